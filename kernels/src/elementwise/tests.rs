use super::*;

fn ramp(n: usize, step: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 - n as f32 / 3.0) * step).collect()
}

fn check(got: &[f32], want: impl Iterator<Item = f64>, isa: Isa) {
    for (got, want) in got.iter().zip(want) {
        assert!((f64::from(*got) - want).abs() <= 2e-6 * want.abs().max(1e-3), "{isa:?}: {got} {want}");
    }
}

#[test]
fn norm_and_gate_follow_their_formulas_on_every_instruction_set() {
    let (x, w) = (ramp(48, 0.7), ramp(48, 0.1));
    let wide = |v: &[f32]| v.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let (wide_x, wide_w) = (wide(&x), wide(&w));
    let rms = (wide_x.iter().map(|x| x * x).sum::<f64>() / 48.0 + 1e-5).sqrt();
    let mut first: Option<[Vec<f32>; 2]> = None;
    for isa in Isa::available() {
        let mut normed = vec![0.0; 48];
        rms_norm(isa, &x, &w, 1e-5, &mut normed);
        check(&normed, wide_x.iter().zip(&wide_w).map(|(x, w)| x / rms * w), isa);
        let mut gated = vec![0.0; 48];
        silu_mul(isa, &x, &w, &mut gated);
        check(&gated, wide_x.iter().zip(&wide_w).map(|(g, u)| g / (1.0 + (-g).exp()) * u), isa);
        let both = [normed, gated];
        assert_eq!(*first.get_or_insert_with(|| both.clone()), both, "{isa:?} is bit-equal");
    }
}

#[test]
fn rope_turns_the_pairs_of_its_layout() {
    for (layout, partner) in [(RopeLayout::Adjacent, 1), (RopeLayout::HalfSplit, 4)] {
        let rope = Rope::new(layout, 10_000.0, 8, &[]);
        let mut heads = [0.0; 16];
        heads[0] = 1.0;
        heads[8 + partner] = 1.0;
        rope.turn(&turns_at(&rope, 4), 2.0, &mut heads);
        let (sin, cos) = 4f32.sin_cos();
        assert!((heads[0] - 2.0 * cos).abs() < 1e-6 && (heads[partner] - 2.0 * sin).abs() < 1e-6);
        assert!((heads[8] + 2.0 * sin).abs() < 1e-6 && (heads[8 + partner] - 2.0 * cos).abs() < 1e-6);
    }
}

#[test]
fn rope_at_position_zero_only_scales() {
    let rope = Rope::new(RopeLayout::Adjacent, 1e5, 64, &[]);
    let mut heads = ramp(128, 1.0);
    rope.turn(&turns_at(&rope, 0), 0.5, &mut heads);
    assert_eq!(heads, ramp(128, 0.5));
}

#[test]
fn a_divisor_slows_its_pair_only() {
    let rope = Rope::new(RopeLayout::HalfSplit, 10_000.0, 4, &[1.0, 8.0]);
    let turns = turns_at(&rope, 4000);
    let unscaled = turns_at(&Rope::new(RopeLayout::HalfSplit, 10_000.0, 4, &[]), 4000);
    assert_eq!(turns[0], unscaled[0]);
    let (sin, cos) = (4000.0 / 100.0 / 8.0_f64).sin_cos();
    assert_eq!(turns[1], (cos as f32, sin as f32));
}

fn turns_at(rope: &Rope, position: usize) -> Vec<Turn> {
    let mut turns = vec![Turn::default(); rope.n_turns()];
    rope.turns_at(position, &mut turns);
    turns
}

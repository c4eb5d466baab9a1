use proptest::prelude::*;

use super::*;

/// Index by the definition: the first that no other exceeds.
fn plain_argmax(logits: &[f32]) -> usize {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|&x| x == best).unwrap_or(0)
}

fn logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        40 => -30f32..30.0,
        2 => Just(3.0),
        1 => Just(f32::NAN),
        1 => Just(f32::NEG_INFINITY),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(80))]
    #[test]
    fn equals_the_definition_on_every_instruction_set(
        logits in proptest::collection::vec(logit(), 1..1500), temperature in 0.1f32..3.0,
    ) {
        let peak = max(Isa::PORTABLE, &logits);
        let finite = logits.iter().filter(|x| x.is_finite()).count() > 0;
        let sum_at = |t: f64| -> f64 {
            let terms = logits.iter().filter(|x| !x.is_nan());
            terms.map(|&x| ((f64::from(x) - f64::from(peak)) / t).exp()).sum()
        };
        let mut reference = vec![f32::NAN; logits.len()];
        softmax(Isa::PORTABLE, &logits, temperature, &mut reference);
        let sum = exp_sum(Isa::PORTABLE, &logits, peak);
        if finite {
            prop_assert!((sum - sum_at(1.0)).abs() < 2e-6 * sum, "{sum}");
            let total = sum_at(f64::from(temperature));
            for (&x, &p) in logits.iter().zip(&reference) {
                let want = if x.is_nan() { 0.0 } else {
                    ((f64::from(x) - f64::from(peak)) / f64::from(temperature)).exp() / total
                };
                prop_assert!((f64::from(p) - want).abs() <= 5e-5 * want + 1e-37, "{p} {want}");
            }
        }
        for isa in Isa::available() {
            prop_assert_eq!(argmax(isa, &logits), plain_argmax(&logits), "{:?}", isa);
            prop_assert_eq!(max(isa, &logits).to_bits(), peak.to_bits(), "{:?}", isa);
            prop_assert_eq!(exp_sum(isa, &logits, peak).to_bits(), sum.to_bits(), "{:?}", isa);
            let mut out = vec![f32::NAN; logits.len()];
            softmax(isa, &logits, temperature, &mut out);
            prop_assert_eq!(&out, &reference, "{:?}", isa);
        }
    }
}

#[test]
fn special_rows_give_no_nan() {
    for isa in Isa::available() {
        for row in [&[f32::NAN; 20][..], &[f32::NEG_INFINITY; 3], &[f32::INFINITY, 1.0], &[]] {
            let mut out = vec![f32::NAN; row.len()];
            softmax(isa, row, 1.0, &mut out);
            assert!(out.iter().all(|&p| p == 0.0), "{row:?} {isa:?}");
            assert_eq!(argmax(isa, row), 0, "{row:?} {isa:?}");
        }
        assert_eq!(argmax(isa, &[f32::NAN, 2.0, 5.0, 5.0]), 2);
        assert_eq!(max(isa, &[-0.0, f32::NAN]).to_bits(), 0);
    }
}

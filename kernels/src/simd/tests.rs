use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::isa::{Isa, Op};

/// Everything the vocabulary can say about some inputs, as bits.
struct Everything<'a> {
    a: &'a [f32; LANES],
    b: &'a [f32; LANES],
    line: &'a Line,
    word: i32,
}

impl Op for Everything<'_> {
    type Output = Vec<u32>;

    #[inline(always)]
    fn call<S: Simd>(self, s: S) -> Vec<u32> {
        let (a, b) = (s.load(self.a), s.load(self.b));
        let bytes = s.load_line(self.line);
        let start = s.splat_i32(-77);
        let mut halves = [f16::ZERO; LANES];
        s.store_f16(a, &mut halves);
        let brains = self.a.map(bf16::from_f32);
        let small: [i8; LANES] = std::array::from_fn(|i| self.line.0[i].cast_signed());
        let or_bits = |left, mask| s.or_bits(s.low_nibbles(bytes), bytes, left, mask);
        let results = [
            s.load_bf16(&brains),
            s.load_i8(&small),
            s.to_f32(s.dot_small(start, or_bits(4, 0x30), self.word)),
            s.to_f32(s.dot_small(start, or_bits(3, 0x10), self.word)),
            s.to_f32(s.dot_small(start, or_bits(2, 0x30), self.word)),
            s.to_f32(s.dot_small(start, or_bits(1, 0x10), self.word)),
            s.to_f32(s.dot_small(start, or_bits(0, 0x30), self.word)),
            s.to_f32(s.dot_small(start, or_bits(-1, 0x10), self.word)),
            s.to_f32(s.dot_small(start, or_bits(-2, 0x30), self.word)),
            s.to_f32(s.dot_small(start, or_bits(-3, 0x10), self.word)),
            s.add(a, b),
            s.sub(a, b),
            s.mul(a, b),
            s.div(a, b),
            s.fma(a, b, a),
            s.max(a, b),
            s.min(a, b),
            s.exp(a),
            s.scaled(b, s.load(&s.to_i8(a).map(f32::from))),
            s.keep_first(5, a, b),
            s.keep_first(16, a, b),
            s.zero_below(a, 1.0, b),
            s.load_f16(&halves),
            s.to_f32(s.dot_bytes(start, bytes, self.word)),
            s.to_f32(s.dot_small(start, s.low_nibbles(bytes), self.word)),
            s.to_f32(s.dot_small(start, s.high_nibbles(bytes), self.word)),
            s.splat(s.sum(a)),
            s.splat(s.highest(a)),
            s.load(&s.to_i8(a).map(f32::from)),
        ];
        let mut out = [0.0; LANES];
        results
            .into_iter()
            .flat_map(|v| {
                s.store(v, &mut out);
                out.map(f32::to_bits)
            })
            .collect()
    }
}

proptest! {
    #[test]
    fn all_instruction_sets_agree_bit_for_bit(
        a in proptest::array::uniform16(-100f32..100.0),
        b in proptest::array::uniform16(-1e3f32..1e3),
        bytes in proptest::collection::vec(any::<u8>(), 64),
        word in proptest::array::uniform4(-127i8..=127),
    ) {
        let line = Line(bytes.try_into().unwrap());
        let word = i32::from_le_bytes(word.map(i8::cast_unsigned));
        let results: Vec<_> =
            Isa::available().iter().map(|isa| isa.run(Everything { a: &a, b: &b, line: &line, word })).collect();
        for (isa, result) in Isa::available().iter().zip(&results) {
            prop_assert_eq!(result, results.last().unwrap(), "{:?}", isa);
        }
    }

    #[test]
    fn exp_is_exact_to_a_few_ulp(x in -87f32..88.0) {
        let mut out = [0.0; LANES];
        Portable.store(Portable.exp(Portable.splat(x)), &mut out);
        let expected = f64::from(x).exp();
        prop_assert!((f64::from(out[0]) - expected).abs() <= expected * 3e-7, "{} {}", out[0], expected);
    }
}

#[test]
fn exp_of_the_special_values() {
    let exp = |x| Portable.exp([x; LANES])[0];
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(exp(-87.5), 0.0);
}

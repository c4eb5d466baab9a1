//! What sampling needs of a row of logits: the greatest, its place, and exponential weights.
//!
//! Lanes, order and tree of every sum are fixed, so all instruction sets agree bit for bit. NaN counts as no logit:
//! it never wins and has weight 0.

use crate::{
    isa::{Isa, Op},
    simd::{LANES, Simd},
};

#[cfg(test)]
mod tests;

/// Logits that are summed in f32 lanes before the sum continues in f64.
const RUN_LEN: usize = 512;

/// Index of the greatest logit, the lowest one of equals; 0 when there is none.
pub fn argmax(isa: Isa, logits: &[f32]) -> usize {
    isa.run(Argmax { logits })
}

/// The greatest logit; -inf when there is none.
pub fn max(isa: Isa, logits: &[f32]) -> f32 {
    isa.run(Max { logits })
}

/// The sum of e^(x - peak) over all logits x, where `peak` is [`max`]: 20 microseconds for 50 thousand.
pub fn exp_sum(isa: Isa, logits: &[f32], peak: f32) -> f64 {
    isa.run(ExpSum { logits, peak, inverse_temperature: 1.0 })
}

/// Probabilities of `logits` at `temperature` > 0: `out` is as long as `logits`. All are 0 when the greatest logit
/// is not finite.
pub fn softmax(isa: Isa, logits: &[f32], temperature: f32, out: &mut [f32]) {
    assert_eq!(logits.len(), out.len(), "a probability per logit");
    assert!(temperature > 0.0, "a positive temperature");
    // Finite, so that it times a difference of zero is zero.
    let (peak, inverse_temperature) = (max(isa, logits), (1.0 / temperature).min(f32::MAX));
    let sum = isa.run(ExpSum { logits, peak, inverse_temperature });
    let factor = if sum > 0.0 { (1.0 / sum) as f32 } else { 0.0 };
    isa.run(Softmax { logits, peak, inverse_temperature, factor, out });
}

struct Argmax<'a> {
    logits: &'a [f32],
}

impl Op for Argmax<'_> {
    type Output = usize;

    #[inline(always)]
    fn call<S: Simd>(self, s: S) -> usize {
        let (mut best, mut run_start) = (f32::NEG_INFINITY, 0);
        for (i, run) in self.logits.chunks(RUN_LEN).enumerate() {
            let greatest = run_max(s, run);
            if greatest > best {
                (best, run_start) = (greatest, i * RUN_LEN);
            }
        }
        self.logits[run_start..].iter().position(|&x| x == best).map_or(0, |i| run_start + i)
    }
}

struct Max<'a> {
    logits: &'a [f32],
}

impl Op for Max<'_> {
    type Output = f32;

    #[inline(always)]
    fn call<S: Simd>(self, s: S) -> f32 {
        self.logits.chunks(RUN_LEN).map(|run| run_max(s, run)).fold(f32::NEG_INFINITY, f32::max)
    }
}

/// The greatest of a run; of zeros of both signs +0.
#[inline(always)]
fn run_max<S: Simd>(s: S, run: &[f32]) -> f32 {
    let mut tops = [s.splat(f32::NEG_INFINITY); 4];
    let (vectors, rest) = run.as_chunks::<LANES>();
    let (fours, vectors) = vectors.as_chunks::<4>();
    for four in fours {
        for (top, x) in tops.iter_mut().zip(four) {
            *top = s.max(s.load(x), *top);
        }
    }
    for x in vectors {
        tops[0] = s.max(s.load(x), tops[0]);
    }
    tops[0] = s.max(s.load(&padded(rest)), tops[0]);
    s.highest(s.max(s.max(tops[0], tops[1]), s.max(tops[2], tops[3]))) + 0.0
}

/// The last logits of a run, filled up with logits that count for nothing.
#[inline(always)]
fn padded(rest: &[f32]) -> [f32; LANES] {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    lanes[..rest.len()].copy_from_slice(rest);
    lanes
}

struct ExpSum<'a> {
    logits: &'a [f32],
    peak: f32,
    inverse_temperature: f32,
}

impl Op for ExpSum<'_> {
    type Output = f64;

    #[inline(always)]
    fn call<S: Simd>(self, s: S) -> f64 {
        let mut sum = 0.0;
        for run in self.logits.chunks(RUN_LEN) {
            let (vectors, rest) = run.as_chunks::<LANES>();
            let mut lanes = s.splat(0.0);
            for x in vectors {
                lanes = s.add(lanes, weight(s, x, self.peak, self.inverse_temperature));
            }
            if !rest.is_empty() {
                let x = padded(rest);
                lanes = s.add(lanes, weight(s, &x, self.peak, self.inverse_temperature));
            }
            sum += f64::from(s.sum(lanes));
        }
        sum
    }
}

/// e^((x - peak) / temperature), 0 for NaN.
#[inline(always)]
fn weight<S: Simd>(s: S, x: &[f32; LANES], peak: f32, inverse_temperature: f32) -> S::F {
    s.exp(s.mul(s.sub(s.load(x), s.splat(peak)), s.splat(inverse_temperature)))
}

struct Softmax<'a> {
    logits: &'a [f32],
    peak: f32,
    inverse_temperature: f32,
    factor: f32,
    out: &'a mut [f32],
}

impl Softmax<'_> {
    // Not a closure: those are not always inlined, and outside its caller a vector instruction is a function call.
    #[inline(always)]
    fn probability<S: Simd>(&self, s: S, x: &[f32; LANES]) -> S::F {
        s.mul(weight(s, x, self.peak, self.inverse_temperature), s.splat(self.factor))
    }
}

impl Op for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(mut self, s: S) {
        let (vectors, rest) = self.logits.as_chunks::<LANES>();
        let (out, out_rest) = std::mem::take(&mut self.out).as_chunks_mut::<LANES>();
        for (x, out) in vectors.iter().zip(out) {
            s.store(self.probability(s, x), out);
        }
        let mut lanes = [0.0; LANES];
        s.store(self.probability(s, &padded(rest)), &mut lanes);
        out_rest.copy_from_slice(&lanes[..rest.len()]);
    }
}

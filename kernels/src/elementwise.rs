//! The small operations between the products: norm, rotary positions, gated activation.
//!
//! Every function works on one token's row, so results cannot depend on the batch.

use crate::{
    isa::{Isa, Op},
    simd::{LANES, Simd},
};

#[cfg(test)]
mod tests;

/// out = x / rms(x) x weight; all `[width]`, width a multiple of 16.
pub fn rms_norm(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == weight.len() && x.len() == out.len(), "equal widths");
    assert!(x.len().is_multiple_of(LANES), "whole vectors");
    isa.run(RmsNorm { x, weight, eps, out });
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Op for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let x = self.x.as_chunks::<LANES>().0;
        let mut squares = s.splat(0.0);
        for x in x {
            let x = s.load(x);
            squares = s.fma(x, x, squares);
        }
        let mean = s.sum(squares) / self.x.len() as f32;
        let inverse = s.splat(1.0 / (mean + self.eps).sqrt());
        let weight = self.weight.as_chunks::<LANES>().0;
        for ((x, w), out) in x.iter().zip(weight).zip(self.out.as_chunks_mut::<LANES>().0) {
            s.store(s.mul(s.mul(s.load(x), inverse), s.load(w)), out);
        }
    }
}

/// out = silu(gate) x up, where silu(g) = g / (1 + e^-g); all `[width]`, width a multiple of 16.
pub fn silu_mul(isa: Isa, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == up.len() && gate.len() == out.len(), "equal widths");
    assert!(gate.len().is_multiple_of(LANES), "whole vectors");
    isa.run(SiluMul { gate, up, out });
}

struct SiluMul<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl Op for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let (gate, up) = (self.gate.as_chunks::<LANES>().0, self.up.as_chunks::<LANES>().0);
        for ((gate, up), out) in gate.iter().zip(up).zip(self.out.as_chunks_mut::<LANES>().0) {
            let gate = s.load(gate);
            let below = s.add(s.splat(1.0), s.exp(s.sub(s.splat(0.0), gate)));
            s.store(s.mul(s.div(gate, below), s.load(up)), out);
        }
    }
}

/// Which elements of a head turn together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeLayout {
    /// (0, 1), (2, 3), ...: GGUF files of the llama architecture.
    Adjacent,
    /// (0, n/2), (1, n/2 + 1), ...: GPT-NeoX, Qwen, and every architecture in safetensors.
    HalfSplit,
}

/// Cosine and sine of a pair's angle.
pub type Turn = (f32, f32);

/// Rotary position embedding: pair i of a head turns by position x base^(-2i / head_dim) / divisor i radians.
///
/// There is no table over the context, which for 128 k positions would be tens of MB: a step computes the turns of its
/// own positions once and uses them in every layer.
#[derive(Debug)]
pub struct Rope {
    layout: RopeLayout,
    /// Radians per position of every pair.
    frequencies: Vec<f64>,
}

impl Rope {
    /// `divisors` is `[head_dim / 2]`, or empty when no frequency is scaled.
    pub fn new(layout: RopeLayout, base: f32, head_dim: usize, divisors: &[f32]) -> Self {
        let half = head_dim / 2;
        assert!(divisors.is_empty() || divisors.len() == half, "a divisor per pair");
        let frequency = |i: usize| {
            let divisor = divisors.get(i).copied().map_or(1.0, f64::from);
            f64::from(base).powf(-2.0 * i as f64 / head_dim as f64) / divisor
        };
        Self { layout, frequencies: (0..half).map(frequency).collect() }
    }

    /// Turns of one position: `head_dim / 2`.
    pub fn n_turns(&self) -> usize {
        self.frequencies.len()
    }

    /// Writes the turns of `position` to `out`, `[n_turns]`.
    pub fn turns_at(&self, position: usize, out: &mut [Turn]) {
        for (out, frequency) in out.iter_mut().zip(&self.frequencies) {
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            *out = (cos as f32, sin as f32);
        }
    }

    /// Turns every head of `heads`, `[n_heads][head_dim]`, by `turns` and multiplies it by `scale`.
    pub fn turn(&self, turns: &[Turn], scale: f32, heads: &mut [f32]) {
        let half = self.n_turns();
        for head in heads.chunks_exact_mut(2 * half) {
            match self.layout {
                RopeLayout::Adjacent => {
                    for (pair, &turn) in head.as_chunks_mut::<2>().0.iter_mut().zip(turns) {
                        *pair = turned(pair[0], pair[1], turn, scale);
                    }
                }
                RopeLayout::HalfSplit => {
                    let (low, high) = head.split_at_mut(half);
                    for ((a, b), &turn) in low.iter_mut().zip(high).zip(turns) {
                        [*a, *b] = turned(*a, *b, turn, scale);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn turned(a: f32, b: f32, (cos, sin): Turn, scale: f32) -> [f32; 2] {
    [(a * cos - b * sin) * scale, (a * sin + b * cos) * scale]
}

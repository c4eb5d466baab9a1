//! Choosing a token from logits. The randomness is a pure function of (seed, position), so a stream that is resumed
//! on another worker continues as if nothing had happened.

use std::cmp::Ordering;
use std::num::NonZeroU32;

use proto::v1;

#[cfg(test)]
mod tests;

/// How to choose; see OpenAI's parameters of the same names.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingParams {
    /// 0 chooses the likeliest token; otherwise logits are divided by it.
    pub temperature: f32,
    /// Only the likeliest tokens that together reach this probability stay; 1 keeps all.
    pub top_p: f32,
    /// Only this many of the likeliest tokens stay.
    pub top_k: Option<NonZeroU32>,
    pub seed: u64,
}

impl SamplingParams {
    /// Always the likeliest token.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, top_k: None, seed: 0 };
}

impl From<v1::Sampling> for SamplingParams {
    fn from(wire: v1::Sampling) -> Self {
        let v1::Sampling { temperature, top_p, top_k, seed } = wire;
        Self { temperature, top_p, top_k: NonZeroU32::new(top_k), seed }
    }
}

/// A chosen token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampled {
    pub token: u32,
    /// Natural logarithm of its probability at temperature 1 among all tokens, whatever the parameters.
    pub logprob: f32,
}

/// Chooses the token at `position` of its sequence from `logits`, `[vocab]`. Of equal logits the lowest id is
/// likelier. Complexity O(vocab), plus sorting the few candidates that top-p needs.
pub fn sample(logits: &[f32], params: &SamplingParams, position: u64) -> Sampled {
    let best = argmax(logits);
    let token = if params.temperature <= 0.0 {
        best
    } else {
        let weight = |l: f32| f64::from((l - logits[best]) / params.temperature).exp();
        let chance = uniform(params.seed, position);
        let k = params.top_k.map_or(logits.len(), |k| k.get() as usize);
        if k >= logits.len() && params.top_p >= 1.0 {
            choose(logits.iter().map(|&l| weight(l)), chance)
        } else {
            let kept = likeliest(logits, k, f64::from(params.top_p), weight);
            kept[choose(kept.iter().map(|&id| weight(logits[id as usize])), chance)] as usize
        }
    };
    Sampled { token: token as u32, logprob: logits[token] - log_sum_exp(logits, logits[best]) }
}

/// Index of the greatest logit, the lowest one of equals; NaN never wins.
fn argmax(logits: &[f32]) -> usize {
    let better =
        |best: usize, i: usize| if logits[i] > logits[best] || logits[best].is_nan() { i } else { best };
    (0..logits.len()).fold(0, better)
}

fn log_sum_exp(logits: &[f32], peak: f32) -> f32 {
    let sum: f64 = logits.iter().map(|&l| f64::from((l - peak).exp())).sum();
    peak + sum.ln() as f32
}

/// Index of the first weight at which the running sum passes `chance` of the total.
fn choose(weights: impl Iterator<Item = f64> + Clone, chance: f64) -> usize {
    let mut left = chance * weights.clone().filter(|w| *w > 0.0).sum::<f64>();
    let mut last = 0;
    for (i, weight) in weights.enumerate().filter(|(_, w)| *w > 0.0) {
        last = i;
        left -= weight;
        if left < 0.0 {
            break;
        }
    }
    last
}

/// The ids that survive top-k, then top-p over the survivors, likeliest first; at least one.
fn likeliest(logits: &[f32], k: usize, top_p: f64, weight: impl Fn(f32) -> f64) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let by_likelihood =
        |a: &u32, b: &u32| -> Ordering { logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)) };
    let of = |id: u32| Some(weight(logits[id as usize])).filter(|w| !w.is_nan()).unwrap_or(0.0);
    if k < ids.len() {
        ids.select_nth_unstable_by(k, by_likelihood);
        ids.truncate(k);
    }
    let wanted = top_p * ids.iter().map(|&id| of(id)).sum::<f64>();
    // Usually a few dozen ids hold the mass: sort ever longer heads instead of the whole vocabulary.
    let mut n_sorted = 64;
    loop {
        if n_sorted < ids.len() {
            ids.select_nth_unstable_by(n_sorted, by_likelihood);
        }
        let n_head = n_sorted.min(ids.len());
        ids[..n_head].sort_unstable_by(by_likelihood);
        let mut sum = 0.0;
        let enough = ids[..n_head].iter().position(|&id| {
            sum += of(id);
            sum >= wanted
        });
        if enough.is_some() || n_head == ids.len() {
            ids.truncate(enough.map_or(n_head, |i| i + 1));
            return ids;
        }
        n_sorted *= 8;
    }
}

/// A number in 0..1 that depends on nothing but its arguments: SplitMix64 (Steele, Lea and Flood 2014), used as a
/// counter-based generator whose stream is keyed by the mixed seed.
fn uniform(seed: u64, position: u64) -> f64 {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    let bits =
        mix(mix(seed.wrapping_add(GOLDEN)).wrapping_add(position.wrapping_add(1).wrapping_mul(GOLDEN)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// SplitMix64's finalizer.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

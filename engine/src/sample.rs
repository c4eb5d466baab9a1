//! Choosing a token from logits. The randomness is a pure function of (seed, position), so a stream that is resumed
//! on another worker continues as if nothing had happened.

use std::cmp::Ordering;
use std::num::NonZeroU32;

use kernels::isa::Isa;
use kernels::logits;
use model::grammar::Mask;
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
    /// Tokens come with their log-probabilities, and with those of this many of the likeliest.
    pub logprobs: Option<u8>,
}

/// The most alternatives that are named with a token.
pub const MAX_TOP_LOGPROBS: u8 = 20;

impl SamplingParams {
    /// Always the likeliest token.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, top_k: None, seed: 0, logprobs: None };
}

/// Natural logarithms of probabilities by the model alone: temperature 1, before any constraint.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    pub logprob: f32,
    /// The likeliest tokens, the best first.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// As others read it.
    #[must_use]
    pub fn to_wire(&self) -> v1::Logprobs {
        let (top_ids, top_logprobs) = self.top.iter().copied().unzip();
        v1::Logprobs { logprob: self.logprob, top_ids, top_logprobs }
    }
}

impl From<v1::Logprobs> for Logprobs {
    fn from(wire: v1::Logprobs) -> Self {
        Self { logprob: wire.logprob, top: wire.top_ids.into_iter().zip(wire.top_logprobs).collect() }
    }
}

impl From<v1::Sampling> for SamplingParams {
    fn from(wire: v1::Sampling) -> Self {
        let v1::Sampling { temperature, top_p, top_k, seed, top_logprobs, logprobs } = wire;
        let n_top = u8::try_from(top_logprobs).unwrap_or(u8::MAX).min(MAX_TOP_LOGPROBS);
        Self { temperature, top_p, top_k: NonZeroU32::new(top_k), seed, logprobs: logprobs.then_some(n_top) }
    }
}

/// Chooses tokens. Holds the probabilities of a row while it does.
#[derive(Debug)]
pub struct Sampler {
    isa: Isa,
    probabilities: Vec<f32>,
    /// The allowed logits of a row.
    allowed: Vec<f32>,
}

impl Default for Sampler {
    fn default() -> Self {
        Self { isa: Isa::detect(), probabilities: Vec::new(), allowed: Vec::new() }
    }
}

impl Sampler {
    /// The token at `position` of its sequence, chosen from `logits`, `[vocab]`. Of equal logits the lowest id is
    /// likelier. O(vocab), about 20 µs for 50 thousand when greedy and 100 µs when not.
    pub fn sample(&mut self, logits: &[f32], params: &SamplingParams, position: u64) -> u32 {
        let best = logits::argmax(self.isa, logits);
        // Whatever came over the wire, a temperature that is no number is none.
        if params.temperature.is_nan() || params.temperature <= 0.0 {
            return best as u32;
        }
        self.probabilities.resize(logits.len(), 0.0);
        logits::softmax(self.isa, logits, params.temperature, &mut self.probabilities);
        let (probabilities, chance) = (&self.probabilities[..], uniform(params.seed, position));
        let k = params.top_k.map_or(logits.len(), |k| k.get() as usize);
        let chosen = if k >= logits.len() && params.top_p >= 1.0 {
            choose(probabilities, chance)
        } else {
            let kept = likeliest(probabilities, k, f64::from(params.top_p));
            let weights: Vec<f32> = kept.iter().map(|&id| probabilities[id as usize]).collect();
            choose(&weights, chance).map(|i| kept[i] as usize)
        };
        // Without any probability, as when the greatest logit is infinite, the greatest wins.
        chosen.unwrap_or(best) as u32
    }

    /// The same among the tokens that `mask` allows, at least one. Top-p and top-k count within them.
    pub fn sample_allowed(
        &mut self,
        logits: &[f32],
        mask: &Mask,
        params: &SamplingParams,
        position: u64,
    ) -> u32 {
        let first = mask.first().unwrap_or(0);
        if mask.n_allowed() == 1 {
            return first;
        }
        let mut allowed = std::mem::take(&mut self.allowed);
        keep_allowed(logits, mask, &mut allowed);
        let token = self.sample(&allowed, params, position);
        self.allowed = allowed;
        // Where no allowed token has a logit that counts, the lowest id is as likely as any.
        if mask.allows(token) { token } else { first }
    }

    /// Log-probabilities of `token` and of the `n_top` likeliest. O(vocab), about 60 µs for 50 thousand.
    #[must_use]
    pub fn logprobs(&self, logits: &[f32], token: u32, n_top: u8) -> Logprobs {
        let peak = logits::max(self.isa, logits);
        let log_sum = logits::exp_sum(self.isa, logits, peak).ln();
        let of = |logit: f32| (f64::from(logit) - f64::from(peak) - log_sum) as f32;
        let top = greatest(logits, n_top.into()).into_iter().map(|(id, logit)| (id, of(logit))).collect();
        let logit = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        Logprobs { logprob: of(logit), top }
    }
}

/// Copies `logits`; those that `mask` does not allow become -inf.
fn keep_allowed(logits: &[f32], mask: &Mask, out: &mut Vec<f32>) {
    out.clear();
    out.resize(logits.len(), f32::NEG_INFINITY);
    for ((logits, out), &word) in logits.chunks(32).zip(out.chunks_mut(32)).zip(mask.words()) {
        if word == u32::MAX {
            out.copy_from_slice(logits);
            continue;
        }
        let mut left = word;
        while left != 0 {
            let i = left.trailing_zeros() as usize;
            // The vocabulary may be shorter than the mask.
            if let (Some(out), Some(&logit)) = (out.get_mut(i), logits.get(i)) {
                *out = logit;
            }
            left &= left - 1;
        }
    }
}

/// The `n` greatest logits with their ids, the greatest first, of equals the lowest id. NaN counts as no logit.
fn greatest(logits: &[f32], n: usize) -> Vec<(u32, f32)> {
    let mut top: Vec<(u32, f32)> = Vec::with_capacity(n + 1);
    let mut bar = f32::NEG_INFINITY;
    for (id, &logit) in (0..).zip(logits) {
        if logit.is_nan() || (top.len() == n && logit <= bar) || n == 0 {
            continue;
        }
        let at = top.partition_point(|(_, other)| *other >= logit);
        top.insert(at, (id, logit));
        top.truncate(n);
        bar = top.last().map_or(bar, |(_, logit)| *logit);
    }
    top
}

/// Index of the first weight at which the running sum passes `chance` of the total; None when all are 0.
fn choose(weights: &[f32], chance: f64) -> Option<usize> {
    const RUN_LEN: usize = 256;
    let sums: Vec<f64> = weights.chunks(RUN_LEN).map(sum).collect();
    let mut left = chance * sums.iter().sum::<f64>();
    let mut last = None;
    for (run, weights) in weights.chunks(RUN_LEN).enumerate() {
        if left >= sums[run] && run + 1 < sums.len() {
            left -= sums[run];
            continue;
        }
        for (i, &weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
            last = Some(run * RUN_LEN + i);
            left -= f64::from(weight);
            if left < 0.0 {
                return last;
            }
        }
    }
    // Rounding has left a rest: the last possible one.
    last.or_else(|| weights.iter().rposition(|&weight| weight > 0.0))
}

/// Eight partial sums, which the compiler can keep in registers.
fn sum(weights: &[f32]) -> f64 {
    let (chunks, rest) = weights.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for chunk in chunks {
        sums.iter_mut().zip(chunk).for_each(|(sum, &weight)| *sum += f64::from(weight));
    }
    sums.iter().sum::<f64>() + rest.iter().copied().map(f64::from).sum::<f64>()
}

/// The ids that survive top-k, then top-p over the survivors, likeliest first; at least one.
fn likeliest(probabilities: &[f32], k: usize, top_p: f64) -> Vec<u32> {
    let by_likelihood = |a: &u32, b: &u32| -> Ordering {
        probabilities[*b as usize].total_cmp(&probabilities[*a as usize]).then(a.cmp(b))
    };
    let k = k.min(probabilities.len());
    // Usually a few dozen ids hold the mass: look at the likelier ones first, and at all only at the end.
    for floor in [1e-3, 1e-5, 0.0] {
        let mut ids: Vec<u32> = Vec::new();
        ids.extend((0..).zip(probabilities).filter(|(_, p)| **p >= floor).map(|(id, _): (u32, _)| id));
        let complete = floor == 0.0;
        if ids.len() < k && !complete && k < probabilities.len() {
            continue;
        }
        ids.sort_unstable_by(by_likelihood);
        ids.truncate(k);
        let of = |id: &u32| f64::from(probabilities[*id as usize]);
        let all: f64 = if k < probabilities.len() { ids.iter().map(of).sum() } else { sum(probabilities) };
        let mut mass = 0.0;
        let enough = ids.iter().position(|id| {
            mass += of(id);
            mass >= top_p * all
        });
        if let Some(i) = enough {
            ids.truncate(i + 1);
            return ids;
        }
        if complete {
            return ids;
        }
    }
    Vec::new()
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

//! Which drafts are worth checking: expected tokens against the measured time of a wider step.

use crate::costs::StepCosts;

/// A gain below this share is within what the estimates can tell.
const MIN_GAIN: f64 = 1.02;

/// A step without drafts, and what preparing the drafts at hand has cost already.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Base {
    /// Tokens in the step, slices of prefill included.
    pub(crate) n_tokens: usize,
    /// Streams; each gets one token whatever happens.
    pub(crate) n_streams: usize,
}

impl Base {
    /// Output tokens per second without drafts.
    fn rate(self, costs: &StepCosts) -> f64 {
        self.n_streams as f64 / costs.of(self.n_tokens)
    }

    /// True if one more draft token in a step that has `n_drafts` is worth `seconds` of preparation and its place,
    /// when it is accepted with this `chance`.
    pub(crate) fn pays(self, costs: &StepCosts, n_drafts: usize, chance: f64, seconds: f64) -> bool {
        let n_tokens = self.n_tokens + n_drafts;
        let dearer = costs.of(n_tokens + 1) - costs.of(n_tokens) + seconds;
        chance > dearer * self.rate(costs)
    }
}

/// How many tokens of each draft to check, together at most `limit`. `drafts[i][j]` is the chance that token j of draft
/// i is accepted, given that all before it are.
///
/// Tokens enter in the order of their total chance, which within a draft is their own order; of all such prefixes the
/// one with the most expected output per second wins. O(n log n).
pub(crate) fn choose(costs: &StepCosts, base: Base, drafts: &[Vec<f64>], limit: usize) -> Vec<usize> {
    let mut tokens: Vec<(f64, usize)> = Vec::new();
    for (i, chances) in drafts.iter().enumerate() {
        let mut total = 1.0;
        for chance in chances {
            total *= chance;
            tokens.push((total, i));
        }
    }
    // Stable, so tokens of one draft with equal chances keep their order.
    tokens.sort_by(|a, b| b.0.total_cmp(&a.0));
    let (mut best_rate, mut best_len) = (base.rate(costs) * MIN_GAIN, 0);
    let mut expected = base.n_streams as f64;
    for (n, (total, _)) in tokens.iter().take(limit).enumerate() {
        expected += total;
        let rate = expected / costs.of(base.n_tokens + n + 1);
        if rate > best_rate {
            (best_rate, best_len) = (rate, n + 1);
        }
    }
    let mut kept = vec![0; drafts.len()];
    for &(_, i) in &tokens[..best_len] {
        kept[i] += 1;
    }
    kept
}

#[cfg(test)]
mod tests;

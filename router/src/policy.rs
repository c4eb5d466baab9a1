//! The `ttft` policy: the plan with the smallest estimated time to the first token.
//!
//! For every way to run the turn: wait (queued prompt tokens at that worker's measured rate) + own uncached tokens at
//! that rate + what must move. Long prompts never run on a decode worker while a prefill worker is there, since they
//! would hold up running streams. Session affinity emerges: a worker that holds the prefix is almost always cheapest.

use crate::index::WorkerIdx;

/// What moving and disturbing cost, in microseconds. The rates of computing are measured instead.
#[derive(Debug, Clone, Copy)]
pub struct Costs {
    /// Prompts with more uncached tokens than this go to a prefill worker, if there is one.
    pub local_prefill_tokens: u32,
    /// A handover's fixed cost.
    pub handover_us: f64,
    /// Moving one KV block.
    pub block_us: f64,
}

impl Default for Costs {
    fn default() -> Self {
        Self { local_prefill_tokens: 128, handover_us: 10_000.0, block_us: 100.0 }
    }
}

/// One worker, seen by one turn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidate {
    pub(crate) idx: WorkerIdx,
    /// Blocks of the turn's prefix that it holds.
    pub(crate) held: usize,
    pub(crate) queued_tokens: u32,
    pub(crate) turns: u32,
    pub(crate) free_blocks: u32,
    pub(crate) us_per_token: f64,
    pub(crate) us_per_output: f64,
}

/// What the turn needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Demand {
    pub(crate) prompt_tokens: u32,
    pub(crate) last_decode: Option<WorkerIdx>,
}

/// The workers of one turn, by index into the candidates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Choice {
    pub(crate) decode: usize,
    pub(crate) prefill: Option<usize>,
    pub(crate) ttft_us: f64,
}

/// Chooses among `decode` and `prefill` workers; nothing when there is no decode worker.
pub(crate) fn choose(
    costs: &Costs,
    demand: Demand,
    decode: &[Candidate],
    prefill: &[Candidate],
) -> Option<Choice> {
    let most_held = decode.iter().chain(prefill).map(|candidate| candidate.held).max().unwrap_or(0);
    let mut best: Option<(f64, bool, Choice)> = None;
    for (d, decoder) in decode.iter().enumerate() {
        let is_last = demand.last_decode == Some(decoder.idx);
        let pressure = costs.pressure(demand, decoder);
        let own = fill_us(costs, demand, decoder, most_held);
        let fits = uncached(demand, most_held) <= costs.local_prefill_tokens;
        let local = (prefill.is_empty() || fits)
            .then_some((None, own + costs.disturbance(demand, decoder, most_held)));
        let remote = prefill.iter().enumerate().map(|(p, worker)| {
            let moved = blocks(demand).saturating_sub(decoder.held);
            let us = fill_us(costs, demand, worker, most_held) + costs.handover_us + costs.move_us(moved);
            (Some(p), us)
        });
        for (p, us) in local.into_iter().chain(remote) {
            let choice = Choice { decode: d, prefill: p, ttft_us: us + pressure };
            let better = best.as_ref().is_none_or(|(least, least_is_last, _)| {
                choice.ttft_us < *least || (choice.ttft_us == *least && is_last && !least_is_last)
            });
            if better {
                best = Some((choice.ttft_us, is_last, choice));
            }
        }
    }
    best.map(|(_, _, choice)| choice)
}

impl Costs {
    fn move_us(&self, n_blocks: usize) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "block counts are small")]
        let n_blocks = n_blocks as f64;
        self.block_us * n_blocks
    }

    /// A busy or full decode worker answers later.
    fn pressure(&self, demand: Demand, decoder: &Candidate) -> f64 {
        let missing = blocks(demand).saturating_sub(decoder.held);
        let full = if (decoder.free_blocks as usize) < missing { 1e6 } else { 0.0 };
        full + f64::from(decoder.turns) * decoder.us_per_output
    }

    /// Prefill on a decode worker holds up the streams it runs.
    fn disturbance(&self, demand: Demand, decoder: &Candidate, most_held: usize) -> f64 {
        let own = f64::from(uncached(demand, most_held)) * decoder.us_per_token;
        own * f64::from(decoder.turns.min(8)) * 0.5
    }
}

/// Wait, pull and compute on the worker that fills the prompt.
fn fill_us(costs: &Costs, demand: Demand, worker: &Candidate, most_held: usize) -> f64 {
    let computed = f64::from(worker.queued_tokens) + f64::from(uncached(demand, most_held.max(worker.held)));
    let pulled = most_held.saturating_sub(worker.held);
    let fixed = if pulled > 0 { costs.handover_us } else { 0.0 };
    computed * worker.us_per_token + fixed + costs.move_us(pulled)
}

fn uncached(demand: Demand, held: usize) -> u32 {
    let cached = u32::try_from(held * kv::BLOCK_TOKENS).unwrap_or(u32::MAX);
    demand.prompt_tokens.saturating_sub(cached).max(1)
}

fn blocks(demand: Demand) -> usize {
    (demand.prompt_tokens as usize).div_ceil(kv::BLOCK_TOKENS)
}

#[cfg(test)]
mod tests;

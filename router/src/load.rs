//! How busy a worker is: its last report, the turns routed since, and its rates, fitted online.

use std::time::{Duration, Instant};

use proto::v1;

/// Weight of the newest observation in a rate.
const FIT: f64 = 0.3;
/// Observations shorter than this say little.
const MIN_TOKENS: u64 = 32;

/// A turn routed to a worker that has not reported it yet.
#[derive(Debug, Clone, Copy)]
struct Prediction {
    turn: u64,
    tokens: u32,
    until: Instant,
}

/// One worker's load as the router sees it.
#[derive(Debug, Default)]
pub(crate) struct LoadView {
    report: v1::Load,
    fitted: v1::Load,
    us_per_token: Option<f64>,
    us_per_output: Option<f64>,
    predictions: Vec<Prediction>,
}

impl LoadView {
    /// Takes in a report: the turns it names are no longer predictions.
    pub(crate) fn report(&mut self, load: v1::Load) {
        self.predictions.retain(|prediction| !load.admitted_turns.contains(&prediction.turn));
        let prefill = load.prefill_tokens_total.saturating_sub(self.fitted.prefill_tokens_total);
        if prefill >= MIN_TOKENS {
            let us = load.prefill_busy_us_total.saturating_sub(self.fitted.prefill_busy_us_total);
            fit(&mut self.us_per_token, us, prefill);
            self.fitted.prefill_tokens_total = load.prefill_tokens_total;
            self.fitted.prefill_busy_us_total = load.prefill_busy_us_total;
        }
        let decode = load.decode_tokens_total.saturating_sub(self.fitted.decode_tokens_total);
        if decode >= MIN_TOKENS {
            let us = load.decode_busy_us_total.saturating_sub(self.fitted.decode_busy_us_total);
            fit(&mut self.us_per_output, us, decode);
            self.fitted.decode_tokens_total = load.decode_tokens_total;
            self.fitted.decode_busy_us_total = load.decode_busy_us_total;
        }
        self.report = load;
    }

    /// Counts a turn that was just routed here, until the worker reports it or `lease` is over.
    pub(crate) fn predict(&mut self, turn: u64, tokens: u32, now: Instant, lease: Duration) {
        self.predictions.retain(|prediction| prediction.until > now);
        self.predictions.push(Prediction { turn, tokens, until: now + lease });
    }

    /// Prompt tokens waiting here, predicted ones included.
    pub(crate) fn queued_tokens(&self, now: Instant) -> u32 {
        let predicted =
            self.current(now).fold(0, |sum: u32, prediction| sum.saturating_add(prediction.tokens));
        self.report.queued_prefill_tokens.saturating_add(predicted)
    }

    /// Turns running or about to.
    pub(crate) fn turns(&self, now: Instant) -> u32 {
        let predicted = u32::try_from(self.current(now).count()).unwrap_or(u32::MAX);
        self.report.running_sequences.saturating_add(self.report.waiting_sequences).saturating_add(predicted)
    }

    /// The worker wants no new turns.
    pub(crate) fn is_draining(&self) -> bool {
        self.report.draining
    }

    pub(crate) fn free_blocks(&self) -> u32 {
        self.report.free_blocks
    }

    /// Measured cost of one prompt token, in microseconds, once the worker has shown it.
    pub(crate) fn us_per_token(&self) -> Option<f64> {
        self.us_per_token
    }

    /// Measured cost of one output token, in microseconds, once the worker has shown it.
    pub(crate) fn us_per_output(&self) -> Option<f64> {
        self.us_per_output
    }

    fn current(&self, now: Instant) -> impl Iterator<Item = &Prediction> {
        self.predictions.iter().filter(move |prediction| prediction.until > now)
    }
}

fn fit(rate: &mut Option<f64>, us: u64, tokens: u64) {
    #[expect(clippy::cast_precision_loss, reason = "a rate needs no 53 bits")]
    let seen = us as f64 / tokens as f64;
    *rate = Some(rate.map_or(seen, |old| old + FIT * (seen - old)));
}

#[cfg(test)]
mod tests;

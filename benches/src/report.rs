//! Sums up a run: percentiles, errors, and whether the client itself was punctual enough to be believed.

mod table;

use std::collections::BTreeMap;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::drive::Outcome;
use crate::options::Options;
use crate::record::Record;

pub use table::print;

/// What histograms tell apart: 1 us to 1 h, 3 digits.
const LONGEST_US: u64 = 3_600_000_000;
/// Lateness that nobody minds.
const TOLERATED_LATENESS_US: u64 = 5_000;

/// Percentiles of one kind of time, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Times {
    pub count: u64,
    pub mean_us: f64,
    pub p50_us: u64,
    pub p90_us: u64,
    pub p99_us: u64,
    pub max_us: u64,
}

/// A run in numbers. Times are of requests that were answered.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// Requests that were to be sent.
    pub planned: usize,
    pub answered: usize,
    pub errors: BTreeMap<String, usize>,
    pub interrupted: bool,
    pub wall_s: f64,
    pub requests_per_s: f64,
    pub output_tokens_per_s: f64,
    /// From the scheduled time, as are the next three.
    pub ttft: Times,
    pub ttft_opening: Times,
    pub ttft_continuing: Times,
    pub end_to_end: Times,
    /// From the time of sending.
    pub service: Times,
    pub inter_token: Times,
    pub lateness: Times,
    pub handshake: Times,
    pub input_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    pub bytes_up: usize,
    pub bytes_down: usize,
    /// The client was too late too often: its latencies say more about itself than about the server.
    pub unfaithful: bool,
    pub notes: Vec<String>,
}

/// Everything about a run, for `--json`.
#[derive(Debug, Serialize)]
pub struct Document<'a> {
    pub replayer: &'static str,
    pub options: &'a Options,
    pub model: &'a str,
    pub summary: &'a Summary,
    pub requests: &'a [Record],
}

impl Times {
    /// Percentiles of `times`.
    pub fn of(times: impl IntoIterator<Item = Duration>) -> Self {
        let mut histogram =
            Histogram::<u64>::new_with_bounds(1, LONGEST_US, 3).expect("bounds that fit each other");
        for time in times {
            histogram.saturating_record(u64::try_from(time.as_micros()).unwrap_or(LONGEST_US).max(1));
        }
        if histogram.is_empty() {
            return Self::default();
        }
        Self {
            count: histogram.len(),
            mean_us: histogram.mean(),
            p50_us: histogram.value_at_quantile(0.5),
            p90_us: histogram.value_at_quantile(0.9),
            p99_us: histogram.value_at_quantile(0.99),
            max_us: histogram.max(),
        }
    }
}

impl Summary {
    /// Sums up `outcome` of a workload of `planned` requests.
    #[must_use]
    pub fn new(outcome: &Outcome, planned: usize, notes: Vec<String>) -> Self {
        let records = &outcome.records;
        let answered: Vec<&Record> = records.iter().filter(|record| record.error.is_none()).collect();
        let times =
            |of: &dyn Fn(&Record) -> Option<Duration>| Times::of(answered.iter().filter_map(|r| of(r)));
        let sum = |of: fn(&Record) -> u64| answered.iter().map(|r| of(r)).sum::<u64>();
        let mut errors = BTreeMap::new();
        for code in records.iter().filter_map(|record| record.error.clone()) {
            *errors.entry(code).or_default() += 1;
        }
        let wall_s = outcome.wall.as_secs_f64();
        let per_s = |n: f64| if wall_s > 0.0 { n / wall_s } else { 0.0 };
        let output_tokens = sum(|record| record.output_tokens);
        let ttft = times(&Record::ttft);
        // Requests that failed were late or not all the same.
        let lateness = Times::of(records.iter().map(Record::lateness));
        Self {
            planned,
            answered: answered.len(),
            errors,
            interrupted: outcome.interrupted,
            wall_s,
            requests_per_s: per_s(answered.len() as f64),
            output_tokens_per_s: per_s(output_tokens as f64),
            ttft,
            ttft_opening: times(&|record| record.ttft().filter(|_| !record.continues)),
            ttft_continuing: times(&|record| record.ttft().filter(|_| record.continues)),
            end_to_end: times(&|record| Some(record.end_to_end())),
            service: times(&|record| Some(record.service_time())),
            inter_token: Times::of(answered.iter().flat_map(|record| record.gaps.iter().copied())),
            lateness,
            handshake: times(&|record| record.handshake),
            input_tokens: sum(|record| record.input_tokens),
            cached_tokens: sum(|record| record.cached_tokens),
            output_tokens,
            bytes_up: answered.iter().map(|record| record.bytes_up).sum(),
            bytes_down: answered.iter().map(|record| record.bytes_down).sum(),
            unfaithful: lateness.p99_us > TOLERATED_LATENESS_US.max(ttft.p50_us / 100),
            notes,
        }
    }

    /// Requests that failed.
    #[must_use]
    pub fn n_errors(&self) -> usize {
        self.errors.values().sum()
    }
}

#[cfg(test)]
mod tests;

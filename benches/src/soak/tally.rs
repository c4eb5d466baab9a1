//! Counts what the clients tell, and sees when nothing moves any more.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::session::{End, News, Over};

/// Turns are open and no text comes on any connection: the server has stalled.
const STALL: Duration = Duration::from_secs(30);
/// Different texts that are told apart.
const MAX_TEXTS: usize = 100;
/// Where texts beyond those are counted.
const OTHERS: &str = "others";

/// What happened to the turns. A forked turn is counted as forked and by its end.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Tally {
    pub answered: u64,
    pub cancelled_before_text: u64,
    pub cancelled_in_stream: u64,
    pub refused_too_long: u64,
    pub refused_overload: u64,
    /// Turns that continued an older response than the latest.
    pub forked: u64,
    pub input_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    /// What the server said when it refused, with numbers replaced by `N`.
    pub refusals: BTreeMap<String, u64>,
    /// Everything that should not have happened.
    pub errors: BTreeMap<String, u64>,
    /// Longest time without text on any connection while turns were open.
    pub longest_silence_s: f64,
    /// Longest time between two texts of one answer.
    pub longest_gap_s: f64,
    /// Longest time from sending to the first text.
    pub longest_ttft_s: f64,
    /// Turns that are open.
    #[serde(skip)]
    open: u64,
    /// When something moved last.
    #[serde(skip)]
    moved: Duration,
}

impl Tally {
    /// Counts one piece of news.
    pub(super) fn book(&mut self, news: News) {
        match news {
            News::Sent { at } => {
                if self.open == 0 {
                    self.moved = at;
                }
                self.open += 1;
            }
            News::Text { at } => self.movement(at),
            News::Ended(over) => {
                self.movement(over.record.done);
                self.open -= 1;
                self.book_end(&over);
            }
            News::Unreachable(problem) => self.error(format!("connect: {problem}")),
        }
    }

    /// Counts something that should not have happened.
    pub(super) fn error(&mut self, text: String) {
        count(&mut self.errors, text);
    }

    /// Counts a stall: the time of [`Tally::stalls_at`] has come.
    pub(super) fn stall(&mut self) {
        longest(&mut self.longest_silence_s, STALL);
        self.error(format!("stall: no text on any connection for {} s", STALL.as_secs()));
    }

    /// How often something happened that should not have.
    #[must_use]
    pub fn n_errors(&self) -> u64 {
        self.errors.values().sum()
    }

    /// Turns that were sent and are not over.
    #[must_use]
    pub fn n_open(&self) -> u64 {
        self.open
    }

    /// When the server has stalled unless something moves before.
    pub(super) fn stalls_at(&self) -> Option<Duration> {
        (self.open > 0).then(|| self.moved + STALL)
    }

    fn movement(&mut self, at: Duration) {
        longest(&mut self.longest_silence_s, at.saturating_sub(self.moved));
        self.moved = self.moved.max(at);
    }

    fn book_end(&mut self, over: &Over) {
        let Over { record, end, forked } = over;
        self.forked += u64::from(*forked);
        for gap in &record.gaps {
            longest(&mut self.longest_gap_s, *gap);
        }
        if let Some(first) = record.first_text {
            longest(&mut self.longest_ttft_s, first.saturating_sub(record.sent));
        }
        match end {
            End::Answered(_) => {
                self.answered += 1;
                self.input_tokens += record.input_tokens;
                self.cached_tokens += record.cached_tokens;
                self.output_tokens += record.output_tokens;
            }
            End::Cancelled if record.first_text.is_none() => self.cancelled_before_text += 1,
            End::Cancelled => self.cancelled_in_stream += 1,
            End::Failed => {
                let code = record.error.as_deref().unwrap_or("failed");
                let text = format!("{code}: {}", record.message.as_deref().unwrap_or("no more is known"));
                match code {
                    "context_length_exceeded" => self.refused_too_long += 1,
                    code if is_overload(code) => self.refused_overload += 1,
                    _ => return self.error(format!("{text} ({} turn {})", record.session, record.turn)),
                }
                count(&mut self.refusals, without_numbers(&text));
            }
        }
    }
}

/// The request may be sent again later.
pub(super) fn is_overload(code: &str) -> bool {
    matches!(code, "server_is_overloaded" | "rate_limit_exceeded")
}

fn longest(so_far: &mut f64, time: Duration) {
    *so_far = so_far.max(time.as_secs_f64());
}

fn count(texts: &mut BTreeMap<String, u64>, text: String) {
    let known = texts.contains_key(&text) || texts.len() < MAX_TEXTS;
    *texts.entry(if known { text } else { OTHERS.to_owned() }).or_default() += 1;
}

fn without_numbers(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_number = false;
    for char in text.chars() {
        if !char.is_ascii_digit() {
            out.push(char);
        } else if !in_number {
            out.push('N');
        }
        in_number = char.is_ascii_digit();
    }
    out
}

#[cfg(test)]
mod tests;

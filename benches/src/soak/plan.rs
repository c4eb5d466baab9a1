//! What random clients do, as a function of the seed alone.

use std::time::Duration;

use crate::options::Options;
use crate::text::{Rng, Text, mix};

/// Lengths are between what was asked for and so many times that.
const SPREAD: u64 = 4;
/// One session of so many begins as an earlier one did.
const TWINS: u64 = 8;
/// How far back the earlier one is, at most.
const TWIN_DISTANCE: u64 = 32;
/// A client that does not wait for the answer's text goes away within this time.
const LONGEST_PATIENCE_MS: u64 = 1024;

/// The ranges that everything is drawn from.
#[derive(Debug, Clone)]
pub struct Plan {
    seed: u64,
    delta_tokens: u64,
    output_tokens: u64,
    max_output_tokens: u64,
    turns: u64,
    tool_ms: u64,
    cancel: f64,
    fork: f64,
}

/// One conversation of one client.
#[derive(Debug, Clone, PartialEq)]
pub struct Session {
    pub number: u64,
    /// The session whose first text it sends: its own number, or an earlier one.
    pub opening: u64,
    pub turns: Vec<Turn>,
}

/// One request.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    pub text: Text,
    pub output_tokens: u32,
    /// Wait before it.
    pub pause: Duration,
    /// Chooses an older response to continue; absent: the latest.
    pub older: Option<u64>,
    pub cut: Option<Cut>,
}

/// When a client closes its socket in the middle of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// So long after sending, usually before the first text.
    AfterSending(Duration),
    AfterDeltas(u64),
}

impl Plan {
    /// The ranges that `options` name.
    #[must_use]
    pub fn new(options: &Options) -> Self {
        Self {
            seed: options.seed,
            delta_tokens: options.delta_tokens as u64,
            output_tokens: u64::from(options.output_tokens).max(1),
            max_output_tokens: u64::from(options.max_output_tokens),
            turns: options.turns,
            tool_ms: options.tool_ms.unwrap_or(0),
            cancel: options.soak.cancel,
            fork: options.soak.fork,
        }
    }

    /// The session of this number.
    #[must_use]
    pub fn session(&self, number: u64) -> Session {
        let mut rng = self.rng(number);
        // Drawn first: `opening` draws the same.
        let opening = self.opening(number, &mut rng);
        let n_turns = 1 + rng.next_u64() % (2 * self.turns);
        let turns = (0..n_turns).map(|idx| self.turn(if idx == 0 { opening } else { number }, idx, &mut rng));
        Session { number, opening, turns: turns.collect() }
    }

    fn rng(&self, number: u64) -> Rng {
        Rng::new(mix(self.seed, number))
    }

    /// The session that first sent what session `number` begins with.
    fn opening(&self, number: u64, rng: &mut Rng) -> u64 {
        let (is_twin, back) = (rng.next_u64().is_multiple_of(TWINS), rng.next_u64());
        if is_twin && number > 0 {
            let earlier = number - 1 - back % number.min(TWIN_DISTANCE);
            self.opening(earlier, &mut self.rng(earlier))
        } else {
            number
        }
    }

    /// The turn `idx`, with the text of that turn of session `text_of`.
    fn turn(&self, text_of: u64, idx: u64, rng: &mut Rng) -> Turn {
        let text_seed = mix(mix(self.seed, text_of), idx);
        let n_tokens = log_uniform(&mut Rng::new(text_seed), self.delta_tokens, SPREAD);
        let output_tokens = log_uniform(rng, self.output_tokens, SPREAD).min(self.max_output_tokens);
        let pause_ms = rng.next_u64() % (2 * self.tool_ms + 1);
        let (is_fork, older) = (chance(rng, self.fork), rng.next_u64());
        let (is_cut, is_early) = (chance(rng, self.cancel), chance(rng, 0.5));
        let deltas = log_uniform(rng, 1, output_tokens);
        let patience = Duration::from_millis(log_uniform(rng, 1, LONGEST_PATIENCE_MS));
        let cut = if is_early { Cut::AfterSending(patience) } else { Cut::AfterDeltas(deltas) };
        Turn {
            text: Text::words(text_seed, usize::try_from(n_tokens).unwrap_or(usize::MAX)),
            output_tokens: u32::try_from(output_tokens).unwrap_or(u32::MAX),
            pause: Duration::from_millis(pause_ms),
            older: is_fork.then_some(older),
            cut: is_cut.then_some(cut),
        }
    }
}

impl Turn {
    /// Which of `n` responses of its session it continues; none when there are none. The latest is the last one.
    #[must_use]
    pub fn parent(&self, n: usize) -> Option<usize> {
        let latest = n.checked_sub(1)?;
        match self.older {
            Some(draw) if latest > 0 => usize::try_from(draw % latest as u64).ok(),
            _ => Some(latest),
        }
    }
}

fn chance(rng: &mut Rng, share: f64) -> bool {
    fraction(rng) < share
}

/// A number in [0, 1), of 53 random bits.
fn fraction(rng: &mut Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
}

/// From `least` to `spread` times that; each doubling is as likely as the others.
fn log_uniform(rng: &mut Rng, least: u64, spread: u64) -> u64 {
    let drawn = least as f64 * (spread as f64).powf(fraction(rng));
    (drawn as u64).clamp(least, least.saturating_mul(spread))
}

#[cfg(test)]
mod tests;

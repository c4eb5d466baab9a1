//! What is to be sent: sessions of turns, cut to what was asked for and to what the model can hold.

use std::time::Duration;

use crate::options::{Mode, Options};
use crate::text::Text;
use crate::{synth, trace};

/// Tokens that a chat template adds to a turn, at most.
pub(crate) const TEMPLATE_TOKENS: usize = 48;

/// How a turn relates to the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chain {
    /// The text is the whole prompt of a new chain.
    Opens,
    /// The text is only what is new; the turn names the previous response.
    Continues,
}

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    pub chain: Chain,
    pub text: Text,
    /// The request's own time in the trace, from the start of its session.
    pub at: Duration,
    /// Wait after the previous answer: the tool runs.
    pub delay: Duration,
    pub output_tokens: u32,
}

/// Turns of one client, over one connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    pub id: String,
    /// When the trace starts it; absent: the trace does not say.
    pub start: Option<Duration>,
    /// Sent as a system message where a chain opens.
    pub system: Text,
    pub turns: Vec<Turn>,
}

/// Sessions in the order of their starts, and what was done to fit them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    pub sessions: Vec<Session>,
    /// For the report: everything that was changed or left out.
    pub notes: Vec<String>,
}

/// Why there is nothing to replay.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Trace(#[from] trace::Error),
    #[error("{0}")]
    Usage(&'static str),
    #[error("nothing is left to replay: widen --start, --end or --limit, or raise --max-input-tokens")]
    Empty,
}

impl Workload {
    /// Reads or makes the sessions that `options` ask for.
    ///
    /// # Errors
    /// When the trace is unreadable, options contradict each other, or nothing is left.
    pub fn new(options: &Options) -> Result<Self, Error> {
        let mut workload = match &options.trace {
            Some(path) => trace::read(path, options)?,
            None => synth::sessions(options),
        };
        workload.select(options);
        workload.set_starts(options);
        workload.fit(options);
        if options.mode == Mode::Open {
            workload.open()?;
        }
        if workload.sessions.is_empty() { Err(Error::Empty) } else { Ok(workload) }
    }

    /// Requests of all sessions.
    #[must_use]
    pub fn n_turns(&self) -> usize {
        self.sessions.iter().map(|session| session.turns.len()).sum()
    }

    fn select(&mut self, options: &Options) {
        let start = options.start.map_or(Duration::ZERO, Duration::from_secs_f64);
        let end = options.end.map_or(Duration::MAX, Duration::from_secs_f64);
        let before = self.sessions.len();
        self.sessions.retain_mut(|session| match &mut session.start {
            Some(at) => {
                let inside = (start..end).contains(at);
                *at = at.saturating_sub(start);
                inside
            }
            None => true,
        });
        self.sessions.truncate(options.limit.unwrap_or(usize::MAX));
        if self.sessions.len() < before {
            self.notes.push(format!("{} of {before} sessions selected", self.sessions.len()));
        }
    }

    fn set_starts(&mut self, options: &Options) {
        self.sessions.sort_by_key(|session| session.start);
        for (idx, session) in self.sessions.iter_mut().enumerate() {
            if let Some(rate) = options.rate {
                session.start = Some(Duration::from_secs_f64(idx as f64 / rate));
            } else if let Some(start) = &mut session.start {
                *start = start.div_f64(options.speed);
            }
            for turn in &mut session.turns {
                turn.at = turn.at.div_f64(options.speed);
                turn.delay = turn.delay.div_f64(options.speed);
            }
        }
    }

    /// Caps outputs, and leaves out turns that do not fit the model's context or continue one that was left out.
    fn fit(&mut self, options: &Options) {
        let n_turns = self.n_turns();
        for session in &mut self.sessions {
            let mut held = 0;
            let mut broken = false;
            session.turns.retain_mut(|turn| {
                turn.output_tokens = turn.output_tokens.clamp(1, options.max_output_tokens);
                let own = turn.text.estimated_tokens() + TEMPLATE_TOKENS;
                match turn.chain {
                    Chain::Opens => {
                        held = session.system.estimated_tokens() + own;
                        broken = false;
                    }
                    Chain::Continues => held += own,
                }
                broken |= held > options.max_input_tokens + TEMPLATE_TOKENS || turn.text.is_empty();
                held += turn.output_tokens as usize;
                !broken
            });
        }
        self.sessions.retain(|session| !session.turns.is_empty());
        let left_out = n_turns - self.n_turns();
        if left_out > 0 {
            let limit = options.max_input_tokens;
            self.notes.push(format!(
                "{left_out} of {n_turns} turns left out: empty, longer than {limit} tokens, or after such a turn"
            ));
        }
    }

    /// Makes each turn a session of its own, at its own time and with its whole prompt.
    fn open(&mut self) -> Result<(), Error> {
        let mut single = Vec::with_capacity(self.n_turns());
        for session in std::mem::take(&mut self.sessions) {
            let start = session.start.ok_or(Error::Usage(
                "--mode open sends each request at its own time, and these sessions have no start: add --rate",
            ))?;
            let mut prompt = Text::default();
            for (idx, turn) in session.turns.into_iter().enumerate() {
                if turn.chain == Chain::Opens {
                    prompt = Text::default();
                }
                prompt.extend(&turn.text);
                single.push(Session {
                    id: format!("{}#{idx}", session.id),
                    start: Some(start + turn.at),
                    system: session.system.clone(),
                    turns: vec![Turn {
                        chain: Chain::Opens,
                        text: prompt.clone(),
                        at: Duration::ZERO,
                        ..turn
                    }],
                });
            }
        }
        single.sort_by_key(|session| session.start);
        self.sessions = single;
        Ok(())
    }
}

#[cfg(test)]
mod tests;

//! Mooncake's traces: lengths, and the ids of chained blocks of 512 tokens. Each request is a conversation of its own.

use std::time::Duration;

use serde::Deserialize;

use super::Format;
use crate::options::Options;
use crate::text::{Text, mix};
use crate::workload::{Chain, Session, Turn};

/// Tokens that one hash id stands for.
const BLOCK_TOKENS: usize = 512;

#[derive(Debug, Deserialize)]
pub(super) struct Line {
    /// Milliseconds from the trace's start.
    timestamp: f64,
    input_length: usize,
    output_length: u32,
    hash_ids: Vec<u64>,
}

#[derive(Debug)]
pub(super) struct Reader {
    seed: u64,
    max_input_tokens: usize,
    n_cut: usize,
    sessions: Vec<Session>,
}

impl Reader {
    pub(super) fn new(options: &Options) -> Self {
        let (seed, max_input_tokens) = (options.seed, options.max_input_tokens);
        Self { seed, max_input_tokens, n_cut: 0, sessions: Vec::new() }
    }

    /// Text in which equal ids at equal places are equal text.
    fn text(&self, ids: &[u64], n_tokens: usize) -> Text {
        let mut text = Text::default();
        for (idx, id) in ids.iter().enumerate() {
            let n = n_tokens.saturating_sub(idx * BLOCK_TOKENS).min(BLOCK_TOKENS);
            if n > 0 {
                text.extend(&Text::words(mix(self.seed, *id), n));
            }
        }
        text
    }
}

impl Format for Reader {
    type Line = Line;

    fn add(&mut self, line: Line) -> Result<(), String> {
        let start = Duration::try_from_secs_f64(line.timestamp / 1e3)
            .map_err(|_| format!("timestamp {} is no time", line.timestamp))?;
        if line.hash_ids.len() != line.input_length.div_ceil(BLOCK_TOKENS) {
            let n = line.hash_ids.len();
            return Err(format!(
                "{n} hash_ids do not stand for input_length {} at 512 tokens each",
                line.input_length
            ));
        }
        let n_tokens = line.input_length.min(self.max_input_tokens);
        self.n_cut += usize::from(n_tokens < line.input_length);
        let turn = Turn {
            chain: Chain::Opens,
            text: self.text(&line.hash_ids, n_tokens),
            at: Duration::ZERO,
            delay: Duration::ZERO,
            output_tokens: line.output_length,
        };
        let id = format!("request-{}", self.sessions.len());
        self.sessions.push(Session { id, start: Some(start), system: Text::default(), turns: vec![turn] });
        Ok(())
    }

    fn finish(self) -> (Vec<Session>, Vec<String>) {
        let mut notes = vec!["prompt text is made up: equal hash ids give equal text".to_owned()];
        if self.n_cut > 0 {
            notes.push(format!(
                "{} of {} prompts of the trace cut to their first {} tokens",
                self.n_cut,
                self.sessions.len(),
                self.max_input_tokens
            ));
        }
        (self.sessions, notes)
    }
}

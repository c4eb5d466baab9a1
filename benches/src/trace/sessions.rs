//! Recorded sessions in delta form: a prompt is the first `keep_chars` characters of the previous one and `append_text`.

use std::collections::HashMap;
use std::time::Duration;

use serde::Deserialize;

use super::Format;
use crate::options::Options;
use crate::text::Text;
use crate::workload::{Chain, Session, Turn};

#[derive(Debug, Deserialize)]
pub(super) struct Line {
    session_id: String,
    turn: u64,
    /// Milliseconds from the session's start.
    timestamp: f64,
    keep_chars: usize,
    append_text: String,
    output_text: String,
}

#[derive(Debug)]
pub(super) struct Reader {
    tool: Option<Duration>,
    max_delay: Duration,
    max_output_tokens: u32,
    open: HashMap<String, Open>,
    sessions: Vec<Session>,
}

/// A session whose last line may be still to come.
#[derive(Debug)]
struct Open {
    idx: usize,
    next_turn: u64,
    prompt: String,
}

impl Reader {
    pub(super) fn new(options: &Options) -> Self {
        Self {
            tool: options.tool_ms.map(Duration::from_millis),
            max_delay: Duration::from_millis(options.max_delay_ms),
            max_output_tokens: options.max_output_tokens,
            open: HashMap::new(),
            sessions: Vec::new(),
        }
    }

    /// Tokens of the recorded answer, about; sessions without recorded answers get the limit.
    fn output_tokens(&self, text: &str) -> u32 {
        if text.is_empty() {
            return self.max_output_tokens;
        }
        u32::try_from(text.len().div_ceil(4)).unwrap_or(u32::MAX)
    }
}

impl Format for Reader {
    type Line = Line;

    fn add(&mut self, line: Line) -> Result<(), String> {
        let at = Duration::try_from_secs_f64(line.timestamp / 1e3)
            .map_err(|_| format!("timestamp {} is no time", line.timestamp))?;
        let output_tokens = self.output_tokens(&line.output_text);
        let sessions = &mut self.sessions;
        let open = self.open.entry(line.session_id).or_insert_with_key(|id| {
            sessions.push(Session {
                id: id.clone(),
                start: None,
                system: Text::default(),
                turns: Vec::new(),
            });
            Open { idx: sessions.len() - 1, next_turn: 0, prompt: String::new() }
        });
        if line.turn != open.next_turn {
            return Err(format!("turn {} stands where turn {} should", line.turn, open.next_turn));
        }
        open.next_turn += 1;
        let n_chars = open.prompt.chars().count();
        if line.keep_chars > n_chars {
            return Err(format!(
                "keep_chars is {}, the previous prompt has {n_chars} characters",
                line.keep_chars
            ));
        }
        let keep = open.prompt.char_indices().nth(line.keep_chars).map_or(open.prompt.len(), |(at, _)| at);
        open.prompt.truncate(keep);
        open.prompt.push_str(&line.append_text);
        let continues = line.turn > 0 && line.keep_chars == n_chars && !line.append_text.is_empty();
        // The same prompt again is asked as a client without memory would: in a new chain.
        let (chain, text) = if continues {
            (Chain::Continues, Text::given(line.append_text))
        } else {
            (Chain::Opens, Text::given(open.prompt.as_str()))
        };
        let turns = &mut sessions[open.idx].turns;
        let gap = turns.last().map(|last: &Turn| at.saturating_sub(last.at));
        let delay = gap.map_or(Duration::ZERO, |gap| self.tool.unwrap_or(gap).min(self.max_delay));
        turns.push(Turn { chain, text, at, delay, output_tokens });
        Ok(())
    }

    fn finish(self) -> (Vec<Session>, Vec<String>) {
        let mut notes = Vec::new();
        if self.tool.is_none() {
            notes.push(
                "delays between turns are the recorded gaps, which include the recorded model's time"
                    .to_owned(),
            );
        }
        (self.sessions, notes)
    }
}

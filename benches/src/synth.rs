//! Agent sessions made from a seed: a shared system prompt, then one tool result after the other.

use std::time::Duration;

use crate::options::Options;
use crate::text::{Text, mix};
use crate::workload::{Chain, Session, Turn, Workload};

/// The sessions that `options` describe; the same options give the same text.
#[must_use]
pub fn sessions(options: &Options) -> Workload {
    let system = system(options);
    let delay = Duration::from_millis(options.tool_ms.unwrap_or(Options::TOOL_MS));
    let turn = |session: u64, idx: u64| Turn {
        chain: if idx == 0 { Chain::Opens } else { Chain::Continues },
        text: Text::words(mix(mix(options.seed, session), idx), options.delta_tokens),
        at: delay * u32::try_from(idx).unwrap_or(u32::MAX),
        delay: if idx == 0 { Duration::ZERO } else { delay },
        output_tokens: options.output_tokens,
    };
    let sessions = (0..options.sessions)
        .map(|session| Session {
            id: format!("synth-{session}"),
            start: None,
            system: system.clone(),
            turns: (0..options.turns).map(|idx| turn(session, idx)).collect(),
        })
        .collect();
    Workload { sessions, notes: Vec::new() }
}

/// The system prompt of all of them.
#[must_use]
pub fn system(options: &Options) -> Text {
    Text::words(mix(options.seed, u64::MAX), options.system_tokens)
}

#[cfg(test)]
mod tests;

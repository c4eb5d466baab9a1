//! Why a turn could not build on what its conversation had in the caches, for whoever wants to know: clients that change
//! the beginning of their prompts pay for all of it again.

use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use crate::conversation::TokenLog;
use crate::history::Entry;
use crate::store::Stored;
use crate::wire::Tools;

/// What broke a prefix, and what it costs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct CacheBreak {
    /// The first thing that is not as before, such as `instructions`, `tools[4] read_file` or `input[7]`.
    pub(crate) first_changed: String,
    /// `edit`, `insert`, `remove` or `reorder`.
    pub(crate) kind: &'static str,
    /// Tokens at the beginning of the prompt that stayed the same.
    pub(crate) prefix_tokens_kept: usize,
    /// Tokens of the earlier prompt behind them.
    pub(crate) tokens_lost: usize,
}

/// Compares a turn with the newest response of its conversation; None when it builds on all of that.
pub(crate) fn find(
    before: &Stored,
    instructions: Option<&Arc<str>>,
    tools: &Tools,
    entries: &[Entry],
    log: &TokenLog,
) -> Option<CacheBreak> {
    let (first_changed, kind) = if before.instructions.as_ref() != instructions {
        ("instructions".to_owned(), kind_of(before.instructions.is_some(), instructions.is_some()))
    } else if before.tools.raw != tools.raw {
        changed_tool(&before.tools.raw, &tools.raw)
    } else {
        changed_item(before, entries)?
    };
    let (old, new) = (before.log.ids_from(0), log.ids_from(0));
    let prefix_tokens_kept = old.iter().zip(&new).take_while(|(old, new)| old == new).count();
    Some(CacheBreak { first_changed, kind, prefix_tokens_kept, tokens_lost: old.len() - prefix_tokens_kept })
}

fn kind_of(was_there: bool, is_there: bool) -> &'static str {
    match (was_there, is_there) {
        (false, _) => "insert",
        (true, false) => "remove",
        (true, true) => "edit",
    }
}

fn changed_tool(old: &str, new: &str) -> (String, &'static str) {
    let list = |raw: &str| serde_json::from_str::<Vec<Value>>(raw).unwrap_or_default();
    let (old, new) = (list(old), list(new));
    let idx = old.iter().zip(&new).take_while(|(old, new)| old == new).count();
    let name = new.get(idx).or(old.get(idx)).and_then(|tool| tool["name"].as_str()).unwrap_or_default();
    let is_reordered = old.len() == new.len() && old.iter().all(|tool| new.contains(tool));
    let kind = match old.len().cmp(&new.len()) {
        _ if is_reordered => "reorder",
        std::cmp::Ordering::Less if old.iter().all(|tool| new.contains(tool)) => "insert",
        std::cmp::Ordering::Greater if new.iter().all(|tool| old.contains(tool)) => "remove",
        _ => "edit",
    };
    (format!("tools[{idx}] {name}").trim_end().to_owned(), kind)
}

fn changed_item(before: &Stored, entries: &[Entry]) -> Option<(String, &'static str)> {
    let said: Vec<_> = before.history.entries().into_iter().filter_map(Entry::hash).collect();
    let repeated: Vec<(usize, _)> =
        entries.iter().enumerate().filter_map(|(idx, entry)| Some((idx, entry.hash()?))).collect();
    let n_same = said.iter().zip(&repeated).take_while(|(said, (_, repeated))| *said == repeated).count();
    if n_same == said.len() {
        return None;
    }
    let idx = repeated.get(n_same).map_or(entries.len(), |(idx, _)| *idx);
    Some((format!("input[{idx}]"), kind_of(true, n_same < repeated.len())))
}

#[cfg(test)]
mod tests;

//! From items to token ids: what is new is appended to what was rendered before, whenever the template allows it.

use model::calls::{Call, CallFormat};
use model::chat_template::{Content, Message, Reply, Role};
use model::prompt::{self, Entry as LogEntry, LogEnd, TemplateClass};

use super::Basis;
use crate::compact;
use crate::conversation::{Cut, Item, TokenLog};
use crate::error::ApiError;
use crate::metrics as names;
use crate::state::Gateway;
use crate::store::Stored;
use crate::wire::{InputItem, InputKind};

/// A prompt, and what it cost.
pub(super) struct Built {
    pub(super) log: TokenLog,
    /// Where workers may pick up.
    pub(super) cut: Cut,
    pub(super) n_tokenized: usize,
}

/// Renders what is new, or everything when what was rendered before does not hold any more.
///
/// # Errors
/// When the template cannot render it.
pub(super) fn build(gateway: &Gateway, basis: &Basis, reply: Reply) -> Result<Built, ApiError> {
    let input = messages(gateway, &basis.new);
    // A parent that was made for nothing but its id has no tokens.
    let Some(parent) = basis.parent.as_deref().filter(|parent| parent.log.len() > 0) else {
        return start(gateway, basis, &input, reply);
    };
    if basis.appends_to(gateway, parent) {
        match extend(gateway, parent, &input, reply) {
            Err(prompt::Error::NotAppendable { .. }) => {}
            result => return result.map_err(refused),
        }
    }
    metrics::counter!(names::RERENDERS).increment(1);
    let entries = parent.log.with_entries(|entries| entries.iter().copied().map(item).collect::<Vec<_>>());
    rerender(gateway, basis, entries, &input, reply).map_err(refused)
}

/// An assistant's turn that is put together of items: what was thought, said and called in a row.
#[derive(Default)]
struct Assistant {
    thought: String,
    said: Option<Content>,
    calls: Vec<Call>,
}

impl Assistant {
    /// The message, if anything was said or called. A thought that led to nothing is none.
    fn end(&mut self, format: &CallFormat) -> Option<Message> {
        let Self { thought, said, calls } = std::mem::take(self);
        let mut message = match said {
            None if calls.is_empty() => return None,
            Some(content) if calls.is_empty() => Message { role: Role::Assistant, content },
            said => format.assistant(said.unwrap_or_default().text(), &calls),
        };
        if !thought.is_empty() {
            let mut content = format.thought(&thought);
            content.append(&message.content);
            message.content = content;
        }
        Some(message)
    }
}

/// The messages that items stand for. What an assistant said and called in a row is one message, as it was one turn.
fn messages(gateway: &Gateway, items: &[InputItem]) -> Vec<Message> {
    let prompts = &gateway.text().prompts;
    let format = prompts.format();
    let is_question =
        |item: &InputItem| matches!(&item.kind, InputKind::Message(message) if message.role == Role::User);
    // Older thoughts are dropped by the templates that know them.
    let thinks_from = match prompts.class() {
        TemplateClass::AppendOnly => 0,
        _ => items.iter().rposition(is_question).unwrap_or_default(),
    };
    let mut messages = Vec::with_capacity(items.len());
    let mut assistant = Assistant::default();
    for (idx, item) in items.iter().enumerate() {
        let other = match &item.kind {
            InputKind::Message(message) if message.role == Role::Assistant => {
                if assistant.said.is_some() || !assistant.calls.is_empty() {
                    messages.extend(assistant.end(format));
                }
                assistant.said = Some(message.content.clone());
                continue;
            }
            InputKind::Call { call, .. } => {
                assistant.calls.push(call.clone());
                continue;
            }
            InputKind::Reasoning { .. } if !format.knows_reasoning() => continue,
            InputKind::Reasoning { text, .. } => {
                if assistant.said.is_some() || !assistant.calls.is_empty() {
                    messages.extend(assistant.end(format));
                }
                if idx >= thinks_from {
                    assistant.thought.push_str(text);
                }
                continue;
            }
            InputKind::Message(message) => message.clone(),
            InputKind::Result { text: result, .. } => format.result(result),
            InputKind::Compaction { summary, .. } => {
                let content = format!("{}{summary}", compact::PREFACE).into();
                Message { role: Role::User, content }
            }
            InputKind::CompactionTrigger if idx + 1 == items.len() => {
                Message { role: Role::User, content: compact::PROMPT.into() }
            }
            // What was asked for before has been answered.
            InputKind::CompactionTrigger
            | InputKind::Tools(_)
            | InputKind::Reference(_)
            | InputKind::Silent => continue,
        };
        messages.extend(assistant.end(format));
        messages.push(other);
    }
    messages.extend(assistant.end(format));
    messages
}

/// True when the template lets these items be appended to what was rendered before.
pub(super) fn appendable(gateway: &Gateway, new: &[InputItem]) -> bool {
    match gateway.text().prompts.class() {
        TemplateClass::AppendOnly => true,
        TemplateClass::AppendOnlyWithinToolLoop => {
            let speaks = |kind: &InputKind| {
                matches!(
                    kind,
                    InputKind::Message(_) | InputKind::Compaction { .. } | InputKind::CompactionTrigger
                )
            };
            !new.iter().any(|item| speaks(&item.kind))
        }
        TemplateClass::Rewrites => false,
    }
}

fn start(gateway: &Gateway, basis: &Basis, input: &[Message], reply: Reply) -> Result<Built, ApiError> {
    let messages = with_instructions(basis.instructions.as_deref(), input);
    let ids = gateway.text().prompts.start(&messages, reply, &basis.tools.shown).map_err(refused)?;
    let mut log = TokenLog::new(gateway.hash_key());
    let n_tokenized = ids.len();
    append(&mut log, ids, input, reply);
    Ok(Built { log, cut: Cut::root(), n_tokenized })
}

fn extend(
    gateway: &Gateway,
    parent: &Stored,
    input: &[Message],
    reply: Reply,
) -> Result<Built, prompt::Error> {
    let mut log = parent.log.clone();
    let cut = log.cut();
    let ids = gateway.text().prompts.extend(log.end(), input, reply)?;
    let n_tokenized = ids.len();
    append(&mut log, ids, input, reply);
    Ok(Built { log, cut, n_tokenized })
}

/// Renders the whole conversation again; generated ids stay as they were generated.
fn rerender(
    gateway: &Gateway,
    basis: &Basis,
    before: Vec<Item>,
    input: &[Message],
    reply: Reply,
) -> Result<Built, prompt::Error> {
    let system = basis.instructions.as_deref().map(system_message);
    let items: Vec<Item> = before.into_iter().chain(input.iter().cloned().map(Item::Message)).collect();
    let all: Vec<LogEntry<'_>> =
        system.iter().map(LogEntry::Message).chain(items.iter().filter_map(Item::entry)).collect();
    let ids = gateway.text().prompts.render_all(&all, reply, &basis.tools.shown)?;
    drop(all);
    let mut log = TokenLog::new(gateway.hash_key());
    let n_tokenized = ids.len();
    log.append(ids, items, end(reply));
    Ok(Built { log, cut: Cut::root(), n_tokenized })
}

/// The longest prompt that leaves room for an answer of at most `limit` tokens.
pub(super) fn most_prompt_tokens(gateway: &Gateway, limit: Option<usize>) -> usize {
    let context = gateway.text().context_len as usize;
    let answer = limit.map_or(context / 4, |limit| limit.min(context / 2));
    context - answer.max(1)
}

/// The conversation without its oldest items, as many as it takes. What was said last stays, whatever its length.
///
/// # Errors
/// When the template cannot render it.
pub(super) fn truncated(
    gateway: &Gateway,
    basis: &Basis,
    reply: Reply,
    most: usize,
) -> Result<Built, ApiError> {
    let parent = basis.parent.as_deref();
    let mut items: Vec<Item> = parent.map_or_else(Vec::new, |parent| {
        parent.log.with_entries(|entries| entries.iter().copied().map(item).collect())
    });
    items.extend(messages(gateway, &basis.new).into_iter().map(Item::Message));
    drop_hopeless(&mut items, gateway.max_prompt_bytes());
    let starts_turn = |item: &Item| matches!(item, Item::Message(message) if message.role == Role::User);
    loop {
        let n_dropped = items.len().div_ceil(4);
        // What is left begins with a user's message, so that no result stands without its call.
        let from = (n_dropped..items.len()).find(|&idx| starts_turn(&items[idx]));
        let is_last = from.is_none() || items.len() <= 1;
        items.drain(..from.unwrap_or(items.len().saturating_sub(1)));
        let built = rerender(gateway, basis, items.clone(), &[], reply).map_err(refused)?;
        if built.log.len() <= most || is_last {
            return Ok(built);
        }
    }
}

/// Drops the oldest items as long as the text of all is longer than any that fits, so that it is never tokenized.
fn drop_hopeless(items: &mut Vec<Item>, most_bytes: usize) {
    let n_bytes = |item: &Item| match item {
        Item::Message(message) => message.content.text().len(),
        Item::Generated | Item::GeneratedBefore { .. } => 0,
    };
    let mut rest: usize = items.iter().map(n_bytes).sum();
    let mut n_dropped = 0;
    while rest > most_bytes && n_dropped + 1 < items.len() {
        rest -= n_bytes(&items[n_dropped]);
        n_dropped += 1;
    }
    items.drain(..n_dropped);
}

fn item(entry: LogEntry<'_>) -> Item {
    match entry {
        LogEntry::Message(message) => Item::Message(message.clone()),
        LogEntry::Generated { ids } => Item::GeneratedBefore { ids: ids.into() },
    }
}

fn append(log: &mut TokenLog, ids: Vec<u32>, input: &[Message], reply: Reply) {
    let end = if input.is_empty() && reply == Reply::None { log.end() } else { end(reply) };
    log.append(ids, input.iter().cloned().map(Item::Message).collect(), end);
}

fn end(reply: Reply) -> LogEnd {
    if reply == Reply::Expected { LogEnd::Prompt } else { LogEnd::Message }
}

fn with_instructions(instructions: Option<&str>, input: &[Message]) -> Vec<Message> {
    instructions.map(system_message).into_iter().chain(input.iter().cloned()).collect()
}

fn system_message(instructions: &str) -> Message {
    Message { role: Role::System, content: instructions.into() }
}

fn refused(error: prompt::Error) -> ApiError {
    ApiError::bad_value("input", format!("the model's chat template cannot render this input: {error}"))
}

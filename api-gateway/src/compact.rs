//! Compaction: the model sums a conversation up, and the sealed summary stands for it from then on.
//!
//! ```text
//!   developer ─ user ─ answer ─ call ─ result ─ …  ─ user          what would be said to the model
//!   ────┬────   ────────────────┬───────────────     ─┬──
//!       │                    summary                  │
//!       └─────────────┐         │         ┌───────────┘
//!                  { instructions, text, latest }                 what is sealed
//! ```
//! A summary that a client asks for stands beside what the client keeps. One that was made because the conversation had
//! become too long (`context_management`) stands for everything before it, whether the client sends that again or not, so
//! it holds what must not be lost: instructions and tools that were items, and what is being answered.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::emit::{EventSink, new_id, unix_now};
use crate::error::ApiError;
use crate::history::Entry;
use crate::prepare::{self, Prepared};
use crate::state::Gateway;
use crate::turn::{Origin, Stop, run_turn};
use crate::wire::{Create, InputItem, InputKind, with_id};

/// What the model is asked for.
pub(crate) const PROMPT: &str = "Summarize the conversation above for somebody who has to continue it without seeing it. \
    Name the task, what was found out and decided, what was changed, and what is still to be done. Keep names, paths, \
    numbers and code exactly. Write plain text.";
/// In front of a summary where it stands for a conversation.
pub(crate) const PREFACE: &str = "Summary of the conversation so far:\n";
/// A summary that needs more is none.
const MAX_SUMMARY_TOKENS: usize = 1024;
/// A shorter one says nothing.
const MIN_SUMMARY_TOKENS: usize = 64;
/// A model that thinks before it writes may think for so long.
const MAX_THOUGHTS_TOKENS: usize = 2048;

/// What is sealed.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Summary {
    pub(crate) text: String,
    /// Of one that stands for everything before it.
    pub(crate) kept: Option<Kept>,
}

/// Items that a summary keeps word for word, as JSON.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// In front of the summary: instructions and tools.
    pub(crate) instructions: Vec<Box<RawValue>>,
    /// Behind it: what the user said last, or calls and their results.
    pub(crate) latest: Vec<Box<RawValue>>,
}

impl Summary {
    /// As the client keeps it.
    pub(crate) fn sealed(&self, gateway: &Gateway, tenant: &str) -> String {
        let json = serde_json::to_string(self).expect("our own types serialize");
        gateway.seal().close(&json, tenant)
    }

    /// What is in a seal; None when it was not made here, or was changed.
    pub(crate) fn open(gateway: &Gateway, sealed: &str, tenant: &str) -> Option<Self> {
        let opened = gateway.seal().open(sealed, tenant)?;
        // Earlier ones were the text alone.
        let text = || (!opened.starts_with('{')).then(|| Self { text: opened.clone(), kept: None });
        serde_json::from_str(&opened).ok().or_else(text)
    }
}

/// Tokens that a summary may have.
pub(crate) fn most_tokens(gateway: &Gateway) -> usize {
    let thinks = gateway.text().prompts.format().knows_reasoning();
    MAX_SUMMARY_TOKENS + if thinks { MAX_THOUGHTS_TOKENS } else { 0 }
}

/// Tokens that the summary of a prompt of `n_tokens` may have: it has to be shorter.
pub(crate) fn tokens_for(gateway: &Gateway, n_tokens: usize) -> usize {
    let thoughts = most_tokens(gateway) - MAX_SUMMARY_TOKENS;
    (n_tokens / 4).clamp(MIN_SUMMARY_TOKENS, MAX_SUMMARY_TOKENS) + thoughts
}

/// The parts of a final response object that a compaction shows.
#[derive(Deserialize)]
struct Final<'a> {
    #[serde(borrow)]
    output: Vec<&'a RawValue>,
    #[serde(borrow)]
    usage: &'a RawValue,
}

#[derive(Serialize)]
struct Compacted<'a> {
    id: String,
    object: &'static str,
    created_at: u64,
    output: Vec<Box<RawValue>>,
    usage: &'a RawValue,
}

/// `POST /v1/responses/compact`: the user's messages and a sealed summary of everything.
///
/// # Errors
/// As for a turn of the same input.
pub(crate) async fn compact(
    gateway: &Gateway,
    mut create: Create,
    origin: Origin,
) -> Result<String, ApiError> {
    prepare::recall(gateway, &create, &origin).await?;
    summarizing(&mut create);
    create.aside = true;
    let (own, asked, from) = (gateway.clone(), create.clone(), origin.clone());
    let collecting = tokio::task::spawn_blocking(move || user_messages(&own, &asked, &from));
    let interrupted = |_| Err(ApiError::internal("collecting the messages was interrupted"));
    let mut output = collecting.await.unwrap_or_else(interrupted)?;
    let never = Stop::default();
    let ended = run_turn(gateway, create, origin, EventSink::Discard, &never).await?;
    let end = parsed(&ended.response)?;
    output.extend(end.output.iter().map(|item| (*item).to_owned()));
    let compacted = Compacted {
        id: new_id("resp"),
        object: "response.compaction",
        created_at: unix_now(),
        output,
        usage: end.usage,
    };
    Ok(serde_json::to_string(&compacted).expect("our own types serialize"))
}

/// A conversation that is to be shortened before it is answered.
#[derive(Debug)]
pub(crate) struct Due {
    /// The request for its summary.
    summary: Create,
    kept: Kept,
}

/// What there is to be shortened, when the prompt has at least as many tokens as the client allows.
pub(crate) fn due(create: &Create, prepared: &Prepared) -> Option<Due> {
    let threshold = create.compact_threshold.filter(|_| create.generate && !prepared.compacts)?;
    if prepared.log.len() < threshold as usize {
        return None;
    }
    let entries = prepared.history.entries();
    let items: Vec<InputItem> =
        entries.iter().map(|entry| InputItem::parse(&entry.json, "input")).collect::<Result<_, _>>().ok()?;
    let latest = latest_from(&items);
    // What was summed up already, with little since, does not become shorter.
    let n_bytes = |is_counted: fn(&InputItem) -> bool| -> usize {
        items[..latest].iter().filter(|item| is_counted(item)).map(|item| item.json.len()).sum()
    };
    let (said, summed_up) = (n_bytes(is_said), n_bytes(|item| is_summary(&item.kind)));
    if said == 0 || said < summed_up / 2 {
        return None;
    }
    let json = |item: &InputItem| RawValue::from_string(item.json.to_string()).ok();
    let kept = Kept {
        instructions: items[..latest].iter().filter(|item| item.is_instruction()).filter_map(json).collect(),
        latest: items[latest..].iter().filter(|item| !is_summary(&item.kind)).filter_map(json).collect(),
    };
    let mut summary = create.clone();
    let n_own = summary.input.len();
    summary.input.truncate(n_own - n_own.min(items.len() - latest));
    summarizing(&mut summary);
    summary.aside = true;
    Some(Due { summary, kept })
}

impl Due {
    /// The summary, as an item that stands for everything that was said.
    ///
    /// # Errors
    /// As for a turn of the same input; also when the model has nothing to say.
    pub(crate) async fn sum_up(
        self,
        gateway: &Gateway,
        origin: Origin,
        stop: &Stop,
    ) -> Result<String, ApiError> {
        #[derive(Deserialize)]
        struct Item {
            encrypted_content: Option<String>,
        }
        let tenant = origin.tenant.clone();
        let origin = Origin { response_id: new_id("resp"), ..origin };
        let ended = Box::pin(run_turn(gateway, self.summary, origin, EventSink::Discard, stop)).await?;
        let end = parsed(&ended.response)?;
        let items = end.output.iter().filter_map(|item| serde_json::from_str::<Item>(item.get()).ok());
        let sealed = items.filter_map(|item| item.encrypted_content).next_back();
        let summary = sealed.and_then(|sealed| Summary::open(gateway, &sealed, &tenant));
        let Some(Summary { text, .. }) = summary else { return Err(no_summary()) };
        Ok(Summary { text, kept: Some(self.kept) }.sealed(gateway, &tenant))
    }
}

/// The model ended its turn before it had written anything.
pub(crate) fn no_summary() -> ApiError {
    ApiError::internal("the model wrote no summary of the conversation: try again")
}

fn parsed(response: &str) -> Result<Final<'_>, ApiError> {
    serde_json::from_str(response)
        .map_err(|error| ApiError::internal(format!("the summary could not be read: {error}")))
}

/// Where the end of a conversation begins that no summary can stand for: what the user said last, or else the calls whose
/// results have just come.
fn latest_from(items: &[InputItem]) -> usize {
    use model::chat_template::Role;
    let trailing = |is_part: fn(&InputKind) -> bool| {
        items.iter().rposition(|item| !is_part(&item.kind)).map_or(0, |idx| idx + 1)
    };
    let results =
        trailing(|kind| matches!(kind, InputKind::Result { .. } | InputKind::Silent | InputKind::Tools(_)));
    let answered: Vec<&str> = items[results..]
        .iter()
        .filter_map(
            |item| if let InputKind::Result { call_id, .. } = &item.kind { Some(&**call_id) } else { None },
        )
        .collect();
    if answered.is_empty() {
        let said = trailing(|kind| match kind {
            InputKind::Message(message) => message.role != Role::Assistant,
            InputKind::Silent | InputKind::Tools(_) => true,
            _ => false,
        });
        return with_calls(items, said);
    }
    let calls = |item: &InputItem| matches!(&item.kind, InputKind::Call { call_id, .. } if answered.contains(&&**call_id));
    with_calls(items, items.iter().position(calls).unwrap_or(results).min(results))
}

/// The place before the calls right before `from`, with the thoughts that led to them: their results may still come.
fn with_calls(items: &[InputItem], from: usize) -> usize {
    let goes_along = |item: &InputItem| {
        matches!(item.kind, InputKind::Call { .. } | InputKind::Reasoning { .. } | InputKind::Silent)
    };
    let start = items[..from].iter().rposition(|item| !goes_along(item)).map_or(0, |idx| idx + 1);
    let has_calls = items[start..from].iter().any(|item| matches!(item.kind, InputKind::Call { .. }));
    if has_calls { start } else { from }
}

/// Whether a summary has to stand for it.
fn is_said(item: &InputItem) -> bool {
    let says = matches!(item.kind, InputKind::Message(_) | InputKind::Call { .. } | InputKind::Result { .. });
    says && !item.is_instruction()
}

fn is_summary(kind: &InputKind) -> bool {
    matches!(kind, InputKind::Compaction { .. } | InputKind::CompactionTrigger)
}

/// Makes a request one for a summary. What is too long for the model is summed up without its beginning.
fn summarizing(create: &mut Create) {
    create.input.push(InputItem::compaction_trigger());
    create.generate = true;
    create.store = false;
    create.background = false;
    create.truncates = true;
    create.temperature = Some(0.0);
    create.compact_threshold = None;
    create.text = Default::default();
}

fn user_messages(
    gateway: &Gateway,
    create: &Create,
    origin: &Origin,
) -> Result<Vec<Box<RawValue>>, ApiError> {
    #[derive(Deserialize)]
    struct Role {
        role: Option<String>,
    }
    let is_user = |entry: &&Entry| {
        serde_json::from_str::<Role>(&entry.json).is_ok_and(|item| item.role.as_deref() == Some("user"))
    };
    let entries = prepare::all_entries(gateway, create, origin)?;
    Ok(entries.iter().filter(is_user).map(|entry| with_id(&entry.id, &entry.json)).collect())
}

//! Compaction: the model sums a conversation up, the client keeps the sealed summary and sends it instead of the
//! conversation.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

use crate::emit::{EventSink, new_id, unix_now};
use crate::error::ApiError;
use crate::history::Entry;
use crate::prepare;
use crate::state::Gateway;
use crate::turn::{Origin, run_turn};
use crate::wire::{Create, InputItem, InputKind, Setting, with_id};

/// What the model is asked for.
pub(crate) const PROMPT: &str = "Summarize the conversation above for somebody who has to continue it without seeing it. \
    Name the task, what was found out and decided, what was changed, and what is still to be done. Keep names, paths, \
    numbers and code exactly. Write plain text.";
/// In front of a summary where it stands for a conversation.
pub(crate) const PREFACE: &str = "Summary of the conversation so far:\n";
/// A summary that needs more is none.
pub(crate) const MAX_SUMMARY_TOKENS: usize = 1024;

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
    let mut output = user_messages(gateway, &create, &origin)?;
    summarizing(&mut create);
    let never = CancellationToken::new();
    let ended = run_turn(gateway, create, origin, EventSink::Discard, &never).await?;
    let end: Final<'_> = serde_json::from_str(&ended.response)
        .map_err(|error| ApiError::internal(format!("the summary could not be read: {error}")))?;
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

/// The sealed summary of what `create` would be answered from, if its prompt has at least as many tokens as it allows.
///
/// # Errors
/// As for a turn of the same input.
pub(crate) async fn before_turn(
    gateway: &Gateway,
    create: &Create,
    origin: &Origin,
) -> Result<Option<String>, ApiError> {
    let Some(threshold) = create.compact_threshold else { return Ok(None) };
    prepare::recall(gateway, create, origin).await?;
    if prepare::count_tokens(gateway, create, origin)? < threshold as usize {
        return Ok(None);
    }
    let mut summary = create.clone();
    summarizing(&mut summary);
    let origin = Origin { response_id: new_id("resp"), ..origin.clone() };
    let never = CancellationToken::new();
    let ended = Box::pin(run_turn(gateway, summary, origin, EventSink::Discard, &never)).await?;
    #[derive(Deserialize)]
    struct Item {
        encrypted_content: Option<String>,
    }
    let end: Final<'_> = serde_json::from_str(&ended.response)
        .map_err(|error| ApiError::internal(format!("the summary could not be read: {error}")))?;
    let items = end.output.iter().filter_map(|item| serde_json::from_str::<Item>(item.get()).ok());
    Ok(items.filter_map(|item| item.encrypted_content).next_back())
}

/// Makes a request one for a summary.
fn summarizing(create: &mut Create) {
    create.input.push(InputItem { id: None, json: "{}".into(), kind: InputKind::CompactionTrigger });
    create.generate = true;
    create.store = false;
    create.conversation = None;
    create.compact_threshold = None;
    create.text = Default::default();
    if matches!(create.instructions, Setting::Absent) && create.previous_response_id.is_none() {
        create.instructions = Setting::Null;
    }
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

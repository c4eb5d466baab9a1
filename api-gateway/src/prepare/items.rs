//! The items that a request is answered from: references are replaced by what they stand for, summaries are opened, and
//! what a summary stands for is left out.

use std::sync::Arc;

use serde_json::value::RawValue;

use crate::compact::{Kept, Summary};
use crate::conversations::{Continued, ListedItem};
use crate::emit::new_id;
use crate::error::ApiError;
use crate::history::Entry;
use crate::state::Gateway;
use crate::store::Stored;
use crate::thought::Thought;
use crate::turn::Origin;
use crate::wire::{Create, InputItem, InputKind, ask_for_summary};

/// Items of a request.
#[derive(Debug)]
pub(super) struct Items {
    /// Behind what the parent holds.
    pub(super) new: Vec<InputItem>,
    /// The request's own, as its conversation keeps them.
    pub(super) own: Vec<ListedItem>,
    /// Of its conversation, before it.
    pub(super) version: u64,
}

/// The items of a request that `parent` does not hold. A conversation has a parent of its own; one that ended in a summary
/// is none.
///
/// # Errors
/// When an item cannot be found, or a summary was not made here.
pub(super) fn items(
    gateway: &Gateway,
    create: &Create,
    origin: &Origin,
    parent: &mut Option<Arc<Stored>>,
) -> Result<Items, ApiError> {
    let mut own: Vec<InputItem> = create
        .input
        .iter()
        .enumerate()
        .map(|(idx, item)| found(gateway, item, &origin.tenant, &format!("input[{idx}]")))
        .collect::<Result<_, _>>()?;
    let mut listed = Vec::new();
    if create.conversation.is_some() {
        for item in &mut own {
            let entry = Entry::of_input(item, new_id);
            item.id = Some(entry.id.clone());
            listed.push(entry.into());
        }
    }
    let mut all: Vec<(InputItem, String)> = Vec::with_capacity(own.len());
    let mut version = 0;
    if let Some(summary) = &create.summary {
        all.push((summary.clone(), "input".to_owned()));
    } else {
        let mut newer = Vec::new();
        if let Some(id) = &create.conversation {
            let continued = continued(gateway, id, origin)?;
            version = continued.version;
            newer = listed_items(continued.newer, continued.from)?;
            *parent = continued.latest;
        }
        if let Some(ended) = parent.take_if(|parent| parent.ends_in_summary()) {
            all.extend(after_summary(&ended)?);
        }
        all.extend(newer);
        all.extend(own.into_iter().enumerate().map(|(idx, item)| (item, format!("input[{idx}]"))));
    }
    let new = opened(gateway, origin, all, parent)?;
    Ok(Items { new, own: listed, version })
}

/// The item, or the stored one that it names.
///
/// # Errors
/// When no item in memory has that id.
pub(crate) fn found(
    gateway: &Gateway,
    item: &InputItem,
    tenant: &Arc<str>,
    param: &str,
) -> Result<InputItem, ApiError> {
    let InputKind::Reference(id) = &item.kind else { return Ok(item.clone()) };
    let json = gateway.store().item(tenant, id).ok_or_else(|| {
        let message = format!("no stored item has the id `{id}`: send the item itself");
        ApiError::invalid("item_not_found", message).at(format!("{param}.id"))
    })?;
    InputItem::parse(&json, param)
}

fn continued(gateway: &Gateway, id: &str, origin: &Origin) -> Result<Continued, ApiError> {
    let conversation = gateway.conversations().get(id, &origin.tenant);
    Ok(conversation.map_err(|error| error.at("conversation"))?.continued())
}

/// Items of a conversation, the first of which is its `from`-th.
fn listed_items(items: Vec<ListedItem>, from: usize) -> Result<Vec<(InputItem, String)>, ApiError> {
    let parse = |(idx, item): (usize, ListedItem)| {
        let param = format!("conversation.items[{}]", from + idx);
        let mut parsed = InputItem::parse(&item.json, &param)?;
        parsed.id = Some(item.id);
        Ok((parsed, param))
    };
    items.into_iter().enumerate().map(parse).collect()
}

/// What stands for a response that has ended in a summary: that, and the instructions among the items before it.
fn after_summary(ended: &Stored) -> Result<Vec<(InputItem, String)>, ApiError> {
    let entries = ended.history.entries();
    let last = entries.len().saturating_sub(1);
    let mut items = Vec::new();
    for (idx, entry) in entries.into_iter().enumerate() {
        let item = InputItem::parse(&entry.json, "previous_response_id")?;
        if idx == last || item.is_instruction() {
            items.push((item, "previous_response_id".to_owned()));
        }
    }
    Ok(items)
}

/// The items with their summaries opened. What stands before one that stands for everything is dropped, the parent too.
fn opened(
    gateway: &Gateway,
    origin: &Origin,
    items: Vec<(InputItem, String)>,
    parent: &mut Option<Arc<Stored>>,
) -> Result<Vec<InputItem>, ApiError> {
    let mut new = Vec::with_capacity(items.len());
    for (mut item, param) in items {
        if let InputKind::Reasoning { sealed: Some(sealed), text } = &mut item.kind
            && let Some(thought) = Thought::open(gateway.seal(), sealed, &origin.tenant)
        {
            *text = thought.text;
        }
        let InputKind::Compaction { sealed, summary } = &mut item.kind else {
            new.push(item);
            continue;
        };
        let open = Summary::open(gateway, sealed, &origin.tenant).ok_or_else(|| {
            let message = "this summary was not made here, or was changed: send the conversation instead";
            ApiError::invalid("invalid_encrypted_content", message).at(format!("{param}.encrypted_content"))
        })?;
        *summary = open.text;
        // One that was asked for with an item stands for what stands before that item.
        let was_asked_for = ask_for_summary(&new);
        let Some(Kept { instructions, latest }) = open.kept else {
            if was_asked_for {
                *parent = None;
                new.retain(InputItem::is_instruction);
            }
            new.push(item);
            continue;
        };
        *parent = None;
        let parsed = |raw: &RawValue| InputItem::parse(raw.get(), &param);
        // The client may have other instructions by now.
        new.retain(InputItem::is_instruction);
        if new.is_empty() {
            new = instructions.iter().map(|raw| parsed(raw)).collect::<Result<_, _>>()?;
        }
        new.push(item);
        new.extend(latest.iter().map(|raw| parsed(raw)).collect::<Result<Vec<_>, _>>()?);
    }
    Ok(new)
}

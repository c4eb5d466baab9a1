//! What a turn builds on: its parent, by name or by what was said, its instructions and its tools.

use std::sync::Arc;

use model::chat_template::Reply;

use super::items::{Items, items};
use super::render::{appendable, build};
use crate::Config;
use crate::cache_break::{self, CacheBreak};
use crate::constraint::is_slow;
use crate::conversation::TokenLog;
use crate::conversations::ListedItem;
use crate::emit::new_id;
use crate::error::ApiError;
use crate::history::{ContentHash, Entry, History};
use crate::metrics as names;
use crate::state::Gateway;
use crate::store::Stored;
use crate::turn::Origin;
use crate::wire::{Create, InputItem, InputKind, Setting, ToolSource, Tools, ask_for_summary};

/// What a turn continues and takes over, before anything is rendered.
#[derive(Debug)]
pub(crate) struct Basis {
    pub(super) parent: Option<Arc<Stored>>,
    pub(super) instructions: Option<Arc<str>>,
    pub(super) tools: Arc<Tools>,
    /// The newest response of what seems to be the same conversation, when this turn does not continue it.
    likely: Option<Arc<Stored>>,
    /// The input behind what the parent holds already.
    pub(super) new: Vec<InputItem>,
    pub(super) entries: Vec<Entry>,
    /// The request's own items, as its conversation keeps them.
    pub(super) own: Vec<ListedItem>,
    /// Of its conversation, before it.
    pub(super) version: u64,
}

/// Brings what the request names into memory, where [`find_basis`] looks for it.
///
/// # Errors
/// When the conversation is unknown, or the disk fails.
pub(crate) async fn recall(gateway: &Gateway, create: &Create, origin: &Origin) -> Result<(), ApiError> {
    if let Some(id) = &create.conversation {
        let found = gateway.conversations().recall(id, &origin.tenant).await;
        found.map_err(|error| error.at("conversation"))?;
    }
    if !gateway.store().is_durable() {
        return Ok(());
    }
    if let Some(id) = &create.previous_response_id
        && origin.latest.as_ref().is_none_or(|latest| latest.id != *id)
    {
        gateway.store().recall(id, &origin.tenant).await?;
    }
    for item in &create.input {
        if let InputKind::Reference(id) = &item.kind {
            gateway.store().recall_item(&origin.tenant, id).await?;
        }
    }
    Ok(())
}

/// Checks the request against the model and finds what it continues: the response it names, or else the one after which
/// exactly the beginning of its input had been said.
///
/// # Errors
/// When the model or the parent is unknown, or the input cannot fit the context.
pub(crate) fn find_basis(gateway: &Gateway, create: &Create, origin: &Origin) -> Result<Basis, ApiError> {
    check_model(gateway, create)?;
    let mut parent = if create.summary.is_some() { None } else { find_parent(gateway, create, origin)? };
    let Items { new, own, version } = items(gateway, create, origin, &mut parent)?;
    check_size(gateway, create, &new)?;
    let says = |item: &InputItem| {
        !item.is_instruction() && !matches!(item.kind, InputKind::CompactionTrigger | InputKind::Silent)
    };
    if ask_for_summary(&new) && parent.is_none() && !new.iter().any(says) {
        let message = "there is nothing to be summed up: send what was said as input";
        return Err(ApiError::invalid("missing_required_parameter", message).at("input"));
    }
    let instructions = given(&create.instructions, parent.as_deref().and_then(|p| p.instructions.as_ref()));
    let tools = offered(gateway.config(), create, parent.as_deref(), &new)?;
    let entries: Vec<Entry> = new.iter().map(|item| Entry::of_input(item, new_id)).collect();
    let mut basis = Basis { parent, instructions, tools, likely: None, new, entries, own, version };
    if basis.parent.is_none() {
        basis.find_by_content(gateway, origin);
    }
    if basis.parent.is_none()
        && let Some(key) = &create.prompt_cache_key
    {
        basis.likely = gateway.store().latest_of(&origin.tenant, key);
    }
    basis.check_results(create.input.len())?;
    Ok(basis)
}

impl Basis {
    /// True when preparing the turn takes so long that other connections would feel it.
    pub(crate) fn is_slow(&self, gateway: &Gateway, create: &Create) -> bool {
        /// Inputs up to this size take less than a millisecond to tokenize.
        const LONG_INPUT_BYTES: usize = 32 << 10;
        self.text_bytes() > LONG_INPUT_BYTES
            || is_slow(create, &self.tools)
            || self.rerenders_much(gateway)
            || self.may_be_shortened(create)
    }

    /// True when the conversation may be summed up first, which takes all of it apart.
    fn may_be_shortened(&self, create: &Create) -> bool {
        let n_tokens = self.parent.as_ref().map_or(0, |parent| parent.log.len());
        create.compact_threshold.is_some_and(|most| n_tokens >= most as usize / 2)
    }

    /// True when the turn renders a long conversation anew.
    fn rerenders_much(&self, gateway: &Gateway) -> bool {
        const MUCH: usize = 4096;
        self.parent
            .as_deref()
            .is_some_and(|parent| parent.log.len() > MUCH && !self.appends_to(gateway, parent))
    }

    /// Bytes of text that may have to be tokenized.
    pub(super) fn text_bytes(&self) -> usize {
        self.new.iter().map(InputItem::text_bytes).sum::<usize>()
            + if self.parent.is_none() { self.tools.raw.len() } else { 0 }
    }

    pub(super) fn appends_to(&self, gateway: &Gateway, parent: &Stored) -> bool {
        let same_tools = Arc::ptr_eq(&self.tools, &parent.tools);
        self.instructions == parent.instructions && same_tools && appendable(gateway, &self.new)
    }

    /// Looks on disk for the conversation that the input repeats, when memory does not know it.
    pub(crate) async fn recall_by_content(&mut self, gateway: &Gateway, origin: &Origin) {
        // A single item repeats no conversation.
        if self.parent.is_some() || self.entries.len() < 2 || !gateway.store().is_durable() {
            return;
        }
        let start = ContentHash::start(&origin.tenant, self.instructions.as_deref(), &self.tools);
        let mut contents = History::new(start).contents_with(&self.entries);
        contents.remove(0);
        contents.reverse();
        contents.dedup();
        if gateway.store().recall_after(contents, &origin.tenant).await {
            self.find_by_content(gateway, origin);
            self.likely = None;
        }
    }

    /// Looks for the conversation that the input repeats, longest first. O(items).
    fn find_by_content(&mut self, gateway: &Gateway, origin: &Origin) {
        let start = ContentHash::start(&origin.tenant, self.instructions.as_deref(), &self.tools);
        let contents = History::new(start).contents_with(&self.entries);
        // What asks for a summary says nothing, but is never something that was said.
        let asks = self.new.iter().position(|item| matches!(item.kind, InputKind::CompactionTrigger));
        let most = asks.unwrap_or(self.new.len());
        let found = contents[..=most].iter().enumerate().skip(1).rev().find_map(|(n_items, content)| {
            // What ends in a summary goes on with that, not with what was summed up.
            let found = gateway.store().after(content).filter(|found| !found.ends_in_summary());
            Some((n_items, found?))
        });
        let Some((n_items, parent)) = found else { return };
        metrics::counter!(names::CONTENT_MATCHES).increment(1);
        self.new.drain(..n_items);
        self.entries.drain(..n_items);
        self.tools = Arc::clone(&parent.tools);
        self.instructions.clone_from(&parent.instructions);
        self.parent = Some(parent);
    }

    /// What keeps the turn from building on its conversation, if anything does. Told to the log, too.
    pub(super) fn cache_break(&self, log: &TokenLog) -> Option<CacheBreak> {
        let changed = |parent: &&Stored| {
            parent.log.len() > 0
                && (parent.instructions != self.instructions || !Arc::ptr_eq(&parent.tools, &self.tools))
        };
        let found = match (self.parent.as_deref().filter(changed), &self.likely) {
            (Some(parent), _) => {
                let all: Vec<Entry> = parent
                    .history
                    .entries()
                    .into_iter()
                    .cloned()
                    .chain(self.entries.iter().cloned())
                    .collect();
                cache_break::find(parent, self.instructions.as_ref(), &self.tools, &all, log)
            }
            (None, Some(likely)) => {
                cache_break::find(likely, self.instructions.as_ref(), &self.tools, &self.entries, log)
            }
            (None, None) => None,
        }?;
        let CacheBreak { first_changed, kind, prefix_tokens_kept, tokens_lost } = &found;
        metrics::counter!(names::CACHE_BREAKS, "kind" => *kind).increment(1);
        tracing::info!(first_changed, kind, prefix_tokens_kept, tokens_lost, "the cached prefix is broken");
        Some(found)
    }

    /// Every result must answer a call of the conversation. The last `n_own` items are those of the request.
    fn check_results(&self, n_own: usize) -> Result<(), ApiError> {
        for (idx, item) in self.new.iter().enumerate() {
            let InputKind::Result { call_id, .. } = &item.kind else { continue };
            let own = self.new[..idx]
                .iter()
                .any(|item| matches!(&item.kind, InputKind::Call { call_id: own, .. } if own == call_id));
            if !own && !self.parent.as_ref().is_some_and(|parent| parent.history.has_call(call_id)) {
                let call_id: String = call_id.chars().take(80).collect();
                let unknown = format!("no tool call with the id `{call_id}` is in this conversation");
                let (message, param) = match (n_own + idx).checked_sub(self.new.len()) {
                    Some(idx) => (unknown, format!("input[{idx}].call_id")),
                    None => {
                        let item = &self.entries[idx].id;
                        (format!("{unknown}: remove its item `{item}`"), "conversation".to_owned())
                    }
                };
                return Err(ApiError::invalid("unknown_call_id", message).at(param));
            }
        }
        Ok(())
    }
}

/// All items that a request is to be answered from.
///
/// # Errors
/// As for [`find_basis`].
pub(crate) fn all_entries(
    gateway: &Gateway,
    create: &Create,
    origin: &Origin,
) -> Result<Vec<Entry>, ApiError> {
    let basis = find_basis(gateway, create, origin)?;
    let before = basis.parent.iter().flat_map(|parent| parent.history.entries().into_iter().cloned());
    Ok(before.chain(basis.entries).collect())
}

/// The length of the prompt of a request.
///
/// # Errors
/// As for a turn, except that it may be too long for the model.
pub(crate) fn count_tokens(gateway: &Gateway, create: &Create, origin: &Origin) -> Result<usize, ApiError> {
    let basis = find_basis(gateway, create, origin)?;
    Ok(build(gateway, &basis, Reply::Expected)?.log.len())
}

/// The tools of the turn: those of the request, and what items of the input add.
fn offered(
    config: &Config,
    create: &Create,
    parent: Option<&Stored>,
    new: &[InputItem],
) -> Result<Arc<Tools>, ApiError> {
    let before = parent.map(|parent| &parent.tools);
    let added: Vec<&str> = new
        .iter()
        .filter_map(|item| if let InputKind::Tools(raw) = &item.kind { Some(raw.as_str()) } else { None })
        .collect();
    let given = match &create.tools {
        Setting::Given(raw) => raw.as_str(),
        // Clients whose tools are items of the input send them once, with the first of them.
        Setting::Absent | Setting::Null => before.and_then(|tools| tools.added.as_deref()).unwrap_or("[]"),
    };
    let raw = merged(given, &added);
    if let Some(same) = before.filter(|same| *same.raw == *raw) {
        return Ok(Arc::clone(same));
    }
    if raw == "[]" {
        return Ok(Tools::none());
    }
    let source = if added.is_empty() { ToolSource::Request } else { ToolSource::Items };
    if !config.tools_canonical_order {
        return Tools::parse(&raw, source);
    }
    let (ordered, places) = Tools::by_name(given)?;
    let raw = merged(&ordered, &added);
    match before.filter(|same| *same.raw == *raw) {
        Some(same) => {
            metrics::counter!(names::REORDERS).increment(1);
            Ok(Arc::clone(same))
        }
        None => Tools::parse_from(&raw, source, &places),
    }
}

/// One JSON list of all tools. What is there already, as it is, is not added again.
fn merged(given: &str, added: &[&str]) -> String {
    if added.is_empty() {
        return given.to_owned();
    }
    let inner = |list: &str| {
        let list = list.trim();
        list.strip_prefix('[').and_then(|list| list.strip_suffix(']')).unwrap_or_default().trim().to_owned()
    };
    let mut all = inner(given);
    for list in added.iter().map(|list| inner(list)).filter(|list| !list.is_empty()) {
        if format!(",{all},").contains(&format!(",{list},")) {
            continue;
        }
        if !all.is_empty() {
            all.push(',');
        }
        all.push_str(&list);
    }
    format!("[{all}]")
}

fn check_model(gateway: &Gateway, create: &Create) -> Result<(), ApiError> {
    let name = &gateway.text().name;
    match create.model.as_deref() {
        Some(model) if model == name => Ok(()),
        Some(model) => {
            let message = format!("the model `{model}` is not served here; this gateway serves `{name}`");
            Err(ApiError::not_found("model_not_found", message).at("model"))
        }
        None => Err(ApiError::invalid("missing_required_parameter", "model is required").at("model")),
    }
}

/// Refuses what cannot fit before any of it is tokenized. Of a request that may be truncated, the last item has to.
fn check_size(gateway: &Gateway, create: &Create, new: &[InputItem]) -> Result<(), ApiError> {
    let n_bytes = if truncates(create, new) {
        new.last().map_or(0, InputItem::text_bytes)
    } else {
        let instructions = if let Setting::Given(text) = &create.instructions { text.len() } else { 0 };
        instructions + new.iter().map(InputItem::text_bytes).sum::<usize>()
    };
    if n_bytes > gateway.max_prompt_bytes() {
        let message = format!(
            "the input has {n_bytes} bytes of text, the model's context of {} tokens holds fewer: shorten the input",
            gateway.text().context_len
        );
        return Err(ApiError::invalid("context_length_exceeded", message).at("input"));
    }
    Ok(())
}

/// Whether the oldest items may be left out: when the client says so, and where a summary is asked for, which is wanted
/// most when there is no room.
pub(super) fn truncates(create: &Create, new: &[InputItem]) -> bool {
    create.truncates || ask_for_summary(new)
}

fn find_parent(gateway: &Gateway, create: &Create, origin: &Origin) -> Result<Option<Arc<Stored>>, ApiError> {
    let Some(id) = &create.previous_response_id else { return Ok(None) };
    let latest = origin.latest.as_ref().filter(|latest| latest.id == *id);
    match latest.cloned().or_else(|| gateway.store().get(id, &origin.tenant)) {
        Some(stored) => Ok(Some(stored)),
        None => {
            let id: String = id.chars().take(80).collect();
            let message =
                format!("no response with the id `{id}` can be continued here: send the whole input");
            Err(ApiError::invalid("previous_response_not_found", message).at("previous_response_id"))
        }
    }
}

/// The instructions of this turn: those that are given, not the parent's. Equal text is kept once.
fn given(setting: &Setting<String>, parent: Option<&Arc<str>>) -> Option<Arc<str>> {
    match setting {
        Setting::Given(text) => match parent {
            Some(same) if **same == **text => Some(Arc::clone(same)),
            _ => Some(text.as_str().into()),
        },
        Setting::Null | Setting::Absent => None,
    }
}

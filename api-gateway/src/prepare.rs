//! From a request to a prompt: find the parent, by name or by what was said; take over what is inherited; tokenize only
//! what is new.

use std::sync::Arc;

use model::calls::Call;
use model::chat_template::{Content, Message, Reply, Role};
use model::prompt::{self, Entry as LogEntry, LogEnd, TemplateClass};
use proto::v1;

use crate::compact;
use crate::constraint::{Constraint, constraint, is_slow};
use crate::conversation::{Cut, Item, TokenLog};
use crate::emit::new_id;
use crate::error::ApiError;
use crate::history::{ContentHash, Entry, History};
use crate::metrics as names;
use crate::state::Gateway;
use crate::store::{Base, Stored};
use crate::turn::Origin;
use crate::wire::{Create, InputItem, InputKind, Setting, ToolSource, Tools};

/// A turn ready to run.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) response_id: String,
    pub(crate) tenant: Arc<str>,
    pub(crate) conversation: String,
    /// The whole prompt.
    pub(crate) log: TokenLog,
    /// All items up to the answer.
    pub(crate) history: History,
    /// The last of them, which this turn has brought.
    pub(crate) n_own_items: usize,
    /// The answer is a summary of everything, to be sealed.
    pub(crate) compacts: bool,
    /// Where the workers may pick up: what the parent's turn has left in their caches.
    pub(crate) cut: Cut,
    pub(crate) n_tokenized: usize,
    /// What keeping this turn's response costs besides its output, in tokens.
    pub(crate) n_own_tokens: usize,
    pub(crate) max_output_tokens: usize,
    pub(crate) sampling: v1::Sampling,
    pub(crate) constraint: Option<Constraint>,
    pub(crate) instructions: Option<Arc<str>>,
    pub(crate) tools: Arc<Tools>,
    pub(crate) last_decode: String,
    /// The durable response that the log grew out of.
    pub(crate) base: Option<Base>,
}

/// What a turn continues and takes over, before anything is rendered.
#[derive(Debug)]
pub(crate) struct Basis {
    parent: Option<Arc<Stored>>,
    instructions: Option<Arc<str>>,
    tools: Arc<Tools>,
    /// The input behind what the parent holds already.
    new: Vec<InputItem>,
    entries: Vec<Entry>,
}

/// Brings what the request names into memory, where [`find_basis`] looks for it.
///
/// # Errors
/// When the disk fails.
pub(crate) async fn recall(gateway: &Gateway, create: &Create, origin: &Origin) -> Result<(), ApiError> {
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
    if !create.truncates {
        check_size(gateway, create)?;
    }
    let parent = if create.starts_anew { None } else { find_parent(gateway, create, origin)? };
    let instructions =
        given(&create.instructions, parent.as_deref().and_then(|p| p.instructions.as_ref()));
    let new = resolved(gateway, create, origin)?;
    let tools = offered(create, parent.as_deref(), &new)?;
    let entries: Vec<Entry> = new.iter().map(|item| Entry::of_input(item, new_id)).collect();
    let mut basis = Basis { parent, instructions, tools, new, entries };
    if basis.parent.is_none() {
        basis.find_by_content(gateway, origin);
    }
    basis.check_results()?;
    Ok(basis)
}

impl Basis {
    /// True when preparing the turn takes so long that other connections would feel it.
    pub(crate) fn is_slow(&self, gateway: &Gateway, create: &Create) -> bool {
        /// Inputs up to this size take less than a millisecond to tokenize.
        const LONG_INPUT_BYTES: usize = 32 << 10;
        self.text_bytes() > LONG_INPUT_BYTES || is_slow(create, &self.tools) || self.rerenders_much(gateway)
    }

    /// True when the turn renders a long conversation anew.
    fn rerenders_much(&self, gateway: &Gateway) -> bool {
        const MUCH: usize = 4096;
        self.parent.as_deref().is_some_and(|parent| parent.log.len() > MUCH && !self.appends_to(gateway, parent))
    }

    /// Bytes of text that may have to be tokenized.
    fn text_bytes(&self) -> usize {
        self.new.iter().map(InputItem::text_bytes).sum::<usize>()
            + if self.parent.is_none() { self.tools.raw.len() } else { 0 }
    }

    fn appends_to(&self, gateway: &Gateway, parent: &Stored) -> bool {
        let same_tools = Arc::ptr_eq(&self.tools, &parent.tools);
        self.instructions == parent.instructions && same_tools && appendable(gateway, &self.new)
    }

    /// Looks on disk for the conversation that the input repeats, when memory does not know it.
    ///
    /// # Errors
    /// When the disk fails.
    pub(crate) async fn recall_by_content(&mut self, gateway: &Gateway, origin: &Origin) -> Result<(), ApiError> {
        // A single item repeats no conversation.
        if self.parent.is_some() || self.entries.len() < 2 || !gateway.store().is_durable() {
            return Ok(());
        }
        let start = ContentHash::start(&origin.tenant, self.instructions.as_deref(), &self.tools);
        let mut contents = History::new(start).contents_with(&self.entries);
        contents.remove(0);
        contents.reverse();
        contents.dedup();
        if gateway.store().recall_after(contents, &origin.tenant).await? {
            self.find_by_content(gateway, origin);
        }
        Ok(())
    }

    /// Looks for the conversation that the input repeats, longest first. O(items).
    fn find_by_content(&mut self, gateway: &Gateway, origin: &Origin) {
        let start = ContentHash::start(&origin.tenant, self.instructions.as_deref(), &self.tools);
        let contents = History::new(start).contents_with(&self.entries);
        let found = contents
            .iter()
            .enumerate()
            .skip(1)
            .rev()
            .find_map(|(n_items, content)| Some((n_items, gateway.store().after(content)?)));
        let Some((n_items, parent)) = found else { return };
        metrics::counter!(names::CONTENT_MATCHES).increment(1);
        self.new.drain(..n_items);
        self.entries.drain(..n_items);
        self.tools = Arc::clone(&parent.tools);
        self.instructions.clone_from(&parent.instructions);
        self.parent = Some(parent);
    }

    /// Every result must answer a call of the conversation.
    fn check_results(&self) -> Result<(), ApiError> {
        for (idx, item) in self.new.iter().enumerate() {
            let InputKind::Result { call_id, .. } = &item.kind else { continue };
            let own = self.new[..idx].iter().any(|item| {
                matches!(&item.kind, InputKind::Call { call_id: own, .. } if own == call_id)
            });
            if !own && !self.parent.as_ref().is_some_and(|parent| parent.history.has_call(call_id)) {
                let message = format!("no tool call with the id `{call_id}` is in this conversation");
                return Err(ApiError::invalid("unknown_call_id", message).at(format!("input[{idx}].call_id")));
            }
        }
        Ok(())
    }
}

/// The input with a conversation's items in front, references replaced by what they stand for, and summaries opened.
fn resolved(gateway: &Gateway, create: &Create, origin: &Origin) -> Result<Vec<InputItem>, ApiError> {
    let mut items = Vec::with_capacity(create.input.len());
    if let Some(id) = &create.conversation {
        for (idx, item) in gateway.conversations().get(id, &origin.tenant)?.items().into_iter().enumerate() {
            let mut parsed = InputItem::parse(&item.json, &format!("conversation.items[{idx}]"))?;
            parsed.id = Some(item.id);
            items.push(opened(gateway, parsed, origin, "conversation")?);
        }
    }
    for (idx, item) in create.input.iter().enumerate() {
        let param = format!("input[{idx}]");
        let item = match &item.kind {
            InputKind::Reference(id) => {
                let json = gateway.store().item(&origin.tenant, id).ok_or_else(|| {
                    let message = format!("no stored item has the id `{id}`: send the item itself");
                    ApiError::invalid("item_not_found", message).at(format!("{param}.id"))
                })?;
                InputItem::parse(&json, &param)?
            }
            _ => item.clone(),
        };
        items.push(opened(gateway, item, origin, &param)?);
    }
    Ok(items)
}

/// The item, its summary opened if it has one.
fn opened(gateway: &Gateway, mut item: InputItem, origin: &Origin, param: &str) -> Result<InputItem, ApiError> {
    if let InputKind::Compaction { sealed, summary } = &mut item.kind {
        *summary = gateway.seal().open(sealed, &origin.tenant).ok_or_else(|| {
            let message = "this summary was not made here, or was changed: send the conversation instead";
            ApiError::invalid("invalid_encrypted_content", message).at(format!("{param}.encrypted_content"))
        })?;
    }
    Ok(item)
}

/// All items that a request is to be answered from.
///
/// # Errors
/// As for [`find_basis`].
pub(crate) fn all_entries(gateway: &Gateway, create: &Create, origin: &Origin) -> Result<Vec<Entry>, ApiError> {
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
    create: &Create,
    parent: Option<&Stored>,
    new: &[InputItem],
) -> Result<Arc<Tools>, ApiError> {
    let added: Vec<&str> = new
        .iter()
        .filter_map(|item| if let InputKind::Tools(raw) = &item.kind { Some(raw.as_str()) } else { None })
        .collect();
    let before = parent.map(|parent| &parent.tools);
    let given = match &create.tools {
        Setting::Given(raw) => raw.as_str(),
        // Clients whose tools are items of the input send them once, with the first of them.
        Setting::Absent | Setting::Null => before.and_then(|tools| tools.added.as_deref()).unwrap_or("[]"),
    };
    let raw = merged(given, &added);
    match before {
        Some(same) if *same.raw == *raw => Ok(Arc::clone(same)),
        _ if raw == "[]" => Ok(Tools::none()),
        _ => Tools::parse(&raw, if added.is_empty() { ToolSource::Request } else { ToolSource::Items }),
    }
}

/// One JSON list of all tools.
fn merged(given: &str, added: &[&str]) -> String {
    let inner = |list: &str| {
        let list = list.trim();
        list.strip_prefix('[').and_then(|list| list.strip_suffix(']')).unwrap_or_default().trim().to_owned()
    };
    if added.is_empty() {
        return given.to_owned();
    }
    let lists: Vec<String> =
        std::iter::once(given).chain(added.iter().copied()).map(inner).filter(|list| !list.is_empty()).collect();
    format!("[{}]", lists.join(","))
}

/// Builds the turn's prompt.
///
/// # Errors
/// When the template cannot render it or it does not fit the context.
pub(crate) fn prepare(
    gateway: &Gateway,
    create: &Create,
    origin: &Origin,
    basis: Basis,
) -> Result<Prepared, ApiError> {
    let reply = if create.generate { Reply::Expected } else { Reply::None };
    let compacts = matches!(basis.new.last(), Some(InputItem { kind: InputKind::CompactionTrigger, .. }));
    let is_free = compacts || !create.generate;
    let constraint = if is_free { None } else { constraint(gateway, create, &basis.tools)? };
    let built = build(gateway, &basis, reply)?;
    let most = most_prompt_tokens(gateway, create);
    let built = if create.truncates && built.log.len() > most {
        truncated(gateway, &basis, reply, most).map_err(refused)?
    } else {
        built
    };
    metrics::counter!(names::TOKENIZED_TOKENS).increment(built.n_tokenized as u64);
    let mut max_output_tokens = output_limit(gateway, create, built.log.len())?;
    if compacts {
        max_output_tokens = max_output_tokens.min(compact::MAX_SUMMARY_TOKENS);
    }
    let Basis { parent, instructions, tools, entries, .. } = basis;
    let parent = parent.as_deref();
    let response_id = origin.response_id.clone();
    let start = || ContentHash::start(&origin.tenant, instructions.as_deref(), &tools);
    let mut history = match parent {
        Some(parent) if parent.instructions == instructions && Arc::ptr_eq(&parent.tools, &tools) => {
            parent.history.clone()
        }
        Some(parent) => parent.history.restarted(start()),
        None => History::new(start()),
    };
    let n_own_items = entries.len();
    history.append(entries);
    Ok(Prepared {
        conversation: parent.map_or_else(|| response_id.clone(), |parent| parent.conversation.clone()),
        last_decode: parent.map(|parent| parent.decode_worker.clone()).unwrap_or_default(),
        base: parent.and_then(|parent| parent.base_of(&built.log)),
        response_id,
        tenant: Arc::clone(&origin.tenant),
        n_own_tokens: built.n_tokenized + own_text_tokens(parent, instructions.as_ref(), &tools),
        log: built.log,
        history,
        n_own_items,
        compacts,
        cut: built.cut,
        n_tokenized: built.n_tokenized,
        max_output_tokens,
        sampling: sampling(gateway, create),
        constraint,
        instructions,
        tools,
    })
}

/// Texts that the parent does not share, at about four bytes a token.
fn own_text_tokens(parent: Option<&Stored>, instructions: Option<&Arc<str>>, tools: &Arc<Tools>) -> usize {
    let same_text = |text: &Arc<str>| {
        parent.and_then(|parent| parent.instructions.as_ref()).is_some_and(|other| Arc::ptr_eq(other, text))
    };
    let text = instructions.filter(|text| !same_text(text)).map_or(0, |text| text.len());
    let same_tools = parent.is_some_and(|parent| Arc::ptr_eq(&parent.tools, tools));
    (text + if same_tools { 0 } else { tools.raw.len() }) / 4
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

/// Refuses what cannot fit before any of it is tokenized.
fn check_size(gateway: &Gateway, create: &Create) -> Result<(), ApiError> {
    let n_bytes = create.text_bytes();
    if n_bytes > gateway.max_prompt_bytes() {
        let message = format!(
            "the input has {n_bytes} bytes of text, the model's context of {} tokens holds fewer: shorten the input",
            gateway.text().context_len
        );
        return Err(ApiError::invalid("context_length_exceeded", message).at("input"));
    }
    Ok(())
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

struct Built {
    log: TokenLog,
    cut: Cut,
    n_tokenized: usize,
}

fn build(gateway: &Gateway, basis: &Basis, reply: Reply) -> Result<Built, ApiError> {
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

/// The messages that items stand for. What an assistant said and called in a row is one message, as it was one turn.
fn messages(gateway: &Gateway, items: &[InputItem]) -> Vec<Message> {
    let format = gateway.text().prompts.format();
    let mut messages = Vec::with_capacity(items.len());
    let mut text: Option<Content> = None;
    let mut calls: Vec<Call> = Vec::new();
    let flush = |text: &mut Option<Content>, calls: &mut Vec<Call>, messages: &mut Vec<Message>| {
        let said = text.take();
        if calls.is_empty() {
            messages.extend(said.map(|content| Message { role: Role::Assistant, content }));
        } else {
            let said = said.unwrap_or_default();
            messages.push(format.assistant(said.text(), &std::mem::take(calls)));
        }
    };
    for item in items {
        match &item.kind {
            InputKind::Message(message) if message.role == Role::Assistant => {
                flush(&mut text, &mut calls, &mut messages);
                text = Some(message.content.clone());
            }
            InputKind::Call { call, .. } => calls.push(call.clone()),
            InputKind::Message(message) => {
                flush(&mut text, &mut calls, &mut messages);
                messages.push(message.clone());
            }
            InputKind::Result { text: result, .. } => {
                flush(&mut text, &mut calls, &mut messages);
                messages.push(format.result(result));
            }
            InputKind::Compaction { summary, .. } => {
                flush(&mut text, &mut calls, &mut messages);
                let content = format!("{}{summary}", compact::PREFACE).into();
                messages.push(Message { role: Role::User, content });
            }
            InputKind::CompactionTrigger => {
                flush(&mut text, &mut calls, &mut messages);
                messages.push(Message { role: Role::User, content: compact::PROMPT.into() });
            }
            InputKind::Tools(_)
            | InputKind::Reference(_)
            | InputKind::Silent => {}
        }
    }
    flush(&mut text, &mut calls, &mut messages);
    messages
}

/// True when the template lets these items be appended to what was rendered before.
fn appendable(gateway: &Gateway, new: &[InputItem]) -> bool {
    match gateway.text().prompts.class() {
        TemplateClass::AppendOnly => true,
        TemplateClass::AppendOnlyWithinToolLoop => {
            !new.iter().any(|item| matches!(item.kind, InputKind::Message(_)))
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

/// The longest prompt that leaves room for an answer.
fn most_prompt_tokens(gateway: &Gateway, create: &Create) -> usize {
    let context = gateway.text().context_len as usize;
    let answer = create.max_output_tokens.map_or(context / 4, |limit| (limit as usize).min(context / 2));
    context - answer.max(1)
}

/// The conversation without its oldest items, as many as it takes. What was said last stays, whatever its length.
fn truncated(gateway: &Gateway, basis: &Basis, reply: Reply, most: usize) -> Result<Built, prompt::Error> {
    let parent = basis.parent.as_deref();
    let mut items: Vec<Item> = parent.map_or_else(Vec::new, |parent| {
        parent.log.with_entries(|entries| entries.iter().copied().map(item).collect())
    });
    items.extend(messages(gateway, &basis.new).into_iter().map(Item::Message));
    let starts_turn = |item: &Item| matches!(item, Item::Message(message) if message.role == Role::User);
    loop {
        let n_dropped = items.len().div_ceil(4);
        // What is left begins with a user's message, so that no result stands without its call.
        let from = (n_dropped..items.len()).find(|&idx| starts_turn(&items[idx]));
        let is_last = from.is_none() || items.len() <= 1;
        items.drain(..from.unwrap_or(items.len().saturating_sub(1)));
        let built = rerender(gateway, basis, items.clone(), &[], reply)?;
        if built.log.len() <= most || is_last {
            return Ok(built);
        }
    }
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

/// How many tokens may be generated; an error when the prompt leaves room for none.
fn output_limit(gateway: &Gateway, create: &Create, prompt_tokens: usize) -> Result<usize, ApiError> {
    let context = gateway.text().context_len as usize;
    if !create.generate {
        return if prompt_tokens <= context { Ok(0) } else { Err(too_long(prompt_tokens, context)) };
    }
    let room = context.saturating_sub(prompt_tokens);
    if room == 0 {
        return Err(too_long(prompt_tokens, context));
    }
    Ok(create.max_output_tokens.map_or(room, |limit| room.min(limit as usize)))
}

fn too_long(prompt_tokens: usize, context: usize) -> ApiError {
    let message = format!(
        "the conversation has {prompt_tokens} tokens, the model's context holds {context} with the answer: shorten the input"
    );
    ApiError::invalid("context_length_exceeded", message).at("input")
}

fn sampling(gateway: &Gateway, create: &Create) -> v1::Sampling {
    let config = gateway.config();
    v1::Sampling {
        temperature: create.temperature.unwrap_or(config.temperature),
        top_p: create.top_p.unwrap_or(config.top_p),
        top_k: create.top_k.map_or(0, Into::into),
        seed: create.seed.unwrap_or_else(rand::random),
        logprobs: create.include.logprobs || create.top_logprobs.is_some_and(|n| n > 0),
        top_logprobs: create.top_logprobs.unwrap_or(0),
        ..v1::Sampling::default()
    }
}

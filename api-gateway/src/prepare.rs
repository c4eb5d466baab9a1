//! From a request to a prompt: find the parent, take over what is inherited, tokenize only what is new.

use std::sync::Arc;

use model::chat_template::{Message, Reply, Role};
use model::prompt::{self, Entry, LogEnd, TemplateClass};
use proto::v1;
use serde_json::value::RawValue;

use crate::conversation::{Cut, Item, TokenLog};
use crate::emit::no_tools;
use crate::error::ApiError;
use crate::metrics as names;
use crate::state::Gateway;
use crate::store::Stored;
use crate::turn::Origin;
use crate::wire::{Create, Setting, Transport};

/// A turn ready to run.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) response_id: String,
    pub(crate) conversation: String,
    /// The whole prompt.
    pub(crate) log: TokenLog,
    /// Where the workers may pick up: what the parent's turn has left in their caches.
    pub(crate) cut: Cut,
    pub(crate) n_tokenized: usize,
    /// What keeping this turn's response costs besides its output, in tokens.
    pub(crate) n_own_tokens: usize,
    pub(crate) max_output_tokens: usize,
    pub(crate) sampling: v1::Sampling,
    pub(crate) instructions: Option<Arc<str>>,
    pub(crate) tools: Arc<str>,
    pub(crate) tools_echo: Box<RawValue>,
    pub(crate) last_decode: String,
}

/// What a turn continues and takes over, before anything is rendered.
#[derive(Debug)]
pub(crate) struct Basis {
    parent: Option<Arc<Stored>>,
    instructions: Option<Arc<str>>,
    tools: Arc<str>,
}

/// Checks the request against the model and finds what it continues.
///
/// # Errors
/// When the model or the parent is unknown, or the input cannot fit the context.
pub(crate) fn find_basis(gateway: &Gateway, create: &Create, origin: &Origin) -> Result<Basis, ApiError> {
    check_model(gateway, create)?;
    check_size(gateway, create)?;
    let parent = find_parent(gateway, create, origin)?;
    let instructions =
        inherit(&create.instructions, parent.as_deref().and_then(|p| p.instructions.as_ref()), origin);
    let tools = inherit(&create.tools, parent.as_deref().map(|p| &p.tools), origin);
    Ok(Basis { parent, instructions, tools: tools.unwrap_or_else(|| "[]".into()) })
}

impl Basis {
    /// True when the turn renders a long conversation anew.
    pub(crate) fn rerenders_much(&self, gateway: &Gateway, create: &Create) -> bool {
        const MUCH: usize = 4096;
        self.parent.as_deref().is_some_and(|parent| {
            let appends = self.instructions == parent.instructions && appendable(gateway, &create.input);
            parent.log.len() > MUCH && !appends
        })
    }
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
    let Basis { parent, instructions, tools } = basis;
    let reply = if create.generate { Reply::Expected } else { Reply::None };
    let built = build(gateway, create, parent.as_deref(), instructions.as_deref(), reply)?;
    metrics::counter!(names::TOKENIZED_TOKENS).increment(built.n_tokenized as u64);
    let max_output_tokens = output_limit(gateway, create, built.log.len())?;
    let response_id = origin.response_id.clone();
    Ok(Prepared {
        conversation: parent
            .as_ref()
            .map_or_else(|| response_id.clone(), |parent| parent.conversation.clone()),
        last_decode: parent.as_ref().map(|parent| parent.decode_worker.clone()).unwrap_or_default(),
        response_id,
        n_own_tokens: built.n_tokenized + own_text_tokens(parent.as_deref(), instructions.as_ref(), &tools),
        log: built.log,
        cut: built.cut,
        n_tokenized: built.n_tokenized,
        max_output_tokens,
        sampling: sampling(gateway, create),
        instructions,
        tools,
        tools_echo: no_tools(),
    })
}

/// Texts that the parent does not share, at about four bytes a token.
fn own_text_tokens(parent: Option<&Stored>, instructions: Option<&Arc<str>>, tools: &Arc<str>) -> usize {
    let shared = |text: &Arc<str>| {
        let theirs = parent.map(|parent| [parent.instructions.as_ref(), Some(&parent.tools)]);
        theirs.into_iter().flatten().flatten().any(|other| Arc::ptr_eq(other, text))
    };
    instructions.into_iter().chain([tools]).filter(|text| !shared(text)).map(|text| text.len() / 4).sum()
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
    match latest.cloned().or_else(|| gateway.store().get(id)) {
        Some(stored) => Ok(Some(stored)),
        None => {
            let id: String = id.chars().take(80).collect();
            let message =
                format!("no response with the id `{id}` can be continued here: send the whole input");
            Err(ApiError::invalid("previous_response_not_found", message).at("previous_response_id"))
        }
    }
}

/// A setting's value for this turn: given, removed, or (on a socket) the parent's. Equal text is kept once.
fn inherit(setting: &Setting<String>, parent: Option<&Arc<str>>, origin: &Origin) -> Option<Arc<str>> {
    match setting {
        Setting::Given(text) => match parent {
            Some(same) if **same == **text => Some(Arc::clone(same)),
            _ => Some(text.as_str().into()),
        },
        Setting::Null => None,
        Setting::Absent if origin.transport == Transport::WebSocket => parent.cloned(),
        Setting::Absent => None,
    }
}

struct Built {
    log: TokenLog,
    cut: Cut,
    n_tokenized: usize,
}

fn build(
    gateway: &Gateway,
    create: &Create,
    parent: Option<&Stored>,
    instructions: Option<&str>,
    reply: Reply,
) -> Result<Built, ApiError> {
    let Some(parent) = parent else {
        return start(gateway, &create.input, instructions, reply);
    };
    let unchanged = parent.instructions.as_deref() == instructions;
    if unchanged && appendable(gateway, &create.input) {
        match extend(gateway, parent, &create.input, reply) {
            Err(prompt::Error::NotAppendable { .. }) => {}
            result => return result.map_err(refused),
        }
    }
    metrics::counter!(names::RERENDERS).increment(1);
    rerender(gateway, parent, &create.input, instructions, reply).map_err(refused)
}

/// True when the template lets these messages be appended to what was rendered before.
fn appendable(gateway: &Gateway, new: &[Message]) -> bool {
    match gateway.text().prompts.class() {
        TemplateClass::AppendOnly => true,
        TemplateClass::AppendOnlyWithinToolLoop => new.iter().all(|message| message.role == Role::Tool),
        TemplateClass::Rewrites => false,
    }
}

fn start(
    gateway: &Gateway,
    input: &[Message],
    instructions: Option<&str>,
    reply: Reply,
) -> Result<Built, ApiError> {
    let messages = with_instructions(instructions, input);
    let ids = gateway.text().prompts.extend(LogEnd::Empty, &messages, reply).map_err(refused)?;
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
    parent: &Stored,
    input: &[Message],
    instructions: Option<&str>,
    reply: Reply,
) -> Result<Built, prompt::Error> {
    let system = instructions.map(system_message);
    let mut log = TokenLog::new(gateway.hash_key());
    let (ids, items) = parent.log.with_entries(|entries| {
        let all: Vec<Entry<'_>> = system
            .iter()
            .map(Entry::Message)
            .chain(entries.iter().copied())
            .chain(input.iter().map(Entry::Message))
            .collect();
        let ids = gateway.text().prompts.render_all(&all, reply)?;
        Ok::<_, prompt::Error>((ids, entries.iter().copied().map(item).collect::<Vec<_>>()))
    })?;
    let n_tokenized = ids.len();
    let items = items.into_iter().chain(input.iter().cloned().map(Item::Message)).collect();
    log.append(ids, items, end(reply));
    Ok(Built { log, cut: Cut::root(), n_tokenized })
}

fn item(entry: Entry<'_>) -> Item {
    match entry {
        Entry::Message(message) => Item::Message(message.clone()),
        Entry::Generated { ids } => Item::GeneratedBefore { ids: ids.into() },
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
    Message { role: Role::System, content: instructions.to_owned() }
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
        ..v1::Sampling::default()
    }
}

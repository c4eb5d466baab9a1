//! From a request to a prompt: find the parent, by name or by what was said; take over what is inherited; tokenize only
//! what is new.

mod basis;
mod items;
mod render;

use std::sync::Arc;

use model::calls::Thinks;
use model::chat_template::Reply;
use proto::v1;

use crate::cache_break::CacheBreak;
use crate::compact;
use crate::constraint::{Constraint, constraint};
use crate::conversation::{Cut, TokenLog};
use crate::conversations::ListedItem;
use crate::error::ApiError;
use crate::history::{ContentHash, History};
use crate::metrics as names;
use crate::state::Gateway;
use crate::store::{Base, Stored};
use crate::turn::Origin;
use crate::wire::{Create, Tools, ask_for_summary};

use basis::truncates;
pub(crate) use basis::{Basis, all_entries, count_tokens, find_basis, recall};
pub(crate) use items::found;
use render::{build, most_prompt_tokens, truncated};

/// What a token's text takes, about. A token id takes as much.
pub(crate) const TOKEN_BYTES: usize = 4;

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
    /// The request's own items, as its conversation keeps them.
    pub(crate) own: Vec<ListedItem>,
    /// Of its conversation, before it.
    pub(crate) version: u64,
    /// The answer is a summary of everything, to be sealed.
    pub(crate) compacts: bool,
    pub(crate) cache_break: Option<CacheBreak>,
    /// Where the workers may pick up: what the parent's turn has left in their caches.
    pub(crate) cut: Cut,
    pub(crate) n_tokenized: usize,
    /// What keeping this turn's response costs besides its output, in tokens.
    pub(crate) n_own_tokens: usize,
    pub(crate) max_output_tokens: usize,
    pub(crate) sampling: v1::Sampling,
    pub(crate) constraint: Option<Constraint>,
    /// Whether the answer begins within reasoning.
    pub(crate) thinks: Thinks,
    pub(crate) instructions: Option<Arc<str>>,
    pub(crate) tools: Arc<Tools>,
    pub(crate) last_decode: String,
    /// The durable response that the log grew out of.
    pub(crate) base: Option<Base>,
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
    let compacts = ask_for_summary(&basis.new);
    let is_free = compacts || !create.generate;
    let constraint = if is_free { None } else { constraint(gateway, create, &basis.tools)? };
    let truncates = truncates(create, &basis.new);
    let is_hopeless = truncates && basis.text_bytes() > gateway.max_prompt_bytes();
    // A client limits its answers, not a summary.
    let asked = create.max_output_tokens.map(|limit| limit as usize);
    let room = if compacts { Some(compact::most_tokens(gateway)) } else { asked };
    let most = most_prompt_tokens(gateway, room);
    let mut built =
        if is_hopeless { truncated(gateway, &basis, reply, most)? } else { build(gateway, &basis, reply)? };
    if truncates && built.log.len() > most && !is_hopeless {
        built = truncated(gateway, &basis, reply, most)?;
    }
    let mut thinks = gateway.text().prompts.thinks();
    if thinks == Thinks::Already && constraint.as_ref().is_some_and(Constraint::is_forced) {
        // What is ruled from the first token on is an answer, not a thought.
        let ids = gateway.text().prompts.end_of_thinking();
        built.n_tokenized += ids.len();
        built.log.append(ids, Vec::new(), built.log.end());
        thinks = Thinks::MayBegin;
    }
    metrics::counter!(names::TOKENIZED_TOKENS).increment(built.n_tokenized as u64);
    let summary = compacts.then(|| compact::tokens_for(gateway, built.log.len()));
    let max_output_tokens = match output_limit(gateway, create, summary.or(asked), built.log.len()) {
        // It is shortened before it is answered.
        Err(_) if create.compact_threshold.is_some() && create.generate => 0,
        limit => limit?,
    };
    let cache_break = basis.cache_break(&built.log);
    let Basis { parent, instructions, tools, entries, own, version, .. } = basis;
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
    let n_own_bytes: usize = entries.iter().map(|entry| entry.json.len()).sum();
    history.append(entries);
    Ok(Prepared {
        conversation: parent.map_or_else(|| response_id.clone(), |parent| parent.conversation.clone()),
        last_decode: parent.map(|parent| parent.decode_worker.clone()).unwrap_or_default(),
        base: parent.and_then(|parent| parent.base_of(&built.log)),
        response_id,
        tenant: Arc::clone(&origin.tenant),
        n_own_tokens: built.n_tokenized
            + n_own_bytes / TOKEN_BYTES
            + own_text_tokens(parent, instructions.as_ref(), &tools),
        log: built.log,
        history,
        n_own_items,
        own,
        version,
        compacts,
        cache_break,
        cut: built.cut,
        n_tokenized: built.n_tokenized,
        max_output_tokens,
        sampling: sampling(gateway, create),
        constraint,
        thinks,
        instructions,
        tools,
    })
}

/// Texts that the parent does not share, in tokens.
fn own_text_tokens(parent: Option<&Stored>, instructions: Option<&Arc<str>>, tools: &Arc<Tools>) -> usize {
    let same_text = |text: &Arc<str>| {
        parent.and_then(|parent| parent.instructions.as_ref()).is_some_and(|other| Arc::ptr_eq(other, text))
    };
    let text = instructions.filter(|text| !same_text(text)).map_or(0, |text| text.len());
    let same_tools = parent.is_some_and(|parent| Arc::ptr_eq(&parent.tools, tools));
    (text + if same_tools { 0 } else { tools.raw.len() }) / TOKEN_BYTES
}

/// How many tokens may be generated; an error when the prompt leaves room for none.
fn output_limit(
    gateway: &Gateway,
    create: &Create,
    limit: Option<usize>,
    prompt_tokens: usize,
) -> Result<usize, ApiError> {
    let context = gateway.text().context_len as usize;
    if !create.generate {
        return if prompt_tokens <= context { Ok(0) } else { Err(too_long(gateway, prompt_tokens)) };
    }
    let room = context.saturating_sub(prompt_tokens);
    if room == 0 {
        return Err(too_long(gateway, prompt_tokens));
    }
    Ok(limit.map_or(room, |limit| room.min(limit)))
}

/// The prompt leaves no room for an answer.
pub(crate) fn too_long(gateway: &Gateway, prompt_tokens: usize) -> ApiError {
    let context = gateway.text().context_len;
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
    }
}

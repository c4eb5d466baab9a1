//! What clients ask for: `response.create` frames and `POST /v1/responses` bodies.
//!
//! Lenient where clients differ (unknown fields, `stream` on a socket, a nested `response` object), strict where a wrong
//! value would change the answer. Each field is first taken as raw text, so that an error can name it and text that
//! equals the previous turn's is neither parsed nor rendered again.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::input::{self, InputItem};
use super::tools::{TextSettings, ToolChoice};
use super::{Transport, echo};
use crate::error::ApiError;
use crate::turn::Partial;

/// A field that can be left out, removed, or given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Setting<T> {
    Absent,
    Null,
    Given(T),
}

/// One request for a response, checked.
#[derive(Debug, Clone)]
pub(crate) struct Create {
    pub(crate) model: Option<String>,
    pub(crate) input: Vec<InputItem>,
    pub(crate) instructions: Setting<String>,
    /// Raw JSON text.
    pub(crate) tools: Setting<String>,
    pub(crate) tool_choice: ToolChoice,
    pub(crate) text: TextSettings,
    pub(crate) previous_response_id: Option<String>,
    /// The id of a conversation that the response is added to.
    pub(crate) conversation: Option<String>,
    /// A summary that stands for the input and everything before it.
    pub(crate) summary: Option<InputItem>,
    /// A turn of our own beside the client's: nothing of it is kept.
    pub(crate) aside: bool,
    /// False: only prefill.
    pub(crate) generate: bool,
    pub(crate) background: bool,
    pub(crate) max_output_tokens: Option<u32>,
    pub(crate) max_tool_calls: Option<u32>,
    /// Drop the oldest items when the context is full.
    pub(crate) truncates: bool,
    /// Tokens at which the conversation is to be compacted before the turn.
    pub(crate) compact_threshold: Option<u32>,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<NonZeroU32>,
    pub(crate) seed: Option<u64>,
    pub(crate) top_logprobs: Option<u32>,
    pub(crate) store: bool,
    pub(crate) stream: bool,
    /// Raw JSON text of fields that are only echoed.
    pub(crate) metadata: Option<Box<RawValue>>,
    pub(crate) tool_choice_echo: Option<Box<RawValue>>,
    pub(crate) reasoning: Option<Box<RawValue>>,
    pub(crate) parallel_tool_calls: bool,
    pub(crate) prompt_cache_key: Option<String>,
    pub(crate) safety_identifier: Option<String>,
    pub(crate) include: Include,
}

/// What a client wants besides the usual.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Include {
    /// Baton's own account of the turn.
    pub(crate) baton: bool,
    /// The reasoning as the model wrote it.
    pub(crate) raw_reasoning: bool,
    /// The reasoning sealed, to be sent back.
    pub(crate) sealed_reasoning: bool,
    pub(crate) logprobs: bool,
}

/// What a client says on a socket.
#[derive(Debug, Clone)]
pub(crate) enum ClientEvent {
    Create {
        lane: Lane,
        create: Box<Create>,
    },
    /// A create that cannot be served, and the response it would have continued.
    Refused {
        lane: Lane,
        parent: Option<String>,
        error: ApiError,
    },
    /// Stop the running response.
    Stop {
        response_id: Option<String>,
        partial: Partial,
    },
    /// Change the running response's mind.
    Steer(Steer),
    /// Known, and nothing to do.
    Ignored,
}

/// A lane of a connection: the default one, or one with a name (`stream_id`).
pub(crate) type Lane = Option<Box<str>>;

/// A `response.steer`, as much as is needed to refuse it.
#[derive(Debug, Clone)]
pub(crate) struct Steer {
    pub(crate) previous_response_id: Option<Box<RawValue>>,
    pub(crate) input: Option<Box<RawValue>>,
}

/// The value of a `include` entry that asks for Baton's account of the turn.
const INCLUDE_BATON: &str = "baton.turn";
/// Asks for the reasoning as the model wrote it, in OpenAI's raw events.
const INCLUDE_RAW_REASONING: &str = "baton.reasoning_text";
const INCLUDE_SEALED_REASONING: &str = "reasoning.encrypted_content";
const INCLUDE_LOGPROBS: &str = "message.output_text.logprobs";
const MAX_TOP_LOGPROBS: u32 = 20;
/// The `mode` of an interrupt: an item that is not complete was never said.
const DISCARD_PARTIAL_ITEMS: &str = "discard_partial_items";
/// Longest name of a lane.
const MAX_LANE_BYTES: usize = 256;

/// A frame, or the body of a request.
#[derive(Deserialize)]
struct Fields<'a> {
    #[serde(rename = "type", borrow, default, deserialize_with = "raw")]
    kind: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    response: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    response_id: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    mode: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    stream_id: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    model: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    input: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    instructions: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    previous_response_id: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    generate: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    max_output_tokens: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    temperature: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    top_p: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    top_k: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    seed: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    store: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    stream: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    background: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    metadata: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    tools: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    tool_choice: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    text: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    reasoning: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    truncation: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    include: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    parallel_tool_calls: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    prompt_cache_key: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    safety_identifier: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    conversation: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    prompt: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    context_management: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    max_tool_calls: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    prompt_cache_options: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    top_logprobs: Option<&'a RawValue>,
}

/// Keeps an explicit null apart from an absent field.
fn raw<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

/// Parses one text frame.
pub(crate) fn parse_frame(text: &str) -> Result<ClientEvent, ApiError> {
    let frame: Fields<'_> = object(text)?;
    let kind: Option<String> = field(frame.kind, "type")?;
    match kind.as_deref() {
        Some("response.create") => create(frame),
        Some("response.cancel") => Ok(ClientEvent::Stop {
            response_id: field(frame.response_id, "response_id")?,
            partial: Partial::Keep,
        }),
        Some("response.interrupt") => {
            let mode: Option<String> = field(frame.mode, "mode")?;
            let discards = mode.is_none_or(|mode| mode == DISCARD_PARTIAL_ITEMS);
            let partial = if discards { Partial::Discard } else { Partial::Keep };
            Ok(ClientEvent::Stop { response_id: field(frame.response_id, "response_id")?, partial })
        }
        Some("response.steer") => Ok(ClientEvent::Steer(Steer {
            previous_response_id: frame.previous_response_id.map(RawValue::to_owned),
            input: frame.input.map(RawValue::to_owned),
        })),
        Some("response.processed") => Ok(ClientEvent::Ignored),
        Some(other) => {
            let message =
                format!("`{other}` is no event of this server; send response.create or response.cancel");
            Err(ApiError::invalid("unknown_event_type", message).at("type"))
        }
        None => Err(ApiError::invalid("missing_required_parameter", "type is required").at("type")),
    }
}

/// A create whose fields stand in the frame, or in its `response`.
fn create(frame: Fields<'_>) -> Result<ClientEvent, ApiError> {
    let outer = frame.stream_id.filter(|raw| raw.get() != "null");
    let nested = frame.response.filter(|raw| raw.get() != "null");
    let fields = match nested.map(|nested| object::<Fields<'_>>(nested.get())) {
        None => frame,
        Some(Ok(fields)) => fields,
        Some(Err(error)) => return Ok(ClientEvent::Refused { lane: lane(outer)?, parent: None, error }),
    };
    let (lane, parent) = (lane(outer.or(fields.stream_id))?, fields.previous_response_id);
    Ok(match parse(fields, Transport::WebSocket) {
        Ok(create) => ClientEvent::Create { lane, create: Box::new(create) },
        Err(error) => {
            // It costs its parent like any failed continuation.
            let parent = field(parent, "previous_response_id").ok().flatten();
            ClientEvent::Refused { lane, parent, error }
        }
    })
}

/// The lane that `stream_id` names.
fn lane(raw: Option<&RawValue>) -> Result<Lane, ApiError> {
    let Some(raw) = raw.filter(|raw| raw.get() != "null") else { return Ok(None) };
    let name: Option<String> = serde_json::from_str(raw.get()).ok();
    let fits = |name: &String| {
        let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
        (1..=MAX_LANE_BYTES).contains(&name.len()) && name.chars().all(known)
    };
    match name.filter(fits) {
        Some(name) => Ok(Some(name.into())),
        None => {
            let message =
                format!("stream_id must be 1 to {MAX_LANE_BYTES} of the characters A-Z a-z 0-9 _ . -");
            Err(ApiError::invalid("invalid_stream_id", message).at("stream_id"))
        }
    }
}

/// Parses the body of `POST /v1/responses`.
pub(crate) fn parse_body(body: &[u8]) -> Result<Create, ApiError> {
    let text = std::str::from_utf8(body)
        .map_err(|error| ApiError::invalid("invalid_json", format!("the body is not UTF-8: {error}")))?;
    parse(object(text)?, Transport::Http)
}

/// Parses the body of `POST /v1/responses/input_tokens`: a request that may be without input.
pub(crate) fn parse_counted(body: &[u8]) -> Result<Create, ApiError> {
    let text = std::str::from_utf8(body)
        .map_err(|error| ApiError::invalid("invalid_json", format!("the body is not UTF-8: {error}")))?;
    parse_fields(&object(text)?, Transport::Http)
}

/// Serde alone would also take a list, its elements being the fields in their order.
pub(crate) fn object<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, ApiError> {
    let not_object = |why: String| {
        ApiError::invalid("invalid_json", format!("this is not the JSON object that was expected: {why}"))
    };
    if text.trim_start().starts_with('[') {
        return Err(not_object("it is a list".to_owned()));
    }
    serde_json::from_str(text).map_err(|error| not_object(plain(&error.to_string())))
}

fn parse(fields: Fields<'_>, transport: Transport) -> Result<Create, ApiError> {
    let create = parse_fields(&fields, transport)?;
    let continues = create.previous_response_id.is_some() || create.conversation.is_some();
    if create.input.is_empty() && !continues && create.generate {
        return Err(ApiError::invalid("missing_required_parameter", "input is required").at("input"));
    }
    if create.background && !create.store {
        let message =
            "a background response must be stored, so that it can be asked for: leave out store:false";
        return Err(ApiError::bad_value("background", message));
    }
    Ok(create)
}

fn parse_fields(fields: &Fields<'_>, transport: Transport) -> Result<Create, ApiError> {
    check(fields, transport)?;
    Ok(Create {
        model: field(fields.model, "model")?,
        input: input::parse(fields.input)?,
        instructions: setting(fields.instructions, "instructions")?,
        tools: tools(fields.tools)?,
        tool_choice: ToolChoice::parse(fields.tool_choice)?,
        text: TextSettings::parse(fields.text)?,
        previous_response_id: field(fields.previous_response_id, "previous_response_id")?,
        conversation: conversation(fields.conversation)?,
        summary: None,
        aside: false,
        generate: generate(fields)?,
        background: field(fields.background, "background")?.unwrap_or(false),
        max_output_tokens: within(fields.max_output_tokens, "max_output_tokens", 1, u32::MAX)?,
        max_tool_calls: within(fields.max_tool_calls, "max_tool_calls", 1, u32::MAX)?,
        truncates: truncates(fields.truncation)?,
        compact_threshold: compact_threshold(fields.context_management)?,
        temperature: within(fields.temperature, "temperature", 0.0, 2.0)?,
        top_p: within(fields.top_p, "top_p", 0.0, 1.0)?,
        top_k: field(fields.top_k, "top_k")?,
        seed: field(fields.seed, "seed")?,
        top_logprobs: within(fields.top_logprobs, "top_logprobs", 0, MAX_TOP_LOGPROBS)?,
        store: field(fields.store, "store")?.unwrap_or(true),
        stream: field(fields.stream, "stream")?.unwrap_or(false),
        metadata: metadata(fields.metadata)?.and(owned(fields.metadata)),
        tool_choice_echo: owned(fields.tool_choice),
        reasoning: echo::reasoning(fields.reasoning)?,
        parallel_tool_calls: field(fields.parallel_tool_calls, "parallel_tool_calls")?.unwrap_or(true),
        prompt_cache_key: field(fields.prompt_cache_key, "prompt_cache_key")?,
        safety_identifier: field(fields.safety_identifier, "safety_identifier")?,
        include: include(fields.include)?,
    })
}

fn check(fields: &Fields<'_>, transport: Transport) -> Result<(), ApiError> {
    let given = |raw: Option<&RawValue>| raw.is_some_and(|raw| raw.get() != "null");
    if given(fields.prompt) {
        return Err(ApiError::unsupported(
            "prompt",
            "stored prompts are not supported: send instructions and input",
        ));
    }
    if given(fields.conversation) && given(fields.previous_response_id) {
        let message = "conversation and previous_response_id exclude each other: send one";
        return Err(ApiError::bad_value("conversation", message));
    }
    if transport == Transport::Http && field(fields.generate, "generate")? == Some(false) {
        return Err(ApiError::unsupported("generate", "generate:false exists on the WebSocket only"));
    }
    match transport {
        Transport::WebSocket if field(fields.background, "background")? == Some(true) => {
            Err(ApiError::unsupported(
                "background",
                "background responses exist on HTTP only; here events are streamed",
            ))
        }
        _ => Ok(()),
    }
}

/// A request that only warms the cache says `generate:false`, or `prewarm` among the cache options.
fn generate(fields: &Fields<'_>) -> Result<bool, ApiError> {
    #[derive(Deserialize)]
    struct Options {
        prewarm: Option<bool>,
    }
    let options: Option<Options> = field(fields.prompt_cache_options, "prompt_cache_options")?;
    let prewarms = options.and_then(|options| options.prewarm) == Some(true);
    Ok(field(fields.generate, "generate")?.unwrap_or(true) && !prewarms)
}

fn conversation(raw: Option<&RawValue>) -> Result<Option<String>, ApiError> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Named {
        Id(String),
        Object { id: String },
    }
    let named: Option<Named> = field(raw, "conversation").map_err(|_| {
        let message = "conversation is the id of one, or an object with an `id`";
        ApiError::invalid("invalid_type", message).at("conversation")
    })?;
    Ok(named.map(|named| match named {
        Named::Id(id) | Named::Object { id } => id,
    }))
}

fn truncates(raw: Option<&RawValue>) -> Result<bool, ApiError> {
    match field::<String>(raw, "truncation")?.as_deref() {
        None | Some("disabled") => Ok(false),
        Some("auto") => Ok(true),
        Some(other) => Err(ApiError::bad_value(
            "truncation",
            format!("`{other}` is no truncation; use auto or disabled"),
        )),
    }
}

fn compact_threshold(raw: Option<&RawValue>) -> Result<Option<u32>, ApiError> {
    #[derive(Deserialize)]
    struct Entry {
        #[serde(rename = "type")]
        kind: String,
        compact_threshold: Option<u32>,
    }
    let entries: Vec<Entry> = field(raw, "context_management")?.unwrap_or_default();
    Ok(entries.iter().find(|entry| entry.kind == "compaction").and_then(|entry| entry.compact_threshold))
}

/// The tools are parsed later, and only if they are not the parent's.
fn tools(raw: Option<&RawValue>) -> Result<Setting<String>, ApiError> {
    Ok(match raw.map(RawValue::get) {
        None => Setting::Absent,
        Some("null") => Setting::Null,
        Some(list) if list.starts_with('[') => Setting::Given(list.to_owned()),
        Some(_) => return Err(ApiError::invalid("invalid_type", "tools must be a list").at("tools")),
    })
}

fn include(raw: Option<&RawValue>) -> Result<Include, ApiError> {
    let include: Vec<String> = field(raw, "include")?.unwrap_or_default();
    let has = |wanted| include.iter().any(|value| value == wanted);
    Ok(Include {
        baton: has(INCLUDE_BATON),
        raw_reasoning: has(INCLUDE_RAW_REASONING),
        sealed_reasoning: has(INCLUDE_SEALED_REASONING),
        logprobs: has(INCLUDE_LOGPROBS),
    })
}

/// Checks `metadata`.
pub(crate) fn metadata(raw: Option<&RawValue>) -> Result<Option<BTreeMap<String, String>>, ApiError> {
    const MAX_PAIRS: usize = 16;
    let pairs: Option<BTreeMap<String, String>> = field(raw, "metadata")?;
    let Some(pairs) = pairs else { return Ok(None) };
    let fits = |(key, value): (&String, &String)| key.chars().count() <= 64 && value.chars().count() <= 512;
    if pairs.len() > MAX_PAIRS || !pairs.iter().all(fits) {
        let message = "metadata holds at most 16 pairs, keys of 64 and values of 512 characters";
        return Err(ApiError::bad_value("metadata", message));
    }
    Ok(Some(pairs))
}

pub(super) fn owned(raw: Option<&RawValue>) -> Option<Box<RawValue>> {
    raw.filter(|raw| raw.get() != "null").map(RawValue::to_owned)
}

/// An error of the parser without the names of our own types.
fn plain(error: &str) -> String {
    let words = error.split(' ').collect::<Vec<_>>();
    let mut plain = Vec::with_capacity(words.len());
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        plain.push(match word {
            "struct" => {
                words.next();
                "an object"
            }
            "f32" | "f64" => "a number",
            "u32" | "u64" | "usize" => "a whole number that is not negative",
            word => word,
        });
    }
    plain.join(" ")
}

fn setting(raw: Option<&RawValue>, name: &str) -> Result<Setting<String>, ApiError> {
    Ok(match raw {
        None => Setting::Absent,
        Some(_) => field(raw, name)?.map_or(Setting::Null, Setting::Given),
    })
}

/// Parses one field; null is the same as absent.
pub(crate) fn field<'a, T: Deserialize<'a>>(
    raw: Option<&'a RawValue>,
    name: &str,
) -> Result<Option<T>, ApiError> {
    let Some(raw) = raw else { return Ok(None) };
    if raw.get() == "null" {
        return Ok(None);
    }
    serde_json::from_str(raw.get()).map(Some).map_err(|error| {
        let error = error.to_string();
        let what = plain(error.split(" at line").next().unwrap_or_default());
        ApiError::invalid("invalid_type", format!("{name} has the wrong type: {what}")).at(name)
    })
}

fn within<T>(raw: Option<&RawValue>, name: &str, least: T, most: T) -> Result<Option<T>, ApiError>
where
    T: serde::de::DeserializeOwned + PartialOrd + std::fmt::Display,
{
    let value: Option<T> = field(raw, name)?;
    match value {
        Some(value) if !(value >= least && value <= most) => {
            Err(ApiError::bad_value(name, format!("{name} must be between {least} and {most}, not {value}")))
        }
        value => Ok(value),
    }
}

#[cfg(test)]
mod tests;

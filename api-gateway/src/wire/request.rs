//! What clients ask for: `response.create` frames and `POST /v1/responses` bodies.
//!
//! Lenient where clients differ (unknown fields, `stream` on a socket, a nested `response` object), strict where a wrong
//! value would change the answer. Each field is first taken as raw text, so that an error can name it and text that
//! equals the previous turn's is neither parsed nor rendered again.

use std::num::NonZeroU32;

use model::chat_template::Message;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::{Transport, input};
use crate::error::ApiError;

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
    pub(crate) input: Vec<Message>,
    pub(crate) instructions: Setting<String>,
    /// Raw JSON text.
    pub(crate) tools: Setting<String>,
    pub(crate) previous_response_id: Option<String>,
    /// False: only prefill.
    pub(crate) generate: bool,
    pub(crate) max_output_tokens: Option<u32>,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<NonZeroU32>,
    pub(crate) seed: Option<u64>,
    pub(crate) store: bool,
    pub(crate) stream: bool,
    /// Raw JSON text of fields that are only echoed.
    pub(crate) metadata: Option<Box<RawValue>>,
    pub(crate) tool_choice: Option<Box<RawValue>>,
    pub(crate) reasoning: Option<Box<RawValue>>,
    pub(crate) parallel_tool_calls: bool,
    pub(crate) prompt_cache_key: Option<String>,
    pub(crate) safety_identifier: Option<String>,
    /// The client asked for Baton's own account of the turn.
    pub(crate) include_baton: bool,
}

impl Create {
    /// Bytes of text that may have to be tokenized.
    pub(crate) fn text_bytes(&self) -> usize {
        let instructions = if let Setting::Given(text) = &self.instructions { text.len() } else { 0 };
        instructions + self.input.iter().map(|message| message.content.len()).sum::<usize>()
    }
}

/// What a client says on a socket.
#[derive(Debug, Clone)]
pub(crate) enum ClientEvent {
    Create(Box<Create>),
    /// A create that cannot be served, and the response it would have continued.
    Refused {
        parent: Option<String>,
        error: ApiError,
    },
    /// Stop the running response.
    Cancel {
        response_id: Option<String>,
    },
    /// Known, and nothing to do.
    Ignored,
}

/// The value of a `include` entry that asks for Baton's account of the turn.
const INCLUDE_BATON: &str = "baton.turn";

#[derive(Deserialize)]
struct Frame<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(borrow, default)]
    response: Option<&'a RawValue>,
    response_id: Option<String>,
}

#[derive(Deserialize)]
struct Fields<'a> {
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
    stream_id: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "raw")]
    top_logprobs: Option<&'a RawValue>,
}

/// Keeps an explicit null apart from an absent field.
fn raw<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

/// Parses one text frame.
pub(crate) fn parse_frame(text: &str) -> Result<ClientEvent, ApiError> {
    let frame: Frame<'_> = object(text)?;
    match frame.kind.as_deref() {
        Some("response.create") => {
            let body = frame.response.map_or(text, RawValue::get);
            Ok(match parse(body, Transport::WebSocket) {
                Ok(create) => ClientEvent::Create(Box::new(create)),
                Err(error) => ClientEvent::Refused { parent: parent_of(body), error },
            })
        }
        Some("response.cancel" | "response.interrupt") => {
            Ok(ClientEvent::Cancel { response_id: frame.response_id })
        }
        Some("response.processed") => Ok(ClientEvent::Ignored),
        Some(other) => {
            let message =
                format!("`{other}` is no event of this server; send response.create or response.cancel");
            Err(ApiError::invalid("unknown_event_type", message).at("type"))
        }
        None => Err(ApiError::invalid("missing_required_parameter", "type is required").at("type")),
    }
}

/// The parent that a malformed create names, if it names one.
fn parent_of(body: &str) -> Option<String> {
    let fields: Fields<'_> = object(body).ok()?;
    field(fields.previous_response_id, "previous_response_id").ok().flatten()
}

/// Parses the body of `POST /v1/responses`.
pub(crate) fn parse_body(body: &[u8]) -> Result<Create, ApiError> {
    let text = std::str::from_utf8(body)
        .map_err(|error| ApiError::invalid("invalid_json", format!("the body is not UTF-8: {error}")))?;
    parse(text, Transport::Http)
}

/// Serde alone would also take a list, its elements being the fields in their order.
fn object<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, ApiError> {
    let not_object = |why: String| {
        ApiError::invalid("invalid_json", format!("this is not the JSON object that was expected: {why}"))
    };
    if text.trim_start().starts_with('[') {
        return Err(not_object("it is a list".to_owned()));
    }
    serde_json::from_str(text).map_err(|error| not_object(error.to_string()))
}

fn parse(text: &str, transport: Transport) -> Result<Create, ApiError> {
    let fields: Fields<'_> = object(text)?;
    refuse_unsupported(&fields, transport)?;
    let create = Create {
        model: field(fields.model, "model")?,
        input: input::parse(fields.input)?,
        instructions: setting(fields.instructions, "instructions")?,
        tools: tools(fields.tools)?,
        previous_response_id: field(fields.previous_response_id, "previous_response_id")?,
        generate: field(fields.generate, "generate")?.unwrap_or(true),
        max_output_tokens: within(fields.max_output_tokens, "max_output_tokens", 1, u32::MAX)?,
        temperature: within(fields.temperature, "temperature", 0.0, 2.0)?,
        top_p: within(fields.top_p, "top_p", 0.0, 1.0)?,
        top_k: field(fields.top_k, "top_k")?,
        seed: field(fields.seed, "seed")?,
        store: field(fields.store, "store")?.unwrap_or(true),
        stream: field(fields.stream, "stream")?.unwrap_or(false),
        metadata: metadata(fields.metadata)?,
        tool_choice: owned(fields.tool_choice),
        reasoning: owned(fields.reasoning),
        parallel_tool_calls: field(fields.parallel_tool_calls, "parallel_tool_calls")?.unwrap_or(true),
        prompt_cache_key: field(fields.prompt_cache_key, "prompt_cache_key")?,
        safety_identifier: field(fields.safety_identifier, "safety_identifier")?,
        include_baton: includes_baton(fields.include)?,
    };
    if create.input.is_empty() && create.previous_response_id.is_none() && create.generate {
        return Err(ApiError::invalid("missing_required_parameter", "input is required").at("input"));
    }
    Ok(create)
}

fn refuse_unsupported(fields: &Fields<'_>, transport: Transport) -> Result<(), ApiError> {
    let given = |raw: Option<&RawValue>| raw.is_some_and(|raw| raw.get() != "null");
    for (raw, name) in [
        (fields.conversation, "conversation"),
        (fields.prompt, "prompt"),
        (fields.context_management, "context_management"),
        (fields.stream_id, "stream_id"),
    ] {
        if given(raw) {
            return Err(ApiError::unsupported(name, format!("{name} is not supported yet")));
        }
    }
    if field::<bool>(fields.background, "background")? == Some(true) {
        return Err(ApiError::unsupported(
            "background",
            "background responses are not supported; stream instead",
        ));
    }
    if transport == Transport::Http
        && given(fields.generate)
        && field(fields.generate, "generate")? == Some(false)
    {
        return Err(ApiError::unsupported("generate", "generate:false exists on the WebSocket only"));
    }
    if field::<u32>(fields.top_logprobs, "top_logprobs")?.unwrap_or(0) > 0 {
        return Err(ApiError::unsupported("top_logprobs", "log-probabilities are not supported yet"));
    }
    match field::<String>(fields.truncation, "truncation")?.as_deref() {
        None | Some("disabled") => {}
        Some("auto") => {
            return Err(ApiError::unsupported("truncation", "only truncation `disabled` is supported yet"));
        }
        Some(other) => return Err(ApiError::bad_value("truncation", format!("`{other}` is no truncation"))),
    }
    refuse_format(fields.text)?;
    refuse_tool_choice(fields.tool_choice)
}

fn refuse_format(raw: Option<&RawValue>) -> Result<(), ApiError> {
    #[derive(Deserialize)]
    struct Text {
        format: Option<Format>,
    }
    #[derive(Deserialize)]
    struct Format {
        #[serde(rename = "type")]
        kind: String,
    }
    match field::<Text>(raw, "text")?.and_then(|text| text.format) {
        Some(format) if format.kind != "text" => {
            let message = format!("output of type `{}` is not supported yet; use text", format.kind);
            Err(ApiError::unsupported("text.format.type", message))
        }
        _ => Ok(()),
    }
}

fn refuse_tool_choice(raw: Option<&RawValue>) -> Result<(), ApiError> {
    match raw.map(RawValue::get) {
        None | Some("null" | "\"auto\"" | "\"none\"") => Ok(()),
        Some(_) => Err(ApiError::unsupported(
            "tool_choice",
            "forced tool calls are not supported yet; use auto or none",
        )),
    }
}

/// Tools that the server would have to offer to the model are refused; hosted and unknown ones are ignored.
fn tools(raw: Option<&RawValue>) -> Result<Setting<String>, ApiError> {
    #[derive(Deserialize)]
    struct Tool {
        #[serde(rename = "type")]
        kind: Option<String>,
    }
    let Some(raw) = raw else { return Ok(Setting::Absent) };
    let list: Vec<Tool> = field(Some(raw), "tools")?.unwrap_or_default();
    let callable = |tool: &Tool| matches!(tool.kind.as_deref(), Some("function" | "custom" | "namespace"));
    if let Some(idx) = list.iter().position(callable) {
        return Err(ApiError::unsupported(
            format!("tools[{idx}]"),
            "tools are not supported yet; send no tools",
        ));
    }
    Ok(if raw.get() == "null" { Setting::Null } else { Setting::Given(raw.get().to_owned()) })
}

fn includes_baton(raw: Option<&RawValue>) -> Result<bool, ApiError> {
    let include: Vec<String> = field(raw, "include")?.unwrap_or_default();
    Ok(include.iter().any(|value| value == INCLUDE_BATON))
}

fn metadata(raw: Option<&RawValue>) -> Result<Option<Box<RawValue>>, ApiError> {
    const MAX_PAIRS: usize = 16;
    let pairs: Option<std::collections::BTreeMap<String, String>> = field(raw, "metadata")?;
    let Some(pairs) = pairs else { return Ok(None) };
    let fits = |(key, value): (&String, &String)| key.chars().count() <= 64 && value.chars().count() <= 512;
    if pairs.len() > MAX_PAIRS || !pairs.iter().all(fits) {
        let message = "metadata holds at most 16 pairs, keys of 64 and values of 512 characters";
        return Err(ApiError::bad_value("metadata", message));
    }
    Ok(owned(raw))
}

fn owned(raw: Option<&RawValue>) -> Option<Box<RawValue>> {
    raw.filter(|raw| raw.get() != "null").map(RawValue::to_owned)
}

fn setting(raw: Option<&RawValue>, name: &str) -> Result<Setting<String>, ApiError> {
    Ok(match raw {
        None => Setting::Absent,
        Some(_) => field(raw, name)?.map_or(Setting::Null, Setting::Given),
    })
}

/// Parses one field; null is the same as absent.
fn field<T: serde::de::DeserializeOwned>(raw: Option<&RawValue>, name: &str) -> Result<Option<T>, ApiError> {
    let Some(raw) = raw else { return Ok(None) };
    serde_json::from_str(raw.get()).map_err(|error| {
        let error = error.to_string();
        let what = error.split(" at line").next().unwrap_or_default();
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

//! `input`: a string or a list of items.
//!
//! Items that carry nothing for a text model (hosted tools' calls, reasoning that cannot be read here) are accepted and left
//! out: a client replays what it has, and its turn must not fail for it.

use std::sync::Arc;

use model::calls::Call;
use model::chat_template::{Message, Role};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::tools::flat_name;
use crate::error::ApiError;

/// One item of the input.
#[derive(Debug, Clone)]
pub(crate) struct InputItem {
    /// The client's name for it, if it has one.
    pub(crate) id: Option<String>,
    /// As it was sent.
    pub(crate) json: Arc<str>,
    pub(crate) kind: InputKind,
}

/// What an item says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum InputKind {
    Message(Message),
    Call {
        call_id: String,
        call: Call,
    },
    Result {
        call_id: String,
        text: String,
    },
    /// A summary of what came before, sealed by us. `summary` is empty until it was opened.
    Compaction {
        sealed: String,
        summary: String,
    },
    /// Asks for such a summary.
    CompactionTrigger,
    /// What the model thought before it answered or called. `text` is empty until it was opened, unless the client has
    /// it in the clear.
    Reasoning {
        sealed: Option<String>,
        text: String,
    },
    /// Raw JSON text of further tools.
    Tools(String),
    /// An item of an earlier response, by its id.
    Reference(String),
    /// Nothing for the model.
    Silent,
}

#[derive(Deserialize)]
struct WireItem<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    id: Option<String>,
    role: Option<String>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    call_id: Option<String>,
    name: Option<String>,
    namespace: Option<String>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
    #[serde(borrow)]
    output: Option<&'a RawValue>,
    encrypted_content: Option<String>,
    #[serde(borrow)]
    tools: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct WirePart {
    #[serde(rename = "type")]
    kind: Option<String>,
    text: Option<String>,
    refusal: Option<String>,
    filename: Option<String>,
}

/// Whether what comes next is to be a summary of the items.
pub(crate) fn ask_for_summary(items: &[InputItem]) -> bool {
    matches!(items.last(), Some(InputItem { kind: InputKind::CompactionTrigger, .. }))
}

/// Parses `input`; absent or null is no item.
pub(crate) fn parse(raw: Option<&RawValue>) -> Result<Vec<InputItem>, ApiError> {
    parse_at(raw, "input")
}

/// Parses a list of items that stands at `param` of the request.
pub(crate) fn parse_at(raw: Option<&RawValue>, param: &str) -> Result<Vec<InputItem>, ApiError> {
    let Some(raw) = raw else { return Ok(Vec::new()) };
    match raw.get().trim_start().as_bytes().first() {
        Some(b'"') => Ok(vec![InputItem::user(string(raw, param)?)]),
        Some(b'[') => {
            let items: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|error| {
                ApiError::bad_value(param, format!("{param} is no list of items: {error}"))
            })?;
            items
                .into_iter()
                .enumerate()
                .map(|(idx, item)| parse_item(item, &format!("{param}[{idx}]")))
                .collect()
        }
        Some(b'n') => Ok(Vec::new()),
        _ => Err(ApiError::bad_value(param, format!("{param} must be a string or a list of items"))),
    }
}

impl InputItem {
    /// A sealed summary.
    pub(crate) fn compaction(sealed: String) -> Self {
        let json = serde_json::json!({"type": "compaction", "encrypted_content": sealed});
        let kind = InputKind::Compaction { sealed, summary: String::new() };
        Self { id: None, json: json.to_string().into(), kind }
    }

    /// Asks for a summary.
    pub(crate) fn compaction_trigger() -> Self {
        let json = r#"{"type":"compaction_trigger"}"#.into();
        Self { id: None, json, kind: InputKind::CompactionTrigger }
    }

    /// Whether the item says how to answer, not what.
    pub(crate) fn is_instruction(&self) -> bool {
        match &self.kind {
            InputKind::Message(message) => matches!(message.role, Role::System | Role::Developer),
            InputKind::Tools(_) => true,
            _ => false,
        }
    }

    /// Parses one item that stands at `param` of a request.
    ///
    /// # Errors
    /// Names the field at fault.
    pub(crate) fn parse(json: &str, param: &str) -> Result<Self, ApiError> {
        let raw = serde_json::from_str(json)
            .map_err(|error| ApiError::bad_value(param, format!("{param} is no JSON: {error}")))?;
        parse_item(raw, param)
    }

    /// A user's message.
    pub(crate) fn user(text: String) -> Self {
        let json = serde_json::json!({
            "type": "message", "role": "user", "content": [{"type": "input_text", "text": text}],
        });
        let kind = InputKind::Message(Message { role: Role::User, content: text.into() });
        Self { id: None, json: json.to_string().into(), kind }
    }

    /// Bytes of text that may have to be tokenized; of a summary or a thought, once it was opened.
    pub(crate) fn text_bytes(&self) -> usize {
        match &self.kind {
            InputKind::Message(message) => message.content.text().len(),
            InputKind::Call { call, .. } => call.name.len() + call.input.len(),
            InputKind::Result { text, .. } => text.len(),
            InputKind::Compaction { summary, .. } => summary.len(),
            InputKind::Reasoning { text, .. } => text.len(),
            InputKind::Tools(raw) => raw.len(),
            InputKind::CompactionTrigger | InputKind::Reference(_) | InputKind::Silent => 0,
        }
    }
}

fn parse_item(raw: &RawValue, param: &str) -> Result<InputItem, ApiError> {
    let item: WireItem<'_> = serde_json::from_str(raw.get())
        .map_err(|error| ApiError::bad_value(param, format!("{param} is no input item: {error}")))?;
    let kind = kind(&item, param)?;
    Ok(InputItem { id: item.id, json: raw.get().into(), kind })
}

fn kind(item: &WireItem<'_>, param: &str) -> Result<InputKind, ApiError> {
    let of = |field: &str| format!("{param}.{field}");
    Ok(match item.kind.as_deref() {
        // A reference has neither type nor role in older clients.
        None if item.role.is_none() && item.content.is_none() && item.id.is_some() => {
            InputKind::Reference(item.id.clone().unwrap_or_default())
        }
        None | Some("message") => InputKind::Message(message(item, param)?),
        Some("function_call") => {
            let input = item.arguments.map(|raw| text(raw, &of("arguments"))).transpose()?;
            call(item, input.unwrap_or_else(|| "{}".to_owned()), param)?
        }
        Some("custom_tool_call") => {
            let input = item.input.map(|raw| text(raw, &of("input"))).transpose()?;
            let mut kind = call(item, input.unwrap_or_default(), param)?;
            if let InputKind::Call { call, .. } = &mut kind {
                call.is_text = true;
            }
            kind
        }
        Some("function_call_output" | "custom_tool_call_output") => {
            let raw = item.output.ok_or_else(|| missing(of("output")))?;
            InputKind::Result {
                call_id: named(item.call_id.as_ref(), of("call_id"))?,
                text: output(raw, &of("output"))?,
            }
        }
        Some("compaction" | "compaction_summary") => {
            let sealed = named(item.encrypted_content.as_ref(), of("encrypted_content"))?;
            InputKind::Compaction { sealed, summary: String::new() }
        }
        Some("reasoning") => {
            // It is ours or another server's, in some form: what cannot be read is left out.
            let text = item.content.and_then(|raw| output(raw, "content").ok()).unwrap_or_default();
            InputKind::Reasoning { sealed: item.encrypted_content.clone(), text }
        }
        Some("compaction_trigger") => InputKind::CompactionTrigger,
        Some("additional_tools") => InputKind::Tools(item.tools.map_or("[]", RawValue::get).to_owned()),
        Some("item_reference") => InputKind::Reference(named(item.id.as_ref(), of("id"))?),
        // Multi-agent harnesses: a message of another agent.
        Some("agent_message") if item.content.is_some() => {
            let content = content(item, param)?;
            InputKind::Message(Message { role: Role::User, content: content.into() })
        }
        Some(_) => InputKind::Silent,
    })
}

fn call(item: &WireItem<'_>, input: String, param: &str) -> Result<InputKind, ApiError> {
    let name = named(item.name.as_ref(), format!("{param}.name"))?;
    let call_id = named(item.call_id.as_ref(), format!("{param}.call_id"))?;
    let call = Call { name: flat_name(item.namespace.as_deref(), &name), input, is_text: false };
    Ok(InputKind::Call { call_id, call })
}

fn message(item: &WireItem<'_>, param: &str) -> Result<Message, ApiError> {
    let role = match item.role.as_deref() {
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("system") => Role::System,
        Some("developer") => Role::Developer,
        Some(other) => {
            let message = format!("`{other}` is no role; use user, assistant, system or developer");
            return Err(ApiError::bad_value(format!("{param}.role"), message));
        }
        None => return Err(missing(format!("{param}.role"))),
    };
    Ok(Message { role, content: content(item, param)?.into() })
}

fn content(item: &WireItem<'_>, param: &str) -> Result<String, ApiError> {
    let param = format!("{param}.content");
    let raw = item.content.ok_or_else(|| missing(&param))?;
    output(raw, &param)
}

/// A string, or a list of content parts.
fn output(raw: &RawValue, param: &str) -> Result<String, ApiError> {
    match raw.get().trim_start().as_bytes().first() {
        Some(b'"') => string(raw, param),
        Some(b'[') => parts(raw, param),
        _ => Err(ApiError::bad_value(param, format!("{param} must be a string or a list of parts"))),
    }
}

fn parts(raw: &RawValue, param: &str) -> Result<String, ApiError> {
    let parts: Vec<WirePart> = serde_json::from_str(raw.get()).map_err(|error| {
        ApiError::bad_value(param, format!("{param} is no list of content parts: {error}"))
    })?;
    let mut content = String::new();
    for (idx, part) in parts.into_iter().enumerate() {
        let text = match part.kind.as_deref() {
            None | Some("input_text" | "output_text" | "text" | "summary_text" | "reasoning_text") => {
                part.text
            }
            Some("refusal") => part.refusal,
            // A text model is told what it cannot see, so that it can say so.
            Some("input_image") => Some("[an image, which this model cannot see]".to_owned()),
            Some("input_file") => {
                let name = part.filename.unwrap_or_else(|| "without a name".to_owned());
                Some(format!("[a file, {name}, which this model cannot read]"))
            }
            Some(kind) => {
                let message = format!("content of type `{kind}` is not supported by this text model");
                return Err(ApiError::unsupported(format!("{param}[{idx}].type"), message));
            }
        };
        content.push_str(&text.ok_or_else(|| missing(format!("{param}[{idx}].text")))?);
    }
    Ok(content)
}

/// A string's content; anything else as its JSON.
fn text(raw: &RawValue, param: &str) -> Result<String, ApiError> {
    if raw.get().trim_start().starts_with('"') { string(raw, param) } else { Ok(raw.get().to_owned()) }
}

fn string(raw: &RawValue, param: &str) -> Result<String, ApiError> {
    serde_json::from_str(raw.get())
        .map_err(|error| ApiError::bad_value(param, format!("{param} is no valid string: {error}")))
}

fn named(text: Option<&String>, param: String) -> Result<String, ApiError> {
    text.cloned().ok_or_else(|| missing(param))
}

fn missing(param: impl Into<String>) -> ApiError {
    let param = param.into();
    ApiError::invalid("missing_required_parameter", format!("{param} is required")).at(param)
}

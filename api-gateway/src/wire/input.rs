//! `input`: a string or a list of items, as messages for the chat template.

use model::chat_template::{Message, Role};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::error::ApiError;

#[derive(Deserialize)]
struct WireItem<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct WirePart {
    #[serde(rename = "type")]
    kind: Option<String>,
    text: Option<String>,
    refusal: Option<String>,
}

/// Parses `input`; absent or null is no message.
pub(crate) fn parse(raw: Option<&RawValue>) -> Result<Vec<Message>, ApiError> {
    let Some(raw) = raw else { return Ok(Vec::new()) };
    match raw.get().trim_start().as_bytes().first() {
        Some(b'"') => {
            let content = string(raw, "input")?;
            Ok(vec![Message { role: Role::User, content }])
        }
        Some(b'[') => {
            let items: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|error| {
                ApiError::bad_value("input", format!("input is no list of items: {error}"))
            })?;
            let mut messages = Vec::with_capacity(items.len());
            for (idx, item) in items.into_iter().enumerate() {
                messages.extend(parse_item(item, idx)?);
            }
            Ok(messages)
        }
        Some(b'n') => Ok(Vec::new()),
        _ => Err(ApiError::bad_value("input", "input must be a string or a list of items")),
    }
}

/// One item; nothing for kinds that carry no text for the model.
fn parse_item(raw: &RawValue, idx: usize) -> Result<Option<Message>, ApiError> {
    let param = format!("input[{idx}]");
    let item: WireItem<'_> = serde_json::from_str(raw.get())
        .map_err(|error| ApiError::bad_value(&param, format!("{param} is no input item: {error}")))?;
    match item.kind.as_deref() {
        None | Some("message") => message(&item, &param).map(Some),
        // Hidden reasoning that clients send back; models without reasoning have no use for it.
        Some("reasoning") => Ok(None),
        Some(kind) => Err(ApiError::unsupported(
            format!("{param}.type"),
            format!("items of type `{kind}` are not supported yet; send messages"),
        )),
    }
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
    let param = format!("{param}.content");
    let raw = item.content.ok_or_else(|| missing(&param))?;
    let content = match raw.get().trim_start().as_bytes().first() {
        Some(b'"') => string(raw, &param)?,
        Some(b'[') => parts(raw, &param)?,
        _ => return Err(ApiError::bad_value(param, "content must be a string or a list of parts")),
    };
    Ok(Message { role, content })
}

fn parts(raw: &RawValue, param: &str) -> Result<String, ApiError> {
    let parts: Vec<WirePart> = serde_json::from_str(raw.get()).map_err(|error| {
        ApiError::bad_value(param, format!("{param} is no list of content parts: {error}"))
    })?;
    let mut content = String::new();
    for (idx, part) in parts.into_iter().enumerate() {
        let text = match part.kind.as_deref() {
            None | Some("input_text" | "output_text" | "text") => part.text,
            Some("refusal") => part.refusal,
            Some(kind) => {
                let message = format!("content of type `{kind}` is not supported by this text model");
                return Err(ApiError::unsupported(format!("{param}[{idx}].type"), message));
            }
        };
        content.push_str(&text.ok_or_else(|| missing(format!("{param}[{idx}].text")))?);
    }
    Ok(content)
}

fn string(raw: &RawValue, param: &str) -> Result<String, ApiError> {
    serde_json::from_str(raw.get())
        .map_err(|error| ApiError::bad_value(param, format!("{param} is no valid string: {error}")))
}

fn missing(param: impl Into<String>) -> ApiError {
    let param = param.into();
    ApiError::invalid("missing_required_parameter", format!("{param} is required")).at(param)
}

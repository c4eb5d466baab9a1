//! Fields that responses repeat as they were sent, once they are known to have the right form.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::request::field;
use crate::error::ApiError;

const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// `reasoning`: effort and summary, both of which clients leave out at times.
pub(super) fn reasoning(raw: Option<&RawValue>) -> Result<Option<Box<RawValue>>, ApiError> {
    #[derive(Deserialize)]
    struct Wire {
        effort: Option<String>,
        summary: Option<String>,
    }
    #[derive(Serialize)]
    struct Echo {
        effort: Option<String>,
        summary: Option<String>,
    }
    let Some(Wire { effort, summary }) = field(raw, "reasoning")? else { return Ok(None) };
    let effort = effort.filter(|effort| EFFORTS.contains(&effort.as_str()));
    let echo = serde_json::to_string(&Echo { effort, summary }).expect("our own types serialize");
    Ok(RawValue::from_string(echo).ok())
}

/// The item's JSON, with the id that it is known by here and the fields that clients expect of every item.
pub(crate) fn with_id(id: &str, json: &str) -> Box<RawValue> {
    let mut item: serde_json::Map<String, serde_json::Value> = serde_json::from_str(json).unwrap_or_default();
    item.insert("id".to_owned(), id.into());
    let kind = item.entry("type").or_insert_with(|| "message".into());
    if kind == "message" {
        let is_assistant = item.get("role").is_some_and(|role| role == "assistant");
        if let Some(text) = item.get("content").and_then(|content| content.as_str()) {
            let kind = if is_assistant { "output_text" } else { "input_text" };
            let mut part = serde_json::json!({"type": kind, "text": text});
            if is_assistant {
                part["annotations"] = serde_json::json!([]);
            }
            item.insert("content".to_owned(), serde_json::json!([part]));
        }
    }
    item.entry("status").or_insert_with(|| "completed".into());
    let json = serde_json::to_string(&item).expect("a map of JSON serializes");
    RawValue::from_string(json).expect("it was just written")
}

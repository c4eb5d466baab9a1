//! The events of a response that has ended, made from its final object.

use serde_json::{Map, Value, json};

use super::event::Event;
use super::item::{Body, OutputItem, Shown};
use super::response::Status;
use super::{At, terminal_kind};

/// All events that a reader would have seen, each text in one piece.
pub(crate) fn events_of(response: &str) -> Vec<Event> {
    let Ok(Value::Object(response)) = serde_json::from_str(response) else { return Vec::new() };
    let mut events = Vec::new();
    let mut begun = response.clone();
    begun.insert("status".to_owned(), "in_progress".into());
    begun.insert("output".to_owned(), json!([]));
    for field in ["usage", "completed_at", "error", "incomplete_details"] {
        begun.insert(field.to_owned(), Value::Null);
    }
    events.push(of_response("response.created", 0, &begun));
    events.push(of_response("response.in_progress", 1, &begun));
    let items = response.get("output").and_then(Value::as_array).into_iter().flatten();
    for (output_index, item) in items.filter_map(item).enumerate() {
        add_item(&item, output_index, &mut events);
    }
    let kind = terminal_kind(status(response.get("status")));
    events.push(of_response(kind, events.len(), &response));
    events
}

fn of_response(kind: &'static str, sequence_number: usize, response: &Map<String, Value>) -> Event {
    let json = json!({"type": kind, "sequence_number": sequence_number, "response": response}).to_string();
    Event { kind, json }
}

fn add_item(item: &OutputItem, output_index: usize, events: &mut Vec<Event>) {
    let at = |events: &Vec<Event>| At { sequence_number: events.len() as u64, output_index };
    let has_part = matches!(item.body, Body::Message { .. } | Body::Reasoning { shown: Shown::Summary, .. });
    let has_text =
        !matches!(item.body, Body::Compaction { .. } | Body::Reasoning { shown: Shown::Nothing, .. });
    events.push(Event::item_added(at(events), item));
    if has_part {
        events.push(Event::part_added(at(events), item));
    }
    if has_text {
        if !item.body.text().is_empty() {
            events.push(Event::delta(at(events), item, item.body.text(), &[]));
        }
        events.push(Event::text_done(at(events), item));
    }
    if has_part {
        events.push(Event::part_done(at(events), item));
    }
    events.push(Event::item_done(at(events), item));
}

fn item(value: &Value) -> Option<OutputItem> {
    let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
    let namespace = value["namespace"].as_str().map(str::to_owned);
    let body = match value["type"].as_str()? {
        "message" => Body::Message {
            text: value["content"][0]["text"].as_str().unwrap_or_default().to_owned(),
            logprobs: Vec::new(),
        },
        "function_call" => Body::Call {
            call_id: text("call_id"),
            name: text("name"),
            namespace,
            arguments: text("arguments"),
        },
        "custom_tool_call" => {
            Body::CustomCall { call_id: text("call_id"), name: text("name"), namespace, input: text("input") }
        }
        "reasoning" => {
            let part = |field: &str| value[field][0]["text"].as_str().map(str::to_owned);
            let sealed = value["encrypted_content"].as_str().map(str::to_owned);
            let (text, shown) = match (part("content"), part("summary")) {
                (Some(text), _) => (text, Shown::Raw),
                (None, Some(text)) => (text, Shown::Summary),
                (None, None) => (String::new(), Shown::Nothing),
            };
            Body::Reasoning { text, shown, sealed }
        }
        "compaction" => Body::Compaction { sealed: text("encrypted_content") },
        _ => return None,
    };
    Some(OutputItem { id: text("id"), status: status(value.get("status")), body })
}

fn status(value: Option<&Value>) -> Status {
    match value.and_then(Value::as_str) {
        Some("incomplete") => Status::Incomplete,
        Some("failed") => Status::Failed,
        Some("cancelled") => Status::Cancelled,
        Some("in_progress") => Status::InProgress,
        _ => Status::Completed,
    }
}

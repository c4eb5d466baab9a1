//! Server events: each is serialized once, whatever the transport.

use serde::Serialize;
use serde_json::value::RawValue;

use super::item::{Announced, Body as ItemBody, Logprob, OutputItem, OutputText, ReasoningPart, Shown};
use super::request::{Lane, Steer};
use super::response::Status;
use crate::error::{ApiError, Body};

/// One event, ready to be framed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) kind: &'static str,
    pub(crate) json: String,
}

impl Event {
    /// The response object of an event that carries one.
    pub(crate) fn response(&self) -> Option<&str> {
        // It is the last field.
        let (_, response) = self.json.split_once(",\"response\":").filter(|(head, _)| head.len() < 128)?;
        response.strip_suffix('}')
    }

    /// Whether no event of the response follows.
    pub(crate) fn is_terminal(&self) -> bool {
        matches!(self.kind, "response.completed" | "response.incomplete" | "response.failed")
    }

    /// The event as an event of `lane`.
    pub(crate) fn on_lane(mut self, lane: &Lane) -> Self {
        if let Some(name) = lane
            && self.json.pop() == Some('}')
        {
            // The characters of a lane's name need no escapes.
            self.json.push_str(",\"stream_id\":\"");
            self.json.push_str(name);
            self.json.push_str("\"}");
        }
        self
    }
}

/// The event that ends a response with this status.
pub(crate) fn terminal_kind(status: Status) -> &'static str {
    match status {
        Status::Cancelled | Status::Incomplete => "response.incomplete",
        Status::Failed => "response.failed",
        Status::Completed | Status::InProgress => "response.completed",
    }
}

/// The `error` event of a socket. It carries `status`, without which Codex ignores it.
pub(crate) fn error_frame(error: &ApiError) -> Event {
    #[derive(Serialize)]
    struct Wire<'a> {
        #[serde(rename = "type")]
        kind: &'static str,
        status: u16,
        error: Body<'a>,
    }
    event("error", &Wire { kind: "error", status: error.status, error: error.body() })
}

/// The answer to `response.steer`: a running response's input cannot be changed here.
pub(crate) fn steer_failed(steer: &Steer) -> Event {
    #[derive(Serialize)]
    struct Failed<'a> {
        previous_response_id: Option<&'a RawValue>,
        input: Option<&'a RawValue>,
    }
    #[derive(Serialize)]
    struct Wire<'a> {
        #[serde(rename = "type")]
        kind: &'static str,
        sequence_number: u64,
        error: Body<'a>,
        steer: Failed<'a>,
    }
    let message = "a running response cannot be steered here: wait for its end, or cancel it";
    let error = ApiError::invalid("steering_not_supported", message);
    let kind = "response.steer.failed";
    let steer =
        Failed { previous_response_id: steer.previous_response_id.as_deref(), input: steer.input.as_deref() };
    event(kind, &Wire { kind, sequence_number: 0, error: error.body(), steer })
}

#[derive(Serialize)]
struct OfItem<'a, T> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u64,
    output_index: usize,
    item: &'a T,
}

/// Where in a response an event happens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct At {
    pub(crate) sequence_number: u64,
    pub(crate) output_index: usize,
}

/// Everything that happens within an item. Each kind of event has its own few of the optional fields.
#[derive(Serialize, Default)]
struct Within<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u64,
    item_id: &'a str,
    output_index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_index: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    summary_index: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    part: Option<Part<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<&'a [Logprob]>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Part<'a> {
    Text(OutputText<'a>),
    Reasoning(ReasoningPart<'a>),
}

impl Event {
    /// `response.created`, `.in_progress` and the terminal events; `response` is the response object's JSON.
    pub(crate) fn of_response(kind: &'static str, sequence_number: u64, response: &str) -> Self {
        /// Room for what stands around a response, and a lane's name.
        const AROUND: usize = 384;
        let mut json = String::with_capacity(response.len() + AROUND);
        json.push_str("{\"type\":\"");
        json.push_str(kind);
        json.push_str("\",\"sequence_number\":");
        json.push_str(&sequence_number.to_string());
        json.push_str(",\"response\":");
        json.push_str(response);
        json.push('}');
        Self { kind, json }
    }

    pub(crate) fn item_added(at: At, item: &OutputItem) -> Self {
        let kind = "response.output_item.added";
        let At { sequence_number, output_index } = at;
        event(kind, &OfItem { kind, sequence_number, output_index, item: &Announced(item) })
    }

    pub(crate) fn item_done(at: At, item: &OutputItem) -> Self {
        let kind = "response.output_item.done";
        let At { sequence_number, output_index } = at;
        event(kind, &OfItem { kind, sequence_number, output_index, item })
    }

    /// The part of a message or of a reasoning summary begins.
    pub(crate) fn part_added(at: At, item: &OutputItem) -> Self {
        part(at, item, "", ["response.content_part.added", "response.reasoning_summary_part.added"])
    }

    pub(crate) fn part_done(at: At, item: &OutputItem) -> Self {
        part(
            at,
            item,
            item.body.text(),
            ["response.content_part.done", "response.reasoning_summary_part.done"],
        )
    }

    /// The item grows by `delta`.
    pub(crate) fn delta(at: At, item: &OutputItem, delta: &str, logprobs: &[Logprob]) -> Self {
        let kind = match &item.body {
            ItemBody::Message { .. } => "response.output_text.delta",
            ItemBody::Call { .. } => "response.function_call_arguments.delta",
            ItemBody::CustomCall { .. } => "response.custom_tool_call_input.delta",
            ItemBody::Reasoning { shown, .. } => match shown {
                Shown::Raw => "response.reasoning_text.delta",
                Shown::Summary | Shown::Nothing => "response.reasoning_summary_text.delta",
            },
            ItemBody::Compaction { .. } => "response.compaction.compacting",
        };
        let is_message = matches!(item.body, ItemBody::Message { .. });
        let wire =
            Within { delta: Some(delta), logprobs: is_message.then_some(logprobs), ..within(kind, at, item) };
        event(kind, &wire)
    }

    /// The item's text is complete.
    pub(crate) fn text_done(at: At, item: &OutputItem) -> Self {
        let text = item.body.text();
        let (kind, wire) = match &item.body {
            ItemBody::Message { logprobs, .. } => (
                "response.output_text.done",
                Within { text: Some(text), logprobs: Some(logprobs), ..Within::default() },
            ),
            ItemBody::Call { name, .. } => (
                "response.function_call_arguments.done",
                Within { arguments: Some(text), name: Some(name), ..Within::default() },
            ),
            ItemBody::CustomCall { .. } => {
                ("response.custom_tool_call_input.done", Within { input: Some(text), ..Within::default() })
            }
            ItemBody::Reasoning { shown: Shown::Raw, .. } => {
                ("response.reasoning_text.done", Within { text: Some(text), ..Within::default() })
            }
            ItemBody::Reasoning { .. } | ItemBody::Compaction { .. } => {
                ("response.reasoning_summary_text.done", Within { text: Some(text), ..Within::default() })
            }
        };
        let place = within(kind, at, item);
        let wire = Within {
            kind,
            sequence_number: place.sequence_number,
            item_id: place.item_id,
            output_index: place.output_index,
            content_index: place.content_index,
            summary_index: place.summary_index,
            ..wire
        };
        event(kind, &wire)
    }
}

fn within<'a>(kind: &'static str, at: At, item: &'a OutputItem) -> Within<'a> {
    let (content_index, summary_index) = match &item.body {
        ItemBody::Message { .. } | ItemBody::Reasoning { shown: Shown::Raw, .. } => (Some(0), None),
        ItemBody::Reasoning { .. } => (None, Some(0)),
        ItemBody::Call { .. } | ItemBody::CustomCall { .. } | ItemBody::Compaction { .. } => (None, None),
    };
    let At { sequence_number, output_index } = at;
    Within {
        kind,
        sequence_number,
        item_id: &item.id,
        output_index,
        content_index,
        summary_index,
        ..Within::default()
    }
}

fn part(at: At, item: &OutputItem, text: &str, [of_message, of_summary]: [&'static str; 2]) -> Event {
    let (kind, part) = match &item.body {
        ItemBody::Reasoning { .. } => (of_summary, Part::Reasoning(ReasoningPart::summary(text))),
        ItemBody::Message { logprobs, .. } if !text.is_empty() => {
            (of_message, Part::Text(OutputText::new(text, logprobs)))
        }
        _ => (of_message, Part::Text(OutputText::new(text, &[]))),
    };
    event(kind, &Within { part: Some(part), ..within(kind, at, item) })
}

fn event(kind: &'static str, wire: &impl Serialize) -> Event {
    let json = serde_json::to_string(wire).expect("our own types have string keys and no failing parts");
    Event { kind, json }
}

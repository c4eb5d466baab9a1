//! Server events: each is serialized once, whatever the transport.

use serde::Serialize;

use super::response::{MessageItem, OutputText, ResponseView, Status};
use crate::error::{ApiError, Body};

/// One event, ready to be framed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) kind: &'static str,
    pub(crate) json: String,
}

/// The event that ends a response with this status.
pub(crate) fn terminal_kind(status: Status) -> &'static str {
    match status {
        Status::Incomplete => "response.incomplete",
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

#[derive(Serialize)]
struct OfResponse<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u64,
    response: &'a ResponseView<'a>,
}

#[derive(Serialize)]
struct OfItem<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u64,
    output_index: u32,
    item: MessageItem<'a>,
}

#[derive(Serialize)]
struct OfPart<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u64,
    item_id: &'a str,
    output_index: u32,
    content_index: u32,
    part: OutputText<'a>,
}

#[derive(Serialize)]
struct OfText<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u64,
    item_id: &'a str,
    output_index: u32,
    content_index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    logprobs: [(); 0],
}

impl Event {
    /// `response.created`, `.in_progress` and the terminal events.
    pub(crate) fn response(kind: &'static str, sequence_number: u64, response: &ResponseView<'_>) -> Self {
        event(kind, &OfResponse { kind, sequence_number, response })
    }

    pub(crate) fn item_added(sequence_number: u64, id: &str) -> Self {
        let kind = "response.output_item.added";
        let item = MessageItem::new(id, Status::InProgress, &[]);
        event(kind, &OfItem { kind, sequence_number, output_index: 0, item })
    }

    pub(crate) fn item_done(sequence_number: u64, id: &str, status: Status, text: &str) -> Self {
        let kind = "response.output_item.done";
        let content = [OutputText::new(text)];
        let item = MessageItem::new(id, status, &content);
        event(kind, &OfItem { kind, sequence_number, output_index: 0, item })
    }

    pub(crate) fn part_added(sequence_number: u64, item_id: &str) -> Self {
        Self::part("response.content_part.added", sequence_number, item_id, "")
    }

    pub(crate) fn part_done(sequence_number: u64, item_id: &str, text: &str) -> Self {
        Self::part("response.content_part.done", sequence_number, item_id, text)
    }

    fn part(kind: &'static str, sequence_number: u64, item_id: &str, text: &str) -> Self {
        let part = OutputText::new(text);
        event(kind, &OfPart { kind, sequence_number, item_id, output_index: 0, content_index: 0, part })
    }

    pub(crate) fn text_delta(sequence_number: u64, item_id: &str, delta: &str) -> Self {
        Self::text("response.output_text.delta", sequence_number, item_id, Some(delta), None)
    }

    pub(crate) fn text_done(sequence_number: u64, item_id: &str, text: &str) -> Self {
        Self::text("response.output_text.done", sequence_number, item_id, None, Some(text))
    }

    fn text(
        kind: &'static str,
        sequence_number: u64,
        item_id: &str,
        delta: Option<&str>,
        text: Option<&str>,
    ) -> Self {
        let wire = OfText {
            kind,
            sequence_number,
            item_id,
            output_index: 0,
            content_index: 0,
            delta,
            text,
            logprobs: [],
        };
        event(kind, &wire)
    }
}

fn event(kind: &'static str, wire: &impl Serialize) -> Event {
    let json = serde_json::to_string(wire).expect("our own types have string keys and no failing parts");
    Event { kind, json }
}

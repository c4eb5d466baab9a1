//! OpenAI's JSON: requests come in here and become domain types, responses and events leave from here.

mod event;
mod input;
mod request;
mod response;

pub(crate) use event::{Event, error_frame, terminal_kind};
pub(crate) use request::{ClientEvent, Create, Setting, parse_body, parse_frame};
pub(crate) use response::{BatonTurn, ResponseView, Status, Usage};

/// Where the client's bytes came from; a few rules differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    WebSocket,
    Http,
}

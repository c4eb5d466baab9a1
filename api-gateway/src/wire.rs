//! OpenAI's JSON: requests come in here and become domain types, responses and events leave from here.

mod echo;
mod event;
mod input;
mod item;
mod replay;
mod request;
mod response;
mod tools;

pub(crate) use echo::with_id;
pub(crate) use event::{At, Event, error_frame, steer_failed, terminal_kind};
pub(crate) use input::{InputItem, InputKind, ask_for_summary, parse_at as parse_items};
pub(crate) use item::{Body, Logprob, OutputItem, Shown};
pub(crate) use replay::events_of;
pub(crate) use request::{
    ClientEvent, Create, Lane, Setting, metadata, object, parse_body, parse_counted, parse_frame,
};
pub(crate) use response::{BatonTurn, ResponseView, Status, Usage};
pub(crate) use tools::{Format, Source as ToolSource, ToolChoice, Tools, flat_name};

/// Where the client's bytes came from; a few rules differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    WebSocket,
    Http,
}

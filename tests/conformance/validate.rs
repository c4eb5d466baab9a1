//! Checks what a server sends: streams of events, responses, errors, and the objects of the other endpoints.
//!
//! Each violation is a [`Fault`] that names its [`Rule`], so that the tests of the validator can see that each rule bites.

mod item;
mod object;
mod open_item;
mod response;
mod shape;
mod stream;
#[cfg(test)]
mod tests;

use std::fmt;

use serde_json::Value;

pub(crate) use item::item;
pub(crate) use object::{
    compaction, conversation, conversation_deleted, error_body, id_with_prefix, input_tokens, items, models,
    response_deleted,
};
pub(crate) use response::{Echo, response};
pub(crate) use stream::Stream;

/// What the protocol demands. The numbers are those of protocol.md's sections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rule {
    /// 1.5: per response, from 0, one more each event.
    SequenceNumber,
    /// 2.3: `response.created` is the first event.
    CreatedFirst,
    /// 2.3: `response.in_progress` stands before the first item.
    InProgressMissing,
    /// 4: only events of the protocol, unless asked for others.
    UnknownEvent,
    /// 2.3: exactly one terminal event, and it is the last.
    AfterTerminal,
    /// 2.3: a stream ends with a terminal event.
    TerminalMissing,
    /// 2.3: a failure after `created` is `response.failed`.
    ErrorAfterCreated,
    /// 2.3: all events of a stream carry one response, whose settings do not change.
    ResponseChanged,
    /// 2.2: the status fits the event.
    Status,
    /// 1.5: events of a named lane carry its name, others none.
    StreamId,
    /// 2.3: `output_index` counts the items.
    OutputIndex,
    /// 2.3: an item is done before the next is added.
    ItemOverlap,
    /// 2.3: events belong to the item that is open, under its id.
    ItemId,
    /// 2.3: an item is closed before the response ends.
    ItemLeftOpen,
    /// 2.3: an item starts empty and in progress.
    ItemStart,
    /// 2.3: an item keeps its type, name and call id.
    ItemChanged,
    /// 2.3: `content_index` and `summary_index` count the parts.
    PartIndex,
    /// 2.3: parts are opened before their text and closed before their item.
    PartOrder,
    /// 2.3: texts have their `.done` event.
    DoneMissing,
    /// 2.3: the deltas add up to the final text.
    Deltas,
    /// 2.3: the finished item is what its events said.
    DoneItem,
    /// 2.3: the terminal event's output is the items that were done.
    Output,
    /// 2.2, 2.3: a field is there, not null where it must not be, and of its type.
    Field,
    /// 2.4: prefix, charset and length of an id.
    Id,
    /// 2.4: ids are not used twice.
    IdReused,
    /// 2.2: `tools` is complete.
    Tools,
    /// 2.2: the response says what was asked for.
    Echo,
    /// 2.2: usage adds up.
    Usage,
    /// 2.4: fields of an item.
    Item,
    /// 6: the arguments of a finished call are JSON.
    Arguments,
    /// 2.3: `encrypted_content` is left out when there is none.
    NullEncryptedContent,
    /// 2.3: no `obfuscation`.
    Obfuscation,
    /// 1.6: what an error says of itself.
    Error,
    /// 2.1: lists and the other objects.
    Object,
}

/// A violated rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) rule: Rule,
    pub(crate) why: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?}: {}", self.rule, self.why)
    }
}

impl std::error::Error for Fault {}

/// The outcome of a check.
pub(crate) type Checked<T = ()> = Result<T, Fault>;

/// Checks the whole answer to `request`, which was sent on the default lane.
pub(crate) fn answer(request: &Value, events: &[Value]) -> Checked {
    let mut stream = Stream::answering(request);
    for event in events {
        stream.feed(event)?;
    }
    stream.end()
}

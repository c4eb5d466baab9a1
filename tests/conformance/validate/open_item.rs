//! The item that a stream is in the middle of: its parts, its texts, and what its end must look like.

use serde_json::{Value, json};

use super::item::{named_call, part, prefix};
use super::shape::{count, ensure, id, list, text};
use super::{Checked, Fault, Rule, item};

/// How a kind of text travels.
#[derive(Debug, PartialEq, Eq)]
struct Channel {
    delta: &'static str,
    done: &'static str,
    /// Where the done event and the part keep the text.
    field: &'static str,
    /// The index that tells texts of an item apart; empty when there is only one.
    index: &'static str,
    part: &'static str,
    item: &'static str,
    /// Whether a part must be added before the first delta.
    explicit: bool,
}

static CHANNELS: [Channel; 6] = [
    Channel {
        delta: "response.output_text.delta",
        done: "response.output_text.done",
        field: "text",
        index: "content_index",
        part: "output_text",
        item: "message",
        explicit: true,
    },
    Channel {
        delta: "response.refusal.delta",
        done: "response.refusal.done",
        field: "refusal",
        index: "content_index",
        part: "refusal",
        item: "message",
        explicit: true,
    },
    Channel {
        delta: "response.function_call_arguments.delta",
        done: "response.function_call_arguments.done",
        field: "arguments",
        index: "",
        part: "",
        item: "function_call",
        explicit: false,
    },
    Channel {
        delta: "response.custom_tool_call_input.delta",
        done: "response.custom_tool_call_input.done",
        field: "input",
        index: "",
        part: "",
        item: "custom_tool_call",
        explicit: false,
    },
    Channel {
        delta: "response.reasoning_summary_text.delta",
        done: "response.reasoning_summary_text.done",
        field: "text",
        index: "summary_index",
        part: "summary_text",
        item: "reasoning",
        explicit: true,
    },
    Channel {
        delta: "response.reasoning_text.delta",
        done: "response.reasoning_text.done",
        field: "text",
        index: "content_index",
        part: "reasoning_text",
        item: "reasoning",
        explicit: false,
    },
];

const PART_EVENTS: [&str; 5] = [
    "response.content_part.added",
    "response.content_part.done",
    "response.reasoning_summary_part.added",
    "response.reasoning_summary_part.done",
    "response.output_text.annotation.added",
];

/// A text that is being written.
#[derive(Debug)]
struct OpenText {
    channel: &'static Channel,
    index: u64,
    deltas: String,
    done: bool,
    /// A part event opened it, and one must close it.
    has_part: bool,
}

/// An item between `output_item.added` and `output_item.done`.
#[derive(Debug)]
pub(super) struct OpenItem {
    added: Value,
    text: Option<OpenText>,
    /// Finished parts of the content and of a reasoning summary.
    contents: Vec<Value>,
    summaries: Vec<Value>,
    /// Finished arguments or input of a call.
    call: Option<String>,
}

impl OpenItem {
    pub(super) fn start(added: &Value) -> Checked<Self> {
        id(added, "id", prefix(added)?)?;
        let empty = match text(added, "type")? {
            "message" => list(added, "content")?.is_empty(),
            "reasoning" => list(added, "summary")?.is_empty(),
            "function_call" => text(added, "arguments")?.is_empty(),
            "custom_tool_call" => text(added, "input")?.is_empty(),
            _ => true,
        };
        let status = added.get("status");
        let optional = matches!(added["type"].as_str(), Some("reasoning" | "compaction"));
        let running = status.map_or(optional, |status| status == "in_progress");
        ensure(empty && running, Rule::ItemStart, || {
            format!("an item starts empty and in progress: {added}")
        })?;
        if ["function_call", "custom_tool_call"].map(Some).contains(&added["type"].as_str()) {
            named_call(added)?;
        }
        Ok(Self { added: added.clone(), text: None, contents: Vec::new(), summaries: Vec::new(), call: None })
    }

    pub(super) fn id(&self) -> &Value {
        &self.added["id"]
    }

    /// Whether events of this kind tell about a part of an item.
    pub(super) fn knows(kind: &str) -> bool {
        PART_EVENTS.contains(&kind)
            || CHANNELS.iter().any(|channel| channel.delta == kind || channel.done == kind)
    }

    /// An event of this item, other than its start and end.
    pub(super) fn feed(&mut self, kind: &str, event: &Value) -> Checked {
        match kind {
            "response.content_part.added" => self.open_part(event, "content_index"),
            "response.content_part.done" => self.close_part(event, "content_index"),
            "response.reasoning_summary_part.added" => self.open_part(event, "summary_index"),
            "response.reasoning_summary_part.done" => self.close_part(event, "summary_index"),
            "response.output_text.annotation.added" => self.open_text(kind).map(drop),
            _ => {
                let of = |channel: &&Channel| channel.delta == kind || channel.done == kind;
                let Some(channel) = CHANNELS.iter().find(of) else {
                    return Err(Fault { rule: Rule::UnknownEvent, why: format!("`{kind}` is no event") });
                };
                if channel.delta == kind { self.delta(channel, event) } else { self.done(channel, event) }
            }
        }
    }

    fn count_of(&self, index: &str) -> u64 {
        let parts = if index == "summary_index" { &self.summaries } else { &self.contents };
        parts.len() as u64
    }

    fn open_part(&mut self, event: &Value, index: &'static str) -> Checked {
        ensure(self.text.is_none(), Rule::PartOrder, || "a part begins within another".to_owned())?;
        let at = count(event, index)?;
        ensure(at == self.count_of(index), Rule::PartIndex, || format!("{index} {at} comes out of order"))?;
        let added = &event["part"];
        part(added)?;
        let fits = |channel: &&Channel| {
            added["type"] == channel.part && self.added["type"] == channel.item && channel.index == index
        };
        let Some(channel) = CHANNELS.iter().find(fits) else {
            let why = format!("a {} has no part {added}", self.added["type"]);
            return Err(Fault { rule: Rule::PartOrder, why });
        };
        ensure(added[channel.field] == "", Rule::ItemStart, || format!("a part starts empty: {added}"))?;
        self.text = Some(OpenText { channel, index: at, deltas: String::new(), done: false, has_part: true });
        Ok(())
    }

    fn open_text(&mut self, kind: &str) -> Checked<&mut OpenText> {
        let missing = || Fault { rule: Rule::PartOrder, why: format!("{kind} without an open part") };
        self.text.as_mut().ok_or_else(missing)
    }

    /// The open text of a channel; some begin with their first event.
    fn text_of(&mut self, channel: &'static Channel, event: &Value) -> Checked<&mut OpenText> {
        ensure(self.added["type"] == channel.item, Rule::ItemId, || {
            format!("{} in a {}", event["type"], self.added["type"])
        })?;
        let index = if channel.index.is_empty() { 0 } else { count(event, channel.index)? };
        if self.text.is_none() && !channel.explicit {
            ensure(self.call.is_none(), Rule::PartOrder, || format!("{} after it was done", event["type"]))?;
            let next = if channel.index.is_empty() { 0 } else { self.count_of(channel.index) };
            ensure(index == next, Rule::PartIndex, || format!("index {index} comes out of order"))?;
            self.text =
                Some(OpenText { channel, index, deltas: String::new(), done: false, has_part: false });
        }
        let open = self.open_text(channel.delta)?;
        ensure(open.channel == channel, Rule::PartOrder, || {
            format!("{} in a part of type {}", event["type"], open.channel.part)
        })?;
        ensure(open.index == index, Rule::PartIndex, || format!("part {} is open, not {index}", open.index))?;
        ensure(!open.done, Rule::PartOrder, || format!("{} after the text was done", event["type"]))?;
        Ok(open)
    }

    fn delta(&mut self, channel: &'static Channel, event: &Value) -> Checked {
        let delta = text(event, "delta")?;
        if channel.part == "output_text" {
            list(event, "logprobs")?;
        }
        self.text_of(channel, event)?.deltas.push_str(delta);
        Ok(())
    }

    fn done(&mut self, channel: &'static Channel, event: &Value) -> Checked {
        let whole = text(event, channel.field)?.to_owned();
        if channel.part == "output_text" {
            list(event, "logprobs")?;
        }
        if channel.item == "function_call" {
            let name = text(event, "name")?;
            ensure(self.added["name"] == name, Rule::ItemChanged, || {
                format!("the call is named {name} now")
            })?;
        }
        let open = self.text_of(channel, event)?;
        ensure(open.deltas == whole, Rule::Deltas, || {
            format!("the deltas are `{}`, {} says `{whole}`", open.deltas, channel.done)
        })?;
        open.done = true;
        if !open.has_part {
            self.text = None;
            if channel.part.is_empty() {
                self.call = Some(whole);
            } else {
                self.contents.push(json!({"type": channel.part, "text": whole}));
            }
        }
        Ok(())
    }

    fn close_part(&mut self, event: &Value, index: &'static str) -> Checked {
        let at = count(event, index)?;
        let done = &event["part"];
        part(done)?;
        let Some(open) = self.text.take() else {
            return Err(Fault { rule: Rule::PartOrder, why: "a part ends that is not open".to_owned() });
        };
        ensure(open.index == at && open.channel.index == index, Rule::PartIndex, || {
            format!("part {} is open, not {index} {at}", open.index)
        })?;
        ensure(open.done, Rule::DoneMissing, || format!("the part ends before {}", open.channel.done))?;
        let same = done["type"] == open.channel.part && done[open.channel.field] == open.deltas.as_str();
        ensure(same, Rule::Deltas, || format!("the deltas are `{}`, the part is {done}", open.deltas))?;
        let parts = if index == "summary_index" { &mut self.summaries } else { &mut self.contents };
        parts.push(done.clone());
        Ok(())
    }

    /// The item is done: it must be what its events said.
    pub(super) fn finish(self, done: &Value) -> Checked {
        if let Some(open) = &self.text {
            let rule = if open.has_part { Rule::PartOrder } else { Rule::DoneMissing };
            return Err(Fault { rule, why: format!("an item ends, and its text is open: {open:?}") });
        }
        item(done)?;
        for field in ["id", "type", "role", "call_id", "name", "namespace"] {
            ensure(self.added.get(field) == done.get(field), Rule::ItemChanged, || {
                format!("{field} was {:?}, is {:?}", self.added.get(field), done.get(field))
            })?;
        }
        let differs = |what: &str| format!("{what} differs from the events: {done}");
        match done["type"].as_str() {
            Some("message") => {
                ensure(done["content"] == json!(self.contents), Rule::DoneItem, || differs("content"))
            }
            Some("function_call") => self.finish_call(&done["arguments"]),
            Some("custom_tool_call") => self.finish_call(&done["input"]),
            Some("reasoning") => {
                ensure(done["summary"] == json!(self.summaries), Rule::DoneItem, || differs("summary"))?;
                let contents = done.get("content").cloned().unwrap_or(json!([]));
                ensure(contents == json!(self.contents), Rule::DoneItem, || differs("content"))
            }
            _ => Ok(()),
        }
    }

    fn finish_call(&self, whole: &Value) -> Checked {
        let Some(call) = &self.call else {
            return Err(Fault {
                rule: Rule::DoneMissing,
                why: format!("a call ends without its done event: {whole}"),
            });
        };
        ensure(whole == call.as_str(), Rule::DoneItem, || {
            format!("the events said `{call}`, the item {whole}")
        })
    }
}

//! A stream of events, fed one by one, section 2.3.

use std::collections::HashSet;

use serde_json::Value;

use super::object::error_frame;
use super::open_item::OpenItem;
use super::response::{Echo, response};
use super::shape::{count, ensure, list, table, text};
use super::{Checked, Fault, Rule};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    New,
    Created,
    Running,
    Ended,
}

/// Fields of a response that may differ between its events.
const CHANGING: [&str; 7] =
    ["status", "completed_at", "output", "usage", "error", "incomplete_details", "baton"];

/// One response on its way.
#[derive(Debug)]
pub(crate) struct Stream {
    lane: Option<String>,
    echo: Option<Echo>,
    phase: Phase,
    n_events: u64,
    /// The response as `response.created` showed it.
    created: Value,
    /// Items that are done.
    items: Vec<Value>,
    open: Option<OpenItem>,
    ids: HashSet<String>,
}

impl Stream {
    /// A response on the default lane, to a request nobody knows.
    pub(crate) fn new() -> Self {
        Self {
            lane: None,
            echo: None,
            phase: Phase::New,
            n_events: 0,
            created: Value::Null,
            items: Vec::new(),
            open: None,
            ids: HashSet::new(),
        }
    }

    /// The answer to `request`, on the lane it names.
    pub(crate) fn answering(request: &Value) -> Self {
        let lane = request.get("stream_id").and_then(Value::as_str).map(str::to_owned);
        Self { lane, echo: Some(Echo::of(request)), ..Self::new() }
    }

    /// True after the terminal event, or an error in its place.
    pub(crate) fn has_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    /// The next event.
    pub(crate) fn feed(&mut self, event: &Value) -> Checked {
        let kind = text(event, "type")?;
        ensure(self.phase != Phase::Ended, Rule::AfterTerminal, || format!("{kind} after the end"))?;
        let lane = event.get("stream_id").and_then(Value::as_str);
        let echoed = lane == self.lane.as_deref() && (lane.is_some() || event.get("stream_id").is_none());
        ensure(echoed, Rule::StreamId, || format!("lane {:?}, event {event}", self.lane))?;
        if kind == "error" {
            ensure(self.phase == Phase::New, Rule::ErrorAfterCreated, || event.to_string())?;
            self.phase = Phase::Ended;
            return error_frame(event);
        }
        let number = count(event, "sequence_number")?;
        ensure(number == self.n_events, Rule::SequenceNumber, || {
            format!("{kind} has number {number}, {} comes next", self.n_events)
        })?;
        self.n_events += 1;
        ensure(event.get("obfuscation").is_none(), Rule::Obfuscation, || event.to_string())?;
        self.dispatch(kind, event)
    }

    fn dispatch(&mut self, kind: &str, event: &Value) -> Checked {
        if kind == "response.created" {
            return self.create(event);
        }
        ensure(self.phase != Phase::New, Rule::CreatedFirst, || format!("{kind} comes first"))?;
        match kind {
            "response.queued" | "response.in_progress" => self.progress(kind, event),
            "response.completed" | "response.incomplete" | "response.failed" => self.terminate(kind, event),
            _ if self.phase == Phase::Created => {
                let why = format!("{kind} before response.in_progress");
                Err(Fault { rule: Rule::InProgressMissing, why })
            }
            "response.output_item.added" => self.add_item(event),
            "response.output_item.done" => self.finish_item(event),
            _ => {
                ensure(OpenItem::knows(kind), Rule::UnknownEvent, || format!("`{kind}` is no event"))?;
                let Some(open) = &mut self.open else {
                    return Err(Fault { rule: Rule::ItemId, why: format!("no item is open for {event}") });
                };
                at_index(event, self.items.len())?;
                let of = text(event, "item_id")?;
                ensure(*open.id() == of, Rule::ItemId, || format!("{} is open, not {of}", open.id()))?;
                open.feed(kind, event)
            }
        }
    }

    fn create(&mut self, event: &Value) -> Checked {
        ensure(self.phase == Phase::New, Rule::CreatedFirst, || "a second response.created".to_owned())?;
        let created = table(event, "response")?;
        response(created)?;
        begun(created, &["in_progress", "queued"])?;
        if let Some(echo) = &self.echo {
            echo.check(created)?;
        }
        self.created = created.clone();
        self.phase = Phase::Created;
        Ok(())
    }

    fn progress(&mut self, kind: &str, event: &Value) -> Checked {
        let shown = table(event, "response")?;
        response(shown)?;
        self.same(shown)?;
        if kind == "response.queued" {
            ensure(self.phase == Phase::Created, Rule::Status, || "queued, but it ran already".to_owned())?;
            return begun(shown, &["queued"]);
        }
        self.phase = Phase::Running;
        ensure(shown["status"] == "in_progress", Rule::Status, || format!("{kind} says {}", shown["status"]))
    }

    fn add_item(&mut self, event: &Value) -> Checked {
        ensure(self.open.is_none(), Rule::ItemOverlap, || format!("an item begins within another: {event}"))?;
        at_index(event, self.items.len())?;
        let added = table(event, "item")?;
        for field in ["id", "call_id"] {
            if let Some(id) = added.get(field).and_then(Value::as_str) {
                ensure(self.ids.insert(id.to_owned()), Rule::IdReused, || format!("{id} is used twice"))?;
            }
        }
        self.open = Some(OpenItem::start(added)?);
        Ok(())
    }

    fn finish_item(&mut self, event: &Value) -> Checked {
        at_index(event, self.items.len())?;
        let done = table(event, "item")?;
        let Some(open) = self.open.take() else {
            return Err(Fault { rule: Rule::ItemId, why: format!("an item ends that never began: {done}") });
        };
        open.finish(done)?;
        self.items.push(done.clone());
        Ok(())
    }

    fn terminate(&mut self, kind: &str, event: &Value) -> Checked {
        let ended = table(event, "response")?;
        response(ended)?;
        self.same(ended)?;
        let status = kind.trim_start_matches("response.");
        ensure(ended["status"] == status, Rule::Status, || format!("{kind} says {}", ended["status"]))?;
        // An interrupted response drops what it was in the middle of.
        let interrupted = ended["incomplete_details"]["reason"] == "interrupted";
        ensure(self.open.is_none() || interrupted, Rule::ItemLeftOpen, || {
            format!("{kind}, and this item is open: {:?}", self.open)
        })?;
        ensure(*list(ended, "output")? == self.items, Rule::Output, || {
            format!("the events had {:?}, the response has {}", self.items, ended["output"])
        })?;
        self.phase = Phase::Ended;
        Ok(())
    }

    /// What does not change has not changed.
    fn same(&self, shown: &Value) -> Checked {
        let of = |response: &Value| {
            let mut fields = response.as_object().cloned().unwrap_or_default();
            CHANGING.iter().for_each(|field| drop(fields.remove(*field)));
            fields
        };
        let (before, now) = (of(&self.created), of(shown));
        let changed = before.iter().find(|(field, value)| now.get(*field) != Some(value));
        let changed =
            changed.map(|(field, _)| field).or_else(|| now.keys().find(|field| !before.contains_key(*field)));
        ensure(changed.is_none(), Rule::ResponseChanged, || format!("{changed:?} of the response changed"))
    }

    /// The stream is over.
    pub(crate) fn end(&self) -> Checked {
        ensure(self.has_ended(), Rule::TerminalMissing, || format!("it ended after {} events", self.n_events))
    }
}

/// A response that has nothing to show yet.
fn begun(response: &Value, statuses: &[&str]) -> Checked {
    let status = response["status"].as_str().unwrap_or_default();
    let empty = response["output"].as_array().is_some_and(Vec::is_empty) && response["usage"].is_null();
    ensure(statuses.contains(&status) && empty, Rule::Status, || format!("not new: {response}"))
}

fn at_index(event: &Value, next: usize) -> Checked {
    let index = count(event, "output_index")?;
    ensure(index == next as u64, Rule::OutputIndex, || format!("output_index {index}, {next} comes next"))
}

//! Plays a recording against a cluster as its client would have, and validates every answer.
//!
//! A frame goes out as it was recorded, but for what depends on the server: response ids, items and call ids are those
//! that this server sent. The model, a temperature of 0 and a limit of output tokens are set; and where the client went
//! on with the output of a call, the call is forced, because a small model would rarely make it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use super::recording::{Answer, Recording, Step};
use super::validate::{self, Echo, Stream};
use crate::client::Socket;
use crate::cluster::{Cluster, until};
use crate::http;
use crate::plain::TEXT;

/// Output tokens of an answer, and of a forced call.
const ANSWER_TOKENS: u32 = 24;
const CALL_TOKENS: u32 = 192;
/// How long a worker may go on for a client that left.
const FAREWELL: Duration = Duration::from_secs(2);

/// What came of a recording.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Played {
    pub(crate) n_answers: usize,
    /// The first refusal; nothing was sent after it.
    pub(crate) refused: Option<String>,
}

/// What the server gave in place of the recording's ids.
#[derive(Debug, Default)]
struct Given {
    responses: HashMap<String, String>,
    /// Items by their recorded id, and calls by their recorded call id.
    items: HashMap<String, Value>,
    /// The newest response: what an id that was not recorded means.
    latest: Option<String>,
}

struct Player<'a> {
    cluster: &'a Cluster,
    socket: Option<Socket>,
    given: Given,
    played: Played,
}

/// Plays the whole recording. An answer that violates the protocol is an error.
pub(crate) async fn play(cluster: &Cluster, recording: &Recording) -> anyhow::Result<Played> {
    let mut player = Player { cluster, socket: None, given: Given::default(), played: Played::default() };
    for (at, step) in recording.steps.iter().enumerate() {
        let context = || format!("{}, step {at}", recording.name);
        player.step(step).await.with_context(context)?;
        if player.played.refused.is_some() {
            break;
        }
    }
    Ok(player.played)
}

impl Player<'_> {
    fn address(&self) -> SocketAddr {
        self.cluster.address()
    }

    async fn step(&mut self, step: &Step) -> anyhow::Result<()> {
        match step {
            Step::Connect => self.socket = Some(Socket::open(self.address()).await?),
            Step::Leave => self.socket = None,
            Step::Frame { frame, answer } => {
                let frame = self.given.prepare(frame, answer);
                self.frame(&frame, answer).await?;
            }
            Step::Request { method, path, body, answer } => {
                ensure!(method == "POST" && path == "/v1/responses", "{method} {path} is not played here");
                let body = self.given.prepare(body, answer);
                let events = self.post(&body).await?;
                self.take(&events, answer)?;
            }
        }
        Ok(())
    }

    async fn frame(&mut self, frame: &Value, answer: &Answer) -> anyhow::Result<()> {
        let socket = self.socket.as_mut().context("a frame without a connection")?;
        socket.send(frame).await?;
        let mut stream = Stream::answering(frame);
        let mut events = Vec::new();
        while !stream.has_ended() {
            let event = socket.event().await?;
            stream.feed(&event).with_context(|| event.to_string())?;
            let began = event["type"] == "response.in_progress";
            events.push(event);
            if answer.abandoned && began {
                return self.abandon().await;
            }
        }
        self.take(&events, answer)
    }

    /// Leaves without a word, as Codex does when its user interrupts.
    async fn abandon(&mut self) -> anyhow::Result<()> {
        self.socket = None;
        let left = Instant::now();
        until("the turn of a client that left ends", async || self.cluster.live_turns() == 0).await;
        ensure!(left.elapsed() < FAREWELL, "the turn went on for {:?}", left.elapsed());
        Ok(())
    }

    /// The events of the answer; of a plain answer, its end.
    async fn post(&self, body: &Value) -> anyhow::Result<Vec<Value>> {
        let reply = http::post(self.address(), body).await?;
        if reply.status != 200 {
            validate::error_body(&reply.json(), reply.status)?;
            return Ok(vec![json!({"type": "error", "error": reply.json()["error"]})]);
        }
        if body["stream"] == true {
            let events = reply.events().events;
            validate::answer(body, &events)?;
            return Ok(events);
        }
        let response = reply.json();
        validate::response(&response)?;
        Echo::of(body).check(&response)?;
        Ok(vec![json!({"type": "response.completed", "response": response})])
    }

    fn take(&mut self, events: &[Value], answer: &Answer) -> anyhow::Result<()> {
        let last = events.last().context("no events")?;
        if last["type"] == "error" {
            self.played.refused = last["error"]["code"].as_str().map(str::to_owned);
            return Ok(());
        }
        if last["type"] == "response.failed" {
            bail!("the turn failed: {}", last["response"]["error"]);
        }
        self.played.n_answers += 1;
        self.given.learn(&last["response"], answer)
    }
}

fn is_call(item: &Value) -> bool {
    matches!(item["type"].as_str(), Some("function_call" | "custom_tool_call"))
}

impl Given {
    /// The frame as a client of this server would send it.
    fn prepare(&self, recorded: &Value, answer: &Answer) -> Value {
        let mut frame = recorded.clone();
        frame["model"] = TEXT.name.as_str().into();
        frame["temperature"] = 0.into();
        frame["max_output_tokens"] = ANSWER_TOKENS.into();
        if let Some(id) = recorded.get("previous_response_id").and_then(Value::as_str) {
            let ours = self.responses.get(id).or(self.latest.as_ref());
            frame["previous_response_id"] = ours.map_or(id, String::as_str).into();
        }
        if let Some(items) = recorded["input"].as_array() {
            frame["input"] = items.iter().filter_map(|item| self.substitute(item, items)).collect();
        }
        if answer.calls.iter().any(|call| !self.items.contains_key(call))
            && let Some(choice) = forced(recorded, answer)
        {
            frame["tool_choice"] = choice;
            frame["max_output_tokens"] = CALL_TOKENS.into();
        }
        frame
    }

    /// The item with this server's ids and texts. An output without its call is left out.
    fn substitute(&self, item: &Value, all: &[Value]) -> Option<Value> {
        let known = |field: &str| item[field].as_str().and_then(|id| self.items.get(id));
        let mut item = item.clone();
        if item["type"].as_str().is_some_and(|kind| kind.ends_with("_call_output")) {
            if let Some(call) = known("call_id") {
                item["call_id"] = call["call_id"].clone();
                return Some(item);
            }
            let call = |other: &Value| is_call(other) && other["call_id"] == item["call_id"];
            return all.iter().any(call).then_some(item);
        }
        let Some(ours) = known("call_id").or_else(|| known("id")).filter(|ours| ours["type"] == item["type"])
        else {
            return Some(item);
        };
        for field in ["id", "call_id", "name", "arguments", "input", "encrypted_content", "summary"] {
            if let (Some(_), Some(value)) = (item.get(field), ours.get(field)) {
                item[field] = value.clone();
            }
        }
        if let Some(parts) = ours["content"].as_array().filter(|_| item.get("content").is_some()) {
            let part = |part: &Value| json!({"type": part["type"], "text": part["text"]});
            item["content"] = parts.iter().map(part).collect();
        }
        Some(item)
    }

    /// Remembers what stands for the recording's ids.
    fn learn(&mut self, response: &Value, answer: &Answer) -> anyhow::Result<()> {
        let id = response["id"].as_str().context("a response has an id")?.to_owned();
        if let Some(recorded) = &answer.response_id {
            self.responses.insert(recorded.clone(), id.clone());
        }
        self.latest = Some(id);
        let output = response["output"].as_array().context("a response has output")?;
        for kind in ["message", "function_call", "custom_tool_call", "reasoning", "compaction"] {
            let of = |item: &&Value| item["type"] == kind;
            let pairs = answer.items.iter().filter(of).zip(output.iter().filter(of));
            for (recorded, ours) in pairs {
                let ids = ["id", "call_id"].into_iter().filter_map(|field| recorded[field].as_str());
                ids.for_each(|id| drop(self.items.insert(id.to_owned(), ours.clone())));
            }
        }
        let mut calls = output.iter().filter(|item| is_call(item));
        for call in &answer.calls {
            if let (false, Some(ours)) = (self.items.contains_key(call), calls.next()) {
                self.items.insert(call.clone(), ours.clone());
            }
        }
        let wanted = answer.calls.iter().any(|call| self.items.contains_key(call)) || answer.calls.is_empty();
        ensure!(wanted, "a call was to be made, this was: {}", response["output"]);
        Ok(())
    }
}

/// The choice that makes the recorded call, or the first function there is.
fn forced(frame: &Value, answer: &Answer) -> Option<Value> {
    let recorded = answer.items.iter().find(|item| is_call(item));
    let named = recorded.map(|item| {
        let kind = if item["type"] == "custom_tool_call" { "custom" } else { "function" };
        json!({"type": kind, "name": item["name"]})
    });
    let first = || {
        let tools = frame["tools"].as_array()?;
        let tool = tools.iter().find(|tool| tool["type"] == "function")?;
        Some(json!({"type": "function", "name": tool["name"]}))
    };
    named.or_else(first)
}

#[cfg(test)]
mod tests;

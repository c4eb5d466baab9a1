//! Recordings of real clients: what they sent, and the ids that the server of that day gave them.
//!
//! The small ones lie in `fixtures/`, made by `trim.py`. The originals, when they are there, have the same form.

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::Value;

/// One thing that a client did.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// It opened a WebSocket, in place of the one it had.
    Connect,
    /// It sent a frame and read the answer, as far as `answer` goes.
    Frame { frame: Value, answer: Answer },
    /// It sent an HTTP request.
    Request { method: String, path: String, body: Value, answer: Answer },
    /// It left.
    Leave,
}

/// What the server of the recording said to a frame.
#[derive(Debug, Clone, Default)]
pub(crate) struct Answer {
    /// Absent when the client left before the end, when the server refused, or for HTTP.
    pub(crate) response_id: Option<String>,
    /// Type, id, and the name and id of calls.
    pub(crate) items: Vec<Value>,
    /// The next thing the client did was to leave, in the middle of the answer.
    pub(crate) abandoned: bool,
    /// Calls whose output the client sends next: the answer must have had them.
    pub(crate) calls: Vec<String>,
}

/// A client's part of a conversation.
#[derive(Debug, Clone)]
pub(crate) struct Recording {
    pub(crate) name: String,
    pub(crate) steps: Vec<Step>,
}

impl Recording {
    /// The small recording of this name.
    pub(crate) fn small(name: &str) -> anyhow::Result<Self> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("conformance/fixtures");
        Self::read(&folder.join(format!("{name}.json")))
    }

    /// All original recordings, if this checkout lies beside them.
    pub(crate) fn originals() -> anyhow::Result<Vec<Self>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/fixtures/protocol");
        if !folder.is_dir() {
            return Ok(Vec::new());
        }
        let mut paths: Vec<PathBuf> = Vec::new();
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            let text = std::fs::read_to_string(&path)?;
            if path.extension().is_some_and(|end| end == "json") && text.contains("\"exchange\"") {
                paths.push(path);
            }
        }
        paths.sort();
        paths.iter().map(|path| Self::read(path)).collect()
    }

    fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let recording: Value = serde_json::from_str(&text)?;
        let exchange = recording["exchange"].as_array().context("a recording has an exchange")?;
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        Ok(Self { name, steps: steps(exchange) })
    }
}

fn steps(exchange: &[Value]) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut tools = Value::Null;
    for (at, entry) in exchange.iter().enumerate().filter(|(_, entry)| entry["dir"] == "client") {
        let answer = || answer(&exchange[at + 1..]);
        match entry["kind"].as_str() {
            Some("ws_upgrade") => steps.push(Step::Connect),
            Some("ws_text") => {
                steps.push(Step::Frame { frame: with_tools(&entry["frame"], &mut tools), answer: answer() });
            }
            Some("http") => {
                let field = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
                steps.push(Step::Request {
                    method: field("method"),
                    path: field("path"),
                    body: with_tools(&entry["body"], &mut tools),
                    answer: answer(),
                });
            }
            _ => steps.push(Step::Leave),
        }
    }
    steps
}

/// The frame with its tools, which a small recording writes only once.
fn with_tools(frame: &Value, last: &mut Value) -> Value {
    let mut frame = frame.clone();
    match frame.get("tools") {
        Some(tools) if tools == "same" => frame["tools"] = last.clone(),
        Some(tools) => *last = tools.clone(),
        None => {}
    }
    frame
}

/// What came after a frame, up to the client's next act.
fn answer(after: &[Value]) -> Answer {
    let n_server = after.iter().take_while(|entry| entry["dir"] == "server").count();
    let (events, next) = after.split_at(n_server);
    let mut answer = Answer::default();
    let mut ended = false;
    for event in events.iter().map(|entry| &entry["event"]) {
        match event["type"].as_str() {
            Some("response.output_item.done") => answer.items.push(event["item"].clone()),
            Some("response.completed" | "response.incomplete" | "response.failed") => {
                answer.response_id = event["response"]["id"].as_str().map(str::to_owned);
                ended = true;
            }
            Some("error") => ended = true,
            _ => {}
        }
    }
    answer.abandoned = !ended && next.first().is_some_and(|entry| entry["kind"] == "ws_close");
    answer.calls = next.iter().find(|entry| has_input(entry)).map(new_calls).unwrap_or_default();
    answer
}

fn body(entry: &Value) -> &Value {
    entry.get("frame").or_else(|| entry.get("body")).unwrap_or(&Value::Null)
}

fn has_input(entry: &Value) -> bool {
    entry["dir"] == "client" && body(entry).get("input").is_some()
}

/// Calls that end the input of a frame with their outputs.
fn new_calls(entry: &Value) -> Vec<String> {
    let items = body(entry)["input"].as_array().cloned().unwrap_or_default();
    let is_output = |item: &&Value| item["type"].as_str().is_some_and(|kind| kind.ends_with("_call_output"));
    let asks = |item: &&Value| item["type"] == "compaction_trigger" || item["role"] == "user";
    let last = items.iter().rev().skip_while(asks).take_while(is_output);
    let mut calls: Vec<String> =
        last.filter_map(|item| item["call_id"].as_str().map(str::to_owned)).collect();
    calls.reverse();
    calls
}

//! Frames and bodies that no client sends: recorded ones, damaged. Whatever comes, the gateway answers, every event and
//! every error has its form, nothing panics, and the next client is served.
//!
//! A few seconds each here; `cargo xtask fuzz frames|bodies --seconds 60` runs them for longer, `--seed` elsewhere.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::{Map, Value, json};
use tokio_tungstenite::tungstenite::Message;

use crate::client::{Frame, Socket, create};
use crate::cluster::{Cluster, Spec};
use crate::conformance::recording::{Recording, Step};
use crate::http;

/// Damaged frames that are sent before the answers are waited for.
const VOLLEY: usize = 8;
/// Deeper than any request; JSON parsers recurse.
const DEEP: usize = 3000;

/// SplitMix64 (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `n`, which is not zero.
    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n as u64).expect("below a usize")
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

/// How long to go on, and where to begin.
#[expect(clippy::disallowed_methods, reason = "xtask sets them for a longer run")]
fn settings() -> (Duration, Random) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    (Duration::from_secs(number("BATON_FUZZ_S").unwrap_or(3)), Random(number("BATON_FUZZ_SEED").unwrap_or(1)))
}

/// What clients have sent, to be damaged.
fn seeds(name: &str) -> anyhow::Result<Vec<Value>> {
    let recording = Recording::small(name)?;
    Ok(recording
        .steps
        .into_iter()
        .filter_map(|step| match step {
            Step::Frame { frame, .. } => Some(frame),
            Step::Request { body, .. } => Some(body),
            Step::Connect | Step::Leave => None,
        })
        .filter(Value::is_object)
        .collect())
}

const RECORDINGS: [&str; 10] = [
    "openai_python_ws_stream_id",
    "openai_python_ws_tool",
    "openai_python_http_parse_schema",
    "openai_python_http_stream_helper_tool",
    "openai_python_ws_generate_false",
    "codex_ws_tool_small_config",
    "codex_ws_custom_tool_apply_patch",
    "codex_ws_remote_compaction_v2",
    "codex_ws_responses_lite_additional_tools",
    "codex_http_sse_reasoning_replay",
];

fn all_seeds() -> anyhow::Result<Vec<Value>> {
    let mut all = Vec::new();
    for name in RECORDINGS {
        all.extend(seeds(name)?);
    }
    all.push(json!({"type": "response.interrupt", "response_id": "resp_1", "mode": "discard_partial_items"}));
    all.push(json!({"type": "response.cancel", "response_id": "resp_1"}));
    all.push(json!({"type": "response.steer", "previous_response_id": "resp_1", "input": "Stop."}));
    ensure!(all.len() > 20, "the recordings hold frames");
    Ok(all)
}

/// A value that has no business where it is put.
fn odd(random: &mut Random) -> Value {
    match random.below(16) {
        0 => Value::Null,
        1 => json!(true),
        2 => json!(-1),
        3 => json!(u64::MAX),
        4 => json!(1e308),
        5 => json!(0.5),
        6 => json!(""),
        7 => json!("\u{0}\u{feff}\u{10ffff}<|im_end|>"),
        8 => json!("x".repeat(random.below(5000))),
        9 => json!([]),
        10 => json!({}),
        11 => json!([null, [[]], {"type": "message"}]),
        12 => json!({"type": ["function"], "name": 7}),
        13 => json!({"type": "function", "name": "f", "parameters": {"$ref": "#"}}),
        14 => json!({"type": "grammar", "syntax": "lark", "definition": "start: start"}),
        _ => json!({"role": "user", "content": [{"type": "input_text"}]}),
    }
}

/// Damages one place of `value`, which may lie deep.
fn damage(value: &mut Value, random: &mut Random) {
    match value {
        Value::Object(fields) if !fields.is_empty() && !random.one_in(6) => damage_field(fields, random),
        Value::Array(items) if !items.is_empty() && !random.one_in(6) => {
            let at = random.below(items.len());
            match random.below(6) {
                0 => drop(items.remove(at)),
                1 => items.insert(at, items[at].clone()),
                _ => damage(&mut items[at], random),
            }
        }
        other => *other = odd(random),
    }
}

fn damage_field(fields: &mut Map<String, Value>, random: &mut Random) {
    let names: Vec<String> = fields.keys().cloned().collect();
    let name = random.pick(&names);
    match random.below(8) {
        0 => drop(fields.remove(name)),
        1 => {
            let other = random.pick(&names).clone();
            let value = fields[name].clone();
            fields.insert(other, value);
        }
        _ => {
            if let Some(inner) = fields.get_mut(name) {
                damage(inner, random);
            }
        }
    }
}

/// A request, damaged as a value or as text. Those that are still good say little.
fn damaged(seeds: &[Value], random: &mut Random) -> Vec<u8> {
    let mut request = random.pick(seeds).clone();
    request["max_output_tokens"] = 1.into();
    for _ in 0..=random.below(3) {
        damage(&mut request, random);
    }
    let mut bytes = request.to_string().into_bytes();
    match random.below(12) {
        0 => bytes.truncate(random.below(bytes.len() + 1)),
        1 => {
            let at = random.below(bytes.len());
            bytes[at] = random.next().to_le_bytes()[0];
        }
        2 => {
            let at = random.below(bytes.len());
            bytes.splice(at..at, *b"[{\"");
        }
        3 if random.one_in(20) => {
            bytes = format!("{{\"input\":{}{}}}", "[".repeat(DEEP), "]".repeat(DEEP)).into_bytes();
        }
        _ => {}
    }
    bytes
}

/// An error says what happened to whom.
fn check_error(error: &Value, whole: &Value) -> anyhow::Result<()> {
    ensure!(error["code"].is_string() && error["message"].is_string(), "{whole}");
    ensure!(error["code"] != "server_error", "{whole}");
    Ok(())
}

fn check_event(event: &Value) -> anyhow::Result<()> {
    let kind = event["type"].as_str().context("an event has a type")?;
    match kind {
        "error" => check_error(&event["error"], event),
        "response.failed" => check_error(&event["response"]["error"], event),
        _ => Ok(()),
    }
}

/// Sends frames and reads until the last, which nobody understands, has been answered.
async fn volley(socket: &mut Socket, frames: Vec<Message>, mark: &str) -> anyhow::Result<bool> {
    for frame in frames {
        // The gateway may have hung up on one of them.
        if socket.send_message(frame).await.is_err() {
            return Ok(false);
        }
    }
    if socket.send(&json!({"type": mark})).await.is_err() {
        return Ok(false);
    }
    loop {
        match socket.next().await {
            Ok(Frame::Event(event)) => {
                check_event(&event)?;
                if event.to_string().contains(mark) {
                    return Ok(true);
                }
            }
            Ok(Frame::Pong(_)) => {}
            Ok(Frame::Closed(_)) => return Ok(false),
            Err(error) if error.to_string().contains("silent") => return Err(error),
            Err(_) => return Ok(false),
        }
    }
}

/// After all that, a client is served as if nothing had been.
async fn still_serves(address: SocketAddr) -> anyhow::Result<()> {
    Socket::open(address).await?.turn(&create("Hello.")).await?.expect_answer();
    Ok(())
}

async fn cluster() -> anyhow::Result<Cluster> {
    let api = api_gateway::Config { max_request_bytes: 1 << 20, ..Default::default() };
    let mut cluster = Cluster::start(Spec { api, n_blocks: 600, ..Spec::aggregated(1) }).await?;
    // Some of what is sent is a good request that a worker cannot follow; a panic is no warning and is not forgiven.
    cluster.forgive_warnings();
    Ok(cluster)
}

#[tokio::test]
async fn frames() -> anyhow::Result<()> {
    let (time, mut random) = settings();
    let cluster = cluster().await?;
    let seeds = all_seeds()?;
    let began = Instant::now();
    let mut n_frames = 0;
    let mut socket = Socket::open(cluster.address()).await?;
    while began.elapsed() < time {
        let frames = (0..VOLLEY).map(|_| {
            let bytes = damaged(&seeds, &mut random);
            match (String::from_utf8(bytes), random.below(10)) {
                (Ok(text), 1..) => Message::text(text),
                (Ok(text), _) => Message::binary(text.into_bytes()),
                (Err(error), _) => Message::binary(error.into_bytes()),
            }
        });
        let (frames, mark) = (frames.collect(), format!("fuzz.{n_frames}"));
        if !volley(&mut socket, frames, &mark).await? {
            socket = Socket::open(cluster.address()).await?;
        }
        n_frames += VOLLEY;
    }
    still_serves(cluster.address()).await?;
    println!("{n_frames} frames in {:?}", began.elapsed());
    Ok(())
}

#[tokio::test]
async fn bodies() -> anyhow::Result<()> {
    const PATHS: [(&str, &str); 8] = [
        ("POST", "/v1/responses"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/responses/input_tokens"),
        ("POST", "/v1/responses/compact"),
        ("POST", "/v1/conversations"),
        ("POST", "/v1/conversations/conv_1/items"),
        ("GET", "/v1/responses/resp_%00?stream=true&starting_after=-1"),
        ("DELETE", "/v1/responses/%F0%9F%92%A9"),
    ];
    let (time, mut random) = settings();
    let cluster = cluster().await?;
    let seeds = all_seeds()?;
    let began = Instant::now();
    let mut n_bodies = 0;
    while began.elapsed() < time {
        let (method, path) = *random.pick(&PATHS);
        let body = damaged(&seeds, &mut random);
        let reply = http::request_bytes(cluster.address(), method, path, &body).await?;
        let shown = || format!("{method} {path} {}: {reply:?}", String::from_utf8_lossy(&body));
        ensure!((200..500).contains(&reply.status) || reply.status == 503, "{}", shown());
        if reply.status >= 400 {
            let answer: Value = serde_json::from_str(&reply.body).with_context(shown)?;
            check_error(&answer["error"], &answer).with_context(shown)?;
        }
        n_bodies += 1;
    }
    still_serves(cluster.address()).await?;
    println!("{n_bodies} bodies in {:?}", began.elapsed());
    Ok(())
}

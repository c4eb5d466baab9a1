//! Asks on each transport, and validates the answer.

use std::net::SocketAddr;

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::validate::{self, Echo};
use crate::client::{Socket, Turn};
use crate::http;
use crate::plain::TEXT;

/// A greedy request whose answer ends by itself.
pub(crate) fn body(input: impl Into<Value>) -> Value {
    json!({"model": TEXT.name, "input": input.into(), "temperature": 0})
}

/// The same as a frame.
pub(crate) fn frame(input: impl Into<Value>) -> Value {
    let mut frame = body(input);
    frame["type"] = "response.create".into();
    frame
}

/// A turn on the socket; it may be refused.
pub(crate) async fn on_socket(socket: &mut Socket, frame: &Value) -> anyhow::Result<Turn> {
    let turn = socket.turn(frame).await?;
    validate::answer(frame, &turn.events).with_context(|| told(&turn))?;
    Ok(turn)
}

/// What to show of an answer that is not as it should be.
fn told(turn: &Turn) -> String {
    let mut kinds = turn.kinds();
    kinds.dedup();
    format!("{kinds:?} ending in {}", turn.last())
}

/// A stream over HTTP.
pub(crate) async fn streamed(address: SocketAddr, body: &Value) -> anyhow::Result<Turn> {
    let mut body = body.clone();
    body["stream"] = true.into();
    let reply = http::post(address, &body).await?;
    ensure!(reply.status == 200 && reply.head.contains("content-type: text/event-stream"), "{reply:?}");
    let turn = reply.events();
    validate::answer(&body, &turn.events).with_context(|| told(&turn))?;
    Ok(turn)
}

/// A whole response over HTTP.
pub(crate) async fn whole(address: SocketAddr, body: &Value) -> anyhow::Result<Value> {
    let reply = http::post(address, body).await?;
    ensure!(reply.status == 200, "{reply:?}");
    let response = reply.json();
    validate::response(&response).with_context(|| response.to_string())?;
    Echo::of(body).check(&response)?;
    Ok(response)
}

/// Any request with a JSON answer, errors among them.
pub(crate) async fn json(
    address: SocketAddr,
    method: &str,
    path: &str,
    body: &Value,
) -> anyhow::Result<(u16, Value)> {
    let text = if body.is_null() { String::new() } else { body.to_string() };
    let reply = http::request(address, method, path, &text).await?;
    let answer = if reply.body.is_empty() { Value::Null } else { reply.json() };
    if reply.status >= 400 {
        validate::error_body(&answer, reply.status).with_context(|| format!("{method} {path}: {answer}"))?;
    }
    Ok((reply.status, answer))
}

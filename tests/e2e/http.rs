//! HTTP/1.1 by hand: one request per connection.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::Turn;

const PATIENCE: Duration = Duration::from_secs(60);

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    /// Lower-case names.
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    /// The events of an SSE answer, whose names must agree with their bodies and which must end with `[DONE]`.
    pub(crate) fn events(&self) -> Turn {
        let (events, end) = self.body.split_at(self.body.len().saturating_sub(14));
        assert_eq!(end, "data: [DONE]\n\n", "{self:?}");
        let events = events.split_terminator("\n\n").map(|event| {
            let (name, data) = event.split_once('\n').expect("an event has two lines");
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
            assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
            data
        });
        Turn { events: events.collect() }
    }
}

/// Sends a request; the connection is for the caller to read, or to drop.
pub(crate) async fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    body: &[u8],
) -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    // A server may answer and close before it has read everything.
    let _ = stream.write_all(body).await;
    Ok(stream)
}

/// Sends a request with an API key and reads the whole answer.
pub(crate) async fn request_as(
    key: &str,
    address: SocketAddr,
    method: &str,
    path: &str,
    body: &str,
) -> anyhow::Result<Reply> {
    let mut stream = TcpStream::connect(address).await?;
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(head.as_bytes()).await?;
    read(stream).await
}

/// Sends a request and reads the whole answer.
pub(crate) async fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    body: &str,
) -> anyhow::Result<Reply> {
    read(send(address, method, path, body.as_bytes()).await?).await
}

/// The same with a body that may be no text.
pub(crate) async fn request_bytes(
    address: SocketAddr,
    method: &str,
    path: &str,
    body: &[u8],
) -> anyhow::Result<Reply> {
    read(send(address, method, path, body).await?).await
}

/// Reads the whole answer of a request that was sent.
pub(crate) async fn read(mut stream: TcpStream) -> anyhow::Result<Reply> {
    let mut answer = Vec::new();
    let read = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.context("no answer")?;
    // What was answered before a reset counts.
    if answer.is_empty() {
        read?;
    }
    let answer = String::from_utf8(answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no end of the head")?;
    let head = head.to_lowercase();
    let status = head.split(' ').nth(1).context("no status")?.parse()?;
    let body = if head.contains("transfer-encoding: chunked") { unchunk(body)? } else { body.to_owned() };
    Ok(Reply { status, head, body })
}

/// `POST /v1/responses`.
pub(crate) async fn post(address: SocketAddr, body: &Value) -> anyhow::Result<Reply> {
    request(address, "POST", "/v1/responses", &body.to_string()).await
}

fn unchunk(mut rest: &str) -> anyhow::Result<String> {
    let mut body = String::new();
    loop {
        let (length, after) = rest.split_once("\r\n").context("a chunk without its length")?;
        let length = usize::from_str_radix(length, 16)?;
        if length == 0 {
            return Ok(body);
        }
        body.push_str(after.get(..length).context("a chunk is cut")?);
        rest = after.get(length + 2..).context("a chunk is cut")?;
    }
}

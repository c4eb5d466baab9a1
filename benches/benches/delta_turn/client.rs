//! A client that forks one response again and again over one WebSocket.

use std::time::Duration;

use anyhow::{Context, bail};
use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

const TURN_LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Client {
    socket: WebSocketStream<TcpStream>,
    /// Fields of every request.
    fixed: Value,
}

/// What a client sends again with each turn.
#[derive(Debug, Clone, Default)]
pub(crate) struct Resent {
    pub(crate) instructions: String,
    /// JSON, a list.
    pub(crate) tools: Value,
}

/// How a turn ended.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) id: String,
    pub(crate) input_tokens: u64,
    pub(crate) output_tokens: u64,
    pub(crate) bytes_up: usize,
    pub(crate) bytes_down: usize,
}

impl Client {
    /// Connects; each turn will carry what is `resent`, unless it is empty.
    pub(crate) async fn connect(
        address: std::net::SocketAddr,
        model: &str,
        resent: Resent,
    ) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let url = format!("ws://{address}/v1/responses");
        let (socket, _) = tokio_tungstenite::client_async(url, stream).await?;
        let mut fixed = json!({"type": "response.create", "model": model, "store": true, "temperature": 0});
        if !resent.instructions.is_empty() {
            fixed["instructions"] = resent.instructions.into();
        }
        if !resent.tools.is_null() {
            fixed["tools"] = resent.tools;
        }
        Ok(Self { socket, fixed })
    }

    /// Runs one turn with `input` after `parent` to its end.
    pub(crate) async fn turn(&mut self, parent: Option<&str>, input: &str) -> anyhow::Result<Answer> {
        let mut frame = self.fixed.clone();
        frame["input"] = input.into();
        if let Some(parent) = parent {
            frame["previous_response_id"] = parent.into();
        }
        let frame = frame.to_string();
        let bytes_up = frame.len();
        self.socket.send(Message::text(frame)).await?;
        let end = tokio::time::timeout(TURN_LIMIT, self.read(bytes_up));
        end.await.context("no answer within a minute")?
    }

    async fn read(&mut self, bytes_up: usize) -> anyhow::Result<Answer> {
        let mut bytes_down = 0;
        loop {
            let message = self.socket.next().await.context("the gateway closed the connection")??;
            let Message::Text(text) = message else { continue };
            bytes_down += text.len();
            // Deltas are many and say nothing that is measured here.
            if text.contains("\"response.output_text.delta\"") {
                continue;
            }
            let event: Value = serde_json::from_str(&text)?;
            match event["type"].as_str() {
                Some("response.completed") => {
                    let response = &event["response"];
                    let usage = &response["usage"];
                    return Ok(Answer {
                        id: response["id"].as_str().context("a response without id")?.to_owned(),
                        input_tokens: usage["input_tokens"].as_u64().unwrap_or(0),
                        output_tokens: usage["output_tokens"].as_u64().unwrap_or(0),
                        bytes_up,
                        bytes_down,
                    });
                }
                Some("error" | "response.failed" | "response.incomplete") => bail!("the turn failed: {text}"),
                _ => {}
            }
        }
    }
}

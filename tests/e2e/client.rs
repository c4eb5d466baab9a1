//! A WebSocket client, as small as a user's.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{WebSocketStream, client_async};

use crate::plain::TEXT;

/// How long a client waits for the next frame. Generous: tests share the cores.
const PATIENCE: Duration = Duration::from_secs(30);

/// What the server sent.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Frame {
    Event(Value),
    Pong(Bytes),
    /// With its code.
    Closed(Option<u16>),
}

/// One connection. Dropping it closes the TCP stream without a word, as a killed client does.
pub(crate) struct Socket {
    stream: WebSocketStream<TcpStream>,
}

impl Socket {
    pub(crate) async fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let tcp = TcpStream::connect(address).await?;
        tcp.set_nodelay(true)?;
        let (stream, _) = client_async(format!("ws://{address}/v1/responses"), tcp).await?;
        Ok(Self { stream })
    }

    pub(crate) async fn send(&mut self, frame: &Value) -> anyhow::Result<()> {
        self.send_message(Message::text(frame.to_string())).await
    }

    pub(crate) async fn send_message(&mut self, message: Message) -> anyhow::Result<()> {
        Ok(self.stream.send(message).await?)
    }

    pub(crate) async fn next(&mut self) -> anyhow::Result<Frame> {
        loop {
            let message = timeout(PATIENCE, self.stream.next()).await.context("the server is silent")?;
            return Ok(match message {
                None => Frame::Closed(None),
                Some(message) => match message? {
                    Message::Text(text) => Frame::Event(serde_json::from_str(&text)?),
                    Message::Pong(payload) => Frame::Pong(payload),
                    Message::Close(frame) => Frame::Closed(frame.map(|frame| frame.code.into())),
                    Message::Ping(_) => continue,
                    other => bail!("a frame nobody expects: {other:?}"),
                },
            });
        }
    }

    /// The next event; anything else is an error.
    pub(crate) async fn event(&mut self) -> anyhow::Result<Value> {
        match self.next().await? {
            Frame::Event(event) => Ok(event),
            other => bail!("an event was expected, not {other:?}"),
        }
    }

    /// Events up to and including the first one of this kind.
    pub(crate) async fn until(&mut self, kind: &str) -> anyhow::Result<Vec<Value>> {
        let mut events = Vec::new();
        loop {
            let event = self.event().await?;
            let ends = is_terminal(&event);
            let found = event["type"] == kind;
            events.push(event);
            if found {
                return Ok(events);
            }
            if ends {
                bail!("the turn ended without {kind}: {:?}", events.last());
            }
        }
    }

    /// The rest of a turn, up to its terminal event.
    pub(crate) async fn rest(&mut self, mut events: Vec<Value>) -> anyhow::Result<Turn> {
        loop {
            let event = self.event().await?;
            let ends = is_terminal(&event);
            events.push(event);
            if ends {
                return Ok(Turn { events });
            }
        }
    }

    /// Sends a frame and collects everything up to the terminal event or error.
    pub(crate) async fn turn(&mut self, create: &Value) -> anyhow::Result<Turn> {
        self.send(create).await?;
        self.rest(Vec::new()).await
    }
}

fn is_terminal(event: &Value) -> bool {
    let kinds = ["response.completed", "response.incomplete", "response.failed", "error"];
    event["type"].as_str().is_some_and(|kind| kinds.contains(&kind))
}

/// All events of one turn.
#[derive(Debug, Clone)]
pub(crate) struct Turn {
    pub(crate) events: Vec<Value>,
}

impl Turn {
    pub(crate) fn kinds(&self) -> Vec<&str> {
        self.events.iter().filter_map(|event| event["type"].as_str()).collect()
    }

    pub(crate) fn last(&self) -> &Value {
        self.events.last().expect("a turn has a terminal event")
    }

    /// The terminal event's kind.
    pub(crate) fn end(&self) -> &str {
        self.last()["type"].as_str().unwrap_or_default()
    }

    /// The final response object.
    pub(crate) fn response(&self) -> &Value {
        &self.last()["response"]
    }

    pub(crate) fn id(&self) -> &str {
        self.response()["id"].as_str().unwrap_or_default()
    }

    pub(crate) fn text(&self) -> &str {
        self.response()["output"][0]["content"][0]["text"].as_str().unwrap_or_default()
    }

    /// A number of the response's usage.
    pub(crate) fn usage(&self, pointer: &str) -> u64 {
        self.response()["usage"].pointer(pointer).and_then(Value::as_u64).expect("usage is complete")
    }

    /// A number of Baton's account of the turn.
    pub(crate) fn account(&self, name: &str) -> u64 {
        let value = &self.response()["baton"][name];
        value.as_u64().unwrap_or_else(|| panic!("{name} is no number in {:?}", self.last()))
    }

    /// A worker of the turn.
    pub(crate) fn worker(&self, name: &str) -> &str {
        self.response()["baton"][name].as_str().unwrap_or_default()
    }

    pub(crate) fn output_ids(&self) -> Vec<u32> {
        let ids = self.response()["baton"]["output_ids"].as_array();
        let ids = ids.unwrap_or_else(|| panic!("no output ids in {:?}", self.last()));
        ids.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()).collect()
    }

    /// Fails unless the model answered, to its end or to its limit.
    pub(crate) fn expect_answer(&self) {
        let reason = &self.response()["incomplete_details"]["reason"];
        let fine = self.end() == "response.completed" || reason == "max_output_tokens";
        assert!(fine, "no answer: {}", self.last());
    }
}

/// A greedy `response.create` for `input`, with Baton's account.
pub(crate) fn create(input: impl Into<Value>) -> Value {
    json!({
        "type": "response.create",
        "model": TEXT.name,
        "input": input.into(),
        "temperature": 0,
        "max_output_tokens": 12,
        "include": ["baton.turn"],
    })
}

/// `frame` with `fields` put over its own.
pub(crate) fn with(mut frame: Value, fields: Value) -> Value {
    if let (Value::Object(frame), Value::Object(fields)) = (&mut frame, fields) {
        frame.extend(fields);
    }
    frame
}

/// A conversation over one connection.
pub(crate) struct Chat {
    pub(crate) socket: Socket,
    parent: Value,
}

impl Chat {
    pub(crate) async fn open(address: SocketAddr) -> anyhow::Result<Self> {
        Ok(Self { socket: Socket::open(address).await?, parent: Value::Null })
    }

    /// The frame of the next turn.
    pub(crate) fn frame(&self, input: &str, limit: usize) -> Value {
        let fields = json!({"previous_response_id": self.parent, "max_output_tokens": limit, "store": false});
        with(create(input), fields)
    }

    /// The next turn, which must be answered.
    pub(crate) async fn say(&mut self, input: &str, limit: usize) -> anyhow::Result<Turn> {
        let turn = self.socket.turn(&self.frame(input, limit)).await?;
        self.answered(&turn);
        Ok(turn)
    }

    /// The next turn continues `turn`.
    pub(crate) fn answered(&mut self, turn: &Turn) {
        turn.expect_answer();
        self.parent = turn.id().into();
    }
}

//! A client of the Responses API over WebSocket: one connection, one request at a time, clocks taken as bytes arrive.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use futures::{SinkExt, StreamExt};
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::http::Uri;

use crate::pacing::Clock;
use crate::record::Record;

/// To connect and to be answered the upgrade, or the list of models.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// The longest answer over plain HTTP that is read.
const MAX_HTTP_BYTES: u64 = 4 << 20;

/// A server that cannot be used at all.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("`{url}` is no address that can be used here: write {scheme}://HOST[:PORT]/PATH")]
    Url { url: String, scheme: &'static str },
    #[error("cannot reach {address}: {problem}")]
    Unreachable { address: String, problem: String },
    #[error("{address} does not say which models it serves ({problem}): name one with --model")]
    Models { address: String, problem: String },
}

/// Where requests go.
#[derive(Debug, Clone)]
pub struct Target {
    url: String,
    address: String,
}

/// What one request asks for.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    pub model: &'a str,
    pub system: &'a str,
    pub text: &'a str,
    pub previous_response_id: Option<&'a str>,
    pub max_output_tokens: u32,
    pub temperature: f64,
}

/// An open connection.
#[derive(Debug)]
pub struct Connection {
    socket: WebSocketStream<TcpStream>,
    /// How long it took to open.
    pub handshake: Duration,
}

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
    response: Option<Response>,
    error: Option<Problem>,
}

#[derive(Deserialize)]
struct Response {
    id: String,
    usage: Option<Usage>,
    error: Option<Problem>,
    incomplete_details: Option<Incomplete>,
}

#[derive(Deserialize)]
struct Problem {
    code: Option<String>,
    message: Option<String>,
}

#[derive(Deserialize)]
struct Incomplete {
    reason: String,
}

#[derive(Deserialize)]
struct Usage {
    input_tokens: u64,
    output_tokens: u64,
    input_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: u64,
}

impl Target {
    /// Checks the address of a Responses API, `ws://...`.
    ///
    /// # Errors
    /// [`Error::Url`].
    pub fn new(url: &str) -> Result<Self, Error> {
        Self::with_scheme(url, "ws")
    }

    /// Checks an address for [`Target::get`], `http://...`.
    ///
    /// # Errors
    /// [`Error::Url`].
    pub fn http(url: &str) -> Result<Self, Error> {
        Self::with_scheme(url, "http")
    }

    /// The same server's page at `path`, for [`Target::get`].
    #[must_use]
    pub fn page(&self, path: &str) -> Self {
        Self { url: format!("http://{}{path}", self.address), address: self.address.clone() }
    }

    /// The address as it was written.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    fn with_scheme(url: &str, scheme: &'static str) -> Result<Self, Error> {
        let wrong = || Error::Url { url: url.to_owned(), scheme };
        let uri: Uri = url.parse().map_err(|_| wrong())?;
        let host = uri.host().filter(|_| uri.scheme_str() == Some(scheme)).ok_or_else(wrong)?;
        let address = format!("{host}:{}", uri.port_u16().unwrap_or(80));
        Ok(Self { url: url.to_owned(), address })
    }

    /// The first model that the server lists, over plain HTTP.
    ///
    /// # Errors
    /// When the server is not there or lists none.
    pub async fn first_model(&self) -> Result<String, Error> {
        let failed = |problem: String| Error::Models { address: self.address.clone(), problem };
        let answer = self.page("/v1/models").exchange_http(self.dial().await?).await.map_err(failed)?;
        first_model(&answer).map_err(failed)
    }

    /// The body of the page, over plain HTTP.
    ///
    /// # Errors
    /// When there is none, in words.
    pub async fn get(&self) -> Result<String, String> {
        let stream = self.dial().await.map_err(|error| error.to_string())?;
        let answer = self.exchange_http(stream).await?;
        body(&answer).map(str::to_owned)
    }

    /// Asks for the page; the answer as it came, head and all.
    async fn exchange_http(&self, mut stream: TcpStream) -> Result<String, String> {
        let Self { url, address } = self;
        let uri: Uri = url.parse().map_err(|_| format!("`{url}` is no address"))?;
        let path = uri.path();
        let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        let mut answer = Vec::new();
        let exchange = async {
            stream.write_all(request.as_bytes()).await?;
            stream.take(MAX_HTTP_BYTES).read_to_end(&mut answer).await
        };
        match timeout(CONNECT_LIMIT, exchange).await {
            Ok(Ok(_)) => Ok(String::from_utf8_lossy(&answer).into_owned()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("no answer".to_owned()),
        }
    }

    /// Checks that somebody listens.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    pub async fn dial(&self) -> Result<TcpStream, Error> {
        let failed = |problem: String| Error::Unreachable { address: self.address.clone(), problem };
        match timeout(CONNECT_LIMIT, TcpStream::connect(&self.address)).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(_) => Err(failed("no answer".to_owned())),
        }
    }
}

/// What follows the head of an HTTP answer, possibly in chunks.
fn body(answer: &str) -> Result<&str, String> {
    let status = answer.lines().next().unwrap_or_default();
    if !status.contains(" 200") {
        return Err(format!("it answers `{status}`"));
    }
    answer.split_once("\r\n\r\n").map(|(_, body)| body).ok_or_else(|| "it answers a head only".to_owned())
}

/// The model in an HTTP answer.
fn first_model(answer: &str) -> Result<String, String> {
    let body = body(answer)?;
    // The body may be chunked: its JSON object is all that is needed.
    let json = body.find('{').map(|open| &body[open..]);
    let body = json.and_then(|json| serde_json::Deserializer::from_str(json).into_iter().next());
    let body: serde_json::Value = body.and_then(Result::ok).ok_or("it answers no JSON object")?;
    let id = body["data"][0]["id"].as_str().ok_or("its list of models is empty")?;
    Ok(id.to_owned())
}

impl Request<'_> {
    /// The frame to send.
    #[must_use]
    pub fn frame(&self) -> String {
        let mut frame = json!({
            "type": "response.create",
            "model": self.model,
            "max_output_tokens": self.max_output_tokens,
            "temperature": self.temperature,
        });
        let user = json!({"role": "user", "content": self.text});
        if let Some(id) = self.previous_response_id {
            frame["previous_response_id"] = id.into();
            frame["input"] = json!([user]);
        } else if self.system.is_empty() {
            frame["input"] = json!([user]);
        } else {
            frame["input"] = json!([{"role": "system", "content": self.system}, user]);
        }
        frame.to_string()
    }
}

impl Connection {
    /// Opens a connection.
    ///
    /// # Errors
    /// When the server is not there or refuses the upgrade, in words.
    pub async fn open(target: &Target) -> Result<Self, String> {
        let began = Instant::now();
        let open = async {
            let stream = TcpStream::connect(&target.address).await.map_err(|error| error.to_string())?;
            stream.set_nodelay(true).map_err(|error| error.to_string())?;
            tokio_tungstenite::client_async(&target.url, stream).await.map_err(|error| error.to_string())
        };
        let (socket, _) = timeout(CONNECT_LIMIT, open).await.map_err(|_| "no answer".to_owned())??;
        Ok(Self { socket, handshake: began.elapsed() })
    }

    /// Sends `frame` and reads until the response has ended; fills `record`, and returns the response's id unless the
    /// request failed.
    pub async fn exchange(
        &mut self,
        frame: String,
        limit: Duration,
        clock: &Clock,
        record: &mut Record,
    ) -> Option<String> {
        let result = timeout(limit, self.send_and_read(frame, clock, record)).await;
        record.done = clock.now();
        match result.unwrap_or_else(|_| Err("timeout".to_owned())) {
            Ok(id) => Some(id),
            Err(code) => {
                record.error = Some(code);
                None
            }
        }
    }

    /// Sends `frame`; fills `record`.
    ///
    /// # Errors
    /// The code `closed`.
    pub async fn send(&mut self, frame: String, clock: &Clock, record: &mut Record) -> Result<(), String> {
        record.bytes_up = frame.len();
        record.sent = clock.now();
        self.socket.send(Message::text(frame)).await.map_err(|error| {
            record.message = Some(error.to_string());
            "closed".to_owned()
        })
    }

    /// Waits for one message and books it; the outcome if it is the last one of the response. May be dropped.
    pub async fn next_event(&mut self, clock: &Clock, record: &mut Record) -> Option<Result<String, String>> {
        let message = self.socket.next().await;
        let why = match message {
            Some(Ok(Message::Text(text))) => {
                record.bytes_down += text.len();
                return read_event(&text, clock.now(), record);
            }
            Some(Ok(Message::Close(frame))) => frame.map(|frame| frame.to_string()),
            Some(Ok(_)) => return None,
            Some(Err(error)) => Some(error.to_string()),
            None => None,
        };
        record.message = why;
        Some(Err("closed".to_owned()))
    }

    async fn send_and_read(
        &mut self,
        frame: String,
        clock: &Clock,
        record: &mut Record,
    ) -> Result<String, String> {
        self.send(frame, clock, record).await?;
        loop {
            if let Some(end) = self.next_event(clock, record).await {
                return end;
            }
        }
    }
}

/// Books one event; the outcome if it is the last one.
fn read_event(text: &str, now: Duration, record: &mut Record) -> Option<Result<String, String>> {
    let Ok(event) = serde_json::from_str::<Event<'_>>(text) else {
        return Some(Err("protocol".to_owned()));
    };
    match &*event.kind {
        "response.output_text.delta" => {
            if let Some(last) = record.last_text.replace(now) {
                record.gaps.push(now - last);
            }
            record.first_text.get_or_insert(now);
            None
        }
        "error" => Some(Err(code(event.error, "error", record))),
        "response.completed" | "response.incomplete" | "response.failed" => {
            let Some(response) = event.response else { return Some(Err("protocol".to_owned())) };
            if let Some(usage) = &response.usage {
                record.input_tokens = usage.input_tokens;
                record.output_tokens = usage.output_tokens;
                record.cached_tokens =
                    usage.input_tokens_details.as_ref().map_or(0, |details| details.cached_tokens);
            }
            Some(outcome(&event.kind, response, record))
        }
        _ => None,
    }
}

fn outcome(kind: &str, response: Response, record: &mut Record) -> Result<String, String> {
    match (kind, response.incomplete_details) {
        ("response.failed", _) => Err(code(response.error, "failed", record)),
        // The replayer itself limits the answers.
        ("response.incomplete", Some(details)) if details.reason != "max_output_tokens" => {
            Err(format!("incomplete: {}", details.reason))
        }
        _ => Ok(response.id),
    }
}

/// The problem's code; its message goes into the record.
fn code(problem: Option<Problem>, otherwise: &str, record: &mut Record) -> String {
    let Some(Problem { code, message }) = problem else { return otherwise.to_owned() };
    record.message = message;
    code.unwrap_or_else(|| otherwise.to_owned())
}

#[cfg(test)]
mod tests;

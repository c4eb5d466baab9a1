//! A small WebSocket client of the Responses API, for `baton chat` and the check at the start of `baton up`.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use api_gateway::Secret;
use futures::{SinkExt, StreamExt};
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::http::{HeaderValue, StatusCode, header};
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async_with_config};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The server repeats `response.in_progress` well within this.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(120);

/// One connection, which remembers the conversation's newest response.
#[derive(Debug)]
pub struct Client {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    previous: Option<String>,
}

/// How to answer.
#[derive(Debug, Clone)]
pub struct Style {
    pub model: String,
    pub instructions: Option<String>,
    pub temperature: f32,
    pub top_p: f32,
    pub max_output_tokens: u32,
}

/// One finished turn.
#[derive(Debug, Clone)]
pub struct Turn {
    pub text: String,
    pub response_id: String,
    pub input_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    /// From the request to the first text.
    pub first_text: Option<Duration>,
    pub total: Duration,
    pub account: Account,
}

/// The cluster's own account of a turn.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Account {
    pub decode_worker: String,
    pub prefill_worker: String,
    pub moved_blocks: u64,
    pub moved_bytes: u64,
    pub computed_tokens: u64,
    pub tokenized_tokens: u64,
    pub output_ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    delta: Option<String>,
    response: Option<Response>,
    error: Option<Problem>,
}

#[derive(Deserialize)]
struct Response {
    id: String,
    usage: Option<Usage>,
    error: Option<Problem>,
    baton: Option<Account>,
}

#[derive(Deserialize)]
struct Usage {
    input_tokens: u64,
    input_tokens_details: Details,
    output_tokens: u64,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: u64,
}

#[derive(Deserialize)]
struct Problem {
    code: String,
    message: String,
}

impl Client {
    /// Connects to `url`, such as `ws://127.0.0.1:8080/v1/responses`; with `key` if the server asks for one.
    ///
    /// # Errors
    /// When nobody listens there, or it is no WebSocket.
    pub async fn connect(url: &str, key: Option<&Secret>) -> anyhow::Result<Self> {
        let advice =
            || format!("cannot connect to {url}: is `baton up` running there? (--url names the endpoint)");
        let mut request = url.into_client_request().with_context(advice)?;
        if let Some(key) = key {
            let value = HeaderValue::from_str(&format!("Bearer {}", key.reveal()));
            let mut value =
                value.map_err(|_| anyhow::anyhow!("the API key has characters that no header can hold"))?;
            value.set_sensitive(true);
            request.headers_mut().insert(header::AUTHORIZATION, value);
        }
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, connect_async_with_config(request, None, true))
            .await
            .with_context(advice)?;
        match connected {
            Ok((socket, _)) => Ok(Self { socket, previous: None }),
            Err(Error::Http(answer)) if answer.status() == StatusCode::UNAUTHORIZED => {
                bail!("{url} asks for an API key: give a known one with --api-key or BATON_API_KEY")
            }
            Err(error) => Err(error).with_context(advice),
        }
    }

    /// A new connection to `url` that continues the same conversation.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn reconnected(self, url: &str, key: Option<&Secret>) -> anyhow::Result<Self> {
        let previous = self.previous;
        Ok(Self { previous, ..Self::connect(url, key).await? })
    }

    /// Forgets the conversation: the next turn starts a new one.
    pub fn forget(&mut self) {
        self.previous = None;
    }

    /// Sends one message and waits for the whole answer; `on_text` sees each piece as it comes.
    ///
    /// # Errors
    /// When the server refuses the turn or the connection is lost.
    pub async fn turn(
        &mut self,
        input: &str,
        style: &Style,
        mut on_text: impl FnMut(&str),
    ) -> anyhow::Result<Turn> {
        let mut create = json!({
            "type": "response.create", "model": style.model, "input": input, "include": ["baton.turn"],
            "temperature": style.temperature, "top_p": style.top_p, "max_output_tokens": style.max_output_tokens,
        });
        if let Some(previous) = &self.previous {
            create["previous_response_id"] = json!(previous);
        }
        // They hold for one turn; what is the same as before costs nothing.
        if let Some(instructions) = &style.instructions {
            create["instructions"] = json!(instructions);
        }
        let began = Instant::now();
        self.socket.send(Message::text(create.to_string())).await.context("the connection was lost")?;
        let (mut text, mut first_text) = (String::new(), None);
        loop {
            let event = self.event().await?;
            match event.kind.as_str() {
                "response.output_text.delta" => {
                    first_text.get_or_insert_with(|| began.elapsed());
                    let delta = event.delta.unwrap_or_default();
                    on_text(&delta);
                    text.push_str(&delta);
                }
                "error" => {
                    let problem = event.error.context("an error without a description")?;
                    bail!("{} ({})", problem.message, problem.code);
                }
                "response.completed" | "response.incomplete" | "response.failed" => {
                    let response = event.response.context("a terminal event without a response")?;
                    if let Some(problem) = response.error {
                        bail!("{} ({})", problem.message, problem.code);
                    }
                    let usage = response.usage.context("a finished response without usage")?;
                    self.previous = Some(response.id.clone());
                    return Ok(Turn {
                        text,
                        response_id: response.id,
                        input_tokens: usage.input_tokens,
                        cached_tokens: usage.input_tokens_details.cached_tokens,
                        output_tokens: usage.output_tokens,
                        first_text,
                        total: began.elapsed(),
                        account: response.baton.unwrap_or_default(),
                    });
                }
                _ => {}
            }
        }
    }

    async fn event(&mut self) -> anyhow::Result<Event> {
        loop {
            let message = tokio::time::timeout(SILENCE_TIMEOUT, self.socket.next())
                .await
                .context("the server has been silent for two minutes")?
                .context("the server closed the connection")?
                .context("the connection was lost")?;
            match message {
                Message::Text(text) => {
                    return serde_json::from_str(&text).context("an event that is not understood");
                }
                Message::Close(frame) => {
                    let reason = frame.map(|frame| frame.reason.to_string()).unwrap_or_default();
                    bail!("the server closed the connection: {reason}");
                }
                _ => {}
            }
        }
    }
}

/// The name of the model that the server behind a WebSocket `url` serves.
///
/// # Errors
/// When it cannot be asked.
pub async fn served_model(url: &str, key: Option<&Secret>) -> anyhow::Result<String> {
    let rest = url.strip_prefix("ws://").context("only ws:// endpoints are supported")?;
    let (host, path) = rest.split_once('/').context("the URL has no path; it ends with /v1/responses")?;
    let path = path.strip_suffix("/responses").or_else(|| path.strip_suffix("responses")).unwrap_or("v1");
    let address = if host.contains(':') { host.to_owned() } else { format!("{host}:80") };
    let ask = async {
        let mut stream = TcpStream::connect(&address).await?;
        let key = key.map_or_else(String::new, |key| format!("Authorization: Bearer {}\r\n", key.reveal()));
        let request =
            format!("GET /{path}/models HTTP/1.1\r\nHost: {host}\r\n{key}Connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.take(1 << 20).read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let advice =
        || format!("cannot connect to {address}: is `baton up` running there? (--url names the endpoint)");
    let answer =
        tokio::time::timeout(CONNECT_TIMEOUT, ask).await.with_context(advice)?.with_context(advice)?;
    #[derive(Deserialize)]
    struct Models {
        data: Vec<Model>,
    }
    #[derive(Deserialize)]
    struct Model {
        id: String,
    }
    if answer.starts_with("HTTP/1.1 401") {
        bail!("{url} asks for an API key: give a known one with --api-key or BATON_API_KEY");
    }
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body).context("an answer without a body")?;
    let models: Models = serde_json::from_str(body).context("the answer of /v1/models is not understood")?;
    models.data.into_iter().next().map(|model| model.id).context("the server serves no model")
}

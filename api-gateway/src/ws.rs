//! One WebSocket connection: a reader that never waits for the model, a writer, and one lane of turns.
//!
//! The three run in one task. When the reader ends (the client is gone), everything else is dropped, and with the
//! running turn's future its stream: the worker stops decoding before its next step.

use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket, close_code};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, MissedTickBehavior, timeout};
use tokio_util::sync::CancellationToken;

use crate::emit::{EventSink, new_id};
use crate::error::ApiError;
use crate::http::all_turns_taken;
use crate::metrics as names;
use crate::state::Gateway;
use crate::store::Stored;
use crate::turn::{Ended, Origin, run_turn};
use crate::wire::{ClientEvent, Create, Event, Transport, error_frame, parse_frame};

/// Events a slow client may leave unread.
const EVENTS_IN_FLIGHT: usize = 256;
/// Pings that may go unanswered.
const SILENT_PINGS: u32 = 3;
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a connection ends.
#[derive(Debug)]
enum End {
    /// The client closed it or is gone.
    Client,
    /// We close it, with a code and a reason.
    Close(u16, &'static str),
}

/// Serves one client until it leaves, its life is over, or the gateway drains.
pub(crate) async fn serve(
    gateway: &Gateway,
    socket: WebSocket,
    turns: &Semaphore,
    shutdown: &CancellationToken,
) {
    let (mut sink, stream) = socket.split();
    let (events, outgoing) = mpsc::channel(EVENTS_IN_FLIGHT);
    let (creates, queue) = mpsc::channel(gateway.config().max_queued_creates);
    let running = Running::default();
    let reader = Reader {
        gateway,
        stream,
        creates,
        events: events.clone(),
        running: &running,
        opened: Instant::now(),
    };
    let lane = Lane { gateway, queue, events, running: &running, turns, latest: None };
    let end = {
        let mut writing = pin!(write(&mut sink, outgoing, gateway.config().ping));
        let end = tokio::select! {
            end = reader.run() => end,
            end = &mut writing => end,
            end = lane.run(shutdown) => end,
        };
        if let End::Close(..) = end {
            // Nobody adds events any more: the writer ends after the last one, or the client does not read.
            let _ = timeout(CLOSE_TIMEOUT, writing).await;
        }
        end
    };
    if let End::Close(code, reason) = end {
        let frame = CloseFrame { code, reason: Utf8Bytes::from_static(reason) };
        // The client may be gone or not read any more; then the socket just ends.
        let _ = timeout(CLOSE_TIMEOUT, sink.send(Message::Close(Some(frame)))).await;
    }
}

/// The response that runs now, so that the reader can stop it.
#[derive(Debug, Default)]
struct Running(Mutex<Option<(String, CancellationToken)>>);

impl Running {
    fn set(&self, running: Option<(String, CancellationToken)>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = running;
    }

    /// Stops the running response, if it is the one that is meant.
    fn cancel(&self, id: Option<&str>) -> Result<(), ApiError> {
        let running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match running.as_ref().filter(|(running, _)| id.is_none_or(|id| id == running)) {
            Some((_, cancel)) => {
                cancel.cancel();
                Ok(())
            }
            None => {
                let message = "no such response is running on this connection";
                Err(ApiError::invalid("response_not_found", message).at("response_id"))
            }
        }
    }
}

/// What waits for its turn on a lane.
#[derive(Debug)]
enum Queued {
    Create(Box<Create>),
    /// A malformed create: it is answered in its place, and costs its parent like any failed continuation.
    Refused {
        parent: Option<String>,
        error: ApiError,
    },
}

struct Reader<'a> {
    gateway: &'a Gateway,
    stream: SplitStream<WebSocket>,
    creates: mpsc::Sender<Queued>,
    events: mpsc::Sender<Event>,
    running: &'a Running,
    opened: Instant,
}

impl Reader<'_> {
    async fn run(mut self) -> End {
        let silence = self.gateway.config().ping * SILENT_PINGS;
        loop {
            // Pings are answered while the stream is polled, so this loop must never wait for anything else.
            let message = match timeout(silence, self.stream.next()).await {
                Ok(Some(Ok(message))) => message,
                Ok(Some(Err(error))) => return self.broken(&error).await,
                Ok(None) => return End::Client,
                Err(_) => return End::Close(close_code::POLICY, "no answer to pings"),
            };
            let result = match message {
                Message::Text(text) => self.text(&text),
                Message::Binary(_) => Err(ApiError::invalid(
                    "invalid_frame",
                    "binary frames are not understood: send JSON as text",
                )),
                Message::Ping(_) | Message::Pong(_) => Ok(()),
                Message::Close(_) => {
                    // The answer goes out while the stream is polled to its end.
                    let _ = timeout(CLOSE_TIMEOUT, self.stream.next()).await;
                    return End::Client;
                }
            };
            if let Err(error) = result
                && self.events.try_send(refused(&error)).is_err()
            {
                return End::Close(close_code::POLICY, "the client does not read");
            }
        }
    }

    fn text(&self, text: &str) -> Result<(), ApiError> {
        metrics::counter!(names::CLIENT_BYTES_IN).increment(text.len() as u64);
        match parse_frame(text)? {
            ClientEvent::Create(create) => {
                if self.opened.elapsed() >= self.gateway.config().connection_life {
                    let message = "this connection is too old: open a new one and continue there";
                    return Err(ApiError::invalid("websocket_connection_limit_reached", message));
                }
                self.enqueue(Queued::Create(create))
            }
            ClientEvent::Refused { parent, error } => self.enqueue(Queued::Refused { parent, error }),
            ClientEvent::Cancel { response_id } => self.running.cancel(response_id.as_deref()),
            ClientEvent::Ignored => Ok(()),
        }
    }

    fn enqueue(&self, queued: Queued) -> Result<(), ApiError> {
        self.creates.try_send(queued).map_err(|_| {
            ApiError::rate_limited("too many responses are queued on this connection: wait for one to end")
        })
    }

    /// The stream is unusable. A message over the limit is the client's mistake and is explained.
    async fn broken(&self, error: &axum::Error) -> End {
        let limit = self.gateway.config().max_request_bytes;
        let message = error.to_string();
        if message.contains("too long") || message.contains("too big") || message.contains("Space limit") {
            let error = ApiError::too_large(format!("the message is larger than {limit} bytes: send less"));
            let _ = self.events.try_send(refused(&error));
            // The writer runs beside: give it a moment to deliver the explanation.
            tokio::time::sleep(Duration::from_millis(100)).await;
            return End::Close(close_code::SIZE, "message too large");
        }
        tracing::debug!(error = message, "connection lost");
        End::Client
    }
}

/// Sends events as they come, several per flush when they come fast, and pings in between.
async fn write(
    sink: &mut SplitSink<WebSocket, Message>,
    mut events: mpsc::Receiver<Event>,
    ping: Duration,
) -> End {
    // Pings go out while events flow too: a client that only reads has no other way to show that it is there.
    let mut pings = tokio::time::interval_at(Instant::now() + ping, ping);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let sent = tokio::select! {
            event = events.recv() => match event {
                Some(event) => send_all(sink, event, &mut events).await,
                None => return End::Client,
            },
            _ = pings.tick() => sink.send(Message::Ping(Default::default())).await,
        };
        if sent.is_err() {
            return End::Client;
        }
    }
}

async fn send_all(
    sink: &mut SplitSink<WebSocket, Message>,
    first: Event,
    events: &mut mpsc::Receiver<Event>,
) -> Result<(), axum::Error> {
    let mut next = Some(first);
    let mut n_bytes = 0;
    while let Some(event) = next {
        n_bytes += event.json.len();
        sink.feed(Message::Text(event.json.into())).await?;
        next = events.try_recv().ok();
    }
    metrics::counter!(names::CLIENT_BYTES_OUT).increment(n_bytes as u64);
    sink.flush().await
}

/// Runs the connection's turns one after the other.
struct Lane<'a> {
    gateway: &'a Gateway,
    queue: mpsc::Receiver<Queued>,
    events: mpsc::Sender<Event>,
    running: &'a Running,
    turns: &'a Semaphore,
    /// The newest response of this connection, which can be continued here even when it is not stored.
    latest: Option<Arc<Stored>>,
}

impl Lane<'_> {
    async fn run(mut self, shutdown: &CancellationToken) -> End {
        loop {
            let queued = tokio::select! {
                queued = self.queue.recv() => queued,
                () = shutdown.cancelled() => return End::Close(close_code::AWAY, "the server drains"),
            };
            let result = match queued {
                Some(Queued::Create(create)) => self.turn(*create).await,
                Some(Queued::Refused { parent, error }) => {
                    self.evict(parent.as_deref());
                    Err(error)
                }
                None => return End::Client,
            };
            match result {
                Ok(()) => {}
                Err(error) if error.is_client_gone() => {
                    return End::Close(close_code::POLICY, "the client does not read");
                }
                Err(error) => {
                    if self.events.send(refused(&error)).await.is_err() {
                        return End::Client;
                    }
                }
            }
        }
    }

    async fn turn(&mut self, create: Create) -> Result<(), ApiError> {
        let Ok(_place) = self.turns.try_acquire() else { return Err(all_turns_taken()) };
        let parent = create.previous_response_id.clone();
        let response_id = new_id("resp");
        let cancel = CancellationToken::new();
        self.running.set(Some((response_id.clone(), cancel.clone())));
        let origin = Origin { transport: Transport::WebSocket, response_id, latest: self.latest.clone() };
        let events = EventSink::Stream(self.events.clone());
        let result = run_turn(self.gateway, create, origin, events, &cancel).await;
        self.running.set(None);
        match result {
            Ok(Ended { stored: Some(stored), .. }) => {
                self.latest = Some(stored);
                Ok(())
            }
            Ok(_) => {
                self.evict(parent.as_deref());
                Ok(())
            }
            Err(error) => {
                self.evict(parent.as_deref());
                Err(error)
            }
        }
    }

    /// A failed continuation makes its parent unusable on this connection.
    fn evict(&mut self, parent: Option<&str>) {
        self.latest.take_if(|latest| Some(latest.id.as_str()) == parent);
    }
}

fn refused(error: &ApiError) -> Event {
    metrics::counter!(names::TURNS, "outcome" => "refused").increment(1);
    tracing::info!(status = error.status, code = error.code, message = error.message, "request refused");
    error_frame(error)
}

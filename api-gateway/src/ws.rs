//! One WebSocket connection: a reader that never waits for the model, a writer, and the lanes of turns ([`lanes`]).
//!
//! All of them run in one task. When the reader ends (the client is gone), everything else is dropped, and with the
//! running turn's future its stream: the worker stops decoding before its next step.

mod lanes;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket, close_code};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, MissedTickBehavior, timeout};
use tokio_util::sync::CancellationToken;

use crate::error::ApiError;
use crate::metrics as names;
use crate::state::Gateway;
use crate::wire::{ClientEvent, Event, Lane, error_frame, parse_frame, steer_failed};
use lanes::{Lanes, Queued, Running};

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
    tenant: Arc<str>,
    turns: &Semaphore,
    shutdown: &CancellationToken,
) {
    let (mut sink, stream) = socket.split();
    let (events, outgoing) = mpsc::channel(EVENTS_IN_FLIGHT);
    let (creates, queue) = mpsc::channel(gateway.config().max_queued_creates.max(1));
    let running = Running::default();
    let reader = Reader {
        gateway,
        stream,
        creates,
        events: events.clone(),
        running: &running,
        opened: Instant::now(),
    };
    let lanes = Lanes::new(gateway, tenant, events, &running, turns, shutdown);
    let end = {
        let mut writing = pin!(write(&mut sink, outgoing, gateway.config().ping));
        let end = tokio::select! {
            end = reader.run() => end,
            end = &mut writing => end,
            end = lanes.run(queue) => end,
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
                Message::Binary(_) => {
                    let message = "binary frames are not understood: send JSON as text";
                    Err((None, ApiError::invalid("invalid_frame", message)))
                }
                Message::Ping(_) | Message::Pong(_) => Ok(()),
                Message::Close(_) => {
                    // The answer goes out while the stream is polled to its end.
                    let _ = timeout(CLOSE_TIMEOUT, self.stream.next()).await;
                    return End::Client;
                }
            };
            if let Err((lane, error)) = result
                && self.events.try_send(refused(&error, &lane)).is_err()
            {
                return End::Close(close_code::POLICY, "the client does not read");
            }
        }
    }

    /// Takes a frame, or refuses it on the lane that it is for.
    fn text(&self, text: &str) -> Result<(), (Lane, ApiError)> {
        metrics::counter!(names::CLIENT_BYTES_IN).increment(text.len() as u64);
        match parse_frame(text).map_err(|error| (None, error))? {
            ClientEvent::Create { lane, create } => {
                if self.opened.elapsed() >= self.gateway.config().connection_life {
                    let message = "this connection is too old: open a new one and continue there";
                    return Err((lane, ApiError::invalid("websocket_connection_limit_reached", message)));
                }
                self.enqueue(Queued::Create { lane, create })
            }
            ClientEvent::Refused { lane, parent, error } => {
                self.enqueue(Queued::Refused { lane, parent, error })
            }
            ClientEvent::Steer(steer) => {
                let sent = self.events.try_send(steer_failed(&steer));
                sent.map_err(|_| (None, ApiError::client_gone("the client does not read")))
            }
            ClientEvent::Stop { response_id, partial } => {
                self.running.stop(response_id.as_deref(), partial).map_err(|error| (None, error))
            }
            ClientEvent::Ignored => Ok(()),
        }
    }

    fn enqueue(&self, queued: Queued) -> Result<(), (Lane, ApiError)> {
        let lane = queued.lane().clone();
        let taken = self.running.wait(self.gateway.config().max_queued_creates);
        let sent = taken.and_then(|()| {
            self.creates.try_send(queued).map_err(|_| ApiError::internal("the connection's queue is closed"))
        });
        sent.map_err(|error| (lane, error))
    }

    /// The stream is unusable. A message over the limit is the client's mistake and is explained.
    async fn broken(&self, error: &axum::Error) -> End {
        let limit = self.gateway.config().max_request_bytes;
        let message = error.to_string();
        if message.contains("too long") || message.contains("too big") || message.contains("Space limit") {
            let error = ApiError::too_large(format!("the message is larger than {limit} bytes: send less"));
            let _ = self.events.try_send(refused(&error, &None));
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

/// The `error` frame of a request on `lane`.
fn refused(error: &ApiError, lane: &Lane) -> Event {
    metrics::counter!(names::TURNS, "outcome" => "refused").increment(1);
    tracing::info!(status = error.status, code = error.code, message = error.message, "request refused");
    error_frame(error).on_lane(lane)
}

//! The lanes of a connection: turns of one lane run one after the other, lanes run beside each other.
//!
//! A request without `stream_id` is on the default lane. All turns are polled by the connection's task, so that they end
//! with it.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::ws::close_code;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::emit::{EventSink, new_id};
use crate::error::ApiError;
use crate::http::all_turns_taken;
use crate::recent::Recent;
use crate::state::Gateway;
use crate::store::Stored;
use crate::turn::{Ended, Origin, Partial, Stop, run_turn};
use crate::wire::{Create, Event, Lane};

use super::{End, refused};

/// Ended responses that are remembered, so that stopping them is no mistake.
const MAX_ENDED: usize = 64;

/// What waits for its turn on a lane.
#[derive(Debug)]
pub(super) enum Queued {
    Create {
        lane: Lane,
        create: Box<Create>,
    },
    /// A malformed create: it is answered in its place, and costs its parent like any failed continuation.
    Refused {
        lane: Lane,
        parent: Option<String>,
        error: ApiError,
    },
}

impl Queued {
    pub(super) fn lane(&self) -> &Lane {
        match self {
            Self::Create { lane, .. } | Self::Refused { lane, .. } => lane,
        }
    }
}

/// The responses that run now, so that the reader can stop them, and how many requests wait.
#[derive(Debug, Default)]
pub(super) struct Running {
    by_id: Mutex<HashMap<String, Stop>>,
    /// The responses that ended last.
    ended: Mutex<Recent<MAX_ENDED>>,
    n_waiting: AtomicUsize,
    /// The next response is stopped when it begins.
    next: Mutex<Option<Partial>>,
}

impl Running {
    /// Takes one of `limit` places in the queues of all lanes.
    pub(super) fn wait(&self, limit: usize) -> Result<(), ApiError> {
        let taken = self
            .n_waiting
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < limit).then_some(n + 1));
        taken.map(|_| ()).map_err(|_| {
            ApiError::rate_limited("too many responses are queued on this connection: wait for one to end")
        })
    }

    fn waited(&self) {
        self.n_waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// What waited is refused: there is nothing to stop when it begins.
    fn refused(&self) {
        self.waited();
        self.next.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    fn add(&self, id: &str) -> Stop {
        let stop = Stop::default();
        if let Some(partial) = self.next.lock().unwrap_or_else(PoisonError::into_inner).take() {
            stop.stop(partial);
        }
        self.by_id.lock().unwrap_or_else(PoisonError::into_inner).insert(id.to_owned(), stop.clone());
        stop
    }

    fn remove(&self, id: &str) {
        self.by_id.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).add(id);
    }

    /// Stops the running response with this id; without an id the only one. One that has ended meanwhile needs no
    /// stopping.
    pub(super) fn stop(&self, id: Option<&str>, partial: Partial) -> Result<(), ApiError> {
        let running = self.by_id.lock().unwrap_or_else(PoisonError::into_inner);
        let found = match id {
            Some(id) => running.get(id),
            None if running.len() == 1 => running.values().next(),
            None => None,
        };
        match found {
            Some(stop) => {
                stop.stop(partial);
                Ok(())
            }
            None if id.is_some_and(|id| self.has_ended(id)) => Ok(()),
            // It was asked for, and has no id yet.
            None if id.is_none() && running.is_empty() && self.n_waiting.load(Ordering::Relaxed) > 0 => {
                *self.next.lock().unwrap_or_else(PoisonError::into_inner) = Some(partial);
                Ok(())
            }
            None => {
                let message = "no such response is running on this connection";
                Err(ApiError::invalid("response_not_found", message).at("response_id"))
            }
        }
    }
}

impl Running {
    fn has_ended(&self, id: &str) -> bool {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).has(id)
    }
}

/// One lane.
#[derive(Default)]
struct State {
    is_busy: bool,
    queue: VecDeque<Queued>,
    /// The newest response, which can be continued on this connection even when it is not stored.
    latest: Option<Arc<Stored>>,
}

/// How a turn of a lane ended.
struct Done {
    lane: Lane,
    parent: Option<String>,
    result: Result<Ended, ApiError>,
}

/// See the module's header.
pub(super) struct Lanes<'a> {
    gateway: &'a Gateway,
    tenant: Arc<str>,
    events: mpsc::Sender<Event>,
    running: &'a Running,
    turns: &'a Semaphore,
    /// The server drains: what runs ends, nothing begins.
    shutdown: &'a CancellationToken,
    lanes: HashMap<Lane, State>,
    active: FuturesUnordered<BoxFuture<'a, Done>>,
    /// Lanes with something to run, in the order they came, when too many turns run already.
    ready: VecDeque<Lane>,
}

impl<'a> Lanes<'a> {
    pub(super) fn new(
        gateway: &'a Gateway,
        tenant: Arc<str>,
        events: mpsc::Sender<Event>,
        running: &'a Running,
        turns: &'a Semaphore,
        shutdown: &'a CancellationToken,
    ) -> Self {
        let (lanes, active, ready) = (HashMap::new(), FuturesUnordered::new(), VecDeque::new());
        Self { gateway, tenant, events, running, turns, shutdown, lanes, active, ready }
    }

    /// Runs what comes from `queue` until the client is gone or, between turns, the server drains.
    pub(super) async fn run(mut self, mut queue: mpsc::Receiver<Queued>) -> End {
        let shutdown = self.shutdown;
        loop {
            let handled = tokio::select! {
                Some(done) = self.active.next(), if !self.active.is_empty() => self.ended(done).await,
                queued = queue.recv() => match queued {
                    Some(queued) => self.accept(queued).await,
                    None => return End::Client,
                },
                () = shutdown.cancelled(), if self.active.is_empty() => {
                    return End::Close(close_code::AWAY, "the server drains");
                }
            };
            if let Err(end) = handled {
                return end;
            }
        }
    }

    async fn accept(&mut self, queued: Queued) -> Result<(), End> {
        let lane = queued.lane().clone();
        let n_named = self.lanes.keys().filter(|lane| lane.is_some()).count();
        if lane.is_some() && !self.lanes.contains_key(&lane) && n_named >= self.gateway.config().max_lanes {
            let limit = self.gateway.config().max_lanes;
            let message =
                format!("this connection has {limit} lanes already: use one of them, or another connection");
            let error = ApiError::invalid("websocket_stream_limit_reached", message).at("stream_id");
            self.running.refused();
            return self.refuse(&error, &lane).await;
        }
        self.lanes.entry(lane.clone()).or_default().queue.push_back(queued);
        self.advance(lane).await
    }

    /// Starts what is next on an idle lane, if a place is free.
    async fn advance(&mut self, lane: Lane) -> Result<(), End> {
        loop {
            let n_active = self.active.len();
            let state = self.lanes.entry(lane.clone()).or_default();
            if state.is_busy || self.shutdown.is_cancelled() {
                return Ok(());
            }
            if n_active >= self.gateway.config().max_active_lanes && !state.queue.is_empty() {
                if !self.ready.contains(&lane) {
                    self.ready.push_back(lane);
                }
                return Ok(());
            }
            match state.queue.pop_front() {
                Some(Queued::Create { create, .. }) => {
                    state.is_busy = true;
                    self.running.waited();
                    self.start(lane, *create);
                    return Ok(());
                }
                Some(Queued::Refused { parent, error, .. }) => {
                    self.running.refused();
                    self.evict(&lane, parent.as_deref());
                    self.refuse(&error, &lane).await?;
                }
                None => return Ok(()),
            }
        }
    }

    fn start(&mut self, lane: Lane, create: Create) {
        let parent = create.previous_response_id.clone();
        // One that was deleted is not there for its own connection either.
        let latest = parent.as_deref().filter(|id| !self.gateway.store().is_deleted(id));
        let latest = latest.and_then(|id| self.latest(id));
        let response_id = new_id("resp");
        let (gateway, running, turns) = (self.gateway, self.running, self.turns);
        let tenant = Arc::clone(&self.tenant);
        let events = EventSink::Stream(self.events.clone(), lane.clone());
        let stop = running.add(&response_id);
        let turn = async move {
            let origin = Origin { tenant, response_id: response_id.clone(), latest };
            let result = match turns.try_acquire() {
                Ok(_place) => run_turn(gateway, create, origin, events, &stop).await,
                Err(_) => Err(all_turns_taken()),
            };
            running.remove(&response_id);
            Done { lane, parent, result }
        };
        self.active.push(Box::pin(turn));
    }

    /// The newest response of any lane, if it is the one with this id.
    fn latest(&self, id: &str) -> Option<Arc<Stored>> {
        let latest = self.lanes.values().filter_map(|lane| lane.latest.as_ref());
        latest.into_iter().find(|latest| latest.id == id).cloned()
    }

    async fn ended(&mut self, done: Done) -> Result<(), End> {
        let Done { lane, parent, result } = done;
        let state = self.lanes.entry(lane.clone()).or_default();
        state.is_busy = false;
        match result {
            Ok(Ended { stored: Some(stored), .. }) => state.latest = Some(stored),
            Ok(_) => self.evict(&lane, parent.as_deref()),
            Err(error) if error.is_client_gone() => {
                return Err(End::Close(close_code::POLICY, "the client does not read"));
            }
            Err(error) => {
                self.evict(&lane, parent.as_deref());
                self.refuse(&error, &lane).await?;
            }
        }
        // Lanes that have waited for a place come first.
        if self.ready.is_empty() {
            self.advance(lane).await?;
        } else if self.lanes.get(&lane).is_some_and(|state| !state.queue.is_empty()) {
            self.ready.push_back(lane);
        }
        while self.active.len() < self.gateway.config().max_active_lanes {
            let Some(lane) = self.ready.pop_front() else { break };
            self.advance(lane).await?;
        }
        Ok(())
    }

    /// A failed continuation makes its parent unusable on this connection; a failed fork does not.
    fn evict(&mut self, lane: &Lane, parent: Option<&str>) {
        if let Some(state) = self.lanes.get_mut(lane) {
            state.latest.take_if(|latest| Some(latest.id.as_str()) == parent);
        }
    }

    async fn refuse(&mut self, error: &ApiError, lane: &Lane) -> Result<(), End> {
        let sent = self.events.send_timeout(refused(error, lane), self.gateway.config().slow_reader).await;
        sent.map_err(|_| End::Close(close_code::POLICY, "the client does not read"))
    }
}

//! Responses that run without a reader: their events are kept, so that they can be asked for and read again from any
//! place.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dashmap::DashMap;
use tokio::sync::watch;

use crate::error::ApiError;
use crate::turn::{Partial, Stop};
use crate::wire::Event;

/// How long the events of a finished response can be read again.
const KEPT_FOR: Duration = Duration::from_secs(600);

/// The events of one response so far.
#[derive(Debug)]
pub(crate) struct EventLog {
    tenant: Arc<str>,
    stop: Stop,
    state: Mutex<State>,
    /// Counts events, so that readers can wait for the next one.
    n_events: watch::Sender<usize>,
    max_bytes: usize,
}

#[derive(Debug, Default)]
struct State {
    events: Vec<Event>,
    n_bytes: usize,
    /// The response object as the last event that carried it has it.
    response: String,
    ended: Option<Instant>,
}

impl EventLog {
    /// Keeps an event. Once they have become too large, only the last one of the response is kept.
    ///
    /// # Errors
    /// When the events together have just become too large.
    pub(crate) fn push(&self, event: Event) -> Result<(), ApiError> {
        let mut state = self.state();
        let was_full = state.n_bytes > self.max_bytes;
        state.n_bytes += event.json.len();
        if state.n_bytes > self.max_bytes && !event.is_terminal() {
            if was_full {
                return Ok(());
            }
            return Err(ApiError::internal("the response has become too large to be kept"));
        }
        if let Some(response) = event.response() {
            response.clone_into(&mut state.response);
        }
        state.events.push(event);
        let n_events = state.events.len();
        drop(state);
        self.n_events.send_replace(n_events);
        Ok(())
    }

    /// No further events come.
    fn end(&self) {
        self.state().ended = Some(Instant::now());
        self.n_events.send_modify(|_| {});
    }

    /// Stops the turn.
    pub(crate) fn stop(&self) -> &Stop {
        &self.stop
    }

    /// The response object as it is now.
    pub(crate) fn response(&self) -> String {
        self.state().response.clone()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.state().ended.is_some()
    }

    /// The events from the `from`-th on, as soon as there is one; None when there will be none.
    pub(crate) async fn read(&self, from: usize) -> Option<Vec<Event>> {
        let mut n_events = self.n_events.subscribe();
        loop {
            {
                let state = self.state();
                if state.events.len() > from {
                    return Some(state.events[from..].to_vec());
                }
                if state.ended.is_some() {
                    return None;
                }
            }
            n_events.changed().await.ok()?;
        }
    }

    /// Waits until the response has ended.
    pub(crate) async fn ended(&self) {
        let mut n_events = self.n_events.subscribe();
        while !self.has_ended() {
            if n_events.changed().await.is_err() {
                return;
            }
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends a log when it is dropped, also when its turn panicked: whoever waits for it must not wait for ever.
#[derive(Debug)]
pub(crate) struct Ends(pub(crate) Arc<EventLog>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// The background responses of one gateway. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Background {
    logs: Arc<DashMap<String, Arc<EventLog>>>,
    max_logs: usize,
    max_bytes: usize,
}

impl Background {
    /// At most `max_logs` responses, each with at most `max_bytes` of events.
    pub(crate) fn new(max_logs: usize, max_bytes: usize) -> Self {
        Self { logs: Arc::default(), max_logs, max_bytes }
    }

    /// A log for a response that is about to run.
    ///
    /// # Errors
    /// When too many are kept already.
    pub(crate) fn begin(&self, id: &str, tenant: &Arc<str>) -> Result<Arc<EventLog>, ApiError> {
        self.logs.retain(|_, log| log.state().ended.is_none_or(|ended| ended.elapsed() < KEPT_FOR));
        if self.logs.len() >= self.max_logs {
            return Err(ApiError::overloaded(
                "too many background responses run or are kept: try again shortly",
            ));
        }
        let log = Arc::new(EventLog {
            tenant: Arc::clone(tenant),
            stop: Stop::default(),
            state: Mutex::default(),
            n_events: watch::Sender::new(0),
            max_bytes: self.max_bytes,
        });
        self.logs.insert(id.to_owned(), Arc::clone(&log));
        Ok(log)
    }

    /// The log of a response of `tenant`.
    pub(crate) fn get(&self, id: &str, tenant: &str) -> Option<Arc<EventLog>> {
        let log = self.logs.get(id)?;
        (*log.tenant == *tenant).then(|| Arc::clone(&log))
    }

    /// Forgets a response.
    pub(crate) fn remove(&self, id: &str) {
        if let Some((_, log)) = self.logs.remove(id) {
            log.stop.stop(Partial::Discard);
        }
    }
}

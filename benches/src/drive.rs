//! Drives a workload: starts sessions on schedule or as places come free, and collects what happened.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;

use crate::client::{Connection, Request, Target};
use crate::pacing::Clock;
use crate::record::Record;
use crate::workload::{Chain, Session, Turn};

/// How long before its first request a session connects and renders its text.
const LEAD: Duration = Duration::from_millis(250);
/// Records on their way to the collector.
const RECORDS_IN_FLIGHT: usize = 256;

/// How requests are sent.
#[derive(Debug, Clone)]
pub struct Settings {
    pub target: Target,
    pub model: String,
    pub concurrency: usize,
    pub temperature: f64,
    pub timeout: Duration,
}

/// What happened.
#[derive(Debug, Default)]
pub struct Outcome {
    pub records: Vec<Record>,
    /// From the start of the run to its end.
    pub wall: Duration,
    pub interrupted: bool,
}

/// Runs all `sessions`, or as far as they have come when `stop` is ready.
pub async fn run(sessions: Vec<Session>, settings: Settings, stop: impl Future) -> Outcome {
    let clock = Clock::start_in(LEAD);
    let (sender, mut receiver) = mpsc::channel(RECORDS_IN_FLIGHT);
    let mut outcome = Outcome::default();
    let mut dispatch = std::pin::pin!(dispatch(sessions, Arc::new(settings), clock, sender));
    let mut dispatching = true;
    let mut stop = std::pin::pin!(stop);
    loop {
        tokio::select! {
            () = &mut dispatch, if dispatching => dispatching = false,
            record = receiver.recv() => match record {
                Some(record) => outcome.records.push(record),
                None => break,
            },
            _ = &mut stop => {
                outcome.interrupted = true;
                break;
            }
        }
    }
    outcome.wall = clock.now();
    outcome.records.sort_by_key(|record| record.scheduled);
    outcome
}

/// Starts each session at its time, or as soon as a place is free; waits for all.
async fn dispatch(
    sessions: Vec<Session>,
    settings: Arc<Settings>,
    clock: Clock,
    records: mpsc::Sender<Record>,
) {
    let places = Arc::new(Semaphore::new(settings.concurrency));
    let mut running = JoinSet::new();
    for session in sessions {
        if let Some(start) = session.start {
            clock.until(start.saturating_sub(LEAD)).await;
        }
        let place = Arc::clone(&places).acquire_owned().await.expect("the semaphore is never closed");
        let client =
            Client { settings: Arc::clone(&settings), clock, records: records.clone(), _place: place };
        running.spawn(client.session(session));
        while let Some(ended) = running.try_join_next() {
            ended.expect("a session does not panic");
        }
    }
    drop(records);
    while let Some(ended) = running.join_next().await {
        ended.expect("a session does not panic");
    }
}

/// One session's client.
struct Client {
    settings: Arc<Settings>,
    clock: Clock,
    records: mpsc::Sender<Record>,
    _place: OwnedSemaphorePermit,
}

impl Client {
    /// Runs the session's turns until one fails.
    async fn session(self, session: Session) {
        let mut due = session.start.unwrap_or_default();
        let system = session.system.render();
        let Ok(mut connection) = Connection::open(&self.settings.target).await else {
            return self.refused(&session, due).await;
        };
        let mut handshake = Some(connection.handshake);
        let mut previous = None;
        for (idx, turn) in session.turns.iter().enumerate() {
            let frame = self.frame(turn, &system, previous.as_deref());
            if session.start.is_none() && idx == 0 {
                // Without a schedule a session is due once its place and its connection are there.
                due = self.clock.now();
            }
            let mut record = Record {
                session: session.id.clone(),
                turn: idx,
                continues: turn.chain == Chain::Continues,
                scheduled: due,
                handshake: handshake.take(),
                ..Default::default()
            };
            self.clock.until(due).await;
            previous = connection.exchange(frame, self.settings.timeout, &self.clock, &mut record).await;
            let next_delay = session.turns.get(idx + 1).map_or(Duration::ZERO, |next| next.delay);
            due = record.done + next_delay;
            if self.records.send(record).await.is_err() || previous.is_none() {
                return;
            }
        }
    }

    fn frame(&self, turn: &Turn, system: &str, previous: Option<&str>) -> String {
        let request = Request {
            model: &self.settings.model,
            system,
            text: &turn.text.render(),
            previous_response_id: previous.filter(|_| turn.chain == Chain::Continues),
            max_output_tokens: turn.output_tokens,
            temperature: self.settings.temperature,
        };
        request.frame()
    }

    async fn refused(&self, session: &Session, due: Duration) {
        let now = self.clock.now();
        let record = Record {
            session: session.id.clone(),
            scheduled: due.min(now),
            sent: now,
            done: now,
            error: Some("connect".to_owned()),
            ..Default::default()
        };
        // Nobody listens any more when the run was interrupted.
        let _ = self.records.send(record).await;
    }
}

#[cfg(test)]
mod tests;

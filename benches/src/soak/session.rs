//! One random client: session after session until the soak ends, one turn at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use super::plan::{Cut, Plan, Session, Turn};
use super::tally::is_overload;
use crate::client::{Connection, Request};
use crate::drive::Settings;
use crate::pacing::Clock;
use crate::record::Record;
use crate::text::Text;
use crate::workload::TEMPLATE_TOKENS;

/// Wait after anything but an answer.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(250);

/// What all clients share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) settings: Settings,
    pub(super) plan: Plan,
    pub(super) system: Text,
    pub(super) max_input_tokens: usize,
    pub(super) clock: Clock,
    /// The number of the next session.
    pub(super) next: AtomicU64,
}

/// What a client tells of a turn. Times are the run's.
#[derive(Debug)]
pub(super) enum News {
    Sent {
        at: Duration,
    },
    /// More text.
    Text {
        at: Duration,
    },
    Ended(Box<Over>),
    /// No turn: a connection could not be opened.
    Unreachable(String),
}

/// A turn that is over.
#[derive(Debug)]
pub(super) struct Over {
    pub(super) record: Record,
    pub(super) end: End,
    pub(super) forked: bool,
}

/// How a turn ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    /// With the response of this id.
    Answered(String),
    /// The client went away.
    Cancelled,
    /// The record says why.
    Failed,
}

/// A response that can be continued.
struct Response {
    id: String,
    /// Tokens of its conversation up to its end.
    n_tokens: usize,
}

/// A client.
pub(super) struct Client {
    pub(super) shared: Arc<Shared>,
    pub(super) news: mpsc::Sender<News>,
    /// Becomes true when no turn is to be started any more.
    pub(super) ending: watch::Receiver<bool>,
    pub(super) connection: Option<Connection>,
}

/// The soak is ending, or nobody listens to the news any more.
struct Stop;

impl Client {
    /// Runs sessions until the soak ends.
    pub(super) async fn run(mut self) {
        loop {
            let session = self.shared.plan.session(self.shared.next.fetch_add(1, Ordering::Relaxed));
            if let Err(Stop) = self.session(&session).await {
                return;
            }
        }
    }

    /// Runs the session's turns until one does not fit or fails otherwise than for overload.
    async fn session(&mut self, session: &Session) -> Result<(), Stop> {
        let mut responses: Vec<Response> = Vec::new();
        for (idx, turn) in session.turns.iter().enumerate() {
            self.pause(turn.pause).await?;
            let parent = turn.parent(responses.len()).map(|at| &responses[at]);
            // Without a parent, after a cancelled turn, its text opens the conversation.
            let held = parent.map_or(self.shared.system.estimated_tokens(), |parent| parent.n_tokens);
            if held + turn.text.estimated_tokens() + TEMPLATE_TOKENS > self.shared.max_input_tokens {
                return Ok(());
            }
            let forked = turn.older.is_some() && responses.len() > 1;
            let mut record = Record {
                session: format!("soak-{}", session.number),
                turn: idx,
                continues: parent.is_some(),
                ..Record::default()
            };
            let frame = self.frame(turn, parent);
            let end = self.turn(frame, turn.cut, &mut record).await?;
            let n_tokens = usize::try_from(record.input_tokens + record.output_tokens).unwrap_or(usize::MAX);
            let error = record.error.clone();
            if let End::Answered(id) = &end {
                responses.push(Response { id: id.clone(), n_tokens });
            }
            self.tell(News::Ended(Box::new(Over { record, end, forked }))).await?;
            if let Some(code) = error {
                self.pause(PAUSE_AFTER_FAILURE).await?;
                if !is_overload(&code) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn frame(&self, turn: &Turn, parent: Option<&Response>) -> String {
        let Shared { settings, system, .. } = &*self.shared;
        let request = Request {
            model: &settings.model,
            system: &system.render(),
            text: &turn.text.render(),
            previous_response_id: parent.map(|parent| parent.id.as_str()),
            max_output_tokens: turn.output_tokens,
            temperature: settings.temperature,
        };
        request.frame()
    }

    /// Sends one request and reads its answer, or as far as the client waits for it. The connection is kept after an
    /// answer only.
    async fn turn(&mut self, frame: String, cut: Option<Cut>, record: &mut Record) -> Result<End, Stop> {
        let mut connection = self.connect().await?;
        let clock = self.shared.clock;
        record.scheduled = clock.now();
        self.tell(News::Sent { at: record.scheduled }).await?;
        let limit = record.scheduled + self.shared.settings.timeout;
        let mut end = match connection.send(frame, &clock, record).await {
            Ok(()) => None,
            Err(code) => Some(Err(code)),
        };
        let mut n_deltas = 0;
        let result = loop {
            if let Some(end) = end.take() {
                break end;
            }
            let patience = match cut {
                Some(Cut::AfterSending(patience)) => Some(record.sent + patience),
                Some(Cut::AfterDeltas(n)) if n_deltas >= n => Some(Duration::ZERO),
                _ => None,
            };
            let before = record.last_text;
            tokio::select! {
                biased;
                () = clock.until(patience.unwrap_or(limit)), if patience.is_some() => {
                    record.done = clock.now();
                    return Ok(End::Cancelled);
                }
                () = clock.until(limit) => break Err("timeout".to_owned()),
                got = connection.next_event(&clock, record) => end = got,
            }
            if record.last_text != before {
                n_deltas += 1;
                self.tell(News::Text { at: clock.now() }).await?;
            }
        };
        record.done = clock.now();
        match result {
            Ok(id) => {
                self.connection = Some(connection);
                Ok(End::Answered(id))
            }
            Err(code) => {
                record.error = Some(code);
                Ok(End::Failed)
            }
        }
    }

    async fn connect(&mut self) -> Result<Connection, Stop> {
        loop {
            if let Some(connection) = self.connection.take() {
                return Ok(connection);
            }
            match Connection::open(&self.shared.settings.target).await {
                Ok(connection) => return Ok(connection),
                Err(problem) => {
                    self.tell(News::Unreachable(problem)).await?;
                    self.pause(PAUSE_AFTER_FAILURE).await?;
                }
            }
        }
    }

    async fn tell(&self, news: News) -> Result<(), Stop> {
        self.news.send(news).await.map_err(|_| Stop)
    }

    /// Waits, or stops if the soak ends.
    async fn pause(&mut self, pause: Duration) -> Result<(), Stop> {
        tokio::select! {
            biased;
            _ = self.ending.wait_for(|ending| *ending) => Err(Stop),
            () = tokio::time::sleep(pause) => Ok(()),
        }
    }
}

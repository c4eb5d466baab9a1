//! From the engine's thread to one turn's stream: events wait here, and tokens coalesce, until the reader comes.
//!
//! The engine never waits and nothing is unbounded: a turn has at most as many tokens as its output limit.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use engine::job::{Admitted, Error, Event, FinishReason, Output, Sink};
use tokio::sync::Notify;

#[derive(Debug, Default)]
struct State {
    admitted: Option<Admitted>,
    prefilled: Option<usize>,
    tokens: Vec<Output>,
    end: Option<Result<FinishReason, Error>>,
    reader_gone: bool,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Notify,
}

/// The reading end. Dropping it cancels the turn at its next token.
#[derive(Debug)]
pub(crate) struct Outbox {
    shared: Arc<Shared>,
}

/// What the reader gets, in order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Next {
    Prefilled { computed_tokens: usize },
    Tokens(Vec<Output>),
    End(Result<FinishReason, Error>),
}

/// An outbox and the sink that fills it.
pub(crate) fn outbox() -> (Outbox, Sink) {
    let shared = Arc::new(Shared::default());
    let writer = Writer(Arc::clone(&shared));
    let sink = move |event| {
        let writer = &writer;
        let mut state = writer.0.lock();
        match event {
            Event::Admitted(admitted) => state.admitted = Some(admitted),
            Event::Prefilled { computed_tokens } => state.prefilled = Some(computed_tokens),
            Event::Token(token) => state.tokens.push(token),
            Event::Finished(reason) => state.end = Some(Ok(reason)),
            Event::Failed(error) => state.end = Some(Err(error)),
        }
        let heard = !state.reader_gone;
        drop(state);
        writer.0.changed.notify_one();
        heard
    };
    (Outbox { shared }, Box::new(sink))
}

/// Ends the turn for its reader when the engine drops it without a last word.
struct Writer(Arc<Shared>);

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.lock().end.get_or_insert(Err(Error::Stopped));
        self.0.changed.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Outbox {
    /// Waits until the turn has its place.
    pub(crate) async fn admitted(&self) -> Result<Admitted, Error> {
        loop {
            {
                let mut state = self.shared.lock();
                if let Some(admitted) = state.admitted.take() {
                    return Ok(admitted);
                }
                if let Some(Err(error)) = &state.end {
                    return Err(error.clone());
                }
            }
            self.shared.changed.notified().await;
        }
    }

    /// Waits for the next thing. Call it no more after `End`.
    pub(crate) async fn next(&self) -> Next {
        loop {
            if let Some(next) = self.shared.lock().take() {
                return next;
            }
            self.shared.changed.notified().await;
        }
    }
}

impl State {
    fn take(&mut self) -> Option<Next> {
        if let Some(computed_tokens) = self.prefilled.take() {
            return Some(Next::Prefilled { computed_tokens });
        }
        if !self.tokens.is_empty() {
            return Some(Next::Tokens(std::mem::take(&mut self.tokens)));
        }
        self.end.take().map(Next::End)
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.shared.lock().reader_gone = true;
    }
}

//! How clients stop turns.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio_util::sync::CancellationToken;

/// What becomes of an item that is not complete when its turn is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Partial {
    /// It is told as incomplete, and can be continued.
    Keep,
    /// It was never said.
    Discard,
}

/// Stops a turn. Cheap to clone; clones stop the same turn.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stop {
    token: CancellationToken,
    discards: Arc<AtomicBool>,
}

impl Stop {
    /// Stops the turn; what is said first holds.
    pub(crate) fn stop(&self, partial: Partial) {
        if !self.token.is_cancelled() {
            self.discards.store(partial == Partial::Discard, Ordering::Relaxed);
        }
        self.token.cancel();
    }

    /// Completes when the turn is to be stopped.
    pub(crate) async fn stopped(&self) {
        self.token.cancelled().await;
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Whether an item that is not complete was never said.
    pub(crate) fn discards(&self) -> bool {
        self.token.is_cancelled() && self.discards.load(Ordering::Relaxed)
    }
}

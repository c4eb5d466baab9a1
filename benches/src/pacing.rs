//! One clock for a whole run, and waits until absolute times on it, so that delays never add up.

use std::time::{Duration, Instant};

/// Time since the start of a run.
#[derive(Debug, Clone, Copy)]
pub struct Clock(Instant);

impl Clock {
    /// Starts the run `lead` from now: connections for the first requests are opened before its zero.
    #[must_use]
    pub fn start_in(lead: Duration) -> Self {
        Self(Instant::now() + lead)
    }

    /// Now; zero before the start.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.0.elapsed()
    }

    /// Waits until `at`; at once when it has passed.
    pub async fn until(&self, at: Duration) {
        tokio::time::sleep_until((self.0 + at).into()).await;
    }
}

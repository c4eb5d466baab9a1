//! What is known of one request: clocks since the start of the run, tokens, bytes, and why it failed if it did.

use std::time::Duration;

use serde::{Serialize, Serializer};

/// One request. Times are since the start of the run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Record {
    pub session: String,
    pub turn: usize,
    /// It names a previous response and carries only what is new.
    pub continues: bool,
    #[serde(rename = "scheduled_us", serialize_with = "micros")]
    pub scheduled: Duration,
    #[serde(rename = "sent_us", serialize_with = "micros")]
    pub sent: Duration,
    #[serde(rename = "first_text_us", serialize_with = "optional_micros")]
    pub first_text: Option<Duration>,
    #[serde(rename = "last_text_us", serialize_with = "optional_micros")]
    pub last_text: Option<Duration>,
    #[serde(rename = "done_us", serialize_with = "micros")]
    pub done: Duration,
    /// Times between text deltas.
    #[serde(skip)]
    pub gaps: Vec<Duration>,
    pub input_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    pub bytes_up: usize,
    pub bytes_down: usize,
    /// Time to open the connection, in the record of a connection's first request.
    #[serde(rename = "handshake_us", serialize_with = "optional_micros")]
    pub handshake: Option<Duration>,
    /// The server's error code, or `connect`, `closed`, `timeout`, `protocol`.
    pub error: Option<String>,
    /// What else was said about it.
    pub message: Option<String>,
}

impl Record {
    /// From the time the request should have been sent to its last event.
    #[must_use]
    pub fn end_to_end(&self) -> Duration {
        self.done.saturating_sub(self.scheduled)
    }

    /// From the time the request was sent to its last event: what a closed loop would report.
    #[must_use]
    pub fn service_time(&self) -> Duration {
        self.done.saturating_sub(self.sent)
    }

    /// From the time the request should have been sent to the first text.
    #[must_use]
    pub fn ttft(&self) -> Option<Duration> {
        self.first_text.map(|at| at.saturating_sub(self.scheduled))
    }

    /// How late the client itself was.
    #[must_use]
    pub fn lateness(&self) -> Duration {
        self.sent.saturating_sub(self.scheduled)
    }
}

fn micros<S: Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(whole_micros(*value))
}

fn optional_micros<S: Serializer>(value: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    value.map(whole_micros).serialize(serializer)
}

fn whole_micros(value: Duration) -> u64 {
    u64::try_from(value.as_micros()).unwrap_or(u64::MAX)
}

//! How turns end.

use proto::reason::Reason;
use proto::v1::FinishReason;
use tonic::Status;

use crate::cluster::may_retry;
use crate::error::ApiError;
use crate::metrics as names;

/// How the tokens of a turn came to their end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The model ended its turn.
    Stop,
    /// The output limit or the context was reached.
    Length,
    /// Nothing was to be generated.
    Prefilled,
    /// The client stopped it.
    Interrupted,
}

impl Finish {
    pub(super) fn from_wire(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Length => Self::Length,
            FinishReason::Prefilled => Self::Prefilled,
            FinishReason::Stop | FinishReason::Unspecified => Self::Stop,
        }
    }

    /// Why the response is incomplete, if it is.
    pub(crate) fn incomplete_reason(self) -> Option<&'static str> {
        match self {
            Self::Stop | Self::Prefilled => None,
            Self::Length => Some("max_output_tokens"),
            Self::Interrupted => Some("interrupted"),
        }
    }
}

/// What a client is told when the cluster fails its turn.
pub(super) fn api_error(status: &Status) -> ApiError {
    match Reason::of(status) {
        Some(Reason::PromptTooLong) => {
            ApiError::invalid("context_length_exceeded", status.message()).at("input")
        }
        Some(Reason::Overloaded) => ApiError::overloaded("all workers are busy: try again shortly"),
        Some(Reason::NoWorker) => ApiError::overloaded(status.message()),
        _ if may_retry(status) => {
            ApiError::overloaded(format!("no worker could take the turn: {}", status.message()))
        }
        _ => ApiError::internal(format!("the turn failed inside the cluster: {}", status.message())),
    }
}

/// Counts the turn when it is over, also when its client is gone and the future is dropped.
pub(super) struct Outcome<'a> {
    pub(super) outcome: &'static str,
    pub(super) conversation: &'a str,
}

impl Drop for Outcome<'_> {
    fn drop(&mut self) {
        metrics::counter!(names::TURNS, "outcome" => self.outcome).increment(1);
        if self.outcome == "cancelled" {
            tracing::info!(conversation = self.conversation, "turn cancelled: the client is gone");
        }
    }
}

//! Why a call failed, as both sides understand it: a closed set of reasons carried beside the gRPC status.

use std::fmt;

use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

const HEADER: &str = "baton-reason";

/// A failure that the caller acts upon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The worker lacks the prompt's parent block: send the full ids.
    ParentUnknown,
    /// The prompt does not fit the model's context or the worker's KV memory.
    PromptTooLong,
    /// Queues are full: try another worker, or later.
    Overloaded,
    /// The worker is going away: try another one.
    Draining,
    /// Peers run different models or KV layouts.
    Mismatch,
    /// The grant is unknown, revoked, or of another epoch.
    GrantRevoked,
    /// Bytes arrived damaged or incomplete.
    Damaged,
    /// No worker fits the request.
    NoWorker,
    /// The grammar that a hash stands for is not held here: send it.
    GrammarUnknown,
    /// The output's constraint cannot be used: a defective grammar, or one that led nowhere.
    BadConstraint,
}

impl Reason {
    const ALL: [Self; 10] = [
        Self::ParentUnknown,
        Self::PromptTooLong,
        Self::Overloaded,
        Self::Draining,
        Self::Mismatch,
        Self::GrantRevoked,
        Self::Damaged,
        Self::NoWorker,
        Self::GrammarUnknown,
        Self::BadConstraint,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::ParentUnknown => "parent_unknown",
            Self::PromptTooLong => "prompt_too_long",
            Self::Overloaded => "overloaded",
            Self::Draining => "draining",
            Self::Mismatch => "mismatch",
            Self::GrantRevoked => "grant_revoked",
            Self::Damaged => "damaged",
            Self::NoWorker => "no_worker",
            Self::GrammarUnknown => "grammar_unknown",
            Self::BadConstraint => "bad_constraint",
        }
    }

    fn code(self) -> Code {
        match self {
            Self::ParentUnknown | Self::GrammarUnknown | Self::Mismatch | Self::GrantRevoked => {
                Code::FailedPrecondition
            }
            Self::PromptTooLong | Self::BadConstraint => Code::InvalidArgument,
            Self::Overloaded => Code::ResourceExhausted,
            Self::Draining | Self::NoWorker => Code::Unavailable,
            Self::Damaged => Code::DataLoss,
        }
    }

    /// The gRPC status that carries this reason and `message`.
    pub fn status(self, message: impl Into<String>) -> Status {
        let mut status = Status::new(self.code(), message);
        status.metadata_mut().insert(HEADER, MetadataValue::from_static(self.name()));
        status
    }

    /// The reason a peer gave, if it gave one.
    #[must_use]
    pub fn of(status: &Status) -> Option<Self> {
        let name = status.metadata().get(HEADER)?.to_str().ok()?;
        Self::ALL.into_iter().find(|reason| reason.name() == name)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// True when another worker, or the same one later, may succeed.
#[must_use]
pub fn is_retryable(status: &Status) -> bool {
    match Reason::of(status) {
        Some(reason) => matches!(reason, Reason::Overloaded | Reason::Draining | Reason::NoWorker),
        None => matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal),
    }
}

#[cfg(test)]
mod tests;

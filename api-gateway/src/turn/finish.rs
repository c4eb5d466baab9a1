//! How turns end.

use proto::v1::FinishReason;

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

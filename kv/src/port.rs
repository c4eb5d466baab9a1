//! The door to one worker's KV memory: whoever owns the memory (the engine's thread) answers these commands.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use crate::hash::BlockHash;
use crate::pool::BlockId;

/// A run of layers of some blocks, whole and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub first_layer: u32,
    pub n_layers: u32,
    /// Push: the owner's block numbers. Pull: indices into the hashes asked for.
    pub blocks: Vec<BlockId>,
    /// One piece per block, each `n_layers` layers long, in the geometry's layout.
    pub payload: Bytes,
}

/// Why bytes were not written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    #[error("grant {0} is unknown or revoked")]
    Revoked(u64),
    #[error("the frame does not fit its grant: {0}")]
    Misfit(String),
    #[error("the worker's engine has stopped")]
    Stopped,
}

/// What the memory's owner is asked to do.
#[derive(Debug)]
pub enum PortCommand {
    /// Write `frame` into blocks of `grant`.
    Import { grant: u64, frame: Frame, reply: Reply<Result<(), ImportError>> },
    /// Read the held blocks among `hashes`, from the first on, into `frames`, all layers of each.
    Export { hashes: Vec<BlockHash>, frames: FrameSender },
}

/// The way back to whoever asked.
#[derive(Debug)]
pub struct Reply<T>(oneshot::Sender<T>);

impl<T> Reply<T> {
    /// A reply and the future it completes.
    #[must_use]
    pub fn new() -> (Self, oneshot::Receiver<T>) {
        let (sender, receiver) = oneshot::channel();
        (Self(sender), receiver)
    }

    /// Answers. Whoever asked may be gone, and then nobody needs the answer.
    pub fn send(self, value: T) {
        let _ = self.0.send(value);
    }
}

/// The sending end of a bounded run of frames, for a thread that must not wait.
#[derive(Debug, Clone)]
pub struct FrameSender(mpsc::Sender<Frame>);

/// Why no frame can be sent now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotNow {
    /// The reader is behind: come back later.
    Full,
    /// The reader is gone.
    Closed,
}

impl FrameSender {
    /// A sender with room for `n_frames` and its receiver.
    #[must_use]
    pub fn new(n_frames: usize) -> (Self, mpsc::Receiver<Frame>) {
        let (sender, receiver) = mpsc::channel(n_frames);
        (Self(sender), receiver)
    }

    /// Sends what `make` builds, if there is room; `make` is not called otherwise.
    ///
    /// # Errors
    /// When the reader is behind or gone.
    pub fn send_with(&self, make: impl FnOnce() -> Frame) -> Result<(), NotNow> {
        match self.0.try_reserve() {
            Ok(slot) => {
                slot.send(make());
                Ok(())
            }
            Err(mpsc::error::TrySendError::Full(())) => Err(NotNow::Full),
            Err(mpsc::error::TrySendError::Closed(())) => Err(NotNow::Closed),
        }
    }

    /// True when nobody reads any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

/// A cheap handle to the memory's owner.
#[derive(Clone)]
pub struct Port {
    submit: Arc<dyn Fn(PortCommand) -> bool + Send + Sync>,
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Port")
    }
}

impl Port {
    /// A port that hands commands to `submit`, which returns false once the owner has stopped.
    #[must_use]
    pub fn new(submit: impl Fn(PortCommand) -> bool + Send + Sync + 'static) -> Self {
        Self { submit: Arc::new(submit) }
    }

    /// Writes one frame; returns when it is in place.
    ///
    /// # Errors
    /// When the grant does not cover it or the owner has stopped.
    pub async fn import(&self, grant: u64, frame: Frame) -> Result<(), ImportError> {
        let (reply, answer) = Reply::new();
        if !(self.submit)(PortCommand::Import { grant, frame, reply }) {
            return Err(ImportError::Stopped);
        }
        answer.await.unwrap_or(Err(ImportError::Stopped))
    }

    /// Reads held blocks among `hashes`, from the first on, into `frames`; its channel closes at the end.
    pub fn export(&self, hashes: Vec<BlockHash>, frames: FrameSender) {
        (self.submit)(PortCommand::Export { hashes, frames });
    }
}

//! What lies beneath the memory: nothing, or a disk. A database that several gateways share would be a third case.

use std::sync::Arc;
use std::time::Duration;

use super::Stored;
use super::chain::Chain;
use super::disk::Disk;
use crate::conversations::{Change, Kept};
use crate::history::ContentHash;

/// A durable response that is looked for.
#[derive(Debug)]
pub(super) enum Wanted {
    Id(String),
    /// After which the first possible of these had been said.
    After(Vec<ContentHash>),
    /// That brought or made the item with this id.
    Item(String),
}

/// What was found.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) id: String,
    pub(super) chain: Chain,
    /// How long it is still kept.
    pub(super) life: Duration,
}

/// Durable storage failed; the text is for clients too.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Failure(pub(super) &'static str);

impl Failure {
    pub(super) const TOO_MANY: Self = Self("too many conversations are kept: delete some");
    pub(super) const GONE: Self = Self("the conversation was deleted");
    pub(super) const NO_ROOM: Self = Self("conversations take as much of the disk as they may: delete some");

    /// Whoever should have answered is gone.
    pub(super) fn interrupted() -> Self {
        Self("the store was interrupted")
    }
}

/// Where durable responses are.
#[derive(Debug)]
pub(super) enum Durable {
    Nothing,
    Disk(Disk),
}

impl Durable {
    /// Keeps a response that has a response object. It survives a crash once this has returned.
    pub(super) async fn put(&self, stored: Arc<Stored>) -> Result<(), Failure> {
        match self {
            Self::Nothing => Ok(()),
            Self::Disk(disk) => disk.put(stored).await,
        }
    }

    /// A response of `tenant` and the rows it consists of, back to the first one that `known` has. Blocks.
    pub(super) fn find(
        &self,
        wanted: &Wanted,
        tenant: &str,
        known: &dyn Fn(&str) -> Option<Arc<Stored>>,
    ) -> Result<Option<Found>, Failure> {
        match self {
            Self::Nothing => Ok(None),
            Self::Disk(disk) => disk.find(wanted, tenant, known),
        }
    }

    /// Forgets a response of `tenant`, if there is one.
    pub(super) async fn delete(&self, id: &str, tenant: &str) -> Result<bool, Failure> {
        match self {
            Self::Nothing => Ok(false),
            Self::Disk(disk) => disk.delete(id, tenant).await,
        }
    }

    /// Changes a conversation. It survives a crash once this has returned.
    pub(super) async fn converse(&self, id: &str, change: Change) -> Result<(), Failure> {
        match self {
            Self::Nothing => Ok(()),
            Self::Disk(disk) => disk.converse(id, change).await,
        }
    }

    /// A conversation of `tenant`. Blocks.
    pub(super) fn conversation(&self, id: &str, tenant: &str) -> Result<Option<Kept>, Failure> {
        match self {
            Self::Nothing => Ok(None),
            Self::Disk(disk) => disk.conversation(id, tenant),
        }
    }

    /// A response is in use: its life begins anew, as soon as there is time for it.
    pub(super) fn touch(&self, id: &str) {
        match self {
            Self::Nothing => {}
            Self::Disk(disk) => disk.touch(id),
        }
    }

    /// Removes what has expired, as soon as there is time for it.
    pub(super) fn sweep(&self) {
        match self {
            Self::Nothing => {}
            Self::Disk(disk) => disk.sweep(),
        }
    }

    /// How long responses are kept.
    pub(super) fn ttl(&self) -> Option<Duration> {
        match self {
            Self::Nothing => None,
            Self::Disk(disk) => Some(disk.ttl()),
        }
    }

    /// Completes when everything is durable and closed.
    pub(super) async fn close(&self) {
        match self {
            Self::Nothing => {}
            Self::Disk(disk) => disk.close().await,
        }
    }
}

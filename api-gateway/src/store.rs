//! Responses that can be continued, by id and by what was said.
//!
//! ```text
//!   turn ──▶ Store ──▶ Memory    everything recent, bounded: the answer to nearly every question
//!              │ ▲
//!       put    ▼ │ recall        what memory does not have, chain of rows by chain of rows
//!            Durable ──▶ Disk    responses that are to be kept, one row each (redb)
//! ```
//! A response with `store: true` is durable before its last event is sent. What is asked of memory is answered at once;
//! only [`Store::recall`] and [`Store::recall_after`] wait for a disk.

mod bytes;
mod chain;
mod disk;
mod durable;
mod memory;
mod row;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kv::hash::HashKey;
use model::TextModel;

use crate::conversation::TokenLog;
use crate::conversations::{Change, Kept};
use crate::error::ApiError;
use crate::history::{ContentHash, Entry, History};
use crate::metrics as names;
use crate::wire::Tools;

pub use disk::OpenError;
use durable::{Durable, Failure, Wanted};
use memory::Memory;
use row::Form;

/// What the ids of summaries begin with.
const SUMMARY_ID: &str = "cmp_";

/// Everything a later turn needs of an earlier one, and what is told of it.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) id: String,
    /// Whose it is.
    pub(crate) tenant: Arc<str>,
    /// Names the conversation in logs, plans and metrics; the id of its first response.
    pub(crate) conversation: String,
    pub(crate) log: TokenLog,
    /// All items, its own output included.
    pub(crate) history: History,
    /// The last of the items, which this turn added.
    pub(crate) n_own_items: usize,
    /// The last of those, which it generated.
    pub(crate) n_output_items: usize,
    pub(crate) instructions: Option<Arc<str>>,
    pub(crate) tools: Arc<Tools>,
    /// The decode worker that has its KV.
    pub(crate) decode_worker: String,
    /// The client's name for the conversation's cache.
    pub(crate) cache_key: Option<String>,
    /// The durable response that its log and its items grew out of.
    pub(crate) base: Option<Base>,
    /// The final response object; None when the client asked not to store it.
    pub(crate) response: Option<Arc<str>>,
}

/// A durable response, as the beginning of later ones.
#[derive(Debug, Clone)]
pub(crate) struct Base {
    pub(crate) id: Arc<str>,
    pub(crate) log: TokenLog,
    /// Items up to its end.
    pub(crate) n_entries: usize,
}

impl Stored {
    /// The items that this turn added: its input and its output.
    pub(crate) fn own_entries(&self) -> Vec<&Entry> {
        self.history.newest(self.n_own_items)
    }

    /// Whether it is nothing but a summary of what came before, so that the summary is what is continued.
    pub(crate) fn ends_in_summary(&self) -> bool {
        self.n_output_items > 0
            && self.own_entries().last().is_some_and(|entry| entry.id.starts_with(SUMMARY_ID))
    }

    /// What a response that continues this one with `log` is built upon, if the log was not rendered anew.
    pub(crate) fn base_of(&self, log: &TokenLog) -> Option<Base> {
        self.as_base().filter(|base| log.continues(&base.log))
    }

    fn as_base(&self) -> Option<Base> {
        if self.response.is_none() {
            return self.base.clone();
        }
        let id = self.id.as_str().into();
        Some(Base { id, log: self.log.clone(), n_entries: self.history.len() })
    }
}

/// Limits of what is kept in memory.
#[derive(Debug, Clone, Copy)]
pub struct StoreLimits {
    /// Responses kept.
    pub max_responses: usize,
    /// Tokens kept, counting each response's own part once.
    pub max_tokens: usize,
    /// How long a response can be continued; those on disk have a life of their own.
    pub ttl: Duration,
}

/// Where and for how long responses are kept on disk.
#[derive(Debug, Clone)]
pub struct DiskConfig {
    /// The folder, for this gateway alone. It is made if it is not there.
    pub folder: PathBuf,
    /// How long a response is kept after it was made or last continued.
    pub ttl: Duration,
    /// Beyond this many bytes the oldest responses go first. Conversations stay until they are deleted, and take at most
    /// half of it.
    pub max_bytes: u64,
}

/// The store of one gateway. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    memory: Memory,
    durable: Durable,
    hash_key: HashKey,
    limits: StoreLimits,
}

impl Store {
    /// A store whose responses end with the process.
    pub(crate) fn in_memory(limits: StoreLimits, hash_key: HashKey) -> Self {
        Self::new(limits, Durable::Nothing, hash_key)
    }

    /// A store whose responses outlive the process. Reads the file once, so it may take a while.
    ///
    /// # Errors
    /// When the folder or the file cannot be used; nothing has been changed then.
    pub(crate) fn open(
        limits: StoreLimits,
        config: &DiskConfig,
        text: &TextModel,
        hash_key: HashKey,
    ) -> Result<Self, OpenError> {
        let disk = disk::Disk::open(config, Form::of(text))?;
        Ok(Self::new(limits, Durable::Disk(disk), hash_key))
    }

    fn new(limits: StoreLimits, durable: Durable, hash_key: HashKey) -> Self {
        Self { inner: Arc::new(Inner { memory: Memory::new(limits), durable, hash_key, limits }) }
    }

    /// A stored response of `tenant`, if it is in memory.
    pub(crate) fn get(&self, id: &str, tenant: &str) -> Option<Arc<Stored>> {
        self.inner.memory.get(id, tenant)
    }

    /// The newest response in memory after which exactly this had been said, stored by the client's wish or not.
    pub(crate) fn after(&self, content: &ContentHash) -> Option<Arc<Stored>> {
        self.inner.memory.after(content)
    }

    /// The newest response under a client's cache key.
    pub(crate) fn latest_of(&self, tenant: &Arc<str>, cache_key: &str) -> Option<Arc<Stored>> {
        self.inner.memory.latest_of(tenant, cache_key)
    }

    /// The JSON of an item of a response in memory.
    pub(crate) fn item(&self, tenant: &Arc<str>, id: &str) -> Option<Arc<str>> {
        self.inner.memory.item(tenant, id)
    }

    /// A stored response of `tenant`, wherever it is; it is in memory afterwards.
    ///
    /// # Errors
    /// When the disk fails.
    pub(crate) async fn recall(&self, id: &str, tenant: &str) -> Result<Option<Arc<Stored>>, ApiError> {
        if let Some(stored) = self.get(id, tenant) {
            return Ok(Some(stored));
        }
        self.inner.read(Wanted::Id(id.to_owned()), tenant).await
    }

    /// Looks on disk for the response after which the first possible of `contents` had been said. True when it is in
    /// memory now; when the disk fails, it is a conversation that nobody knows.
    pub(crate) async fn recall_after(&self, contents: Vec<ContentHash>, tenant: &str) -> bool {
        self.inner.read(Wanted::After(contents), tenant).await.is_ok_and(|found| found.is_some())
    }

    /// Brings the response that has a stored item into memory, if there is one.
    ///
    /// # Errors
    /// When the disk fails.
    pub(crate) async fn recall_item(&self, tenant: &Arc<str>, id: &str) -> Result<(), ApiError> {
        if self.item(tenant, id).is_none() {
            self.inner.read(Wanted::Item(id.to_owned()), tenant).await?;
        }
        Ok(())
    }

    /// Forgets a response of `tenant`: it can neither be asked for nor continued.
    ///
    /// # Errors
    /// When the disk fails; the response is still there then.
    pub(crate) async fn delete(&self, id: &str, tenant: &str) -> Result<bool, ApiError> {
        let was_durable = self.inner.durable.delete(id, tenant).await.map_err(|failure| {
            ApiError::storage(format!("the response could not be deleted: {failure}; try again"))
        })?;
        Ok(self.inner.memory.delete(id, tenant) || was_durable)
    }

    /// Whether the response was deleted a short while ago.
    pub(crate) fn is_deleted(&self, id: &str) -> bool {
        self.inner.memory.is_deleted(id)
    }

    /// Keeps a response whose own part costs `n_tokens`; one with a response object is durable afterwards.
    ///
    /// # Errors
    /// When the disk fails; the response is not kept then.
    pub(crate) async fn put(&self, stored: Arc<Stored>, n_tokens: usize) -> Result<(), ApiError> {
        let inner = &*self.inner;
        let mut life = inner.limits.ttl;
        if stored.response.is_some() {
            inner.durable.put(Arc::clone(&stored)).await.map_err(|failure| not_kept(&failure))?;
            life = inner.durable.ttl().unwrap_or(life);
        } else if let Some(base) = &stored.base {
            inner.durable.touch(&base.id);
        }
        inner.memory.put(stored, n_tokens, life);
        Ok(())
    }

    /// Changes a conversation that is kept on disk, if any is. It survives a crash once this has returned.
    ///
    /// # Errors
    /// When the disk fails or has no room; nothing has changed then.
    pub(crate) async fn converse(&self, id: &str, change: Change) -> Result<(), ApiError> {
        let changed = self.inner.durable.converse(id, change).await;
        changed.map_err(|failure| match failure {
            Failure::GONE => ApiError::not_found("conversation_not_found", failure.to_string()),
            Failure::TOO_MANY | Failure::NO_ROOM => ApiError::overloaded(failure.to_string()),
            failure => ApiError::storage(format!("the conversation could not be kept: {failure}")),
        })
    }

    /// A conversation of `tenant` as it is on disk.
    ///
    /// # Errors
    /// When the disk fails.
    pub(crate) async fn conversation(&self, id: &str, tenant: &str) -> Result<Option<Kept>, ApiError> {
        if !self.is_durable() {
            return Ok(None);
        }
        let (inner, id, tenant) = (Arc::clone(&self.inner), id.to_owned(), tenant.to_owned());
        let reading = tokio::task::spawn_blocking(move || inner.durable.conversation(&id, &tenant));
        let read = reading.await.unwrap_or_else(|_| Err(Failure::interrupted()));
        read.map_err(|failure| ApiError::storage(format!("the conversation could not be read: {failure}")))
    }

    /// Whether responses outlive the process.
    pub(crate) fn is_durable(&self) -> bool {
        !matches!(self.inner.durable, Durable::Nothing)
    }

    /// How often [`sweep`](Self::sweep) is worth its while; None: never.
    pub(crate) fn sweep_interval(&self) -> Option<Duration> {
        const MOST: Duration = Duration::from_secs(30);
        self.inner.durable.ttl().map(|ttl| (ttl / 4).clamp(Duration::from_millis(100), MOST))
    }

    /// Removes what has expired from the disk.
    pub(crate) fn sweep(&self) {
        self.inner.durable.sweep();
    }

    /// Waits until everything is on disk and closes it; whatever is put later fails.
    pub(crate) async fn close(&self) {
        self.inner.durable.close().await;
    }
}

impl Inner {
    /// Reads a response from disk into memory.
    async fn read(self: &Arc<Self>, wanted: Wanted, tenant: &str) -> Result<Option<Arc<Stored>>, ApiError> {
        if matches!(self.durable, Durable::Nothing) {
            return Ok(None);
        }
        let (inner, tenant) = (Arc::clone(self), tenant.to_owned());
        let reading = tokio::task::spawn_blocking(move || inner.read_now(&wanted, &tenant));
        let read = reading.await.unwrap_or_else(|_| Err(Failure::interrupted()));
        read.map_err(|failure| {
            ApiError::storage(format!("the store of responses could not be read: {failure}"))
        })
    }

    fn read_now(&self, wanted: &Wanted, tenant: &str) -> Result<Option<Arc<Stored>>, Failure> {
        let known = |id: &str| self.memory.get(id, tenant);
        let Some(found) = self.durable.find(wanted, tenant, &known)? else { return Ok(None) };
        let stored = match found.chain.restore(self.hash_key) {
            Ok(stored) => Arc::new(stored),
            Err(error) => {
                tracing::warn!(response = found.id, %error, "a response on disk cannot be used");
                return Ok(None);
            }
        };
        metrics::counter!(names::RECALLS).increment(1);
        let text = stored.response.as_ref().map_or(0, |text| text.len() / 4);
        let n_tokens = stored.log.len() + text;
        let lives = self.memory.put_again(Arc::clone(&stored), n_tokens, found.life);
        Ok(lives.then_some(stored))
    }
}

fn not_kept(failure: &Failure) -> ApiError {
    ApiError::storage(format!(
        "the response could not be stored: {failure}; with `store: false` it need not be"
    ))
}

#[cfg(test)]
mod tests;

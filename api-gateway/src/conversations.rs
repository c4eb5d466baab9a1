//! Conversations that clients name: lists of items that responses read before they begin and add to when they end.
//!
//! A turn of a conversation is an ordinary turn whose input begins with all of its items. It costs no more than a
//! continuation: the response that the items have led to is its parent. Where responses outlive the process,
//! conversations do: what is in memory is what was used last.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use tokio::sync::Mutex as AsyncMutex;
use tokio_util::task::TaskTracker;

use crate::emit::{new_id, unix_now};
use crate::error::ApiError;
use crate::history;
use crate::recent::Recent;
use crate::store::{Store, Stored};

/// A conversation that was asked for within so many seconds is not let go.
const IN_USE_S: u64 = 60;
/// Deleted conversations that are remembered.
const MAX_DELETED: usize = 256;

/// An item of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListedItem {
    pub(crate) id: String,
    pub(crate) json: Arc<str>,
}

impl From<history::Entry> for ListedItem {
    fn from(entry: history::Entry) -> Self {
        Self { id: entry.id, json: entry.json }
    }
}

/// What is told of a conversation besides its items.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Head {
    /// Seconds since 1970.
    pub(crate) created_at: u64,
    pub(crate) metadata: BTreeMap<String, String>,
}

/// A conversation as it is kept.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) head: Head,
    pub(crate) items: Vec<ListedItem>,
}

/// A change of a conversation.
#[derive(Debug)]
pub(crate) enum Change {
    /// It begins, unless `most` exist.
    Create {
        tenant: Arc<str>,
        head: Head,
        items: Vec<ListedItem>,
        most: usize,
    },
    Append(Vec<ListedItem>),
    /// The item with this id goes.
    Remove(String),
    Metadata(BTreeMap<String, String>),
    Delete,
}

/// One conversation.
#[derive(Debug)]
pub(crate) struct Conversation {
    pub(crate) id: String,
    pub(crate) tenant: Arc<str>,
    created_at: u64,
    state: Mutex<State>,
    /// When it was last asked for, in seconds since 1970.
    used_at: AtomicU64,
    /// Changes come one after the other, on disk and in memory.
    changing: AsyncMutex<()>,
}

#[derive(Debug, Default)]
struct State {
    items: Vec<ListedItem>,
    n_bytes: usize,
    metadata: BTreeMap<String, String>,
    /// The response that the first so many items have led to.
    latest: Option<(Weak<Stored>, usize)>,
    /// Raised by every change of the items.
    version: u64,
    is_deleted: bool,
}

/// What a turn of a conversation continues.
#[derive(Debug)]
pub(crate) struct Continued {
    /// The response that holds all items but the `newer` ones.
    pub(crate) latest: Option<Arc<Stored>>,
    pub(crate) newer: Vec<ListedItem>,
    /// The place of the first of them.
    pub(crate) from: usize,
    pub(crate) version: u64,
}

impl Conversation {
    fn new(id: String, tenant: Arc<str>, kept: Kept) -> Self {
        let Kept { head, items } = kept;
        let n_bytes = n_bytes(&items);
        let state = State { items, n_bytes, metadata: head.metadata, ..State::default() };
        Self {
            id,
            tenant,
            created_at: head.created_at,
            state: Mutex::new(state),
            used_at: AtomicU64::new(unix_now()),
            changing: AsyncMutex::default(),
        }
    }

    pub(crate) fn items(&self) -> Vec<ListedItem> {
        self.state().items.clone()
    }

    pub(crate) fn head(&self) -> Head {
        Head { created_at: self.created_at, metadata: self.state().metadata.clone() }
    }

    /// What the next turn continues. O(items since the last turn).
    pub(crate) fn continued(&self) -> Continued {
        let state = self.state();
        // What the store has let go is read again, item by item.
        let latest = state.latest.as_ref().and_then(|(latest, n_items)| Some((latest.upgrade()?, *n_items)));
        let (latest, from) = latest.map_or((None, 0), |(latest, n_items)| (Some(latest), n_items));
        Continued { latest, newer: state.items[from..].to_vec(), from, version: state.version }
    }

    fn n_bytes(&self) -> usize {
        self.state().n_bytes
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unknown(id: &str) -> ApiError {
    let id: String = id.chars().take(80).collect();
    ApiError::not_found("conversation_not_found", format!("there is no conversation with the id `{id}`"))
}

fn n_bytes(items: &[ListedItem]) -> usize {
    items.iter().map(|item| item.json.len()).sum()
}

/// All conversations of one gateway. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Conversations {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    by_id: DashMap<String, Arc<Conversation>>,
    store: Store,
    limits: Limits,
    /// Bytes of the items in memory.
    n_bytes: AtomicUsize,
    /// The ids of those deleted last: what was read before must not come back after.
    deleted: Mutex<Recent<MAX_DELETED>>,
    tasks: TaskTracker,
}

impl Inner {
    fn deleted(&self) -> std::sync::MutexGuard<'_, Recent<MAX_DELETED>> {
        self.deleted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Limits of conversations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// How many there may be. Of those on disk, as many are kept in memory.
    pub(crate) n: usize,
    /// Bytes of one conversation's items.
    pub(crate) bytes_each: usize,
    /// Bytes of the items in memory. With a disk, what was not used lately is let go beyond that.
    pub(crate) bytes: usize,
}

impl Conversations {
    /// Kept where `store` keeps responses.
    pub(crate) fn new(store: Store, limits: Limits) -> Self {
        let inner = Inner {
            by_id: DashMap::new(),
            store,
            limits,
            n_bytes: AtomicUsize::new(0),
            deleted: Mutex::default(),
            tasks: TaskTracker::new(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// A new one with these items.
    ///
    /// # Errors
    /// When too many exist, the items are too large, or the disk fails.
    pub(crate) async fn create(
        &self,
        tenant: &Arc<str>,
        items: Vec<ListedItem>,
        metadata: BTreeMap<String, String>,
    ) -> Result<Arc<Conversation>, ApiError> {
        let inner = &*self.inner;
        self.check_room(0, &items)?;
        if !self.has_room() {
            return Err(ApiError::overloaded("too many conversations are kept: delete some"));
        }
        let (id, head) = (new_id("conv"), Head { created_at: unix_now(), metadata });
        let change = Change::Create {
            tenant: Arc::clone(tenant),
            head: head.clone(),
            items: items.clone(),
            most: inner.limits.n,
        };
        inner.store.converse(&id, change).await?;
        let conversation = Arc::new(Conversation::new(id, Arc::clone(tenant), Kept { head, items }));
        inner.n_bytes.fetch_add(conversation.n_bytes(), Ordering::Relaxed);
        inner.by_id.insert(conversation.id.clone(), Arc::clone(&conversation));
        Ok(conversation)
    }

    /// A conversation of `tenant`, if it is in memory: [`recall`](Self::recall) brings it there.
    ///
    /// # Errors
    /// When there is none with this id.
    pub(crate) fn get(&self, id: &str, tenant: &str) -> Result<Arc<Conversation>, ApiError> {
        let found = self.inner.by_id.get(id).map(|conversation| Arc::clone(&conversation));
        if let Some(found) = &found {
            found.used_at.store(unix_now(), Ordering::Relaxed);
        }
        found.filter(|conversation| *conversation.tenant == *tenant).ok_or_else(|| unknown(id))
    }

    /// A conversation of `tenant`, wherever it is; it is in memory afterwards.
    ///
    /// # Errors
    /// When there is none with this id, or the disk fails.
    pub(crate) async fn recall(&self, id: &str, tenant: &Arc<str>) -> Result<Arc<Conversation>, ApiError> {
        if !self.inner.by_id.contains_key(id)
            && let Some(kept) = self.inner.store.conversation(id, tenant).await?
        {
            self.has_room();
            let conversation = Arc::new(Conversation::new(id.to_owned(), Arc::clone(tenant), kept));
            // Another request may have brought it meanwhile: there is only one of it.
            let deleted = self.inner.deleted();
            if !deleted.has(id)
                && let Entry::Vacant(place) = self.inner.by_id.entry(id.to_owned())
            {
                self.inner.n_bytes.fetch_add(conversation.n_bytes(), Ordering::Relaxed);
                place.insert(conversation);
            }
        }
        self.get(id, tenant)
    }

    /// Adds items at the end.
    ///
    /// # Errors
    /// When the conversation would become too large or was deleted, or the disk fails.
    pub(crate) async fn append(
        &self,
        conversation: &Arc<Conversation>,
        items: Vec<ListedItem>,
    ) -> Result<(), ApiError> {
        let (all, conversation) = (self.clone(), Arc::clone(conversation));
        self.whole(async move {
            let _changing = conversation.changing.lock().await;
            all.append_now(&conversation, items).await
        })
        .await
    }

    /// Adds what a turn brought and made, which has begun at `version`.
    ///
    /// # Errors
    /// When the conversation would become too large or was deleted, or the disk fails.
    pub(crate) async fn answered(
        &self,
        conversation: &Arc<Conversation>,
        items: Vec<ListedItem>,
        stored: &Arc<Stored>,
        version: u64,
    ) -> Result<(), ApiError> {
        let (all, conversation, stored) = (self.clone(), Arc::clone(conversation), Arc::downgrade(stored));
        self.whole(async move {
            let _changing = conversation.changing.lock().await;
            // Another turn may have run beside this one, or an item was removed: then no response holds all of it.
            let holds_all = conversation.state().version == version;
            all.append_now(&conversation, items).await?;
            let mut state = conversation.state();
            state.latest = holds_all.then(|| (stored, state.items.len()));
            Ok(())
        })
        .await
    }

    /// Removes an item; false when there is none with this id.
    ///
    /// # Errors
    /// When the disk fails.
    pub(crate) async fn remove(&self, conversation: &Arc<Conversation>, id: &str) -> Result<bool, ApiError> {
        let (all, conversation, id) = (self.clone(), Arc::clone(conversation), id.to_owned());
        self.whole(async move {
            let _changing = conversation.changing.lock().await;
            let place = |state: &State| state.items.iter().position(|item| item.id == id);
            if place(&conversation.state()).is_none() {
                return Ok(false);
            }
            all.inner.store.converse(&conversation.id, Change::Remove(id.clone())).await?;
            let mut state = conversation.state();
            let Some(idx) = place(&state) else { return Ok(false) };
            let n_bytes = state.items.remove(idx).json.len();
            state.n_bytes -= n_bytes;
            all.inner.n_bytes.fetch_sub(n_bytes, Ordering::Relaxed);
            state.latest = None;
            state.version += 1;
            Ok(true)
        })
        .await
    }

    /// Replaces the metadata.
    ///
    /// # Errors
    /// When the disk fails.
    pub(crate) async fn set_metadata(
        &self,
        conversation: &Arc<Conversation>,
        metadata: BTreeMap<String, String>,
    ) -> Result<(), ApiError> {
        let (all, conversation) = (self.clone(), Arc::clone(conversation));
        self.whole(async move {
            let _changing = conversation.changing.lock().await;
            all.inner.store.converse(&conversation.id, Change::Metadata(metadata.clone())).await?;
            conversation.state().metadata = metadata;
            Ok(())
        })
        .await
    }

    /// Forgets a conversation.
    ///
    /// # Errors
    /// When the disk fails; it is still there then.
    pub(crate) async fn delete(&self, conversation: &Arc<Conversation>) -> Result<(), ApiError> {
        let (all, conversation) = (self.clone(), Arc::clone(conversation));
        self.whole(async move {
            let _changing = conversation.changing.lock().await;
            all.inner.store.converse(&conversation.id, Change::Delete).await?;
            conversation.state().is_deleted = true;
            all.inner.deleted().add(&conversation.id);
            if all.inner.by_id.remove(&conversation.id).is_some() {
                all.inner.n_bytes.fetch_sub(conversation.n_bytes(), Ordering::Relaxed);
            }
            Ok(())
        })
        .await
    }

    /// Runs a change to its end, whether its client waits for it or not: disk and memory change together.
    async fn whole<T: Send + 'static>(
        &self,
        change: impl Future<Output = Result<T, ApiError>> + Send + 'static,
    ) -> Result<T, ApiError> {
        let changed = self.inner.tasks.spawn(change).await;
        changed.unwrap_or_else(|_| Err(ApiError::internal("the conversation's change was interrupted")))
    }

    async fn append_now(&self, conversation: &Conversation, items: Vec<ListedItem>) -> Result<(), ApiError> {
        let (n_there, is_deleted) = {
            let state = conversation.state();
            (state.n_bytes, state.is_deleted)
        };
        if is_deleted {
            return Err(unknown(&conversation.id));
        }
        self.check_room(n_there, &items)?;
        let (n_bytes, inner) = (n_bytes(&items), &*self.inner);
        let n_all = inner.n_bytes.load(Ordering::Relaxed);
        if !inner.store.is_durable() && n_all + n_bytes > inner.limits.bytes {
            return Err(ApiError::overloaded("conversations take as much memory as they may: delete some"));
        }
        inner.store.converse(&conversation.id, Change::Append(items.clone())).await?;
        inner.n_bytes.fetch_add(n_bytes, Ordering::Relaxed);
        let mut state = conversation.state();
        state.n_bytes += n_bytes;
        state.items.extend(items);
        state.version += 1;
        Ok(())
    }

    fn check_room(&self, n_there: usize, items: &[ListedItem]) -> Result<(), ApiError> {
        let max_bytes = self.inner.limits.bytes_each;
        if n_there + n_bytes(items) <= max_bytes {
            return Ok(());
        }
        let message = format!("the conversation would hold more than {max_bytes} bytes: start another one");
        Err(ApiError::invalid("conversation_too_large", message))
    }

    /// Whether another one may be in memory. What is on disk and not in use is let go for it.
    fn has_room(&self) -> bool {
        let Inner { by_id, store, limits, n_bytes, .. } = &*self.inner;
        let is_full = || by_id.len() >= limits.n || n_bytes.load(Ordering::Relaxed) >= limits.bytes;
        if is_full() && store.is_durable() {
            let now = unix_now();
            let used = |conversation: &Conversation| conversation.used_at.load(Ordering::Relaxed);
            by_id.retain(|_, kept| {
                let stays = Arc::strong_count(kept) > 1 || used(kept) + IN_USE_S > now;
                if !stays {
                    n_bytes.fetch_sub(kept.n_bytes(), Ordering::Relaxed);
                }
                stays
            });
        }
        !is_full()
    }
}

#[cfg(test)]
mod tests;

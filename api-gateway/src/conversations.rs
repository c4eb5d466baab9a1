//! Conversations that clients name: lists of items that responses read before they begin and add to when they end.
//!
//! A turn of a conversation is an ordinary turn whose input begins with all of its items. It costs no more than a
//! continuation: the response that the items have led to is its parent.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use dashmap::DashMap;

use crate::emit::{new_id, unix_now};
use crate::error::ApiError;
use crate::history::Entry;
use crate::store::Stored;

/// An item of a conversation.
#[derive(Debug, Clone)]
pub(crate) struct ListedItem {
    pub(crate) id: String,
    pub(crate) json: Arc<str>,
}

impl From<Entry> for ListedItem {
    fn from(entry: Entry) -> Self {
        Self { id: entry.id, json: entry.json }
    }
}

/// One conversation.
#[derive(Debug)]
pub(crate) struct Conversation {
    pub(crate) id: String,
    pub(crate) tenant: Arc<str>,
    pub(crate) created_at: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    items: Vec<ListedItem>,
    n_bytes: usize,
    metadata: BTreeMap<String, String>,
    /// The response that the first so many items have led to.
    latest: Option<(Weak<Stored>, usize)>,
}

/// What a turn of a conversation continues.
#[derive(Debug)]
pub(crate) struct Continued {
    /// The response that holds all items but the `newer` ones.
    pub(crate) latest: Option<Arc<Stored>>,
    pub(crate) newer: Vec<ListedItem>,
    /// How many items there are.
    pub(crate) n_items: usize,
}

impl Conversation {
    pub(crate) fn items(&self) -> Vec<ListedItem> {
        self.state().items.clone()
    }

    /// What the next turn continues. O(items since the last turn).
    pub(crate) fn continued(&self) -> Continued {
        let state = self.state();
        // What the store has let go is read again, item by item.
        let latest = state.latest.as_ref().and_then(|(latest, n_items)| Some((latest.upgrade()?, *n_items)));
        let (latest, from) = latest.map_or((None, 0), |(latest, n_items)| (Some(latest), n_items));
        Continued { latest, newer: state.items[from..].to_vec(), n_items: state.items.len() }
    }

    /// Adds what a turn brought and made, which has begun after `n_before` items.
    ///
    /// # Errors
    /// When the conversation would become larger than `max_bytes`.
    pub(crate) fn answered(
        &self,
        items: Vec<ListedItem>,
        stored: &Arc<Stored>,
        n_before: usize,
        max_bytes: usize,
    ) -> Result<(), ApiError> {
        let mut state = self.state();
        // Another turn may have run beside this one, or an item was removed: then no response holds all of it.
        let holds_all = state.items.len() == n_before;
        state.append(items, max_bytes)?;
        state.latest = holds_all.then(|| (Arc::downgrade(stored), state.items.len()));
        Ok(())
    }

    /// Adds items at the end.
    ///
    /// # Errors
    /// When the conversation would become larger than `max_bytes`.
    pub(crate) fn append(&self, items: Vec<ListedItem>, max_bytes: usize) -> Result<(), ApiError> {
        self.state().append(items, max_bytes)
    }

    /// Removes an item; false when there is none with this id.
    pub(crate) fn remove(&self, id: &str) -> bool {
        let mut state = self.state();
        let Some(idx) = state.items.iter().position(|item| item.id == id) else { return false };
        let item = state.items.remove(idx);
        state.n_bytes -= item.json.len();
        state.latest = None;
        true
    }

    pub(crate) fn metadata(&self) -> BTreeMap<String, String> {
        self.state().metadata.clone()
    }

    pub(crate) fn set_metadata(&self, metadata: BTreeMap<String, String>) {
        self.state().metadata = metadata;
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn append(&mut self, items: Vec<ListedItem>, max_bytes: usize) -> Result<(), ApiError> {
        let n_bytes: usize = items.iter().map(|item| item.json.len()).sum();
        if self.n_bytes + n_bytes > max_bytes {
            let message =
                format!("the conversation would hold more than {max_bytes} bytes: start another one");
            return Err(ApiError::invalid("conversation_too_large", message));
        }
        self.n_bytes += n_bytes;
        self.items.extend(items);
        Ok(())
    }
}

/// All conversations of one gateway. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Conversations {
    by_id: Arc<DashMap<String, Arc<Conversation>>>,
    limit: usize,
}

impl Conversations {
    /// Keeps at most `limit` of them.
    pub(crate) fn new(limit: usize) -> Self {
        Self { by_id: Arc::default(), limit }
    }

    /// A new, empty one.
    ///
    /// # Errors
    /// When too many exist.
    pub(crate) fn create(&self, tenant: &Arc<str>) -> Result<Arc<Conversation>, ApiError> {
        if self.by_id.len() >= self.limit {
            return Err(ApiError::overloaded("too many conversations are kept: delete some"));
        }
        let conversation = Arc::new(Conversation {
            id: new_id("conv"),
            tenant: Arc::clone(tenant),
            created_at: unix_now(),
            state: Mutex::default(),
        });
        self.by_id.insert(conversation.id.clone(), Arc::clone(&conversation));
        Ok(conversation)
    }

    /// A conversation of `tenant`.
    ///
    /// # Errors
    /// When there is none with this id.
    pub(crate) fn get(&self, id: &str, tenant: &str) -> Result<Arc<Conversation>, ApiError> {
        let found = self.by_id.get(id).map(|conversation| Arc::clone(&conversation));
        found.filter(|conversation| *conversation.tenant == *tenant).ok_or_else(|| {
            let id: String = id.chars().take(80).collect();
            ApiError::not_found(
                "conversation_not_found",
                format!("there is no conversation with the id `{id}`"),
            )
        })
    }

    pub(crate) fn delete(&self, id: &str) {
        self.by_id.remove(id);
    }
}

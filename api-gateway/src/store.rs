//! Responses that can be continued, by id and by what was said: bounded in number, in size and in age, the oldest go
//! first.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dashmap::DashMap;

use crate::conversation::TokenLog;
use crate::history::{ContentHash, Entry, History};
use crate::wire::Tools;

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
    /// The final response object; None when the client asked not to store it.
    pub(crate) response: Option<Arc<str>>,
}

/// Limits of the store.
#[derive(Debug, Clone, Copy)]
pub struct StoreLimits {
    /// Responses kept.
    pub max_responses: usize,
    /// Tokens kept, counting each response's own part once.
    pub max_tokens: usize,
    /// How long a response can be continued.
    pub ttl: Duration,
}

#[derive(Debug, Default)]
struct Order {
    /// Oldest first: the response, when stored, tokens of its own.
    queue: VecDeque<(Arc<Stored>, Instant, usize)>,
    n_tokens: usize,
}

/// The store of one gateway. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    by_id: DashMap<String, (Arc<Stored>, Instant)>,
    by_content: DashMap<ContentHash, Arc<Stored>>,
    by_cache_key: DashMap<(Arc<str>, String), Arc<Stored>>,
    /// Items that can be referred to: by (tenant, id) as they were sent.
    items: DashMap<(Arc<str>, String), Arc<str>>,
    order: Mutex<Order>,
    limits: StoreLimits,
}

impl Store {
    pub(crate) fn new(limits: StoreLimits) -> Self {
        let inner = Inner {
            by_id: DashMap::new(),
            by_content: DashMap::new(),
            by_cache_key: DashMap::new(),
            items: DashMap::new(),
            order: Mutex::default(),
            limits,
        };
        Self { inner: Arc::new(inner) }
    }

    /// A stored response of `tenant`.
    pub(crate) fn get(&self, id: &str, tenant: &str) -> Option<Arc<Stored>> {
        let entry = self.inner.by_id.get(id)?;
        let (stored, since) = &*entry;
        let fresh = since.elapsed() <= self.inner.limits.ttl;
        (fresh && *stored.tenant == *tenant).then(|| Arc::clone(stored))
    }

    /// The newest response after which exactly this had been said, stored by the client's wish or not.
    pub(crate) fn after(&self, content: &ContentHash) -> Option<Arc<Stored>> {
        self.inner.by_content.get(content).map(|stored| Arc::clone(&stored))
    }

    /// The newest response under a client's cache key.
    pub(crate) fn latest_of(&self, tenant: &Arc<str>, cache_key: &str) -> Option<Arc<Stored>> {
        let key = (Arc::clone(tenant), cache_key.to_owned());
        self.inner.by_cache_key.get(&key).map(|stored| Arc::clone(&stored))
    }

    /// The JSON of a stored item.
    pub(crate) fn item(&self, tenant: &Arc<str>, id: &str) -> Option<Arc<str>> {
        self.inner.items.get(&(Arc::clone(tenant), id.to_owned())).map(|json| Arc::clone(&json))
    }

    /// Forgets a response: it can neither be asked for nor continued by id.
    pub(crate) fn delete(&self, id: &str, tenant: &str) -> bool {
        let removed = self.inner.by_id.remove_if(id, |_, (stored, _)| *stored.tenant == *tenant);
        removed.is_some_and(|(_, (stored, _))| {
            self.inner.forget_content(&stored);
            true
        })
    }

    /// Keeps a response whose own part of the log is `n_tokens` long. Only those with a response object can be found by
    /// their id.
    pub(crate) fn put(&self, stored: Arc<Stored>, n_tokens: usize) {
        let now = Instant::now();
        let inner = &*self.inner;
        let mut order = inner.order.lock().unwrap_or_else(PoisonError::into_inner);
        order.queue.push_back((Arc::clone(&stored), now, n_tokens));
        order.n_tokens += n_tokens;
        inner.by_content.insert(stored.history.content(), Arc::clone(&stored));
        if let Some(key) = &stored.cache_key {
            inner.by_cache_key.insert((Arc::clone(&stored.tenant), key.clone()), Arc::clone(&stored));
        }
        if stored.response.is_some() {
            for entry in stored.own_entries() {
                inner.items.insert((Arc::clone(&stored.tenant), entry.id.clone()), Arc::clone(&entry.json));
            }
            inner.by_id.insert(stored.id.clone(), (stored, now));
        }
        while let Some((_, since, n_tokens)) = order.queue.front() {
            let keep = order.queue.len() <= inner.limits.max_responses
                && order.n_tokens <= inner.limits.max_tokens
                && now.duration_since(*since) <= inner.limits.ttl;
            if keep {
                break;
            }
            order.n_tokens -= *n_tokens;
            if let Some((stored, ..)) = order.queue.pop_front() {
                inner.forget(&stored);
            }
        }
    }
}

impl Inner {
    fn forget(&self, stored: &Arc<Stored>) {
        self.by_id.remove(&stored.id);
        self.forget_content(stored);
        if stored.response.is_some() {
            for entry in stored.own_entries() {
                self.items.remove(&(Arc::clone(&stored.tenant), entry.id.clone()));
            }
        }
    }

    fn forget_content(&self, stored: &Arc<Stored>) {
        self.by_content.remove_if(&stored.history.content(), |_, other| Arc::ptr_eq(other, stored));
        if let Some(key) = &stored.cache_key {
            let key = (Arc::clone(&stored.tenant), key.clone());
            self.by_cache_key.remove_if(&key, |_, other| Arc::ptr_eq(other, stored));
        }
    }
}

impl Stored {
    /// The items that this turn added: its input and its output.
    pub(crate) fn own_entries(&self) -> Vec<&Entry> {
        self.history.newest(self.n_own_items)
    }
}

#[cfg(test)]
mod tests;

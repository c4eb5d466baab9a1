//! Responses in memory: found by id, by what was said and by the client's cache key; bounded in number, in size and in
//! age, the oldest go first.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dashmap::DashMap;

use super::{StoreLimits, Stored};
use crate::history::ContentHash;
use crate::recent::Recent;

/// Deletions that are remembered, so that what was just being read from disk does not come back.
const MAX_DELETED: usize = 4096;

/// A response and the moment from which it is not found any more.
#[derive(Debug, Clone)]
struct Kept {
    stored: Arc<Stored>,
    expires: Instant,
}

#[derive(Debug, Default)]
struct Order {
    /// Oldest first, with the tokens of its own.
    queue: VecDeque<(Kept, usize)>,
    n_tokens: usize,
    deleted: Recent<MAX_DELETED>,
}

/// The responses of one gateway that are in memory.
#[derive(Debug)]
pub(super) struct Memory {
    by_id: DashMap<String, Kept>,
    by_content: DashMap<ContentHash, Arc<Stored>>,
    by_cache_key: DashMap<(Arc<str>, String), Arc<Stored>>,
    /// Items that can be referred to: by (tenant, id) as they were sent.
    items: DashMap<(Arc<str>, String), Arc<str>>,
    order: Mutex<Order>,
    limits: StoreLimits,
}

impl Memory {
    pub(super) fn new(limits: StoreLimits) -> Self {
        Self {
            by_id: DashMap::new(),
            by_content: DashMap::new(),
            by_cache_key: DashMap::new(),
            items: DashMap::new(),
            order: Mutex::default(),
            limits,
        }
    }

    pub(super) fn get(&self, id: &str, tenant: &str) -> Option<Arc<Stored>> {
        let entry = self.by_id.get(id)?;
        let fresh = Instant::now() < entry.expires;
        (fresh && *entry.stored.tenant == *tenant).then(|| Arc::clone(&entry.stored))
    }

    pub(super) fn after(&self, content: &ContentHash) -> Option<Arc<Stored>> {
        self.by_content.get(content).map(|stored| Arc::clone(&stored))
    }

    pub(super) fn latest_of(&self, tenant: &Arc<str>, cache_key: &str) -> Option<Arc<Stored>> {
        let key = (Arc::clone(tenant), cache_key.to_owned());
        self.by_cache_key.get(&key).map(|stored| Arc::clone(&stored))
    }

    pub(super) fn item(&self, tenant: &Arc<str>, id: &str) -> Option<Arc<str>> {
        self.items.get(&(Arc::clone(tenant), id.to_owned())).map(|json| Arc::clone(&json))
    }

    /// Forgets a response of `tenant`, if there is one.
    pub(super) fn delete(&self, id: &str, tenant: &str) -> bool {
        let mut order = self.order();
        order.deleted.add(id);
        drop(order);
        let removed = self.by_id.remove_if(id, |_, kept| *kept.stored.tenant == *tenant);
        removed.is_some_and(|(_, kept)| {
            self.forget(&kept.stored);
            true
        })
    }

    /// Whether the response was deleted a short while ago.
    pub(super) fn is_deleted(&self, id: &str) -> bool {
        self.order().deleted.has(id)
    }

    /// Keeps a response for `life`; `n_tokens` is what it costs. Only those with a response object can be found by
    /// their id.
    pub(super) fn put(&self, stored: Arc<Stored>, n_tokens: usize, life: Duration) {
        let mut order = self.order();
        self.insert(&mut order, stored, n_tokens, life);
    }

    /// Keeps a response that was read from disk, unless it has been deleted since.
    pub(super) fn put_again(&self, stored: Arc<Stored>, n_tokens: usize, life: Duration) -> bool {
        let mut order = self.order();
        let lives = !order.deleted.has(&stored.id);
        if lives {
            self.insert(&mut order, stored, n_tokens, life);
        }
        lives
    }

    fn order(&self) -> std::sync::MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert(&self, order: &mut Order, stored: Arc<Stored>, n_tokens: usize, life: Duration) {
        let now = Instant::now();
        let kept = Kept { stored: Arc::clone(&stored), expires: now + life };
        order.queue.push_back((kept.clone(), n_tokens));
        order.n_tokens += n_tokens;
        self.by_content.insert(stored.history.content(), Arc::clone(&stored));
        if let Some(key) = &stored.cache_key {
            self.by_cache_key.insert((Arc::clone(&stored.tenant), key.clone()), Arc::clone(&stored));
        }
        if stored.response.is_some() {
            for entry in stored.own_entries() {
                self.items.insert((Arc::clone(&stored.tenant), entry.id.clone()), Arc::clone(&entry.json));
            }
            self.by_id.insert(stored.id.clone(), kept);
        }
        while let Some((oldest, n_tokens)) = order.queue.front() {
            let keep = order.queue.len() <= self.limits.max_responses
                && order.n_tokens <= self.limits.max_tokens
                && now < oldest.expires;
            if keep {
                break;
            }
            order.n_tokens -= *n_tokens;
            if let Some((oldest, _)) = order.queue.pop_front() {
                self.forget(&oldest.stored);
            }
        }
    }

    fn forget(&self, stored: &Arc<Stored>) {
        self.by_id.remove_if(&stored.id, |_, kept| Arc::ptr_eq(&kept.stored, stored));
        self.by_content.remove_if(&stored.history.content(), |_, other| Arc::ptr_eq(other, stored));
        if let Some(key) = &stored.cache_key {
            let key = (Arc::clone(&stored.tenant), key.clone());
            self.by_cache_key.remove_if(&key, |_, other| Arc::ptr_eq(other, stored));
        }
        if stored.response.is_some() {
            for entry in stored.own_entries() {
                let key = (Arc::clone(&stored.tenant), entry.id.clone());
                self.items.remove_if(&key, |_, json| Arc::ptr_eq(json, &entry.json));
            }
        }
    }
}

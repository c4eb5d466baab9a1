//! Responses that can be continued, by id: bounded in number and in age, the oldest go first.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dashmap::DashMap;

use crate::conversation::TokenLog;

/// Everything a later turn needs of an earlier one.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) id: String,
    /// Names the conversation in logs, plans and metrics; the id of its first response.
    pub(crate) conversation: String,
    pub(crate) log: TokenLog,
    pub(crate) instructions: Option<Arc<str>>,
    /// Raw JSON text of the tools, to be echoed and compared.
    pub(crate) tools: Arc<str>,
    /// The decode worker that has its KV.
    pub(crate) decode_worker: String,
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
    /// Oldest first: id, when stored, tokens of its own.
    queue: VecDeque<(String, Instant, usize)>,
    n_tokens: usize,
}

/// The store of one gateway. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    by_id: Arc<DashMap<String, (Arc<Stored>, Instant)>>,
    order: Arc<Mutex<Order>>,
    limits: StoreLimits,
}

impl Store {
    pub(crate) fn new(limits: StoreLimits) -> Self {
        Self { by_id: Arc::default(), order: Arc::default(), limits }
    }

    pub(crate) fn get(&self, id: &str) -> Option<Arc<Stored>> {
        let entry = self.by_id.get(id)?;
        let (stored, since) = &*entry;
        (since.elapsed() <= self.limits.ttl).then(|| Arc::clone(stored))
    }

    /// Keeps a response whose own part of the log is `n_tokens` long.
    pub(crate) fn put(&self, stored: Arc<Stored>, n_tokens: usize) {
        let now = Instant::now();
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        order.queue.push_back((stored.id.clone(), now, n_tokens));
        order.n_tokens += n_tokens;
        self.by_id.insert(stored.id.clone(), (stored, now));
        while let Some((id, since, n_tokens)) = order.queue.front() {
            let keep = order.queue.len() <= self.limits.max_responses
                && order.n_tokens <= self.limits.max_tokens
                && now.duration_since(*since) <= self.limits.ttl;
            if keep {
                break;
            }
            self.by_id.remove(id);
            let n_tokens = *n_tokens;
            order.n_tokens -= n_tokens;
            order.queue.pop_front();
        }
    }
}

#[cfg(test)]
mod tests;

//! Ids of what has just ended, so many of them.

use std::collections::VecDeque;

/// The last `N` ids that were added.
#[derive(Debug, Default)]
pub(crate) struct Recent<const N: usize>(VecDeque<String>);

impl<const N: usize> Recent<N> {
    /// Remembers an id in the place of the oldest one.
    pub(crate) fn add(&mut self, id: &str) {
        if self.0.len() == N {
            self.0.pop_front();
        }
        self.0.push_back(id.to_owned());
    }

    /// O(N).
    pub(crate) fn has(&self, id: &str) -> bool {
        self.0.iter().any(|known| known == id)
    }
}

//! Who holds which prefix: one node per block hash, linked to its parent, with its holders.
//!
//! ```text
//! root ◀── h0 {w0,w1} ◀── h1 {w0,w1} ◀── h2 {w0}        a worker that holds a block holds all before it, so the
//!                              ◀── h3 {w1}              deepest node that names a worker is the length of its prefix
//! ```
//! Built from the workers' events alone. Storing and removing are O(1); a match walks from the prompt's deepest known
//! block towards the root until every worker is found: O(blocks of the prompt) at most. About 100 bytes per block.

use std::collections::HashMap;

use kv::hash::BlockHash;

/// A worker's place in the router's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct WorkerIdx(pub(crate) u64);

#[derive(Debug)]
struct Node {
    parent: BlockHash,
    n_blocks: u32,
    holders: Vec<WorkerIdx>,
}

/// The blocks of all workers.
#[derive(Debug, Default)]
pub(crate) struct Index {
    nodes: HashMap<BlockHash, Node>,
}

/// A part of a chain of block hashes: what follows `parent`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chain<'a> {
    pub(crate) parent: BlockHash,
    pub(crate) hashes: &'a [BlockHash],
}

/// The parent of a chain is held nowhere: its earlier blocks must be asked about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChainUnknown;

impl Index {
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// `worker` holds `hash`. Its parent has been stored before, by the contract of the events.
    pub(crate) fn store(&mut self, worker: WorkerIdx, hash: BlockHash, parent: BlockHash) {
        let n_blocks = self.nodes.get(&parent).map_or(0, |node| node.n_blocks) + 1;
        let node = self.nodes.entry(hash).or_insert_with(|| Node { parent, n_blocks, holders: Vec::new() });
        if !node.holders.contains(&worker) {
            node.holders.push(worker);
        }
    }

    /// `worker` holds `hash` no more.
    pub(crate) fn remove(&mut self, worker: WorkerIdx, hash: &BlockHash) {
        if let Some(node) = self.nodes.get_mut(hash) {
            node.holders.retain(|holder| *holder != worker);
            if node.holders.is_empty() {
                self.nodes.remove(hash);
            }
        }
    }

    /// `worker` is gone. O(blocks of all workers).
    pub(crate) fn forget(&mut self, worker: WorkerIdx) {
        self.nodes.retain(|_, node| {
            node.holders.retain(|holder| *holder != worker);
            !node.holders.is_empty()
        });
    }

    /// How many blocks of the chain's prefix each of `workers` holds, in their order.
    ///
    /// # Errors
    /// When the chain starts in the middle and nothing of it is known.
    pub(crate) fn held(&self, chain: Chain<'_>, workers: &[WorkerIdx]) -> Result<Vec<usize>, ChainUnknown> {
        let n_known = chain.hashes.iter().take_while(|hash| self.nodes.contains_key(hash)).count();
        let mut next = n_known.checked_sub(1).map_or(chain.parent, |last| chain.hashes[last]);
        if n_known == 0 && !chain.parent.is_root() && !self.nodes.contains_key(&chain.parent) {
            return Err(ChainUnknown);
        }
        let mut deepest: HashMap<WorkerIdx, usize> = HashMap::with_capacity(workers.len());
        while deepest.len() < workers.len() {
            let Some(node) = self.nodes.get(&next) else { break };
            for holder in node.holders.iter().filter(|holder| workers.contains(holder)) {
                deepest.entry(*holder).or_insert(node.n_blocks as usize);
            }
            next = node.parent;
        }
        Ok(workers.iter().map(|worker| deepest.get(worker).copied().unwrap_or(0)).collect())
    }
}

#[cfg(test)]
mod tests;

//! The place of KV blocks: who uses which block, what is cached, and what goes first when memory is short.
//!
//! ```text
//!            allocate            seal(hash)             release (last user)
//!   free ───────────────▶ private ─────────▶ shared ───────────────────────▶ cached
//!    ▲                       │ release         ▲ acquire(hash)                 │ │
//!    └───────────────────────┘                 └───────────────────────────────┘ │
//!    └────────────────────── evict: least recently used leaf ◀───────────────────┘
//! ```
//! A block is a *leaf* when no sealed block in the pool continues it; only unused leaves are evicted, so what is
//! cached is always closed under prefixes: who holds a block holds everything before it. A sealed block in use is itself a
//! user of its parent, so whichever part of a chain is used, wherever unused blocks are there is an unused leaf. After
//! vLLM's block manager
//! (Kwon et al. 2023) and SGLang's radix cache (Zheng et al. 2024), with hashes in place of the tree.
//! All operations are O(1) or O(log n) per block; memory is about 150 bytes per block.

use std::collections::{BTreeSet, HashMap};

use crate::BLOCK_TOKENS;
use crate::hash::BlockHash;

/// The number of a block in its worker's KV memory.
pub type BlockId = u32;

/// What the pool tells the cluster, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The block can be reused from now on.
    Stored { hash: BlockHash, parent: BlockHash },
    /// The block is gone.
    Removed { hash: BlockHash },
}

/// Fewer blocks are free or evictable than asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{wanted} KV blocks are needed, {available} can be had")]
pub struct Exhausted {
    pub wanted: usize,
    pub available: usize,
}

#[derive(Debug, Clone, Default)]
struct Block {
    users: u32,
    sealed: Option<Sealed>,
}

#[derive(Debug, Clone)]
struct Sealed {
    hash: BlockHash,
    parent: Option<BlockId>,
    n_children: u32,
    last_used: u64,
    tokens: [u32; BLOCK_TOKENS],
}

/// All blocks of one worker. One owner; no locks inside.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    free: Vec<BlockId>,
    by_hash: HashMap<BlockHash, BlockId>,
    /// Unused sealed leaves by (last use, id).
    evictable: BTreeSet<(u64, BlockId)>,
    n_cached: usize,
    clock: u64,
    changes: Vec<Change>,
}

impl BlockPool {
    /// A pool of `n_blocks` free blocks.
    #[must_use]
    pub fn new(n_blocks: u32) -> Self {
        Self {
            blocks: vec![Block::default(); n_blocks as usize],
            free: (0..n_blocks).rev().collect(),
            by_hash: HashMap::new(),
            evictable: BTreeSet::new(),
            n_cached: 0,
            clock: 0,
            changes: Vec::new(),
        }
    }

    /// All blocks.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that [`Self::allocate`] can hand out now: free ones and unused cached ones.
    #[must_use]
    pub fn available(&self) -> usize {
        self.free.len() + self.n_cached
    }

    /// How many of `hashes`, from the first on, are held.
    #[must_use]
    pub fn held_prefix(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().take_while(|hash| self.by_hash.contains_key(hash)).count()
    }

    /// Takes the held blocks among `hashes`, from the first on, into use. Each needs a [`Self::release`].
    pub fn acquire_prefix(&mut self, hashes: &[BlockHash]) -> Vec<BlockId> {
        let held: Vec<BlockId> = hashes.iter().map_while(|hash| self.by_hash.get(hash).copied()).collect();
        for &id in &held {
            self.retain(id);
        }
        held
    }

    /// One more user of a block that is held or in use: a fork shares, it does not copy. O(1), plus the ancestors that
    /// come into use with it.
    pub fn retain(&mut self, id: BlockId) {
        self.clock += 1;
        let mut next = Some(id);
        while let Some(id) = next.take() {
            let block = &mut self.blocks[id as usize];
            assert!(block.users > 0 || block.sealed.is_some(), "block {id} is free");
            block.users += 1;
            if let Some(sealed) = &mut block.sealed {
                if block.users == 1 {
                    self.n_cached -= 1;
                    self.evictable.remove(&(sealed.last_used, id));
                    next = sealed.parent;
                }
                sealed.last_used = self.clock;
            }
        }
    }

    /// Hands out `n` private blocks with one user each, evicting least recently used leaves where needed.
    ///
    /// # Errors
    /// When fewer than `n` are available; nothing is evicted then.
    pub fn allocate(&mut self, n: usize) -> Result<Vec<BlockId>, Exhausted> {
        if n > self.available() {
            return Err(Exhausted { wanted: n, available: self.available() });
        }
        let mut taken = Vec::with_capacity(n);
        while taken.len() < n {
            match self.free.pop() {
                Some(id) => {
                    self.blocks[id as usize].users = 1;
                    taken.push(id);
                }
                None => self.evict_one(),
            }
        }
        Ok(taken)
    }

    /// Names a full private block, so that others can find it. Its parent must be held (or be the root).
    /// If the name is already held by another block, that one is taken into use and returned, and `id` is released:
    /// the caller goes on with the returned block.
    pub fn seal(
        &mut self,
        id: BlockId,
        hash: BlockHash,
        parent: BlockHash,
        tokens: [u32; BLOCK_TOKENS],
    ) -> BlockId {
        if let Some(&twin) = self.by_hash.get(&hash) {
            if twin != id {
                self.retain(twin);
                self.release(id);
            }
            return twin;
        }
        let parent_id = (!parent.is_root()).then(|| self.by_hash[&parent]);
        if let Some(parent_id) = parent_id {
            self.add_child(parent_id);
            self.retain(parent_id);
        }
        self.clock += 1;
        let block = &mut self.blocks[id as usize];
        assert!(block.users > 0 && block.sealed.is_none(), "block {id} is not private");
        block.sealed = Some(Sealed { hash, parent: parent_id, n_children: 0, last_used: self.clock, tokens });
        self.by_hash.insert(hash, id);
        self.changes.push(Change::Stored { hash, parent });
        id
    }

    /// One user fewer. The last user's private block becomes free, its sealed block stays cached. O(1), plus the
    /// ancestors that go out of use with it.
    pub fn release(&mut self, id: BlockId) {
        let mut next = Some(id);
        while let Some(id) = next.take() {
            let block = &mut self.blocks[id as usize];
            assert!(block.users > 0, "block {id} has no user");
            block.users -= 1;
            if block.users > 0 {
                return;
            }
            match &block.sealed {
                None => self.free.push(id),
                Some(sealed) => {
                    self.n_cached += 1;
                    if sealed.n_children == 0 {
                        self.evictable.insert((sealed.last_used, id));
                    }
                    next = sealed.parent;
                }
            }
        }
    }

    /// All token ids up to and including the block `hash`, or nothing when it is not held. O(tokens).
    #[must_use]
    pub fn tokens_of(&self, hash: &BlockHash) -> Option<Vec<u32>> {
        let mut chain = Vec::new();
        let mut next = Some(*self.by_hash.get(hash)?);
        while let Some(id) = next {
            let sealed = self.blocks[id as usize].sealed.as_ref()?;
            chain.push(&sealed.tokens);
            next = sealed.parent;
        }
        Some(chain.into_iter().rev().flatten().copied().collect())
    }

    /// The hashes from the chain's first block up to and including `hash`, or nothing when it is not held.
    #[must_use]
    pub fn hashes_of(&self, hash: &BlockHash) -> Option<Vec<BlockHash>> {
        let mut chain = Vec::new();
        let mut next = Some(*self.by_hash.get(hash)?);
        while let Some(id) = next {
            let sealed = self.blocks[id as usize].sealed.as_ref()?;
            chain.push(sealed.hash);
            next = sealed.parent;
        }
        chain.reverse();
        Some(chain)
    }

    /// What was stored and removed since the last call, in order.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    fn add_child(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        let sealed = block.sealed.as_mut().expect("a parent is sealed");
        sealed.n_children += 1;
        self.evictable.remove(&(sealed.last_used, id));
    }

    /// Frees the least recently used leaf. The caller has checked that something is cached.
    fn evict_one(&mut self) {
        let (_, id) = self.evictable.pop_first().expect("a cached block without cached children exists");
        let sealed = self.blocks[id as usize].sealed.take().expect("evictable blocks are sealed");
        self.by_hash.remove(&sealed.hash);
        self.n_cached -= 1;
        self.free.push(id);
        self.changes.push(Change::Removed { hash: sealed.hash });
        if let Some(parent) = sealed.parent {
            self.drop_child(parent);
        }
    }

    fn drop_child(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        let sealed = block.sealed.as_mut().expect("a parent outlives its children");
        sealed.n_children -= 1;
        if sealed.n_children == 0 && block.users == 0 {
            self.evictable.insert((sealed.last_used, id));
        }
    }
}

#[cfg(test)]
mod tests;

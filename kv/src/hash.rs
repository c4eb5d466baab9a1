//! Names of KV blocks: keyed BLAKE3 over (parent hash, token ids), 128 bits. The only place that hashes blocks.
//!
//! A block's hash names its tokens *and everything before them*, so equal hashes mean interchangeable KV.
//! The key is derived from the model's fingerprint and the tenant's salt: KV is never shared between models or tenants.

use std::fmt;

use crate::BLOCK_TOKENS;

/// The name of one full block and of the whole prefix that ends with it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash([u8; Self::BYTES]);

impl BlockHash {
    /// Length on the wire.
    pub const BYTES: usize = 16;
    /// The parent of a chain's first block.
    pub const ROOT: Self = Self([0; Self::BYTES]);

    /// The hash as it travels.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// True for the parent of first blocks, which names no block.
    #[must_use]
    pub fn is_root(&self) -> bool {
        *self == Self::ROOT
    }

    /// Reads one hash; an empty slice is the root.
    ///
    /// # Errors
    /// When `bytes` is neither empty nor 16 bytes long.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, WrongLength> {
        if bytes.is_empty() {
            return Ok(Self::ROOT);
        }
        Ok(Self(bytes.try_into().map_err(|_| WrongLength { bytes: bytes.len() })?))
    }

    /// Reads a run of hashes that were written one after the other.
    ///
    /// # Errors
    /// When the length is not a multiple of 16.
    pub fn run_from_wire(bytes: &[u8]) -> Result<Vec<Self>, WrongLength> {
        let (hashes, rest) = bytes.as_chunks::<{ Self::BYTES }>();
        if !rest.is_empty() {
            return Err(WrongLength { bytes: bytes.len() });
        }
        Ok(hashes.iter().map(|hash| Self(*hash)).collect())
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().take(6).try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Bytes from a peer that are no block hashes.
#[derive(Debug, thiserror::Error)]
#[error("block hashes are {} bytes each, got {bytes} bytes", BlockHash::BYTES)]
pub struct WrongLength {
    bytes: usize,
}

/// The secret-free key under which one tenant's blocks of one model are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HashKey([u8; 32]);

impl HashKey {
    /// Derives the key. `model_fingerprint` stands for weights, quantization and rope settings.
    #[must_use]
    pub fn derive(model_fingerprint: &[u8; 32], tenant_salt: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("baton 2026 kv block hash key");
        hasher.update(model_fingerprint);
        hasher.update(&[u8::try_from(BLOCK_TOKENS).expect("a block is small")]);
        hasher.update(tenant_salt);
        Self(*hasher.finalize().as_bytes())
    }

    /// The name of the block that holds `tokens` after `parent`.
    #[must_use]
    pub fn block(&self, parent: &BlockHash, tokens: &[u32; BLOCK_TOKENS]) -> BlockHash {
        let mut bytes = [0_u8; BlockHash::BYTES + 4 * BLOCK_TOKENS];
        let (head, tail) = bytes.split_at_mut(BlockHash::BYTES);
        head.copy_from_slice(&parent.0);
        for (slot, token) in tail.as_chunks_mut::<4>().0.iter_mut().zip(tokens) {
            *slot = token.to_le_bytes();
        }
        let digest = blake3::keyed_hash(&self.0, &bytes);
        let (hash, _) = digest.as_bytes().split_at(BlockHash::BYTES);
        BlockHash(hash.try_into().expect("split at the hash length"))
    }
}

/// A chain of block hashes that grows with its tokens. Cloning costs O(1): a fork shares nothing that grows.
///
/// ```text
/// tokens  t0 .. t15 | t16 .. t31 | t32 t33        hashes of full blocks are handed out once,
///         `- h0 ---'  `- h1 ----'  `- tail         in order; the tail waits for its 16th token
/// ```
#[derive(Debug, Clone)]
pub struct HashChain {
    key: HashKey,
    last: BlockHash,
    n_blocks: usize,
    tail: [u32; BLOCK_TOKENS],
    n_tail: usize,
}

impl HashChain {
    /// An empty chain.
    #[must_use]
    pub fn new(key: HashKey) -> Self {
        Self::after(key, BlockHash::ROOT, 0)
    }

    /// A chain that continues after the block `last`, the `n_blocks`-th of its prefix.
    #[must_use]
    pub fn after(key: HashKey, last: BlockHash, n_blocks: usize) -> Self {
        Self { key, last, n_blocks, tail: [0; BLOCK_TOKENS], n_tail: 0 }
    }

    /// Appends `tokens`; returns the hashes of the blocks that became full, oldest first. O(tokens).
    pub fn extend(&mut self, tokens: &[u32]) -> Vec<BlockHash> {
        let mut full = Vec::with_capacity((self.n_tail + tokens.len()) / BLOCK_TOKENS);
        for &token in tokens {
            self.tail[self.n_tail] = token;
            self.n_tail += 1;
            if self.n_tail == BLOCK_TOKENS {
                self.last = self.key.block(&self.last, &self.tail);
                self.n_blocks += 1;
                self.n_tail = 0;
                full.push(self.last);
            }
        }
        full
    }

    /// The hash of the newest full block, or the root.
    #[must_use]
    pub fn last(&self) -> BlockHash {
        self.last
    }

    /// Full blocks so far.
    #[must_use]
    pub fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    /// Tokens after the newest full block, fewer than a block.
    #[must_use]
    pub fn tail(&self) -> &[u32] {
        &self.tail[..self.n_tail]
    }
}

#[cfg(test)]
mod tests;

//! Causal attention over keys and values that lie in blocks of 16 tokens.
//!
//! ```text
//!  one block, layer and KV head:   K [head_dim][16 tokens] | V [16 tokens][head_dim]      all f16
//!  the same in 8 bits:             K, 16 bf16 scales       | V, 16 bf16 scales            a scale per token
//! ```
//! Keys are transposed, so a lane is a token and scores need no horizontal sum. All query heads of a group, and up to
//! 12 query rows of neighbouring tokens, share one pass over keys and values.
//!
//! Softmax runs online (Milakov and Gimelshein 2018; FlashAttention) over segments of 512 tokens that begin at
//! multiples of 512. A query's result depends only on its own position and the tokens before it, bit for bit.

use std::{ops::Range, sync::atomic::AtomicUsize};

use crate::{
    isa::{Isa, Op},
    pool::{SharedMut, ThreadPool, take_next},
    simd::{LANES, Simd},
};
use stored::{Stored, StoredF16, StoredI8};

mod rows;
mod stored;
#[cfg(test)]
mod tests;

/// Fewer tokens than this are not worth a parallel region.
const MIN_TOKENS_TO_SPLIT: usize = 8;

/// Tokens in a block.
pub const BLOCK_TOKENS: usize = LANES;

/// The head counts of a layer; `n_heads` is a multiple of `n_kv_heads`, `head_dim` a multiple of 16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
}

impl Heads {
    /// Numbers in one token's row of queries, keys and values.
    pub fn row_len(self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }

    /// 16-bit words in one block of one layer: `[n_kv_heads][K, V]`.
    pub fn block_len(self, dtype: KvDtype) -> usize {
        2 * self.n_kv_heads * self.tile_len(dtype)
    }

    /// Words in K (or V) of one block, layer and KV head.
    fn tile_len(self, dtype: KvDtype) -> usize {
        match dtype {
            KvDtype::F16 => self.head_dim * BLOCK_TOKENS,
            KvDtype::I8 => self.head_dim * BLOCK_TOKENS / 2 + BLOCK_TOKENS,
        }
    }
}

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvDtype {
    #[default]
    F16,
    /// A signed byte per number and a scale per token, KV head, and key or value: about half the memory, with an
    /// error of up to 1/250 of the vector's greatest number.
    I8,
}

/// Where one layer's part of every block lies, in 16-bit words: block b starts at b x `block_stride` + `layer_start`.
#[derive(Debug, Clone, Copy)]
pub struct LayerPlace {
    pub dtype: KvDtype,
    pub block_stride: usize,
    pub layer_start: usize,
}

/// Neighbouring tokens of one sequence in the batch.
#[derive(Debug, Clone)]
pub struct Span<'a> {
    /// Their rows in the batch.
    pub rows: Range<usize>,
    /// Position of the first one in its sequence.
    pub start: usize,
    /// The sequence's blocks; they cover `start + rows.len()` tokens.
    pub blocks: &'a [u32],
}

/// One layer's attention for a batch.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    pub heads: Heads,
    pub place: LayerPlace,
    pub spans: &'a [Span<'a>],
    /// `[n_tokens][queries, keys, values]`, see [`Heads::row_len`]; turned, and queries scaled.
    pub qkv: &'a [f32],
}

impl Attention<'_> {
    /// Writes keys and values of the batch into `kv`; numbers beyond f16's range are cut to it.
    pub fn store(&self, pool: &ThreadPool, isa: Isa, kv: &mut [u16]) {
        let n_parts = 2 * self.heads.n_kv_heads;
        let (next, kv) = (AtomicUsize::new(0), SharedMut::new(kv));
        let qkv_rows: Vec<&[f32]> = self.qkv.chunks_exact(self.heads.row_len()).collect();
        let store = Store { attention: self, qkv_rows: &qkv_rows, kv: &kv, next: &next, n_parts };
        if qkv_rows.len() < MIN_TOKENS_TO_SPLIT {
            return isa.run(store);
        }
        pool.run(|_, _| isa.run(store));
    }

    /// Attends over `kv`, which holds the keys and values of all tokens up to the batch's own:
    /// `out` is `[n_tokens][n_heads][head_dim]`. The spans' rows ascend and do not overlap.
    pub fn run(&self, pool: &ThreadPool, isa: Isa, kv: &[u16], out: &mut [f32]) {
        let n_tokens = self.qkv.len() / self.heads.row_len();
        assert_eq!(out.len(), n_tokens * self.heads.n_heads * self.heads.head_dim, "a row per token");
        let mut n_assigned = 0;
        for span in self.spans {
            assert!(
                span.rows.start >= n_assigned && span.rows.end <= n_tokens,
                "spans in order, without overlap"
            );
            n_assigned = span.rows.end;
        }
        let tiles = self.tiles();
        let (next, out) = (AtomicUsize::new(0), SharedMut::new(out));
        let share = Share { attention: self, kv, tiles: &tiles, next: &next, out: &out };
        pool.run(|_, _| isa.run(share));
    }

    /// Cuts the batch into runs of tokens that are worked on together, the longest histories first.
    fn tiles(&self) -> Vec<Tile> {
        let group = self.heads.n_heads / self.heads.n_kv_heads;
        let n_tokens = (rows::MAX_ROWS / group).max(1);
        let mut tiles = Vec::new();
        for (span_idx, span) in self.spans.iter().enumerate() {
            let cut = |at: usize| Tile { span_idx, tokens: at..span.rows.len().min(at + n_tokens) };
            tiles.extend((0..span.rows.len()).step_by(n_tokens).map(cut));
        }
        tiles.sort_by_key(|tile| std::cmp::Reverse(self.spans[tile.span_idx].start + tile.tokens.end));
        tiles
    }

    /// Offset of K of `kv_head` in `block`; V follows.
    #[inline(always)]
    fn tile_at(&self, block: u32, kv_head: usize) -> usize {
        block as usize * self.place.block_stride
            + self.place.layer_start
            + 2 * kv_head * self.heads.tile_len(self.place.dtype)
    }
}

/// Tokens of one span, counted from its first.
#[derive(Debug)]
struct Tile {
    span_idx: usize,
    tokens: Range<usize>,
}

/// One thread's share: it takes (tile, KV head) pairs until none is left. Tiles of one sequence follow each other for the
/// same head, whose keys and values stay in the L2 cache; single tokens take all heads of a block, which lie together.
#[derive(Clone, Copy)]
struct Share<'a> {
    attention: &'a Attention<'a>,
    kv: &'a [u16],
    tiles: &'a [Tile],
    next: &'a AtomicUsize,
    out: &'a SharedMut<'a, f32>,
}

impl Op for Share<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        match self.attention.place.dtype {
            KvDtype::F16 => self.attend::<S, StoredF16>(s),
            KvDtype::I8 => self.attend::<S, StoredI8>(s),
        }
    }
}

impl Share<'_> {
    #[inline(always)]
    fn attend<S: Simd, K: Stored>(self, s: S) {
        let (n_kv_heads, n_tiles) = (self.attention.heads.n_kv_heads, self.tiles.len());
        let by_head = n_tiles > 2 * self.attention.spans.len();
        let mut scratch = rows::Scratch::new();
        while let Some(item) = take_next(self.next, n_tiles * n_kv_heads) {
            let (tile, kv_head) = if by_head {
                (item % n_tiles, item / n_tiles)
            } else {
                (item / n_kv_heads, item % n_kv_heads)
            };
            rows::attend_tile::<S, K>(s, &self, &self.tiles[tile], kv_head, &mut scratch);
        }
    }
}

/// One thread's share of storing: it takes K or V of a KV head, for all tokens, until none is left.
#[derive(Clone, Copy)]
struct Store<'a> {
    attention: &'a Attention<'a>,
    qkv_rows: &'a [&'a [f32]],
    kv: &'a SharedMut<'a, u16>,
    next: &'a AtomicUsize,
    n_parts: usize,
}

impl Op for Store<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        while let Some(part) = take_next(self.next, self.n_parts) {
            match self.attention.place.dtype {
                KvDtype::F16 => self.store::<S, StoredF16>(s, part),
                KvDtype::I8 => self.store::<S, StoredI8>(s, part),
            }
        }
    }
}

impl Store<'_> {
    /// Stores keys (even parts) or values (odd parts) of KV head `part / 2`.
    #[inline(always)]
    fn store<S: Simd, K: Stored>(self, s: S, part: usize) {
        let Heads { n_heads, n_kv_heads, head_dim } = self.attention.heads;
        let tile_len = self.attention.heads.tile_len(self.attention.place.dtype);
        let (kv_head, is_value) = (part / 2, part % 2);
        let first = (n_heads + is_value * n_kv_heads + kv_head) * head_dim;
        for span in self.attention.spans {
            for (position, row) in (span.start..).zip(&self.qkv_rows[span.rows.clone()]) {
                let block = span.blocks[position / BLOCK_TOKENS];
                let start = self.attention.tile_at(block, kv_head) + is_value * tile_len;
                // SAFETY: no other thread has this half of this KV head, whatever the block.
                let tile = unsafe { self.kv.slice(start..start + tile_len) };
                let (x, slot) = (&row[first..first + head_dim], position % BLOCK_TOKENS);
                if is_value == 0 {
                    K::put_key(s, x, slot, tile);
                } else {
                    K::put_value(s, x, slot, tile);
                }
            }
        }
    }
}

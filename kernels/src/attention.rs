//! Causal attention over keys and values that lie in blocks of 16 tokens.
//!
//! ```text
//!  one block, layer and KV head:   K [head_dim][16 tokens] | V [16 tokens][head_dim]      all f16
//! ```
//! Keys are transposed, so a lane is a token and scores need no horizontal sum. All query heads of a group, and up to
//! 12 query rows of neighbouring tokens, share one pass over keys and values.
//!
//! Softmax runs online (Milakov and Gimelshein 2018; FlashAttention) over segments of 512 tokens that begin at
//! multiples of 512. A query's result depends only on its own position and the tokens before it, bit for bit.

use std::{ops::Range, sync::atomic::AtomicUsize};

use half::f16;

use crate::{
    isa::{Isa, Op},
    pool::{SharedMut, ThreadPool, take_next},
    simd::{LANES, Simd},
};

mod rows;
#[cfg(test)]
mod tests;

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

    /// Numbers in K (or V) of one block, layer and KV head.
    fn tile_len(self) -> usize {
        self.head_dim * BLOCK_TOKENS
    }

    /// Numbers in one block of one layer: `[n_kv_heads][K, V]`.
    pub fn block_len(self) -> usize {
        2 * self.n_kv_heads * self.tile_len()
    }
}

/// Where one layer's part of every block lies: block b starts at b x `block_stride` + `layer_start`.
#[derive(Debug, Clone, Copy)]
pub struct LayerPlace {
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
    pub fn store(&self, isa: Isa, kv: &mut [f16]) {
        isa.run(Store { attention: self, kv });
    }

    /// Attends over `kv`, which holds the keys and values of all tokens up to the batch's own:
    /// `out` is `[n_tokens][n_heads][head_dim]`. The spans' rows ascend and do not overlap.
    pub fn run(&self, pool: &ThreadPool, isa: Isa, kv: &[f16], out: &mut [f32]) {
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
            + 2 * kv_head * self.heads.tile_len()
    }
}

/// Tokens of one span, counted from its first.
#[derive(Debug)]
struct Tile {
    span_idx: usize,
    tokens: Range<usize>,
}

/// One thread's share: it takes (tile, KV head) pairs until none is left.
#[derive(Clone, Copy)]
struct Share<'a> {
    attention: &'a Attention<'a>,
    kv: &'a [f16],
    tiles: &'a [Tile],
    next: &'a AtomicUsize,
    out: &'a SharedMut<'a, f32>,
}

impl Op for Share<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let n_kv_heads = self.attention.heads.n_kv_heads;
        let mut scratch = rows::Scratch::new();
        while let Some(item) = take_next(self.next, self.tiles.len() * n_kv_heads) {
            rows::attend_tile(s, &self, &self.tiles[item / n_kv_heads], item % n_kv_heads, &mut scratch);
        }
    }
}

struct Store<'a> {
    attention: &'a Attention<'a>,
    kv: &'a mut [f16],
}

impl Op for Store<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let Heads { n_heads, n_kv_heads, head_dim } = self.attention.heads;
        let tile_len = self.attention.heads.tile_len();
        let qkv_rows = self.attention.qkv.chunks_exact(self.attention.heads.row_len());
        let qkv_rows: Vec<&[f32]> = qkv_rows.collect();
        for span in self.attention.spans {
            for (position, row) in (span.start..).zip(&qkv_rows[span.rows.clone()]) {
                let (keys, values) = row[n_heads * head_dim..].split_at(n_kv_heads * head_dim);
                let (block, slot) = (span.blocks[position / BLOCK_TOKENS], position % BLOCK_TOKENS);
                for kv_head in 0..n_kv_heads {
                    let start = self.attention.tile_at(block, kv_head);
                    let (k, v) = self.kv[start..start + 2 * tile_len].split_at_mut(tile_len);
                    let head = kv_head * head_dim..(kv_head + 1) * head_dim;
                    let by_dim = k.as_chunks_mut::<BLOCK_TOKENS>().0;
                    for (x, k) in keys[head.clone()].as_chunks().0.iter().zip(by_dim.chunks_exact_mut(LANES))
                    {
                        let halves = to_f16(s, x);
                        k.iter_mut().zip(halves).for_each(|(k, x)| k[slot] = x);
                    }
                    let v = v[slot * head_dim..][..head_dim].as_chunks_mut::<LANES>().0;
                    for (x, v) in values[head].as_chunks().0.iter().zip(v) {
                        *v = to_f16(s, x);
                    }
                }
            }
        }
    }
}

/// Rounds to f16, cutting to its finite range: an infinity would spoil even queries that give it weight zero.
#[inline(always)]
fn to_f16<S: Simd>(s: S, x: &[f32; LANES]) -> [f16; LANES] {
    let limit = f16::MAX.to_f32();
    let x = s.max(s.min(s.load(x), s.splat(limit)), s.splat(-limit));
    let mut halves = [f16::ZERO; LANES];
    s.store_f16(x, &mut halves);
    halves
}

//! The inner loops of attention: a tile of query rows against the blocks of one KV head.

use std::marker::PhantomData;

use super::{BLOCK_TOKENS, Share, Stored, Tile};
use crate::simd::{LANES, Simd, unroll};

/// Query rows that share a pass; 12 accumulators and a key fit the vector registers.
pub(super) const MAX_ROWS: usize = 12;

/// Blocks whose scores are held at once; 12 rows x 512 tokens x 4 B = 24 KB.
const SEGMENT_BLOCKS: usize = 32;

/// Scores, then weights: `[row][block of the segment][token]`.
pub(super) struct Scratch {
    scores: [[[f32; BLOCK_TOKENS]; SEGMENT_BLOCKS]; MAX_ROWS],
}

impl Scratch {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self { scores: [[[0.0; BLOCK_TOKENS]; SEGMENT_BLOCKS]; MAX_ROWS] }
    }
}

/// A query row: one token's query head.
#[derive(Clone, Copy, Default)]
struct Row {
    /// Index of the token in the batch.
    token: usize,
    head: usize,
    /// Tokens it sees: its own and all before it.
    n_visible: usize,
}

/// Attends for every query head of `kv_head`'s group and every token of `tile`.
#[inline(always)]
pub(super) fn attend_tile<S: Simd, K: Stored>(
    s: S,
    share: &Share<'_>,
    tile: &Tile,
    kv_head: usize,
    scratch: &mut Scratch,
) {
    let span = &share.attention.spans[tile.span_idx];
    let group = share.attention.heads.n_heads / share.attention.heads.n_kv_heads;
    let row = |i: usize| Row {
        token: span.rows.start + tile.tokens.start + i / group,
        head: kv_head * group + i % group,
        n_visible: span.start + tile.tokens.start + i / group + 1,
    };
    let n_rows = tile.tokens.len() * group;
    let pass = Pass { s, share, blocks: span.blocks, kv_head, stored: PhantomData::<K> };
    let mut done = 0;
    while done < n_rows {
        let rows = |i: usize| row(done + i);
        done += match n_rows - done {
            // More rows than registers hold would be slower.
            3.. if S::N_REGISTERS < 32 => pass.attend::<3>(std::array::from_fn(rows), scratch),
            _ if S::N_REGISTERS < 32 => pass.attend::<1>(std::array::from_fn(rows), scratch),
            12.. => pass.attend::<12>(std::array::from_fn(rows), scratch),
            6.. => pass.attend::<6>(std::array::from_fn(rows), scratch),
            3.. => pass.attend::<3>(std::array::from_fn(rows), scratch),
            2 => pass.attend::<2>(std::array::from_fn(rows), scratch),
            _ => pass.attend::<1>(std::array::from_fn(rows), scratch),
        };
    }
}

/// One pass over the blocks of one sequence and KV head.
#[derive(Clone, Copy)]
struct Pass<'a, S, K> {
    s: S,
    share: &'a Share<'a>,
    blocks: &'a [u32],
    kv_head: usize,
    stored: PhantomData<K>,
}

/// Blocks whose scores are held at once.
#[derive(Clone, Copy)]
struct Segment<'a> {
    blocks: &'a [u32],
    first_token: usize,
}

impl<'a, S: Simd, K: Stored> Pass<'a, S, K> {
    /// Attends for `R` rows and returns `R`.
    #[inline(always)]
    fn attend<const R: usize>(self, rows: [Row; R], scratch: &mut Scratch) -> usize {
        let s = self.s;
        let n_visible = rows.iter().map(|row| row.n_visible).max().unwrap_or(0);
        let blocks = &self.blocks[..n_visible.div_ceil(BLOCK_TOKENS)];
        let queries = self.queries(&rows);
        let mut outs = rows.map(|row| self.out(row));
        let mut peaks = [f32::NEG_INFINITY; R];
        let mut sums = [s.splat(0.0); R];
        for (i, blocks) in blocks.chunks(SEGMENT_BLOCKS).enumerate() {
            let segment = Segment { blocks, first_token: i * SEGMENT_BLOCKS * BLOCK_TOKENS };
            let tops = self.score(&queries, &rows, segment, scratch);
            for r in 0..R {
                let peak = peaks[r].max(s.highest(tops[r]));
                let fade = s.exp(s.splat(peaks[r] - peak));
                peaks[r] = peak;
                sums[r] = s.mul(sums[r], fade);
                for (scores, &block) in scratch.scores[r].iter_mut().zip(blocks) {
                    let mut weights = s.exp(s.sub(s.load(scores), s.splat(peak)));
                    sums[r] = s.add(sums[r], weights);
                    if K::HAS_SCALES {
                        weights = s.mul(weights, K::scales(s, self.tiles(block).1));
                    }
                    s.store(weights, scores);
                }
                self.scale(outs[r], fade);
            }
            self.mix(segment, n_visible - segment.first_token, scratch, &mut outs);
        }
        for (out, sum) in outs.into_iter().zip(sums) {
            self.scale(out, s.splat(1.0 / s.sum(sum)));
        }
        R
    }

    /// K and V of a block.
    #[inline(always)]
    fn tiles(self, block: u32) -> (&'a [u16], &'a [u16]) {
        let attention = self.share.attention;
        let start = attention.tile_at(block, self.kv_head);
        let tile_len = attention.heads.tile_len(attention.place.dtype);
        self.share.kv[start..start + 2 * tile_len].split_at(tile_len)
    }

    /// The queries, 16 numbers of each row at a time: `[head_dim / 16][row][16]`.
    #[inline(always)]
    fn queries<const R: usize>(self, rows: &[Row; R]) -> Vec<[[f32; LANES]; R]> {
        let heads = self.share.attention.heads;
        let mut queries = vec![[[0.0; LANES]; R]; heads.head_dim / LANES];
        for (r, row) in rows.iter().enumerate() {
            let start = row.token * heads.row_len() + row.head * heads.head_dim;
            let query = &self.share.attention.qkv[start..start + heads.head_dim];
            queries.iter_mut().zip(query.as_chunks().0).for_each(|(q, &x)| q[r] = x);
        }
        queries
    }

    /// The row's output, zeroed.
    #[inline(always)]
    fn out(self, row: Row) -> &'a mut [f32] {
        let heads = self.share.attention.heads;
        let start = (row.token * heads.n_heads + row.head) * heads.head_dim;
        // SAFETY: every (token, head) belongs to one row of one tile, and no tile is taken twice.
        let out = unsafe { self.share.out.slice(start..start + heads.head_dim) };
        out.fill(0.0);
        out
    }

    #[inline(always)]
    fn scale(self, out: &mut [f32], factor: S::F) {
        for out in out.as_chunks_mut::<LANES>().0 {
            self.s.store(self.s.mul(self.s.load(out), factor), out);
        }
    }

    /// Fills the scores of a segment and returns the greatest per row and lane; tokens out of sight score -inf.
    #[inline(always)]
    fn score<const R: usize>(
        self,
        queries: &[[[f32; LANES]; R]],
        rows: &[Row; R],
        segment: Segment<'_>,
        scratch: &mut Scratch,
    ) -> [S::F; R] {
        let s = self.s;
        let mut tops = [s.splat(f32::NEG_INFINITY); R];
        // Two at a time where registers allow it: each query's number is read once for both.
        let n_pairs = if 2 * R + 3 <= S::N_REGISTERS { segment.blocks.len() / 2 } else { 0 };
        for pair in 0..n_pairs {
            let found = self.score_blocks::<R, 2>(queries, rows, segment, 2 * pair, scratch);
            tops = std::array::from_fn(|r| s.max(tops[r], found[r]));
        }
        for at in 2 * n_pairs..segment.blocks.len() {
            let found = self.score_blocks::<R, 1>(queries, rows, segment, at, scratch);
            tops = std::array::from_fn(|r| s.max(tops[r], found[r]));
        }
        tops
    }

    /// The same for `B` blocks, from the segment's block `first` on.
    #[inline(always)]
    fn score_blocks<const R: usize, const B: usize>(
        self,
        queries: &[[[f32; LANES]; R]],
        rows: &[Row; R],
        segment: Segment<'_>,
        first: usize,
        scratch: &mut Scratch,
    ) -> [S::F; R] {
        let s = self.s;
        let last = segment.blocks.len() - 1;
        let keys_of = |at: usize| self.tiles(segment.blocks[at.min(last)]).0;
        let tiles: [&[u16]; B] = std::array::from_fn(|b| keys_of(first + b));
        let keys: [&[[K::Number; LANES]]; B] = std::array::from_fn(|b| K::numbers(tiles[b]));
        let next: [&[[K::Number; LANES]]; B] = std::array::from_fn(|b| K::numbers(keys_of(first + B + b)));
        let mut acc = [[s.splat(0.0); B]; R];
        for (part, queries) in queries.iter().enumerate() {
            let dims = part * LANES..(part + 1) * LANES;
            for next in next {
                // A block begins where no hardware prefetcher expects it.
                let next = &next[dims.clone()];
                next.iter().step_by(64 / size_of_val(&next[0])).for_each(|line| s.prefetch(line));
            }
            let keys: [&[[K::Number; LANES]]; B] = std::array::from_fn(|b| &keys[b][dims.clone()]);
            for i in 0..LANES {
                let key: [S::F; B] = std::array::from_fn(|b| K::load(s, &keys[b][i]));
                unroll!(S, r < R, {
                    let query = s.splat(queries[r][i]);
                    unroll!(S, b < B, acc[r][b] = s.fma(query, key[b], acc[r][b]));
                });
            }
        }
        let minus_infinity = s.splat(f32::NEG_INFINITY);
        let mut tops = [minus_infinity; R];
        unroll!(S, b < B, {
            let first_token = segment.first_token + (first + b) * BLOCK_TOKENS;
            unroll!(S, r < R, {
                let mut scores = acc[r][b];
                if K::HAS_SCALES {
                    scores = s.mul(scores, K::scales(s, tiles[b]));
                }
                let n_visible = rows[r].n_visible.saturating_sub(first_token).min(BLOCK_TOKENS);
                let scores = s.keep_first(n_visible, scores, minus_infinity);
                tops[r] = s.max(tops[r], scores);
                s.store(scores, &mut scratch.scores[r][first + b]);
            });
        });
        tops
    }

    /// Adds the weighted values of a segment's first `n_tokens` tokens.
    #[inline(always)]
    fn mix<const R: usize>(
        self,
        segment: Segment<'_>,
        n_tokens: usize,
        scratch: &Scratch,
        outs: &mut [&mut [f32]; R],
    ) {
        let n_vectors = self.share.attention.heads.head_dim / LANES;
        // Two at a time where registers allow it: each weight is read once for both.
        let n_pairs = if 2 * R + 3 <= S::N_REGISTERS { n_vectors / 2 } else { 0 };
        for v in 0..n_pairs {
            self.mix_columns::<R, 2>(segment, n_tokens, scratch, 2 * v, outs);
        }
        for v in 2 * n_pairs..n_vectors {
            self.mix_columns::<R, 1>(segment, n_tokens, scratch, v, outs);
        }
    }

    /// The same for `V` vectors of every row's output, from vector `first` on.
    #[inline(always)]
    fn mix_columns<const R: usize, const V: usize>(
        self,
        segment: Segment<'_>,
        n_tokens: usize,
        scratch: &Scratch,
        first: usize,
        outs: &mut [&mut [f32]; R],
    ) {
        let s = self.s;
        let n_vectors = self.share.attention.heads.head_dim / LANES;
        let mut acc = [[s.splat(0.0); V]; R];
        unroll!(S, r < R, {
            let out = &outs[r].as_chunks().0[first..first + V];
            unroll!(S, v < V, acc[r][v] = s.load(&out[v]));
        });
        for (i, &block) in segment.blocks.iter().enumerate() {
            let next = segment.blocks[(i + 1).min(segment.blocks.len() - 1)];
            let next = K::numbers(self.tiles(next).1).chunks_exact(n_vectors);
            let (_, values) = self.tiles(block);
            let weights: [&[f32; BLOCK_TOKENS]; R] = std::array::from_fn(|r| &scratch.scores[r][i]);
            let values = K::numbers(values).chunks_exact(n_vectors);
            let n_tokens = (n_tokens - i * BLOCK_TOKENS).min(BLOCK_TOKENS);
            for (t, (value, next)) in (0..n_tokens.min(BLOCK_TOKENS)).zip(values.zip(next)) {
                s.prefetch(&raw const next[first]);
                let value = &value[first..first + V];
                let value: [S::F; V] = std::array::from_fn(|v| K::load(s, &value[v]));
                unroll!(S, r < R, {
                    let weight = s.splat(weights[r][t]);
                    unroll!(S, v < V, acc[r][v] = s.fma(weight, value[v], acc[r][v]));
                });
            }
        }
        unroll!(S, r < R, {
            let out = &mut outs[r].as_chunks_mut().0[first..first + V];
            unroll!(S, v < V, s.store(acc[r][v], &mut out[v]));
        });
    }
}

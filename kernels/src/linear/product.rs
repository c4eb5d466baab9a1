//! The inner loops of a linear layer: groups of 16 rows times tiles of up to 8 tokens.

use std::ops::Range;

use super::{BLOCK_LEN, Halves, Packed, Part, QuantBlock, Share, Write, pack::Blocks};
use crate::simd::{LANES, Line, Simd};

/// Tokens whose activations stay in the L2 cache while all groups pass: 128 x 1536 x 1.5 B = 295 KB.
const SLAB_TOKENS: usize = 128;

/// One thread's share of one part: `groups` are those of the part.
#[inline(always)]
pub(super) fn run<S: Simd>(s: S, share: &Share<'_>, part: &Part, groups: Range<usize>) {
    match &part.packed {
        Packed::Nibbles4_1(blocks) => quantized::<S, Nibbles4_1>(s, share, part, blocks, groups),
        Packed::Nibbles4_0(blocks) => quantized::<S, Nibbles4_0>(s, share, part, blocks, groups),
        Packed::Bytes(blocks) => quantized::<S, Bytes>(s, share, part, blocks, groups),
        Packed::Dense(weights) => dense(s, share, part, weights, groups),
    }
}

/// What differs between the block types.
trait Format {
    /// Lines per block.
    const N_LINES: usize;
    /// Parameters per block: scale, then perhaps minimum.
    const N_PARAMS: usize;
    /// A stored number is the weight plus this.
    const OFFSET: i32;
    /// Register i holds inputs 4i..4i+4 of the block.
    fn unpack<S: Simd>(s: S, lines: &[Line]) -> [S::B; 8];
    fn dot<S: Simd>(s: S, acc: S::I, w: S::B, x: i32) -> S::I;
}

struct Nibbles4_1;
struct Nibbles4_0;
struct Bytes;

#[inline(always)]
fn unpack_nibbles<S: Simd>(s: S, lines: &[Line]) -> [S::B; 8] {
    let v = [s.load_line(&lines[0]), s.load_line(&lines[1]), s.load_line(&lines[2]), s.load_line(&lines[3])];
    [
        s.low_nibbles(v[0]),
        s.high_nibbles(v[0]),
        s.low_nibbles(v[1]),
        s.high_nibbles(v[1]),
        s.low_nibbles(v[2]),
        s.high_nibbles(v[2]),
        s.low_nibbles(v[3]),
        s.high_nibbles(v[3]),
    ]
}

impl Format for Nibbles4_1 {
    const N_LINES: usize = 4;
    const N_PARAMS: usize = 2;
    const OFFSET: i32 = 0;
    #[inline(always)]
    fn unpack<S: Simd>(s: S, lines: &[Line]) -> [S::B; 8] {
        unpack_nibbles(s, lines)
    }
    #[inline(always)]
    fn dot<S: Simd>(s: S, acc: S::I, w: S::B, x: i32) -> S::I {
        s.dot_nibbles(acc, w, x)
    }
}

impl Format for Nibbles4_0 {
    const N_LINES: usize = 4;
    const N_PARAMS: usize = 1;
    const OFFSET: i32 = 8;
    #[inline(always)]
    fn unpack<S: Simd>(s: S, lines: &[Line]) -> [S::B; 8] {
        unpack_nibbles(s, lines)
    }
    #[inline(always)]
    fn dot<S: Simd>(s: S, acc: S::I, w: S::B, x: i32) -> S::I {
        s.dot_nibbles(acc, w, x)
    }
}

impl Format for Bytes {
    const N_LINES: usize = 8;
    const N_PARAMS: usize = 1;
    const OFFSET: i32 = 128;
    #[inline(always)]
    fn unpack<S: Simd>(s: S, lines: &[Line]) -> [S::B; 8] {
        let mut v = [s.load_line(&lines[0]); 8];
        for (v, line) in v.iter_mut().zip(lines) {
            *v = s.load_line(line);
        }
        v
    }
    #[inline(always)]
    fn dot<S: Simd>(s: S, acc: S::I, w: S::B, x: i32) -> S::I {
        s.dot_bytes(acc, w, x)
    }
}

#[inline(always)]
fn quantized<S: Simd, F: Format>(s: S, share: &Share<'_>, part: &Part, w: &Blocks, groups: Range<usize>) {
    let n_blocks = share.linear.n_in / BLOCK_LEN;
    let tokens: Vec<&[QuantBlock]> = share.input.blocks.chunks_exact(n_blocks).collect();
    for (slab, tokens) in tokens.chunks(SLAB_TOKENS).enumerate() {
        for group in groups.clone() {
            let weights = Group {
                lines: &w.lines[group * n_blocks * F::N_LINES..][..n_blocks * F::N_LINES],
                params: &w.params[group * n_blocks * F::N_PARAMS..][..n_blocks * F::N_PARAMS],
            };
            let mut place = Place { share, part, group, token: slab * SLAB_TOKENS };
            let (eights, rest) = tokens.as_chunks::<8>();
            for tile in eights {
                place.write(s, quantized_tile::<S, F, 8>(s, weights, tile));
            }
            let (fours, rest) = rest.as_chunks::<4>();
            for tile in fours {
                place.write(s, quantized_tile::<S, F, 4>(s, weights, tile));
            }
            let (twos, rest) = rest.as_chunks::<2>();
            for tile in twos {
                place.write(s, quantized_tile::<S, F, 2>(s, weights, tile));
            }
            for tile in rest.as_chunks::<1>().0 {
                place.write(s, quantized_tile::<S, F, 1>(s, weights, tile));
            }
        }
    }
}

/// The weights of 16 rows.
#[derive(Clone, Copy)]
struct Group<'a> {
    lines: &'a [Line],
    params: &'a [Halves],
}

/// Repeats the body for `$t` in 0..8, or in 0..`$n` with `$n` at most 8. A loop that the compiler left rolled would
/// keep its arrays in memory instead of registers.
macro_rules! unroll {
    ($t:ident, $body:expr) => {
        unroll!(@ $t, 8, $body, 0 1 2 3 4 5 6 7)
    };
    ($t:ident < $n:ident, $body:expr) => {
        unroll!(@ $t, $n, $body, 0 1 2 3 4 5 6 7)
    };
    (@ $t:ident, $n:expr, $body:expr, $($i:literal)*) => {
        $({
            let $t = $i;
            if $t < $n {
                $body;
            }
        })*
    };
}

/// 16 rows times `T` tokens; the order of additions per token is the same for every `T`.
#[inline(always)]
fn quantized_tile<S: Simd, F: Format, const T: usize>(
    s: S,
    weights: Group<'_>,
    tokens: &[&[QuantBlock]; T],
) -> [S::F; T] {
    let mut acc = [s.splat(0.0); T];
    let blocks = weights.lines.chunks_exact(F::N_LINES).zip(weights.params.chunks_exact(F::N_PARAMS));
    for (i, (lines, params)) in blocks.enumerate() {
        let w = F::unpack(s, lines);
        let scale = s.load_f16(&params[0].0);
        let minimum = s.load_f16(&params[F::N_PARAMS - 1].0);
        let mut x = [&tokens[0][i]; T];
        let mut dots = [s.splat_i32(0); T];
        unroll!(t < T, {
            x[t] = &tokens[t][i];
            dots[t] = s.splat_i32(-F::OFFSET * x[t].sum);
        });
        // All dot products first, then all sums: 3041 tok/s of prefill where token after token gave 2445.
        unroll!(k, unroll!(t < T, dots[t] = F::dot(s, dots[t], w[k], x[t].words[k])));
        unroll!(t < T, {
            acc[t] = s.fma(s.to_f32(dots[t]), s.mul(scale, s.splat(x[t].scale)), acc[t]);
            if F::N_PARAMS == 2 {
                acc[t] = s.fma(minimum, s.splat(x[t].scaled_sum), acc[t]);
            }
        });
    }
    acc
}

#[inline(always)]
fn dense<S: Simd>(s: S, share: &Share<'_>, part: &Part, w: &[[f32; LANES]], groups: Range<usize>) {
    let n_in = share.linear.n_in;
    let tokens: Vec<&[f32]> = share.input.plain.chunks_exact(n_in).collect();
    for group in groups {
        let weights = &w[group * n_in..][..n_in];
        let mut place = Place { share, part, group, token: 0 };
        let (fours, rest) = tokens.as_chunks::<4>();
        for tile in fours {
            place.write(s, dense_tile(s, weights, tile));
        }
        for tile in rest.as_chunks::<1>().0 {
            place.write(s, dense_tile(s, weights, tile));
        }
    }
}

#[inline(always)]
fn dense_tile<S: Simd, const T: usize>(s: S, weights: &[[f32; LANES]], tokens: &[&[f32]; T]) -> [S::F; T] {
    let mut acc = [s.splat(0.0); T];
    for (i, w) in weights.iter().enumerate() {
        let w = s.load(w);
        for t in 0..T {
            acc[t] = s.fma(w, s.splat(tokens[t][i]), acc[t]);
        }
    }
    acc
}

/// Where the next tile's results go.
struct Place<'a> {
    share: &'a Share<'a>,
    part: &'a Part,
    group: usize,
    token: usize,
}

impl Place<'_> {
    #[inline(always)]
    fn write<S: Simd, const T: usize>(&mut self, s: S, tile: [S::F; T]) {
        let first = self.group * LANES;
        let n_rows = LANES.min(self.part.n_rows - first);
        for v in tile {
            let start = self.token * self.share.linear.n_out + self.part.first_row + first;
            // SAFETY: no other thread has this group, and this token passes once.
            let out = unsafe { self.share.out.slice(start..start + n_rows) };
            store(s, v, self.share.write, out);
            self.token += 1;
        }
    }
}

/// Stores the first `out.len()` lanes.
#[inline(always)]
fn store<S: Simd>(s: S, v: S::F, write: Write, out: &mut [f32]) {
    if let Ok(out) = <&mut [f32; LANES]>::try_from(&mut *out) {
        let v = if write == Write::Add { s.add(v, s.load(out)) } else { v };
        return s.store(v, out);
    }
    let mut lanes = [0.0; LANES];
    s.store(v, &mut lanes);
    for (out, lane) in out.iter_mut().zip(lanes) {
        *out = if write == Write::Add { lane + *out } else { lane };
    }
}

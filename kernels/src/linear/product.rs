//! The inner loops of a linear layer: groups of 16 rows times tiles of up to 12 tokens.

use std::ops::Range;

use half::{bf16, f16};

use super::{
    BLOCK_LEN, Halves, Packed, Part, QuantBlock, Share, WIDEST_TILE, Write,
    pack::{Blocks, Layout},
    part_tokens,
};
use crate::{
    quant::DType,
    simd::{LANES, Line, Simd, unroll},
};

/// Activations of a slab of tokens stay in the L2 cache while all groups pass.
const SLAB_BYTES: usize = 1 << 20;
/// Larger slabs save no more: weights are read once for each.
const MAX_SLAB_TOKENS: usize = 240;

/// One thread's share of one part: `groups` are those of the part.
#[inline(always)]
pub(super) fn run<S: Simd>(s: S, share: &Share<'_>, part: &Part, groups: Range<usize>) {
    match &part.packed {
        Packed::Blocks(dtype, blocks) => match dtype {
            DType::Q4_0 => quantized::<S, Q4_0>(s, share, part, blocks, groups),
            DType::Q4_1 => quantized::<S, Q4_1>(s, share, part, blocks, groups),
            DType::Q8_0 => quantized::<S, Q8_0>(s, share, part, blocks, groups),
            DType::Q4K => quantized::<S, Q4K>(s, share, part, blocks, groups),
            DType::Q5K => quantized::<S, Q5K>(s, share, part, blocks, groups),
            DType::Q6K => quantized::<S, Q6K>(s, share, part, blocks, groups),
            DType::F32 | DType::F16 | DType::BF16 => unreachable!("they have no blocks"),
        },
        Packed::F32(weights) => plain(s, share, part, weights, groups),
        Packed::F16(weights) => plain(s, share, part, weights, groups),
        Packed::BF16(weights) => plain(s, share, part, weights, groups),
    }
}

/// What differs between the block types.
trait Format {
    const LAYOUT: Layout;
    /// Value = scale x number + minimum; otherwise there is no minimum.
    const HAS_MINIMUM: bool = false;
    /// Scales per block: one, or one for each half.
    const N_SCALES: usize = 1;
    /// Tokens of the widest tile: dot products and sums of 12, and what a few inputs need, fill 32 registers; 8 are too
    /// few to hide what a dot product takes. Halves with scales of their own need sums of their own.
    const MAX_TILE: usize = if Self::N_SCALES == 1 { WIDEST_TILE } else { 8 };
    /// Register i holds inputs 4i..4i+4 of the block.
    #[inline(always)]
    fn unpack<S: Simd>(s: S, lines: &[Line]) -> [S::B; 8] {
        unpack_nibbles(s, lines)
    }
    /// What the weights' offset adds to a dot product, negated; `excess` is that of an offset of 32.
    #[inline(always)]
    fn excess(excess: i32) -> i32 {
        match Self::LAYOUT.offset {
            0 => 0,
            32 => excess,
            offset => (excess >> 5) * i32::from(offset),
        }
    }
    /// The scales of both halves, and the minimum, of block `i`.
    fn scales<S: Simd>(s: S, group: Group<'_>, i: usize) -> ([S::F; 2], S::F);
    #[inline(always)]
    fn dot<S: Simd>(s: S, acc: S::I, w: S::B, x: i32) -> S::I {
        s.dot_small(acc, w, x)
    }
}

struct Q4_0;
struct Q4_1;
struct Q8_0;
struct Q4K;
struct Q5K;
struct Q6K;

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

/// The scale of block `i` of a type with one parameter per block.
#[inline(always)]
fn one_scale<S: Simd>(s: S, group: Group<'_>, i: usize) -> ([S::F; 2], S::F) {
    let scale = s.load_f16(&group.params[i].0);
    ([scale; 2], scale)
}

/// The scale and minimum of block `i` of Q4_K or Q5_K; the minimum is stored as what is subtracted.
#[inline(always)]
fn factored_scale<S: Simd>(s: S, group: Group<'_>, i: usize) -> ([S::F; 2], S::F) {
    let params = &group.params[i / 8 * 2..][..2];
    let factors = &group.factors[i * 2..][..2];
    let scale = s.mul(s.load_f16(&params[0].0), s.load_i8(&factors[0]));
    let minimum = s.mul(s.load_f16(&params[1].0), s.load_i8(&factors[1]));
    ([scale; 2], s.sub(s.splat(0.0), minimum))
}

impl Format for Q4_0 {
    const LAYOUT: Layout = Layout::of(DType::Q4_0);
    #[inline(always)]
    fn scales<S: Simd>(s: S, group: Group<'_>, i: usize) -> ([S::F; 2], S::F) {
        one_scale(s, group, i)
    }
}

impl Format for Q4_1 {
    const LAYOUT: Layout = Layout::of(DType::Q4_1);
    const HAS_MINIMUM: bool = true;
    #[inline(always)]
    fn scales<S: Simd>(s: S, group: Group<'_>, i: usize) -> ([S::F; 2], S::F) {
        let params = &group.params[i * 2..][..2];
        ([s.load_f16(&params[0].0); 2], s.load_f16(&params[1].0))
    }
}

impl Format for Q8_0 {
    const LAYOUT: Layout = Layout::of(DType::Q8_0);
    #[inline(always)]
    fn unpack<S: Simd>(s: S, lines: &[Line]) -> [S::B; 8] {
        let mut v = [s.load_line(&lines[0]); 8];
        for (v, line) in v.iter_mut().zip(lines) {
            *v = s.load_line(line);
        }
        v
    }
    #[inline(always)]
    fn scales<S: Simd>(s: S, group: Group<'_>, i: usize) -> ([S::F; 2], S::F) {
        one_scale(s, group, i)
    }
    #[inline(always)]
    fn dot<S: Simd>(s: S, acc: S::I, w: S::B, x: i32) -> S::I {
        s.dot_bytes(acc, w, x)
    }
}

impl Format for Q4K {
    const LAYOUT: Layout = Layout::of(DType::Q4K);
    const HAS_MINIMUM: bool = true;
    #[inline(always)]
    fn scales<S: Simd>(s: S, group: Group<'_>, i: usize) -> ([S::F; 2], S::F) {
        factored_scale(s, group, i)
    }
}

impl Format for Q5K {
    const LAYOUT: Layout = Layout::of(DType::Q5K);
    const HAS_MINIMUM: bool = true;
    #[inline(always)]
    fn unpack<S: Simd>(s: S, lines: &[Line]) -> [S::B; 8] {
        let (mut v, plane) = (unpack_nibbles(s, lines), s.load_line(&lines[4]));
        unroll!(S, i < 8, v[i] = s.or_bits(v[i], plane, 4 - i as i32, 0x10));
        v
    }
    #[inline(always)]
    fn scales<S: Simd>(s: S, group: Group<'_>, i: usize) -> ([S::F; 2], S::F) {
        factored_scale(s, group, i)
    }
}

impl Format for Q6K {
    const LAYOUT: Layout = Layout::of(DType::Q6K);
    const N_SCALES: usize = 2;
    #[inline(always)]
    fn unpack<S: Simd>(s: S, lines: &[Line]) -> [S::B; 8] {
        let planes = [s.load_line(&lines[4]), s.load_line(&lines[5])];
        let mut v = unpack_nibbles(s, lines);
        unroll!(S, i < 8, v[i] = s.or_bits(v[i], planes[i / 4], 4 - 2 * (i % 4) as i32, 0x30));
        v
    }
    #[inline(always)]
    fn scales<S: Simd>(s: S, group: Group<'_>, i: usize) -> ([S::F; 2], S::F) {
        let scale = s.load_f16(&group.params[i / 8].0);
        let factors = &group.factors[i * 2..][..2];
        ([s.mul(scale, s.load_i8(&factors[0])), s.mul(scale, s.load_i8(&factors[1]))], scale)
    }
}

#[inline(always)]
fn quantized<S: Simd, F: Format>(s: S, share: &Share<'_>, part: &Part, w: &Blocks, groups: Range<usize>) {
    let n_blocks = share.linear.n_in / BLOCK_LEN;
    let n_lines = n_blocks * F::LAYOUT.n_lines;
    let n_params = n_blocks / F::LAYOUT.span * F::LAYOUT.n_params;
    let n_factors = n_blocks * F::LAYOUT.n_factors;
    let tokens: Vec<&[QuantBlock]> = share.input.blocks.chunks_exact(n_blocks).collect();
    let n_fitting = SLAB_BYTES / (n_blocks * size_of::<QuantBlock>());
    let slab_tokens = part_tokens(tokens.len(), n_fitting.clamp(2 * WIDEST_TILE, MAX_SLAB_TOKENS));
    for (slab, tokens) in tokens.chunks(slab_tokens).enumerate() {
        let tiles = arranged::<S, F>(tokens, n_blocks);
        for group in groups.clone() {
            let weights = Group {
                lines: &w.lines[group * n_lines..][..n_lines],
                params: &w.params[group * n_params..][..n_params],
                factors: &w.factors[group * n_factors..][..n_factors],
            };
            let mut place = Place { share, part, group, token: slab * slab_tokens };
            let (mut tiles, mut n_left) = (&tiles[..], tokens.len());
            while n_left > 0 {
                let n_tile = tile_len::<S, F>(n_left);
                let (tile, others) = tiles.split_at(n_tile * n_blocks);
                quantized_tile_of::<S, F>(s, weights, n_tile, tile, &mut place);
                (tiles, n_left) = (others, n_left - n_tile);
            }
        }
    }
}

/// Tokens of the next tile when `n_left` are left: all below 8 share a pass over the weights, if there are registers.
#[inline(always)]
fn tile_len<S: Simd, F: Format>(n_left: usize) -> usize {
    match n_left {
        WIDEST_TILE.. if S::N_REGISTERS == 32 => F::MAX_TILE,
        _ if S::N_REGISTERS == 32 => n_left.min(8),
        0..4 => 1,
        _ => 4,
    }
}

/// The activations of `tokens` in the order in which they are read: `[tile][block][token of the tile]`.
#[inline(always)]
fn arranged<S: Simd, F: Format>(tokens: &[&[QuantBlock]], n_blocks: usize) -> Vec<QuantBlock> {
    let mut arranged = Vec::with_capacity(tokens.len() * n_blocks);
    let mut left = tokens;
    while !left.is_empty() {
        let (tile, others) = left.split_at(tile_len::<S, F>(left.len()));
        (0..n_blocks).for_each(|i| arranged.extend(tile.iter().map(|token| token[i])));
        left = others;
    }
    arranged
}

#[inline(always)]
fn quantized_tile_of<S: Simd, F: Format>(
    s: S,
    w: Group<'_>,
    n_tokens: usize,
    x: &[QuantBlock],
    place: &mut Place<'_>,
) {
    if S::N_REGISTERS < 32 {
        return match n_tokens {
            4 => place.write(s, quantized_tile::<S, F, 4>(s, w, x)),
            _ => place.write(s, quantized_tile::<S, F, 1>(s, w, x)),
        };
    }
    match n_tokens {
        1 => place.write(s, quantized_tile::<S, F, 1>(s, w, x)),
        2 => place.write(s, quantized_tile::<S, F, 2>(s, w, x)),
        3 => place.write(s, quantized_tile::<S, F, 3>(s, w, x)),
        4 => place.write(s, quantized_tile::<S, F, 4>(s, w, x)),
        5 => place.write(s, quantized_tile::<S, F, 5>(s, w, x)),
        6 => place.write(s, quantized_tile::<S, F, 6>(s, w, x)),
        7 => place.write(s, quantized_tile::<S, F, 7>(s, w, x)),
        8 => place.write(s, quantized_tile::<S, F, 8>(s, w, x)),
        _ => place.write(s, quantized_tile::<S, F, WIDEST_TILE>(s, w, x)),
    }
}

/// The weights of 16 rows.
#[derive(Clone, Copy)]
struct Group<'a> {
    lines: &'a [Line],
    params: &'a [Halves],
    factors: &'a [[i8; LANES]],
}

/// 16 rows times `T` tokens; the order of additions per token is the same for every `T`.
#[inline(always)]
fn quantized_tile<S: Simd, F: Format, const T: usize>(
    s: S,
    weights: Group<'_>,
    x: &[QuantBlock],
) -> [S::F; T] {
    let mut acc = [s.splat(0.0); T];
    let blocks = weights.lines.chunks_exact(F::LAYOUT.n_lines).zip(x.as_chunks::<T>().0);
    for (i, (lines, x)) in blocks.enumerate() {
        let w = F::unpack(s, lines);
        let (scales, minimum) = F::scales(s, weights, i);
        // All dot products first, then all sums: 3041 tok/s of prefill where token after token gave 2445.
        if F::N_SCALES == 1 {
            let mut dots = [s.splat_i32(0); T];
            unroll!(S, t < T, dots[t] = s.splat_i32(F::excess(x[t].excess[0] + x[t].excess[1])));
            unroll!(S, k < 8, unroll!(S, t < T, dots[t] = F::dot(s, dots[t], w[k], x[t].words[k])));
            unroll!(
                S,
                t < T,
                acc[t] = s.fma(s.to_f32(dots[t]), s.mul(scales[0], s.splat(x[t].scale)), acc[t])
            );
        } else {
            let low = half_block::<S, F, T>(s, [w[0], w[1], w[2], w[3]], 0, x);
            let low: [S::F; T] = low.map(|dot| s.mul(s.to_f32(dot), scales[0]));
            let high = half_block::<S, F, T>(s, [w[4], w[5], w[6], w[7]], 1, x);
            unroll!(
                S,
                t < T,
                acc[t] = s.fma(s.fma(s.to_f32(high[t]), scales[1], low[t]), s.splat(x[t].scale), acc[t])
            );
        }
        if F::HAS_MINIMUM {
            unroll!(S, t < T, acc[t] = s.fma(minimum, s.splat(x[t].scaled_sum), acc[t]));
        }
    }
    acc
}

/// The dot products of 16 inputs, which have a scale of their own.
#[inline(always)]
fn half_block<S: Simd, F: Format, const T: usize>(
    s: S,
    w: [S::B; 4],
    half: usize,
    x: &[QuantBlock; T],
) -> [S::I; T] {
    let mut dots = [s.splat_i32(0); T];
    unroll!(S, t < T, dots[t] = s.splat_i32(F::excess(x[t].excess[half])));
    unroll!(S, k < 4, unroll!(S, t < T, dots[t] = F::dot(s, dots[t], w[k], x[t].words[4 * half + k])));
    dots
}

/// A weight that is a number by itself.
trait Plain: Sized {
    fn load<S: Simd>(s: S, from: &[Self; LANES]) -> S::F;
}

impl Plain for f32 {
    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[Self; LANES]) -> S::F {
        s.load(from)
    }
}

impl Plain for f16 {
    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[Self; LANES]) -> S::F {
        s.load_f16(from)
    }
}

impl Plain for bf16 {
    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[Self; LANES]) -> S::F {
        s.load_bf16(from)
    }
}

#[inline(always)]
fn plain<S: Simd, P: Plain>(s: S, share: &Share<'_>, part: &Part, w: &[[P; LANES]], groups: Range<usize>) {
    let n_in = share.linear.n_in;
    let tokens: Vec<&[f32]> = share.input.plain.chunks_exact(n_in).collect();
    for group in groups {
        let weights = &w[group * n_in..][..n_in];
        let mut place = Place { share, part, group, token: 0 };
        let (fours, rest) = tokens.as_chunks::<4>();
        for tile in fours {
            place.write(s, plain_tile(s, weights, tile));
        }
        for tile in rest.as_chunks::<1>().0 {
            place.write(s, plain_tile(s, weights, tile));
        }
    }
}

#[inline(always)]
fn plain_tile<S: Simd, P: Plain, const T: usize>(
    s: S,
    weights: &[[P; LANES]],
    tokens: &[&[f32]; T],
) -> [S::F; T] {
    let mut acc = [s.splat(0.0); T];
    for (i, w) in weights.iter().enumerate() {
        let w = P::load(s, w);
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

//! The two forms of stored keys and values: how a vector is written into a tile, and how 16 numbers are read.

use half::{bf16, f16, slice::HalfBitsSliceExt};

use crate::simd::{LANES, Simd};

/// A form; a tile is K or V of one block, layer and KV head, as 16-bit words.
pub(super) trait Stored: Copy {
    type Number: Copy;
    /// Whether numbers are multiplied by their token's scale.
    const HAS_SCALES: bool;

    /// All numbers of a tile, 16 at a time.
    fn numbers(tile: &[u16]) -> &[[Self::Number; LANES]];
    fn load<S: Simd>(s: S, from: &[Self::Number; LANES]) -> S::F;
    /// The scales of the tile's 16 tokens.
    fn scales<S: Simd>(s: S, tile: &[u16]) -> S::F;
    /// Writes the key `x`, `[head_dim]`, of the token in `slot` into `tile`, `[head_dim][16 tokens]`.
    fn put_key<S: Simd>(s: S, x: &[f32], slot: usize, tile: &mut [u16]);
    /// Writes the value `x`, `[head_dim]`, of the token in `slot` into `tile`, `[16 tokens][head_dim]`.
    fn put_value<S: Simd>(s: S, x: &[f32], slot: usize, tile: &mut [u16]);
}

/// Half precision.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoredF16;

impl Stored for StoredF16 {
    type Number = f16;
    const HAS_SCALES: bool = false;

    #[inline(always)]
    fn numbers(tile: &[u16]) -> &[[f16; LANES]] {
        tile.reinterpret_cast::<f16>().as_chunks().0
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[f16; LANES]) -> S::F {
        s.load_f16(from)
    }
    #[inline(always)]
    fn scales<S: Simd>(s: S, _tile: &[u16]) -> S::F {
        s.splat(1.0)
    }
    #[inline(always)]
    fn put_key<S: Simd>(s: S, x: &[f32], slot: usize, tile: &mut [u16]) {
        let by_dim = tile.reinterpret_cast_mut::<f16>().as_chunks_mut::<LANES>().0;
        for (x, tokens) in x.as_chunks().0.iter().zip(by_dim.chunks_exact_mut(LANES)) {
            let halves = to_f16(s, x);
            tokens.iter_mut().zip(halves).for_each(|(tokens, x)| tokens[slot] = x);
        }
    }
    #[inline(always)]
    fn put_value<S: Simd>(s: S, x: &[f32], slot: usize, tile: &mut [u16]) {
        let row = &mut tile.reinterpret_cast_mut::<f16>()[slot * x.len()..][..x.len()];
        for (x, out) in x.as_chunks().0.iter().zip(row.as_chunks_mut().0) {
            *out = to_f16(s, x);
        }
    }
}

/// Rounds to f16, cutting to its finite range: an infinity would spoil even queries that give it weight zero.
#[inline(always)]
fn to_f16<S: Simd>(s: S, x: &[f32; LANES]) -> [f16; LANES] {
    let mut halves = [f16::ZERO; LANES];
    s.store_f16(cut(s, x), &mut halves);
    halves
}

/// `x`, cut to the finite range of f16.
#[inline(always)]
fn cut<S: Simd>(s: S, x: &[f32; LANES]) -> S::F {
    let limit = f16::MAX.to_f32();
    s.max(s.min(s.load(x), s.splat(limit)), s.splat(-limit))
}

/// Signed bytes, then 16 bf16 scales.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoredI8;

impl Stored for StoredI8 {
    type Number = i8;
    const HAS_SCALES: bool = true;

    #[inline(always)]
    fn numbers(tile: &[u16]) -> &[[i8; LANES]] {
        let words = &tile[..tile.len() - LANES];
        // SAFETY: the same memory, and every bit pattern is a valid i8.
        let bytes = unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<i8>(), 2 * words.len()) };
        bytes.as_chunks().0
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[i8; LANES]) -> S::F {
        s.load_i8(from)
    }
    #[inline(always)]
    fn scales<S: Simd>(s: S, tile: &[u16]) -> S::F {
        let scales = tile.last_chunk::<LANES>().expect("a tile ends with its scales");
        s.load_bf16(&scales.map(bf16::from_bits))
    }
    #[inline(always)]
    fn put_key<S: Simd>(s: S, x: &[f32], slot: usize, tile: &mut [u16]) {
        let inverse = put_scale(s, x, slot, tile);
        let by_dim = bytes_mut(tile).as_chunks_mut::<LANES>().0;
        for (x, tokens) in x.as_chunks().0.iter().zip(by_dim.chunks_exact_mut(LANES)) {
            let bytes = s.to_i8(s.mul(cut(s, x), inverse));
            tokens.iter_mut().zip(bytes).for_each(|(tokens, x)| tokens[slot] = x);
        }
    }
    #[inline(always)]
    fn put_value<S: Simd>(s: S, x: &[f32], slot: usize, tile: &mut [u16]) {
        let inverse = put_scale(s, x, slot, tile);
        let row = &mut bytes_mut(tile)[slot * x.len()..][..x.len()];
        for (x, out) in x.as_chunks().0.iter().zip(row.as_chunks_mut().0) {
            *out = s.to_i8(s.mul(cut(s, x), inverse));
        }
    }
}

/// Stores the scale of `x` and returns what to multiply it with. The scale is rounded up, so that no number exceeds
/// 127 scales.
#[inline(always)]
fn put_scale<S: Simd>(s: S, x: &[f32], slot: usize, tile: &mut [u16]) -> S::F {
    let mut peak = s.splat(0.0);
    for x in x.as_chunks().0 {
        let x = cut(s, x);
        peak = s.max(peak, s.max(x, s.sub(s.splat(0.0), x)));
    }
    let bits = (s.highest(peak) / 127.0).to_bits();
    let scale = bf16::from_bits((bits.saturating_add(0xFFFF) >> 16) as u16);
    let scales_at = tile.len() - LANES;
    tile[scales_at + slot] = scale.to_bits();
    s.splat(if bits > 0 { 1.0 / scale.to_f32() } else { 0.0 })
}

/// The bytes of a tile, without its scales.
#[inline(always)]
fn bytes_mut(tile: &mut [u16]) -> &mut [i8] {
    let n_words = tile.len() - LANES;
    let words = &mut tile[..n_words];
    // SAFETY: the same memory, borrowed for as long, and every bit pattern is valid in both types.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<i8>(), 2 * n_words) }
}

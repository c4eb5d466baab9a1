//! Linear layers: weights packed for the vector units, and the product with a batch of tokens.
//!
//! ```text
//!  group of 16 rows, 32 inputs:   row0: i0 i1 i2 i3 | row1: i0 i1 i2 i3 | ... | row15: i0 i1 i2 i3    <- one Line
//!                                 row0: i4 i5 i6 i7 | ...
//! ```
//! A lane is a row, so there is no horizontal sum; an activation is a broadcast 4-byte word. Packing is a lossless
//! permutation of the file's data (engine.md, section 5a). Activations are rounded to 8 bits per 32 inputs.
//!
//! Batch invariance: every token has its own accumulator and the inputs are added in file order, so the result for
//! a token does not depend on its neighbours, on chunking or on the number of threads, bit for bit.

use std::ops::Range;

use half::f16;

use crate::{
    isa::{Isa, Op},
    pool::{SharedMut, ThreadPool},
    quant::{self, DType},
    simd::{LANES, Simd},
    table::Zero,
};

mod pack;
mod product;
#[cfg(test)]
mod tests;

use pack::Packed;

/// Inputs that share one activation scale; also the block length of the 4-bit and 8-bit weight types.
pub const BLOCK_LEN: usize = 32;

/// Tokens that one pass over a group's weights serves at most, where there are 32 registers.
const WIDEST_TILE: usize = 12;

/// How many of `n_tokens` are worked on together when `most` of them, about, fit a cache: parts of the same length, as each
/// reads all weights, and of whole tiles. At least one tile.
pub fn part_tokens(n_tokens: usize, most: usize) -> usize {
    let n_parts = n_tokens.div_ceil(most).max(1);
    n_tokens.div_ceil(n_parts).next_multiple_of(WIDEST_TILE).max(WIDEST_TILE)
}

/// Why weights cannot become a layer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Quant(#[from] quant::Error),
    /// The inner loops work on whole activation blocks.
    #[error("a row has {0} inputs; it must be a positive multiple of {BLOCK_LEN}")]
    Inputs(usize),
    #[error("a row has {n_in} inputs, which is not a whole number of {dtype:?} blocks")]
    Blocks { dtype: DType, n_in: usize },
}

/// One weight matrix `[n_rows][n_in]` as it lies in a file.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    pub dtype: DType,
    pub n_rows: usize,
    pub bytes: &'a [u8],
}

/// A packed weight matrix, or several that share their input, stacked: `[n_out][n_in]`.
#[derive(Debug)]
pub struct Linear {
    n_in: usize,
    n_out: usize,
    parts: Vec<Part>,
}

/// The rows of one source; its groups are padded with zero rows.
#[derive(Debug)]
struct Part {
    first_row: usize,
    n_rows: usize,
    packed: Packed,
}

/// 32 activations: value = scale x byte.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, align(16))]
pub struct QuantBlock {
    /// The bytes, four to a little-endian word.
    words: [i32; 8],
    scale: f32,
    /// -32 x the sum of the bytes, per half: what weights that are stored with 32 added have too much.
    excess: [i32; 2],
    /// scale x sum of all bytes.
    scaled_sum: f32,
}

/// A batch of layer inputs in both forms; the weights' type decides which one is read.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// `[n_tokens][n_in]`.
    pub plain: &'a [f32],
    /// `[n_tokens][n_in / 32]`, from [`quantize`].
    pub blocks: &'a [QuantBlock],
}

/// What happens to the old content of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    Replace,
    Add,
}

impl Linear {
    /// Packs `sources`, stacked in order, every one with rows of `n_in` weights.
    pub fn pack(sources: &[Source<'_>], n_in: usize, pool: &ThreadPool) -> Result<Self, Error> {
        if n_in == 0 || !n_in.is_multiple_of(BLOCK_LEN) {
            return Err(Error::Inputs(n_in));
        }
        let mut linear = Self { n_in, n_out: 0, parts: Vec::with_capacity(sources.len()) };
        for source in sources {
            let packed = Packed::new(source, n_in, pool)?;
            linear.parts.push(Part { first_row: linear.n_out, n_rows: source.n_rows, packed });
            linear.n_out += source.n_rows;
        }
        Ok(linear)
    }

    /// Inputs per token.
    pub fn n_in(&self) -> usize {
        self.n_in
    }

    /// Outputs per token.
    pub fn n_out(&self) -> usize {
        self.n_out
    }

    /// Memory of the packed weights.
    pub fn n_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.packed.n_bytes()).sum()
    }

    /// The weights of one row, decoded: `out` is `[n_in]`. Exactly what [`quant::dequantize`] makes of the file.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.n_in, "a row has n_in weights");
        let covers = |part: &&Part| (part.first_row..part.first_row + part.n_rows).contains(&row);
        let part = self.parts.iter().find(covers).expect("the row exists");
        part.packed.row(row - part.first_row, out);
    }

    /// The product with every token of `input`: `out` is `[n_tokens][n_out]`.
    pub fn forward(&self, pool: &ThreadPool, isa: Isa, input: Input<'_>, write: Write, out: &mut [f32]) {
        let n_tokens = out.len() / self.n_out;
        assert_eq!(out.len(), n_tokens * self.n_out, "whole tokens of output");
        assert_eq!(input.plain.len(), n_tokens * self.n_in, "plain input of every token");
        assert_eq!(input.blocks.len() * BLOCK_LEN, n_tokens * self.n_in, "quantized input of every token");
        let n_groups: usize = self.parts.iter().map(Part::n_groups).sum();
        let out = SharedMut::new(out);
        pool.run(|thread_idx, n_threads| {
            let groups = thread_idx * n_groups / n_threads..(thread_idx + 1) * n_groups / n_threads;
            isa.run(Share { linear: self, input, write, groups, out: &out });
        });
    }
}

impl Part {
    fn n_groups(&self) -> usize {
        self.n_rows.div_ceil(LANES)
    }
}

/// One thread's groups of a product; groups are counted over all parts.
struct Share<'a> {
    linear: &'a Linear,
    input: Input<'a>,
    write: Write,
    groups: Range<usize>,
    out: &'a SharedMut<'a, f32>,
}

impl Op for Share<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, simd: S) {
        let mut first_group = 0;
        for part in &self.linear.parts {
            let end = first_group + part.n_groups();
            let wanted = self.groups.start.max(first_group)..self.groups.end.min(end);
            if !wanted.is_empty() {
                product::run(simd, &self, part, wanted.start - first_group..wanted.end - first_group);
            }
            first_group = end;
        }
    }
}

/// Rounds one token's activations to 8 bits per 32: `out` is `[plain.len() / 32]`.
pub fn quantize(isa: Isa, plain: &[f32], out: &mut [QuantBlock]) {
    assert_eq!(plain.len(), out.len() * BLOCK_LEN, "whole blocks");
    isa.run(Quantize { plain, out });
}

struct Quantize<'a> {
    plain: &'a [f32],
    out: &'a mut [QuantBlock],
}

impl Op for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        for (x, out) in self.plain.as_chunks::<BLOCK_LEN>().0.iter().zip(self.out) {
            let halves = x.as_chunks::<LANES>().0;
            let (low, high) = (s.load(&halves[0]), s.load(&halves[1]));
            let top = s.max(low, high);
            let bottom = s.min(low, high);
            let peak = s.highest(s.max(top, s.sub(s.splat(0.0), bottom)));
            let inverse = s.splat(if peak > 0.0 { 127.0 / peak } else { 0.0 });
            let halves = [s.to_i8(s.mul(low, inverse)), s.to_i8(s.mul(high, inverse))];
            let bytes = halves.as_flattened();
            for (word, b) in out.words.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *word = i32::from_le_bytes(b.map(i8::cast_unsigned));
            }
            out.scale = peak / 127.0;
            let sums = halves.map(|half| s.sum_i8(&half));
            out.excess = sums.map(|sum| -32 * sum);
            out.scaled_sum = out.scale * (sums[0] + sums[1]) as f32;
        }
    }
}

/// 16 half-precision numbers, one per row of a group.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(32))]
struct Halves([f16; LANES]);

// SAFETY: halves of zero bits are zero; the alignment is 32.
unsafe impl Zero for Halves {}

//! The packed forms of a weight matrix, how they are made, and how a row is read back.

use half::{bf16, f16};

use super::{BLOCK_LEN, Error, Halves, Source};
use crate::{
    pool::ThreadPool,
    quant::{self, DType, f16_at, k_codes, k_factors},
    simd::{LANES, Line},
    table::{Table, Zero},
};

/// A packed matrix; the first index of every array is the group of 16 rows.
#[derive(Debug)]
pub(super) enum Packed {
    Blocks(DType, Blocks),
    /// `[group][input][row]`.
    F32(Table<[f32; LANES]>),
    F16(Table<[f16; LANES]>),
    BF16(Table<[bf16; LANES]>),
}

/// Weights that share scales; see [`Layout`].
#[derive(Debug)]
pub(super) struct Blocks {
    /// `[group][block][n_lines]`.
    pub(super) lines: Table<Line>,
    /// `[group][block / span][n_params]`: scale, then perhaps minimum.
    pub(super) params: Table<Halves>,
    /// `[group][block][n_factors]`: of the scale, then of the minimum or of the scale's second half.
    pub(super) factors: Table<[i8; LANES]>,
}

/// How a block of 32 inputs and 16 rows lies in memory. A number's lowest four bits are in a nibble of lines 0..4:
/// low halves of line i hold inputs 8i..8i+4, high halves 8i+4..8i+8. Higher bits follow in planes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) n_lines: usize,
    /// Per `span` blocks.
    pub(super) n_params: usize,
    /// Blocks that share parameters.
    pub(super) span: usize,
    pub(super) n_factors: usize,
    /// A stored number is the weight, in units of its scale, plus this.
    pub(super) offset: u8,
}

impl Layout {
    /// Of a type whose weights share scales.
    pub(super) const fn of(dtype: DType) -> Self {
        let simple = Self { n_lines: 4, n_params: 1, span: 1, n_factors: 0, offset: 0 };
        match dtype {
            DType::Q4_0 => Self { offset: 8, ..simple },
            DType::Q4_1 => Self { n_params: 2, ..simple },
            // Whole bytes: line i holds inputs 4i..4i+4.
            DType::Q8_0 => Self { n_lines: 8, offset: 128, ..simple },
            DType::Q4K => Self { n_params: 2, span: 8, n_factors: 2, ..simple },
            // Line 4: bit i of a byte belongs to input 4i + byte.
            DType::Q5K => Self { n_lines: 5, n_params: 2, span: 8, n_factors: 2, ..simple },
            // Lines 4 and 5: bits 2i and 2i + 1 of a byte belong to input 4i + byte of half the block.
            DType::Q6K => Self { n_lines: 6, n_params: 1, span: 8, n_factors: 2, offset: 32 },
            DType::F32 | DType::F16 | DType::BF16 => panic!("no blocks"),
        }
    }
}

impl Packed {
    pub(super) fn new(source: &Source<'_>, n_in: usize, pool: &ThreadPool) -> Result<Self, Error> {
        let Source { dtype, n_rows, bytes } = *source;
        let elements = n_rows.saturating_mul(n_in);
        if !n_in.is_multiple_of(dtype.block_len()) {
            return Err(Error::Blocks { dtype, n_in });
        }
        if dtype.bytes_for(elements) != Some(bytes.len()) {
            return Err(quant::Error::Length { dtype, elements, bytes: bytes.len() }.into());
        }
        let rows = Rows { dtype, bytes, n_rows, n_in };
        Ok(match dtype {
            DType::F32 => Self::F32(rows.pack_plain(|b| f32::from_le_bytes(*b))),
            DType::F16 => Self::F16(rows.pack_plain(|b| f16::from_le_bytes(*b))),
            DType::BF16 => Self::BF16(rows.pack_plain(|b| bf16::from_le_bytes(*b))),
            _ => Self::Blocks(dtype, rows.pack_blocks(pool)),
        })
    }

    pub(super) fn n_bytes(&self) -> usize {
        match self {
            Self::Blocks(_, b) => {
                size_of_val(&b.lines[..]) + size_of_val(&b.params[..]) + size_of_val(&b.factors[..])
            }
            Self::F32(w) => size_of_val(&w[..]),
            Self::F16(w) => size_of_val(&w[..]),
            Self::BF16(w) => size_of_val(&w[..]),
        }
    }

    /// Decodes one row into `out`, `[n_in]`.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        let (group, lane) = (row / LANES, row % LANES);
        let inputs = group * out.len()..(group + 1) * out.len();
        match self {
            Self::Blocks(dtype, blocks) => blocks.row(*dtype, group, lane, out),
            Self::F32(w) => out.iter_mut().zip(&w[inputs]).for_each(|(o, w)| *o = w[lane]),
            Self::F16(w) => out.iter_mut().zip(&w[inputs]).for_each(|(o, w)| *o = w[lane].to_f32()),
            Self::BF16(w) => out.iter_mut().zip(&w[inputs]).for_each(|(o, w)| *o = w[lane].to_f32()),
        }
    }
}

impl Blocks {
    fn row(&self, dtype: DType, group: usize, lane: usize, out: &mut [f32]) {
        let layout = Layout::of(dtype);
        let first = group * (out.len() / BLOCK_LEN);
        for (block, out) in (first..).zip(out.chunks_exact_mut(BLOCK_LEN)) {
            let lines = &self.lines[block * layout.n_lines..][..layout.n_lines];
            let params = &self.params[block / layout.span * layout.n_params..][..layout.n_params];
            let factors = &self.factors[block * layout.n_factors..][..layout.n_factors];
            let param = |i: usize| params[i].0[lane].to_f32();
            let factor = |i: usize| f32::from(factors[i][lane]);
            for (k, out) in out.iter_mut().enumerate() {
                let code = f32::from(code_at(layout.n_lines, lines, lane, k));
                *out = match dtype {
                    DType::Q4_1 => param(0) * code + param(1),
                    DType::Q4K | DType::Q5K => param(0) * factor(0) * code - param(1) * factor(1),
                    DType::Q6K => param(0) * factor(k / 16) * (code - 32.0),
                    _ => param(0) * (code - f32::from(layout.offset)),
                };
            }
        }
    }
}

/// The stored number of input `k` of a block, in the lane of one row.
fn code_at(n_lines: usize, lines: &[Line], lane: usize, k: usize) -> u8 {
    let (register, byte) = (k / 4, 4 * lane + k % 4);
    let bits = |line: usize, shift: usize, mask: u8| (lines[line].0[byte] >> shift) & mask;
    if n_lines == 8 {
        return bits(register, 0, 255);
    }
    let low = bits(register / 2, register % 2 * 4, 15);
    match n_lines {
        5 => low | bits(4, register, 1) << 4,
        6 => low | bits(4 + register / 4, register % 4 * 2, 3) << 4,
        _ => low,
    }
}

/// Writes what [`code_at`] reads; the lines were zero.
fn put_code(lines: &mut [Line], lane: usize, k: usize, code: u8) {
    let (register, byte) = (k / 4, 4 * lane + k % 4);
    let n_lines = lines.len();
    let mut put = |line: usize, shift: usize, bits: u8| lines[line].0[byte] |= bits << shift;
    if n_lines == 8 {
        return put(register, 0, code);
    }
    put(register / 2, register % 2 * 4, code & 15);
    match n_lines {
        5 => put(4, register, code >> 4),
        6 => put(4 + register / 4, register % 4 * 2, code >> 4),
        _ => {}
    }
}

/// A source together with its row length.
struct Rows<'a> {
    dtype: DType,
    bytes: &'a [u8],
    n_rows: usize,
    n_in: usize,
}

/// The part of [`Blocks`] that one row of file blocks goes to.
struct Target<'a> {
    lines: &'a mut [Line],
    params: &'a mut [Halves],
    factors: &'a mut [[i8; LANES]],
}

impl Rows<'_> {
    /// Permutes a type with scales.
    fn pack_blocks(&self, pool: &ThreadPool) -> Blocks {
        let layout = Layout::of(self.dtype);
        let n_groups = self.n_rows.div_ceil(LANES);
        let n_blocks = self.n_in / BLOCK_LEN;
        let n_lines = n_blocks * layout.n_lines;
        let n_params = n_blocks / layout.span * layout.n_params;
        let n_factors = n_blocks * layout.n_factors;
        let mut blocks = Blocks {
            lines: Table::zeroed(n_groups * n_lines),
            params: Table::zeroed(n_groups * n_params),
            factors: Table::zeroed(n_groups * n_factors),
        };
        let mut factors = &mut blocks.factors[..];
        let groups = blocks.lines.chunks_mut(n_lines).zip(blocks.params.chunks_mut(n_params));
        let targets = groups.map(|(lines, params)| Target {
            lines,
            params,
            factors: factors.split_off_mut(..n_factors).expect("factors of every group"),
        });
        let mut parts: Vec<_> = targets.enumerate().collect();
        pool.each(&mut parts, |(group, target)| {
            let first_row = *group * LANES;
            for row in first_row..self.n_rows.min(first_row + LANES) {
                self.pack_row(row, row - first_row, layout, target);
            }
        });
        blocks
    }

    /// Puts one row into its lane.
    fn pack_row(&self, row: usize, lane: usize, layout: Layout, target: &mut Target<'_>) {
        let block_bytes = self.dtype.block_bytes();
        let n_file_blocks = self.n_in / self.dtype.block_len();
        let row_bytes = &self.bytes[row * n_file_blocks * block_bytes..][..n_file_blocks * block_bytes];
        for (i, bytes) in row_bytes.chunks_exact(block_bytes).enumerate() {
            let codes = codes(self.dtype, bytes);
            for (block, codes) in (i * layout.span..).zip(codes[..self.dtype.block_len()].chunks(BLOCK_LEN)) {
                let lines = &mut target.lines[block * layout.n_lines..][..layout.n_lines];
                codes.iter().enumerate().for_each(|(k, &code)| put_code(lines, lane, k, code));
                let factors = &mut target.factors[block * layout.n_factors..][..layout.n_factors];
                let found = factors_of(self.dtype, bytes, block % layout.span);
                factors.iter_mut().zip(found).for_each(|(to, factor)| to[lane] = factor);
            }
            let params_at = if self.dtype == DType::Q6K { 208 } else { 0 };
            let params = &mut target.params[i * layout.n_params..][..layout.n_params];
            for (p, param) in params.iter_mut().enumerate() {
                param.0[lane] = f16_at(bytes, params_at + 2 * p);
            }
        }
    }

    /// Permutes numbers of `N` bytes.
    fn pack_plain<const N: usize, T: Zero>(&self, read: impl Fn(&[u8; N]) -> T) -> Table<[T; LANES]> {
        let mut packed: Table<[T; LANES]> = Table::zeroed(self.n_rows.div_ceil(LANES) * self.n_in);
        for (row, bytes) in self.bytes.chunks_exact(self.n_in * N).enumerate() {
            let inputs = &mut packed[row / LANES * self.n_in..][..self.n_in];
            for (lanes, bytes) in inputs.iter_mut().zip(bytes.as_chunks().0) {
                lanes[row % LANES] = read(bytes);
            }
        }
        packed
    }
}

/// The stored numbers of a file block, unsigned; only the first `block_len` count.
fn codes(dtype: DType, block: &[u8]) -> [u8; 256] {
    let mut codes = [0; 256];
    match dtype {
        DType::Q8_0 => codes.iter_mut().zip(&block[2..]).for_each(|(code, b)| *code = b ^ 0x80),
        DType::Q4_0 | DType::Q4_1 => {
            // Byte i of 16 holds inputs i (low half) and i + 16 (high half).
            let weights = &block[dtype.block_bytes() - 16..];
            (0..32).for_each(|k| codes[k] = (weights[k % 16] >> (k / 16 * 4)) & 15);
        }
        _ => return k_codes(dtype, block),
    }
    codes
}

/// The factors of the `i`-th 32 weights of a file block; all are below 64 or signed in the file.
fn factors_of(dtype: DType, block: &[u8], i: usize) -> [i8; 2] {
    match dtype {
        DType::Q4K | DType::Q5K => {
            let (scale, min) = k_factors(&block[4..16], i);
            [scale.cast_signed(), min.cast_signed()]
        }
        DType::Q6K => [block[192 + 2 * i].cast_signed(), block[193 + 2 * i].cast_signed()],
        _ => [0; 2],
    }
}

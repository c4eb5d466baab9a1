//! The packed forms of a weight matrix, how they are made, and how a row is read back.

use half::f16;

use super::{BLOCK_LEN, Error, Halves, Source};
use crate::{
    pool::ThreadPool,
    quant::{self, DType, f16_at},
    simd::{LANES, Line},
};

/// A packed matrix; the first index of every array is the group of 16 rows.
#[derive(Debug)]
pub(super) enum Packed {
    /// Q4_1: `lines[group][block][4]`, low halves hold inputs 8i..8i+4 of line i, high halves 8i+4..8i+8;
    /// `params[group][block][scale, minimum]`.
    Nibbles4_1(Blocks),
    /// Q4_0: the same, without minimum; value = scale x (nibble - 8).
    Nibbles4_0(Blocks),
    /// Q8_0: `lines[group][block][8]`, bytes are the weight + 128; `params[group][block][scale]`.
    Bytes(Blocks),
    /// F32, and F16 and BF16 widened: `[group][input][row]`.
    Dense(Vec<[f32; LANES]>),
}

#[derive(Debug)]
pub(super) struct Blocks {
    pub(super) lines: Vec<Line>,
    pub(super) params: Vec<Halves>,
}

impl Packed {
    pub(super) fn new(source: &Source<'_>, n_in: usize, pool: &ThreadPool) -> Result<Self, Error> {
        let Source { dtype, n_rows, bytes } = *source;
        let elements = n_rows.saturating_mul(n_in);
        if dtype.bytes_for(elements) != Some(bytes.len()) {
            return Err(quant::Error::Length { dtype, elements, bytes: bytes.len() }.into());
        }
        let rows = Rows { dtype, bytes, n_rows, n_in };
        Ok(match dtype {
            DType::Q4_1 => Self::Nibbles4_1(rows.pack(pool, 4, 2)),
            DType::Q4_0 => Self::Nibbles4_0(rows.pack(pool, 4, 1)),
            DType::Q8_0 => Self::Bytes(rows.pack(pool, 8, 1)),
            DType::F32 | DType::F16 | DType::BF16 => Self::Dense(rows.pack_dense()?),
            DType::Q4K | DType::Q5K | DType::Q6K => return Err(quant::Error::Unsupported(dtype).into()),
        })
    }

    pub(super) fn n_bytes(&self) -> usize {
        match self {
            Self::Nibbles4_1(b) | Self::Nibbles4_0(b) | Self::Bytes(b) => {
                size_of_val(&b.lines[..]) + size_of_val(&b.params[..])
            }
            Self::Dense(w) => size_of_val(&w[..]),
        }
    }

    /// Decodes one row into `out`, `[n_in]`.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        let (group, lane) = (row / LANES, row % LANES);
        let n_blocks = out.len() / BLOCK_LEN;
        let (b, n_lines, n_params) = match self {
            Self::Nibbles4_1(b) => (b, 4, 2),
            Self::Nibbles4_0(b) => (b, 4, 1),
            Self::Bytes(b) => (b, 8, 1),
            Self::Dense(w) => {
                let inputs = &w[group * out.len()..][..out.len()];
                return out.iter_mut().zip(inputs).for_each(|(o, w)| *o = w[lane]);
            }
        };
        for (i, out) in out.chunks_exact_mut(BLOCK_LEN).enumerate() {
            let block = group * n_blocks + i;
            let lines = &b.lines[block * n_lines..][..n_lines];
            let params = &b.params[block * n_params..][..n_params];
            let scale = params[0].0[lane].to_f32();
            let byte = |line: usize, j: usize| lines[line].0[4 * lane + j];
            let nibble = |k: usize| (byte(k / 8, k % 4) >> (4 * (k / 4 % 2))) & 15;
            for (k, out) in out.iter_mut().enumerate() {
                *out = match self {
                    Self::Nibbles4_1(_) => scale * f32::from(nibble(k)) + params[1].0[lane].to_f32(),
                    Self::Nibbles4_0(_) => scale * (f32::from(nibble(k)) - 8.0),
                    _ => scale * (f32::from(byte(k / 4, k % 4)) - 128.0),
                };
            }
        }
    }
}

/// A source together with its row length.
struct Rows<'a> {
    dtype: DType,
    bytes: &'a [u8],
    n_rows: usize,
    n_in: usize,
}

impl Rows<'_> {
    /// Permutes a block type into `n_lines` lines and `n_params` parameters per block and group.
    fn pack(&self, pool: &ThreadPool, n_lines: usize, n_params: usize) -> Blocks {
        let n_groups = self.n_rows.div_ceil(LANES);
        let n_blocks = self.n_in / BLOCK_LEN;
        let zero = Halves([f16::ZERO; LANES]);
        let mut lines = vec![Line([0; 64]); n_groups * n_blocks * n_lines];
        let mut params = vec![zero; n_groups * n_blocks * n_params];
        let groups = lines.chunks_mut(n_blocks * n_lines).zip(params.chunks_mut(n_blocks * n_params));
        let mut parts: Vec<_> = groups.enumerate().collect();
        pool.each(&mut parts, |(group, (lines, params))| {
            let first_row = *group * LANES;
            for row in first_row..self.n_rows.min(first_row + LANES) {
                let row_bytes = n_blocks * self.dtype.block_bytes();
                let blocks =
                    self.bytes[row * row_bytes..][..row_bytes].chunks_exact(self.dtype.block_bytes());
                let packed = lines.chunks_exact_mut(n_lines).zip(params.chunks_exact_mut(n_params));
                for (block, (lines, params)) in blocks.zip(packed) {
                    self.pack_block(block, row - first_row, lines, params);
                }
            }
        });
        Blocks { lines, params }
    }

    /// Puts one row's block into its lane.
    fn pack_block(&self, block: &[u8], lane: usize, lines: &mut [Line], params: &mut [Halves]) {
        for (i, param) in params.iter_mut().enumerate() {
            param.0[lane] = f16_at(block, 2 * i);
        }
        let weights = &block[2 * params.len()..];
        // In the file, byte i of 16 holds inputs i (low half) and i + 16 (high half).
        let nibble = |k: usize| (weights[k % 16] >> (4 * (k / 16))) & 15;
        for (i, line) in lines.iter_mut().enumerate() {
            for (j, byte) in line.0[4 * lane..4 * lane + 4].iter_mut().enumerate() {
                *byte = match self.dtype {
                    DType::Q8_0 => weights[4 * i + j] ^ 0x80,
                    _ => nibble(8 * i + j) | nibble(8 * i + 4 + j) << 4,
                };
            }
        }
    }

    fn pack_dense(&self) -> Result<Vec<[f32; LANES]>, quant::Error> {
        let mut packed = vec![[0.0; LANES]; self.n_rows.div_ceil(LANES) * self.n_in];
        let mut row_weights = vec![0.0; self.n_in];
        let rows = self.bytes.chunks_exact(self.n_in * self.dtype.block_bytes());
        for (row, bytes) in rows.enumerate() {
            quant::dequantize(self.dtype, bytes, &mut row_weights)?;
            let inputs = &mut packed[row / LANES * self.n_in..][..self.n_in];
            inputs.iter_mut().zip(&row_weights).for_each(|(lanes, &w)| lanes[row % LANES] = w);
        }
        Ok(packed)
    }
}

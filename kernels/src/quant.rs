//! How weights lie in a GGUF file: block types, their sizes, and plain dequantisation to f32.
//!
//! This is the readable definition every packed format in [`crate::linear`] is tested against.
//! Layouts follow `ggml-common.h` of llama.cpp.

use half::{bf16, f16};

#[cfg(test)]
mod tests;

/// What can go wrong when bytes are read as weights.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The type is known, but nothing here can decode it.
    #[error("weights of type {0:?} cannot be decoded; supported: F32, F16, BF16, Q4_0, Q4_1, Q8_0")]
    Unsupported(DType),
    /// The number of bytes does not fit the number of elements.
    #[error("{elements} elements of type {dtype:?} do not fit {bytes} bytes")]
    Length { dtype: DType, elements: usize, bytes: usize },
}

/// Element type of a GGUF tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    F32,
    F16,
    BF16,
    /// 32 weights: f16 scale, 16 bytes of nibbles; value = scale x (nibble - 8).
    Q4_0,
    /// 32 weights: f16 scale, f16 minimum, 16 bytes of nibbles; value = scale x nibble + minimum.
    Q4_1,
    /// 32 weights: f16 scale, 32 signed bytes; value = scale x byte.
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

impl DType {
    /// The type with this number in the GGUF tensor table (`enum ggml_type`), if we know it.
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            8 => Self::Q8_0,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            30 => Self::BF16,
            _ => return None,
        })
    }

    /// Elements per block; a row is a whole number of blocks.
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Bytes of `n` elements, or None when `n` is not a whole number of blocks or the product overflows.
    pub fn bytes_for(self, n: usize) -> Option<usize> {
        if !n.is_multiple_of(self.block_len()) {
            return None;
        }
        (n / self.block_len()).checked_mul(self.block_bytes())
    }
}

/// Decodes all of `bytes` into `out`; the lengths must match exactly.
pub fn dequantize(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), Error> {
    if dtype.bytes_for(out.len()) != Some(bytes.len()) {
        return Err(Error::Length { dtype, elements: out.len(), bytes: bytes.len() });
    }
    let blocks = bytes.chunks_exact(dtype.block_bytes()).zip(out.chunks_exact_mut(dtype.block_len()));
    match dtype {
        DType::F32 => blocks.for_each(|(b, o)| o[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        DType::F16 => blocks.for_each(|(b, o)| o[0] = f16_at(b, 0).to_f32()),
        DType::BF16 => blocks.for_each(|(b, o)| o[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32()),
        DType::Q4_0 => blocks.for_each(|(b, o)| {
            let scale = f16_at(b, 0).to_f32();
            nibbles(&b[2..], |i, q| o[i] = scale * (f32::from(q) - 8.0));
        }),
        DType::Q4_1 => blocks.for_each(|(b, o)| {
            let (scale, min) = (f16_at(b, 0).to_f32(), f16_at(b, 2).to_f32());
            nibbles(&b[4..], |i, q| o[i] = scale * f32::from(q) + min);
        }),
        DType::Q8_0 => blocks.for_each(|(b, o)| {
            let scale = f16_at(b, 0).to_f32();
            o.iter_mut().zip(&b[2..]).for_each(|(o, &q)| *o = scale * f32::from(q.cast_signed()));
        }),
        DType::Q4K | DType::Q5K | DType::Q6K => return Err(Error::Unsupported(dtype)),
    }
    Ok(())
}

/// Rounds to Q8_0 blocks; lossless for numbers that came from such blocks. The length is a multiple of 32.
pub fn quantize_q8_0(values: &[f32]) -> Vec<u8> {
    assert!(values.len().is_multiple_of(DType::Q8_0.block_len()), "whole blocks");
    let mut bytes = Vec::with_capacity(values.len() / 32 * DType::Q8_0.block_bytes());
    for block in values.chunks_exact(DType::Q8_0.block_len()) {
        let peak = block.iter().fold(0.0f32, |peak, x| peak.max(x.abs()));
        let scale = f16::from_f32(peak / 127.0);
        let inverse = if scale > f16::ZERO { scale.to_f32().recip() } else { 0.0 };
        bytes.extend_from_slice(&scale.to_le_bytes());
        bytes.extend(block.iter().map(|x| ((x * inverse).round_ties_even() as i8).cast_unsigned()));
    }
    bytes
}

/// The little-endian f16 at byte `at`.
pub(crate) fn f16_at(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Calls `f(element, nibble)`: byte `i` of 16 holds element `i` (low half) and element `i + 16` (high half).
fn nibbles(bytes: &[u8], mut f: impl FnMut(usize, u8)) {
    for (i, &byte) in bytes.iter().enumerate() {
        f(i, byte & 15);
        f(i + 16, byte >> 4);
    }
}

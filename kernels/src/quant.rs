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
    /// 256 weights: f16 scale and minimum; per 32 weights a 6-bit factor of each; nibbles.
    /// Value = scale x factor x nibble - minimum x factor.
    Q4K,
    /// The same with a fifth bit per weight.
    Q5K,
    /// 256 weights of 6 bits: f16 scale, a signed 8-bit factor per 16 weights.
    /// Value = scale x factor x (number - 32).
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
        DType::Q4K | DType::Q5K => blocks.for_each(|(b, o)| {
            let (scale, min) = (f16_at(b, 0).to_f32(), f16_at(b, 2).to_f32());
            for (i, (o, code)) in o.iter_mut().zip(k_codes(dtype, b)).enumerate() {
                let (factor, min_factor) = k_factors(&b[4..16], i / 32);
                *o = scale * f32::from(factor) * f32::from(code) - min * f32::from(min_factor);
            }
        }),
        DType::Q6K => blocks.for_each(|(b, o)| {
            let scale = f16_at(b, 208).to_f32();
            for (i, (o, code)) in o.iter_mut().zip(k_codes(dtype, b)).enumerate() {
                let factor = f32::from(b[192 + i / 16].cast_signed());
                *o = scale * factor * (f32::from(code) - 32.0);
            }
        }),
    }
    Ok(())
}

/// The little-endian f16 at byte `at`.
pub(crate) fn f16_at(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// The stored numbers of a block of 256, unsigned, in order.
pub(crate) fn k_codes(dtype: DType, block: &[u8]) -> [u8; 256] {
    match dtype {
        // Bytes 32i..32i+32 of the nibbles hold elements 64i.. (low half) and 64i + 32.. (high half).
        DType::Q4K => std::array::from_fn(|e| (block[16 + e / 64 * 32 + e % 32] >> (e / 32 % 2 * 4)) & 15),
        // Byte i of the fifth bits holds elements i, i + 32, ... from the lowest bit on.
        DType::Q5K => std::array::from_fn(|e| {
            let low = (block[48 + e / 64 * 32 + e % 32] >> (e / 32 % 2 * 4)) & 15;
            low | ((block[16 + e % 32] >> (e / 32)) & 1) << 4
        }),
        // Per 128 elements: 64 bytes whose low halves hold elements 0..64 and high halves 64..128; 32 bytes that
        // hold the upper two bits of elements i, i + 32, i + 64, i + 96.
        _ => std::array::from_fn(|e| {
            let (half, e) = (e / 128, e % 128);
            let low = (block[64 * half + e % 64] >> (e / 64 * 4)) & 15;
            low | ((block[128 + 32 * half + e % 32] >> (e / 32 * 2)) & 3) << 4
        }),
    }
}

/// The 6-bit factors (of the scale, of the minimum) of 32 weights, from the 12 bytes that hold eight of each:
/// llama.cpp's `get_scale_min_k4`.
pub(crate) fn k_factors(bytes: &[u8], i: usize) -> (u8, u8) {
    if i < 4 {
        (bytes[i] & 63, bytes[i + 4] & 63)
    } else {
        (bytes[i + 4] & 15 | (bytes[i - 4] >> 6) << 4, bytes[i + 4] >> 4 | (bytes[i] >> 6) << 4)
    }
}

/// Calls `f(element, nibble)`: byte `i` of 16 holds element `i` (low half) and element `i + 16` (high half).
fn nibbles(bytes: &[u8], mut f: impl FnMut(usize, u8)) {
    for (i, &byte) in bytes.iter().enumerate() {
        f(i, byte & 15);
        f(i + 16, byte >> 4);
    }
}

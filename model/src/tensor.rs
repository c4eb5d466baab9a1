//! Tensors as they lie in a model's files.

use std::ops::Range;

use kernels::quant::DType;

/// Bytes of each tensor's start and end that enter a model's fingerprint.
const FINGERPRINT_SAMPLE_BYTES: usize = 4096;

/// What a file says of one tensor.
#[derive(Debug, Clone)]
pub struct TensorInfo {
    pub name: String,
    pub dtype: DType,
    /// The fastest-moving dimension first, as in GGUF (a row-major `[out, in]` matrix reads `[in, out]`).
    pub shape: Vec<u64>,
    /// Position of the bytes in the file.
    pub(crate) bytes: Range<usize>,
}

/// One tensor: `data` holds exactly the bytes that `shape` and `dtype` call for.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    pub name: &'a str,
    pub dtype: DType,
    /// The fastest-moving dimension first.
    pub shape: &'a [u64],
    pub data: &'a [u8],
}

impl TensorInfo {
    /// Number of elements.
    pub fn n_elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of the tensor's data.
    pub fn n_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The tensor in its `file`, whose length was compared with `bytes` when the file was opened.
    pub(crate) fn tensor<'a>(&'a self, file: &'a [u8]) -> Tensor<'a> {
        Tensor { name: &self.name, dtype: self.dtype, shape: &self.shape, data: &file[self.bytes.clone()] }
    }
}

impl Tensor<'_> {
    /// Feeds the first and last 4 KiB to a fingerprint.
    pub(crate) fn sample(&self, hasher: &mut blake3::Hasher) {
        let sample = self.data.len().min(FINGERPRINT_SAMPLE_BYTES);
        hasher.update(&self.data[..sample]);
        hasher.update(&self.data[self.data.len() - sample..]);
    }
}

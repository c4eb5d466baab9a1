//! The memory of all KV blocks of a worker: where each number lies, and how blocks leave and enter as bytes.
//!
//! ```text
//!  block 0                              block 1
//!  layer 0  | layer 1  | ... | layer n  layer 0 | ...
//!  [kv head]{ K [head_dim][16 tokens], V [16 tokens][head_dim] }       f16, or i8 with scales behind each
//! ```
//! Any range of layers of a block is one contiguous run, so a handover copies without gathering.

use std::ops::Range;

use kernels::attention::{BLOCK_TOKENS, Heads, KvDtype, LayerPlace};
use kernels::table::Table;

#[cfg(test)]
mod tests;

/// Why bytes cannot become part of a block.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("KV block {block} does not exist; the arena has {n_blocks}")]
    Block { block: u32, n_blocks: usize },
    #[error("KV layers {layers:?} do not exist; the model has {n_layers}")]
    Layers { layers: Range<usize>, n_layers: usize },
    #[error("layers {layers:?} of a KV block take {expected} bytes, not {found}")]
    Length { layers: Range<usize>, expected: usize, found: usize },
}

/// The form of a KV block; two workers can exchange blocks when these are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvGeometry {
    pub n_layers: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub dtype: KvDtype,
}

impl KvGeometry {
    /// Tokens in a block.
    pub const BLOCK_TOKENS: usize = BLOCK_TOKENS;

    /// The same with another number format.
    pub fn with_dtype(self, dtype: KvDtype) -> Self {
        Self { dtype, ..self }
    }

    /// Name of the stored number format.
    pub fn dtype_name(&self) -> &'static str {
        match self.dtype {
            KvDtype::F16 => "f16",
            KvDtype::I8 => "i8+scale",
        }
    }

    /// 16-bit words in one layer of a block: keys and values of 16 tokens.
    fn layer_len(&self) -> usize {
        let heads = Heads { n_heads: self.n_kv_heads, n_kv_heads: self.n_kv_heads, head_dim: self.head_dim };
        heads.block_len(self.dtype)
    }

    /// Words in a block.
    fn block_len(&self) -> usize {
        self.n_layers * self.layer_len()
    }

    /// Bytes of one layer of a block.
    pub fn bytes_per_block_layer(&self) -> usize {
        self.layer_len() * size_of::<u16>()
    }

    /// Bytes of a whole block.
    pub fn bytes_per_block(&self) -> usize {
        self.block_len() * size_of::<u16>()
    }
}

/// Keys and values of `n_blocks` blocks; zero until written.
#[derive(Debug)]
pub struct KvArena {
    geometry: KvGeometry,
    n_blocks: usize,
    /// The kernels know what is in it; the system hands out zeroed integers without touching the pages.
    words: Table<u16>,
}

impl KvArena {
    /// Memory for `n_blocks` blocks; pages are claimed when first written.
    pub fn new(geometry: KvGeometry, n_blocks: usize) -> Self {
        Self { geometry, n_blocks, words: Table::zeroed(n_blocks * geometry.block_len()) }
    }

    pub fn geometry(&self) -> KvGeometry {
        self.geometry
    }

    pub fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    /// Bytes that [`export`](Self::export) appends per layer.
    pub fn bytes_per_block_layer(&self) -> usize {
        self.geometry.bytes_per_block_layer()
    }

    /// Appends `layers` of `block` to `out`, in the stored format, little-endian. Panics if they do not exist.
    pub fn export(&self, block: u32, layers: Range<usize>, out: &mut Vec<u8>) {
        let range = self.range(block, &layers).expect("the exporter owns the block and knows the model");
        let start = out.len();
        out.resize(start + range.len() * size_of::<u16>(), 0);
        for (bytes, word) in out[start..].as_chunks_mut().0.iter_mut().zip(&self.words[range]) {
            *bytes = word.to_le_bytes();
        }
    }

    /// Overwrites `layers` of `block` with what [`export`](Self::export) wrote elsewhere.
    pub fn import(&mut self, block: u32, layers: Range<usize>, bytes: &[u8]) -> Result<(), Error> {
        let range = self.range(block, &layers)?;
        let expected = range.len() * size_of::<u16>();
        if bytes.len() != expected {
            return Err(Error::Length { layers, expected, found: bytes.len() });
        }
        for (word, bytes) in self.words[range].iter_mut().zip(bytes.as_chunks().0) {
            *word = u16::from_le_bytes(*bytes);
        }
        Ok(())
    }

    /// Copies all of block `from` over block `to`. Panics if they do not exist.
    pub fn copy_block(&mut self, from: u32, to: u32) {
        let layers = 0..self.geometry.n_layers;
        let from = self.range(from, &layers).expect("the source block exists");
        let to = self.range(to, &layers).expect("the target block exists");
        self.words.copy_within(from, to.start);
    }

    /// All of it, for the kernels.
    pub(crate) fn words(&self) -> &[u16] {
        &self.words
    }

    pub(crate) fn words_mut(&mut self) -> &mut [u16] {
        &mut self.words
    }

    /// Where the kernels find a layer.
    pub(crate) fn place(&self, layer_idx: usize) -> LayerPlace {
        LayerPlace {
            dtype: self.geometry.dtype,
            block_stride: self.geometry.block_len(),
            layer_start: layer_idx * self.geometry.layer_len(),
        }
    }

    fn range(&self, block: u32, layers: &Range<usize>) -> Result<Range<usize>, Error> {
        if block as usize >= self.n_blocks {
            return Err(Error::Block { block, n_blocks: self.n_blocks });
        }
        if layers.start > layers.end || layers.end > self.geometry.n_layers {
            return Err(Error::Layers { layers: layers.clone(), n_layers: self.geometry.n_layers });
        }
        let start = block as usize * self.geometry.block_len();
        let layer_len = self.geometry.layer_len();
        Ok(start + layers.start * layer_len..start + layers.end * layer_len)
    }
}

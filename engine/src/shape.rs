//! The sizes of a model, checked against what the kernels can do.

use std::ops::Deref;

use kernels::attention::{Heads, KvDtype};
use kernels::{LANES, linear};
use model::checkpoint::{self, Checkpoint};
use model::dims::Dims;

use crate::arena::KvGeometry;

/// Why a model cannot be run. Every message names the key.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    File(#[from] checkpoint::Error),
    #[error("the model's {key} = {value} is impossible: {rule}")]
    Size { key: &'static str, value: usize, rule: &'static str },
}

/// The largest heads in use have 256 numbers.
pub(crate) const MAX_HEAD_DIM: usize = 512;

/// What a grant can keep count of; no dense model has more.
const MAX_LAYERS: usize = 128;

/// The sizes and constants of a dense decoder that can be run.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelShape {
    dims: Dims,
}

impl Deref for ModelShape {
    type Target = Dims;

    fn deref(&self) -> &Dims {
        &self.dims
    }
}

impl ModelShape {
    /// Reads and checks the sizes of `checkpoint`.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, Error> {
        let shape = Self { dims: checkpoint.dims()? };
        shape.check()?;
        Ok(shape)
    }

    /// The head counts as the attention kernel wants them.
    pub fn heads(&self) -> Heads {
        Heads { n_heads: self.n_heads, n_kv_heads: self.n_kv_heads, head_dim: self.head_dim }
    }

    /// What a KV arena for this model looks like, in f16; see [`KvGeometry::with_dtype`].
    pub fn kv_geometry(&self) -> KvGeometry {
        KvGeometry {
            n_layers: self.n_layers,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            dtype: KvDtype::F16,
        }
    }

    /// Numbers in a token's query or attention output: `n_heads x head_dim`.
    pub fn d_attention(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Numbers in a token's keys, or in its values: `n_kv_heads x head_dim`.
    pub fn d_kv(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    fn check(&self) -> Result<(), Error> {
        let blocks = |n| is_multiple(n, linear::BLOCK_LEN);
        let whole_blocks = "it must be a positive multiple of 32";
        let layers = (1..=MAX_LAYERS).contains(&self.n_layers);
        let heads_fit = is_multiple(self.n_heads, self.n_kv_heads);
        let lanes = is_multiple(self.head_dim, LANES);
        // Names of the keys in GGUF, and in config.json.
        let rules = [
            ("block_count (num_hidden_layers)", self.n_layers, layers, "it must be 1 to 128"),
            ("embedding_length (hidden_size)", self.d_model, blocks(self.d_model), whole_blocks),
            ("feed_forward_length (intermediate_size)", self.d_ffn, blocks(self.d_ffn), whole_blocks),
            (
                "attention.key_length (head_dim)",
                self.head_dim,
                lanes && self.head_dim <= MAX_HEAD_DIM,
                "it must be a positive multiple of 16, up to 512",
            ),
            (
                "attention.head_count_kv (num_key_value_heads)",
                self.n_kv_heads,
                heads_fit,
                "it must divide head_count (num_attention_heads)",
            ),
            (
                "attention.head_count (num_attention_heads)",
                self.n_heads,
                blocks(self.d_attention()),
                "times head_dim it must be a multiple of 32",
            ),
            ("context_length (max_position_embeddings)", self.context_len, self.context_len > 0, "0 tokens"),
            ("vocabulary", self.vocab, self.vocab > 0, "the embedding must have rows"),
        ];
        match rules.into_iter().find(|(_, _, holds, _)| !holds) {
            Some((key, value, _, rule)) => Err(Error::Size { key, value, rule }),
            None => Ok(()),
        }
    }
}

/// n = k x unit for some positive k.
fn is_multiple(n: usize, unit: usize) -> bool {
    n > 0 && unit > 0 && n.is_multiple_of(unit)
}

//! The sizes of a model, read from the metadata of its file and checked against what the kernels can do.

use kernels::attention::{Heads, KvDtype};
use kernels::elementwise::RopeLayout;
use kernels::{LANES, linear};
use model::gguf::{self, Gguf};

use crate::arena::KvGeometry;

/// Why a file cannot be run. Every message names the key.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    File(#[from] gguf::Error),
    #[error("model architecture `{0}` is not supported; supported: llama")]
    Architecture(String),
    #[error("model feature `{key}` = `{value}` is not supported")]
    Feature { key: String, value: String },
    #[error("model metadata `{key}` = {value} is impossible: {rule}")]
    Size { key: &'static str, value: usize, rule: &'static str },
}

/// The sizes and constants of a dense decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelShape {
    pub n_layers: usize,
    pub d_model: usize,
    pub d_ffn: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    /// Positions the model was trained for, in tokens.
    pub context_len: usize,
    pub rope_base: f32,
    pub rope_layout: RopeLayout,
    pub rms_eps: f32,
}

impl ModelShape {
    /// Reads and checks the sizes of `gguf`.
    pub fn read(gguf: &Gguf) -> Result<Self, Error> {
        let architecture = gguf.str("general.architecture")?;
        if architecture != "llama" {
            return Err(Error::Architecture(architecture.to_owned()));
        }
        let size = |key: &str| gguf.u32(&format!("llama.{key}")).map(|n| n as usize);
        let (d_model, n_heads) = (size("embedding_length")?, size("attention.head_count")?);
        let optional = |key: &str, default| if has(gguf, key) { size(key) } else { Ok(default) };
        let shape = Self {
            n_layers: size("block_count")?,
            d_model,
            d_ffn: size("feed_forward_length")?,
            n_heads,
            n_kv_heads: optional("attention.head_count_kv", n_heads)?,
            head_dim: optional("attention.key_length", d_model.checked_div(n_heads).unwrap_or(0))?,
            vocab: gguf.tensor("token_embd.weight")?.shape.get(1).map_or(0, |&n| n as usize),
            context_len: size("context_length")?,
            rope_base: if has(gguf, "rope.freq_base") { gguf.f32("llama.rope.freq_base")? } else { 10_000.0 },
            rope_layout: RopeLayout::Adjacent,
            rms_eps: gguf.f32("llama.attention.layer_norm_rms_epsilon")?,
        };
        shape.check()?;
        let rope_dim = optional("rope.dimension_count", shape.head_dim)?;
        let value_dim = optional("attention.value_length", shape.head_dim)?;
        refuse_unless(rope_dim == shape.head_dim, "llama.rope.dimension_count", rope_dim)?;
        refuse_unless(value_dim == shape.head_dim, "llama.attention.value_length", value_dim)?;
        if has(gguf, "rope.scaling.type") {
            let scaling = gguf.str("llama.rope.scaling.type")?;
            refuse_unless(scaling == "none", "llama.rope.scaling.type", scaling)?;
        }
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

    fn check(&self) -> Result<(), Error> {
        let whole_blocks = "it must be a positive multiple of 32";
        let rules = [
            ("llama.block_count", self.n_layers, (1..=1024).contains(&self.n_layers), "it must be 1 to 1024"),
            (
                "llama.embedding_length",
                self.d_model,
                is_multiple(self.d_model, linear::BLOCK_LEN),
                whole_blocks,
            ),
            (
                "llama.feed_forward_length",
                self.d_ffn,
                is_multiple(self.d_ffn, linear::BLOCK_LEN),
                whole_blocks,
            ),
            (
                "llama.attention.key_length",
                self.head_dim,
                is_multiple(self.head_dim, LANES),
                "it must be a positive multiple of 16",
            ),
            (
                "llama.attention.head_count_kv",
                self.n_kv_heads,
                is_multiple(self.n_heads, self.n_kv_heads),
                "it must divide head_count",
            ),
            (
                "llama.attention.head_count",
                self.n_heads,
                is_multiple(self.d_attention(), linear::BLOCK_LEN),
                "head_count x key_length must be a multiple of 32",
            ),
            ("llama.context_length", self.context_len, self.context_len > 0, "it must be positive"),
            ("llama.vocab_size", self.vocab, self.vocab > 0, "token_embd.weight must have rows"),
        ];
        match rules.into_iter().find(|(_, _, holds, _)| !holds) {
            Some((key, value, _, rule)) => Err(Error::Size { key, value, rule }),
            None => Ok(()),
        }
    }
}

fn has(gguf: &Gguf, key: &str) -> bool {
    gguf.get(&format!("llama.{key}")).is_some()
}

/// n = k x unit for some positive k.
fn is_multiple(n: usize, unit: usize) -> bool {
    n > 0 && unit > 0 && n.is_multiple_of(unit)
}

fn refuse_unless(holds: bool, key: &str, value: impl ToString) -> Result<(), Error> {
    if holds { Ok(()) } else { Err(Error::Feature { key: key.to_owned(), value: value.to_string() }) }
}

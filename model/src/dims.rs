//! The sizes and constants of a model, from the metadata of a GGUF file or from a `config.json`.

mod config;
mod metadata;
mod rope;

use kernels::elementwise::RopeLayout;

use crate::gguf;

pub(crate) use config::Config;
pub(crate) use metadata::of_gguf;

/// The tensor with the divisors of the rotary frequencies, which converters write for Llama 3. It goes into [`Dims`].
pub const ROPE_DIVISORS: &str = "rope_freqs.weight";

/// Frequencies of this many pairs at most can be scaled: far more than any head has.
const MAX_PAIRS: usize = 1 << 16;

/// Why a model's sizes cannot be used. Every message names the key.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Gguf(#[from] gguf::Error),
    #[error("config.json: {0}")]
    Config(#[from] serde_json::Error),
    #[error("model architecture `{found}` is not supported; supported: {}", Architecture::NAMES.join(", "))]
    Architecture { found: String },
    #[error("model feature `{key}` = `{value}` is not supported")]
    Feature { key: String, value: String },
    #[error("`{key}` is impossible: {rule}")]
    Value { key: String, rule: String },
}

/// The kinds of decoders that can be run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2 and 3, SmolLM2 and whatever else was trained in this form.
    Llama,
    /// Llama with biases for queries, keys and values: Qwen2, Qwen2.5.
    Qwen2,
    /// Llama with a norm of every query and key head.
    Qwen3,
}

/// What a dense decoder is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct Dims {
    pub architecture: Architecture,
    pub n_layers: usize,
    pub d_model: usize,
    pub d_ffn: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    /// Rows of the embedding; the tokenizer may know fewer tokens.
    pub vocab: usize,
    /// Positions the model was trained for, in tokens.
    pub context_len: usize,
    pub rms_eps: f32,
    /// The embedding is also the head.
    pub tied_head: bool,
    pub rope_layout: RopeLayout,
    pub rope_base: f32,
    /// What the frequency of each pair is divided by: `[head_dim / 2]`, or empty when none is.
    pub rope_divisors: Vec<f32>,
}

impl Dims {
    /// The numbers that no kernel checks.
    fn checked(self) -> Result<Self, Error> {
        let positive = |x: f32| x.is_normal() && x > 0.0;
        if !positive(self.rope_base) {
            return Err(impossible("rope_theta (GGUF: rope.freq_base)", "it must be a positive number"));
        }
        if !positive(self.rms_eps) {
            return Err(impossible(
                "rms_norm_eps (GGUF: layer_norm_rms_epsilon)",
                "it must be a positive number",
            ));
        }
        Ok(self)
    }
}

impl Architecture {
    const ALL: [Self; 3] = [Self::Llama, Self::Qwen2, Self::Qwen3];
    const NAMES: [&str; 3] = ["llama", "qwen2", "qwen3"];

    /// The name in `general.architecture` and in `model_type`.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    fn named(name: &str) -> Result<Self, Error> {
        let known = Self::ALL.into_iter().find(|known| known.name() == name);
        known.ok_or_else(|| Error::Architecture { found: name.to_owned() })
    }

    /// Queries, keys and values have biases.
    pub fn has_qkv_bias(self) -> bool {
        self == Self::Qwen2
    }

    /// Every query and key head is normed before it is turned.
    pub fn has_qk_norm(self) -> bool {
        self == Self::Qwen3
    }
}

fn refuse_unless(holds: bool, key: &str, value: impl ToString) -> Result<(), Error> {
    if holds { Ok(()) } else { Err(Error::Feature { key: key.to_owned(), value: value.to_string() }) }
}

fn impossible(key: &str, rule: &str) -> Error {
    Error::Value { key: key.to_owned(), rule: rule.to_owned() }
}

#[cfg(test)]
mod tests;

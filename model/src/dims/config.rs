//! Sizes from a `config.json` as transformers writes it.

use kernels::elementwise::RopeLayout;
use serde::Deserialize;

use super::rope::RopeScaling;
use super::{Architecture, Dims, Error, refuse_unless};

/// The part of a `config.json` that is read first: the rest depends on it.
#[derive(Deserialize)]
struct Kind {
    model_type: String,
}

/// A checked `config.json`.
#[derive(Debug)]
pub(crate) struct Config {
    architecture: Architecture,
    keys: Keys,
}

/// The keys that decide a model's form. What is not listed does not change what it computes.
#[derive(Debug, Deserialize)]
struct Keys {
    hidden_size: u32,
    intermediate_size: u32,
    num_hidden_layers: u32,
    num_attention_heads: u32,
    num_key_value_heads: Option<u32>,
    head_dim: Option<u32>,
    max_position_embeddings: u32,
    rms_norm_eps: f32,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeScaling>,
    rope_parameters: Option<RopeScaling>,
    #[serde(default)]
    tie_word_embeddings: bool,
    hidden_act: Option<String>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    use_sliding_window: bool,
    quantization_config: Option<Quantization>,
}

#[derive(Debug, Deserialize)]
struct Quantization {
    quant_method: Option<String>,
}

impl Config {
    /// Reads `config.json`.
    ///
    /// # Errors
    /// An architecture or feature that is not supported, by name; keys that are missing or not numbers.
    pub(crate) fn parse(json: &[u8]) -> Result<Self, Error> {
        let kind: Kind = serde_json::from_slice(json)?;
        let architecture = Architecture::named(&kind.model_type)?;
        let keys: Keys = serde_json::from_slice(json)?;
        if let Some(quantization) = &keys.quantization_config {
            let method = quantization.quant_method.as_deref().unwrap_or("unnamed");
            refuse_unless(false, "quantization_config", method)?;
        }
        let activation = keys.hidden_act.as_deref().unwrap_or("silu");
        refuse_unless(activation == "silu", "hidden_act", activation)?;
        let has_own_bias = keys.attention_bias && !architecture.has_qkv_bias();
        refuse_unless(!has_own_bias, "attention_bias", true)?;
        refuse_unless(!keys.mlp_bias, "mlp_bias", true)?;
        refuse_unless(!keys.use_sliding_window, "use_sliding_window", true)?;
        Ok(Self { architecture, keys })
    }

    pub(crate) fn has_tied_head(&self) -> bool {
        self.keys.tie_word_embeddings
    }

    /// The sizes; `vocab` is the embedding's number of rows.
    pub(crate) fn dims(&self, vocab: usize) -> Result<Dims, Error> {
        let keys = &self.keys;
        let scaling = keys.rope_parameters.as_ref().or(keys.rope_scaling.as_ref());
        let rope_base = scaling.and_then(|scaling| scaling.rope_theta).or(keys.rope_theta).unwrap_or(10_000.0);
        let default_head_dim = keys.hidden_size.checked_div(keys.num_attention_heads).unwrap_or(0);
        let head_dim = keys.head_dim.unwrap_or(default_head_dim) as usize;
        let dims = Dims {
            architecture: self.architecture,
            n_layers: keys.num_hidden_layers as usize,
            d_model: keys.hidden_size as usize,
            d_ffn: keys.intermediate_size as usize,
            n_heads: keys.num_attention_heads as usize,
            n_kv_heads: keys.num_key_value_heads.unwrap_or(keys.num_attention_heads) as usize,
            head_dim,
            vocab,
            context_len: keys.max_position_embeddings as usize,
            rms_eps: keys.rms_norm_eps,
            tied_head: keys.tie_word_embeddings,
            rope_layout: RopeLayout::HalfSplit,
            rope_base: rope_base as f32,
            rope_divisors: match scaling {
                Some(scaling) => scaling.divisors(rope_base, head_dim)?,
                None => Vec::new(),
            },
        };
        dims.checked()
    }
}

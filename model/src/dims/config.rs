//! Sizes from a `config.json` as transformers writes it.

use kernels::elementwise::RopeLayout;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::rope::RopeScaling;
use super::{Architecture, Dims, Error, impossible, refuse_unless};

const TIED: &str = "tie_word_embeddings";

/// A checked `config.json`.
#[derive(Debug)]
pub(crate) struct Config {
    architecture: Architecture,
    keys: Keys,
}

/// The content of a `config.json`. Keys that nobody asks for do not change what the model computes.
#[derive(Debug)]
struct Keys(Map<String, Value>);

#[derive(Deserialize)]
struct Quantization {
    quant_method: Option<String>,
}

impl Keys {
    /// The value of `key`; None when there is none, or null.
    fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, Error> {
        let value = self.0.get(key).filter(|value| !value.is_null());
        let read = value.map(|value| T::deserialize(value)).transpose();
        read.map_err(|error| impossible(key, &error.to_string()))
    }

    fn required<T: DeserializeOwned>(&self, key: &str) -> Result<T, Error> {
        self.get(key)?.ok_or_else(|| impossible(key, "config.json does not have it"))
    }

    fn size(&self, key: &str) -> Result<usize, Error> {
        Ok(self.required::<u32>(key)? as usize)
    }

    fn size_or(&self, key: &str, default: usize) -> Result<usize, Error> {
        Ok(self.get::<u32>(key)?.map_or(default, |n| n as usize))
    }

    fn is_set(&self, key: &str) -> Result<bool, Error> {
        Ok(self.get(key)?.unwrap_or(false))
    }
}

impl Config {
    /// Reads `config.json`.
    ///
    /// # Errors
    /// An architecture or feature that is not supported, by name; a key that is missing or of the wrong type.
    pub(crate) fn parse(json: &[u8]) -> Result<Self, Error> {
        let keys = Keys(serde_json::from_slice(json)?);
        let architecture = Architecture::named(&keys.required::<String>("model_type")?)?;
        if let Some(quantization) = keys.get::<Quantization>("quantization_config")? {
            let method = quantization.quant_method.as_deref().unwrap_or("unnamed");
            refuse_unless(false, "quantization_config", method)?;
        }
        if let Some(activation) = keys.get::<String>("hidden_act")? {
            refuse_unless(activation == "silu", "hidden_act", activation)?;
        }
        for key in ["attention_bias", "mlp_bias", "use_sliding_window"] {
            // Qwen2's biases are part of the architecture, whatever this key says.
            let is_known = key == "attention_bias" && architecture.has_qkv_bias();
            refuse_unless(is_known || !keys.is_set(key)?, key, true)?;
        }
        keys.is_set(TIED)?;
        Ok(Self { architecture, keys })
    }

    /// The embedding is also the head.
    pub(crate) fn has_tied_head(&self) -> bool {
        self.keys.is_set(TIED).unwrap_or(false)
    }

    /// The sizes; `vocab` is the embedding's number of rows.
    pub(crate) fn dims(&self, vocab: usize) -> Result<Dims, Error> {
        let keys = &self.keys;
        let (d_model, n_heads) = (keys.size("hidden_size")?, keys.size("num_attention_heads")?);
        let head_dim = keys.size_or("head_dim", d_model.checked_div(n_heads).unwrap_or(0))?;
        let scaling: RopeScaling = match keys.get("rope_parameters")? {
            Some(parameters) => parameters,
            None => keys.get("rope_scaling")?.unwrap_or_default(),
        };
        let rope_base = match scaling.rope_theta {
            Some(base) => base,
            None => keys.get("rope_theta")?.unwrap_or(10_000.0),
        };
        let dims = Dims {
            architecture: self.architecture,
            n_layers: keys.size("num_hidden_layers")?,
            d_model,
            d_ffn: keys.size("intermediate_size")?,
            n_heads,
            n_kv_heads: keys.size_or("num_key_value_heads", n_heads)?,
            head_dim,
            vocab,
            context_len: keys.size("max_position_embeddings")?,
            rms_eps: keys.required("rms_norm_eps")?,
            tied_head: self.has_tied_head(),
            rope_layout: RopeLayout::HalfSplit,
            rope_base: rope_base as f32,
            rope_divisors: scaling.divisors(rope_base, head_dim)?,
        };
        dims.checked()
    }
}

//! Scaling of the rotary frequencies as a `config.json` describes it.

use serde::Deserialize;

use super::{Error, MAX_PAIRS, impossible};

/// `rope_scaling`, or `rope_parameters` of newer files.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct RopeScaling {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    pub(super) rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

impl RopeScaling {
    /// Divisors of the frequencies of a head's pairs; empty when none is scaled.
    pub(super) fn divisors(&self, base: f64, head_dim: usize) -> Result<Vec<f32>, Error> {
        match self.rope_type.as_deref() {
            None | Some("default") => Ok(Vec::new()),
            Some("llama3") => self.llama3(base, head_dim),
            Some(other) => {
                let value = format!("{other} (supported: default, llama3)");
                Err(Error::Feature { key: "rope_scaling.rope_type".to_owned(), value })
            }
        }
    }

    /// Long waves are divided by `factor`, short ones stay, those between are mixed. After
    /// `_compute_llama3_parameters` of transformers.
    fn llama3(&self, base: f64, head_dim: usize) -> Result<Vec<f32>, Error> {
        let positive = |key: &str, value: Option<f64>| {
            let valid = value.filter(|value| value.is_normal() && *value > 0.0);
            valid.ok_or_else(|| impossible(&format!("rope_scaling.{key}"), "llama3 needs a positive number"))
        };
        let factor = positive("factor", self.factor)?;
        let low = positive("low_freq_factor", self.low_freq_factor)?;
        let high = positive("high_freq_factor", self.high_freq_factor)?;
        let trained = positive("original_max_position_embeddings", self.original_max_position_embeddings)?;
        if high <= low {
            return Err(impossible("rope_scaling.high_freq_factor", "it must exceed low_freq_factor"));
        }
        let n_pairs = head_dim / 2;
        if n_pairs > MAX_PAIRS {
            return Err(impossible("head_dim", "a head of so many numbers"));
        }
        let divisor = |i: usize| {
            let wave_len = std::f64::consts::TAU * base.powf(2.0 * i as f64 / head_dim as f64);
            // How many such waves the trained context held.
            let n_waves = trained / wave_len;
            if n_waves < low {
                factor
            } else if n_waves > high {
                1.0
            } else {
                let kept = (n_waves - low) / (high - low);
                1.0 / ((1.0 - kept) / factor + kept)
            }
        };
        Ok((0..n_pairs).map(|i| divisor(i) as f32).collect())
    }
}

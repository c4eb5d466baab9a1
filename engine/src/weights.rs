//! A model's weights in the form the kernels want: packed matrices, plain norms.

use std::collections::HashSet;

use kernels::linear::{self, Linear, Source};
use kernels::pool::ThreadPool;
use kernels::quant;
use model::checkpoint::{self, Checkpoint};
use model::dims::ROPE_DIVISORS;
use model::tensor::Tensor;

use crate::shape::{self, ModelShape};

/// Why a file's weights cannot be loaded. Every message names the tensor.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Shape(#[from] shape::Error),
    #[error(transparent)]
    File(#[from] checkpoint::Error),
    #[error("tensor `{name}` has dimensions {found:?}, the model's sizes ask for {expected:?}")]
    Dimensions { name: String, found: Vec<u64>, expected: Vec<u64> },
    #[error("tensor `{name}`: {source}")]
    Format { name: String, source: linear::Error },
    /// Running without it would give wrong results, not an error.
    #[error("tensor `{name}` is not part of the {architecture} architecture as this engine knows it")]
    UnknownTensor { name: String, architecture: &'static str },
}

/// All weights of a model.
#[derive(Debug)]
pub struct Weights {
    pub(crate) shape: ModelShape,
    /// `[vocab][d_model]`.
    pub(crate) embedding: Linear,
    pub(crate) layers: Vec<Layer>,
    /// `[d_model]`.
    pub(crate) output_norm: Vec<f32>,
    /// `[vocab][d_model]`; None when the embedding serves.
    output: Option<Linear>,
}

/// One decoder layer.
#[derive(Debug)]
pub(crate) struct Layer {
    /// `[d_model]`.
    pub(crate) attention_norm: Vec<f32>,
    /// Queries, keys, values stacked: `[(n_heads + 2 n_kv_heads) x head_dim][d_model]`.
    pub(crate) qkv: Linear,
    /// Added to the product with `qkv`: `[(n_heads + 2 n_kv_heads) x head_dim]`, or empty.
    pub(crate) qkv_bias: Vec<f32>,
    /// Norms of each query and each key head, `[head_dim]`, where the architecture has them.
    pub(crate) qk_norms: Option<[Vec<f32>; 2]>,
    /// `[d_model][n_heads x head_dim]`.
    pub(crate) attention_output: Linear,
    /// `[d_model]`.
    pub(crate) ffn_norm: Vec<f32>,
    /// Gate and up stacked: `[2 d_ffn][d_model]`.
    pub(crate) gate_up: Linear,
    /// `[d_model][d_ffn]`.
    pub(crate) down: Linear,
}

impl Weights {
    /// Reads and packs everything; every tensor of the model must be used.
    pub fn load(checkpoint: &Checkpoint, pool: &ThreadPool) -> Result<Self, Error> {
        Self::load_with(checkpoint, pool, &mut |_, _| ())
    }

    /// The same; `on_layer(n_done, n_layers)` is called after every layer.
    pub fn load_with(
        checkpoint: &Checkpoint,
        pool: &ThreadPool,
        on_layer: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, Error> {
        let shape = ModelShape::read(checkpoint)?;
        let mut loader = Loader { checkpoint, pool, used: HashSet::new() };
        let embedding = loader.linear(&[("token_embd.weight", shape.vocab)], shape.d_model)?;
        let mut layers = Vec::with_capacity(shape.n_layers);
        for layer_idx in 0..shape.n_layers {
            layers.push(loader.layer(layer_idx, &shape)?);
            on_layer(layer_idx + 1, shape.n_layers);
        }
        let output_norm = loader.vector("output_norm.weight", shape.d_model)?;
        let output = match shape.tied_head {
            true => None,
            false => Some(loader.linear(&[("output.weight", shape.vocab)], shape.d_model)?),
        };
        loader.check_all_used(&shape)?;
        Ok(Self { shape, embedding, layers, output_norm, output })
    }

    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Memory of the packed matrices.
    pub fn n_bytes(&self) -> usize {
        let layer = |l: &Layer| [&l.qkv, &l.attention_output, &l.gate_up, &l.down].map(Linear::n_bytes);
        let layers = self.layers.iter().flat_map(layer).sum::<usize>();
        layers + self.embedding.n_bytes() + self.output.as_ref().map_or(0, Linear::n_bytes)
    }

    /// The product that makes logits: `[vocab][d_model]`.
    pub(crate) fn head(&self) -> &Linear {
        self.output.as_ref().unwrap_or(&self.embedding)
    }
}

struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    pool: &'a ThreadPool,
    used: HashSet<String>,
}

impl<'a> Loader<'a> {
    fn layer(&mut self, layer_idx: usize, shape: &ModelShape) -> Result<Layer, Error> {
        let name = |part: &str| format!("blk.{layer_idx}.{part}.weight");
        let (d_model, d_kv) = (shape.d_model, shape.d_kv());
        let (q, k, v) = (name("attn_q"), name("attn_k"), name("attn_v"));
        let (gate, up) = (name("ffn_gate"), name("ffn_up"));
        Ok(Layer {
            attention_norm: self.vector(&name("attn_norm"), d_model)?,
            qkv: self.linear(&[(&q, shape.d_attention()), (&k, d_kv), (&v, d_kv)], d_model)?,
            qkv_bias: match shape.architecture.has_qkv_bias() {
                true => self.qkv_bias(layer_idx, shape)?,
                false => Vec::new(),
            },
            qk_norms: match shape.architecture.has_qk_norm() {
                true => Some([
                    self.vector(&name("attn_q_norm"), shape.head_dim)?,
                    self.vector(&name("attn_k_norm"), shape.head_dim)?,
                ]),
                false => None,
            },
            attention_output: self.linear(&[(&name("attn_output"), d_model)], shape.d_attention())?,
            ffn_norm: self.vector(&name("ffn_norm"), d_model)?,
            gate_up: self.linear(&[(&gate, shape.d_ffn), (&up, shape.d_ffn)], d_model)?,
            down: self.linear(&[(&name("ffn_down"), d_model)], shape.d_ffn)?,
        })
    }

    fn qkv_bias(&mut self, layer_idx: usize, shape: &ModelShape) -> Result<Vec<f32>, Error> {
        let widths = [("q", shape.d_attention()), ("k", shape.d_kv()), ("v", shape.d_kv())];
        let part = |(part, width)| self.vector(&format!("blk.{layer_idx}.attn_{part}.bias"), width);
        Ok(widths.map(part).into_iter().collect::<Result<Vec<_>, _>>()?.concat())
    }

    /// Stacks matrices, given as (name, rows).
    fn linear(&mut self, parts: &[(&str, usize)], n_in: usize) -> Result<Linear, Error> {
        let mut sources = Vec::with_capacity(parts.len());
        for &(name, n_rows) in parts {
            let tensor = self.tensor(name, &[n_in as u64, n_rows as u64])?;
            sources.push(Source { dtype: tensor.dtype, n_rows, bytes: tensor.data });
        }
        Linear::pack(&sources, n_in, self.pool).map_err(|source| {
            let name = parts.iter().map(|(name, _)| *name).collect::<Vec<_>>().join("`, `");
            Error::Format { name, source }
        })
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let tensor = self.tensor(name, &[len as u64])?;
        decode(&tensor)
    }

    fn tensor(&mut self, name: &str, shape: &[u64]) -> Result<Tensor<'a>, Error> {
        self.used.insert(name.to_owned());
        tensor_of_shape(self.checkpoint, name, shape)
    }

    fn check_all_used(&self, shape: &ModelShape) -> Result<(), Error> {
        let is_known = |name: &str| {
            // It went into the sizes.
            let is_divisors = name == ROPE_DIVISORS && !shape.rope_divisors.is_empty();
            is_divisors || self.used.contains(name)
        };
        match self.checkpoint.tensors().into_iter().find(|tensor| !is_known(&tensor.name)) {
            Some(tensor) => {
                let architecture = shape.architecture.name();
                Err(Error::UnknownTensor { name: tensor.name.clone(), architecture })
            }
            None => Ok(()),
        }
    }
}

/// The tensor, if it has these dimensions (fastest first).
pub(crate) fn tensor_of_shape<'a>(
    checkpoint: &'a Checkpoint,
    name: &str,
    expected: &[u64],
) -> Result<Tensor<'a>, Error> {
    let tensor = checkpoint.tensor(name)?;
    if tensor.shape != expected {
        let (found, expected) = (tensor.shape.to_vec(), expected.to_vec());
        return Err(Error::Dimensions { name: name.to_owned(), found, expected });
    }
    Ok(tensor)
}

/// All numbers of a tensor as f32.
pub(crate) fn decode(tensor: &Tensor<'_>) -> Result<Vec<f32>, Error> {
    let mut out = vec![0.0; tensor.shape.iter().product::<u64>() as usize];
    quant::dequantize(tensor.dtype, tensor.data, &mut out)
        .map_err(|source| Error::Format { name: tensor.name.to_owned(), source: source.into() })?;
    Ok(out)
}

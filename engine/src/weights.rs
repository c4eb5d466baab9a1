//! A model's weights in the form the kernels want: packed matrices, plain norms.

use std::collections::HashSet;

use kernels::linear::{self, Linear, Source};
use kernels::pool::ThreadPool;
use kernels::quant;
use model::gguf::{self, Gguf, Tensor};

use crate::shape::{self, ModelShape};

/// Why a file's weights cannot be loaded. Every message names the tensor.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Shape(#[from] shape::Error),
    #[error(transparent)]
    File(#[from] gguf::Error),
    #[error("tensor `{name}` has dimensions {found:?}, the model's sizes ask for {expected:?}")]
    Dimensions { name: String, found: Vec<u64>, expected: Vec<u64> },
    #[error("tensor `{name}`: {source}")]
    Format { name: String, source: linear::Error },
    /// Running without it would give wrong results, not an error.
    #[error("tensor `{0}` is not part of the llama architecture as this engine knows it")]
    UnknownTensor(String),
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
    /// Reads and packs everything; every tensor of the file must be used.
    pub fn load(gguf: &Gguf, pool: &ThreadPool) -> Result<Self, Error> {
        let shape = ModelShape::read(gguf)?;
        let mut loader = Loader { gguf, pool, used: HashSet::new() };
        let embedding = loader.linear(&[("token_embd.weight", shape.vocab)], shape.d_model)?;
        let layers = (0..shape.n_layers).map(|i| loader.layer(i, &shape)).collect::<Result<_, _>>()?;
        let output_norm = loader.norm("output_norm.weight", shape.d_model)?;
        let has_output = gguf.tensors().any(|tensor| tensor.name == "output.weight");
        let output = has_output.then(|| loader.linear(&[("output.weight", shape.vocab)], shape.d_model));
        let output = output.transpose()?;
        loader.check_all_used()?;
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
    gguf: &'a Gguf,
    pool: &'a ThreadPool,
    used: HashSet<String>,
}

impl<'a> Loader<'a> {
    fn layer(&mut self, layer_idx: usize, shape: &ModelShape) -> Result<Layer, Error> {
        let name = |part: &str| format!("blk.{layer_idx}.{part}.weight");
        let (d_model, d_kv) = (shape.d_model, shape.n_kv_heads * shape.head_dim);
        let (q, k, v) = (name("attn_q"), name("attn_k"), name("attn_v"));
        let (gate, up) = (name("ffn_gate"), name("ffn_up"));
        Ok(Layer {
            attention_norm: self.norm(&name("attn_norm"), d_model)?,
            qkv: self.linear(&[(&q, shape.d_attention()), (&k, d_kv), (&v, d_kv)], d_model)?,
            attention_output: self.linear(&[(&name("attn_output"), d_model)], shape.d_attention())?,
            ffn_norm: self.norm(&name("ffn_norm"), d_model)?,
            gate_up: self.linear(&[(&gate, shape.d_ffn), (&up, shape.d_ffn)], d_model)?,
            down: self.linear(&[(&name("ffn_down"), d_model)], shape.d_ffn)?,
        })
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

    fn norm(&mut self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let tensor = self.tensor(name, &[len as u64])?;
        decode(&tensor)
    }

    fn tensor(&mut self, name: &str, shape: &[u64]) -> Result<Tensor<'a>, Error> {
        self.used.insert(name.to_owned());
        tensor_of_shape(self.gguf, name, shape)
    }

    fn check_all_used(&self) -> Result<(), Error> {
        match self.gguf.tensors().find(|tensor| !self.used.contains(&tensor.name)) {
            Some(tensor) => Err(Error::UnknownTensor(tensor.name.clone())),
            None => Ok(()),
        }
    }
}

/// The tensor, if it has these dimensions (fastest first).
pub(crate) fn tensor_of_shape<'a>(gguf: &'a Gguf, name: &str, expected: &[u64]) -> Result<Tensor<'a>, Error> {
    let tensor = gguf.tensor(name)?;
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

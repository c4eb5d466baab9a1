//! The draft head: guesses the next tokens from the model's last hidden state. No attention, no KV; its whole state is
//! one vector of the model's width.
//!
//! ```text
//! u       = [ rms(s) x norm_state ; rms(E[token]) x norm_emb ]       E = the model's embedding
//! [a ; b] = w1 u          s' = s + w2 (silu(a) x b)
//! logit_i = (rms(s') x norm_out) . E[vocab_ids[i]]
//! ```
//! s starts as the residual stream before the output norm. Related to EAGLE (Li et al. 2024) without its attention;
//! the short output vocabulary is FR-Spec's idea (Zhao et al. 2025). Weights are rounded to 8 bits when loaded.

use std::collections::HashMap;
use std::sync::Arc;

use kernels::elementwise;
use kernels::isa::Isa;
use kernels::linear::{self, Input, Linear, QuantBlock, Source, Write};
use kernels::pool::ThreadPool;
use kernels::quant::{self, DType};

use super::Guess;
use crate::weights::Weights;

mod file;

pub use file::Error;
use file::File;

/// Made for SmolLM2-135M-Instruct; see NOTICE.
const SMOLLM2: &[u8] = include_bytes!("../../assets/smollm2_draft_head_fp16.safetensors");

/// As in training.
const RMS_EPS: f32 = 1e-5;

/// A trained head for one model.
#[derive(Debug)]
pub struct DraftHead {
    weights: Arc<Weights>,
    /// `[2 x hidden][2 x d_model]`.
    w1: Linear,
    /// `[d_model][hidden]`.
    w2: Linear,
    /// `[d_model]` each.
    norm_state: Vec<f32>,
    norm_emb: Vec<f32>,
    norm_out: Vec<f32>,
    /// `[n_ids][d_model]`: the rows of the model's head that can be proposed.
    out: Linear,
    /// The token of each row.
    ids: Vec<u32>,
    d_model: usize,
    d_hidden: usize,
}

impl DraftHead {
    /// Reads a head from the bytes of its safetensors file and fits it to `weights`.
    ///
    /// # Errors
    /// When the file is damaged, or made for a model of other sizes.
    pub fn load(bytes: &[u8], weights: &Arc<Weights>, pool: &ThreadPool) -> Result<Self, Error> {
        let file = File::parse(bytes)?;
        let (d_model, vocab) = (weights.shape().d_model, weights.shape().vocab);
        let d_hidden = file.rows("w2", d_model)?.1;
        let w2 = file.floats("w2", &[d_model, d_hidden])?;
        let ids = file.ids("vocab_ids")?;
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::OtherModel(format!("it proposes token {id}, the model has {vocab}")));
        }
        let matrix = |name: &str, n_rows: usize, n_in: usize| {
            let values = file.floats(name, &[n_rows, n_in])?;
            pack(&values, n_rows, n_in, pool)
        };
        let mut rows = vec![0.0; ids.len() * d_model];
        for (row, &id) in rows.chunks_exact_mut(d_model).zip(&ids) {
            weights.head().row(id as usize, row);
        }
        Ok(Self {
            w1: matrix("w1", 2 * d_hidden, 2 * d_model)?,
            w2: pack(&w2, d_model, d_hidden, pool)?,
            norm_state: file.floats("norm_state", &[d_model])?,
            norm_emb: file.floats("norm_emb", &[d_model])?,
            norm_out: file.floats("norm_out", &[d_model])?,
            out: pack(&rows, ids.len(), d_model, pool)?,
            weights: Arc::clone(weights),
            ids,
            d_model,
            d_hidden,
        })
    }

    /// The head that ships with Baton for a model like this, if there is one. It was trained on one file of the model; with
    /// another quantization its guesses are a little worse, never the output.
    #[must_use]
    pub fn built_in(weights: &Arc<Weights>, pool: &ThreadPool) -> Option<Self> {
        let shape = weights.shape();
        let smollm2 = (shape.n_layers, shape.d_model, shape.n_heads, shape.vocab) == (30, 576, 9, 49_152);
        smollm2.then(|| Self::load(SMOLLM2, weights, pool).expect("the file is part of the program"))
    }

    /// Memory of its matrices.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        [&self.w1, &self.w2, &self.out].map(Linear::n_bytes).iter().sum()
    }
}

/// Packs f32 rows as 8-bit blocks.
fn pack(values: &[f32], n_rows: usize, n_in: usize, pool: &ThreadPool) -> Result<Linear, Error> {
    let blocks = n_in.is_multiple_of(linear::BLOCK_LEN);
    if !blocks {
        return Err(Error::OtherModel(format!("rows of {n_in} are no multiple of {}", linear::BLOCK_LEN)));
    }
    let bytes = quant::quantize_q8_0(values);
    let source = Source { dtype: DType::Q8_0, n_rows, bytes: &bytes };
    Linear::pack(&[source], n_in, pool).map_err(|error| Error::Damaged(error.to_string()))
}

/// Runs a head for the streams of one engine.
#[derive(Debug)]
pub(crate) struct Runner {
    head: Arc<DraftHead>,
    pool: Arc<ThreadPool>,
    isa: Isa,
    /// s of every stream that is being drafted for, by its index.
    states: HashMap<usize, Vec<f32>>,
}

impl Runner {
    pub(crate) fn new(head: Arc<DraftHead>, pool: Arc<ThreadPool>) -> Self {
        Self { head, pool, isa: Isa::detect(), states: HashMap::new() }
    }

    /// Starts drafts: streams as (index, hidden state of the newest position the model has run).
    pub(crate) fn begin<'a>(&mut self, streams: impl Iterator<Item = (usize, &'a [f32])>) {
        self.states.clear();
        self.states.extend(streams.map(|(idx, hidden)| (idx, hidden.to_vec())));
    }

    /// Guesses the token after each of `tokens`, given as (stream index, token).
    pub(crate) fn guess(&mut self, tokens: impl Iterator<Item = (usize, u32)>) -> Vec<Guess> {
        let Self { head, pool, isa, states } = self;
        let (d_model, d_hidden, isa) = (head.d_model, head.d_hidden, *isa);
        let tokens: Vec<(usize, u32)> = tokens.collect();
        let mut inputs = vec![0.0; tokens.len() * 2 * d_model];
        let mut embedded = vec![0.0; d_model];
        for (input, (idx, token)) in inputs.chunks_exact_mut(2 * d_model).zip(&tokens) {
            let (state, token_part) = input.split_at_mut(d_model);
            elementwise::rms_norm(isa, &states[idx], &head.norm_state, RMS_EPS, state);
            head.weights.embedding.row(*token as usize, &mut embedded);
            elementwise::rms_norm(isa, &embedded, &head.norm_emb, RMS_EPS, token_part);
        }
        let mut ab = vec![0.0; tokens.len() * 2 * d_hidden];
        product(pool, isa, &head.w1, &inputs, &mut ab);
        let mut gated = vec![0.0; tokens.len() * d_hidden];
        for (gated, ab) in gated.chunks_exact_mut(d_hidden).zip(ab.chunks_exact(2 * d_hidden)) {
            elementwise::silu_mul(isa, &ab[..d_hidden], &ab[d_hidden..], gated);
        }
        let mut change = vec![0.0; tokens.len() * d_model];
        product(pool, isa, &head.w2, &gated, &mut change);
        let mut normed = vec![0.0; tokens.len() * d_model];
        let rows = normed.chunks_exact_mut(d_model).zip(change.chunks_exact(d_model));
        for ((normed, change), (idx, _)) in rows.zip(&tokens) {
            let state = states.get_mut(idx).expect("the draft was begun");
            state.iter_mut().zip(change).for_each(|(s, c)| *s += c);
            elementwise::rms_norm(isa, state, &head.norm_out, RMS_EPS, normed);
        }
        let mut logits = vec![0.0; tokens.len() * head.ids.len()];
        product(pool, isa, &head.out, &normed, &mut logits);
        let guess = |logits: &[f32]| Guess::likeliest(isa, logits, |row| head.ids[row]);
        logits.chunks_exact(head.ids.len()).map(guess).collect()
    }
}

fn product(pool: &ThreadPool, isa: Isa, linear: &Linear, plain: &[f32], out: &mut [f32]) {
    let mut blocks = vec![QuantBlock::default(); plain.len() / linear::BLOCK_LEN];
    linear::quantize(isa, plain, &mut blocks);
    linear.forward(pool, isa, Input { plain, blocks: &blocks }, Write::Replace, out);
}

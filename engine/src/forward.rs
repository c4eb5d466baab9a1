//! One step: a ragged batch of tokens of several sequences through all layers.
//!
//! The logits of a token depend on its sequence alone: batch, chunking and thread count do not change a bit
//! (see `kernels::linear` and `kernels::attention`; tested in `engine/tests/engine/forward.rs`).

use std::sync::Arc;

use kernels::attention::{Attention, BLOCK_TOKENS, LayerPlace, Span};
use kernels::elementwise::{self, Rope, Turn};
use kernels::isa::Isa;
use kernels::linear::{self, Input, Linear, QuantBlock, Write};
use kernels::pool::ThreadPool;
use kernels::table::Buffer;

use crate::arena::{KvArena, KvGeometry};
use crate::projection::Projection;
use crate::shape::ModelShape;
use crate::weights::{Layer, Weights};

/// Fewer tokens than this are not worth a parallel region between the products.
const MIN_TOKENS_TO_SPLIT: usize = 3;

/// Tokens that pass the feed-forward layer together, at most about: 168 x 3072 x 4 B = 2 MB.
const FFN_TOKENS: usize = 168;

/// Why a step was refused; nothing was written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("a step of {found} tokens exceeds the limit of {limit}")]
    TooManyTokens { found: usize, limit: usize },
    #[error("token id {token} is outside the vocabulary of {vocab}")]
    Token { token: u32, vocab: usize },
    #[error("position {position} is outside the context of {context_len}")]
    Position { position: usize, context_len: usize },
    #[error("a block table of {found} blocks is too short for {n_tokens} tokens")]
    BlockTable { found: usize, n_tokens: usize },
    #[error("KV block {block} does not exist; the arena has {n_blocks}")]
    Block { block: u32, n_blocks: usize },
    #[error("the KV arena has geometry {found:?}, the model needs {expected:?}")]
    Geometry { found: KvGeometry, expected: KvGeometry },
}

/// One sequence's share of a step.
#[derive(Debug, Clone, Copy)]
pub struct Slice<'a> {
    pub tokens: &'a [u32],
    /// Position of the first token; keys and values of all tokens before it are in `blocks`.
    pub start: usize,
    /// The sequence's blocks, which cover `start + tokens.len()` tokens. Blocks that this step writes to belong to
    /// this sequence alone.
    pub blocks: &'a [u32],
    pub logits: Logits,
}

/// Which tokens of a slice get logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    None,
    Last,
    All,
}

/// Logits in slice order.
#[derive(Debug, Clone, PartialEq)]
pub struct LogitRows {
    vocab: usize,
    data: Vec<f32>,
    d_model: usize,
    /// The residual stream that each row was made from.
    hidden: Vec<f32>,
}

impl LogitRows {
    pub fn n_rows(&self) -> usize {
        self.data.len() / self.vocab
    }

    /// The i-th row, `[vocab]`. Panics if there is none.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.vocab..(i + 1) * self.vocab]
    }

    /// The residual stream behind the i-th row, before the output norm: `[d_model]`. Panics if there is none.
    pub fn hidden(&self, i: usize) -> &[f32] {
        &self.hidden[i * self.d_model..(i + 1) * self.d_model]
    }
}

/// Runs steps of one model; holds the intermediate results of a step.
#[derive(Debug)]
pub struct Forward {
    weights: Arc<Weights>,
    rope: Rope,
    max_batch_tokens: usize,
    workers: Workers,
    scratch: Scratch,
}

/// Who computes, and with which instructions.
#[derive(Debug)]
struct Workers {
    pool: Arc<ThreadPool>,
    isa: Isa,
}

/// Intermediate results, `[n_tokens][width]` each.
#[derive(Debug, Default)]
struct Scratch {
    /// The residual stream, `d_model` wide.
    x: Buffer,
    /// Cosines and sines of the tokens' positions, `head_dim / 2` wide.
    turns: Vec<Turn>,
    qkv: Buffer,
    /// Attention output, `n_heads x head_dim` wide.
    attended: Buffer,
    /// `2 d_ffn` wide, for some tokens at a time.
    gate_up: Buffer,
    prepared: Prepared,
}

/// Input of a product, in both forms.
#[derive(Debug, Default)]
struct Prepared {
    plain: Buffer,
    blocks: Vec<QuantBlock>,
}

impl Forward {
    /// `max_batch_tokens` limits a step; memory grows with the largest step seen.
    pub fn new(weights: Arc<Weights>, pool: Arc<ThreadPool>, max_batch_tokens: usize) -> Self {
        Self::with_isa(weights, pool, max_batch_tokens, Isa::detect())
    }

    /// The same with other instructions than the fastest, to compare them.
    pub fn with_isa(weights: Arc<Weights>, pool: Arc<ThreadPool>, max_batch_tokens: usize, isa: Isa) -> Self {
        let shape = weights.shape();
        let rope = Rope::new(shape.rope_layout, shape.rope_base, shape.head_dim, &shape.rope_divisors);
        let (workers, scratch) = (Workers { pool, isa }, Scratch::default());
        Self { weights, rope, max_batch_tokens, workers, scratch }
    }

    /// Writes keys and values of all tokens into `arena` and returns the logits asked for. `on_layer(layer_idx, arena)`
    /// is called as soon as a layer's keys and values of the whole batch are written.
    pub fn run(
        &mut self,
        arena: &mut KvArena,
        slices: &[Slice<'_>],
        on_layer: &mut dyn FnMut(usize, &KvArena),
    ) -> Result<LogitRows, Error> {
        self.check(arena, slices)?;
        let mut spans = spans(slices);
        let weights = Arc::clone(&self.weights);
        self.embed(slices);
        self.find_turns(&spans);
        for (layer_idx, layer) in weights.layers.iter().enumerate() {
            self.project_qkv(layer);
            let place = arena.place(layer_idx);
            self.attention(place, &spans).store(&self.workers.pool, self.workers.isa, arena.words_mut());
            on_layer(layer_idx, arena);
            if layer_idx + 1 == weights.layers.len() {
                spans = self.keep_wanted(slices);
            }
            self.attend(place, &spans, arena);
            self.add_attention(layer);
            self.add_feed_forward(layer);
        }
        Ok(self.logits())
    }

    fn check(&self, arena: &KvArena, slices: &[Slice<'_>]) -> Result<(), Error> {
        let shape = self.weights.shape();
        let found = arena.geometry();
        let expected = shape.kv_geometry().with_dtype(found.dtype);
        if found != expected {
            return Err(Error::Geometry { found, expected });
        }
        let n_tokens = slices.iter().map(|slice| slice.tokens.len()).sum();
        if n_tokens > self.max_batch_tokens {
            return Err(Error::TooManyTokens { found: n_tokens, limit: self.max_batch_tokens });
        }
        slices.iter().try_for_each(|slice| check_slice(slice, shape, arena.n_blocks()))
    }

    /// Fills the residual stream with the tokens' embeddings and sizes the other buffers.
    fn embed(&mut self, slices: &[Slice<'_>]) {
        let shape = &self.weights.shape;
        let tokens: Vec<u32> = slices.iter().flat_map(|slice| slice.tokens).copied().collect();
        let scratch = &mut self.scratch;
        scratch.resize(shape, tokens.len());
        let embedding = &self.weights.embedding;
        self.workers.each_row(&mut scratch.x, shape.d_model, |i, x| embedding.row(tokens[i] as usize, x));
    }

    /// Computes the turns of all positions, which every layer uses.
    fn find_turns(&mut self, spans: &[Span<'_>]) {
        let positions: Vec<usize> =
            spans.iter().flat_map(|span| span.start..span.start + span.rows.len()).collect();
        let (rope, n_turns) = (&self.rope, self.rope.n_turns());
        self.scratch.turns.resize(positions.len() * n_turns, Turn::default());
        self.workers.each_row(&mut self.scratch.turns, n_turns, |i, out| rope.turns_at(positions[i], out));
    }

    /// Norm, product, and what the architecture does to queries and keys.
    fn project_qkv(&mut self, layer: &Layer) {
        let shape = &self.weights.shape;
        let scratch = &mut self.scratch;
        self.workers.norm(&scratch.x, &layer.attention_norm, shape.rms_eps, &mut scratch.prepared);
        self.workers.product(&layer.qkv, &scratch.prepared, Write::Replace, &mut scratch.qkv);
        let projection =
            Projection { shape, layer, rope: &self.rope, turns: &scratch.turns, isa: self.workers.isa };
        self.workers.each_row(&mut scratch.qkv, shape.heads().row_len(), |i, row| projection.finish(i, row));
    }

    fn attention<'a>(&'a self, place: LayerPlace, spans: &'a [Span<'a>]) -> Attention<'a> {
        Attention { heads: self.weights.shape.heads(), place, spans, qkv: &self.scratch.qkv }
    }

    fn attend(&mut self, place: LayerPlace, spans: &[Span<'_>], arena: &KvArena) {
        let mut attended = std::mem::take(&mut self.scratch.attended);
        let attention = self.attention(place, spans);
        attention.run(&self.workers.pool, self.workers.isa, arena.words(), &mut attended);
        self.scratch.attended = attended;
    }

    /// Drops all rows but those whose logits are asked for: once the last layer's keys and values are written,
    /// nothing depends on the others. Returns what is left.
    fn keep_wanted<'a>(&mut self, slices: &[Slice<'a>]) -> Vec<Span<'a>> {
        let shape = &self.weights.shape;
        let (mut spans, mut n_kept, mut n_tokens) = (Vec::new(), 0, 0);
        for slice in slices {
            n_tokens += slice.tokens.len();
            let n_rows = slice.logits.n_rows(slice.tokens.len());
            let (from, rows) = (n_tokens - n_rows..n_tokens, n_kept..n_kept + n_rows);
            for (buffer, width) in
                [(&mut self.scratch.x, shape.d_model), (&mut self.scratch.qkv, shape.heads().row_len())]
            {
                buffer.copy_within(from.start * width..from.end * width, rows.start * width);
            }
            n_kept = rows.end;
            if n_rows > 0 {
                let start = slice.start + slice.tokens.len() - n_rows;
                spans.push(Span { rows, start, blocks: slice.blocks });
            }
        }
        self.scratch.resize(shape, n_kept);
        spans
    }

    fn add_attention(&mut self, layer: &Layer) {
        let scratch = &mut self.scratch;
        let attended = &scratch.attended;
        let width = self.weights.shape.d_attention();
        self.workers.prepare(width, attended.len() / width, &mut scratch.prepared, |i, plain| {
            plain.copy_from_slice(&attended[i * width..(i + 1) * width]);
        });
        self.workers.product(&layer.attention_output, &scratch.prepared, Write::Add, &mut scratch.x);
    }

    /// A few tokens at a time: what is between the products stays in the caches.
    fn add_feed_forward(&mut self, layer: &Layer) {
        let shape = &self.weights.shape;
        let (scratch, isa, width) = (&mut self.scratch, self.workers.isa, shape.d_ffn);
        let n_part = linear::part_tokens(scratch.x.len() / shape.d_model, FFN_TOKENS);
        for x in scratch.x.chunks_mut(n_part * shape.d_model) {
            let n_tokens = x.len() / shape.d_model;
            self.workers.norm(x, &layer.ffn_norm, shape.rms_eps, &mut scratch.prepared);
            scratch.gate_up.resize(n_tokens * 2 * width);
            self.workers.product(&layer.gate_up, &scratch.prepared, Write::Replace, &mut scratch.gate_up);
            let gate_up = &scratch.gate_up;
            self.workers.prepare(width, n_tokens, &mut scratch.prepared, |i, plain| {
                let (gate, up) = gate_up[2 * i * width..2 * (i + 1) * width].split_at(width);
                elementwise::silu_mul(isa, gate, up, plain);
            });
            self.workers.product(&layer.down, &scratch.prepared, Write::Add, x);
        }
    }

    /// The logits of all rows that were kept.
    fn logits(&mut self) -> LogitRows {
        let shape = &self.weights.shape;
        let Scratch { x, prepared, .. } = &mut self.scratch;
        let mut data = vec![0.0; x.len() / shape.d_model * shape.vocab];
        self.workers.norm(x, &self.weights.output_norm, shape.rms_eps, prepared);
        self.workers.product(self.weights.head(), prepared, Write::Replace, &mut data);
        LogitRows { vocab: shape.vocab, data, d_model: shape.d_model, hidden: x.to_vec() }
    }
}

impl Scratch {
    /// Room for `n_tokens`; what is there stays.
    fn resize(&mut self, shape: &ModelShape, n_tokens: usize) {
        self.x.resize(n_tokens * shape.d_model);
        self.qkv.resize(n_tokens * shape.heads().row_len());
        self.attended.resize(n_tokens * shape.d_attention());
    }
}

impl Logits {
    /// Rows of a slice of `n_tokens`, from its end.
    fn n_rows(self, n_tokens: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Last => n_tokens.min(1),
            Self::All => n_tokens,
        }
    }
}

impl Workers {
    /// Normed rows of `x`, ready for a product; `weight` is `[width]`.
    fn norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut Prepared) {
        let width = weight.len();
        self.prepare(width, x.len() / width, out, |i, plain| {
            elementwise::rms_norm(self.isa, &x[i * width..(i + 1) * width], weight, eps, plain);
        });
    }

    /// Lets `fill(row, plain)` write each row, `[width]`, and quantizes it.
    fn prepare(
        &self,
        width: usize,
        n_rows: usize,
        out: &mut Prepared,
        fill: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let n_blocks = width / linear::BLOCK_LEN;
        out.plain.resize(n_rows * width);
        out.blocks.resize(n_rows * n_blocks, QuantBlock::default());
        let n_part_rows = self.n_part_rows(n_rows);
        let plain = out.plain.chunks_mut(n_part_rows * width);
        let mut parts: Vec<_> =
            plain.zip(out.blocks.chunks_mut(n_part_rows * n_blocks)).enumerate().collect();
        self.pool.each(&mut parts, |(part_idx, (plain, blocks))| {
            let rows = plain.chunks_exact_mut(width).zip(blocks.chunks_exact_mut(n_blocks));
            for (i, (plain, blocks)) in rows.enumerate() {
                fill(*part_idx * n_part_rows + i, plain);
                linear::quantize(self.isa, plain, blocks);
            }
        });
    }

    fn each_row<T: Send>(&self, rows: &mut [T], width: usize, body: impl Fn(usize, &mut [T]) + Sync) {
        let n_part_rows = self.n_part_rows(rows.len() / width);
        let mut parts: Vec<_> = rows.chunks_mut(n_part_rows * width).enumerate().collect();
        self.pool.each(&mut parts, |(part_idx, rows)| {
            for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                body(*part_idx * n_part_rows + i, row);
            }
        });
    }

    fn product(&self, linear: &Linear, input: &Prepared, write: Write, out: &mut [f32]) {
        let input = Input { plain: &input.plain, blocks: &input.blocks };
        linear.forward(&self.pool, self.isa, input, write, out);
    }

    /// Rows that one thread takes at a time; at least 1.
    fn n_part_rows(&self, n_rows: usize) -> usize {
        let n_parts = if n_rows < MIN_TOKENS_TO_SPLIT { 1 } else { self.pool.n_threads() };
        n_rows.div_ceil(n_parts).max(1)
    }
}

fn spans<'a>(slices: &[Slice<'a>]) -> Vec<Span<'a>> {
    let mut n_rows = 0;
    let span = |slice: &Slice<'a>| {
        let rows = n_rows..n_rows + slice.tokens.len();
        n_rows = rows.end;
        Span { rows, start: slice.start, blocks: slice.blocks }
    };
    slices.iter().map(span).collect()
}

fn check_slice(slice: &Slice<'_>, shape: &ModelShape, n_blocks: usize) -> Result<(), Error> {
    if let Some(&token) = slice.tokens.iter().find(|&&token| token as usize >= shape.vocab) {
        return Err(Error::Token { token, vocab: shape.vocab });
    }
    let n_tokens = slice.start.saturating_add(slice.tokens.len());
    if n_tokens > shape.context_len {
        return Err(Error::Position { position: n_tokens - 1, context_len: shape.context_len });
    }
    if slice.blocks.len() < n_tokens.div_ceil(BLOCK_TOKENS) {
        return Err(Error::BlockTable { found: slice.blocks.len(), n_tokens });
    }
    match slice.blocks.iter().find(|&&block| block as usize >= n_blocks) {
        Some(&block) => Err(Error::Block { block, n_blocks }),
        None => Ok(()),
    }
}

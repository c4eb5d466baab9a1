//! The forward pass by the book: plain loops over decoded f32 weights, no cache, no SIMD. Slow, and the judge of the
//! fast one. Follows llama2.c's `run.c`.

use kernels::elementwise::RopeLayout;
use model::checkpoint::Checkpoint;

use crate::shape::ModelShape;
use crate::weights::{Error, decode, tensor_of_shape};

/// A model read straight from its file; weights are decoded anew for every call, one matrix at a time.
#[derive(Debug)]
pub struct Reference<'a> {
    checkpoint: &'a Checkpoint,
    shape: ModelShape,
}

/// Rows of numbers, one per token.
type Rows = Vec<Vec<f32>>;

impl<'a> Reference<'a> {
    pub fn new(checkpoint: &'a Checkpoint) -> Result<Self, Error> {
        Ok(Self { checkpoint, shape: ModelShape::read(checkpoint)? })
    }

    /// Logits `[vocab]` after every one of `tokens`, which start at position 0.
    pub fn logits(&self, tokens: &[u32]) -> Result<Rows, Error> {
        let shape = &self.shape;
        let embedding = self.matrix("token_embd", shape.d_model, shape.vocab)?;
        let row = |&token: &u32| embedding[token as usize * shape.d_model..][..shape.d_model].to_vec();
        let mut x: Rows = tokens.iter().map(row).collect();
        for layer_idx in 0..shape.n_layers {
            self.attention(layer_idx, &mut x)?;
            self.feed_forward(layer_idx, &mut x)?;
        }
        let x = self.norm("output_norm", &x)?;
        let head =
            if shape.tied_head { embedding } else { self.matrix("output", shape.d_model, shape.vocab)? };
        Ok(product(&head, &x))
    }

    fn attention(&self, layer_idx: usize, x: &mut Rows) -> Result<(), Error> {
        let shape = &self.shape;
        let d_kv = shape.d_kv();
        let linear = |part: &str, n_in, n_out| self.matrix(&format!("blk.{layer_idx}.{part}"), n_in, n_out);
        let normed = self.norm(&format!("blk.{layer_idx}.attn_norm"), x)?;
        let mut queries = product(&linear("attn_q", shape.d_model, shape.d_attention())?, &normed);
        let mut keys = product(&linear("attn_k", shape.d_model, d_kv)?, &normed);
        let mut values = product(&linear("attn_v", shape.d_model, d_kv)?, &normed);
        if shape.architecture.has_qkv_bias() {
            for (part, rows) in [("q", &mut queries), ("k", &mut keys), ("v", &mut values)] {
                self.add_bias(&format!("blk.{layer_idx}.attn_{part}.bias"), rows)?;
            }
        }
        for (part, rows) in [("q", &mut queries), ("k", &mut keys)] {
            if shape.architecture.has_qk_norm() {
                self.norm_heads(&format!("blk.{layer_idx}.attn_{part}_norm.weight"), rows)?;
            }
            rows.iter_mut().enumerate().for_each(|(position, row)| self.rope(position, row));
        }
        let mut mixed = vec![vec![0.0; shape.d_attention()]; x.len()];
        for (position, mixed) in mixed.iter_mut().enumerate() {
            for (head, out) in mixed.chunks_exact_mut(shape.head_dim).enumerate() {
                let kv_head = head / (shape.n_heads / shape.n_kv_heads);
                let (q, kv) = (self.head(head), self.head(kv_head));
                let query = &queries[position][q];
                let scale = (shape.head_dim as f32).sqrt().recip();
                let mut weights: Vec<f32> =
                    keys[..=position].iter().map(|key| dot(query, &key[kv.clone()]) * scale).collect();
                softmax(&mut weights);
                for (weight, value) in weights.iter().zip(&values) {
                    out.iter_mut().zip(&value[kv.clone()]).for_each(|(o, v)| *o += weight * v);
                }
            }
        }
        add(x, &product(&linear("attn_output", shape.d_attention(), shape.d_model)?, &mixed));
        Ok(())
    }

    fn feed_forward(&self, layer_idx: usize, x: &mut Rows) -> Result<(), Error> {
        let (d_model, d_ffn) = (self.shape.d_model, self.shape.d_ffn);
        let linear = |part: &str, n_in, n_out| self.matrix(&format!("blk.{layer_idx}.{part}"), n_in, n_out);
        let normed = self.norm(&format!("blk.{layer_idx}.ffn_norm"), x)?;
        let mut gate = product(&linear("ffn_gate", d_model, d_ffn)?, &normed);
        let up = product(&linear("ffn_up", d_model, d_ffn)?, &normed);
        for (gate, up) in gate.iter_mut().flatten().zip(up.iter().flatten()) {
            *gate = *gate / (1.0 + (-*gate).exp()) * up;
        }
        add(x, &product(&linear("ffn_down", d_ffn, d_model)?, &gate));
        Ok(())
    }

    fn norm(&self, name: &str, x: &Rows) -> Result<Rows, Error> {
        let weight = self.vector(&format!("{name}.weight"), self.shape.d_model)?;
        Ok(x.iter().map(|row| self.normed(row, &weight)).collect())
    }

    fn normed(&self, row: &[f32], weight: &[f32]) -> Vec<f32> {
        let rms = (dot(row, row) / row.len() as f32 + self.shape.rms_eps).sqrt();
        row.iter().zip(weight).map(|(x, w)| x / rms * w).collect()
    }

    fn norm_heads(&self, name: &str, rows: &mut Rows) -> Result<(), Error> {
        let head_dim = self.shape.head_dim;
        let weight = self.vector(name, head_dim)?;
        for head in rows.iter_mut().flat_map(|row| row.chunks_exact_mut(head_dim)) {
            head.copy_from_slice(&self.normed(head, &weight));
        }
        Ok(())
    }

    fn add_bias(&self, name: &str, rows: &mut Rows) -> Result<(), Error> {
        let bias = self.vector(name, rows.first().map_or(0, Vec::len))?;
        rows.iter_mut().for_each(|row| row.iter_mut().zip(&bias).for_each(|(x, b)| *x += b));
        Ok(())
    }

    fn rope(&self, position: usize, row: &mut [f32]) {
        let head_dim = self.shape.head_dim;
        for head in row.chunks_exact_mut(head_dim) {
            for i in 0..head_dim / 2 {
                let divisor = self.shape.rope_divisors.get(i).copied().unwrap_or(1.0);
                let frequency = self.shape.rope_base.powf(-2.0 * i as f32 / head_dim as f32) / divisor;
                let angle = position as f32 * frequency;
                let (a, b) = match self.shape.rope_layout {
                    RopeLayout::Adjacent => (2 * i, 2 * i + 1),
                    RopeLayout::HalfSplit => (i, i + head_dim / 2),
                };
                let (x, y) = (head[a], head[b]);
                head[a] = x * angle.cos() - y * angle.sin();
                head[b] = x * angle.sin() + y * angle.cos();
            }
        }
    }

    fn head(&self, head: usize) -> std::ops::Range<usize> {
        head * self.shape.head_dim..(head + 1) * self.shape.head_dim
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        decode(&tensor_of_shape(self.checkpoint, name, &[len as u64])?)
    }

    /// Decoded weights `[n_out][n_in]`.
    fn matrix(&self, name: &str, n_in: usize, n_out: usize) -> Result<Vec<f32>, Error> {
        let name = format!("{name}.weight");
        decode(&tensor_of_shape(self.checkpoint, &name, &[n_in as u64, n_out as u64])?)
    }
}

/// Every row of `x` times the matrix `[n_out][n_in]`.
fn product(matrix: &[f32], x: &Rows) -> Rows {
    let row = |x: &Vec<f32>| matrix.chunks_exact(x.len()).map(|w| dot(w, x)).collect();
    x.iter().map(row).collect()
}

/// Sixteen partial sums, which the compiler can keep in vector registers.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; 16];
    for (a, b) in a.as_chunks::<16>().0.iter().zip(b.as_chunks::<16>().0) {
        for i in 0..16 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum()
}

fn softmax(x: &mut [f32]) {
    let peak = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    x.iter_mut().for_each(|x| *x = (*x - peak).exp());
    let sum: f32 = x.iter().sum();
    x.iter_mut().for_each(|x| *x /= sum);
}

fn add(x: &mut Rows, y: &Rows) {
    x.iter_mut().flatten().zip(y.iter().flatten()).for_each(|(x, y)| *x += y);
}

//! What happens to a token's queries, keys and values between the product and the attention.

use kernels::elementwise::{self, Rope, Turn};
use kernels::isa::Isa;

use crate::shape::{MAX_HEAD_DIM, ModelShape};
use crate::weights::Layer;

/// One layer's part in a step: biases (Qwen2), norms of the heads (Qwen3), rotation, and the division of queries by
/// sqrt(head_dim).
pub(crate) struct Projection<'a> {
    pub(crate) shape: &'a ModelShape,
    pub(crate) layer: &'a Layer,
    pub(crate) rope: &'a Rope,
    /// Of every token: `[n_tokens][head_dim / 2]`.
    pub(crate) turns: &'a [Turn],
    pub(crate) isa: Isa,
}

impl Projection<'_> {
    /// Finishes the row of the step's `i`-th token: queries, keys, values.
    pub(crate) fn finish(&self, i: usize, row: &mut [f32]) {
        let (shape, layer) = (self.shape, self.layer);
        row.iter_mut().zip(&layer.qkv_bias).for_each(|(x, bias)| *x += bias);
        let (queries, rest) = row.split_at_mut(shape.d_attention());
        let keys = &mut rest[..shape.d_kv()];
        if let Some([query_norm, key_norm]) = &layer.qk_norms {
            self.norm_heads(query_norm, queries);
            self.norm_heads(key_norm, keys);
        }
        let n_turns = self.rope.n_turns();
        let turns = &self.turns[i * n_turns..][..n_turns];
        let scale = (shape.head_dim as f32).sqrt().recip();
        self.rope.turn(turns, scale, queries);
        self.rope.turn(turns, 1.0, keys);
    }

    fn norm_heads(&self, weight: &[f32], heads: &mut [f32]) {
        let mut copy = [0.0; MAX_HEAD_DIM];
        let copy = &mut copy[..weight.len()];
        for head in heads.chunks_exact_mut(weight.len()) {
            copy.copy_from_slice(head);
            elementwise::rms_norm(self.isa, copy, weight, self.shape.rms_eps, head);
        }
    }
}

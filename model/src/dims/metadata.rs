//! Sizes from GGUF metadata, whose keys begin with the architecture's name.

use kernels::elementwise::RopeLayout;
use kernels::quant::DType;

use super::{Architecture, Dims, Error, ROPE_DIVISORS, impossible, refuse_unless};
use crate::gguf::Gguf;

/// Reads the sizes of `gguf`.
pub(crate) fn of_gguf(gguf: &Gguf) -> Result<Dims, Error> {
    let architecture = Architecture::named(gguf.str("general.architecture")?)?;
    let key = |part: &str| format!("{}.{part}", architecture.name());
    let size = |part: &str| gguf.u32(&key(part)).map(|n| n as usize);
    let has = |part: &str| gguf.get(&key(part)).is_some();
    let optional = |part: &str, default| if has(part) { size(part) } else { Ok(default) };
    let (d_model, n_heads) = (size("embedding_length")?, size("attention.head_count")?);
    let head_dim = optional("attention.key_length", d_model.checked_div(n_heads).unwrap_or(0))?;
    let dims = Dims {
        architecture,
        n_layers: size("block_count")?,
        d_model,
        d_ffn: size("feed_forward_length")?,
        n_heads,
        n_kv_heads: optional("attention.head_count_kv", n_heads)?,
        head_dim,
        vocab: gguf.tensor("token_embd.weight")?.shape.get(1).map_or(0, |&n| n as usize),
        context_len: size("context_length")?,
        rms_eps: gguf.f32(&key("attention.layer_norm_rms_epsilon"))?,
        tied_head: gguf.tensor("output.weight").is_err(),
        rope_layout: match architecture {
            // Converters permute the rows of queries and keys for it.
            Architecture::Llama => RopeLayout::Adjacent,
            Architecture::Qwen2 | Architecture::Qwen3 => RopeLayout::HalfSplit,
        },
        rope_base: if has("rope.freq_base") { gguf.f32(&key("rope.freq_base"))? } else { 10_000.0 },
        rope_divisors: rope_divisors(gguf, head_dim)?,
    };
    let rope_dim = optional("rope.dimension_count", head_dim)?;
    let value_dim = optional("attention.value_length", head_dim)?;
    refuse_unless(rope_dim == head_dim, &key("rope.dimension_count"), rope_dim)?;
    refuse_unless(value_dim == head_dim, &key("attention.value_length"), value_dim)?;
    let n_experts = optional("expert_count", 0)?;
    refuse_unless(n_experts == 0, &key("expert_count"), n_experts)?;
    if has("rope.scaling.type") {
        let scaling = gguf.str(&key("rope.scaling.type"))?;
        refuse_unless(scaling == "none", &key("rope.scaling.type"), scaling)?;
    }
    dims.checked()
}

fn rope_divisors(gguf: &Gguf, head_dim: usize) -> Result<Vec<f32>, Error> {
    let Ok(tensor) = gguf.tensor(ROPE_DIVISORS) else { return Ok(Vec::new()) };
    if tensor.dtype != DType::F32 || tensor.shape != [head_dim as u64 / 2] {
        return Err(impossible(ROPE_DIVISORS, "it must hold an F32 for each pair of a head"));
    }
    let divisors: Vec<f32> =
        tensor.data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    if !divisors.iter().all(|divisor| divisor.is_normal() && *divisor > 0.0) {
        return Err(impossible(ROPE_DIVISORS, "every divisor must be a positive number"));
    }
    Ok(divisors)
}

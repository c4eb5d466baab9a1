//! The step against the plain reference on small random models of every weight type, and files that are refused.

use std::fs;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use engine::arena::KvArena;
use engine::forward::{Error, Forward, Logits, Slice};
use engine::reference::Reference;
use engine::weights::Weights;
use kernels::pool::ThreadPool;
use kernels::quant::DType;
use model::checkpoint::Checkpoint;

const D_MODEL: u64 = 64;
const D_FFN: u64 = 96;
const VOCAB: u64 = 50;

/// A llama-like file to be: two layers, four query heads and two KV heads of 16.
#[derive(Clone)]
struct File {
    architecture: &'static str,
    /// Keys without their `llama.` prefix.
    sizes: Vec<(&'static str, u32)>,
    tensors: Vec<(String, DType, Vec<u64>)>,
}

impl File {
    fn new(dtype: DType) -> Self {
        // Rows are whole blocks of the weights' type.
        let unit = dtype.block_len() as u64;
        let (d_model, d_ffn) = (D_MODEL.next_multiple_of(unit), D_FFN.next_multiple_of(unit));
        let d_kv = d_model / 2;
        let sizes = vec![
            ("block_count", 2),
            ("embedding_length", d_model as u32),
            ("feed_forward_length", d_ffn as u32),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 2),
            ("context_length", 64),
        ];
        let mut tensors = vec![
            ("token_embd.weight".to_owned(), dtype, vec![d_model, VOCAB]),
            ("output_norm.weight".to_owned(), DType::F32, vec![d_model]),
        ];
        for layer in 0..2 {
            let mut add = |part: &str, dtype, shape: &[u64]| {
                tensors.push((format!("blk.{layer}.{part}.weight"), dtype, shape.to_vec()));
            };
            add("attn_norm", DType::F32, &[d_model]);
            add("ffn_norm", DType::F32, &[d_model]);
            add("attn_q", dtype, &[d_model, d_model]);
            add("attn_k", dtype, &[d_model, d_kv]);
            add("attn_v", DType::F16, &[d_model, d_kv]);
            add("attn_output", dtype, &[d_model, d_model]);
            add("ffn_gate", dtype, &[d_model, d_ffn]);
            add("ffn_up", dtype, &[d_model, d_ffn]);
            add("ffn_down", dtype, &[d_ffn, d_model]);
        }
        Self { architecture: "llama", sizes, tensors }
    }

    /// Writes it under `name` and opens it.
    fn open(&self, name: &str) -> Checkpoint {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.gguf"));
        fs::write(&path, self.bytes()).expect("the target directory is writable");
        Checkpoint::open(&path).expect("the file is well-formed")
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        let text = |out: &mut Vec<u8>, s: &str| {
            out.extend((s.len() as u64).to_le_bytes());
            out.extend(s.as_bytes());
        };
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.sizes.len() as u64 + 2).to_le_bytes());
        text(&mut out, "general.architecture");
        out.extend(8u32.to_le_bytes());
        text(&mut out, self.architecture);
        text(&mut out, "llama.attention.layer_norm_rms_epsilon");
        out.extend(6u32.to_le_bytes());
        out.extend(1e-5f32.to_le_bytes());
        for (key, value) in &self.sizes {
            text(&mut out, &format!("llama.{key}"));
            out.extend(4u32.to_le_bytes());
            out.extend(value.to_le_bytes());
        }
        let mut noise = Noise(1);
        let mut data = Vec::new();
        for (name, dtype, shape) in &self.tensors {
            data.resize(data.len().next_multiple_of(32), 0);
            text(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(ggml_id(*dtype).to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            noise.weights(*dtype, shape.iter().product(), &mut data);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(data);
        out
    }
}

fn ggml_id(dtype: DType) -> u32 {
    (0..40).find(|&id| DType::from_ggml_id(id) == Some(dtype)).expect("every type has a number")
}

/// Reproducible numbers in -1..1.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Appends `n` weights of about -0.25..0.25 to `out`: attention stays smooth, so that the f16 of keys shows little.
    fn weights(&mut self, dtype: DType, n: u64, out: &mut Vec<u8>) {
        let half = |x: f32| half::f16::from_f32(x).to_le_bytes();
        for _ in 0..n as usize / dtype.block_len() {
            // The scale of Q6_K lies behind its numbers.
            let n_before = if dtype == DType::Q6K { 208 } else { 0 };
            let head = match dtype {
                DType::F32 => (self.next() / 4.0).to_le_bytes().to_vec(),
                DType::BF16 => half::bf16::from_f32(self.next() / 4.0).to_le_bytes().to_vec(),
                DType::F16 => half(self.next() / 4.0).to_vec(),
                DType::Q4_1 => [half(0.03), half(-0.22)].concat(),
                DType::Q4_0 => half(0.03).to_vec(),
                DType::Q4K => [half(0.0005), half(0.0036)].concat(),
                DType::Q5K => [half(0.00025), half(0.0036)].concat(),
                DType::Q6K => half(0.0001).to_vec(),
                _ => half(0.002).to_vec(),
            };
            let n_after = dtype.block_bytes() - head.len() - n_before;
            out.extend((0..n_before).map(|_| (self.next() * 127.0) as i8 as u8));
            out.extend(head);
            out.extend((0..n_after).map(|_| (self.next() * 127.0) as i8 as u8));
        }
    }
}

fn pool() -> Arc<ThreadPool> {
    Arc::new(ThreadPool::new(NonZeroUsize::new(2).expect("two")))
}

fn load(file: &File, name: &str) -> Result<Weights, engine::weights::Error> {
    Weights::load(&file.open(name), &pool())
}

/// Greatest difference of any logit between the step and the plain reference, relative to the greatest logit.
fn error_of(file: &File, name: &str) -> f32 {
    let gguf = file.open(name);
    let tokens: Vec<u32> = (0..40).map(|i| i * 7 % VOCAB as u32).collect();
    let want = Reference::new(&gguf).and_then(|r| r.logits(&tokens)).expect("the model is supported");
    let weights = Arc::new(Weights::load(&gguf, &pool()).expect("the model is supported"));
    let mut arena = KvArena::new(weights.shape().kv_geometry(), 5);
    let mut forward = Forward::new(weights, pool(), 64);
    let slice = Slice { tokens: &tokens, start: 0, blocks: &[4, 0, 2], logits: Logits::All };
    let got = forward.run(&mut arena, &[slice], &mut |_, _| ()).expect("the step is within the limits");
    let want: Vec<f32> = want.concat();
    let got: Vec<f32> = (0..got.n_rows()).flat_map(|i| got.row(i).to_vec()).collect();
    let peak = want.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
    want.iter().zip(&got).fold(0.0, |m: f32, (a, b)| m.max((a - b).abs())) / peak
}

#[test]
fn the_step_equals_the_plain_reference_for_every_weight_type() {
    // With unrounded activations only the f16 of keys and values is left; 8-bit activations cost about one percent.
    for (dtype, tolerance) in [
        (DType::F32, 1e-3),
        (DType::F16, 1e-3),
        (DType::BF16, 1e-3),
        (DType::Q8_0, 0.02),
        (DType::Q4_0, 0.02),
        (DType::Q4_1, 0.02),
        (DType::Q4K, 0.02),
        (DType::Q5K, 0.02),
        (DType::Q6K, 0.02),
    ] {
        let error = error_of(&File::new(dtype), &format!("equal_{dtype:?}"));
        assert!(error < tolerance, "{dtype:?}: {error}");
    }
}

#[test]
fn a_separate_output_matrix_is_used() {
    let mut file = File::new(DType::F32);
    file.tensors.push(("output.weight".to_owned(), DType::F32, vec![D_MODEL, VOCAB]));
    let error = error_of(&file, "output");
    assert!(error < 1e-3, "{error}");
}

#[test]
fn files_that_would_run_wrongly_are_refused_by_name() {
    let check = |what: &str, change: &dyn Fn(&mut File), expected: &str| {
        let mut file = File::new(DType::F32);
        change(&mut file);
        let error = load(&file, &format!("refused_{what}")).expect_err("the file is refused").to_string();
        assert!(error.contains(expected), "{what}: {error}");
    };
    check(
        "architecture",
        &|f| f.architecture = "gpt2",
        "`gpt2` is not supported; supported: llama, qwen2, qwen3",
    );
    check("missing", &|f| drop(f.tensors.pop()), "blk.1.ffn_down.weight");
    check("dims", &|f| f.tensors[2].2 = vec![D_MODEL + 1], "blk.0.attn_norm.weight");
    check(
        "bias",
        &|f| f.tensors.push(("blk.0.attn_q.bias".to_owned(), DType::F32, vec![64])),
        "blk.0.attn_q.bias",
    );
    check("rope", &|f| f.sizes.push(("rope.dimension_count", 8)), "llama.rope.dimension_count");
    check("heads", &|f| f.sizes[4].1 = 3, "attention.head_count_kv");
    check("zero", &|f| f.sizes[3].1 = 0, "attention.key_length");
    check("ffn", &|f| f.sizes[2].1 = 100, "feed_forward_length");
}

#[test]
fn steps_beyond_a_limit_are_refused() {
    let weights = Arc::new(load(&File::new(DType::Q8_0), "limits").expect("the model is supported"));
    let mut arena = KvArena::new(weights.shape().kv_geometry(), 5);
    let mut forward = Forward::new(weights, pool(), 8);
    let mut run = |tokens: &[u32], start, blocks: &[u32]| {
        let slice = Slice { tokens, start, blocks, logits: Logits::Last };
        forward.run(&mut arena, &[slice], &mut |_, _| ()).map(|rows| rows.n_rows())
    };
    assert_eq!(run(&[1; 8], 0, &[0]), Ok(1));
    assert_eq!(run(&[1; 9], 0, &[0]), Err(Error::TooManyTokens { found: 9, limit: 8 }));
    assert_eq!(run(&[50], 0, &[0]), Err(Error::Token { token: 50, vocab: 50 }));
    assert_eq!(run(&[1], 64, &[0; 5]), Err(Error::Position { position: 64, context_len: 64 }));
    assert_eq!(run(&[1; 2], 15, &[0]), Err(Error::BlockTable { found: 1, n_tokens: 17 }));
    assert_eq!(run(&[1], 0, &[5]), Err(Error::Block { block: 5, n_blocks: 5 }));
}

//! The forward pass alone: prefill, decoding, and checking drafts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::arena::KvArena;
use engine::forward::{Forward, Logits, Slice};
use engine::weights::Weights;
use kernels::pool::ThreadPool;

use crate::limits::Limits;

const PREFILLS: [usize; 3] = [128, 512, 2048];
const CONTEXTS: [usize; 3] = [64, 512, 2048];
const BATCHES: [usize; 4] = [1, 4, 8, 16];
const BLOCKS_PER_SEQUENCE: usize = 2048 / kv::BLOCK_TOKENS + 2;

/// One measured step.
struct Case {
    name: String,
    /// Tokens through the model.
    n_tokens: usize,
    /// Tokens that count for the rate.
    n_useful: usize,
    /// (first position, tokens) per sequence.
    sequences: Vec<(usize, usize)>,
    logits: Logits,
    times: Vec<Duration>,
}

impl Case {
    fn new(name: String, sequences: Vec<(usize, usize)>, logits: Logits) -> Self {
        let n_tokens = sequences.iter().map(|sequence| sequence.1).sum();
        Self { name, n_tokens, n_useful: n_tokens, sequences, logits, times: Vec::new() }
    }
}

fn cases(context_len: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for n in PREFILLS {
        cases.push(Case::new(format!("prefill {n}"), vec![(0, n)], Logits::Last));
    }
    for context in CONTEXTS {
        for batch in BATCHES {
            let name = format!("decode at {context}, batch {batch}");
            cases.push(Case::new(name, vec![(context, 1); batch], Logits::All));
        }
    }
    for n in 1..=8 {
        cases.push(Case { n_useful: 1, ..Case::new(format!("verify {n}"), vec![(64, n)], Logits::All) });
    }
    cases.retain(|case| case.sequences.iter().all(|(start, n)| start + n <= context_len));
    cases
}

/// Measures all cases in `rounds` rounds, so that a slow moment hits all of them alike, and prints the table.
pub(crate) fn run(
    weights: &Arc<Weights>,
    pool: &Arc<ThreadPool>,
    limits: Limits,
    rounds: usize,
) -> anyhow::Result<()> {
    let shape = weights.shape();
    let longest = PREFILLS[2].min(shape.context_len);
    let mut forward = Forward::new(Arc::clone(weights), Arc::clone(pool), longest);
    let mut arena = KvArena::new(shape.kv_geometry(), BATCHES[3] * BLOCKS_PER_SEQUENCE);
    let mut cases = cases(shape.context_len);
    for _ in 0..rounds {
        for case in &mut cases {
            let n_repeats = (256 / case.n_tokens).clamp(1, 12);
            for _ in 0..n_repeats {
                let took = step(&mut forward, &mut arena, case)?;
                case.times.push(took);
            }
        }
    }
    report(&cases, weights, limits);
    Ok(())
}

fn step(forward: &mut Forward, arena: &mut KvArena, case: &Case) -> anyhow::Result<Duration> {
    let tables: Vec<Vec<u32>> = (0..case.sequences.len())
        .map(|i| (0..).skip(i * BLOCKS_PER_SEQUENCE).take(BLOCKS_PER_SEQUENCE).collect())
        .collect();
    let tokens: Vec<u32> = (0..2048).map(|i| 100 + i * 17 % 40_000).collect();
    let slices: Vec<Slice<'_>> = case
        .sequences
        .iter()
        .zip(&tables)
        .map(|(&(start, n), blocks)| Slice { tokens: &tokens[..n], start, blocks, logits: case.logits })
        .collect();
    let began = Instant::now();
    forward.run(arena, &slices, &mut |_, _| ())?;
    Ok(began.elapsed())
}

#[expect(clippy::print_stdout, reason = "it prints its findings")]
fn report(cases: &[Case], weights: &Weights, limits: Limits) {
    let shape = weights.shape();
    // Every weight is read once a step, of the embedding only when it is the head too.
    let weight_bytes = weights.n_bytes() as f64;
    let d_q = shape.d_attention();
    let d_kv = shape.n_kv_heads * shape.head_dim;
    let per_layer = shape.d_model * (2 * d_q + 2 * d_kv) + 3 * shape.d_model * shape.d_ffn;
    let kv_bytes = shape.kv_geometry().bytes_per_block() / kv::BLOCK_TOKENS;
    println!(
        "{:<24} {:>8} {:>8} {:>9} {:>6} {:>5} {:>6} {:>5}",
        "", "median", "best", "step ms", "GB/s", "of", "GOPS", "of"
    );
    for case in cases {
        let mut sorted = case.times.clone();
        sorted.sort();
        let (median, best) = (sorted[sorted.len() / 2].as_secs_f64(), sorted[0].as_secs_f64());
        let useful = case.n_useful as f64;
        let n_logits = match case.logits {
            Logits::All => case.n_tokens,
            _ => case.sequences.len(),
        };
        let products = case.n_tokens * shape.n_layers * per_layer + n_logits * shape.vocab * shape.d_model;
        let ops = 2.0 * products as f64;
        let history: usize = case.sequences.iter().map(|(start, n)| start + n).sum();
        let bytes = weight_bytes + (history * kv_bytes) as f64;
        println!(
            "{:<24} {:>8.0} {:>8.0} {:>9.2} {:>6.1} {:>4.0}% {:>6.0} {:>4.0}%",
            case.name,
            useful / median,
            useful / best,
            median * 1e3,
            bytes / median / 1e9,
            100.0 * bytes / median / limits.read,
            ops / median / 1e9,
            100.0 * ops / median / limits.int8,
        );
    }
}

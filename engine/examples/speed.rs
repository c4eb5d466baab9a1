//! Measures load time, prefill and decode speed on this machine:
//! `cargo run --release -p engine --example speed -- MODEL [N_THREADS] [MAX_CONTEXT]`.
#![expect(clippy::print_stdout, reason = "it prints its findings")]

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::arena::KvArena;
use engine::forward::{Forward, Logits, Slice};
use engine::weights::Weights;
use kernels::attention::BLOCK_TOKENS;
use kernels::isa::Isa;
use kernels::pool::ThreadPool;
use model::checkpoint::Checkpoint;

/// Tokens of a sequence beyond its context.
const MARGIN: usize = 16;
/// A case of a large model is repeated less often.
const MAX_CASE: Duration = Duration::from_secs(20);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let path = PathBuf::from(args.next().ok_or("usage: speed MODEL [N_THREADS] [MAX_CONTEXT]")?);
    let n_threads: NonZeroUsize = args.next().unwrap_or_else(|| "2".to_owned()).parse()?;
    let max_context: usize = args.next().unwrap_or_else(|| "2048".to_owned()).parse()?;
    let pool = Arc::new(ThreadPool::new(n_threads));
    let start = Instant::now();
    let gguf = Checkpoint::open(&path)?;
    let weights = Arc::new(Weights::load(&gguf, &pool)?);
    println!("{:?}, {n_threads} threads", Isa::detect());
    println!("load: {:?}, {:.1} MB packed", start.elapsed(), weights.n_bytes() as f64 / 1e6);
    let max_context = max_context.min(weights.shape().context_len - MARGIN);
    let n_blocks = (max_context + MARGIN).div_ceil(BLOCK_TOKENS);
    let arena = KvArena::new(weights.shape().kv_geometry(), 16 * n_blocks);
    let vocab = weights.shape().vocab as u32;
    let mut bench = Bench { forward: Forward::new(weights, pool, 2048), arena, n_blocks, vocab };
    for n_tokens in [128, 512, 2048].into_iter().filter(|n| *n <= max_context) {
        report(&format!("prefill {n_tokens}"), n_tokens, &bench.prefill(n_tokens));
    }
    for context in [64, 512, 2048].into_iter().filter(|n| *n <= max_context) {
        for batch in [1, 2, 4, 8, 16] {
            report(&format!("decode at {context}, batch {batch}"), batch, &bench.decode(context, batch));
        }
    }
    report("verify 4 tokens at 64", 4, &bench.verify(64, 4));
    Ok(())
}

fn report(what: &str, n_tokens: usize, times: &[Duration]) {
    let mut sorted = times.to_vec();
    sorted.sort();
    let rate = |time: Duration| n_tokens as f64 / time.as_secs_f64();
    let (median, best) = (sorted[sorted.len() / 2], sorted[0]);
    println!("{what}: median {:.0}, best {:.0} tok/s ({median:.2?})", rate(median), rate(best));
}

struct Bench {
    forward: Forward,
    arena: KvArena,
    /// Blocks of a sequence.
    n_blocks: usize,
    vocab: u32,
}

impl Bench {
    fn prefill(&mut self, n_tokens: usize) -> Vec<Duration> {
        let tokens: Vec<u32> = (0..n_tokens as u32).map(|i| i * 17 % self.vocab).collect();
        self.repeat(3 + 2048 / n_tokens, &[(tokens, 0)])
    }

    fn decode(&mut self, context: usize, batch: usize) -> Vec<Duration> {
        let sequences: Vec<_> = (0..batch).map(|i| (vec![(500 + i as u32) % self.vocab], context)).collect();
        self.repeat(40, &sequences)
    }

    fn verify(&mut self, context: usize, n_tokens: usize) -> Vec<Duration> {
        self.repeat(40, &[((0..n_tokens as u32).collect(), context)])
    }

    /// Repeats one step, at least once, of sequences, given as (tokens, start).
    fn repeat(&mut self, n_repeats: usize, sequences: &[(Vec<u32>, usize)]) -> Vec<Duration> {
        let table = |i: usize| {
            let first = i * self.n_blocks;
            (first as u32..(first + self.n_blocks) as u32).collect::<Vec<_>>()
        };
        let tables: Vec<_> = (0..sequences.len()).map(table).collect();
        let slices: Vec<_> = sequences
            .iter()
            .zip(&tables)
            .map(|((tokens, start), blocks)| Slice { tokens, start: *start, blocks, logits: Logits::Last })
            .collect();
        let step = |_| {
            let start = Instant::now();
            self.forward
                .run(&mut self.arena, &slices, &mut |_, _| ())
                .expect("the step is within the limits");
            start.elapsed()
        };
        let began = Instant::now();
        (0..n_repeats).take_while(|i| *i == 0 || began.elapsed() < MAX_CASE).map(step).collect()
    }
}

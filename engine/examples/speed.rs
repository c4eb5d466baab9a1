//! Measures load time, prefill and decode speed on this machine:
//! `cargo run --release -p engine --example speed -- MODEL.gguf [N_THREADS] [i8]`, where i8 is the KV format.
#![expect(clippy::print_stdout, reason = "it prints its findings")]

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::arena::KvArena;
use engine::forward::{Forward, Logits, Slice};
use engine::weights::Weights;
use kernels::attention::KvDtype;
use kernels::isa::Isa;
use kernels::pool::ThreadPool;
use model::gguf::Gguf;

const BLOCKS_PER_SEQUENCE: usize = 160;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let path = PathBuf::from(args.next().ok_or("usage: speed MODEL.gguf [N_THREADS]")?);
    let n_threads: NonZeroUsize = args.next().unwrap_or_else(|| "2".to_owned()).parse()?;
    let pool = Arc::new(ThreadPool::new(n_threads));
    let start = Instant::now();
    let gguf = Gguf::open(&path)?;
    let weights = Arc::new(Weights::load(&gguf, &pool)?);
    println!("{:?}, {n_threads} threads", Isa::detect());
    println!("load: {:?}, {:.1} MB packed", start.elapsed(), weights.n_bytes() as f64 / 1e6);
    let dtype = if args.next().is_some_and(|arg| arg == "i8") { KvDtype::I8 } else { KvDtype::F16 };
    let arena = KvArena::new(weights.shape().kv_geometry().with_dtype(dtype), 16 * BLOCKS_PER_SEQUENCE);
    let mut bench = Bench { forward: Forward::new(weights, pool, 2048), arena };
    for n_tokens in [128, 512, 2048] {
        report(&format!("prefill {n_tokens}"), n_tokens, &bench.prefill(n_tokens));
    }
    for context in [64, 512, 2048] {
        for batch in [1, 2, 4, 8, 16] {
            report(&format!("decode at {context}, batch {batch}"), batch, &bench.decode(context, batch));
        }
    }
    for n_tokens in 1..=8 {
        report(&format!("verify {n_tokens} tokens at 64"), n_tokens, &bench.verify(64, n_tokens));
    }
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
}

impl Bench {
    fn prefill(&mut self, n_tokens: usize) -> Vec<Duration> {
        let tokens: Vec<u32> = (0..n_tokens as u32).map(|i| 100 + i * 17 % 40_000).collect();
        self.repeat(3 + 2048 / n_tokens, &[(tokens, 0)], Logits::Last)
    }

    fn decode(&mut self, context: usize, batch: usize) -> Vec<Duration> {
        let sequences: Vec<_> = (0..batch).map(|i| (vec![500 + i as u32], context)).collect();
        self.repeat(40, &sequences, Logits::Last)
    }

    fn verify(&mut self, context: usize, n_tokens: usize) -> Vec<Duration> {
        self.repeat(40, &[((0..n_tokens as u32).collect(), context)], Logits::All)
    }

    /// Repeats one step of sequences, given as (tokens, start).
    fn repeat(&mut self, n_repeats: usize, sequences: &[(Vec<u32>, usize)], logits: Logits) -> Vec<Duration> {
        let table = |i: usize| {
            let first = (i * BLOCKS_PER_SEQUENCE) as u32;
            (first..first + BLOCKS_PER_SEQUENCE as u32).collect::<Vec<_>>()
        };
        let tables: Vec<_> = (0..sequences.len()).map(table).collect();
        let slices: Vec<_> = sequences
            .iter()
            .zip(&tables)
            .map(|((tokens, start), blocks)| Slice { tokens, start: *start, blocks, logits })
            .collect();
        let step = |_| {
            let start = Instant::now();
            self.forward
                .run(&mut self.arena, &slices, &mut |_, _| ())
                .expect("the step is within the limits");
            start.elapsed()
        };
        (0..n_repeats).map(step).collect()
    }
}

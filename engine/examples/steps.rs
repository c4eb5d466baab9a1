//! Times steps of the engine on request: a line in, seconds out. Used by `cargo xtask compare-llama-cpp`, whose other side
//! is `xtask/python/llama_cpp_steps.py`: `steps MODEL N_THREADS`, then on stdin `prefill N` or `decode CONTEXT BATCH`.

use std::io::{BufRead, Write};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use engine::arena::KvArena;
use engine::forward::{Forward, Logits, Slice};
use engine::weights::Weights;
use kernels::pool::ThreadPool;
use kv::BLOCK_TOKENS;
use model::checkpoint::Checkpoint;

type Failure = Box<dyn std::error::Error>;

/// Steps of a decode measurement, after some that warm up caches and clock.
const DECODE_STEPS: usize = 48;
const WARM_STEPS: usize = 16;
const MAX_TOKENS: usize = 2048;
const MAX_SEQUENCES: usize = 16;
const BLOCKS_PER_SEQUENCE: usize = (MAX_TOKENS + WARM_STEPS + DECODE_STEPS).div_ceil(BLOCK_TOKENS);

fn main() -> Result<(), Failure> {
    let usage = "usage: steps MODEL N_THREADS";
    let path = PathBuf::from(std::env::args().nth(1).ok_or(usage)?);
    let n_threads: NonZeroUsize = std::env::args().nth(2).ok_or(usage)?.parse()?;
    let pool = Arc::new(ThreadPool::new(n_threads));
    let weights = Arc::new(Weights::load(&Checkpoint::open(&path)?, &pool)?);
    let arena = KvArena::new(weights.shape().kv_geometry(), MAX_SEQUENCES * BLOCKS_PER_SEQUENCE);
    let mut steps = Steps { forward: Forward::new(weights, pool, MAX_TOKENS), arena };
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let mut words = line.split_whitespace();
        let name = words.next().unwrap_or_default();
        let numbers: Vec<usize> = words.map(str::parse).collect::<Result<_, _>>()?;
        let seconds = match (name, &numbers[..]) {
            ("prefill", &[n]) => {
                steps.run(1, 0, n)?;
                steps.run(1, 0, n)?
            }
            ("decode", &[context, batch]) => steps.decode(context, batch)?,
            _ => return Err(format!("`{line}` is neither `prefill N` nor `decode CONTEXT BATCH`").into()),
        };
        writeln!(std::io::stdout(), "{seconds}")?;
    }
    Ok(())
}

struct Steps {
    forward: Forward,
    arena: KvArena,
}

impl Steps {
    /// Mean seconds of a step with one token of each of `batch` sequences.
    fn decode(&mut self, context: usize, batch: usize) -> Result<f64, Failure> {
        let mut seconds = 0.0;
        for step in 0..WARM_STEPS + DECODE_STEPS {
            let took = self.run(batch, context + step, 1)?;
            seconds += if step < WARM_STEPS { 0.0 } else { took };
        }
        Ok(seconds / DECODE_STEPS as f64)
    }

    /// Seconds of a step with `n_tokens` tokens from `start` on of each of `batch` sequences.
    fn run(&mut self, batch: usize, start: usize, n_tokens: usize) -> Result<f64, Failure> {
        let tokens: Vec<u32> = (0..).take(n_tokens).map(|i| 100 + i * 17 % 40_000).collect();
        let tables: Vec<Vec<u32>> = (0..batch)
            .map(|i| (0..).skip(i * BLOCKS_PER_SEQUENCE).take(BLOCKS_PER_SEQUENCE).collect())
            .collect();
        let slice = |blocks| Slice { tokens: &tokens, start, blocks, logits: Logits::Last };
        let slices: Vec<Slice<'_>> = tables.iter().map(|table| slice(&table[..])).collect();
        let began = Instant::now();
        self.forward.run(&mut self.arena, &slices, &mut |_, _| ())?;
        Ok(began.elapsed().as_secs_f64())
    }
}

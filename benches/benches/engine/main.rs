//! The engine against the machine, and speculation against plain decoding, each in one run:
//! `cargo bench -p benches --bench engine -- [--model FILE] [--only forward|speculation]`.
//!
//! A shared machine is never quiet: every table is made of rounds over all its rows, and medians and bests are shown
//! beside limits measured in the same run. Ratios mean more than numbers.

mod forward;
mod limits;
mod prompts;
mod speculation;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use clap::{Parser, ValueEnum};
use engine::weights::Weights;
use kernels::isa::Isa;
use kernels::pool::ThreadPool;
use model::TextModel;
use model::checkpoint::Checkpoint;
use model::reference::ModelRef;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Forward,
    Speculation,
}

#[derive(Debug, Parser)]
#[command(about = "Measures the engine on this machine")]
struct Args {
    /// The model file; without it the default model is looked for in the cache folder
    #[arg(long)]
    model: Option<PathBuf>,
    /// Measure one part only
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// Rounds of the forward pass over all cases
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Alternations of speculation on and off
    #[arg(long, default_value_t = 5)]
    alternations: usize,
    /// Threads of the speculation part, and the larger count of the forward part
    #[arg(long, default_value = "2")]
    threads: NonZeroUsize,
    /// Written by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

#[expect(clippy::print_stdout, reason = "it prints its findings")]
fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let path = match &args.model {
        Some(path) => path.clone(),
        None => default_model()?,
    };
    let wants = |part| args.only.is_none_or(|only| only == part);
    let text = TextModel::open(&path)?;
    for n_threads in [NonZeroUsize::MIN, args.threads] {
        let last = n_threads == args.threads;
        if !wants(Part::Forward) && !last {
            continue;
        }
        let pool = Arc::new(ThreadPool::new(n_threads));
        let began = Instant::now();
        let weights = Arc::new(Weights::load(&Checkpoint::open(&path)?, &pool)?);
        let (ms, mb) = (began.elapsed().as_millis(), weights.n_bytes() as f64 / 1e6);
        println!("\n{}, {:?}, {n_threads} threads; loaded in {ms} ms, {mb:.1} MB", text.name, Isa::detect());
        if wants(Part::Forward) {
            let limits = limits::measure(&pool);
            println!(
                "limits now: {:.1} GB/s read (96 MiB), {:.0} GOPS int8, {:.0} GFLOPS f32",
                limits.read / 1e9,
                limits.int8 / 1e9,
                limits.f32 / 1e9
            );
            forward::run(&weights, &pool, limits, args.rounds)?;
        }
        if wants(Part::Speculation) && last {
            speculation::run(&weights, &pool, &text, args.alternations)?;
        }
        if args.threads == NonZeroUsize::MIN {
            break;
        }
    }
    Ok(())
}

/// The default model from the cache folder.
fn default_model() -> anyhow::Result<PathBuf> {
    let home = std::env::var_os("HOME").context("HOME is not set: give --model")?;
    let cache = PathBuf::from(home).join(".cache/baton");
    Ok(ModelRef::default().resolve(&cache, &mut |_| {})?)
}

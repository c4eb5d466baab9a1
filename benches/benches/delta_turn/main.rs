//! The gateway's CPU time, tokenized tokens and bytes of one turn that adds 1 KB to histories of 1, 32 and 256 KB; then what
//! token events and idle connections cost (`streams`).
//!
//! ```text
//! client (main thread) ──WebSocket──▶ gateway (own threads, measured) ──gRPC──▶ stand-in router and worker (a thread)
//! ```
//! Answers have eight tokens, each a message of its own. They come all at once, which shows what a turn costs, or one by
//! one, which adds the wake-ups of real decoding. Every measured turn continues the same response, so the history keeps its size. The three sizes take turns in
//! rounds, and medians over rounds are reported: on a shared machine ratios of one run mean more than numbers.

mod client;
mod gateway;
mod report;
mod standin;
mod streams;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use benches::text;
use clap::Parser;
use metrics_exporter_prometheus::PrometheusBuilder;
use model::TextModel;
use model::reference::ModelRef;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use client::{Client, Resent};
use gateway::Gateway;
use report::{History, Sample};
use standin::StandIn;

/// Bytes of the histories, smallest first.
const HISTORIES: [usize; 3] = [1 << 10, 32 << 10, 256 << 10];
/// Far more than the largest history needs.
const CONTEXT_TOKENS: u32 = 1_000_000;
/// The gateway is asleep again this long after an answer.
const SETTLE: Duration = Duration::from_millis(10);

#[derive(Debug, Parser)]
#[command(about = "Measures the gateway's cost of a turn against the size of its history")]
struct Args {
    /// Measured turns of each history and round.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    turns: u32,
    /// Rounds over all histories.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Unmeasured turns of each history before the first round.
    #[arg(long, default_value_t = 50)]
    warmup: u32,
    /// New text of each turn, in bytes.
    #[arg(long, default_value_t = 1024)]
    delta_bytes: usize,
    /// Instructions sent again with each turn, in bytes.
    #[arg(long, default_value_t = 0)]
    instructions_bytes: usize,
    /// Tools sent again with each turn, in bytes; agents send tens of kilobytes.
    #[arg(long, default_value_t = 37 << 10)]
    tools_bytes: usize,
    /// Microseconds between two tokens of the answers that come one token at a time.
    #[arg(long, default_value_t = 1000)]
    pace_us: u64,
    /// The model file; without it the default model is looked for in the cache folder.
    #[arg(long, env = "BATON_TEST_MODEL")]
    model: Option<PathBuf>,
    #[arg(long, env = "BATON_CACHE_DIR")]
    cache_dir: Option<PathBuf>,
    #[arg(long, env = "HOME", hide = true)]
    home: Option<PathBuf>,
    /// Ends with exit code 1 when a limit is missed.
    #[arg(long)]
    check: bool,
    /// What `cargo bench` adds.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let mut text = TextModel::open(&model_file(&args)?)?;
    text.context_len = CONTEXT_TOKENS;
    // The same instruments as in production, so that their cost is counted.
    let metrics = PrometheusBuilder::new().install_recorder().context("metrics")?;
    tracing_subscriber::fmt().with_writer(std::io::sink).with_max_level(tracing::Level::INFO).init();
    let shutdown = CancellationToken::new();
    let worker = StandIn::start(&text, shutdown.clone())?;
    let gateway = Gateway::start(text.clone(), worker.address, metrics, shutdown.clone())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let histories = runtime.block_on(measure(&args, &text.name, &gateway, &worker))?;
    let mut out = std::io::stdout();
    runtime.block_on(streams::run(&mut out, &text.name, &gateway, &worker, args.rounds))?;
    drop(runtime);
    shutdown.cancel();
    gateway.join()?;
    worker.join()?;
    let resent = args.instructions_bytes + tools(args.tools_bytes).to_string().len();
    let passed = report::print(&mut std::io::stdout().lock(), &histories, args.delta_bytes, resent)?;
    Ok(if passed || !args.check { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn model_file(args: &Args) -> anyhow::Result<PathBuf> {
    if let Some(path) = &args.model {
        return Ok(path.clone());
    }
    let at_home = || args.home.as_ref().map(|home| home.join(".cache/baton"));
    let cache = args.cache_dir.clone().or_else(at_home).context("set BATON_CACHE_DIR or BATON_TEST_MODEL")?;
    Ok(ModelRef::default().resolve(&cache, &mut |_| {})?)
}

async fn measure(
    args: &Args,
    model: &str,
    gateway: &Gateway,
    worker: &StandIn,
) -> anyhow::Result<Vec<History>> {
    gateway.ready().await?;
    let instructions = text::prose(99, args.instructions_bytes);
    let resent = Resent { instructions, tools: tools(args.tools_bytes) };
    let mut client = Client::connect(gateway.address, model, resent).await?;
    let mut seeds = 1_000..;
    let mut histories = Vec::new();
    for n_bytes in HISTORIES {
        let before = gateway.read()?;
        let answer = client.turn(None, &text::prose(n_bytes as u64, n_bytes)).await?;
        tokio::time::sleep(SETTLE).await;
        let first_turn = gateway.read()?.cpu - before.cpu;
        for seed in seeds.by_ref().take(args.warmup as usize) {
            client.turn(Some(&answer.id), &text::prose(seed, args.delta_bytes)).await?;
        }
        let n_tokens = answer.input_tokens + answer.output_tokens;
        histories.push(History {
            n_bytes,
            n_tokens,
            id: answer.id,
            first_turn,
            at_once: Vec::new(),
            one_by_one: Vec::new(),
        });
    }
    for _ in 0..args.rounds {
        for history in &mut histories {
            for (pace_us, samples) in [(0, &mut history.at_once), (args.pace_us, &mut history.one_by_one)] {
                worker.set_pace_us(pace_us);
                let seeds = seeds.by_ref().take(args.turns as usize);
                samples.push(round(gateway, &mut client, &history.id, args.delta_bytes, seeds).await?);
            }
        }
    }
    Ok(histories)
}

/// Function tools as agents have them, about `n_bytes` of JSON; null for zero.
fn tools(n_bytes: usize) -> Value {
    const TOOL_BYTES: usize = 1200;
    let tool = |i: usize| {
        let names = ["path", "pattern", "limit", "recursive"];
        let parameters: serde_json::Map<String, Value> = names
            .into_iter()
            .zip(["string", "string", "integer", "boolean"])
            .map(|(name, kind)| {
                (name.to_owned(), json!({"type": kind, "description": text::prose(i as u64, 120)}))
            })
            .collect();
        json!({
            "type": "function",
            "name": format!("tool_{i}"),
            "description": text::prose(1000 + i as u64, 400),
            "strict": false,
            "parameters": {"type": "object", "properties": parameters, "required": ["path"]},
        })
    };
    match n_bytes.div_ceil(TOOL_BYTES) {
        0 => Value::Null,
        n_tools => (0..n_tools).map(tool).collect(),
    }
}

/// One round over one history: the averages of its turns.
async fn round(
    gateway: &Gateway,
    client: &mut Client,
    parent: &str,
    delta_bytes: usize,
    seeds: impl Iterator<Item = u64>,
) -> anyhow::Result<Sample> {
    let deltas: Vec<String> = seeds.map(|seed| text::prose(seed, delta_bytes)).collect();
    tokio::time::sleep(SETTLE).await;
    let before = gateway.read()?;
    let began = Instant::now();
    let (mut bytes_up, mut bytes_down) = (0, 0);
    for delta in &deltas {
        let answer = client.turn(Some(parent), delta).await?;
        bytes_up += answer.bytes_up;
        bytes_down += answer.bytes_down;
    }
    let wall = began.elapsed();
    tokio::time::sleep(SETTLE).await;
    let after = gateway.read()?;
    let n = deltas.len() as f64;
    Ok(Sample {
        cpu_us: (after.cpu - before.cpu).as_secs_f64() * 1e6 / n,
        wall_us: wall.as_secs_f64() * 1e6 / n,
        tokenized: (after.tokenized_tokens - before.tokenized_tokens) as f64 / n,
        bytes_up: bytes_up as f64 / n,
        bytes_down: bytes_down as f64 / n,
        worker_bytes: (after.worker_bytes - before.worker_bytes) as f64 / n,
        irregular: (after.full_prompts - before.full_prompts) + (after.rerenders - before.rerenders),
    })
}

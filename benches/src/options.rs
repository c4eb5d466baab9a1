//! What the replayer is asked to do.

use std::path::PathBuf;

use clap::{Args, Parser, ValueEnum};
use serde::Serialize;

/// When requests are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Sessions start on schedule; later turns follow the previous answer and the tool's time.
    Session,
    /// Every request at its own trace time, with its whole prompt.
    Open,
}

/// Replays a trace, or made-up agent sessions, against a Responses API over WebSocket and reports what clients see.
#[derive(Debug, Clone, Parser, Serialize)]
#[command(name = "replay", version)]
pub struct Options {
    /// Trace file: Mooncake's JSON lines or recorded sessions, plain or zstd. Without it sessions are made up.
    #[arg(long)]
    pub trace: Option<PathBuf>,
    /// Where the Responses API listens.
    #[arg(long, default_value = "ws://127.0.0.1:8080/v1/responses")]
    pub url: String,
    /// Model to ask for; without it the server's first one.
    #[arg(long)]
    pub model: Option<String>,
    #[arg(long, value_enum, default_value = "session")]
    pub mode: Mode,
    /// Most sessions (requests with --mode open) in flight.
    #[arg(long, default_value_t = 64, value_parser = at_least_one)]
    pub concurrency: usize,
    /// Session starts per second; without it the trace's own times, or, where there are none, one as another ends.
    #[arg(long, value_parser = positive)]
    pub rate: Option<f64>,
    /// How much faster than recorded trace times and delays pass.
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    pub speed: f64,
    /// Only sessions that start at this trace time or later, in seconds.
    #[arg(long, value_parser = not_negative)]
    pub start: Option<f64>,
    /// Only sessions that start before this trace time, in seconds.
    #[arg(long, value_parser = not_negative)]
    pub end: Option<f64>,
    /// Only the first so many sessions.
    #[arg(long, value_parser = at_least_one)]
    pub limit: Option<usize>,
    /// Prompts are held below about this many tokens.
    #[arg(long, default_value_t = 6000, value_parser = at_least_one)]
    pub max_input_tokens: usize,
    /// Cap on the tokens of an answer.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_output_tokens: u32,
    #[arg(long, default_value_t = 0.0, value_parser = not_negative)]
    pub temperature: f64,
    /// A request without its last event after so long is given up.
    #[arg(long, default_value_t = 120.0, value_parser = positive)]
    pub timeout_s: f64,
    /// Wait between an answer and the next turn. Default: recorded gaps, or 500 in made-up sessions.
    #[arg(long)]
    pub tool_ms: Option<u64>,
    /// Longest wait taken over from a trace.
    #[arg(long, default_value_t = 60_000)]
    pub max_delay_ms: u64,
    /// Made-up sessions.
    #[arg(long, default_value_t = 8, conflicts_with = "trace", value_parser = clap::value_parser!(u64).range(1..))]
    pub sessions: u64,
    /// Turns of a made-up session.
    #[arg(long, default_value_t = 5, conflicts_with = "trace", value_parser = clap::value_parser!(u64).range(1..))]
    pub turns: u64,
    /// New tokens of each turn of a made-up session, about.
    #[arg(long, default_value_t = 200, conflicts_with = "trace", value_parser = at_least_one)]
    pub delta_tokens: usize,
    /// Most tokens of each answer of a made-up session.
    #[arg(long, default_value_t = 32, conflicts_with = "trace")]
    pub output_tokens: u32,
    /// Tokens of the system prompt that all made-up sessions share, about.
    #[arg(long, default_value_t = 200, conflicts_with = "trace")]
    pub system_tokens: usize,
    /// Made-up text is a function of this number.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Writes everything, with a row for each request, to this file.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Ends with exit code 0 even if requests failed.
    #[arg(long)]
    pub allow_errors: bool,
    #[command(flatten)]
    pub soak: Soak,
}

/// A soak: random load for a time, then a look at what the server still holds.
#[derive(Debug, Clone, Args, Serialize)]
pub struct Soak {
    /// Keeps --concurrency clients busy with random sessions for so many seconds, and checks that nothing is left.
    #[arg(long, value_parser = positive,
          conflicts_with_all = ["trace", "rate", "start", "end", "limit", "mode", "sessions", "allow_errors"])]
    pub soak_s: Option<f64>,
    /// Share of a soak's turns whose client goes away before the answer is complete.
    #[arg(long, default_value_t = 0.1, requires = "soak_s", value_parser = share)]
    pub cancel: f64,
    /// Share of a soak's turns that continue an older response than the latest.
    #[arg(long, default_value_t = 0.1, requires = "soak_s", value_parser = share)]
    pub fork: f64,
    /// More pages of metrics for a soak to read, one for each process with a worker.
    #[arg(long, requires = "soak_s")]
    pub metrics_url: Vec<String>,
    /// Process whose memory a soak watches.
    #[arg(long, requires = "soak_s")]
    pub pid: Option<u32>,
}

impl Options {
    /// Tool time of made-up sessions, in milliseconds.
    pub const TOOL_MS: u64 = 500;
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".to_owned()),
        Ok(n) => Ok(n),
        Err(error) => Err(format!("{error}")),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    number(text).and_then(|value| if value > 0.0 { Ok(value) } else { Err("must be above 0".to_owned()) })
}

fn not_negative(text: &str) -> Result<f64, String> {
    number(text)
        .and_then(|value| if value >= 0.0 { Ok(value) } else { Err("must not be negative".to_owned()) })
}

fn share(text: &str) -> Result<f64, String> {
    let value = not_negative(text)?;
    if value <= 1.0 { Ok(value) } else { Err("must not be above 1".to_owned()) }
}

/// A number small enough for a time in seconds.
fn number(text: &str) -> Result<f64, String> {
    const LARGEST: f64 = 1e9;
    let value: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if value.abs() <= LARGEST { Ok(value) } else { Err("is too large".to_owned()) }
}

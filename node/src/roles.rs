//! Starts roles: binds the port, loads the model, and hands both to the role's `run`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use engine::{Engine, EngineConfig, Speculate};
use kernels::isa::Isa;
use kv::transfer::LocalPorts;
use model::TextModel;
use proto::v1;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::access::{self, Access};
use crate::cli::{
    ApiArgs, DrainArgs, EngineArgs, GatewayArgs, KvDtype, PlanArgs, RouterArgs, Speculation, WorkerArgs,
};
use crate::health::{self, Ready};
use crate::loading::{self, Loaded};
use crate::models;
use crate::telemetry::Telemetry;

/// Larger numbers are mistakes, not limits.
const MAX_COUNT: usize = 1 << 32;
const MIN_STORE_MB: u64 = 4;
const MAX_STORE_MB: u64 = 1 << 20;
const MAX_THREADS: usize = 256;
const MAX_STEP_TOKENS: usize = 4096;

/// Signals this soon after the first one are not a second request.
const SAME_SIGNAL: Duration = Duration::from_millis(500);

/// A configuration that cannot work, found before anything was started.
#[derive(Debug)]
pub struct BadConfig(pub String);

impl std::fmt::Display for BadConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadConfig {}

/// What a worker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerRole {
    Prefill,
    Decode,
}

impl WorkerRole {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    fn step_tokens(self) -> usize {
        match self {
            Self::Prefill => 256,
            Self::Decode => 64,
        }
    }
}

/// Binds `address`.
///
/// # Errors
/// When it cannot be had; says what to do if it is in use.
pub async fn bind(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| {
        let advice = match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                ": another process uses it; stop that one or choose another --listen"
            }
            std::io::ErrorKind::PermissionDenied => {
                ": ports below 1024 need privileges; choose another --listen"
            }
            _ => "",
        };
        anyhow::Error::new(error).context(format!("cannot listen on {address}{advice}"))
    })
}

/// Completes at SIGTERM or SIGINT.
///
/// # Errors
/// When signals cannot be handled.
pub async fn stop_signal() -> anyhow::Result<()> {
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    Ok(())
}

/// Cancels the returned token at the first signal; a second one ends the process at once.
pub(crate) fn shutdown_on_signal()
-> anyhow::Result<(CancellationToken, impl Future<Output = anyhow::Result<()>>)> {
    let token = CancellationToken::new();
    let cancelled = token.clone();
    let watch = async move {
        stop_signal().await?;
        tracing::info!("draining; a second signal ends the process at once");
        cancelled.cancel();
        // Some supervisors send the same signal to the process and to its group.
        tokio::time::sleep(SAME_SIGNAL).await;
        stop_signal().await?;
        anyhow::bail!("a second signal came before everything was drained")
    };
    Ok((token, watch))
}

/// Runs `service` beside the signals.
async fn until_signal<T>(
    service: impl AsyncFnOnce(CancellationToken) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let (token, signals) = shutdown_on_signal()?;
    tokio::select! {
        result = service(token) => result,
        result = signals => Err(result.err().unwrap_or_else(|| anyhow::anyhow!("signals ended"))),
    }
}

/// Runs `baton gateway`.
///
/// # Errors
/// When the port or the model cannot be had.
pub async fn run_gateway(args: GatewayArgs, telemetry: &Telemetry) -> anyhow::Result<()> {
    check_api(&args.api)?;
    let access = access::read(&args.api, args.listen)?;
    let listener = bind(args.listen).await?;
    let address = listener.local_addr()?;
    let path = models::fetch(&args.model).await?;
    let text = loading::open_text(&path).await?;
    tracing::info!(%address, model = text.name, routers = args.routers.join(","), "gateway serves");
    let config = gateway_config(&args.api, &args.drain, args.routers, access);
    let readiness = api_gateway::Readiness::default();
    until_signal(async |shutdown| serve_gateway(config, text, listener, telemetry, readiness, shutdown).await)
        .await
}

pub(crate) async fn serve_gateway(
    config: api_gateway::Config,
    text: TextModel,
    listener: TcpListener,
    telemetry: &Telemetry,
    readiness: api_gateway::Readiness,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let (ready, draining) = (readiness.clone(), shutdown.clone());
    let ready: Ready = Arc::new(move || match (draining.is_cancelled(), ready.is_ready()) {
        (true, _) => Err("draining"),
        (false, false) => Err("no decode worker is known yet"),
        (false, true) => Ok(()),
    });
    let routes: Router = health::routes(telemetry, ready);
    api_gateway::run(config, text, listener, routes, readiness, shutdown).await?;
    Ok(())
}

/// Runs `baton router`.
///
/// # Errors
/// When the port cannot be had.
pub async fn run_router(args: RouterArgs, telemetry: &Telemetry) -> anyhow::Result<()> {
    check_plan(&args.plan)?;
    let listener = bind(args.listen).await?;
    tracing::info!(address = %listener.local_addr()?, workers = args.workers.join(","), "router serves");
    let config = router_config(&args.plan, args.workers);
    until_signal(async |shutdown| serve_router(config, listener, telemetry, shutdown).await).await
}

pub(crate) async fn serve_router(
    config: router::Config,
    listener: TcpListener,
    telemetry: &Telemetry,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    for worker in &config.workers {
        proto::net::channel(worker).map_err(|error| BadConfig(error.to_string()))?;
    }
    let readiness = router::Readiness::default();
    let watched = readiness.clone();
    let ready: Ready = Arc::new(move || match watched.decode_workers() {
        0 => Err("no decode worker is connected"),
        _ => Ok(()),
    });
    let routes = health::routes(telemetry, ready).into();
    router::run(config, listener, routes, readiness, shutdown).await?;
    Ok(())
}

/// Runs `baton prefill` or `baton decode`.
///
/// # Errors
/// When the port or the model cannot be had, or the model does not fit the memory.
pub async fn run_worker(role: WorkerRole, args: WorkerArgs, telemetry: &Telemetry) -> anyhow::Result<()> {
    if args.listen.ip().is_unspecified() && args.advertise.is_none() {
        return Err(BadConfig(format!(
            "others cannot reach {}: give --advertise http://HOST:PORT",
            args.listen
        ))
        .into());
    }
    check_engine(&args.engine, 1)?;
    let listener = bind(args.listen).await?;
    let address = listener.local_addr()?;
    let speculation = match role {
        WorkerRole::Prefill => Speculation::Off,
        WorkerRole::Decode => args.engine.speculation,
    };
    let loaded = loading::load(&args.model, &args.engine, speculation).await?;
    let advertise = args.advertise.unwrap_or_else(|| format!("http://{address}"));
    let place = advertise.split_once("://").map_or(advertise.as_str(), |(_, place)| place);
    let id = args.id.unwrap_or_else(|| format!("{}-{place}", role.name()));
    let worker = Worker::new(role, id, advertise, &loaded, &args.engine)?;
    tracing::info!(
        %address, worker = worker.info.id, model = loaded.text.name, backend = worker.info.backend,
        kv_tokens = worker.kv_tokens(), "{} worker serves", role.name()
    );
    let host = Host {
        drain: Duration::from_secs(args.drain.drain_s),
        engine: args.engine,
        local: LocalPorts::default(),
        telemetry: telemetry.clone(),
    };
    until_signal(async |shutdown| worker.serve(listener, host, shutdown).await).await
}

/// What the workers of one process share.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    pub(crate) engine: EngineArgs,
    pub(crate) drain: Duration,
    pub(crate) local: LocalPorts,
    pub(crate) telemetry: Telemetry,
}

/// One worker, ready to serve.
#[derive(Debug)]
pub(crate) struct Worker {
    role: WorkerRole,
    pub(crate) info: v1::WorkerInfo,
    engine: Engine,
}

impl Worker {
    pub(crate) fn new(
        role: WorkerRole,
        id: String,
        address: String,
        loaded: &Loaded,
        args: &EngineArgs,
    ) -> anyhow::Result<Self> {
        let threads = Arc::clone(&loaded.threads);
        let n_threads = threads.n_threads();
        let kv_dtype = match args.kv_dtype {
            KvDtype::F16 => kernels::attention::KvDtype::F16,
            KvDtype::I8 => kernels::attention::KvDtype::I8,
        };
        let geometry = loaded.model.weights.shape().kv_geometry().with_dtype(kv_dtype);
        let draft_bytes = if role == WorkerRole::Decode { loaded.draft_block_bytes() } else { 0 };
        let n_blocks = n_blocks(args, geometry.bytes_per_block() + draft_bytes)?;
        let step_tokens = if args.step_tokens == 0 { role.step_tokens() } else { args.step_tokens };
        let config = EngineConfig {
            n_blocks,
            step_tokens,
            max_running: step_tokens,
            max_turns: args.max_worker_turns,
            kv_dtype,
            speculate: match (role, args.speculation) {
                (WorkerRole::Prefill, _) | (_, Speculation::Off) => Speculate::Never,
                (WorkerRole::Decode, Speculation::Auto | Speculation::Lookup) => Speculate::WhenItPays,
            },
        };
        let engine = Engine::start(loaded.model.clone(), threads, config, &id)?;
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let info = v1::WorkerInfo {
            id,
            epoch: epoch(),
            role: match role {
                WorkerRole::Prefill => v1::Role::Prefill.into(),
                WorkerRole::Decode => v1::Role::Decode.into(),
            },
            address,
            model: loaded.text.name.clone(),
            model_fingerprint: loaded.model.fingerprint.to_vec().into(),
            geometry: Some(engine.geometry().to_wire()),
            n_blocks,
            context_tokens: narrow(engine.context_tokens()),
            backend: format!("cpu {:?}, {n_threads} threads", Isa::detect()),
        };
        Ok(Self { role, info, engine })
    }

    pub(crate) fn kv_tokens(&self) -> usize {
        self.info.n_blocks as usize * kv::BLOCK_TOKENS
    }

    pub(crate) async fn serve(
        self,
        listener: TcpListener,
        host: Host,
        shutdown: CancellationToken,
    ) -> anyhow::Result<()> {
        let Host { engine: args, drain, local, telemetry } = host;
        let draining = shutdown.clone();
        let ready: Ready = Arc::new(move || if draining.is_cancelled() { Err("draining") } else { Ok(()) });
        let routes = health::routes(&telemetry, ready).into();
        let handover_deadline = Duration::from_millis(args.handover_deadline_ms);
        let pull_deadline = Duration::from_millis(args.pull_deadline_ms);
        let local = if args.force_grpc_transfer { LocalPorts::default() } else { local };
        match self.role {
            WorkerRole::Decode => {
                let config =
                    decode_worker::Config { info: self.info, handover_deadline, pull_deadline, drain };
                decode_worker::run(config, self.engine, listener, routes, local, shutdown).await?;
            }
            WorkerRole::Prefill => {
                let config = prefill_worker::Config {
                    info: self.info,
                    max_deadline: handover_deadline,
                    pull_deadline,
                    drain,
                };
                prefill_worker::run(config, self.engine, listener, routes, local, shutdown).await?;
            }
        }
        Ok(())
    }
}

fn n_blocks(args: &EngineArgs, block_bytes: usize) -> anyhow::Result<u32> {
    let n_blocks = (args.kv_memory_mb as usize * (1 << 20)) / block_bytes;
    if n_blocks < 2 {
        let message = format!(
            "--kv-memory-mb {} holds {n_blocks} KV blocks of {block_bytes} bytes: give more",
            args.kv_memory_mb
        );
        return Err(BadConfig(message).into());
    }
    Ok(u32::try_from(n_blocks).unwrap_or(u32::MAX))
}

fn epoch() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(1, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

/// Checks the costs that plans are made with.
pub(crate) fn check_plan(plan: &PlanArgs) -> anyhow::Result<()> {
    let fine = |us: f64| us.is_finite() && us >= 0.0;
    if fine(plan.handover_us) && fine(plan.block_us) {
        return Ok(());
    }
    Err(BadConfig("--handover-us and --block-us are microseconds, 0 or more".to_owned()).into())
}

/// Checks that `n_workers` engines fit this machine.
pub(crate) fn check_engine(engine: &EngineArgs, n_workers: usize) -> anyhow::Result<()> {
    if engine.threads > MAX_THREADS {
        return Err(BadConfig(format!("--threads is at most {MAX_THREADS}")).into());
    }
    if engine.max_worker_turns == 0 {
        return Err(
            BadConfig("--max-worker-turns 0 would refuse every turn: give at least 1".to_owned()).into()
        );
    }
    if engine.step_tokens > MAX_STEP_TOKENS {
        return Err(BadConfig(format!("--step-tokens is at most {MAX_STEP_TOKENS}")).into());
    }
    let wanted = u64::from(engine.kv_memory_mb).saturating_mul(n_workers as u64);
    match total_memory_mb() {
        Some(total) if wanted > total => Err(BadConfig(format!(
            "{n_workers} workers with --kv-memory-mb {} need {wanted} MiB, this machine has {total}: give less",
            engine.kv_memory_mb
        ))
        .into()),
        _ => Ok(()),
    }
}

/// The machine's memory, where the system tells it.
fn total_memory_mb() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kb| kb / 1024)
}

/// Checks what clap's types cannot.
pub(crate) fn check_api(api: &ApiArgs) -> anyhow::Result<()> {
    let counts = [
        (api.max_request_bytes, "--max-request-bytes"),
        (api.max_connections, "--max-connections"),
        (api.max_turns, "--max-turns"),
        (api.max_queued_creates, "--max-queued-creates"),
    ];
    if let Some((_, name)) = counts.into_iter().find(|(value, _)| !(1..=MAX_COUNT).contains(value)) {
        return Err(BadConfig(format!("{name} is between 1 and {MAX_COUNT}")).into());
    }
    if !(0.0..=2.0).contains(&api.temperature) || !(0.0..=1.0).contains(&api.top_p) {
        return Err(BadConfig("--temperature is between 0 and 2, --top-p between 0 and 1".to_owned()).into());
    }
    if !(MIN_STORE_MB..=MAX_STORE_MB).contains(&api.keep.store_max_mb) {
        return Err(BadConfig(format!("--store-max-mb is between {MIN_STORE_MB} and {MAX_STORE_MB}")).into());
    }
    if api.ping_ms == 0 || api.heartbeat_ms == 0 || api.connection_life_s == 0 {
        return Err(
            BadConfig("--ping-ms, --heartbeat-ms and --connection-life-s are at least 1".to_owned()).into()
        );
    }
    Ok(())
}

pub(crate) fn gateway_config(
    api: &ApiArgs,
    drain: &DrainArgs,
    routers: Vec<String>,
    access: Access,
) -> api_gateway::Config {
    let keep = &api.keep;
    let disk = keep.data_dir.as_ref().map(|folder| api_gateway::DiskConfig {
        folder: folder.clone(),
        ttl: keep.store_ttl,
        max_bytes: keep.store_max_mb << 20,
    });
    api_gateway::Config {
        routers,
        temperature: api.temperature,
        top_p: api.top_p,
        max_request_bytes: api.max_request_bytes,
        max_connections: api.max_connections,
        max_turns: api.max_turns,
        max_queued_creates: api.max_queued_creates,
        connection_life: Duration::from_secs(api.connection_life_s),
        heartbeat: Duration::from_millis(api.heartbeat_ms),
        ping: Duration::from_millis(api.ping_ms),
        slow_reader: Duration::from_millis(api.slow_reader_ms),
        max_resubmissions: api.max_resubmissions,
        websockets: !api.no_websockets,
        tools_canonical_order: api.tools_canonical_order,
        store: api_gateway::StoreLimits {
            max_responses: api.max_responses,
            max_tokens: api.max_stored_tokens,
            ttl: Duration::from_secs(api.response_ttl_s),
        },
        disk,
        api_keys: access.api_keys,
        seal_secret: access.seal_secret,
        drain: Duration::from_secs(drain.drain_s),
        ..api_gateway::Config::default()
    }
}

pub(crate) fn router_config(plan: &PlanArgs, workers: Vec<String>) -> router::Config {
    router::Config {
        workers,
        costs: router::Costs {
            local_prefill_tokens: plan.local_prefill_tokens,
            handover_us: plan.handover_us,
            block_us: plan.block_us,
        },
        prediction: Duration::from_millis(plan.prediction_ms),
    }
}

//! `baton up`: every role in one process, each on its own port, meeting over gRPC as everywhere else.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::Context;
use kv::transfer::LocalPorts;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::access::{self, Access};
use crate::cli::UpArgs;
use crate::loading::{self, Loaded};
use crate::roles::{self, BadConfig, Host, Worker, WorkerRole};
use crate::self_check;
use crate::telemetry::Telemetry;

/// How long the roles may take to find each other.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Workers of one process; more of them share the same cores.
const MAX_WORKERS: usize = 64;

/// A running cluster. The parts stop in the order in which work flows: gateway, router, decode, prefill.
struct Cluster {
    api: SocketAddr,
    gateway: api_gateway::Readiness,
    parts: Vec<Part>,
}

struct Part {
    shutdown: CancellationToken,
    tasks: JoinSet<anyhow::Result<()>>,
}

impl Part {
    fn new() -> Self {
        Self { shutdown: CancellationToken::new(), tasks: JoinSet::new() }
    }

    async fn stop(mut self) -> anyhow::Result<()> {
        self.shutdown.cancel();
        while let Some(result) = self.tasks.join_next().await {
            result.context("a role was interrupted")??;
        }
        Ok(())
    }
}

/// Runs `baton up` until a signal.
///
/// # Errors
/// When a port or the model cannot be had, a role fails, or the check does.
pub async fn run(args: UpArgs, telemetry: &Telemetry) -> anyhow::Result<()> {
    if args.decode == 0 {
        return Err(BadConfig("--decode 0 leaves nobody to answer: give at least 1".to_owned()).into());
    }
    if args.decode + args.prefill > MAX_WORKERS {
        return Err(BadConfig(format!(
            "--prefill and --decode start at most {MAX_WORKERS} workers in one process"
        ))
        .into());
    }
    roles::check_api(&args.api)?;
    roles::check_plan(&args.plan)?;
    roles::check_engine(&args.engine, args.decode + args.prefill)?;
    let access = access::read(&args.api, args.listen)?;
    let own_key = access.own_key.clone();
    let began = Instant::now();
    let listener = roles::bind(args.listen).await?;
    let (signalled, signals) = roles::shutdown_on_signal()?;
    let stopped = signalled.clone();
    let start = async {
        let loaded = loading::load(&args.model, &args.engine, args.engine.speculation).await?;
        let name = loaded.text.name.clone();
        let mut banner = String::new();
        let mut cluster = start(&args, &loaded, (listener, access), telemetry, &mut banner).await?;
        cluster.ready().await?;
        if !args.skip_self_check {
            banner.push_str("One real conversation went through all of it:\n");
            let checked = self_check::run(cluster.api, &name, own_key.as_ref()).await;
            banner.push_str(&checked.context("the cluster is up but its first conversation failed")?);
        }
        invite(&mut banner, cluster.api, &name, began.elapsed());
        std::io::stdout().write_all(banner.as_bytes())?;
        Ok::<_, anyhow::Error>(cluster)
    };
    let serve = async {
        // Nothing has been served yet: whoever stops it now need not wait.
        let mut cluster = tokio::select! {
            cluster = start => cluster?,
            () = stopped.cancelled() => return Ok(()),
        };
        tokio::select! {
            () = signalled.cancelled() => cluster.stop().await,
            error = cluster.failed() => Err(error),
        }
    };
    tokio::select! {
        result = serve => result,
        result = signals => result,
    }
}

async fn start(
    args: &UpArgs,
    loaded: &Loaded,
    (listener, access): (TcpListener, Access),
    telemetry: &Telemetry,
    banner: &mut String,
) -> anyhow::Result<Cluster> {
    let host = Host {
        engine: args.engine.clone(),
        drain: Duration::from_secs(args.drain.drain_s),
        local: LocalPorts::default(),
        telemetry: telemetry.clone(),
    };
    let (mut gateway, mut router, mut decode, mut prefill) =
        (Part::new(), Part::new(), Part::new(), Part::new());
    let mut addresses = Vec::new();
    let _ = writeln!(banner, "Baton is up with {}.", loaded.text.name);
    let decoders = (0..args.decode).map(|idx| (WorkerRole::Decode, idx));
    let prefillers = (0..args.prefill).map(|idx| (WorkerRole::Prefill, idx));
    for (role, idx) in decoders.chain(prefillers) {
        let listener = own_port().await?;
        let address = format!("http://{}", listener.local_addr()?);
        let worker =
            Worker::new(role, format!("{}-{idx}", role.name()), address.clone(), loaded, &args.engine)?;
        let _ = writeln!(
            banner,
            "  {:<10} {address}  {}, KV for {} tokens",
            worker.info.id,
            worker.info.backend,
            worker.kv_tokens()
        );
        let part = if role == WorkerRole::Decode { &mut decode } else { &mut prefill };
        part.tasks.spawn(worker.serve(listener, host.clone(), part.shutdown.clone()));
        addresses.push(address);
    }
    let _ = writeln!(
        banner,
        "  {:<10} {}",
        "memory",
        loaded.memory(args.engine.kv_memory_mb, args.decode + args.prefill)
    );
    let port = own_port().await?;
    let router_address = format!("http://{}", port.local_addr()?);
    let _ = writeln!(banner, "  {:<10} {router_address}", "router");
    let config = roles::router_config(&args.plan, addresses);
    let (own_telemetry, shutdown) = (telemetry.clone(), router.shutdown.clone());
    router.tasks.spawn(async move { roles::serve_router(config, port, &own_telemetry, shutdown).await });

    let api = listener.local_addr()?;
    let _ = writeln!(banner, "  {:<10} http://{api}", "gateway");
    let readiness = api_gateway::Readiness::default();
    let ready = readiness.clone();
    let config = roles::gateway_config(&args.api, &args.drain, vec![router_address], access);
    let (own_telemetry, shutdown, text) = (telemetry.clone(), gateway.shutdown.clone(), loaded.text.clone());
    gateway.tasks.spawn(async move {
        roles::serve_gateway(config, text, listener, &own_telemetry, ready, shutdown).await
    });
    Ok(Cluster { api, gateway: readiness, parts: vec![gateway, router, decode, prefill] })
}

async fn own_port() -> anyhow::Result<TcpListener> {
    roles::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await
}

impl Cluster {
    /// Waits until the gateway knows of a decode worker.
    async fn ready(&mut self) -> anyhow::Result<()> {
        let gateway = self.gateway.clone();
        let poll = async {
            let mut tick = tokio::time::interval(Duration::from_millis(20));
            loop {
                tick.tick().await;
                if gateway.is_ready() {
                    return;
                }
            }
        };
        tokio::select! {
            result = tokio::time::timeout(START_TIMEOUT, poll) => {
                result.context("the roles did not find each other; the log above says why")
            }
            error = self.failed() => Err(error),
        }
    }

    /// Completes when any role ends before it is told to.
    async fn failed(&mut self) -> anyhow::Error {
        let ended = self
            .parts
            .iter_mut()
            .filter(|part| !part.tasks.is_empty())
            .map(|part| Box::pin(part.tasks.join_next()));
        let (result, ..) = futures::future::select_all(ended).await;
        match result {
            Some(Ok(Err(error))) => error.context("a role failed"),
            Some(Err(error)) => anyhow::Error::new(error).context("a role was interrupted"),
            _ => anyhow::anyhow!("a role ended by itself"),
        }
    }

    async fn stop(self) -> anyhow::Result<()> {
        for part in self.parts {
            part.stop().await?;
        }
        Ok(())
    }
}

fn invite(banner: &mut String, api: SocketAddr, model: &str, took: Duration) {
    let _ = write!(
        banner,
        "Ready after {:.1} s. Try:\n  \
         baton chat --url ws://{api}/v1/responses\n  \
         curl -s http://{api}/v1/responses -H 'content-type: application/json' \\\n    \
         -d '{{\"model\": \"{model}\", \"input\": \"What is the capital of France?\", \
     \"instructions\": \"You are a helpful assistant.\", \"temperature\": 0, \"max_output_tokens\": 64}}'\n  \
         python: OpenAI(base_url=\"http://{api}/v1\", api_key=\"none\").responses.connect()\n  \
         curl -s http://{api}/metrics\n\
         Ctrl-C stops it.\n",
        took.as_secs_f64()
    );
}

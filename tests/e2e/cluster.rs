//! Starts the roles as `baton` does, and kills them as a kernel does.
//!
//! Every role has a runtime of its own, so that killing it takes its listener, its connections and its tasks at once.

use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr, TcpListener as StdListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use engine::{Engine, EngineConfig, Model, Speculate};
use kernels::attention::KvDtype;
use kv::transfer::LocalPorts;
use model::TextModel;
use model::chat_template::ChatTemplate;
use model::grammar::GrammarEngine;
use model::prompt::PromptBuilder;
use proto::v1;
use proto::v1::router_client::RouterClient;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

use crate::log;
use crate::plain::{MODEL, TEXT, threads};

/// How long roles may take to find each other, and to die. Generous: tests share the cores.
const PATIENCE: Duration = Duration::from_secs(20);

/// A start of a worker counts as a new epoch, one of a cluster as a new tag.
static STARTS: AtomicU64 = AtomicU64::new(1);

/// How workers hand blocks over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Handover {
    Grpc,
    Memory,
}

/// What a cluster is made of.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    pub(crate) n_prefill: usize,
    pub(crate) n_decode: usize,
    /// KV blocks of each worker.
    pub(crate) n_blocks: u32,
    pub(crate) handover: Handover,
    /// Prompts with more uncached tokens go to a prefill worker.
    pub(crate) local_prefill_tokens: u32,
    pub(crate) api: api_gateway::Config,
    /// Another chat template than the model's.
    pub(crate) template: Option<String>,
}

impl Spec {
    /// Decode workers that prefill by themselves.
    pub(crate) fn aggregated(n_decode: usize) -> Self {
        Self::split(0, n_decode)
    }

    pub(crate) fn split(n_prefill: usize, n_decode: usize) -> Self {
        Self {
            n_prefill,
            n_decode,
            n_blocks: 300,
            handover: Handover::Grpc,
            local_prefill_tokens: 32,
            api: api_gateway::Config::default(),
            template: None,
        }
    }
}

/// One role with a runtime of its own.
struct Process {
    address: SocketAddr,
    runtime: Arc<Mutex<Option<Runtime>>>,
    shutdown: CancellationToken,
}

impl Process {
    /// `name` is the name of its threads.
    fn start<F>(
        name: &str,
        listener: StdListener,
        serve: impl FnOnce(TcpListener, CancellationToken) -> F,
    ) -> anyhow::Result<Self>
    where
        F: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        let address = listener.local_addr()?;
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name(name).enable_all().build()?;
        let shutdown = CancellationToken::new();
        let listener = {
            let _entered = runtime.enter();
            TcpListener::from_std(listener)?
        };
        let service = serve(listener, shutdown.clone());
        let (end, ended) = std::sync::mpsc::channel();
        runtime.spawn(async move {
            service.await.expect("a role serves until it is told to stop");
            // Nobody waits any more when the role was killed.
            let _ = end.send(());
        });
        let runtime = Arc::new(Mutex::new(Some(runtime)));
        let own = Arc::clone(&runtime);
        // As in a process: what still runs when the role's `run` returns is cut.
        std::thread::spawn(move || {
            if ended.recv().is_ok()
                && let Some(runtime) = take(&own)
            {
                runtime.shutdown_background();
            }
        });
        Ok(Self { address, runtime, shutdown })
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Everything of it is gone when this returns.
    async fn kill(&mut self) {
        let Some(runtime) = take(&self.runtime) else { return };
        runtime.shutdown_background();
        let address = self.address;
        until("a killed role is gone", async || TcpStream::connect(address).is_err()).await;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(runtime) = take(&self.runtime) {
            runtime.shutdown_background();
        }
    }
}

fn take(runtime: &Mutex<Option<Runtime>>) -> Option<Runtime> {
    runtime.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// What the roles of one cluster share.
struct Host {
    spec: Spec,
    /// Stands in the names of all its threads.
    tag: String,
    local: LocalPorts,
}

/// A worker of either kind.
pub(crate) struct Worker {
    process: Process,
    pub(crate) info: v1::WorkerInfo,
    pub(crate) engine: Engine,
}

impl Worker {
    fn start(role: v1::Role, idx: usize, listener: StdListener, host: &Host) -> anyhow::Result<Self> {
        let Host { spec, tag, local } = host;
        let id = format!("{}-{idx}", if role == v1::Role::Prefill { "prefill" } else { "decode" });
        let name = format!("{tag}{id}");
        let config = EngineConfig {
            n_blocks: spec.n_blocks,
            step_tokens: 64,
            max_running: 64,
            max_turns: 256,
            kv_dtype: KvDtype::F16,
            speculate: Speculate::Always,
        };
        // As in processes of their own: each compiles what it is sent.
        let grammars = Some(Arc::new(GrammarEngine::new(&TEXT.tokenizer)));
        let model = Model { grammars, ..MODEL.clone() };
        let engine = Engine::start(model, Arc::new(threads(1)), config, &name)?;
        let info = v1::WorkerInfo {
            id,
            epoch: STARTS.fetch_add(1, Ordering::Relaxed),
            role: role.into(),
            address: format!("http://{}", listener.local_addr()?),
            model: TEXT.name.clone(),
            model_fingerprint: TEXT.fingerprint.to_vec().into(),
            geometry: Some(engine.geometry().to_wire()),
            n_blocks: spec.n_blocks,
            context_tokens: u32::try_from(engine.context_tokens())?,
            backend: "test".to_owned(),
        };
        let local = if spec.handover == Handover::Memory { local.clone() } else { LocalPorts::default() };
        let process =
            Process::start(&name, listener, serve_worker(role, info.clone(), engine.clone(), local))?;
        Ok(Self { process, info, engine })
    }

    pub(crate) async fn kill(&mut self) {
        self.process.kill().await;
        self.engine.stop();
    }

    /// Asks it to finish what runs and to take nothing new.
    pub(crate) fn drain(&self) {
        self.process.shutdown.cancel();
    }

    pub(crate) fn as_ref(&self) -> v1::WorkerRef {
        let info = &self.info;
        v1::WorkerRef { id: info.id.clone(), address: info.address.clone(), epoch: info.epoch }
    }
}

type Served = std::pin::Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send>>;

fn serve_worker(
    role: v1::Role,
    info: v1::WorkerInfo,
    engine: Engine,
    local: LocalPorts,
) -> impl FnOnce(TcpListener, CancellationToken) -> Served {
    let deadline = Duration::from_secs(30);
    let pull_deadline = Duration::from_secs(10);
    let routes = tonic::service::Routes::default();
    move |listener, shutdown| {
        Box::pin(async move {
            if role == v1::Role::Prefill {
                let config =
                    prefill_worker::Config { info, max_deadline: deadline, pull_deadline, drain: PATIENCE };
                prefill_worker::run(config, engine, listener, routes, local, shutdown).await?;
            } else {
                let config = decode_worker::Config {
                    info,
                    handover_deadline: deadline,
                    pull_deadline,
                    drain: PATIENCE,
                };
                decode_worker::run(config, engine, listener, routes, local, shutdown).await?;
            }
            Ok(())
        })
    }
}

/// A running cluster.
pub(crate) struct Cluster {
    host: Host,
    forgives_warnings: bool,
    pub(crate) decode: Vec<Worker>,
    pub(crate) prefill: Vec<Worker>,
    router: Process,
    gateway: Process,
    _stranger: Option<Process>,
}

impl Cluster {
    /// Starts all roles and waits until they know each other.
    pub(crate) async fn start(spec: Spec) -> anyhow::Result<Self> {
        Self::launch(spec, None).await
    }

    /// The same with one more decode worker that is not ours: `serve` makes its services.
    pub(crate) async fn start_with(
        spec: Spec,
        serve: impl FnOnce(v1::WorkerInfo) -> tonic::service::Routes,
    ) -> anyhow::Result<Self> {
        let listener = own_port()?;
        let info = v1::WorkerInfo {
            id: "stranger".to_owned(),
            epoch: STARTS.fetch_add(1, Ordering::Relaxed),
            role: v1::Role::Decode.into(),
            address: format!("http://{}", listener.local_addr()?),
            model: TEXT.name.clone(),
            model_fingerprint: TEXT.fingerprint.to_vec().into(),
            ..Default::default()
        };
        let routes = serve(info);
        let stranger = Process::start("stranger", listener, |listener, _| async move {
            let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
            Ok(proto::net::server().add_routes(routes).serve_with_incoming(incoming).await?)
        })?;
        Self::launch(spec, Some(stranger)).await
    }

    async fn launch(spec: Spec, stranger: Option<Process>) -> anyhow::Result<Self> {
        log::start();
        let tag = format!("cluster {} ", STARTS.fetch_add(1, Ordering::Relaxed));
        let host = Host { spec, tag, local: LocalPorts::default() };
        let workers = |role, n| -> anyhow::Result<Vec<Worker>> {
            (0..n).map(|idx| Worker::start(role, idx, own_port()?, &host)).collect()
        };
        let decode = workers(v1::Role::Decode, host.spec.n_decode)?;
        let prefill = workers(v1::Role::Prefill, host.spec.n_prefill)?;
        let addresses = decode.iter().chain(&prefill).map(|worker| worker.info.address.clone());
        let addresses: Vec<String> = addresses.chain(stranger.as_ref().map(Process::url)).collect();
        let n_workers = addresses.len();
        let router = start_router(own_port()?, addresses, &host)?;
        knows(&router.url(), n_workers).await;

        let gateway = start_gateway(own_port()?, &router, &host).await?;
        Ok(Self { host, forgives_warnings: false, decode, prefill, router, gateway, _stranger: stranger })
    }

    /// Where clients connect.
    pub(crate) fn address(&self) -> SocketAddr {
        self.gateway.address
    }

    /// This test breaks things, and the roles may say so.
    pub(crate) fn forgive_warnings(&mut self) {
        self.forgives_warnings = true;
    }

    /// Asks the gateway to finish what runs and to take nothing new.
    pub(crate) fn drain_gateway(&self) {
        self.gateway.shutdown.cancel();
    }

    /// Ends the gateway and starts a new one at the old address; only what is on disk is left.
    pub(crate) async fn restart_gateway(&mut self) -> anyhow::Result<()> {
        self.gateway.shutdown.cancel();
        let (address, runtime) = (self.gateway.address, Arc::clone(&self.gateway.runtime));
        let is_there = || runtime.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        until("the gateway has ended", async || !is_there()).await;
        self.gateway = start_gateway(bind(address)?, &self.router, &self.host).await?;
        Ok(())
    }

    pub(crate) async fn kill_router(&mut self) {
        self.router.kill().await;
    }

    /// A new router at the old address; it starts with an empty index.
    pub(crate) async fn restart_router(&mut self) -> anyhow::Result<()> {
        let workers = self.decode.iter().chain(&self.prefill);
        let addresses: Vec<String> = workers.map(|worker| worker.info.address.clone()).collect();
        let n_workers = addresses.len();
        self.router = start_router(bind(self.router.address)?, addresses, &self.host)?;
        knows(&self.router.url(), n_workers).await;
        Ok(())
    }

    /// A new worker, with an empty cache, at the address of one that was killed.
    pub(crate) fn restart_decode(&mut self, idx: usize) -> anyhow::Result<()> {
        let listener = bind(self.decode[idx].process.address)?;
        self.decode[idx] = Worker::start(v1::Role::Decode, idx, listener, &self.host)?;
        Ok(())
    }

    /// The decode worker with this id.
    pub(crate) fn decode_named(&mut self, id: &str) -> &mut Worker {
        self.decode
            .iter_mut()
            .find(|worker| worker.info.id == id)
            .expect("a turn names a worker of the cluster")
    }

    /// Turns in all decode workers.
    pub(crate) fn live_turns(&self) -> usize {
        self.decode.iter().map(|worker| worker.engine.live_turns()).sum()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let of = if self.forgives_warnings { log::panics_of } else { log::warnings_of };
        let lines = of(&self.host.tag);
        if !std::thread::panicking() {
            assert!(lines.is_empty(), "unexpected:\n{}", lines.join("\n"));
        }
    }
}

async fn start_gateway(listener: StdListener, router: &Process, host: &Host) -> anyhow::Result<Process> {
    let config = api_gateway::Config { routers: vec![router.url()], ..host.spec.api.clone() };
    let readiness = api_gateway::Readiness::default();
    let ready = readiness.clone();
    let text = match &host.spec.template {
        None => TEXT.clone(),
        Some(source) => {
            let template = ChatTemplate::new(source, "<|im_start|>", "<|im_end|>")?;
            TextModel { prompts: PromptBuilder::new(template, Arc::clone(&TEXT.tokenizer))?, ..TEXT.clone() }
        }
    };
    let gateway =
        Process::start(&format!("{}gateway", host.tag), listener, |listener, shutdown| async move {
            let routes = axum::Router::new();
            api_gateway::run(config, text, listener, routes, readiness, shutdown).await?;
            Ok(())
        })?;
    until("the gateway knows a decode worker", async || ready.is_ready()).await;
    Ok(gateway)
}

fn start_router(listener: StdListener, workers: Vec<String>, host: &Host) -> anyhow::Result<Process> {
    let costs =
        router::Costs { local_prefill_tokens: host.spec.local_prefill_tokens, ..router::Costs::default() };
    let config = router::Config { workers, costs, prediction: Duration::from_secs(1) };
    let routes = tonic::service::Routes::default();
    Process::start(&format!("{}router", host.tag), listener, |listener, shutdown| async move {
        router::run(config, listener, routes, router::Readiness::default(), shutdown).await?;
        Ok(())
    })
}

fn own_port() -> anyhow::Result<StdListener> {
    bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
}

fn bind(address: SocketAddr) -> anyhow::Result<StdListener> {
    let listener = StdListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Waits until the router at `url` is connected to `n_workers`.
async fn knows(url: &str, n_workers: usize) {
    let client = RouterClient::new(proto::net::channel(url).expect("our own address is well-formed"));
    until("the router knows all workers", async || {
        let state = client.clone().cluster(v1::ClusterRequest {}).await;
        state.is_ok_and(|state| state.into_inner().workers.len() == n_workers)
    })
    .await;
}

/// Polls until `check` holds. Panics after a generous while.
pub(crate) async fn until(what: &str, mut check: impl AsyncFnMut() -> bool) {
    let poll = async {
        let mut tick = tokio::time::interval(Duration::from_millis(5));
        while !check().await {
            tick.tick().await;
        }
    };
    tokio::time::timeout(PATIENCE, poll).await.unwrap_or_else(|_| panic!("not after {PATIENCE:?}: {what}"));
}

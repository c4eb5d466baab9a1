//! A real gateway on threads of its own, and what the kernel and its own counters say about it.

use std::net::SocketAddr;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use api_gateway::{Config, Readiness};
use metrics_exporter_prometheus::PrometheusHandle;
use model::TextModel;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// By this name the kernel's books tell the gateway's threads from others.
const THREAD_NAME: &str = "gateway";
/// Helper threads must not end during a run: their time would vanish from the books.
const KEEP_ALIVE: Duration = Duration::from_secs(3600);

/// A running gateway: all its async tasks run on one thread, blocking work on helpers.
#[derive(Debug)]
pub(crate) struct Gateway {
    pub(crate) address: SocketAddr,
    readiness: Readiness,
    metrics: PrometheusHandle,
    thread: JoinHandle<anyhow::Result<()>>,
}

/// What a gateway has done since its start.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reading {
    pub(crate) cpu: Duration,
    pub(crate) tokenized_tokens: u64,
    pub(crate) worker_bytes: u64,
    pub(crate) full_prompts: u64,
    pub(crate) rerenders: u64,
}

impl Gateway {
    /// Serves on a port and a thread of its own until `shutdown`.
    pub(crate) fn start(
        text: TextModel,
        router: SocketAddr,
        metrics: PrometheusHandle,
        shutdown: CancellationToken,
    ) -> anyhow::Result<Self> {
        let (sender, started) = mpsc::sync_channel(1);
        let readiness = Readiness::default();
        let ready = readiness.clone();
        let config = Config { routers: vec![format!("http://{router}")], ..Default::default() };
        let thread = std::thread::Builder::new().name(THREAD_NAME.to_owned()).spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .thread_name(THREAD_NAME)
                .thread_keep_alive(KEEP_ALIVE)
                .build()?;
            runtime.block_on(async {
                let listener = TcpListener::bind("127.0.0.1:0").await?;
                sender.send(listener.local_addr()?)?;
                api_gateway::run(config, text, listener, axum::Router::new(), ready, shutdown).await?;
                Ok(())
            })
        })?;
        let Ok(address) = started.recv() else {
            thread.join().map_err(|_| anyhow::anyhow!("the gateway panicked"))??;
            anyhow::bail!("the gateway did not start");
        };
        Ok(Self { address, readiness, metrics, thread })
    }

    /// Waits until turns can be served.
    pub(crate) async fn ready(&self) -> anyhow::Result<()> {
        let wait = async {
            let mut tick = tokio::time::interval(Duration::from_millis(20));
            while !self.readiness.is_ready() {
                tick.tick().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), wait).await.context("the gateway does not become ready")
    }

    /// CPU time and counters. The gateway must be asleep: the kernel books running time only now and then.
    pub(crate) fn read(&self) -> anyhow::Result<Reading> {
        let rendered = self.metrics.render();
        Ok(Reading {
            cpu: cpu_time()?,
            tokenized_tokens: counter(&rendered, api_gateway::metrics::TOKENIZED_TOKENS),
            worker_bytes: counter(&rendered, api_gateway::metrics::WORKER_BYTES_OUT),
            full_prompts: counter(&rendered, api_gateway::metrics::FULL_PROMPTS),
            rerenders: counter(&rendered, api_gateway::metrics::RERENDERS),
        })
    }

    /// Waits for the end after `shutdown`.
    pub(crate) fn join(self) -> anyhow::Result<()> {
        self.thread.join().map_err(|_| anyhow::anyhow!("the gateway panicked"))?
    }
}

/// CPU time of all threads of the gateway.
fn cpu_time() -> anyhow::Result<Duration> {
    let mut total_ns = 0;
    for task in std::fs::read_dir("/proc/self/task").context("the CPU time of a thread needs /proc")? {
        let task = task?.path();
        if std::fs::read_to_string(task.join("comm"))?.trim_end() == THREAD_NAME {
            let schedstat = std::fs::read_to_string(task.join("schedstat"))?;
            let ns = schedstat.split(' ').next().and_then(|field| field.parse::<u64>().ok());
            total_ns += ns.context("odd schedstat")?;
        }
    }
    Ok(Duration::from_nanos(total_ns))
}

/// A counter's value in Prometheus' text format; zero before its first increment.
fn counter(rendered: &str, name: &str) -> u64 {
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
    rendered.lines().find_map(value).unwrap_or(0)
}

//! Prompt tokens to KV blocks: computes a prompt, pushes each layer group as soon as it is written, returns the first
//! token.

mod handover;
pub mod metrics;
mod service;

use std::time::Duration;

use engine::Engine;
use kv::announce::WorkerService;
use kv::transfer::{Links, LocalPorts, Peer, TransferService};
use proto::v1;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;

/// How long connections may take to close after the drain.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// One prefill worker's settings.
#[derive(Debug, Clone)]
pub struct Config {
    /// What routers and peers are told: id, epoch, address, model, limits.
    pub info: v1::WorkerInfo,
    /// The longest deadline a grant may name.
    pub max_deadline: Duration,
    /// How long another worker may take to send a prefix before it is computed here.
    pub pull_deadline: Duration,
    /// How long running prompts may take to finish once the worker drains.
    pub drain: Duration,
}

/// Serves prompts on `listener` until `shutdown`, then lets running ones finish. `routes` holds what the process
/// serves beside (health, metrics).
///
/// # Errors
/// When the listener fails.
pub async fn run(
    config: Config,
    engine: Engine,
    listener: TcpListener,
    routes: Routes,
    local: LocalPorts,
    shutdown: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let tasks = TaskTracker::new();
    let stop_serving = CancellationToken::new();
    let own =
        Peer { id: config.info.id.clone(), address: config.info.address.clone(), epoch: config.info.epoch };
    let geometry = engine.geometry().clone();
    local.add(own.id.clone(), own.epoch, engine.port());
    let links = Links::new(own.clone(), geometry.clone(), local.clone());
    let news = WorkerService::new(
        config.info.clone(),
        engine.announcer().clone(),
        tasks.clone(),
        stop_serving.clone(),
    );
    let transfer = TransferService::new(own.clone(), geometry, engine.port(), tasks.clone());
    let drain = config.drain;
    let prefill = service::PrefillService::new(config, engine.clone(), links, shutdown.clone());
    let limit = proto::MAX_MESSAGE_BYTES;
    let routes = routes
        .add_service(v1::prefill_server::PrefillServer::new(prefill).max_decoding_message_size(limit))
        .add_service(v1::worker_server::WorkerServer::new(news))
        .add_service(v1::transfer_server::TransferServer::new(transfer).max_decoding_message_size(limit));
    let idle = engine.clone();
    let drained = async {
        shutdown.cancelled().await;
        let wait = async {
            let mut tick = tokio::time::interval(Duration::from_millis(20));
            while idle.live_turns() > 0 {
                tick.tick().await;
            }
        };
        if tokio::time::timeout(drain, wait).await.is_err() {
            tracing::warn!(prompts = idle.live_turns(), "prompts are cut short: the drain period is over");
        }
        stop_serving.cancel();
    };
    let serve = proto::net::server()
        .add_routes(routes)
        .serve_with_incoming_shutdown(proto::net::incoming(listener), drained);
    let cut = async {
        stop_serving.cancelled().await;
        tokio::time::sleep(CLOSE_TIMEOUT).await;
    };
    let result = tokio::select! {
        result = serve => result,
        () = cut => Ok(()),
    };
    local.remove(&own.id);
    stop_serving.cancel();
    tasks.close();
    tasks.wait().await;
    // The engine's thread ends its current step first: a few milliseconds.
    engine.stop();
    result
}

//! KV blocks to output tokens: runs each turn, has its prompt filled by a prefill worker, and streams token ids.

mod intake;
pub mod metrics;
mod service;
mod stream;

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

/// One decode worker's settings.
#[derive(Debug, Clone)]
pub struct Config {
    /// What routers and peers are told: id, epoch, address, model, limits.
    pub info: v1::WorkerInfo,
    /// How long a prefill worker may take to fill a prompt before it is computed here.
    pub handover_deadline: Duration,
    /// How long another worker may take to send a prefix before it is computed here.
    pub pull_deadline: Duration,
    /// How long running turns may take to finish once the worker drains.
    pub drain: Duration,
}

/// Serves turns on `listener` until `shutdown`, then lets running ones finish. `routes` holds what the process serves
/// beside (health, metrics).
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
    let phases = service::Phases { draining: shutdown.clone(), cut: stop_serving.clone() };
    let decode = service::DecodeService::new(config, engine.clone(), links, tasks.clone(), phases);
    let limit = proto::MAX_MESSAGE_BYTES;
    let routes = routes
        .add_service(v1::decode_server::DecodeServer::new(decode.clone()).max_decoding_message_size(limit))
        .add_service(v1::worker_server::WorkerServer::new(news))
        .add_service(v1::transfer_server::TransferServer::new(transfer).max_decoding_message_size(limit));
    let drained = async {
        shutdown.cancelled().await;
        decode.drained(drain).await;
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

//! KV blocks to output tokens: runs each turn, has its prompt filled by a prefill worker, and streams token ids.

mod intake;
pub mod metrics;
mod service;
mod stream;

use std::time::Duration;

use engine::Engine;
use kv::host::{Ending, Host};
use kv::transfer::LocalPorts;
use proto::v1;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

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
    let host = Host::new(config.info.clone(), engine.port(), engine.geometry().clone(), local);
    let phases = service::Phases { draining: shutdown.clone(), cut: host.cut() };
    let drain = config.drain;
    let decode = service::DecodeService::new(config, engine.clone(), host.links(), host.tasks(), phases);
    let decode =
        v1::decode_server::DecodeServer::new(decode).max_decoding_message_size(proto::MAX_MESSAGE_BYTES);
    let ending = Ending { shutdown, drain, live: || engine.live_turns() };
    let result = host.serve(listener, routes.add_service(decode), engine.announcer().clone(), ending).await;
    // The engine's thread ends its current step first: a few milliseconds.
    engine.stop();
    result
}

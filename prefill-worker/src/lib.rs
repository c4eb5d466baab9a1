//! Prompt tokens to KV blocks: computes a prompt, pushes each layer group as soon as it is written, returns the first
//! token.

mod handover;
pub mod metrics;
mod service;

use std::time::Duration;

use engine::Engine;
use kv::host::{Ending, Host};
use kv::transfer::LocalPorts;
use proto::v1;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

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
    let host = Host::new(config.info.clone(), engine.port(), engine.geometry().clone(), local);
    let drain = config.drain;
    let prefill = service::PrefillService::new(config, engine.clone(), host.links(), shutdown.clone());
    let prefill =
        v1::prefill_server::PrefillServer::new(prefill).max_decoding_message_size(proto::MAX_MESSAGE_BYTES);
    let ending = Ending { shutdown, drain, live: || engine.live_turns() };
    let result = host.serve(listener, routes.add_service(prefill), engine.announcer().clone(), ending).await;
    // The engine's thread ends its current step first: a few milliseconds.
    engine.stop();
    result
}

//! Chooses the workers of each turn: what is cached where, and who is busy. Control only: no token passes it.

mod index;
mod load;
pub mod metrics;
mod policy;
mod service;
mod watch;

use std::time::Duration;

use proto::v1;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;

pub use policy::Costs;
pub use service::Readiness;

/// The router's settings.
#[derive(Debug, Clone)]
pub struct Config {
    /// Addresses of all workers, `http://host:port`.
    pub workers: Vec<String>,
    pub costs: Costs,
    /// How long a routed turn counts as load before its worker has reported it.
    pub prediction: Duration,
}

/// Serves plans on `listener` until `shutdown`. `routes` holds what the process serves beside (health, metrics).
///
/// # Errors
/// When the listener fails.
pub async fn run(
    config: Config,
    listener: TcpListener,
    routes: Routes,
    readiness: Readiness,
    shutdown: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let tasks = TaskTracker::new();
    let cluster = service::Cluster::new(config.costs, config.prediction, readiness);
    for address in config.workers {
        tasks.spawn(watch::run(address, cluster.clone(), shutdown.clone()));
    }
    let service = v1::router_server::RouterServer::new(service::RouterService::new(cluster))
        .max_decoding_message_size(proto::MAX_MESSAGE_BYTES);
    let serve = proto::net::server()
        .add_routes(routes.add_service(service))
        .serve_with_incoming_shutdown(proto::net::incoming(listener), shutdown.cancelled());
    let cut = async {
        shutdown.cancelled().await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    };
    let result = tokio::select! {
        result = serve => result,
        () = cut => Ok(()),
    };
    tasks.close();
    tasks.wait().await;
    result
}

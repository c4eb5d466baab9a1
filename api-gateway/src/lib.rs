//! Speaks OpenAI's Responses API over WebSocket, SSE and JSON, and owns every conversation's tokens.

mod auth;
mod background;
mod cache_break;
mod cluster;
mod compact;
mod constraint;
mod conversation;
mod conversations;
mod emit;
mod error;
mod history;
mod http;
pub mod metrics;
mod output;
mod prepare;
mod recent;
mod seal;
mod state;
mod store;
mod thought;
mod turn;
mod wire;
mod ws;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use kv::hash::HashKey;
use model::TextModel;
use proto::net::BadAddress;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use store::Store;

pub use auth::{ApiKeys, Secret, WeakKey};
pub use store::{DiskConfig, OpenError, StoreLimits};

/// The gateway's settings.
#[derive(Debug, Clone)]
pub struct Config {
    /// Addresses of all routers, `http://host:port`.
    pub routers: Vec<String>,
    /// Sampling where the request says nothing.
    pub temperature: f32,
    pub top_p: f32,
    /// Longest WebSocket message and HTTP body, in bytes.
    pub max_request_bytes: usize,
    /// Open WebSocket connections; further upgrades are answered with 503.
    pub max_connections: usize,
    /// Turns in progress over all connections; further ones are answered with 503.
    pub max_turns: usize,
    /// Creates that may wait behind running ones on a connection.
    pub max_queued_creates: usize,
    /// Lanes with a name on a connection.
    pub max_lanes: usize,
    /// Turns in progress on a connection; further ones wait.
    pub max_active_lanes: usize,
    /// After this long a connection takes no further creates.
    pub connection_life: Duration,
    /// `response.in_progress` is repeated at this interval while nothing else is sent.
    pub heartbeat: Duration,
    /// A ping goes out at this interval; a connection that stays silent for three of them is closed.
    pub ping: Duration,
    /// A turn whose events cannot be sent for this long is cancelled.
    pub slow_reader: Duration,
    /// Other workers tried when one fails during a turn.
    pub max_resubmissions: usize,
    /// Whether clients may open WebSockets; upgrades are answered with 426 otherwise.
    pub websockets: bool,
    /// Shows the tools of a request to the model ordered by name, so that a client that sends the same ones in another
    /// order breaks no prefix.
    pub tools_canonical_order: bool,
    pub store: StoreLimits,
    /// Where responses are kept that outlive the process; without it none does.
    pub disk: Option<DiskConfig>,
    /// Who may use the gateway.
    pub api_keys: ApiKeys,
    /// Of this the key is made under which summaries are sealed; without it they can be read until the gateway ends.
    pub seal_secret: Option<Secret>,
    /// Responses that run in the background, or ended a short while ago.
    pub max_background: usize,
    /// Conversations that clients have named.
    pub max_conversations: usize,
    /// Bytes of their items in memory; with a disk, what was not used lately makes room.
    pub max_conversation_bytes: usize,
    /// How long running turns may take to finish once the gateway drains.
    pub drain: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            routers: Vec::new(),
            temperature: 1.0,
            top_p: 1.0,
            max_request_bytes: 64 << 20,
            max_connections: 10_000,
            max_turns: 4_096,
            max_queued_creates: 64,
            max_lanes: 32,
            max_active_lanes: 16,
            connection_life: Duration::from_secs(3600),
            heartbeat: Duration::from_secs(15),
            ping: Duration::from_secs(20),
            slow_reader: Duration::from_secs(30),
            max_resubmissions: 3,
            websockets: true,
            tools_canonical_order: false,
            store: StoreLimits {
                max_responses: 100_000,
                max_tokens: 256 << 20,
                ttl: Duration::from_secs(24 * 3600),
            },
            disk: None,
            api_keys: ApiKeys::default(),
            seal_secret: None,
            max_background: 1024,
            max_conversations: 10_000,
            max_conversation_bytes: 1 << 30,
            drain: Duration::from_secs(30),
        }
    }
}

/// Whether any router has named a decode worker; readable from outside, for health checks.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Arc<AtomicBool>);

impl Readiness {
    /// True once a turn can be served.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Why a gateway cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Router(#[from] BadAddress),
    #[error(transparent)]
    Store(#[from] OpenError),
}

/// Serves clients on `listener` until `shutdown`, then lets running turns finish. `routes` holds what the process
/// serves beside (health, metrics).
///
/// # Errors
/// When a router's address is malformed, or the folder for responses cannot be used.
pub async fn run(
    config: Config,
    text: TextModel,
    listener: TcpListener,
    routes: Router,
    readiness: Readiness,
    shutdown: CancellationToken,
) -> Result<(), StartError> {
    let tasks = TaskTracker::new();
    let cluster = cluster::ClusterClient::new(&config.routers)?;
    tasks.spawn(cluster.clone().refresh(readiness.clone(), shutdown.clone()));
    let drain = config.drain;
    let store = open_store(&config, &text).await?;
    tasks.spawn(sweep(store.clone(), shutdown.clone()));
    let gateway = state::Gateway::new(config, text, cluster, store.clone());
    let app = routes.merge(http::routes(gateway, tasks.clone(), shutdown.clone()));
    let listener = axum::serve::ListenerExt::tap_io(listener, |stream| {
        // A socket that cannot be tuned still works.
        let _ = stream.set_nodelay(true);
    });
    let serve = axum::serve(listener, app).with_graceful_shutdown(shutdown.clone().cancelled_owned());
    let cut = async {
        shutdown.cancelled().await;
        tokio::time::sleep(drain).await;
    };
    let served = async {
        if let Err(error) = serve.await {
            tracing::error!(%error, "the listener failed");
        }
        // Sockets and streams outlive the requests that opened them.
        tasks.close();
        tasks.wait().await;
    };
    tokio::select! {
        () = served => {}
        () = cut => tracing::warn!("connections are cut: the drain period is over"),
    }
    store.close().await;
    Ok(())
}

async fn open_store(config: &Config, text: &TextModel) -> Result<Store, OpenError> {
    let hash_key = HashKey::derive(&text.fingerprint, b"");
    let Some(disk) = config.disk.clone() else { return Ok(Store::in_memory(config.store, hash_key)) };
    let (limits, text) = (config.store, text.clone());
    let opening = tokio::task::spawn_blocking(move || Store::open(limits, &disk, &text, hash_key));
    opening.await.unwrap_or_else(|_| Err(OpenError::Interrupted))
}

/// Removes what has expired from the disk, now and then.
async fn sweep(store: Store, shutdown: CancellationToken) {
    let Some(interval) = store.sweep_interval() else { return };
    while shutdown.run_until_cancelled(tokio::time::sleep(interval)).await.is_some() {
        store.sweep();
    }
}

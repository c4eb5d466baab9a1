//! What every worker does beside its own work: tell its news, let others reach its memory, drain, and end.

use std::time::Duration;

use proto::v1;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;

use crate::announce::{Announcer, WorkerService};
use crate::geometry::Geometry;
use crate::port::Port;
use crate::transfer::{Links, LocalPorts, Peer, TransferService};

/// How often a draining worker looks whether it is idle.
const IDLE_POLL: Duration = Duration::from_millis(20);
/// How long connections may take to close after the drain.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// One worker's place in the cluster.
#[derive(Debug)]
pub struct Host {
    info: v1::WorkerInfo,
    own: Peer,
    geometry: Geometry,
    port: Port,
    local: LocalPorts,
    links: Links,
    tasks: TaskTracker,
    cut: CancellationToken,
}

/// How a worker ends.
#[derive(Debug)]
pub struct Ending<F> {
    /// No new work from here on.
    pub shutdown: CancellationToken,
    /// How long running work may take from then on.
    pub drain: Duration,
    /// Turns or prompts that run now.
    pub live: F,
}

impl Host {
    /// Makes the worker's memory known to the others in this process.
    #[must_use]
    pub fn new(info: v1::WorkerInfo, port: Port, geometry: Geometry, local: LocalPorts) -> Self {
        let own = Peer { id: info.id.clone(), address: info.address.clone(), epoch: info.epoch };
        local.add(own.id.clone(), own.epoch, port.clone());
        let links = Links::new(own.clone(), geometry.clone(), local.clone());
        let (tasks, cut) = (TaskTracker::new(), CancellationToken::new());
        Self { info, own, geometry, port, local, links, tasks, cut }
    }

    /// The ways to the other workers.
    #[must_use]
    pub fn links(&self) -> Links {
        self.links.clone()
    }

    /// Where the worker's own tasks run; [`Self::serve`] waits for them.
    #[must_use]
    pub fn tasks(&self) -> TaskTracker {
        self.tasks.clone()
    }

    /// Cancelled when the drain period is over: what still runs ends.
    #[must_use]
    pub fn cut(&self) -> CancellationToken {
        self.cut.clone()
    }

    /// Serves `routes`, the worker's news and its memory on `listener` until `ending` is over.
    ///
    /// # Errors
    /// When the listener fails.
    pub async fn serve(
        self,
        listener: TcpListener,
        routes: Routes,
        announcer: Announcer,
        ending: Ending<impl Fn() -> usize>,
    ) -> Result<(), tonic::transport::Error> {
        let news = WorkerService::new(self.info, announcer.clone(), self.tasks.clone(), self.cut.clone());
        let transfer = TransferService::new(self.own.clone(), self.geometry, self.port, self.tasks.clone());
        let routes = routes.add_service(v1::worker_server::WorkerServer::new(news)).add_service(
            v1::transfer_server::TransferServer::new(transfer)
                .max_decoding_message_size(proto::MAX_MESSAGE_BYTES),
        );
        let drained = async {
            ending.shutdown.cancelled().await;
            announcer.publish_drain();
            ending.drained().await;
            self.cut.cancel();
        };
        let serve = proto::net::server()
            .add_routes(routes)
            .serve_with_incoming_shutdown(proto::net::incoming(listener), drained);
        let overdue = async {
            self.cut.cancelled().await;
            tokio::time::sleep(CLOSE_TIMEOUT).await;
        };
        let result = tokio::select! {
            result = serve => result,
            () = overdue => Ok(()),
        };
        self.local.remove(&self.own.id);
        self.cut.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        result
    }
}

impl<F: Fn() -> usize> Ending<F> {
    /// Waits until nothing runs, as long as the drain lasts.
    async fn drained(&self) {
        let idle = async {
            let mut tick = tokio::time::interval(IDLE_POLL);
            while (self.live)() > 0 {
                tick.tick().await;
            }
        };
        if tokio::time::timeout(self.drain, idle).await.is_err() {
            tracing::warn!(running = (self.live)(), "work is cut short: the drain period is over");
        }
    }
}

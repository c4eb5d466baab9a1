//! One task per configured worker: connect, take its snapshot and events in, start over after any loss.

use std::time::Duration;

use kv::announce::pairs_from_wire;
use kv::hash::BlockHash;
use proto::v1::worker_client::WorkerClient;
use proto::v1::worker_event::Event;
use proto::{net, v1};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::index::WorkerIdx;
use crate::service::Cluster;

const FIRST_RETRY: Duration = Duration::from_millis(100);
const LAST_RETRY: Duration = Duration::from_secs(2);

/// Watches the worker at `address` until `shutdown`.
pub(crate) async fn run(address: String, cluster: Cluster, shutdown: CancellationToken) {
    let mut retry = FIRST_RETRY;
    let mut told = false;
    loop {
        let mut connected = false;
        let watching = watch(&address, &cluster, &mut connected);
        let result = tokio::select! {
            result = watching => result,
            () = shutdown.cancelled() => return,
        };
        if connected {
            retry = FIRST_RETRY;
            told = false;
        }
        if let Err(status) = result
            && !told
        {
            told = true;
            tracing::info!(
                address,
                error = status.message(),
                "worker is not connected: trying again until it is"
            );
        }
        tokio::select! {
            () = tokio::time::sleep(retry) => retry = (retry * 2).min(LAST_RETRY),
            () = shutdown.cancelled() => return,
        }
    }
}

/// Leaves the cluster when the watch ends, however it ends.
struct Membership<'a> {
    cluster: &'a Cluster,
    idx: WorkerIdx,
    id: String,
}

impl Drop for Membership<'_> {
    fn drop(&mut self) {
        tracing::info!(worker = self.id, "worker disconnected");
        self.cluster.leave(self.idx);
    }
}

async fn watch(address: &str, cluster: &Cluster, connected: &mut bool) -> Result<(), Status> {
    let channel = net::channel(address).map_err(|error| Status::invalid_argument(error.to_string()))?;
    let mut client = WorkerClient::new(channel).max_decoding_message_size(proto::MAX_MESSAGE_BYTES);
    let mut events = client.watch(v1::WatchRequest {}).await?.into_inner();
    let mut member: Option<Membership<'_>> = None;
    let mut n_events = 0;
    while let Some(event) = events.message().await? {
        n_events += 1;
        if event.number != n_events {
            return Err(Status::data_loss(format!("event {} came as number {n_events}", event.number)));
        }
        match (event.event, &member) {
            (Some(Event::Snapshot(snapshot)), _) => {
                if let Some(info) = snapshot.info {
                    let (id, role) = (info.id.clone(), info.role());
                    let idx = cluster.join(info).map_err(|other| {
                        Status::already_exists(format!(
                            "a worker named {id} is connected at {other} already: give each its own --id"
                        ))
                    })?;
                    *connected = true;
                    tracing::info!(worker = id, ?role, address, "worker connected");
                    member = Some(Membership { cluster, idx, id });
                }
                if let Some(member) = &member {
                    cluster.store(member.idx, &pairs_from_wire(&snapshot.blocks).map_err(damaged)?);
                }
            }
            (Some(Event::Delta(delta)), Some(member)) => {
                cluster.store(member.idx, &pairs_from_wire(&delta.stored).map_err(damaged)?);
                cluster.remove(member.idx, &BlockHash::run_from_wire(&delta.removed).map_err(damaged)?);
            }
            (Some(Event::Load(load)), Some(member)) => cluster.report(member.idx, load),
            (_, None) => return Err(Status::data_loss("an event came before the snapshot")),
            (None, _) => {}
        }
    }
    Err(Status::unavailable("the worker ended its events"))
}

fn damaged(error: kv::hash::WrongLength) -> Status {
    Status::data_loss(error.to_string())
}

//! A worker's news for routers: a snapshot of what it holds, then numbered deltas and load reports.
//!
//! The engine publishes after each step; every watcher sees the snapshot and then each later event exactly once, or
//! its stream ends (it fell behind, or the worker stopped) and it asks again.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{BufMut, Bytes, BytesMut};
use proto::v1;
use tokio::sync::{broadcast, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status};

use crate::hash::BlockHash;
use crate::pool::Change;

/// Events a watcher may fall behind before it has to start over.
const BACKLOG: usize = 1024;
/// Blocks in one part of a snapshot: 512 KiB on the wire.
const SNAPSHOT_PART: usize = 16 * 1024;

type Event = v1::worker_event::Event;

/// The publishing end and the memory of what is held.
#[derive(Debug, Clone)]
pub struct Announcer {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    /// hash -> (parent, order of storing)
    held: HashMap<BlockHash, (BlockHash, u64)>,
    n_stored: u64,
    load: v1::Load,
    draining: bool,
    events: broadcast::Sender<Arc<Event>>,
}

impl Default for Announcer {
    fn default() -> Self {
        let (events, _) = broadcast::channel(BACKLOG);
        let state =
            State { held: HashMap::new(), n_stored: 0, load: v1::Load::default(), draining: false, events };
        Self { state: Arc::new(Mutex::new(state)) }
    }
}

impl Announcer {
    /// Tells all watchers what changed in the pool, in order.
    pub fn publish_changes(&self, changes: &[Change]) {
        if changes.is_empty() {
            return;
        }
        let mut state = self.lock();
        let (mut stored, mut removed) = (BytesMut::new(), BytesMut::new());
        for change in changes {
            match change {
                Change::Stored { hash, parent } => {
                    // A removal must not travel in one delta with a later storing of the same hash.
                    if !removed.is_empty() {
                        state.send_delta(&mut stored, &mut removed);
                    }
                    stored.put_slice(hash.as_bytes());
                    stored.put_slice(parent.as_bytes());
                    state.n_stored += 1;
                    let order = state.n_stored;
                    state.held.insert(*hash, (*parent, order));
                }
                Change::Removed { hash } => {
                    removed.put_slice(hash.as_bytes());
                    state.held.remove(hash);
                }
            }
        }
        state.send_delta(&mut stored, &mut removed);
    }

    /// Tells all watchers how busy the worker is.
    pub fn publish_load(&self, load: v1::Load) {
        let mut state = self.lock();
        let load = v1::Load { draining: state.draining, ..load };
        state.load = load.clone();
        state.load.admitted_turns.clear();
        state.send(Event::Load(load));
    }

    /// Tells all watchers, now and with every later report, to plan nothing here any more.
    pub fn publish_drain(&self) {
        self.lock().draining = true;
        self.publish_load(self.load());
    }

    /// The newest load report.
    #[must_use]
    pub fn load(&self) -> v1::Load {
        self.lock().load.clone()
    }

    fn watch(&self, info: v1::WorkerInfo) -> (Vec<Event>, broadcast::Receiver<Arc<Event>>) {
        let state = self.lock();
        let mut blocks: Vec<_> =
            state.held.iter().map(|(hash, (parent, order))| (*order, *hash, *parent)).collect();
        let receiver = state.events.subscribe();
        let load = state.load.clone();
        drop(state);
        blocks.sort_unstable_by_key(|block| block.0);
        let mut parts = Vec::new();
        let mut info = Some(info);
        let mut rest = blocks.as_slice();
        loop {
            let (part, later) = rest.split_at(rest.len().min(SNAPSHOT_PART));
            let mut bytes = BytesMut::with_capacity(part.len() * 2 * BlockHash::BYTES);
            for (_, hash, parent) in part {
                bytes.put_slice(hash.as_bytes());
                bytes.put_slice(parent.as_bytes());
            }
            rest = later;
            let last = rest.is_empty();
            parts.push(Event::Snapshot(v1::Snapshot { info: info.take(), blocks: bytes.freeze(), last }));
            if last {
                break;
            }
        }
        parts.push(Event::Load(load));
        (parts, receiver)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn send_delta(&self, stored: &mut BytesMut, removed: &mut BytesMut) {
        if stored.is_empty() && removed.is_empty() {
            return;
        }
        let delta = v1::BlockDelta { stored: stored.split().freeze(), removed: removed.split().freeze() };
        self.send(Event::Delta(delta));
    }

    fn send(&self, event: Event) {
        // Nobody watches: nobody needs to know.
        let _ = self.events.send(Arc::new(event));
    }
}

/// The gRPC service every worker offers to routers.
#[derive(Debug, Clone)]
pub struct WorkerService {
    info: v1::WorkerInfo,
    announcer: Announcer,
    tasks: TaskTracker,
    shutdown: CancellationToken,
}

impl WorkerService {
    /// Serves `announcer`'s events under the name and shape of `info` until `shutdown`; its streams run on `tasks`.
    #[must_use]
    pub fn new(
        info: v1::WorkerInfo,
        announcer: Announcer,
        tasks: TaskTracker,
        shutdown: CancellationToken,
    ) -> Self {
        Self { info, announcer, tasks, shutdown }
    }
}

#[tonic::async_trait]
impl v1::worker_server::Worker for WorkerService {
    type WatchStream = Pin<Box<dyn futures::Stream<Item = Result<v1::WorkerEvent, Status>> + Send>>;

    async fn describe(&self, _: Request<v1::DescribeRequest>) -> Result<Response<v1::WorkerInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (snapshot, events) = self.announcer.watch(self.info.clone());
        let (sender, receiver) = mpsc::channel(64);
        let shutdown = self.shutdown.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = forward(snapshot, events, &sender) => {}
                () = shutdown.cancelled() => {}
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

async fn forward(
    snapshot: Vec<Event>,
    mut events: broadcast::Receiver<Arc<Event>>,
    sender: &mpsc::Sender<Result<v1::WorkerEvent, Status>>,
) {
    let mut number = 0;
    let mut next = |event: Event| {
        number += 1;
        Ok(v1::WorkerEvent { number, event: Some(event) })
    };
    for event in snapshot {
        if sender.send(next(event)).await.is_err() {
            return;
        }
    }
    loop {
        let message = match events.recv().await {
            Ok(event) => next(Event::clone(&event)),
            Err(broadcast::error::RecvError::Lagged(n)) => {
                Err(Status::data_loss(format!("{n} events behind: ask for a new snapshot")))
            }
            Err(broadcast::error::RecvError::Closed) => return,
        };
        let failed = message.is_err();
        if sender.send(message).await.is_err() || failed {
            return;
        }
    }
}

/// Reads pairs (hash, parent) as snapshots and deltas carry them.
///
/// # Errors
/// When the bytes are no whole number of pairs.
pub fn pairs_from_wire(bytes: &Bytes) -> Result<Vec<(BlockHash, BlockHash)>, crate::hash::WrongLength> {
    let hashes = BlockHash::run_from_wire(bytes)?;
    let (pairs, _) = hashes.as_chunks::<2>();
    Ok(pairs.iter().map(|[hash, parent]| (*hash, *parent)).collect())
}

#[cfg(test)]
mod tests;

//! The journey of KV blocks between workers: `Local` inside one process, `Grpc` everywhere.
//!
//! The contract is the same for both: geometry is compared by name before any byte moves, a grant names the blocks
//! that may be written, every frame carries a checksum, each frame is acknowledged once it is in place, and whoever
//! waits does so under a deadline. A transfer that fails is a typed error; the worker that lacks the blocks computes
//! them itself.

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use dashmap::DashMap;
use futures::StreamExt;
use proto::v1::transfer_client::TransferClient;
use proto::{net, trace, v1};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::transport::Channel;

use crate::geometry::Geometry;
use crate::hash::BlockHash;
use crate::pool::BlockId;
use crate::port::{Frame, FrameSender, ImportError, Port};

mod service;
pub use service::TransferService;

/// Frames a puller lets wait before the holder pauses.
const FRAMES_IN_FLIGHT: usize = 16;

/// Why blocks did not arrive.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the peer refused or was lost: {0}")]
    Peer(#[from] Box<Status>),
    #[error(transparent)]
    Import(#[from] ImportError),
    #[error(transparent)]
    BadAddress(#[from] net::BadAddress),
    #[error("a frame arrived damaged: {0}")]
    Damaged(&'static str),
    #[error("not done after {} ms", .0.as_millis())]
    Deadline(Duration),
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        Self::Peer(Box::new(status))
    }
}

/// Another worker, as plans and grants name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    pub id: String,
    pub address: String,
    pub epoch: u64,
}

impl From<v1::WorkerRef> for Peer {
    fn from(wire: v1::WorkerRef) -> Self {
        Self { id: wire.id, address: wire.address, epoch: wire.epoch }
    }
}

/// The workers of one process, which hand blocks over in memory.
#[derive(Debug, Clone, Default)]
pub struct LocalPorts {
    ports: Arc<DashMap<String, (u64, Port)>>,
}

impl LocalPorts {
    /// Makes a worker's memory known to the others in this process.
    pub fn add(&self, worker: String, epoch: u64, port: Port) {
        self.ports.insert(worker, (epoch, port));
    }

    /// Forgets a worker that stops.
    pub fn remove(&self, worker: &str) {
        self.ports.remove(worker);
    }

    fn get(&self, peer: &Peer) -> Option<Port> {
        let entry = self.ports.get(&peer.id)?;
        (entry.0 == peer.epoch).then(|| entry.1.clone())
    }
}

/// One worker's connections to the others: who it is, what its blocks look like, and how to reach them.
#[derive(Debug, Clone)]
pub struct Links {
    own: Peer,
    geometry: Arc<Geometry>,
    local: LocalPorts,
    /// Bounded by the number of workers of the cluster.
    channels: Arc<DashMap<String, Channel>>,
}

/// The way to one peer.
#[derive(Debug, Clone)]
pub enum Transfer {
    /// Same process: frames are handed over in memory.
    Local(Port),
    /// Any other process.
    Grpc(TransferClient<Channel>),
}

/// What a transfer moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moved {
    pub blocks: usize,
    pub bytes: u64,
}

impl Links {
    /// The links of the worker `own`.
    #[must_use]
    pub fn new(own: Peer, geometry: Geometry, local: LocalPorts) -> Self {
        Self { own, geometry: Arc::new(geometry), local, channels: Arc::default() }
    }

    /// The way to `peer`.
    ///
    /// # Errors
    /// When its address is malformed; no connection is made yet.
    pub fn to(&self, peer: &Peer) -> Result<Transfer, Error> {
        if let Some(port) = self.local.get(peer) {
            return Ok(Transfer::Local(port));
        }
        let client = TransferClient::new(self.channel(&peer.address)?);
        Ok(Transfer::Grpc(
            client
                .max_decoding_message_size(proto::MAX_MESSAGE_BYTES)
                .max_encoding_message_size(proto::MAX_MESSAGE_BYTES),
        ))
    }

    /// A channel to `address`, shared by all calls.
    ///
    /// # Errors
    /// When the address is malformed.
    pub fn channel(&self, address: &str) -> Result<Channel, Error> {
        if let Some(channel) = self.channels.get(address) {
            return Ok(channel.clone());
        }
        let channel = net::channel(address)?;
        self.channels.insert(address.to_owned(), channel.clone());
        Ok(channel)
    }

    fn hello(&self, peer_epoch: u64, grant: u64) -> v1::Hello {
        v1::Hello {
            worker: self.own.id.clone(),
            epoch: peer_epoch,
            model_fingerprint: Bytes::copy_from_slice(&self.geometry.model_fingerprint),
            geometry: Some(self.geometry.to_wire()),
            grant,
        }
    }

    /// Writes `frames` into the blocks of `grant` at `peer`; returns once all are acknowledged.
    ///
    /// # Errors
    /// When the peer refuses, is lost, or is not done before `deadline`.
    pub async fn push(
        &self,
        peer: &Peer,
        grant: u64,
        frames: mpsc::Receiver<Frame>,
        deadline: Duration,
    ) -> Result<Moved, Error> {
        let work = async {
            match self.to(peer)? {
                Transfer::Local(port) => push_local(&port, grant, frames).await,
                Transfer::Grpc(client) => push_grpc(client, self.hello(peer.epoch, grant), frames).await,
            }
        };
        tokio::time::timeout(deadline, work).await.unwrap_or(Err(Error::Deadline(deadline)))
    }

    /// Reads the blocks `hashes` from `peer` into this worker's `targets` under `grant`. The holder may have fewer:
    /// the first `Moved::blocks` of them are complete.
    ///
    /// # Errors
    /// When the peer refuses, is lost, sends damaged frames, or is not done before `deadline`.
    pub async fn pull(&self, peer: &Peer, pull: Pull<'_>, deadline: Duration) -> Result<Moved, Error> {
        let work = async {
            match self.to(peer)? {
                Transfer::Local(port) => {
                    let (sender, frames) = FrameSender::new(FRAMES_IN_FLIGHT);
                    port.export(pull.hashes.to_vec(), sender);
                    pull.take(ReceiverStream::new(frames).map(Ok), self.geometry.n_layers).await
                }
                Transfer::Grpc(mut client) => {
                    let mut hashes = BytesMut::with_capacity(pull.hashes.len() * BlockHash::BYTES);
                    pull.hashes.iter().for_each(|hash| hashes.put_slice(hash.as_bytes()));
                    let request =
                        v1::PullRequest { hello: Some(self.hello(peer.epoch, 0)), hashes: hashes.freeze() };
                    let frames = client.pull(trace::request(request)).await?.into_inner();
                    let frames = frames.map(|frame| from_wire(frame?).map_err(Error::Damaged));
                    pull.take(frames, self.geometry.n_layers).await
                }
            }
        };
        tokio::time::timeout(deadline, work).await.unwrap_or(Err(Error::Deadline(deadline)))
    }
}

/// Blocks to read from another worker, and where they go.
#[derive(Debug)]
pub struct Pull<'a> {
    pub hashes: &'a [BlockHash],
    /// This worker's blocks, one per hash.
    pub targets: &'a [BlockId],
    pub grant: u64,
    pub port: &'a Port,
}

impl Pull<'_> {
    async fn take(
        &self,
        frames: impl futures::Stream<Item = Result<Frame, Error>>,
        n_layers: u32,
    ) -> Result<Moved, Error> {
        let mut moved = Moved::default();
        let mut frames = std::pin::pin!(frames);
        while let Some(frame) = frames.next().await {
            let mut frame = frame?;
            for block in &mut frame.blocks {
                *block =
                    *self.targets.get(*block as usize).ok_or(Error::Damaged("a block nobody asked for"))?;
            }
            // A block comes in several groups of layers; the last one completes it.
            if frame.first_layer.saturating_add(frame.n_layers) == n_layers {
                moved.blocks += frame.blocks.len();
            }
            moved.bytes += frame.payload.len() as u64;
            self.port.import(self.grant, frame).await?;
        }
        Ok(moved)
    }
}

async fn push_local(port: &Port, grant: u64, frames: mpsc::Receiver<Frame>) -> Result<Moved, Error> {
    let mut moved = Moved::default();
    let mut done = ReceiverStream::new(frames)
        .map(|frame| {
            moved.bytes += frame.payload.len() as u64;
            port.import(grant, frame)
        })
        .buffered(FRAMES_IN_FLIGHT);
    while let Some(result) = done.next().await {
        result?;
    }
    drop(done);
    Ok(moved)
}

async fn push_grpc(
    mut client: TransferClient<Channel>,
    hello: v1::Hello,
    mut frames: mpsc::Receiver<Frame>,
) -> Result<Moved, Error> {
    let (sender, outgoing) = mpsc::channel(FRAMES_IN_FLIGHT);
    let hello = v1::PushMessage { message: Some(v1::push_message::Message::Hello(hello)) };
    let _ = sender.send(hello).await;
    let mut acks = client.push(trace::request(ReceiverStream::new(outgoing))).await?.into_inner();
    let (mut n_sent, mut n_acked, mut bytes) = (0, 0, 0);
    let mut sender = Some(sender);
    while sender.is_some() || n_acked < n_sent {
        tokio::select! {
            frame = frames.recv(), if sender.is_some() && n_sent - n_acked < FRAMES_IN_FLIGHT => match frame {
                Some(frame) => {
                    bytes += frame.payload.len() as u64;
                    let message = v1::push_message::Message::Frame(to_wire(n_sent, frame));
                    n_sent += 1;
                    if let Some(sender) = &sender {
                        // A lost connection shows in the acknowledgements.
                        let _ = sender.try_send(v1::PushMessage { message: Some(message) });
                    }
                }
                None => sender = None,
            },
            ack = acks.message() => match ack? {
                Some(_) => n_acked += 1,
                None => return Err(Status::unavailable("the owner of the blocks ended the transfer early").into()),
            },
        }
    }
    Ok(Moved { blocks: 0, bytes })
}

fn to_wire(number: usize, frame: Frame) -> v1::KvFrame {
    v1::KvFrame {
        number: u32::try_from(number).unwrap_or(u32::MAX),
        first_layer: frame.first_layer,
        n_layers: frame.n_layers,
        blocks: frame.blocks,
        crc32: crc32fast::hash(&frame.payload),
        payload: frame.payload,
    }
}

/// Checks a frame that came over the wire.
fn from_wire(frame: v1::KvFrame) -> Result<Frame, &'static str> {
    if frame.payload.len() > proto::MAX_FRAME_BYTES {
        return Err("the frame is larger than agreed");
    }
    if crc32fast::hash(&frame.payload) != frame.crc32 {
        return Err("the checksum does not match");
    }
    let v1::KvFrame { first_layer, n_layers, blocks, payload, .. } = frame;
    Ok(Frame { first_layer, n_layers, blocks, payload })
}

#[cfg(test)]
mod tests;

//! The receiving side of transfers over gRPC.

use std::pin::Pin;

use futures::StreamExt;
use proto::reason::Reason;
use proto::v1;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};

use super::{FRAMES_IN_FLIGHT, Peer, from_wire, to_wire};
use crate::geometry::Geometry;
use crate::hash::BlockHash;
use crate::port::{FrameSender, ImportError, Port};

/// Serves one worker's memory to the others.
#[derive(Debug, Clone)]
pub struct TransferService {
    own: Peer,
    geometry: Geometry,
    port: Port,
    tasks: TaskTracker,
}

type Answers<T> = Pin<Box<dyn futures::Stream<Item = Result<T, Status>> + Send>>;

impl TransferService {
    /// Serves `port`, whose blocks have `geometry`, under the name of `own`; its streams run on `tasks`.
    #[must_use]
    pub fn new(own: Peer, geometry: Geometry, port: Port, tasks: TaskTracker) -> Self {
        Self { own, geometry, port, tasks }
    }

    fn check(&self, hello: Option<v1::Hello>) -> Result<v1::Hello, Status> {
        let hello = hello.ok_or_else(|| Status::invalid_argument("a transfer begins with a hello"))?;
        self.geometry.check(&hello.model_fingerprint, hello.geometry.as_ref()).map_err(|mismatch| {
            Reason::Mismatch.status(format!("{} refuses {}: {mismatch}", self.own.id, hello.worker))
        })?;
        if hello.epoch != self.own.epoch {
            return Err(Reason::GrantRevoked.status(format!("{} has restarted since the grant", self.own.id)));
        }
        Ok(hello)
    }
}

#[tonic::async_trait]
impl v1::transfer_server::Transfer for TransferService {
    type PushStream = Answers<v1::PushAck>;
    type PullStream = Answers<v1::KvFrame>;

    async fn push(
        &self,
        request: Request<Streaming<v1::PushMessage>>,
    ) -> Result<Response<Self::PushStream>, Status> {
        let mut incoming = request.into_inner();
        let hello = match incoming.message().await?.and_then(|message| message.message) {
            Some(v1::push_message::Message::Hello(hello)) => self.check(Some(hello))?,
            _ => return Err(Status::invalid_argument("a transfer begins with a hello")),
        };
        let (port, grant) = (self.port.clone(), hello.grant);
        let acks = incoming
            .map(move |message| {
                let port = port.clone();
                async move { import(&port, grant, message?).await }
            })
            .buffered(FRAMES_IN_FLIGHT);
        Ok(Response::new(Box::pin(acks)))
    }

    async fn pull(&self, request: Request<v1::PullRequest>) -> Result<Response<Self::PullStream>, Status> {
        let request = request.into_inner();
        self.check(request.hello)?;
        let hashes = BlockHash::run_from_wire(&request.hashes)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let (sender, mut frames) = FrameSender::new(FRAMES_IN_FLIGHT);
        self.port.export(hashes, sender);
        let (answers, receiver) = mpsc::channel(FRAMES_IN_FLIGHT);
        self.tasks.spawn(async move {
            let mut number = 0;
            while let Some(frame) = frames.recv().await {
                if answers.send(Ok(to_wire(number, frame))).await.is_err() {
                    return;
                }
                number += 1;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

async fn import(port: &Port, grant: u64, message: v1::PushMessage) -> Result<v1::PushAck, Status> {
    let Some(v1::push_message::Message::Frame(frame)) = message.message else {
        return Err(Status::invalid_argument("only frames follow the hello"));
    };
    let number = frame.number;
    let frame = from_wire(frame).map_err(|what| Reason::Damaged.status(what))?;
    port.import(grant, frame).await.map_err(|error| match error {
        ImportError::Revoked(_) => Reason::GrantRevoked.status(error.to_string()),
        ImportError::Misfit(_) => Status::invalid_argument(error.to_string()),
        ImportError::Stopped => Reason::Draining.status(error.to_string()),
    })?;
    Ok(v1::PushAck { number })
}

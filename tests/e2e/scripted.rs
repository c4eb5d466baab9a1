//! A decode worker that says what a test wants it to say, and tells what it was asked: for what the gateway makes of
//! outputs that a small model would not write on demand.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::Stream;
use proto::reason::Reason;
use proto::v1;
use proto::v1::generate_event::Event;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::cluster::{Cluster, Spec};
use crate::plain::TEXT;

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// A part of an output.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Says {
    /// Text, markers in it being what the model means by them, one token at a time.
    Text(&'static str),
    Pause(Duration),
    /// Nothing more, as long as anybody listens.
    Silence,
    /// The worker is gone, without a last word.
    Death,
}

/// What the worker is to say, and has heard.
#[derive(Debug, Clone, Default)]
pub(crate) struct Script {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    says: VecDeque<Vec<Says>>,
    heard: Vec<String>,
}

impl Script {
    /// The next turn's output, which ends its turn unless it falls silent.
    pub(crate) fn say(&self, parts: impl Into<Vec<Says>>) {
        self.inner().says.push_back(parts.into());
    }

    /// Nothing is to be said any more.
    pub(crate) fn forget(&self) {
        self.inner().says.clear();
    }

    /// The text of the last prompt, markers included.
    pub(crate) fn heard(&self) -> String {
        self.inner().heard.last().cloned().unwrap_or_default()
    }

    pub(crate) fn n_heard(&self) -> usize {
        self.inner().heard.len()
    }

    fn inner(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A cluster whose only worker follows this script.
    pub(crate) async fn cluster(&self, spec: Spec) -> anyhow::Result<Cluster> {
        let script = self.clone();
        Cluster::start_with(Spec { n_prefill: 0, n_decode: 0, ..spec }, |info| {
            let worker = Worker { info, script };
            let routes = tonic::service::Routes::new(v1::decode_server::DecodeServer::new(worker.clone()));
            routes.add_service(v1::worker_server::WorkerServer::new(worker))
        })
        .await
    }
}

#[derive(Clone)]
struct Worker {
    info: v1::WorkerInfo,
    script: Script,
}

#[tonic::async_trait]
impl v1::worker_server::Worker for Worker {
    type WatchStream = Events<v1::WorkerEvent>;

    async fn describe(&self, _: Request<v1::DescribeRequest>) -> Result<Response<v1::WorkerInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let snapshot = v1::Snapshot { info: Some(self.info.clone()), last: true, ..Default::default() };
        let event = v1::WorkerEvent { number: 1, event: Some(v1::worker_event::Event::Snapshot(snapshot)) };
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(event)).chain(tokio_stream::pending()))))
    }
}

#[tonic::async_trait]
impl v1::decode_server::Decode for Worker {
    type GenerateStream = Events<v1::GenerateEvent>;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        let prompt = request.prompt.unwrap_or_default();
        if prompt.parent_blocks > 0 {
            return Err(Reason::ParentUnknown.status("it keeps nothing"));
        }
        let bytes: Vec<u8> =
            prompt.ids.iter().flat_map(|id| TEXT.tokenizer.token_bytes(*id)).copied().collect();
        let parts = {
            let mut inner = self.script.inner();
            inner.heard.push(String::from_utf8_lossy(&bytes).into_owned());
            inner.says.pop_front().unwrap_or_default()
        };
        let (sender, events) = mpsc::channel(16);
        let started = v1::Started { decode_worker: self.info.id.clone(), ..Default::default() };
        let saying = say(parts, request.max_output_tokens as usize, Event::Started(started), sender);
        // It is said while somebody listens.
        let saying = futures::stream::once(saying).filter_map(|()| None);
        Ok(Response::new(Box::pin(futures::stream::select(ReceiverStream::new(events), saying))))
    }
}

/// Says all parts, or as many tokens as were asked for. Ends early when nobody listens.
async fn say(
    parts: Vec<Says>,
    limit: usize,
    started: Event,
    events: mpsc::Sender<Result<v1::GenerateEvent, Status>>,
) {
    let send = async |event| events.send(Ok(v1::GenerateEvent { event: Some(event) })).await.is_ok();
    if !send(started).await {
        return;
    }
    let token = |id| Event::Tokens(v1::Tokens { ids: vec![id], ..Default::default() });
    let mut n_said = 0;
    for part in parts {
        match part {
            Says::Text(text) => {
                for id in TEXT.tokenizer.encode_with_specials(text) {
                    if n_said == limit || !send(token(id)).await {
                        break;
                    }
                    n_said += 1;
                }
            }
            Says::Pause(pause) => tokio::time::sleep(pause).await,
            Says::Silence => return events.closed().await,
            Says::Death => {
                let _ = events.send(Err(Status::unavailable("died before its last word"))).await;
                return;
            }
        }
    }
    let reason = if n_said < limit {
        send(token(TEXT.tokenizer.special_id("<|im_end|>").expect("it ends turns"))).await;
        v1::FinishReason::Stop
    } else if limit == 0 {
        v1::FinishReason::Prefilled
    } else {
        v1::FinishReason::Length
    };
    let output_tokens = u32::try_from(n_said).unwrap_or(u32::MAX);
    send(Event::Finished(v1::Finished { reason: reason.into(), output_tokens })).await;
}

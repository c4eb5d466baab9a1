//! Against a server that answers after known times.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use clap::Parser;
use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio_tungstenite::tungstenite::Message;

use super::{Outcome, Settings, run};
use crate::client::Target;
use crate::options::Options;
use crate::report::Summary;
use crate::workload::Workload;

const SERVICE: Duration = Duration::from_millis(5);
const STALL: Duration = Duration::from_millis(600);
/// The request that stalls.
const STALLS: usize = 10;

/// Serves one request at a time, whatever the connection.
#[derive(Debug, Default)]
struct Mock {
    server: Mutex<()>,
    n_requests: AtomicUsize,
    frames: Mutex<Vec<Value>>,
}

impl Mock {
    async fn listen(self: Arc<Self>, listener: TcpListener) {
        let mut connections = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            connections.spawn(Arc::clone(&self).serve(stream));
        }
    }

    async fn serve(self: Arc<Self>, stream: TcpStream) {
        let mut socket = tokio_tungstenite::accept_async(stream).await.unwrap();
        while let Some(Ok(Message::Text(text))) = socket.next().await {
            let frame: Value = serde_json::from_str(&text).unwrap();
            let _busy = self.server.lock().await;
            let number = self.n_requests.fetch_add(1, Ordering::Relaxed);
            self.frames.lock().await.push(frame.clone());
            if frame["model"] == "broken" {
                let error = json!({"type": "error", "status": 500, "error": {"code": "server_error"}});
                socket.send(Message::text(error.to_string())).await.unwrap();
                continue;
            }
            tokio::time::sleep(if number == STALLS { STALL } else { SERVICE }).await;
            let delta = json!({"type": "response.output_text.delta", "delta": "word"});
            for _ in 0..2 {
                socket.send(Message::text(delta.to_string())).await.unwrap();
            }
            let usage = json!({
                "input_tokens": 100, "input_tokens_details": {"cached_tokens": 50}, "output_tokens": 2,
            });
            let response = json!({"id": format!("resp_{number}"), "status": "completed", "usage": usage});
            let end = json!({"type": "response.completed", "response": response});
            socket.send(Message::text(end.to_string())).await.unwrap();
        }
    }
}

async fn replay(arguments: &str, model: &str, stop: impl Future) -> (Outcome, Vec<Value>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mock = Arc::new(Mock::default());
    let mut server = JoinSet::new();
    server.spawn(Arc::clone(&mock).listen(listener));
    let options = Options::parse_from(std::iter::once("replay").chain(arguments.split_whitespace()));
    let settings = Settings {
        target: Target::new(&format!("ws://{address}/v1/responses")).unwrap(),
        model: model.to_owned(),
        concurrency: options.concurrency,
        temperature: 0.0,
        timeout: Duration::from_secs_f64(options.timeout_s),
    };
    let outcome = run(Workload::new(&options).unwrap().sessions, settings, stop).await;
    let frames = mock.frames.lock().await.clone();
    (outcome, frames)
}

#[tokio::test]
async fn a_stall_delays_all_who_were_due_meanwhile() {
    // 100 requests a second, one place: whoever is due while the server stalls waits for it.
    let arguments = "--sessions 50 --turns 1 --rate 100 --concurrency 1";
    let (outcome, _) = replay(arguments, "fine", std::future::pending::<()>()).await;
    let n_late = |of: fn(&crate::record::Record) -> Duration| {
        outcome.records.iter().filter(|record| of(record) > STALL / 4).count()
    };
    let summary = Summary::new(&outcome, 50, Vec::new());
    assert_eq!(summary.answered, 50);
    assert_eq!(n_late(crate::record::Record::service_time), 1, "only one request was served slowly");
    assert!(n_late(crate::record::Record::end_to_end) > 15, "many were due in the stall");
    assert!(summary.end_to_end.p90_us > 150_000, "{:?}", summary.end_to_end);
    assert!(summary.service.p90_us < 150_000, "{:?}", summary.service);
    assert!(summary.unfaithful, "the cap made the client late, and the report says so");
}

#[tokio::test]
async fn later_turns_continue_the_previous_response() {
    let (outcome, frames) =
        replay("--sessions 1 --turns 3 --tool-ms 20 --delta-tokens 40", "fine", std::future::pending::<()>())
            .await;
    let named: Vec<_> = frames.iter().map(|frame| frame["previous_response_id"].as_str()).collect();
    assert_eq!(named, [None, Some("resp_0"), Some("resp_1")]);
    assert_eq!(frames[2]["input"].as_array().unwrap().len(), 1);
    let [first, second, _] = outcome.records.as_slice() else { panic!("three records") };
    assert_eq!(second.scheduled, first.done + Duration::from_millis(20));
    assert!(first.handshake.is_some() && second.handshake.is_none());
    assert_eq!((first.cached_tokens, first.output_tokens, first.gaps.len()), (50, 2, 1));
}

#[tokio::test]
async fn a_failed_turn_ends_its_session() {
    let (outcome, _) = replay("--sessions 2 --turns 3", "broken", std::future::pending::<()>()).await;
    let summary = Summary::new(&outcome, 6, Vec::new());
    assert_eq!(summary.errors["server_error"], 2);
}

#[tokio::test]
async fn a_silent_server_is_given_up() {
    let arguments = "--sessions 12 --turns 1 --concurrency 1 --timeout-s 0.2";
    let (outcome, _) = replay(arguments, "fine", std::future::pending::<()>()).await;
    assert!(Summary::new(&outcome, 12, Vec::new()).errors["timeout"] >= 1);
}

#[tokio::test]
async fn an_interrupted_run_keeps_what_it_has() {
    let stop = tokio::time::sleep(Duration::from_millis(550));
    let (outcome, _) = replay("--sessions 100 --turns 1 --rate 20", "fine", stop).await;
    assert!(outcome.interrupted);
    assert!((1..100).contains(&outcome.records.len()), "{} records", outcome.records.len());
}

//! Against a server that answers and has a page of metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::Parser;
use futures::{SinkExt, StreamExt};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_tungstenite::tungstenite::Message;

use super::report::Report;
use super::{Error, run};
use crate::client::Target;
use crate::drive::Settings;
use crate::options::Options;

/// The model `broken` always fails.
#[derive(Debug, Default)]
struct Mock {
    n_responses: AtomicU64,
}

impl Mock {
    async fn listen(self: Arc<Self>, listener: TcpListener) {
        let mut connections = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            connections.spawn(Arc::clone(&self).serve(stream));
        }
    }

    async fn serve(self: Arc<Self>, stream: TcpStream) {
        let mut start = [0; 12];
        while stream.peek(&mut start).await.unwrap() < start.len() {}
        if start == *b"GET /metrics" { self.page(stream).await } else { self.turns(stream).await }
    }

    async fn page(&self, mut stream: TcpStream) {
        let mut request = [0; 1024];
        assert!(stream.read(&mut request).await.unwrap() > 0);
        let page = "HTTP/1.1 200 OK\r\n\r\nbaton_engine_free_blocks{worker=\"w\"} 100\n";
        stream.write_all(page.as_bytes()).await.unwrap();
    }

    /// Errors are those of clients that went away.
    async fn turns(&self, stream: TcpStream) {
        let Ok(mut socket) = tokio_tungstenite::accept_async(stream).await else { return };
        while let Some(Ok(Message::Text(text))) = socket.next().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
            let delta = json!({"type": "response.output_text.delta", "delta": "word"});
            let _ = socket.send(Message::text(delta.to_string())).await;
            let number = self.n_responses.fetch_add(1, Ordering::Relaxed);
            let usage = json!({"input_tokens": 10, "output_tokens": 2});
            let end = if text.contains("broken") {
                json!({"type": "error", "error": {"code": "server_error", "message": "no luck"}})
            } else {
                json!({"type": "response.completed", "response": {"id": format!("resp_{number}"), "usage": usage}})
            };
            let _ = socket.send(Message::text(end.to_string())).await;
        }
    }
}

async fn soak(model: &str, pages: &str) -> Result<Report, Error> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut server = JoinSet::new();
    server.spawn(Arc::new(Mock::default()).listen(listener));
    let arguments = format!("replay --soak-s 1 --cancel 0.2 --fork 0.3 --concurrency 4 {pages}");
    let options = Options::parse_from(arguments.split_whitespace());
    let settings = Settings {
        target: Target::new(&format!("ws://{address}/v1/responses")).unwrap(),
        model: model.to_owned(),
        concurrency: options.concurrency,
        temperature: 0.0,
        timeout: Duration::from_secs(5),
    };
    run(&options, Duration::from_millis(600), settings, std::future::pending::<()>()).await
}

#[tokio::test]
async fn a_sound_server_passes() {
    let report = soak("sound", "").await.unwrap();
    assert_eq!(report.failures, Vec::<String>::new(), "{:?}", report.turns);
    let turns = &report.turns;
    let n_cancelled = turns.cancelled_before_text + turns.cancelled_in_stream;
    assert!(turns.answered > 20 && turns.forked > 0 && n_cancelled > 0, "{turns:?}");
    assert!(turns.n_open() == 0 && report.wall_s < 2.0);
}

#[tokio::test]
async fn errors_fail_the_soak_with_their_text() {
    let report = soak("broken", "").await.unwrap();
    assert!(report.turns.errors.keys().all(|text| text.starts_with("server_error: no luck (soak-")));
    assert!(report.failures.iter().any(|failure| failure.ends_with(" errors")), "{:?}", report.failures);
}

#[tokio::test]
async fn a_page_that_is_not_there_prevents_the_soak() {
    let error = soak("sound", "--metrics-url http://127.0.0.1:1/metrics").await.unwrap_err();
    assert!(matches!(error, Error::Metrics(_)), "{error}");
}

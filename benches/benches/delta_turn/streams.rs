//! What a token event costs while 64 answers stream at once, and what a connection costs that does nothing.

use std::io::Write;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, ensure};
use futures::future::try_join_all;
use futures::{SinkExt, StreamExt};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;

use crate::gateway::Gateway;
use crate::standin::{ANSWER_TOKENS, StandIn};

const N_STREAMS: usize = 64;
/// Tokens of a long answer.
const LONG: usize = 256;
/// Between two tokens of a stream.
const PACE_US: u64 = 10_000;
const N_IDLE: usize = 1000;
const TURN_LIMIT: Duration = Duration::from_secs(120);
/// The gateway is asleep again this long after an answer.
const SETTLE: Duration = Duration::from_millis(50);

/// How streams share connections.
#[derive(Debug, Clone, Copy)]
struct Layout {
    n_sockets: usize,
    n_lanes: usize,
}

/// Measures and prints both.
pub(crate) async fn run(
    out: &mut impl Write,
    model: &str,
    gateway: &Gateway,
    worker: &StandIn,
    n_rounds: u32,
) -> anyhow::Result<()> {
    worker.set_pace_us(PACE_US);
    for layout in
        [Layout { n_sockets: N_STREAMS, n_lanes: 1 }, Layout { n_sockets: 4, n_lanes: N_STREAMS / 4 }]
    {
        let mut costs = Vec::new();
        for _ in 0..n_rounds {
            let mut cpu_us = [0.0; 2];
            for (n_tokens, cpu_us) in [ANSWER_TOKENS, LONG].into_iter().zip(&mut cpu_us) {
                worker.set_answer_tokens(n_tokens);
                *cpu_us = round(model, gateway, layout).await?;
            }
            costs.push((cpu_us[1] - cpu_us[0]) / (N_STREAMS * (LONG - ANSWER_TOKENS)) as f64);
        }
        costs.sort_by(f64::total_cmp);
        let Layout { n_sockets, n_lanes } = layout;
        writeln!(
            out,
            "{n_sockets} sockets with {n_lanes} streams: {:.2} us for each token event ({:.2} - {:.2}), user and kernel",
            costs[costs.len() / 2],
            costs[0],
            costs[costs.len() - 1]
        )?;
    }
    idle(out, gateway.address).await
}

/// CPU time of the gateway while all streams give one answer each, in microseconds.
async fn round(model: &str, gateway: &Gateway, layout: Layout) -> anyhow::Result<f64> {
    let sockets = try_join_all((0..layout.n_sockets).map(|_| async {
        let stream = TcpStream::connect(gateway.address).await?;
        stream.set_nodelay(true)?;
        let url = format!("ws://{}/v1/responses", gateway.address);
        anyhow::Ok(tokio_tungstenite::client_async(url, stream).await?.0)
    }))
    .await?;
    tokio::time::sleep(SETTLE).await;
    let before = gateway.read()?;
    let answers = sockets.into_iter().map(|mut socket| async move {
        for lane in 0..layout.n_lanes {
            let mut frame =
                json!({"type": "response.create", "model": model, "input": "Hello.", "store": false});
            if layout.n_lanes > 1 {
                frame["stream_id"] = format!("lane-{lane}").into();
            }
            socket.send(Message::text(frame.to_string())).await?;
        }
        let mut n_left = layout.n_lanes;
        while n_left > 0 {
            let message = socket.next().await.context("the gateway closed the connection")??;
            let Message::Text(text) = message else { continue };
            ensure!(!text.contains("\"type\":\"error\""), "refused: {text}");
            n_left -= usize::from(text.contains("\"response.completed\""));
        }
        anyhow::Ok(socket)
    });
    let sockets = tokio::time::timeout(TURN_LIMIT, try_join_all(answers)).await??;
    tokio::time::sleep(SETTLE).await;
    let after = gateway.read()?;
    drop(sockets);
    Ok((after.cpu - before.cpu).as_secs_f64() * 1e6)
}

/// Memory of the process before and after a thousand clients have connected, who keep nothing of their own.
async fn idle(out: &mut impl Write, address: SocketAddr) -> anyhow::Result<()> {
    let upgrade = format!(
        "GET /v1/responses HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    let before = resident()?;
    let mut sockets = Vec::with_capacity(N_IDLE);
    for _ in 0..N_IDLE {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(upgrade.as_bytes()).await?;
        let mut head = [0; 12];
        stream.read_exact(&mut head).await?;
        ensure!(head == *b"HTTP/1.1 101", "not upgraded: {}", String::from_utf8_lossy(&head));
        sockets.push(stream);
    }
    tokio::time::sleep(SETTLE).await;
    let kb = (resident()? - before) as f64 / 1024.0 / N_IDLE as f64;
    writeln!(out, "{N_IDLE} connections that do nothing: {kb:.1} KB each, without what the kernel keeps")?;
    Ok(())
}

/// Bytes of memory that the process has in use.
fn resident() -> anyhow::Result<i64> {
    let status = std::fs::read_to_string("/proc/self/status").context("memory needs /proc")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("odd status")?;
    let kb: i64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kb * 1024)
}

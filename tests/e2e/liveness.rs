//! A socket is alive while its turn waits or runs.

use std::time::Duration;

use anyhow::{bail, ensure};
use bytes::Bytes;
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;

use crate::client::{Frame, Socket, create, with};
use crate::cluster::{Cluster, Spec, until};

fn long_prompt() -> Value {
    let facts =
        "The lighthouse keeper counted the ships in the bay and wrote their names into her book. ".repeat(40);
    with(create(format!("{facts}How many ships were there?")), json!({"max_output_tokens": 4}))
}

async fn pong(socket: &mut Socket, payload: &'static str) -> anyhow::Result<Vec<Value>> {
    socket.send_message(Message::Ping(Bytes::from_static(payload.as_bytes()))).await?;
    let mut events = Vec::new();
    loop {
        match socket.next().await? {
            Frame::Event(event) => events.push(event),
            Frame::Pong(answer) => {
                assert_eq!(answer, payload.as_bytes());
                return Ok(events);
            }
            Frame::Closed(code) => bail!("closed with {code:?}"),
        }
    }
}

#[tokio::test]
async fn pings_are_answered_while_a_turn_runs_and_another_waits() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    socket.send(&long_prompt()).await?;
    socket.send(&create("Hello")).await?;
    let mut events = pong(&mut socket, "while it prefills").await?;
    ensure!(
        events.iter().all(|event| event["type"] != "response.completed"),
        "the turn still runs: {events:?}"
    );
    events.extend(socket.until("response.output_text.delta").await?);
    let rest = pong(&mut socket, "while it decodes").await?;
    events.extend(rest);
    while events.iter().filter(|event| event["type"] == "response.created").count() < 2 {
        events.push(socket.event().await?);
    }
    socket.rest(events).await?.expect_answer();
    pong(&mut socket, "while nothing runs").await?;
    Ok(())
}

#[tokio::test]
async fn a_slow_worker_is_bridged_by_heartbeats() -> anyhow::Result<()> {
    let api = api_gateway::Config { heartbeat: Duration::from_millis(50), ..api_gateway::Config::default() };
    let cluster = Cluster::start(Spec { api, ..Spec::split(1, 1) }).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let turn = socket.turn(&long_prompt()).await?;
    turn.expect_answer();
    let beats = turn.kinds().iter().filter(|kind| **kind == "response.in_progress").count();
    ensure!(beats > 2, "{beats} heartbeats in {:?}", turn.kinds());
    for (idx, event) in turn.events.iter().enumerate() {
        assert_eq!(event["sequence_number"], idx);
        if event["type"] == "response.in_progress" {
            assert_eq!(event["response"]["status"], "in_progress");
        }
    }
    Ok(())
}

#[tokio::test]
async fn the_server_pings_an_idle_socket_and_closes_a_silent_one() -> anyhow::Result<()> {
    let api = api_gateway::Config { ping: Duration::from_millis(50), ..api_gateway::Config::default() };
    let cluster = Cluster::start(Spec { api, ..Spec::aggregated(1) }).await?;
    // This client answers pings while it reads: a turn that lasts longer than the patience of the server survives.
    let mut reading = Socket::open(cluster.address()).await?;
    let story = with(create("Write a long story."), json!({"max_output_tokens": 40}));
    reading.turn(&story).await?.expect_answer();
    // Waiting for an event that never comes, it is still there: nothing but pings arrives.
    let idle = tokio::time::timeout(Duration::from_millis(600), reading.next()).await;
    ensure!(idle.is_err(), "{idle:?}");
    reading.turn(&create("Hello")).await?.expect_answer();
    // This one does not read, so it does not answer; afterwards it finds that the server has closed.
    let mut silent = Socket::open(cluster.address()).await?;
    silent.turn(&create("Hello")).await?.expect_answer();
    let waited = tokio::time::timeout(Duration::from_millis(600), std::future::pending::<()>()).await;
    ensure!(waited.is_err(), "it waits in silence");
    match silent.next().await {
        Ok(Frame::Closed(code)) => ensure!(code.is_none_or(|code| code == 1008), "closed with {code:?}"),
        Ok(other) => bail!("{other:?}"),
        Err(_) => {}
    }
    Ok(())
}

#[tokio::test]
async fn a_close_is_answered_with_a_close() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    for busy in [false, true] {
        let mut socket = Socket::open(cluster.address()).await?;
        if busy {
            socket.send(&with(create("Write a long story."), json!({"max_output_tokens": 400}))).await?;
            socket.until("response.output_text.delta").await?;
        }
        let frame = CloseFrame { code: CloseCode::Normal, reason: "done".into() };
        socket.send_message(Message::Close(Some(frame))).await?;
        let code = loop {
            match socket.next().await? {
                Frame::Event(_) | Frame::Pong(_) => {}
                Frame::Closed(code) => break code,
            }
        };
        assert_eq!(code, Some(1000), "busy: {busy}");
    }
    until("nothing runs for a closed socket", async || cluster.live_turns() == 0).await;
    Ok(())
}

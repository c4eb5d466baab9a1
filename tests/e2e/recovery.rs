//! Work that is given up, and memory that is short.

use std::time::Instant;

use anyhow::ensure;
use futures::future::try_join_all;
use serde_json::json;
use tokio::io::AsyncReadExt;

use crate::client::{Chat, Socket, create, with};
use crate::cluster::{Cluster, Spec, until};
use crate::http;
use crate::plain::Plain;

/// Waits until no worker runs a turn. The design says 100 ms; the limit here forgives a busy machine.
async fn check_freed(cluster: &Cluster, who: &str) {
    let gone = Instant::now();
    until("the turn is freed", async || cluster.live_turns() == 0).await;
    let took = gone.elapsed();
    assert!(took.as_millis() < 2000, "{who}: the engine was freed after {took:?}");
}

#[tokio::test]
async fn a_vanished_client_frees_the_engine() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::split(1, 2)).await?;
    let long =
        with(create("Write a very long story about a lighthouse."), json!({"max_output_tokens": 2000}));
    let running = async || until("the turn runs", async || cluster.live_turns() > 0).await;

    let mut socket = Socket::open(cluster.address()).await?;
    socket.send(&long).await?;
    socket.until("response.output_text.delta").await?;
    ensure!(cluster.live_turns() == 1, "the turn runs");
    drop(socket);
    check_freed(&cluster, "a WebSocket").await;

    let streamed = with(long.clone(), json!({"stream": true})).to_string();
    let mut stream = http::send(cluster.address(), "POST", "/v1/responses", streamed.as_bytes()).await?;
    stream.read_exact(&mut [0; 64]).await?;
    running().await;
    drop(stream);
    check_freed(&cluster, "an SSE reader").await;

    let stream = http::send(cluster.address(), "POST", "/v1/responses", long.to_string().as_bytes()).await?;
    running().await;
    drop(stream);
    check_freed(&cluster, "a JSON reader").await;

    // The freed memory serves others, and the prefix is still cached.
    let turn =
        Socket::open(cluster.address()).await?.turn(&with(long, json!({"max_output_tokens": 4}))).await?;
    turn.expect_answer();
    ensure!(turn.usage("/input_tokens_details/cached_tokens") > 0, "{}", turn.last());
    Ok(())
}

#[tokio::test]
async fn more_turns_than_memory_all_complete() -> anyhow::Result<()> {
    const LIMIT: usize = 100;
    let topics = ["a river", "the moon", "a bridge", "bread", "a clock", "the wind"];
    let question =
        |topic: &str| format!("Write a long and detailed story about {topic}, with many characters in it.");
    // Each turn grows to 9 or 10 blocks; all of them fit at first, four at the end.
    let cluster = Cluster::start(Spec { n_blocks: 40, ..Spec::aggregated(1) }).await?;
    let turns = try_join_all(topics.map(|topic| async {
        let mut chat = Chat::open(cluster.address()).await?;
        chat.say(&question(topic), LIMIT).await
    }))
    .await?;
    let blocks: u64 = turns.iter().map(|turn| turn.usage("/total_tokens") / 16).sum();
    ensure!(blocks > 40, "{blocks} blocks are no shortage");
    for idx in [0, 5] {
        let want = Plain::new().say(&question(topics[idx]), LIMIT);
        assert_eq!(turns[idx].output_ids(), want, "a turn that was put off says the same");
    }
    check_freed(&cluster, "the last turn").await;
    Ok(())
}

#[tokio::test]
async fn a_prompt_beyond_the_workers_memory_is_refused_by_name() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec { n_blocks: 12, ..Spec::split(1, 1) }).await?;
    let mut chat = Chat::open(cluster.address()).await?;
    let refused = chat.socket.turn(&create("word ".repeat(250))).await?;
    let error = &refused.last()["error"];
    assert_eq!((&refused.last()["status"], &error["code"]), (&json!(400), &json!("context_length_exceeded")));
    assert_eq!(error["param"], "input");
    chat.say("Hello", 6).await?;
    // A turn that grows to the end of the memory ends there.
    let turn = chat.say("Write a very long story about a lighthouse.", 5000).await?;
    ensure!(turn.usage("/total_tokens") <= 12 * 16, "{}", turn.last());
    Ok(())
}

//! What is limited says so, and the rest goes on.

use std::time::Duration;

use anyhow::ensure;
use serde_json::json;

use crate::client::{Chat, Frame, Socket, create, with};
use crate::cluster::{Cluster, Spec, until};
use crate::http;
use crate::plain::Plain;

#[tokio::test]
async fn turns_beyond_the_gateways_places_are_refused_at_once() -> anyhow::Result<()> {
    let api = api_gateway::Config { max_turns: 1, ..api_gateway::Config::default() };
    let cluster = Cluster::start(Spec { api, ..Spec::aggregated(1) }).await?;
    let mut first = Socket::open(cluster.address()).await?;
    first.send(&with(create("Write a long story."), json!({"max_output_tokens": 60}))).await?;
    let began = first.until("response.output_text.delta").await?;

    let mut second = Socket::open(cluster.address()).await?;
    let refused = second.turn(&create("Hello")).await?;
    let error = &refused.last()["error"];
    assert_eq!((&refused.last()["status"], &error["code"]), (&json!(503), &json!("server_is_overloaded")));
    for stream in [false, true] {
        let reply = http::post(cluster.address(), &with(create("Hello"), json!({"stream": stream}))).await?;
        assert_eq!(reply.status, 503, "{reply:?}");
        ensure!(reply.head.contains("retry-after"), "{reply:?}");
    }
    first.rest(began).await?.expect_answer();
    until("the place is free again", async || {
        second.turn(&create("Hello")).await.is_ok_and(|turn| turn.end() != "error")
    })
    .await;
    Ok(())
}

#[tokio::test]
async fn an_old_connection_takes_no_create_and_says_why() -> anyhow::Result<()> {
    let api = api_gateway::Config { connection_life: Duration::ZERO, ..api_gateway::Config::default() };
    let cluster = Cluster::start(Spec { api, ..Spec::aggregated(1) }).await?;
    let refused = Socket::open(cluster.address()).await?.turn(&create("Hello")).await?;
    let code = &refused.last()["error"]["code"];
    assert_eq!(
        (&refused.last()["status"], code),
        (&json!(400), &json!("websocket_connection_limit_reached"))
    );
    Ok(())
}

#[tokio::test]
async fn a_client_that_does_not_read_loses_its_turn_and_nobody_elses() -> anyhow::Result<()> {
    // Large events in quick succession fill all buffers on the way within seconds.
    let heartbeat = Duration::from_millis(1);
    let slow_reader = Duration::from_millis(200);
    let api = api_gateway::Config { heartbeat, slow_reader, ..api_gateway::Config::default() };
    let cluster = Cluster::start(Spec { api, n_blocks: 400, ..Spec::aggregated(1) }).await?;
    let pairs =
        (0..16).map(|idx| (idx.to_string(), json!("x".repeat(512)))).collect::<serde_json::Map<_, _>>();
    let endless =
        with(create("Write a very long story."), json!({"metadata": pairs, "max_output_tokens": 6000}));
    let mut slow = Socket::open(cluster.address()).await?;
    slow.send(&endless).await?;
    until("its turn runs", async || cluster.live_turns() == 1).await;
    let mut other = Socket::open(cluster.address()).await?;
    other.turn(&create("Hello")).await?.expect_answer();
    until("its turn is cancelled", async || cluster.live_turns() == 0).await;
    other.turn(&create("Hello")).await?.expect_answer();
    let end = loop {
        match slow.next().await {
            Ok(Frame::Closed(code)) => break code,
            Ok(Frame::Event(event)) => ensure!(event["type"] != "response.incomplete", "it ran to its end"),
            Ok(Frame::Pong(_)) => {}
            Err(_) => break None,
        }
    };
    ensure!(end.is_none_or(|code| code == 1008), "closed with {end:?}");
    Ok(())
}

#[tokio::test]
async fn a_draining_gateway_finishes_turns_and_says_goodbye() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut idle = Socket::open(cluster.address()).await?;
    let mut busy = Socket::open(cluster.address()).await?;
    busy.send(&with(create("Write a long story."), json!({"max_output_tokens": 40}))).await?;
    let began = busy.until("response.output_text.delta").await?;
    let over_http =
        http::send(cluster.address(), "POST", "/v1/responses", create("Hello").to_string().as_bytes())
            .await?;
    until("the HTTP turn runs", async || cluster.live_turns() == 2).await;
    cluster.drain_gateway();
    let turn = busy.rest(began).await?;
    turn.expect_answer();
    assert_eq!(turn.usage("/output_tokens"), 40, "nothing is cut");
    for socket in [&mut busy, &mut idle] {
        assert_eq!(socket.next().await?, Frame::Closed(Some(1001)), "1001: going away");
    }
    let reply = http::read(over_http).await?;
    assert_eq!(reply.status, 200, "{reply:?}");
    let closed = async || tokio::net::TcpStream::connect(cluster.address()).await.is_err();
    until("no connection is taken", closed).await;
    Ok(())
}

#[tokio::test]
async fn a_forgotten_conversation_is_computed_again() -> anyhow::Result<()> {
    // 30 blocks hold one of the two conversations.
    let cluster = Cluster::start(Spec { n_blocks: 30, ..Spec::aggregated(1) }).await?;
    let story =
        "The keeper of the lighthouse counted the ships in the bay and wrote their names down. ".repeat(14);
    let mut plain = Plain::new();
    let mut chat = Chat::open(cluster.address()).await?;
    let turn = chat.say(&story, 8).await?;
    assert_eq!(turn.output_ids(), plain.say(&story, 8));
    ensure!(turn.usage("/input_tokens") > 15 * 16, "more than half of the memory: {}", turn.last());
    let mut other = Chat::open(cluster.address()).await?;
    other.say(&story.replace("lighthouse", "old mill"), 8).await?;

    let turn = chat.say("How many ships?", 8).await?;
    assert_eq!(turn.output_ids(), plain.say("How many ships?", 8));
    ensure!(turn.account("tokenized_tokens") < 24, "the gateway has not forgotten it");
    let (delta, computed) = (turn.account("tokenized_tokens"), turn.account("computed_tokens"));
    ensure!(computed > delta + 32, "{computed} tokens computed for {delta}: nothing was forgotten");
    let turn = chat.say("Why?", 8).await?;
    assert_eq!(turn.output_ids(), plain.say("Why?", 8));
    ensure!(turn.account("computed_tokens") <= turn.account("tokenized_tokens") + 32, "it is held again");
    Ok(())
}

#[tokio::test]
async fn a_history_sent_again_is_not_computed_again() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let question = "What is the capital of France? Answer with one word.";
    let mut chat = Chat::open(cluster.address()).await?;
    let first = chat.say(question, 60).await?;
    assert_eq!(first.end(), "response.completed", "a whole answer can be sent back");
    let second = chat.say("And of Italy?", 8).await?;
    // As clients do that lost their connection: everything from the start, on another transport.
    let history = json!([
        {"role": "user", "content": question},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": first.text()}]},
        {"role": "user", "content": "And of Italy?"},
    ]);
    let again =
        http::post(cluster.address(), &with(create(history), json!({"max_output_tokens": 8}))).await?.json();
    assert_eq!(again["baton"]["output_ids"], json!(second.output_ids()));
    let cached = again["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default();
    ensure!(cached >= first.usage("/input_tokens") / 16 * 16, "{cached} tokens cached: {again}");
    Ok(())
}

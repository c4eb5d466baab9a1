//! Who can continue which response.

use anyhow::ensure;
use serde_json::json;

use crate::client::{Chat, Socket, create, with};
use crate::cluster::{Cluster, Spec};
use crate::http;

#[tokio::test]
async fn an_unstored_response_is_known_to_its_own_socket_only() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut chat = Chat::open(cluster.address()).await?;
    let turn = chat.say("Hello, my name is Ada.", 8).await?;
    let next = with(create("And now?"), json!({"previous_response_id": turn.id()}));

    let mut stranger = Socket::open(cluster.address()).await?;
    let refused = stranger.turn(&next).await?;
    let error = &refused.last()["error"];
    assert_eq!(
        (&refused.last()["status"], &error["code"]),
        (&json!(400), &json!("previous_response_not_found"))
    );
    assert_eq!(error["param"], "previous_response_id");
    let over_http = http::post(cluster.address(), &next).await?;
    assert_eq!(over_http.status, 400);
    assert_eq!(over_http.json()["error"]["code"], "previous_response_not_found");

    stranger.turn(&create("Hello")).await?.expect_answer();
    chat.say("What is my name?", 8).await?;
    Ok(())
}

#[tokio::test]
async fn a_stored_response_is_known_everywhere_and_forks() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let root = socket.turn(&create("Let us talk about the moon and its craters.")).await?;
    root.expect_answer();
    let branch = |input: &str| with(create(input), json!({"previous_response_id": root.id()}));

    let left = socket.turn(&branch("Is it round?")).await?;
    let right = socket.turn(&branch("How far is it?")).await?;
    let mut other = Socket::open(cluster.address()).await?;
    let again = other.turn(&branch("Is it round?")).await?;
    let over_http = http::post(cluster.address(), &branch("Is it round?")).await?.json();
    for turn in [&left, &right, &again] {
        turn.expect_answer();
        ensure!(
            turn.usage("/input_tokens") > root.usage("/total_tokens"),
            "the parent's turn is in the context"
        );
        ensure!(turn.account("tokenized_tokens") < 24, "only the new part is tokenized");
        ensure!(
            turn.account("computed_tokens") <= turn.account("tokenized_tokens") + 32,
            "branches share their KV"
        );
    }
    assert_eq!(left.output_ids(), again.output_ids(), "branches do not disturb each other");
    assert_eq!(json!(left.output_ids()), over_http["baton"]["output_ids"]);
    // Each branch goes on by itself.
    let longer = with(create("Thanks."), json!({"previous_response_id": left.id()}));
    let longer = socket.turn(&longer).await?;
    ensure!(
        longer.usage("/input_tokens") > left.usage("/total_tokens"),
        "the branch is longer than its parent"
    );
    Ok(())
}

#[tokio::test]
async fn a_failed_continuation_evicts_its_parent_from_the_socket() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let orphan = json!([{"type": "function_call_output", "call_id": "call_unknown", "output": "42"}]);
    let too_long = json!("word ".repeat(10_000));
    for bad_input in [orphan, too_long] {
        let mut chat = Chat::open(cluster.address()).await?;
        let parent = chat.say("Hello", 6).await?.id().to_owned();
        let bad = with(chat.frame("", 6), json!({"input": bad_input}));
        let failed = chat.socket.turn(&bad).await?;
        assert_eq!((failed.end(), &failed.last()["status"]), ("error", &json!(400)), "{:?}", failed.last());
        let retry = chat.socket.turn(&chat.frame("Hello again", 6)).await?;
        assert_eq!(
            retry.last()["error"]["code"],
            "previous_response_not_found",
            "{parent} after {bad_input:.60}"
        );
        chat.socket.turn(&create("A fresh start")).await?.expect_answer();
    }
    Ok(())
}

#[tokio::test]
async fn a_failed_continuation_leaves_a_stored_parent_alone() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let parent = socket.turn(&create("Hello")).await?;
    let next = |input: &str| with(create(input), json!({"previous_response_id": parent.id()}));
    let failed = socket.turn(&next(&"word ".repeat(10_000))).await?;
    assert_eq!(failed.last()["error"]["code"], "context_length_exceeded");
    socket.turn(&next("Hello again")).await?.expect_answer();
    Ok(())
}

//! What breaks a conversation's cached prefix is named; tools in another order can be put right.

use anyhow::ensure;
use serde_json::{Value, json};

use crate::client::{Socket, Turn, create, with};
use crate::cluster::{Cluster, Spec};

fn tools(names: &[&str]) -> Value {
    let tool = |name: &&str| {
        let parameters =
            json!({"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]});
        json!({"type": "function", "name": name, "description": format!("Does {name}."), "parameters": parameters})
    };
    names.iter().map(tool).collect()
}

/// A first turn with three tools, and one that continues it with the same tools in another order.
async fn reordered(cluster: &Cluster) -> anyhow::Result<(Turn, Turn)> {
    let mut socket = Socket::open(cluster.address()).await?;
    let fields = json!({"tools": tools(&["read", "edit", "list"]), "tool_choice": "none"});
    let first = socket.turn(&with(create("Say hello."), fields)).await?;
    first.expect_answer();
    let fields = json!({
        "tools": tools(&["list", "read", "edit"]), "tool_choice": "none", "previous_response_id": first.id(),
    });
    let second = socket.turn(&with(create("Again."), fields)).await?;
    second.expect_answer();
    Ok((first, second))
}

#[tokio::test]
async fn tools_in_another_order_break_the_prefix_and_are_named() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let (first, second) = reordered(&cluster).await?;
    let found = &second.response()["baton"]["cache_break"];
    assert_eq!((&found["first_changed"], &found["kind"]), (&json!("tools[0] list"), &json!("reorder")));
    let (kept, lost) = (found["prefix_tokens_kept"].as_u64(), found["tokens_lost"].as_u64());
    assert!(kept < lost && kept.is_some(), "{found}");
    ensure!(second.account("tokenized_tokens") > first.usage("/input_tokens"), "everything is rendered anew");
    Ok(())
}

#[tokio::test]
async fn in_canonical_order_nothing_is_broken() -> anyhow::Result<()> {
    let api = api_gateway::Config { tools_canonical_order: true, ..Default::default() };
    let cluster = Cluster::start(Spec { api, ..Spec::aggregated(1) }).await?;
    let (first, second) = reordered(&cluster).await?;
    assert_eq!(second.response()["baton"].get("cache_break"), None);
    ensure!(second.account("tokenized_tokens") < 16, "only what was said is tokenized");
    ensure!(
        second.usage("/input_tokens_details/cached_tokens") > first.usage("/input_tokens") / 16 * 16 - 16
    );
    // A new client that sends everything again, in yet another order, is recognized.
    let said: Value = json!([
        {"role": "user", "content": "Say hello."},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": first.text()}]},
        {"role": "user", "content": "Again."},
    ]);
    let fields = json!({"tools": tools(&["edit", "list", "read"]), "tool_choice": "none"});
    let again = Socket::open(cluster.address()).await?.turn(&with(create(said), fields)).await?;
    ensure!(again.account("tokenized_tokens") < 16, "the conversation is known");
    assert_eq!(again.output_ids(), second.output_ids());
    // What is wrong with a tool is told by the place that the client gave it.
    let mut wrong = tools(&["b", "a"]);
    wrong[0]["parameters"] = json!("no schema");
    let mut socket = Socket::open(cluster.address()).await?;
    let refused = socket.turn(&with(create("Hello."), json!({"tools": wrong}))).await?;
    assert_eq!(refused.last()["error"]["param"], "tools[0].parameters");
    Ok(())
}

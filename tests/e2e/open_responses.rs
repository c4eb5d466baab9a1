//! The assertions of the Open Responses suite, one test each, under the suite's names.

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::client::{Socket, Turn, with};
use crate::cluster::{Cluster, Spec};
use crate::conformance::{ask, validate};

/// A question whose greedy answer is short.
const SHORT: &str = "What is the capital of France? Answer with one word.";
/// An image of one pixel.
const PIXEL: &str = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==";

async fn cluster() -> anyhow::Result<Cluster> {
    Cluster::start(Spec::aggregated(1)).await
}

fn message(role: &str, text: &str) -> Value {
    json!({"type": "message", "role": role, "content": text})
}

fn weather() -> Value {
    let city = json!({"type": "string", "description": "The city and state, e.g. San Francisco, CA"});
    json!({
        "type": "function",
        "name": "get_weather",
        "description": "Get the current weather for a location",
        "parameters": {"type": "object", "properties": {"location": city}, "required": ["location"]},
    })
}

fn completed(turn: &Turn) -> anyhow::Result<()> {
    ensure!(turn.end() == "response.completed", "{}", turn.last());
    Ok(())
}

/// A whole answer over HTTP, which must complete and say something.
async fn complete(body: &Value) -> anyhow::Result<Value> {
    let response = ask::whole(cluster().await?.address(), body).await?;
    ensure!(response["status"] == "completed", "{response}");
    ensure!(response["output"].as_array().is_some_and(|output| !output.is_empty()), "{response}");
    Ok(response)
}

fn error_code(turn: &Turn) -> &Value {
    &turn.last()["error"]["code"]
}

#[tokio::test]
async fn basic_response() -> anyhow::Result<()> {
    complete(&ask::body(json!([message("user", SHORT)]))).await.map(drop)
}

#[tokio::test]
async fn assistant_phase() -> anyhow::Result<()> {
    let said = |text: &str, phase: &str| with(message("assistant", text), json!({"phase": phase}));
    let history = json!([
        message("user", "What is the capital of Italy?"),
        said("I think about it.", "commentary"),
        said("Rome.", "final_answer"),
        message("user", SHORT),
    ]);
    complete(&ask::body(history)).await.map(drop)
}

#[test]
fn response_output_phase_schema() {
    let item = |phase: &str| {
        json!({"type": "message", "id": "msg_0123456789abcdef01234567", "status": "completed", "role": "assistant",
               "content": [], "phase": phase})
    };
    assert!(validate::item(&item("commentary")).is_ok() && validate::item(&item("final_answer")).is_ok());
    assert!(validate::item(&item("thinking")).is_err());
}

#[tokio::test]
async fn streaming_response() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    completed(&ask::streamed(cluster.address(), &ask::body(json!([message("user", SHORT)]))).await?)
}

#[tokio::test]
async fn system_prompt() -> anyhow::Result<()> {
    let input = json!([message("system", "You are a pirate."), message("user", SHORT)]);
    complete(&ask::body(input)).await.map(drop)
}

/// The suite sends no `tool_choice`; whether a small model calls is its own affair, so this asks for the call.
#[tokio::test]
async fn tool_calling() -> anyhow::Result<()> {
    let fields = json!({"tools": [weather()], "tool_choice": "required"});
    let asked =
        with(ask::body(json!([message("user", "What's the weather like in San Francisco?")])), fields);
    let response = complete(&asked).await?;
    let call =
        response["output"].as_array().into_iter().flatten().find(|item| item["type"] == "function_call");
    let call = call.context("no call")?;
    assert_eq!(call["name"], "get_weather");
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap_or_default())?;
    ensure!(arguments["location"].is_string(), "{arguments}");
    Ok(())
}

/// From an earlier revision of the suite.
#[tokio::test]
async fn tool_calling_streaming() -> anyhow::Result<()> {
    let fields = json!({"tools": [weather()], "tool_choice": "required"});
    let asked =
        with(ask::body(json!([message("user", "What's the weather like in San Francisco?")])), fields);
    let turn = ask::streamed(cluster().await?.address(), &asked).await?;
    completed(&turn)?;
    for kind in [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ] {
        ensure!(turn.kinds().contains(&kind), "no {kind} in {:?}", turn.kinds());
    }
    Ok(())
}

#[tokio::test]
async fn image_input() -> anyhow::Result<()> {
    let content = json!([
        {"type": "input_text", "text": "What do you see? Answer in one sentence."},
        {"type": "input_image", "image_url": PIXEL},
    ]);
    complete(&ask::body(json!([{"type": "message", "role": "user", "content": content}]))).await.map(drop)
}

#[tokio::test]
async fn multi_turn() -> anyhow::Result<()> {
    let input = json!([
        message("user", "My name is Alice."),
        message("assistant", "Hello Alice! Nice to meet you."),
        message("user", SHORT),
    ]);
    complete(&ask::body(input)).await.map(drop)
}

/// Compacts a conversation of two messages.
async fn compact(cluster: &Cluster) -> anyhow::Result<Value> {
    let input = json!([message("user", "I moor at pier seven."), message("assistant", "Noted: pier seven.")]);
    let body = with(ask::body(input), json!({"prompt_cache_key": "a-session"}));
    let (status, object) = ask::json(cluster.address(), "POST", "/v1/responses/compact", &body).await?;
    ensure!(status == 200, "{status}: {object}");
    validate::compaction(&object)?;
    Ok(object)
}

#[tokio::test]
async fn compact_response() -> anyhow::Result<()> {
    compact(&cluster().await?).await.map(drop)
}

#[tokio::test]
async fn compact_missing_model() -> anyhow::Result<()> {
    let body = json!({"input": [message("user", "Hello")]});
    let (status, _) = ask::json(cluster().await?.address(), "POST", "/v1/responses/compact", &body).await?;
    ensure!([400, 422].contains(&status), "{status}");
    Ok(())
}

#[tokio::test]
async fn websocket_response() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let mut socket = Socket::open(cluster.address()).await?;
    completed(&ask::on_socket(&mut socket, &ask::frame(json!([message("user", SHORT)]))).await?)
}

#[tokio::test]
async fn websocket_sequential_responses() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let mut socket = Socket::open(cluster.address()).await?;
    for _ in 0..2 {
        completed(&ask::on_socket(&mut socket, &ask::frame(SHORT)).await?)?;
    }
    Ok(())
}

/// From an earlier revision of the suite.
#[tokio::test]
async fn websocket_generate_false() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let warm =
        with(ask::frame(json!([message("system", "Be brief.")])), json!({"generate": false, "store": false}));
    let warm = ask::on_socket(&mut socket, &warm).await?;
    completed(&warm)?;
    assert_eq!((&warm.response()["output"], warm.usage("/output_tokens")), (&json!([]), 0));
    let next = with(ask::frame(SHORT), json!({"previous_response_id": warm.id(), "store": false}));
    completed(&ask::on_socket(&mut socket, &next).await?)
}

/// An unstored first turn.
async fn unstored(socket: &mut Socket) -> anyhow::Result<Turn> {
    let turn = ask::on_socket(socket, &with(ask::frame(SHORT), json!({"store": false}))).await?;
    completed(&turn)?;
    Ok(turn)
}

#[tokio::test]
async fn websocket_continuation() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let first = unstored(&mut socket).await?;
    let next = with(ask::frame("And of Italy?"), json!({"previous_response_id": first.id(), "store": false}));
    completed(&ask::on_socket(&mut socket, &next).await?)
}

#[tokio::test]
async fn websocket_previous_response_not_found() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let fields = json!({"previous_response_id": "resp_0123456789abcdef01234567", "store": false});
    let refused = ask::on_socket(&mut socket, &with(ask::frame(SHORT), fields)).await?;
    assert_eq!(error_code(&refused), "previous_response_not_found");
    Ok(())
}

#[tokio::test]
async fn websocket_reconnect_store_false_recovery() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let lost = unstored(&mut Socket::open(cluster.address()).await?).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let fields = json!({"previous_response_id": lost.id(), "store": false});
    let refused = ask::on_socket(&mut socket, &with(ask::frame(SHORT), fields)).await?;
    assert_eq!(error_code(&refused), "previous_response_not_found");
    unstored(&mut socket).await.map(drop)
}

#[tokio::test]
async fn websocket_failed_continuation_evicts_cache() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let first = unstored(&mut socket).await?;
    let fields = json!({"previous_response_id": first.id(), "store": false});
    let output = json!([{"type": "function_call_output", "call_id": "call_unknown", "output": "nothing"}]);
    let refused = ask::on_socket(&mut socket, &with(ask::frame(output), fields.clone())).await?;
    ensure!(refused.last()["status"].as_u64().is_some_and(|status| status >= 400), "{}", refused.last());
    let again = ask::on_socket(&mut socket, &with(ask::frame("And of Italy?"), fields)).await?;
    assert_eq!(error_code(&again), "previous_response_not_found");
    Ok(())
}

#[tokio::test]
async fn websocket_compact_new_chain() -> anyhow::Result<()> {
    let cluster = cluster().await?;
    let compacted = compact(&cluster).await?;
    let mut input = compacted["output"].as_array().context("a list")?.clone();
    input.push(message("user", SHORT));
    let mut socket = Socket::open(cluster.address()).await?;
    completed(&ask::on_socket(&mut socket, &with(ask::frame(input), json!({"store": false}))).await?)
}

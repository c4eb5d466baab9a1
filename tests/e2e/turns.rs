//! What one turn looks like from outside, on all transports.

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::client::{Chat, Socket, Turn, create, with};
use crate::cluster::{Cluster, Spec};
use crate::http;
use crate::plain::TEXT;

/// The events of an answer, without repetitions of deltas and heartbeats.
const ORDER: [&str; 10] = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
    "",
];
const NEVER_NULL: [&str; 20] = [
    "id",
    "object",
    "created_at",
    "status",
    "model",
    "output",
    "tools",
    "tool_choice",
    "truncation",
    "parallel_tool_calls",
    "text",
    "top_p",
    "temperature",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "store",
    "background",
    "service_tier",
    "metadata",
];
const ALWAYS_THERE: [&str; 10] = [
    "completed_at",
    "error",
    "incomplete_details",
    "instructions",
    "previous_response_id",
    "reasoning",
    "usage",
    "max_output_tokens",
    "max_tool_calls",
    "safety_identifier",
];

/// A question whose greedy answer is short.
const SHORT: &str = "What is the capital of France? Answer with one word.";

fn check_order(turn: &Turn, terminal: &str) {
    let mut kinds = turn.kinds();
    kinds.dedup();
    let mut order = ORDER;
    order[8] = terminal;
    assert_eq!(kinds, order[..9], "the order of events");
    for (idx, event) in turn.events.iter().enumerate() {
        assert_eq!(event["sequence_number"], idx, "numbers have no gaps");
    }
}

fn check_response(response: &Value) {
    for field in NEVER_NULL {
        assert!(response.get(field).is_some_and(|value| !value.is_null()), "{field} is null in {response}");
    }
    for field in ALWAYS_THERE.into_iter().chain(["prompt_cache_key"]) {
        assert!(response.get(field).is_some(), "{field} is missing in {response}");
    }
    assert_eq!(response["object"], "response");
    assert_eq!(response["model"], TEXT.name.as_str());
}

/// Every event names the same response and the same item, and the deltas add up to the final text.
fn check_identity(turn: &Turn) {
    let id = turn.id();
    let item_id = turn.response()["output"][0]["id"].as_str().expect("the item has an id");
    assert!(id.starts_with("resp_") && item_id.starts_with("msg_"), "{id} {item_id}");
    let mut text = String::new();
    for event in &turn.events {
        if let Some(response) = event.get("response") {
            check_response(response);
            assert_eq!(response["id"], id);
        }
        if let Some(item) = event.get("item") {
            assert_eq!(
                (&item["id"], &item["role"], &event["output_index"]),
                (&json!(item_id), &json!("assistant"), &json!(0))
            );
        }
        if let Some(of) = event.get("item_id") {
            assert_eq!(
                (of, &event["output_index"], &event["content_index"]),
                (&json!(item_id), &json!(0), &json!(0))
            );
        }
        match event["type"].as_str() {
            Some("response.output_text.delta") => {
                text.push_str(event["delta"].as_str().expect("a delta is text"));
            }
            Some("response.output_text.done") => assert_eq!(event["text"], text),
            Some("response.content_part.done") => assert_eq!(event["part"]["text"], text),
            Some("response.output_item.done") => assert_eq!(event["item"]["content"][0]["text"], text),
            _ => {}
        }
    }
    assert_eq!(turn.text(), text);
    assert!(!text.is_empty());
}

fn check_usage(turn: &Turn) {
    let (input, output) = (turn.usage("/input_tokens"), turn.usage("/output_tokens"));
    assert_eq!(turn.usage("/total_tokens"), input + output);
    assert_eq!(turn.usage("/input_tokens_details/cached_tokens"), input - turn.account("computed_tokens"));
    assert_eq!(turn.usage("/output_tokens_details/reasoning_tokens"), 0);
    assert_eq!(output, turn.output_ids().len() as u64);
    assert_eq!(input, turn.account("prompt_tokens"));
}

#[tokio::test]
async fn a_text_turn_is_complete_and_in_order_on_every_transport() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let asked = with(create(SHORT), json!({"max_output_tokens": 60}));
    let socket = Socket::open(cluster.address()).await?.turn(&asked).await?;
    let streamed = http::post(cluster.address(), &with(asked.clone(), json!({"stream": true}))).await?;
    ensure!(streamed.head.contains("content-type: text/event-stream"), "{streamed:?}");
    let streamed = streamed.events();
    for turn in [&socket, &streamed] {
        check_order(turn, "response.completed");
        check_identity(turn);
        check_usage(turn);
        assert!(turn.response()["completed_at"].is_u64());
        assert_eq!(turn.response()["status"], "completed");
    }
    let whole = http::post(cluster.address(), &asked).await?;
    ensure!(whole.status == 200 && whole.head.contains("x-request-id: req_"), "{whole:?}");
    let whole = Turn { events: vec![json!({"type": "response.completed", "response": whole.json()})] };
    check_response(whole.response());
    check_usage(&whole);
    assert_eq!((socket.text(), streamed.text()), (whole.text(), whole.text()));
    assert_eq!(socket.output_ids(), whole.output_ids());
    Ok(())
}

#[tokio::test]
async fn settings_are_echoed() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let parent = socket.turn(&create("Hello")).await?;
    let fields = json!({
        "metadata": {"run": "7", "user": "né"},
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 5,
        "store": false,
        "previous_response_id": parent.id(),
        "instructions": "Be brief.",
        "tool_choice": "none",
        "parallel_tool_calls": false,
        "reasoning": {"effort": null, "summary": "auto"},
        "prompt_cache_key": "key",
        "safety_identifier": "someone",
    });
    let turn = socket.turn(&with(create("Go on"), fields.clone())).await?;
    for (name, value) in fields.as_object().context("an object")? {
        for event in turn.events.iter().filter(|event| event.get("response").is_some()) {
            assert_eq!(&event["response"][name], value, "{name}");
        }
    }
    let defaults = with(create("Hello"), json!({"temperature": null, "max_output_tokens": 4}));
    let turn = socket.turn(&defaults).await?;
    let response = turn.response();
    assert_eq!((&response["temperature"], &response["top_p"]), (&json!(1.0), &json!(1.0)));
    assert_eq!((&response["store"], &response["metadata"]), (&json!(true), &json!({})));
    assert_eq!((&response["tools"], &response["tool_choice"]), (&json!([]), &json!("auto")));
    assert!(response.get("baton").is_some());
    let plain = with(create("Hello"), json!({"include": [], "max_output_tokens": 4}));
    assert!(socket.turn(&plain).await?.response().get("baton").is_none(), "our own fields are opt-in");
    Ok(())
}

#[tokio::test]
async fn the_output_limit_makes_a_response_incomplete() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let asked = with(create("Write a long story about a lighthouse."), json!({"max_output_tokens": 7}));
    let turn = Socket::open(cluster.address()).await?.turn(&asked).await?;
    check_order(&turn, "response.incomplete");
    check_identity(&turn);
    check_usage(&turn);
    let response = turn.response();
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(
        (&response["status"], &response["output"][0]["status"]),
        (&json!("incomplete"), &json!("incomplete"))
    );
    assert_eq!((turn.usage("/output_tokens"), &response["max_output_tokens"]), (7, &json!(7)));
    Ok(())
}

#[tokio::test]
async fn generate_false_prefills_and_can_be_continued() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut chat = Chat::open(cluster.address()).await?;
    let rules =
        "You answer questions about the sea, in one short sentence, and never mention anything else at all.";
    let warm = with(
        chat.frame("", 12),
        json!({
            "generate": false,
            "input": [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": rules}]}],
        }),
    );
    let warm = chat.socket.turn(&warm).await?;
    assert_eq!(warm.kinds(), ["response.created", "response.in_progress", "response.completed"]);
    assert_eq!((&warm.response()["output"], warm.usage("/output_tokens")), (&json!([]), 0));
    ensure!(warm.account("computed_tokens") > 16, "it prefills for real");
    chat.answered(&warm);
    let turn = chat.say("Why is it salty?", 12).await?;
    assert_eq!(turn.response()["previous_response_id"], warm.id());
    ensure!(turn.usage("/input_tokens") > warm.usage("/input_tokens"), "the context is kept");
    ensure!(turn.account("computed_tokens") <= turn.account("tokenized_tokens") + 32, "the prefill is used");
    // An empty one may come at any place of the chain.
    let again = chat.socket.turn(&with(chat.frame("", 12), json!({"generate": false, "input": []}))).await?;
    assert_eq!(again.end(), "response.completed");
    chat.answered(&again);
    chat.say("And why is it blue?", 12).await?;
    Ok(())
}

#[tokio::test]
async fn a_cancelled_response_is_incomplete_and_can_be_continued() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut chat = Chat::open(cluster.address()).await?;
    chat.socket.send(&chat.frame("Write a very long story about a lighthouse.", 600)).await?;
    let events = chat.socket.until("response.output_text.delta").await?;
    let id = events[0]["response"]["id"].clone();
    chat.socket.send(&json!({"type": "response.cancel", "response_id": id})).await?;
    let turn = chat.socket.rest(events).await?;
    check_order(&turn, "response.incomplete");
    check_identity(&turn);
    assert_eq!(turn.response()["incomplete_details"]["reason"], "interrupted");
    let n_output = turn.usage("/output_tokens");
    ensure!((1..600).contains(&n_output), "{n_output} tokens");
    let parent = turn.id().to_owned();
    let fields = json!({"previous_response_id": parent});
    let next = chat.socket.turn(&with(chat.frame("Thank you. Now say hello.", 8), fields)).await?;
    next.expect_answer();
    ensure!(next.usage("/input_tokens") > turn.usage("/input_tokens") + n_output, "what was said is kept");
    // What has ended meanwhile needs no cancelling; what never ran cannot be cancelled. The socket lives on.
    chat.socket.send(&json!({"type": "response.cancel", "response_id": parent})).await?;
    let refused = chat.socket.turn(&json!({"type": "response.cancel", "response_id": "resp_0"})).await?;
    assert_eq!(refused.last()["error"]["code"], "response_not_found");
    Ok(())
}

#[tokio::test]
async fn a_create_on_a_busy_socket_waits_for_its_turn() -> anyhow::Result<()> {
    let api = api_gateway::Config { max_queued_creates: 2, ..api_gateway::Config::default() };
    let cluster = Cluster::start(Spec { api, ..Spec::aggregated(1) }).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let long = with(create("Tell me about rivers."), json!({"max_output_tokens": 60}));
    socket.send(&long).await?;
    let began = socket.until("response.output_text.delta").await?;
    for idx in 0..3 {
        socket.send(&with(create("Say hello."), json!({"metadata": {"idx": idx.to_string()}}))).await?;
    }
    // One more than may wait: it is refused at once, the others are not touched.
    let mut first = began;
    let refusal = loop {
        let event = socket.event().await?;
        if event["type"] == "error" {
            break event;
        }
        first.push(event);
    };
    assert_eq!((&refusal["status"], &refusal["error"]["code"]), (&json!(429), &json!("rate_limit_exceeded")));
    let first = socket.rest(first).await?;
    check_order(&first, "response.incomplete");
    for idx in 0..2 {
        let turn = socket.rest(Vec::new()).await?;
        assert_eq!(turn.response()["metadata"]["idx"], idx.to_string(), "first come, first served");
        check_identity(&turn);
    }
    Ok(())
}

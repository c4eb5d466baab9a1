//! The protocol's checklist, where no other module has it.

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::client::{Socket, with};
use crate::cluster::{Cluster, Spec};
use crate::conformance::ask;

const SHORT: &str = "What is the capital of France? Answer with one word.";

/// 1.3: instructions, tools and settings hold for one response. Only the context is inherited.
#[tokio::test]
async fn nothing_but_the_context_is_inherited() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let fields = json!({
        "instructions": "Answer in capital letters.",
        "temperature": 0.5,
        "metadata": {"a": "b"},
        "prompt_cache_key": "key",
        "max_output_tokens": 20,
    });
    let first = ask::on_socket(&mut socket, &with(ask::frame(SHORT), fields)).await?;
    let next = json!({"type": "response.create", "model": first.response()["model"], "input": "And of Italy?",
                      "previous_response_id": first.id(), "max_output_tokens": 30});
    let next = ask::on_socket(&mut socket, &next).await?;
    let response = next.response();
    assert_eq!(response["instructions"], Value::Null);
    assert_eq!((&response["temperature"], &response["metadata"]), (&json!(1.0), &json!({})));
    assert_eq!(response["prompt_cache_key"], Value::Null);
    Ok(())
}

/// 1.2: older clients nest the body; SDKs say `stream` although they should not.
#[tokio::test]
async fn creates_come_in_any_dress() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    for fields in [
        json!({"stream": true}),
        json!({"stream": false}),
        json!({"client_metadata": {"x-codex-turn-metadata": "{\"request_kind\":\"turn\"}"}}),
        json!({"a_field_of_tomorrow": [1, 2], "user": "u", "service_tier": "priority", "include": ["message.input_image.image_url"]}),
        json!({"text": {"format": {"type": "text"}, "verbosity": "low"}}),
        json!({"stream_options": {"include_obfuscation": true}}),
    ] {
        let turn = ask::on_socket(&mut socket, &with(ask::frame(SHORT), fields.clone())).await;
        turn.with_context(|| fields.to_string())?.expect_answer();
    }
    let nested = json!({"type": "response.create", "response": ask::body(SHORT)});
    ask::on_socket(&mut socket, &nested).await?.expect_answer();
    Ok(())
}

/// 1.3: Codex (with `use_responses_lite`) and openai-python begin a chain with a warm-up that has nothing in it.
#[tokio::test]
async fn an_empty_warm_up_is_a_parent() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let warm = with(ask::frame(json!([])), json!({"generate": false, "store": false}));
    let warm = ask::on_socket(&mut socket, &warm).await?;
    assert_eq!((warm.end(), &warm.response()["output"]), ("response.completed", &json!([])));
    let next = with(ask::frame(SHORT), json!({"previous_response_id": warm.id(), "store": false}));
    ask::on_socket(&mut socket, &next).await?.expect_answer();
    Ok(())
}

/// 2.5 and 2.2: Codex sends half of `reasoning`, and gets all of it.
#[tokio::test]
async fn reasoning_is_echoed_complete() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    for reasoning in [json!({}), json!({"summary": "auto"}), json!({"context": "all_turns"}), Value::Null] {
        let asked = with(ask::frame(SHORT), json!({"reasoning": reasoning}));
        let turn = ask::on_socket(&mut socket, &asked).await;
        turn.with_context(|| reasoning.to_string())?.expect_answer();
    }
    Ok(())
}

/// 1.2 and 1.3: refused, and the socket lives on.
#[tokio::test]
async fn a_background_response_does_not_run_on_a_socket() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let refused = ask::on_socket(&mut socket, &with(ask::frame(SHORT), json!({"background": true}))).await?;
    assert_eq!((refused.end(), &refused.last()["status"]), ("error", &json!(400)));
    ask::on_socket(&mut socket, &ask::frame(SHORT)).await?.expect_answer();
    Ok(())
}

/// 1.7: steering is politely refused.
#[tokio::test]
async fn steering_is_refused_by_name() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let input = json!([{"type": "message", "role": "user", "content": "Be brief."}]);
    let parent = "resp_0123456789abcdef01234567";
    let steer = json!({"type": "response.steer", "previous_response_id": parent, "input": input});
    socket.send(&steer).await?;
    let failed = socket.event().await?;
    assert_eq!(failed["type"], "response.steer.failed");
    assert_eq!(failed["error"]["code"], "steering_not_supported");
    ensure!(failed["error"]["type"].is_string() && failed["error"]["message"].is_string(), "{failed}");
    assert_eq!(
        (&failed["steer"]["previous_response_id"], &failed["steer"]["input"]),
        (&json!(parent), &input)
    );
    ask::on_socket(&mut socket, &ask::frame(SHORT)).await?.expect_answer();
    Ok(())
}

/// 1.1: one message of 20 MiB in one frame, beyond the usual limit of a frame.
#[tokio::test]
async fn a_frame_of_twenty_mebibytes_is_read() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let filler = json!({"client_metadata": {"filler": "x".repeat(20 << 20)}});
    ask::on_socket(&mut socket, &with(ask::frame(SHORT), filler)).await?.expect_answer();
    Ok(())
}

/// 1.6: the one code by which Codex knows that it must not try again.
#[tokio::test]
async fn too_much_context_has_its_name_on_every_transport() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec { n_blocks: 700, ..Spec::aggregated(1) }).await?;
    let asked = "The keeper counts the ships in the bay. ".repeat(1500);
    let mut socket = Socket::open(cluster.address()).await?;
    let refused = ask::on_socket(&mut socket, &ask::frame(asked.as_str())).await?;
    assert_eq!(refused.last()["error"]["code"], "context_length_exceeded");
    let (status, body) =
        ask::json(cluster.address(), "POST", "/v1/responses", &ask::body(asked.as_str())).await?;
    assert_eq!((status, &body["error"]["code"]), (400, &json!("context_length_exceeded")));
    Ok(())
}

/// 2.5: `truncation: auto` drops the oldest items instead.
#[tokio::test]
async fn truncation_drops_the_oldest_items() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec { n_blocks: 700, ..Spec::aggregated(1) }).await?;
    // More than the model's context by itself; what is left is answered quickly.
    let story = "The keeper counts the ships in the bay. ".repeat(1000);
    let mut input: Vec<Value> = vec![json!({"role": "user", "content": story})];
    input.extend((0..4).map(|_| json!({"role": "user", "content": "Count them."})));
    input.push(json!({"role": "user", "content": SHORT}));
    let asked = with(ask::body(input), json!({"truncation": "auto", "max_output_tokens": 16}));
    ask::whole(cluster.address(), &asked).await?;
    Ok(())
}

/// 2.5: formats hold whatever the model would rather say.
#[tokio::test]
async fn a_schema_holds() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let schema = json!({
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": false,
    });
    let format = json!({"type": "json_schema", "name": "city", "strict": true, "schema": schema});
    let asked = with(ask::body("Tell me about Paris."), json!({"text": {"format": format}}));
    let turn = ask::streamed(cluster.address(), &asked).await?;
    let answer: Value = serde_json::from_str(turn.text())?;
    ensure!(answer["city"].is_string() && answer["people"].is_i64(), "{answer}");
    let asked = with(ask::body("Answer with JSON."), json!({"text": {"format": {"type": "json_object"}}}));
    let turn = ask::streamed(cluster.address(), &with(asked, json!({"max_output_tokens": 200}))).await?;
    ensure!(turn.text().starts_with('{'), "{}", turn.text());
    let bad = json!({"type": "json_schema", "name": "x", "strict": true, "schema": {"type": "nothing"}});
    let (status, body) = ask::json(
        cluster.address(),
        "POST",
        "/v1/responses",
        &with(ask::body("x"), json!({"text": {"format": bad}})),
    )
    .await?;
    ensure!(status == 400 && body["error"]["param"].is_string(), "{status} {body}");
    Ok(())
}

//! What went wrong between other gateways and their clients; `docs/protocol-symptoms.md` lists all of it.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::client_async;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use crate::client::{Chat, Socket, Turn, create, with};
use crate::cluster::{Cluster, Spec};
use crate::conformance::ask;
use crate::http;

const SHORT: &str = "What is the capital of France? Answer with one word.";
/// Tokens that the template puts around a message, and that no usage counts as output.
const FRAMING: u64 = 16;

fn echo_tool() -> Value {
    let parameters = json!({
        "type": "object",
        "properties": {"word": {"type": "string", "enum": ["ship", "sea"]}},
        "required": ["word"],
        "additionalProperties": false,
    });
    json!({"type": "function", "name": "say", "description": "Says a word", "parameters": parameters, "strict": true})
}

fn forced(fields: Value) -> Value {
    let choice = json!({"tools": [echo_tool()], "tool_choice": {"type": "function", "name": "say"}});
    with(ask::frame("Say a word."), with(choice, fields))
}

fn call(turn: &Turn) -> anyhow::Result<&Value> {
    let output = turn.response()["output"].as_array().context("a response has output")?;
    output
        .iter()
        .find(|item| item["type"] == "function_call")
        .with_context(|| format!("no call in {output:?}"))
}

/// No. 6: the model is not known at the handshake, and nobody has to name it there.
#[tokio::test]
async fn an_upgrade_needs_no_query_and_no_beta_header() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let address = cluster.address();
    for (query, beta) in
        [("", None), ("?api-version=1", Some("responses_websockets=2026-02-06")), ("", Some("other=1"))]
    {
        let mut request = format!("ws://{address}/v1/responses{query}").into_client_request()?;
        if let Some(beta) = beta {
            request.headers_mut().insert("openai-beta", beta.parse()?);
        }
        let offer = "permessage-deflate; client_max_window_bits";
        request.headers_mut().insert("sec-websocket-extensions", offer.parse()?);
        let (_, answer) = client_async(request, TcpStream::connect(address).await?).await?;
        ensure!(answer.headers().contains_key("x-request-id"), "{answer:?}");
        ensure!(
            !answer.headers().contains_key("sec-websocket-extensions"),
            "the offer is declined: {answer:?}"
        );
    }
    Ok(())
}

/// No. 10: a client that waits hears nothing of its connection's age.
#[tokio::test]
async fn an_old_connection_that_is_idle_hears_nothing() -> anyhow::Result<()> {
    let api =
        api_gateway::Config { connection_life: Duration::from_millis(50), ..api_gateway::Config::default() };
    let cluster = Cluster::start(Spec { api, ..Spec::aggregated(1) }).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let heard = tokio::time::timeout(Duration::from_millis(300), socket.next()).await;
    ensure!(heard.is_err(), "{heard:?}");
    let refused = ask::on_socket(&mut socket, &ask::frame(SHORT)).await?;
    assert_eq!(refused.last()["error"]["code"], "websocket_connection_limit_reached");
    Ok(())
}

/// No. 11: a response that runs is finished, however old its connection gets.
#[tokio::test]
async fn a_response_outlives_its_connections_age() -> anyhow::Result<()> {
    let api =
        api_gateway::Config { connection_life: Duration::from_millis(300), ..api_gateway::Config::default() };
    let cluster = Cluster::start(Spec { api, ..Spec::aggregated(1) }).await?;
    let began = std::time::Instant::now();
    let mut n_tokens = 100;
    // However fast the machine is, some answer takes longer than the connection's life.
    let (mut socket, turn) = loop {
        let story =
            with(create("Write a long story about a lighthouse."), json!({"max_output_tokens": n_tokens}));
        let mut socket = Socket::open(cluster.address()).await?;
        let asked = std::time::Instant::now();
        let turn = ask::on_socket(&mut socket, &story).await?;
        if asked.elapsed() > Duration::from_millis(400) {
            break (socket, turn);
        }
        ensure!(began.elapsed() < Duration::from_secs(60), "no answer took long enough");
        n_tokens *= 2;
    };
    turn.expect_answer();
    let refused = ask::on_socket(&mut socket, &ask::frame(SHORT)).await?;
    assert_eq!(refused.last()["error"]["code"], "websocket_connection_limit_reached");
    Ok(())
}

/// Nos. 12, 14 and 28: a chain holds all that was said, once, and what was computed is not computed again.
#[tokio::test]
async fn a_chain_grows_by_what_is_new() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::split(1, 1)).await?;
    let mut chat = Chat::open(cluster.address()).await?;
    let facts = "The keeper of the light counts the ships and writes their names into her book. ".repeat(4);
    let mut before = chat.say(&facts, 12).await?;
    for question in ["How many ships?", "Who counts them?", "Where does she write?"] {
        let turn = chat.say(question, 12).await?;
        let held = before.usage("/input_tokens") + before.usage("/output_tokens");
        let input = turn.usage("/input_tokens");
        ensure!(input > held && input < held + FRAMING + 16, "{held} tokens were held, now {input}");
        let cached = turn.usage("/input_tokens_details/cached_tokens");
        ensure!(cached + 2 * FRAMING >= held, "{cached} of {held} tokens were reused");
        assert_eq!(turn.response()["previous_response_id"], before.id());
        before = turn;
    }
    Ok(())
}

/// No. 13: when the end of a response is told, it is already kept.
#[tokio::test]
async fn a_response_is_kept_before_its_end_is_told() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut asking = Socket::open(cluster.address()).await?;
    let mut other = Socket::open(cluster.address()).await?;
    for _ in 0..10 {
        let first = asking.turn(&with(create("Hello"), json!({"max_output_tokens": 2}))).await?;
        let fields = json!({"previous_response_id": first.id(), "max_output_tokens": 2});
        ask::on_socket(&mut other, &with(create("Go on"), fields.clone())).await?.expect_answer();
        ask::whole(cluster.address(), &with(create("Go on"), fields)).await?;
    }
    Ok(())
}

/// Nos. 15 and 16: a call is an item of its own, and nothing of it is also text.
#[tokio::test]
async fn a_call_is_never_also_text() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let turn = ask::on_socket(&mut socket, &forced(json!({}))).await?;
    let kinds = turn.kinds();
    ensure!(kinds.contains(&"response.function_call_arguments.delta"), "{kinds:?}");
    ensure!(!kinds.contains(&"response.output_text.delta"), "{kinds:?}");
    assert_eq!(turn.response()["output"].as_array().map(Vec::len), Some(1));
    assert_eq!(call(&turn)?["name"], "say");
    Ok(())
}

/// No. 21: what the server cannot run is no reason to refuse a turn.
#[tokio::test]
async fn hosted_and_unknown_tools_are_ignored() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let tools = json!([
        {"type": "web_search", "external_web_access": true},
        {"type": "file_search", "vector_store_ids": ["vs_1"]},
        {"type": "tool_search"},
        {"type": "a_type_of_tomorrow", "anything": {"at": "all"}},
    ]);
    let mut socket = Socket::open(cluster.address()).await?;
    ask::on_socket(&mut socket, &with(ask::frame(SHORT), json!({"tools": tools}))).await?.expect_answer();
    Ok(())
}

/// No. 21: custom tools and namespaces are tools.
#[tokio::test]
async fn custom_tools_and_namespaces_are_accepted() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let tools = json!([
        {"type": "custom", "name": "free", "description": "Takes text"},
        {"type": "custom", "name": "digits", "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"}},
        {"type": "namespace", "name": "harbour", "description": "Ships", "tools": [echo_tool()]},
        echo_tool(),
    ]);
    let mut socket = Socket::open(cluster.address()).await?;
    let none = json!({"tools": tools, "tool_choice": "none"});
    ask::on_socket(&mut socket, &with(ask::frame(SHORT), none)).await?.expect_answer();
    let digits = json!({"tools": tools, "tool_choice": {"type": "custom", "name": "digits"}});
    let turn = ask::on_socket(&mut socket, &with(ask::frame("Give three digits."), digits)).await?;
    let item = &turn.response()["output"][0];
    assert_eq!((&item["type"], &item["name"]), (&json!("custom_tool_call"), &json!("digits")));
    let input = item["input"].as_str().unwrap_or_default();
    ensure!(input.len() == 3 && input.bytes().all(|byte| byte.is_ascii_digit()), "`{input}`");
    Ok(())
}

/// No. 22: an output is a string, or a list of parts.
#[tokio::test]
async fn an_output_may_be_a_list_of_parts() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    for output in
        [json!("aye"), json!([{"type": "input_text", "text": "aye"}, {"type": "input_text", "text": "aye"}])]
    {
        let called = ask::on_socket(&mut socket, &forced(json!({}))).await?;
        let item =
            json!({"type": "function_call_output", "call_id": call(&called)?["call_id"], "output": output});
        let fields = json!({"previous_response_id": called.id(), "max_output_tokens": 12});
        ask::on_socket(&mut socket, &with(ask::frame(json!([item])), fields)).await?.expect_answer();
    }
    Ok(())
}

/// No. 23: reasoning that comes back has been through other hands.
#[tokio::test]
async fn reasoning_comes_back_in_any_shape() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    for reasoning in [
        json!({"type": "reasoning", "id": "rs_1"}),
        json!({"type": "reasoning", "summary": [], "encrypted_content": "b3BhcXVl"}),
        json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "status": "completed"}),
        json!({"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": null}),
    ] {
        let input = json!([
            {"role": "user", "content": "Hello"},
            reasoning,
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": SHORT},
        ]);
        ask::whole(cluster.address(), &ask::body(input)).await?;
    }
    Ok(())
}

/// No. 24: items of hosted tools and of other worlds are context or nothing, but no mistake.
#[tokio::test]
async fn items_of_other_worlds_are_taken() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    for item in [
        json!({"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}}),
        json!({"type": "agent_message", "id": "am_1", "content": [{"type": "output_text", "text": "Aye."}]}),
        json!({"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [echo_tool()]}),
        json!({"type": "configuration_update", "id": "cu_1", "settings": {}}),
        json!({"type": "local_shell_call", "id": "lsh_1", "call_id": "call_1", "action": {"type": "exec", "command": ["ls"]}}),
        json!({"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": []}),
        json!({"type": "image_generation_call", "id": "ig_1", "result": "", "status": "completed"}),
        json!({"type": "an_item_of_tomorrow", "id": "x", "anything": [1, 2, 3]}),
    ] {
        let input = json!([{"role": "user", "content": "Hello"}, item, {"role": "user", "content": SHORT}]);
        ask::whole(cluster.address(), &ask::body(input)).await.with_context(|| item.to_string())?;
    }
    Ok(())
}

/// No. 25: a call in a namespace names both.
#[tokio::test]
async fn a_namespaced_call_comes_back_with_its_namespace() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let tools =
        json!([{"type": "namespace", "name": "harbour", "description": "Ships", "tools": [echo_tool()]}]);
    let fields = json!({"tools": tools, "tool_choice": "required"});
    let mut socket = Socket::open(cluster.address()).await?;
    let turn = ask::on_socket(&mut socket, &with(ask::frame("Say a word."), fields)).await?;
    let item = call(&turn)?;
    assert_eq!((&item["namespace"], &item["name"]), (&json!("harbour"), &json!("say")));
    Ok(())
}

/// No. 27: what fails within a stream ends it, in the way that all clients understand.
#[tokio::test]
async fn a_refused_stream_is_an_answer_with_a_status() -> anyhow::Result<()> {
    let cluster = Cluster::start(Spec::aggregated(1)).await?;
    let bad = with(ask::body(SHORT), json!({"temperature": 9, "stream": true}));
    let reply = http::post(cluster.address(), &bad).await?;
    ensure!(reply.status == 400 && reply.head.contains("content-type: application/json"), "{reply:?}");
    crate::conformance::validate::error_body(&reply.json(), reply.status)?;
    Ok(())
}

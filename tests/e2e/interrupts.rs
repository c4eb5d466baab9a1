//! A turn that is stopped in the middle of an item: what was complete stays, the rest was said or not, as the client
//! wishes.

use anyhow::ensure;
use serde_json::{Value, json};

use crate::client::{Socket, Turn, create, with};
use crate::cluster::{Cluster, Spec};
use crate::scripted::{Says, Script};

const BEGUN: &str =
    "Let me look. Yes.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"where\": \"to the left";

fn asked(input: &str, fields: Value) -> Value {
    let where_to = json!({"type": "object", "properties": {"where": {"type": "string"}}});
    let tool = json!({"type": "function", "name": "look", "parameters": where_to});
    let fields = with(json!({"tools": [tool], "store": false, "max_output_tokens": 200}), fields);
    with(create(input), fields)
}

/// Stops a turn with `stop` once it has sent an event of this kind, and falls silent.
async fn stopped(socket: &mut Socket, seen: &str, stop: Value) -> anyhow::Result<Turn> {
    socket.send(&asked("What is there?", json!({}))).await?;
    let events = socket.until(seen).await?;
    let stop = with(json!({"response_id": events[0]["response"]["id"]}), stop);
    socket.send(&stop).await?;
    let turn = socket.rest(events).await?;
    assert_eq!(turn.end(), "response.incomplete", "{}", turn.last());
    assert_eq!(turn.response()["incomplete_details"]["reason"], "interrupted");
    ensure!(turn.usage("/output_tokens") > 0, "it is counted: {}", turn.last());
    Ok(turn)
}

/// What the model reads of a stopped turn when it is continued.
async fn continued(script: &Script, socket: &mut Socket, turn: &Turn) -> anyhow::Result<String> {
    script.say([Says::Text("Fine.")]);
    let next = socket.turn(&asked("Go on.", json!({"previous_response_id": turn.id()}))).await?;
    next.expect_answer();
    Ok(script.heard())
}

async fn start(script: &Script) -> anyhow::Result<(Cluster, Socket)> {
    let cluster = script.cluster(Spec::aggregated(0)).await?;
    let socket = Socket::open(cluster.address()).await?;
    Ok((cluster, socket))
}

#[tokio::test]
async fn an_interrupted_call_was_never_made() -> anyhow::Result<()> {
    let script = Script::default();
    let (_cluster, mut socket) = start(&script).await?;
    let discards = json!({"type": "response.interrupt", "mode": "discard_partial_items"});
    let keeps = json!({"type": "response.cancel"});
    for (stop, n_items) in [(discards, 1), (keeps, 2)] {
        script.say([Says::Text(BEGUN), Says::Silence]);
        let turn = stopped(&mut socket, "response.function_call_arguments.delta", stop).await?;
        let output = turn.response()["output"].as_array().cloned().unwrap_or_default();
        assert_eq!(output.len(), n_items, "{output:?}");
        assert_eq!(output[0]["content"][0]["text"], "Let me look. Yes.");
        assert_eq!(output[0]["status"], "completed");
        let heard = continued(&script, &mut socket, &turn).await?;
        ensure!(heard.contains("Let me look. Yes."), "{heard}");
        assert_eq!(heard.contains("to the left"), n_items == 2, "{heard}");
    }
    Ok(())
}

#[tokio::test]
async fn an_interrupted_text_was_never_said() -> anyhow::Result<()> {
    let script = Script::default();
    let (_cluster, mut socket) = start(&script).await?;
    script.say([Says::Text("Once upon a time"), Says::Silence]);
    let turn =
        stopped(&mut socket, "response.output_text.delta", json!({"type": "response.interrupt"})).await?;
    assert_eq!(turn.response()["output"], json!([]));
    let heard = continued(&script, &mut socket, &turn).await?;
    ensure!(!heard.contains("Once upon"), "{heard}");
    ensure!(heard.contains("What is there?") && heard.contains("Go on."), "{heard}");
    Ok(())
}

#[tokio::test]
async fn what_the_client_was_told_and_what_the_model_remembers_are_the_same() -> anyhow::Result<()> {
    let script = Script::default();
    let (_cluster, mut socket) = start(&script).await?;
    let stop = || json!({"type": "response.interrupt"});
    // Where a call may begin, the text before it is not told as complete yet.
    script.say([Says::Text("Let me look.\n<tool_call>\n{\"na"), Says::Silence]);
    let turn = stopped(&mut socket, "response.output_text.delta", stop()).await?;
    assert_eq!(turn.response()["output"], json!([]));
    ensure!(!continued(&script, &mut socket, &turn).await?.contains("Let me look."));
    // A call whose arguments are complete was made.
    script.say([
        Says::Text("Yes.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"where\": \"left\"}"),
        Says::Silence,
    ]);
    let turn = stopped(&mut socket, "response.function_call_arguments.done", stop()).await?;
    let output = turn.response()["output"].as_array().cloned().unwrap_or_default();
    assert_eq!((output.len(), &output[1]["status"]), (2, &json!("completed")), "{output:?}");
    let heard = continued(&script, &mut socket, &turn).await?;
    ensure!(
        heard.contains("Yes.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"where\": \"left\"}"),
        "{heard}"
    );
    Ok(())
}

#[tokio::test]
async fn what_was_only_asked_for_can_be_stopped_without_its_id() -> anyhow::Result<()> {
    let script = Script::default();
    let (_cluster, mut socket) = start(&script).await?;
    for _ in 0..5 {
        script.say([Says::Text("Once upon a time"), Says::Silence]);
        socket.send(&asked("Tell me.", json!({}))).await?;
        socket.send(&json!({"type": "response.interrupt"})).await?;
        let turn = socket.rest(Vec::new()).await?;
        assert_eq!(turn.end(), "response.incomplete", "{}", turn.last());
    }
    script.forget();
    script.say([Says::Text("A ship.")]);
    let next = socket.turn(&asked("What is there?", json!({}))).await?;
    assert_eq!(
        (next.end(), next.text()),
        ("response.completed", "A ship."),
        "only what was asked for is stopped"
    );
    Ok(())
}

#[tokio::test]
async fn a_call_that_the_limit_cuts_is_no_text() -> anyhow::Result<()> {
    let script = Script::default();
    let (_cluster, mut socket) = start(&script).await?;
    let call = "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"where\": \"left\"}}\n</tool_call>";
    for limit in 1..24 {
        script.say([Says::Text(call)]);
        let turn = socket.turn(&asked("Look.", json!({"max_output_tokens": limit}))).await?;
        let output = turn.response()["output"].as_array().cloned().unwrap_or_default();
        let markup = output.iter().any(|item| item.to_string().contains("tool_call>"));
        ensure!(!markup || limit < 4, "{limit}: {output:?}");
    }
    Ok(())
}

#[tokio::test]
async fn an_interrupt_that_comes_too_late_is_no_mistake() -> anyhow::Result<()> {
    let script = Script::default();
    let (_cluster, mut socket) = start(&script).await?;
    script.say([Says::Text("A ship.")]);
    let turn = socket.turn(&asked("What is there?", json!({}))).await?;
    socket.send(&json!({"type": "response.interrupt", "response_id": turn.id()})).await?;
    let heard = continued(&script, &mut socket, &turn).await?;
    ensure!(heard.contains("A ship."), "{heard}");
    Ok(())
}

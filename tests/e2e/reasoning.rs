//! Models that think before they answer: what clients see of it, and what the model sees again.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::client::{Socket, Turn, create, with};
use crate::cluster::{Cluster, Spec};
use crate::conformance::ask;
use crate::scripted::{Says, Script};

/// Drops reasoning once the user has spoken again, as Qwen3's template does.
const DROPS: &str = include_str!("../../model/tests/fixtures/drops_old_reasoning.jinja");
const CALLS: &str = "<think>\nI need to look.\n</think>\n\n<tool_call>\n{\"name\": \"look\", \"arguments\": {}}\n</tool_call>";

async fn cluster(script: &Script, template: &str) -> anyhow::Result<Cluster> {
    let api = api_gateway::Config { heartbeat: Duration::from_millis(50), ..api_gateway::Config::default() };
    script.cluster(Spec { api, template: Some(template.to_owned()), ..Spec::aggregated(0) }).await
}

/// The same template for a model whose answers begin within a thought.
fn opens() -> String {
    DROPS.replace(
        "'<|im_start|>assistant\\n' }}\n{%- endif %}\n",
        "'<|im_start|>assistant\\n<think>\\n' }}\n{%- endif %}\n",
    )
}

fn asked(input: Value, fields: Value) -> Value {
    let tool =
        json!({"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}});
    with(with(create(input), json!({"tools": [tool], "store": false, "max_output_tokens": 200})), fields)
}

fn result(call: &Value) -> Value {
    json!({"type": "function_call_output", "call_id": call["call_id"], "output": "A ship."})
}

fn output(turn: &Turn) -> &[Value] {
    turn.response()["output"].as_array().expect("a list")
}

#[tokio::test]
async fn thoughts_stay_within_a_tool_loop_and_are_dropped_when_the_user_speaks() -> anyhow::Result<()> {
    let script = Script::default();
    let cluster = cluster(&script, DROPS).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    script.say([Says::Text(CALLS)]);
    let called = socket.turn(&asked("What is there?".into(), json!({}))).await?;
    let [thought, call] = output(&called) else { anyhow::bail!("{}", called.last()) };
    assert_eq!((&thought["type"], &call["type"]), (&json!("reasoning"), &json!("function_call")));
    assert_eq!(thought["summary"], json!([]), "nobody asked for it");
    ensure!(thought.get("encrypted_content").is_none(), "{thought}");
    ensure!(called.usage("/output_tokens_details/reasoning_tokens") > 5, "{}", called.last());
    script.say([Says::Text("<think>\nIt is a ship.\n</think>\n\nA ship.")]);
    let next = asked(json!([result(call)]), json!({"previous_response_id": called.id()}));
    let answered = socket.turn(&next).await?;
    ensure!(script.heard().contains("I need to look."), "{}", script.heard());
    script.say([Says::Text("Hardly.")]);
    let next = asked("A big one?".into(), json!({"previous_response_id": answered.id()}));
    let next = socket.turn(&next).await?;
    next.expect_answer();
    let heard = script.heard();
    for gone in ["I need to look.", "It is a ship.", "think>"] {
        ensure!(!heard.contains(gone), "{gone} is still in {heard}");
    }
    for there in ["What is there?", "\"look\"", "A ship.<|im_end|>", "A big one?"] {
        ensure!(heard.contains(there), "{there} is not in {heard}");
    }
    Ok(())
}

#[tokio::test]
async fn sealed_thoughts_come_back_where_the_models_own_tokens_are_gone() -> anyhow::Result<()> {
    let script = Script::default();
    let cluster = cluster(&script, DROPS).await?;
    let sealed = json!({"include": ["reasoning.encrypted_content"]});
    script.say([Says::Text(CALLS)]);
    let called = ask::streamed(cluster.address(), &asked("What is there?".into(), sealed.clone())).await?;
    let [thought, call] = output(&called) else { anyhow::bail!("{}", called.last()) };
    let seal = thought["encrypted_content"].as_str().context("it is sealed")?;
    ensure!(!seal.contains("look") && thought["summary"] == json!([]), "{thought}");
    // Under other instructions nothing of the earlier turn is continued: all of it is rendered.
    let say = async |thought: &Value, then: &[Value]| {
        let user = json!({"role": "user", "content": "What is there?"});
        let input = [&[user, thought.clone(), call.clone(), result(call)], then].concat();
        script.say([Says::Text("A ship.")]);
        let fields = with(sealed.clone(), json!({"instructions": "Be brief."}));
        ask::whole(cluster.address(), &asked(json!(input), fields)).await.map(|_| script.heard())
    };
    let heard = say(thought, &[]).await?;
    let written = "<|im_start|>assistant\n<think>\nI need to look.\n</think>\n\n<tool_call>\n{\"name\": \"look\", \
                   \"arguments\": {}}\n</tool_call><|im_end|>\n";
    ensure!(heard.contains(written), "{heard}");
    let asked_on =
        [json!({"role": "assistant", "content": "A ship."}), json!({"role": "user", "content": "Big?"})];
    let heard = say(thought, &asked_on).await?;
    ensure!(!heard.contains("I need to look."), "the user has spoken again: {heard}");
    // Another server's thoughts cannot be read, and are no reason to refuse the turn.
    let heard = say(&json!({"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}), &[]).await?;
    ensure!(!heard.contains("think>"), "{heard}");
    Ok(())
}

#[tokio::test]
async fn an_answer_of_a_given_form_is_no_thought() -> anyhow::Result<()> {
    let script = Script::default();
    let cluster = cluster(&script, &opens()).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    script.say([Says::Text("Easy.\n</think>\n\nSeven.")]);
    let free = socket.turn(&asked("How many?".into(), json!({"tools": []}))).await?;
    ensure!(script.heard().ends_with("<|im_start|>assistant\n<think>\n"), "{}", script.heard());
    assert_eq!((output(&free)[0]["type"].as_str(), output(&free).len()), (Some("reasoning"), 2));
    script.say([Says::Text("{\"n\": 7}")]);
    let form = json!({"tools": [], "text": {"format": {"type": "json_object"}}, "store": true});
    let json = socket.turn(&asked("How many?".into(), form)).await?;
    assert_eq!(json.text(), "{\"n\": 7}", "{}", json.last());
    ensure!(script.heard().ends_with("<think>\n\n</think>\n\n"), "{}", script.heard());
    script.say([Says::Text("<tool_call>\n{\"name\": \"look\", \"arguments\": {}}\n</tool_call>")]);
    let forced =
        socket.turn(&asked("Look!".into(), json!({"tool_choice": "required", "store": true}))).await?;
    assert_eq!(output(&forced)[0]["type"], "function_call", "{}", forced.last());
    // What had a form is remembered like any other answer.
    for (turn, said) in [(&json, "{\"n\": 7}"), (&forced, "{\"name\": \"look\", \"arguments\": {}}")] {
        script.say([Says::Text("Easy.\n</think>\n\nFine.")]);
        let fields =
            json!({"previous_response_id": turn.id(), "tools": turn.response()["tools"], "store": true});
        socket.turn(&asked("Go on.".into(), fields)).await?.expect_answer();
        ensure!(script.heard().contains(said), "{}", script.heard());
    }
    Ok(())
}

#[tokio::test]
async fn hidden_thoughts_are_bridged_by_heartbeats() -> anyhow::Result<()> {
    let script = Script::default();
    let cluster = cluster(&script, DROPS).await?;
    let thinks = [Says::Text("Hm. "), Says::Pause(Duration::from_millis(30))];
    let thinks = thinks.iter().cycle().take(20);
    let parts = [Says::Text("<think>\n")].iter().chain(thinks).chain(&[Says::Text("\n</think>\n\nYes.")]);
    script.say(parts.copied().collect::<Vec<_>>());
    let turn = Socket::open(cluster.address()).await?.turn(&asked("Well?".into(), json!({}))).await?;
    turn.expect_answer();
    let thinking = turn.kinds().iter().position(|kind| *kind == "response.output_item.done");
    let while_it_thinks = &turn.kinds()[..thinking.context("the thought ends")?];
    let beats = while_it_thinks.iter().filter(|kind| **kind == "response.in_progress").count();
    ensure!(beats > 4, "{beats} heartbeats in {:?}", turn.kinds());
    Ok(())
}

//! A conversation that has become too long goes on as a summary, whoever keeps it.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::client::{Socket, Turn, create, with};
use crate::cluster::{Cluster, Spec};
use crate::conformance::ask;
use crate::scripted::{Says, Script};

const RULES: &str = "Speak like a sailor.";
/// Far longer than the threshold below.
const OLD: &str = "The lighthouse keeper counts the ships in the bay and writes their names into her book. ";
const THRESHOLD: u32 = 300;

fn rules() -> Value {
    json!({"type": "message", "role": "developer", "content": RULES})
}

fn user(text: &str) -> Value {
    json!({"type": "message", "role": "user", "content": text})
}

fn result(call_id: &Value, output: &str) -> Value {
    json!({"type": "function_call_output", "call_id": call_id, "output": output})
}

/// A request that may be compacted.
fn asked(input: Value, fields: Value) -> Value {
    let tool =
        json!({"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}});
    let managed = json!([{"type": "compaction", "compact_threshold": THRESHOLD}]);
    with(with(create(input), json!({"tools": [tool], "context_management": managed})), fields)
}

fn kinds(turn: &Turn) -> Vec<&str> {
    let output = turn.response()["output"].as_array().unwrap_or_else(|| panic!("no output: {}", turn.last()));
    output.iter().filter_map(|item| item["type"].as_str()).collect()
}

/// What the model was asked last holds all of `there`, in this order, and nothing of `gone`.
fn check_heard(script: &Script, there: &[&str], gone: &[&str]) {
    let heard = script.heard();
    let mut rest = heard.as_str();
    for text in there {
        let at = rest.find(text).unwrap_or_else(|| panic!("{text:?} is not where it should be in {heard}"));
        rest = &rest[at + text.len()..];
    }
    for text in gone {
        assert!(!heard.contains(text), "{text:?} is still in {heard}");
    }
}

#[tokio::test]
async fn a_tool_loop_goes_on_with_its_calls_and_results() -> anyhow::Result<()> {
    let script = Script::default();
    let cluster = script.cluster(Spec::aggregated(0)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    script.say([Says::Text("I look.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {}}\n</tool_call>")]);
    let fields = json!({"context_management": null, "store": false, "max_output_tokens": 100});
    let called = socket.turn(&asked(json!([rules(), user(&OLD.repeat(20))]), fields)).await?;
    assert_eq!(kinds(&called), ["message", "function_call"], "{}", called.last());
    let call_id = &called.response()["output"][1]["call_id"];
    script.say([Says::Text("She counted forty ships.")]);
    script.say([Says::Text("Aye, forty-one.")]);
    let fields = json!({"previous_response_id": called.id(), "store": false});
    let answered = socket.turn(&asked(json!([result(call_id, "One more ship.")]), fields)).await?;
    assert_eq!(kinds(&answered), ["compaction", "message"], "{}", answered.last());
    let there = [RULES, "She counted forty ships.", "<tool_call>", "\"look\"", "One more ship."];
    check_heard(&script, &there, &["writes their names"]);
    // From here on the summary is what is continued, however far.
    let mut parent = answered.id().to_owned();
    for question in ["And now?", "And then?"] {
        script.say([Says::Text("Nothing new.")]);
        let fields = json!({"previous_response_id": parent, "store": false});
        let next = socket.turn(&asked(json!([user(question)]), fields)).await?;
        assert_eq!(kinds(&next), ["message"], "{}", next.last());
        check_heard(&script, &[&there[..], &["Aye, forty-one.", question]].concat(), &["writes their names"]);
        next.id().clone_into(&mut parent);
    }
    Ok(())
}

#[tokio::test]
async fn a_client_that_keeps_everything_itself_is_understood() -> anyhow::Result<()> {
    let script = Script::default();
    let cluster = script.cluster(Spec::aggregated(0)).await?;
    let (address, mut kept) = (cluster.address(), vec![rules(), user(&OLD.repeat(20)), user("How many?")]);
    script.say([Says::Text("Forty.")]);
    let plain = |input: &[Value]| asked(json!(input), json!({"store": false}));
    let first = with(plain(&kept), json!({"context_management": null}));
    kept.extend(ask::whole(address, &first).await?["output"].as_array().cloned().unwrap_or_default());
    kept.push(user("Is that all?"));
    script.say([Says::Text("Forty ships were counted.")]);
    script.say([Says::Text("That is all.")]);
    let shortened = ask::whole(address, &plain(&kept)).await?;
    let output = shortened["output"].as_array().context("a list")?.clone();
    assert_eq!((output.len(), &output[0]["type"]), (2, &json!("compaction")), "{shortened}");
    let summary = [RULES, "Forty ships were counted.", "Is that all?"];
    check_heard(&script, &summary, &["writes their names"]);
    // What the summary stands for may be sent again, or be left out.
    let whole: Vec<Value> = kept.iter().chain(&output).cloned().collect();
    for input in [whole.as_slice(), output.as_slice()] {
        let n_heard = script.n_heard();
        script.say([Says::Text("Yes.")]);
        let next = ask::whole(address, &plain(&[input, &[user("Sure?")]].concat())).await?;
        assert_eq!((script.n_heard() - n_heard, next["output"][0]["type"].as_str()), (1, Some("message")));
        check_heard(&script, &[&summary[..], &["That is all.", "Sure?"]].concat(), &["writes their names"]);
    }
    Ok(())
}

#[tokio::test]
async fn a_conversation_that_the_server_keeps_becomes_shorter_for_good() -> anyhow::Result<()> {
    let script = Script::default();
    let cluster = script.cluster(Spec::aggregated(0)).await?;
    let address = cluster.address();
    let (_, made) = ask::json(address, "POST", "/v1/conversations", &json!({})).await?;
    let say = async |input: Value| {
        ask::whole(address, &asked(json!([input]), json!({"conversation": made["id"]}))).await
    };
    let say_at_length = async |input: Value| {
        let fields = json!({"conversation": made["id"], "context_management": null});
        ask::whole(address, &asked(json!([input]), fields)).await
    };
    script.say([Says::Text("Noted.")]);
    say_at_length(user(&format!("My ship is the Ada. {}", OLD.repeat(8)))).await?;
    script.say([Says::Text("Noted, too.")]);
    say_at_length(user(&OLD.repeat(8))).await?;
    script.say([Says::Text("The ship is the Ada.")]);
    script.say([Says::Text("The Ada.")]);
    let shortened = say(user("Which ship?")).await?;
    assert_eq!(shortened["output"][0]["type"], "compaction", "{shortened}");
    for question in ["Whose?", "Where?"] {
        script.say([Says::Text("Yours.")]);
        let next = say(user(question)).await?;
        assert_eq!(next["output"][0]["type"], "message", "{next}");
        check_heard(
            &script,
            &["The ship is the Ada.", "Which ship?", "The Ada.", question],
            &["writes their names"],
        );
    }
    let path =
        format!("/v1/conversations/{}/items?limit=100&order=asc", made["id"].as_str().context("an id")?);
    let (_, items) = ask::json(address, "GET", &path, &Value::Null).await?;
    let kinds: Vec<&str> =
        items["data"].as_array().context("a list")?.iter().filter_map(|item| item["type"].as_str()).collect();
    assert_eq!(kinds.iter().filter(|kind| **kind == "compaction").count(), 1, "{items}");
    assert_eq!(kinds.len(), 11, "nothing that was said is lost: {items}");
    Ok(())
}

/// Asks for a summary with an item, as Codex does.
fn triggered(previous: &str) -> Value {
    let fields = json!({"previous_response_id": previous, "context_management": null, "store": false});
    asked(json!([{"type": "compaction_trigger"}]), fields)
}

#[tokio::test]
async fn what_ends_in_a_summary_is_continued_from_there() -> anyhow::Result<()> {
    let script = Script::default();
    let cluster = script.cluster(Spec::aggregated(0)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    script.say([Says::Text("Forty.")]);
    let first =
        asked(json!([rules(), user(&OLD.repeat(20))]), json!({"context_management": null, "store": false}));
    let first = socket.turn(&first).await?;
    // The client's limit is for answers, not for summaries.
    script.say([Says::Text(
        "There were forty ships, each with a name of its own, and all of them were counted twice.",
    )]);
    let summed_up = socket.turn(&with(triggered(first.id()), json!({"max_output_tokens": 1}))).await?;
    assert_eq!((summed_up.end(), kinds(&summed_up)), ("response.completed", vec!["compaction"]));
    script.say([Says::Text("Aye.")]);
    let fields = json!({"previous_response_id": summed_up.id(), "store": false});
    socket.turn(&asked(json!([user("Go on.")]), fields)).await?.expect_answer();
    check_heard(&script, &[RULES, "all of them were counted twice.", "Go on."], &["writes their names"]);
    Ok(())
}

#[tokio::test]
async fn a_model_without_a_summary_loses_nothing() -> anyhow::Result<()> {
    let script = Script::default();
    let mut cluster = script.cluster(Spec::aggregated(0)).await?;
    cluster.forgive_warnings();
    let mut socket = Socket::open(cluster.address()).await?;
    script.say([Says::Text("Forty.")]);
    let first = asked(json!([user(&OLD.repeat(20))]), json!({"context_management": null, "store": false}));
    let first = socket.turn(&first).await?;
    script.say([Says::Text(" \n")]);
    let failed = socket.turn(&triggered(first.id())).await?;
    assert_eq!(failed.end(), "response.failed", "{}", failed.last());
    script.say([Says::Text("Forty.")]);
    let first = asked(json!([user(&OLD.repeat(20))]), json!({"context_management": null, "store": false}));
    let first = socket.turn(&first).await?;
    script.say([Says::Text("")]);
    script.say([Says::Text("All of them.")]);
    let fields = json!({"previous_response_id": first.id(), "store": false});
    let next = socket.turn(&asked(json!([user("Which?")]), fields)).await?;
    assert_eq!((next.end(), kinds(&next)), ("response.completed", vec!["message"]), "{}", next.last());
    check_heard(&script, &["writes their names", "Forty.", "Which?"], &[]);
    Ok(())
}

#[tokio::test]
async fn a_long_summary_is_bridged_by_heartbeats_and_can_be_stopped() -> anyhow::Result<()> {
    let script = Script::default();
    let api = api_gateway::Config { heartbeat: Duration::from_millis(50), ..api_gateway::Config::default() };
    let mut cluster: Cluster = script.cluster(Spec { api, ..Spec::aggregated(0) }).await?;
    cluster.forgive_warnings();
    let mut socket = Socket::open(cluster.address()).await?;
    let input = json!([user(&OLD.repeat(20)), {"role": "assistant", "content": "Forty."}, user("Which?")]);
    let long = asked(input, json!({"store": false}));
    // It writes all the time, and nothing of it is to be shown.
    let slow = [Says::Text("Forty "), Says::Pause(Duration::from_millis(30))];
    script.say(slow.iter().cycle().take(20).copied().collect::<Vec<_>>());
    script.say([Says::Text("All.")]);
    let turn = socket.turn(&long).await?;
    turn.expect_answer();
    let beats = turn.kinds().iter().filter(|kind| **kind == "response.in_progress").count();
    ensure!(beats > 4, "{beats} heartbeats in {:?}", turn.kinds());
    script.say([Says::Text("Forty"), Says::Silence]);
    socket.send(&long).await?;
    let events = socket.until("response.in_progress").await?;
    socket.send(&json!({"type": "response.cancel", "response_id": events[0]["response"]["id"]})).await?;
    let stopped = socket.rest(events).await?;
    assert_eq!(stopped.end(), "response.incomplete", "{}", stopped.last());
    assert_eq!(stopped.response()["incomplete_details"]["reason"], "interrupted");
    Ok(())
}

#[tokio::test]
async fn results_that_come_later_still_find_their_calls() -> anyhow::Result<()> {
    let script = Script::default();
    let cluster = script.cluster(Spec::aggregated(0)).await?;
    let mut socket = Socket::open(cluster.address()).await?;
    let call = "<tool_call>\n{\"name\": \"look\", \"arguments\": {}}\n</tool_call>";
    script.say([Says::Text(call), Says::Text("\n"), Says::Text(call)]);
    let fields = json!({"context_management": null, "max_output_tokens": 100});
    let called = socket.turn(&asked(json!([user(&OLD.repeat(20))]), fields)).await?;
    assert_eq!(kinds(&called), ["function_call", "function_call"], "{}", called.last());
    let call_id = |idx: usize| &called.response()["output"][idx]["call_id"];
    script.say([Says::Text("Forty ships.")]);
    script.say([Says::Text("I wait.")]);
    let fields = json!({"previous_response_id": called.id()});
    let waits = socket.turn(&asked(json!([result(call_id(1), "A brig.")]), fields)).await?;
    assert_eq!(kinds(&waits), ["compaction", "message"], "{}", waits.last());
    script.say([Says::Text("Both.")]);
    let fields = json!({"previous_response_id": waits.id()});
    let both = socket.turn(&asked(json!([result(call_id(0), "A cutter.")]), fields)).await?;
    both.expect_answer();
    check_heard(
        &script,
        &["Forty ships.", "\"look\"", "\"look\"", "A brig.", "A cutter."],
        &["writes their names"],
    );
    Ok(())
}

#[tokio::test]
async fn a_summary_that_was_asked_for_shortens_a_conversation_whoever_remembers_it() -> anyhow::Result<()> {
    let script = Script::default();
    let cluster = script.cluster(Spec::aggregated(0)).await?;
    let address = cluster.address();
    let (_, made) = ask::json(address, "POST", "/v1/conversations", &json!({})).await?;
    let path = format!("/v1/conversations/{}/items", made["id"].as_str().context("an id")?);
    let fields = json!({"conversation": made["id"], "context_management": null});
    let say = async |item: Value| ask::whole(address, &asked(json!([item]), fields.clone())).await;
    script.say([Says::Text("Forty.")]);
    say(user(&OLD.repeat(20))).await?;
    script.say([Says::Text("Forty ships were counted.")]);
    say(json!({"type": "compaction_trigger"})).await?;
    // What others have added since comes behind the summary.
    let (_, added) =
        ask::json(address, "POST", &path, &json!({"items": [user("Call me Bob."), user("No, Eve.")]}))
            .await?;
    script.say([Says::Text("Aye.")]);
    say(user("Go on.")).await?;
    let there = ["Forty ships were counted.", "Call me Bob.", "No, Eve.", "Go on."];
    check_heard(&script, &there, &["writes their names", "Summarize"]);
    // Without one of its items no response stands for the conversation: all items are read again.
    let removed = format!("{path}/{}", added["data"][0]["id"].as_str().context("an id")?);
    ask::json(address, "DELETE", &removed, &Value::Null).await?;
    script.say([Says::Text("Aye.")]);
    say(user("And now?")).await?;
    let there = ["Forty ships were counted.", "No, Eve.", "Go on.", "Aye.", "And now?"];
    check_heard(&script, &there, &["writes their names", "Summarize", "Call me Bob."]);
    // One that is made beside the conversation leaves it as it is.
    let (_, before) = ask::json(address, "GET", &path, &Value::Null).await?;
    script.say([Says::Text("Eve counts ships.")]);
    let model = ask::body("");
    let compact = json!({"model": model["model"], "conversation": made["id"]});
    let (status, compacted) = ask::json(address, "POST", "/v1/responses/compact", &compact).await?;
    assert_eq!(status, 200, "{compacted}");
    assert_eq!(ask::json(address, "GET", &path, &Value::Null).await?.1, before);
    Ok(())
}

#[tokio::test]
async fn what_a_summary_does_not_shorten_stays_as_it_is() -> anyhow::Result<()> {
    let script = Script::default();
    let cluster = script.cluster(Spec::aggregated(0)).await?;
    let address = cluster.address();
    let input =
        json!([user("My name is Ada."), {"role": "assistant", "content": "OK."}, user("What is it?")]);
    let managed =
        json!({"context_management": [{"type": "compaction", "compact_threshold": 20}], "store": false});
    script.say([Says::Text(
        "The user is called Ada, which she has told, and nothing else was said by anybody here.",
    )]);
    script.say([Says::Text("Ada.")]);
    let answered = ask::whole(address, &asked(input, managed)).await?;
    assert_eq!(answered["output"][0]["type"], "message", "{answered}");
    check_heard(&script, &["My name is Ada.", "OK.", "What is it?"], &["nothing else was said"]);
    // There must be something to sum up.
    let nothing = [json!([]), json!([rules()])];
    for input in nothing {
        let body = json!({"model": ask::body("")["model"], "input": input});
        let (status, refused) = ask::json(address, "POST", "/v1/responses/compact", &body).await?;
        assert_eq!((status, &refused["error"]["param"]), (400, &json!("input")), "{refused}");
    }
    let trigger = with(create(json!([{"type": "compaction_trigger"}])), json!({"store": false}));
    assert_eq!(ask::json(address, "POST", "/v1/responses", &trigger).await?.0, 400);
    Ok(())
}

//! What is read out of a recording, and what is put in place of its ids.

use serde_json::{Value, json};

use super::Given;
use crate::conformance::recording::{Answer, Recording, Step};

/// Each step in a word: frames with the calls their answers must have.
fn story(name: &str) -> Vec<String> {
    let recording = Recording::small(name).unwrap();
    let word = |step: &Step| match step {
        Step::Connect => "connect".to_owned(),
        Step::Leave => "leave".to_owned(),
        Step::Frame { answer, .. } if answer.abandoned => "abandoned".to_owned(),
        Step::Frame { frame, .. } if frame["generate"] == false => "warm-up".to_owned(),
        Step::Frame { answer, .. } => format!("frame, {} calls", answer.calls.len()),
        Step::Request { method, answer, .. } => format!("{method}, {} calls", answer.calls.len()),
    };
    recording.steps.iter().map(word).collect()
}

#[test]
fn recordings_are_read_as_they_happened() {
    let call = "frame, 1 calls";
    let text = "frame, 0 calls";
    assert_eq!(story("codex_ws_tool_small_config"), ["connect", "warm-up", call, text, "leave"]);
    assert_eq!(story("codex_ws_parallel_calls"), ["connect", "warm-up", "frame, 2 calls", text, "leave"]);
    assert_eq!(
        story("codex_ws_multi_turn_and_interrupt"),
        ["connect", "warm-up", text, text, "abandoned", "leave", "connect", text, "leave"]
    );
    assert_eq!(
        story("codex_ws_remote_compaction_v2")[..5],
        ["connect", "warm-up", call, text, text],
        "an output stands before a trigger too"
    );
    assert_eq!(
        story("agents_python_http"),
        ["POST, 1 calls", "POST, 0 calls", "POST, 1 calls", "POST, 0 calls"]
    );
    assert_eq!(story("codex_ws_custom_tool_apply_patch")[2], call);
}

fn called(given: &mut Given, answer: &Answer) {
    let ours = json!({"id": "resp_ours", "output": [
        {"type": "function_call", "id": "fc_ours", "call_id": "call_ours", "name": "say", "arguments": "{\"a\": 1}"},
    ]});
    given.learn(&ours, answer).unwrap();
}

fn answer(calls: &[&str]) -> Answer {
    let item = json!({"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "say"});
    Answer {
        response_id: Some("resp_1".to_owned()),
        items: vec![item],
        calls: calls.iter().map(|call| (*call).to_owned()).collect(),
        ..Answer::default()
    }
}

#[test]
fn a_call_that_was_made_is_forced() {
    let given = Given::default();
    let frame =
        json!({"input": "Hello", "tools": [{"type": "function", "name": "say"}], "tool_choice": "auto"});
    let forced = given.prepare(&frame, &answer(&["call_1"]));
    assert_eq!(forced["tool_choice"], json!({"type": "function", "name": "say"}));
    assert_eq!(given.prepare(&frame, &answer(&[]))["tool_choice"], "auto");
}

#[test]
fn ids_are_those_of_this_server() {
    let mut given = Given::default();
    called(&mut given, &answer(&["call_1", "call_2"]));
    let output = |call: &str| json!({"type": "function_call_output", "call_id": call, "output": "x"});
    let next = json!({"previous_response_id": "resp_1", "input": [output("call_1"), output("call_2")]});
    let next = given.prepare(&next, &Answer::default());
    assert_eq!(next["previous_response_id"], "resp_ours");
    assert_eq!(next["input"], json!([output("call_ours")]), "the second call was not made here");
    let call = json!({"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "say", "arguments": "{}",
                      "status": "completed"});
    let whole = json!({"input": [{"role": "user", "content": "Hello"}, call, output("call_1")]});
    let whole = given.prepare(&whole, &Answer::default());
    let item = &whole["input"][1];
    assert_eq!((&item["id"], &item["call_id"]), (&json!("fc_ours"), &json!("call_ours")));
    assert_eq!((&item["arguments"], &item["status"]), (&json!("{\"a\": 1}"), &json!("completed")));
    assert_eq!(whole["input"][2]["call_id"], "call_ours");
}

#[test]
fn an_id_that_was_not_recorded_is_the_newest() {
    let mut given = Given::default();
    let unseen = Answer { calls: vec!["call_9".to_owned()], ..Answer::default() };
    called(&mut given, &unseen);
    let next = json!({"previous_response_id": "resp_7", "input": [
        {"type": "function_call_output", "call_id": "call_9", "output": "x"},
    ]});
    let next: Value = given.prepare(&next, &Answer::default());
    assert_eq!(
        (&next["previous_response_id"], &next["input"][0]["call_id"]),
        (&json!("resp_ours"), &json!("call_ours"))
    );
}

#[test]
fn a_call_that_was_not_made_is_noticed() {
    let text = json!({"id": "resp_ours", "output": [{"type": "message", "id": "msg_ours", "content": []}]});
    assert!(Given::default().learn(&text, &answer(&["call_1"])).is_err());
    assert!(Given::default().learn(&text, &answer(&[])).is_ok());
}

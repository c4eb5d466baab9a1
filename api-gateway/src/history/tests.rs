use serde_json::value::RawValue;

use super::*;
use crate::wire::{Status, parse_items};

fn input(json: &str) -> Vec<Entry> {
    let raw = RawValue::from_string(json.to_owned()).expect("JSON");
    let items = parse_items(Some(&raw), "input").expect("items");
    items.iter().map(|item| Entry::of_input(item, |prefix| format!("{prefix}_new"))).collect()
}

fn output(body: Body) -> Entry {
    Entry::of_output(&OutputItem { id: "x_1".into(), status: Status::Completed, body })
}

fn start() -> History {
    History::new(ContentHash::start("me", Some("Be brief."), &Tools::none()))
}

#[test]
fn what_a_client_repeats_has_the_name_of_what_was_said() {
    let mut said = start();
    said.append(input(r#"[{"role":"user","content":"list"}]"#));
    let arguments = "{\"path\": \".\"}".to_owned();
    said.append(vec![
        output(Body::Reasoning { text: "Hm.".into(), shown: crate::wire::Shown::Nothing, sealed: None }),
        output(Body::Message { text: "I look.".into(), logprobs: Vec::new() }),
        output(Body::Call {
            call_id: "call_1".into(),
            name: "ls".into(),
            namespace: Some("fs".into()),
            arguments,
        }),
    ]);
    let repeated = input(
        r#"[{"type":"message","role":"user","content":[{"type":"input_text","text":"list"}]},
            {"type":"message","id":"msg_7","status":"completed","role":"assistant",
             "content":[{"type":"output_text","text":"I look.","annotations":[]}]},
            {"type":"function_call","call_id":"call_1","namespace":"fs","name":"ls","arguments":"{\"path\": \".\"}"},
            {"type":"function_call_output","call_id":"call_1","output":"a b"}]"#,
    );
    let contents = start().contents_with(&repeated);
    assert_eq!(
        contents.iter().rposition(|content| *content == said.content()),
        Some(3),
        "all but the result"
    );
    let other = History::new(ContentHash::start("you", Some("Be brief."), &Tools::none()));
    assert!(!other.contents_with(&repeated).contains(&said.content()), "tenants share nothing");
}

#[test]
fn calls_are_found_and_items_keep_their_order() {
    let mut history = start();
    assert_eq!((history.len(), history.entries().len()), (0, 0));
    history.append(input(
        r#"[{"role":"user","content":"a"},{"type":"custom_tool_call","call_id":"c","name":"p","input":"x"}]"#,
    ));
    history.append(input(r#"[{"type":"custom_tool_call_output","call_id":"c","output":"y","id":"ctco_1"}]"#));
    let ids: Vec<&str> = history.entries().iter().map(|entry| entry.id.as_str()).collect();
    assert_eq!(ids, ["msg_new", "ctc_new", "ctco_1"]);
    assert!(history.has_call("c") && !history.has_call("d"));
    assert_eq!(
        history.newest(2).iter().map(|entry| entry.id.as_str()).collect::<Vec<_>>(),
        ["ctc_new", "ctco_1"]
    );
}

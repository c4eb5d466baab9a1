//! Streams and objects that violate one rule each, and that must be caught for that very rule.

use serde_json::{Value, json};

use super::{Checked, Fault, Rule, Stream};

mod objects;
mod streams;

const RESPONSE: &str = "resp_0123456789abcdef01234567";
const MESSAGE: &str = "msg_0123456789abcdef01234567";
const CALL: &str = "fc_0123456789abcdef01234567";
const CALL_ID: &str = "call_0123456789abcdef01234567";
const REASONING: &str = "rs_0123456789abcdef01234567";

fn usage(output: u64) -> Value {
    json!({
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 30 + output,
    })
}

/// A complete response that has not begun.
fn fresh() -> Value {
    json!({
        "id": RESPONSE, "object": "response", "created_at": 1_700_000_000, "completed_at": null,
        "status": "in_progress", "background": false, "error": null, "incomplete_details": null,
        "instructions": null, "max_output_tokens": null, "max_tool_calls": null, "model": "a-model", "output": [],
        "parallel_tool_calls": true, "previous_response_id": null, "prompt_cache_key": null,
        "reasoning": {"effort": null, "summary": null}, "safety_identifier": null, "service_tier": "default",
        "store": true, "temperature": 1.0, "text": {"format": {"type": "text"}}, "tool_choice": "auto",
        "tools": [], "top_p": 1.0, "top_logprobs": 0, "truncation": "disabled", "usage": null, "metadata": {},
        "presence_penalty": 0.0, "frequency_penalty": 0.0,
    })
}

fn completed(output: Value) -> Value {
    let mut response = fresh();
    response["status"] = "completed".into();
    response["completed_at"] = 1_700_000_009.into();
    response["output"] = output;
    response["usage"] = usage(9);
    response
}

fn message_item() -> Value {
    let part = json!({"type": "output_text", "text": "Hello there", "annotations": [], "logprobs": []});
    json!({"type": "message", "id": MESSAGE, "status": "completed", "role": "assistant", "content": [part]})
}

fn call_item() -> Value {
    json!({
        "type": "function_call", "id": CALL, "call_id": CALL_ID, "name": "get_weather",
        "arguments": "{\"city\": \"Oslo\"}", "status": "completed",
    })
}

fn message_events(output_index: u64) -> Vec<Value> {
    let at = |kind: &str, more: Value| {
        let mut event = json!({
            "type": kind, "item_id": MESSAGE, "output_index": output_index, "content_index": 0,
        });
        if let (Value::Object(event), Value::Object(more)) = (&mut event, more) {
            event.extend(more);
        }
        event
    };
    let empty = json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []});
    let start = json!({"type": "message", "id": MESSAGE, "status": "in_progress", "role": "assistant", "content": []});
    vec![
        json!({"type": "response.output_item.added", "output_index": output_index, "item": start}),
        at("response.content_part.added", json!({"part": empty})),
        at("response.output_text.delta", json!({"delta": "Hello ", "logprobs": []})),
        at("response.output_text.delta", json!({"delta": "there", "logprobs": []})),
        at("response.output_text.done", json!({"text": "Hello there", "logprobs": []})),
        at("response.content_part.done", json!({"part": message_item()["content"][0]})),
        json!({"type": "response.output_item.done", "output_index": output_index, "item": message_item()}),
    ]
}

fn call_events(output_index: u64) -> Vec<Value> {
    let mut start = call_item();
    start["arguments"] = "".into();
    start["status"] = "in_progress".into();
    let delta = |delta: &str| {
        json!({
            "type": "response.function_call_arguments.delta", "item_id": CALL, "output_index": output_index,
            "delta": delta,
        })
    };
    vec![
        json!({"type": "response.output_item.added", "output_index": output_index, "item": start}),
        delta("{\"city\": "),
        delta("\"Oslo\"}"),
        json!({
            "type": "response.function_call_arguments.done", "item_id": CALL, "output_index": output_index,
            "arguments": "{\"city\": \"Oslo\"}", "name": "get_weather",
        }),
        json!({"type": "response.output_item.done", "output_index": output_index, "item": call_item()}),
    ]
}

fn reasoning_events() -> Vec<Value> {
    let at = |kind: &str, field: &str, value: Value| json!({"type": kind, "item_id": REASONING, "output_index": 0, "summary_index": 0, field: value});
    let part = |text: &str| json!({"type": "summary_text", "text": text});
    let item = |summary: Value| json!({"type": "reasoning", "id": REASONING, "summary": summary});
    vec![
        json!({"type": "response.output_item.added", "output_index": 0, "item": item(json!([]))}),
        at("response.reasoning_summary_part.added", "part", part("")),
        at("response.reasoning_summary_text.delta", "delta", "Hm.".into()),
        at("response.reasoning_summary_text.done", "text", "Hm.".into()),
        at("response.reasoning_summary_part.done", "part", part("Hm.")),
        json!({"type": "response.output_item.done", "output_index": 0, "item": item(json!([part("Hm.")]))}),
    ]
}

/// Puts items between the start and the end of a response.
fn whole(items: &[Vec<Value>]) -> Vec<Value> {
    let mut events = vec![
        json!({"type": "response.created", "response": fresh()}),
        json!({"type": "response.in_progress", "response": fresh()}),
    ];
    events.extend(items.concat());
    let done = events.iter().filter(|event| event["type"] == "response.output_item.done");
    let output: Vec<Value> = done.map(|event| event["item"].clone()).collect();
    events.push(json!({"type": "response.completed", "response": completed(json!(output))}));
    number(&mut events);
    events
}

fn number(events: &mut [Value]) {
    for (number, event) in events.iter_mut().enumerate() {
        event["sequence_number"] = number.into();
    }
}

fn run(mut stream: Stream, events: &[Value]) -> Checked {
    events.iter().try_for_each(|event| stream.feed(event))?;
    stream.end()
}

/// What a change of a good stream violates.
#[track_caller]
fn violates(rule: Rule, mut events: Vec<Value>, change: impl FnOnce(&mut Vec<Value>)) {
    change(&mut events);
    number(&mut events);
    caught(rule, run(Stream::new(), &events));
}

#[track_caller]
fn caught(rule: Rule, checked: Checked) {
    match checked {
        Err(fault) => assert_eq!(fault.rule, rule, "{fault}"),
        Ok(()) => panic!("{rule:?} was violated, and nobody saw it"),
    }
}

/// The first event of a kind.
fn first<'a>(events: &'a mut [Value], kind: &str) -> &'a mut Value {
    let found = events.iter_mut().find(|event| event["type"] == kind);
    found.expect("the stream has such an event")
}

fn remove(events: &mut Vec<Value>, kind: &str) {
    let at = events.iter().position(|event| event["type"] == kind);
    drop(events.remove(at.expect("the stream has such an event")));
}

/// Takes a field away.
fn without(object: &mut Value, field: &str) {
    let removed = object.as_object_mut().and_then(|object| object.remove(field));
    assert!(removed.is_some(), "{field} was not there");
}

#[test]
fn a_fault_names_its_rule() {
    let fault = Fault { rule: Rule::Deltas, why: "they differ".to_owned() };
    assert_eq!(fault.to_string(), "Deltas: they differ");
}

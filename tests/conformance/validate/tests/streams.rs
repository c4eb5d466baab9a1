//! Streams with one thing wrong.

use serde_json::{Value, json};

use super::{
    CALL, RESPONSE, call_events, caught, completed, first, fresh, message_events, number, reasoning_events,
    remove, run, violates, whole, without,
};
use crate::conformance::validate::{Rule, Stream, answer};

fn text() -> Vec<Value> {
    whole(&[message_events(0)])
}

fn call() -> Vec<Value> {
    whole(&[call_events(0)])
}

#[test]
fn good_streams_pass() {
    run(Stream::new(), &text()).unwrap();
    run(Stream::new(), &call()).unwrap();
    run(Stream::new(), &whole(&[reasoning_events(), message_events(1), call_events(2)])).unwrap();
    run(Stream::new(), &whole(&[])).unwrap();
    let mut beating = text();
    beating.insert(5, json!({"type": "response.in_progress", "response": fresh()}));
    number(&mut beating);
    run(Stream::new(), &beating).unwrap();
}

#[test]
fn numbers_have_no_gaps() {
    let mut events = text();
    events[4]["sequence_number"] = 5.into();
    caught(Rule::SequenceNumber, run(Stream::new(), &events));
    let mut events = text();
    events
        .iter_mut()
        .for_each(|event| event["sequence_number"] = (event["sequence_number"].as_u64().unwrap() + 1).into());
    caught(Rule::SequenceNumber, run(Stream::new(), &events));
}

#[test]
fn a_response_begins_and_ends_once() {
    violates(Rule::CreatedFirst, text(), |events| drop(events.remove(0)));
    violates(Rule::CreatedFirst, text(), |events| events.insert(1, events[0].clone()));
    violates(Rule::InProgressMissing, text(), |events| drop(events.remove(1)));
    violates(Rule::TerminalMissing, text(), |events| drop(events.pop()));
    violates(Rule::AfterTerminal, text(), |events| events.push(events[1].clone()));
    violates(Rule::AfterTerminal, text(), |events| events.push(events[events.len() - 1].clone()));
    violates(Rule::UnknownEvent, text(), |events| events.insert(3, json!({"type": "baton.turn"})));
    violates(Rule::ErrorAfterCreated, text(), |events| {
        let error = json!({"type": "server_error", "code": "server_error", "message": "no"});
        events.insert(3, json!({"type": "error", "status": 500, "error": error}));
    });
}

#[test]
fn a_response_stays_itself() {
    violates(Rule::ResponseChanged, text(), |events| {
        events[1]["response"]["id"] = "resp_aaaaaaaaaaaaaaaaaaaaaaaa".into();
    });
    violates(Rule::ResponseChanged, text(), |events| {
        first(events, "response.completed")["response"]["temperature"] = 0.5.into();
    });
    violates(Rule::Status, text(), |events| {
        let ended = first(events, "response.completed");
        ended["response"]["status"] = "incomplete".into();
        ended["response"]["incomplete_details"] = json!({"reason": "max_output_tokens"});
    });
    violates(Rule::Status, text(), |events| events[1]["response"]["status"] = "queued".into());
    violates(Rule::Status, text(), |events| events[0]["response"]["output"] = json!([super::message_item()]));
    violates(Rule::Status, text(), |events| {
        first(events, "response.completed")["response"]["completed_at"] = Value::Null;
    });
}

#[test]
fn lanes_are_named() {
    let request = json!({"stream_id": "main"});
    let named = |name: Option<&str>| {
        let mut events = text();
        for event in &mut events {
            if let Some(name) = name {
                event["stream_id"] = name.into();
            }
        }
        events
    };
    run(Stream::answering(&request), &named(Some("main"))).unwrap();
    caught(Rule::StreamId, run(Stream::answering(&request), &named(None)));
    caught(Rule::StreamId, run(Stream::answering(&request), &named(Some("other"))));
    caught(Rule::StreamId, run(Stream::new(), &named(Some("main"))));
    let mut null = text();
    null[0]["stream_id"] = Value::Null;
    caught(Rule::StreamId, run(Stream::new(), &null));
}

#[test]
fn items_come_one_after_the_other() {
    let two = || whole(&[message_events(0), call_events(1)]);
    run(Stream::new(), &two()).unwrap();
    violates(Rule::OutputIndex, two(), |events| events[9]["output_index"] = 2.into());
    violates(Rule::OutputIndex, two(), |events| events[4]["output_index"] = 1.into());
    violates(Rule::ItemOverlap, two(), |events| {
        let added = events.remove(9);
        events.insert(4, added);
    });
    violates(Rule::ItemId, two(), |events| events[4]["item_id"] = CALL.into());
    violates(Rule::ItemId, two(), |events| events.insert(2, events[4].clone()));
    violates(Rule::ItemId, two(), |events| drop(events.remove(2)));
    violates(Rule::ItemLeftOpen, text(), |events| remove(events, "response.output_item.done"));
    violates(Rule::IdReused, whole(&[call_events(0), call_events(1)]), |_| {});
}

#[test]
fn an_interrupted_item_is_dropped() {
    let mut events = whole(&[message_events(0), call_events(1)]);
    events.truncate(11);
    let mut response = completed(json!([super::message_item()]));
    response["status"] = "incomplete".into();
    response["incomplete_details"] = json!({"reason": "interrupted"});
    events.push(json!({"type": "response.incomplete", "response": response}));
    number(&mut events);
    run(Stream::new(), &events).unwrap();
}

#[test]
fn an_item_keeps_what_it_began_with() {
    violates(Rule::ItemStart, text(), |events| events[2]["item"]["content"] = json!([super::message_item()]));
    violates(Rule::ItemStart, text(), |events| events[2]["item"]["status"] = "completed".into());
    violates(Rule::ItemStart, text(), |events| events[3]["part"]["text"] = "Hello".into());
    violates(Rule::ItemStart, call(), |events| events[2]["item"]["arguments"] = "{".into());
    violates(Rule::ItemChanged, call(), |events| {
        first(events, "response.output_item.done")["item"]["call_id"] =
            "call_aaaaaaaaaaaaaaaaaaaaaaaa".into();
    });
    violates(Rule::ItemChanged, text(), |events| {
        first(events, "response.output_item.done")["item"]["id"] = "msg_aaaaaaaaaaaaaaaaaaaaaaaa".into();
    });
    violates(Rule::ItemChanged, call(), |events| {
        first(events, "response.function_call_arguments.done")["name"] = "other".into();
    });
}

#[test]
fn parts_open_and_close() {
    violates(Rule::PartIndex, text(), |events| events[3]["content_index"] = 1.into());
    violates(Rule::PartIndex, text(), |events| events[4]["content_index"] = 1.into());
    violates(Rule::PartOrder, text(), |events| remove(events, "response.content_part.added"));
    violates(Rule::PartOrder, text(), |events| remove(events, "response.content_part.done"));
    violates(Rule::PartOrder, text(), |events| events.insert(7, events[5].clone()));
    violates(Rule::PartOrder, text(), |events| events.insert(4, events[3].clone()));
    violates(Rule::DoneMissing, text(), |events| remove(events, "response.output_text.done"));
    violates(Rule::DoneMissing, call(), |events| remove(events, "response.function_call_arguments.done"));
    violates(Rule::PartOrder, whole(&[reasoning_events()]), |events| {
        remove(events, "response.reasoning_summary_part.added");
    });
    violates(Rule::DoneMissing, whole(&[reasoning_events()]), |events| {
        remove(events, "response.reasoning_summary_text.done");
    });
}

#[test]
fn deltas_add_up() {
    violates(Rule::Deltas, text(), |events| remove(events, "response.output_text.delta"));
    violates(Rule::Deltas, text(), |events| {
        first(events, "response.output_text.done")["text"] = "Hello".into();
    });
    violates(Rule::Deltas, text(), |events| {
        first(events, "response.content_part.done")["part"]["text"] = "Hello".into();
    });
    violates(Rule::DoneItem, text(), |events| {
        first(events, "response.output_item.done")["item"]["content"][0]["text"] = "Hello".into();
    });
    violates(Rule::Output, text(), |events| {
        first(events, "response.completed")["response"]["output"][0]["content"][0]["text"] = "Hello".into();
    });
    violates(Rule::Output, text(), |events| {
        first(events, "response.completed")["response"]["output"] = json!([]);
    });
    violates(Rule::Deltas, call(), |events| remove(events, "response.function_call_arguments.delta"));
    violates(Rule::DoneItem, call(), |events| {
        first(events, "response.output_item.done")["item"]["arguments"] = "{}".into();
    });
    violates(Rule::DoneItem, whole(&[reasoning_events()]), |events| {
        first(events, "response.output_item.done")["item"]["summary"] = json!([]);
    });
}

#[test]
fn events_have_their_fields() {
    for (field, at) in
        [("delta", 4), ("logprobs", 4), ("text", 6), ("part", 7), ("item_id", 4), ("content_index", 4)]
    {
        violates(Rule::Field, text(), |events| without(&mut events[at], field));
    }
    for (field, at) in [("arguments", 5), ("name", 5), ("delta", 3), ("output_index", 3)] {
        violates(Rule::Field, call(), |events| without(&mut events[at], field));
    }
    violates(Rule::Obfuscation, text(), |events| events[4]["obfuscation"] = "xyz".into());
}

#[test]
fn ids_have_their_form() {
    for id in
        ["call_0123456789abcdef01234567", "resp_", "resp_short", "resp_0123456789abcdef0123456789abcdef0"]
    {
        violates(Rule::Id, text(), |events| {
            events.iter_mut().filter(|event| event.get("response").is_some()).for_each(|event| {
                event["response"]["id"] = id.into();
            });
        });
    }
    violates(Rule::Id, text(), |events| events[2]["item"]["id"] = "item_0123456789abcdef01234567".into());
    violates(Rule::Id, call(), |events| events[2]["item"]["call_id"] = "1".into());
}

#[test]
fn finished_items_are_complete() {
    violates(Rule::Arguments, call(), |events| {
        let broken = "{\"city\": ";
        first(events, "response.function_call_arguments.done")["arguments"] = broken.into();
        events.remove(4);
        first(events, "response.output_item.done")["item"]["arguments"] = broken.into();
    });
    violates(Rule::NullEncryptedContent, whole(&[reasoning_events()]), |events| {
        first(events, "response.output_item.done")["item"]["encrypted_content"] = Value::Null;
    });
    violates(Rule::Item, text(), |events| events[2]["item"]["type"] = "web_search_call".into());
    violates(Rule::Field, text(), |events| {
        first(events, "response.output_item.done")["item"]["status"] = "in_progress".into();
    });
}

#[test]
fn an_error_stands_for_a_whole_response() {
    let error =
        json!({"type": "invalid_request_error", "code": "previous_response_not_found", "message": "no"});
    let frame = json!({"type": "error", "status": 400, "error": error});
    run(Stream::new(), std::slice::from_ref(&frame)).unwrap();
    run(Stream::answering(&json!({"stream_id": "a"})), &[with(&frame, "stream_id", "a".into())]).unwrap();
    caught(Rule::StreamId, run(Stream::answering(&json!({"stream_id": "a"})), std::slice::from_ref(&frame)));
    let mut silent = frame.clone();
    without(&mut silent, "status");
    caught(Rule::Error, run(Stream::new(), &[silent]));
    caught(Rule::Error, run(Stream::new(), &[with(&frame, "status", 404.into())]));
    caught(Rule::AfterTerminal, run(Stream::new(), &[frame.clone(), frame]));
}

#[test]
fn a_response_says_what_was_asked_for() {
    let request = json!({"input": "Hello", "model": "a-model"});
    answer(&request, &text()).unwrap();
    for (field, value) in [
        ("instructions", json!("Be brief.")),
        ("store", json!(false)),
        ("temperature", json!(0.5)),
        ("previous_response_id", json!(RESPONSE)),
        ("metadata", json!({"a": "b"})),
        ("text", json!({"format": {"type": "json_object"}})),
    ] {
        caught(Rule::Echo, answer(&with(&request, field, value), &text()));
    }
    let tool = json!({"type": "function", "name": "get_weather", "parameters": {"type": "object"}});
    let request = with(&request, "tools", json!([tool]));
    caught(Rule::Tools, answer(&request, &text()));
    let mut events = text();
    for event in events.iter_mut().filter(|event| event.get("response").is_some()) {
        let echo = json!({"description": null, "strict": null, "type": "function", "name": "get_weather",
                          "parameters": {"type": "object"}});
        event["response"]["tools"] = json!([echo]);
    }
    answer(&request, &events).unwrap();
    for event in events.iter_mut().filter(|event| event.get("response").is_some()) {
        without(&mut event["response"]["tools"][0], "strict");
    }
    caught(Rule::Tools, answer(&request, &events));
}

fn with(object: &Value, field: &str, value: Value) -> Value {
    let mut object = object.clone();
    object[field] = value;
    object
}

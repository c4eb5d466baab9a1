use std::time::Duration;

use super::{Request, Target, first_model, read_event};
use crate::record::Record;

#[test]
fn reads_the_first_model_of_plain_and_chunked_answers() {
    let json = r#"{"object":"list","data":[{"id":"small"},{"id":"large"}]}"#;
    let plain = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{json}", json.len());
    let chunked = format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3c\r\n{json}\r\n0\r\n\r\n");
    for answer in [plain, chunked] {
        assert_eq!(first_model(&answer).as_deref(), Ok("small"));
    }
    for wrong in [
        "",
        "HTTP/1.1 404 Not Found\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\n\r\n{\"data\":[]}",
        "HTTP/1.1 200 OK\r\n\r\nhi",
    ] {
        assert!(first_model(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn refuses_addresses_that_are_no_web_sockets() {
    assert!(Target::new("ws://127.0.0.1:8080/v1/responses").is_ok());
    for wrong in ["", "http://127.0.0.1/", "wss://somewhere/", "127.0.0.1:8080", "ws:///v1"] {
        assert!(Target::new(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn a_continued_turn_carries_only_what_is_new() {
    let opening = Request {
        model: "m",
        system: "rules",
        text: "hello",
        previous_response_id: None,
        max_output_tokens: 8,
        temperature: 0.0,
    };
    let frame: serde_json::Value = serde_json::from_str(&opening.frame()).unwrap();
    assert_eq!(frame["input"][0]["content"], "rules");
    assert_eq!(frame["input"][1]["content"], "hello");
    let next = Request { previous_response_id: Some("resp_1"), text: "more", ..opening };
    let frame: serde_json::Value = serde_json::from_str(&next.frame()).unwrap();
    assert_eq!(frame["previous_response_id"], "resp_1");
    assert_eq!(frame["input"], serde_json::json!([{"role": "user", "content": "more"}]));
}

/// The outcome of one event.
fn check(event: &str, expected: Option<Result<&str, &str>>) {
    let outcome = read_event(event, Duration::ZERO, &mut Record::default());
    let outcome = outcome.as_ref().map(|end| end.as_ref().map(String::as_str).map_err(String::as_str));
    assert_eq!(outcome, expected, "{event}");
}

#[test]
fn tells_how_a_response_ended() {
    check(r#"{"type":"response.created","response":{"id":"r"}}"#, None);
    check(r#"{"type":"response.completed","response":{"id":"r","usage":null}}"#, Some(Ok("r")));
    let cut = r#"{"type":"response.incomplete","response":{"id":"r","incomplete_details":{"reason":"max_output_tokens"}}}"#;
    check(cut, Some(Ok("r")));
    check(&cut.replace("max_output_tokens", "content_filter"), Some(Err("incomplete: content_filter")));
    check(r#"{"type":"error","status":503,"error":{"code":"overloaded"}}"#, Some(Err("overloaded")));
    check(
        r#"{"type":"response.failed","response":{"id":"r","error":{"code":"server_error"}}}"#,
        Some(Err("server_error")),
    );
    check("no JSON", Some(Err("protocol")));
}

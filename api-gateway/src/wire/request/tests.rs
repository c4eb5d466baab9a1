use model::chat_template::Role;

use super::*;
use crate::wire::InputKind;

fn error_of(body: &str) -> (u16, &'static str, Option<String>) {
    let error = parse_body(body.as_bytes()).expect_err(body);
    (error.status, error.code, error.param)
}

#[test]
fn each_bad_field_is_named_with_its_fault() {
    let cases = [
        ("{", "invalid_json", None),
        ("[]", "invalid_json", None),
        (r#"{"model":"m"}"#, "missing_required_parameter", Some("input")),
        (r#"{"model":7,"input":"x"}"#, "invalid_type", Some("model")),
        (r#"{"input":7}"#, "invalid_value", Some("input")),
        (r#"{"input":[7]}"#, "invalid_value", Some("input[0]")),
        (r#"{"input":[{"role":"user"}]}"#, "missing_required_parameter", Some("input[0].content")),
        (r#"{"input":[{"role":"robot","content":""}]}"#, "invalid_value", Some("input[0].role")),
        (
            r#"{"input":[{"type":"function_call_output","call_id":"c"}]}"#,
            "missing_required_parameter",
            Some("input[0].output"),
        ),
        (
            r#"{"input":[{"type":"function_call","call_id":"c","arguments":"{}"}]}"#,
            "missing_required_parameter",
            Some("input[0].name"),
        ),
        (
            r#"{"input":[{"role":"user","content":[{"type":"input_audio"}]}]}"#,
            "unsupported_parameter",
            Some("input[0].content[0].type"),
        ),
        (r#"{"input":"x","temperature":3}"#, "invalid_value", Some("temperature")),
        (r#"{"input":"x","temperature":"hot"}"#, "invalid_type", Some("temperature")),
        (r#"{"input":"x","top_p":-0.1}"#, "invalid_value", Some("top_p")),
        (r#"{"input":"x","max_output_tokens":0}"#, "invalid_value", Some("max_output_tokens")),
        (r#"{"input":"x","max_output_tokens":-4}"#, "invalid_type", Some("max_output_tokens")),
        (r#"{"input":"x","tools":{}}"#, "invalid_type", Some("tools")),
        (r#"{"input":"x","tool_choice":"must"}"#, "invalid_value", Some("tool_choice")),
        (
            r#"{"input":"x","tool_choice":{"type":"function"}}"#,
            "missing_required_parameter",
            Some("tool_choice.name"),
        ),
        (r#"{"input":"x","text":{"format":{"type":"xml"}}}"#, "invalid_value", Some("text.format.type")),
        (
            r#"{"input":"x","text":{"format":{"type":"json_schema"}}}"#,
            "missing_required_parameter",
            Some("text.format.schema"),
        ),
        (r#"{"input":"x","conversation":7}"#, "invalid_type", Some("conversation")),
        (
            r#"{"input":"x","conversation":"c","previous_response_id":"r"}"#,
            "invalid_value",
            Some("conversation"),
        ),
        (r#"{"input":"x","background":true,"store":false}"#, "invalid_value", Some("background")),
        (r#"{"input":"x","truncation":"some"}"#, "invalid_value", Some("truncation")),
        (r#"{"input":"x","top_logprobs":21}"#, "invalid_value", Some("top_logprobs")),
        (r#"{"input":"x","metadata":{"a":1}}"#, "invalid_type", Some("metadata")),
    ];
    for (body, code, param) in cases {
        assert_eq!(error_of(body), (400, code, param.map(str::to_owned)), "{body}");
    }
}

#[test]
fn what_clients_send_besides_is_taken_or_ignored() {
    let frame = r#"{"type":"response.create","model":"m","stream":true,"client_metadata":{"a":"b"},"unknown":[1],
        "tools":[{"type":"web_search"}],"reasoning":{},"include":["reasoning.encrypted_content"],"text":{"verbosity":"low"},
        "input":[{"role":"developer","content":"d"},{"type":"reasoning","summary":[]},
                 {"type":"message","role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_text","text":"b"}]}]}"#;
    let Ok(ClientEvent::Create { lane: None, create }) = parse_frame(frame) else { panic!("a create") };
    let read: Vec<Option<(Role, &str)>> = create
        .input
        .iter()
        .map(|item| match &item.kind {
            InputKind::Message(message) => Some((message.role, message.content.text())),
            _ => None,
        })
        .collect();
    assert_eq!(read, [Some((Role::Developer, "d")), None, Some((Role::User, "ab"))]);
    assert!(create.store && create.generate && !create.include.baton);
}

#[test]
fn absent_null_and_given_settings_are_told_apart() {
    let of = |rest: &str| {
        let frame = format!(r#"{{"type":"response.create","input":"x"{rest}}}"#);
        match parse_frame(&frame).expect("a frame") {
            ClientEvent::Create { create, .. } => create.instructions,
            _ => panic!("a create"),
        }
    };
    assert_eq!(of(""), Setting::Absent);
    assert_eq!(of(r#","instructions":null"#), Setting::Null);
    assert_eq!(of(r#","instructions":"be \"brief\"""#), Setting::Given("be \"brief\"".into()));
}

#[test]
fn a_nested_response_object_is_read_like_a_flat_one() {
    let frame = r#"{"type":"response.create","response":{"model":"m","input":"x","generate":false}}"#;
    let Ok(ClientEvent::Create { create, .. }) = parse_frame(frame) else { panic!("a create") };
    assert_eq!((create.model.as_deref(), create.generate), (Some("m"), false));
}

#[test]
fn lanes_have_names_of_a_few_characters() {
    let lane = |name: &str| {
        let frame = format!(r#"{{"type":"response.create","stream_id":{name},"input":"x"}}"#);
        match parse_frame(&frame) {
            Ok(ClientEvent::Create { lane, .. }) => Ok(lane.map(String::from)),
            Ok(_) => panic!("a create"),
            Err(error) => Err(error.code),
        }
    };
    assert_eq!(lane("null"), Ok(None));
    assert_eq!(lane("\"a.B-3_\""), Ok(Some("a.B-3_".into())));
    let long = format!("\"{}\"", "x".repeat(257));
    for bad in ["\"\"", "\"a b\"", "7", "\"é\"", &long] {
        assert_eq!(lane(bad), Err("invalid_stream_id"), "{bad}");
    }
}

#[test]
fn other_frames_are_known_or_refused() {
    let partial = |frame: &str| match parse_frame(frame) {
        Ok(ClientEvent::Stop { partial, .. }) => Some(partial),
        _ => None,
    };
    assert_eq!(partial(r#"{"type":"response.cancel","response_id":"r"}"#), Some(Partial::Keep));
    let interrupt = r#"{"type":"response.interrupt","response_id":"r","mode":"discard_partial_items"}"#;
    assert_eq!(partial(interrupt), Some(Partial::Discard));
    assert!(matches!(parse_frame(r#"{"type":"response.processed"}"#), Ok(ClientEvent::Ignored)));
    assert_eq!(parse_frame(r#"{"type":"nonsense"}"#).expect_err("unknown").code, "unknown_event_type");
    assert_eq!(parse_frame("{}").expect_err("no type").code, "missing_required_parameter");
}

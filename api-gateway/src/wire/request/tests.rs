use model::chat_template::Role;

use super::*;

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
            "unsupported_parameter",
            Some("input[0].type"),
        ),
        (
            r#"{"input":[{"role":"user","content":[{"type":"input_image","image_url":"x"}]}]}"#,
            "unsupported_parameter",
            Some("input[0].content[0].type"),
        ),
        (r#"{"input":"x","temperature":3}"#, "invalid_value", Some("temperature")),
        (r#"{"input":"x","temperature":"hot"}"#, "invalid_type", Some("temperature")),
        (r#"{"input":"x","top_p":-0.1}"#, "invalid_value", Some("top_p")),
        (r#"{"input":"x","max_output_tokens":0}"#, "invalid_value", Some("max_output_tokens")),
        (r#"{"input":"x","max_output_tokens":-4}"#, "invalid_type", Some("max_output_tokens")),
        (
            r#"{"input":"x","tools":[{"type":"function","name":"f"}]}"#,
            "unsupported_parameter",
            Some("tools[0]"),
        ),
        (r#"{"input":"x","tool_choice":"required"}"#, "unsupported_parameter", Some("tool_choice")),
        (
            r#"{"input":"x","text":{"format":{"type":"json_object"}}}"#,
            "unsupported_parameter",
            Some("text.format.type"),
        ),
        (r#"{"input":"x","conversation":"conv_1"}"#, "unsupported_parameter", Some("conversation")),
        (r#"{"input":"x","background":true}"#, "unsupported_parameter", Some("background")),
        (r#"{"input":"x","truncation":"auto"}"#, "unsupported_parameter", Some("truncation")),
        (r#"{"input":"x","metadata":{"a":1}}"#, "invalid_type", Some("metadata")),
        (r#"{"input":"x","generate":false}"#, "unsupported_parameter", Some("generate")),
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
    let Ok(ClientEvent::Create(create)) = parse_frame(frame) else { panic!("a create") };
    let read: Vec<(Role, &str)> = create.input.iter().map(|m| (m.role, m.content.as_str())).collect();
    assert_eq!(read, [(Role::Developer, "d"), (Role::User, "ab")]);
    assert!(create.store && create.generate && !create.include_baton);
}

#[test]
fn absent_null_and_given_settings_are_told_apart() {
    let of = |rest: &str| {
        let frame = format!(r#"{{"type":"response.create","input":"x"{rest}}}"#);
        match parse_frame(&frame).expect("a frame") {
            ClientEvent::Create(create) => create.instructions,
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
    let Ok(ClientEvent::Create(create)) = parse_frame(frame) else { panic!("a create") };
    assert_eq!((create.model.as_deref(), create.generate), (Some("m"), false));
}

#[test]
fn other_frames_are_known_or_refused() {
    assert!(matches!(
        parse_frame(r#"{"type":"response.cancel","response_id":"r"}"#),
        Ok(ClientEvent::Cancel { .. })
    ));
    assert!(matches!(parse_frame(r#"{"type":"response.processed"}"#), Ok(ClientEvent::Ignored)));
    assert_eq!(parse_frame(r#"{"type":"nonsense"}"#).expect_err("unknown").code, "unknown_event_type");
    assert_eq!(parse_frame("{}").expect_err("no type").code, "missing_required_parameter");
}

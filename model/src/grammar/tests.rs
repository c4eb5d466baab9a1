//! What needs no vocabulary; grammars on the real one are in `tests/real_model/grammar.rs`.

use super::*;

#[test]
fn messages_become_one_line_with_a_place() {
    let check = |message: &str, wanted: &str| assert_eq!(one_line(message), wanted);
    check("3(14): expected ':' (at b (rule))\n 1 | x\n", "line 3, column 14: expected ':' (at b (rule))");
    check("at 2(5): unknown name: \"bar\"\n   1 | start: bar", "line 2, column 5: unknown name: \"bar\"");
    check("at EOF: no start (yet)", "at EOF: no start (yet)");
    check("\n  f(x): y", "f(x): y");
    check("", "unknown error");
    check(&"é".repeat(1000), &"é".repeat(MAX_MESSAGE_CHARS));
}

#[test]
fn a_schema_keeps_its_own_white_space_options() {
    let own = serde_json::json!({"type": "object", "x-guidance": {"whitespace_flexible": true}});
    assert!(source::json_schema(&own).contains(r#""x-guidance":{"whitespace_flexible":true}"#));
    assert!(source::json_object().contains(r#""item_separator":", ""#));
    assert_eq!(source::json_schema(&serde_json::json!(true)), "start: %json true");
}

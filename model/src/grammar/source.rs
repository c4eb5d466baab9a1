//! Grammars in the form that [`super::GrammarEngine::compile`] reads.

use llguidance::regex_to_lark;
use serde_json::{Value, json};

/// Key of llguidance's options in a schema.
const OPTIONS: &str = "x-guidance";

/// JSON that a schema describes. Between its parts stands what Python's `json.dumps` writes, which models know well,
/// unless the schema says otherwise in `x-guidance`: free white space can go on for ever, and forces no tokens.
pub fn json_schema(schema: &Value) -> String {
    let mut schema = schema.clone();
    if let Some(object) = schema.as_object_mut() {
        object.entry(OPTIONS).or_insert_with(
            || json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}),
        );
    }
    format!("start: %json {schema}")
}

/// Any JSON object.
pub fn json_object() -> String {
    json_schema(&json!({"type": "object"}))
}

/// Text that `regex` matches as a whole, in the syntax of the crate `regex`.
pub fn regex(regex: &str) -> String {
    format!("start: /(?:{})/", regex_to_lark(regex, ""))
}

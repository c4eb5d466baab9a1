//! Finished output items, section 2.4.

use serde_json::Value;

use super::shape::{ensure, id, list, optional, present, text, word};
use super::{Checked, Fault, Rule};

/// Item types that a server may make, and the prefixes of their ids.
pub(super) const PREFIXES: [(&str, &str); 5] = [
    ("message", "msg_"),
    ("function_call", "fc_"),
    ("custom_tool_call", "ctc_"),
    ("reasoning", "rs_"),
    ("compaction", "cmp_"),
];

/// The prefix of the ids of this item's type.
pub(super) fn prefix(item: &Value) -> Checked<&'static str> {
    let kind = text(item, "type")?;
    let found = PREFIXES.iter().find(|(ours, _)| *ours == kind);
    let unknown = || Fault { rule: Rule::Item, why: format!("a server makes no items of type `{kind}`") };
    found.map(|(_, prefix)| *prefix).ok_or_else(unknown)
}

/// An item of a response's output, or of the event that says it is done.
pub(crate) fn item(item: &Value) -> Checked {
    id(item, "id", prefix(item)?)?;
    let sealed = item.get("encrypted_content");
    ensure(sealed.is_none_or(Value::is_string), Rule::NullEncryptedContent, || format!("{item}"))?;
    match text(item, "type")? {
        "message" => message(item),
        "function_call" => {
            call(item)?;
            let arguments = text(item, "arguments")?;
            let whole = item["status"] == "completed";
            let parsed: Result<Value, _> = serde_json::from_str(arguments);
            ensure(!whole || parsed.is_ok(), Rule::Arguments, || format!("no JSON: {arguments}"))?;
            optional(item, "namespace", text)
        }
        "custom_tool_call" => {
            call(item)?;
            text(item, "input").map(drop)
        }
        "reasoning" => reasoning(item),
        _ => text(item, "encrypted_content").map(drop),
    }
}

fn finished(item: &Value) -> Checked {
    word(item, "status", &["completed", "incomplete"])
}

fn message(item: &Value) -> Checked {
    finished(item)?;
    word(item, "role", &["assistant"])?;
    optional(item, "phase", |item, field| word(item, field, &["commentary", "final_answer"]))?;
    list(item, "content")?.iter().try_for_each(part)
}

/// A part of a message.
pub(super) fn part(part: &Value) -> Checked {
    match text(part, "type")? {
        "output_text" => {
            text(part, "text")?;
            list(part, "annotations")?;
            optional(part, "logprobs", list)
        }
        "refusal" => text(part, "refusal").map(drop),
        "reasoning_text" | "summary_text" => text(part, "text").map(drop),
        other => Err(Fault { rule: Rule::Item, why: format!("a server makes no parts of type `{other}`") }),
    }
}

fn call(item: &Value) -> Checked {
    finished(item)?;
    named_call(item)
}

/// The fields of a call that are there from the start.
pub(super) fn named_call(item: &Value) -> Checked {
    id(item, "call_id", "call_")?;
    ensure(!text(item, "name")?.is_empty(), Rule::Item, || format!("a call without a name: {item}"))?;
    ensure(item["call_id"] != item["id"], Rule::IdReused, || format!("call_id is the item's id: {item}"))
}

fn reasoning(item: &Value) -> Checked {
    optional(item, "status", |item, field| word(item, field, &["completed", "incomplete"]))?;
    list(item, "summary")?.iter().try_for_each(part)?;
    optional(item, "content", list)?;
    item.get("content").and_then(Value::as_array).into_iter().flatten().try_for_each(part)?;
    present(item, "summary").map(drop)
}

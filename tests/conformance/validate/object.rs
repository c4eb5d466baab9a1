//! Errors, and the objects of the endpoints beside `/v1/responses`, sections 1.6 and 2.1.

use serde_json::Value;

use super::response::usage;
use super::shape::{count, ensure, id, list, nullable, optional, present, table, text, word};
use super::{Checked, Fault, Rule, item};

const ERROR_TYPES: [&str; 6] = [
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "rate_limit_error",
    "server_error",
    "insufficient_quota",
];
/// Codes whose status the protocol fixes.
const STATUS_OF: [(&str, u64); 10] = [
    ("previous_response_not_found", 400),
    ("websocket_connection_limit_reached", 400),
    ("websocket_stream_limit_reached", 400),
    ("invalid_stream_id", 400),
    ("invalid_json", 400),
    ("unknown_event_type", 400),
    ("missing_required_parameter", 400),
    ("model_not_found", 404),
    ("context_length_exceeded", 400),
    ("rate_limit_exceeded", 429),
];

/// An `error` frame of a socket.
pub(crate) fn error_frame(event: &Value) -> Checked {
    let checked = || -> Checked {
        word(event, "type", &["error"])?;
        let status = count(event, "status")?;
        optional(event, "sequence_number", count)?;
        optional(event, "headers", table)?;
        explanation(table(event, "error")?, status)
    };
    checked().map_err(|fault| Fault { rule: Rule::Error, ..fault })
}

/// The body of an HTTP answer with this status.
pub(crate) fn error_body(body: &Value, status: u16) -> Checked {
    let checked = || -> Checked {
        let error = table(body, "error")?;
        for field in ["param", "code"] {
            nullable(error, field, text)?;
        }
        explanation(error, status.into())
    };
    checked().map_err(|fault| Fault { rule: Rule::Error, ..fault })
}

fn explanation(error: &Value, status: u64) -> Checked {
    let code = text(error, "code")?;
    ensure(!text(error, "message")?.is_empty(), Rule::Error, || format!("no message: {error}"))?;
    word(error, "type", &ERROR_TYPES)?;
    nullable_or_absent(error, "param")?;
    let fixed = STATUS_OF.iter().find(|(ours, _)| *ours == code).map(|(_, status)| *status);
    ensure(fixed.is_none_or(|fixed| fixed == status), Rule::Error, || {
        format!("{code} with status {status}")
    })?;
    let kind = match status {
        401 => "authentication_error",
        403 => "permission_error",
        429 => return Ok(()),
        500.. => "server_error",
        _ => "invalid_request_error",
    };
    ensure(error["type"] == kind, Rule::Error, || format!("status {status} is a {kind}, not {error}"))
}

fn nullable_or_absent(object: &Value, field: &str) -> Checked {
    if object.get(field).is_none() { Ok(()) } else { nullable(object, field, text) }
}

/// An id of ours, by itself.
pub(crate) fn id_with_prefix(object: &Value, field: &str, prefix: &str) -> Checked {
    id(object, field, prefix)
}

/// A list of input or conversation items.
pub(crate) fn items(page: &Value) -> Checked {
    let checked = || -> Checked {
        word(page, "object", &["list"])?;
        super::shape::flag(page, "has_more")?;
        let data = list(page, "data")?;
        let ends = [("first_id", data.first()), ("last_id", data.last())];
        for (field, item) in ends {
            let is = present(page, field)?;
            let wanted = item.map_or(&Value::Null, |item| &item["id"]);
            let empty = item.is_none() && is.as_str().is_none_or(str::is_empty);
            ensure(is == wanted || empty, Rule::Object, || format!("{field} is {is}, not {wanted}"))?;
        }
        data.iter().try_for_each(listed)
    };
    checked().map_err(|fault| Fault { rule: Rule::Object, ..fault })
}

/// An item of a list: ours, or a client's, which keeps the id it came with.
fn listed(listed: &Value) -> Checked {
    ensure(!text(listed, "id")?.is_empty(), Rule::Id, || format!("an item without an id: {listed}"))?;
    if listed["type"] == "message" {
        word(listed, "role", &["user", "assistant", "system", "developer"])?;
        word(listed, "status", &["completed", "incomplete", "in_progress"])?;
        for part in list(listed, "content")? {
            text(part, "type")?;
        }
        return Ok(());
    }
    text(listed, "type").map(drop)
}

/// `GET /v1/models`.
pub(crate) fn models(page: &Value) -> Checked {
    let checked = || -> Checked {
        word(page, "object", &["list"])?;
        list(page, "data")?.iter().try_for_each(|model| {
            word(model, "object", &["model"])?;
            text(model, "id")?;
            count(model, "created")?;
            text(model, "owned_by").map(drop)
        })
    };
    checked().map_err(|fault| Fault { rule: Rule::Object, ..fault })
}

/// `POST /v1/responses/compact`.
pub(crate) fn compaction(object: &Value) -> Checked {
    let checked = || -> Checked {
        text(object, "id")?;
        word(object, "object", &["response.compaction"])?;
        count(object, "created_at")?;
        usage(table(object, "usage")?)?;
        let output = list(object, "output")?;
        let sealed: Vec<&Value> = output.iter().filter(|item| item["type"] == "compaction").collect();
        ensure(sealed.len() == 1, Rule::Object, || format!("{} compaction items", sealed.len()))?;
        sealed.into_iter().try_for_each(item)
    };
    checked().map_err(|fault| Fault { rule: Rule::Object, ..fault })
}

/// A conversation.
pub(crate) fn conversation(object: &Value) -> Checked {
    let checked = || -> Checked {
        id(object, "id", "conv_")?;
        word(object, "object", &["conversation"])?;
        count(object, "created_at")?;
        table(object, "metadata").map(drop)
    };
    checked().map_err(|fault| Fault { rule: Rule::Object, ..fault })
}

/// The answer to `DELETE /v1/conversations/{id}`.
pub(crate) fn conversation_deleted(object: &Value) -> Checked {
    deleted(object, "conv_", "conversation.deleted")
}

/// The answer to `DELETE /v1/responses/{id}`.
pub(crate) fn response_deleted(object: &Value) -> Checked {
    deleted(object, "resp_", "response")
}

fn deleted(object: &Value, prefix: &str, kind: &str) -> Checked {
    let checked = || -> Checked {
        id(object, "id", prefix)?;
        word(object, "object", &[kind])?;
        ensure(object["deleted"] == true, Rule::Object, || format!("not deleted: {object}"))
    };
    checked().map_err(|fault| Fault { rule: Rule::Object, ..fault })
}

/// `POST /v1/responses/input_tokens`.
pub(crate) fn input_tokens(object: &Value) -> Checked {
    let checked = || -> Checked {
        word(object, "object", &["response.input_tokens"])?;
        ensure(count(object, "input_tokens")? > 0, Rule::Object, || format!("no tokens: {object}"))
    };
    checked().map_err(|fault| Fault { rule: Rule::Object, ..fault })
}

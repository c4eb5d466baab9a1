//! Responses and other objects with one thing wrong.

use serde_json::{Value, json};

use super::{CALL, MESSAGE, call_item, caught, completed, message_item, usage, without};
use crate::conformance::validate::{
    Checked, Rule, compaction, conversation, conversation_deleted, error_body, id_with_prefix, input_tokens,
    item, items, models, response, response_deleted,
};

/// Fields that every response has.
const FIELDS: [&str; 31] = [
    "id",
    "object",
    "created_at",
    "completed_at",
    "status",
    "error",
    "incomplete_details",
    "instructions",
    "model",
    "output",
    "previous_response_id",
    "tools",
    "tool_choice",
    "truncation",
    "parallel_tool_calls",
    "text",
    "top_p",
    "temperature",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "reasoning",
    "usage",
    "max_output_tokens",
    "max_tool_calls",
    "store",
    "background",
    "service_tier",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
];
const NEVER_NULL: [&str; 20] = [
    "id",
    "object",
    "created_at",
    "status",
    "model",
    "output",
    "tools",
    "tool_choice",
    "truncation",
    "parallel_tool_calls",
    "text",
    "top_p",
    "temperature",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "store",
    "background",
    "service_tier",
    "metadata",
];

/// What a change of a good object violates.
#[track_caller]
fn violates(rule: Rule, check: fn(&Value) -> Checked, good: Value, change: impl FnOnce(&mut Value)) {
    check(&good).unwrap();
    let mut bad = good;
    change(&mut bad);
    caught(rule, check(&bad));
}

#[test]
fn a_response_has_every_field() {
    let good = || completed(json!([message_item(), call_item()]));
    for field in FIELDS {
        violates(Rule::Field, response, good(), |response| without(response, field));
    }
    for field in NEVER_NULL {
        violates(Rule::Field, response, good(), |response| response[field] = Value::Null);
    }
    violates(Rule::Field, response, good(), |response| response["text"]["verbosity"] = Value::Null);
    violates(Rule::Field, response, good(), |response| response["reasoning"]["effort"] = "extreme".into());
    violates(Rule::Field, response, good(), |response| response["metadata"] = json!({"a": 1}));
    violates(Rule::Tools, response, good(), |response| {
        response["tools"] = json!([{"type": "function", "name": "f", "parameters": null, "strict": null}]);
    });
}

#[test]
fn a_response_does_not_contradict_itself() {
    let good = || completed(json!([message_item()]));
    violates(Rule::Status, response, good(), |response| {
        response["error"] = json!({"code": "server_error", "message": "no"});
    });
    violates(Rule::Status, response, good(), |response| response["status"] = "incomplete".into());
    violates(Rule::Status, response, good(), |response| {
        response["output"][0]["status"] = "incomplete".into();
    });
    violates(Rule::Usage, response, good(), |response| response["usage"] = Value::Null);
}

#[test]
fn usage_adds_up() {
    let good = || completed(json!([]));
    for (field, value) in [("total_tokens", 40), ("output_tokens", 8), ("input_tokens", 31)] {
        violates(Rule::Usage, response, good(), |response| response["usage"][field] = value.into());
    }
    for (details, field) in
        [("input_tokens_details", "cached_tokens"), ("output_tokens_details", "reasoning_tokens")]
    {
        violates(Rule::Usage, response, good(), |response| response["usage"][details][field] = 99.into());
        violates(Rule::Field, response, good(), |response| without(&mut response["usage"][details], field));
    }
    violates(Rule::Field, response, good(), |response| {
        without(&mut response["usage"]["input_tokens_details"], "cache_write_tokens");
    });
}

#[test]
fn items_have_their_shape() {
    violates(Rule::Id, item, message_item(), |item| item["id"] = CALL.into());
    violates(Rule::Id, item, call_item(), |item| item["id"] = MESSAGE.into());
    violates(Rule::Field, item, message_item(), |item| item["role"] = "user".into());
    violates(Rule::Field, item, message_item(), |item| item["phase"] = Value::Null);
    violates(Rule::Field, item, message_item(), |item| without(&mut item["content"][0], "annotations"));
    violates(Rule::Item, item, message_item(), |item| item["content"][0]["type"] = "input_text".into());
    violates(Rule::Item, item, call_item(), |item| item["name"] = "".into());
    violates(Rule::Arguments, item, call_item(), |item| item["arguments"] = "{".into());
    let custom = json!({"type": "custom_tool_call", "id": "ctc_0123456789abcdef01234567", "status": "completed",
                        "call_id": "call_0123456789abcdef01234567", "name": "apply_patch", "input": "x"});
    violates(Rule::Field, item, custom, |item| without(item, "input"));
    let sealed =
        json!({"type": "compaction", "id": "cmp_0123456789abcdef01234567", "encrypted_content": "b"});
    violates(Rule::NullEncryptedContent, item, sealed, |item| item["encrypted_content"] = Value::Null);
}

#[test]
fn errors_explain_themselves() {
    let good =
        || json!({"error": {"message": "no", "type": "invalid_request_error", "param": null, "code": "bad"}});
    let check: fn(&Value) -> Checked = |body| error_body(body, 400);
    for field in ["message", "type", "param", "code"] {
        violates(Rule::Error, check, good(), |body| without(&mut body["error"], field));
    }
    violates(Rule::Error, check, good(), |body| body["error"]["type"] = "server_error".into());
    violates(Rule::Error, check, good(), |body| body["error"]["code"] = "rate_limit_exceeded".into());
    caught(Rule::Error, error_body(&good(), 500));
}

#[test]
fn lists_are_pages() {
    let id = |id: &str| json!({"type": "function_call_output", "id": id, "call_id": "c", "output": "o"});
    let page = || json!({"object": "list", "data": [id("a"), id("b")], "first_id": "a", "last_id": "b", "has_more": false});
    violates(Rule::Object, items, page(), |page| page["last_id"] = "a".into());
    violates(Rule::Object, items, page(), |page| without(page, "has_more"));
    violates(Rule::Object, items, page(), |page| without(&mut page["data"][0], "type"));
    items(&json!({"object": "list", "data": [], "first_id": null, "last_id": null, "has_more": false}))
        .unwrap();
    let model = json!({"id": "m", "object": "model", "created": 1, "owned_by": "baton"});
    violates(Rule::Object, models, json!({"object": "list", "data": [model]}), |page| {
        without(&mut page["data"][0], "owned_by");
    });
}

#[test]
fn other_objects_have_their_shape() {
    let sealed =
        json!({"type": "compaction", "id": "cmp_0123456789abcdef01234567", "encrypted_content": "b"});
    let good = json!({"id": "resp_0123456789abcdef01234567", "object": "response.compaction",
                      "created_at": 1_700_000_000, "output": [sealed], "usage": usage(3)});
    violates(Rule::Object, compaction, good.clone(), |object| object["output"] = json!([sealed, sealed]));
    violates(Rule::Object, compaction, good, |object| without(object, "usage"));
    let good = json!({"id": "conv_0123456789abcdef01234567", "object": "conversation", "created_at": 1,
                      "metadata": {}});
    violates(Rule::Object, conversation, good, |object| without(object, "metadata"));
    let good =
        json!({"id": "conv_0123456789abcdef01234567", "object": "conversation.deleted", "deleted": true});
    violates(Rule::Object, conversation_deleted, good, |object| object["deleted"] = false.into());
    let good = json!({"id": "resp_0123456789abcdef01234567", "object": "response", "deleted": true});
    violates(Rule::Object, response_deleted, good, |object| object["object"] = "response.deleted".into());
    let good = json!({"object": "response.input_tokens", "input_tokens": 12});
    violates(Rule::Object, input_tokens, good, |object| object["input_tokens"] = 0.into());
    caught(Rule::Id, id_with_prefix(&json!({"id": "cmp_1"}), "id", "cmp_"));
}

//! The response object, section 2.2: always complete, and an echo of what was asked for.

use serde_json::{Value, json};

use super::item::item;
use super::shape::{count, ensure, flag, id, list, nullable, number, optional, present, table, text, word};
use super::{Checked, Fault, Rule};

const STATUSES: [&str; 6] = ["queued", "in_progress", "completed", "failed", "incomplete", "cancelled"];
const REASONS: [&str; 4] = ["max_output_tokens", "content_filter", "steered", "interrupted"];
const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];
const VERBOSITIES: [&str; 3] = ["low", "medium", "high"];

/// A response, in an event or by itself. Its items are checked when it has ended.
pub(crate) fn response(response: &Value) -> Checked {
    identity(response)?;
    settings(response)?;
    nullable(response, "usage", |response, _| usage(&response["usage"]))?;
    outcome(response)
}

fn identity(response: &Value) -> Checked {
    id(response, "id", "resp_")?;
    word(response, "object", &["response"])?;
    ensure(count(response, "created_at")? > 1_600_000_000, Rule::Field, || {
        format!("created_at is no time in seconds: {}", response["created_at"])
    })?;
    nullable(response, "completed_at", count)?;
    word(response, "status", &STATUSES)?;
    ensure(!text(response, "model")?.is_empty(), Rule::Field, || "model is empty".to_owned())?;
    nullable(response, "previous_response_id", text)
}

fn settings(response: &Value) -> Checked {
    for field in ["instructions", "safety_identifier", "prompt_cache_key"] {
        nullable(response, field, text)?;
    }
    for field in ["max_output_tokens", "max_tool_calls"] {
        nullable(response, field, count)?;
    }
    for field in ["top_p", "temperature", "presence_penalty", "frequency_penalty"] {
        number(response, field)?;
    }
    for field in ["parallel_tool_calls", "store", "background"] {
        flag(response, field)?;
    }
    count(response, "top_logprobs")?;
    word(response, "truncation", &["auto", "disabled"])?;
    word(response, "service_tier", &["default"])?;
    tool_choice(present(response, "tool_choice")?)?;
    list(response, "tools")?.iter().try_for_each(tool)?;
    format(table(response, "text")?)?;
    nullable(response, "reasoning", |response, _| reasoning(&response["reasoning"]))?;
    let pairs = table(response, "metadata")?.as_object();
    let strings = pairs.is_some_and(|pairs| pairs.values().all(Value::is_string));
    ensure(strings, Rule::Field, || format!("metadata is no table of strings: {}", response["metadata"]))
}

fn tool_choice(choice: &Value) -> Checked {
    let fits = match choice {
        Value::String(choice) => ["none", "auto", "required"].contains(&choice.as_str()),
        choice => choice.get("type").is_some_and(Value::is_string),
    };
    ensure(fits, Rule::Field, || format!("tool_choice is {choice}"))
}

fn tool(tool: &Value) -> Checked {
    let complete = |tool: &Value| -> Checked {
        if text(tool, "type")? != "function" {
            return Ok(());
        }
        text(tool, "name")?;
        nullable(tool, "description", text)?;
        nullable(tool, "parameters", table)?;
        nullable(tool, "strict", flag)
    };
    complete(tool).map_err(|fault| Fault { rule: Rule::Tools, ..fault })
}

fn format(text_settings: &Value) -> Checked {
    let format = table(text_settings, "format")?;
    word(format, "type", &["text", "json_object", "json_schema"])?;
    if format["type"] == "json_schema" {
        text(format, "name")?;
        table(format, "schema")?;
        nullable(format, "strict", flag)?;
    }
    optional(text_settings, "verbosity", |settings, field| word(settings, field, &VERBOSITIES))
}

fn reasoning(reasoning: &Value) -> Checked {
    nullable(reasoning, "effort", |reasoning, field| word(reasoning, field, &EFFORTS))?;
    nullable(reasoning, "summary", text)
}

/// Usage, complete and adding up.
pub(super) fn usage(usage: &Value) -> Checked {
    let input = count(usage, "input_tokens")?;
    let output = count(usage, "output_tokens")?;
    let cached = count(table(usage, "input_tokens_details")?, "cached_tokens")?;
    count(&usage["input_tokens_details"], "cache_write_tokens")?;
    let reasoning = count(table(usage, "output_tokens_details")?, "reasoning_tokens")?;
    let adds_up = count(usage, "total_tokens")? == input + output;
    ensure(adds_up && cached <= input && reasoning <= output, Rule::Usage, || usage.to_string())
}

fn outcome(response: &Value) -> Checked {
    let output = list(response, "output")?;
    nullable(response, "error", |response, _| {
        text(&response["error"], "code")?;
        text(&response["error"], "message")
    })?;
    nullable(response, "incomplete_details", |response, _| {
        word(&response["incomplete_details"], "reason", &REASONS)
    })?;
    let status = text(response, "status")?;
    let is = |field: &str| !response[field].is_null();
    ensure(is("error") == (status == "failed"), Rule::Status, || {
        format!("{status}, but error is {}", response["error"])
    })?;
    ensure(is("incomplete_details") == (status == "incomplete"), Rule::Status, || {
        format!("{status}, but incomplete_details is {}", response["incomplete_details"])
    })?;
    let ended = ["completed", "incomplete"].contains(&status);
    ensure(!ended || is("usage"), Rule::Usage, || format!("{status} without usage"))?;
    ensure(status != "completed" || is("completed_at"), Rule::Status, || "completed, but never".to_owned())?;
    if matches!(status, "queued" | "in_progress") {
        return Ok(());
    }
    output.iter().try_for_each(item)?;
    let whole = output.iter().all(|item| item.get("status").is_none_or(|status| status == "completed"));
    ensure(status != "completed" || whole, Rule::Status, || "completed, but an item is not".to_owned())
}

/// What a request asked for, as its response must say it.
#[derive(Debug, Clone)]
pub(crate) struct Echo {
    request: Value,
}

/// Fields that come back as they were sent.
const SAME: [&str; 12] = [
    "instructions",
    "previous_response_id",
    "metadata",
    "store",
    "max_output_tokens",
    "max_tool_calls",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "truncation",
    "tool_choice",
    "background",
];

impl Echo {
    /// `request` is a body, or a frame with the body's fields.
    pub(crate) fn of(request: &Value) -> Self {
        Self { request: request.get("response").filter(|body| body.is_object()).unwrap_or(request).clone() }
    }

    pub(crate) fn check(&self, response: &Value) -> Checked {
        let asked = |field: &str| self.request.get(field).filter(|value| !value.is_null());
        for field in SAME {
            let same = asked(field).is_none_or(|asked| *asked == response[field]);
            ensure(same, Rule::Echo, || {
                format!("{field} was {}, the response says {}", self.request[field], response[field])
            })?;
        }
        for field in ["temperature", "top_p"] {
            let value = response[field].as_f64().unwrap_or(f64::NAN);
            let near = |asked: &Value| asked.as_f64().is_some_and(|asked| (asked - value).abs() < 1e-4);
            ensure(asked(field).is_none_or(near), Rule::Echo, || format!("{field} is {value}"))?;
        }
        let stored = asked("store").and_then(Value::as_bool).unwrap_or(true);
        ensure(response["store"] == stored, Rule::Echo, || "store is true unless it was false".to_owned())?;
        ensure(
            asked("previous_response_id").is_some() || response["previous_response_id"].is_null(),
            Rule::Echo,
            || format!("a parent nobody named: {}", response["previous_response_id"]),
        )?;
        self.format(response)?;
        self.tools(response)
    }

    fn format(&self, response: &Value) -> Checked {
        let Some(format) = self.request.pointer("/text/format").and_then(Value::as_object) else {
            return Ok(());
        };
        let echoed = &response["text"]["format"];
        let same = format.iter().all(|(field, value)| value.is_null() || echoed[field] == *value);
        ensure(same, Rule::Echo, || format!("text.format was {}, is {echoed}", json!(format)))
    }

    /// Function tools come back in their order, with the fields they had.
    fn tools(&self, response: &Value) -> Checked {
        let functions = |tools: Option<&Value>| -> Vec<Value> {
            let tools = tools.and_then(Value::as_array).into_iter().flatten();
            tools.filter(|tool| tool["type"] == "function").cloned().collect()
        };
        let Some(tools) = self.request.get("tools") else { return Ok(()) };
        let (asked, echoed) = (functions(Some(tools)), functions(response.get("tools")));
        let names = |tools: &[Value]| tools.iter().map(|tool| tool["name"].clone()).collect::<Vec<_>>();
        ensure(names(&asked) == names(&echoed), Rule::Tools, || {
            format!("functions {:?} came back as {:?}", names(&asked), names(&echoed))
        })?;
        for (asked, echoed) in asked.iter().zip(&echoed) {
            for field in ["description", "parameters", "strict"] {
                let same = asked.get(field).is_none_or(|value| *value == echoed[field]);
                ensure(same, Rule::Tools, || format!("{field} of a tool was {asked}, is {echoed}"))?;
            }
        }
        Ok(())
    }
}

//! Tools, calls and results as text for prompts.

use serde::Serialize;
use serde_json::value::RawValue;

use crate::chat_template::{Content, Message, Role};

use super::{CallFormat, Input, Marker, Style, Tool};

/// A call as it stands in a conversation's history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub name: String,
    /// Raw JSON for tools that take JSON, else the text.
    pub input: String,
    pub is_text: bool,
}

/// A tool in the form that chat templates are trained on.
#[derive(Serialize)]
struct Function<'a> {
    name: &'a str,
    description: &'a str,
    parameters: &'a RawValue,
}

#[derive(Serialize)]
struct Entry<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    function: Function<'a>,
}

impl Tool {
    /// The tool as the JSON that chat templates take.
    pub(crate) fn template_json(&self) -> String {
        let nothing = || RawValue::from_string(r#"{"type":"object","properties":{}}"#.to_owned());
        let schema = match &self.input {
            Input::Json { schema, .. } => RawValue::from_string(schema.clone()).or_else(|_| nothing()),
            Input::Text(_) => nothing(),
        };
        let description = match &self.input {
            Input::Json { .. } => self.description.clone(),
            Input::Text(_) => format!(
                "{}\nThis tool takes free text: write {{\"name\": \"{}\"}} on a line of its own, then the text as it is.",
                self.description, self.name
            ),
        };
        let parameters = &*schema.expect("the text of an empty object is JSON");
        let function = Function { name: &self.name, description: description.trim_start(), parameters };
        serde_json::to_string(&Entry { kind: "function", function }).expect("strings and JSON serialize")
    }
}

impl CallFormat {
    /// The part of the instructions that shows `tools` to a model whose template does not: the wording that Hermes and
    /// Qwen models are trained on.
    pub fn tools_text(&self, tools: &[Tool]) -> String {
        let mut text = "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided \
                        with function signatures within <tools></tools> XML tags:\n<tools>"
            .to_owned();
        for tool in tools {
            text.push('\n');
            text.push_str(&tool.template_json());
        }
        text.push_str(
            "\n</tools>\n\nFor each function call, return a json object with function name and arguments within \
             <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": \
             <args-json-object>}\n</tool_call>",
        );
        text
    }

    /// An assistant's turn of `text` and `calls`, written as the model itself would.
    pub fn assistant(&self, text: &str, calls: &[Call]) -> Message {
        let mut content = Content::from(text);
        if self.style == Style::Mistral && !calls.is_empty() {
            self.open.append_to(&mut content);
            content.push_str("[");
        }
        for (idx, call) in calls.iter().enumerate() {
            match self.style {
                Style::Tagged => {
                    if !content.is_empty() {
                        content.push_str("\n");
                    }
                    self.tagged(call, &mut content);
                }
                Style::Mistral => {
                    content.push_str(if idx == 0 { "" } else { ", " });
                    content.push_str(&object(call, "arguments"));
                }
                Style::Llama => {
                    content.push_str(if content.is_empty() { "" } else { "\n" });
                    content.push_str(&object(call, "parameters"));
                }
            }
        }
        if self.style == Style::Mistral && !calls.is_empty() {
            content.push_str("]");
        }
        Message { role: Role::Assistant, content }
    }

    /// Reasoning as it stands in front of an answer, written as the model itself would; nothing for models that do not
    /// reason.
    pub fn thought(&self, text: &str) -> Content {
        let mut content = Content::default();
        if let Some((open, close)) = &self.think {
            open.append_to(&mut content);
            content.push_str(&format!("\n{}\n", text.trim_matches('\n')));
            close.append_to(&mut content);
            content.push_str("\n\n");
        }
        content
    }

    fn tagged(&self, call: &Call, content: &mut Content) {
        self.open.append_to(content);
        content.push_str("\n");
        if call.is_text {
            content.push_str(&format!("{{\"name\": {}}}\n{}", json_string(&call.name), call.input));
        } else {
            content.push_str(&object(call, "arguments"));
        }
        content.push_str("\n");
        if let Some(close) = &self.close {
            close.append_to(content);
        }
    }

    /// What a tool has given back.
    pub fn result(&self, text: &str) -> Message {
        if self.has_results {
            return Message { role: Role::Tool, content: text.into() };
        }
        Message { role: Role::User, content: format!("<tool_response>\n{text}\n</tool_response>").into() }
    }
}

impl Marker {
    pub(super) fn append_to(&self, content: &mut Content) {
        match self.id {
            Some(id) => content.push_special(id),
            None => content.push_str(self.text),
        }
    }
}

fn object(call: &Call, key: &str) -> String {
    let input = if call.is_text { json_string(&call.input) } else { call.input.clone() };
    format!("{{\"name\": {}, \"{key}\": {input}}}", json_string(&call.name))
}

fn json_string(text: &str) -> String {
    serde_json::to_string(text).expect("a string is JSON")
}

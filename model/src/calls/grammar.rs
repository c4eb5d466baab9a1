//! What an output must look like, as a grammar in the dialect of `llguidance`.

use serde_json::Value;

use super::{CallFormat, Input, Marker, Style, TextGrammar, Tool};

/// Which calls an output may or must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// Free, until the model begins a call: the grammar describes what follows [`CallFormat::trigger`].
    Lazy,
    /// The same, for one call: the output ends with it.
    LazyOnce,
    /// Calls and nothing else: one, or up to this many.
    Calls(usize),
}

/// What begins a call in free text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trigger {
    Id(u32),
    Text(&'static str),
}

impl CallFormat {
    /// What begins a call within an output that is free until then.
    pub fn trigger(&self) -> Trigger {
        match (self.style, self.open.id) {
            (Style::Llama, _) => Trigger::Text("{\"name\": \""),
            (_, Some(id)) => Trigger::Id(id),
            (_, None) => Trigger::Text(self.open.text),
        }
    }

    /// The grammar of calls of `tools`, of which there is at least one. With an `answer`, the JSON text of a schema, such
    /// JSON may stand instead of calls.
    pub fn grammar(&self, tools: &[&Tool], choice: Choice, answer: Option<&str>) -> String {
        let mut rules = String::new();
        let open = self.open.lark();
        let one = match self.style {
            Style::Tagged => {
                rules.push_str("rest: \"\\n\" body\n");
                rules.push_str(&format!("call: {open} rest\n"));
                (r#""\n""#, "call", "rest")
            }
            Style::Mistral => {
                let more = match choice {
                    Choice::LazyOnce | Choice::Calls(..=1) => String::new(),
                    Choice::Calls(most) => format!(" (\", \" body){{0,{}}}", most - 1),
                    Choice::Lazy => " (\", \" body)*".to_owned(),
                };
                rules.push_str(&format!("list: \"[\" body{more} \"]\"\n"));
                rules.push_str(&format!("call: {open} list\n"));
                ("\"\"", "call", "list")
            }
            Style::Llama => {
                rules.push_str("call: body\n");
                (r#""\n""#, "call", "tail")
            }
        };
        let (between, call, rest) = one;
        let start = match choice {
            Choice::Lazy => rest.to_owned(),
            Choice::LazyOnce => format!("{rest} ({})", self.ends()),
            Choice::Calls(most) if most > 1 && self.style != Style::Mistral => {
                format!("{call} ({between} {call}){{0,{}}}", most - 1)
            }
            Choice::Calls(_) => call.to_owned(),
        };
        let mut grammar = match answer {
            Some(schema) => {
                format!("start: answer | calls\nanswer: %json {}\ncalls: {start}\n{rules}", spaced(schema))
            }
            None => format!("start: {start}\n{rules}"),
        };
        let lazy_llama = self.style == Style::Llama && matches!(choice, Choice::Lazy | Choice::LazyOnce);
        let body: Vec<String> = (0..tools.len()).map(|idx| format!("t{idx}")).collect();
        grammar.push_str(&format!("{}: {}\n", if lazy_llama { "tail" } else { "body" }, body.join(" | ")));
        for (idx, tool) in tools.iter().enumerate() {
            grammar.push_str(&self.tool_rule(idx, tool, lazy_llama));
        }
        grammar
    }

    /// The end of the model's turn.
    fn ends(&self) -> String {
        let ends: Vec<String> = self.ends.iter().map(|id| format!("<[{id}]>")).collect();
        ends.join(" | ")
    }

    fn tool_rule(&self, idx: usize, tool: &Tool, without_head: bool) -> String {
        let key = if self.style == Style::Llama { "parameters" } else { "arguments" };
        let name = serde_json::to_string(&tool.name).expect("a string is JSON");
        let head = if without_head { name[1..].to_owned() } else { format!("{{\"name\": {name}") };
        let tagged = self.close.filter(|_| self.style == Style::Tagged);
        let end = tagged.map_or_else(String::new, |close| format!(" \"\\n\" {}", close.lark()));
        match (&tool.input, tagged) {
            (Input::Text(form), Some(close)) => {
                let literal = lark_string(&format!("{head}}}\n"));
                match form {
                    // Anything up to the closing marker, which never stands in it.
                    None if close.id.is_some() => {
                        format!("t{idx}: {literal} a{idx} {}\na{idx}: /(?s:.*)/\n", close.lark())
                    }
                    None => {
                        let suffix = lark_string(&format!("\n{}", close.text));
                        format!("t{idx}: {literal} a{idx}\na{idx}[suffix={suffix}]: /(?s:.*)/\n")
                    }
                    Some(form) => format!("t{idx}: {literal} a{idx}{end}\na{idx}: {}\n", form.lark()),
                }
            }
            (input, _) => {
                let literal = lark_string(&format!("{head}, \"{key}\": "));
                let schema = match input {
                    Input::Json { schema, .. } => spaced(&object_schema(schema)),
                    Input::Text(_) => r#"{"type":"string"}"#.to_owned(),
                };
                format!("t{idx}: {literal} a{idx} \"}}\"{end}\na{idx}: %json {schema}\n")
            }
        }
    }
}

impl TextGrammar {
    fn lark(&self) -> String {
        match self {
            Self::Lark(source) => format!("%lark {{\n{source}\n}}"),
            Self::Regex(pattern) => regex(pattern),
        }
    }
}

impl Marker {
    /// The marker as a Lark expression.
    fn lark(&self) -> String {
        self.id.map_or_else(|| lark_string(self.text), |id| format!("<[{id}]>"))
    }
}

/// The grammar of an answer that is JSON of `schema`, JSON text.
pub fn answer(schema: &str) -> String {
    format!("start: %json {}\n", spaced(schema))
}

/// A schema whose JSON is spaced as Python's `json.dumps` does it, which models know well. Free white space could go on
/// for ever, and forces no tokens.
fn spaced(schema: &str) -> String {
    const OPTIONS: &str =
        r#""x-guidance":{"whitespace_flexible":false,"item_separator":", ","key_separator":": "}"#;
    let rest = schema.trim_start().strip_prefix('{').map(str::trim_start);
    match rest {
        Some(_) if schema.contains("\"x-guidance\"") => schema.to_owned(),
        Some(rest) if rest.starts_with('}') => format!("{{{OPTIONS}{rest}"),
        Some(rest) => format!("{{{OPTIONS},{rest}"),
        None => schema.to_owned(),
    }
}

/// A schema for an arguments object, even when the tool declares none. The order of its keys is kept.
fn object_schema(schema: &str) -> String {
    match serde_json::from_str::<Value>(schema) {
        Ok(Value::Object(fields)) if fields.contains_key("type") || fields.contains_key("$ref") => {
            schema.to_owned()
        }
        Ok(Value::Object(fields)) if !fields.is_empty() => {
            let rest = schema.trim_start().strip_prefix('{').unwrap_or("}");
            format!("{{\"type\":\"object\",{rest}")
        }
        _ => r#"{"type":"object"}"#.to_owned(),
    }
}

/// A Lark regex literal.
fn regex(pattern: &str) -> String {
    let mut literal = "/".to_owned();
    let mut escaped = false;
    for c in pattern.chars() {
        match c {
            '/' if !escaped => literal.push_str("\\/"),
            '\n' => literal.push_str("\\n"),
            c => literal.push(c),
        }
        escaped = c == '\\' && !escaped;
    }
    literal.push('/');
    literal
}

/// A Lark string literal, whose escapes are those of JSON.
fn lark_string(text: &str) -> String {
    serde_json::to_string(text).expect("a string is JSON")
}

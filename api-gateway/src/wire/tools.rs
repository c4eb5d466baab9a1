//! `tools`, `tool_choice` and `text.format`: what the client offers the model, and the form it wants answers in.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

use model::calls::{Input, TextGrammar, Tool};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::request::field;
use crate::constraint::Constraint;
use crate::error::ApiError;

/// More tools than any harness offers.
const MAX_TOOLS: usize = 1024;

/// One tool that the model can call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Offered {
    /// What clients call it; the model's name for it is [`flat_name`].
    pub(crate) name: String,
    pub(crate) namespace: Option<String>,
    pub(crate) is_custom: bool,
    /// Its path in the request, such as `tools[3]`.
    pub(crate) param: String,
}

/// The tools of a request, parsed.
#[derive(Debug)]
pub(crate) struct Tools {
    /// Raw JSON text, to be compared.
    pub(crate) raw: Arc<str>,
    /// The same text, if items of the input brought tools: those hold for the rest of the conversation.
    pub(crate) added: Option<Arc<str>>,
    pub(crate) offered: Vec<Offered>,
    /// As the model sees them; one for each in `offered`.
    pub(crate) shown: Arc<[Tool]>,
    /// As responses repeat them.
    pub(crate) echo: Box<RawValue>,
    /// What calls of them look like, once it is known.
    pub(crate) lazy: OnceLock<Constraint>,
}

/// What brought tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Request,
    /// Items of the input, besides the request.
    Items,
}

#[derive(Deserialize)]
struct WireTool<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    name: Option<String>,
    description: Option<String>,
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
    strict: Option<bool>,
    format: Option<WireFormat>,
    #[serde(borrow)]
    tools: Option<Vec<&'a RawValue>>,
    /// Some older clients send functions as Chat Completions does.
    #[serde(borrow)]
    function: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct WireFormat {
    #[serde(rename = "type")]
    kind: String,
    syntax: Option<String>,
    definition: Option<String>,
}

#[derive(Serialize)]
struct FunctionEcho<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    name: &'a str,
    description: Option<&'a str>,
    parameters: Option<&'a RawValue>,
    strict: Option<bool>,
}

/// What a tool is called where a namespace and a name must be one word.
pub(crate) fn flat_name(namespace: Option<&str>, name: &str) -> String {
    namespace.map_or_else(|| name.to_owned(), |namespace| format!("{namespace}.{name}"))
}

impl Tools {
    /// No tools.
    pub(crate) fn none() -> Arc<Self> {
        let echo = RawValue::from_string("[]".to_owned()).expect("an empty list is JSON");
        Arc::new(Self {
            raw: "[]".into(),
            added: None,
            offered: Vec::new(),
            shown: Arc::default(),
            echo,
            lazy: OnceLock::new(),
        })
    }

    /// Parses the raw JSON text of tools. Hosted tools and kinds nobody knows are left out.
    ///
    /// # Errors
    /// Names the tool that cannot be used.
    pub(crate) fn parse(raw: &str, by: Source) -> Result<Arc<Self>, ApiError> {
        Self::parse_from(raw, by, &[])
    }

    /// The same for tools that were brought into another order: the client had the first one at `places[0]`, and so on;
    /// those behind have kept their places.
    pub(crate) fn parse_from(raw: &str, by: Source, places: &[usize]) -> Result<Arc<Self>, ApiError> {
        let mut parser = Parser::default();
        for (idx, tool) in list(raw)?.into_iter().enumerate() {
            let place = places.get(idx).copied().unwrap_or(idx);
            parser.tool(tool, None, &format!("tools[{place}]"))?;
        }
        let echo = format!("[{}]", parser.echo.join(","));
        let echo = RawValue::from_string(echo).map_err(|error| ApiError::internal(error.to_string()))?;
        let Parser { offered, shown, .. } = parser;
        let raw: Arc<str> = raw.into();
        let added = (by == Source::Items).then(|| Arc::clone(&raw));
        Ok(Arc::new(Self { raw, added, offered, shown: shown.into(), echo, lazy: OnceLock::new() }))
    }

    /// The raw JSON text of tools, ordered: namespaces last, each kind by name. Also the place that each had before.
    /// Clients that keep their tools in hash maps send them in another order each time; ordered, they are the same text.
    ///
    /// # Errors
    /// When it is no list of objects.
    pub(crate) fn by_name(raw: &str) -> Result<(String, Vec<usize>), ApiError> {
        let list = list(raw)?;
        let mut tools = Vec::with_capacity(list.len());
        for (idx, tool) in list.into_iter().enumerate() {
            let key: SortKey<'_> = field(Some(tool), &format!("tools[{idx}]"))?.unwrap_or_default();
            let function = key.function.as_ref().and_then(|function| function.name.as_deref());
            let name = key.name.as_deref().or(function).unwrap_or_default().to_owned();
            tools.push((key.kind.as_deref() == Some("namespace"), name, idx, tool.get()));
        }
        tools.sort_unstable();
        let texts: Vec<&str> = tools.iter().map(|(.., text)| *text).collect();
        Ok((format!("[{}]", texts.join(",")), tools.iter().map(|(_, _, idx, _)| *idx).collect()))
    }

    /// The place of the tool that the model calls `name`; the bare name of a namespaced one will do.
    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        let flat = self.shown.iter().position(|tool| tool.name == name);
        flat.or_else(|| self.offered.iter().position(|tool| tool.name == name))
    }
}

/// What decides a tool's place.
#[derive(Deserialize, Default)]
struct SortKey<'a> {
    #[serde(rename = "type", borrow)]
    kind: Option<Cow<'a, str>>,
    #[serde(borrow)]
    name: Option<Cow<'a, str>>,
    #[serde(borrow)]
    function: Option<Named<'a>>,
}

#[derive(Deserialize)]
struct Named<'a> {
    #[serde(borrow)]
    name: Option<Cow<'a, str>>,
}

fn list(raw: &str) -> Result<Vec<&RawValue>, ApiError> {
    let list: Option<Vec<&RawValue>> = serde_json::from_str(raw).map_err(|error| {
        ApiError::invalid("invalid_type", format!("tools is no list: {error}")).at("tools")
    })?;
    Ok(list.unwrap_or_default())
}

#[derive(Default)]
struct Parser {
    offered: Vec<Offered>,
    shown: Vec<Tool>,
    names: HashSet<String>,
    echo: Vec<String>,
}

impl Parser {
    fn tool(&mut self, raw: &RawValue, namespace: Option<&str>, param: &str) -> Result<(), ApiError> {
        let mut tool: WireTool<'_> = field(Some(raw), param)?
            .ok_or_else(|| ApiError::bad_value(param, format!("{param} must be an object")))?;
        let kind = tool.kind.take();
        match kind.as_deref() {
            Some("function") => {
                if let Some(function) = tool.function {
                    tool = field(Some(function), &format!("{param}.function"))?.unwrap_or(tool);
                }
                self.function(&tool, namespace, param)
            }
            Some("custom") => self.custom(&tool, raw, namespace, param),
            Some("namespace") if namespace.is_none() => {
                self.echo.push(raw.get().to_owned());
                let name = required(tool.name.as_deref(), &format!("{param}.name"))?;
                for (idx, inner) in tool.tools.iter().flatten().enumerate() {
                    self.tool(inner, Some(name), &format!("{param}.tools[{idx}]"))?;
                }
                Ok(())
            }
            Some(other) => {
                tracing::debug!(param, kind = other, "a tool of a kind that is not run here is ignored");
                Ok(())
            }
            None => Err(missing(&format!("{param}.type"))),
        }
    }

    fn function(
        &mut self,
        tool: &WireTool<'_>,
        namespace: Option<&str>,
        param: &str,
    ) -> Result<(), ApiError> {
        let name = required(tool.name.as_deref(), &format!("{param}.name"))?;
        let parameters = tool.parameters.filter(|raw| raw.get() != "null");
        if parameters.is_some_and(|raw| !raw.get().trim_start().starts_with('{')) {
            let param = format!("{param}.parameters");
            return Err(ApiError::bad_value(&param, format!("{param} must be a JSON schema, an object")));
        }
        if namespace.is_none() {
            let (description, strict) = (tool.description.as_deref(), tool.strict);
            let echo = FunctionEcho { kind: "function", name, description, parameters, strict };
            self.echo.push(serde_json::to_string(&echo).expect("our own types serialize"));
        }
        let schema = parameters
            .map_or_else(|| r#"{"type":"object","properties":{}}"#.to_owned(), |raw| raw.get().to_owned());
        let input = Input::Json { schema, strict: tool.strict == Some(true) };
        self.offer(tool, input, namespace, param)
    }

    fn custom(
        &mut self,
        tool: &WireTool<'_>,
        raw: &RawValue,
        namespace: Option<&str>,
        param: &str,
    ) -> Result<(), ApiError> {
        if namespace.is_none() {
            self.echo.push(raw.get().to_owned());
        }
        let form = match &tool.format {
            Some(format) if format.kind == "grammar" => Some(grammar(format, &format!("{param}.format"))?),
            Some(format) if format.kind != "text" => {
                let param = format!("{param}.format.type");
                let message = format!("`{}` is no format; use text or grammar", format.kind);
                return Err(ApiError::bad_value(param, message));
            }
            _ => None,
        };
        self.offer(tool, Input::Text(form), namespace, param)
    }

    fn offer(
        &mut self,
        tool: &WireTool<'_>,
        input: Input,
        namespace: Option<&str>,
        param: &str,
    ) -> Result<(), ApiError> {
        let name = required(tool.name.as_deref(), &format!("{param}.name"))?;
        let flat = flat_name(namespace, name);
        if !self.names.insert(flat.clone()) {
            let message = format!("two tools have the name `{flat}`: rename one");
            return Err(ApiError::bad_value(format!("{param}.name"), message));
        }
        if self.offered.len() == MAX_TOOLS {
            return Err(ApiError::bad_value("tools", format!("more than {MAX_TOOLS} tools are offered")));
        }
        let description = tool.description.clone().unwrap_or_default();
        self.offered.push(Offered {
            name: name.to_owned(),
            namespace: namespace.map(str::to_owned),
            is_custom: matches!(input, Input::Text(_)),
            param: param.to_owned(),
        });
        self.shown.push(Tool { name: flat, description, input });
        Ok(())
    }
}

fn grammar(format: &WireFormat, param: &str) -> Result<TextGrammar, ApiError> {
    let definition = required(format.definition.as_deref(), &format!("{param}.definition"))?.to_owned();
    match format.syntax.as_deref() {
        Some("lark") => Ok(TextGrammar::Lark(definition)),
        Some("regex") => Ok(TextGrammar::Regex(definition)),
        Some(other) => {
            let param = format!("{param}.syntax");
            Err(ApiError::bad_value(param, format!("`{other}` is no syntax; use lark or regex")))
        }
        None => Err(missing(&format!("{param}.syntax"))),
    }
}

fn required<'a>(text: Option<&'a str>, param: &str) -> Result<&'a str, ApiError> {
    text.filter(|text| !text.is_empty()).ok_or_else(|| missing(param))
}

fn missing(param: &str) -> ApiError {
    ApiError::invalid("missing_required_parameter", format!("{param} is required")).at(param)
}

/// What the model may do with the tools.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum ToolChoice {
    None,
    #[default]
    Auto,
    Required,
    /// This one, by its flat name.
    Named(String),
    /// Only these, by their flat names.
    Allowed {
        names: Vec<String>,
        required: bool,
    },
}

#[derive(Deserialize)]
struct WireChoice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    namespace: Option<String>,
    mode: Option<String>,
    tools: Option<Vec<WireChoice>>,
}

impl ToolChoice {
    pub(crate) fn parse(raw: Option<&RawValue>) -> Result<Self, ApiError> {
        const PARAM: &str = "tool_choice";
        let Some(raw) = raw.filter(|raw| raw.get() != "null") else { return Ok(Self::Auto) };
        match raw.get() {
            "\"auto\"" => return Ok(Self::Auto),
            "\"none\"" => return Ok(Self::None),
            "\"required\"" => return Ok(Self::Required),
            other if other.starts_with('"') => {
                let message = format!("{other} is no tool choice; use auto, none, required or name a tool");
                return Err(ApiError::bad_value(PARAM, message));
            }
            _ => {}
        }
        let choice: WireChoice = field(Some(raw), PARAM)?.ok_or_else(|| missing(PARAM))?;
        match choice.kind.as_str() {
            "function" | "custom" => {
                let name = required(choice.name.as_deref(), "tool_choice.name")?;
                Ok(Self::Named(flat_name(choice.namespace.as_deref(), name)))
            }
            "allowed_tools" => {
                let required = choice.mode.as_deref() == Some("required");
                let tools = choice.tools.unwrap_or_default().into_iter();
                let names = tools
                    .filter_map(|tool| Some(flat_name(tool.namespace.as_deref(), tool.name.as_deref()?)))
                    .collect();
                Ok(Self::Allowed { names, required })
            }
            other => {
                let message =
                    format!("`{other}` is no tool choice that works here; name a function or custom tool");
                Err(ApiError::bad_value("tool_choice.type", message))
            }
        }
    }
}

/// The form of the answer.
#[derive(Debug, Clone, Default)]
pub(crate) enum Format {
    #[default]
    Text,
    JsonObject,
    JsonSchema {
        schema: String,
        strict: bool,
    },
}

/// `text`: the form of the answer, and how responses repeat it.
#[derive(Debug, Clone)]
pub(crate) struct TextSettings {
    pub(crate) format: Format,
    pub(crate) echo: Box<RawValue>,
}

#[derive(Deserialize)]
struct WireText<'a> {
    #[serde(borrow)]
    format: Option<&'a RawValue>,
    #[serde(borrow)]
    verbosity: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct WireTextFormat<'a> {
    #[serde(rename = "type")]
    kind: String,
    #[serde(borrow)]
    schema: Option<&'a RawValue>,
    strict: Option<bool>,
}

impl Default for TextSettings {
    fn default() -> Self {
        Self::parse(None).expect("the usual form of answers is one")
    }
}

impl TextSettings {
    pub(crate) fn parse(raw: Option<&RawValue>) -> Result<Self, ApiError> {
        let text: Option<WireText<'_>> = field(raw, "text")?;
        let (format, verbosity) = text.map_or((None, None), |text| (text.format, text.verbosity));
        let format = format.filter(|raw| raw.get() != "null");
        let wire: Option<WireTextFormat<'_>> = field(format, "text.format")?;
        let parsed = match wire {
            None => Format::Text,
            Some(wire) => match wire.kind.as_str() {
                "text" => Format::Text,
                "json_object" => Format::JsonObject,
                "json_schema" => {
                    let schema = wire.schema.ok_or_else(|| missing("text.format.schema"))?.get().to_owned();
                    Format::JsonSchema { schema, strict: wire.strict == Some(true) }
                }
                other => {
                    let message = format!("`{other}` is no format; use text, json_object or json_schema");
                    return Err(ApiError::bad_value("text.format.type", message));
                }
            },
        };
        let format = format.map_or(r#"{"type":"text"}"#, RawValue::get);
        let echo = match verbosity.map(RawValue::get).filter(|raw| *raw != "null") {
            Some(verbosity) => format!(r#"{{"format":{format},"verbosity":{verbosity}}}"#),
            None => format!(r#"{{"format":{format}}}"#),
        };
        let echo = RawValue::from_string(echo).map_err(|error| ApiError::internal(error.to_string()))?;
        Ok(Self { format: parsed, echo })
    }
}

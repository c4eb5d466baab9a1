//! The form that an output must have: calls of the offered tools, JSON of a schema, or what a grammar allows.
//!
//! Grammars are compiled here first, so that one that cannot be used is refused with its place in the request. Workers
//! compile them again, once, and follow them beside their samplers.

use std::sync::Arc;

use model::calls::{Choice, Input, TextGrammar, Tool, Trigger, answer};
use proto::v1;

use crate::error::ApiError;
use crate::state::Gateway;
use crate::wire::{Create, Format, ToolChoice, Tools};

/// Calls in one answer, when a call is required and several may be made at once.
const MAX_FORCED_CALLS: usize = 8;
const ANY_OBJECT: &str = r#"{"type":"object"}"#;

/// A grammar, and what it waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Constraint {
    grammar: Arc<str>,
    hash: [u8; 32],
    trigger: Option<Trigger>,
}

impl Constraint {
    /// Whether it rules the output from its first token on.
    pub(crate) fn is_forced(&self) -> bool {
        self.trigger.is_none()
    }

    /// BLAKE3 of the grammar's source.
    pub(crate) fn hash(&self) -> &[u8; 32] {
        &self.hash
    }

    /// As workers take it, with the hash alone for those that hold the grammar. `n_generated` tokens of the output are
    /// there already.
    pub(crate) fn to_wire(&self, n_generated: usize, spelling: Spelling) -> v1::Constraint {
        let triggers = self.trigger.iter().map(|trigger| {
            let trigger = match trigger {
                Trigger::Id(id) => v1::trigger::Trigger::Id(*id),
                Trigger::Text(text) => v1::trigger::Trigger::Text((*text).to_owned()),
            };
            v1::Trigger { trigger: Some(trigger) }
        });
        let generated = u32::try_from(n_generated).unwrap_or(u32::MAX);
        let grammar = match spelling {
            Spelling::Full => self.grammar.to_string(),
            Spelling::Hash => String::new(),
        };
        let grammar_hash = bytes::Bytes::copy_from_slice(&self.hash);
        v1::Constraint { grammar, triggers: triggers.collect(), generated, grammar_hash }
    }
}

/// How a grammar travels: of many tools it has tens of kilobytes, and it is the same every turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spelling {
    Full,
    Hash,
}

/// Whether finding the constraint may take milliseconds: something has to be compiled.
pub(crate) fn is_slow(create: &Create, tools: &Tools) -> bool {
    let is_free = matches!(create.text.format, Format::Text);
    match create.tool_choice {
        ToolChoice::None => !is_free,
        ToolChoice::Auto => {
            let is_known = create.parallel_tool_calls && tools.lazy.get().is_some();
            !is_free || !(tools.shown.is_empty() || is_known)
        }
        ToolChoice::Required | ToolChoice::Named(_) | ToolChoice::Allowed { .. } => true,
    }
}

/// The calls that an output may hold.
struct Calls {
    /// Places among the tools.
    allowed: Vec<usize>,
    /// There must be one.
    is_forced: bool,
    most: usize,
}

/// What the output of `create` must look like, if anything.
///
/// # Errors
/// Names the tool, schema or grammar that cannot be used.
pub(crate) fn constraint(
    gateway: &Gateway,
    create: &Create,
    tools: &Tools,
) -> Result<Option<Constraint>, ApiError> {
    let schema = answer_schema(gateway, create)?;
    let calls = calls(create, tools)?;
    if calls.allowed.is_empty() {
        let compile = |schema: String| {
            compiled(gateway, &answer(&schema)).map_err(|why| ApiError::bad_value("text.format.schema", why))
        };
        return schema.map(compile).transpose();
    }
    let is_usual = schema.is_none()
        && !calls.is_forced
        && calls.allowed.len() == tools.shown.len()
        && create.parallel_tool_calls;
    if let Some(known) = tools.lazy.get().filter(|_| is_usual) {
        return Ok(Some(known.clone()));
    }
    let format = gateway.text().prompts.format();
    let choice = match (&schema, calls.is_forced) {
        (None, false) if create.parallel_tool_calls => Choice::Lazy,
        (None, false) => Choice::LazyOnce,
        _ => Choice::Calls(calls.most),
    };
    // Where a form for answers is given, a call is one more possibility, unless there must be one.
    let answer = schema.as_deref().filter(|_| !calls.is_forced);
    let mut constraint =
        of_calls(gateway, tools, &calls.allowed, |tools| format.grammar(tools, choice, answer))?;
    if matches!(choice, Choice::Lazy | Choice::LazyOnce) {
        constraint.trigger = Some(format.trigger());
    }
    if is_usual {
        let _ = tools.lazy.set(constraint.clone());
    }
    Ok(Some(constraint))
}

fn calls(create: &Create, tools: &Tools) -> Result<Calls, ApiError> {
    let all = || (0..tools.shown.len()).collect::<Vec<_>>();
    let find = |name: &str| {
        tools.find(name).ok_or_else(|| {
            let message =
                format!("tool_choice names the tool `{name}`, which is not among the tools of the request");
            ApiError::bad_value("tool_choice", message)
        })
    };
    let several = if create.parallel_tool_calls { MAX_FORCED_CALLS } else { 1 };
    let most = create.max_tool_calls.map_or(several, |most| several.min(most as usize));
    let calls = match &create.tool_choice {
        ToolChoice::None => Calls { allowed: Vec::new(), is_forced: false, most },
        ToolChoice::Auto => Calls { allowed: all(), is_forced: false, most },
        ToolChoice::Required => Calls { allowed: all(), is_forced: true, most },
        ToolChoice::Named(name) => Calls { allowed: vec![find(name)?], is_forced: true, most: 1 },
        ToolChoice::Allowed { names, required } => {
            let allowed = names.iter().map(|name| find(name)).collect::<Result<_, _>>()?;
            Calls { allowed, is_forced: *required, most }
        }
    };
    if calls.is_forced && calls.allowed.is_empty() {
        let message = "tool_choice asks for a call, but no tool that can be called is offered";
        return Err(ApiError::bad_value("tool_choice", message));
    }
    Ok(calls)
}

/// The schema of answers, if they have a form. One that is not strict and cannot be used only asks for an object.
fn answer_schema(gateway: &Gateway, create: &Create) -> Result<Option<String>, ApiError> {
    match &create.text.format {
        Format::Text => Ok(None),
        Format::JsonObject => Ok(Some(ANY_OBJECT.to_owned())),
        Format::JsonSchema { schema, strict } => match compiled(gateway, &answer(schema)) {
            Ok(_) => Ok(Some(schema.clone())),
            Err(_) if !strict => Ok(Some(ANY_OBJECT.to_owned())),
            Err(why) => Err(ApiError::bad_value("text.format.schema", why)),
        },
    }
}

/// The grammar of calls of some tools. If it cannot be compiled, the tool at fault is found, and helped if it does not
/// insist.
fn of_calls(
    gateway: &Gateway,
    tools: &Tools,
    allowed: &[usize],
    grammar: impl Fn(&[&Tool]) -> String,
) -> Result<Constraint, ApiError> {
    let shown: Vec<&Tool> = allowed.iter().map(|&idx| &tools.shown[idx]).collect();
    if let Ok(constraint) = compiled(gateway, &grammar(&shown)) {
        return Ok(constraint);
    }
    let format = gateway.text().prompts.format();
    let mut usable = Vec::with_capacity(allowed.len());
    for &idx in allowed {
        let (mut tool, param) = (tools.shown[idx].clone(), &tools.offered[idx].param);
        let alone = |tool: &Tool| compiled(gateway, &format.grammar(&[tool], Choice::Calls(1), None));
        if let Err(why) = alone(&tool) {
            match &mut tool.input {
                Input::Json { schema, strict: false } => *schema = ANY_OBJECT.to_owned(),
                Input::Json { .. } => return Err(ApiError::bad_value(format!("{param}.parameters"), why)),
                Input::Text(form) => {
                    let why =
                        form.as_ref().map_or(Ok(()), |form| alone_error(gateway, form)).err().unwrap_or(why);
                    return Err(ApiError::bad_value(format!("{param}.format.definition"), why));
                }
            }
        }
        usable.push(tool);
    }
    let usable: Vec<&Tool> = usable.iter().collect();
    compiled(gateway, &grammar(&usable)).map_err(|why| ApiError::bad_value("tools", why))
}

/// What is wrong with a client's own grammar, with its place in that.
fn alone_error(gateway: &Gateway, form: &TextGrammar) -> Result<(), String> {
    let source = match form {
        TextGrammar::Lark(source) => source.clone(),
        TextGrammar::Regex(pattern) => model::grammar::source::regex(pattern),
    };
    compiled(gateway, &source).map(|_| ())
}

fn compiled(gateway: &Gateway, grammar: &str) -> Result<Constraint, String> {
    let grammar = gateway.text().grammars.compile(grammar).map_err(|error| error.to_string())?;
    Ok(Constraint { grammar: grammar.source(), hash: *grammar.hash(), trigger: None })
}

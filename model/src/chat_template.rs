//! Renders a model's chat template (Jinja, as Hugging Face writes them) to text.
//!
//! The environment is what `transformers` offers to templates: trimmed blocks, loop controls, Python methods, its own
//! `tojson`, `raise_exception` and `strftime_now`. Turning text into ids is [`crate::prompt`]'s work.

mod clock;
mod json;

use std::fmt;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, ErrorKind, context};
use serde::Deserialize;

use crate::checkpoint::Checkpoint;
use crate::tokenizer::Tokenizer;

const NAME: &str = "chat_template";

/// Why a template cannot be used or refuses a dialogue.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the model has no chat template (`chat_template`): use an instruct model")]
    Missing,
    #[error("the model's chat template is not valid: {0}")]
    Syntax(String),
    #[error("the model's chat template refuses these messages: {0}")]
    Render(String),
}

/// Who wrote a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    System,
    /// Rendered as system unless the template knows it.
    Developer,
    User,
    Assistant,
    Tool,
}

/// A message given as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    pub role: Role,
    pub content: Content,
}

/// The text of a message. Nothing in it can become a special token; those that belong there stand beside it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Content {
    text: String,
    /// (before this byte of the text, id), in order.
    specials: Vec<(usize, u32)>,
}

impl Content {
    pub fn text(&self) -> &str {
        &self.text
    }

    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.specials.is_empty()
    }

    pub fn push_str(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Appends a special token, such as the marker of a tool call.
    pub fn push_special(&mut self, id: u32) {
        self.specials.push((self.text.len(), id));
    }

    /// What stands behind the first `n_bytes` bytes of the text. Special tokens right behind them stay.
    pub(crate) fn behind(&self, n_bytes: usize) -> Self {
        let specials =
            self.specials.iter().filter(|(at, _)| *at >= n_bytes).map(|(at, id)| (at - n_bytes, *id));
        Self { text: self.text[n_bytes..].to_owned(), specials: specials.collect() }
    }

    /// Appends all of `other`.
    pub fn append(&mut self, other: &Self) {
        let from = self.text.len();
        self.text.push_str(&other.text);
        self.specials.extend(other.specials.iter().map(|(at, id)| (from + at, *id)));
    }

    /// (before this byte of the text, id) of each special token, in order.
    pub fn specials(&self) -> &[(usize, u32)] {
        &self.specials
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Self { text, specials: Vec::new() }
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

/// Whether the model is to answer next, so that the prompt for its turn is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reply {
    Expected,
    None,
}

/// A compiled template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
    knows_developer: bool,
    reads_clock: bool,
    knows_reasoning: bool,
    source: String,
}

impl ChatTemplate {
    /// Compiles `source`; `bos` and `eos` are the texts of those tokens, empty if there are none.
    ///
    /// # Errors
    /// [`Error::Syntax`].
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self, Error> {
        let mut environment = Environment::new();
        let blocks = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(blocks.expect("the delimiters are the usual ones"));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", json::to_json);
        environment.add_function("strftime_now", clock::strftime_now);
        environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_template_owned(NAME, source.to_owned()).map_err(|e| Error::Syntax(e.to_string()))?;
        Ok(Self {
            environment,
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            knows_developer: source.contains("developer"),
            reads_clock: source.contains("strftime_now"),
            knows_reasoning: source.contains("</think>"),
            source: source.to_owned(),
        })
    }

    /// The template that the files of `checkpoint` carry.
    ///
    /// # Errors
    /// [`Error::Missing`] for a base model, [`Error::Syntax`].
    pub fn read(checkpoint: &Checkpoint, tokenizer: &Tokenizer) -> Result<Self, Error> {
        let text = |id: Option<u32>| {
            id.map_or_else(String::new, |id| String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned())
        };
        let (bos, eos) = (text(tokenizer.bos_id()), text(tokenizer.eos_id()));
        Self::new(&source(checkpoint).ok_or(Error::Missing)?, &bos, &eos)
    }

    /// The text of a whole dialogue.
    ///
    /// # Errors
    /// [`Error::Render`] when the template raises, for example on an order of roles that it does not know.
    pub fn render(&self, messages: &[(Role, &str)], reply: Reply) -> Result<String, Error> {
        self.render_with(messages, reply, Value::UNDEFINED)
    }

    /// The text of a whole dialogue in which tools are offered. `tools` is what [`tools_value`](Self::tools_value) gives.
    ///
    /// # Errors
    /// As for [`Self::render`].
    pub(crate) fn render_with(
        &self,
        messages: &[(Role, &str)],
        reply: Reply,
        tools: Value,
    ) -> Result<String, Error> {
        let messages = messages.iter().map(|(role, content)| {
            let said = [("content", Value::from(*content)), ("role", Value::from(self.role_name(*role)))];
            // Some templates want one for results, of nine characters.
            let id = (*role == Role::Tool).then(|| ("tool_call_id", Value::from("call00000")));
            Value::from_pairs(said.into_iter().chain(id))
        });
        let context = context! {
            messages => messages.collect::<Vec<Value>>(),
            add_generation_prompt => reply == Reply::Expected,
            tools => tools,
            bos_token => &self.bos,
            eos_token => &self.eos,
        };
        let template = self.environment.get_template(NAME).expect("added when the environment was made");
        template.render(context).map_err(|e| Error::Render(e.to_string()))
    }

    /// Whether the template's source has this text in it.
    pub(crate) fn mentions(&self, text: &str) -> bool {
        self.source.contains(text)
    }

    /// Tools as templates take them, from the JSON text of each; the order of keys is kept.
    ///
    /// # Errors
    /// When one is no JSON.
    pub(crate) fn tools_value(tools: impl Iterator<Item = String>) -> Result<Value, Error> {
        let parse = |tool: String| serde_json::from_str(&tool).map_err(|e| Error::Render(e.to_string()));
        Ok(Value::from(tools.map(parse).collect::<Result<Vec<Value>, _>>()?))
    }

    /// Whether two renderings of the same messages can differ because time has passed.
    pub(crate) fn reads_clock(&self) -> bool {
        self.reads_clock
    }

    /// Whether the template treats `<think>` parts of a message in a way of its own.
    pub(crate) fn knows_reasoning(&self) -> bool {
        self.knows_reasoning
    }

    fn role_name(&self, role: Role) -> &'static str {
        match role {
            Role::Developer if self.knows_developer => "developer",
            Role::System | Role::Developer => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").finish_non_exhaustive()
    }
}

/// `chat_template` of a `tokenizer_config.json`.
#[derive(Deserialize)]
struct Config {
    chat_template: Templates,
}

/// One template, or several of which one is the default.
#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<Named>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

fn source(checkpoint: &Checkpoint) -> Option<String> {
    let texts = match checkpoint {
        Checkpoint::Gguf(gguf) => return gguf.str("tokenizer.chat_template").ok().map(str::to_owned),
        Checkpoint::Folder(folder) => &folder.texts,
    };
    if let Some(template) = &texts.template {
        return String::from_utf8(template.clone()).ok();
    }
    let config: Config = serde_json::from_slice(texts.tokenizer_config.as_deref()?).ok()?;
    match config.chat_template {
        Templates::One(template) => Some(template),
        Templates::Named(all) => all.into_iter().find(|one| one.name == "default").map(|one| one.template),
    }
}

#[cfg(test)]
mod tests;

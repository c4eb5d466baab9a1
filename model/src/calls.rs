//! Tool calls as models write them: how tools, calls and results are put into prompts, and how calls are found in
//! outputs.
//!
//! | style | a call | known by the template's text |
//! |---|---|---|
//! | tagged (Hermes, Qwen) | `<tool_call>\n{"name": …, "arguments": …}\n</tool_call>` | `<tool_call>`; also the fallback |
//! | Mistral | `[TOOL_CALLS][{"name": …, "arguments": …}]`, `[TOOL_CALLS]name[ARGS]{…}` | `[TOOL_CALLS]` |
//! | Llama 3 | `{"name": …, "parameters": …}` as the whole answer | `"parameters"` and `ipython` |
//!
//! In every style a JSON object, bare at the start of the answer or in a fenced block, that names a declared tool is a
//! call too: Qwen2.5-Coder answers so. Tools with free text as input are called in a form of our own, whose text is not
//! escaped, so that a grammar can rule it and its pieces can be streamed as they are:
//!
//! ```text
//! <tool_call>
//! {"name": "apply_patch"}
//! *** Begin Patch
//! …
//! </tool_call>
//! ```

mod find;
mod grammar;
mod header;
mod render;

use std::sync::Arc;

use crate::chat_template::ChatTemplate;
use crate::tokenizer::Tokenizer;

pub use find::{CallFinder, Piece, Thinks};
pub use grammar::{Choice, Trigger, answer};
pub use render::Call;

/// A tool as a model is told of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tool {
    /// As the model is to write it.
    pub name: String,
    pub description: String,
    pub input: Input,
}

/// What a tool takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// A JSON object. `schema` is JSON text; when `strict`, outputs are held to all of it.
    Json { schema: String, strict: bool },
    /// Free text, of any form or as a grammar allows.
    Text(Option<TextGrammar>),
}

/// The form of a tool's free text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TextGrammar {
    /// In the dialect of `llguidance`, beginning at `start`.
    Lark(String),
    Regex(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    Tagged,
    Mistral,
    Llama,
}

/// A text that opens or closes something; when it is one token, only that token counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Marker {
    text: &'static str,
    id: Option<u32>,
}

impl Marker {
    fn new(text: &'static str, tokenizer: &Tokenizer) -> Self {
        Self { text, id: tokenizer.special_id(text) }
    }
}

/// How one model speaks of tools and shows its reasoning.
#[derive(Debug, Clone)]
pub struct CallFormat {
    style: Style,
    open: Marker,
    close: Option<Marker>,
    /// Before the arguments of a call of the newer Mistral models.
    args: Option<Marker>,
    /// Around reasoning, if the model knows it.
    think: Option<(Marker, Marker)>,
    /// Tokens that end the model's turn.
    ends: Vec<u32>,
    /// The template shows tools to the model by itself.
    templated: bool,
    /// The template has messages of the role `tool`.
    has_results: bool,
}

impl CallFormat {
    /// The format that `template` shows.
    pub fn of(template: &ChatTemplate, tokenizer: &Tokenizer) -> Arc<Self> {
        let marker = |text| Marker::new(text, tokenizer);
        let templated = template.mentions("tools");
        let (style, open, close) = if template.mentions("[TOOL_CALLS]") {
            (Style::Mistral, marker("[TOOL_CALLS]"), None)
        } else if template.mentions("ipython") && template.mentions("parameters") {
            (Style::Llama, marker("<|python_tag|>"), None)
        } else {
            (Style::Tagged, marker("<tool_call>"), Some(marker("</tool_call>")))
        };
        Arc::new(Self {
            style,
            open,
            close,
            args: (style == Style::Mistral).then(|| marker("[ARGS]")),
            think: template.knows_reasoning().then(|| (marker("<think>"), marker("</think>"))),
            ends: tokenizer.end_of_turn_ids().to_vec(),
            templated,
            has_results: template.mentions("'tool'") || template.mentions("\"tool\""),
        })
    }

    /// Whether the chat template shows the tools it is given; otherwise [`Self::tools_text`] has to stand in the
    /// instructions.
    pub fn is_templated(&self) -> bool {
        self.templated
    }

    /// The token that ends reasoning, if it is one.
    pub(crate) fn end_of_thinking(&self) -> Option<u32> {
        self.think.and_then(|(_, close)| close.id)
    }

    /// Whether the model thinks aloud before it answers.
    pub fn knows_reasoning(&self) -> bool {
        self.think.is_some()
    }
}

#[cfg(test)]
mod tests;

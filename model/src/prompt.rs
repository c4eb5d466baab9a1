//! From messages to token ids, so that a conversation's ids only ever grow: delta tokenization.
//!
//! Three rules keep `extend` in any number of steps equal to `render_all` of the whole dialogue:
//! 1. Text is cut only at special tokens that the *template* writes. They are emitted as ids; everything between two of
//!    them (role line and content) is encoded together as ordinary text, so that `<|im_end|>` in a message stays text.
//! 2. Ids that the model generated are never decoded and encoded again.
//! 3. What the template writes between the end of the log and the new messages (the *bridge*) is found by rendering
//!    stand-in messages in front of the new ones and taking what comes after the stand-ins.
//!
//! Contents are not rendered: placeholders are, and the result, a [`Shape`](shape::Shape), is cached by the kinds of its
//! messages. A turn whose kinds were seen before runs no template at all; its cost is the encoding of its contents.

mod classify;
mod reasoning;
mod shape;

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::calls::{CallFormat, Thinks, Tool};
use crate::chat_template::{self, ChatTemplate, Content, Message, Reply, Role};
use crate::tokenizer::Tokenizer;
use minijinja::value::Value;
use shape::{Shape, Source};

/// Shapes kept; agents use a handful. The cache starts anew when it is full.
const MAX_SHAPES: usize = 256;
/// Longer extensions (a whole history sent again) are unlikely to come again with the same kinds.
const MAX_CACHED_MESSAGES: usize = 16;

/// Why a prompt cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Template(#[from] chat_template::Error),
    #[error("the model's chat template leaves out the content of a {0:?} message")]
    Dropped(Role),
    #[error(
        "the model's chat template changes the content of a {0:?} message in a way that is not supported"
    )]
    Transformed(Role),
    #[error(
        "the model's chat template cannot be continued after {after:?}: render the whole dialogue instead"
    )]
    NotAppendable { after: LogEnd },
}

/// An entry of a conversation as the token log knows it.
#[derive(Debug, Clone, Copy)]
pub enum Entry<'a> {
    Message(&'a Message),
    /// Ids as the model generated them, with or without an end-of-turn id at their end.
    Generated {
        ids: &'a [u32],
    },
}

/// Where a token log ends, as far as the template is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LogEnd {
    Empty,
    /// After a rendered message, without the prompt for a reply.
    Message,
    /// After the prompt for a reply, nothing generated yet.
    Prompt,
    /// After generated ids; `closed` when the last one is an end-of-turn id.
    Generated {
        closed: bool,
    },
}

/// What a template does to the text before its newest message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TemplateClass {
    /// Nothing: every rendering starts with the rendering of fewer messages.
    AppendOnly,
    /// Changes it (drops old reasoning) when a user message comes, but not between tool calls.
    AppendOnlyWithinToolLoop,
    /// Changes it at other times too, or writes text that cannot be cut: only `render_all` is exact.
    Rewrites,
}

/// Builds prompts for one model. Cheap to clone; shared between threads.
#[derive(Debug, Clone)]
pub struct PromptBuilder {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    template: ChatTemplate,
    tokenizer: Arc<Tokenizer>,
    class: TemplateClass,
    format: Arc<CallFormat>,
    thinks: Thinks,
    /// What opens the reasoning when the template does.
    opener: Vec<u32>,
    shapes: Mutex<HashMap<ShapeKey, Arc<Shape>>>,
}

/// All that decides a shape. Empty content is a kind of its own because templates test for it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ShapeKey {
    end: LogEnd,
    messages: Vec<(Role, bool)>,
    reply: Reply,
}

impl PromptBuilder {
    /// Tries the template on synthetic dialogues to find its class.
    ///
    /// # Errors
    /// When the template renders none of them.
    pub fn new(template: ChatTemplate, tokenizer: Arc<Tokenizer>) -> Result<Self, Error> {
        let class = classify::classify(&template, &tokenizer)?;
        let format = CallFormat::of(&template, &tokenizer);
        let prompt = template.render(&[(Role::User, "?")], Reply::Expected).unwrap_or_default();
        let thinks = thinks(&prompt, &format);
        let opener = reasoning::opener(&prompt, &tokenizer);
        let inner = Inner { template, tokenizer, class, format, thinks, opener, shapes: Mutex::default() };
        Ok(Self { inner: Arc::new(inner) })
    }

    pub fn class(&self) -> TemplateClass {
        self.inner.class
    }

    pub fn template(&self) -> &ChatTemplate {
        &self.inner.template
    }

    /// How the model writes calls.
    pub fn format(&self) -> &Arc<CallFormat> {
        &self.inner.format
    }

    /// Whether an answer begins within reasoning, because the template has opened it.
    pub fn thinks(&self) -> Thinks {
        self.inner.thinks
    }

    /// What ends reasoning that the template has opened, for an answer that begins with something else.
    pub fn end_of_thinking(&self) -> Vec<u32> {
        self.inner.tokenizer.encode_with_specials("\n</think>\n\n")
    }

    /// The ids of a dialogue that begins with `messages` and in which `tools` are offered.
    ///
    /// # Errors
    /// When the template refuses the messages or the tools.
    pub fn start(&self, messages: &[Message], reply: Reply, tools: &[Tool]) -> Result<Vec<u32>, Error> {
        if tools.is_empty() {
            return self.extend(LogEnd::Empty, messages, reply);
        }
        let entries: Vec<Entry<'_>> = messages.iter().map(Entry::Message).collect();
        self.render_all(&entries, reply, tools)
    }

    /// The ids to append to a log that ends as `end`, for the messages `new` and, when a reply is expected, the prompt
    /// for it. With nothing to write (no message, and no reply expected or its prompt already there) there are none.
    ///
    /// Tool results of one step must come in one call: some templates put them in one block.
    ///
    /// # Errors
    /// When the template refuses the messages or cannot be continued; [`Error::NotAppendable`] calls for `render_all`.
    pub fn extend(&self, end: LogEnd, new: &[Message], reply: Reply) -> Result<Vec<u32>, Error> {
        if new.is_empty() && (reply == Reply::None || end == LogEnd::Prompt) {
            return Ok(Vec::new());
        }
        let shape = self.inner.shape(end, new, reply)?;
        let mut ids = Vec::new();
        shape.fill(&self.inner.tokenizer, |index| Some(&new[index].content), |_| &[], &mut ids);
        if end == LogEnd::Empty {
            self.inner.begin_with_bos(&mut ids);
        }
        Ok(ids)
    }

    /// The ids of a whole dialogue in which `tools` are offered: messages rendered, generated ids as they are.
    /// O(dialogue).
    ///
    /// # Errors
    /// When the template refuses the messages or the tools.
    pub fn render_all(&self, entries: &[Entry<'_>], reply: Reply, tools: &[Tool]) -> Result<Vec<u32>, Error> {
        let inner = &self.inner;
        let offer = inner.offer(entries, tools)?;
        let mut entries = without_retried(entries, reply);
        if let Some(system) = &offer.system {
            let replaced = usize::from(is_system(entries.first()));
            entries.splice(..replaced, [Entry::Message(system)]);
        }
        if entries.is_empty() && reply == Reply::None {
            return Ok(Vec::new());
        }
        let cut = inner.without_old_reasoning(&entries);
        for (entry, cut) in entries.iter_mut().zip(&cut) {
            if let Some(message) = cut {
                *entry = Entry::Message(message);
            }
        }
        let kept = inner.kept(&entries);
        let sources: Vec<Source> = entries.iter().map(|entry| inner.source(entry)).collect();
        let text = inner.render_with(&sources, reply, offer.value)?;
        let mut shape = Shape::compile(&text, &sources, None, &inner.tokenizer)?;
        if reply == Reply::None && matches!(entries.last(), Some(Entry::Generated { .. })) {
            // The log ends with what was generated; what closes it belongs to the next extension.
            shape.truncate_after_generated();
        }
        let content = |index: usize| match entries[index] {
            Entry::Message(message) => Some(&message.content),
            Entry::Generated { .. } => None,
        };
        let generated = |index: usize| match (&kept[index], entries[index]) {
            (Some(ids), _) => ids,
            (None, Entry::Generated { ids }) => ids,
            (None, Entry::Message(_)) => &[],
        };
        let mut ids = Vec::new();
        shape.fill(&inner.tokenizer, content, generated, &mut ids);
        inner.begin_with_bos(&mut ids);
        Ok(ids)
    }
}

/// How tools enter a rendering.
struct Offer {
    /// For templates that show them.
    value: Value,
    /// The system message with the tools in it, for those that do not.
    system: Option<Message>,
}

fn is_system(entry: Option<&Entry<'_>>) -> bool {
    matches!(entry, Some(Entry::Message(message)) if matches!(message.role, Role::System | Role::Developer))
}

/// A template that opens the reasoning leaves its marker at the end of the prompt.
fn thinks(prompt: &str, format: &CallFormat) -> Thinks {
    match format.knows_reasoning() && prompt.trim_end().ends_with("<think>") {
        true => Thinks::Already,
        false => Thinks::MayBegin,
    }
}

/// A reply of which nothing was generated, and that is asked for again right away, has left only its prompt in the log,
/// which serves the next attempt.
fn without_retried<'a>(entries: &[Entry<'a>], reply: Reply) -> Vec<Entry<'a>> {
    let is_retried = |index: usize| {
        let retried = match entries.get(index + 1) {
            Some(next) => matches!(next, Entry::Generated { .. }),
            None => reply == Reply::Expected,
        };
        retried && matches!(entries[index], Entry::Generated { ids: [] })
    };
    (0..entries.len()).filter(|index| !is_retried(*index)).map(|index| entries[index]).collect()
}

impl Inner {
    fn offer(&self, entries: &[Entry<'_>], tools: &[Tool]) -> Result<Offer, Error> {
        if tools.is_empty() {
            return Ok(Offer { value: Value::UNDEFINED, system: None });
        }
        if self.format.is_templated() {
            let json = tools.iter().map(|tool| self.neutral(&tool.template_json()));
            return Ok(Offer { value: ChatTemplate::tools_value(json)?, system: None });
        }
        let tools = self.format.tools_text(tools);
        let content: Content = match entries.first() {
            Some(Entry::Message(message)) if is_system(entries.first()) && !message.content.is_empty() => {
                format!("{}\n\n{tools}", message.content.text()).into()
            }
            _ => tools.into(),
        };
        Ok(Offer { value: Value::UNDEFINED, system: Some(Message { role: Role::System, content }) })
    }

    /// JSON in which no special token stands: its text is broken by a space of no width.
    fn neutral(&self, json: &str) -> String {
        let mut neutral = String::with_capacity(json.len());
        let mut from = 0;
        for (range, _) in self.tokenizer.find_specials(json) {
            let first = json[range.start..].chars().next().map_or(0, char::len_utf8);
            neutral.push_str(&json[from..range.start + first]);
            neutral.push('\u{200b}');
            from = range.start + first;
        }
        neutral.push_str(&json[from..]);
        neutral
    }

    /// Puts the first token of every dialogue in front when the model wants one and the template has not written it.
    fn begin_with_bos(&self, ids: &mut Vec<u32>) {
        if let Some(bos) = self.tokenizer.leading_bos()
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
    }

    /// The cached shape of an extension, or a new one.
    fn shape(&self, end: LogEnd, new: &[Message], reply: Reply) -> Result<Arc<Shape>, Error> {
        let messages = new.iter().map(|message| (message.role, message.content.is_empty())).collect();
        let key = ShapeKey { end, messages, reply };
        if let Some(shape) = self.shapes.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(Arc::clone(shape));
        }
        let sources: Vec<Source> = new.iter().map(Source::of).collect();
        let shape = Arc::new(self.extension(end, &sources, reply)?);
        if new.len() <= MAX_CACHED_MESSAGES && !self.template.reads_clock() {
            let mut shapes = self.shapes.lock().unwrap_or_else(PoisonError::into_inner);
            if shapes.len() >= MAX_SHAPES {
                shapes.clear();
            }
            shapes.insert(key, Arc::clone(&shape));
        }
        Ok(shape)
    }

    /// What to append to a log that ends as `end`, found by rendering stand-ins for what the log holds.
    fn extension(&self, end: LogEnd, new: &[Source], reply: Reply) -> Result<Shape, Error> {
        match end {
            LogEnd::Empty => {
                let text = self.render(new, reply)?;
                Shape::compile(&text, new, None, &self.tokenizer)
            }
            LogEnd::Message => self.after_message(new, reply),
            LogEnd::Prompt => self.after_reply(false, end, new, reply),
            LogEnd::Generated { closed } => self.after_reply(closed, end, new, reply),
        }
    }

    /// The extension of a log that ends in the turn of the assistant, with or without its end-of-turn id.
    fn after_reply(&self, closed: bool, end: LogEnd, new: &[Source], reply: Reply) -> Result<Shape, Error> {
        let sources = [&[Source::StandIn(Role::User), Source::StandIn(Role::Assistant)], new].concat();
        let text = self.render(&sources, reply)?;
        let tail = shape::after(&text, 1).ok_or(Error::NotAppendable { after: end })?;
        Ok(Shape::compile(tail, &sources, Some(closed), &self.tokenizer)?.without_stand_ins(2))
    }

    /// The extension of a log that ends in a rendered message of any role. The template may care about the role before
    /// the first new message, so the order that dialogues have is tried first.
    fn after_message(&self, new: &[Source], reply: Reply) -> Result<Shape, Error> {
        const AFTER_USER: &[Source] = &[Source::StandIn(Role::User)];
        const AFTER_ASSISTANT: &[Source] = &[Source::StandIn(Role::User), Source::StandIn(Role::Assistant)];
        let reply_comes_next = new.first().is_none_or(|source| source.role() == Role::Assistant);
        let candidates =
            if reply_comes_next { [AFTER_USER, AFTER_ASSISTANT] } else { [AFTER_ASSISTANT, AFTER_USER] };
        let mut first_error = None;
        for stand_ins in candidates {
            match self.after_stand_ins(stand_ins, new, reply) {
                Ok(shape) => return Ok(shape),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        Err(first_error.expect("there are two candidates"))
    }

    fn after_stand_ins(&self, stand_ins: &[Source], new: &[Source], reply: Reply) -> Result<Shape, Error> {
        let not_appendable = Error::NotAppendable { after: LogEnd::Message };
        let sources = [stand_ins, new].concat();
        let (before, after) = (self.render(stand_ins, Reply::None)?, self.render(&sources, reply)?);
        let last = stand_ins.len() - 1;
        let (Some(before), Some(after)) = (shape::after(&before, last), shape::after(&after, last)) else {
            return Err(not_appendable);
        };
        match after.strip_prefix(before) {
            Some(delta) if shape::is_clean_cut(before, delta, &self.tokenizer) => {
                Ok(Shape::compile(delta, &sources, None, &self.tokenizer)?.without_stand_ins(stand_ins.len()))
            }
            _ => Err(not_appendable),
        }
    }

    /// Up to where the template drops reasoning.
    fn drops_until(&self, entries: &[Entry<'_>]) -> usize {
        // As Qwen3's template has it: what a tool has said is no question, whoever brings it.
        let is_result =
            |text: &str| text.starts_with("<tool_response>") && text.ends_with("</tool_response>");
        let is_question = |entry: &Entry<'_>| match entry {
            Entry::Message(message) => {
                message.role == Role::User && !is_result(message.content.text().trim())
            }
            Entry::Generated { .. } => false,
        };
        match self.class {
            TemplateClass::AppendOnlyWithinToolLoop => {
                entries.iter().rposition(is_question).unwrap_or_default()
            }
            TemplateClass::AppendOnly | TemplateClass::Rewrites => 0,
        }
    }

    /// The assistant's messages as the template would write them, where that is not all of them.
    fn without_old_reasoning(&self, entries: &[Entry<'_>]) -> Vec<Option<Message>> {
        let drops_until = self.drops_until(entries);
        let cut = |(idx, entry): (usize, &Entry<'_>)| match entry {
            Entry::Message(message) if idx < drops_until && message.role == Role::Assistant => {
                let content = reasoning::answer_of(&message.content, self.format.end_of_thinking())?;
                Some(Message { role: Role::Assistant, content })
            }
            _ => None,
        };
        entries.iter().enumerate().map(cut).collect()
    }

    /// The generated ids as the template would keep them, where that is not all of them.
    fn kept<'a>(&self, entries: &[Entry<'a>]) -> Vec<Option<Cow<'a, [u32]>>> {
        let drops_until = self.drops_until(entries);
        let kept = |(idx, entry): (usize, &Entry<'a>)| match entry {
            Entry::Generated { ids } if idx < drops_until => {
                Some(reasoning::without(ids, self.thinks, &self.tokenizer))
            }
            Entry::Generated { ids } if self.thinks == Thinks::Already => {
                reasoning::opened(ids, &self.opener, &self.tokenizer)
            }
            _ => None,
        };
        entries.iter().enumerate().map(kept).collect()
    }

    fn source(&self, entry: &Entry<'_>) -> Source {
        match entry {
            Entry::Message(message) => Source::of(message),
            Entry::Generated { ids } => {
                Source::Generated { closed: ids.last().is_some_and(|id| self.tokenizer.is_end_of_turn(*id)) }
            }
        }
    }

    /// The template's text with a placeholder for each source.
    fn render(&self, sources: &[Source], reply: Reply) -> Result<String, Error> {
        self.render_with(sources, reply, Value::UNDEFINED)
    }

    fn render_with(&self, sources: &[Source], reply: Reply, tools: Value) -> Result<String, Error> {
        let contents: Vec<String> =
            sources.iter().enumerate().map(|(index, source)| source.placeholder(index)).collect();
        let messages: Vec<(Role, &str)> = sources
            .iter()
            .zip(&contents)
            .map(|(source, content)| (source.role(), content.as_str()))
            .collect();
        Ok(self.template.render_with(&messages, reply, tools)?)
    }
}

//! A rendering with holes: what the template writes around contents that are not known yet.
//!
//! ```text
//! <|im_start|>  user\n ⟨content 0⟩  <|im_end|>  \n  <|im_start|>  assistant\n
//! Ids           Run                 Ids ────────────────────────────────────
//! ```
//! Contents enter the template as placeholders: private-use characters around the message's index. White space around
//! them shows whether the template trims: what is missing of it after rendering is trimmed from real contents too.

use crate::chat_template::{Content, Message, Role};
use crate::tokenizer::Tokenizer;

use super::Error;

const OPEN: char = '\u{F8F0}';
const CLOSE: char = '\u{F8F1}';
/// White space before and after a placeholder. The em space tells it from any that a template writes; the line ends show
/// `strip('\n')`, and are more than a template writes in a row.
const PROBE_START: &str = "\n\n\n\n\n\n\n\n\u{2003}\n";
const PROBE_END: &str = "\n\u{2003}\n\n\n\n\n\n\n\n";
const PROBE_MARK: char = '\u{2003}';
/// What is left of them by `lstrip('\n')` and `rstrip('\n')`.
const PROBE_START_STRIPPED: &str = "\u{2003}\n";
const PROBE_END_STRIPPED: &str = "\n\u{2003}";

/// Where the content of a message comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// A message given as text.
    Text(Role),
    /// A message with empty content.
    Empty(Role),
    /// An assistant's turn whose ids are kept; `closed` when they end with an end-of-turn id.
    Generated { closed: bool },
    /// A message that is in the log already.
    StandIn(Role),
}

impl Source {
    pub(super) fn of(message: &Message) -> Self {
        if message.content.is_empty() { Self::Empty(message.role) } else { Self::Text(message.role) }
    }

    pub(super) fn role(self) -> Role {
        match self {
            Self::Text(role) | Self::Empty(role) | Self::StandIn(role) => role,
            Self::Generated { .. } => Role::Assistant,
        }
    }

    /// What stands for the content of message `index` while rendering.
    pub(super) fn placeholder(self, index: usize) -> String {
        match self {
            Self::Text(_) => format!("{PROBE_START}{OPEN}{index}{CLOSE}{PROBE_END}"),
            Self::Empty(_) => String::new(),
            Self::Generated { .. } | Self::StandIn(_) => format!("{OPEN}{index}{CLOSE}"),
        }
    }
}

/// The part of a rendering after the placeholder of the stand-in `index`.
pub(super) fn after(text: &str, index: usize) -> Option<&str> {
    let placeholder = format!("{OPEN}{index}{CLOSE}");
    Some(&text[text.rfind(&placeholder)? + placeholder.len()..])
}

/// Whether encoding `before` and `delta` apart gives what encoding them together gives: a special token must stand on
/// one side of the cut.
pub(super) fn is_clean_cut(before: &str, delta: &str, tokenizer: &Tokenizer) -> bool {
    let ends = tokenizer.find_specials(before).last().is_some_and(|(range, _)| range.end == before.len());
    let starts = tokenizer.find_specials(delta).next().is_some_and(|(range, _)| range.start == 0);
    ends || starts || delta.is_empty()
}

/// See the module's header.
#[derive(Debug)]
pub(super) struct Shape {
    pieces: Vec<Piece>,
}

#[derive(Debug)]
enum Piece {
    /// Special tokens, and text of the template alone between them.
    Ids(Vec<u32>),
    /// Encoded together as ordinary text.
    Run(Vec<Part>),
    /// The generated ids of this message.
    Generated(usize),
}

#[derive(Debug)]
enum Part {
    Text(String),
    Content { message: usize, start: Trim, end: Trim },
}

/// What the template trims from one side of a content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trim {
    Nothing,
    LineEnds,
    WhiteSpace,
}

impl Shape {
    /// Cuts a rendering of `sources` at its special tokens and placeholders. `after_reply` is Some when the text begins
    /// right behind an assistant's turn; if that is closed, its end-of-turn marker is left out.
    pub(super) fn compile(
        text: &str,
        sources: &[Source],
        after_reply: Option<bool>,
        tokenizer: &Tokenizer,
    ) -> Result<Self, Error> {
        let mut compiler = Compiler {
            sources,
            tokenizer,
            pieces: Vec::new(),
            run: Vec::new(),
            after_reply,
            seen: vec![false; sources.len()],
        };
        let mut from = 0;
        for (range, id) in tokenizer.find_specials(text) {
            compiler.text(&text[from..range.start])?;
            compiler.special(id);
            from = range.end;
        }
        compiler.text(&text[from..])?;
        compiler.end_run();
        let unseen = sources
            .iter()
            .zip(&compiler.seen)
            .find(|(source, seen)| matches!(source, Source::Text(_) | Source::Generated { .. }) && !**seen);
        if let Some((source, _)) = unseen {
            return Err(Error::Dropped(source.role()));
        }
        Ok(Self { pieces: compiler.pieces })
    }

    /// Counts messages from the first one behind `n` stand-ins.
    pub(super) fn without_stand_ins(mut self, n: usize) -> Self {
        for piece in &mut self.pieces {
            let Piece::Run(parts) = piece else { continue };
            for part in parts {
                if let Part::Content { message, .. } = part {
                    *message -= n;
                }
            }
        }
        self
    }

    /// Drops what comes after the last generated turn.
    pub(super) fn truncate_after_generated(&mut self) {
        let last = self.pieces.iter().rposition(|piece| matches!(piece, Piece::Generated(_)));
        self.pieces.truncate(last.map_or(0, |index| index + 1));
    }

    /// Appends the ids, with contents and generated ids by message index.
    pub(super) fn fill<'a>(
        &self,
        tokenizer: &Tokenizer,
        content: impl Fn(usize) -> Option<&'a Content>,
        generated: impl Fn(usize) -> &'a [u32],
        ids: &mut Vec<u32>,
    ) {
        let mut run = String::new();
        for piece in &self.pieces {
            match piece {
                Piece::Ids(fixed) => ids.extend(fixed),
                Piece::Generated(message) => ids.extend(generated(*message)),
                Piece::Run(parts) => {
                    run.clear();
                    for part in parts {
                        match part {
                            Part::Text(text) => run.push_str(text),
                            Part::Content { message, start, end } => {
                                let Some(content) = content(*message) else { continue };
                                let range = trimmed(content, *start, *end);
                                let mut from = range.start;
                                for &(at, id) in content.specials() {
                                    run.push_str(&content.text()[from..at]);
                                    tokenizer.encode_ordinary_into(&run, ids);
                                    run.clear();
                                    ids.push(id);
                                    from = at;
                                }
                                run.push_str(&content.text()[from..range.end]);
                            }
                        }
                    }
                    tokenizer.encode_ordinary_into(&run, ids);
                }
            }
        }
    }
}

/// The bytes of the text that a template keeps: white space that a special token parts from the edge stays.
fn trimmed(content: &Content, start: Trim, end: Trim) -> std::ops::Range<usize> {
    let text = content.text();
    let first = content.specials().first().map_or(text.len(), |(at, _)| *at);
    let last = content.specials().last().map_or(0, |(at, _)| *at);
    let kept_from = text.len() - start.start_of(text).len();
    let kept_to = end.end_of(text).len();
    let from = kept_from.min(first);
    from..kept_to.max(last).max(from)
}

impl Trim {
    fn start_of(self, text: &str) -> &str {
        match self {
            Self::Nothing => text,
            Self::LineEnds => text.trim_start_matches('\n'),
            Self::WhiteSpace => text.trim_start(),
        }
    }

    fn end_of(self, text: &str) -> &str {
        match self {
            Self::Nothing => text,
            Self::LineEnds => text.trim_end_matches('\n'),
            Self::WhiteSpace => text.trim_end(),
        }
    }
}

/// State of [`Shape::compile`].
struct Compiler<'a> {
    sources: &'a [Source],
    tokenizer: &'a Tokenizer,
    pieces: Vec<Piece>,
    /// Text and contents since the last special token.
    run: Vec<Part>,
    /// Some until the first special token behind a generated turn; whether the turn is closed.
    after_reply: Option<bool>,
    seen: Vec<bool>,
}

impl Compiler<'_> {
    /// Text without special tokens.
    fn text(&mut self, mut text: &str) -> Result<(), Error> {
        while let Some((before, index, rest)) = next_placeholder(text) {
            self.seen[index] = true;
            text = match self.sources[index] {
                Source::Text(role) => {
                    let (before, start) =
                        trim_of(before, str::strip_suffix, [PROBE_START, PROBE_START_STRIPPED]);
                    let (rest, end) = trim_of(rest, str::strip_prefix, [PROBE_END, PROBE_END_STRIPPED]);
                    self.literal(before, role)?;
                    self.run.push(Part::Content { message: index, start, end });
                    rest
                }
                Source::Generated { closed } => {
                    self.literal(before, Role::Assistant)?;
                    self.end_run();
                    self.pieces.push(Piece::Generated(index));
                    self.after_reply = Some(closed);
                    rest
                }
                Source::StandIn(role) | Source::Empty(role) => return Err(Error::Transformed(role)),
            };
        }
        let last_role = self.sources.last().map_or(Role::User, |source| source.role());
        self.literal(text, last_role)
    }

    /// Text of the template itself. A rest of a probe in it means that a content was changed.
    fn literal(&mut self, text: &str, role: Role) -> Result<(), Error> {
        if text.contains([PROBE_MARK, OPEN, CLOSE]) {
            return Err(Error::Transformed(role));
        }
        if !text.is_empty() {
            self.run.push(Part::Text(text.to_owned()));
        }
        Ok(())
    }

    fn special(&mut self, id: u32) {
        if self.after_reply.take() == Some(true) && self.tokenizer.is_end_of_turn(id) {
            self.run.clear();
            return;
        }
        self.end_run();
        self.push_ids(&[id]);
    }

    fn end_run(&mut self) {
        let run = std::mem::take(&mut self.run);
        if run.iter().any(|part| matches!(part, Part::Content { .. })) {
            self.pieces.push(Piece::Run(run));
            return;
        }
        let text: String =
            run.iter().map(|part| if let Part::Text(text) = part { text.as_str() } else { "" }).collect();
        self.push_ids(&self.tokenizer.encode_ordinary(&text));
    }

    fn push_ids(&mut self, ids: &[u32]) {
        match self.pieces.last_mut() {
            _ if ids.is_empty() => {}
            Some(Piece::Ids(fixed)) => fixed.extend(ids),
            _ => self.pieces.push(Piece::Ids(ids.to_vec())),
        }
    }
}

/// The text before the next placeholder, its index, and the text behind it.
fn next_placeholder(text: &str) -> Option<(&str, usize, &str)> {
    let (before, rest) = text.split_once(OPEN)?;
    let (index, rest) = rest.split_once(CLOSE)?;
    Some((before, index.parse().ok()?, rest))
}

/// Takes the probe off one side of `text` (`strip` says which) and tells from what is left of it what was trimmed.
fn trim_of<'a>(
    text: &'a str,
    strip: impl Fn(&'a str, &'static str) -> Option<&'a str>,
    [whole, stripped]: [&'static str; 2],
) -> (&'a str, Trim) {
    if let Some(text) = strip(text, whole) {
        (text, Trim::Nothing)
    } else if let Some(text) = strip(text, stripped) {
        (text, Trim::LineEnds)
    } else {
        (text, Trim::WhiteSpace)
    }
}

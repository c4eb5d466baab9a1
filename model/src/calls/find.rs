//! Finds reasoning, text and calls in an output while it is generated.
//!
//! Text is given on as it comes, except what may still turn out to be a marker or the beginning of a call. The arguments
//! of a call are given on as the model has written them, so that the pieces joined are what stands in the token log.

use std::sync::Arc;

use super::header::{self, Balance, Header, Progress};
use super::{CallFormat, Input, Marker, Style, Tool};

/// A header longer than this is no call.
const MAX_HEADER_BYTES: usize = 16 << 10;
const FENCES: [&str; 2] = ["```json\n", "```\n"];

/// A part of an output. The parts of one kind in a row belong together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    Reasoning(String),
    Text(String),
    /// A call of the tool with this name begins. It need not be a declared one.
    Call(String),
    /// The next part of the call's arguments: raw JSON, or text.
    Arguments(String),
    /// The call is over; `whole` unless the output ended within it.
    End {
        whole: bool,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Text,
    Reasoning,
    /// Behind an opening marker: the header is not known yet.
    Header,
    /// The text so far may be a call without a marker, that begins after this many bytes of `pending`.
    Bare {
        at: usize,
    },
    /// Within arguments that are streamed.
    Json(Balance),
    /// Within the arguments of a tool that takes text, which the model writes as JSON.
    Quoted,
    /// Within free text.
    Free {
        begun: bool,
    },
    /// Behind the arguments.
    Tail,
}

/// Splits one output. Feed it all tokens in order.
#[derive(Debug)]
pub struct CallFinder {
    format: Arc<CallFormat>,
    tools: Arc<[Tool]>,
    state: State,
    /// Not given on yet.
    pending: String,
    /// Nothing but white space was given on so far.
    at_start: bool,
    /// The call began with a marker.
    marked: bool,
    n_calls: usize,
    /// The tool of the running call takes free text.
    is_text: bool,
}

impl CallFinder {
    /// `tools` may be empty: then only reasoning is told from text.
    pub fn new(format: Arc<CallFormat>, tools: Arc<[Tool]>, thinks_first: Thinks) -> Self {
        let state = if thinks_first == Thinks::Already { State::Reasoning } else { State::Text };
        Self {
            format,
            tools,
            state,
            pending: String::new(),
            at_start: true,
            marked: false,
            n_calls: 0,
            is_text: false,
        }
    }

    /// Takes the next token and the text that it adds; appends what is sure to `pieces`.
    pub fn push(&mut self, id: u32, text: &str, pieces: &mut Vec<Piece>) {
        let is = |marker: &Marker| marker.id == Some(id);
        let think = self.format.think;
        if think.is_some_and(|(open, _)| is(&open)) && self.state == State::Text {
            self.flush_text(pieces);
            self.state = State::Reasoning;
        } else if think.is_some_and(|(_, close)| is(&close)) && self.state == State::Reasoning {
            self.end_reasoning("", pieces);
        } else if is(&self.format.open) && !self.tools.is_empty() && self.accepts_open() {
            self.flush_before_call(pieces);
            self.open();
        } else if self.format.close.as_ref().is_some_and(is) && self.in_call() {
            self.close(pieces);
        } else {
            // The marker between a Mistral call's name and its arguments is read as text.
            match self.format.args.filter(is) {
                Some(args) => self.pending.push_str(args.text),
                None => self.pending.push_str(text),
            }
            self.scan(pieces);
        }
    }

    /// Ends the output: what was held back is text, a call that is not closed is incomplete.
    pub fn finish(mut self, pieces: &mut Vec<Piece>) {
        match self.state {
            State::Text if self.n_calls > 0 && self.pending.trim().is_empty() => {}
            State::Text | State::Bare { .. } => self.text_up_to(self.pending.len(), pieces),
            State::Reasoning => push_reasoning(std::mem::take(&mut self.pending), pieces),
            State::Header if self.marked => {
                if let Some(name) = self.only_tool_that_fits() {
                    pieces.push(Piece::Call(name));
                    pieces.push(Piece::End { whole: false });
                    return;
                }
                // An opened call without a name: nothing is dropped silently.
                let text = format!("{}{}", self.format.open.text, self.pending);
                pieces.push(Piece::Text(text));
            }
            State::Header => self.text_up_to(self.pending.len(), pieces),
            State::Free { .. } => self.end_free(false, pieces),
            State::Json(_) | State::Quoted => {
                self.arguments_up_to(self.pending.len(), pieces);
                pieces.push(Piece::End { whole: false });
            }
            State::Tail => {}
        }
    }

    /// The name of the tool that the header so far must become, if there is but one.
    fn only_tool_that_fits(&self) -> Option<String> {
        let plain: String = self.pending.chars().filter(|c| !c.is_whitespace()).collect();
        let fits = |tool: &&Tool| {
            let name: String = tool.name.chars().filter(|c| !c.is_whitespace()).collect();
            let whole = format!("{{\"name\":\"{name}\"");
            whole.starts_with(&plain) || plain.starts_with(&whole)
        };
        let mut fitting = self.tools.iter().filter(fits);
        let only = fitting.next()?.name.clone();
        fitting.next().is_none().then_some(only)
    }

    /// Whether the output is within reasoning.
    pub fn is_reasoning(&self) -> bool {
        self.state == State::Reasoning
    }

    /// Whether the output is text, as far as is known.
    pub fn is_text(&self) -> bool {
        matches!(self.state, State::Text | State::Bare { .. })
    }

    /// Whether the end of the text so far is not given on, because it may be the beginning of something else.
    pub fn holds_back(&self) -> bool {
        self.is_text() && !self.pending.is_empty()
    }

    /// Whether a call's arguments are complete, and its end has not come yet.
    pub fn is_behind_call(&self) -> bool {
        self.state == State::Tail
    }

    fn accepts_open(&self) -> bool {
        matches!(self.state, State::Text | State::Bare { .. } | State::Tail)
    }

    fn in_call(&self) -> bool {
        matches!(
            self.state,
            State::Header | State::Json(_) | State::Quoted | State::Free { .. } | State::Tail
        )
    }

    fn open(&mut self) {
        self.marked = true;
        self.state = State::Header;
    }

    /// The closing marker has come.
    fn close(&mut self, pieces: &mut Vec<Piece>) {
        match self.state {
            State::Header => {
                let text = format!("{}{}", self.format.open.text, std::mem::take(&mut self.pending));
                let close = self.format.close.map_or("", |close| close.text);
                pieces.push(Piece::Text(text + close));
            }
            State::Free { .. } => self.end_free(true, pieces),
            State::Json(_) | State::Quoted => {
                self.arguments_up_to(self.pending.len(), pieces);
                pieces.push(Piece::End { whole: false });
            }
            _ => {}
        }
        self.pending.clear();
        self.state = State::Text;
    }

    /// Goes on as long as something is sure.
    fn scan(&mut self, pieces: &mut Vec<Piece>) {
        loop {
            let before = (self.state.clone(), self.pending.len());
            match self.state.clone() {
                State::Text => self.scan_text(pieces),
                State::Reasoning => self.scan_reasoning(pieces),
                State::Header => self.scan_header(0, pieces),
                State::Bare { at } => self.scan_header(at, pieces),
                State::Json(balance) => self.scan_json(balance, pieces),
                State::Quoted => self.scan_quoted(pieces),
                State::Free { begun } => self.scan_free(begun, pieces),
                State::Tail => self.scan_tail(),
            }
            if self.pending.is_empty() || before == (self.state.clone(), self.pending.len()) {
                return;
            }
        }
    }

    fn scan_text(&mut self, pieces: &mut Vec<Piece>) {
        let think = self.format.think.map(|(open, _)| open).filter(|open| open.id.is_none());
        if let Some(open) = think.filter(|_| self.at_start)
            && let Some(rest) = self.pending.trim_start().strip_prefix(open.text)
        {
            self.pending = rest.to_owned();
            self.state = State::Reasoning;
            return;
        }
        if self.tools.is_empty() {
            let held = think.filter(|_| self.at_start).map_or(0, |open| held_back(&self.pending, open.text));
            return self.text_up_to(self.pending.len() - held, pieces);
        }
        let open = self.format.open;
        let marker = if open.id.is_none() { self.pending.find(open.text) } else { None };
        let bare = self.bare_start();
        match (marker, bare) {
            (Some(at), bare) if bare.is_none_or(|(from, _)| at <= from) => {
                let rest = self.pending.split_off(at + open.text.len());
                self.pending.truncate(at);
                self.flush_before_call(pieces);
                self.pending = rest;
                self.open();
            }
            (_, Some((from, object))) => {
                self.text_up_to(from, pieces);
                self.marked = false;
                self.state = State::Bare { at: object - from };
            }
            _ => {
                let held = self.held(open);
                self.text_up_to(self.pending.len() - held, pieces);
            }
        }
    }

    /// Where a call without a marker may begin, and where its object does.
    fn bare_start(&self) -> Option<(usize, usize)> {
        let text = &self.pending;
        let trimmed = text.len() - text.trim_start().len();
        if self.at_start && text[trimmed..].starts_with('{') {
            return Some((0, trimmed));
        }
        FENCES
            .iter()
            .filter_map(|fence| {
                let from = text.match_indices(fence).map(|(at, _)| at).find(|at| self.begins_line(*at))?;
                let object = from + fence.len();
                text[object..].trim_start().is_empty().then_some((from, text.len())).or_else(|| {
                    let object = object + (text[object..].len() - text[object..].trim_start().len());
                    text[object..].starts_with('{').then_some((from, object))
                })
            })
            .min()
    }

    fn begins_line(&self, at: usize) -> bool {
        self.pending[..at].ends_with('\n')
            || (at == 0 && self.at_start)
            || self.pending[..at].trim().is_empty()
    }

    /// Bytes at the end of the pending text that may be the beginning of something else than text: a marker, a fence, or
    /// white space before one.
    fn held(&self, open: Marker) -> usize {
        let text = &self.pending;
        let think = self.format.think.map(|(open, _)| open);
        let think = think.filter(|open| self.at_start && open.id.is_none()).map(|open| open.text);
        let markers = (open.id.is_none()).then_some(open.text).into_iter().chain(FENCES).chain(think);
        let marker = markers.map(|marker| held_back(text, marker)).max().unwrap_or(0);
        let before = &text[..text.len() - marker];
        marker + before.len() - before.trim_end().len()
    }

    fn scan_reasoning(&mut self, pieces: &mut Vec<Piece>) {
        let Some((_, close)) = self.format.think else { return };
        if close.id.is_none()
            && let Some(at) = self.pending.find(close.text)
        {
            let rest = self.pending.split_off(at + close.text.len());
            self.pending.truncate(at);
            return self.end_reasoning(&rest, pieces);
        }
        let held = if close.id.is_none() { held_back(&self.pending, close.text) } else { 0 };
        let before = &self.pending[..self.pending.len() - held];
        // White space at the end of the reasoning is the template's.
        let keep = self.pending.split_off(before.trim_end().len());
        push_reasoning(std::mem::replace(&mut self.pending, keep), pieces);
    }

    fn end_reasoning(&mut self, rest: &str, pieces: &mut Vec<Piece>) {
        push_reasoning(self.pending.trim_end().to_owned(), pieces);
        self.pending = rest.to_owned();
        self.state = State::Text;
        self.at_start = true;
    }

    fn scan_header(&mut self, at: usize, pieces: &mut Vec<Piece>) {
        if self.format.style == Style::Mistral && self.marked && self.scan_mistral(pieces) {
            return;
        }
        let text = &self.pending[at..];
        let header = if text.trim_start().is_empty() { Header::More } else { header::read(text) };
        match header {
            Header::More if self.pending.len() <= MAX_HEADER_BYTES => {}
            Header::Arguments { name, at: value } if self.is_call(&name) => {
                self.begin_call(name, at + value, pieces);
            }
            Header::Closed { name, arguments, end } if self.is_call(&name) => {
                self.closed_header(name, arguments.map(|(from, to)| (at + from, at + to)), at + end, pieces);
            }
            // Not a call: text, and nothing in it is looked at again.
            _ if self.marked => {
                let text = format!("{}{}", self.format.open.text, std::mem::take(&mut self.pending));
                self.at_start = false;
                pieces.push(Piece::Text(text));
                self.state = State::Text;
            }
            _ => {
                self.text_up_to(self.pending.len(), pieces);
                self.at_start = false;
                self.state = State::Text;
            }
        }
    }

    /// Behind a marker any name is a call; a bare object must name a declared tool.
    fn is_call(&self, name: &str) -> bool {
        self.marked || self.tools.iter().any(|tool| tool.name == name)
    }

    /// `[TOOL_CALLS]name[ARGS]{…}`, and the list around the older form. True when the header is dealt with or waits.
    fn scan_mistral(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let text = self.pending.trim_start_matches([' ', '\n', '[', ',']);
        if text.starts_with('{') {
            self.pending = text.to_owned();
            return false;
        }
        let Some(at) = text.find('{') else { return true };
        let name = text[..at].trim().trim_end_matches("[ARGS]").to_owned();
        self.pending = text[at..].to_owned();
        self.begin_call(name, 0, pieces);
        true
    }

    fn begin_call(&mut self, name: String, value_at: usize, pieces: &mut Vec<Piece>) {
        self.is_text = self.takes_text(&name);
        self.pending.drain(..value_at);
        self.n_calls += 1;
        pieces.push(Piece::Call(name));
        let quoted = self.is_text || self.pending.starts_with('"');
        self.state = if quoted { State::Quoted } else { State::Json(Balance::default()) };
    }

    /// A call whose object ended before its arguments could be streamed: they came first, or there are none.
    fn closed_header(
        &mut self,
        name: String,
        arguments: Option<(usize, usize)>,
        end: usize,
        pieces: &mut Vec<Piece>,
    ) {
        self.is_text = self.takes_text(&name);
        self.n_calls += 1;
        pieces.push(Piece::Call(name));
        let arguments = arguments.map(|(from, to)| self.pending[from..to].to_owned());
        self.pending.drain(..end);
        if arguments.is_none() && self.is_text && self.marked {
            self.state = State::Free { begun: false };
            return;
        }
        let arguments = arguments.map_or_else(
            || if self.is_text { String::new() } else { "{}".to_owned() },
            |raw| {
                if self.is_text { text_of(&raw) } else { raw }
            },
        );
        pieces.push(Piece::Arguments(arguments));
        pieces.push(Piece::End { whole: true });
        self.state = State::Tail;
    }

    fn takes_text(&self, name: &str) -> bool {
        self.tools.iter().any(|tool| tool.name == name && matches!(tool.input, Input::Text(_)))
    }

    fn scan_json(&mut self, mut balance: Balance, pieces: &mut Vec<Piece>) {
        for (at, byte) in self.pending.bytes().enumerate() {
            let end = match balance.push(byte) {
                Progress::Inside => continue,
                Progress::Last => at + 1,
                Progress::Behind => at,
            };
            self.arguments_up_to(end, pieces);
            pieces.push(Piece::End { whole: true });
            self.state = State::Tail;
            return;
        }
        self.arguments_up_to(self.pending.len(), pieces);
        self.state = State::Json(balance);
    }

    fn scan_quoted(&mut self, pieces: &mut Vec<Piece>) {
        let Some(end) = header::value_end(&self.pending, 0) else { return };
        let raw: String = self.pending.drain(..end).collect();
        pieces.push(Piece::Arguments(if self.is_text { text_of(&raw) } else { unquoted(&raw) }));
        pieces.push(Piece::End { whole: true });
        self.state = State::Tail;
    }

    fn scan_free(&mut self, begun: bool, pieces: &mut Vec<Piece>) {
        if !begun {
            let text = self.pending.strip_prefix('\n').unwrap_or(&self.pending);
            self.pending = text.to_owned();
            self.state = State::Free { begun: true };
        }
        let Some(close) = self.format.close else { return };
        if close.id.is_none()
            && let Some(at) = self.pending.find(close.text)
        {
            let rest = self.pending.split_off(at + close.text.len());
            self.pending.truncate(at);
            self.end_free(true, pieces);
            self.pending = rest;
            self.state = State::Text;
            return;
        }
        let held = if close.id.is_none() { held_back(&self.pending, close.text) } else { 0 };
        let before = &self.pending[..self.pending.len() - held];
        let sure = before.strip_suffix('\n').unwrap_or(before).len();
        self.arguments_up_to(sure, pieces);
    }

    /// The line end before the closing marker is not part of the text.
    fn end_free(&mut self, whole: bool, pieces: &mut Vec<Piece>) {
        let end = self.pending.strip_suffix('\n').filter(|_| whole).unwrap_or(&self.pending).len();
        self.arguments_up_to(end, pieces);
        self.pending.clear();
        pieces.push(Piece::End { whole });
    }

    /// Passes over what closes a call.
    fn scan_tail(&mut self) {
        let text = self.pending.trim_start_matches(['}', ' ', '\n', '\r', ';']).to_owned();
        let next = match (self.format.style, self.marked) {
            (Style::Tagged, true) => self.tail_of_tagged(&text),
            (Style::Mistral, true) => tail_of_list(&text),
            _ => tail_of_bare(&text),
        };
        let Some((state, rest)) = next else {
            self.pending = text;
            return;
        };
        self.at_start |= !self.marked;
        self.state = state;
        self.pending = rest;
    }

    /// Behind the closing marker, if it is text and has come.
    fn tail_of_tagged(&self, text: &str) -> Option<(State, String)> {
        let close = self.format.close.filter(|close| close.id.is_none())?;
        let at = text.find(close.text)?;
        Some((State::Text, text[at + close.text.len()..].to_owned()))
    }

    fn arguments_up_to(&mut self, end: usize, pieces: &mut Vec<Piece>) {
        if end > 0 {
            pieces.push(Piece::Arguments(self.pending.drain(..end).collect()));
        }
    }

    fn text_up_to(&mut self, end: usize, pieces: &mut Vec<Piece>) {
        if end == 0 {
            return;
        }
        let text: String = self.pending.drain(..end).collect();
        // What stands between calls is the template's white space.
        if self.n_calls > 0 && text.trim().is_empty() {
            return;
        }
        self.at_start &= text.trim().is_empty();
        pieces.push(Piece::Text(text));
    }

    fn flush_text(&mut self, pieces: &mut Vec<Piece>) {
        self.text_up_to(self.pending.len(), pieces);
    }

    /// White space before a call belongs to the call.
    fn flush_before_call(&mut self, pieces: &mut Vec<Piece>) {
        if self.state == State::Tail {
            self.pending.clear();
        }
        let end = self.pending.trim_end().len();
        self.text_up_to(end, pieces);
        self.pending.clear();
    }
}

fn tail_of_list(text: &str) -> Option<(State, String)> {
    let rest = text.get(1..).unwrap_or_default().to_owned();
    match text.as_bytes().first()? {
        b',' => Some((State::Header, rest)),
        b']' => Some((State::Text, rest)),
        _ => Some((State::Text, text.to_owned())),
    }
}

fn tail_of_bare(text: &str) -> Option<(State, String)> {
    const FENCE: &str = "```";
    match text.strip_prefix(FENCE) {
        Some(rest) => Some((State::Text, rest.to_owned())),
        None if FENCE.starts_with(text) => None,
        None => Some((State::Text, text.to_owned())),
    }
}

/// Whether the prompt has opened the reasoning already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thinks {
    Already,
    MayBegin,
}

fn push_reasoning(text: String, pieces: &mut Vec<Piece>) {
    if !text.is_empty() {
        pieces.push(Piece::Reasoning(text));
    }
}

/// Length of the longest end of `text` that `marker` begins with.
fn held_back(text: &str, marker: &str) -> usize {
    let most = marker.len().saturating_sub(1).min(text.len());
    (1..=most)
        .rev()
        .find(|n| text.is_char_boundary(text.len() - n) && marker.starts_with(&text[text.len() - n..]))
        .unwrap_or(0)
}

/// Arguments that the model has written as a string of JSON.
fn unquoted(raw: &str) -> String {
    serde_json::from_str(raw).unwrap_or_else(|_| raw.to_owned())
}

/// The text that JSON arguments stand for: the string itself, or the only string of an object.
fn text_of(raw: &str) -> String {
    match serde_json::from_str(raw) {
        Ok(serde_json::Value::String(text)) => text,
        Ok(serde_json::Value::Object(fields)) if fields.len() == 1 => match fields.into_iter().next() {
            Some((_, serde_json::Value::String(text))) => text,
            _ => raw.to_owned(),
        },
        _ => raw.to_owned(),
    }
}

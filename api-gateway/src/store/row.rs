//! One stored response as bytes: what it adds to the response it continues, and how to say all of it again.
//!
//! ```text
//! version 1 | checksum 8 | model 16 | id width 1 | form 1 | body, deflated when that pays
//! body: tenant, conversation, base or (instructions, tools), segments, end, items, counts, hints, content, response
//! ```
//! The response object is kept without the parts that stand elsewhere in the rows: instructions, tools and output.

use std::io::{Read as _, Write as _};
use std::sync::Arc;

use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use model::TextModel;
use model::chat_template::{Content, Message, Role};
use model::prompt::LogEnd;

use super::bytes::{IdWidth, Malformed, Reader, Writer};
use super::{Base, Stored};
use crate::conversation::Item;
use crate::history::Entry;

const VERSION: u8 = 1;
const CHECKSUM_BYTES: usize = 8;
/// Shorter bodies do not become shorter.
const MIN_DEFLATED_BYTES: usize = 256;
/// No row holds more than this; a length beyond it is damage.
const MAX_BODY_BYTES: usize = 1 << 30;

/// What the rows of one model have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Form {
    model: [u8; 16],
    width: IdWidth,
}

impl Form {
    /// For a model, its tokenizer and its template.
    pub(crate) fn of(text: &TextModel) -> Self {
        Self::new(&text.fingerprint, text.tokenizer.vocab_size())
    }

    pub(super) fn new(fingerprint: &[u8; 32], n_tokens: u32) -> Self {
        let digest = blake3::derive_key("baton 2026 stored rows", fingerprint);
        let (model, _) = digest.split_at(16);
        Self {
            model: model.try_into().expect("split at its length"),
            width: IdWidth::of_vocabulary(n_tokens),
        }
    }
}

/// Why a row cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unreadable {
    #[error("it was made by another model")]
    OtherModel,
    #[error("it has a form that this version of Baton does not know")]
    OtherVersion,
    #[error("its bytes are damaged")]
    Damaged,
    #[error("a response that it continues is missing")]
    Missing,
}

impl From<Malformed> for Unreadable {
    fn from(_: Malformed) -> Self {
        Self::Damaged
    }
}

/// A row in memory.
#[derive(Debug)]
pub(super) struct Row {
    model: [u8; 16],
    pub(super) tenant: String,
    pub(super) conversation: String,
    /// The response whose parts come before.
    pub(super) base: Option<String>,
    pub(super) context: Context,
    pub(super) segments: Vec<(Vec<u32>, Vec<Item>)>,
    pub(super) end: LogEnd,
    pub(super) entries: Vec<Entry>,
    pub(super) n_own_items: usize,
    pub(super) n_output_items: usize,
    pub(super) decode_worker: String,
    pub(super) cache_key: Option<String>,
    /// Names everything up to here: whether all parts belong together can be seen by it.
    pub(super) content: [u8; 32],
    pub(super) response: Vec<Piece>,
}

impl Row {
    /// Whether the model that this form is of made it.
    pub(super) fn is_of(&self, form: &Form) -> bool {
        self.model == form.model
    }
}

/// Instructions and tools; a row with a base has those of its base.
#[derive(Debug, Default)]
pub(super) struct Context {
    pub(super) instructions: Option<String>,
    /// Raw JSON, and whether items of the input brought it.
    pub(super) tools: Option<(String, bool)>,
}

/// A piece of a response object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Piece {
    Text(String),
    Instructions,
    Output,
    Tools,
}

/// The row of `stored`, which has a response object; `base` is a row that exists.
pub(super) fn encode(stored: &Stored, base: Option<&Base>, form: &Form) -> Vec<u8> {
    let mut body = Writer::default();
    body.text(&stored.tenant);
    body.text(&stored.conversation);
    body.some_text(base.map(|base| &*base.id));
    if base.is_none() {
        body.some_text(stored.instructions.as_deref());
        let tools = &stored.tools;
        let given = *tools.raw != *"[]";
        body.some_text(given.then_some(&*tools.raw));
        body.byte(tools.added.is_some().into());
    }
    let segments = stored.log.segments_from(base.map_or(0, |base| base.log.n_segments()));
    body.number(segments.len());
    for (ids, items) in segments {
        body.ids(ids, form.width);
        body.number(items.len());
        items.iter().for_each(|item| write_item(&mut body, item, form));
    }
    body.byte(end_byte(stored.log.end()));
    let entries = stored.history.newest(stored.history.len() - base.map_or(0, |base| base.n_entries));
    body.number(entries.len());
    entries.iter().for_each(|entry| write_entry(&mut body, entry));
    body.number(stored.n_own_items);
    body.number(stored.n_output_items);
    body.text(&stored.decode_worker);
    body.some_text(stored.cache_key.as_deref());
    body.raw(stored.history.content().as_bytes());
    write_pieces(&mut body, &cut(stored));
    seal(&body.0, form)
}

/// Puts the head in front of a body.
fn seal(body: &[u8], form: &Form) -> Vec<u8> {
    let mut rest = Writer::default();
    rest.raw(&form.model);
    rest.byte(if form.width == IdWidth::Two { 2 } else { 0 });
    match deflated(body) {
        Some(deflated) => {
            rest.byte(1);
            rest.number(body.len());
            rest.raw(&deflated);
        }
        None => {
            rest.byte(0);
            rest.raw(body);
        }
    }
    let mut row = vec![VERSION];
    row.extend_from_slice(&checksum(&rest.0));
    row.extend_from_slice(&rest.0);
    row
}

fn checksum(bytes: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let digest = blake3::hash(bytes);
    let (head, _) = digest.as_bytes().split_at(CHECKSUM_BYTES);
    head.try_into().expect("split at its length")
}

fn deflated(body: &[u8]) -> Option<Vec<u8>> {
    if body.len() < MIN_DEFLATED_BYTES {
        return None;
    }
    let mut encoder = DeflateEncoder::new(Vec::with_capacity(body.len() / 2), Compression::fast());
    encoder.write_all(body).ok()?;
    encoder.finish().ok().filter(|deflated| deflated.len() < body.len())
}

/// Reads a row, whichever model made it.
///
/// # Errors
/// [`Unreadable`], whatever the bytes are.
pub(super) fn decode(bytes: &[u8]) -> Result<Row, Unreadable> {
    let mut reader = Reader(bytes);
    if reader.byte()? != VERSION {
        return Err(Unreadable::OtherVersion);
    }
    if reader.array()? != checksum(&bytes[1 + CHECKSUM_BYTES..]) {
        return Err(Unreadable::Damaged);
    }
    let model = reader.array()?;
    let width = if reader.byte()? == 2 { IdWidth::Two } else { IdWidth::Varying };
    match reader.byte()? {
        0 => read_body(Reader(reader.0), model, width),
        _ => {
            let n = reader.number()?;
            let body = inflated(reader.0, n)?;
            read_body(Reader(&body), model, width)
        }
    }
}

fn inflated(deflated: &[u8], n_bytes: usize) -> Result<Vec<u8>, Unreadable> {
    if n_bytes > MAX_BODY_BYTES {
        return Err(Unreadable::Damaged);
    }
    let mut body = Vec::new();
    let n_read = DeflateDecoder::new(deflated).take(n_bytes as u64 + 1).read_to_end(&mut body);
    if n_read.ok() == Some(n_bytes) { Ok(body) } else { Err(Unreadable::Damaged) }
}

fn read_body(mut body: Reader<'_>, model: [u8; 16], width: IdWidth) -> Result<Row, Unreadable> {
    let (tenant, conversation) = (body.text()?.to_owned(), body.text()?.to_owned());
    let base = body.some_text()?.map(str::to_owned);
    let mut context = Context::default();
    if base.is_none() {
        context.instructions = body.some_text()?.map(str::to_owned);
        let tools = body.some_text()?.map(str::to_owned);
        let from_items = body.byte()? == 1;
        context.tools = tools.map(|raw| (raw, from_items));
    }
    let n_segments = body.count(2)?;
    let segments = (0..n_segments).map(|_| read_segment(&mut body, width)).collect::<Result<_, _>>()?;
    let end = end_of(body.byte()?)?;
    let n_entries = body.count(4)?;
    let entries = (0..n_entries).map(|_| read_entry(&mut body)).collect::<Result<_, _>>()?;
    let row = Row {
        model,
        tenant,
        conversation,
        base,
        context,
        segments,
        end,
        entries,
        n_own_items: body.number()?,
        n_output_items: body.number()?,
        decode_worker: body.text()?.to_owned(),
        cache_key: body.some_text()?.map(str::to_owned),
        content: body.array()?,
        response: read_pieces(&mut body)?,
    };
    body.end()?;
    Ok(row)
}

fn read_segment(body: &mut Reader<'_>, width: IdWidth) -> Result<(Vec<u32>, Vec<Item>), Malformed> {
    let ids = body.ids(width)?;
    let n_items = body.count(1)?;
    let items = (0..n_items).map(|_| read_item(body, width)).collect::<Result<_, _>>()?;
    Ok((ids, items))
}

const GENERATED: u8 = 0;
const GENERATED_BEFORE: u8 = 1;
/// Messages have this and their role's number.
const MESSAGE: u8 = 16;
const ROLES: [Role; 5] = [Role::System, Role::Developer, Role::User, Role::Assistant, Role::Tool];

fn write_item(body: &mut Writer, item: &Item, form: &Form) {
    match item {
        Item::Generated => body.byte(GENERATED),
        Item::GeneratedBefore { ids } => {
            body.byte(GENERATED_BEFORE);
            body.ids(ids, form.width);
        }
        Item::Message(message) => {
            let role = ROLES.iter().position(|role| *role == message.role).expect("all roles are listed");
            body.byte(MESSAGE + u8::try_from(role).expect("there are few roles"));
            body.text(message.content.text());
            let specials = message.content.specials();
            body.number(specials.len());
            for &(at, id) in specials {
                body.number(at);
                body.number(id as usize);
            }
        }
    }
}

fn read_item(body: &mut Reader<'_>, width: IdWidth) -> Result<Item, Malformed> {
    let kind = body.byte()?;
    match kind {
        GENERATED => return Ok(Item::Generated),
        GENERATED_BEFORE => return Ok(Item::GeneratedBefore { ids: body.ids(width)?.into() }),
        _ => {}
    }
    let role = kind.checked_sub(MESSAGE).and_then(|role| ROLES.get(usize::from(role))).ok_or(Malformed)?;
    let text = body.text()?;
    let mut content = Content::default();
    let mut from = 0;
    for _ in 0..body.count(2)? {
        let (at, id) = (body.number()?, body.number()?);
        content.push_str(text.get(from..at).ok_or(Malformed)?);
        content.push_special(u32::try_from(id).map_err(|_| Malformed)?);
        from = at;
    }
    content.push_str(text.get(from..).ok_or(Malformed)?);
    Ok(Item::Message(Message { role: *role, content }))
}

fn end_byte(end: LogEnd) -> u8 {
    match end {
        LogEnd::Empty => 0,
        LogEnd::Message => 1,
        LogEnd::Prompt => 2,
        LogEnd::Generated { closed: false } => 3,
        LogEnd::Generated { closed: true } => 4,
    }
}

fn end_of(byte: u8) -> Result<LogEnd, Malformed> {
    Ok(match byte {
        0 => LogEnd::Empty,
        1 => LogEnd::Message,
        2 => LogEnd::Prompt,
        3 => LogEnd::Generated { closed: false },
        4 => LogEnd::Generated { closed: true },
        _ => return Err(Malformed),
    })
}

fn write_entry(body: &mut Writer, entry: &Entry) {
    let (hash, call_id) = entry.to_keep();
    body.text(&entry.id);
    body.text(&entry.json);
    body.byte(hash.is_some().into());
    if let Some(hash) = hash {
        body.raw(hash);
    }
    body.some_text(call_id);
}

fn read_entry(body: &mut Reader<'_>) -> Result<Entry, Malformed> {
    let (id, json) = (body.text()?.to_owned(), body.text()?.into());
    let hash = if body.byte()? == 1 { Some(body.array()?) } else { None };
    Ok(Entry::kept(id, json, hash, body.some_text()?.map(str::to_owned)))
}

/// The parts of a response object that are kept elsewhere, as they stand in it.
fn holes(stored: &Stored) -> [(Piece, String); 3] {
    let outputs: Vec<&str> =
        stored.history.newest(stored.n_output_items).iter().map(|entry| &*entry.json).collect();
    let instructions = serde_json::to_string(&stored.instructions.as_deref()).expect("a text serializes");
    [
        (Piece::Instructions, format!("\"instructions\":{instructions}")),
        (Piece::Output, format!("\"output\":[{}]", outputs.join(","))),
        (Piece::Tools, format!("\"tools\":{}", stored.tools.echo)),
    ]
}

/// The response object in pieces. Whatever is cut out is put back as it was, wherever it stood.
fn cut(stored: &Stored) -> Vec<Piece> {
    let mut rest = stored.response.as_deref().unwrap_or_default();
    let mut pieces = Vec::new();
    for (piece, hole) in holes(stored) {
        if let Some((before, after)) = rest.split_once(hole.as_str()) {
            pieces.extend([Piece::Text(before.to_owned()), piece]);
            rest = after;
        }
    }
    pieces.push(Piece::Text(rest.to_owned()));
    pieces
}

/// The response object of `stored`, whose other fields are complete.
pub(super) fn joined(pieces: &[Piece], stored: &Stored) -> Arc<str> {
    let holes = holes(stored);
    let text = |piece: &Piece| match piece {
        Piece::Text(text) => text.clone(),
        other => {
            holes.iter().find(|(hole, _)| hole == other).map(|(_, text)| text.clone()).unwrap_or_default()
        }
    };
    pieces.iter().map(text).collect::<String>().into()
}

fn write_pieces(body: &mut Writer, pieces: &[Piece]) {
    body.number(pieces.len());
    for piece in pieces {
        match piece {
            Piece::Instructions => body.byte(1),
            Piece::Output => body.byte(2),
            Piece::Tools => body.byte(3),
            Piece::Text(text) => {
                body.byte(0);
                body.text(text);
            }
        }
    }
}

fn read_pieces(body: &mut Reader<'_>) -> Result<Vec<Piece>, Malformed> {
    let n_pieces = body.count(1)?;
    let piece = |body: &mut Reader<'_>| {
        Ok(match body.byte()? {
            0 => Piece::Text(body.text()?.to_owned()),
            1 => Piece::Instructions,
            2 => Piece::Output,
            3 => Piece::Tools,
            _ => return Err(Malformed),
        })
    };
    (0..n_pieces).map(|_| piece(body)).collect()
}

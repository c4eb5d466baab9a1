//! Items that responses consist of, as clients see them.

use model::tokenizer::Tokenizer;
use proto::v1;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::response::Status;

/// One item of a response's output.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OutputItem {
    pub(crate) id: String,
    pub(crate) status: Status,
    pub(crate) body: Body,
}

/// What an item is, and its content so far.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Body {
    Message {
        text: String,
        logprobs: Vec<Logprob>,
    },
    Call {
        call_id: String,
        name: String,
        namespace: Option<String>,
        arguments: String,
    },
    CustomCall {
        call_id: String,
        name: String,
        namespace: Option<String>,
        input: String,
    },
    Reasoning {
        text: String,
        shown: Shown,
        /// The text, for clients that send it back but are not to read it.
        sealed: Option<String>,
    },
    /// A sealed summary of everything before it.
    Compaction {
        sealed: String,
    },
}

/// How much of the reasoning a client gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shown {
    Nothing,
    Summary,
    Raw,
}

/// A token of the output and how likely it was.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Logprob {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
    pub(crate) top_logprobs: Vec<TopLogprob>,
}

/// A token that could have stood there.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct TopLogprob {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
}

impl Logprob {
    /// Of the output token `id`.
    pub(crate) fn new(tokenizer: &Tokenizer, id: u32, wire: &v1::Logprobs) -> Self {
        let (token, bytes) = shown(tokenizer, id);
        let top = wire.top_ids.iter().zip(&wire.top_logprobs);
        let top_logprobs = top
            .map(|(&id, &logprob)| {
                let (token, bytes) = shown(tokenizer, id);
                TopLogprob { token, logprob, bytes }
            })
            .collect();
        Self { token, logprob: wire.logprob, bytes, top_logprobs }
    }
}

/// A token's text, as far as it is any, and its bytes.
fn shown(tokenizer: &Tokenizer, id: u32) -> (String, Vec<u8>) {
    let bytes = tokenizer.token_bytes(id);
    (String::from_utf8_lossy(bytes).into_owned(), bytes.to_vec())
}

impl Body {
    /// The prefix of ids of such items.
    pub(crate) fn id_prefix(&self) -> &'static str {
        match self {
            Self::Message { .. } => "msg",
            Self::Call { .. } => "fc",
            Self::CustomCall { .. } => "ctc",
            Self::Reasoning { .. } => "rs",
            Self::Compaction { .. } => "cmp",
        }
    }

    /// Adds to the item's text.
    pub(crate) fn push_str(&mut self, delta: &str) {
        match self {
            Self::Message { text, .. } | Self::Reasoning { text, .. } => text.push_str(delta),
            Self::Call { arguments: text, .. } | Self::CustomCall { input: text, .. } => text.push_str(delta),
            Self::Compaction { .. } => {}
        }
    }

    /// The item's text so far.
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::Message { text, .. } | Self::Reasoning { text, .. } => text,
            Self::Call { arguments: text, .. } | Self::CustomCall { input: text, .. } => text,
            Self::Compaction { sealed } => sealed,
        }
    }
}

/// A part of a message.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct OutputText<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    text: &'a str,
    annotations: [(); 0],
    logprobs: &'a [Logprob],
}

impl<'a> OutputText<'a> {
    pub(crate) fn new(text: &'a str, logprobs: &'a [Logprob]) -> Self {
        Self { kind: "output_text", text, annotations: [], logprobs }
    }
}

/// A part of a reasoning item: a piece of the summary, or of the raw text.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct ReasoningPart<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    text: &'a str,
}

impl<'a> ReasoningPart<'a> {
    pub(crate) fn summary(text: &'a str) -> Self {
        Self { kind: "summary_text", text }
    }

    fn raw(text: &'a str) -> Self {
        Self { kind: "reasoning_text", text }
    }
}

/// An item as it was announced: with nothing in it.
pub(crate) struct Announced<'a>(pub(crate) &'a OutputItem);

impl Serialize for OutputItem {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        write(self, self.status, self.body.text(), serializer)
    }
}

impl Serialize for Announced<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        write(self.0, Status::InProgress, "", serializer)
    }
}

fn write<S: Serializer>(
    item: &OutputItem,
    status: Status,
    text: &str,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(None)?;
    map.serialize_entry("id", &item.id)?;
    let empty = text.is_empty() && status == Status::InProgress;
    match &item.body {
        Body::Message { logprobs, .. } => {
            map.serialize_entry("type", "message")?;
            map.serialize_entry("status", &status)?;
            map.serialize_entry("role", "assistant")?;
            let part = (!empty).then(|| OutputText::new(text, logprobs));
            map.serialize_entry("content", part.as_slice())?;
        }
        Body::Call { call_id, name, namespace, .. } => {
            map.serialize_entry("type", "function_call")?;
            map.serialize_entry("status", &status)?;
            call(&mut map, call_id, name, namespace.as_deref())?;
            map.serialize_entry("arguments", text)?;
        }
        Body::CustomCall { call_id, name, namespace, .. } => {
            map.serialize_entry("type", "custom_tool_call")?;
            map.serialize_entry("status", &status)?;
            call(&mut map, call_id, name, namespace.as_deref())?;
            map.serialize_entry("input", text)?;
        }
        Body::Reasoning { shown, sealed, .. } => {
            map.serialize_entry("type", "reasoning")?;
            map.serialize_entry("status", &status)?;
            let summary = (*shown == Shown::Summary && !empty).then(|| ReasoningPart::summary(text));
            map.serialize_entry("summary", summary.as_slice())?;
            if *shown == Shown::Raw && !empty {
                map.serialize_entry("content", &[ReasoningPart::raw(text)])?;
            }
            if let Some(sealed) = sealed.as_deref().filter(|_| status != Status::InProgress) {
                map.serialize_entry("encrypted_content", sealed)?;
            }
        }
        Body::Compaction { .. } => {
            map.serialize_entry("type", "compaction")?;
            map.serialize_entry("encrypted_content", text)?;
        }
    }
    map.end()
}

fn call<M: SerializeMap>(
    map: &mut M,
    call_id: &str,
    name: &str,
    namespace: Option<&str>,
) -> Result<(), M::Error> {
    map.serialize_entry("call_id", call_id)?;
    map.serialize_entry("name", name)?;
    match namespace {
        Some(namespace) => map.serialize_entry("namespace", namespace),
        None => Ok(()),
    }
}

//! The response object, complete in every event that carries it.

use serde::Serialize;
use serde_json::value::RawValue;

use super::item::OutputItem;
use crate::cache_break::CacheBreak;
use crate::error::ApiError;

/// The status of a response or of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    InProgress,
    Completed,
    Incomplete,
    Failed,
    Cancelled,
}

/// Tokens of a turn. `cached_tokens` are prompt tokens whose KV was reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) input_tokens: usize,
    pub(crate) cached_tokens: usize,
    pub(crate) output_tokens: usize,
    /// Those of the output tokens that are reasoning.
    pub(crate) reasoning_tokens: usize,
}

impl Serialize for Usage {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Input {
            cached_tokens: usize,
            cache_write_tokens: usize,
        }
        #[derive(Serialize)]
        struct Output {
            reasoning_tokens: usize,
        }
        #[derive(Serialize)]
        struct Wire {
            input_tokens: usize,
            input_tokens_details: Input,
            output_tokens: usize,
            output_tokens_details: Output,
            total_tokens: usize,
        }
        Wire {
            input_tokens: self.input_tokens,
            input_tokens_details: Input { cached_tokens: self.cached_tokens, cache_write_tokens: 0 },
            output_tokens: self.output_tokens,
            output_tokens_details: Output { reasoning_tokens: self.reasoning_tokens },
            total_tokens: self.input_tokens + self.output_tokens,
        }
        .serialize(serializer)
    }
}

/// Baton's own account of a turn, sent when `include` has `baton.turn`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct BatonTurn {
    pub(crate) decode_worker: String,
    /// Empty: the decode worker computed the prompt.
    pub(crate) prefill_worker: String,
    pub(crate) prompt_tokens: usize,
    pub(crate) computed_tokens: usize,
    pub(crate) tokenized_tokens: usize,
    pub(crate) moved_blocks: usize,
    pub(crate) moved_bytes: u64,
    pub(crate) resubmissions: usize,
    pub(crate) output_ids: Vec<u32>,
    /// Why the turn did not build on its conversation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cache_break: Option<CacheBreak>,
}

/// Everything a response object is made of.
#[derive(Debug)]
pub(crate) struct ResponseView<'a> {
    pub(crate) id: &'a str,
    pub(crate) created_at: u64,
    pub(crate) completed_at: Option<u64>,
    pub(crate) status: Status,
    pub(crate) error: Option<&'a ApiError>,
    pub(crate) incomplete_reason: Option<&'static str>,
    pub(crate) instructions: Option<&'a str>,
    pub(crate) model: &'a str,
    pub(crate) output: &'a [OutputItem],
    pub(crate) conversation: Option<&'a str>,
    pub(crate) background: bool,
    pub(crate) previous_response_id: Option<&'a str>,
    pub(crate) tools: &'a RawValue,
    pub(crate) tool_choice: Option<&'a RawValue>,
    pub(crate) reasoning: Option<&'a RawValue>,
    pub(crate) parallel_tool_calls: bool,
    pub(crate) truncates: bool,
    pub(crate) text: &'a RawValue,
    pub(crate) top_logprobs: u32,
    pub(crate) max_tool_calls: Option<u32>,
    pub(crate) temperature: f32,
    pub(crate) top_p: f32,
    pub(crate) usage: Option<Usage>,
    pub(crate) max_output_tokens: Option<u32>,
    pub(crate) store: bool,
    pub(crate) metadata: Option<&'a RawValue>,
    pub(crate) safety_identifier: Option<&'a str>,
    pub(crate) prompt_cache_key: Option<&'a str>,
    pub(crate) baton: Option<&'a BatonTurn>,
}

#[derive(Serialize)]
struct Wire<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    completed_at: Option<u64>,
    status: Status,
    background: bool,
    error: Option<WireError<'a>>,
    incomplete_details: Option<Incomplete>,
    instructions: Option<&'a str>,
    model: &'a str,
    output: &'a [OutputItem],
    previous_response_id: Option<&'a str>,
    tools: &'a RawValue,
    tool_choice: Echo<'a>,
    truncation: &'static str,
    parallel_tool_calls: bool,
    text: &'a RawValue,
    temperature: f32,
    top_p: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    top_logprobs: u32,
    reasoning: Reasoning<'a>,
    usage: Option<Usage>,
    max_output_tokens: Option<u32>,
    max_tool_calls: Option<u32>,
    store: bool,
    service_tier: &'static str,
    metadata: Echo<'a>,
    safety_identifier: Option<&'a str>,
    prompt_cache_key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    conversation: Option<Conversation<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    baton: Option<&'a BatonTurn>,
}

#[derive(Serialize)]
struct WireError<'a> {
    code: &'a str,
    message: &'a str,
}

#[derive(Serialize)]
struct Incomplete {
    reason: &'static str,
}

#[derive(Serialize)]
struct Conversation<'a> {
    id: &'a str,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Echo<'a> {
    Raw(&'a RawValue),
    Word(&'static str),
    Empty {},
}

#[derive(Serialize)]
#[serde(untagged)]
enum Reasoning<'a> {
    Raw(&'a RawValue),
    None { effort: Option<&'static str>, summary: Option<&'static str> },
}

impl Serialize for ResponseView<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Wire {
            id: self.id,
            object: "response",
            created_at: self.created_at,
            completed_at: self.completed_at,
            status: self.status,
            background: self.background,
            error: self.error.map(|error| WireError { code: error.code, message: &error.message }),
            incomplete_details: self.incomplete_reason.map(|reason| Incomplete { reason }),
            instructions: self.instructions,
            model: self.model,
            output: self.output,
            previous_response_id: self.previous_response_id,
            tools: self.tools,
            tool_choice: self.tool_choice.map_or(Echo::Word("auto"), Echo::Raw),
            truncation: if self.truncates { "auto" } else { "disabled" },
            parallel_tool_calls: self.parallel_tool_calls,
            text: self.text,
            temperature: self.temperature,
            top_p: self.top_p,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            top_logprobs: self.top_logprobs,
            reasoning: self.reasoning.map_or(Reasoning::None { effort: None, summary: None }, Reasoning::Raw),
            usage: self.usage,
            max_output_tokens: self.max_output_tokens,
            max_tool_calls: self.max_tool_calls,
            store: self.store,
            service_tier: "default",
            metadata: self.metadata.map_or(Echo::Empty {}, Echo::Raw),
            safety_identifier: self.safety_identifier,
            prompt_cache_key: self.prompt_cache_key,
            conversation: self.conversation.map(|id| Conversation { id }),
            baton: self.baton,
        }
        .serialize(serializer)
    }
}

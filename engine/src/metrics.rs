//! Names of the engine's metrics. Every one carries the label `worker`.

/// Prompt tokens run through the model.
pub const PREFILL_TOKENS: &str = "baton_engine_prefill_tokens_total";
/// Prompt tokens whose KV was reused or came from another worker.
pub const CACHED_TOKENS: &str = "baton_engine_cached_tokens_total";
/// Output tokens of running streams; the first token of a turn is its prompt's.
pub const DECODE_TOKENS: &str = "baton_engine_decode_tokens_total";
/// Duration of one step.
pub const STEP_SECONDS: &str = "baton_engine_step_seconds";
/// Turns that hold blocks now.
pub const RUNNING_TURNS: &str = "baton_engine_running_turns";
/// Drafts that were checked. With `source`: grammar, lookup, head or model, as all metrics of drafts.
pub const DRAFTS: &str = "baton_engine_drafts_total";
/// Tokens in those drafts.
pub const DRAFT_TOKENS: &str = "baton_engine_draft_tokens_total";
/// Those of them that were right; divided by the drafts it is the mean acceptance length.
pub const DRAFT_ACCEPTED: &str = "baton_engine_draft_accepted_tokens_total";
/// Estimated decoding time that drafts have saved, less what wider steps and drafting cost.
pub const DRAFT_SAVED_SECONDS: &str = "baton_engine_draft_saved_seconds";
/// KV blocks that are free or can be evicted.
pub const FREE_BLOCKS: &str = "baton_engine_free_blocks";
/// Turns that gave their blocks back because memory was short.
pub const PREEMPTIONS: &str = "baton_engine_preemptions_total";

//! Names of the prefill worker's metrics. Every one carries the label `worker`.

/// Prompts that ended, by `outcome`: finished, failed, parent_unknown (the whole prompt follows).
pub const PROMPTS: &str = "baton_prefill_prompts_total";
/// From the request to the last acknowledged block.
pub const PROMPT_SECONDS: &str = "baton_prefill_prompt_seconds";
/// KV bytes pushed to decode workers.
pub const PUSHED_BYTES: &str = "baton_prefill_pushed_bytes_total";
/// KV blocks pulled from other workers instead of computed.
pub const PULLED_BLOCKS: &str = "baton_prefill_pulled_blocks_total";

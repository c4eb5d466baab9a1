//! Names of the decode worker's metrics. Every one carries the label `worker`.

/// Turns that ended, by `outcome`: finished, failed, cancelled.
pub const TURNS: &str = "baton_decode_turns_total";
/// Prompts by who filled them, `by`: self, pull, handover, fallback.
pub const FILLS: &str = "baton_decode_prompts_total";
/// From the grant to the first token of a handover.
pub const HANDOVER_SECONDS: &str = "baton_decode_handover_seconds";
/// KV blocks received from other workers.
pub const RECEIVED_BLOCKS: &str = "baton_decode_received_blocks_total";

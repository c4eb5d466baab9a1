//! Names of the gateway's metrics.

/// Turns that ended, by `outcome`: completed, incomplete, failed, refused, cancelled.
pub const TURNS: &str = "baton_gateway_turns_total";
/// From the request to the first text delta.
pub const TTFT_SECONDS: &str = "baton_gateway_ttft_seconds";
/// From the request to the last event.
pub const TURN_SECONDS: &str = "baton_gateway_turn_seconds";
/// Tokens that went through the tokenizer.
pub const TOKENIZED_TOKENS: &str = "baton_gateway_tokenized_tokens_total";
/// Prompt tokens of all turns.
pub const PROMPT_TOKENS: &str = "baton_gateway_prompt_tokens_total";
/// Prompt tokens whose KV was reused.
pub const CACHED_TOKENS: &str = "baton_gateway_cached_tokens_total";
/// Prompt tokens that went through a model.
pub const COMPUTED_TOKENS: &str = "baton_gateway_computed_tokens_total";
/// Generated tokens.
pub const OUTPUT_TOKENS: &str = "baton_gateway_output_tokens_total";
/// Bytes of requests from clients, frames and bodies.
pub const CLIENT_BYTES_IN: &str = "baton_gateway_client_received_bytes_total";
/// Bytes of events and bodies to clients.
pub const CLIENT_BYTES_OUT: &str = "baton_gateway_client_sent_bytes_total";
/// Bytes of requests to routers and workers.
pub const WORKER_BYTES_OUT: &str = "baton_gateway_worker_sent_bytes_total";
/// Turns whose whole prompt was sent because a worker lacked the parent.
pub const FULL_PROMPTS: &str = "baton_gateway_full_prompts_total";
/// Conversations rendered anew because instructions or tools changed.
pub const RERENDERS: &str = "baton_gateway_rerenders_total";
/// Requests whose input repeated a conversation that was known already.
pub const CONTENT_MATCHES: &str = "baton_gateway_content_matches_total";
/// Turns that could not build on what their conversation had cached, by kind of the change.
pub const CACHE_BREAKS: &str = "baton_gateway_cache_breaks_total";
/// Requests whose tools were those of the turn before in another order, which was put right.
pub const REORDERS: &str = "baton_gateway_tool_reorders_total";
/// From the end of a response to its being durable.
pub const STORE_SECONDS: &str = "baton_gateway_store_seconds";
/// What durable responses take on disk, about.
pub const STORE_BYTES: &str = "baton_gateway_store_bytes";
/// Responses that were read from disk because memory did not have them.
pub const RECALLS: &str = "baton_gateway_recalls_total";
/// Turns sent again after a worker failed.
pub const RESUBMISSIONS: &str = "baton_gateway_resubmissions_total";
/// Plans made without a router.
pub const FALLBACK_PLANS: &str = "baton_gateway_fallback_plans_total";
/// Open WebSocket connections.
pub const CONNECTIONS: &str = "baton_gateway_connections";

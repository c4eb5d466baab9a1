//! Names of the router's metrics.

/// Plans made, by `kind`: own, pull, handover, chain_unknown, no_worker.
pub const PLANS: &str = "baton_router_plans_total";
/// Time to make a plan.
pub const PLAN_SECONDS: &str = "baton_router_plan_seconds";
/// Blocks known to be held by at least one worker.
pub const INDEX_BLOCKS: &str = "baton_router_index_blocks";
/// Workers that are connected now.
pub const WORKERS: &str = "baton_router_workers";

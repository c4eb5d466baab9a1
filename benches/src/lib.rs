//! The trace replayer and what the benchmarks share with it.
//!
//! ```text
//! options ─▶ trace | synth ─▶ workload ─▶ drive (pacing, client) ─▶ records ─▶ report
//!
//! options ─▶ soak (plan, clients, metrics) ─▶ soak report
//! ```

pub mod client;
pub mod drive;
pub mod options;
pub mod pacing;
pub mod record;
pub mod report;
pub mod soak;
pub mod synth;
pub mod text;
pub mod trace;
pub mod workload;

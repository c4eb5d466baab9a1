//! KV blocks: their name ([`hash`]), place ([`pool`]), journey ([`transfer`]) and news ([`announce`]).

pub mod announce;
pub mod geometry;
pub mod hash;
pub mod host;
pub mod pool;
pub mod port;
pub mod transfer;

/// Tokens in one block, the same for the whole cluster.
pub const BLOCK_TOKENS: usize = 16;

//! Runs a model on one device: schedule, forward, publish. Synchronous, without network; it owns KV memory.

pub mod arena;
pub mod constrain;
mod costs;
pub mod engine;
mod exports;
pub mod forward;
mod grants;
pub mod job;
pub mod metrics;
mod projection;
pub mod reference;
pub mod sample;
mod scheduler;
mod sequence;
pub mod shape;
pub mod speculate;
mod steps;
mod verify;
pub mod weights;

pub use engine::{Drafter, Engine, EngineConfig, Model, Speculate};

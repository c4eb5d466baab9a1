//! The one binary's parts: configuration, telemetry, roles and their order of shutdown, and the tools for people.

mod access;
pub mod chat;
pub mod cli;
pub mod client;
pub mod config;
pub mod health;
mod loading;
pub mod models;
pub mod roles;
pub mod self_check;
pub mod telemetry;
pub mod up;

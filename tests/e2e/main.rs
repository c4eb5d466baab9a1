//! A whole cluster inside the test's process: the roles' own `run` functions, real sockets, the real model.
//!
//! A module per topic. [`cluster`] starts and kills roles, [`client`] and [`http`] speak with the gateway as users do,
//! [`plain`] is the model without a cluster, to compare with, [`scripted`] a worker that says what a test wants, [`conformance`] judges what the gateway says by the protocol.
//! The model file is named by `BATON_TEST_MODEL` or fetched.

mod client;
mod cluster;
#[path = "../conformance/conformance.rs"]
mod conformance;
mod http;
mod log;
mod plain;
mod scripted;

mod bad_input;
mod bad_input_http;
mod checklist;
mod compaction;
mod constrained;
mod crowd;
mod durable;
mod endpoints;
mod equality;
mod failures;
mod fuzz;
mod instructions;
mod interrupts;
mod keys;
mod lanes;
mod limits;
mod liveness;
mod mid_turn;
mod open_responses;
mod prefixes;
mod reasoning;
mod recordings;
mod recovery;
mod storage;
mod symptoms;
mod transfer;
mod turns;

//! The engine from outside: the step against references, and turns through a running engine.

mod architectures;
mod constrained;
mod forward;
mod host;
mod logprobs;
mod real;
mod schemas;
mod small_model;
mod speculation;
#[path = "../../../model/tests/fixtures/tiny.rs"]
mod tiny;

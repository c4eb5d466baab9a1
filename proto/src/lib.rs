//! The wire between Baton's processes: generated messages, the mapping of errors to gRPC statuses, trace context.

pub mod net;
pub mod reason;
pub mod trace;

/// Messages and services of `baton.v1`.
#[expect(
    unused_qualifications,
    clippy::all,
    clippy::too_many_lines,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]
pub mod v1 {
    tonic::include_proto!("baton.v1");
}

/// The largest gRPC message any role accepts, in bytes. KV frames are far smaller.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// The largest payload of one KV frame, in bytes.
pub const MAX_FRAME_BYTES: usize = 1 << 20;

/// HTTP/2 flow-control window of streams and connections, in bytes.
pub const WINDOW_BYTES: u32 = 64 << 20;

//! What judges the gateway from outside: a validator written from the protocol, and recordings of real clients.
//!
//! Nothing here uses the gateway's own types: events and objects are JSON values, as clients see them. [`validate`] checks
//! what the server sends, [`recording`] reads what clients sent, [`replay`] plays it against a cluster, [`ask`] is for tests
//! that write their own requests.

pub(crate) mod ask;
pub(crate) mod recording;
pub(crate) mod replay;
pub(crate) mod validate;

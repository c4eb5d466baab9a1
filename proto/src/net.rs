//! How our processes connect: one set of HTTP/2 settings for every role.

use std::time::Duration;

use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};

use crate::WINDOW_BYTES;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// An address that is no `http://host:port`.
#[derive(Debug, thiserror::Error)]
#[error("`{address}` is no worker address: write http://HOST:PORT")]
pub struct BadAddress {
    address: String,
}

/// A channel to `address` (`http://host:port`) that connects at its first call and again after a loss.
///
/// # Errors
/// When `address` is no URI.
pub fn channel(address: &str) -> Result<Channel, BadAddress> {
    let endpoint =
        Endpoint::from_shared(address.to_owned()).map_err(|_| BadAddress { address: address.to_owned() })?;
    if endpoint.uri().host().is_none() {
        return Err(BadAddress { address: address.to_owned() });
    }
    Ok(endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true)
        .connect_lazy())
}

/// The connections of `listener`, without Nagle's delay: small messages must not wait for acknowledgements.
#[must_use]
pub fn incoming(listener: TcpListener) -> TcpIncoming {
    TcpIncoming::from(listener).with_nodelay(Some(true))
}

/// A server with the same settings; it answers plain HTTP/1.1 too, for health checks and metrics on the same port.
#[must_use]
pub fn server() -> Server {
    Server::builder()
        .accept_http1(true)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE))
}

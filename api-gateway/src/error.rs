//! What a client is told when a request fails: one shape for HTTP bodies, WebSocket `error` events and failed
//! responses.

use serde::Serialize;

const CLIENT_GONE: &str = "client_gone";

/// OpenAI's error types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) enum Kind {
    #[serde(rename = "invalid_request_error")]
    InvalidRequest,
    #[serde(rename = "authentication_error")]
    Authentication,
    #[serde(rename = "rate_limit_error")]
    RateLimit,
    #[serde(rename = "server_error")]
    Server,
}

/// An error a client can act upon.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub(crate) struct ApiError {
    pub(crate) status: u16,
    pub(crate) kind: Kind,
    pub(crate) code: &'static str,
    pub(crate) message: String,
    pub(crate) param: Option<String>,
}

/// The error as it stands in bodies and events.
#[derive(Debug, Serialize)]
pub(crate) struct Body<'a> {
    #[serde(rename = "type")]
    kind: Kind,
    code: &'a str,
    message: &'a str,
    param: Option<&'a str>,
}

impl ApiError {
    fn new(status: u16, kind: Kind, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, code, message: message.into(), param: None }
    }

    /// The client must change its request.
    pub(crate) fn invalid(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(400, Kind::InvalidRequest, code, message)
    }

    /// A field has a value that cannot be used.
    pub(crate) fn bad_value(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid("invalid_value", message).at(param)
    }

    /// A field asks for what this server does not do.
    pub(crate) fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid("unsupported_parameter", message).at(param)
    }

    pub(crate) fn not_found(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(404, Kind::InvalidRequest, code, message)
    }

    /// The client must say who it is.
    pub(crate) fn unauthorized(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(401, Kind::Authentication, code, message)
    }

    pub(crate) fn too_large(message: impl Into<String>) -> Self {
        Self::new(413, Kind::InvalidRequest, "request_too_large", message)
    }

    pub(crate) fn rate_limited(message: impl Into<String>) -> Self {
        Self::new(429, Kind::RateLimit, "rate_limit_exceeded", message)
    }

    pub(crate) fn overloaded(message: impl Into<String>) -> Self {
        Self::new(503, Kind::Server, "server_is_overloaded", message)
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(500, Kind::Server, "server_error", message)
    }

    /// What was to be kept could not be, or what was kept could not be read.
    pub(crate) fn storage(message: impl Into<String>) -> Self {
        Self::new(500, Kind::Server, "storage_error", message)
    }

    /// Nobody reads the answer any more.
    pub(crate) fn client_gone(message: impl Into<String>) -> Self {
        Self::new(499, Kind::InvalidRequest, CLIENT_GONE, message)
    }

    pub(crate) fn is_client_gone(&self) -> bool {
        self.code == CLIENT_GONE
    }

    /// Names the field at fault.
    pub(crate) fn at(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    pub(crate) fn body(&self) -> Body<'_> {
        Body { kind: self.kind, code: self.code, message: &self.message, param: self.param.as_deref() }
    }
}

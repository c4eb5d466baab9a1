//! `/livez`, `/readyz` and `/metrics`, on every role's own port.

use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::telemetry::Telemetry;

/// Says whether a role can serve, or why not.
pub type Ready = Arc<dyn Fn() -> Result<(), &'static str> + Send + Sync>;

/// The routes of one role.
pub fn routes(telemetry: &Telemetry, ready: Ready) -> Router {
    let telemetry = telemetry.clone();
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(move || async move { readiness(&ready) }))
        .route("/metrics", get(move || async move { telemetry.render() }))
}

fn readiness(ready: &Ready) -> Response {
    match ready() {
        Ok(()) => "ready\n".into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {why}\n")).into_response(),
    }
}

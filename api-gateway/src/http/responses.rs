//! What can be asked about responses, and done with them, after they were made.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::StreamExt;
use serde::{Deserialize, Serialize};

use super::listing::{Page, query};
use super::{App, frame};
use crate::background::EventLog;
use crate::error::ApiError;
use crate::turn::Partial;
use crate::wire::{Event, events_of, parse_counted};

/// How long a cancelled response may take to end.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(10);

/// How a stored response is wanted.
#[derive(Debug, Deserialize)]
pub(super) struct Retrieval {
    #[serde(default)]
    stream: bool,
    starting_after: Option<u64>,
}

pub(super) async fn get(
    State(app): State<App>,
    headers: HeaderMap,
    Path(id): Path<String>,
    how: Result<Query<Retrieval>, QueryRejection>,
) -> Result<Response, ApiError> {
    let how = query(how)?;
    let tenant = app.gateway.config().api_keys.tenant(&headers)?;
    let log = app.gateway.background().get(&id, &tenant);
    if how.stream {
        return match log {
            Some(log) => Ok(stream(log, how.starting_after)),
            None => Ok(replayed(&stored(&app, &id, &tenant).await?, how.starting_after)),
        };
    }
    if let Some(log) = log.filter(|log| !log.has_ended()) {
        return Ok(json(log.response()));
    }
    Ok(json(stored(&app, &id, &tenant).await?))
}

/// The final response object of a stored response, or of one in the background that failed.
async fn stored(app: &App, id: &str, tenant: &str) -> Result<String, ApiError> {
    if let Some(response) =
        app.gateway.store().recall(id, tenant).await?.and_then(|stored| stored.response.clone())
    {
        return Ok(response.to_string());
    }
    match app.gateway.background().get(id, tenant) {
        Some(log) => Ok(log.response()),
        None => Err(not_found(id)),
    }
}

fn not_found(id: &str) -> ApiError {
    let id: String = id.chars().take(80).collect();
    ApiError::not_found("response_not_found", format!("no response with the id `{id}` is stored here"))
}

/// The events of a background response, those that come included. A reader who leaves does not end it.
pub(super) fn stream(log: Arc<EventLog>, starting_after: Option<u64>) -> Response {
    let first =
        starting_after.map_or(0, |number| usize::try_from(number).unwrap_or(usize::MAX).saturating_add(1));
    let events = futures::stream::unfold((log, first), |(log, from)| async move {
        let events = log.read(from).await?;
        let next = from + events.len();
        Some((futures::stream::iter(events), (log, next)))
    });
    let frames = events
        .flatten()
        .map(|event: Event| frame(&event))
        .chain(futures::stream::once(async { Bytes::from_static(b"data: [DONE]\n\n") }))
        .map(Ok::<_, Infallible>);
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    (headers, Body::from_stream(frames)).into_response()
}

/// The events of a response that has ended: its text comes in one piece.
fn replayed(response: &str, starting_after: Option<u64>) -> Response {
    let first =
        starting_after.map_or(0, |number| usize::try_from(number).unwrap_or(usize::MAX).saturating_add(1));
    let events = events_of(response);
    // While it ran, events had more and higher numbers: how it ended is told to whoever has seen those.
    let first = first.min(events.len().saturating_sub(1));
    let events = events.into_iter().skip(first).map(|event| frame(&event));
    let mut text: Vec<u8> = events.flat_map(|frame| frame.to_vec()).collect();
    text.extend_from_slice(b"data: [DONE]\n\n");
    ([(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")], text).into_response()
}

pub(super) fn json(text: String) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], text).into_response()
}

#[derive(Serialize)]
struct Deleted<'a> {
    id: &'a str,
    object: &'static str,
    deleted: bool,
}

pub(super) async fn delete(
    State(app): State<App>,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let tenant = app.gateway.config().api_keys.tenant(&headers)?;
    let log = app.gateway.background().get(&id, &tenant);
    if let Some(log) = &log {
        // One that still runs would be stored when it ends.
        log.stop().stop(Partial::Keep);
        log.ended().await;
    }
    let was_stored = app.gateway.store().delete(&id, &tenant).await?;
    if log.is_none() && !was_stored {
        return Err(not_found(&id));
    }
    app.gateway.background().remove(&id);
    Ok(axum::Json(Deleted { id: &id, object: "response", deleted: true }).into_response())
}

pub(super) async fn cancel(
    State(app): State<App>,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let tenant = app.gateway.config().api_keys.tenant(&headers)?;
    let Some(log) = app.gateway.background().get(&id, &tenant) else {
        stored(&app, &id, &tenant).await?;
        let message = "only background responses can be cancelled; others end with their connection";
        return Err(ApiError::invalid("not_cancellable", message));
    };
    log.stop().stop(Partial::Keep);
    // Cancelling what has ended is no mistake: it may have ended just now.
    let _ = tokio::time::timeout(CANCEL_TIMEOUT, log.ended()).await;
    Ok(json(log.response()))
}

pub(super) async fn input_items(
    State(app): State<App>,
    headers: HeaderMap,
    Path(id): Path<String>,
    page: Result<Query<Page>, QueryRejection>,
) -> Result<Response, ApiError> {
    let tenant = app.gateway.config().api_keys.tenant(&headers)?;
    let stored = app.gateway.store().recall(&id, &tenant).await?.ok_or_else(|| not_found(&id))?;
    let n_input = stored.history.len() - stored.n_output_items;
    let entries = stored.history.entries().into_iter().take(n_input);
    let items = entries.map(|entry| (entry.id.clone(), Arc::clone(&entry.json))).collect();
    Ok(json(query(page)?.of(items)?))
}

#[derive(Serialize)]
struct InputTokens {
    object: &'static str,
    input_tokens: usize,
}

/// How many tokens the prompt of a request would have.
pub(super) async fn input_tokens(
    State(app): State<App>,
    headers: HeaderMap,
    body: super::body::Received,
) -> Result<Response, ApiError> {
    let origin = app.origin(&headers)?;
    let create = parse_counted(&super::body::decoded(&app, &headers, body)?)?;
    let _place = app.turns.try_acquire().map_err(|_| super::all_turns_taken())?;
    let gateway = app.gateway.clone();
    crate::prepare::recall(&gateway, &create, &origin).await?;
    let counting =
        tokio::task::spawn_blocking(move || crate::prepare::count_tokens(&gateway, &create, &origin));
    let input_tokens =
        counting.await.unwrap_or_else(|_| Err(ApiError::internal("counting the tokens was interrupted")))?;
    Ok(axum::Json(InputTokens { object: "response.input_tokens", input_tokens }).into_response())
}

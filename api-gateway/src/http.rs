//! The HTTP surface: upgrades, `POST /v1/responses` as JSON or SSE, what can be asked of stored responses, conversations,
//! the model list, and errors as JSON everywhere.

mod body;
mod conversations;
mod listing;
mod responses;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use futures::StreamExt;
use serde::Serialize;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::background::Ends;
use crate::emit::{EventSink, new_id};
use crate::error::ApiError;
use crate::metrics as names;
use crate::state::Gateway;
use crate::turn::{Origin, Stop, run_turn};
use crate::wire::{Create, Event, parse_body, parse_counted};
use crate::ws;

/// Events an SSE reader may leave unread.
const EVENTS_IN_FLIGHT: usize = 256;
/// Allocated for each connection; a turn's delta usually fits.
const READ_BUFFER_BYTES: usize = 16 << 10;
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

#[derive(Debug, Clone)]
struct App {
    gateway: Gateway,
    connections: Arc<Semaphore>,
    turns: Arc<Semaphore>,
    tasks: TaskTracker,
    shutdown: CancellationToken,
}

/// All of the API's routes.
pub(crate) fn routes(gateway: Gateway, tasks: TaskTracker, shutdown: CancellationToken) -> Router {
    let config = gateway.config();
    let app = App {
        connections: Arc::new(Semaphore::new(config.max_connections)),
        turns: Arc::new(Semaphore::new(config.max_turns)),
        tasks,
        shutdown,
        gateway: gateway.clone(),
    };
    Router::new()
        .route("/v1/responses", get(upgrade).post(create))
        .route("/v1/responses/compact", post(compact))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/responses/{id}", get(responses::get).delete(responses::delete))
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/v1/responses/{id}/input_items", get(responses::input_items))
        .route("/v1/conversations", post(conversations::create))
        .route(
            "/v1/conversations/{id}",
            get(conversations::get).post(conversations::update).delete(conversations::delete),
        )
        .route("/v1/conversations/{id}/items", get(conversations::items).post(conversations::add_items))
        .route(
            "/v1/conversations/{id}/items/{item_id}",
            get(conversations::item).delete(conversations::delete_item),
        )
        .route("/v1/models", get(models))
        .route("/v1/models/{id}", get(model))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(config.max_request_bytes))
        .layer(middleware::from_fn(name_request))
        .with_state(app)
}

async fn name_request(request: Request, next: Next) -> Response {
    let mut response = if is_text(request.uri().path()) {
        next.run(request).await
    } else {
        ApiError::invalid("invalid_path", "the path is not UTF-8 once its escapes are decoded")
            .into_response()
    };
    if let Ok(id) = HeaderValue::from_str(&new_id("req")) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// Whether a path is text once its escapes are decoded.
fn is_text(path: &str) -> bool {
    let hex = |byte: Option<&u8>| byte.and_then(|byte| char::from(*byte).to_digit(16));
    let (bytes, mut decoded, mut at) = (path.as_bytes(), Vec::with_capacity(path.len()), 0);
    while let Some(&byte) = bytes.get(at) {
        let escaped = (byte == b'%').then(|| hex(bytes.get(at + 1)).zip(hex(bytes.get(at + 2)))).flatten();
        match escaped.and_then(|(high, low)| u8::try_from(high * 16 + low).ok()) {
            Some(escaped) => {
                decoded.push(escaped);
                at += 3;
            }
            None => {
                decoded.push(byte);
                at += 1;
            }
        }
    }
    std::str::from_utf8(&decoded).is_ok()
}

async fn upgrade(
    State(app): State<App>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Response {
    let tenant = match app.gateway.config().api_keys.tenant(&headers) {
        Ok(tenant) => tenant,
        Err(error) => return error.into_response(),
    };
    if !app.gateway.config().websockets {
        return not_upgraded("WebSockets are switched off here: POST /v1/responses instead");
    }
    let Ok(upgrade) = upgrade else {
        let mut response = not_upgraded("GET /v1/responses is a WebSocket: upgrade, or POST a request");
        response.headers_mut().insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        return response;
    };
    let Ok(place) = Arc::clone(&app.connections).try_acquire_owned() else {
        return ApiError::overloaded("all connections are taken: try again shortly").into_response();
    };
    let limit = app.gateway.config().max_request_bytes;
    let upgrade = upgrade.read_buffer_size(READ_BUFFER_BYTES).max_message_size(limit).max_frame_size(limit);
    // The server forgets a connection once it is upgraded; the drain must not.
    let tracked = app.tasks.token();
    upgrade.on_upgrade(move |socket| async move {
        let (_place, _tracked) = (place, tracked);
        metrics::gauge!(names::CONNECTIONS).increment(1.0);
        ws::serve(&app.gateway, socket, tenant, &app.turns, &app.shutdown).await;
        metrics::gauge!(names::CONNECTIONS).decrement(1.0);
    })
}

/// Clients that know both ways take 426 as the word to use HTTP.
fn not_upgraded(message: &str) -> Response {
    let status = StatusCode::UPGRADE_REQUIRED.as_u16();
    ApiError { status, ..ApiError::invalid("upgrade_required", message) }.into_response()
}

async fn create(
    State(app): State<App>,
    headers: HeaderMap,
    body: body::Received,
) -> Result<Response, ApiError> {
    let origin = app.origin(&headers)?;
    let create = parse_body(&body::decoded(&app, &headers, body)?)?;
    match (create.background, create.stream) {
        (true, stream) => background(app, create, origin, stream).await,
        (false, true) => sse(app, create, origin).await,
        (false, false) => json(app, create, origin).await,
    }
}

/// Starts a response that goes on without its reader. The answer is what it looks like once it has begun.
async fn background(app: App, create: Create, origin: Origin, stream: bool) -> Result<Response, ApiError> {
    let place = Arc::clone(&app.turns).try_acquire_owned().map_err(|_| all_turns_taken())?;
    let id = origin.response_id.clone();
    let log = app.gateway.background().begin(&id, &origin.tenant)?;
    let (refused, mut refusal) = oneshot::channel();
    let (gateway, kept) = (app.gateway.clone(), Arc::clone(&log));
    app.tasks.spawn(async move {
        let (_place, kept) = (place, Ends(kept));
        let sink = EventSink::Log(Arc::clone(&kept.0));
        if let Err(error) = run_turn(&gateway, create, origin, sink, kept.0.stop()).await {
            let _ = refused.send(error);
        }
    });
    let begun = log.read(0).await;
    if begun.is_none() {
        app.gateway.background().remove(&id);
        let error =
            refusal.try_recv().unwrap_or_else(|_| ApiError::internal("the turn ended without an event"));
        return Err(error);
    }
    Ok(if stream { responses::stream(log, None) } else { responses::json(log.response()) })
}

async fn compact(
    State(app): State<App>,
    headers: HeaderMap,
    bytes: body::Received,
) -> Result<Response, ApiError> {
    let origin = app.origin(&headers)?;
    let create = parse_counted(&body::decoded(&app, &headers, bytes)?)?;
    let _place = app.turns.try_acquire().map_err(|_| all_turns_taken())?;
    Ok(responses::json(crate::compact::compact(&app.gateway, create, origin).await?))
}

impl App {
    /// Where a request comes from.
    ///
    /// # Errors
    /// When it has no right to come.
    fn origin(&self, headers: &HeaderMap) -> Result<Origin, ApiError> {
        let tenant = self.gateway.config().api_keys.tenant(headers)?;
        Ok(Origin { tenant, response_id: new_id("resp"), latest: None })
    }
}

async fn json(app: App, create: Create, origin: Origin) -> Result<Response, ApiError> {
    let _place = app.turns.try_acquire().map_err(|_| all_turns_taken())?;
    let ended = run_turn(&app.gateway, create, origin, EventSink::Discard, &Stop::default()).await?;
    metrics::counter!(names::CLIENT_BYTES_OUT).increment(ended.response.len() as u64);
    Ok(([(header::CONTENT_TYPE, "application/json")], ended.response).into_response())
}

/// Streams events. The status is decided by what comes first: an event, or an error.
async fn sse(app: App, create: Create, origin: Origin) -> Result<Response, ApiError> {
    let place = Arc::clone(&app.turns).try_acquire_owned().map_err(|_| all_turns_taken())?;
    let (sender, mut events) = mpsc::channel(EVENTS_IN_FLIGHT);
    let (refused, refusal) = oneshot::channel();
    // A task of its own, so that a reader who stalls is noticed; it ends with the body that reads from it.
    let reader = CancellationToken::new();
    let gone = reader.clone();
    app.tasks.spawn(async move {
        let _place = place;
        let never = Stop::default();
        let turn = run_turn(&app.gateway, create, origin, EventSink::Stream(sender, None), &never);
        let result = tokio::select! {
            result = turn => result,
            () = gone.cancelled() => return,
        };
        if let Err(error) = result {
            let _ = refused.send(error);
        }
    });
    let reader = reader.drop_guard();
    let Some(first) = events.recv().await else {
        return Err(refusal.await.unwrap_or_else(|_| ApiError::internal("the turn ended without an event")));
    };
    let frames = futures::stream::once(async move { first })
        .chain(ReceiverStream::new(events))
        .map(move |event| {
            let _guard = &reader;
            frame(&event)
        })
        .map(Ok)
        .chain(futures::stream::once(async move {
            match refusal.await {
                // Cut off, not done: whoever reads on must not take it for the end.
                Ok(error) => Err(std::io::Error::other(error.to_string())),
                Err(_) => Ok(Bytes::from_static(b"data: [DONE]\n\n")),
            }
        }));
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    Ok((headers, Body::from_stream(frames)).into_response())
}

fn frame(event: &Event) -> Bytes {
    let text = format!("event: {}\ndata: {}\n\n", event.kind, event.json);
    metrics::counter!(names::CLIENT_BYTES_OUT).increment(text.len() as u64);
    text.into()
}

pub(crate) fn all_turns_taken() -> ApiError {
    ApiError::overloaded("all places for turns are taken: try again shortly")
}

#[derive(Serialize)]
struct Model<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
}

#[derive(Serialize)]
struct List<T> {
    object: &'static str,
    data: Vec<T>,
}

fn served(gateway: &Gateway) -> Model<'_> {
    Model { id: &gateway.text().name, object: "model", created: 0, owned_by: "baton" }
}

async fn models(State(app): State<App>, headers: HeaderMap) -> Result<Response, ApiError> {
    app.gateway.config().api_keys.tenant(&headers)?;
    Ok(axum::Json(List { object: "list", data: vec![served(&app.gateway)] }).into_response())
}

async fn model(
    State(app): State<App>,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    app.gateway.config().api_keys.tenant(&headers)?;
    let model = served(&app.gateway);
    if model.id != id {
        let message = format!("the model `{id}` is not served here; this gateway serves `{}`", model.id);
        return Err(ApiError::not_found("model_not_found", message).at("model"));
    }
    Ok(axum::Json(model).into_response())
}

async fn unknown_path(request: Request) -> ApiError {
    let path = request.uri().path();
    ApiError::not_found(
        "unknown_path",
        format!("there is nothing at {path}; try /v1/responses or /v1/models"),
    )
}

async fn wrong_method(request: Request) -> ApiError {
    let message = format!("{} is not allowed at {}", request.method(), request.uri().path());
    ApiError { status: 405, ..ApiError::invalid("method_not_allowed", message) }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        #[derive(Serialize)]
        struct Wire<'a> {
            error: crate::error::Body<'a>,
        }
        metrics::counter!(names::TURNS, "outcome" => "refused").increment(1);
        tracing::info!(status = self.status, code = self.code, message = self.message, "request refused");
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, axum::Json(Wire { error: self.body() })).into_response();
        if matches!(self.status, 429 | 503) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

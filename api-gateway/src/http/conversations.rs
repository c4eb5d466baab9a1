//! `/v1/conversations`: conversations that clients name.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::listing::{Page, query};
use super::responses::json;
use super::{App, body};
use crate::compact::Summary;
use crate::conversations::{Conversation, Head, ListedItem};
use crate::emit::new_id;
use crate::error::ApiError;
use crate::history::Entry;
use crate::prepare::found;
use crate::state::Gateway;
use crate::wire::{InputKind, metadata, object, parse_items, with_id};

/// Items that one request may bring.
const MAX_ITEMS: usize = 20;

#[derive(Deserialize)]
struct Wire<'a> {
    #[serde(borrow, default)]
    items: Option<&'a RawValue>,
    #[serde(borrow, default)]
    metadata: Option<&'a RawValue>,
}

#[derive(Serialize)]
struct View<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    metadata: BTreeMap<String, String>,
}

#[derive(Serialize)]
struct Deleted<'a> {
    id: &'a str,
    object: &'static str,
    deleted: bool,
}

fn view(conversation: &Conversation) -> Response {
    let Head { created_at, metadata } = conversation.head();
    axum::Json(View { id: &conversation.id, object: "conversation", created_at, metadata }).into_response()
}

/// The items, references replaced by what they stand for.
async fn parsed(
    gateway: &Gateway,
    tenant: &Arc<str>,
    raw: Option<&RawValue>,
) -> Result<Vec<ListedItem>, ApiError> {
    let mut items = parse_items(raw, "items")?;
    if items.len() > MAX_ITEMS {
        let message = format!("at most {MAX_ITEMS} items can be added at once, not {}", items.len());
        return Err(ApiError::bad_value("items", message));
    }
    for (idx, item) in items.iter().enumerate() {
        if let InputKind::Compaction { sealed, .. } = &item.kind
            && Summary::open(gateway, sealed, tenant).is_none()
        {
            let message = "this summary was not made here, or was changed: leave it out";
            let error = ApiError::invalid("invalid_encrypted_content", message);
            return Err(error.at(format!("items[{idx}].encrypted_content")));
        }
    }
    for (idx, item) in items.iter_mut().enumerate() {
        let InputKind::Reference(id) = &item.kind else { continue };
        gateway.store().recall_item(tenant, id).await?;
        *item = found(gateway, item, tenant, &format!("items[{idx}]"))?;
    }
    Ok(items.iter().map(|item| Entry::of_input(item, new_id).into()).collect())
}

fn text(bytes: &[u8]) -> Result<&str, ApiError> {
    match std::str::from_utf8(bytes) {
        Ok("") => Ok("{}"),
        Ok(text) => Ok(text),
        Err(error) => Err(ApiError::invalid("invalid_json", format!("the body is not UTF-8: {error}"))),
    }
}

pub(super) async fn create(
    State(app): State<App>,
    headers: HeaderMap,
    bytes: body::Received,
) -> Result<Response, ApiError> {
    let tenant = app.gateway.config().api_keys.tenant(&headers)?;
    let bytes = body::decoded(&app, &headers, bytes)?;
    let wire: Wire<'_> = object(text(&bytes)?)?;
    let items = parsed(&app.gateway, &tenant, wire.items).await?;
    let metadata = metadata(wire.metadata)?;
    let metadata = metadata.unwrap_or_default();
    Ok(view(&*app.gateway.conversations().create(&tenant, items, metadata).await?))
}

pub(super) async fn get(
    State(app): State<App>,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    Ok(view(&*app.conversation(&headers, &id).await?))
}

pub(super) async fn update(
    State(app): State<App>,
    headers: HeaderMap,
    Path(id): Path<String>,
    bytes: body::Received,
) -> Result<Response, ApiError> {
    let conversation = app.conversation(&headers, &id).await?;
    let bytes = body::decoded(&app, &headers, bytes)?;
    let wire: Wire<'_> = object(text(&bytes)?)?;
    if let Some(metadata) = metadata(wire.metadata)? {
        app.gateway.conversations().set_metadata(&conversation, metadata).await?;
    }
    Ok(view(&conversation))
}

pub(super) async fn delete(
    State(app): State<App>,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let conversation = app.conversation(&headers, &id).await?;
    app.gateway.conversations().delete(&conversation).await?;
    Ok(axum::Json(Deleted { id: &id, object: "conversation.deleted", deleted: true }).into_response())
}

pub(super) async fn items(
    State(app): State<App>,
    headers: HeaderMap,
    Path(id): Path<String>,
    page: Result<Query<Page>, QueryRejection>,
) -> Result<Response, ApiError> {
    let items = app.conversation(&headers, &id).await?.items();
    Ok(json(query(page)?.of(items.into_iter().map(|item| (item.id, item.json)).collect())?))
}

pub(super) async fn add_items(
    State(app): State<App>,
    headers: HeaderMap,
    Path(id): Path<String>,
    bytes: body::Received,
) -> Result<Response, ApiError> {
    let conversation = app.conversation(&headers, &id).await?;
    let bytes = body::decoded(&app, &headers, bytes)?;
    let wire: Wire<'_> = object(text(&bytes)?)?;
    let items = parsed(&app.gateway, &conversation.tenant, wire.items).await?;
    if items.is_empty() {
        return Err(ApiError::invalid("missing_required_parameter", "items is required").at("items"));
    }
    let added = items.iter().map(|item| (item.id.clone(), Arc::clone(&item.json))).collect();
    app.gateway.conversations().append(&conversation, items).await?;
    Ok(json(Page::all().of(added)?))
}

pub(super) async fn item(
    State(app): State<App>,
    headers: HeaderMap,
    Path((id, item_id)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    let items = app.conversation(&headers, &id).await?.items();
    let item = items.iter().find(|item| item.id == item_id).ok_or_else(|| no_item(&item_id))?;
    Ok(json(with_id(&item.id, &item.json).get().to_owned()))
}

pub(super) async fn delete_item(
    State(app): State<App>,
    headers: HeaderMap,
    Path((id, item_id)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    let conversation = app.conversation(&headers, &id).await?;
    if !app.gateway.conversations().remove(&conversation, &item_id).await? {
        return Err(no_item(&item_id));
    }
    Ok(view(&conversation))
}

fn no_item(id: &str) -> ApiError {
    let id: String = id.chars().take(80).collect();
    ApiError::not_found("item_not_found", format!("the conversation has no item with the id `{id}`"))
}

impl App {
    async fn conversation(&self, headers: &HeaderMap, id: &str) -> Result<Arc<Conversation>, ApiError> {
        let tenant = self.gateway.config().api_keys.tenant(headers)?;
        self.gateway.conversations().recall(id, &tenant).await
    }
}

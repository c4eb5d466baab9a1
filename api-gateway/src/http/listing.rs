//! Lists in pages, as OpenAI's API gives them.

use std::sync::Arc;

use axum::extract::Query;
use axum::extract::rejection::QueryRejection;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::error::ApiError;
use crate::wire::with_id;

const DEFAULT_LIMIT: usize = 20;
const MAX_LIMIT: usize = 100;

/// What stands behind the `?` of a request.
///
/// # Errors
/// When a parameter has a value that it cannot have.
pub(super) fn query<T>(query: Result<Query<T>, QueryRejection>) -> Result<T, ApiError> {
    let Query(query) =
        query.map_err(|rejection| ApiError::invalid("invalid_value", rejection.body_text()))?;
    Ok(query)
}

/// Which part of a list is wanted.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Page {
    after: Option<String>,
    limit: Option<usize>,
    order: Option<String>,
}

#[derive(Serialize)]
struct Listed {
    object: &'static str,
    data: Vec<Box<RawValue>>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

impl Page {
    /// As much as one page can hold, oldest first.
    pub(super) fn all() -> Self {
        Self { after: None, limit: Some(MAX_LIMIT), order: Some("asc".to_owned()) }
    }

    /// The page of `items` (id and JSON, oldest first) as a list object.
    ///
    /// # Errors
    /// When the page's parameters make no sense, or it begins after an item that is not there.
    pub(super) fn of(&self, mut items: Vec<(String, Arc<str>)>) -> Result<String, ApiError> {
        let limit = self.limit.unwrap_or(DEFAULT_LIMIT);
        if !(1..=MAX_LIMIT).contains(&limit) {
            return Err(ApiError::bad_value(
                "limit",
                format!("limit must be between 1 and {MAX_LIMIT}, not {limit}"),
            ));
        }
        match self.order.as_deref() {
            None | Some("desc") => items.reverse(),
            Some("asc") => {}
            Some(other) => {
                return Err(ApiError::bad_value("order", format!("`{other}` is no order; use asc or desc")));
            }
        }
        if let Some(after) = &self.after {
            let Some(idx) = items.iter().position(|(id, _)| id == after) else {
                return Err(ApiError::bad_value(
                    "after",
                    "the list has no item with the id that `after` names",
                ));
            };
            items.drain(..=idx);
        }
        let has_more = items.len() > limit;
        items.truncate(limit);
        let id = |item: Option<&(String, Arc<str>)>| item.map(|(id, _)| id.clone());
        let (first_id, last_id) = (id(items.first()), id(items.last()));
        let data = items.into_iter().map(|(id, json)| with_id(&id, &json)).collect();
        let list = Listed { object: "list", data, first_id, last_id, has_more };
        Ok(serde_json::to_string(&list).expect("our own types serialize"))
    }
}

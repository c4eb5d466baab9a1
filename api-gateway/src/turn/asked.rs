//! From a request to a turn that can run, its conversation shortened if need be.

use super::{Origin, Stop};
use crate::compact::{self, Due};
use crate::emit::Emitter;
use crate::error::ApiError;
use crate::prepare::{Basis, Prepared, find_basis, prepare, recall};
use crate::state::Gateway;
use crate::wire::{Create, InputItem, InputKind};

/// A request and what it was made into.
pub(super) struct Asked {
    pub(super) create: Create,
    pub(super) prepared: Prepared,
    /// What is to be summed up first.
    pub(super) due: Option<Due>,
}

impl Asked {
    /// The summary that its conversation was replaced by.
    pub(super) fn sealed_summary(&self) -> Option<String> {
        match &self.create.summary.as_ref()?.kind {
            InputKind::Compaction { sealed, .. } => Some(sealed.clone()),
            _ => None,
        }
    }
}

/// The turn with a summary in the place of what it continues; None when the model has none.
pub(super) async fn shortened(
    gateway: &Gateway,
    asked: &Asked,
    due: Due,
    origin: Origin,
    stop: &Stop,
    emitter: &mut Emitter<'_>,
) -> Result<Option<Asked>, ApiError> {
    emitter.begin().await?;
    let sealed = match emitter.waiting(due.sum_up(gateway, origin.clone(), stop)).await? {
        Ok(sealed) => sealed,
        Err(error) => {
            // A conversation that still fits goes on as it is.
            if !stop.is_stopped() {
                tracing::warn!(%error, "the conversation was not compacted");
            }
            return Ok(None);
        }
    };
    let summary = Some(InputItem::compaction(sealed));
    let create = Create { summary, ..asked.create.clone() };
    let mut shortened = emitter.waiting(prepare_off_thread(gateway, create, origin)).await??;
    let before = &asked.prepared;
    if shortened.prepared.log.len() >= before.log.len() {
        return Ok(None);
    }
    shortened.prepared.conversation.clone_from(&before.conversation);
    shortened.prepared.last_decode.clone_from(&before.last_decode);
    shortened.prepared.own.clone_from(&before.own);
    shortened.prepared.version = before.version;
    Ok(Some(shortened))
}

/// Prepares a turn; a long input is tokenized on a thread of its own, so that other connections go on.
pub(super) async fn prepare_off_thread(
    gateway: &Gateway,
    create: Create,
    origin: Origin,
) -> Result<Asked, ApiError> {
    recall(gateway, &create, &origin).await?;
    let mut basis = find_basis(gateway, &create, &origin)?;
    if create.summary.is_none() {
        basis.recall_by_content(gateway, &origin).await;
    }
    if !basis.is_slow(gateway, &create) {
        return asked(gateway, create, &origin, basis);
    }
    let gateway = gateway.clone();
    let preparing = tokio::task::spawn_blocking(move || asked(&gateway, create, &origin, basis));
    preparing.await.unwrap_or_else(|_| Err(ApiError::internal("preparing the turn was interrupted")))
}

fn asked(gateway: &Gateway, create: Create, origin: &Origin, basis: Basis) -> Result<Asked, ApiError> {
    let prepared = prepare(gateway, &create, origin, basis)?;
    let due = compact::due(&create, &prepared);
    Ok(Asked { create, prepared, due })
}

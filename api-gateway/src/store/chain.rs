//! From rows back to a response that can be continued.

use std::sync::Arc;

use kv::hash::HashKey;

use super::row::{Context, Row, Unreadable, joined};
use super::{Base, Stored};
use crate::conversation::TokenLog;
use crate::history::{ContentHash, History};
use crate::wire::{ToolSource, Tools};

/// A response's row and those of the responses that it continues.
#[derive(Debug)]
pub(super) struct Chain {
    /// With their ids, newest first.
    pub(super) rows: Vec<(String, Row)>,
    /// What the oldest row continues, if that is in memory.
    pub(super) known: Option<Arc<Stored>>,
}

/// What the rows of a chain are added to.
struct Grown {
    instructions: Option<Arc<str>>,
    tools: Arc<Tools>,
    log: TokenLog,
    history: History,
}

impl Chain {
    /// The response of the newest row. O(tokens).
    ///
    /// # Errors
    /// When the rows do not belong together.
    pub(super) fn restore(mut self, key: HashKey) -> Result<Stored, Unreadable> {
        let (_, oldest) = self.rows.last_mut().ok_or(Unreadable::Missing)?;
        let tenant: Arc<str> = oldest.tenant.as_str().into();
        let context = std::mem::take(&mut oldest.context);
        let mut grown = match &self.known {
            Some(known) => Grown {
                instructions: known.instructions.clone(),
                tools: Arc::clone(&known.tools),
                log: known.log.clone(),
                history: known.history.clone(),
            },
            None => Grown::new(&tenant, context, key)?,
        };
        let mut base = self.known.as_deref().and_then(Stored::as_base);
        while let Some((id, row)) = self.rows.pop() {
            if row.base.as_deref() != base.as_ref().map(|base| &*base.id) || *row.tenant != *tenant {
                return Err(Unreadable::Damaged);
            }
            grown.add(&row);
            if grown.history.content().as_bytes() != &row.content {
                return Err(Unreadable::Damaged);
            }
            if self.rows.is_empty() {
                return Ok(grown.finish(id, row, tenant, base));
            }
            base = Some(Base { id: id.into(), log: grown.log.clone(), n_entries: grown.history.len() });
        }
        Err(Unreadable::Missing)
    }
}

impl Grown {
    fn new(tenant: &str, context: Context, key: HashKey) -> Result<Self, Unreadable> {
        let tools = match context.tools {
            None => Tools::none(),
            Some((raw, from_items)) => {
                let source = if from_items { ToolSource::Items } else { ToolSource::Request };
                // They were accepted once; a version that does not know them any more cannot continue.
                Tools::parse(&raw, source).map_err(|_| Unreadable::OtherVersion)?
            }
        };
        let start = ContentHash::start(tenant, context.instructions.as_deref(), &tools);
        let instructions = context.instructions.map(Into::into);
        Ok(Self { instructions, tools, log: TokenLog::new(key), history: History::new(start) })
    }

    fn add(&mut self, row: &Row) {
        for (ids, items) in &row.segments {
            self.log.append(ids.clone(), items.clone(), row.end);
        }
        self.history.append(row.entries.clone());
    }

    fn finish(self, id: String, row: Row, tenant: Arc<str>, base: Option<Base>) -> Stored {
        let Self { instructions, tools, log, history } = self;
        let mut stored = Stored {
            id,
            tenant,
            conversation: row.conversation,
            log,
            history,
            n_own_items: row.n_own_items,
            n_output_items: row.n_output_items,
            instructions,
            tools,
            decode_worker: row.decode_worker,
            cache_key: row.cache_key,
            base,
            response: None,
        };
        stored.response = Some(joined(&row.response, &stored));
        stored
    }
}

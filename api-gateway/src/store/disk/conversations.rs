//! The tables of conversations that clients have named: heads by id, items by (id, number).

use std::collections::BTreeMap;

use redb::{
    ReadOnlyTable, ReadTransaction, ReadableTable, ReadableTableMetadata, Table, TableDefinition,
    WriteTransaction,
};

use super::super::bytes::{Malformed, Reader, Writer};
use super::super::durable::Failure;
use crate::conversations::{Change, Head, Kept, ListedItem};

type Result<T> = std::result::Result<T, redb::Error>;

const HEADS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("conversations");
const ITEMS: TableDefinition<'_, (&str, u64), &[u8]> = TableDefinition::new("conversation_items");

/// A head as it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    tenant: String,
    head: Head,
    /// The number of the next item.
    next: u64,
    /// Bytes of items.
    n_bytes: u64,
}

impl Row {
    fn encode(&self) -> Vec<u8> {
        let mut row = Writer::default();
        row.text(&self.tenant);
        let number = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        row.number(number(self.head.created_at));
        row.number(self.head.metadata.len());
        for (key, value) in &self.head.metadata {
            row.text(key);
            row.text(value);
        }
        row.number(number(self.next));
        row.number(number(self.n_bytes));
        row.0
    }

    fn decode(bytes: &[u8]) -> std::result::Result<Self, Malformed> {
        let mut row = Reader(bytes);
        let tenant = row.text()?.to_owned();
        let created_at = row.number()? as u64;
        let n_pairs = row.count(2)?;
        let mut metadata = BTreeMap::new();
        for _ in 0..n_pairs {
            let (key, value) = (row.text()?.to_owned(), row.text()?.to_owned());
            metadata.insert(key, value);
        }
        let (next, n_bytes) = (row.number()? as u64, row.number()? as u64);
        row.end()?;
        Ok(Self { tenant, head: Head { created_at, metadata }, next, n_bytes })
    }
}

fn encode_item(item: &ListedItem) -> Vec<u8> {
    let mut row = Writer::default();
    row.text(&item.id);
    row.text(&item.json);
    row.0
}

fn decode_item(bytes: &[u8]) -> std::result::Result<ListedItem, Malformed> {
    let mut row = Reader(bytes);
    let (id, json) = (row.text()?.to_owned(), row.text()?.into());
    row.end()?;
    Ok(ListedItem { id, json })
}

/// Both tables, within one change of the file.
pub(super) struct Conversations<'t> {
    heads: Table<'t, &'static str, &'static [u8]>,
    items: Table<'t, (&'static str, u64), &'static [u8]>,
    n_bytes: u64,
}

impl<'t> Conversations<'t> {
    /// `n_bytes` are in use.
    pub(super) fn open(write: &'t WriteTransaction, n_bytes: u64) -> Result<Self> {
        Ok(Self { heads: write.open_table(HEADS)?, items: write.open_table(ITEMS)?, n_bytes })
    }

    /// Bytes in use, about.
    pub(super) fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Makes a change, or says why it cannot be made; all items may take `max_bytes`.
    pub(super) fn apply(
        &mut self,
        id: &str,
        change: &Change,
        max_bytes: u64,
    ) -> Result<std::result::Result<(), Failure>> {
        match change {
            Change::Create { tenant, head, items, most } => {
                if self.heads.len()? >= *most as u64 {
                    return Ok(Err(Failure::TOO_MANY));
                }
                let row = Row { tenant: tenant.to_string(), head: head.clone(), next: 0, n_bytes: 0 };
                self.append(id, row, items, max_bytes)
            }
            Change::Append(items) => match self.row(id)? {
                Some(row) => self.append(id, row, items, max_bytes),
                None => Ok(Err(Failure::GONE)),
            },
            Change::Remove(item) => self.remove(id, item),
            Change::Metadata(metadata) => {
                let Some(mut row) = self.row(id)? else { return Ok(Err(Failure::GONE)) };
                row.head.metadata.clone_from(metadata);
                self.heads.insert(id, row.encode().as_slice())?;
                Ok(Ok(()))
            }
            Change::Delete => {
                let Some(row) = self.row(id)? else { return Ok(Ok(())) };
                self.heads.remove(id)?;
                self.items.retain_in((id, 0)..=(id, u64::MAX), |_, _| false)?;
                self.n_bytes = self.n_bytes.saturating_sub(row.n_bytes);
                Ok(Ok(()))
            }
        }
    }

    fn append(
        &mut self,
        id: &str,
        mut row: Row,
        items: &[ListedItem],
        max_bytes: u64,
    ) -> Result<std::result::Result<(), Failure>> {
        let rows: Vec<Vec<u8>> = items.iter().map(encode_item).collect();
        let n_bytes: u64 = rows.iter().map(|row| row.len() as u64).sum();
        if self.n_bytes + n_bytes > max_bytes {
            return Ok(Err(Failure::NO_ROOM));
        }
        for bytes in &rows {
            self.items.insert((id, row.next), bytes.as_slice())?;
            row.next += 1;
        }
        row.n_bytes += n_bytes;
        self.n_bytes += n_bytes;
        self.heads.insert(id, row.encode().as_slice())?;
        Ok(Ok(()))
    }

    fn remove(&mut self, id: &str, item: &str) -> Result<std::result::Result<(), Failure>> {
        let Some(mut row) = self.row(id)? else { return Ok(Err(Failure::GONE)) };
        let mut n_bytes = 0;
        self.items.retain_in((id, 0)..=(id, u64::MAX), |_, bytes| {
            let is_it = n_bytes == 0 && decode_item(bytes).is_ok_and(|kept| kept.id == item);
            n_bytes += if is_it { bytes.len() as u64 } else { 0 };
            !is_it
        })?;
        row.n_bytes = row.n_bytes.saturating_sub(n_bytes);
        self.n_bytes = self.n_bytes.saturating_sub(n_bytes);
        self.heads.insert(id, row.encode().as_slice())?;
        Ok(Ok(()))
    }

    /// The head of a conversation; one that cannot be read is none.
    fn row(&self, id: &str) -> Result<Option<Row>> {
        Ok(self.heads.get(id)?.and_then(|bytes| Row::decode(bytes.value()).ok()))
    }
}

/// Both tables, to be read.
pub(super) struct ReadConversations {
    heads: ReadOnlyTable<&'static str, &'static [u8]>,
    items: ReadOnlyTable<(&'static str, u64), &'static [u8]>,
}

impl ReadConversations {
    pub(super) fn open(read: &ReadTransaction) -> Result<Self> {
        Ok(Self { heads: read.open_table(HEADS)?, items: read.open_table(ITEMS)? })
    }

    /// Bytes in use, about.
    pub(super) fn n_bytes(&self) -> Result<u64> {
        let mut n_bytes = 0;
        for entry in self.heads.iter()? {
            n_bytes += Row::decode(entry?.1.value()).map_or(0, |row| row.n_bytes);
        }
        Ok(n_bytes)
    }

    /// A conversation of `tenant`. Items that cannot be read are left out.
    pub(super) fn find(&self, id: &str, tenant: &str) -> Result<Option<Kept>> {
        let Some(row) = self.heads.get(id)?.and_then(|bytes| Row::decode(bytes.value()).ok()) else {
            return Ok(None);
        };
        if row.tenant != tenant {
            return Ok(None);
        }
        let mut items = Vec::new();
        for entry in self.items.range((id, 0)..=(id, u64::MAX))? {
            match decode_item(entry?.1.value()) {
                Ok(item) => items.push(item),
                Err(Malformed) => tracing::warn!(conversation = id, "an item on disk cannot be read"),
            }
        }
        Ok(Some(Kept { head: row.head, items }))
    }
}

//! The tables of the file, and what changes and questions mean in them.
//!
//! ```text
//!   rows     id -> the response's row                       about    what this file is
//!   meta     id -> how long, how large, who builds upon it  expiry   (when, id), the next to go first
//!   content  hash of what was said -> id                    items    hash of (tenant, item) -> id
//! ```
//! A row stays as long as a response is built upon it, but once it has expired or was deleted nothing finds it any more.

use std::sync::Arc;

use redb::{
    Database, ReadOnlyTable, ReadTransaction, ReadableDatabase, ReadableTable, Table, TableDefinition,
    WriteTransaction,
};

use super::super::chain::Chain;
use super::super::durable::{Found, Wanted};
use super::super::row::{self, Form, Unreadable};
use super::super::{Base, Stored};
use super::conversations::{Conversations, ReadConversations};
use super::file::Used;

type Result<T> = std::result::Result<T, redb::Error>;

const FORMAT: u64 = 2;
const FORMAT_WITHOUT_CONVERSATIONS: u64 = 1;
const ABOUT: TableDefinition<'_, &str, u64> = TableDefinition::new("about");
const ROWS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("rows");
/// (expires, how many rows are built upon it, bytes, gone, base or nothing).
const META: TableDefinition<'_, &str, (u64, u32, u64, bool, &str)> = TableDefinition::new("meta");
const EXPIRY: TableDefinition<'_, (u64, &str), ()> = TableDefinition::new("expiry");
const CONTENT: TableDefinition<'_, &[u8; 32], &str> = TableDefinition::new("content");
const ITEMS: TableDefinition<'_, &[u8; 16], &str> = TableDefinition::new("items");

/// A chain longer than this is damage.
const MAX_CHAIN: usize = 1 << 20;
/// What a row's entries in the other tables take, about.
const INDEX_BYTES: u64 = 400;
const ITEM_BYTES: u64 = 100;
const PAGE_BYTES: u64 = 4096;

/// What is known of a row besides what it says.
#[derive(Debug, Clone)]
struct Meta {
    /// Milliseconds since 1970.
    expires: u64,
    /// Rows that are built upon it.
    n_children: u32,
    n_bytes: u64,
    /// Expired or deleted: only its children need it.
    gone: bool,
    base: Option<String>,
}

impl Meta {
    fn of((expires, n_children, n_bytes, gone, base): (u64, u32, u64, bool, &str)) -> Self {
        let base = (!base.is_empty()).then(|| base.to_owned());
        Self { expires, n_children, n_bytes, gone, base }
    }

    fn to_value(&self) -> (u64, u32, u64, bool, &str) {
        (self.expires, self.n_children, self.n_bytes, self.gone, self.base.as_deref().unwrap_or_default())
    }
}

/// Why the tables cannot be used.
#[derive(Debug)]
pub(super) enum PrepareError {
    OtherVersion,
    Database(redb::Error),
}

impl<E: Into<redb::Error>> From<E> for PrepareError {
    fn from(error: E) -> Self {
        Self::Database(error.into())
    }
}

/// Makes the tables that are not there, and tells how many bytes are in use.
pub(super) fn prepare(database: &Database) -> std::result::Result<Used, PrepareError> {
    let (is_new, is_first) = {
        let read = database.begin_read()?;
        let is_new = read.list_tables()?.next().is_none();
        let format = if is_new { None } else { read.open_table(ABOUT)?.get("format")?.map(|n| n.value()) };
        (is_new, format == Some(FORMAT_WITHOUT_CONVERSATIONS))
    };
    if is_new || is_first {
        let write = database.begin_write()?;
        write.open_table(ABOUT)?.insert("format", FORMAT)?;
        drop(Tables::open(&write, 0)?);
        drop(Conversations::open(&write, 0)?);
        write.commit()?;
    }
    let read = database.begin_read()?;
    let format = read.open_table(ABOUT)?.get("format")?.map(|format| format.value());
    if format != Some(FORMAT) {
        return Err(PrepareError::OtherVersion);
    }
    let meta = read.open_table(META)?;
    ReadTables::open(&read)?;
    let mut responses = 0;
    for entry in meta.iter()? {
        responses += entry?.1.value().2;
    }
    Ok(Used { responses, conversations: ReadConversations::open(&read)?.n_bytes()? })
}

/// A name for an item of a tenant.
fn item_key(tenant: &str, id: &str) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(tenant.len() as u64).to_le_bytes()).update(tenant.as_bytes()).update(id.as_bytes());
    let digest = hasher.finalize();
    let (key, _) = digest.as_bytes().split_at(16);
    key.try_into().expect("split at its length")
}

/// What a row takes in the file, about: pages are half full, and rows larger than one take a power of two of them.
fn footprint(n_bytes: usize, n_items: usize) -> u64 {
    let n_bytes = n_bytes as u64;
    let row = if n_bytes > PAGE_BYTES / 2 {
        (n_bytes + 64).next_power_of_two().max(PAGE_BYTES)
    } else {
        n_bytes * 3 / 2
    };
    row + INDEX_BYTES + n_items as u64 * ITEM_BYTES
}

/// All tables, within one change of the file.
pub(super) struct Tables<'t> {
    rows: Table<'t, &'static str, &'static [u8]>,
    meta: Table<'t, &'static str, (u64, u32, u64, bool, &'static str)>,
    expiry: Table<'t, (u64, &'static str), ()>,
    content: Table<'t, &'static [u8; 32], &'static str>,
    items: Table<'t, &'static [u8; 16], &'static str>,
    n_bytes: u64,
}

impl<'t> Tables<'t> {
    /// `n_bytes` are in use.
    pub(super) fn open(write: &'t WriteTransaction, n_bytes: u64) -> Result<Self> {
        Ok(Self {
            rows: write.open_table(ROWS)?,
            meta: write.open_table(META)?,
            expiry: write.open_table(EXPIRY)?,
            content: write.open_table(CONTENT)?,
            items: write.open_table(ITEMS)?,
            n_bytes,
        })
    }

    /// Bytes in use, about.
    pub(super) fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Keeps a response until `expires`, and what it is built upon as long.
    pub(super) fn put(&mut self, stored: &Stored, expires: u64, form: &Form) -> Result<()> {
        // What it was built upon may have been deleted meanwhile; then it carries everything itself.
        let base = match &stored.base {
            Some(base) if self.builds_upon(base, expires)? => Some(base),
            _ => None,
        };
        let bytes = row::encode(stored, base, form);
        let id = stored.id.as_str();
        let entries = stored.own_entries();
        let n_bytes = footprint(bytes.len(), entries.len());
        let base = base.map(|base| base.id.to_string());
        let meta = Meta { expires, n_children: 0, n_bytes, gone: false, base };
        self.rows.insert(id, bytes.as_slice())?;
        self.meta.insert(id, meta.to_value())?;
        self.expiry.insert((expires, id), ())?;
        self.content.insert(stored.history.content().as_bytes(), id)?;
        for entry in entries {
            self.items.insert(&item_key(&stored.tenant, &entry.id), id)?;
        }
        self.n_bytes += n_bytes;
        Ok(())
    }

    /// Counts one more row upon `base` and lets it live as long; false when it is not there any more.
    fn builds_upon(&mut self, base: &Base, expires: u64) -> Result<bool> {
        let Some(mut meta) = self.meta_of(&base.id)? else { return Ok(false) };
        meta.n_children += 1;
        self.meta.insert(&*base.id, meta.to_value())?;
        self.touch(&base.id, expires)?;
        Ok(true)
    }

    /// Lets a response that is still found live until `expires`.
    pub(super) fn touch(&mut self, id: &str, expires: u64) -> Result<()> {
        let Some(mut meta) = self.meta_of(id)? else { return Ok(()) };
        if meta.gone || meta.expires >= expires {
            return Ok(());
        }
        self.expiry.remove((meta.expires, id))?;
        meta.expires = expires;
        self.expiry.insert((expires, id), ())?;
        self.meta.insert(id, meta.to_value())?;
        Ok(())
    }

    /// Deletes a response of `tenant`; false when it has none with this id.
    pub(super) fn delete(&mut self, id: &str, tenant: &str) -> Result<bool> {
        let Some(meta) = self.meta_of(id)? else { return Ok(false) };
        let decoded = self.rows.get(id)?.map(|bytes| row::decode(bytes.value()));
        let is_theirs = matches!(decoded, Some(Ok(row)) if row.tenant == tenant);
        if meta.gone || !is_theirs {
            return Ok(false);
        }
        self.let_go(id, meta)?;
        Ok(true)
    }

    /// Removes up to `most` responses that have expired.
    pub(super) fn sweep(&mut self, now: u64, most: usize) -> Result<()> {
        for _ in 0..most {
            match self.next_to_go()? {
                Some((expires, id)) if expires <= now => self.expire(expires, &id)?,
                _ => break,
            }
        }
        Ok(())
    }

    /// Removes up to `most` of the oldest responses while more than `max_bytes` are in use.
    pub(super) fn shrink(&mut self, max_bytes: u64, most: usize) -> Result<()> {
        for _ in 0..most {
            if self.n_bytes <= max_bytes {
                break;
            }
            let Some((expires, id)) = self.next_to_go()? else { break };
            self.expire(expires, &id)?;
        }
        Ok(())
    }

    fn next_to_go(&self) -> Result<Option<(u64, String)>> {
        Ok(self.expiry.first()?.map(|(key, _)| {
            let (expires, id) = key.value();
            (expires, id.to_owned())
        }))
    }

    fn expire(&mut self, expires: u64, id: &str) -> Result<()> {
        match self.meta_of(id)? {
            Some(meta) => self.let_go(id, meta),
            None => {
                self.expiry.remove((expires, id))?;
                Ok(())
            }
        }
    }

    /// Lets nobody find a row any more. It is removed at once or with the last row that is built upon it.
    fn let_go(&mut self, id: &str, mut meta: Meta) -> Result<()> {
        self.expiry.remove((meta.expires, id))?;
        meta.gone = true;
        if meta.n_children > 0 {
            self.meta.insert(id, meta.to_value())?;
            return Ok(());
        }
        let (mut id, mut meta) = (id.to_owned(), meta);
        loop {
            self.remove(&id, &meta)?;
            let Some(base) = meta.base.take() else { return Ok(()) };
            let Some(mut of_base) = self.meta_of(&base)? else { return Ok(()) };
            of_base.n_children = of_base.n_children.saturating_sub(1);
            if of_base.n_children > 0 || !of_base.gone {
                self.meta.insert(base.as_str(), of_base.to_value())?;
                return Ok(());
            }
            (id, meta) = (base, of_base);
        }
    }

    fn remove(&mut self, id: &str, meta: &Meta) -> Result<()> {
        let decoded = self.rows.remove(id)?.map(|bytes| row::decode(bytes.value()));
        self.meta.remove(id)?;
        self.n_bytes = self.n_bytes.saturating_sub(meta.n_bytes);
        // What names a row that cannot be read stays behind; it leads nowhere.
        let Some(Ok(row)) = decoded else { return Ok(()) };
        if self.content.get(&row.content)?.is_some_and(|other| other.value() == id) {
            self.content.remove(&row.content)?;
        }
        for entry in row.entries.iter().rev().take(row.n_own_items) {
            let key = item_key(&row.tenant, &entry.id);
            if self.items.get(&key)?.is_some_and(|other| other.value() == id) {
                self.items.remove(&key)?;
            }
        }
        Ok(())
    }

    fn meta_of(&self, id: &str) -> Result<Option<Meta>> {
        Ok(self.meta.get(id)?.map(|meta| Meta::of(meta.value())))
    }
}

/// The tables that questions need.
pub(super) struct ReadTables {
    rows: ReadOnlyTable<&'static str, &'static [u8]>,
    meta: ReadOnlyTable<&'static str, (u64, u32, u64, bool, &'static str)>,
    content: ReadOnlyTable<&'static [u8; 32], &'static str>,
    items: ReadOnlyTable<&'static [u8; 16], &'static str>,
}

impl ReadTables {
    pub(super) fn open(read: &ReadTransaction) -> Result<Self> {
        Ok(Self {
            rows: read.open_table(ROWS)?,
            meta: read.open_table(META)?,
            content: read.open_table(CONTENT)?,
            items: read.open_table(ITEMS)?,
        })
    }

    /// A response of `tenant` with the rows that it consists of, back to one that is `known`. What cannot be read is not
    /// found.
    pub(super) fn find(
        &self,
        wanted: &Wanted,
        tenant: &str,
        known: &dyn Fn(&str) -> Option<Arc<Stored>>,
        form: &Form,
    ) -> Result<Option<Found>> {
        let now = super::unix_ms();
        for id in self.ids_of(wanted, tenant)? {
            let Some(meta) = self.meta.get(id.as_str())?.map(|meta| Meta::of(meta.value())) else { continue };
            if meta.gone || meta.expires <= now {
                continue;
            }
            match self.chain(&id, tenant, known, form)? {
                Ok(chain) => {
                    let life = std::time::Duration::from_millis(meta.expires - now);
                    return Ok(Some(Found { id, chain, life }));
                }
                // Another tenant's is like none; another model's comes back with that model.
                Err(None | Some(Unreadable::OtherModel)) => {}
                Err(Some(error)) => tracing::warn!(response = id, %error, "a stored response cannot be read"),
            }
        }
        Ok(None)
    }

    /// The ids that are meant, best first.
    fn ids_of(&self, wanted: &Wanted, tenant: &str) -> Result<Vec<String>> {
        let mut ids = Vec::new();
        match wanted {
            Wanted::Id(id) => ids.push(id.clone()),
            Wanted::Item(item) => {
                ids.extend(self.items.get(&item_key(tenant, item))?.map(|id| id.value().to_owned()));
            }
            Wanted::After(contents) => {
                for content in contents {
                    ids.extend(self.content.get(content.as_bytes())?.map(|id| id.value().to_owned()));
                }
            }
        }
        Ok(ids)
    }

    fn chain(
        &self,
        id: &str,
        tenant: &str,
        known: &dyn Fn(&str) -> Option<Arc<Stored>>,
        form: &Form,
    ) -> Result<std::result::Result<Chain, Option<Unreadable>>> {
        let mut rows = Vec::new();
        let mut next = id.to_owned();
        loop {
            let Some(bytes) = self.rows.get(next.as_str())? else {
                return Ok(Err(Some(Unreadable::Missing)));
            };
            let row = match row::decode(bytes.value()) {
                Ok(row) if row.is_of(form) => row,
                Ok(_) => return Ok(Err(Some(Unreadable::OtherModel))),
                Err(error) => return Ok(Err(Some(error))),
            };
            if row.tenant != tenant {
                return Ok(Err(None));
            }
            if rows.len() == MAX_CHAIN {
                return Ok(Err(Some(Unreadable::Damaged)));
            }
            let base = row.base.clone();
            rows.push((next, row));
            let Some(base) = base else { return Ok(Ok(Chain { rows, known: None })) };
            if let Some(known) = known(&base) {
                return Ok(Ok(Chain { rows, known: Some(known) }));
            }
            next = base;
        }
    }
}

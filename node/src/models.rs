//! Models for people and roles: fetching with visible progress, and `baton model`.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use engine::shape::ModelShape;
use model::TextModel;
use model::checkpoint::Checkpoint;
use model::reference::Progress;

use crate::cli::{ModelAction, ModelArgs, ModelChoice};
use crate::roles::BadConfig;

/// Runs `baton model`.
///
/// # Errors
/// When the model cannot be fetched or read.
pub async fn run(args: ModelArgs) -> anyhow::Result<()> {
    let (choice, describe) = match args.action {
        ModelAction::Fetch(choice) => (choice, false),
        ModelAction::Info(choice) => (choice, true),
    };
    let path = fetch(&choice).await?;
    let text = if describe { info(&path)? } else { format!("{}\n", path.display()) };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

/// The file that `choice` names, fetched if it is not in the cache yet.
///
/// # Errors
/// When it cannot be had; the message says what to do.
pub async fn fetch(choice: &ModelChoice) -> anyhow::Result<PathBuf> {
    let cache = cache_dir(choice)?;
    let model = choice.model.clone();
    let fetching = tokio::task::spawn_blocking(move || {
        let mut display = Display::new();
        let path = model.resolve(&cache, &mut |progress| display.show(&progress));
        display.end();
        path
    });
    Ok(fetching.await.context("fetching the model was interrupted")??)
}

fn cache_dir(choice: &ModelChoice) -> anyhow::Result<PathBuf> {
    if let Some(dir) = &choice.cache_dir {
        return Ok(dir.clone());
    }
    let from = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = from("XDG_CACHE_HOME").or_else(|| from("HOME").map(|home| home.join(".cache")));
    let none = || BadConfig("neither XDG_CACHE_HOME nor HOME is set: choose --cache-dir".to_owned());
    Ok(cache.ok_or_else(none)?.join("baton"))
}

/// Progress on stderr: one line that moves on a terminal, a line now and then elsewhere.
pub(crate) struct Display {
    moves: bool,
    shown: Option<Instant>,
}

impl Display {
    pub(crate) fn new() -> Self {
        Self { moves: std::io::stderr().is_terminal(), shown: None }
    }

    fn show(&mut self, progress: &Progress) {
        let text = match progress {
            Progress::Downloading { bytes, total } => {
                format!("fetching the model: {}{}", mb(*bytes), of(*total))
            }
            Progress::Unpacking { bytes, total } => {
                format!("unpacking and checking: {}{}", mb(*bytes), of(Some(*total)))
            }
            Progress::RecordedSha256(sum) => format!("no checksum was known; recorded sha256 {sum}"),
        };
        if matches!(progress, Progress::RecordedSha256(_)) {
            self.shown = None;
        }
        self.say(&text);
    }

    /// Shows `text` unless something was shown a moment ago.
    pub(crate) fn say(&mut self, text: &str) {
        let interval = Duration::from_millis(if self.moves { 100 } else { 3_000 });
        if self.shown.is_some_and(|shown| shown.elapsed() < interval) {
            return;
        }
        self.shown = Some(Instant::now());
        let mut stderr = std::io::stderr();
        // Progress that cannot be shown is not worth failing for.
        let _ = if self.moves { write!(stderr, "\r\x1b[K{text}") } else { writeln!(stderr, "{text}") };
        let _ = stderr.flush();
    }

    pub(crate) fn end(&self) {
        if self.moves && self.shown.is_some() {
            let _ = writeln!(std::io::stderr());
        }
    }
}

fn mb(bytes: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "shown with one decimal")]
    let mb = bytes as f64 / 1e6;
    format!("{mb:.1} MB")
}

fn of(total: Option<u64>) -> String {
    total.map(|total| format!(" of {}", mb(total))).unwrap_or_default()
}

fn info(path: &Path) -> anyhow::Result<String> {
    let checkpoint = Checkpoint::open(path).with_context(|| path.display().to_string())?;
    let shape = ModelShape::read(&checkpoint)?;
    let text = TextModel::new(&checkpoint, path)?;
    let mut kinds = std::collections::BTreeMap::new();
    for tensor in checkpoint.tensors() {
        let (n, bytes) = kinds.entry(format!("{:?}", tensor.dtype)).or_insert((0_usize, 0_u64));
        *n += 1;
        *bytes += tensor.n_bytes() as u64;
    }
    let kinds: Vec<String> =
        kinds.into_iter().map(|(kind, (n, bytes))| format!("{n} {kind} ({})", mb(bytes))).collect();
    let fingerprint: String = text.fingerprint.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let kv_token = shape.kv_geometry().bytes_per_block() / kv::BLOCK_TOKENS;
    let rows = [
        ("model", text.name.clone()),
        ("path", path.display().to_string()),
        ("fingerprint", fingerprint),
        ("architecture", shape.architecture.name().to_owned()),
        ("layers, width, ffn", format!("{}, {}, {}", shape.n_layers, shape.d_model, shape.d_ffn)),
        ("heads, kv heads, head dim", format!("{}, {}, {}", shape.n_heads, shape.n_kv_heads, shape.head_dim)),
        ("context", format!("{} tokens", shape.context_len)),
        ("vocabulary", format!("{} tokens", shape.vocab)),
        ("KV memory", format!("{kv_token} bytes per token")),
        ("tensors", kinds.join(", ")),
        ("chat template", format!("{:?}", text.prompts.class())),
    ];
    Ok(rows.iter().map(|(name, value)| format!("{name:<27}{value}\n")).collect())
}

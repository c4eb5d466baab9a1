//! Loads a model, what guesses ahead for it, and the threads that run both: once for all workers of the process.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use engine::speculate::head::DraftHead;
use engine::weights::Weights;
use engine::{Drafter, Model};
use kernels::pool::ThreadPool;
use model::TextModel;
use model::checkpoint::Checkpoint;

use crate::cli::{EngineArgs, ModelChoice, Speculation};
use crate::models;
use crate::roles::BadConfig;

/// A model in memory and the threads that run it, shared by all workers of the process.
#[derive(Debug, Clone)]
pub(crate) struct Loaded {
    pub(crate) model: Model,
    /// One pool: the engines' parallel regions take turns on the cores instead of fighting for them.
    pub(crate) threads: Arc<ThreadPool>,
    /// Tokenizer, template and grammars, for a gateway of the same process too.
    pub(crate) text: TextModel,
}

impl Loaded {
    /// Bytes of a KV block of the draft model, which decode workers hold beside each of their own.
    pub(crate) fn draft_block_bytes(&self) -> usize {
        match &self.model.drafter {
            Drafter::Model(weights) => weights.shape().kv_geometry().bytes_per_block(),
            Drafter::None | Drafter::Head(_) => 0,
        }
    }

    /// What the process needs for the model, in words.
    pub(crate) fn memory(&self, kv_memory_mb: u32, n_workers: usize) -> String {
        let mb = |bytes: usize| bytes.div_ceil(1_000_000);
        let weights = mb(self.model.weights.n_bytes());
        let drafter = match &self.model.drafter {
            Drafter::None => String::new(),
            Drafter::Head(head) => format!(", draft head {} MB", mb(head.n_bytes())),
            Drafter::Model(weights) => format!(", draft model {} MB", mb(weights.n_bytes())),
        };
        format!("weights {weights} MB{drafter}, KV {n_workers} x {kv_memory_mb} MiB, claimed as it is used")
    }
}

/// Fetches and loads a model, and what guesses ahead for it, off the runtime's threads. Prefill workers alone need no
/// speculation.
pub(crate) async fn load(
    choice: &ModelChoice,
    args: &EngineArgs,
    speculation: Speculation,
) -> anyhow::Result<Loaded> {
    let path = models::fetch(choice).await?;
    let draft = match &args.draft_model {
        Some(model) if speculation == Speculation::Auto => {
            Some(models::fetch(&ModelChoice { model: model.clone(), ..choice.clone() }).await?)
        }
        _ => None,
    };
    let n_threads = n_threads(args);
    let began = Instant::now();
    let loading = tokio::task::spawn_blocking(move || -> anyhow::Result<Loaded> {
        let threads = Arc::new(ThreadPool::new(n_threads));
        let checkpoint = Checkpoint::open(&path).with_context(|| path.display().to_string())?;
        let text = TextModel::new(&checkpoint, &path)?;
        let mut display = models::Display::new();
        let loading = Weights::load_with(&checkpoint, &threads, &mut |n_done, n_layers| {
            display.say(&format!("loading the weights: {n_done} of {n_layers} layers"));
        });
        display.end();
        let weights = loading.with_context(|| path.display().to_string())?;
        let weights = Arc::new(weights);
        let drafter = match (speculation, draft) {
            (Speculation::Auto, Some(draft)) => Drafter::Model(load_draft(&draft, &text, &threads)?),
            (Speculation::Auto, None) => DraftHead::built_in(&weights, &threads)
                .map_or(Drafter::None, |head| Drafter::Head(Arc::new(head))),
            (Speculation::Lookup | Speculation::Off, _) => Drafter::None,
        };
        let grammars = Some(Arc::clone(&text.grammars));
        let model = Model { weights, fingerprint: text.fingerprint, drafter, grammars };
        Ok(Loaded { model, threads, text })
    });
    let loaded = loading.await.context("loading the model was interrupted")??;
    let ms = began.elapsed().as_millis();
    tracing::info!(
        model = loaded.text.name,
        ms,
        memory = loaded.memory(args.kv_memory_mb, 1),
        "weights loaded"
    );
    Ok(loaded)
}

/// Loads a draft model, which must speak the large model's language.
fn load_draft(path: &Path, large: &TextModel, threads: &ThreadPool) -> anyhow::Result<Arc<Weights>> {
    let checkpoint = Checkpoint::open(path).with_context(|| path.display().to_string())?;
    let draft = TextModel::new(&checkpoint, path)?;
    if !draft.tokenizer.same_vocabulary(&large.tokenizer) {
        let message = format!(
            "--draft-model {} has another vocabulary than {}: choose a smaller model of the same family",
            draft.name, large.name
        );
        return Err(BadConfig(message).into());
    }
    Ok(Arc::new(Weights::load(&checkpoint, threads).with_context(|| path.display().to_string())?))
}

pub(crate) async fn open_text(path: &Path) -> anyhow::Result<TextModel> {
    let path = path.to_owned();
    Ok(tokio::task::spawn_blocking(move || TextModel::open(&path))
        .await
        .context("loading was interrupted")??)
}

fn n_threads(args: &EngineArgs) -> NonZeroUsize {
    let cores = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    NonZeroUsize::new(args.threads).unwrap_or(cores)
}

//! The engine: one OS thread that owns a device's KV memory and runs steps; everybody else holds an [`Engine`] handle.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use kernels::attention::KvDtype;
use kernels::pool::ThreadPool;
use kv::announce::Announcer;
use kv::geometry::Geometry;
use kv::port::{Port, PortCommand};
use model::grammar::GrammarEngine;
use proto::v1;

use crate::arena::KvGeometry;
use crate::constrain::Constraint;
use crate::job::{Error, Job, Output, SequenceId};
use crate::sequence::Place;
use crate::speculate::Guesser;
use crate::speculate::draft_model::DraftModel;
use crate::speculate::head::{DraftHead, Runner};
use crate::steps::Steps;
use crate::weights::Weights;

/// Limits of one engine.
#[derive(Debug, Clone, Copy)]
pub struct EngineConfig {
    /// KV blocks of 16 tokens.
    pub n_blocks: u32,
    /// Tokens in one step: decode tokens and slices of prefill together.
    pub step_tokens: usize,
    /// Sequences in the running set.
    pub max_running: usize,
    /// Turns in the engine, waiting ones included.
    pub max_turns: usize,
    /// How keys and values are stored.
    pub kv_dtype: KvDtype,
    pub speculate: Speculate,
}

/// May several tokens of a stream be checked in one step? See [`crate::speculate`]. The output is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speculate {
    Never,
    /// As much as measured costs and acceptance recommend.
    WhenItPays,
    /// Whatever can be drafted, at any cost: to test, and to measure acceptance.
    Always,
}

/// A model in memory, and what guesses ahead for it.
#[derive(Debug, Clone)]
pub struct Model {
    pub weights: Arc<Weights>,
    /// Names the model in block hashes and handshakes.
    pub fingerprint: [u8; 32],
    pub drafter: Drafter,
    /// Its vocabulary, for outputs that must follow a grammar; without it there are none.
    pub grammars: Option<Arc<GrammarEngine>>,
}

/// Who guesses ahead where nothing can be looked up.
#[derive(Debug, Clone)]
pub enum Drafter {
    None,
    Head(Arc<DraftHead>),
    /// A smaller model with the same vocabulary.
    Model(Arc<Weights>),
}

impl Model {
    pub(crate) fn guesser(&self, threads: &Arc<ThreadPool>, config: EngineConfig) -> Guesser {
        match &self.drafter {
            Drafter::Head(head) if config.speculate != Speculate::Never => {
                Guesser::Head(Runner::new(Arc::clone(head), Arc::clone(threads)))
            }
            Drafter::Model(weights) if config.speculate != Speculate::Never => {
                let (weights, threads) = (Arc::clone(weights), Arc::clone(threads));
                let model = DraftModel::new(weights, threads, config.n_blocks, config.max_running);
                Guesser::Model(Box::new(model))
            }
            Drafter::None | Drafter::Head(_) | Drafter::Model(_) => Guesser::None,
        }
    }
}

/// What the engine's thread is told.
pub(crate) enum Command {
    Submit(SequenceId, Box<Job>, Place),
    Filled { id: SequenceId, first: Option<Output>, whole: bool },
    Cancel(SequenceId),
    Port(PortCommand),
    Stop,
}

/// A handle to a running engine. Dropping the last one stops the thread after its current step.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

struct Shared {
    commands: mpsc::Sender<Command>,
    next_id: AtomicU64,
    live: Arc<AtomicUsize>,
    max_turns: usize,
    announcer: Announcer,
    geometry: Geometry,
    context_tokens: usize,
    grammars: Option<Arc<GrammarEngine>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("live", &self.shared.live.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Starts the thread. `name` names the thread and metrics.
    ///
    /// # Errors
    /// When the operating system refuses a thread.
    pub fn start(
        model: Model,
        threads: Arc<ThreadPool>,
        config: EngineConfig,
        name: &str,
    ) -> std::io::Result<Self> {
        let (commands, inbox) = mpsc::channel();
        let announcer = Announcer::default();
        let live = Arc::new(AtomicUsize::new(0));
        let weights = &model.weights;
        let context_tokens = weights.shape().context_len.min(config.n_blocks as usize * kv::BLOCK_TOKENS);
        let geometry =
            geometry_of(weights.shape().kv_geometry().with_dtype(config.kv_dtype), model.fingerprint);
        let grammars = model.grammars.clone();
        let steps = Steps::new(model, threads, config, announcer.clone(), name.to_owned());
        let thread = std::thread::Builder::new().name(format!("engine {name}")).spawn(move || {
            let run = std::panic::AssertUnwindSafe(|| steps.run(&inbox));
            if std::panic::catch_unwind(run).is_err() {
                tracing::error!(
                    "a broken invariant in the engine: the process ends so that it can be restarted"
                );
                std::process::abort();
            }
        })?;
        let shared = Shared {
            commands,
            next_id: AtomicU64::new(1),
            live,
            max_turns: config.max_turns,
            announcer,
            geometry,
            context_tokens,
            grammars,
            thread: Mutex::new(Some(thread)),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Hands a turn to the engine; its sink hears of everything that follows.
    ///
    /// # Errors
    /// When all places are taken or the engine has stopped.
    pub fn submit(&self, job: Job) -> Result<SequenceId, Error> {
        let limit = self.shared.max_turns;
        // Every live turn sends a bounded number of commands, so this limit bounds the inbox too.
        let place = Place::take(&self.shared.live, limit).ok_or(Error::Overloaded { limit })?;
        let id = SequenceId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        self.shared.commands.send(Command::Submit(id, Box::new(job), place)).map_err(|_| Error::Stopped)?;
        Ok(id)
    }

    /// Checks a constraint for a job. Blocks for some milliseconds, the first time in a process for a third of a second:
    /// not for a runtime's threads.
    ///
    /// # Errors
    /// [`Error::Constraint`]: it is defective, or this engine knows no vocabulary. [`Error::GrammarUnknown`]: it names a
    /// grammar that is not held here.
    pub fn constraint(&self, wire: v1::Constraint) -> Result<Constraint, Error> {
        let unknown = || Error::Constraint("this worker does not know the model's vocabulary".to_owned());
        Constraint::from_wire(wire, self.shared.grammars.as_deref().ok_or_else(unknown)?)
    }

    /// The source of the grammar with this hash, if it is held here.
    #[must_use]
    pub fn grammar_source(&self, hash: &[u8]) -> Option<Arc<str>> {
        Some(self.shared.grammars.as_deref()?.known(hash)?.source())
    }

    /// The bytes a sequence waited for have arrived. The first token comes with a handover.
    pub fn filled(&self, id: SequenceId, first: Option<Output>) {
        self.send(Command::Filled { id, first, whole: true });
    }

    /// The bytes will not arrive: the engine computes what is missing.
    pub fn not_filled(&self, id: SequenceId) {
        self.send(Command::Filled { id, first: None, whole: false });
    }

    /// Stops a turn before its next step; its sink hears nothing more. Unknown ids are ignored.
    pub fn cancel(&self, id: SequenceId) {
        self.send(Command::Cancel(id));
    }

    /// The door to this engine's KV memory.
    #[must_use]
    pub fn port(&self) -> Port {
        let commands = self.shared.commands.clone();
        Port::new(move |command| commands.send(Command::Port(command)).is_ok())
    }

    /// The news for routers.
    #[must_use]
    pub fn announcer(&self) -> &Announcer {
        &self.shared.announcer
    }

    /// The shape of this engine's blocks.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    /// The model's limit for prompt and output together, in tokens.
    #[must_use]
    pub fn context_tokens(&self) -> usize {
        self.shared.context_tokens
    }

    /// Turns in the engine now.
    #[must_use]
    pub fn live_turns(&self) -> usize {
        self.shared.live.load(Ordering::Relaxed)
    }

    /// Ends the thread after its current step and waits for it. Blocks; running turns hear nothing more.
    pub fn stop(&self) {
        self.send(Command::Stop);
        let thread = self.shared.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic there has ended the process.
            let _ = thread.join();
        }
    }

    fn send(&self, command: Command) {
        // A stopped engine has no turns left to tell about.
        let _ = self.shared.commands.send(command);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Stop);
    }
}

fn geometry_of(kv: KvGeometry, model_fingerprint: [u8; 32]) -> Geometry {
    let narrow = |n: usize| u32::try_from(n).expect("a model's dimensions are small");
    Geometry {
        model_fingerprint,
        dtype: kv.dtype_name(),
        layout: "layer, kv head, K dim-major then V token-major",
        n_layers: narrow(kv.n_layers),
        n_kv_heads: narrow(kv.n_kv_heads),
        head_dim: narrow(kv.head_dim),
        block_tokens: narrow(kv::BLOCK_TOKENS),
        layer_bytes: narrow(kv.bytes_per_block_layer()),
    }
}

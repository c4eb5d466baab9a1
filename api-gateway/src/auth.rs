//! API keys: who may use the gateway, and on whose behalf.

use std::sync::Arc;

use axum::http::{HeaderMap, header};

use crate::error::ApiError;

/// Shorter keys can be guessed.
const MIN_KEY_CHARS: usize = 16;

/// A text that is shown nowhere.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text, for whoever has to use it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// The keys that are accepted, as hashes; none: everybody is let in, as one tenant.
#[derive(Clone, Default)]
pub struct ApiKeys {
    hashes: Arc<[(blake3::Hash, Arc<str>)]>,
}

impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ApiKeys({})", self.hashes.len())
    }
}

/// A key that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("API key {number} has {n_chars} characters: use at least {MIN_KEY_CHARS}, random ones")]
pub struct WeakKey {
    number: usize,
    n_chars: usize,
}

impl ApiKeys {
    /// The keys in `text`: one a line or with commas between, empty lines and those that begin with `#` left out. Only
    /// their hashes are kept.
    ///
    /// # Errors
    /// When a key is too short.
    pub fn parse(text: &str) -> Result<Self, WeakKey> {
        let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
        let keys = lines.flat_map(|line| line.split(',')).map(str::trim).filter(|key| !key.is_empty());
        let hashed = keys.enumerate().map(|(idx, key)| {
            let n_chars = key.chars().count();
            if n_chars < MIN_KEY_CHARS {
                return Err(WeakKey { number: idx + 1, n_chars });
            }
            let hash = blake3::hash(key.as_bytes());
            // What is stored for a key is found by its hash's beginning; the key itself is not needed again.
            Ok((hash, Arc::from(&hash.to_hex()[..16])))
        });
        Ok(Self { hashes: hashed.collect::<Result<_, _>>()? })
    }

    /// Whether no key is asked for.
    pub fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    /// On whose behalf a request comes.
    ///
    /// # Errors
    /// When keys are asked for and the request has none of them.
    pub(crate) fn tenant(&self, headers: &HeaderMap) -> Result<Arc<str>, ApiError> {
        if self.hashes.is_empty() {
            return Ok("".into());
        }
        let header = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let Some(key) = header.and_then(|value| value.strip_prefix("Bearer ")) else {
            let message = "an API key is required: send `Authorization: Bearer KEY`";
            return Err(ApiError::unauthorized("missing_api_key", message));
        };
        let hash = blake3::hash(key.trim().as_bytes());
        // blake3 compares hashes in constant time; all keys are looked at, whichever it is.
        let found = self.hashes.iter().fold(
            None,
            |found, (known, tenant)| {
                if *known == hash { Some(tenant) } else { found }
            },
        );
        let tenant = found
            .ok_or_else(|| ApiError::unauthorized("invalid_api_key", "this API key is not known here"))?;
        Ok(Arc::clone(tenant))
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn tenant(keys: &ApiKeys, header: &'static str) -> Result<Arc<str>, &'static str> {
        let mut headers = HeaderMap::new();
        if !header.is_empty() {
            headers.insert(header::AUTHORIZATION, HeaderValue::from_static(header));
        }
        keys.tenant(&headers).map_err(|error| error.code)
    }

    #[test]
    fn only_known_keys_are_let_in_and_each_is_a_tenant_of_its_own() {
        let keys =
            ApiKeys::parse("# mine\nsk-0123456789abcdef\n\n sk-fedcba9876543210 \n").expect("two keys");
        let first = tenant(&keys, "Bearer sk-0123456789abcdef").expect("known");
        let second = tenant(&keys, "Bearer sk-fedcba9876543210").expect("known");
        assert_ne!(first, second);
        assert_eq!(tenant(&keys, "Bearer sk-0123456789abcdeF"), Err("invalid_api_key"));
        assert_eq!(tenant(&keys, "Basic sk-0123456789abcdef"), Err("missing_api_key"));
        assert_eq!(tenant(&keys, ""), Err("missing_api_key"));
        assert_eq!(tenant(&ApiKeys::default(), ""), Ok("".into()));
        assert_eq!(ApiKeys::parse("short").map(|_| ()), Err(WeakKey { number: 1, n_chars: 5 }));
    }

    #[test]
    fn keys_may_stand_in_one_line_and_are_shown_nowhere() {
        let keys = ApiKeys::parse(
            "# sk-not-a-key-0000000, sk-nor-this-0000000\nsk-0123456789abcdef,sk-fedcba9876543210",
        )
        .expect("two");
        assert!(tenant(&keys, "Bearer sk-fedcba9876543210").is_ok());
        assert_eq!(tenant(&keys, "Bearer sk-nor-this-0000000"), Err("invalid_api_key"));
        assert_eq!(format!("{keys:?}"), "ApiKeys(2)");
        let config =
            crate::Config { seal_secret: Some("hidden".to_owned().into()), ..crate::Config::default() };
        assert!(!format!("{config:?}").contains("hidden"));
    }
}

//! Text that clients keep for us and cannot read or change: ChaCha20-Poly1305 (RFC 8439) under a key of the
//! configuration, as base64.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chacha20poly1305::aead::{Aead, Payload};
use chacha20poly1305::{ChaCha20Poly1305, Key, KeyInit, Nonce};

/// In front of every sealed text; a later form gets another one.
const VERSION: &str = "b1.";
const NONCE_BYTES: usize = 12;

/// Seals and opens.
#[derive(Clone)]
pub(crate) struct Seal {
    cipher: ChaCha20Poly1305,
}

impl Seal {
    /// Under a key derived from `secret`; gateways with the same secret open each other's seals.
    pub(crate) fn new(secret: &[u8]) -> Self {
        let key = blake3::derive_key("baton 2026 sealed items", secret);
        Self { cipher: ChaCha20Poly1305::new(Key::from_slice(&key)) }
    }

    /// `text`, readable for whoever has the key, and bound to `tenant`.
    pub(crate) fn close(&self, text: &str, tenant: &str) -> String {
        let nonce: [u8; NONCE_BYTES] = rand::random();
        let payload = Payload { msg: text.as_bytes(), aad: tenant.as_bytes() };
        let sealed = self.cipher.encrypt(Nonce::from_slice(&nonce), payload);
        let sealed = sealed.expect("a text in memory is shorter than the cipher's limit");
        format!("{VERSION}{}", URL_SAFE_NO_PAD.encode([&nonce[..], &sealed].concat()))
    }

    /// The text in a seal; None when it was not closed under this key for this tenant, or was changed.
    pub(crate) fn open(&self, sealed: &str, tenant: &str) -> Option<String> {
        let bytes = URL_SAFE_NO_PAD.decode(sealed.strip_prefix(VERSION)?).ok()?;
        let (nonce, sealed) = bytes.split_at_checked(NONCE_BYTES)?;
        let payload = Payload { msg: sealed, aad: tenant.as_bytes() };
        let text = self.cipher.decrypt(Nonce::from_slice(nonce), payload).ok()?;
        String::from_utf8(text).ok()
    }
}

impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seal").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seal_opens_for_its_tenant_and_key_only_and_only_unchanged() {
        let seal = Seal::new(b"secret");
        let sealed = seal.close("a summary", "me");
        assert_eq!(seal.open(&sealed, "me").as_deref(), Some("a summary"));
        assert_eq!(seal.open(&sealed, "you"), None);
        assert_eq!(Seal::new(b"other").open(&sealed, "me"), None);
        let mut changed = sealed.clone();
        changed.pop();
        for bad in [changed.as_str(), "", "b1.", "b1.AAAA", "b2.AAAA"] {
            assert_eq!(seal.open(bad, "me"), None, "{bad}");
        }
        assert_ne!(sealed, seal.close("a summary", "me"), "the same text is sealed differently each time");
    }
}

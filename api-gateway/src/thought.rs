//! Reasoning that clients keep for us: they send it back with the calls that it led to, so that the model can go on with
//! its thought where its own tokens are not there any more.

use serde::{Deserialize, Serialize};

use crate::seal::Seal;

/// What is sealed.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Thought {
    #[serde(rename = "thought")]
    pub(crate) text: String,
}

impl Thought {
    /// As the client keeps it.
    pub(crate) fn sealed(&self, seal: &Seal, tenant: &str) -> String {
        let json = serde_json::to_string(self).expect("our own types serialize");
        seal.close(&json, tenant)
    }

    /// What is in a seal; None when it was not made here, or was changed.
    pub(crate) fn open(seal: &Seal, sealed: &str, tenant: &str) -> Option<Self> {
        serde_json::from_str(&seal.open(sealed, tenant)?).ok()
    }
}

//! The shape of a worker's KV blocks, compared by name before any byte moves.

use proto::v1;

/// Everything two workers must agree on to exchange blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Blocks of different models never mix, whatever their shape.
    pub model_fingerprint: [u8; 32],
    pub dtype: &'static str,
    /// Names the order of the bytes inside a block.
    pub layout: &'static str,
    pub n_layers: u32,
    pub n_kv_heads: u32,
    pub head_dim: u32,
    pub block_tokens: u32,
    /// Bytes of one layer of one block: keys and values.
    pub layer_bytes: u32,
}

/// The first thing in which two geometries differ.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("KV blocks do not fit: {field} is {theirs} there and {ours} here")]
pub struct Mismatch {
    pub field: &'static str,
    pub theirs: String,
    pub ours: String,
}

impl Geometry {
    /// Bytes of one whole block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.n_layers as usize * self.layer_bytes as usize
    }

    /// The geometry as it travels; the fingerprint travels beside it.
    #[must_use]
    pub fn to_wire(&self) -> v1::KvGeometry {
        v1::KvGeometry {
            dtype: self.dtype.into(),
            layout: self.layout.into(),
            n_layers: self.n_layers,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            block_tokens: self.block_tokens,
        }
    }

    /// Compares with a peer's announcement.
    ///
    /// # Errors
    /// Names the first field that differs.
    pub fn check(&self, fingerprint: &[u8], theirs: Option<&v1::KvGeometry>) -> Result<(), Mismatch> {
        let missing = v1::KvGeometry::default();
        let theirs = theirs.unwrap_or(&missing);
        let hex = |bytes: &[u8]| bytes.iter().take(6).map(|byte| format!("{byte:02x}")).collect::<String>();
        let fields: [(&'static str, String, String); 7] = [
            ("model fingerprint", hex(fingerprint), hex(&self.model_fingerprint)),
            ("dtype", theirs.dtype.clone(), self.dtype.into()),
            ("layout", theirs.layout.clone(), self.layout.into()),
            ("n_layers", theirs.n_layers.to_string(), self.n_layers.to_string()),
            ("n_kv_heads", theirs.n_kv_heads.to_string(), self.n_kv_heads.to_string()),
            ("head_dim", theirs.head_dim.to_string(), self.head_dim.to_string()),
            ("block_tokens", theirs.block_tokens.to_string(), self.block_tokens.to_string()),
        ];
        if fingerprint != self.model_fingerprint {
            let [(field, theirs, ours), ..] = fields;
            return Err(Mismatch { field, theirs, ours });
        }
        match fields.into_iter().find(|(_, theirs, ours)| theirs != ours) {
            Some((field, theirs, ours)) => Err(Mismatch { field, theirs, ours }),
            None => Ok(()),
        }
    }
}

//! A small GGUF writer for tests: builds files, sound or broken.

/// Bytes of a GGUF under construction; counts are what the test says they are.
pub(super) struct Writer {
    pub(super) version: u32,
    pub(super) n_tensors: u64,
    pub(super) n_keys: u64,
    pub(super) keys: Vec<u8>,
    pub(super) tensors: Vec<u8>,
    pub(super) data: Vec<u8>,
    pub(super) alignment: usize,
}

impl Writer {
    pub(super) fn new() -> Self {
        Self {
            version: 3,
            n_tensors: 0,
            n_keys: 0,
            keys: Vec::new(),
            tensors: Vec::new(),
            data: Vec::new(),
            alignment: 32,
        }
    }

    /// Adds a key with a raw value: type id and bytes.
    pub(super) fn key(mut self, name: &str, kind: u32, value: &[u8]) -> Self {
        self.n_keys += 1;
        self.keys.extend(string(name.as_bytes()));
        self.keys.extend(kind.to_le_bytes());
        self.keys.extend(value);
        self
    }

    pub(super) fn str(self, name: &str, value: &str) -> Self {
        self.key(name, 8, &string(value.as_bytes()))
    }

    /// Adds a tensor entry as given, without data.
    pub(super) fn entry(mut self, name: &str, shape: &[u64], dtype: u32, offset: u64) -> Self {
        self.n_tensors += 1;
        self.tensors.extend(string(name.as_bytes()));
        self.tensors.extend((shape.len() as u32).to_le_bytes());
        self.tensors.extend(shape.iter().flat_map(|dim| dim.to_le_bytes()));
        self.tensors.extend(dtype.to_le_bytes());
        self.tensors.extend(offset.to_le_bytes());
        self
    }

    /// Adds an F32 tensor with its data, behind what is there.
    pub(super) fn f32(mut self, name: &str, shape: &[u64], data: &[f32]) -> Self {
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
        let offset = self.data.len() as u64;
        self.data.extend(data.iter().flat_map(|x| x.to_le_bytes()));
        self.entry(name, shape, 0, offset)
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.n_tensors.to_le_bytes());
        out.extend(self.n_keys.to_le_bytes());
        out.extend(&self.keys);
        out.extend(&self.tensors);
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(&self.data);
        out
    }
}

/// A GGUF string: length and bytes.
pub(super) fn string(bytes: &[u8]) -> Vec<u8> {
    let mut out = (bytes.len() as u64).to_le_bytes().to_vec();
    out.extend(bytes);
    out
}

/// An array value: element type, length, raw elements.
pub(super) fn array(kind: u32, len: u64, elements: &[u8]) -> Vec<u8> {
    let mut out = kind.to_le_bytes().to_vec();
    out.extend(len.to_le_bytes());
    out.extend(elements);
    out
}

//! Reads a model file: weights and metadata, tokenizer, chat template; and finds the file a reference names.

pub mod gguf;

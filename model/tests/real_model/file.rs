//! The file itself: what it says, and what is said of a damaged one.

use std::fs;
use std::io::Read as _;
use std::path::PathBuf;

use kernels::quant::DType;
use model::gguf::{Error, Gguf};
use model::{TextModel, detokenize::Detokenizer};

use crate::{MODEL, PATH, tokenizer};

#[test]
fn describes_the_model() {
    assert_eq!((MODEL.name.as_str(), MODEL.context_len), ("smollm2-135m-instruct", 8192));
    let gguf = Gguf::open(&PATH).unwrap();
    assert_eq!(gguf.tensors().len(), 272);
    let embedding = gguf.tensor("token_embd.weight").unwrap();
    assert_eq!((embedding.dtype, embedding.shape), (DType::Q8_0, &[576, 49152][..]));
    assert_eq!(embedding.data.len(), 576 * 49152 / 32 * 34);
    assert_eq!(gguf.f32("llama.rope.freq_base").unwrap(), 100_000.0);
    let message = gguf.tensor("blk.99.attn_q.weight").unwrap_err().to_string();
    assert!(message.contains("blk.99.attn_q.weight"), "{message}");
    let message = gguf.u32("general.name").unwrap_err().to_string();
    assert!(message.contains("`general.name` is a string"), "{message}");
}

#[test]
fn names_the_tensor_at_which_a_download_broke_off() {
    let path = std::env::temp_dir().join(format!("baton-truncated-{}.gguf", std::process::id()));
    let mut start = Vec::new();
    fs::File::open(&*PATH).unwrap().take(4_000_000).read_to_end(&mut start).unwrap();
    fs::write(&path, &start).unwrap();
    let result = Gguf::open(&path);
    let text = TextModel::open(&path);
    fs::remove_file(&path).unwrap();
    let error = result.err().unwrap();
    assert!(matches!(error, Error::Truncated { .. }));
    assert!(error.to_string().contains("the data of tensor `token_embd.weight`"), "{error}");
    assert!(text.unwrap_err().to_string().contains("baton-truncated"));
}

#[test]
fn names_a_file_that_is_not_there() {
    let missing = PathBuf::from("/no/such/model.gguf");
    assert!(Gguf::open(&missing).unwrap_err().to_string().contains("/no/such/model.gguf"));
}

#[test]
fn has_one_fingerprint() {
    let gguf = Gguf::open(&PATH).unwrap();
    assert_eq!(gguf.fingerprint(), MODEL.fingerprint);
}

#[test]
fn never_shows_a_control_token_as_text() {
    let mut detokenizer = Detokenizer::new(tokenizer().byte_table());
    let end = tokenizer().special_id("<|im_end|>").unwrap();
    assert_eq!(detokenizer.push(end), "");
    assert_eq!(tokenizer().token_bytes(end), b"<|im_end|>");
}

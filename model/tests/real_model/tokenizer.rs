//! Encoding against llama.cpp's ids (`fixtures/smollm2_tokenizer.json`) and against the `tokenizers` crate.

use std::sync::LazyLock;

use model::gguf::Gguf;
use proptest::prelude::*;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, Tokenizer as Reference};

use crate::{PATH, tokenizer};

const FIXTURE: &str = include_str!("../fixtures/smollm2_tokenizer.json");

/// The whole pipeline of the `tokenizers` crate on the same vocabulary, without and with special tokens.
static REFERENCES: LazyLock<[Reference; 2]> = LazyLock::new(|| [reference(false), reference(true)]);

fn reference(with_specials: bool) -> Reference {
    let gguf = Gguf::open(&PATH).expect("the default model opens");
    let tokens = gguf.strings("tokenizer.ggml.tokens").expect("tokens");
    let vocab: Vocab = tokens.iter().enumerate().map(|(id, token)| (token.clone(), id as u32)).collect();
    let merges = gguf.strings("tokenizer.ggml.merges").expect("merges").iter();
    let merges =
        merges.map(|merge| merge.split_once(' ').expect("a pair")).map(|(a, b)| (a.to_owned(), b.to_owned()));
    let model = BPE::builder().vocab_and_merges(vocab, merges.collect()).build().expect("a model");
    let mut reference = Reference::new(model);
    let split = Sequence::new(vec![Digits::new(true).into(), ByteLevel::new(false, true, true).into()]);
    reference.with_pre_tokenizer(Some(split));
    if with_specials {
        let specials = tokenizer().specials().iter();
        let specials = specials.map(|token| AddedToken::from(token.text.clone(), true).normalized(false));
        reference.add_special_tokens(&specials.collect::<Vec<_>>());
    }
    reference
}

fn ids(value: &serde_json::Value) -> Vec<u32> {
    let ids = value.as_array().expect("a list of ids").iter();
    ids.map(|id| id.as_u64().expect("an id") as u32).collect()
}

#[test]
fn equals_llama_cpp_in_both_modes() {
    let fixture: serde_json::Value = serde_json::from_str(FIXTURE).unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    assert!(cases.len() >= 60);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let ordinary = tokenizer().encode_ordinary(text);
        assert_eq!(ordinary, ids(&case["no_special"]), "ordinary {text:?}");
        assert_eq!(tokenizer().encode_with_specials(text), ids(&case["parse_special"]), "special {text:?}");
        let bytes: Vec<u8> = ordinary.iter().flat_map(|id| tokenizer().token_bytes(*id)).copied().collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), text);
    }
}

#[test]
fn knows_the_special_tokens() {
    let specials: Vec<(u32, &str)> = tokenizer().specials().iter().map(|t| (t.id, t.text.as_str())).collect();
    assert_eq!(specials[..3], [(0, "<|endoftext|>"), (1, "<|im_start|>"), (2, "<|im_end|>")]);
    assert_eq!((specials.len(), tokenizer().vocab_size()), (17, 49152));
    assert_eq!(tokenizer().end_of_turn_ids(), [0, 2]);
    assert_eq!((tokenizer().bos_id(), tokenizer().eos_id()), (Some(1), Some(2)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn equals_the_whole_pipeline_of_the_tokenizers_crate(
        text in "([a-zA-Z']{0,12}[ \t\n]{0,3}|[0-9½]{1,4}|\\PC|[éß日本\u{301}\u{a0}!.(){};_]|<\\|im_end\\|>|<\\|im_|fn |    ){0,20}",
    ) {
        let of = |reference: &Reference| reference.encode_fast(text.as_str(), false).unwrap().get_ids().to_vec();
        prop_assert_eq!(tokenizer().encode_ordinary(&text), of(&REFERENCES[0]));
        prop_assert_eq!(tokenizer().encode_with_specials(&text), of(&REFERENCES[1]));
    }
}

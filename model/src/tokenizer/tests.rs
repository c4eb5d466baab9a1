//! Splitting against the published patterns as the `tokenizers` crate runs them. Whole encodings of the real model are
//! in `tests/real_model.rs`.

use proptest::prelude::*;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};

use super::split::{Pattern, Specials, Splitter};
use super::{SpecialToken, byte_level};

const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The words that the reference pre-tokenizer called `name` cuts, as ranges of `text`.
fn reference(name: &str, text: &str) -> Vec<String> {
    let split = |pattern: &str| {
        Split::new(SplitPattern::Regex(pattern.to_owned()), SplitDelimiterBehavior::Isolated, false).unwrap()
    };
    let mut words = PreTokenizedString::from(text);
    match name {
        "smollm" => Digits::new(true).pre_tokenize(&mut words).unwrap(),
        "gpt-2" => {}
        "qwen2" => split(QWEN2).pre_tokenize(&mut words).unwrap(),
        "llama-bpe" => split(LLAMA3).pre_tokenize(&mut words).unwrap(),
        other => panic!("no reference for {other}"),
    }
    ByteLevel::new(false, true, matches!(name, "smollm" | "gpt-2")).pre_tokenize(&mut words).unwrap();
    let ranges = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
    ranges.into_iter().map(|(_, (from, to), _)| text[from..to].to_owned()).collect()
}

fn check(text: &str) {
    for name in ["smollm", "gpt-2", "qwen2", "llama-bpe"] {
        let splitter = Splitter::new(Pattern::named(name).unwrap());
        let words: Vec<&str> = splitter.words(text).collect();
        assert_eq!(words, reference(name, text), "{name}: {text:?}");
    }
}

#[test]
fn splits_as_the_published_patterns_do() {
    for text in [
        "",
        " ",
        "a  b",
        "a \n b",
        "x\n\n  y",
        "n = 12  34\t5",
        "It's  WE'LL 'sa",
        " !\n x !\r\n\r\ny",
        "日本語 12３ é\u{301}",
        "\u{3000}\u{3000}a",
        "½ⅷ 1",
    ] {
        check(text);
    }
}

#[test]
fn knows_the_published_patterns() {
    assert_eq!(Pattern::published_as(QWEN2), Some(Pattern::Qwen2));
    assert_eq!(Pattern::published_as(LLAMA3), Some(Pattern::Llama3));
    assert_eq!(Pattern::published_as(r"\s+(?!\S)|\s+"), None);
}

#[test]
fn names_an_unknown_pre_tokenizer_and_the_known_ones() {
    let message = Pattern::named("tekken").unwrap_err().to_string();
    assert!(message.contains("`tekken`") && message.contains("smollm, gpt-2, qwen2"), "{message}");
}

#[test]
fn prefers_the_longest_special_token() {
    let token = |id, text: &str| SpecialToken { id, text: text.to_owned(), control: true };
    let specials = Specials::new(vec![token(3, "<a>"), token(4, "<a><b>"), token(5, "[x]")]).unwrap();
    let found: Vec<u32> = specials.find("<a><b> <a> x [x]<a>").map(|(_, id)| id).collect();
    assert_eq!(found, [4, 3, 5, 3]);
    assert_eq!(specials.by_id(5).unwrap().text, "[x]");
    assert_eq!(Specials::new(Vec::new()).unwrap().find("<a>").count(), 0);
}

#[test]
fn every_byte_has_its_character() {
    let bytes: Vec<u8> = (0..=255).collect();
    let mut chars = String::new();
    byte_level::to_chars(&bytes, &mut chars);
    assert!(chars.contains('Ġ') && chars.contains('Ċ'));
    assert_eq!(byte_level::to_bytes(&chars), bytes);
    assert_eq!(byte_level::to_bytes("<｜"), "<｜".as_bytes());
}

proptest! {
    #[test]
    fn splits_any_text_as_the_published_patterns_do(text in "([a-z']{0,3}[ \t\n\r]{0,3}|[0-9½]{1,4}|\\PC|[éß日\u{3000}\u{a0}!.]){0,12}") {
        check(&text);
    }
}

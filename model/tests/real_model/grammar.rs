//! Grammars on the real vocabulary.

use std::sync::{Arc, LazyLock};
use std::thread;

use model::calls::{Choice, Input, Tool};
use model::grammar::{Error, GrammarEngine, MAX_LINES, MAX_SOURCE_BYTES, Matcher, source};
use proptest::prelude::*;
use serde_json::json;

use crate::{MODEL, tokenizer};

fn engine() -> &'static GrammarEngine {
    &MODEL.grammars
}

fn matcher(source: &str) -> Matcher {
    engine().compile(source).unwrap_or_else(|error| panic!("{source}: {error}")).matcher()
}

fn encode(text: &str) -> Vec<u32> {
    tokenizer().encode_with_specials(text)
}

/// Feeds `text`; true when the output may end there. Every token is allowed where it comes, or it panics.
fn accepts(source: &str, text: &str) -> bool {
    let mut matcher = matcher(source);
    for token in encode(text) {
        let mask = matcher.mask().expect("the grammar goes on");
        if !mask.allows(token) {
            return false;
        }
        matcher.consume(token).expect("the mask allows it");
    }
    matcher.is_accepting().expect("no more than a question")
}

#[test]
fn a_call_that_is_to_be_the_only_one_ends_the_turn() {
    let input = Input::Json { schema: r#"{"type":"object","properties":{}}"#.to_owned(), strict: true };
    let tool = Tool { name: "look".to_owned(), description: String::new(), input };
    let grammar = |choice| MODEL.prompts.format().grammar(&[&tool], choice, None);
    let call = "\n{\"name\": \"look\", \"arguments\": {}}\n</tool_call>";
    let (once, any) = (grammar(Choice::LazyOnce), grammar(Choice::Lazy));
    assert!(accepts(&once, &format!("{call}<|im_end|>")));
    assert!(!accepts(&once, call), "the turn has to end");
    assert!(!accepts(&once, &format!("{call}\n<tool_call>{call}<|im_end|>")), "with the first call");
    assert!(accepts(&any, call));
}

#[test]
fn outputs_are_accepted_as_the_grammar_says() {
    let call = r#"start: <|im_start|> "call" body <|im_end|>
        body: " " %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
            "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}"#;
    let schema = source::json_schema(&json!({"type": "object", "properties":
        {"b": {"enum": ["x", "y"]}, "a": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
        "required": ["b", "a"], "additionalProperties": false}));
    for (source, text, wanted) in [
        ("start: \"yes\" | \"no\"", "yes", true),
        ("start: \"yes\" | \"no\"", "no", true),
        ("start: \"yes\" | \"no\"", "ye", false),
        ("start: \"yes\" | \"no\"", "maybe", false),
        (&source::regex("[a-c]+/\\d{2}"), "abcab/42", true),
        (&source::regex("[a-c]+/\\d{2}"), "abcab/4", false),
        (&source::regex(""), "", true),
        (&schema, r#"{"b": "y", "a": [true, false]}"#, true),
        (&schema, r#"{"b": "z", "a": []}"#, false),
        (&schema, r#"{"a": [], "b": "x"}"#, false),
        (&source::json_object(), r#"{"k": {"l": [1, 2.5e3, null]}, "é": "日本 \" \u0001"}"#, true),
        (&source::json_object(), "[]", false),
        (call, r#"<|im_start|>call {"a":-12}<|im_end|>"#, true),
        (call, r#"<|im_start|>call {"a":x}<|im_end|>"#, false),
        ("start: \"a\" <[2]>", "a<|im_end|>", true),
    ] {
        assert_eq!(accepts(source, text), wanted, "{text} by {source}");
    }
    // The text of a special token is not the token.
    let token = tokenizer().special_id("<|im_end|>").expect("a control token");
    let mut free = matcher("start: /(?s:.)*/");
    assert!(!free.mask().expect("anything goes").allows(token));
    let spelt = tokenizer().encode_ordinary("<|im_end|>");
    assert_eq!(free.n_fitting(&spelt).expect("anything goes"), spelt.len());
}

#[test]
fn what_is_forced_is_what_the_tokenizer_makes_of_it() {
    let text = "Once upon a time there was a lighthouse";
    let mut matcher = matcher(&format!("start: \"{text}\" /[0-9]/"));
    let wanted = encode(text);
    let forced = matcher.forced().expect("nothing is complex here");
    // The last word may go on differently, so it is not certain yet.
    assert!(forced.len() >= wanted.len() - 1 && wanted.starts_with(&forced), "{forced:?} of {wanted:?}");
    for token in forced {
        let mask = matcher.mask().expect("the grammar goes on");
        assert_eq!((mask.n_allowed(), mask.first()), (1, Some(token)));
        matcher.consume(token).expect("it is forced");
    }
    assert!(!matcher.is_complete());
}

#[test]
fn the_end_is_known_when_nothing_can_follow() {
    let mut matcher = matcher("start: \"no\" \"pe\"?");
    matcher.consume(encode("no")[0]).expect("it fits");
    assert!(matcher.is_accepting().expect("a question") && !matcher.is_complete());
    assert!(matcher.mask().expect("it may go on").n_allowed() > 0);
    for token in encode("pe") {
        matcher.consume(token).expect("it fits");
    }
    assert!(matcher.is_accepting().expect("a question") && matcher.is_complete());
    assert_eq!(matcher.mask().expect("it is at its end").n_allowed(), 0);
    assert_eq!(matcher.forced(), Ok(Vec::new()));
    matcher.rollback(1).expect("one was consumed");
    assert!(!matcher.is_complete());
}

#[test]
fn bytes_go_first_when_they_fit() {
    let mut matcher = matcher("start: /[a-z]{3}/ \"!\"");
    assert_eq!(matcher.consume_bytes(b"a1"), Ok(false));
    assert_eq!(matcher.consume_bytes(b""), Ok(true));
    assert_eq!(matcher.consume_bytes(b"ab"), Ok(true));
    assert_eq!(matcher.n_fitting(&encode("c!")), Ok(encode("c!").len()));
    assert_eq!(matcher.consume_bytes(b"c!"), Ok(true));
    assert!(matcher.is_complete());
}

#[test]
fn defects_are_named_in_one_line() {
    let check = |source: &str, parts: &[&str]| {
        let error = engine().compile(source).expect_err("it is refused").to_string();
        assert!(!error.contains('\n') && parts.iter().all(|part| error.contains(part)), "{source}: {error}");
    };
    check("start: foo", &["line 1", "unknown name", "foo"]);
    check("start: \"a\"\nb: (((\n", &["line 2"]);
    check("start: %json {\"type\": 5}", &["type"]);
    check("start: %json {\"not\": {}}", &["not"]);
    check("start: <|nothing|>", &["<|nothing|>"]);
    check("start: /[/", &["regex"]);
    check("", &["start"]);
    check("start: /a/[stop=\"b\"]", &[""]);
    let unsatisfiable = json!({"type": "integer", "minimum": 3, "maximum": 2});
    check(&source::json_schema(&unsatisfiable), &["nsatisfiable"]);
    let long = "x".repeat(MAX_SOURCE_BYTES + 1);
    assert_eq!(engine().compile(&long).err(), Some(Error::TooLong { n_bytes: long.len() }));
    let lines = "\n".repeat(MAX_LINES + 1);
    assert_eq!(engine().compile(&lines).err(), Some(Error::TooManyLines { n_lines: MAX_LINES + 1 }));
}

/// Whatever a client sends, compiling and a few steps end soon, and without a panic.
#[test]
fn monsters_are_bounded() {
    let n = 61;
    let nested_arrays =
        (0..n).fold(json!({"type": "null"}), |inner, _| json!({"type": "array", "items": inner}));
    let references = json!({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "array", "items":
        {"$ref": "#/$defs/a"}}]}}, "$ref": "#/$defs/a"});
    let chain: serde_json::Map<_, _> = (0..9000)
        .map(|i| (format!("{i}"), json!({"items": {"$ref": format!("#/$defs/{}", i + 1)}})))
        .chain([("9000".to_owned(), json!({"type": "null"}))])
        .collect();
    // Symbolic derivatives of such an intersection double with each pattern.
    let patterns: Vec<_> = (0..21).map(|i| json!({"type": "string", "pattern": format!("a.*{i}")})).collect();
    let wide: serde_json::Map<_, _> = (0..2000)
        .map(|i| (format!("key{i}"), json!({"type": "string", "pattern": "^(a|b)*c{3,40}$"})))
        .collect();
    for source in [
        source::json_schema(&nested_arrays),
        source::json_schema(&references),
        source::json_schema(&json!({"$defs": chain, "$ref": "#/$defs/0"})),
        source::json_schema(&json!({"allOf": patterns})),
        source::json_schema(&json!({"type": "object", "properties": wide})),
        source::regex("((a{500}){500}){500}"),
        source::regex("(a*)*(b|ab)*[^x]{1000}.{900}"),
        format!("start: {}", "a ".repeat(20_000) + "\na: \"x\"?"),
        (0..4000).map(|i| format!("r{i}: \"a\" r{}\n", i + 1)).collect::<String>()
            + "r4000: \"z\"\nstart: r0",
        "start: start start | \"a\" | \"\"".to_owned(),
        "start: start".to_owned(),
        format!("start: {}\"x\"", "\"a\" | ".repeat(8_000)),
        format!("start: /{}a{}/", "(".repeat(240), ")*".repeat(240)),
    ] {
        let began = std::time::Instant::now();
        if let Ok(grammar) = engine().compile(&source) {
            let mut matcher = grammar.matcher();
            for _ in 0..20 {
                let Ok(mask) = matcher.mask() else { break };
                let Some(token) = mask.first() else { break };
                // A row of the parser may become too long.
                if matcher.consume(token).is_err() {
                    break;
                }
            }
        }
        let took = began.elapsed();
        assert!(took.as_secs() < 15, "{took:?} for {}", &source[..source.len().min(80)]);
    }
}

#[test]
fn a_grammar_is_compiled_once_and_shared_by_threads() {
    let own = Arc::new(GrammarEngine::new(tokenizer()));
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let own = Arc::clone(&own);
            thread::spawn(move || {
                let mut matcher = own.compile("start: /[0-9]+/ \".\"").expect("it is well-formed").matcher();
                matcher.consume(encode("7")[0]).expect("a digit");
                matcher.mask().expect("it goes on").n_allowed()
            })
        })
        .collect();
    let counts: Vec<usize> = threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
    assert!(counts.iter().all(|count| *count == counts[0] && *count > 10), "{counts:?}");
}

static SOURCES: LazyLock<[String; 4]> = LazyLock::new(|| {
    [
        source::json_object(),
        source::json_schema(
            &json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["lighthouse", "lightship"]}, "size": {"type": "integer", "minimum": 0, "maximum": 999}},
            "required": ["name", "kind", "size"], "additionalProperties": false}),
        ),
        "start: (\"the \" WORD \" \")+ \"end\"\nWORD: /[a-z]{2,5}/".to_owned(),
        source::regex("(?:[A-Z][a-z]+ ?){1,8}[.!?]"),
    ]
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Masks depend on the consumed tokens alone, not on what was tried, asked and rolled back on the way.
    #[test]
    fn masks_forget_what_was_rolled_back(which in 0usize..4, choices in proptest::collection::vec((0usize..400, 0usize..4), 1..24)) {
        let grammar = engine().compile(&SOURCES[which]).expect("it is well-formed");
        let (mut tried, mut plain) = (grammar.matcher(), grammar.matcher());
        for (choice, n_tried) in choices {
            let mask = plain.mask().expect("the grammar goes on");
            let allowed: Vec<u32> = (0..tokenizer().vocab_size()).filter(|id| mask.allows(*id)).collect();
            if allowed.is_empty() {
                break;
            }
            let forced = tried.forced().expect("not complex");
            prop_assert!(forced.first().is_none_or(|first| mask.n_allowed() == 1 && mask.allows(*first)));
            let mut n_consumed = 0;
            for i in 0..n_tried {
                let mask = tried.mask().expect("the grammar goes on");
                let ids: Vec<u32> = (0..tokenizer().vocab_size()).filter(|id| mask.allows(*id)).collect();
                let Some(&id) = ids.get((choice * 7 + i) % ids.len().max(1)) else { break };
                tried.consume(id).expect("the mask allows it");
                n_consumed += 1;
            }
            tried.rollback(n_consumed).expect("they were consumed");
            prop_assert!(tried.mask().expect("the grammar goes on") == mask);
            let token = allowed[choice % allowed.len()];
            tried.consume(token).expect("the mask allows it");
            plain.consume(token).expect("the mask allows it");
            prop_assert_eq!(tried.is_accepting(), plain.is_accepting());
            prop_assert_eq!(tried.is_complete(), plain.is_complete());
        }
    }
}

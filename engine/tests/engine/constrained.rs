//! Outputs under constraints: what they look like, and that nothing else about them changes.

use std::sync::{Arc, LazyLock};

use engine::constrain::Constraint;
use engine::job::{Error, FinishReason};
use engine::sample::SamplingParams;
use engine::speculate::head::DraftHead;
use engine::{Drafter, EngineConfig, Model, Speculate};
use kernels::attention::KvDtype;
use model::chat_template::{Message, Reply, Role};
use model::grammar::{Matcher, source};
use model::prompt::Entry;
use proto::v1;
use proto::v1::trigger::Trigger;
use serde_json::json;

use crate::host::{Answer, Host, Turn, accepted};
use crate::real::{TEXT, WEIGHTS, pool};

/// Without drafts: what everything is compared with.
static PLAIN: LazyLock<Host> = LazyLock::new(|| host(Drafter::None, Speculate::Never));
/// With every draft there is.
static FAST: LazyLock<Host> = LazyLock::new(|| {
    let head = DraftHead::built_in(&WEIGHTS, &pool(1)).expect("the test model has a head");
    host(Drafter::Head(Arc::new(head)), Speculate::Always)
});

fn host(drafter: Drafter, speculate: Speculate) -> Host {
    Host::start_with(&WEIGHTS, drafter, speculate, Some(Arc::clone(&TEXT.grammars)))
}

pub(crate) fn prompt(question: &str) -> Vec<u32> {
    let message = Message { role: Role::User, content: question.into() };
    TEXT.prompts.render_all(&[Entry::Message(&message)], Reply::Expected, &[]).expect("the template takes it")
}

fn wire(grammar: &str, triggers: &[Trigger]) -> v1::Constraint {
    let triggers = triggers.iter().map(|trigger| v1::Trigger { trigger: Some(trigger.clone()) }).collect();
    v1::Constraint { grammar: grammar.to_owned(), triggers, ..Default::default() }
}

fn constraint(wire: v1::Constraint) -> Constraint {
    PLAIN.engine.constraint(wire).expect("it is well-formed")
}

pub(crate) fn sampled(temperature: f32, seed: u64) -> SamplingParams {
    SamplingParams { temperature, seed, ..SamplingParams::GREEDY }
}

fn turn(question: &str, wire: Option<v1::Constraint>, sampling: SamplingParams) -> Turn {
    Turn {
        ids: prompt(question),
        sampling,
        constraint: wire.map(constraint),
        max_output_tokens: 80,
        stop_ids: TEXT.tokenizer.end_of_turn_ids().to_vec(),
    }
}

/// The text of an output without what ends the turn.
pub(crate) fn text(answer: &Answer) -> String {
    let bytes = answer.ids().into_iter().filter(|id| !TEXT.tokenizer.is_end_of_turn(*id));
    let bytes: Vec<u8> = bytes.flat_map(|id| TEXT.tokenizer.token_bytes(id).to_vec()).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Where free output turns into text under `grammar` and back, by a reading of its own: the ruled runs of tokens.
fn ruled_runs(ids: &[u32], grammar: &str, triggers: &[u32]) -> Vec<Vec<u32>> {
    let grammar = TEXT.grammars.compile(grammar).expect("it is well-formed");
    let mut ruled: Option<Matcher> = None;
    let mut runs: Vec<Vec<u32>> = Vec::new();
    for &id in ids.iter().filter(|id| !TEXT.tokenizer.is_end_of_turn(**id)) {
        match &mut ruled {
            Some(matcher) => {
                matcher.consume(id).expect("the output follows the grammar");
                runs.last_mut().expect("a run has begun").push(id);
                if matcher.is_complete() {
                    ruled = None;
                }
            }
            None if triggers.contains(&id) => {
                ruled = Some(grammar.matcher());
                runs.push(Vec::new());
            }
            None => {}
        }
    }
    runs
}

const QUESTIONS: [&str; 3] = [
    "Describe a lighthouse in one sentence.",
    "Give me the name, the height and the colours of a lighthouse as JSON.",
    "Write a short poem about the sea.",
];

/// Grammars whose text is forced here and there.
fn grammars() -> [String; 4] {
    [
        source::json_schema(&json!({"type": "object", "properties": {
            "name": {"type": "string", "maxLength": 20}, "height_in_metres": {"type": "integer", "minimum": 1, "maximum": 300},
            "colours": {"type": "array", "items": {"enum": ["white", "red", "white and red"]}, "maxItems": 3}},
            "required": ["name", "height_in_metres", "colours"], "additionalProperties": false})),
        source::regex(
            "The (lighthouse|lightship) of [A-Z][a-z]{2,10} is [0-9]{1,3} metres high, and its keeper is called [A-Z][a-z]+\\.",
        ),
        "start: line{3}\nline: \"* \" /[a-z ]{5,40}/ \"\\n\"".to_owned(),
        source::json_object(),
    ]
}

#[test]
fn drafts_change_no_token_of_a_constrained_output() {
    let mut wires: Vec<v1::Constraint> = grammars().iter().map(|grammar| wire(grammar, &[])).collect();
    // Ordinary words that the model likes, so that several calls come in one output.
    let words = [" the", " of", " a", ".", ",", "The"];
    let ids = words.map(|word| Trigger::Id(TEXT.tokenizer.encode_ordinary(word)[0]));
    wires.push(wire("start: \" {\" /[a-z]{3,9}/ \"(\" /[0-9]{1,4}/ \")}\"", &ids));
    wires.push(wire(
        "start: / [a-z]{2,8}/ \" [lamp]\"",
        &[Trigger::Text("ight".to_owned()), Trigger::Text(". ".to_owned())],
    ));
    let forced_before = accepted("grammar");
    for (seed, temperature) in [(1, 0.0), (2, 0.8)] {
        let turns = || {
            QUESTIONS.iter().flat_map(|question| {
                wires.iter().map(|wire| turn(question, Some(wire.clone()), sampled(temperature, seed)))
            })
        };
        let wanted = PLAIN.run(turns());
        assert_eq!(FAST.run(turns()), wanted, "together, at temperature {temperature}");
        for (turn, wanted) in turns().zip(&wanted).step_by(4) {
            assert_eq!(&FAST.run([turn])[0], wanted, "alone, at temperature {temperature}");
        }
    }
    assert!(accepted("grammar") > forced_before, "some tokens were forced");
}

#[test]
fn outputs_follow_the_grammar_to_its_end() {
    for (i, grammar) in grammars()[..3].iter().enumerate() {
        let answers = FAST.run(QUESTIONS.map(|question| {
            let sampling = sampled(if i == 0 { 0.0 } else { 0.9 }, i as u64);
            turn(question, Some(wire(grammar, &[])), sampling)
        }));
        for answer in answers {
            let mut matcher = TEXT.grammars.compile(grammar).expect("it is well-formed").matcher();
            let ids = answer.ids();
            assert_eq!(answer.end, Ok(FinishReason::Stop), "{}", text(&answer));
            let (stop, output) = ids.split_last().expect("it has tokens");
            assert!(TEXT.tokenizer.is_end_of_turn(*stop));
            output.iter().for_each(|id| matcher.consume(*id).expect("the output follows the grammar"));
            assert!(matcher.is_accepting().expect("a question"));
        }
    }
}

#[test]
fn a_complete_output_ends_without_a_stop_token_too() {
    for host in [&PLAIN, &FAST] {
        let asked = turn(QUESTIONS[0], Some(wire("start: \"Yes.\"", &[])), SamplingParams::GREEDY);
        let answer = host.run([Turn { stop_ids: Vec::new(), ..asked }]).remove(0);
        assert_eq!((text(&answer).as_str(), answer.end), ("Yes.", Ok(FinishReason::Stop)));
    }
}

#[test]
fn a_token_triggers_the_grammar_again_and_again() {
    let grammar = "start: \" {\" /[a-z]{3}/ \"}\"";
    let words = [" the", " of", " a", ",", " and", " in", " to"];
    let triggers = words.map(|word| TEXT.tokenizer.encode_ordinary(word)[0]);
    let wire = wire(grammar, &triggers.map(Trigger::Id));
    let mut n_runs = 0;
    for seed in 0..4 {
        let asked = || turn(QUESTIONS[2], Some(wire.clone()), sampled(0.7, seed));
        let answer = FAST.run([asked()]).remove(0);
        let runs = ruled_runs(&answer.ids(), grammar, &triggers);
        n_runs += runs.len();
        assert!(!runs.is_empty(), "{}", text(&answer));
    }
    assert!(n_runs >= 8, "{n_runs} calls in four outputs");
}

/// Finds a trigger in free output that begins within one token and ends within the next.
#[test]
fn a_text_triggers_across_tokens_and_what_follows_it_goes_first() {
    let free = PLAIN.run([turn(QUESTIONS[0], None, SamplingParams::GREEDY)]).remove(0);
    let bytes = |id: &u32| TEXT.tokenizer.token_bytes(*id);
    let ids = free.ids();
    let at = (2..ids.len() - 1).find(|&i| bytes(&ids[i]).len() >= 3 && bytes(&ids[i + 1]).len() >= 4);
    let at = at.expect("two long words in a row");
    let (first, second) = (bytes(&ids[at]), bytes(&ids[at + 1]));
    let trigger = [&first[1..], &second[..2]].concat();
    let trigger = [Trigger::Text(String::from_utf8(trigger).expect("English"))];
    let rest = std::str::from_utf8(&second[2..]).expect("English");
    let run = |grammar: &str| {
        let answers: Vec<Answer> = [&*PLAIN, &*FAST]
            .iter()
            .map(|host| {
                host.run([turn(QUESTIONS[0], Some(wire(grammar, &trigger)), SamplingParams::GREEDY)])
                    .remove(0)
            })
            .collect();
        assert_eq!(answers[0], answers[1]);
        answers[0].clone()
    };
    let answer = run(&format!("start: \"{rest}\" \" <<\" /[0-9]{{3}}/ \">>\""));
    assert_eq!(answer.ids()[..at + 2], ids[..at + 2]);
    let prefix: Vec<u8> = ids[..at + 2].iter().flat_map(bytes).copied().collect();
    let after = text(&answer).split_off(prefix.len());
    assert!(after.starts_with(" <<") && after[6..].starts_with(">>"), "{after}");
    // A grammar that refuses what the token says beyond the trigger leaves the output as it was.
    assert_eq!(run("start: \"0\" /[0-9]{3}/").ids(), ids);
}

#[test]
fn a_turn_that_moves_goes_on_where_it_was() {
    let ids = [" the", " of", " a", ","].map(|word| Trigger::Id(TEXT.tokenizer.encode_ordinary(word)[0]));
    let wires = [
        wire(&grammars()[0], &[]),
        wire(&grammars()[2], &[]),
        wire("start: \" {\" /[a-z]{3,9}/ \"}\"", &ids),
    ];
    for (seed, wire) in (5..).zip(wires) {
        let asked = || turn(QUESTIONS[1], Some(wire.clone()), sampled(0.8, seed));
        let whole = PLAIN.run([asked()]).remove(0).ids();
        for n_generated in [1, 2, 5, whole.len() / 2, whole.len() - 1] {
            let mut rest = asked();
            rest.ids.extend(&whole[..n_generated]);
            rest.max_output_tokens -= n_generated;
            let generated = u32::try_from(n_generated).expect("short");
            rest.constraint = Some(constraint(v1::Constraint { generated, ..wire.clone() }));
            assert_eq!(FAST.run([rest])[0].ids(), whole[n_generated..], "after {n_generated} tokens");
        }
    }
}

#[test]
fn turns_that_are_computed_again_keep_their_place() {
    let wires: Vec<v1::Constraint> = grammars().iter().map(|grammar| wire(grammar, &[])).collect();
    let turns = || wires.iter().map(|wire| turn(QUESTIONS[1], Some(wire.clone()), sampled(0.6, 3)));
    let wanted: Vec<Answer> = turns().map(|turn| PLAIN.run([turn]).remove(0)).collect();
    // Room for two of them at a time, and they grow.
    let model = Model {
        weights: Arc::clone(&WEIGHTS),
        fingerprint: [7; 32],
        drafter: Drafter::None,
        grammars: Some(Arc::clone(&TEXT.grammars)),
    };
    let config = EngineConfig {
        n_blocks: 17,
        step_tokens: 64,
        max_running: 16,
        max_turns: 16,
        kv_dtype: KvDtype::F16,
        speculate: Speculate::Always,
    };
    assert_eq!(Host::with_config(model, config).run(turns()), wanted);
}

#[test]
fn constraints_that_cannot_be_used_are_refused_in_one_line() {
    let refused = |wire: v1::Constraint| match FAST.engine.constraint(wire) {
        Err(error @ Error::Constraint(_)) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let check = |wire: v1::Constraint, part: &str| {
        let message = refused(wire);
        assert!(message.contains(part) && !message.contains('\n'), "{message}");
    };
    check(wire("start: foo", &[]), "line 1");
    check(wire("start: \"a\"", &[Trigger::Text(String::new())]), "1 to 256 bytes");
    check(wire("start: \"a\"", &[Trigger::Id(1 << 20)]), "vocabulary");
    check(wire("start: \"a\"", &vec![Trigger::Id(1); 65]), "64 triggers");
    let nothing =
        v1::Constraint { triggers: vec![v1::Trigger { trigger: None }], ..wire("start: \"a\"", &[]) };
    check(nothing, "neither");
    let too_many = v1::Constraint { generated: 10_000, ..wire("start: \"a\"", &[]) };
    let answer = FAST.run([turn(QUESTIONS[0], Some(too_many), SamplingParams::GREEDY)]).remove(0);
    assert!(matches!(answer.end, Err(Error::Constraint(_))), "{:?}", answer.end);
    let blind = Host::start(&WEIGHTS, Drafter::None, Speculate::Never);
    assert!(matches!(blind.engine.constraint(wire("start: \"a\"", &[])), Err(Error::Constraint(_))));
}

#[test]
fn a_turn_that_left_its_grammar_fails_alone() {
    let mut lost = turn(QUESTIONS[0], None, SamplingParams::GREEDY);
    lost.ids.extend(TEXT.tokenizer.encode_ordinary("something else"));
    let generated = u32::try_from(TEXT.tokenizer.encode_ordinary("something else").len()).expect("short");
    lost.constraint = Some(constraint(v1::Constraint { generated, ..wire("start: /[0-9]+/ \".\"", &[]) }));
    let good = turn(QUESTIONS[0], Some(wire("start: \"Well.\"", &[])), SamplingParams::GREEDY);
    let [lost, good]: [Answer; 2] = FAST.run([lost, good]).try_into().expect("two answers");
    assert!(matches!(lost.end, Err(Error::Constraint(_))) && lost.outputs.is_empty(), "{lost:?}");
    assert_eq!((text(&good).as_str(), good.end), ("Well.", Ok(FinishReason::Stop)));
}

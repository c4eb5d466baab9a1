//! Two hundred schemas: whatever the model says under one of them is valid.

use std::sync::Arc;

use engine::job::FinishReason;
use engine::speculate::head::DraftHead;
use engine::{Drafter, Speculate};
use model::grammar::source;
use proto::v1;
use serde_json::{Value, json};

use crate::constrained::{prompt, sampled, text};
use crate::host::{Host, Turn};
use crate::real::{TEXT, WEIGHTS, pool};
use crate::speculation::noise;

const N_SCHEMAS: u64 = 200;
const MAX_OUTPUT_TOKENS: usize = 160;
const NAMES: [&str; 8] = ["name", "size", "colour", "is_new", "tags", "owner", "größe", "a \"quoted\" key"];
const WORDS: [&str; 6] = ["red", "dark green", "n/a", "日本", "tab\there", "\"x\""];

/// A random schema, at most `depth` levels deep, whose values are short.
fn schema(noise: &mut dyn FnMut(u64) -> u32, depth: usize) -> Value {
    let kinds = if depth == 0 { 7 } else { 10 };
    match noise(kinds) {
        0 => json!({"type": "boolean"}),
        1 => json!({"type": "null"}),
        2 => {
            let from = i64::from(noise(2000)) - 1000;
            json!({"type": "integer", "minimum": from, "maximum": from + i64::from(noise(5000))})
        }
        3 => {
            let least = noise(4);
            json!({"type": "string", "minLength": least, "maxLength": least + noise(12)})
        }
        4 => {
            let n = 1 + noise(WORDS.len() as u64 - 1) as usize;
            json!({"enum": &WORDS[..n]})
        }
        5 => json!({"const": WORDS[noise(WORDS.len() as u64) as usize]}),
        6 => json!({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"}),
        7 => {
            let most = noise(4);
            json!({"type": "array", "items": schema(noise, depth - 1), "maxItems": most})
        }
        8 => json!({"anyOf": [schema(noise, depth - 1), schema(noise, depth - 1)]}),
        _ => object(noise, depth - 1),
    }
}

fn object(noise: &mut dyn FnMut(u64) -> u32, depth: usize) -> Value {
    let n = 1 + noise(4) as usize;
    let first = noise((NAMES.len() - n) as u64) as usize;
    let names = &NAMES[first..first + n];
    let properties: serde_json::Map<_, _> =
        names.iter().map(|name| ((*name).to_owned(), schema(noise, depth))).collect();
    let required: Vec<_> = names.iter().filter(|_| noise(4) > 0).collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

#[test]
fn outputs_of_two_hundred_schemas_are_valid() {
    let head = DraftHead::built_in(&WEIGHTS, &pool(1)).expect("the test model has a head");
    let drafter = Drafter::Head(Arc::new(head));
    let host = Host::start_with(&WEIGHTS, drafter, Speculate::WhenItPays, Some(Arc::clone(&TEXT.grammars)));
    let schemas: Vec<Value> = (0..N_SCHEMAS).map(|seed| object(&mut noise(seed), 2)).collect();
    let turns = (0..).zip(&schemas).map(|(seed, schema)| {
        let constraint = v1::Constraint { grammar: source::json_schema(schema), ..Default::default() };
        Turn {
            ids: prompt("Invent an example in JSON."),
            sampling: sampled([0.0, 0.7, 1.2][seed as usize % 3], seed),
            constraint: Some(host.engine.constraint(constraint).unwrap_or_else(|e| panic!("{schema}: {e}"))),
            max_output_tokens: MAX_OUTPUT_TOKENS,
            stop_ids: TEXT.tokenizer.end_of_turn_ids().to_vec(),
        }
    });
    let answers = host.run(turns);
    let mut n_finished = 0;
    for (schema, answer) in schemas.iter().zip(&answers) {
        match answer.end {
            Ok(FinishReason::Stop) => n_finished += 1,
            Ok(FinishReason::Length) => continue,
            ref other => panic!("{other:?} for {schema}"),
        }
        let text = text(answer);
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text} for {schema}"));
        let validator = jsonschema::validator_for(schema).expect("our schemas are well-formed");
        assert!(validator.is_valid(&value), "{value} for {schema}");
    }
    assert!(n_finished > N_SCHEMAS as usize * 9 / 10, "{n_finished} of {N_SCHEMAS} came to their end");
}

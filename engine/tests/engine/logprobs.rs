//! Log-probabilities of output tokens against those computed here from the model's logits.

use std::sync::Arc;

use engine::arena::KvArena;
use engine::forward::{Forward, Logits, Slice};
use engine::sample::SamplingParams;
use engine::speculate::head::DraftHead;
use engine::{Drafter, Speculate};
use model::grammar::source;
use proto::v1;

use crate::constrained::{prompt, sampled};
use crate::host::{Host, Turn};
use crate::real::{TEXT, WEIGHTS, pool};

/// Logits after every token from `from` on.
fn logits_after(ids: &[u32], from: usize) -> Vec<Vec<f64>> {
    let mut arena = KvArena::new(WEIGHTS.shape().kv_geometry(), 20);
    let mut forward = Forward::new(Arc::clone(&WEIGHTS), Arc::new(pool(2)), ids.len());
    let blocks: Vec<u32> = (0..20).collect();
    let slice = Slice { tokens: ids, start: 0, blocks: &blocks, logits: Logits::All };
    let rows = forward.run(&mut arena, &[slice], &mut |_, _| ()).expect("the step is within the limits");
    (from..ids.len()).map(|i| rows.row(i).iter().map(|&x| f64::from(x)).collect()).collect()
}

#[test]
fn every_token_comes_with_the_models_own_log_probabilities() {
    let head = DraftHead::built_in(&WEIGHTS, &pool(1)).expect("the test model has a head");
    let grammars = || Some(Arc::clone(&TEXT.grammars));
    let plain = Host::start_with(&WEIGHTS, Drafter::None, Speculate::Never, grammars());
    let fast = Host::start_with(&WEIGHTS, Drafter::Head(Arc::new(head)), Speculate::Always, grammars());
    let ids = prompt("Name three colours.");
    let constrained =
        v1::Constraint { grammar: source::regex("[a-z]+(, [a-z]+){2}\\."), ..Default::default() };
    let cases = [
        (SamplingParams { logprobs: Some(5), ..SamplingParams::GREEDY }, None),
        (SamplingParams { logprobs: Some(20), ..sampled(1.3, 4) }, None),
        (SamplingParams { logprobs: Some(0), ..sampled(0.8, 5) }, Some(constrained)),
    ];
    for (sampling, wire) in cases {
        let turn = || Turn {
            ids: ids.clone(),
            sampling,
            constraint: wire.clone().map(|wire| plain.engine.constraint(wire).expect("it is well-formed")),
            max_output_tokens: 24,
            stop_ids: TEXT.tokenizer.end_of_turn_ids().to_vec(),
        };
        let answer = fast.run([turn()]).remove(0);
        assert_eq!(plain.run([turn()])[0], answer);
        let whole = [&ids[..], &answer.ids()].concat();
        let n_top = usize::from(sampling.logprobs.expect("every case asks"));
        for (output, logits) in answer.outputs.iter().zip(logits_after(&whole, ids.len() - 1)) {
            let found = output.logprobs.as_ref().expect("they were asked for");
            let log_sum = logits.iter().map(|x| x.exp()).sum::<f64>().ln();
            let is =
                |id: u32, logprob: f32| (f64::from(logprob) - (logits[id as usize] - log_sum)).abs() < 1e-4;
            assert!(is(output.id, found.logprob));
            assert!(found.top.len() == n_top && found.top.iter().all(|&(id, logprob)| is(id, logprob)));
            assert!(found.top.is_sorted_by(|a, b| a.1 >= b.1));
            let n_better = |bar: f64| logits.iter().filter(|x| **x > bar).count();
            assert!(found.top.iter().enumerate().all(|(i, &(id, _))| n_better(logits[id as usize]) <= i));
        }
        let silent = Turn { sampling: SamplingParams { logprobs: None, ..sampling }, ..turn() };
        let silent = plain.run([silent]).remove(0);
        assert_eq!(silent.ids(), answer.ids());
        assert!(silent.outputs.iter().all(|output| output.logprobs.is_none()));
    }
}

use std::collections::BTreeMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use kv::hash::{BlockHash, HashChain, HashKey};
use proptest::prelude::*;

use super::*;
use crate::exports::Cut;
use crate::job::{Job, Output, Prompt};
use crate::sample::SamplingParams;
use crate::sequence::{Place, Start};

const CONTEXT: usize = 10_000;

/// A scheduler whose model is "the next token is the length of the sequence".
struct Toy {
    scheduler: Scheduler,
    next_id: u64,
    events: Arc<Mutex<BTreeMap<SequenceId, Vec<Event>>>>,
}

impl Toy {
    fn new(n_blocks: u32, step_tokens: usize) -> Self {
        let limits = Limits { step_tokens, max_running: 8 };
        let exports = Exports::new(Cut::new(2, 64, 1 << 20));
        let scheduler = Scheduler::new(BlockPool::new(n_blocks), Grants::new(2, 64), exports, limits);
        Self { scheduler, next_id: 0, events: Arc::default() }
    }

    fn submit(&mut self, tokens: &[u32], max_output_tokens: usize, fill: Fill) -> SequenceId {
        self.next_id += 1;
        let id = SequenceId(self.next_id);
        let key = HashKey::derive(&[0; 32], b"");
        let mut chain = HashChain::new(key);
        let hashes = chain.extend(tokens);
        let events = Arc::clone(&self.events);
        let job = Job {
            turn: id.0,
            prompt: Prompt { key, parent: BlockHash::ROOT, ids: tokens.to_vec() },
            fill,
            export: None,
            sampling: SamplingParams::GREEDY,
            constraint: None,
            max_output_tokens,
            stop_ids: Vec::new(),
            sink: Box::new(move |event| {
                events.lock().expect("no panic elsewhere").entry(id).or_default().push(event);
                true
            }),
        };
        let place = Place::take(&Arc::new(AtomicUsize::new(0)), 1).expect("a place");
        let start = Start { tokens: tokens.to_vec(), chain, hashes };
        self.scheduler.enqueue(Sequence::new(id, start, job, place), None);
        id
    }

    /// One step as the engine would do it; returns the tokens it computed.
    fn step(&mut self) -> usize {
        self.scheduler.admit();
        let shares = self.scheduler.plan();
        let n_tokens = shares.iter().map(|share| share.n_tokens).sum();
        assert!(n_tokens <= self.scheduler.max_step_tokens(), "a step of {n_tokens} tokens");
        let mut done = Vec::new();
        for share in shares {
            let sequence = &mut self.scheduler.running[share.idx];
            sequence.computed += share.n_tokens;
            assert!(sequence.table.len() * BLOCK_TOKENS >= sequence.computed, "tokens without blocks");
            sequence.seal_full(&mut self.scheduler.pool);
            if share.sample {
                let token = u32::try_from(sequence.tokens.len()).expect("short");
                let end = sequence.push(token, CONTEXT);
                sequence.tell(Event::Token(Output { id: token, logprobs: None }));
                done.extend(end.map(|_| sequence.id));
            }
        }
        for id in done {
            self.scheduler.cancel(id);
        }
        n_tokens
    }

    fn run(&mut self) {
        let mut n_idle = 0;
        while !self.scheduler.running.is_empty() || self.scheduler.n_waiting() > 0 {
            n_idle = if self.step() == 0 { n_idle + 1 } else { 0 };
            assert!(n_idle < 3, "no progress although turns wait");
        }
    }

    fn tokens(&self, id: SequenceId) -> Vec<u32> {
        let events = self.events.lock().expect("no panic elsewhere");
        let of = |event: &Event| if let Event::Token(output) = event { Some(output.id) } else { None };
        events.get(&id).map(|events| events.iter().filter_map(of).collect()).unwrap_or_default()
    }

    fn admitted(&self, id: SequenceId) -> Option<Admitted> {
        let events = self.events.lock().expect("no panic elsewhere");
        events
            .get(&id)?
            .iter()
            .find_map(|event| if let Event::Admitted(it) = event { Some(it.clone()) } else { None })
    }
}

fn prompt(seed: u32, n: usize) -> Vec<u32> {
    (0..).map(|i| seed * 1000 + i).take(n).collect()
}

#[test]
fn decode_goes_first_and_prefill_takes_the_rest_of_the_budget() {
    let mut toy = Toy::new(64, 32);
    toy.submit(&prompt(1, 8), 10, Fill::Compute);
    toy.step();
    toy.submit(&prompt(2, 100), 1, Fill::Compute);
    toy.scheduler.admit();
    let shares = toy.scheduler.plan();
    let parts: Vec<(usize, usize, bool)> = shares.iter().map(|s| (s.idx, s.n_tokens, s.sample)).collect();
    // One decode token, then as many whole blocks of the prompt as fit.
    assert_eq!(parts, [(0, 1, true), (1, 16, false)]);
}

#[test]
fn prefill_advances_however_many_streams_there_are() {
    let mut toy = Toy::new(64, 8);
    (0..7).for_each(|n| {
        toy.submit(&prompt(n, 4), 400, Fill::Compute);
    });
    (0..8).for_each(|_| {
        toy.step();
    });
    let late = toy.submit(&prompt(9, 100), 1, Fill::Compute);
    (0..14).for_each(|_| {
        toy.step();
    });
    assert_eq!(toy.tokens(late), [100]);
}

#[test]
fn turns_that_start_together_with_one_prefix_compute_it_once() {
    let mut toy = Toy::new(64, 64);
    let shared = prompt(1, 160);
    let ids: Vec<SequenceId> =
        (0..4).map(|n| toy.submit(&[shared.clone(), prompt(10 + n, 5)].concat(), 1, Fill::Compute)).collect();
    let mut n_computed = 0;
    while !toy.scheduler.running.is_empty() || toy.scheduler.n_waiting() > 0 {
        n_computed += toy.step();
    }
    assert!(ids.iter().all(|id| toy.tokens(*id) == [165]));
    assert_eq!(n_computed, 160 + 4 * 5, "the prefix once, and the end of each");
}

/// Steps that cost `ms` each.
fn costs(ms: u64) -> StepCosts {
    let mut costs = StepCosts::default();
    costs.set(&StepCosts::widths().map(|_| std::time::Duration::from_millis(ms)).collect::<Vec<_>>());
    costs
}

#[test]
fn nobody_waits_for_a_fetch_longer_than_computing_takes() {
    let mut toy = Toy::new(64, 64);
    toy.scheduler.costs = costs(0);
    toy.submit(&prompt(1, 70), 1, Fill::Handover);
    toy.submit(&prompt(1, 74), 1, Fill::Compute);
    toy.scheduler.admit();
    assert_eq!(toy.scheduler.plan().len(), 1, "computing costs nothing here");
}

#[test]
fn a_turn_waits_for_blocks_that_are_on_their_way() {
    let mut toy = Toy::new(64, 64);
    toy.scheduler.costs = costs(100_000);
    let fetched = toy.submit(&prompt(1, 70), 1, Fill::Handover);
    let same = toy.submit(&[&prompt(1, 64)[..], &[7; 10]].concat(), 1, Fill::Compute);
    toy.scheduler.admit();
    assert!(toy.scheduler.plan().is_empty(), "nobody computes what is being fetched");
    let granted = toy.admitted(fetched).expect("admitted").granted;
    toy.scheduler.grants.arrive_for_tests(fetched, &granted);
    assert!(toy.scheduler.filled(fetched, true));
    assert_eq!(toy.step(), 10, "the rest of the second turn");
    assert_eq!(toy.tokens(same), [74]);
}

#[test]
fn the_same_prefix_is_not_sent_twice() {
    let mut toy = Toy::new(64, 64);
    toy.scheduler.costs = costs(100_000);
    let first = toy.submit(&prompt(1, 70), 1, Fill::Handover);
    let long_rest = toy.submit(&[&prompt(1, 64)[..], &[7; 40]].concat(), 1, Fill::Handover);
    let short_rest = toy.submit(&[&prompt(1, 64)[..], &[8; 10]].concat(), 1, Fill::Handover);
    let other = toy.submit(&prompt(2, 40), 1, Fill::Handover);
    toy.scheduler.admit();
    let granted = toy.admitted(first).expect("admitted").granted;
    assert!(toy.admitted(long_rest).is_none(), "what it needs first is on its way to another turn");
    assert!(toy.admitted(other).is_some(), "it has a prompt of its own");
    assert!(toy.scheduler.someone_waits(), "patience ends without a command");
    toy.scheduler.grants.arrive_for_tests(first, &granted);
    assert!(toy.scheduler.filled(first, true));
    toy.scheduler.admit();
    let rest = toy.admitted(long_rest).expect("admitted");
    assert_eq!((rest.cached_tokens, rest.granted.len()), (64, 3), "only its rest is sent");
    assert!(toy.admitted(short_rest).expect("admitted").granted.is_empty(), "its rest is computed here");
}

#[test]
fn a_fetch_that_fails_does_not_hold_up_those_who_waited_for_it() {
    let mut toy = Toy::new(64, 256);
    toy.scheduler.costs = costs(100_000);
    let fetched = toy.submit(&prompt(1, 70), 1, Fill::Handover);
    let same = toy.submit(&prompt(1, 74), 1, Fill::Compute);
    toy.scheduler.admit();
    assert!(toy.scheduler.plan().is_empty());
    toy.scheduler.filled(fetched, false);
    toy.run();
    assert_eq!((toy.tokens(fetched), toy.tokens(same)), (vec![70], vec![74]));
}

#[test]
fn the_shortest_rest_goes_first_but_nobody_waits_for_ever() {
    let mut toy = Toy::new(256, 16);
    let long = toy.submit(&prompt(1, 160), 1, Fill::Compute);
    toy.step();
    let short = toy.submit(&prompt(2, 32), 1, Fill::Compute);
    (0..2).for_each(|_| {
        toy.step();
    });
    assert_eq!(toy.tokens(short), [32], "overtakes the long one");
    // Short turns keep coming, each as long as a step.
    let mut n_steps = 0;
    while toy.tokens(long).is_empty() {
        toy.submit(&prompt(10 + n_steps, 16), 1, Fill::Compute);
        toy.step();
        n_steps += 1;
        assert!(n_steps < 25, "the long turn starves");
    }
    assert!(n_steps > 9, "the long turn was overtaken");
}

#[test]
fn prefill_beside_streams_takes_no_longer_than_the_streams() {
    let mut toy = Toy::new(256, 512);
    toy.submit(&prompt(1, 8), 100, Fill::Compute);
    toy.step();
    toy.submit(&prompt(2, 900), 1, Fill::Compute);
    for (second_ms, expected) in [(10, 512), (11, 10), (19, MIN_SLICE)] {
        // One token takes 10 ms, every further one a certain time.
        let cost = |n: usize| std::time::Duration::from_millis(10 + (second_ms - 10) * (n as u64 - 1));
        let mut costs = StepCosts::default();
        costs.set(&StepCosts::widths().map(cost).collect::<Vec<_>>());
        toy.scheduler.costs = costs;
        toy.scheduler.admit();
        let shares = toy.scheduler.plan();
        let slices: usize = shares.iter().filter(|share| !share.stream).map(|share| share.n_tokens).sum();
        assert_eq!(slices, expected, "the second token costs {} ms", second_ms - 10);
    }
}

#[test]
fn drafts_take_free_blocks_only() {
    let mut toy = Toy::new(3, 64);
    toy.submit(&prompt(1, 14), 40, Fill::Compute);
    toy.submit(&prompt(2, 14), 40, Fill::Compute);
    toy.step();
    toy.step();
    // Both stand at 15 of 16 computed tokens; one block is free.
    let shares = toy.scheduler.plan();
    for mut share in shares {
        toy.scheduler.running[share.idx].speculation.draft_for_tests(&[1; 6]);
        toy.scheduler.add_draft(&mut share);
        assert_eq!(share.n_tokens, if share.idx == 0 { 7 } else { 1 });
    }
    assert_eq!(toy.scheduler.n_preempted, 0);
}

#[test]
fn a_handover_that_arrived_whole_is_taken_and_half_of_one_is_completed_here() {
    for (n_arrived, whole, computed) in [(3, true, 40), (3, false, 32), (1, true, 16), (0, true, 0)] {
        let mut toy = Toy::new(8, 64);
        let id = toy.submit(&prompt(1, 40), 4, Fill::Handover);
        toy.scheduler.admit();
        let granted = toy.admitted(id).expect("admitted").granted;
        assert_eq!(granted.len(), 3);
        assert!(toy.scheduler.plan().is_empty(), "it waits");
        toy.scheduler.grants.arrive_for_tests(id, &granted[..n_arrived]);
        assert_eq!(toy.scheduler.filled(id, whole), whole && n_arrived == 3);
        assert_eq!(toy.scheduler.running[0].computed, computed, "{n_arrived} blocks, whole: {whole}");
    }
}

#[test]
fn a_prompt_that_never_fits_is_refused_and_the_next_one_runs() {
    let mut toy = Toy::new(4, 64);
    let large = toy.submit(&prompt(1, 90), 1, Fill::Handover);
    let small = toy.submit(&prompt(2, 20), 1, Fill::Compute);
    toy.run();
    let events = toy.events.lock().expect("no panic elsewhere")[&large].clone();
    assert!(
        matches!(events[..], [Event::Failed(Error::PromptTooLong { tokens: 90, limit: 64 })]),
        "{events:?}"
    );
    assert_eq!(toy.tokens(small), [20]);
}

proptest! {
    #[test]
    fn every_turn_ends_with_all_its_tokens_however_short_memory_is(
        turns in prop::collection::vec((0_u32..3, 1_usize..60, 1_usize..30), 1..10),
        n_blocks in 7_u32..20,
        step_tokens in 16_usize..64,
    ) {
        let mut toy = Toy::new(n_blocks, step_tokens);
        let mut expected = Vec::new();
        for (seed, n_prompt, n_output) in turns {
            let id = toy.submit(&prompt(seed, n_prompt), n_output, Fill::Compute);
            let first = u32::try_from(n_prompt).expect("short");
            expected.push((id, (first..).take(n_output).collect::<Vec<u32>>()));
        }
        toy.run();
        for (id, tokens) in expected {
            prop_assert_eq!(toy.tokens(id), tokens);
        }
        prop_assert_eq!(toy.scheduler.pool.available(), n_blocks as usize);
    }
}

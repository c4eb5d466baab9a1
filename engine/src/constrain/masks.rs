//! The masks of a step, computed on a thread of their own while the model runs.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::{Masks, State};
use crate::job::SequenceId;
use crate::scheduler::Share;
use crate::sequence::Sequence;

/// Parsers call themselves for nested grammars.
const STACK_BYTES: usize = 8 << 20;

/// Brings the constraints of all who get a token in this step up to date.
pub(crate) fn follow(running: &mut [Sequence], shares: &[Share]) {
    for share in shares.iter().filter(|share| share.sample) {
        let Sequence { constraint, tokens, .. } = &mut running[share.idx];
        if let Some(constraint) = constraint {
            constraint.follow(tokens);
        }
    }
}

/// An output whose masks are wanted, and the draft that the step checks.
struct Order {
    id: SequenceId,
    state: Box<State>,
    draft: Vec<u32>,
}

/// The same with its masks.
struct Done {
    id: SequenceId,
    state: Box<State>,
    masks: Masks,
}

/// Computes the masks of one step at a time; at most one order per running sequence is on its way.
#[derive(Default)]
pub(crate) struct Masker {
    /// Started for the first constraint.
    worker: Option<Worker>,
    n_ordered: usize,
}

impl Masker {
    /// Has the masks of a step begun. The constraints of its sequences are away until they are collected.
    pub(crate) fn order(&mut self, running: &mut [Sequence], shares: &[Share]) {
        for share in shares.iter().filter(|share| share.sample) {
            let sequence = &mut running[share.idx];
            if let Some(state) = sequence.constraint.take() {
                let draft = sequence.speculation.draft().to_vec();
                let worker = self.worker.get_or_insert_with(Worker::start);
                worker.order(Order { id: sequence.id, state, draft });
                self.n_ordered += 1;
            }
        }
    }

    /// Waits for all masks that were ordered.
    pub(crate) fn collect(&mut self, running: &mut [Sequence]) -> HashMap<SequenceId, Masks> {
        let mut masks = HashMap::with_capacity(self.n_ordered);
        for _ in 0..std::mem::take(&mut self.n_ordered) {
            let worker = self.worker.as_ref().expect("it was started for the order");
            let done = worker.done.recv().expect("its thread answers every order");
            let sequence = running.iter_mut().find(|sequence| sequence.id == done.id);
            sequence.expect("no sequence ends within a step").constraint = Some(done.state);
            masks.insert(done.id, done.masks);
        }
        masks
    }
}

struct Worker {
    /// None once it is being dropped.
    orders: Option<Sender<Order>>,
    done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn start() -> Self {
        let (orders, inbox) = channel::<Order>();
        let (outbox, done) = channel();
        let work = move || {
            for Order { id, mut state, draft } in inbox {
                let masks = state.masks(&draft);
                if outbox.send(Done { id, state, masks }).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("masks".to_owned()).stack_size(STACK_BYTES).spawn(work);
        let thread = thread.expect("the system can start one more thread");
        Self { orders: Some(orders), done, thread: Some(thread) }
    }

    fn order(&self, order: Order) {
        let orders = self.orders.as_ref().expect("it takes orders until it is dropped");
        orders.send(order).expect("its thread lives as long");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has reached the engine's thread, which waits for every answer.
            let _ = thread.join();
        }
    }
}

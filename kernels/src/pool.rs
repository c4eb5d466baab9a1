//! A pool of threads for parallel regions of microseconds: the caller works too, idle workers spin briefly,
//! then yield, then sleep.
//!
//! Spinning alone collapses when others share the cores (ggml-org/llama.cpp PR 13079), sleeping alone costs more
//! than a region lasts; the limits below follow PR 29258.

use std::{
    any::Any,
    fmt,
    marker::PhantomData,
    num::NonZeroUsize,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle, Thread},
};

#[cfg(test)]
mod tests;

/// Pause instructions before yielding: 30 to 100 microseconds, depending on the processor.
const SPINS: usize = 2000;
/// Yields before sleeping.
const YIELDS: usize = 16;

/// A fixed set of threads that run one parallel region at a time. Dropping it joins them.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held for the length of a region: regions of several callers take turns.
    turn: Mutex<()>,
}

type Body<'a> = dyn Fn(usize, usize) + Sync + 'a;

struct Shared {
    n_threads: usize,
    /// Counts regions; a change tells the workers to look at `region`.
    epoch: AtomicUsize,
    /// Workers that have not finished the current region.
    n_running: AtomicUsize,
    stop: AtomicBool,
    region: Mutex<Region>,
}

#[derive(Default)]
struct Region {
    body: Option<&'static Body<'static>>,
    caller: Option<Thread>,
    panic: Option<Box<dyn Any + Send>>,
}

impl ThreadPool {
    /// A pool of `n_threads`, the caller of [`run`](Self::run) included: one thread spawns nothing.
    pub fn new(n_threads: NonZeroUsize) -> Self {
        let shared = Arc::new(Shared {
            n_threads: n_threads.get(),
            epoch: AtomicUsize::new(0),
            n_running: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            region: Mutex::default(),
        });
        let spawn = |thread_idx| {
            let shared = Arc::clone(&shared);
            thread::Builder::new()
                .name(format!("kernel-{thread_idx}"))
                .spawn(move || shared.work(thread_idx))
                .expect("the system can start a thread at start-up")
        };
        let workers = (1..n_threads.get()).map(spawn).collect();
        Self { shared, workers, turn: Mutex::new(()) }
    }

    /// Threads that take part in a region.
    pub fn n_threads(&self) -> usize {
        self.shared.n_threads
    }

    /// Runs `body(thread_idx, n_threads)` once on every thread and returns when all are done.
    /// A panic of any of them continues here. Must not be called from inside a region.
    pub fn run(&self, body: impl Fn(usize, usize) + Sync) {
        if self.workers.is_empty() {
            return body(0, 1);
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.start(&body, &self.workers);
        let own = catch_unwind(AssertUnwindSafe(|| body(0, self.n_threads())));
        wait_until(|| self.shared.n_running.load(Ordering::Acquire) == 0);
        let mut region = self.shared.region();
        region.body = None;
        let panic = own.err().or(region.panic.take());
        drop(region);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Calls `body` once for every part; threads take the next free part, so parts may differ in size.
    pub fn each<P: Send>(&self, parts: &mut [P], body: impl Fn(&mut P) + Sync) {
        if parts.len() <= 1 {
            return parts.iter_mut().for_each(body);
        }
        let next = AtomicUsize::new(0);
        let n_parts = parts.len();
        let parts = SharedMut::new(parts);
        self.run(|_, _| {
            while let Some(i) = take_next(&next, n_parts) {
                // SAFETY: the counter hands out each index once.
                let part = unsafe { parts.slice(i..i + 1) };
                body(&mut part[0]);
            }
        });
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches every panic of a body, so joining cannot fail; a drop must not panic anyway.
            let _ = worker.join();
        }
    }
}

impl fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadPool").field("n_threads", &self.n_threads()).finish_non_exhaustive()
    }
}

impl Shared {
    fn region(&self) -> MutexGuard<'_, Region> {
        self.region.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start<'a>(&self, body: &'a Body<'a>, workers: &[JoinHandle<()>]) {
        // SAFETY: only the lifetime changes; `run` neither returns nor unwinds before every worker is done with it.
        let body = unsafe { std::mem::transmute::<&'a Body<'a>, &'static Body<'static>>(body) };
        let mut region = self.region();
        region.body = Some(body);
        region.caller = Some(thread::current());
        drop(region);
        self.n_running.store(workers.len(), Ordering::Relaxed);
        self.epoch.fetch_add(1, Ordering::Release);
        workers.iter().for_each(|worker| worker.thread().unpark());
    }

    fn work(&self, thread_idx: usize) {
        let mut seen = 0;
        loop {
            let stopped = || self.stop.load(Ordering::Acquire);
            wait_until(|| self.epoch.load(Ordering::Acquire) != seen || stopped());
            if stopped() {
                return;
            }
            seen = self.epoch.load(Ordering::Acquire);
            let region = self.region();
            let (body, caller) = (region.body, region.caller.clone());
            drop(region);
            let body = body.expect("the epoch changes only after the body was set");
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| body(thread_idx, self.n_threads))) {
                self.region().panic.get_or_insert(panic);
            }
            let is_last = self.n_running.fetch_sub(1, Ordering::AcqRel) == 1;
            if let (true, Some(caller)) = (is_last, caller) {
                caller.unpark();
            }
        }
    }
}

/// Spins, then yields, then sleeps until woken; whoever makes `ready` true unparks the waiting thread.
fn wait_until(ready: impl Fn() -> bool) {
    for _ in 0..SPINS {
        if ready() {
            return;
        }
        std::hint::spin_loop();
    }
    for _ in 0..YIELDS {
        if ready() {
            return;
        }
        thread::yield_now();
    }
    while !ready() {
        thread::park();
    }
}

/// The next of `0..n` that no other thread has taken.
pub(crate) fn take_next(next: &AtomicUsize, n: usize) -> Option<usize> {
    Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&i| i < n)
}

/// A mutable slice whose disjoint parts may be written by the threads of a region.
pub(crate) struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]` whose parts move to other threads, which needs T: Send.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), owner: PhantomData }
    }

    /// The elements of `range`, which is checked against the slice.
    ///
    /// # Safety
    /// No two live results may overlap.
    #[expect(clippy::mut_from_ref, reason = "that is its purpose; the caller keeps the parts disjoint")]
    #[inline(always)]
    pub(crate) unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "a part lies inside its slice");
        // SAFETY: the range was checked.
        let start = unsafe { self.start.add(range.start) };
        // SAFETY: the range was checked, and the caller keeps the parts disjoint.
        unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
    }
}

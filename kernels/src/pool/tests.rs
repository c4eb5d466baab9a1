use std::{sync::atomic::AtomicU64, thread};

use super::*;

fn pool(n: usize) -> ThreadPool {
    ThreadPool::new(NonZeroUsize::new(n).unwrap())
}

#[test]
fn every_thread_takes_part_once_in_each_region() {
    for n in [1, 2, 3, 8] {
        let pool = pool(n);
        for _ in 0..2000 {
            let seen: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
            pool.run(|i, total| {
                assert_eq!(total, n);
                seen[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(seen.iter().all(|s| s.load(Ordering::Relaxed) == 1));
        }
    }
}

#[test]
fn wakes_workers_that_went_to_sleep() {
    let pool = pool(3);
    for _ in 0..5 {
        thread::park_timeout(std::time::Duration::from_millis(5));
        let sum = AtomicU64::new(0);
        pool.run(|i, _| {
            sum.fetch_add(i as u64 + 1, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 6);
    }
}

#[test]
fn regions_of_several_callers_take_turns() {
    let pool = pool(4);
    let sum = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    pool.run(|_, _| {
                        sum.fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
        }
    });
    assert_eq!(sum.into_inner(), 4 * 4 * 500);
}

#[test]
fn visits_every_part_once() {
    let pool = pool(3);
    for n in [0, 1, 2, 3, 100] {
        let mut parts: Vec<usize> = (0..n).collect();
        pool.each(&mut parts, |part| *part += 1000);
        assert_eq!(parts, (1000..1000 + n).collect::<Vec<_>>());
    }
}

#[test]
fn a_panic_of_any_thread_reaches_the_caller_and_the_pool_lives_on() {
    let pool = pool(3);
    for culprit in 0..3 {
        let result = catch_unwind(AssertUnwindSafe(|| pool.run(|i, _| assert_ne!(i, culprit, "culprit"))));
        assert!(result.is_err(), "thread {culprit}");
        pool.run(|_, _| ());
    }
}

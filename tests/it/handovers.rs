//! Hand-overs by the thousand: two replicas of the real service, one stand-in API server in the same process, a virtual clock,
//! and a history that a seed draws. Pods arrive and end; the leader binds, reserves and evicts; writes are applied late, are
//! lost, refused or repeated; lists come in pages and late; watches lag, die and end; replicas die, stop, are cut off and come
//! back.
//!
//! An oracle that reads only the API server's objects says after every step whether a GPU is overallocated. If every write obeys
//! the write times (`stowage::kubernetes::port::WriteTimes`) that never happens. Some seeds have a proxy that delays Bindings
//! for longer: the overallocations of these are counted, and show that the oracle works.
//!
//! The seed determines what happens to the cluster, to each request and to each replica, and all times. It does not always
//! determine what one replica does within a single moment: a plan is made on a separate thread, and may come before or after
//! other work of that moment. A failing seed may have to be played more than once.
//!
//! `cargo test --test it handovers` plays fifty seeds. `STOWAGE_HANDOVER_SEEDS=1000` plays so many, `STOWAGE_HANDOVER_SEED=7`
//! that one and prints its history. A seed that fails prints both.

mod fates;
mod oracle;
mod schedulers;
mod tally;
mod world;

use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use tally::HandoverTally;
use world::HandoverCluster;

/// What a machine of a CI job plays in about a minute.
const SEEDS: u64 = 50;

/// What came of one seed.
struct HandoverRun {
    tally: HandoverTally,
    history: Vec<String>,
    /// What should not have happened, in order.
    broken: Vec<String>,
}

fn play(seed: u64) -> HandoverRun {
    fastrand::seed(seed);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(async { HandoverCluster::new(seed).await.play().await })
}

fn asked(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

/// Plays the seeds on all cores, and stops at the first that fails.
fn play_all(seeds: u64) -> HandoverTally {
    let (next, total, failed) = (AtomicU64::new(0), Mutex::new(HandoverTally::default()), Mutex::new(None));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while failed.lock().is_none() {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    let played = play(seed);
                    match played.broken.is_empty() {
                        true => *total.lock() += played.tally,
                        false => *failed.lock() = Some((seed, played)),
                    }
                }
            });
        }
    });
    if let Some((seed, HandoverRun { history, broken, .. })) = failed.into_inner() {
        panic!("seed {seed}:\n{}\n\nits history:\n{}", broken.join("\n"), history.join("\n"));
    }
    total.into_inner()
}

#[test]
fn no_gpu_is_allocated_twice_however_leadership_changes_hands() {
    if let Some(seed) = asked("STOWAGE_HANDOVER_SEED") {
        let HandoverRun { tally, history, broken } = play(seed);
        println!("{}\n{tally}", history.join("\n"));
        assert_eq!(broken, [""; 0]);
        return;
    }
    let seeds = asked("STOWAGE_HANDOVER_SEEDS").unwrap_or(SEEDS);
    let tally = play_all(seeds);
    println!("{seeds} seeds: {tally}");
    tally.assert_all_happened(seeds);
}

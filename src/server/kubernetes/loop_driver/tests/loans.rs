//! A pod that borrows from a sleeping engine, and leaves when the engine is to wake.

use super::*;
use stowage_scheduling::policy::EvictionRates;
use stowage_scheduling::testkit::{gpu_at, h100, lending_policy, node as node_named};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::verbs::observe::{DevicesReported, ReadingReported};
use stowage_scheduling::vocabulary::node_reading::{
    EngineLoad, GpuReading, NodeReading, SleepState,
};

/// An engine that was granted 60 GiB sleeps, and a job borrows 30 of them.
fn lent() -> PlannerFixture {
    lent_by(lending_policy())
}

fn lent_by(policy: Policy) -> PlannerFixture {
    let mut bench = PlannerFixture::with_policy(policy, &["n"]);
    let devices = vec![h100("n", 0)].into();
    let reported = DevicesReported {
        node: node_named("n"),
        devices,
        are_all: true,
    };
    bench.state.cluster().apply(reported).unwrap();
    let granted = |name: &str, gib: u64, priority: i32| {
        let mut pod = bound(name, "n", gib, priority);
        pod["metadata"]["annotations"]["stowage.dev/devices"] = json!(gpu_at("n", 0).as_str());
        pod
    };
    bench.show(granted("engine", 60, 100));
    let mut job = granted("job", 30, -10);
    job["metadata"]["annotations"]["stowage.dev/borrowed-from"] = json!("uid-engine");
    bench.show(job);
    (0..3).for_each(|_| report_asleep(&mut bench));
    bench
}

/// A second later, the agent reports that the engine sleeps.
fn report_asleep(bench: &mut PlannerFixture) {
    bench.advance_seconds(1);
    let attributed = vec![(uid("engine"), Bytes::gib(4)), (uid("job"), Bytes::gib(30))];
    let gpu = GpuReading {
        uuid: gpu_at("n", 0),
        used: Some(Bytes::gib(34)),
        attributed,
        engine_load: EngineLoad::NONE,
    };
    let mut cluster = bench.state.cluster();
    let sleep = [(uid("engine"), SleepState::Asleep)].into();
    let reading = NodeReading {
        sampled: cluster.ledger().now(),
        gpus: vec![gpu],
        sleep,
        ..NodeReading::default()
    };
    cluster.apply(ReadingReported {
        node: node_named("n"),
        reading: reading.into(),
    });
}

/// The engine's owner asks that it wakes.
fn ask_to_wake(bench: &mut PlannerFixture) {
    let mut engine = bench.pod("engine");
    engine["metadata"]["annotations"]["stowage.dev/wake-requested"] = json!("1");
    bench.show(engine);
}

async fn written_while_asleep(bench: &mut PlannerFixture, seconds: u64) -> Vec<String> {
    let mut written = Vec::new();
    for _ in 0..seconds {
        report_asleep(bench);
        written.extend(bench.tick().await);
    }
    written
}

#[tokio::test]
async fn a_borrower_whose_eviction_is_tried_again_is_told_that_it_stays_once_its_lender_sleeps_on()
{
    let mut bench = lent();
    bench
        .recorder
        .eviction_outcomes
        .lock()
        .insert("job".into(), EvictionOutcome::TryLater { after: None });
    assert_eq!(
        written_while_asleep(&mut bench, 20).await,
        Vec::<String>::new()
    );
    let engine = bench.pod("engine");
    ask_to_wake(&mut bench);
    let written = written_while_asleep(&mut bench, 30).await;
    assert!(
        written.contains(&"job: evict LoanEnded".to_owned()),
        "{written:?}"
    );
    assert!(
        !written.contains(&"job: stays".to_owned()),
        "it is to leave: {written:?}"
    );
    bench.show(engine);
    let written = written_while_asleep(&mut bench, 30).await;
    assert_eq!(
        written
            .iter()
            .filter(|write| *write == "job: stays")
            .count(),
        1,
        "{written:?}"
    );
}

#[tokio::test]
async fn a_borrower_deleted_with_a_grace_of_a_year_is_told_to_end_sooner_when_its_lender_asks() {
    for grace in [700_i64, 172_800, 31_536_000] {
        let mut bench = lent();
        let mut job = bench.pod("job");
        let ends = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(grace);
        job["metadata"]["deletionTimestamp"] = json!(ends.to_string());
        job["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
        bench.show(job.clone());
        assert_eq!(
            written_while_asleep(&mut bench, 5).await,
            Vec::<String>::new()
        );
        ask_to_wake(&mut bench);
        let written = written_while_asleep(&mut bench, 5).await;
        assert!(
            written.contains(&"job: evict LoanEnded".to_owned()),
            "{grace} s: {written:?}"
        );
        job["metadata"]["deletionTimestamp"] = json!(jiff::Timestamp::now().to_string());
        job["metadata"]["deletionGracePeriodSeconds"] = json!(30);
        bench.show(job);
        assert!(
            !written_while_asleep(&mut bench, 25)
                .await
                .contains(&"job: evict LoanEnded".to_owned())
        );
    }
}

#[tokio::test]
async fn a_borrower_whose_eviction_is_not_allowed_at_the_moment_does_not_use_up_the_eviction_rates()
{
    let mut policy = lending_policy();
    policy.preemption.evictions_per_minute = EvictionRates {
        cluster: 1,
        node: 1,
        tenant: 1,
    };
    let mut bench = lent_by(policy);
    bench
        .recorder
        .eviction_outcomes
        .lock()
        .insert("job".into(), EvictionOutcome::TryLater { after: None });
    ask_to_wake(&mut bench);
    let written = written_while_asleep(&mut bench, 30).await;
    let tried = written
        .iter()
        .filter(|write| *write == "job: evict LoanEnded")
        .count();
    assert!(tried > 2, "{written:?}");
    assert!(
        bench
            .state
            .cluster()
            .ledger()
            .is_within_eviction_rates(&[uid("engine")])
    );
    bench.recorder.eviction_outcomes.lock().clear();
    written_while_asleep(&mut bench, 15).await;
    assert!(
        !bench
            .state
            .cluster()
            .ledger()
            .is_within_eviction_rates(&[uid("engine")]),
        "it was evicted"
    );
}

//! What a reading charges: to the pods it names, to the GPU if no pod explains it, and to all GPUs where a pod may be.

use super::*;

#[test]
fn a_pod_above_its_grant_takes_from_what_is_free_and_one_below_gives_nothing() {
    let mut bench = MeasurementFixture::new();
    bench.observe_bound("greedy", 20, Some(&["GPU-a"]), false);
    bench.observe_bound("modest", 20, Some(&["GPU-b"]), false);
    bench.read([(26, &[("greedy", 26)]), (3, &[("modest", 3)])]);
    assert_eq!(bench.free(), [64, 70]);
}

#[test]
fn unaccounted_vram_counts_after_three_reports_in_a_row() {
    let mut bench = MeasurementFixture::new();
    bench.read([(12, &[]), (0, &[])]);
    bench.read([(12, &[]), (0, &[])]);
    assert_eq!(bench.free(), [90, 90]);
    bench.read([(10, &[]), (0, &[])]);
    assert_eq!(bench.free(), [80, 90], "the least of the three");
    bench.read([(0, &[]), (0, &[])]);
    assert_eq!(bench.free(), [90, 90], "it is gone at once");
}

#[test]
fn a_pods_unused_grant_accounts_for_unattributed_use() {
    let mut bench = MeasurementFixture::new();
    bench.observe_bound("engine", 30, Some(&["GPU-a"]), false);
    (0..4).for_each(|_| bench.read([(25, &[]), (0, &[])]));
    assert_eq!(bench.free(), [60, 90]);
}

#[test]
fn a_report_sampled_before_a_pod_was_bound_is_not_explained_by_it() {
    let mut bench = MeasurementFixture::new();
    (0..3).for_each(|_| bench.read([(10, &[]), (0, &[])]));
    bench.observe_bound("engine", 30, Some(&["GPU-a"]), false);
    assert_eq!(bench.free(), [50, 90]);
    bench.read([(10, &[]), (0, &[])]);
    assert_eq!(bench.free(), [60, 90], "from now on it may be the pod's");
}

#[test]
fn an_unrecorded_pod_is_charged_on_every_gpu_until_an_agent_locates_it() {
    let mut bench = MeasurementFixture::new();
    bench.observe_bound("unrecorded", 30, None, false);
    assert_eq!(bench.free(), [60, 60]);
    bench.read([(0, &[]), (28, &[("unrecorded", 28)])]);
    assert_eq!(bench.free(), [90, 60]);
    bench.read([(0, &[]), (0, &[])]);
    assert_eq!(bench.free(), [90, 60], "it was found once");
}

#[test]
fn a_pod_on_another_gpu_than_its_binding_says_counts_on_both() {
    let mut bench = MeasurementFixture::new();
    bench.observe_bound("drifted", 30, Some(&["GPU-a"]), false);
    bench.read([(0, &[]), (28, &[("drifted", 28)])]);
    assert_eq!(bench.free(), [60, 62]);
}

#[test]
fn recorded_indices_mean_the_gpus_of_the_first_report() {
    let mut ledger = Ledger::new(Arc::new(Policy::default()));
    let device = |index, uuid: &str| whole_gpu(gpu(uuid), index, Bytes::gib(100));
    ledger.set_node(
        &node(),
        NodeKind::Stowage,
        Some(vec![device(0, "index-0"), device(1, "index-1")]),
    );
    let demand = demand(30, 0, ledger.policy());
    let devices = Some(Arc::from([GpuUuid::from_index(1)]));
    let state = ObservedPhase::Bound {
        node: node(),
        devices,
        starting: false,
        ran: None,
    };
    ledger.observe_pod(PodObservation {
        uid: uid("early"),
        key: key("early"),
        demand,
        state,
        observed: None,
    });
    ledger
        .report_devices(&node(), [device(0, "GPU-a"), device(1, "GPU-b")].into())
        .unwrap();
    // The driver numbers the cards again.
    ledger
        .report_devices(&node(), [device(0, "GPU-b"), device(1, "GPU-a")].into())
        .unwrap();
    let snapshot = ledger.snapshot();
    let view = snapshot.node("n").unwrap();
    let charged = view
        .devices
        .iter()
        .zip(view.gpus.iter())
        .find(|(d, _)| d.uuid == gpu("GPU-b"))
        .unwrap();
    assert_eq!(charged.1.charged, Bytes::gib(30));
}

#[test]
fn a_missing_figure_does_not_reset_unaccounted_vram() {
    let mut bench = MeasurementFixture::new();
    (0..3).for_each(|_| bench.read([(60, &[]), (0, &[])]));
    assert_eq!(bench.free(), [30, 90]);
    bench.pass(1);
    let unread = ["GPU-a", "GPU-b"].map(|uuid| GpuReading {
        uuid: gpu(uuid),
        used: None,
        attributed: Vec::new(),
        engine_load: EngineLoad::NONE,
    });
    let reading = NodeReading {
        sampled: bench.now,
        gpus: unread.into(),
        holdings: NodeModelSet::default(),
        ..NodeReading::default()
    };
    bench
        .ledger
        .ledger_mut()
        .take_reading(&node(), reading.into());
    assert_eq!(
        bench.free(),
        [30, 85],
        "and where nothing was known, a margin"
    );
    bench.read([(60, &[]), (0, &[])]);
    assert_eq!(bench.free(), [30, 90]);
}

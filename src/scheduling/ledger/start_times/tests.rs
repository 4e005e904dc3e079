//! Starts that are timed, and what is learned from them: few or absurd ones, policies and nodes that change, tenants that flood.

use super::*;
use crate::ledger::{ObservedPhase, PodPhase};
use crate::placing::score_cache::ScoreCache;
use crate::policy::Policy;
use crate::testkit::{LedgerCluster, demand_of, gpu_at, key, node, uid};
use crate::units::Bytes;
use crate::verbs::Cluster;
use crate::verbs::bind::BindAsked;
use crate::verbs::binding::BindingWritten;
use crate::verbs::observe::{EngineStartObserved, NodeDeleted, NodeImagesObserved, PodDeleted};
use crate::verbs::tick::PolicySet;
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::image::{ImageId, MAX_NODE_IMAGES};
use crate::vocabulary::start_time::{LoadPath, TimeFactor};

/// An engine of 30 GB of weights: by the policy it answers after 30 + 10 + 20 s where nothing is there.
fn engine() -> Demand {
    Demand {
        model: crate::ids::ModelId::parse("m").ok(),
        weights: Some(Bytes(30_000_000_000)),
        engine: Engine::Vllm,
        ..demand_of(1 << 30, 1, Sharing::Shared, 0)
    }
}

fn image(n: u64) -> NodeImage {
    NodeImage {
        image: ImageId::from_reference(&format!("r.io/image:{n}")).unwrap(),
        bytes: Bytes::gib(n),
    }
}

fn bind(cluster: &mut LedgerCluster, pod: &str, on: &str, demand: Demand) {
    cluster.add_waiting(pod, demand);
    cluster
        .apply(BindAsked {
            uid: uid(pod),
            key: key(pod),
            node: node(on),
        })
        .unwrap();
    let devices = cluster
        .ledger()
        .pod_state(&uid(pod))
        .unwrap()
        .devices()
        .cloned();
    cluster.apply(BindingWritten {
        uid: uid(pod),
        node: node(on),
        devices,
    });
}

fn progress(cluster: &mut LedgerCluster, pod: &str, progress: StartProgress) -> Option<TimedStart> {
    cluster.apply(EngineStartObserved {
        uid: uid(pod),
        progress,
    })
}

/// A pod of the namespace `default` starts on the node and is ready after so many seconds; then it is gone.
fn start(cluster: &mut LedgerCluster, pod: &str, on: &str, seconds: u64) -> TimedStart {
    bind(cluster, pod, on, engine());
    cluster.advance(seconds);
    let timed = progress(cluster, pod, StartProgress::Ready).unwrap();
    cluster.apply(PodDeleted(uid(pod)));
    timed
}

/// So many of them, one after the other.
fn starts(cluster: &mut LedgerCluster, count: usize, on: &str, seconds: u64) {
    for _ in 0..count {
        start(cluster, "pod", on, seconds);
    }
}

fn expected(cluster: &mut LedgerCluster, on: &str) -> u64 {
    let snapshot = cluster.snapshot();
    let view = snapshot.node(on).unwrap();
    let policy = cluster.ledger().policy().clone();
    let found =
        rank::estimate_start(view, &engine(), snapshot.start_model(), &policy.loading).unwrap();
    found.total().0 / 1000
}

#[test]
fn engines_that_take_three_times_as_long_are_expected_to_on_their_node_and_on_its_kin() {
    let mut cluster = LedgerCluster::new(&[("slow", 4), ("kin", 4)]);
    assert_eq!(expected(&mut cluster, "slow"), 60);
    let first = start(&mut cluster, "a", "slow", 180);
    assert_eq!(
        (first.expected, first.prior, first.observed),
        (
            Millis::seconds(60),
            Millis::seconds(60),
            Millis::seconds(180)
        )
    );
    assert_eq!(
        expected(&mut cluster, "slow"),
        60,
        "one start may be an accident"
    );
    start(&mut cluster, "b", "slow", 180);
    let after_two = expected(&mut cluster, "slow");
    assert!((150..=180).contains(&after_two), "{after_two}");
    assert_eq!(
        expected(&mut cluster, "kin"),
        60,
        "two starts say nothing of other nodes"
    );
    start(&mut cluster, "c", "slow", 180);
    let kin = expected(&mut cluster, "kin");
    assert!((150..=180).contains(&kin), "{kin}");
    for (n, pod) in ["d", "e", "f"].into_iter().enumerate() {
        let timed = start(&mut cluster, pod, "kin", 20);
        assert!(n < 2 || timed.expected < Millis::seconds(40), "{timed:?}");
    }
    let own = [
        expected(&mut cluster, "slow"),
        expected(&mut cluster, "kin"),
    ];
    assert!(own[0] >= 150 && own[1] <= 30, "{own:?}");
    let errors = cluster.ledger().start_errors();
    assert_eq!(errors.starts, 6);
    assert!(
        errors.prior.p50 >= 660 && errors.prior.p90 == 2000,
        "{errors:?}"
    );
}

#[test]
fn a_start_is_timed_from_when_its_binding_lands() {
    let mut cluster = LedgerCluster::new(&[("n", 1)]);
    cluster.add_waiting("pod", engine());
    cluster
        .apply(BindAsked {
            uid: uid("pod"),
            key: key("pod"),
            node: node("n"),
        })
        .unwrap();
    cluster.advance(26);
    let devices = cluster
        .ledger()
        .pod_state(&uid("pod"))
        .unwrap()
        .devices()
        .cloned();
    cluster.apply(BindingWritten {
        uid: uid("pod"),
        node: node("n"),
        devices,
    });
    cluster.advance(60);
    let timed = progress(&mut cluster, "pod", StartProgress::Ready).unwrap();
    assert_eq!(timed.observed, Millis::seconds(60));
}

#[test]
fn the_pull_is_timed_apart_from_the_engine() {
    let mut cluster = LedgerCluster::new(&[("n", 4), ("other", 4)]);
    let demand = Demand {
        images: [image(20).image].into(),
        ..engine()
    };
    cluster.apply(NodeImagesObserved {
        node: node("other"),
        images: Some(vec![image(20)]),
    });
    for pod in ["a", "b", "c"] {
        cluster.apply(NodeImagesObserved {
            node: node("n"),
            images: Some(Vec::new()),
        });
        bind(&mut cluster, pod, "n", demand.clone());
        let prior = cluster
            .ledger()
            .pod_state(&uid(pod))
            .unwrap()
            .start
            .clone()
            .unwrap()
            .expected
            .prior;
        assert_eq!(prior.pull, Bytes::gib(20).transfer_time(Bytes(200_000_000)));
        cluster.advance(36);
        progress(&mut cluster, pod, StartProgress::Running);
        cluster.advance(60);
        progress(&mut cluster, pod, StartProgress::Running);
        assert_eq!(
            progress(&mut cluster, pod, StartProgress::Ready)
                .unwrap()
                .observed,
            Millis::seconds(96)
        );
        assert_eq!(
            progress(&mut cluster, pod, StartProgress::Ready),
            None,
            "it is ready once"
        );
        cluster.apply(PodDeleted(uid(pod)));
    }
    let (pull, engine) = (
        StartKind::Pull,
        StartKind::Engine(Engine::Vllm, LoadPath::Network),
    );
    let view = cluster.snapshot().node("n").unwrap().clone();
    let found = view.start_factors_of(pull).unwrap().transfer;
    assert!(
        (330..=360).contains(&found.0),
        "a third of 107 s: {found:?}"
    );
    let found = view.start_factors_of(engine).unwrap();
    assert_eq!(
        (found.transfer, found.init),
        (TimeFactor::PRIOR, TimeFactor::PRIOR),
        "60 s, as expected"
    );
}

#[test]
fn an_image_of_unknown_size_teaches_nothing_of_pulls() {
    let mut cluster = LedgerCluster::new(&[("n", 4)]);
    cluster.apply(NodeImagesObserved {
        node: node("n"),
        images: Some(vec![image(1)]),
    });
    for pod in ["a", "b", "c"] {
        bind(
            &mut cluster,
            pod,
            "n",
            Demand {
                images: [image(9).image].into(),
                ..engine()
            },
        );
        cluster.advance(500);
        progress(&mut cluster, pod, StartProgress::Running);
        cluster.advance(60);
        progress(&mut cluster, pod, StartProgress::Ready).unwrap();
        cluster.apply(PodDeleted(uid(pod)));
    }
    assert_eq!(
        cluster
            .snapshot()
            .node("n")
            .unwrap()
            .start_factors_of(StartKind::Pull),
        None
    );
    assert_eq!(
        cluster
            .ledger()
            .start_model()
            .cluster_factors(StartKind::Pull, None),
        None
    );
}

#[test]
fn restarted_unprobed_and_never_ready_pods_are_not_learned_from() {
    let mut cluster = LedgerCluster::new(&[("n", 4)]);
    for pod in ["a", "b", "c", "d"] {
        bind(&mut cluster, pod, "n", engine());
        cluster.advance(10_000);
        assert_eq!(progress(&mut cluster, pod, StartProgress::Untimed), None);
        assert_eq!(
            progress(&mut cluster, pod, StartProgress::Ready),
            None,
            "it was restarted before"
        );
        cluster.apply(PodDeleted(uid(pod)));
        bind(&mut cluster, pod, "n", engine());
        cluster.advance(10_000);
        cluster.apply(PodDeleted(uid(pod)));
    }
    let job = demand_of(1 << 30, 1, Sharing::Shared, -1);
    assert!(!job.terms.engine);
    bind(
        &mut cluster,
        "job",
        "n",
        Demand {
            model: engine().model,
            ..job
        },
    );
    assert_eq!(
        progress(&mut cluster, "job", StartProgress::Ready),
        None,
        "a job is ready before its model is"
    );
    bind(
        &mut cluster,
        "plain",
        "n",
        Demand {
            model: None,
            ..engine()
        },
    );
    assert_eq!(progress(&mut cluster, "plain", StartProgress::Ready), None);
    assert_eq!(expected(&mut cluster, "n"), 60);
    assert_eq!(cluster.ledger().start_errors(), StartErrors::default());
}

#[test]
fn a_failed_binding_drops_the_expected_start_and_the_next_one_sets_it_again() {
    let mut cluster = LedgerCluster::new(&[("n", 4)]);
    cluster.add_waiting("a", engine());
    cluster
        .apply(BindAsked {
            uid: uid("a"),
            key: key("a"),
            node: node("n"),
        })
        .unwrap();
    cluster.apply(crate::verbs::binding::BindingFailed(uid("a")));
    assert_eq!(cluster.ledger().pod_state(&uid("a")).unwrap().start, None);
    cluster.advance(100);
    bind(&mut cluster, "a", "n", engine());
    cluster.advance(60);
    let timed = progress(&mut cluster, "a", StartProgress::Ready).unwrap();
    assert_eq!(timed.observed, Millis::seconds(60));
}

#[test]
fn a_standby_learns_from_pods_that_it_sees_being_bound_and_from_no_others() {
    let mut cluster = LedgerCluster::new(&[("n", 4)]);
    let bound = |starting| ObservedPhase::Bound {
        node: node("n"),
        devices: Some([gpu_at("n", 0)].into()),
        starting,
        ran: None,
    };
    cluster.add_waiting("a", engine());
    cluster.observe("a", engine(), bound(true), None);
    cluster.advance(90);
    assert_eq!(
        progress(&mut cluster, "a", StartProgress::Ready)
            .unwrap()
            .observed,
        Millis::seconds(90)
    );
    cluster.observe("b", engine(), bound(true), None);
    assert_eq!(
        progress(&mut cluster, "b", StartProgress::Ready),
        None,
        "it is unknown since when"
    );
    cluster.add_waiting("c", engine());
    cluster.observe("c", engine(), bound(false), None);
    assert_eq!(
        progress(&mut cluster, "c", StartProgress::Ready),
        None,
        "the watch missed its start"
    );
}

#[test]
fn a_tenant_whose_engines_are_slow_to_be_ready_spoils_a_third_of_what_others_teach_at_most() {
    let mut cluster = LedgerCluster::new(&[("n", 4), ("kin", 4)]);
    for n in 0..30 {
        start(&mut cluster, &format!("honest/{n}"), "n", 60);
    }
    for n in 0..60 {
        // Other names, so that the honest samples are those that the flood would push out.
        start(&mut cluster, &format!("flood/{n}"), "n", 600);
    }
    let others = expected(&mut cluster, "kin");
    assert!(others < 450, "{others}");
    for n in 0..12 {
        start(&mut cluster, &format!("third/{n}"), "n", 60);
    }
    let others = expected(&mut cluster, "kin");
    assert!(others < 200, "{others}");
}

#[test]
fn other_speeds_in_the_policy_void_what_was_compared_with_the_old_ones() {
    let mut cluster = LedgerCluster::new(&[("n", 4)]);
    starts(&mut cluster, 4, "n", 180);
    bind(&mut cluster, "during", "n", engine());
    let mut policy = Policy::default();
    policy.scoring.shortlist = 7;
    cluster.apply(PolicySet {
        policy: policy.clone(),
        prepared: None,
    });
    assert!(
        expected(&mut cluster, "n") > 150,
        "nothing of this concerns the speeds"
    );
    policy.loading.init = Millis::seconds(10);
    cluster.apply(PolicySet {
        policy,
        prepared: None,
    });
    assert_eq!(expected(&mut cluster, "n"), 50);
    assert_eq!(progress(&mut cluster, "during", StartProgress::Ready), None);
}

#[test]
fn fast_starts_do_not_shorten_the_start_gate_and_slow_ones_lengthen_it() {
    let gate = |seconds| {
        let mut cluster = LedgerCluster::new(&[("n", 4)]);
        starts(&mut cluster, 3, "n", seconds);
        bind(&mut cluster, "next", "n", engine());
        cluster
            .ledger()
            .pod_state(&uid("next"))
            .unwrap()
            .starting
            .unwrap()
            .since(cluster.ledger().now())
    };
    assert_eq!(
        gate(1),
        Millis::seconds(120),
        "twice what the policy's speeds say"
    );
    let longer = gate(180);
    assert!((300_000..=360_000).contains(&longer.0), "{longer:?}");
}

#[test]
fn a_new_node_of_the_same_name_starts_without_samples() {
    let mut cluster = LedgerCluster::new(&[("n", 4)]);
    starts(&mut cluster, 2, "n", 180);
    cluster.apply(NodeImagesObserved {
        node: node("n"),
        images: Some(vec![image(3)]),
    });
    assert!(expected(&mut cluster, "n") > 150);
    cluster.apply(NodeDeleted(node("n")));
    assert!(
        cluster.ledger().start_model().images().is_empty(),
        "no node lists it any more"
    );
    cluster.add_node("n", vec![crate::testkit::h100("n", 0)]);
    assert_eq!(expected(&mut cluster, "n"), 60);
    assert!(!cluster.snapshot().node("n").unwrap().images.is_known());
}

#[test]
fn remembered_kinds_and_samples_are_bounded() {
    let mut starts = StartTimes::default();
    let sample = || StartSample {
        transfer: Millis::seconds(30),
        init: Millis::seconds(20),
        observed: Millis::seconds(150),
        namespace: "a".into(),
    };
    let kind = StartKind::Engine(Engine::Vllm, LoadPath::Disk);
    let gpu = |n: usize| GpuModel::parse(&format!("invented-{n}")).unwrap();
    for n in 0..1000 {
        for _ in 0..MIN_SAMPLES {
            starts.learn(kind, Some(&gpu(n)), sample());
        }
    }
    assert_eq!(starts.kinds.len(), MAX_KINDS);
    assert_eq!(
        starts.model.cluster_factors(kind, Some(&gpu(0))),
        None,
        "it was observed longest ago"
    );
    assert!(
        starts
            .model
            .cluster_factors(kind, Some(&gpu(999)))
            .is_some()
    );
    let timed = TimedStart {
        engine: Engine::Vllm,
        expected: Millis(1),
        prior: Millis(u64::MAX),
        observed: Millis(0),
    };
    (0..1000).for_each(|_| starts.record(timed));
    assert_eq!(starts.timed.len(), MAX_TIMED_STARTS);
}

#[test]
fn a_node_that_lists_ten_thousand_images_costs_no_more_than_the_limit_and_loses_no_large_one() {
    let mut cluster = LedgerCluster::new(&[("n", 4), ("other", 4)]);
    let list = || (1..=10_000).map(image).collect();
    cluster.apply(NodeImagesObserved {
        node: node("n"),
        images: Some(list()),
    });
    let snapshot = cluster.snapshot();
    let images = &snapshot.node("n").unwrap().images;
    assert_eq!(images.iter().count(), MAX_NODE_IMAGES);
    assert_eq!(snapshot.start_model().images().len(), MAX_NODE_IMAGES);
    assert!(images.contains(image(10_000).image) && !images.contains(image(1).image));
    let generation = cluster.ledger().generation();
    cluster.apply(NodeImagesObserved {
        node: node("n"),
        images: Some(list()),
    });
    assert_eq!(
        cluster.ledger().generation(),
        generation,
        "the same list changes nothing"
    );
    cluster.apply(NodeImagesObserved {
        node: node("gone"),
        images: Some(list()),
    });
    cluster.apply(NodeImagesObserved {
        node: node("n"),
        images: None,
    });
    assert!(cluster.ledger().start_model().images().is_empty());
}

#[test]
fn starts_of_one_engine_leave_the_cached_scores_of_others_and_small_changes_leave_all() {
    let mut cluster = LedgerCluster::new(&[("n", 4), ("kin", 4)]);
    let (policy, of_vllm) = (cluster.ledger().policy().clone(), engine());
    let of_sglang = Demand {
        engine: Engine::Sglang,
        ..engine()
    };
    let keys = |cluster: &mut Cluster| {
        let snapshot = cluster.snapshot();
        [&of_vllm, &of_sglang].map(|demand| snapshot.start_model().key_of(demand))
    };
    let before = keys(&mut cluster);
    starts(&mut cluster, 3, "n", 180);
    let learned = keys(&mut cluster);
    assert_ne!(learned[0], before[0]);
    assert_eq!(learned[1], before[1]);
    for n in 0..20 {
        start(&mut cluster, "pod", "n", 175 + n % 10);
    }
    assert_eq!(keys(&mut cluster), learned, "as expected, by and large");
    // A score from the cache is the score of the node.
    let mut cache = ScoreCache::default();
    for _ in 0..3 {
        starts(&mut cluster, 3, "kin", 20);
        let snapshot = cluster.snapshot();
        let attempt = || rank::ScheduleAttempt::unreserved(&policy);
        let names = || ["kin", "n"].into_iter();
        // All nodes are remembered; a request about two would remember none.
        cache.best(&snapshot, &of_vllm, &policy);
        let cached = cache.shortlist(&snapshot, &of_vllm, names(), attempt());
        assert_eq!(
            cached,
            rank::shortlist(&snapshot, &of_vllm, names(), attempt())
        );
        assert_eq!(
            snapshot.nodes()[cached.best[0].node_index].name,
            node("kin")
        );
    }
}

#[test]
fn a_ledger_that_is_loaded_expects_what_the_stored_one_did() {
    let mut cluster = LedgerCluster::new(&[("n", 4)]);
    cluster.apply(NodeImagesObserved {
        node: node("n"),
        images: Some(vec![image(3)]),
    });
    starts(&mut cluster, 3, "n", 180);
    bind(&mut cluster, "during", "n", engine());
    let text = serde_json::to_string(&cluster.export()).unwrap();
    let mut loaded = Cluster::load(serde_json::from_str(&text).unwrap()).unwrap();
    assert_eq!(
        loaded.snapshot().start_model(),
        cluster.snapshot().start_model()
    );
    assert!(matches!(
        loaded.ledger().pod_state(&uid("during")).unwrap().phase,
        PodPhase::Bound(_)
    ));
    let ready = || EngineStartObserved {
        uid: uid("during"),
        progress: StartProgress::Ready,
    };
    assert_eq!(loaded.apply(ready()), cluster.apply(ready()));
    assert_eq!(
        loaded.ledger().start_errors(),
        cluster.ledger().start_errors()
    );
}

/// Nodes do not agree on how large an image is if its tag was moved between their pulls, or if they have other processors.
#[test]
fn nodes_that_say_other_sizes_of_one_image_do_not_empty_the_score_cache_in_turn() {
    let mut cluster = LedgerCluster::new(&[("n", 1), ("other", 1)]);
    let demand = Demand {
        images: [image(9).image].into(),
        ..engine()
    };
    let mut list = |name: &str, gib: u64| {
        let listed = NodeImage {
            bytes: Bytes::gib(gib),
            ..image(9)
        };
        cluster.apply(NodeImagesObserved {
            node: node(name),
            images: Some(vec![listed]),
        });
        cluster.ledger().start_model().key_of(&demand)
    };
    list("n", 10);
    let both = list("other", 12);
    for _ in 0..3 {
        assert_eq!(list("n", 10), both);
        assert_eq!(list("other", 12), both);
    }
}

/// It starts again somewhere, on GPUs like its own.
#[test]
fn the_reload_of_an_evicted_pod_costs_what_starts_have_taught() {
    let mut cluster = LedgerCluster::new(&[("n", 4), ("slow", 4)]);
    bind(
        &mut cluster,
        "victim",
        "n",
        Demand {
            priority: -5,
            ..engine()
        },
    );
    let reload = |cluster: &LedgerCluster| {
        let preemptor = cluster.ledger().pricing_preemptor();
        let node_state = cluster.ledger().node_state(&node("n")).unwrap();
        let part = node_state
            .usage_of(cluster.ledger().pod_state(&uid("victim")).unwrap())
            .unwrap()
            .milli_gpus;
        cluster
            .ledger()
            .cost_of_leaving(&uid("victim"), node_state, &preemptor)
            .unwrap()
            .reload
            / part
    };
    assert_eq!(reload(&cluster), 60);
    starts(&mut cluster, 6, "slow", 180);
    let learned = reload(&cluster);
    assert!((165..=180).contains(&learned), "{learned}");
    let mut policy = Policy::default();
    policy.version = 7;
    policy.loading.init = Millis::seconds(30);
    cluster.apply(PolicySet {
        policy,
        prepared: None,
    });
    assert_eq!(
        reload(&cluster),
        70,
        "other speeds in the policy begin again"
    );
}

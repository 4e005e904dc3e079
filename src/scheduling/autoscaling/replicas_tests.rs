//! Which pods and engines are replicas of which model.

use super::*;
use crate::ids::ModelId;
use crate::ledger::{DeviceSlice, PublishedDevices, StartProgress};
use crate::policy::{ModelRules, Policy};
use crate::testkit::{LedgerCluster, demand_of, key, node, uid};
use crate::units::Millis;
use crate::verbs::bind::BindAsked;
use crate::verbs::binding::BindingWritten;
use crate::verbs::observe::SliceObserved;
use crate::verbs::observe::{EngineStartObserved, PodDeleted};
use crate::vocabulary::demand::{Demand, Sharing};

fn of_model(model: &str) -> Demand {
    Demand {
        model: ModelId::parse(model).ok(),
        ..demand_of(1 << 30, 1, Sharing::Shared, 0)
    }
}

fn bound(cluster: &mut LedgerCluster, pod: &str) {
    cluster.add_waiting(pod, of_model("m"));
    cluster
        .apply(BindAsked {
            uid: uid(pod),
            key: key(pod),
            node: node("a"),
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
        node: node("a"),
        devices,
    });
}

fn sample(pod: &str, figures: EngineFigures) -> EngineSample {
    EngineSample {
        node: node("a"),
        is_report_fresh: true,
        pod: uid(pod),
        model: ModelId::parse("m").unwrap(),
        figures,
    }
}

fn busy(share: f64) -> EngineFigures {
    EngineFigures::Serving {
        kv_cache: Permille::from_share(share),
        waiting: Some(2),
        running: Some(3),
    }
}

fn load_of(cluster: &LedgerCluster, engines: &[EngineSample]) -> ModelLoad {
    loads(cluster.ledger(), engines)
        .remove(&ModelId::parse("m").unwrap())
        .unwrap_or_default()
}

#[test]
fn engines_are_replicas_and_pods_without_one_start() {
    let mut cluster = LedgerCluster::new(&[("a", 4)]);
    for pod in ["serves", "serves-too", "starts"] {
        bound(&mut cluster, pod);
    }
    cluster.add_waiting("waits", of_model("m"));
    cluster.add_waiting("other", of_model("n"));
    let load = load_of(
        &cluster,
        &[
            sample("serves", busy(0.5)),
            sample("serves-too", busy(0.25)),
        ],
    );
    assert_eq!((load.serving, load.starting, load.asleep), (2, 2, 0));
    assert_eq!(
        (load.kv_cache, load.waiting),
        (
            ReportedSum {
                sum: 750,
                replicas: 2
            },
            ReportedSum {
                sum: 4,
                replicas: 2
            }
        )
    );
    assert!(
        load.ready_in > Millis(0),
        "what an engine takes without any weights"
    );
    assert_eq!(loads(cluster.ledger(), &[]).len(), 2);
}

#[test]
fn a_pod_whose_engine_should_have_answered_long_ago_is_a_replica_with_unknown_load() {
    let mut cluster = LedgerCluster::new(&[("a", 4)]);
    bound(&mut cluster, "late");
    bound(&mut cluster, "ready");
    cluster
        .apply(EngineStartObserved {
            uid: uid("ready"),
            progress: StartProgress::Ready,
        })
        .unwrap();
    let load = load_of(&cluster, &[]);
    assert_eq!(
        (load.serving, load.starting),
        (1, 1),
        "one is ready, and no agent reports its engine"
    );
    cluster.advance(3600);
    let load = load_of(&cluster, &[]);
    assert_eq!(
        (load.serving, load.starting, load.kv_cache.replicas),
        (2, 0, 0)
    );
}

#[test]
fn two_engines_of_one_pod_are_one_replica_and_a_draining_one_is_none() {
    let mut cluster = LedgerCluster::new(&[("a", 4)]);
    bound(&mut cluster, "two");
    bound(&mut cluster, "gone");
    let engines = [
        sample("two", busy(0.5)),
        sample("two", busy(0.9)),
        sample("gone", EngineFigures::Draining),
    ];
    let load = load_of(&cluster, &engines);
    assert_eq!((load.serving, load.starting), (1, 0));
    assert_eq!((load.kv_cache.sum, load.waiting.sum), (900, 4));
    cluster.apply(PodDeleted(uid("gone")));
    assert_eq!(load_of(&cluster, &engines[..2]).replicas(), 1);
}

#[test]
fn an_engine_that_sleeps_is_ready_sooner_than_a_new_one() {
    let mut cluster = LedgerCluster::new(&[("a", 4)]);
    bound(&mut cluster, "one");
    let awake = load_of(&cluster, &[sample("one", busy(0.5))]);
    let asleep = load_of(&cluster, &[sample("one", EngineFigures::Asleep)]);
    assert_eq!((asleep.serving, asleep.asleep), (0, 1));
    assert!(asleep.ready_in < awake.ready_in);
}

#[test]
fn an_engine_of_a_pod_that_is_gone_does_not_count() {
    let mut cluster = LedgerCluster::new(&[("a", 4)]);
    bound(&mut cluster, "moved");
    cluster.apply(PodDeleted(uid("moved")));
    for figures in [EngineFigures::Silent, busy(0.5)] {
        assert_eq!(
            load_of(&cluster, &[sample("moved", figures)]).replicas(),
            0,
            "{figures:?}"
        );
    }
}

#[test]
fn engines_of_pods_with_resource_claims_count_while_their_agent_is_heard() {
    let mut cluster = LedgerCluster::new(&[("a", 4)]);
    let devices = vec![PublishedDevices::OnNode(node("a"))];
    let (driver, pool, scope) = ("gpu.nvidia.com".into(), "pool".into(), "".into());
    let slice = DeviceSlice {
        driver,
        pool,
        scope,
        generation: 1,
        slices_of_pool: 1,
        devices,
    };
    cluster.apply(SliceObserved {
        name: "a".into(),
        slice,
    });
    assert_eq!(
        load_of(&cluster, &[sample("claims", busy(0.5))]).replicas(),
        1
    );
    let silent = sample("claims", EngineFigures::Silent);
    assert_eq!(
        load_of(&cluster, std::slice::from_ref(&silent)).replicas(),
        1,
        "its page does not answer under load"
    );
    assert_eq!(
        load_of(
            &cluster,
            &[EngineSample {
                is_report_fresh: false,
                ..silent
            }]
        )
        .replicas(),
        0
    );
}

#[test]
fn an_agent_is_believed_about_the_pods_of_its_own_node_only() {
    let mut cluster = LedgerCluster::new(&[("a", 4), ("b", 4)]);
    bound(&mut cluster, "one");
    cluster.add_waiting("waits", of_model("m"));
    let from_b = |pod| EngineSample {
        node: node("b"),
        ..sample(pod, busy(1.0))
    };
    let load = load_of(
        &cluster,
        &[
            sample("one", busy(0.5)),
            from_b("one"),
            from_b("waits"),
            from_b("none"),
        ],
    );
    assert_eq!(
        (load.serving, load.starting, load.kv_cache.sum),
        (1, 1, 500)
    );
}

#[test]
fn pods_of_other_namespaces_than_the_policy_names_for_a_model_are_no_replicas_of_it() {
    let mut policy = Policy::default();
    let ours = ModelRules {
        namespaces: vec!["serving-*".into()],
        ..ModelRules::default()
    };
    policy.settings.autoscaling.models = [("m".to_owned(), ours)].into();
    let mut cluster = LedgerCluster::with_policy_and_nodes(policy, &[("a", 4)]);
    bound(&mut cluster, "serving-a/engine");
    bound(&mut cluster, "intruder/engine");
    cluster.add_waiting("intruder/waits", of_model("m"));
    let engines = ["serving-a/engine", "intruder/engine"].map(|pod| sample(pod, busy(0.5)));
    let unknown = EngineSample {
        pod: uid("claims"),
        ..engines[0].clone()
    };
    let [ours, theirs] = engines;
    let load = load_of(&cluster, &[ours.clone(), theirs.clone(), unknown]);
    assert_eq!((load.replicas(), load.kv_cache.sum), (1, 500));
    let other = |sample: EngineSample| EngineSample {
        model: ModelId::parse("n").unwrap(),
        ..sample
    };
    let loads = loads(cluster.ledger(), &[other(ours), other(theirs)]);
    assert_eq!(
        loads[&ModelId::parse("n").unwrap()].serving,
        2,
        "of a model without the list all count"
    );
}

//! A group is placed whole or not at all, where the policy wants it.

use super::*;

#[test]
fn a_group_is_placed_whole_or_not_at_all() {
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    for name in ["a", "b", "c"] {
        cluster.member(name, job(60), group("trio", Some(3)));
    }
    assert_eq!(
        cluster.plan(),
        ["a waits: group-too-large", "b waits: group-too-large", "c waits: group-too-large"]
    );
    cluster.gated("single", job(60));
    assert_eq!(cluster.plan()[0], "single on m", "the group reserves nothing");
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 2)]);
    for name in ["a", "b"] {
        cluster.member(name, job(60), group("trio", Some(3)));
    }
    assert_eq!(cluster.plan(), ["a waits: group-incomplete", "b waits: group-incomplete"]);
    cluster.member("c", job(60), group("trio", Some(3)));
    cluster.pass(5);
    assert_eq!(cluster.plan(), ["a on n, b on m, c on m"]);
}

#[test]
fn a_group_without_a_declared_size_is_the_pods_that_exist_for_a_while() {
    let mut cluster = LedgerCluster::new(&[("n", 4)]);
    cluster.member("a", job(60), group("g", None));
    assert!(cluster.plan().is_empty());
    cluster.member("b", job(60), group("g", None));
    cluster.pass(3);
    assert_eq!(cluster.plan(), ["a on n, b on n"]);
}

#[test]
fn a_group_is_packed_on_the_fewest_nodes_when_the_policy_says_so() {
    let nodes = [("k", 1), ("l", 1), ("m", 1), ("n", 3)];
    let mut cluster = LedgerCluster::by(with_placement(GroupPlacement::FewestNodes), &nodes);
    for name in ["a", "b", "c"] {
        cluster.member(name, job(60), group("trio", Some(3)));
    }
    assert_eq!(cluster.plan(), ["a on n, b on n, c on n"]);
}

#[test]
fn a_group_is_placed_in_one_island_or_waits_when_the_policy_says_so() {
    let mut cluster = LedgerCluster::by(with_placement(GroupPlacement::OneIsland), &[("n", 4), ("m", 8)]);
    for name in ["a", "b", "c"] {
        cluster.member(name, job(60), group("trio", Some(3)));
    }
    let steps = steps(&mut cluster, 64);
    let [PlanStep::Place(places)] = &steps[..] else { panic!("{steps:?}") };
    let gpus: Vec<&str> = places.iter().map(|place| place.reservation.devices[0].as_str()).collect();
    assert_eq!(gpus, ["GPU-m-0", "GPU-m-1", "GPU-m-2"], "an island of n has two GPUs");
    let mut cluster = LedgerCluster::by(with_placement(GroupPlacement::OneIsland), &[("n", 4)]);
    for name in ["a", "b", "c"] {
        cluster.member(name, job(60), group("trio", Some(3)));
    }
    assert!(cluster.plan().iter().all(|step| step.ends_with("waits: group-too-large")));
}

#[test]
fn a_group_evicts_for_all_its_members_or_for_none() {
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    cluster.bound("j", "n", 0, job(60));
    cluster.bound("k", "m", 0, shared(60, 0));
    for name in ["a", "b"] {
        cluster.member(name, shared(50, 100), group("pair", Some(2)));
    }
    assert_eq!(cluster.plan(), ["a waits: group-too-large", "b waits: group-too-large"], "serving stays");
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    cluster.bound("j", "n", 0, job(60));
    cluster.bound("k", "m", 0, job(60));
    for name in ["a", "b"] {
        cluster.member(name, shared(50, 100), group("pair", Some(2)));
    }
    assert_eq!(cluster.plan(), ["a on m after k, b on n after j"]);
}

//! Which conflicts exist, when they count, which pods are evicted, and what a round costs.

use super::*;
use crate::testkit::{gpu, key, node, uid, whole_gpu};
use crate::units::Bytes;
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::gpu::Health;
use crate::vocabulary::memory_fraction::MemoryFraction;

const GIB: u64 = 1 << 30;

fn seconds(seconds: u64) -> Moment {
    Moment(0) + Millis::seconds(seconds)
}

/// Two GPUs of 80 GiB, as an agent reports them.
fn devices() -> Vec<Device> {
    let device = |index| whole_gpu(gpu(&format!("GPU-{index}")), index, Bytes(80 * GIB));
    (0..2).map(device).collect()
}

fn grant(gib: u64, bound: i64) -> Grant {
    Grant {
        per_gpu: Bytes(gib * GIB),
        sharing: Sharing::Shared,
        fraction: MemoryFraction::new(Bytes::gib(gib), Bytes::gib(80)),
        has_started: false,
        is_leaving: false,
        is_static: false,
        borrows: false,
        bind_times: BindTimes { bound, created: 0 },
    }
}

fn on(name: &str, gpus: &[&str], part: GpuShare) -> (PodUid, AuditedPod) {
    let observed = AuditedPod {
        key: key(&format!("team/{name}")),
        node: node("n"),
        gpus: gpus.iter().map(|name| gpu(name)).collect(),
        share: part,
    };
    (uid(name), observed)
}

fn bound(name: &str, gpus: &[&str], grant: Grant) -> (PodUid, AuditedPod) {
    on(name, gpus, GpuShare::Bound(grant))
}

fn reservations(name: &str, gib: u64, victims: &[&str], until: u64) -> (PodUid, AuditedPod) {
    let victims = victims.iter().map(|name| uid(name)).collect();
    let (per_gpu, deadline) = (Bytes(gib * GIB), seconds(until));
    let kept = ReservedShare {
        per_gpu,
        sharing: Sharing::Shared,
        victims,
        deadline,
    };
    on(name, &["GPU-0"], GpuShare::Reserved(Box::new(kept)))
}

/// One node, checked whenever the test says.
struct AuditFixture {
    audit: OverAllocationAudit,
    devices: Vec<Device>,
}

impl AuditFixture {
    fn new(pods: impl IntoIterator<Item = (PodUid, AuditedPod)>) -> Self {
        let mut bench = Self {
            audit: OverAllocationAudit::default(),
            devices: devices(),
        };
        pods.into_iter().for_each(|pod| bench.see(pod));
        bench
    }

    fn see(&mut self, (uid, observed): (PodUid, AuditedPod)) {
        self.audit.observe(&uid, Some(observed));
    }

    fn check_at(&mut self, at: u64) -> AuditRound {
        let now = seconds(at);
        let due = self.audit.due(now);
        let nodes: Vec<_> = due
            .into_iter()
            .map(|name| (name, self.devices.clone().into()))
            .collect();
        self.audit.check_nodes(&nodes, now)
    }

    /// What counts after it has stood for long enough, in words.
    fn confirmed_texts(&mut self) -> Vec<String> {
        [0, 60, 120]
            .into_iter()
            .for_each(|at| drop(self.check_at(at)));
        self.audit
            .confirmed()
            .map(|over_allocation| over_allocation.to_string())
            .collect()
    }

    fn victims_at(&self, at: u64) -> Vec<String> {
        self.audit
            .victims(seconds(at))
            .iter()
            .map(|leaver| leaver.key.name.to_string())
            .collect()
    }
}

#[test]
fn allocations_beyond_a_gpus_capacity_are_a_conflict_and_headroom_is_not() {
    let mut bench = AuditFixture::new([
        bound("a", &["GPU-0"], grant(50, 1)),
        bound("b", &["GPU-0"], grant(30, 2)),
    ]);
    assert!(bench.confirmed_texts().is_empty(), "80 of 80 GiB");
    bench.devices[0].reserved = Bytes(GIB);
    assert_eq!(
        bench.confirmed_texts(),
        [
            "GPU GPU-0 of node n is overcommitted: team/a (50.0 GiB), team/b (30.0 GiB) were granted 80.0 GiB of 79.0 GiB."
        ]
    );
    let told = |reader| {
        bench
            .audit
            .confirmed()
            .next()
            .unwrap()
            .text_for(&key(reader))
    };
    assert!(
        told("team/a").contains(": team/a (50.0 GiB), team/b (30.0 GiB) were"),
        "{}",
        told("team/a")
    );
    assert!(
        told("else/c").contains(": 2 pods of others (80.0 GiB) were"),
        "{}",
        told("else/c")
    );
}

#[test]
fn pods_of_other_namespaces_are_counted_before_those_that_are_named() {
    let parties = ["a/x", "b/x", "b/y", "b/z"].map(|name| Party {
        uid: uid(&name.replace('/', "-")),
        key: key(name),
        bytes: Bytes(10 * GIB),
        role: PartyRole::Holds,
    });
    let over_allocation = OverAllocation {
        kind: OverAllocationKind::ReservationsOverlap,
        node: node("n"),
        gpu: gpu("GPU-0"),
        parties: parties.into(),
        capacity: None,
    };
    for (reader, told) in [
        (
            "a/x",
            "overlap: 3 pods of others (30.0 GiB), a/x (10.0 GiB, reserved) reserve 40.0 GiB.",
        ),
        (
            "c/x",
            "overlap: 4 pods of others (40.0 GiB) reserve 40.0 GiB.",
        ),
    ] {
        assert!(
            over_allocation.text_for(&key(reader)).ends_with(told),
            "{}",
            over_allocation.text_for(&key(reader))
        );
    }
}

#[test]
fn a_pod_that_terminates_counts_until_it_is_gone() {
    let leaving = Grant {
        is_leaving: true,
        ..grant(50, 1)
    };
    let mut bench = AuditFixture::new([
        bound("a", &["GPU-0"], leaving),
        bound("b", &["GPU-0"], grant(50, 2)),
    ]);
    assert_eq!(bench.confirmed_texts().len(), 1);
    assert!(
        bench.victims_at(120).is_empty(),
        "its end ends the conflict"
    );
    bench.audit.remove(&uid("a"));
    assert_eq!(bench.check_at(121).ended.len(), 1);
}

#[test]
fn a_second_pod_on_an_exclusive_gpu_is_a_conflict_whatever_its_vram() {
    let exclusive = Grant {
        sharing: Sharing::Exclusive,
        ..grant(10, 1)
    };
    let mut bench = AuditFixture::new([
        bound("a", &["GPU-0"], exclusive),
        bound("b", &["GPU-0"], grant(1, 2)),
    ]);
    assert_eq!(
        bench.confirmed_texts(),
        [
            "GPU GPU-0 of node n is exclusive to one pod and has 2 pods: team/a (10.0 GiB, exclusive), team/b (1.0 GiB)."
        ]
    );
    let elsewhere = AuditFixture::new([
        bound("a", &["GPU-0"], exclusive),
        bound("b", &["GPU-1"], grant(1, 2)),
    ]);
    assert!({ elsewhere }.confirmed_texts().is_empty());
}

#[test]
fn a_gpu_index_and_a_uuid_name_one_gpu_once_the_node_reports() {
    let pods = || {
        [
            bound("a", &["index-0"], grant(50, 1)),
            bound("b", &["GPU-0"], grant(50, 2)),
        ]
    };
    assert_eq!(AuditFixture::new(pods()).confirmed_texts().len(), 1);
    let mut unreported = AuditFixture::new(pods());
    unreported
        .devices
        .iter_mut()
        .for_each(|device| device.uuid = GpuUuid::from_index(device.index));
    assert!(
        unreported.confirmed_texts().is_empty(),
        "nobody can say which GPU the UUID means"
    );
}

#[test]
fn an_index_names_the_gpu_of_today_and_not_a_lost_one_of_an_earlier_machine() {
    let pods = || {
        [
            bound("a", &["index-0"], grant(50, 1)),
            bound("b", &["GPU-0"], grant(50, 2)),
        ]
    };
    let mut bench = AuditFixture::new(pods());
    let earlier = Device {
        health: Health::Lost,
        ..whole_gpu(gpu("GPU-00"), 0, Bytes(80 * GIB))
    };
    bench.devices.insert(0, earlier);
    assert_eq!(bench.confirmed_texts().len(), 1);
    let mut all_lost = AuditFixture::new(pods());
    all_lost.devices[0].health = Health::Lost;
    assert!(
        all_lost.confirmed_texts().is_empty(),
        "where no other has the index, it is the lost one"
    );
}

#[test]
fn a_gpu_that_the_node_does_not_have_is_a_conflict_once_the_node_reports() {
    let mut bench = AuditFixture::new([bound("a", &["GPU-9"], grant(50, 1))]);
    assert_eq!(
        bench.confirmed_texts(),
        ["Node n has no GPU GPU-9, which its Binding granted to team/a (50.0 GiB)."]
    );
    assert!(bench.victims_at(120).is_empty());
    let mut unreported = AuditFixture::new([bound("a", &["GPU-9"], grant(50, 1))]);
    unreported.devices.clear();
    assert!(unreported.confirmed_texts().is_empty());
}

#[test]
fn pods_on_a_lost_gpu_are_not_a_conflict() {
    let mut bench = AuditFixture::new([
        bound("a", &["GPU-0"], grant(50, 1)),
        bound("b", &["GPU-0"], grant(50, 2)),
    ]);
    bench.devices[0].health = Health::Lost;
    assert!(bench.confirmed_texts().is_empty());
}

#[test]
fn reservations_beyond_a_gpus_capacity_conflict_until_one_ends() {
    let mut bench = AuditFixture::new([
        reservations("a", 50, &["v"], 1000),
        reservations("b", 50, &[], 130),
    ]);
    bench.see(bound("v", &["GPU-0"], grant(80, 0)));
    assert_eq!(
        bench.confirmed_texts(),
        [
            "Reservations on GPU GPU-0 of node n overlap: team/a (50.0 GiB, reserved), team/b (50.0 GiB, reserved) reserve 100.0 GiB of 80.0 GiB."
        ]
    );
    assert_eq!(
        bench.check_at(130).ended.len(),
        1,
        "the deadline of one has passed, and no pod changed"
    );
}

#[test]
fn a_reservation_conflicts_with_a_bound_pod_unless_it_is_its_victim() {
    let victim = bound("v", &["GPU-0"], grant(60, 0));
    let mut bench = AuditFixture::new([victim, reservations("a", 60, &["v"], 1000)]);
    assert!(bench.confirmed_texts().is_empty());
    bench.see(bound("late", &["GPU-0"], grant(30, 1)));
    assert!(bench.check_at(121).begun.is_empty());
    // The victim and the late pod conflict already: that is what is reported.
    assert_eq!(
        bench.check_at(123).begun[0].kind,
        OverAllocationKind::Overcommitted
    );
    bench.audit.remove(&uid("v"));
    bench.check_at(124);
    assert_eq!(
        bench.check_at(134).begun[0].kind,
        OverAllocationKind::ReservationOverBound
    );
}

#[test]
fn a_conflict_counts_once_a_later_check_finds_it_again() {
    let mut bench = AuditFixture::new([
        bound("a", &["GPU-0"], grant(50, 1)),
        bound("b", &["GPU-0"], grant(50, 2)),
    ]);
    assert_eq!((bench.check_at(0), bench.check_at(1)), Default::default());
    assert_eq!(bench.check_at(2).begun.len(), 1);
    assert_eq!(bench.audit.count(OverAllocationKind::Overcommitted), 1);
    assert_eq!(bench.audit.involving(&uid("b")).len(), 1);
    assert_eq!(bench.check_at(3), AuditRound::default(), "it is news once");
    bench.audit.remove(&uid("a"));
    assert_eq!(bench.check_at(4).ended.len(), 1);
    assert_eq!(bench.audit.count(OverAllocationKind::Overcommitted), 0);
}

#[test]
fn nothing_is_checked_while_pods_are_listed() {
    let mut bench = AuditFixture::new([
        bound("gone", &["GPU-0"], grant(50, 1)),
        bound("b", &["GPU-0"], grant(50, 2)),
    ]);
    bench.audit.begin_relist();
    assert_eq!((bench.check_at(0), bench.check_at(60)), Default::default());
    bench.audit.remove(&uid("gone"));
    bench.audit.end_relist();
    assert!(bench.confirmed_texts().is_empty());
}

#[test]
fn an_edited_gpu_annotation_causes_no_conflict() {
    let mut bench = AuditFixture::new([
        bound("a", &["GPU-0"], grant(50, 1)),
        bound("b", &["GPU-1"], grant(50, 2)),
    ]);
    bench.see(bound(
        "b",
        &["GPU-0"],
        Grant {
            sharing: Sharing::Exclusive,
            ..grant(50, 2)
        },
    ));
    assert!(bench.confirmed_texts().is_empty());
    let mut bench = AuditFixture::new([
        bound("a", &["GPU-0"], grant(50, 1)),
        bound("b", &[], grant(0, 2)),
    ]);
    bench.see(bound("b", &["GPU-0"], grant(50, 2)));
    assert!(
        bench.confirmed_texts().is_empty(),
        "it recorded nothing when it was bound"
    );
}

#[test]
fn the_audit_evicts_the_pod_that_has_not_started_or_was_bound_later() {
    let started = |grant: Grant| Grant {
        has_started: true,
        ..grant
    };
    for (first, second, leaver) in [
        (grant(50, 1), grant(50, 2), &["b"][..]),
        (grant(50, 2), grant(50, 1), &["a"]),
        (grant(50, 1), grant(50, 1), &["b"]),
        (grant(50, 1), started(grant(50, 2)), &["a"]),
        (started(grant(50, 1)), grant(50, 2), &["b"]),
        (started(grant(50, 1)), started(grant(50, 2)), &[]),
    ] {
        let mut bench = AuditFixture::new([
            bound("a", &["GPU-0"], first),
            bound("b", &["GPU-0"], second),
        ]);
        assert_eq!(bench.confirmed_texts().len(), 1);
        assert_eq!(bench.victims_at(120), leaver, "{first:?} {second:?}");
    }
}

#[test]
fn the_audit_prefers_a_victim_whose_eviction_ends_the_conflict() {
    let pods = [
        bound(
            "a",
            &["GPU-0"],
            Grant {
                has_started: true,
                ..grant(60, 1)
            },
        ),
        bound("b", &["GPU-0"], grant(60, 2)),
        bound("c", &["GPU-0"], grant(1, 3)),
    ];
    let mut bench = AuditFixture::new(pods);
    bench.confirmed_texts();
    assert_eq!(bench.victims_at(120), ["b"]);
}

#[test]
fn a_pod_in_conflict_on_two_gpus_is_evicted_once() {
    let both = &["GPU-0", "GPU-1"];
    let pods = [
        bound(
            "a",
            &["GPU-0"],
            Grant {
                has_started: true,
                ..grant(60, 1)
            },
        ),
        bound(
            "b",
            &["GPU-1"],
            Grant {
                has_started: true,
                ..grant(60, 1)
            },
        ),
        bound("c", both, grant(60, 2)),
    ];
    let mut bench = AuditFixture::new(pods);
    assert_eq!(bench.confirmed_texts().len(), 2);
    assert_eq!(bench.victims_at(120), ["c"]);
}

#[test]
fn a_smaller_reported_gpu_evicts_no_pod() {
    let mut bench = AuditFixture::new([
        bound("a", &["GPU-0"], grant(40, 1)),
        bound("b", &["GPU-0"], grant(39, 2)),
    ]);
    bench.devices[0].total = Bytes(10 * GIB);
    assert_eq!(bench.confirmed_texts().len(), 1, "it is told");
    assert!(bench.victims_at(120).is_empty());
    // Nor if one of them was bound while the agent said so: the largest GPU that a record allows counts.
    let small = Grant {
        fraction: MemoryFraction::new(Bytes(9), Bytes(10)),
        ..grant(9, 1)
    };
    let mut bench = AuditFixture::new([
        bound("a", &["GPU-0"], small),
        bound("b", &["GPU-0"], grant(70, 2)),
    ]);
    bench.devices[0].total = Bytes(10 * GIB);
    assert_eq!(bench.confirmed_texts().len(), 1);
    assert!(bench.victims_at(120).is_empty());
    let unknown = Grant {
        fraction: MemoryFraction::ZERO,
        ..grant(70, 1)
    };
    let mut bench = AuditFixture::new([
        bound("a", &["GPU-0"], unknown),
        bound("b", &["GPU-0"], grant(70, 2)),
    ]);
    assert_eq!(bench.confirmed_texts().len(), 1);
    assert!(
        bench.victims_at(120).is_empty(),
        "a record that says nothing of the GPU proves nothing"
    );
}

#[test]
fn a_pod_that_has_just_joined_a_conflict_is_not_evicted_yet() {
    let started = |gib, at| Grant {
        has_started: true,
        ..grant(gib, at)
    };
    let mut bench = AuditFixture::new([
        bound("a", &["GPU-0"], started(50, 1)),
        bound("b", &["GPU-0"], started(50, 2)),
    ]);
    bench.confirmed_texts();
    bench.see(bound("c", &["GPU-0"], grant(50, 3)));
    bench.check_at(121);
    assert!(bench.victims_at(121).is_empty());
    assert_eq!(bench.victims_at(123), ["c"]);
}

/// 5,000 nodes of eight GPUs with two pods on each GPU.
fn large() -> OverAllocationAudit {
    let mut audit = OverAllocationAudit::default();
    for n in 0..80_000u32 {
        let observed = AuditedPod {
            key: key(&format!("team/p-{n}")),
            node: node(&format!("n-{}", n % 5000)),
            gpus: [gpu(&format!("GPU-{}-{}", n % 5000, n / 5000 % 8))].into(),
            share: GpuShare::Bound(grant(30, i64::from(n))),
        };
        audit.observe(&uid(&format!("u-{n}")), Some(observed));
    }
    audit
}

#[test]
fn at_5000_nodes_one_check_visits_the_changed_nodes_and_250_others() {
    let mut audit = large();
    let visits: Vec<usize> = (0..6).map(|at| audit.due(seconds(at)).len()).collect();
    let AuditPace { changed, in_turn } = AuditPace::default();
    assert!(
        visits.iter().all(|visits| *visits <= changed + in_turn),
        "{visits:?}"
    );
    assert_eq!(
        (audit.waiting(), visits[5]),
        (0, in_turn),
        "all were visited once"
    );
    for n in [7, 4711, 4999] {
        audit.remove(&uid(&format!("u-{n}")));
    }
    assert_eq!(audit.waiting(), 3);
    let due = audit.due(seconds(7));
    assert!(
        due.len() >= in_turn && due.len() <= in_turn + 3,
        "{}",
        due.len()
    );
    assert!(
        [7, 4711, 4999]
            .iter()
            .all(|n| due.contains(&node(&format!("n-{n}"))))
    );
    // The status that a kubelet writes every few seconds changes nothing here.
    let observed = audit.nodes[&node("n-8")].pods[&uid("u-8")].clone();
    audit.observe(&uid("u-8"), Some(observed));
    assert_eq!(audit.waiting(), 0);
}

#[test]
fn every_node_is_checked_in_turn() {
    let mut audit = large();
    while audit.waiting() > 0 {
        audit.due(seconds(0));
    }
    audit.last_in_turn = None;
    let rounds = 5000 / AuditPace::default().in_turn;
    let mut seen: Vec<NodeName> = (0..rounds).flat_map(|_| audit.due(seconds(1))).collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 5000);
}

#[test]
fn an_audited_pod_takes_few_bytes_and_shares_its_names() {
    assert!(
        size_of::<AuditedPod>() <= 112,
        "{}",
        size_of::<AuditedPod>()
    );
    let audit = large();
    let pods = &audit.nodes[&node("n-8")].pods;
    let same: Vec<&AuditedPod> = pods
        .values()
        .filter(|pod| *pod.gpus == [gpu("GPU-8-0")])
        .collect();
    assert_eq!(same.len(), 2);
    assert!(Arc::ptr_eq(&same[0].gpus, &same[1].gpus));
}

#[test]
fn a_static_pod_is_not_evicted_to_end_a_conflict() {
    let later = Grant {
        is_static: true,
        ..grant(50, 9)
    };
    let mut bench = AuditFixture::new([
        bound("a", &["GPU-0"], grant(50, 1)),
        bound("b", &["GPU-0"], later),
    ]);
    bench.confirmed_texts();
    assert_eq!(
        bench.victims_at(120),
        ["a"],
        "an eviction of the other one would end nothing"
    );
}

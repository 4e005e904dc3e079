//! Whatever watches show, in any order: the incremental audit finds what brute force over plain lists finds.

use super::*;
use crate::proptests::sharing;
use crate::testkit::{gpu, key, node, uid, whole_gpu};
use crate::units::Bytes;
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::gpu::Health;
use crate::vocabulary::memory_fraction::MemoryFraction;
use proptest::prelude::*;
use std::collections::BTreeSet;
use strum::VariantArray;

#[derive(Debug, Clone)]
enum ConflictStep {
    /// A watch shows a pod on a node: bound, with its GPUs and what it has of each, as a share of 100 B.
    Bound {
        pod: u8,
        node: u8,
        gpus: Vec<u8>,
        part: u64,
        sharing: Sharing,
        started: bool,
        leaving: bool,
    },
    Holds {
        pod: u8,
        node: u8,
        gpus: Vec<u8>,
        part: u64,
        sharing: Sharing,
        victims: Vec<u8>,
        lasts: u64,
    },
    Gone(u8),
    /// A node's GPUs: each of so many bytes, or none, or lost; reported by UUID or known by index.
    Gpus {
        node: u8,
        totals: Vec<u64>,
        lost: bool,
        reported: bool,
    },
    /// A round, so much later.
    Look(u64),
}

fn step() -> impl Strategy<Value = ConflictStep> {
    let (pod, on) = (0u8..7, 0u8..2);
    let gpus = || proptest::collection::vec(0u8..4, 0..3);
    prop_oneof![
        6 => (pod.clone(), on.clone(), gpus(), 1u64..70, sharing(), any::<bool>(), any::<bool>()).prop_map(
            |(pod, node, gpus, part, sharing, started, leaving)| ConflictStep::Bound { pod, node, gpus, part, sharing, started, leaving }),
        4 => (pod.clone(), on.clone(), gpus(), 1u64..70, sharing(), proptest::collection::vec(0u8..7, 0..3), 0u64..30_000)
            .prop_map(|(pod, node, gpus, part, sharing, victims, lasts)| ConflictStep::Holds { pod, node, gpus, part, sharing, victims, lasts }),
        2 => pod.prop_map(ConflictStep::Gone),
        2 => (on, proptest::collection::vec(0u64..120, 0..4), proptest::bool::weighted(0.2), any::<bool>())
            .prop_map(|(node, totals, lost, reported)| ConflictStep::Gpus { node, totals, lost, reported }),
        8 => (0u64..12_000).prop_map(ConflictStep::Look),
    ]
}

/// GPU 3 is named by its index.
fn name(gpu_no: u8) -> GpuUuid {
    if gpu_no == 3 {
        GpuUuid::from_index(0)
    } else {
        gpu(&format!("GPU-{gpu_no}"))
    }
}

/// The oracle: plain lists, and no derived state.
#[derive(Default)]
struct Plain {
    now: u64,
    pods: BTreeMap<u8, AuditedPod>,
    devices: BTreeMap<u8, Vec<Device>>,
    since: BTreeMap<(OverAllocationKind, String, String), u64>,
}

type ConflictRow = (OverAllocationKind, String, String, BTreeSet<String>, u64);

impl Plain {
    fn rows(&self) -> Vec<ConflictRow> {
        let mut rows = Vec::new();
        for n in 0..2u8 {
            let devices = self.devices.get(&n).cloned().unwrap_or_default();
            let names: BTreeSet<String> = devices
                .iter()
                .map(|device| device.uuid.to_string())
                .chain((0..4).map(|number| name(number).to_string()))
                .collect();
            names
                .iter()
                .for_each(|gpu| rows.extend(self.on(n, gpu, &devices)));
        }
        rows
    }

    /// The pods on one GPU of one node, each as (pod, bytes, whole, victims, is bound).
    fn on(&self, n: u8, gpu: &str, devices: &[Device]) -> Vec<ConflictRow> {
        let device = devices.iter().find(|device| device.uuid.as_str() == gpu);
        let reported = devices
            .iter()
            .any(|device| device.uuid.as_str().starts_with("GPU"));
        // An index means a device wherever one has it; then nothing is named by the index itself.
        let means = |written: &GpuUuid| match devices.iter().find(|device| device.uuid == *written)
        {
            Some(device) => device.uuid.to_string(),
            None => match devices
                .iter()
                .find(|device| written.index() == Some(device.index))
            {
                Some(device) => device.uuid.to_string(),
                None => written.to_string(),
            },
        };
        let here: Vec<(&u8, &AuditedPod)> = self
            .pods
            .iter()
            .filter(|(_, pod)| pod.node == node(&format!("n-{n}")))
            .filter(|(_, pod)| pod.gpus.iter().any(|written| means(written) == gpu))
            .collect();
        let bound: Vec<(&u8, &Grant)> = here
            .iter()
            .filter_map(|(pod, observed)| Some((*pod, observed.grant()?)))
            .collect();
        let reservations: Vec<(&u8, &ReservedShare)> = here
            .iter()
            .filter_map(|(pod, observed)| match &observed.share {
                GpuShare::Reserved(kept) if kept.deadline.0 > self.now => Some((*pod, &**kept)),
                _ => None,
            })
            .collect();
        let row = |kind, pods: Vec<&u8>, sum| {
            let pods = pods.into_iter().map(|pod| format!("u-{pod}")).collect();
            (kind, format!("n-{n}"), gpu.to_owned(), pods, sum)
        };
        let all_victims = || bound.iter().map(|(pod, _)| *pod).collect::<Vec<_>>();
        let sum: u64 = bound.iter().map(|(_, grant)| grant.per_gpu.0).sum();
        let is_whole = bound
            .iter()
            .any(|(_, grant)| grant.sharing == Sharing::Exclusive);
        if device.is_none() && reported {
            return if bound.is_empty() {
                vec![]
            } else {
                vec![row(OverAllocationKind::UnknownGpu, all_victims(), sum)]
            };
        }
        if device.is_some_and(|device| device.health == Health::Lost) {
            return vec![];
        }
        if is_whole && bound.len() >= 2 {
            let mut rows = vec![row(OverAllocationKind::ExclusiveShared, all_victims(), sum)];
            rows.extend(
                self.overlap(device, &reservations)
                    .map(|(pods, sum)| row(OverAllocationKind::ReservationsOverlap, pods, sum)),
            );
            return rows;
        }
        let Some(has) = device.map(|device| device.total.0).filter(|has| *has > 0) else {
            return vec![];
        };
        let overlap = self
            .overlap(device, &reservations)
            .map(|(pods, sum)| row(OverAllocationKind::ReservationsOverlap, pods, sum));
        if !is_whole && sum > has {
            return [
                Some(row(OverAllocationKind::Overcommitted, all_victims(), sum)),
                overlap,
            ]
            .into_iter()
            .flatten()
            .collect();
        }
        if let Some(overlap) = overlap {
            return vec![overlap];
        }
        let stays: Vec<_> = bound
            .iter()
            .filter(|(pod, _)| {
                !reservations
                    .iter()
                    .any(|(_, kept)| kept.victims.contains(&uid(&format!("u-{pod}"))))
            })
            .collect();
        if reservations.is_empty() || stays.is_empty() {
            return vec![];
        }
        let kept: u64 = reservations.iter().map(|(_, kept)| wants(kept, has)).sum();
        let stay: u64 = stays.iter().map(|(_, grant)| grant.per_gpu.0).sum();
        let whole = stays
            .iter()
            .any(|(_, grant)| grant.sharing == Sharing::Exclusive)
            || reservations
                .iter()
                .any(|(_, kept)| kept.sharing == Sharing::Exclusive);
        if whole || kept + stay > has {
            let pods = reservations
                .iter()
                .map(|(pod, _)| *pod)
                .chain(stays.iter().map(|(pod, _)| *pod))
                .collect();
            return vec![row(
                OverAllocationKind::ReservationOverBound,
                pods,
                kept + stay,
            )];
        }
        vec![]
    }

    fn overlap<'a>(
        &self,
        device: Option<&Device>,
        reservations: &[(&'a u8, &ReservedShare)],
    ) -> Option<(Vec<&'a u8>, u64)> {
        let has = device.map(|device| device.total.0).filter(|has| *has > 0)?;
        let kept: u64 = reservations.iter().map(|(_, kept)| wants(kept, has)).sum();
        let whole = reservations
            .iter()
            .any(|(_, kept)| kept.sharing == Sharing::Exclusive);
        (reservations.len() > 1 && (whole || kept > has))
            .then(|| (reservations.iter().map(|(pod, _)| *pod).collect(), kept))
    }

    /// The conflicts that count at a round now.
    fn run_audit(&mut self) -> BTreeSet<ConflictRow> {
        let rows = self.rows();
        let key = |row: &ConflictRow| (row.0, row.1.clone(), row.2.clone());
        self.since
            .retain(|known, _| rows.iter().any(|row| key(row) == *known));
        let now = self.now;
        let since: Vec<u64> = rows
            .iter()
            .map(|row| *self.since.entry(key(row)).or_insert(now))
            .collect();
        let stood = |row: &ConflictRow, since: u64| now >= since + row.0.confirmation_time().0;
        rows.iter()
            .zip(since)
            .filter(|(row, since)| stood(row, *since))
            .map(|(row, _)| row.clone())
            .collect()
    }
}

fn wants(kept: &ReservedShare, has: u64) -> u64 {
    if kept.sharing == Sharing::Exclusive {
        has
    } else {
        kept.per_gpu.0
    }
}

/// The audit under test beside the oracle.
struct Both {
    audit: OverAllocationAudit,
    plain: Plain,
}

impl Both {
    fn with_pace(pace: AuditPace) -> Self {
        Self {
            audit: OverAllocationAudit::with_pace(pace),
            plain: Plain::default(),
        }
    }

    fn observed(&self, pod: u8, on: u8, gpus: &[u8], part: GpuShare) -> AuditedPod {
        let gpus = gpus.iter().map(|number| name(*number)).collect();
        let key = key(&format!("team/p-{pod}"));
        AuditedPod {
            key,
            node: node(&format!("n-{on}")),
            gpus,
            share: part,
        }
    }

    fn show(&mut self, pod: u8, observed: AuditedPod) {
        self.audit
            .observe(&uid(&format!("u-{pod}")), Some(observed.clone()));
        // The record of a pod on the same node stays as it was.
        let recorded = self
            .plain
            .pods
            .get_mut(&pod)
            .filter(|recorded| recorded.node == observed.node);
        match (
            recorded.map(|recorded| (recorded.grant().is_some(), recorded)),
            observed.grant(),
        ) {
            (Some((true, recorded)), Some(grant)) => {
                let GpuShare::Bound(first) = &mut recorded.share else {
                    unreachable!("it is bound")
                };
                (first.has_started, first.is_leaving) =
                    (first.has_started || grant.has_started, grant.is_leaving);
            }
            _ => drop(self.plain.pods.insert(pod, observed)),
        }
    }

    fn step(&mut self, step: ConflictStep) -> Option<BTreeSet<ConflictRow>> {
        match step {
            ConflictStep::Bound {
                pod,
                node,
                gpus,
                part,
                sharing,
                started,
                leaving,
            } => {
                let (per_gpu, since) = (Bytes(part), BindTimes::default());
                let grant = Grant {
                    per_gpu,
                    sharing,
                    fraction: MemoryFraction::ZERO,
                    has_started: started,
                    is_leaving: leaving,
                    is_static: false,
                    borrows: false,
                    bind_times: since,
                };
                self.show(pod, self.observed(pod, node, &gpus, GpuShare::Bound(grant)));
            }
            ConflictStep::Holds {
                pod,
                node,
                gpus,
                part,
                sharing,
                victims,
                lasts,
            } => {
                let victims = victims.iter().map(|pod| uid(&format!("u-{pod}"))).collect();
                let deadline = Moment(self.plain.now + lasts);
                let kept = ReservedShare {
                    per_gpu: Bytes(part),
                    sharing,
                    victims,
                    deadline,
                };
                self.show(
                    pod,
                    self.observed(pod, node, &gpus, GpuShare::Reserved(Box::new(kept))),
                );
            }
            ConflictStep::Gone(pod) => {
                self.audit.remove(&uid(&format!("u-{pod}")));
                self.plain.pods.remove(&pod);
            }
            ConflictStep::Gpus {
                node: on,
                totals,
                lost,
                reported,
            } => {
                let device = |(index, total): (usize, &u64)| {
                    let index = index as u32;
                    let uuid = if reported {
                        gpu(&format!("GPU-{index}"))
                    } else {
                        GpuUuid::from_index(index)
                    };
                    let health = if lost && index == 0 {
                        Health::Lost
                    } else {
                        Health::Healthy
                    };
                    Device {
                        health,
                        ..whole_gpu(uuid, index, Bytes(*total))
                    }
                };
                self.plain
                    .devices
                    .insert(on, totals.iter().enumerate().map(device).collect());
                // A node is checked again when it changes; a change of its GPUs alone waits for its turn.
                self.audit.queue.add(&node(&format!("n-{on}")));
            }
            ConflictStep::Look(later) => {
                self.plain.now += later;
                self.run_audit();
                return Some(self.plain.run_audit());
            }
        }
        None
    }

    fn run_audit(&mut self) {
        let now = Moment(self.plain.now);
        let due = self.audit.due(now);
        let devices = |name: &NodeName| {
            let number = name.as_str().trim_start_matches("n-").parse().unwrap();
            self.plain
                .devices
                .get(&number)
                .cloned()
                .unwrap_or_default()
                .into()
        };
        let nodes: Vec<_> = due
            .into_iter()
            .map(|name| (name.clone(), devices(&name)))
            .collect();
        self.audit.check_nodes(&nodes, now);
    }

    fn counted(&self) -> BTreeSet<ConflictRow> {
        let row = |over_allocation: &Arc<OverAllocation>| {
            let pods = over_allocation
                .parties
                .iter()
                .map(|party| party.uid.to_string())
                .collect();
            let sum = over_allocation
                .parties
                .iter()
                .map(|party| party.bytes.0)
                .sum();
            (
                over_allocation.kind,
                over_allocation.node.to_string(),
                over_allocation.gpu.to_string(),
                pods,
                sum,
            )
        };
        self.audit.confirmed().map(row).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn the_audit_counts_the_conflicts_that_brute_force_finds(steps in proptest::collection::vec(step(), 1..60)) {
        // No nodes in turn: a conflict is found only because something changed.
        let mut both = Both::with_pace(AuditPace { changed: usize::MAX, in_turn: 0 });
        for step in steps {
            if let Some(expected) = both.step(step) {
                prop_assert_eq!(both.counted(), expected);
                for &kind in OverAllocationKind::VARIANTS {
                    let counted = both.counted().iter().filter(|row| row.0 == kind).count();
                    prop_assert_eq!(both.audit.count(kind), counted);
                }
            }
        }
    }

    #[test]
    fn checking_one_node_at_a_time_finds_the_same_conflicts_once_nothing_changes(
        steps in proptest::collection::vec(step(), 1..40),
    ) {
        let mut both = Both::with_pace(AuditPace { changed: 1, in_turn: 1 });
        for step in steps {
            both.step(step);
        }
        for _ in 0..12 {
            both.plain.now += 60_000;
            both.run_audit();
            both.plain.run_audit();
        }
        prop_assert_eq!(both.counted(), both.plain.run_audit());
        // Nothing is stored for deleted pods.
        prop_assert!(both.audit.nodes.values().all(|on| !on.pods.is_empty()));
    }

    #[test]
    fn an_evicted_pod_has_not_started_and_is_in_a_proven_conflict(
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        let mut both = Both::with_pace(AuditPace { changed: usize::MAX, in_turn: 0 });
        for step in steps {
            both.step(step);
            for victim in both.audit.victims(Moment(both.plain.now)) {
                let observed = &both.audit.nodes[&victim.node].pods[&victim.uid];
                let grant = observed.grant().unwrap();
                prop_assert!(!grant.has_started && !grant.is_leaving && observed.key == victim.key);
                let of = both.audit.involving(&victim.uid);
                let conflict = of.iter().find(|conflict| conflict.gpu == victim.gpu).unwrap();
                // The GPUs' capacities were not recorded, so only exclusivity proves a conflict.
                prop_assert_eq!(conflict.kind, OverAllocationKind::ExclusiveShared);
                prop_assert!(conflict.parties.iter().any(|party| party.key == victim.remaining_pod));
            }
        }
    }
}

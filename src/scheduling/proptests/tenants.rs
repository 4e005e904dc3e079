//! Random histories under policies with tenants, class exclusions, and pools; the policy changes now and then. The oracle sums
//! every tenant's usage from the pods alone.

use super::{assert_same, stored_and_loaded};
use crate::audit::ledger::audit;
use crate::evicting::{BudgetRules, cheapest_victims};
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::ledger::QuotaStatus;
use crate::ledger::{
    AssumeResult, Ledger, ObservedPhase, ObservedWaiting, PodObservation, PodPhase, PodState,
};
use crate::policy::{Borrowing, Class, Match, Policy, Pool, Preemptibility, Reclaim, Tenant};
use crate::testkit::numbered::{key, node_name, uid};
use crate::testkit::{demand_of, unit_gpu, with_namespace};
use crate::units::{Bytes, Millis, Moment};
use crate::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::node::NodeKind;
use crate::vocabulary::placement::Reservation;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const NAMESPACES: [&str; 4] = ["red", "blue", "green", "nobody's"];

#[derive(Debug, Clone)]
enum TenantStep {
    Arrive {
        pod: u8,
        namespace: usize,
        vram: u64,
        sharing: Sharing,
        priority: i32,
    },
    Assume {
        pod: u8,
        node: u8,
    },
    Confirm(u8),
    /// A bound pod shows that it has run for so many seconds.
    Ran {
        pod: u8,
        seconds: u64,
    },
    Release(u8),
    Hold {
        pod: u8,
        node: u8,
    },
    Policy(usize),
    Tick(u64),
    /// A copy is kept from here on.
    Copy,
    /// A pod leaves the copy.
    ReleaseOnCopy(u8),
}

fn step() -> impl Strategy<Value = TenantStep> {
    let (pod, node) = (0u8..16, 0u8..3);
    let sharing = prop_oneof![5 => Just(Sharing::Shared), 1 => Just(Sharing::Exclusive)];
    prop_oneof![
        6 => (pod.clone(), 0usize..4, 1u64..60, sharing, -2i32..3).prop_map(
            |(pod, namespace, vram, sharing, priority)| TenantStep::Arrive { pod, namespace, vram, sharing, priority }
        ),
        8 => (pod.clone(), node.clone()).prop_map(|(pod, node)| TenantStep::Assume { pod, node }),
        6 => pod.clone().prop_map(TenantStep::Confirm),
        4 => (pod.clone(), 0u64..5000).prop_map(|(pod, seconds)| TenantStep::Ran { pod, seconds }),
        1 => pod.clone().prop_map(TenantStep::Release),
        4 => (pod.clone(), node).prop_map(|(pod, node)| TenantStep::Hold { pod, node }),
        1 => Just(TenantStep::Copy),
        1 => pod.prop_map(TenantStep::ReleaseOnCopy),
        1 => (0usize..3).prop_map(TenantStep::Policy),
        1 => (1u64..2000).prop_map(|seconds| TenantStep::Tick(seconds * 1000)),
    ]
}

/// Three policies with different rights.
fn policy(n: usize) -> Policy {
    let of = |namespace: &str| Match {
        namespaces: vec![namespace.into()],
        ..Match::default()
    };
    let class = |name: &str, shares_with: Option<&[&str]>, min_runtime| Class {
        matches: of(name),
        eviction: Preemptibility::ForHigherPriority,
        engine: false,
        shares_with: shares_with.map(|names| names.iter().map(|&name| name.into()).collect()),
        min_runtime: Millis::seconds(min_runtime),
        ..Class::new(name)
    };
    let others = Class {
        engine: false,
        eviction: Preemptibility::ForHigherPriority,
        ..Class::new("others")
    };
    let classes = match n {
        0 => vec![
            class("red", Some(&["red", "others"]), 0),
            class("blue", None, 900),
            others,
        ],
        1 => vec![class("blue", Some(&[]), 0), class("red", None, 0), others],
        _ => vec![others],
    };
    let tenant = |name: &str, vram, limit| Tenant {
        guarantee: TenantUsage {
            vram: Bytes(vram),
            milli_gpus: u64::MAX,
        },
        limit: TenantLimit {
            vram: limit,
            milli_gpus: None,
        },
        ..Tenant::new(name, &[name])
    };
    let tenants = match n {
        0 => vec![
            tenant("red", 100, Some(Bytes(150))),
            tenant("blue", 60, None),
        ],
        1 => vec![
            Tenant {
                borrowing: Borrowing::Never,
                ..tenant("blue", 90, None)
            },
            Tenant {
                reclaim: Reclaim::Never,
                weight: 3,
                ..tenant("red", 50, Some(Bytes(90)))
            },
            Tenant {
                limit: TenantLimit {
                    vram: None,
                    milli_gpus: Some(1500),
                },
                ..tenant("green", 0, None)
            },
        ],
        _ => vec![],
    };
    let pool = Pool {
        selector: [("of".to_owned(), "red".to_owned())].into(),
        classes: (n == 0).then(|| vec!["red".into()]),
        ..Pool::new("red")
    };
    let policy = Policy::default()
        .with_classes(classes)
        .unwrap()
        .with_tenants(tenants)
        .unwrap();
    policy.with_pools(vec![pool]).unwrap()
}

fn demand(policy: &Policy, namespace: usize, vram: u64, sharing: Sharing, priority: i32) -> Demand {
    with_namespace(
        demand_of(vram, 1, sharing, priority),
        NAMESPACES[namespace],
        policy,
    )
}

fn new_ledger(policy: Policy) -> Ledger {
    let mut ledger = Ledger::new(Arc::new(policy));
    for node in 0..3 {
        ledger.set_node(&node_name(node), NodeKind::Stowage, None);
        let of = if node == 0 { "red" } else { "all" };
        ledger.set_labels(&node_name(node), [("of".to_owned(), of.to_owned())].into());
        ledger
            .report_devices(
                &node_name(node),
                (0..2).map(|index| unit_gpu(node, index)).collect(),
            )
            .unwrap();
    }
    ledger
}

struct TenantFixture {
    ledger: Ledger,
    now: Moment,
    /// One that was made of it earlier, and went on by itself.
    copy: Option<Box<Self>>,
}

/// What a bound, assumed or reserved pod uses: 90 of 100 are allocatable on each GPU.
fn used(entry: &PodState) -> Option<(u64, u64)> {
    let is_here = entry.node().is_some() || entry.reservation().is_some();
    let vram = if entry.demand.sharing == Sharing::Exclusive {
        90
    } else {
        entry.demand.per_gpu.0
    };
    is_here.then_some((vram, (vram * 1000).div_ceil(90)))
}

impl TenantFixture {
    fn apply(&mut self, step: &TenantStep) {
        self.ledger.set_now(self.now);
        match *step {
            TenantStep::Arrive {
                pod,
                namespace,
                vram,
                sharing,
                priority,
            } => {
                if self.ledger.pod_state(&uid(pod)).is_none() {
                    let demand = demand(self.ledger.policy(), namespace, vram, sharing, priority);
                    let key = key(pod);
                    let state = ObservedPhase::Waiting(ObservedWaiting::default());
                    self.ledger.observe_pod(PodObservation {
                        uid: uid(pod),
                        key,
                        demand,
                        state,
                        observed: None,
                    });
                }
            }
            TenantStep::Assume { pod, node } => {
                let had_free_vram = self
                    .ledger
                    .pod_state(&uid(pod))
                    .is_some_and(|entry| entry.reservation().is_some());
                if let Ok(AssumeResult::New(_)) = self.ledger.assume(&uid(pod), &node_name(node)) {
                    self.check_promise(&uid(pod), &node_name(node), had_free_vram);
                }
            }
            TenantStep::Confirm(pod) => {
                let entry = self
                    .ledger
                    .pod_state(&uid(pod))
                    .filter(|entry| entry.is_assumed())
                    .cloned();
                if let Some(entry) = entry {
                    self.ledger
                        .confirm(&uid(pod), entry.node().unwrap(), entry.devices().cloned());
                }
            }
            TenantStep::Ran { pod, seconds } => {
                let entry = self.ledger.pod_state(&uid(pod)).cloned();
                if let Some((entry, bound)) = entry
                    .as_ref()
                    .and_then(|entry| Some((entry, entry.bound()?)))
                {
                    let (node, devices) = (bound.node.clone(), bound.devices.clone());
                    let ran = Some(Millis::seconds(seconds));
                    let state = ObservedPhase::Bound {
                        node,
                        devices,
                        starting: false,
                        ran,
                    };
                    let (key, demand) = (entry.key.clone(), entry.demand.clone());
                    self.ledger.observe_pod(PodObservation {
                        uid: uid(pod),
                        key,
                        demand,
                        state,
                        observed: None,
                    });
                }
            }
            TenantStep::Release(pod) => {
                self.ledger.release(&uid(pod));
            }
            TenantStep::Hold { pod, node } => self.reserve(pod, node),
            TenantStep::Policy(n) => drop(self.ledger.set_policy(policy(n))),
            TenantStep::Tick(millis) => {
                self.now = self.now + Millis(millis);
                self.ledger.expire(self.now);
            }
            TenantStep::Copy => {
                self.copy = Some(Box::new(Self {
                    ledger: self.ledger.scratch(),
                    now: self.now,
                    copy: None,
                }));
            }
            TenantStep::ReleaseOnCopy(pod) => {
                if let Some(copy) = &mut self.copy {
                    copy.ledger.release(&uid(pod));
                }
            }
        }
    }

    fn tenant_of(&self, demand: &Demand) -> Option<Tenant> {
        let of = |tenant: &&Tenant| tenant.namespaces.contains(&demand.traits.namespace);
        self.ledger.policy().tenants().iter().find(of).cloned()
    }

    fn class_of(&self, demand: &Demand) -> Class {
        self.ledger.policy().class(demand.class).clone()
    }

    /// What all pods of a tenant use, summed from nothing but the pods.
    fn sum_of(&self, tenant: &Tenant) -> (u64, u64) {
        let entries = self.ledger.pod_states();
        let its = entries
            .values()
            .filter(|entry| tenant.namespaces.contains(&entry.demand.traits.namespace));
        its.filter_map(|entry| used(entry))
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// A pod was just given a GPU: its tenant stays within its limit, its class is admitted, and no class exclusion is violated.
    fn check_promise(&self, uid: &PodUid, node: &NodeName, had_free_vram: bool) {
        let entries = self.ledger.pod_states();
        let entry = entries[uid];
        // A reservation from before the policy changed is kept.
        if had_free_vram {
            return;
        }
        if let Some(tenant) = self.tenant_of(&entry.demand) {
            let (vram, milli_gpus) = self.sum_of(&tenant);
            let borrows = tenant.borrowing == Borrowing::Allowed;
            assert!(
                tenant.limit.vram.is_none_or(|limit| vram <= limit.0),
                "{vram} of {tenant:?}"
            );
            assert!(
                tenant
                    .limit
                    .milli_gpus
                    .is_none_or(|limit| milli_gpus <= limit),
                "{milli_gpus} of {tenant:?}"
            );
            assert!(
                borrows || vram <= tenant.guarantee.vram.0,
                "{vram} of {tenant:?}"
            );
        }
        let mine = self.class_of(&entry.demand);
        let policy = self.ledger.policy();
        if *node == node_name(0) {
            let admitted = &policy.pools()[0].classes;
            assert!(
                admitted
                    .as_ref()
                    .is_none_or(|names| names.contains(&mine.name)),
                "{}",
                mine.name
            );
        }
        let gpus: BTreeSet<&GpuUuid> = entry.devices().unwrap().iter().collect();
        for (_, other) in entries.iter().filter(|(other, _)| **other != uid) {
            let shares = other
                .devices()
                .is_some_and(|devices| devices.iter().any(|uuid| gpus.contains(uuid)));
            let theirs = self.class_of(&other.demand);
            let agree = mine.shares_with(&theirs.name) && theirs.shares_with(&mine.name);
            assert!(!shares || agree, "{} beside {}", mine.name, theirs.name);
        }
    }

    fn reserve(&mut self, pod: u8, node: u8) {
        let Some(demand) = self
            .ledger
            .pod_state(&uid(pod))
            .map(|entry| entry.demand.clone())
        else {
            return;
        };
        let preemptor = self.ledger.preemptor(&uid(pod));
        let Some(candidate) = self
            .ledger
            .candidates_for(&preemptor, [&node_name(node)])
            .pop()
        else {
            return;
        };
        let guaranteed = self.guaranteed();
        for potential in &candidate.potential_victims {
            let victim = self.ledger.pod_state(&potential.uid).unwrap();
            let PodPhase::Bound(bound) = &victim.phase else {
                panic!("a victim is bound")
            };
            assert!(victim.demand.priority < demand.priority);
            assert!(self.now.since(bound.started) >= self.class_of(&victim.demand).min_runtime);
            let (mine, theirs) = (self.tenant_of(&demand), self.tenant_of(&victim.demand));
            let is_own = mine.as_ref().map(|t| &t.name) == theirs.as_ref().map(|t| &t.name);
            if !is_own {
                let mine = mine.expect("who has no guarantee takes nothing back");
                assert_eq!(mine.reclaim, Reclaim::Allowed);
                let before = self
                    .ledger
                    .pod_state(&uid(pod))
                    .and_then(used)
                    .unwrap_or_default();
                let requested = self.sum_of(&mine).0 - before.0 + demand.per_gpu.0;
                assert!(
                    requested <= mine.guarantee.vram.0,
                    "a borrower evicts nobody of another tenant"
                );
                assert!(
                    !guaranteed.contains(&potential.uid),
                    "what is guaranteed is kept"
                );
            }
            let lives_on_guarantee = guaranteed.contains(&potential.uid);
            assert_eq!(
                potential.quota_status == QuotaStatus::Guaranteed,
                lives_on_guarantee
            );
        }
        let Some(set) = cheapest_victims(&candidate, &demand, BudgetRules::Keep) else {
            return;
        };
        let view = self.ledger.node(&node_name(node)).unwrap();
        let devices = set
            .gpus
            .iter()
            .map(|gpu_index| view.devices[gpu_index].uuid.clone())
            .collect();
        let deadline = self.now + Millis::seconds(60);
        let reservation = Reservation {
            node: node_name(node),
            devices,
            victims: set.all_victims().into(),
            deadline,
        };
        let _ = self.ledger.reserve(&uid(pod), reservation);
    }

    /// Pods that live on their tenants' guarantees: those of the highest priority, then those that started first, as long as the
    /// guarantee lasts.
    fn guaranteed(&self) -> BTreeSet<PodUid> {
        let mut guaranteed = BTreeSet::new();
        for tenant in self.ledger.policy().tenants() {
            let entries = self.ledger.pod_states();
            let mut ranked: Vec<_> = entries
                .iter()
                .filter(|(_, entry)| tenant.namespaces.contains(&entry.demand.traits.namespace))
                .filter_map(|(uid, entry)| match &entry.phase {
                    PodPhase::Bound(bound) => Some((
                        -entry.demand.priority,
                        bound.started,
                        (*uid).clone(),
                        *entry,
                    )),
                    _ => None,
                })
                .collect();
            ranked.sort_by(|a, b| (a.0, a.1, &a.2).cmp(&(b.0, b.1, &b.2)));
            let mut left = tenant.guarantee.vram.0;
            for (.., uid, entry) in ranked {
                let (vram, _) = used(entry).unwrap();
                if vram <= left {
                    left -= vram;
                    guaranteed.insert(uid);
                }
            }
        }
        guaranteed
    }

    fn check(&mut self) {
        assert_eq!(audit(&self.ledger), []);
        let policy = self.ledger.policy().clone();
        for (id, tenant) in policy.tenant_ids().zip(policy.tenants()) {
            let (vram, milli_gpus) = self.sum_of(tenant);
            assert_eq!(
                self.ledger.tenant_usage(id),
                TenantUsage {
                    vram: Bytes(vram),
                    milli_gpus
                },
                "{}",
                tenant.name
            );
        }
        let (known, guaranteed) = (self.ledger.pod_states(), self.guaranteed());
        if let Some((preemptor, _)) = known.first_key_value() {
            let claim = self.ledger.preemptor(preemptor);
            for (uid, entry) in &known {
                let status = self.ledger.quota_status(uid, entry, claim.tenant_shares());
                assert_eq!(
                    status == QuotaStatus::Guaranteed,
                    guaranteed.contains(*uid),
                    "{uid}"
                );
            }
        }
        for entry in self.ledger.pod_states().values() {
            let classified = policy.classify(&entry.demand.traits);
            assert_eq!(
                (entry.demand.class, entry.demand.terms),
                (classified.class, classified.terms)
            );
        }
    }

    /// A ledger that had this policy from its beginning shows the same, as far as it depends on bound pods.
    fn check_rebuilt(&mut self) {
        let policy = self.ledger.policy().clone();
        let mut fresh = new_ledger((*policy).clone());
        fresh.set_now(self.now);
        for (uid, entry) in self.ledger.pod_states() {
            if let PodPhase::Bound(bound) = &entry.phase {
                let mut demand = entry.demand.clone();
                demand.reclassify(policy.classify(&demand.traits));
                let (node, devices) = (bound.node.clone(), bound.devices.clone());
                let state = ObservedPhase::Bound {
                    node,
                    devices,
                    starting: false,
                    ran: None,
                };
                fresh.observe_pod(PodObservation {
                    uid: uid.clone(),
                    key: entry.key.clone(),
                    demand,
                    state,
                    observed: None,
                });
            }
        }
        let bound: Vec<PodUid> = fresh.pod_states().into_keys().cloned().collect();
        let others: Vec<PodUid> = self
            .ledger
            .pod_states()
            .into_keys()
            .filter(|uid| !bound.contains(uid))
            .cloned()
            .collect();
        others.iter().for_each(|uid| {
            self.ledger.release(uid);
        });
        let shown = |ledger: &mut Ledger| -> BTreeMap<String, _> {
            let snapshot = ledger.snapshot();
            let nodes = snapshot.nodes().iter();
            nodes
                .map(|node| {
                    (
                        node.name.to_string(),
                        (node.gpus.to_vec(), node.classes, node.miscut),
                    )
                })
                .collect()
        };
        assert_eq!(shown(&mut self.ledger), shown(&mut fresh));
        for id in policy.tenant_ids() {
            assert_eq!(self.ledger.tenant_usage(id), fresh.tenant_usage(id));
        }
    }
}

proptest! {
    #[test]
    fn limits_and_class_exclusions_hold_after_any_history_and_policy_change(
        steps in prop::collection::vec(step(), 0..120),
    ) {
        let mut bench = TenantFixture { ledger: new_ledger(policy(0)), now: Moment(10_000_000), copy: None };
        for step in &steps {
            bench.apply(step);
            bench.check();
            // What one of them has found out, the other knows, as long as it holds for both.
            if let Some(copy) = &mut bench.copy {
                copy.check();
            }
        }
        bench.check_rebuilt();
    }

    #[test]
    fn a_loaded_ledger_with_tenants_is_the_one_that_was_stored(
        before in prop::collection::vec(step(), 0..80),
        after in prop::collection::vec(step(), 1..30),
    ) {
        let mut bench = TenantFixture { ledger: new_ledger(policy(0)), now: Moment(10_000_000), copy: None };
        before.iter().for_each(|step| bench.apply(step));
        let mut loaded = TenantFixture { ledger: stored_and_loaded(&bench.ledger), now: bench.now, copy: None };
        assert_same(&mut bench.ledger, &mut loaded.ledger);
        for step in &after {
            bench.apply(step);
            loaded.apply(step);
            assert_same(&mut bench.ledger, &mut loaded.ledger);
        }
    }
}

#[test]
fn reclaiming_a_guarantee_evicts_borrowers_and_never_the_reverse() {
    let mut bench = TenantFixture {
        ledger: new_ledger(policy(0)),
        now: Moment(10_000_000),
        copy: None,
    };
    let arrive = |pod, namespace, vram, priority| TenantStep::Arrive {
        pod,
        namespace,
        vram,
        sharing: Sharing::Shared,
        priority,
    };
    // Blue is guaranteed 60 and uses 150; red is guaranteed 100 and uses nothing.
    for (pod, vram) in [(0, 80), (1, 70)] {
        bench.apply(&arrive(pod, 1, vram, -1));
        bench.apply(&TenantStep::Assume { pod, node: 1 });
        bench.apply(&TenantStep::Confirm(pod));
    }
    bench.apply(&TenantStep::Tick(3_600_000));
    bench.apply(&arrive(2, 0, 60, 2));
    bench.apply(&arrive(3, 2, 60, 2));
    let candidates = |bench: &TenantFixture, pod: u8| {
        let preemptor = bench.ledger.preemptor(&uid(pod));
        bench
            .ledger
            .candidates_for(&preemptor, [&node_name(1)])
            .pop()
            .unwrap()
            .potential_victims
            .len()
    };
    assert_eq!(
        candidates(&bench, 2),
        2,
        "red takes back what blue has borrowed"
    );
    assert_eq!(candidates(&bench, 3), 0, "green has no guarantee");
}

#[test]
fn the_pod_that_turns_out_to_have_run_longest_uses_the_guarantee() {
    let mut bench = TenantFixture {
        ledger: new_ledger(policy(0)),
        now: Moment(10_000_000),
        copy: None,
    };
    // Blue is guaranteed 60.
    for pod in [0, 1] {
        let (namespace, sharing) = (1, Sharing::Shared);
        bench.apply(&TenantStep::Arrive {
            pod,
            namespace,
            vram: 40,
            sharing,
            priority: 0,
        });
        bench.apply(&TenantStep::Assume { pod, node: 1 });
        bench.apply(&TenantStep::Confirm(pod));
        bench.apply(&TenantStep::Tick(1000));
    }
    assert_eq!(bench.guaranteed(), [uid(0)].into());
    bench.check();
    bench.apply(&TenantStep::Ran {
        pod: 1,
        seconds: 60,
    });
    assert_eq!(bench.guaranteed(), [uid(1)].into());
    bench.check();
}

//! Any history of a small cluster with two replicas of Stowage: an API server that applies writes at any time, also after the
//! replica that sent them is gone, watches that lag, restarts, hand-overs, policy changes, readings, groups and budgets.
//!
//! After every step the ledgers of both replicas add up. No GPU is overallocated, by their books and by the oracle, which sees the
//! Bindings that land, as long as no write was applied after another replica began to act: what may happen then is reported by the
//! audit, and breaks nothing else.

pub mod made;
mod pages;
mod planned;
mod replica;

use made::{bind, device, epoch, pod, sleeping};
use replica::{FuzzedEvent, FuzzedReplica};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, LazyLock};
use stowage_kubernetes_objects as objects;
use stowage_policy_file::{SourceText, load};
use stowage_scheduling::audit::ledger::{Violation, audit};
use stowage_scheduling::evicting::{BudgetRules, cheapest_victims};
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::ledger::ObservedWaiting;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::testkit::oracle::Oracle;
use stowage_scheduling::units::{Bytes, Millis, Moment, Percent};
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::bind::{BindAnswer, BindAsked, BindDecision};
use stowage_scheduling::verbs::binding::{BindingFailed, BindingWritten};
use stowage_scheduling::verbs::filter::{FilterAnswer, FilterAsked, FilterDecided};
use stowage_scheduling::verbs::observe::{
    BudgetDeleted, BudgetObserved, NodeDeleted, PodReleased, ReadingReported,
};
use stowage_scheduling::verbs::request::VerbRequest;
use stowage_scheduling::verbs::tick::{
    ClockAdvanced, LeadershipBegan, LeadershipEnded, PolicySet, Tick,
};
use stowage_scheduling::verbs::wait::{ReleaseReservation, Reserve, TakeUnknownReservations};
use stowage_scheduling::vocabulary::disruption_budget::DisruptionBudget;
use stowage_scheduling::vocabulary::gpu::{Device, GpuSet};
use stowage_scheduling::vocabulary::label_selector::{Requirement, Selector};
use stowage_scheduling::vocabulary::model_tier::NodeModelSet;
use stowage_scheduling::vocabulary::node::NodeIdentity;
use stowage_scheduling::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading};
use stowage_scheduling::vocabulary::placement::Reservation;

type ApiPod = k8s_openapi::api::core::v1::Pod;

const PODS: u8 = 16;
const NODES: u8 = 4;
const REPLICAS: usize = 2;
/// Number of steps between two checks of the pages; they are also checked at the end.
const STEPS_PER_CHECK: usize = 16;

/// All have the default headroom, so that an allocation under one policy is not too much under another.
static POLICIES: LazyLock<Vec<Policy>> = LazyLock::new(|| {
    let texts = [
        "",
        "tenants: [{name: t, namespaces: [default], limit: {vram: 200Gi}}]\n",
        "classes:\n- name: few\n  match: {expression: \"pod.gpus > 1 || pod.labels['app'] == 'a1'\"}\n  mayShareWith: [few]\n- name: rest\n",
        "mode: shadow\ntelemetry: {fresh: 1s, stale: 2s, expired: refuse}\n",
    ];
    texts
        .map(|text| {
            load(&[SourceText::new(
                "p",
                format!("kind: SchedulingPolicy\n{text}"),
            )])
            .expect("it is sound")
            .policy
        })
        .into()
});

/// Write that a replica has sent and the API server has not committed yet.
enum PendingWrite {
    Binding {
        by: usize,
        term: i32,
        uid: PodUid,
        annotations: BTreeMap<String, String>,
        node: NodeName,
    },
    Reserve {
        term: i32,
        uid: PodUid,
        reservation: Reservation,
    },
}

struct FuzzedControlPlane {
    now: Moment,
    policy: usize,
    /// Number of deletions of each pod number: no UID is used again.
    deleted: [u32; PODS as usize],
    /// Objects of the API server: pods, each with the reservation in its condition.
    pods: BTreeMap<PodUid, (ApiPod, Option<Reservation>)>,
    nodes: BTreeMap<NodeName, (NodeIdentity, Vec<Device>)>,
    budget: Option<DisruptionBudget>,
    writes: VecDeque<PendingWrite>,
    oracle: Oracle,
    replicas: [FuzzedReplica; REPLICAS],
    /// Index of the leader; the term counts its changes.
    leader: usize,
    term: i32,
    /// Whether a write was in flight when another replica began to lead.
    may_over_allocate: bool,
}

/// Applies the data, four bytes a step.
pub fn ledger(data: &[u8]) {
    let mut world = FuzzedControlPlane::new();
    for (nth, step) in data.chunks_exact(4).enumerate() {
        world.apply([step[0], step[1], step[2], step[3]]);
        for replica in &mut world.replicas {
            let mut violations = audit(replica.ledger.ledger());
            if world.may_over_allocate {
                violations.retain(|one| {
                    !matches!(
                        one,
                        Violation::OverPromised { .. } | Violation::ExclusiveShared { .. }
                    )
                });
            }
            assert!(violations.is_empty(), "{step:?}: {violations:?}");
            let _ = replica.ledger.snapshot();
        }
        if !world.may_over_allocate {
            assert_eq!(world.oracle.broken_invariants(), [], "{step:?}");
        }
        if nth % STEPS_PER_CHECK == STEPS_PER_CHECK - 1 {
            world.check_pages();
        }
    }
    world.check_pages();
}

fn node_name(number: u8) -> NodeName {
    NodeName::parse(&format!("node-{}", number % NODES)).expect("a name")
}

impl FuzzedControlPlane {
    fn new() -> Self {
        let replica = || FuzzedReplica {
            ledger: Cluster::new(Arc::new(POLICIES[0].clone())),
            events: VecDeque::new(),
        };
        let mut first = replica();
        first.ledger.apply(LeadershipBegan(epoch(0)));
        let mut oracle = Oracle::default();
        for node in 0..NODES {
            // Of all machines that may have the name, less the headroom.
            let all = (0..4).flat_map(|machine| (0..4).map(move |index| (machine, index)));
            let gpus = all.map(|(machine, index)| device(node, machine, index, 0).uuid);
            let gpus = gpus.map(|gpu| (gpu, Bytes::gib(72)));
            oracle.set_node(&node_name(node), gpus);
        }
        Self {
            oracle,
            now: Moment(0),
            policy: 0,
            deleted: [0; PODS as usize],
            pods: BTreeMap::new(),
            nodes: BTreeMap::new(),
            budget: None,
            writes: VecDeque::new(),
            replicas: [first, replica()],
            leader: 0,
            term: 0,
            may_over_allocate: false,
        }
    }

    /// UID of the current pod with this number.
    fn uid(&self, number: u8) -> PodUid {
        let number = number % PODS;
        PodUid::parse(&format!(
            "uid-{number}-{}",
            self.deleted[usize::from(number)]
        ))
        .expect("a name")
    }

    fn apply(&mut self, [verb, pod, node, amount]: [u8; 4]) {
        let uid = self.uid(pod);
        let name = node_name(node);
        let (now, acting) = (self.now, self.leader);
        self.replicas
            .iter_mut()
            .for_each(|replica| replica.ledger.apply(ClockAdvanced(now)));
        match verb {
            220..=237 => {
                return self.plan(1 + usize::from(pod % 4), |race| {
                    race.commit_write(usize::from(node), amount)
                });
            }
            238.. => return self.preempt(&uid),
            _ => {}
        }
        let ledger = &mut self.replicas[acting].ledger;
        match verb % 22 {
            0 | 1 => self.arrive(pod, amount),
            2..=4 => self.assume(&uid, &name),
            5 | 6 => self.commit_write(usize::from(pod), amount),
            7 => self.drop_write(usize::from(pod)),
            8 => self.reserve(&uid, &name),
            9 => {
                self.pods.remove(&uid);
                self.oracle.end(&uid);
                self.deleted[usize::from(pod % PODS)] += 1;
                self.broadcast(FuzzedEvent::Gone(uid));
            }
            10 => self.advance(Millis(u64::from(amount) * 500)),
            11 | 12 => self.set_node(name, node, amount),
            13 => self.set_policy(usize::from(amount)),
            14 => self.report_reading(&name, pod, amount),
            15 => self.edit_pod(&uid, node, amount),
            16 => self.set_budget(amount),
            17 => self.restart(usize::from(amount) % REPLICAS),
            18 => self.hand_over(amount),
            19 => self.deliver(usize::from(amount) % REPLICAS, usize::from(pod) + 1),
            20 => {
                let Some(pod) = ledger.ledger().pod_state(&uid) else {
                    return;
                };
                let request = VerbRequest {
                    uid: uid.clone(),
                    key: pod.key.clone(),
                    demand: pod.demand.clone(),
                    waiting: ObservedWaiting::default(),
                    disruption: None,
                };
                let snapshot = ledger.apply(FilterAsked(request)).snapshot;
                if let Some(view) = snapshot
                    .node(name.as_str())
                    .filter(|view| !view.devices.is_empty())
                {
                    let place = usize::from(amount) % view.devices.len();
                    let (node, devices) = (view.name.clone(), view.uuids(GpuSet::single(place)));
                    let answer = FilterAnswer::Offered { node, devices };
                    ledger.apply(FilterDecided { uid, answer });
                }
            }
            _ => {
                ledger.apply(ReleaseReservation(uid.clone()));
                self.end_reservation(&uid);
            }
        }
    }

    /// Sets the pod's condition to say that its reservation has ended.
    fn end_reservation(&mut self, uid: &PodUid) {
        if let Some((_, reservation)) = self.pods.get_mut(uid) {
            *reservation = None;
        }
        self.broadcast_pod(uid);
    }

    fn broadcast(&mut self, event: FuzzedEvent) {
        self.replicas
            .iter_mut()
            .for_each(|replica| replica.events.push_back(event.clone()));
    }

    fn broadcast_pod(&mut self, uid: &PodUid) {
        if let Some((pod, reservation)) = self.pods.get(uid) {
            self.broadcast(FuzzedEvent::Pod(Box::new(pod.clone()), reservation.clone()));
        }
    }

    fn arrive(&mut self, number: u8, amount: u8) {
        let uid = self.uid(number);
        if self.pods.contains_key(&uid) {
            return;
        }
        self.pods
            .insert(uid.clone(), (pod(uid.as_str(), number, amount), None));
        self.broadcast_pod(&uid);
        // A filter request brings it to the one that acts before its watch does.
        if amount >= 128 {
            let (pod, reservation) = &self.pods[&uid];
            self.replicas[self.leader].observe_pod(pod, reservation.clone());
        }
    }

    fn assume(&mut self, uid: &PodUid, node: &NodeName) {
        let (by, term) = (self.leader, self.term);
        let ledger = &mut self.replicas[by].ledger;
        let Some(asked) = BindAsked::for_pod(ledger.ledger(), uid, node) else {
            return;
        };
        let Ok(BindAnswer::Write(BindDecision {
            placement,
            is_new: true,
            ..
        })) = ledger.apply(asked)
        else {
            return;
        };
        let entry = ledger.ledger().pod_state(uid).expect("it was just assumed");
        let epoch = epoch(term);
        let binding = objects::binding(
            &entry.key,
            uid,
            &entry.demand,
            &placement,
            Some("nvidia.com/gpu"),
            &epoch,
        );
        let annotations = binding.metadata.annotations.unwrap_or_default();
        let (uid, node) = (uid.clone(), node.clone());
        self.writes.push_back(PendingWrite::Binding {
            by,
            term,
            uid,
            annotations,
            node,
        });
    }

    fn reserve(&mut self, uid: &PodUid, node: &NodeName) {
        let (now, term) = (self.now, self.term);
        let ledger = &mut self.replicas[self.leader].ledger;
        let Some(demand) = ledger
            .ledger()
            .pod_state(uid)
            .map(|entry| entry.demand.clone())
        else {
            return;
        };
        let Some(room) = ledger
            .ledger()
            .candidates_for(&ledger.ledger().preemptor(uid), [node])
            .pop()
        else {
            return;
        };
        let Some(set) = cheapest_victims(&room, &demand, BudgetRules::Keep) else {
            return;
        };
        let devices = &ledger
            .ledger()
            .node(node)
            .expect("the node has room")
            .devices;
        let devices = set
            .gpus
            .iter()
            .map(|place| devices[place].uuid.clone())
            .collect();
        let deadline = now + Millis::seconds(30);
        let reservation = Reservation {
            node: node.clone(),
            devices,
            victims: set.all_victims().into(),
            deadline,
        };
        // Refused if the pod does not wait, or has a reservation already.
        if ledger
            .apply(Reserve {
                uid: uid.clone(),
                reservation: reservation.clone(),
            })
            .is_ok()
        {
            self.writes.push_back(PendingWrite::Reserve {
                term,
                uid: uid.clone(),
                reservation,
            });
        }
    }

    /// Commits a write. Its answer reaches the process that sent it, if that still runs and `amount` is even.
    fn commit_write(&mut self, index: usize, amount: u8) {
        if self.writes.is_empty() {
            return;
        }
        let write = self
            .writes
            .remove(index % self.writes.len())
            .expect("there is one");
        let (PendingWrite::Binding { term, .. } | PendingWrite::Reserve { term, .. }) = &write;
        let is_late = *term != self.term;
        match write {
            PendingWrite::Reserve {
                uid, reservation, ..
            } => {
                let Some((pod, held)) = self.pods.get_mut(&uid) else {
                    return;
                };
                if pod
                    .spec
                    .as_ref()
                    .is_some_and(|spec| spec.node_name.is_none())
                {
                    *held = Some(reservation);
                }
                self.broadcast_pod(&uid);
            }
            PendingWrite::Binding {
                by,
                uid,
                annotations,
                node,
                ..
            } => {
                if let Some((pod, reservation)) = self.pods.get_mut(&uid) {
                    bind(pod, reservation, &node, annotations);
                    let key = objects::identity(pod).expect("it has names").1;
                    let bound = objects::audited_binding(pod, &key).expect("it has a node");
                    self.oracle.observe(&uid, bound);
                }
                self.broadcast_pod(&uid);
                if amount.is_multiple_of(2) && !is_late {
                    self.answer_binding(by, &uid);
                }
            }
        }
    }

    /// Answers a Binding, or a read of its pod: bound here, bound elsewhere, or gone.
    fn answer_binding(&mut self, by: usize, uid: &PodUid) {
        let ledger = &mut self.replicas[by].ledger;
        let bound = self.pods.get(uid).map(|(pod, _)| {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
            (node, objects::recorded_devices(pod))
        });
        match bound {
            None => ledger.apply(PodReleased(uid.clone())),
            Some((Some(node), devices)) => {
                ledger.apply(BindingWritten {
                    uid: uid.clone(),
                    node: NodeName::parse(&node).expect("a name"),
                    devices,
                });
            }
            Some((None, _)) => {}
        }
    }

    /// Drops a write. The process that sent it learns so, if it still runs.
    fn drop_write(&mut self, index: usize) {
        if self.writes.is_empty() {
            return;
        }
        match self
            .writes
            .remove(index % self.writes.len())
            .expect("there is one")
        {
            PendingWrite::Binding { by, term, uid, .. } if term == self.term => {
                self.replicas[by].ledger.apply(BindingFailed(uid.clone()))
            }
            PendingWrite::Reserve { term, uid, .. } if term == self.term => {
                self.replicas[self.leader]
                    .ledger
                    .apply(ReleaseReservation(uid.clone()));
            }
            _ => {}
        }
    }

    fn advance(&mut self, time: Millis) {
        self.now = self.now + time;
        let ledger = &mut self.replicas[self.leader].ledger;
        let mut ended = ledger.apply(Tick {
            now: self.now,
            is_leading: true,
        });
        // A reservation of another leader that this one did not adopt is ended by a write.
        ended.extend(ledger.apply(TakeUnknownReservations));
        self.replicas[(self.leader + 1) % REPLICAS]
            .ledger
            .apply(Tick {
                now: self.now,
                is_leading: false,
            });
        ended.iter().for_each(|uid| self.end_reservation(uid));
    }

    fn set_node(&mut self, name: NodeName, number: u8, amount: u8) {
        if amount == 0 {
            self.nodes.remove(&name);
            self.replicas
                .iter_mut()
                .for_each(|replica| replica.ledger.apply(NodeDeleted(name.clone())));
            return;
        }
        // Now and then another machine takes the name.
        let machine = amount / 64;
        let identity = NodeIdentity {
            uid: format!("node-uid-{machine}").into(),
            machine: None,
            created: None,
        };
        let devices: Vec<Device> = (0..u32::from(amount % 5))
            .map(|index| device(number, machine, index, amount))
            .collect();
        self.nodes
            .insert(name.clone(), (identity.clone(), devices.clone()));
        for replica in &mut self.replicas {
            replica.observe_node(&name, identity.clone(), devices.clone());
        }
    }

    fn set_policy(&mut self, policy: usize) {
        self.policy = policy % POLICIES.len();
        for replica in &mut self.replicas {
            replica.ledger.apply(PolicySet {
                policy: POLICIES[self.policy].clone(),
                prepared: None,
            });
        }
    }

    fn report_reading(&mut self, name: &NodeName, pod: u8, amount: u8) {
        let Some((_, devices)) = self.nodes.get(name) else {
            return;
        };
        let uid = self.uid(pod);
        let gpu = |device: &Device| GpuReading {
            uuid: device.uuid.clone(),
            used: (!amount.is_multiple_of(7)).then(|| Bytes::gib(u64::from(amount % 90))),
            attributed: vec![(uid.clone(), Bytes::gib(u64::from(amount % 50)))],
            engine_load: EngineLoad::new(Percent::new(amount % 101), Some(u32::from(amount))),
        };
        let reading = NodeReading {
            sampled: self.now.before(Millis(u64::from(amount) * 100)),
            gpus: devices.iter().map(gpu).collect(),
            holdings: NodeModelSet::default(),
            engines: devices
                .iter()
                .map(|device| sleeping(&uid, device, amount))
                .collect(),
            ..NodeReading::default()
        };
        self.replicas.iter_mut().for_each(|replica| {
            replica.ledger.apply(ReadingReported {
                node: name.clone(),
                reading: reading.clone().into(),
            });
        });
    }

    /// Edits the mutable parts of the pod, as its owner would.
    fn edit_pod(&mut self, uid: &PodUid, group: u8, amount: u8) {
        let Some((pod, _)) = self.pods.get_mut(uid) else {
            return;
        };
        let labels = pod.metadata.labels.get_or_insert_default();
        labels.insert("app".into(), format!("a{}", amount % 3));
        labels.insert(
            "jobset.sigs.k8s.io/jobset-name".into(),
            format!("set-{}", group % 3),
        );
        let annotations = pod.metadata.annotations.get_or_insert_default();
        annotations.insert(
            "karpenter.sh/do-not-disrupt".into(),
            amount.is_multiple_of(4).to_string(),
        );
        annotations.insert(
            "stowage.dev/exclusive".into(),
            amount.is_multiple_of(5).to_string(),
        );
        if amount >= 200 {
            pod.metadata.deletion_timestamp = serde_json::from_str("\"2026-01-01T00:00:00Z\"").ok();
        }
        self.broadcast_pod(uid);
    }

    fn set_budget(&mut self, amount: u8) {
        let selector = Selector::All(vec![Requirement::equals("app", "a1")]);
        let allowed = u32::from(amount % 3);
        let budget = DisruptionBudget {
            namespace: "default".into(),
            name: "b".into(),
            selector,
            allowed,
            unhealthy_may_go: false,
        };
        self.budget = (amount < 200).then_some(budget);
        for replica in &mut self.replicas {
            match &self.budget {
                Some(budget) => replica.ledger.apply(BudgetObserved(budget.clone())),
                None => replica.ledger.apply(BudgetDeleted {
                    namespace: "default".to_owned(),
                    name: "b".to_owned(),
                }),
            }
        }
    }

    /// Restarts a process, which begins with what the API server has.
    fn restart(&mut self, place: usize) {
        let replica = &mut self.replicas[place];
        replica.ledger = Cluster::new(Arc::new(POLICIES[self.policy].clone()));
        replica.ledger.apply(ClockAdvanced(self.now));
        self.relist(place);
        if place == self.leader {
            // It acts again, and nothing of the process before it may land.
            self.begin_leading(place, 0);
        }
    }

    /// Makes the other replica the leader, after it has relisted. By the write times, no write of its predecessor is in flight any
    /// more; `amount` may override that.
    fn hand_over(&mut self, amount: u8) {
        self.begin_leading((self.leader + 1) % REPLICAS, amount);
    }

    fn begin_leading(&mut self, place: usize, amount: u8) {
        while amount < 128 && !self.writes.is_empty() {
            match amount % 2 {
                0 => self.commit_write(0, 1),
                _ => drop(self.writes.pop_front()),
            }
        }
        // While a write of its predecessor is pending, its result is unknown.
        self.may_over_allocate |= !self.writes.is_empty();
        self.settle_bindings(self.leader);
        self.replicas[self.leader].ledger.apply(LeadershipEnded);
        self.leader = place;
        self.term += 1;
        self.relist(place);
        self.replicas[place]
            .ledger
            .apply(LeadershipBegan(epoch(self.term)));
    }

    /// Lets a former leader read the outcome of the Bindings that it sent.
    fn settle_bindings(&mut self, place: usize) {
        let ledger = &self.replicas[place].ledger;
        let assumed = ledger
            .ledger()
            .pod_states()
            .into_iter()
            .filter(|(_, entry)| entry.is_assumed());
        for uid in assumed.map(|(uid, _)| uid.clone()).collect::<Vec<_>>() {
            self.answer_binding(place, &uid);
            self.replicas[place]
                .ledger
                .apply(BindingFailed(uid.clone()));
        }
    }

    /// Relists into a ledger that may know some of it: what is not listed is gone.
    fn relist(&mut self, place: usize) {
        let replica = &mut self.replicas[place];
        replica.events.clear();
        let known: Vec<PodUid> = replica
            .ledger
            .ledger()
            .pod_states()
            .into_keys()
            .cloned()
            .collect();
        for uid in known.iter().filter(|uid| !self.pods.contains_key(*uid)) {
            replica.ledger.apply(PodReleased(uid.clone()));
        }
        for (name, (identity, devices)) in &self.nodes {
            replica.observe_node(name, identity.clone(), devices.clone());
        }
        for (pod, reservation) in self.pods.values() {
            replica.observe_pod(pod, reservation.clone());
        }
        self.budget
            .iter()
            .for_each(|budget| replica.ledger.apply(BudgetObserved(budget.clone())));
    }

    fn deliver(&mut self, place: usize, count: usize) {
        let replica = &mut self.replicas[place];
        for event in replica
            .events
            .drain(..count.min(replica.events.len()))
            .collect::<Vec<_>>()
        {
            match event {
                FuzzedEvent::Pod(pod, reservation) => replica.observe_pod(&pod, reservation),
                FuzzedEvent::Gone(uid) => replica.ledger.apply(PodReleased(uid.clone())),
            }
        }
    }
}

//! A cluster to which things happen from outside, and which notes every input that the core takes. An oracle sees each Binding and
//! each choice of victims.

use super::*;
use crate::planning::{EvictionRight, PlannedPlacement};
use crate::testkit::oracle::{Granted, Oracle, VictimFacts};
use crate::vocabulary::placement::Placement;
use std::collections::BTreeMap;

/// How long after it was abandoned a Binding may still be committed.
const MAX_COMMIT_DELAY: Millis = Millis::seconds(16);

/// How many GPUs a node has: so few in all that pods preempt each other, and enough on the last for the pod that wants two.
fn gpus_of(node: u8) -> std::ops::Range<u32> {
    0..1 + u32::from(node / 2)
}

/// A cluster, and every input that it was given, as text.
pub struct RecordedCluster {
    pub(crate) cluster: Cluster,
    pub(crate) inputs: Vec<String>,
    /// What was decided, as text.
    pub(crate) decisions: Vec<String>,
    /// What the next policy is prepared on, and then brought to, one after the other.
    copies: Vec<Ledger>,
    terms: i32,
    /// What is bound, or may be: from the answer of bind on, until no Binding of the pod can land.
    promises: Promises,
}

/// The oracle's side.
#[derive(Clone, Default)]
struct Promises {
    oracle: Oracle,
    /// What each pod asks for. What is promised to a pod, its later edits do not change.
    requested: BTreeMap<PodUid, Demand>,
    /// Until when a Binding without an answer may still be committed.
    may_commit_until: BTreeMap<PodUid, Moment>,
}

impl RecordedCluster {
    pub fn from_cluster(cluster: Cluster) -> Self {
        Self {
            cluster,
            inputs: Vec::new(),
            decisions: Vec::new(),
            copies: Vec::new(),
            terms: 1,
            promises: Promises::default(),
        }
    }

    pub fn with_three_nodes() -> Self {
        let mut recorded = Self::from_cluster(Cluster::new(Arc::new(lending_policy())));
        recorded.apply(LeadershipBegan(LeaderEpoch::new("lease", 1, "nonce")));
        (0..3).for_each(|node| recorded.set_node(node));
        recorded
    }

    fn apply<C: Change + Clone + Into<Input>>(&mut self, change: C) -> C::Output {
        self.inputs
            .push(serde_json::to_string(&change.clone().into()).unwrap());
        self.cluster.apply(change)
    }

    /// Prepared on the copies, if there are any.
    fn label<C: NamespaceChange + Clone + Into<Input>>(&mut self, change: C) {
        let mut copies = std::mem::take(&mut self.copies).into_iter();
        let Some(first) = copies.next() else {
            return drop(self.apply(change));
        };
        self.inputs
            .push(serde_json::to_string(&change.clone().into()).unwrap());
        let prepared = copies.fold(
            NamespacesPrepared::new(change, first),
            NamespacesPrepared::caught_up,
        );
        self.cluster.apply(prepared);
    }

    fn set_node(&mut self, node: u8) {
        let labels = Arc::default();
        let machine = FilterNode {
            name: node_name(node),
            labels,
            taints: Arc::default(),
            allocatable: ResourceList::default(),
            pods: 110,
        };
        self.apply(NodeObserved {
            machine: Some(machine),
            ..NodeObserved::new(node_name(node), NodeKind::Stowage)
        });
        let devices = gpus_of(node).map(|index| unit_gpu(node, index)).collect();
        self.apply(DevicesReported {
            node: node_name(node),
            devices,
            are_all: true,
        })
        .unwrap();
        // The default policy's headroom leaves so much of them.
        let gpus = gpus_of(node).map(|index| (unit_gpu(node, index).uuid, Bytes(90)));
        self.promises.oracle.set_node(&node_name(node), gpus);
    }

    fn request(&self, pod: u8) -> Option<VerbRequest> {
        let pod_state = self.cluster.ledger().pod_state(&uid(pod))?;
        let demand = pod_state.demand.clone();
        Some(VerbRequest {
            uid: uid(pod),
            key: key(pod),
            demand,
            waiting: ObservedWaiting::default(),
            disruption: None,
        })
    }

    /// It happens, and no promise is broken by what is decided.
    pub fn apply_event(&mut self, event: &OutsideEvent) {
        self.apply_event_to_core(event);
        let broken = self.promises.oracle.broken_invariants();
        assert_eq!(broken, [], "after {event:?}");
    }

    fn apply_event_to_core(&mut self, event: &OutsideEvent) {
        match *event {
            OutsideEvent::Arrive(pod, vram, priority) => {
                let sharing = if vram % 5 == 0 {
                    Sharing::Exclusive
                } else {
                    Sharing::Shared
                };
                let gpus = if pod == 7 { 2 } else { 1 };
                let demand = Demand {
                    model: (pod % 3 > 0).then(|| ModelId::parse("m").unwrap()),
                    images: [image(pod % 3)].into(),
                    ..demand_of(vram, gpus, sharing, priority)
                };
                let pod_state = self.cluster.ledger().pod_state(&uid(pod));
                let is_placed = pod_state.is_some_and(|pod_state| pod_state.node().is_some());
                let demand = self.promises.arrive(uid(pod), demand, is_placed);
                let state = ObservedPhase::Waiting(ObservedWaiting::default());
                let observation = PodObservation {
                    uid: uid(pod),
                    key: key(pod),
                    demand,
                    state,
                    observed: None,
                };
                self.apply(PodObserved(observation));
                // Every other pod has a claim.
                let claims = if pod % 2 == 0 {
                    Arc::default()
                } else {
                    Arc::from([Arc::from("data")])
                };
                let wants = Requirements {
                    namespace: "team".into(),
                    claims,
                    ..Requirements::default()
                };
                self.apply(FilterPodObserved {
                    uid: uid(pod),
                    pod: FilterPod::Waiting(wants),
                });
            }
            OutsideEvent::Schedule(pod) => self.schedule(pod),
            OutsideEvent::Preempt(pod) => self.preempt(pod),
            OutsideEvent::Bind(pod, node, answer) => self.bind(pod, node, answer),
            OutsideEvent::Read(pod, what) => self.read(pod, what),
            OutsideEvent::Delete(pod) => {
                self.apply(PodDeleted(uid(pod)));
                self.promises.end(&uid(pod));
            }
            OutsideEvent::Start(pod, what) => {
                let progress = match what {
                    0 => StartProgress::Untimed,
                    1 => StartProgress::Running,
                    _ => StartProgress::Ready,
                };
                let timed = self.apply(EngineStartObserved {
                    uid: uid(pod),
                    progress,
                });
                self.decisions.push(format!("{timed:?}"));
            }
            OutsideEvent::Images(node, images) => {
                let image = |n: u8| NodeImage {
                    image: image(n),
                    bytes: Bytes::gib(u64::from(n)),
                };
                let listed = |set: u8| (0..3).filter(|n| set >> n & 1 == 1).map(image).collect();
                self.apply(NodeImagesObserved {
                    node: node_name(node),
                    images: images.map(listed),
                });
            }
            OutsideEvent::Report(node, used) => {
                let gpu = |index: u32| GpuReading {
                    uuid: unit_gpu(node, index).uuid,
                    used: Some(Bytes(used)),
                    // Half of the time its pods are seen, asleep or awake.
                    attributed: self.users(node, index, used),
                    engine_load: EngineLoad::new(Percent::new(used as u8), Some(used as u32 / 4)),
                };
                let state = if used % 4 == 1 {
                    SleepState::Asleep
                } else {
                    SleepState::Awake
                };
                let sleep = (0..8)
                    .filter(|_| used % 2 == 1)
                    .map(|pod| (uid(pod), state))
                    .collect();
                let over = |pod| OverGrant {
                    pod: uid(pod),
                    granted: Bytes::ZERO,
                    used: Bytes(used),
                    ungranted: None,
                };
                // An old sample accuses no pod.
                let sampled = if used % 2 == 0 {
                    self.cluster.ledger().now()
                } else {
                    Moment::default()
                };
                let (gpus, over_grant) =
                    (gpus_of(node).map(gpu).collect(), (0..8).map(over).collect());
                let engines = (used % 3 > 0)
                    .then(|| sleeping(node, (used % 4) as u32))
                    .into_iter()
                    .collect();
                let reading = NodeReading {
                    sampled,
                    gpus,
                    engines,
                    sleep,
                    over_grant,
                    ..NodeReading::default()
                };
                self.apply(ReadingReported {
                    node: node_name(node),
                    reading: reading.into(),
                });
            }
            OutsideEvent::NodeGone(node) => {
                self.apply(NodeDeleted(node_name(node)));
                self.set_node(node);
            }
            OutsideEvent::Slice(node, generation, slices_of_pool, shared) => {
                let devices = match shared {
                    true => {
                        let uuids = DeviceUuids::Known([unit_gpu(node, 1).uuid].into());
                        PublishedDevices::Shared { terms: None, uuids }
                    }
                    false => PublishedDevices::OnNode(node_name(node)),
                };
                let slice = DeviceSlice {
                    driver: "gpu.nvidia.com".into(),
                    pool: "pool".into(),
                    generation,
                    scope: "".into(),
                    slices_of_pool,
                    devices: vec![devices],
                };
                let published = self.apply(SliceObserved {
                    name: format!("slice-{node}").into(),
                    slice,
                });
                self.decisions.push(format!("{published:?}"));
            }
            OutsideEvent::SliceGone(node) => {
                self.apply(SliceDeleted(format!("slice-{node}").into()));
            }
            OutsideEvent::Claim(is_bound) => {
                let binding = match is_bound {
                    true => ClaimBinding::Bound {
                        volume: "pv".into(),
                    },
                    false => ClaimBinding::Unusable,
                };
                let claim = VolumeClaim {
                    binding,
                    of_one_pod: false,
                };
                self.apply(StorageObserved {
                    name: "team/data".into(),
                    object: StorageObject::Claim(claim),
                });
                let object = StorageObject::Volume(VolumeTopology::default());
                self.apply(StorageObserved {
                    name: "pv".into(),
                    object,
                });
            }
            OutsideEvent::ClaimGone => {
                self.apply(StorageDeleted {
                    kind: StorageKind::Claim,
                    name: "team/data".into(),
                });
            }
            OutsideEvent::Plan => self.plan(),
            OutsideEvent::Recall(begin, end) => {
                self.apply(LoansRecalled {
                    begin: vec![uid(begin)],
                    end: vec![uid(end)],
                });
            }
            OutsideEvent::Copy => self.copies.push(self.cluster.ledger().scratch()),
            OutsideEvent::SetPolicy(shortlist) => {
                let mut policy = if shortlist % 2 == 0 {
                    lending_policy()
                } else {
                    policy_with_namespace_selectors()
                };
                policy.scoring.shortlist = shortlist;
                // Half of them keep GPUs free, and half of those only at hours that have begun or have not.
                let hours = r#"{"from": "20:00", "to": "06:00", "timeZone": "UTC"}"#;
                let window: Window = serde_json::from_str(hours).unwrap();
                let when = if shortlist % 4 == 0 {
                    vec![window.clone()]
                } else {
                    Vec::new()
                };
                let rule = SpareRule {
                    gpus: shortlist.into(),
                    model: None,
                    pool: None,
                    when,
                };
                policy.planning.spare = (shortlist % 2 == 0).then_some(rule).into_iter().collect();
                policy.planning.lending.after = Millis::seconds(1);
                policy.loading.init = Millis::seconds(u64::from(shortlist % 2) + 1);
                if shortlist % 2 == 0 {
                    (policy.overuse, policy.overuse_after) =
                        (OveruseRule::Evict, Millis::seconds(1));
                }
                let policy = policy
                    .with_open_windows((shortlist > 4).then_some(window).into_iter().collect());
                let prepared =
                    std::mem::take(&mut self.copies)
                        .into_iter()
                        .fold(None, |prepared, copy| match prepared {
                            None => Some(PreparedPolicy::new(copy, policy.clone())),
                            Some(prepared) => Some(PreparedPolicy::caught_up(prepared, copy)),
                        });
                let set = prepared.map_or(
                    PolicySet {
                        policy,
                        prepared: None,
                    },
                    PolicySet::from,
                );
                self.apply(set);
            }
            OutsideEvent::Label(name, Some(label)) => {
                self.label(NamespaceObserved {
                    name: namespace(name),
                    labels: labelled(label),
                });
            }
            OutsideEvent::Label(name, None) => self.label(NamespaceDeleted(namespace(name))),
            OutsideEvent::ListNamespaces(label) => {
                let all = (0..label)
                    .map(|name| (namespace(name), labelled(label)))
                    .collect();
                self.label(NamespacesListed(all));
            }
            OutsideEvent::Lead => {
                self.terms += 1;
                self.apply(LeadershipEnded);
                self.apply(LeadershipBegan(LeaderEpoch::new(
                    "lease", self.terms, "nonce",
                )));
            }
            OutsideEvent::Pass(millis) => {
                let now = self.cluster.ledger().now() + Millis(millis);
                let ended = self.apply(Tick {
                    now,
                    is_leading: true,
                });
                self.decisions.push(format!("{ended:?}"));
            }
        }
    }

    /// The pods that are bound to a GPU, each with a byte of it.
    fn users(&self, node: u8, index: u32, used: u64) -> Vec<(PodUid, Bytes)> {
        let gpu = unit_gpu(node, index).uuid;
        let node = node_name(node);
        let pods = self
            .cluster
            .ledger()
            .pods_on_node(&node)
            .filter(|_| used % 2 == 1);
        let here =
            pods.filter(|(_, pod)| pod.devices().is_some_and(|devices| devices.contains(&gpu)));
        let mut users: Vec<_> = here.map(|(uid, _)| (uid.clone(), Bytes(1))).collect();
        users.sort_unstable();
        users
    }

    fn schedule(&mut self, pod: u8) {
        let Some(request) = self.request(pod) else {
            return;
        };
        let view = self.apply(FilterAsked(request.clone()));
        let mut scores =
            ScoreCache::default().take(&view.snapshot, &view.request.demand, &view.policy);
        let names: Vec<String> = view
            .snapshot
            .nodes()
            .iter()
            .map(|node| node.name.to_string())
            .collect();
        let names = || names.iter().map(String::as_str);
        let list = filter(&view, names(), &mut scores);
        self.decisions.push(format!("{list:?}"));
        if let Some(decided) = decision_of(&view, &list) {
            return self.apply(decided);
        }
        let view = self.apply(PrioritizeAsked(request));
        let list = prioritize(&view, names());
        if let Some(first) = list.best.first() {
            self.apply(crate::verbs::filter::offer_of(&view, first));
        }
    }

    fn preempt(&mut self, pod: u8) {
        let Some(request) = self.request(pod) else {
            return;
        };
        let on = |node: u8| {
            let node = node_name(node);
            let victims = self
                .cluster
                .ledger()
                .pods_on_node(&node)
                .map(|(uid, _)| uid.to_string())
                .collect();
            OfferedNode {
                node: node.to_string(),
                victims,
                pdb_violations: 0,
            }
        };
        let offered = (0..3).map(on).collect();
        let query = PreemptAsked {
            request,
            wants: Requirements::default(),
            offered,
        };
        let Some((request, view)) = self.apply(query) else {
            return;
        };
        let decision = preempt(view.clone());
        assert_eq!(
            decision,
            preempt_examining_all(view),
            "no node is left out that could be cheapest"
        );
        self.decisions.push(format!("{decision:?}"));
        let PreemptDecision::Evict { victims, .. } = decision else {
            return self.apply(LeftToPlanner(request.uid));
        };
        let evicted: Vec<PodUid> = victims.evicted().cloned().collect();
        let decided = PreemptDecided {
            uid: request.uid.clone(),
            victims,
            policy: request.demand.classified_by,
        };
        let made = self.apply(decided);
        if made.is_ok() {
            self.check_victims("kube-scheduler", &request.uid, &evicted);
        }
        self.decisions.push(format!("{made:?}"));
    }

    fn bind(&mut self, pod: u8, node: u8, answer: BindingAnswer) {
        let answered = self.apply(BindAsked {
            uid: uid(pod),
            key: key(pod),
            node: node_name(node),
        });
        self.decisions.push(format!("{answered:?}"));
        let Ok(BindAnswer::Write(decision)) = answered else {
            return;
        };
        self.promises.bind(&uid(pod), &decision.placement);
        self.promises
            .answered(&uid(pod), answer, self.cluster.ledger().now());
        let step = self.apply(BindingAnswered {
            uid: uid(pod),
            placement: decision.placement.clone(),
            stage: BindingStage::Request {
                is_new: decision.is_new,
            },
            answer,
            max_commit_delay: MAX_COMMIT_DELAY,
        });
        if answer == BindingAnswer::Written {
            let footprint = NodeFootprint {
                node: node_name(node),
                amounts: ResourceList::default(),
                ports: Arc::default(),
                repels: Arc::default(),
                volumes: 0,
                claims_devices: pod.is_multiple_of(3),
            };
            self.apply(FilterPodObserved {
                uid: uid(pod),
                pod: FilterPod::Bound {
                    footprint,
                    successor: None,
                },
            });
        }
        self.decisions.push(format!("{step:?}"));
        let settling = self.apply(SettlingAsked {
            uid: uid(pod),
            placement: decision.placement,
        });
        self.decisions.push(format!("{settling:?}"));
    }

    fn read(&mut self, pod: u8, what: u8) {
        let Some(PodPhase::Assumed(assumed)) = self
            .cluster
            .ledger()
            .pod_state(&uid(pod))
            .map(|pod| pod.phase.clone())
        else {
            return;
        };
        let placement = assumed.placement;
        let (node, devices) = (placement.node.clone(), placement.recorded_gpus());
        let borrows = !placement.borrowed_from.is_empty();
        let shown = match what {
            0 => PodRead::Failed,
            1 => PodRead::Gone,
            2 => PodRead::Unbound,
            _ => PodRead::Bound {
                node,
                devices,
                borrows,
            },
        };
        match shown {
            PodRead::Failed => {}
            PodRead::Gone => self.promises.end(&uid(pod)),
            PodRead::Unbound => self
                .promises
                .binding_failed(&uid(pod), self.cluster.ledger().now()),
            PodRead::Bound { .. } => self.promises.bind(&uid(pod), &placement),
        }
        let (stage, max_commit_delay) = (BindingStage::Settling, MAX_COMMIT_DELAY);
        let requested_at = self.cluster.ledger().now();
        let read = BindingRead {
            uid: uid(pod),
            placement,
            stage,
            pod: shown,
            requested_at,
            max_commit_delay,
        };
        let step = self.apply(read);
        self.decisions.push(format!("{step:?}"));
    }

    fn plan(&mut self) {
        let overuse = self.apply(TakeOveruse);
        self.decisions.push(format!("{overuse:?}"));
        let pending = self.apply(TakePending { limit: 4 });
        let (scratch, generation) = (
            self.cluster.ledger().scratch(),
            self.cluster.ledger().generation(),
        );
        let filters = self.cluster.kube_filters().snapshot();
        let bounds = PlanBounds {
            free_steps: 1000,
            eviction_steps: 1000,
            max_placements: 4,
            is_stopped: &|| false,
        };
        let plan = plan_within(scratch, &filters, &pending, bounds);
        self.apply(PutBack(plan.unreached));
        for step in plan.steps {
            match step {
                PlanStep::Place(placements) => {
                    let taken = self.apply(ReservePlaces {
                        placements: placements.clone(),
                        generation,
                    });
                    let own =
                        |placement: &&PlannedPlacement| placement.by == EvictionRight::Preemption;
                    for placement in placements.iter().filter(own).filter(|_| taken.is_ok()) {
                        self.check_victims(
                            "the planner",
                            &placement.uid,
                            &placement.reservation.victims,
                        );
                    }
                    self.decisions.push(format!("{taken:?}"));
                }
                PlanStep::Requeue { uid, .. } => self.apply(PodRequeued(uid)),
                PlanStep::Wait { uid, .. } => self.apply(NoPlacementFound { uid, generation }),
            }
        }
    }

    /// Those that are there still may be evicted for the pod.
    fn check_victims(&mut self, by: &str, preemptor: &PodUid, victims: &[PodUid]) {
        let policy = self.cluster.ledger().policy();
        let request_of = |pod: &PodUid| self.promises.requested.get(pod);
        let above = request_of(preemptor).expect("it waits").priority;
        for victim in victims {
            let is_there = self.promises.oracle.placement_of(victim).is_some();
            let Some(demand) = request_of(victim).filter(|_| is_there) else {
                continue;
            };
            let class = policy.classify(&demand.traits).class;
            let facts = VictimFacts {
                priority: demand.priority,
                is_preemptible: policy.class(class).eviction == Preemptibility::ForHigherPriority,
                is_protected: false,
            };
            assert_eq!(facts.check(victim, preemptor, above), Ok(()));
            self.decisions.push(format!("{by} evicts {victim}"));
        }
    }

    /// Continues with a cluster that was stored and loaded: the world outside of it is the same.
    #[cfg(test)]
    pub fn continue_from(&mut self, stored: &Self) {
        (self.terms, self.promises) = (stored.terms, stored.promises.clone());
    }

    #[cfg(test)]
    /// The state as text.
    pub fn state(&self) -> serde_json::Value {
        serde_json::to_value(self.cluster.export()).unwrap()
    }
}

impl Promises {
    /// A pod that is placed is promised that, though no Binding of it can land before one is written again.
    fn arrive(&mut self, pod: PodUid, demand: Demand, is_placed: bool) -> Demand {
        let is_promised = is_placed || self.oracle.placement_of(&pod).is_some();
        let promised = self.requested.get(&pod).filter(|_| is_promised).cloned();
        let demand = promised.unwrap_or(demand);
        self.requested.insert(pod, demand.clone());
        demand
    }

    fn bind(&mut self, pod: &PodUid, placement: &Placement) {
        let demand = &self.requested[pod];
        let granted = Granted {
            gpus: demand.gpus,
            per_gpu: match demand.sharing {
                Sharing::Shared => demand.per_gpu,
                Sharing::Exclusive => Bytes(placement.granted.0 / u64::from(demand.gpus)),
            },
            sharing: demand.sharing,
            borrows: !placement.borrowed_from.is_empty(),
        };
        let broken = self
            .oracle
            .bind(pod, &placement.node, &placement.devices, granted);
        assert_eq!(broken, [], "{pod} is bound to {placement:?}");
    }

    fn answered(&mut self, pod: &PodUid, answer: BindingAnswer, now: Moment) {
        match answer {
            BindingAnswer::Written => drop(self.may_commit_until.remove(pod)),
            BindingAnswer::Refused => self.binding_failed(pod, now),
            BindingAnswer::Conflict | BindingAnswer::Unknown => {
                self.may_commit_until
                    .insert(pod.clone(), now + MAX_COMMIT_DELAY);
            }
        }
    }

    /// It is not bound, and is not going to be unless a Binding may still land.
    fn binding_failed(&mut self, pod: &PodUid, now: Moment) {
        if self
            .may_commit_until
            .get(pod)
            .is_none_or(|until| *until < now)
        {
            self.end(pod);
        }
    }

    fn end(&mut self, pod: &PodUid) {
        self.may_commit_until.remove(pod);
        self.oracle.end(pod);
    }
}

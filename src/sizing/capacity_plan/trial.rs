//! One trial: so many nodes, and pods that are placed on them one after the other, through the entry point by which the extender
//! places pods. Whether a pod fits, where it goes and which GPUs it gets is decided there and by kube-scheduler's filters, not
//! here.
//!
//! Pods in a trial run as soon as they are placed: no engine keeps another from starting. Every agent has just reported an idle
//! node.

use super::question::{CapacityQuestion, HOSTNAME, NodeTemplate, PodToPlace};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stowage_scheduling::ids::{GpuUuid, NodeName, PodUid};
use stowage_scheduling::kube_filters::AssumedNodeChange;
use stowage_scheduling::kube_filters::filters::{FilterReason, FilterVerdict};
use stowage_scheduling::kube_filters::requirements::{NodeFootprint, UnsupportedRule};
use stowage_scheduling::ledger::{ObservedPhase, ObservedWaiting, PodObservation};
use stowage_scheduling::placing::fit::Misfit;
use stowage_scheduling::placing::rank::{ScheduleAttempt, shortlist};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::bind::BindDecision;
use stowage_scheduling::verbs::binding::BindingWritten;
use stowage_scheduling::verbs::observe::{
    DevicesReported, FilterPod, FilterPodObserved, NodeObserved, PodObserved, PodReleased,
    ReadingReported,
};
use stowage_scheduling::verbs::request::{DecisionView, VerbRequest};
use stowage_scheduling::vocabulary::device_plugin::PluginDevices;
use stowage_scheduling::vocabulary::gpu::Device;
use stowage_scheduling::vocabulary::node::NodeKind;
use stowage_scheduling::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading};
use stowage_scheduling::vocabulary::node_signs::NodeSigns;
use stowage_scheduling::vocabulary::placement::Placement;

/// A question, and what all its trials have in common.
#[derive(Debug)]
pub(crate) struct TrialSetting<'q> {
    pub question: &'q CapacityQuestion,
    /// Names of what pods ask for beside GPUs, CPU, memory and disk.
    resources: Vec<Arc<str>>,
}

/// A node of a trial.
#[derive(Debug, Clone)]
pub(crate) struct TrialNode {
    pub name: NodeName,
    /// Index of its kind in the question.
    pub template: usize,
    pub allocator: NodeKind,
    /// Number of physical GPUs; slices are not counted.
    pub gpus: u32,
    is_empty: bool,
}

/// Nodes on which a trial may place a pod.
#[derive(Debug, Clone, Copy)]
pub enum CandidateNodes<'n> {
    /// All nodes whose GPUs Stowage hands out; the best one is taken.
    Any,
    /// These nodes, by index; the first that takes the pod is taken.
    FirstOf(&'n [usize]),
}

/// Why a pod has no place on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// One of kube-scheduler's filters refuses the node.
    Filter(FilterReason),
    /// Another pod's anti-affinity repels it, or a rule that Stowage does not support may exclude it.
    Rule(UnsupportedRule),
    /// Its GPUs cannot take the pod.
    Gpus(Misfit),
}

/// Obstacles by kind of node: of several nodes of a kind, that of one.
pub type Obstacles = BTreeMap<usize, Obstacle>;

pub struct Trial<'q> {
    setting: &'q TrialSetting<'q>,
    pub cluster: Cluster,
    nodes: Vec<TrialNode>,
    /// Placements by the pod's index in the question.
    placements: BTreeMap<usize, Placement>,
    /// By workload: the index of one of its pods, and the nodes that have pods of it.
    workloads: BTreeMap<usize, (usize, BTreeSet<usize>)>,
}

impl<'q> TrialSetting<'q> {
    pub fn new(question: &'q CapacityQuestion) -> Self {
        let amounts = question
            .pods
            .iter()
            .flat_map(|pod| pod.requirements.amounts.others.iter());
        let resources: BTreeSet<Arc<str>> = amounts.map(|(name, _)| name.clone()).collect();
        Self {
            question,
            resources: resources.into_iter().collect(),
        }
    }

    pub fn pod(&self, index: usize) -> &'q PodToPlace {
        &self.question.pods[index]
    }

    pub fn template(&self, index: usize) -> &'q NodeTemplate {
        &self.question.node_kinds[index]
    }
}

impl<'q> Trial<'q> {
    pub fn new(setting: &'q TrialSetting<'q>) -> Self {
        let cluster = Cluster::new(setting.question.policy.clone());
        Self {
            setting,
            cluster,
            nodes: Vec::new(),
            placements: BTreeMap::new(),
            workloads: BTreeMap::new(),
        }
    }

    /// Adds nodes of a kind with so many GPUs in all, which Stowage hands out: full nodes, and one with the remaining GPUs.
    pub fn add_nodes(&mut self, template: usize, gpus: u32) {
        let NodeTemplate {
            gpus: each, name, ..
        } = self.setting.template(template);
        let count = gpus.div_ceil(*each);
        let width = count.to_string().len();
        for number in 1..=count {
            let here = (*each).min(gpus - (number - 1) * each);
            self.add_node(template, &format!("{name}-{number:0width$}"), here);
        }
    }

    /// Adds a node whose GPUs a device plugin hands out as these devices.
    pub(crate) fn add_plugin_node(
        &mut self,
        template: usize,
        name: &str,
        gpus: u32,
        devices: PluginDevices,
    ) {
        self.observe_node(
            template,
            name,
            gpus,
            NodeObserved {
                plugin_devices: devices,
                ..unnamed_node(NodeKind::DevicePlugin)
            },
        );
    }

    /// Nodes in the order in which they were added.
    pub fn nodes(&self) -> &[TrialNode] {
        &self.nodes
    }

    pub fn placements(&self) -> &BTreeMap<usize, Placement> {
        &self.placements
    }

    /// Places a pod, by index in the question. Returns the index of its node, or why each kind of the candidate nodes does not take
    /// it.
    pub fn place(
        &mut self,
        index: usize,
        candidates: CandidateNodes<'_>,
    ) -> Result<usize, Obstacles> {
        let pod = self.setting.pod(index);
        let uid = uid(index);
        self.observe_pod(
            index,
            &uid,
            ObservedPhase::Waiting(ObservedWaiting::default()),
        );
        match self.choose_node(pod, &uid, candidates) {
            Ok(node) if self.bind(index, &uid, node) => Ok(node),
            Ok(_) => Err(Obstacles::new()),
            Err(obstacles) => {
                self.cluster.apply(PodReleased(uid));
                Err(obstacles)
            }
        }
    }

    fn add_node(&mut self, template: usize, name: &str, gpus: u32) {
        let node = self.observe_node(template, name, gpus, unnamed_node(NodeKind::Stowage));
        let devices = self.setting.template(template).devices(&node, gpus);
        let reading = idle_reading(&devices);
        let reported = self.cluster.apply(DevicesReported {
            node: node.clone(),
            devices: devices.into(),
            are_all: true,
        });
        debug_assert!(
            reported.is_ok(),
            "a template has no more GPUs than a node may"
        );
        self.cluster.apply(ReadingReported {
            node,
            reading: reading.into(),
        });
    }

    fn observe_node(
        &mut self,
        template: usize,
        name: &str,
        gpus: u32,
        observation: NodeObserved,
    ) -> NodeName {
        let node = NodeName::parse(name).expect("a template's name is short and printable");
        let filter_node = self
            .setting
            .template(template)
            .filter_node(&node, &self.setting.resources);
        let labels = filter_node.labels.clone();
        let allocator = observation.kind;
        self.cluster.apply(NodeObserved {
            name: node.clone(),
            labels,
            machine: Some(filter_node),
            ..observation
        });
        self.nodes.push(TrialNode {
            name: node.clone(),
            template,
            allocator,
            gpus,
            is_empty: true,
        });
        node
    }

    /// Index of the best node for the pod.
    fn choose_node(
        &mut self,
        pod: &PodToPlace,
        uid: &PodUid,
        candidates: CandidateNodes<'_>,
    ) -> Result<usize, Obstacles> {
        let indices = self.candidate_indices(candidates);
        let request = VerbRequest {
            uid: uid.clone(),
            key: pod.key.clone(),
            demand: pod.demand.clone(),
            waiting: ObservedWaiting::default(),
            disruption: None,
        };
        let view = DecisionView::take(&mut self.cluster, request);
        let (accepted, mut obstacles) = self.filter_nodes(pod, indices);
        let attempt = ScheduleAttempt {
            limit: 1,
            ..view.attempt()
        };
        // Score all at once, or one after the other.
        let chunk_size = match candidates {
            CandidateNodes::Any => accepted.len().max(1),
            CandidateNodes::FirstOf(_) => 1,
        };
        for some in accepted.chunks(chunk_size) {
            let names = some.iter().map(|node| self.nodes[*node].name.as_str());
            let list = shortlist(&view.snapshot, &view.request.demand, names, attempt);
            if let Some(best) = list.best.first() {
                return Ok(some[best.query_index]);
            }
            let refused = list.rejected.iter();
            obstacles.extend(
                refused.map(|(query_index, misfit)| (some[*query_index], Obstacle::Gpus(*misfit))),
            );
        }
        // A misfit says more than another node's filter, so it comes last and overwrites.
        Err(obstacles
            .into_iter()
            .map(|(node, why)| (self.nodes[node].template, why))
            .collect())
    }

    /// Indices of the nodes to try: those that Stowage hands out and that have pods, and the first of the empty ones that are equal,
    /// because it would be chosen of them.
    fn candidate_indices(&self, candidates: CandidateNodes<'_>) -> Vec<usize> {
        if let CandidateNodes::FirstOf(nodes) = candidates {
            return nodes.to_vec();
        }
        let mut empty = BTreeSet::new();
        let mut differs =
            |node: &TrialNode| !node.is_empty || empty.insert((node.template, node.gpus));
        let nodes = self.nodes.iter().enumerate();
        nodes
            .filter(|(_, node)| node.allocator == NodeKind::Stowage && differs(node))
            .map(|(node_index, _)| node_index)
            .collect()
    }

    /// The nodes that kube-scheduler's filters accept, and why they refuse the others.
    fn filter_nodes(
        &self,
        pod: &PodToPlace,
        offered: Vec<usize>,
    ) -> (Vec<usize>, Vec<(usize, Obstacle)>) {
        let query = self.cluster.kube_filters().query(None, &pod.requirements);
        let repelled = self.repelled_topology_values(pod);
        let (mut accepted, mut refused) = (Vec::with_capacity(offered.len()), Vec::new());
        for node in offered {
            match query.verdict(&self.nodes[node].name, &AssumedNodeChange::default()) {
                FilterVerdict::Accepts if self.is_far_from(node, &repelled) => accepted.push(node),
                FilterVerdict::Accepts => {
                    refused.push((node, Obstacle::Rule(UnsupportedRule::InterPodAffinity)));
                }
                FilterVerdict::Rejects(reason) => refused.push((node, Obstacle::Filter(reason))),
                FilterVerdict::Unsupported(rule) => refused.push((node, Obstacle::Rule(rule))),
            }
        }
        (accepted, refused)
    }

    /// By topology of the pod's own anti-affinities, the values at which there are pods that it repels. The filters know only the
    /// anti-affinities of pods that are placed.
    fn repelled_topology_values<'p>(
        &'p self,
        pod: &'p PodToPlace,
    ) -> BTreeMap<&'p str, BTreeSet<&'p str>> {
        let mut repelled: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for term in pod.requirements.repels.iter() {
            let takes = |index: usize| term.may_exclude(&self.setting.pod(index).requirements);
            let occupied_nodes = self
                .workloads
                .values()
                .filter(|(any, _)| takes(*any))
                .flat_map(|(_, nodes)| nodes);
            let values =
                occupied_nodes.filter_map(|node| self.topology_value(*node, &term.topology));
            repelled.entry(&term.topology).or_default().extend(values);
        }
        repelled
    }

    fn is_far_from(&self, node: usize, repelled: &BTreeMap<&str, BTreeSet<&str>>) -> bool {
        let is_near = |topology, values: &BTreeSet<&str>| {
            self.topology_value(node, topology)
                .is_some_and(|value| values.contains(value))
        };
        !repelled
            .iter()
            .any(|(topology, values)| is_near(topology, values))
    }

    fn topology_value(&self, node: usize, topology: &str) -> Option<&str> {
        let TrialNode { name, template, .. } = &self.nodes[node];
        match topology {
            HOSTNAME => Some(name.as_str()),
            _ => self
                .setting
                .template(*template)
                .labels
                .get(topology)
                .map(String::as_str),
        }
    }

    /// Binds the pod to the node, where it runs from now on. Returns whether it got GPUs.
    fn bind(&mut self, index: usize, uid: &PodUid, node: usize) -> bool {
        let name = self.nodes[node].name.clone();
        let Some(BindDecision { placement, .. }) = self.cluster.allocate(uid, &name) else {
            return false;
        };
        let devices = placement.recorded_gpus();
        self.cluster.apply(BindingWritten {
            uid: uid.clone(),
            node: name.clone(),
            devices: devices.clone(),
        });
        self.observe_pod(
            index,
            uid,
            ObservedPhase::Bound {
                node: name.clone(),
                devices,
                starting: false,
                ran: None,
            },
        );
        let pod = FilterPod::Bound {
            footprint: footprint(self.setting.pod(index), name),
            successor: None,
        };
        self.cluster.apply(FilterPodObserved {
            uid: uid.clone(),
            pod,
        });
        self.nodes[node].is_empty = false;
        self.placements.insert(index, placement);
        let workload = self.workloads.entry(self.setting.pod(index).workload);
        workload
            .or_insert_with(|| (index, BTreeSet::new()))
            .1
            .insert(node);
        true
    }

    fn observe_pod(&mut self, index: usize, uid: &PodUid, state: ObservedPhase) {
        let PodToPlace { key, demand, .. } = self.setting.pod(index);
        let (uid, key, demand) = (uid.clone(), key.clone(), demand.clone());
        self.cluster.apply(PodObserved(PodObservation {
            uid,
            key,
            demand,
            state,
            observed: None,
        }));
    }
}

/// UID of a pod, made of its index in the question: names may repeat.
fn uid(index: usize) -> PodUid {
    PodUid::parse(&format!("pod-{index:08}")).expect("digits are a name")
}

fn unnamed_node(kind: NodeKind) -> NodeObserved {
    let name = NodeName::parse("unnamed").expect("it is a plain word");
    NodeObserved {
        signs: NodeSigns::with_vram_limits(),
        ..NodeObserved::new(name, kind)
    }
}

/// Reading of idle GPUs.
fn idle_reading(devices: &[Device]) -> NodeReading {
    let gpu = |device: &Device| GpuReading {
        uuid: device.uuid.clone(),
        used: Some(Bytes::ZERO),
        attributed: Vec::new(),
        engine_load: EngineLoad::NONE,
    };
    NodeReading {
        gpus: devices.iter().map(gpu).collect(),
        ..NodeReading::default()
    }
}

fn footprint(pod: &PodToPlace, node: NodeName) -> NodeFootprint {
    let requirements = &pod.requirements;
    NodeFootprint {
        node,
        amounts: requirements.amounts.clone(),
        ports: requirements.ports.clone().into(),
        repels: requirements.repels.clone(),
        volumes: 0,
        claims_devices: false,
    }
}

/// Indices of the chosen GPUs among the node's devices.
pub fn gpu_indices(devices: &[Device], chosen: &[GpuUuid]) -> Vec<usize> {
    (0..devices.len())
        .filter(|gpu_index| chosen.contains(&devices[*gpu_index].uuid))
        .collect()
}

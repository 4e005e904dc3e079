//! Pods that ask a device plugin for whole GPUs or MIG slices: onto how many GPUs they go, and how those are cut.
//!
//! The kubelet picks the device, so what is found here is a node for each pod and a geometry for each GPU that together hold
//! all. First fit, in two orders: each pod goes to the first node with such devices on which the core admits it. In the end
//! all are placed once more on nodes that offer just these devices.

use super::order::PlacingOrder;
use super::question::{NodeTemplate, PodToPlace};
use super::trial::{CandidateNodes, Obstacle, Trial, TrialSetting};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use stowage_scheduling::vocabulary::device_plugin::{GpuRequest, PluginDevices, PluginResource};

/// The whole GPU, as a device plugin offers it.
const WHOLE_GPU_RESOURCE: &str = "nvidia.com/gpu";
/// Prefix of the resource names of MIG profiles.
const MIG_RESOURCE_PREFIX: &str = "nvidia.com/mig-";
/// A device count that no node reaches.
const UNLIMITED_DEVICES: u32 = 1 << 20;

/// One device that a pod asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PluginDevice {
    WholeGpu,
    /// MIG slice of this profile.
    Slice(String),
    /// Device that no described node has, such as a time-sliced share of a GPU.
    Other,
}

/// GPU of a node, and the devices of it that pods hold: each with the pod's index in the question.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PluginGpu(pub Vec<(PluginDevice, usize)>);

/// Node whose GPUs a device plugin hands out.
#[derive(Debug, Clone)]
pub(crate) struct PluginNode {
    pub template: usize,
    /// GPUs in use, one after the other; empty for an observed node, of which only counts are known.
    pub gpus: Vec<PluginGpu>,
    /// Its pods, by index in the question.
    pub pods: Vec<usize>,
    remaining: PluginDevices,
}

/// Placements of the pods that request GPUs of a device plugin.
#[derive(Debug, Clone, Default)]
pub(crate) struct PluginPlan {
    pub nodes: Vec<PluginNode>,
    /// Pods that no node takes: index in the question, and the obstacle for each kind of node.
    pub not_held: Vec<(usize, Vec<(usize, PluginObstacle)>)>,
}

/// Why a kind of node does not take a pod that requests device-plugin GPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PluginObstacle {
    #[error("{}", .0.describe())]
    Placing(Obstacle),
    #[error("a node of this kind has no {resource}")]
    NoSuchDevice { resource: String },
    #[error("the pod asks for {asked} of {resource}, and a node of this kind has at most {most}")]
    TooFew {
        resource: String,
        asked: u32,
        most: u32,
    },
    #[error("all {nodes} nodes of this kind are in use")]
    AllInUse { nodes: u32 },
}

/// The devices that a pod asks for, all of one kind; `None` for one that asks for none.
pub fn requested_devices(pod: &PodToPlace) -> Option<(&PluginResource, PluginDevice, u32)> {
    let GpuRequest::Plugin { resource, count } = &pod.demand.ask else {
        return None;
    };
    let device = match resource.as_str() {
        WHOLE_GPU_RESOURCE => PluginDevice::WholeGpu,
        // A profile with media engines is `1g.10gb+me`, which no resource may be called.
        other => other
            .strip_prefix(MIG_RESOURCE_PREFIX)
            .map_or(PluginDevice::Other, |profile| {
                PluginDevice::Slice(profile.replace(".me", "+me"))
            }),
    };
    Some((resource, device, *count))
}

/// What to do where a kind of node has no such device.
pub fn device_remedy(pod: &PodToPlace, kind: &NodeTemplate) -> String {
    let family = kind.gpu.gpu_type.and_then(|gpu| gpu.family());
    match (requested_devices(pod), family) {
        (Some((_, PluginDevice::Slice(profile), _)), Some(_)) if kind.geometry.is_some() => {
            format!("add {profile} to --mig, or leave --mig out")
        }
        (Some((_, PluginDevice::Slice(_), _)), Some(family)) => {
            format!(
                "{} has the profiles {}",
                kind.gpu.name,
                family.profiles().join(", ")
            )
        }
        (Some((_, PluginDevice::Slice(_), _)), None) => {
            "name a GPU that can be cut into MIG slices, such as A100-80GB".into()
        }
        (Some((_, PluginDevice::WholeGpu, _)), _) if kind.geometry.is_some() => {
            "leave --mig out, or ask for a slice of it".into()
        }
        _ => "ask for stowage.dev/vram: how many shares a GPU has is not known here".into(),
    }
}

/// Places these pods of the question. Of two orders the one that leaves fewer pods out, then with fewer GPUs.
pub fn plan(setting: &TrialSetting<'_>, pods: &[usize]) -> PluginPlan {
    let fitting = PluginFits::new(setting, pods);
    let orders = [PlacingOrder::DecreasingSize, PlacingOrder::Given]
        .map(|order| pods_in_order(setting, pods, order));
    let plans = orders
        .into_iter()
        .map(|order| PluginPacking::new(setting, pods).pack(&order, &fitting));
    let best = plans.min_by_key(|plan| (plan.not_held.len(), plan.gpus(setting)));
    best.map(|plan| plan.into_verified(setting))
        .unwrap_or_default()
}

/// Indices of the pods in the order in which they are placed: largest first (whole GPUs, then slices), or as given.
fn pods_in_order(setting: &TrialSetting<'_>, pods: &[usize], order: PlacingOrder) -> Vec<usize> {
    let mut indices = pods.to_vec();
    if order == PlacingOrder::DecreasingSize {
        indices.sort_by_key(|pod_index| {
            Reverse(
                requested_devices(setting.pod(*pod_index))
                    .map_or(0, |(_, device, count)| u64::from(count) * device.weight()),
            )
        });
    }
    indices
}

/// For each workload, whether an empty node of each kind takes one of its pods, and why not.
struct PluginFits(BTreeMap<usize, Vec<Result<(), PluginObstacle>>>);

impl PluginFits {
    fn new(setting: &TrialSetting<'_>, pods: &[usize]) -> Self {
        let mut by_workload = BTreeMap::new();
        for index in pods {
            by_workload
                .entry(setting.pod(*index).workload)
                .or_insert_with(|| {
                    let kinds = 0..setting.question.node_kinds.len();
                    kinds
                        .map(|template| check_empty_node(setting, *index, template))
                        .collect()
                });
        }
        Self(by_workload)
    }

    fn for_pod(&self, pod: &PodToPlace) -> &[Result<(), PluginObstacle>] {
        self.0.get(&pod.workload).map_or(&[], Vec::as_slice)
    }
}

/// Whether an empty node of that kind takes the pod.
fn check_empty_node(
    setting: &TrialSetting<'_>,
    index: usize,
    template: usize,
) -> Result<(), PluginObstacle> {
    let pod = setting.pod(index);
    let Some((resource, ..)) = requested_devices(pod) else {
        return Ok(());
    };
    let mut node = PluginNode::new(template, setting.template(template));
    node.allocate(index, pod, setting.template(template))
        .map_err(|most| {
            let (resource, requested) = (resource.as_str().to_owned(), pod.demand.gpus);
            match most {
                0 => PluginObstacle::NoSuchDevice { resource },
                most => PluginObstacle::TooFew {
                    resource,
                    asked: requested,
                    most,
                },
            }
        })?;
    let mut trial = Trial::new(setting);
    node.add_to(&mut trial, setting, 0);
    let refused = trial.place(index, CandidateNodes::FirstOf(&[0])).err();
    match refused.and_then(|obstacles| obstacles.into_values().find(Obstacle::is_lasting)) {
        Some(obstacle) => Err(PluginObstacle::Placing(obstacle)),
        None => Ok(()),
    }
}

/// Nodes that are filled one pod after the other. A trial beside them knows what pods ask for beside devices, and who repels
/// whom; which device is on which GPU is known here.
struct PluginPacking<'q> {
    setting: &'q TrialSetting<'q>,
    /// Trial with the nodes of `plan`, in the same order.
    trial: Trial<'q>,
    /// More of each device than any node has, so that the trial leaves the count to the plan's GPUs.
    unlimited_devices: PluginDevices,
    plan: PluginPlan,
}

impl<'q> PluginPacking<'q> {
    fn new(setting: &'q TrialSetting<'q>, pods: &[usize]) -> Self {
        let resources = pods
            .iter()
            .filter_map(|pod_index| Some(requested_devices(setting.pod(*pod_index))?.0.clone()));
        let unlimited_devices = resources
            .map(|resource| (resource, UNLIMITED_DEVICES))
            .collect();
        Self {
            setting,
            trial: Trial::new(setting),
            unlimited_devices,
            plan: PluginPlan::default(),
        }
    }

    fn pack(mut self, order: &[usize], fitting: &PluginFits) -> PluginPlan {
        for index in order {
            let mut obstacles: Vec<(usize, PluginObstacle)> = Vec::new();
            for (template, fits) in fitting.for_pod(self.setting.pod(*index)).iter().enumerate() {
                match fits
                    .clone()
                    .and_then(|()| self.place_on_kind(*index, template))
                {
                    Ok(()) => {
                        obstacles.clear();
                        break;
                    }
                    Err(why) => obstacles.push((template, why)),
                }
            }
            if !obstacles.is_empty() || self.setting.question.node_kinds.is_empty() {
                self.plan.not_held.push((*index, obstacles));
            }
        }
        self.plan.nodes.retain(|node| !node.pods.is_empty());
        self.plan
    }

    /// Places the pod on the first node of the kind that takes it, or on a new one.
    fn place_on_kind(&mut self, index: usize, template: usize) -> Result<(), PluginObstacle> {
        let (pod, kind) = (self.setting.pod(index), self.setting.template(template));
        let has_devices = |node: &PluginNode| {
            node.template == template && node.clone().allocate(index, pod, kind).is_ok()
        };
        let nodes = self.plan.nodes.iter().enumerate();
        let mut candidates: Vec<usize> = nodes
            .filter(|(_, node)| has_devices(node))
            .map(|(number, _)| number)
            .collect();
        let node_count = self
            .plan
            .nodes
            .iter()
            .filter(|node| node.template == template)
            .count() as u32;
        let refused = match self.place_on_nodes(index, template, &candidates) {
            Ok(()) => return Ok(()),
            Err(refused) => refused,
        };
        if let Some(nodes) = kind.max_nodes.filter(|most| node_count >= *most) {
            return Err(PluginObstacle::AllInUse { nodes });
        }
        candidates.retain(|number| self.plan.nodes[*number].pods.is_empty());
        if !candidates.is_empty() {
            // An empty node has just refused it.
            return Err(refused);
        }
        let number = self.plan.nodes.len();
        let name = format!("{}-plugin-{}", kind.name, number + 1);
        let devices = kind
            .plugin_devices
            .clone()
            .unwrap_or_else(|| self.unlimited_devices.clone());
        self.trial
            .add_plugin_node(template, &name, kind.gpus, devices);
        self.plan.nodes.push(PluginNode::new(template, kind));
        self.place_on_nodes(index, template, &[number])
    }

    /// Places the pod on the first of these nodes that takes it; all have its devices.
    fn place_on_nodes(
        &mut self,
        index: usize,
        template: usize,
        nodes: &[usize],
    ) -> Result<(), PluginObstacle> {
        let (pod, kind) = (self.setting.pod(index), self.setting.template(template));
        let number = self
            .trial
            .place(index, CandidateNodes::FirstOf(nodes))
            .map_err(|obstacles| match obstacles.into_values().next() {
                Some(obstacle) => PluginObstacle::Placing(obstacle),
                None => PluginObstacle::AllInUse {
                    nodes: nodes.len() as u32,
                },
            })?;
        // The caller has checked that the node has them.
        let _ = self.plan.nodes[number].allocate(index, pod, kind);
        Ok(())
    }
}

impl PluginPlan {
    /// GPUs in all: of each kind full nodes, and one with as many as are in use there.
    pub fn gpus(&self, setting: &TrialSetting<'_>) -> u32 {
        (0..setting.question.node_kinds.len())
            .map(|template| self.gpus_of_kind(setting, template))
            .sum()
    }

    /// GPUs on nodes of one kind. Which of them is not full may be chosen, so it is the one with the fewest in use.
    pub fn gpus_of_kind(&self, setting: &TrialSetting<'_>, template: usize) -> u32 {
        let kind = setting.template(template);
        let there = self.nodes.iter().filter(|node| node.template == template);
        let in_use: Vec<u32> = there.map(|node| node.gpus_in_use(kind)).collect();
        let Some(fewest) = in_use.iter().min() else {
            return 0;
        };
        (in_use.len() as u32 - 1) * kind.gpus + fewest
    }

    /// The plan without pods that the core refuses on the nodes found for them. The node of each kind that is not full
    /// comes last.
    fn into_verified(mut self, setting: &TrialSetting<'_>) -> Self {
        let mut trial = Trial::new(setting);
        let refused = self.place_all(&mut trial, setting);
        for (index, template, obstacle) in refused {
            self.nodes
                .iter_mut()
                .for_each(|node| node.remove_pod(index));
            self.not_held
                .push((index, vec![(template, PluginObstacle::Placing(obstacle))]));
        }
        self.nodes.retain(|node| !node.pods.is_empty());
        self.nodes.sort_by_key(|node| {
            (
                node.template,
                Reverse(node.gpus_in_use(setting.template(node.template))),
            )
        });
        self
    }

    /// Adds its nodes to a trial and places its pods on them. Says which are refused, on which kind of node and why.
    pub(crate) fn place_all(
        &self,
        trial: &mut Trial<'_>,
        setting: &TrialSetting<'_>,
    ) -> Vec<(usize, usize, Obstacle)> {
        let mut refused = Vec::new();
        let first = trial.nodes().len();
        for (number, node) in self.nodes.iter().enumerate() {
            node.add_to(trial, setting, number);
        }
        for (number, node) in self.nodes.iter().enumerate() {
            for index in &node.pods {
                let placed = trial.place(*index, CandidateNodes::FirstOf(&[first + number]));
                let why = placed
                    .err()
                    .and_then(|obstacles| obstacles.into_values().next());
                refused.extend(why.map(|obstacle| (*index, node.template, obstacle)));
            }
        }
        refused
    }
}

impl PluginNode {
    fn new(template: usize, kind: &NodeTemplate) -> Self {
        Self {
            template,
            gpus: Vec::new(),
            pods: Vec::new(),
            remaining: kind.plugin_devices.clone().unwrap_or_default(),
        }
    }

    /// Allocates the pod's devices if the node has them; otherwise changes nothing and returns how many it has.
    fn allocate(&mut self, index: usize, pod: &PodToPlace, kind: &NodeTemplate) -> Result<(), u32> {
        let Some((resource, device, count)) = requested_devices(pod) else {
            return Err(0);
        };
        match &kind.plugin_devices {
            Some(_) => self.allocate_counted(resource, count)?,
            None => self.allocate_on_gpus(index, &device, count, kind)?,
        }
        self.pods.push(index);
        Ok(())
    }

    /// Allocates devices of an observed node, where only counts are known.
    fn allocate_counted(&mut self, resource: &PluginResource, count: u32) -> Result<(), u32> {
        let remaining = self.remaining.get_mut(resource).ok_or(0u32)?;
        *remaining = remaining.checked_sub(count).ok_or(*remaining)?;
        Ok(())
    }

    /// Allocates devices of a described node: on the first GPUs that can provide them, then on unused GPUs of the node.
    fn allocate_on_gpus(
        &mut self,
        index: usize,
        device: &PluginDevice,
        count: u32,
        kind: &NodeTemplate,
    ) -> Result<(), u32> {
        let before = self.gpus.clone();
        for allocated in 0..count {
            if self
                .gpus
                .iter_mut()
                .any(|card| card.allocate(device, index, kind))
            {
                continue;
            }
            let mut card = PluginGpu::default();
            if self.gpus.len() >= kind.gpus as usize || !card.allocate(device, index, kind) {
                self.gpus = before;
                return Err(allocated);
            }
            self.gpus.push(card);
        }
        Ok(())
    }

    fn remove_pod(&mut self, index: usize) {
        self.pods.retain(|pod| *pod != index);
        self.gpus
            .iter_mut()
            .for_each(|card| card.0.retain(|(_, pod)| *pod != index));
        self.gpus.retain(|card| !card.0.is_empty());
    }

    /// GPUs in use. All GPUs of an observed node count: it does not show which are in use.
    fn gpus_in_use(&self, kind: &NodeTemplate) -> u32 {
        if kind.plugin_devices.is_some() {
            kind.gpus
        } else {
            self.gpus.len() as u32
        }
    }

    /// Devices that the plugin offers on the node: those in use, or all of an observed node.
    fn devices(&self, kind: &NodeTemplate) -> PluginDevices {
        if let Some(devices) = &kind.plugin_devices {
            return devices.clone();
        }
        let mut devices = PluginDevices::new();
        for (device, _) in self.gpus.iter().flat_map(|card| &card.0) {
            *devices.entry(device.resource()).or_default() += 1;
        }
        devices
    }

    fn add_to(&self, trial: &mut Trial<'_>, setting: &TrialSetting<'_>, number: usize) {
        let kind = setting.template(self.template);
        let name = format!("{}-plugin-{}", kind.name, number + 1);
        trial.add_plugin_node(
            self.template,
            &name,
            self.gpus_in_use(kind),
            self.devices(kind),
        );
    }
}

impl PluginGpu {
    /// Allocates a device to the pod, if the GPU can still be cut so.
    fn allocate(&mut self, device: &PluginDevice, index: usize, kind: &NodeTemplate) -> bool {
        let is_possible = match device {
            PluginDevice::WholeGpu => self.0.is_empty() && kind.geometry.is_none(),
            PluginDevice::Slice(profile) => self.can_be_cut(profile, kind),
            PluginDevice::Other => false,
        };
        if is_possible {
            self.0.push((device.clone(), index));
        }
        is_possible
    }

    fn can_be_cut(&self, profile: &str, kind: &NodeTemplate) -> bool {
        let Some(mut profiles) = self.profiles() else {
            return false;
        };
        if let Some(geometry) = &kind.geometry {
            let count = |names: &mut dyn Iterator<Item = &str>| {
                names.filter(|name| *name == profile).count()
            };
            return count(&mut profiles.into_iter()) < count(&mut geometry.profiles());
        }
        profiles.push(profile);
        kind.gpu
            .gpu_type
            .and_then(|gpu| gpu.family())
            .is_some_and(|family| family.can_be_partitioned_into(&profiles))
    }

    /// Profiles of its slices; `None` if a pod has the whole GPU.
    pub fn profiles(&self) -> Option<Vec<&str>> {
        let profile = |(device, _): &'_ (PluginDevice, usize)| match device {
            PluginDevice::Slice(_) => true,
            PluginDevice::WholeGpu | PluginDevice::Other => false,
        };
        let slices = self.0.iter().all(profile);
        slices.then(|| {
            self.0
                .iter()
                .filter_map(|(device, _)| device.profile())
                .collect()
        })
    }
}

impl PluginDevice {
    pub fn profile(&self) -> Option<&str> {
        match self {
            Self::Slice(profile) => Some(profile),
            Self::WholeGpu | Self::Other => None,
        }
    }

    fn resource(&self) -> PluginResource {
        let name = match self {
            Self::WholeGpu | Self::Other => WHOLE_GPU_RESOURCE.to_owned(),
            Self::Slice(profile) => format!("{MIG_RESOURCE_PREFIX}{}", profile.replace('+', ".")),
        };
        PluginResource::parse(&name).expect("these are names of the plugin's")
    }

    /// Size for sorting: a GPU has at most eight slices, so a whole one is larger than any slices of it.
    fn weight(&self) -> u64 {
        match self {
            Self::WholeGpu => 100,
            Self::Slice(profile) => profile
                .bytes()
                .next()
                .map_or(0, |digit| u64::from(digit.saturating_sub(b'0'))),
            Self::Other => 0,
        }
    }
}

//! The fleet's hardware as it is: nodes, their GPUs, what is on their disks and in their memory. Every placement is entered
//! here, whichever scheduler made it, and shown to the oracle, so that one that gives away what is taken is found out.
//!
//! Nothing here decides, and nothing here is read by Stowage's scheduler, which knows what messages say.

use super::pods::{Image, PodSpec};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stowage_scheduling::ids::{GpuModel, GpuUuid, ModelId, NodeName, PodUid};
use stowage_scheduling::testkit::oracle::{BrokenInvariant, Granted, Oracle};
use stowage_scheduling::units::{Bytes, Millis, Moment};
use stowage_scheduling::vocabulary::demand::Sharing;
use stowage_scheduling::vocabulary::engine_model::{EngineModelState, EngineReading, SleepLevel};
use stowage_scheduling::vocabulary::latency::EngineLatency;
use stowage_scheduling::vocabulary::model_tier::{
    LoadingSpeeds, ModelTier, NodeModel, time_to_ready,
};
use stowage_scheduling::vocabulary::node_reading::{
    EngineLoad, GpuReading, NodeReading, SleepState,
};

/// One node's hardware.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineSpec {
    pub name: NodeName,
    pub labels: BTreeMap<String, String>,
    pub gpu: GpuModel,
    pub gpus: u32,
    /// VRAM of each GPU.
    pub vram: Bytes,
    /// Host memory that files stay in after they are read.
    pub page_cache: Bytes,
}

#[derive(Debug, Clone)]
pub struct Machine {
    pub spec: MachineSpec,
    pub gpus: Vec<PhysicalGpu>,
    /// Models whose files are on its disk, and what they weigh.
    pub disk: BTreeMap<ModelId, Bytes>,
    /// Models whose files are in memory, the one that was read last at the end.
    page_cache: Vec<(ModelId, Bytes)>,
    pub images: BTreeSet<Image>,
    /// Engines that sleep and may be woken by another pod, by the places of their GPUs.
    pub sleeping_engines: Vec<SleepingEngine>,
}

/// An engine that sleeps, its weights in host memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SleepingEngine {
    /// The pod that it runs in.
    pub pod: PodUid,
    pub model: ModelId,
    pub weights: Bytes,
    /// Places of its GPUs on its node.
    pub gpus: Vec<usize>,
    /// The namespace whose pods may wake it.
    pub namespace: Arc<str>,
}

/// How long a pod takes to start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PodStartTimes {
    /// From binding until its image is there.
    pub pull: Millis,
    /// From then until its engine answers.
    pub load: Millis,
    /// An engine that slept on its GPUs was woken.
    pub woke_engine: bool,
}

#[derive(Debug, Clone)]
pub struct PhysicalGpu {
    pub uuid: GpuUuid,
    /// What its pods have of it.
    pub pods: BTreeMap<PodUid, Bytes>,
}

/// All nodes.
#[derive(Debug, Clone)]
pub struct Machines {
    all: Vec<Machine>,
    by_name: BTreeMap<NodeName, usize>,
    oracle: Oracle,
    /// How fast weights and images really come.
    pub speeds: LoadingSpeeds,
}

impl Machines {
    pub fn new(specs: impl IntoIterator<Item = MachineSpec>, speeds: LoadingSpeeds) -> Self {
        let all: Vec<Machine> = specs.into_iter().map(Machine::new).collect();
        let by_name = all
            .iter()
            .enumerate()
            .map(|(index, m)| (m.spec.name.clone(), index))
            .collect();
        let mut oracle = Oracle::default();
        for machine in &all {
            let gpus = machine.gpus.iter();
            let gpus = gpus.map(|gpu| (gpu.uuid.clone(), machine.spec.vram));
            oracle.set_node(&machine.spec.name, gpus);
        }
        Self {
            all,
            by_name,
            oracle,
            speeds,
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &Machine> {
        self.all.iter()
    }

    pub fn get(&self, node: &NodeName) -> Option<&Machine> {
        Some(&self.all[*self.by_name.get(node)?])
    }

    pub fn get_mut(&mut self, node: &NodeName) -> Option<&mut Machine> {
        Some(&mut self.all[*self.by_name.get(node)?])
    }

    pub fn gpus(&self) -> u64 {
        self.all
            .iter()
            .map(|machine| machine.gpus.len() as u64)
            .sum()
    }

    /// Enters a placement. What it breaks is answered, and the pod is placed all the same: so would a node start it.
    pub fn bind(
        &mut self,
        pod: &PodUid,
        spec: &PodSpec,
        node: &NodeName,
        devices: &[GpuUuid],
        borrows: bool,
    ) -> Vec<BrokenInvariant> {
        if let Some(machine) = self.get_mut(node) {
            let here = machine.gpus.iter_mut();
            for gpu in here.filter(|gpu| devices.contains(&gpu.uuid)) {
                gpu.pods.insert(pod.clone(), spec.vram_per_gpu());
            }
        }
        let granted = Granted {
            gpus: spec.gpus,
            per_gpu: spec.vram_per_gpu(),
            sharing: if spec.is_exclusive {
                Sharing::Exclusive
            } else {
                Sharing::Shared
            },
            borrows,
        };
        self.oracle.bind(pod, node, devices, granted)
    }

    /// Removes a pod that is gone from its node.
    pub fn remove(&mut self, pod: &PodUid, node: &NodeName) {
        self.oracle.end(pod);
        if let Some(machine) = self.get_mut(node) {
            machine.gpus.iter_mut().for_each(|gpu| {
                gpu.pods.remove(pod);
            });
        }
    }

    /// How a pod that is bound there now starts, and what the node has of it from then on: an engine of its model that sleeps on
    /// exactly its GPUs is woken.
    pub fn start(&mut self, spec: &PodSpec, node: &NodeName, devices: &[GpuUuid]) -> PodStartTimes {
        let speeds = self.speeds.clone();
        let Some(machine) = self.get_mut(node) else {
            return PodStartTimes::default();
        };
        let pull = machine.pull_time(spec.image.as_ref(), &speeds);
        machine.images.extend(spec.image.clone());
        if let Some(sleeper) = machine.wake(spec, devices) {
            return PodStartTimes {
                pull,
                load: sleeper.wake_time(&speeds),
                woke_engine: true,
            };
        }
        let load = machine.load_time(spec, &speeds);
        if let Some(model) = &spec.model {
            machine.read_files(model, spec.weights);
        }
        PodStartTimes {
            pull,
            load,
            woke_engine: false,
        }
    }

    /// The shortest start that any free GPUs offer the pod now; `None` if no node has enough of them.
    pub(crate) fn shortest_start(&self, spec: &PodSpec) -> Option<Millis> {
        self.all
            .iter()
            .filter_map(|machine| machine.shortest_start(spec, &self.speeds))
            .min()
    }
}

impl Machine {
    fn new(spec: MachineSpec) -> Self {
        let gpu = |index: u32| PhysicalGpu {
            uuid: GpuUuid::parse(&format!("GPU-{}-{index}", spec.name))
                .expect("a node's name is short enough"),
            pods: BTreeMap::new(),
        };
        Self {
            gpus: (0..spec.gpus).map(gpu).collect(),
            spec,
            disk: BTreeMap::new(),
            page_cache: Vec::new(),
            images: BTreeSet::new(),
            sleeping_engines: Vec::new(),
        }
    }

    /// GPUs without a pod.
    pub fn free_gpus(&self) -> impl Iterator<Item = (usize, &PhysicalGpu)> {
        self.gpus
            .iter()
            .enumerate()
            .filter(|(_, gpu)| gpu.pods.is_empty())
    }

    pub fn index_of(&self, device: &GpuUuid) -> Option<usize> {
        self.gpus.iter().position(|gpu| gpu.uuid == *device)
    }

    /// Its files of this model.
    pub fn model_files(&self, model: &ModelId) -> Option<NodeModel> {
        let bytes = *self.disk.get(model)?;
        let is_cached = self.page_cache.iter().any(|(cached, _)| cached == model);
        let tier = if is_cached {
            ModelTier::PageCache
        } else {
            ModelTier::Disk
        };
        Some(NodeModel {
            model: model.clone(),
            tier,
            bytes,
        })
    }

    /// Its files of all models, as an agent finds them.
    pub fn holdings(&self) -> impl Iterator<Item = NodeModel> {
        self.disk.keys().filter_map(|model| self.model_files(model))
    }

    /// The files were read: they are on the disk, and in memory as far as there is room, before those that were read earlier.
    pub(crate) fn read_files(&mut self, model: &ModelId, weights: Bytes) {
        self.disk.insert(model.clone(), weights);
        self.page_cache.retain(|(cached, _)| cached != model);
        self.page_cache.push((model.clone(), weights));
        let mut used: Bytes = self.page_cache.iter().map(|(_, bytes)| *bytes).sum();
        while used > self.spec.page_cache && !self.page_cache.is_empty() {
            let (_, dropped) = self.page_cache.remove(0);
            used = used.minus(dropped);
        }
    }

    /// The time until the image is there.
    fn pull_time(&self, image: Option<&Image>, speeds: &LoadingSpeeds) -> Millis {
        let missing = image.filter(|image| !self.images.contains(image));
        missing.map_or(Millis::default(), |image| {
            image.size.transfer_time(speeds.image_pull)
        })
    }

    fn load_time(&self, spec: &PodSpec, speeds: &LoadingSpeeds) -> Millis {
        let Some(model) = &spec.model else {
            return Millis::default();
        };
        time_to_ready(self.model_files(model).as_ref(), spec.weights, speeds)
    }

    fn shortest_start(&self, spec: &PodSpec, speeds: &LoadingSpeeds) -> Option<Millis> {
        let is_free = |index: &usize| self.gpus[*index].pods.is_empty();
        let suits = |one: &&SleepingEngine| {
            one.can_serve(spec)
                && one.gpus.len() == spec.gpus as usize
                && one.gpus.iter().all(is_free)
        };
        let load = match self.sleeping_engines.iter().find(suits) {
            Some(sleeper) => sleeper.wake_time(speeds),
            None if self.free_gpus().count() >= spec.gpus as usize => self.load_time(spec, speeds),
            None => return None,
        };
        Some(self.pull_time(spec.image.as_ref(), speeds) + load)
    }

    /// What its agent reports. `loads` and `latencies` are of the engines that serve, by pod; `held` is what awake engines have of each of their GPUs;
    /// other pods use what they were granted.
    pub fn reading(
        &self,
        now: Moment,
        loads: &BTreeMap<PodUid, EngineLoad>,
        latencies: &BTreeMap<PodUid, EngineLatency>,
        held: &BTreeMap<PodUid, Bytes>,
    ) -> NodeReading {
        let gpu = |gpu: &PhysicalGpu| {
            let loads = gpu.pods.keys().filter_map(|pod| loads.get(pod));
            let used = |(pod, granted): (&PodUid, &Bytes)| {
                (pod.clone(), *held.get(pod).unwrap_or(granted))
            };
            let attributed: Vec<(PodUid, Bytes)> = gpu.pods.iter().map(used).collect();
            GpuReading {
                uuid: gpu.uuid.clone(),
                used: Some(attributed.iter().map(|(_, used)| *used).sum()),
                attributed,
                engine_load: loads.fold(EngineLoad::NONE, |all, one| all.combined_with(*one)),
            }
        };
        let mut engines: Vec<EngineReading> = self
            .sleeping_engines
            .iter()
            .map(|one| self.sleeping_reading(one, now))
            .collect();
        engines.sort_by(|a, b| a.pod.cmp(&b.pod));
        let here = |pod: &&PodUid| self.gpus.iter().any(|gpu| gpu.pods.contains_key(*pod));
        let awake = held.keys().filter(here);
        let measured = latencies.iter().filter(|(pod, _)| here(pod));
        NodeReading {
            latencies: measured.map(|(_, latency)| latency.clone()).collect(),
            sleep: awake.map(|pod| (pod.clone(), SleepState::Awake)).collect(),
            sampled: now,
            gpus: self.gpus.iter().map(gpu).collect(),
            holdings: self.holdings().collect(),
            engines,
            ..NodeReading::default()
        }
    }

    fn sleeping_reading(&self, sleeper: &SleepingEngine, now: Moment) -> EngineReading {
        EngineReading {
            pod: sleeper.pod.clone(),
            model: sleeper.model.clone(),
            gpus: sleeper
                .gpus
                .iter()
                .map(|gpu_index| self.gpus[*gpu_index].uuid.clone())
                .collect(),
            state: EngineModelState::Asleep(SleepLevel::WeightsOffloaded),
            reusable_in: Some(sleeper.namespace.clone()),
            observed_at: now,
        }
    }

    /// Wakes an engine that sleeps on exactly these GPUs for the pod. Others sleep on: they hold host memory, and next to nothing
    /// of a GPU.
    fn wake(&mut self, spec: &PodSpec, devices: &[GpuUuid]) -> Option<SleepingEngine> {
        let mut indices: Vec<usize> = devices
            .iter()
            .filter_map(|device| self.index_of(device))
            .collect();
        indices.sort_unstable();
        let found = self
            .sleeping_engines
            .iter()
            .position(|one| one.can_serve(spec) && one.gpus == indices)?;
        Some(self.sleeping_engines.remove(found))
    }

    /// An engine goes to sleep on the GPUs of its pod, which ends; the one that has slept longest ends if host memory is short.
    pub(crate) fn put_to_sleep(&mut self, sleeper: SleepingEngine, host_memory: Bytes) {
        self.sleeping_engines.push(sleeper);
        while self
            .sleeping_engines
            .iter()
            .map(|one| one.weights)
            .sum::<Bytes>()
            > host_memory
        {
            self.sleeping_engines.remove(0);
        }
    }
}

impl PodStartTimes {
    /// From binding until its engine answers.
    pub fn time(self) -> Millis {
        self.pull + self.load
    }
}

impl SleepingEngine {
    fn wake_time(&self, speeds: &LoadingSpeeds) -> Millis {
        self.weights.transfer_time(speeds.wake) + speeds.wake_init
    }

    fn can_serve(&self, spec: &PodSpec) -> bool {
        spec.model.as_ref() == Some(&self.model) && *self.namespace == *spec.namespace
    }
}

impl PhysicalGpu {
    pub fn granted_bytes(&self) -> Bytes {
        self.pods.values().copied().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machines() -> Machines {
        let spec = MachineSpec {
            name: NodeName::parse("n").unwrap(),
            labels: BTreeMap::new(),
            gpu: GpuModel::parse("any").unwrap(),
            gpus: 2,
            vram: Bytes::gib(80),
            page_cache: Bytes::gib(20),
        };
        Machines::new([spec], LoadingSpeeds::default())
    }

    fn uid(name: &str) -> PodUid {
        PodUid::parse(name).unwrap()
    }

    #[test]
    fn a_placement_beyond_a_gpu_and_one_beside_an_exclusive_pod_are_found_out() {
        let (mut machines, node) = (machines(), NodeName::parse("n").unwrap());
        let gpus: Vec<GpuUuid> = machines
            .get(&node)
            .unwrap()
            .gpus
            .iter()
            .map(|gpu| gpu.uuid.clone())
            .collect();
        let shared = PodSpec::plain("a", Bytes::gib(50));
        assert_eq!(
            machines.bind(&uid("one"), &shared, &node, &gpus[..1], false),
            []
        );
        assert!(matches!(
            machines.bind(&uid("two"), &shared, &node, &gpus[..1], false)[..],
            [BrokenInvariant::Gpu(_)]
        ));
        machines.remove(&uid("one"), &node);
        let alone = PodSpec {
            is_exclusive: true,
            ..shared.clone()
        };
        assert!(matches!(
            machines.bind(&uid("three"), &alone, &node, &gpus[..1], false)[..],
            [BrokenInvariant::Gpu(_)]
        ));
        assert!(matches!(
            machines.bind(&uid("four"), &alone, &node, &gpus, false)[..],
            [BrokenInvariant::OtherCount { .. }, ..]
        ));
    }

    #[test]
    fn a_second_start_finds_the_image_and_the_files_until_memory_is_needed_for_others() {
        let (mut machines, node) = (machines(), NodeName::parse("n").unwrap());
        let model = |name: &str| ModelId::parse(name).unwrap();
        let image = Image {
            name: "engine".into(),
            size: Bytes(20_000_000_000),
        };
        let pod = |name| PodSpec {
            image: Some(image.clone()),
            ..PodSpec::serving("a", model(name), Bytes::gib(15), Bytes::gib(40))
        };
        let first = machines.start(&pod("m"), &node, &[]).time();
        let second = machines.start(&pod("m"), &node, &[]).time();
        // The image is pulled once: 100 s; the files come once over the network, and are read from memory then.
        assert!(
            first > second + Millis::seconds(100),
            "{first:?} {second:?}"
        );
        machines.start(&pod("other"), &node, &[]);
        let third = machines.start(&pod("m"), &node, &[]).time();
        assert!(
            second < third && third < first,
            "{second:?} {third:?} {first:?}"
        );
    }

    #[test]
    fn a_sleeping_engine_is_woken_on_exactly_its_gpu_and_once() {
        let (mut machines, node) = (machines(), NodeName::parse("n").unwrap());
        let model = ModelId::parse("m").unwrap();
        let gpus: Vec<GpuUuid> = machines
            .get(&node)
            .unwrap()
            .gpus
            .iter()
            .map(|gpu| gpu.uuid.clone())
            .collect();
        let sleeper = SleepingEngine {
            pod: uid("asleep"),
            model: model.clone(),
            weights: Bytes::gib(15),
            gpus: vec![1],
            namespace: "a".into(),
        };
        machines
            .get_mut(&node)
            .unwrap()
            .sleeping_engines
            .push(sleeper);
        let pod = PodSpec::serving("a", model, Bytes::gib(15), Bytes::gib(40));
        assert!(
            machines.start(&pod, &node, &gpus[..1]).time() > Millis::seconds(20),
            "it is another GPU"
        );
        assert!(machines.start(&pod, &node, &gpus[1..]).time() < Millis::seconds(2));
        assert!(
            machines.start(&pod, &node, &gpus[1..]).time() > Millis::seconds(20),
            "it was woken"
        );
    }
}

//! Simulated output of a machine's driver, kernel and disk: the only input of the demo's agents that is simulated here.
//!
//! Everything follows from the pods that run on the machine, as the API server shows them, and from earlier ones whose
//! processes have not freed their memory yet ([`termination`](super::termination)). Whose a process is, and the limits that the
//! driver keeps for it ([`vram`](super::vram)), the agent reads in files, as on any node: a `/proc` and cgroups in a folder of the
//! machine. Engines are not part of it: they serve their own metrics pages ([`engines`](super::engines)).

use super::api_server::ApiServer;
use super::machine::DemoMachine;
use super::termination;
use super::vram::{self, VramLimits};
use parking_lot::Mutex;
use serde_json::Value;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stowage_agent::models::{ModelScan, ModelSource};
use stowage_agent::nvml::{GpuSample, GpuSource};
use stowage_agent::ownership::Owners;
use stowage_kubernetes_objects::binding_annotations;
use stowage_report::{DeviceNumbers, GpuReport, ModelReport, PciAddress, ProcessReport};
use stowage_scheduling::ids::{GpuModel, GpuUuid, ModelId, PodUid};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::gpu::Health;
use stowage_scheduling::vocabulary::model_tier::ModelTier;
use stowage_telemetry::agent::SensorReading;
use tempfile::TempDir;

/// The first process on a machine that a pod starts.
const FIRST_PID: u32 = 4000;

/// One machine. Clones are the same one.
#[derive(Clone)]
pub(crate) struct SimulatedHardware {
    machine: DemoMachine,
    api: Arc<ApiServer>,
    /// Every pod that ever ran here; the process of the n-th is [`FIRST_PID`] + n.
    started: Arc<Mutex<Vec<PodUid>>>,
    /// Deleted pods whose processes still run for a while.
    leftovers: Arc<Mutex<Vec<LeftoverProcess>>>,
    /// Has `proc` and `cgroups`.
    files: Arc<TempDir>,
}

struct LeftoverProcess {
    running: RunningProcess,
    memory_delay: Duration,
    /// When the pod was first missed.
    gone_since: Option<Instant>,
}

pub(crate) struct SimulatedGpus(pub SimulatedHardware);
pub(crate) struct SimulatedModels(pub DemoMachine);

/// A pod's process, the GPUs on which it has memory, and the limits on each of them that the driver keeps.
#[derive(Clone)]
struct RunningProcess {
    pod: PodUid,
    process: ProcessReport,
    gpus: Vec<String>,
    limits: Option<VramLimits>,
}

impl SimulatedHardware {
    pub fn new(machine: DemoMachine, api: Arc<ApiServer>) -> io::Result<Self> {
        Ok(Self {
            machine,
            api,
            started: Arc::default(),
            leftovers: Arc::default(),
            files: Arc::new(tempfile::tempdir()?),
        })
    }

    /// What the agent reads of its processes. No kubelet answers: its files say whose they are.
    pub fn owners(&self) -> Owners {
        let [proc, cgroups, socket] =
            ["proc", "cgroups", "kubelet.sock"].map(|name| self.files.path().join(name));
        Owners::new(proc, cgroups, socket)
    }

    /// A process for each pod that runs here, and for each deleted pod whose process still runs.
    fn processes(&self) -> Vec<RunningProcess> {
        let pods = self.api.list("pods").into_iter();
        let here = |pod: &Arc<Value>| {
            pod["spec"]["nodeName"] == self.machine.node && pod["status"]["phase"] == "Running"
        };
        let mut running = Vec::new();
        let mut leftovers = self.leftovers.lock();
        leftovers
            .iter_mut()
            .for_each(|one| one.gone_since = one.gone_since.or_else(|| Some(Instant::now())));
        for pod in pods.filter(here) {
            let Some(found) = self.process_of(&pod) else {
                continue;
            };
            leftovers.retain(|one| one.running.process.pid != found.process.pid);
            let stays = termination::memory_delay(&pod);
            if !stays.is_zero() {
                leftovers.push(LeftoverProcess {
                    running: found.clone(),
                    memory_delay: stays,
                    gone_since: None,
                });
            }
            running.push(found);
        }
        leftovers.retain(|one| {
            one.gone_since
                .is_none_or(|missed| missed.elapsed() < one.memory_delay)
        });
        let left = leftovers.iter().filter(|one| one.gone_since.is_some());
        running.extend(left.map(|one| one.running.clone()));
        running
    }

    fn process_of(&self, pod: &Value) -> Option<RunningProcess> {
        let annotation = |key: &str| pod["metadata"]["annotations"][key].as_str();
        let uid = PodUid::parse(pod["metadata"]["uid"].as_str()?).ok()?;
        let gpus: Vec<String> = annotation(binding_annotations::DEVICES)?
            .split(',')
            .map(str::to_owned)
            .collect();
        let granted: u64 = annotation(binding_annotations::GRANTED)?.parse().ok()?;
        let used = vram::allocated(pod).unwrap_or(used_vram(granted) / gpus.len() as u64);
        let process = ProcessReport {
            pid: self.pid(&uid),
            used_bytes: Some(Bytes(used)),
            pod: None,
            container: None,
        };
        // A process without memory on a GPU is not there for its driver.
        (used > 0).then(|| RunningProcess {
            pod: uid,
            process,
            gpus,
            limits: vram::limits(&self.api, pod),
        })
    }

    fn pid(&self, uid: &PodUid) -> u32 {
        let mut started = self.started.lock();
        let existing = started.iter().position(|pod| pod == uid);
        let index = existing.unwrap_or_else(|| {
            started.push(uid.clone());
            started.len() - 1
        });
        FIRST_PID + index as u32
    }

    /// Each process is in a container of its own.
    fn write_files(&self, running: &[RunningProcess]) -> io::Result<()> {
        let (proc, cgroups) = (
            self.files.path().join("proc"),
            self.files.path().join("cgroups"),
        );
        let controllers = match vram::keeps_limits(&self.api, self.machine.node) {
            true => "cpu memory dmem\n",
            false => "cpu memory\n",
        };
        write(&cgroups, &[("cgroup.controllers", controllers)])?;
        for one in running {
            let (pod, pid) = (one.pod.as_str().replace('-', "_"), one.process.pid);
            let cgroup =
                format!("kubepods.slice/kubepods-pod{pod}.slice/cri-containerd-{pid:064x}.scope");
            // The field that counts is the 22nd: when it started.
            let stat = format!("{pid} (engine) S{} {pid}\n", " 0".repeat(18));
            let place = format!("0::/{cgroup}\n");
            write(
                &proc.join(pid.to_string()),
                &[("stat", &stat), ("cgroup", &place)],
            )?;
            let regions = |bytes: Option<u64>| -> String {
                let value = bytes.map_or("max".to_owned(), |bytes| bytes.to_string());
                let gpus = (0..self.machine.gpu_count)
                    .filter(|index| one.gpus.contains(&self.machine.uuid(*index)));
                gpus.map(|index| format!("nvidia/{}/vidmem {value}\n", pci_address(index)))
                    .collect()
            };
            let limits = one.limits.as_ref();
            let files = [
                (
                    "dmem.current",
                    regions(one.process.used_bytes.map(|bytes| bytes.0)),
                ),
                ("dmem.max", regions(limits.map(|limits| limits.most))),
                (
                    "dmem.min",
                    regions(Some(limits.map_or(0, |limits| limits.kept))),
                ),
            ];
            write(
                &cgroups.join(&cgroup),
                &files.each_ref().map(|(name, text)| (*name, text.as_str())),
            )?;
        }
        Ok(())
    }
}

fn write(folder: &Path, files: &[(&str, &str)]) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let mut files = files.iter();
    files.try_for_each(|(name, text)| std::fs::write(folder.join(name), text))
}

fn pci_address(gpu: u32) -> String {
    format!("0000:{:02x}:00.0", gpu + 1)
}

/// An engine takes what it may have when it starts, and a few per cent are lost to rounding.
fn used_vram(granted: u64) -> u64 {
    granted - granted / 32
}

impl GpuSource for SimulatedGpus {
    fn sample(&mut self) -> Result<GpuSample, String> {
        let Self(hardware) = self;
        let running = hardware.processes();
        let written = hardware.write_files(&running);
        written.map_err(|error| format!("the simulated machine has no files: {error}"))?;
        let gpus: Vec<GpuReport> = (0..hardware.machine.gpu_count)
            .map(|index| gpu(&hardware.machine, index, &running))
            .collect();
        let sensors = gpus
            .iter()
            .map(|gpu| (gpu.uuid.clone(), sensors(gpu)))
            .collect();
        Ok(GpuSample {
            gpus,
            sensors,
            missing: Vec::new(),
            taken_at: Instant::now(),
        })
    }
}

fn gpu(machine: &DemoMachine, index: u32, running: &[RunningProcess]) -> GpuReport {
    let uuid = machine.uuid(index);
    let here = running.iter().filter(|pod| pod.gpus.contains(&uuid));
    let processes: Vec<ProcessReport> = here.map(|pod| pod.process.clone()).collect();
    let used: Bytes = processes
        .iter()
        .filter_map(|process| process.used_bytes)
        .sum();
    GpuReport {
        uuid: GpuUuid::parse(&uuid).expect("a name"),
        index,
        model: GpuModel::parse(machine.model).expect("a name"),
        parent: None,
        total_bytes: Bytes::gib(machine.gib_per_gpu),
        reserved_bytes: Bytes::ZERO,
        used_bytes: Some(used),
        utilization_percent: Some(utilization_percent(used, machine.gib_per_gpu)),
        activity: None,
        health: Health::Healthy,
        health_reason: None,
        failing_millis: None,
        recovered_millis: None,
        numa_node: None,
        compute_mode: None,
        nvlink_island: None,
        processes: Some(processes),
        cgroups: Vec::new(),
        numbers: DeviceNumbers {
            pci: PciAddress::parse(&pci_address(index)),
            ..DeviceNumbers::default()
        },
    }
}

/// The more of its memory is in use, the busier a simulated GPU is.
fn utilization_percent(used: Bytes, gib: u64) -> u8 {
    (used.0 * 90 / Bytes::gib(gib).0.max(1)).min(100) as u8
}

/// From an idle H100, at 30 °C and 70 W, to a busy one, at 75 °C and 700 W.
fn sensors(gpu: &GpuReport) -> SensorReading {
    let busy = u32::from(gpu.utilization_percent.unwrap_or(0));
    SensorReading {
        temperature_celsius: Some(30 + 45 * busy / 100),
        power_milliwatts: Some(70_000 + 630_000 / 100 * busy),
    }
}

impl ModelSource for SimulatedModels {
    fn models(&mut self) -> ModelScan {
        let on_disk = self.0.models.iter().map(|found| ModelReport {
            model: ModelId::parse(found.model).expect("a name"),
            tier: ModelTier::Disk,
            bytes: Bytes::gib(found.gib),
            source: "huggingface".into(),
        });
        ModelScan {
            models: on_disk.collect(),
            problems: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::machine::ModelOnDisk;
    use serde_json::json;
    use stowage_agent::ownership::OwnerSource;

    const MACHINE: DemoMachine = DemoMachine {
        node: "node-a",
        model: "H100",
        gpu_count: 2,
        gib_per_gpu: 80,
        models: &[ModelOnDisk {
            model: "starcoder",
            gib: 9,
        }],
    };

    /// By GPU: the pods that have memory there, and how much is used.
    async fn seen(hardware: &SimulatedHardware) -> Vec<(Vec<PodUid>, Bytes)> {
        let mut gpus = SimulatedGpus(hardware.clone()).sample().unwrap().gpus;
        assert_eq!(hardware.owners().owners(&mut gpus, &[]).await, []);
        let owners = |gpu: &GpuReport| {
            gpu.processes
                .iter()
                .flatten()
                .filter_map(|one| one.pod.clone())
                .collect()
        };
        gpus.iter()
            .map(|gpu| (owners(gpu), gpu.used_bytes.unwrap()))
            .collect()
    }

    #[tokio::test]
    async fn a_pod_has_memory_on_its_gpus_from_when_it_runs_until_it_is_gone() {
        let api = Arc::new(ApiServer::start().await.unwrap());
        let hardware = SimulatedHardware::new(MACHINE, api.clone()).unwrap();
        let idle = vec![(vec![], Bytes::ZERO); 2];
        let pod = api
            .create(
                "pods",
                json!({"metadata": {"name": "p"}, "spec": {"containers": []}}),
            )
            .unwrap();
        let uid = PodUid::parse(pod["metadata"]["uid"].as_str().unwrap()).unwrap();
        let devices = "GPU-node-a-0,GPU-node-a-1";
        let written = json!({binding_annotations::DEVICES: devices, binding_annotations::GRANTED: (64u64 << 30).to_string()});
        let binding = json!({"target": {"name": "node-a"}, "metadata": {"annotations": written}});
        api.bind("pods/default/p", &binding).unwrap();
        assert_eq!(seen(&hardware).await, idle, "it is starting");
        api.patch_status("pods/default/p", &json!({"status": {"phase": "Running"}}))
            .unwrap();
        assert_eq!(seen(&hardware).await, vec![(vec![uid], Bytes::gib(31)); 2]);
        let elsewhere = SimulatedHardware::new(
            DemoMachine {
                node: "node-b",
                ..MACHINE
            },
            api.clone(),
        )
        .unwrap();
        assert_eq!(seen(&elsewhere).await, idle);
        api.delete_now("pods/default/p").unwrap();
        assert_eq!(seen(&hardware).await, idle);
    }

    #[tokio::test]
    async fn a_process_keeps_its_memory_after_its_pod_is_gone_for_the_annotated_time() {
        let api = Arc::new(ApiServer::start().await.unwrap());
        let hardware = SimulatedHardware::new(MACHINE, api.clone()).unwrap();
        for (name, gpu, stays) in [("hangs", 0, termination::FOR_EVER), ("slow", 1, "1")] {
            let annotations = json!({
                termination::MEMORY_DELAY_MILLIS: stays,
                binding_annotations::DEVICES: MACHINE.uuid(gpu),
                binding_annotations::GRANTED: (32u64 << 30).to_string(),
            });
            let pod = json!({"metadata": {"name": name, "annotations": annotations}, "spec": {"containers": []}});
            api.create("pods", pod).unwrap();
            api.bind(
                &format!("pods/default/{name}"),
                &json!({"target": {"name": "node-a"}}),
            )
            .unwrap();
            let running = json!({"status": {"phase": "Running"}});
            api.patch_status(&format!("pods/default/{name}"), &running)
                .unwrap();
        }
        let memory = async || {
            seen(&hardware)
                .await
                .into_iter()
                .map(|(_, used)| used)
                .collect::<Vec<_>>()
        };
        let both = vec![Bytes::gib(31); 2];
        assert_eq!(memory().await, both);
        assert_eq!(memory().await, both, "seen twice, counted once");
        for name in ["hangs", "slow"] {
            api.delete_now(&format!("pods/default/{name}")).unwrap();
        }
        let gone = async {
            while memory().await != [Bytes::gib(31), Bytes::ZERO] {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), gone)
            .await
            .expect("the slow one lets go");
        assert_eq!(
            memory().await,
            [Bytes::gib(31), Bytes::ZERO],
            "the other never does"
        );
    }

    #[tokio::test]
    async fn the_agent_reads_the_limits_that_the_driver_keeps() {
        let api = Arc::new(ApiServer::start().await.unwrap());
        let hardware = SimulatedHardware::new(MACHINE, api.clone()).unwrap();
        let mut node = MACHINE.node_object();
        node["metadata"]["annotations"] = json!({vram::KEEPS_LIMITS: "true"});
        api.create("nodes", node).unwrap();
        let annotations = json!({
            vram::ALLOCATED: (12u64 << 30).to_string(),
            binding_annotations::DEVICES: MACHINE.uuid(1),
            binding_annotations::GRANTED: (40u64 << 30).to_string(),
            "nvidia.com/container.engine.gpu-memory.request": "1Mi",
            "nvidia.com/container.engine.gpu-memory.limit": "40960Mi",
        });
        let metadata = json!({"name": "p", "annotations": annotations});
        let pod = json!({"metadata": metadata, "spec": {"nodeName": "node-a", "containers": []}, "status": {"phase": "Running"}});
        api.create("pods", pod).unwrap();
        let mut gpus = SimulatedGpus(hardware.clone()).sample().unwrap().gpus;
        let mut owners = hardware.owners();
        owners.owners(&mut gpus, &[]).await;
        let (isolation, problem) = owners.read_cgroups(&mut gpus);
        assert!(isolation.unwrap().dmem && problem.is_none(), "{problem:?}");
        let said = |gpu: &GpuReport| {
            let figures = gpu
                .cgroups
                .iter()
                .map(|one| [one.used_bytes, one.limit_bytes, one.guaranteed_bytes]);
            figures.collect::<Vec<_>>()
        };
        let p = [Bytes::gib(12), Bytes::gib(40), Bytes::mib(1)].map(Some);
        assert_eq!((said(&gpus[0]), said(&gpus[1])), (vec![], vec![p]));
    }

    #[test]
    fn a_machine_reports_the_models_on_its_disk() {
        let found = SimulatedModels(MACHINE).models().models;
        assert_eq!(
            (found[0].model.as_str(), found[0].tier, found[0].bytes),
            ("starcoder", ModelTier::Disk, Bytes::gib(9))
        );
    }
}

//! The owners of the processes on the GPUs.
//!
//! [`cgroup`] finds a process' pod, and is right whenever it has an answer. [`pod_resources`] knows to which pod a device plugin
//! or DRA driver gave a GPU, by one of the names in [`device_id`], which identifies a process' owner only if no other pod can be on that
//! GPU. [`dmem`] reads what the cgroups that were found use, and their limits. [`dual_pods`] gives an engine that runs for another pod to that pod. Memory that neither explains belongs to no pod in Kubernetes
//! and is reported as such: a guess would be taken for a measurement.

pub mod cgroup;
pub(crate) mod device_id;
pub(crate) mod dmem;
pub(crate) mod dual_pods;
#[cfg(test)]
mod fake_kubelet;
pub mod pod_resources;

use super::pods::PodOnNode;
use cgroup::{Cgroups, ProcessOwner};
use dmem::Dmem;
use futures::future::BoxFuture;
use pod_resources::{Allocation, PodResources};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use stowage_report::{GpuReport, MissingPart, ProcessReport, ReportPart};
use stowage_scheduling::ids::{GpuUuid, PodKey, PodUid};
use stowage_scheduling::vocabulary::node_reading::NodeIsolation;

/// The annotation of a static pod's mirror with the UID by which the kubelet knows the pod. Its UID in the API is another.
const STATIC_POD_UID: &str = "kubernetes.io/config.mirror";

/// Finds the owners of processes.
pub trait OwnerSource: Send {
    /// Fills in the pod of every process, and returns which could not be found and why.
    fn owners<'a>(
        &'a mut self,
        gpus: &'a mut [GpuReport],
        pods: &'a [PodOnNode],
    ) -> BoxFuture<'a, Vec<MissingPart>>;

    /// Fills in what the cgroups of the processes say, once every process has its pod. Returns what the node has to keep limits, and
    /// why something could not be read.
    fn read_cgroups(&mut self, _gpus: &mut [GpuReport]) -> (Option<NodeIsolation>, Option<String>) {
        (None, None)
    }

    /// What would prevent finding an owner if there were a process now. Only checks for existence; asks nothing.
    fn missing_prerequisites(&self) -> Vec<MissingPart> {
        Vec::new()
    }
}

/// Owners by cgroup, and where that names none by the kubelet's allocations.
#[derive(Debug)]
pub struct Owners {
    cgroups: Cgroups,
    dmem: Dmem,
    pod_resources: PodResources,
}

impl Owners {
    /// `proc` contains the host's PIDs, `cgroup_root` its cgroups; `socket` is the kubelet's pod-resources socket.
    pub fn new(proc: PathBuf, cgroup_root: PathBuf, socket: PathBuf) -> Self {
        Self {
            cgroups: Cgroups::new(proc),
            dmem: Dmem::new(cgroup_root),
            pod_resources: PodResources::new(socket),
        }
    }
}

impl OwnerSource for Owners {
    fn owners<'a>(
        &'a mut self,
        gpus: &'a mut [GpuReport],
        pods: &'a [PodOnNode],
    ) -> BoxFuture<'a, Vec<MissingPart>> {
        Box::pin(async move {
            let by_cgroup = assign_by_cgroup(&mut self.cgroups, gpus, pods);
            let mut reasons = by_cgroup.reasons;
            if !by_cgroup.unidentified.is_empty() {
                let (allocations, problem) = self.pod_resources.allocations().await;
                assign_by_allocation(gpus, &by_cgroup.unidentified, allocations, pods);
                reasons.extend(unknown_device_ids(allocations));
                reasons.extend(problem.map(|problem| problem.to_string()));
            }
            reasons.into_iter().map(missing_owners).collect()
        })
    }

    fn read_cgroups(&mut self, gpus: &mut [GpuReport]) -> (Option<NodeIsolation>, Option<String>) {
        let cgroups = &self.cgroups;
        self.dmem.fill(gpus, |pid| cgroups.path_of(pid))
    }

    fn missing_prerequisites(&self) -> Vec<MissingPart> {
        let proc = self.cgroups.proc();
        let no_proc = (!proc.is_dir()).then(|| {
            format!(
                "there is no {}: mount the host's /proc there, or name it with --proc",
                proc.display()
            )
        });
        let no_kubelet = self
            .pod_resources
            .no_socket()
            .map(|error| error.to_string());
        no_proc
            .into_iter()
            .chain(no_kubelet)
            .map(missing_owners)
            .collect()
    }
}

fn missing_owners(reason: String) -> MissingPart {
    MissingPart {
        part: ReportPart::Owners,
        reason,
    }
}

/// Processes whose pod the cgroups do not show.
#[derive(Debug, Default)]
struct UnownedProcesses {
    /// PIDs without an answer from the cgroups.
    unidentified: BTreeSet<u32>,
    reasons: Vec<String>,
}

/// Fills in the limits that the Bindings of the pods wrote for their GPUs.
pub(crate) fn fill_written_limits(gpus: &mut [GpuReport], pods: &[PodOnNode]) {
    for gpu in gpus {
        let mut cgroups = std::mem::take(&mut gpu.cgroups);
        for cgroup in &mut cgroups {
            let pod = pods.iter().find(|pod| pod.uid == cgroup.pod);
            let has_it =
                |pod: &&PodOnNode| pod.devices.iter().flatten().any(|id| identifies(id, gpu));
            cgroup.written_bytes = pod.filter(has_it).and_then(|pod| pod.written_limit);
        }
        gpu.cgroups = cgroups;
    }
}

/// Reading `/proc` takes microseconds, and only the kernel answers: it needs no thread of its own.
fn assign_by_cgroup(
    cgroups: &mut Cgroups,
    gpus: &mut [GpuReport],
    pods: &[PodOnNode],
) -> UnownedProcesses {
    let pids: BTreeSet<u32> = processes(gpus).map(|process| process.pid).collect();
    let pods_by_uid = PodsByUid::new(pods);
    let (mut unowned, mut owners, mut gone) = (UnownedProcesses::default(), BTreeMap::new(), 0);
    for pid in &pids {
        match cgroups.owner_of(*pid) {
            Ok(ProcessOwner::Pod(named, container)) => {
                owners.insert(*pid, (Some(pods_by_uid.innermost(&named)), container));
            }
            Ok(ProcessOwner::Elsewhere) => {}
            Ok(ProcessOwner::Unidentified) => drop(unowned.unidentified.insert(*pid)),
            Ok(ProcessOwner::Gone) => {
                gone += 1;
                unowned.unidentified.insert(*pid);
            }
            Err(error) => {
                unowned.unidentified.insert(*pid);
                // One process that cannot be read is like the next.
                if unowned.reasons.is_empty() {
                    unowned.reasons.push(error.to_string());
                }
            }
        }
    }
    // One may end between two reads; all of them do not.
    if gone > 0 && gone == pids.len() {
        unowned.reasons.push(no_process_visible(cgroups, gone));
    }
    cgroups.retain(&pids);
    for process in processes_mut(gpus) {
        (process.pod, process.container) = owners.get(&process.pid).cloned().unwrap_or_default();
    }
    unowned
}

fn no_process_visible(cgroups: &Cgroups, processes: usize) -> String {
    format!(
        "none of the {processes} processes on the GPUs is under {}: run the agent with hostPID, or mount the host's /proc and \
         name it with --proc",
        cgroups.proc().display()
    )
}

/// A process belongs to the only pod that can be on its GPU.
fn assign_by_allocation(
    gpus: &mut [GpuReport],
    unidentified: &BTreeSet<u32>,
    allocations: &[Allocation],
    pods: &[PodOnNode],
) {
    for gpu in gpus {
        let Some(owner) = only_holder(gpu, allocations, pods) else {
            continue;
        };
        let of_gpu = gpu.processes.iter_mut().flatten();
        for process in of_gpu.filter(|process| unidentified.contains(&process.pid)) {
            process.pod = Some(owner.clone());
        }
    }
}

/// One sentence for each resource with ids that no rule understands. Its devices may be any of the GPUs.
fn unknown_device_ids(allocations: &[Allocation]) -> Vec<String> {
    let failed = |allocation: &Allocation| {
        let id = allocation.ids.iter().find_map(|id| id.clone().err())?;
        Some((allocation.resource.clone(), id))
    };
    let by_resource: BTreeMap<String, String> = allocations.iter().filter_map(failed).collect();
    let sentence = |(resource, id)| {
        format!(
            "no rule says which GPU the id {id:?} of {resource} is: VRAM of processes that only it would explain counts as nobody's"
        )
    };
    by_resource.into_iter().map(sentence).collect()
}

/// The pod to which a device plugin gave the whole GPU or slice, if no other pod got it, by the plugin or by a Binding.
fn only_holder(gpu: &GpuReport, allocations: &[Allocation], pods: &[PodOnNode]) -> Option<PodUid> {
    let given = allocations
        .iter()
        .filter(|allocation| allocation.ids.iter().flatten().any(|id| id.matches(gpu)));
    let bound = pods
        .iter()
        .filter(|pod| pod.devices.iter().flatten().any(|id| identifies(id, gpu)));
    let holders: BTreeSet<&PodKey> = given
        .clone()
        .map(|allocation| &allocation.key)
        .chain(bound.map(|pod| &pod.key))
        .collect();
    let owner_key = given
        .map(|allocation| &allocation.key)
        .next()
        .filter(|_| holders.len() == 1)?;
    // Two pods of one name are a terminating one and its successor: the owner is known a moment later.
    let mut named = pods.iter().filter(|pod| pod.key == *owner_key);
    named
        .next()
        .filter(|_| named.next().is_none())
        .map(|pod| pod.uid.clone())
}

/// Whether a recorded id is of this GPU. An index identifies a whole GPU, never one of its slices.
fn identifies(id: &GpuUuid, gpu: &GpuReport) -> bool {
    match id.index() {
        Some(index) => gpu.parent.is_none() && gpu.index == index,
        None => *id == gpu.uuid,
    }
}

/// The node's pods by the UIDs that a cgroup may show.
struct PodsByUid<'a>(BTreeMap<&'a str, &'a PodUid>);

impl<'a> PodsByUid<'a> {
    /// A pod's own UID has precedence over another pod's annotation.
    fn new(pods: &'a [PodOnNode]) -> Self {
        let is_static =
            |pod: &'a PodOnNode| Some((pod.annotations.get(STATIC_POD_UID)?.as_str(), &pod.uid));
        let own = pods.iter().map(|pod| (pod.uid.as_str(), &pod.uid));
        Self(pods.iter().filter_map(is_static).chain(own).collect())
    }

    /// The pod of this node among those of the nodes around it; the outermost if none is known, because pods become known a
    /// little later than their processes.
    fn innermost(&self, named: &[PodUid]) -> PodUid {
        let pod_on_node = named.iter().rev().find_map(|uid| self.0.get(uid.as_str()));
        pod_on_node.copied().unwrap_or(&named[0]).clone()
    }
}

fn processes(gpus: &[GpuReport]) -> impl Iterator<Item = &ProcessReport> {
    gpus.iter().flat_map(|gpu| gpu.processes.iter().flatten())
}

fn processes_mut(gpus: &mut [GpuReport]) -> impl Iterator<Item = &mut ProcessReport> {
    gpus.iter_mut()
        .flat_map(|gpu| gpu.processes.iter_mut().flatten())
}

#[cfg(test)]
mod tests;

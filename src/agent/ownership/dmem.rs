//! What the kernel's `dmem` controller says of containers: the VRAM that their cgroups are charged, and the limits in force.
//!
//! Only NVIDIA's regions count, `nvidia/<PCI address>/vidmem`. What is not there, cannot be read or makes no sense is unknown.

use super::cgroup::{MAX_PROC_FILE_BYTES, is_gone, read_bounded};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use stowage_report::{CgroupReport, GpuReport, PciAddress, ProcessReport};
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::node_reading::NodeIsolation;

/// How deep below the root the agent and another container may have their common ancestor: a slice of pods of one quality of
/// service is two deep, and the kubelet may have a root of its own.
const MAX_ANCESTOR_DEPTH: usize = 3;
/// Folders of one depth that are searched: a host has some hundred services.
const MAX_SEARCHED: usize = 1024;

/// Reads cgroups below the host's root of them.
#[derive(Debug)]
pub(super) struct Dmem {
    root: PathBuf,
    /// Where the cgroup of a process is, by its path as the agent sees it; `None` if it is not below the root.
    folders: BTreeMap<Arc<Path>, Option<PathBuf>>,
}

/// A value for each GPU. A limit that is `max` is as much as can be written.
type Regions = BTreeMap<PciAddress, Bytes>;

/// What one container says.
#[derive(Debug, Default)]
struct ContainerVram {
    used: Regions,
    limit: Regions,
    guaranteed: Regions,
    /// Limits of the cgroups below it that its processes are in; `None` for those that are in its own.
    leaves: Vec<Option<Regions>>,
}

/// Where a process of a container is.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ProcessCgroup {
    container: PathBuf,
    /// Its own cgroup, if it is in one below that of the container.
    leaf: Option<PathBuf>,
}

/// What the containers of a pod say of one GPU, as far as all of them do.
#[derive(Debug)]
struct PodVram {
    used: Option<Bytes>,
    limit: Option<Bytes>,
    guaranteed: Option<Bytes>,
}

impl Dmem {
    pub fn new(root: PathBuf) -> Self {
        Self {
            root,
            folders: BTreeMap::new(),
        }
    }

    /// Fills in what the cgroups of the pods on each GPU say. `path_of`: of a process, the path of its cgroup as the agent sees it.
    /// Returns what the node has, if there are cgroups below the root, and why something could not be read.
    pub fn fill(
        &mut self,
        gpus: &mut [GpuReport],
        path_of: impl Fn(u32) -> Option<Arc<Path>>,
    ) -> (Option<NodeIsolation>, Option<String>) {
        let isolation = match self.isolation() {
            Ok(isolation) => isolation,
            Err(error) => return (None, Some(self.unreadable(&error))),
        };
        if isolation.is_none_or(|isolation| !isolation.dmem) {
            return (isolation, None);
        }
        let mut problem = None;
        let cgroups = self.cgroups(gpus, path_of, &mut problem);
        let mut read: BTreeMap<&Path, ContainerVram> = BTreeMap::new();
        let mut regions = |folder: &Path, file| {
            regions(&folder.join(file)).unwrap_or_else(|error| {
                problem.get_or_insert_with(|| self.unreadable(&error));
                Regions::new()
            })
        };
        for ProcessCgroup { container, leaf } in cgroups.values().collect::<BTreeSet<_>>() {
            let vram = read.entry(container).or_insert_with(|| ContainerVram {
                used: regions(container, "dmem.current"),
                limit: regions(container, "dmem.max"),
                guaranteed: regions(container, "dmem.min"),
                leaves: Vec::new(),
            });
            let limit = leaf.as_ref().map(|leaf| regions(leaf, "dmem.max"));
            vram.leaves.push(limit);
        }
        for gpu in gpus {
            let container_of =
                |process: &ProcessReport| Some(&*cgroups.get(&process.pid)?.container);
            gpu.cgroups = pods_on(gpu, container_of, &read);
        }
        (isolation, problem)
    }

    fn isolation(&self) -> io::Result<Option<NodeIsolation>> {
        match File::open(self.root.join("cgroup.controllers")).and_then(read_bounded) {
            Ok(names) => Ok(Some(NodeIsolation {
                cgroup_version: 2,
                dmem: names
                    .split(u8::is_ascii_whitespace)
                    .any(|name| name == b"dmem"),
            })),
            // Version 1 has a folder for each controller there.
            Err(error) if is_gone(&error) => {
                Ok(self.root.join("memory").is_dir().then_some(NodeIsolation {
                    cgroup_version: 1,
                    dmem: false,
                }))
            }
            Err(error) => Err(error),
        }
    }

    fn cgroups(
        &mut self,
        gpus: &[GpuReport],
        path_of: impl Fn(u32) -> Option<Arc<Path>>,
        problem: &mut Option<String>,
    ) -> BTreeMap<u32, ProcessCgroup> {
        let (mut found, mut folders) = (BTreeMap::new(), BTreeMap::new());
        for process in gpus.iter().flat_map(|gpu| gpu.processes.iter().flatten()) {
            let (Some(id), Some(path)) = (&process.container, path_of(process.pid)) else {
                continue;
            };
            let folder = match self.folders.get(&path) {
                Some(folder) => folder.clone(),
                None => self.find(&path),
            };
            if folder.is_none() {
                problem.get_or_insert_with(|| self.not_found());
            }
            let cgroup = folder
                .as_deref()
                .and_then(|leaf| ProcessCgroup::new(leaf, id));
            found.extend(cgroup.map(|cgroup| (process.pid, cgroup)));
            folders.insert(path, folder);
        }
        self.folders = folders;
        found
    }

    /// The folder of a cgroup. From within a cgroup namespace its path begins with the way up to the nearest common ancestor, whose
    /// place is not known: what follows identifies it, because a container's id is in it.
    fn find(&self, path: &Path) -> Option<PathBuf> {
        let is_way =
            |part: &Component<'_>| matches!(part, Component::RootDir | Component::ParentDir);
        let below: PathBuf = path.components().skip_while(is_way).collect();
        if !below
            .components()
            .all(|part| matches!(part, Component::Normal(_)))
        {
            return None;
        }
        let mut level = vec![self.root.clone()];
        for _ in 0..=MAX_ANCESTOR_DEPTH {
            if let Some(found) = level
                .iter()
                .map(|one| one.join(&below))
                .find(|one| one.is_dir())
            {
                return Some(found);
            }
            level = level
                .iter()
                .flat_map(|one| subfolders(one))
                .take(MAX_SEARCHED)
                .collect();
        }
        None
    }

    fn unreadable(&self, error: &io::Error) -> String {
        format!(
            "the dmem files of cgroups below {} cannot be read: {error}; run the agent as root",
            self.root.display()
        )
    }

    fn not_found(&self) -> String {
        format!(
            "a container's cgroup is not below {}: mount the host's /sys/fs/cgroup, and name it with --cgroup-root",
            self.root.display()
        )
    }
}

fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

/// What the pods with processes on a GPU have there, in order of UID. A pod has no entry if nothing of it is known, and is unknown
/// as a whole if one of its processes is in no known container, or in one with another pod's.
fn pods_on<'c>(
    gpu: &GpuReport,
    container_of: impl Fn(&ProcessReport) -> Option<&'c Path>,
    read: &BTreeMap<&Path, ContainerVram>,
) -> Vec<CgroupReport> {
    // The driver keeps no limits on slices.
    let Some(pci) = gpu.numbers.pci.filter(|_| gpu.parent.is_none()) else {
        return Vec::new();
    };
    let mut containers: BTreeMap<&PodUid, BTreeSet<Option<&Path>>> = BTreeMap::new();
    let mut owners: BTreeMap<&Path, BTreeSet<&PodUid>> = BTreeMap::new();
    for process in gpu.processes.iter().flatten() {
        let Some(pod) = &process.pod else { continue };
        let container = container_of(process);
        containers.entry(pod).or_default().insert(container);
        if let Some(container) = container {
            owners.entry(container).or_default().insert(pod);
        }
    }
    let is_of_one = |container: &&Path| owners[container].len() == 1;
    let known = containers.into_iter().filter_map(|(pod, containers)| {
        let own = containers
            .into_iter()
            .map(|container| read.get(container.filter(is_of_one)?));
        let vram = PodVram::sum(&own.collect::<Option<Vec<_>>>()?, pci, gpu.total_bytes);
        Some((pod, vram))
    });
    let mut all: Vec<(&PodUid, PodVram)> = known.collect();
    // A driver that lists its regions and charges nothing to them counts elsewhere.
    if all
        .iter()
        .all(|(_, vram)| vram.used.unwrap_or_default() == Bytes::ZERO)
    {
        all.iter_mut().for_each(|(_, vram)| vram.used = None);
    }
    let all = all
        .into_iter()
        .filter(|(_, vram)| vram.used.or(vram.limit).or(vram.guaranteed).is_some());
    all.map(|(pod, vram)| CgroupReport {
        pod: pod.clone(),
        used_bytes: vram.used,
        limit_bytes: vram.limit,
        guaranteed_bytes: vram.guaranteed,
        written_bytes: None,
    })
    .collect()
}

impl PodVram {
    /// More than a GPU has is in use nowhere, and limits nothing.
    fn sum(containers: &[&ContainerVram], pci: PciAddress, total: Bytes) -> Self {
        let sum = |of: &dyn Fn(&ContainerVram) -> Option<Bytes>| {
            containers.iter().map(|one| of(one)).sum::<Option<Bytes>>()
        };
        Self {
            used: sum(&|one| one.used.get(&pci).copied()).filter(|used| *used <= total),
            limit: sum(&|one| one.limit_on(pci)).map(|limit| limit.min(total)),
            guaranteed: sum(&|one| one.guaranteed.get(&pci).copied()).map(|min| min.min(total)),
        }
    }
}

impl ContainerVram {
    /// Its own limit, or the largest of those of the cgroups below it, if all its processes are in such ones and that is less.
    fn limit_on(&self, pci: PciAddress) -> Option<Bytes> {
        let own = self.limit.get(&pci).copied()?;
        let below = self.leaves.iter().map(|leaf| leaf.as_ref()?.get(&pci));
        let below = below.collect::<Option<BTreeSet<_>>>();
        let largest = below.and_then(|below| below.last().map(|bytes| **bytes));
        Some(largest.map_or(own, |largest| own.min(largest)))
    }
}

impl ProcessCgroup {
    /// `None` if no folder on the way is the container's.
    fn new(folder: &Path, container_id: &str) -> Option<Self> {
        let is_its_own = |folder: &&Path| {
            let name = folder.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.contains(container_id))
        };
        // A container may name cgroups of its own below it.
        let container = folder.ancestors().filter(is_its_own).last()?;
        Some(Self {
            container: container.into(),
            leaf: (container != folder).then(|| folder.into()),
        })
    }
}

/// The regions of a file; none if its cgroup is gone, or if it is longer than the kernel's.
fn regions(file: &Path) -> io::Result<Regions> {
    match File::open(file).and_then(read_bounded) {
        Ok(text) if (text.len() as u64) < MAX_PROC_FILE_BYTES => Ok(parse_regions(&text)),
        Ok(_) => Ok(Regions::new()),
        Err(error) if is_gone(&error) => Ok(Regions::new()),
        Err(error) => Err(error),
    }
}

/// Lines of a region and its value. What is no region of NVIDIA's, or no number, is left out.
fn parse_regions(text: &[u8]) -> Regions {
    let region = |line: &[u8]| {
        let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
        let (region, value) = (words.next()?, words.next()?);
        let pci = region.strip_prefix("nvidia/")?.strip_suffix("/vidmem")?;
        let bytes = match value {
            "max" => u64::MAX,
            number => number.parse().ok()?,
        };
        Some((PciAddress::parse(pci)?, Bytes(bytes)))
    };
    text.split(|byte| *byte == b'\n')
        .filter_map(region)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;
    use tempfile::TempDir;

    const REGION: &str = "nvidia/0000:3b:00.0/vidmem";
    const GIB: u64 = 1 << 30;

    /// The host's cgroups, with GPU `3b` of 80 GiB.
    struct Host {
        root: TempDir,
        dmem: Dmem,
        paths: BTreeMap<u32, Arc<Path>>,
        gpu: GpuReport,
    }

    fn host(controllers: &str) -> Host {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("cgroup.controllers"), controllers).unwrap();
        let gpu = json!({ "uuid": "GPU-a", "index": 0, "model": "H100", "totalBytes": 80 * GIB, "processes": [] });
        let mut gpu: GpuReport = serde_json::from_value(gpu).unwrap();
        gpu.numbers.pci = PciAddress::parse("00000000:3B:00.0");
        Host {
            dmem: Dmem::new(root.path().into()),
            root,
            paths: BTreeMap::new(),
            gpu,
        }
    }

    fn id(container: char) -> String {
        container.to_string().repeat(64)
    }

    impl Host {
        fn with_dmem() -> Self {
            host("cpuset cpu io memory dmem pids\n")
        }

        /// The folder of a container, and its path as another container sees it.
        fn place(container: char) -> (String, String) {
            let below = format!(
                "kubepods-burstable-podx.slice/cri-containerd-{}.scope",
                id(container)
            );
            let folder = format!("kubepods.slice/kubepods-burstable.slice/{below}");
            (folder, format!("/../../{below}"))
        }

        /// Writes the dmem files of a cgroup: the value of each.
        fn has(&self, folder: &str, files: &[(&str, &str)]) {
            let folder = self.root.path().join(folder);
            std::fs::create_dir_all(&folder).unwrap();
            for (file, value) in files {
                let text = format!("drm/0000:03:00.0/vram0 77\n{REGION} {value}\n");
                std::fs::write(folder.join(file), text).unwrap();
            }
        }

        fn runs(&mut self, pod: &str, container: char, path: &str) {
            let pid = self.paths.len() as u32 + 1;
            let process = json!({ "pid": pid, "usedBytes": GIB, "pod": pod });
            let mut process: ProcessReport = serde_json::from_value(process).unwrap();
            process.container = Some(id(container).into());
            self.gpu.processes.as_mut().unwrap().push(process);
            self.paths.insert(pid, Path::new(path).into());
        }

        /// A container with these files and a process.
        fn contains(&mut self, pod: &str, container: char, files: &[(&str, &str)]) {
            let (folder, path) = Self::place(container);
            self.has(&folder, files);
            self.runs(pod, container, &path);
        }

        fn fill(&mut self) -> (Option<NodeIsolation>, Option<String>) {
            let paths = self.paths.clone();
            self.dmem.fill(std::slice::from_mut(&mut self.gpu), |pid| {
                paths.get(&pid).cloned()
            })
        }

        /// Used, limit and guaranteed of each pod.
        fn pods(&mut self) -> Vec<(String, [Option<u64>; 3])> {
            self.fill();
            let figures = |one: &CgroupReport| {
                let figures = [one.used_bytes, one.limit_bytes, one.guaranteed_bytes];
                (
                    one.pod.to_string(),
                    figures.map(|bytes| bytes.map(|bytes| bytes.0)),
                )
            };
            self.gpu.cgroups.iter().map(figures).collect()
        }

        fn only(&mut self) -> [Option<u64>; 3] {
            let pods = self.pods();
            assert!(pods.len() <= 1, "{pods:?}");
            pods.first().map_or([None; 3], |(_, figures)| *figures)
        }
    }

    #[test]
    fn the_containers_of_a_pod_add_up_and_each_pod_has_its_own() {
        let mut host = Host::with_dmem();
        let files = |used, limit, min| {
            [
                ("dmem.current", used),
                ("dmem.max", limit),
                ("dmem.min", min),
            ]
        };
        host.contains("x", 'a', &files("100", "300", "200"));
        host.contains("x", 'b', &files("10", "30", "20"));
        host.runs("x", 'b', &Host::place('b').1);
        host.contains("y", 'c', &files("7", "9", "0"));
        let x = ("x".to_owned(), [Some(110), Some(330), Some(220)]);
        assert_eq!(
            host.pods(),
            [x, ("y".to_owned(), [Some(7), Some(9), Some(0)])]
        );
        let isolation = NodeIsolation {
            cgroup_version: 2,
            dmem: true,
        };
        assert_eq!(host.fill(), (Some(isolation), None));
    }

    #[test]
    fn no_limit_is_all_of_the_gpu_and_a_limit_below_the_use_is_as_it_is() {
        let mut host = Host::with_dmem();
        host.contains(
            "x",
            'a',
            &[
                ("dmem.current", "500"),
                ("dmem.max", "max"),
                ("dmem.min", "0"),
            ],
        );
        assert_eq!(host.only(), [Some(500), Some(80 * GIB), Some(0)]);
        host.has(&Host::place('a').0, &[("dmem.max", "100")]);
        assert_eq!(host.only(), [Some(500), Some(100), Some(0)]);
    }

    #[test]
    fn what_makes_no_sense_is_unknown() {
        let mut host = Host::with_dmem();
        host.contains("x", 'a', &[("dmem.current", "500"), ("dmem.max", "100")]);
        let folder = Host::place('a').0;
        for value in [
            "",
            "-1",
            "1e9",
            "99999999999999999999999999",
            "\u{0}",
            "five",
        ] {
            host.has(&folder, &[("dmem.max", value), ("dmem.min", value)]);
            assert_eq!(host.only(), [Some(500), None, None], "{value:?}");
        }
        host.has(&folder, &[("dmem.current", "18446744073709551615")]);
        assert_eq!(host.only(), [None; 3], "more than the GPU has");
        let other = format!(
            "nvidia/0000:3c:00.0/vidmem 5\nnvidia/0000:3b:00.0/bar1 5\nnvidia/x/vidmem 5\n{REGION}\n"
        );
        std::fs::write(host.root.path().join(&folder).join("dmem.current"), other).unwrap();
        assert_eq!(host.only(), [None; 3], "other regions");
        let long = format!("{REGION} 5\n{}", "x".repeat(MAX_PROC_FILE_BYTES as usize));
        std::fs::write(host.root.path().join(&folder).join("dmem.current"), long).unwrap();
        assert_eq!(host.only(), [None; 3], "no file of the kernel's");
    }

    #[test]
    fn a_cgroup_that_is_gone_says_nothing_and_is_no_problem() {
        let mut host = Host::with_dmem();
        host.contains("x", 'a', &[("dmem.current", "500"), ("dmem.max", "600")]);
        assert_eq!(host.only(), [Some(500), Some(600), None]);
        let folder = host.root.path().join(Host::place('a').0);
        std::fs::remove_file(folder.join("dmem.current")).unwrap();
        assert_eq!(host.only(), [None, Some(600), None], "between two reads");
        std::fs::remove_dir_all(folder).unwrap();
        assert_eq!((host.only(), host.fill().1), ([None; 3], None));
    }

    #[test]
    fn unreadable_files_are_reported_once_in_the_same_words() {
        let mut host = Host::with_dmem();
        for container in ['a', 'b'] {
            host.contains("x", container, &[("dmem.current", "1")]);
            std::fs::create_dir(
                host.root
                    .path()
                    .join(Host::place(container).0)
                    .join("dmem.max"),
            )
            .unwrap();
        }
        let (_, problem) = host.fill();
        let reason = problem.clone().unwrap();
        assert!(
            reason.contains("as root") && !reason.contains("cri-containerd"),
            "{reason}"
        );
        assert_eq!(host.fill().1, problem);
        assert_eq!(host.only()[1], None);
        std::fs::remove_file(host.root.path().join("cgroup.controllers")).unwrap();
        std::fs::create_dir(host.root.path().join("cgroup.controllers")).unwrap();
        let (isolation, problem) = host.fill();
        assert_eq!(isolation, None);
        assert!(problem.unwrap().contains("as root"));
    }

    #[test]
    fn nodes_without_the_controller_are_named_and_nothing_is_read() {
        let mut host = host("cpu memory\n");
        host.contains("x", 'a', &[("dmem.current", "500")]);
        let without = |cgroup_version| {
            Some(NodeIsolation {
                cgroup_version,
                dmem: false,
            })
        };
        assert_eq!((host.only(), host.fill()), ([None; 3], (without(2), None)));
        std::fs::remove_file(host.root.path().join("cgroup.controllers")).unwrap();
        assert_eq!(host.fill(), (None, None), "no cgroups");
        std::fs::create_dir(host.root.path().join("memory")).unwrap();
        assert_eq!(host.fill(), (without(1), None));
    }

    #[test]
    fn a_container_is_found_wherever_the_agent_is_and_a_missing_one_is_reported() {
        let files = [("dmem.current", "500")];
        let below = format!("pod-x/{}", id('a'));
        for (folder, path) in [
            ("kubepods/burstable", format!("/kubepods/burstable/{below}")),
            ("kubepods/burstable", format!("/../../burstable/{below}")),
            ("root/kubepods/burstable", format!("/../{below}")),
        ] {
            let mut host = Host::with_dmem();
            host.has(&format!("{folder}/{below}"), &files);
            host.runs("x", 'a', &path);
            assert_eq!(host.only()[0], Some(500), "{folder} {path}");
        }
        for path in ["/../elsewhere", "/../a/../../b", "/", "/kubepods/other"] {
            let mut host = Host::with_dmem();
            host.runs("x", 'a', path);
            let reason = host.fill().1;
            assert!(
                path == "/" || reason.unwrap().contains("--cgroup-root"),
                "{path}"
            );
            assert_eq!(host.only(), [None; 3]);
        }
    }

    #[test]
    fn a_limit_below_the_containers_cgroup_counts_if_all_its_processes_have_one() {
        let mut host = Host::with_dmem();
        let (folder, path) = Host::place('a');
        host.contains("x", 'a', &[("dmem.current", "500"), ("dmem.max", "max")]);
        host.paths
            .insert(1, Path::new(&format!("{path}/container")).into());
        host.has(&format!("{folder}/container"), &[("dmem.max", "700")]);
        assert_eq!(host.only(), [Some(500), Some(700), None]);
        host.runs("x", 'a', &path);
        assert_eq!(host.only()[1], Some(80 * GIB));
    }

    #[test]
    fn a_pod_with_a_process_in_no_known_container_is_unknown_and_so_are_two_in_one() {
        let mut host = Host::with_dmem();
        host.contains("x", 'a', &[("dmem.current", "500")]);
        let known = host.gpu.clone();
        host.runs("x", 'b', &Host::place('b').1);
        assert_eq!(host.pods(), []);
        host.gpu = known;
        host.runs("y", 'a', &Host::place('a').1);
        assert_eq!(host.pods(), []);
    }

    #[test]
    fn a_driver_that_charges_nothing_counts_elsewhere_and_slices_have_no_limits() {
        let mut host = Host::with_dmem();
        host.contains("x", 'a', &[("dmem.current", "0"), ("dmem.max", "max")]);
        assert_eq!(host.only(), [None, Some(80 * GIB), None]);
        host.contains("y", 'b', &[("dmem.current", "9")]);
        assert_eq!(host.pods()[0].1[0], Some(0), "one that charges to others");
        host.gpu.parent = Some(host.gpu.uuid.clone());
        assert_eq!(host.pods(), []);
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(bytes: Vec<u8>, text in "(nvidia/[0-9a-f:.]{0,14}/vidmem| |max|[0-9]{0,22}|\n){0,20}") {
            parse_regions(&bytes);
            parse_regions(text.as_bytes());
        }
    }
}

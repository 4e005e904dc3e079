//! Finds a process' pod by the cgroup that the kubelet put it in.
//!
//! Every container runtime keeps the pod's UID in the path, whatever the cgroup version and driver; the rest of the path varies
//! and is ignored. Nothing here knows which pods exist.

use memchr::{memchr, memmem, memrchr};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use stowage_scheduling::ids::PodUid;

/// A longer file in `/proc` was not written by the kernel: a process is in a dozen hierarchies, with paths of at most 4 KiB
/// each.
pub(super) const MAX_PROC_FILE_BYTES: u64 = 64 << 10;

/// Minimum hexadecimal digits of a UID: a UUID's, or those of a static pod's hash.
const UID_DIGITS: usize = 32;

/// Hexadecimal digits of a container's id, with every runtime.
const CONTAINER_DIGITS: usize = 64;

/// Processes remembered. A node runs thousands of processes, but few of them on GPUs.
const MAX_CACHED: usize = 4096;

/// The field of `stat` with the start time of a process, counted from 1 (proc_pid_stat(5)).
const START_TIME_FIELD: usize = 22;

/// Reads the cgroups of processes, and caches those that belong to a pod: a container's process never leaves it.
#[derive(Debug)]
pub(crate) struct Cgroups {
    proc: PathBuf,
    cache: FxHashMap<u32, CachedProcess>,
}

#[derive(Debug)]
struct CachedProcess {
    /// Distinguishes a process from a later one of the same PID. In clock ticks since boot.
    started: u64,
    owner: ProcessOwner,
    /// The path of its cgroup of version 2, as it is seen from here.
    path: Option<Arc<Path>>,
}

/// Where a process belongs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ProcessOwner {
    /// To a pod. Several are named if a node runs inside another node's pod; the outermost comes first. And to one of its
    /// containers, by the id that the runtime gave it, if the path has one.
    Pod(Arc<[PodUid]>, Option<Arc<str>>),
    /// To a cgroup outside Kubernetes: a service of the host, or a container that Kubernetes does not know.
    Elsewhere,
    /// Its path is the root of a cgroup namespace, which identifies nothing.
    Unidentified,
    /// It has ended, or is not visible from here.
    Gone,
}

#[derive(Debug, thiserror::Error)]
#[error("{} cannot be read: {error}; run the agent as root with the host's /proc", path.display())]
pub(crate) struct ProcError {
    path: PathBuf,
    error: io::Error,
}

impl Cgroups {
    /// `proc` is the `/proc` that contains the host's PIDs.
    pub fn new(proc: PathBuf) -> Self {
        Self {
            proc,
            cache: FxHashMap::default(),
        }
    }

    pub fn proc(&self) -> &Path {
        &self.proc
    }

    pub fn owner_of(&mut self, pid: u32) -> Result<ProcessOwner, ProcError> {
        let Some(stat) = self.read(pid, "stat")? else {
            return Ok(ProcessOwner::Gone);
        };
        let started = start_time(&stat);
        if let Some(cached) = self.cache.get(&pid)
            && started == Some(cached.started)
        {
            return Ok(cached.owner.clone());
        }
        let Some(cgroup) = self.read(pid, "cgroup")? else {
            return Ok(ProcessOwner::Gone);
        };
        let owner = parse_owner(&cgroup);
        if let (Some(started), ProcessOwner::Pod(..)) = (started, &owner) {
            self.insert(
                pid,
                CachedProcess {
                    started,
                    owner: owner.clone(),
                    path: unified_path(&cgroup),
                },
            );
        }
        Ok(owner)
    }

    /// The path of the cgroup of version 2 of a pod's process, as it is seen from here. Asks the cache alone.
    pub fn path_of(&self, pid: u32) -> Option<Arc<Path>> {
        self.cache.get(&pid)?.path.clone()
    }

    /// Removes every other process from the cache.
    pub fn retain(&mut self, pids: &BTreeSet<u32>) {
        self.cache.retain(|pid, _| pids.contains(pid));
    }

    fn insert(&mut self, pid: u32, process: CachedProcess) {
        if self.cache.len() < MAX_CACHED || self.cache.contains_key(&pid) {
            self.cache.insert(pid, process);
        }
    }

    /// `None` if there is no such process.
    fn read(&self, pid: u32, name: &str) -> Result<Option<Vec<u8>>, ProcError> {
        let path = self.proc.join(pid.to_string()).join(name);
        match File::open(&path).and_then(read_bounded) {
            Ok(text) => Ok(Some(text)),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(ProcError { path, error }),
        }
    }
}

pub(super) fn read_bounded(file: File) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    file.take(MAX_PROC_FILE_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

/// A process that ends while its file is open answers "no such process", and a cgroup that is removed "no such device".
pub(super) fn is_gone(error: &io::Error) -> bool {
    const NO_SUCH_PROCESS: i32 = 3;
    const NO_SUCH_DEVICE: i32 = 19;
    error.kind() == io::ErrorKind::NotFound
        || matches!(error.raw_os_error(), Some(NO_SUCH_PROCESS | NO_SUCH_DEVICE))
}

/// The name of a process is in parentheses and may itself contain spaces and parentheses: the fields follow the last one.
fn start_time(stat: &[u8]) -> Option<u64> {
    let after_name = &stat[memrchr(b')', stat)? + 1..];
    // The first field after the name is the third.
    let field = after_name
        .split(u8::is_ascii_whitespace)
        .filter(|field| !field.is_empty())
        .nth(START_TIME_FIELD - 3)?;
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// The owner that a process' cgroup file shows: the first hierarchy that names a pod counts.
fn parse_owner(cgroup: &[u8]) -> ProcessOwner {
    let paths: Vec<&[u8]> = cgroup
        .split(|byte| *byte == b'\n')
        .filter_map(cgroup_path)
        .collect();
    let named = paths
        .iter()
        .map(|path| (pods_in(path), container_in(path)))
        .find(|(pods, _)| !pods.is_empty());
    match named {
        Some((pods, container)) => ProcessOwner::Pod(pods.into(), container),
        None if paths.iter().all(|path| is_namespace_root(path)) => ProcessOwner::Unidentified,
        None => ProcessOwner::Elsewhere,
    }
}

/// The path in the only hierarchy of version 2, which has the number 0 and no controllers.
fn unified_path(cgroup: &[u8]) -> Option<Arc<Path>> {
    let mut lines = cgroup.split(|byte| *byte == b'\n');
    let path = lines.find_map(|line| line.strip_prefix(b"0::"))?;
    Some(Path::new(OsStr::from_bytes(path)).into())
}

/// The part after the second colon of `hierarchy:controllers:path`.
fn cgroup_path(line: &[u8]) -> Option<&[u8]> {
    let controllers = &line[memchr(b':', line)? + 1..];
    Some(&controllers[memchr(b':', controllers)? + 1..])
}

/// Only a way up from the root of a cgroup namespace, or that root itself.
fn is_namespace_root(path: &[u8]) -> bool {
    path.split(|byte| *byte == b'/')
        .all(|part| matches!(part, b"" | b"." | b".."))
}

fn pods_in(path: &[u8]) -> Vec<PodUid> {
    memmem::find_iter(path, b"pod")
        .filter_map(|at| leading_uid(&path[at + b"pod".len()..]))
        .collect()
}

/// The container id in a cgroup path; of a node inside another node's pod, the innermost one.
fn container_in(path: &[u8]) -> Option<Arc<str>> {
    let is_id = |word: &&[u8]| word.len() == CONTAINER_DIGITS;
    let id = path.split(|byte| !byte.is_ascii_hexdigit()).rfind(is_id)?;
    Some(std::str::from_utf8(id).ok()?.into())
}

/// The UID at the start of the text. The systemd driver writes `_` for `-`, which has another meaning for it.
fn leading_uid(text: &[u8]) -> Option<PodUid> {
    let is_of_uid = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f' | b'-' | b'_');
    let uid = &text[..text
        .iter()
        .position(|byte| !is_of_uid(byte))
        .unwrap_or(text.len())];
    // `libpod-<id>` is a container of podman.
    let begins_well = uid.first().is_some_and(u8::is_ascii_hexdigit);
    let digits = uid.iter().filter(|byte| byte.is_ascii_hexdigit()).count();
    if !begins_well || digits < UID_DIGITS {
        return None;
    }
    let uid: String = uid
        .iter()
        .map(|byte| {
            if *byte == b'_' {
                '-'
            } else {
                char::from(*byte)
            }
        })
        .collect();
    PodUid::parse(&uid).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tempfile::TempDir;

    const UID: &str = "0e5c2a4b-93d1-4f7e-8a06-5b1d2c3e4f50";
    const CONTAINER: &str = "6f1e0d9c8b7a695847362514039f8e7d6c5b4a39281706f5e4d3c2b1a0987654";

    fn pods(cgroup: &str) -> Vec<String> {
        match parse_owner(cgroup.as_bytes()) {
            ProcessOwner::Pod(pods, _) => pods.iter().map(ToString::to_string).collect(),
            _ => vec![],
        }
    }

    #[test]
    fn the_uid_is_found_whatever_the_version_and_the_driver() {
        let systemd = UID.replace('-', "_");
        for cgroup in [
            format!(
                "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{systemd}.slice/cri-containerd-{CONTAINER}.scope\n"
            ),
            format!(
                "0::/kubepods.slice/kubepods-pod{systemd}.slice/crio-{CONTAINER}.scope/container\n"
            ),
            format!("0::/kubepods/besteffort/pod{UID}/{CONTAINER}\n"),
            format!(
                "0::/../../kubepods-besteffort.slice/kubepods-besteffort-pod{systemd}.slice/x.scope\n"
            ),
            format!("0::/kubepods/pod{UID}"),
            format!(
                "12:memory:/kubepods/burstable/pod{UID}/{CONTAINER}\n1:name=systemd:/init.scope\n"
            ),
            format!(
                "2:cpu,cpuacct:/\n1:name=systemd:/kubepods.slice/kubepods-pod{systemd}.slice/docker-{CONTAINER}.scope\n"
            ),
            format!(
                "0::/system.slice/containerd.service/kubepods-burstable-pod{systemd}.slice:cri-containerd:{CONTAINER}\n"
            ),
        ] {
            assert_eq!(pods(&cgroup), [UID], "{cgroup}");
        }
    }

    #[test]
    fn the_container_is_found_and_a_path_without_one_names_none() {
        let container =
            |path: &str| match parse_owner(format!("0::/kubepods/pod{UID}{path}\n").as_bytes()) {
                ProcessOwner::Pod(_, container) => container,
                other => panic!("{other:?}"),
            };
        let (inner, id) = (CONTAINER.replace('6', "7"), Some(Arc::from(CONTAINER)));
        for path in [
            "/ID",
            "/ID/container",
            ".slice/cri-containerd-ID.scope",
            ".slice:cri-containerd:ID",
            ".slice/crio-ID.scope/x",
        ] {
            assert_eq!(container(&path.replace("ID", CONTAINER)), id, "{path}");
        }
        let nested = container(&format!("/{CONTAINER}/kubelet/kubepods/pod{UID}/{inner}"));
        assert_eq!(nested.as_deref(), Some(&*inner));
        for none in ["", "/x", "/crio-0123abcd.scope", &format!("/{CONTAINER}0")] {
            assert_eq!(container(none), None, "{none}");
        }
    }

    #[test]
    fn a_static_pod_has_a_hash_for_a_uid() {
        let hash = UID.replace('-', "");
        assert_eq!(
            pods(&format!("0::/kubepods/burstable/pod{hash}/{CONTAINER}\n")),
            [hash]
        );
    }

    #[test]
    fn for_a_node_inside_a_pod_both_pods_are_named_the_outer_one_first() {
        let outer = UID.replace('0', "1");
        let cgroup = format!("0::/kubepods/pod{outer}/{CONTAINER}/kubelet/kubepods/pod{UID}/x\n");
        assert_eq!(pods(&cgroup), [outer.as_str(), UID]);
    }

    #[test]
    fn a_cgroup_outside_kubernetes_is_elsewhere_and_a_namespace_root_is_unsaid() {
        for cgroup in [
            "0::/system.slice/dcgm.service\n".to_string(),
            "0::/podium/poda/pod-1.scope\n".to_string(),
            format!("0::/machine.slice/libpod-{CONTAINER}.scope\n"),
            format!("0::/docker/{CONTAINER}\n"),
            format!("1:cpu:/\n0::/pod{}", &UID[..35]),
        ] {
            assert_eq!(
                parse_owner(cgroup.as_bytes()),
                ProcessOwner::Elsewhere,
                "{cgroup}"
            );
        }
        for cgroup in ["0::/\n", "0::/../..\n", "3:cpu:/\n0::/\n", "", "no colons"] {
            assert_eq!(
                parse_owner(cgroup.as_bytes()),
                ProcessOwner::Unidentified,
                "{cgroup}"
            );
        }
    }

    #[test]
    fn a_process_may_call_itself_anything() {
        let stat = |name: &str| {
            format!("42 ({name}) S 1 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 9 0 987654 11 12\n")
        };
        for name in ["vllm", "a b", "x) S 1 (y", "", ")))", "\u{1F999}"] {
            assert_eq!(start_time(stat(name).as_bytes()), Some(987_654), "{name}");
        }
        for cut in [
            "",
            "42 (x",
            "42 (x) S 1 2",
            "42 (x) S a b c d e f g h i j k l m n o p q r s",
        ] {
            assert_eq!(start_time(cut.as_bytes()), None, "{cut}");
        }
    }

    struct Proc {
        folder: TempDir,
        cgroups: Cgroups,
    }

    fn proc() -> Proc {
        let folder = tempfile::tempdir().unwrap();
        let cgroups = Cgroups::new(folder.path().into());
        Proc { folder, cgroups }
    }

    impl Proc {
        fn runs(&self, pid: u32, started: u64, cgroup: impl AsRef<[u8]>) {
            let folder = self.folder.path().join(pid.to_string());
            std::fs::create_dir_all(&folder).unwrap();
            let stat = format!("{pid} (x) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {started} 0\n");
            std::fs::write(folder.join("stat"), stat).unwrap();
            std::fs::write(folder.join("cgroup"), cgroup).unwrap();
        }

        fn pods(&mut self, pid: u32) -> Vec<String> {
            match self.cgroups.owner_of(pid).unwrap() {
                ProcessOwner::Pod(pods, _) => pods.iter().map(ToString::to_string).collect(),
                _ => vec![],
            }
        }
    }

    #[test]
    fn a_process_is_cached_until_its_pid_is_reused() {
        let mut proc = proc();
        let other = UID.replace('0', "1");
        proc.runs(7, 100, format!("0::/kubepods/pod{UID}/x\n"));
        assert_eq!(proc.pods(7), [UID]);
        proc.runs(7, 100, format!("0::/kubepods/pod{other}/x\n"));
        assert_eq!(proc.pods(7), [UID], "a process stays in its container");
        proc.runs(7, 101, format!("0::/kubepods/pod{other}/x\n"));
        assert_eq!(proc.pods(7), [other], "another process has its PID");
    }

    #[test]
    fn a_process_outside_pods_is_not_cached() {
        let mut proc = proc();
        proc.runs(7, 100, "0::/system.slice/containerd.service\n");
        assert_eq!(proc.cgroups.owner_of(7).unwrap(), ProcessOwner::Elsewhere);
        proc.runs(7, 100, format!("0::/kubepods/pod{UID}/x\n"));
        assert_eq!(proc.pods(7), [UID], "it was on its way into its container");
    }

    #[test]
    fn the_cache_is_bounded_and_drops_other_processes() {
        let mut proc = proc();
        for pid in 0..MAX_CACHED as u32 + 10 {
            proc.cgroups.insert(
                pid,
                CachedProcess {
                    started: 1,
                    owner: ProcessOwner::Elsewhere,
                    path: None,
                },
            );
        }
        assert_eq!(proc.cgroups.cache.len(), MAX_CACHED);
        proc.cgroups.retain(&BTreeSet::from([3, 9_999_999]));
        assert_eq!(proc.cgroups.cache.len(), 1);
    }

    #[test]
    fn an_ended_process_is_gone_and_an_unreadable_one_is_reported() {
        let mut proc = proc();
        assert_eq!(proc.cgroups.owner_of(7).unwrap(), ProcessOwner::Gone);
        std::fs::create_dir_all(proc.folder.path().join("8/stat")).unwrap();
        let reason = proc.cgroups.owner_of(8).unwrap_err().to_string();
        assert!(
            reason.contains("8/stat") && reason.contains("as root"),
            "{reason}"
        );
    }

    #[test]
    fn a_malformed_cgroup_file_names_no_pod() {
        let mut proc = proc();
        let rubbish: Vec<u8> = (0..=255)
            .cycle()
            .take(3 * MAX_PROC_FILE_BYTES as usize)
            .collect();
        proc.runs(7, 100, rubbish);
        assert!(matches!(
            proc.cgroups.owner_of(7).unwrap(),
            ProcessOwner::Elsewhere | ProcessOwner::Unidentified
        ));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_readers_panic(bytes: Vec<u8>) {
            parse_owner(&bytes);
            start_time(&bytes);
        }

        #[test]
        fn whatever_is_found_looks_like_a_uid(text in "[0:/]{0,4}(pod|[-_a-f0-9]{8}|/|\\.slice|x){0,20}") {
            for uid in pods(&text) {
                prop_assert!(uid.chars().all(|c| c == '-' || c.is_ascii_hexdigit()));
                prop_assert!(uid.chars().filter(char::is_ascii_hexdigit).count() >= UID_DIGITS);
            }
        }
    }
}

//! Turns to start: pods that share a GPU start their engines one after the other, though a kubelet that has just booted starts all
//! of its node at once.
//!
//! An init container asks by connecting to a socket of the node. The kernel says which pod it belongs to, so no pod asks for another,
//! and the answer is the end of the connection: without an agent there is none, and nothing waits. A turn is of the GPUs that the
//! pod's Binding recorded, and ends with the pod's readiness; whatever is not known lets a pod start.

use super::ownership::cgroup::{Cgroups, ProcessOwner};
use super::pods::PodOnNode;
use crate::ids::{GpuUuid, PodUid};
use anyhow::{Context, Result};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{UnixListener, UnixStream};
use tokio_util::task::AbortOnDropHandle;
use tracing::info;

/// A pod that is not ready by then holds no other one up; as long as a policy's `startGate.max` by default.
const LONGEST_TURN: Duration = Duration::from_secs(600);
/// After this, a pod that the API server has not shown starts without a turn.
const UNKNOWN_POD: Duration = Duration::from_secs(30);
/// More than a node has pods. What asks beyond starts at once.
const MAX_ASKS: usize = 512;

/// The pods that start, and those that wait for them, in the order in which they asked.
#[derive(Debug, Default)]
pub struct Turns {
    asks: Vec<Ask>,
    turns: BTreeMap<PodUid, Turn>,
}

#[derive(Debug)]
struct Ask {
    /// As its cgroup names the pod: several, where a node runs inside another node's pod; the outermost comes first.
    pods: Arc<[PodUid]>,
    since: Instant,
    is_told: bool,
    connection: UnixStream,
}

#[derive(Debug)]
struct Turn {
    devices: Vec<GpuUuid>,
    began: Instant,
    /// The pod was seen not to be ready since: after a boot the API server shows for a while how it was before.
    was_unready: bool,
}

impl Turns {
    fn ask(&mut self, pods: Arc<[PodUid]>, connection: UnixStream) {
        if self.asks.len() < MAX_ASKS {
            self.asks.push(Ask { pods, since: Instant::now(), is_told: false, connection });
        }
    }

    /// Ends turns, and lets those start whose GPUs are free then. A pod waits for those that asked before it.
    pub fn round(&mut self, pods: &[PodOnNode], now: Instant) {
        let pod_of = |uid: &PodUid| pods.iter().find(|pod| pod.uid == *uid);
        self.turns.retain(|uid, turn| {
            let Some(pod) = pod_of(uid).filter(|pod| !pod.is_leaving) else { return false };
            turn.was_unready |= !pod.is_ready;
            !(turn.was_unready && pod.is_ready) && now.duration_since(turn.began) < LONGEST_TURN
        });
        let mut taken: BTreeSet<&GpuUuid> = BTreeSet::new();
        let of_turns: Vec<GpuUuid> = self.turns.values().flat_map(|turn| turn.devices.clone()).collect();
        taken.extend(&of_turns);
        for mut ask in std::mem::take(&mut self.asks).into_iter().filter(Ask::is_open) {
            let Some(pod) = ask.pods.iter().rev().find_map(pod_of) else {
                if now.duration_since(ask.since) < UNKNOWN_POD {
                    self.asks.push(ask);
                }
                continue;
            };
            let devices = pod.devices.as_deref().unwrap_or_default();
            if !self.turns.contains_key(&pod.uid) {
                if devices.iter().any(|gpu| taken.contains(gpu)) {
                    if !std::mem::replace(&mut ask.is_told, true) {
                        info!(pod = %pod.key, "waits for its turn to start");
                    }
                    self.asks.push(ask);
                } else {
                    info!(pod = %pod.key, "starts: it is its turn");
                    let turn = Turn { devices: devices.to_vec(), began: now, was_unready: !pod.is_ready };
                    self.turns.insert(pod.uid.clone(), turn);
                }
                taken.extend(devices);
            }
        }
    }
}

impl Ask {
    /// It has not given up. Nothing is ever sent to it, nor by it.
    fn is_open(&self) -> bool {
        matches!(self.connection.try_read(&mut [0]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
    }
}

/// Takes connections at `socket` until it is dropped; `proc` contains the host's PIDs.
pub fn serve(socket: &Path, proc: PathBuf) -> Result<(Arc<Mutex<Turns>>, AbortOnDropHandle<()>)> {
    // Of an agent before this one.
    let _ = std::fs::remove_file(socket);
    let at = || format!("--turns {}", socket.display());
    let listener = UnixListener::bind(socket).with_context(at)?;
    // Init containers run as any user.
    std::fs::set_permissions(socket, Permissions::from_mode(0o666)).with_context(at)?;
    let turns = Arc::new(Mutex::new(Turns::default()));
    let (asked, mut cgroups) = (turns.clone(), Cgroups::new(proc));
    let serving = tokio::spawn(async move {
        loop {
            match listener.accept().await {
                Ok((connection, _)) => {
                    let pid = connection.peer_cred().ok().and_then(|peer| u32::try_from(peer.pid()?).ok());
                    if let Some(Ok(ProcessOwner::Pod(pods))) = pid.map(|pid| cgroups.place(pid)) {
                        asked.lock().ask(pods, connection);
                    }
                }
                // Too many open files, for one.
                Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
            }
        }
    });
    Ok((turns, AbortOnDropHandle::new(serving)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(name: &str, devices: &str, is_ready: bool) -> PodOnNode {
        let ready = if is_ready { "True" } else { "False" };
        let pod = json!({
            "metadata": { "name": name, "namespace": "a", "uid": name, "annotations": { "stowage.dev/devices": devices } },
            "spec": { "containers": [] },
            "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": ready }] },
        });
        PodOnNode::of(&serde_json::from_value(pod).unwrap()).unwrap()
    }

    /// Asks for a pod; the other end of the connection.
    fn ask(turns: &mut Turns, name: &str) -> UnixStream {
        let (there, here) = UnixStream::pair().unwrap();
        turns.ask([PodUid::parse(name).unwrap()].into(), there);
        here
    }

    fn waits(connection: &UnixStream) -> bool {
        !matches!(connection.try_read(&mut [0]), Ok(0))
    }

    #[tokio::test]
    async fn pods_that_share_a_gpu_start_in_the_order_in_which_they_asked() {
        let (mut turns, now) = (Turns::default(), Instant::now());
        let all = |ready: &[&str]| {
            [("one", "GPU-a"), ("two", "GPU-a,GPU-b"), ("three", "GPU-b"), ("four", "GPU-c")]
                .map(|(name, devices)| pod(name, devices, ready.contains(&name)))
        };
        let asked = ["one", "two", "three", "four"].map(|name| ask(&mut turns, name));
        turns.round(&all(&[]), now);
        // `three` could start, but `two` would then wait for ever on a busy node.
        assert_eq!(asked.each_ref().map(waits), [false, true, true, false]);
        turns.round(&all(&["one"]), now);
        assert_eq!(asked.each_ref().map(waits), [false, false, true, false]);
        turns.round(&all(&["one", "two"]), now);
        assert_eq!(asked.each_ref().map(waits), [false; 4]);
    }

    #[tokio::test]
    async fn a_readiness_from_before_the_boot_ends_no_turn() {
        let (mut turns, now) = (Turns::default(), Instant::now());
        let _one = ask(&mut turns, "one");
        let two = ask(&mut turns, "two");
        for (is_ready, still_waits) in [(true, true), (true, true), (false, true), (true, false)] {
            turns.round(&[pod("one", "GPU-a", is_ready), pod("two", "GPU-a", false)], now);
            assert_eq!(waits(&two), still_waits);
        }
    }

    #[tokio::test]
    async fn a_pod_that_is_never_ready_or_gone_holds_no_other_up_for_long() {
        let begun = Instant::now();
        for (pods, later) in [(["one", "two"].as_slice(), LONGEST_TURN), (&["two"], Duration::ZERO)] {
            let mut turns = Turns::default();
            let _one = ask(&mut turns, "one");
            let two = ask(&mut turns, "two");
            turns.round(&["one", "two"].map(|name| pod(name, "GPU-a", false)), begun);
            assert!(waits(&two));
            let pods: Vec<PodOnNode> = pods.iter().map(|name| pod(name, "GPU-a", false)).collect();
            turns.round(&pods, begun + later);
            assert!(!waits(&two));
        }
    }

    #[tokio::test]
    async fn a_pod_that_asks_again_takes_no_second_turn_and_one_that_gave_up_none() {
        let (mut turns, now) = (Turns::default(), Instant::now());
        let pods = ["one", "two", "three"].map(|name| pod(name, "GPU-a", false));
        let again = [ask(&mut turns, "one"), ask(&mut turns, "one")];
        let two = ask(&mut turns, "two");
        let three = ask(&mut turns, "three");
        turns.round(&pods, now);
        assert_eq!((again.each_ref().map(waits), waits(&two)), ([false; 2], true));
        drop(two);
        turns.round(&pods[1..], now);
        assert!(!waits(&three));
    }

    #[tokio::test]
    async fn a_pod_of_which_nothing_is_known_starts_in_the_end_and_one_without_gpus_at_once() {
        let (mut turns, asked) = (Turns::default(), Instant::now());
        let (unknown, without) = (ask(&mut turns, "unknown"), ask(&mut turns, "without"));
        turns.round(&[pod("without", "", false)], asked);
        assert_eq!((waits(&unknown), waits(&without)), (true, false));
        turns.round(&[], asked + UNKNOWN_POD + Duration::from_secs(1));
        assert!(!waits(&unknown));
    }
}

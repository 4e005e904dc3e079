//! Turns to start: pods that share a GPU start their engines one after the other, though a kubelet that has just booted starts all
//! of its node at once.
//!
//! An init container asks by connecting to a socket of the node. The kernel says which pod it belongs to, so no pod asks for another,
//! and the answer is the end of the connection: without an agent there is none, and nothing waits. A turn is of the GPUs that the
//! pod's Binding recorded, and ends with the pod's readiness; whatever is not known lets a pod start.

use super::ownership::cgroup::{Cgroups, ProcessOwner};
use super::pods::PodOnNode;
use anyhow::{Context, Result};
use parking_lot::Mutex;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stowage_scheduling::ids::{GpuUuid, PodUid};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{sleep, timeout};
use tokio_util::task::AbortOnDropHandle;
use tracing::info;

/// A pod that is not ready by then holds no other one up; as long as a policy's `startGate.max` by default.
const MAX_TURN: Duration = Duration::from_secs(600);
/// After this, a pod that the API server has not shown starts without a turn.
const UNKNOWN_POD_TIMEOUT: Duration = Duration::from_secs(30);
/// More than a node has pods. What asks beyond starts at once.
const MAX_TURNS: usize = 512;
/// Pause between two attempts to reach the agent, and after a failed accept: an agent restarts within seconds.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// The pods that start and those that wait, in the order in which they asked: none waits for one behind it.
#[derive(Debug, Default)]
pub struct Turns(Vec<Turn>);

#[derive(Debug)]
struct Turn {
    pod: PodUid,
    /// When it asked, or was let go.
    asked_or_started_at: Instant,
    /// While it waits. Nothing is sent on it; that it is closed is the answer.
    connection: Option<UnixStream>,
    /// The pod was seen not to be ready since it started: after a boot the API server shows for a while how it was before.
    was_unready: bool,
}

impl Turns {
    /// Adds a pod at the end of the queue; a pod that asks again loses its earlier place.
    fn enqueue(&mut self, pod: PodUid, connection: UnixStream) {
        let before = self.0.len();
        self.0.retain(|turn| turn.pod != pod);
        let is_new = self.0.len() == before;
        if self.0.len() < MAX_TURNS {
            // A pod that asks again and again fills no log.
            if is_new {
                info!(%pod, "asks for its turn to start");
            }
            let (since, connection) = (Instant::now(), Some(connection));
            self.0.push(Turn {
                pod,
                asked_or_started_at: since,
                connection,
                was_unready: false,
            });
        }
    }

    /// Ends turns, and lets those start whose GPUs are free then.
    pub fn advance(&mut self, pods: &[PodOnNode], now: Instant) {
        let mut busy_gpus: Vec<&GpuUuid> = Vec::new();
        self.0.retain_mut(|turn| {
            let elapsed = now.duration_since(turn.asked_or_started_at);
            let Some(pod) = pods
                .iter()
                .find(|pod| pod.uid == turn.pod && !pod.is_terminating)
            else {
                return turn.connection.is_some() && elapsed < UNKNOWN_POD_TIMEOUT;
            };
            let gpus = || pod.devices.iter().flatten();
            match &turn.connection {
                // It has given up.
                Some(connection) if matches!(connection.try_read(&mut [0]), Ok(0)) => return false,
                Some(_) if gpus().any(|gpu| busy_gpus.contains(&gpu)) => {}
                Some(_) => {
                    info!(pod = %pod.key, "starts: it is its turn");
                    (turn.connection, turn.asked_or_started_at, turn.was_unready) =
                        (None, now, !pod.is_ready);
                }
                None if turn.was_unready && pod.is_ready || elapsed >= MAX_TURN => return false,
                None => turn.was_unready |= !pod.is_ready,
            }
            busy_gpus.extend(gpus());
            true
        });
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
    let (queue, mut cgroups) = (turns.clone(), Cgroups::new(proc));
    let serving = tokio::spawn(async move {
        loop {
            match listener.accept().await {
                Ok((connection, _)) => {
                    let pid = connection
                        .peer_cred()
                        .ok()
                        .and_then(|peer| u32::try_from(peer.pid()?).ok());
                    // A node inside another node's pod names that pod first.
                    if let Some(Ok(ProcessOwner::Pod(pods, _))) =
                        pid.map(|pid| cgroups.owner_of(pid))
                        && let Some(pod) = pods.last()
                    {
                        queue.lock().enqueue(pod.clone(), connection);
                    }
                }
                // Too many open files, for one.
                Err(_) => sleep(RETRY_INTERVAL).await,
            }
        }
    });
    Ok((turns, AbortOnDropHandle::new(serving)))
}

/// Waits for the turn of the pod that this process belongs to. Returns how that ended; whatever fails lets the pod start.
pub async fn wait_for_turn(socket: &Path, limit: Duration, agent_limit: Duration) -> &'static str {
    let connected = async {
        loop {
            match UnixStream::connect(socket).await {
                Ok(agent) => return agent,
                Err(_) => sleep(RETRY_INTERVAL).await,
            }
        }
    };
    let turn = async {
        match timeout(agent_limit, connected).await {
            Ok(agent) => agent
                .readable()
                .await
                .map_or("the agent has gone", |()| "it is this pod's turn"),
            Err(_) => "no agent answers: the pod starts without a turn",
        }
    };
    timeout(limit, turn)
        .await
        .unwrap_or("the limit has passed: the pod starts without a turn")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::io::Read;
    use std::os::unix::net::UnixStream as Asked;

    fn pod(name: &str, devices: &str, is_ready: bool) -> PodOnNode {
        let ready = if is_ready { "True" } else { "False" };
        let pod = json!({
            "metadata": { "name": name, "namespace": "a", "uid": name, "annotations": { "stowage.dev/devices": devices } },
            "spec": { "containers": [] },
            "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": ready }] },
        });
        PodOnNode::from_pod(&serde_json::from_value(pod).unwrap()).unwrap()
    }

    /// Asks for a pod; the other end of the connection.
    fn ask(turns: &mut Turns, name: &str) -> Asked {
        let (there, here) = Asked::pair().unwrap();
        [&there, &here]
            .into_iter()
            .for_each(|end| end.set_nonblocking(true).unwrap());
        turns.enqueue(
            PodUid::parse(name).unwrap(),
            UnixStream::from_std(there).unwrap(),
        );
        here
    }

    fn waits(mut connection: &Asked) -> bool {
        !matches!(connection.read(&mut [0]), Ok(0))
    }

    #[tokio::test]
    async fn pods_that_share_a_gpu_start_in_the_order_in_which_they_asked() {
        let (mut turns, now) = (Turns::default(), Instant::now());
        let all = |ready: &[&str]| {
            [
                ("one", "GPU-a"),
                ("two", "GPU-a,GPU-b"),
                ("three", "GPU-b"),
                ("four", "GPU-c"),
            ]
            .map(|(name, devices)| pod(name, devices, ready.contains(&name)))
        };
        let asked = ["one", "two", "three", "four"].map(|name| ask(&mut turns, name));
        turns.advance(&all(&[]), now);
        // `three` could start, but `two` would then wait for ever on a busy node.
        assert_eq!(asked.each_ref().map(waits), [false, true, true, false]);
        turns.advance(&all(&["one"]), now);
        assert_eq!(asked.each_ref().map(waits), [false, false, true, false]);
        turns.advance(&all(&["one", "two"]), now);
        assert_eq!(asked.each_ref().map(waits), [false; 4]);
    }

    #[tokio::test]
    async fn readiness_from_before_a_boot_does_not_end_a_turn() {
        let (mut turns, now) = (Turns::default(), Instant::now());
        let _one = ask(&mut turns, "one");
        let two = ask(&mut turns, "two");
        for (is_ready, still_waits) in [(true, true), (true, true), (false, true), (true, false)] {
            turns.advance(
                &[pod("one", "GPU-a", is_ready), pod("two", "GPU-a", false)],
                now,
            );
            assert_eq!(waits(&two), still_waits);
        }
    }

    #[tokio::test]
    async fn a_pod_that_is_never_ready_or_gone_holds_no_other_up_for_long() {
        let begun = Instant::now();
        for (pods, later) in [
            (["one", "two"].as_slice(), MAX_TURN),
            (&["two"], Duration::ZERO),
        ] {
            let mut turns = Turns::default();
            let _one = ask(&mut turns, "one");
            let two = ask(&mut turns, "two");
            turns.advance(&["one", "two"].map(|name| pod(name, "GPU-a", false)), begun);
            assert!(waits(&two));
            let pods: Vec<PodOnNode> = pods.iter().map(|name| pod(name, "GPU-a", false)).collect();
            turns.advance(&pods, begun + later);
            assert!(!waits(&two));
        }
    }

    #[tokio::test]
    async fn a_pod_has_one_turn_however_often_it_asks_and_none_after_it_disconnects() {
        let (mut turns, now) = (Turns::default(), Instant::now());
        let pods = ["one", "two", "three"].map(|name| pod(name, "GPU-a", false));
        let again = [ask(&mut turns, "one"), ask(&mut turns, "one")];
        let two = ask(&mut turns, "two");
        let three = ask(&mut turns, "three");
        turns.advance(&pods, now);
        assert_eq!(
            (again.each_ref().map(waits), waits(&two)),
            ([false; 2], true)
        );
        drop(two);
        // The runtime looks at its connections.
        tokio::task::yield_now().await;
        turns.advance(&pods[1..], now);
        assert!(!waits(&three));
    }

    #[tokio::test]
    async fn an_unknown_pod_starts_after_a_timeout_and_one_without_gpus_at_once() {
        let (mut turns, asked) = (Turns::default(), Instant::now());
        let (unknown, without) = (ask(&mut turns, "unknown"), ask(&mut turns, "without"));
        turns.advance(&[pod("without", "", false)], asked);
        assert_eq!((waits(&unknown), waits(&without)), (true, false));
        turns.advance(&[], asked + UNKNOWN_POD_TIMEOUT + Duration::from_secs(1));
        assert!(!waits(&unknown));
    }
}

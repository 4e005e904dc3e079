//! The kinds of faults, by the names that `--without` takes.

use std::fmt;
use std::str::FromStr;

macro_rules! faults {
    ($($kind:ident $name:literal $what:literal)*) => {
        /// A kind of fault. A history draws which happen, when, and for how long.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum FaultKind { $(#[doc = $what] $kind),* }

        impl FaultKind {
            pub const ALL: &[Self] = &[$(Self::$kind),*];

            pub fn name(self) -> &'static str {
                match self { $(Self::$kind => $name),* }
            }

            /// What happens.
            pub fn what(self) -> &'static str {
                match self { $(Self::$kind => $what),* }
            }
        }
    };
}

faults! {
    LateWrite "late-write" "a write lands late: on its way, in the server's queue, or in its commit"
    LostRequest "lost-request" "a request to the API server is lost on its way, and nobody answers it"
    LostAnswer "lost-answer" "a write lands, and its answer is lost"
    RepeatedWrite "repeated-write" "a write arrives a second time, later"
    RefusedWrite "refused-write" "500: a write is refused"
    Throttling "throttling" "429 with Retry-After"
    SlowRead "slow-read" "a read or a page of a list comes late, or fails"
    LostLease "lost-lease" "a Lease's renewal is late, refused or unanswered"
    HungWebhook "hung-webhook" "no Binding is answered for a while: an admission webhook holds each up until it times out"
    ProxyDelay "proxy-delay" "a proxy delays writes beyond what the write times allow: overallocations are counted, not failed"
    Compaction "compaction" "the API server forgets its log: watches and half-read lists get 410"
    ServerRestart "server-restart" "the API server answers nobody for seconds, and all watches end"
    WatchLag "watch-lag" "a watch is held back for seconds"
    SilentWatch "silent-watch" "a watch's connection dies without a word"
    EndedWatch "ended-watch" "a watch ends"
    Kill "kill" "a replica's pod is gone, with its kube-scheduler; another comes"
    Restart "restart" "a replica's process dies and starts again at once"
    Stop "stop" "a replica is told to stop, and gives up its Lease"
    CutOff "cut-off" "nothing passes between a replica and the API server for seconds"
    ExpiredToken "expired-token" "the API server refuses a replica's token, or an agent's, with 401 for seconds"
    ClockJump "clock-jump" "a replica's wall clock jumps"
    SlowPlan "slow-plan" "a plan or a search for victims takes seconds"
    LostCall "lost-call" "a call of kube-scheduler is lost, or kube-scheduler gives it up before the answer, or it arrives twice"
    DeadAgent "dead-agent" "a node's agent reports nothing for a while, and restarts"
    LateAgent "late-agent" "a node's reports arrive seconds late"
    FlappingAgent "flapping-agent" "a node's agent dies and restarts every few seconds"
    LostReport "lost-report" "reports of a node are lost, arrive twice, or in another order"
    StaleAgent "stale-agent" "a node's agent repeats old figures as new ones"
    LostGpu "lost-gpu" "a GPU is missing in its node's reports, and comes back"
    UnreadGpus "unread-gpus" "a node's agent cannot read its GPUs"
    LostNode "lost-node" "a node is deleted with its pods, and comes back under its name, mostly with other GPUs"
    LingeringProcess "lingering-process" "a process keeps its VRAM after its pod is gone"
    Finalizer "finalizer" "a pod's finalizer is not removed while the history lasts"
    Edit "edit" "a waiting pod's annotations are edited"
    Recreation "recreation" "a pod is deleted, and another of the same name created at once"
    PolicySwap "policy-swap" "the policy files say another policy, on one host after the other"
    BadPolicy "bad-policy" "the policy files are broken, on one host after the other"
}

/// The text is no kind's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no kind of fault \"{name}\"; write one of {}", names().join(", "))]
pub struct UnknownFault {
    name: String,
}

fn names() -> Vec<&'static str> {
    FaultKind::ALL.iter().map(|kind| kind.name()).collect()
}

impl FromStr for FaultKind {
    type Err = UnknownFault;

    fn from_str(text: &str) -> Result<Self, UnknownFault> {
        let found = Self::ALL.iter().find(|kind| kind.name() == text);
        found.copied().ok_or_else(|| UnknownFault {
            name: text.to_owned(),
        })
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

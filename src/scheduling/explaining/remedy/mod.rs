//! What would have to change for a pod that fits nowhere: each answer was found by changing that one thing and asking the core
//! again. [`request`] changes what the pod asks for, [`lift`] what stands in its way, [`victims`] who is there; [`sentence`]
//! says it. For a pod that fits or holds room it says what to look at next. Nothing here is a guess from an error's code.

mod devices;
mod lift_one_obstacle;
mod request;
mod sentence;
mod victims;

use super::LedgerAccess;
use super::classification::asked_vram;
use super::explanation::{PodVerdict, ShareAmount};
use super::facts::Facts;
use super::nodes::NodeOutline;
use crate::ids::{GpuModel, NodeName};
use crate::scheduling::ledger::PodEvictionCost;
use crate::scheduling::ledger::PodPhase;
use crate::scheduling::ledger::eviction_allowance::EvictionLimit;
use crate::scheduling::placing::fit::fit;
use crate::scheduling::placing::fit::is_allowed;
use crate::scheduling::placing::rank::shortlist;
use crate::scheduling::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::scheduling::vocabulary::demand::{Demand, Sharing};
use crate::scheduling::vocabulary::gpu::{GpuSet, Health};
use crate::scheduling::vocabulary::node::Node;
use crate::scheduling::vocabulary::node_reading::Freshness;
use crate::units::{Bytes, Millis, Percent};
use serde::{Deserialize, Serialize};

/// One thing that would help, and how to say it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Remedy {
    #[serde(flatten)]
    pub change: RemedyChange,
    pub text: String,
}

/// GPUs of one node, by their indices there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuCandidate {
    pub node: NodeName,
    pub gpus: Vec<u32>,
}

/// Each but the first five makes the pod fit on its seat, if it names one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "change")]
pub enum RemedyChange {
    /// It fits, and the scheduler has not asked since this process knows of it.
    NotAsked,
    /// It fits, and was offered a node that it was not bound to.
    NotBound { node: NodeName, tries: u32 },
    /// It fits now; it was refused before that.
    AskAgain { woken: u32, ago_millis: Millis },
    /// It fits only on nodes that the scheduler did not ask about when it was refused.
    RuledOut { node: NodeName, nodes: u32 },
    /// Its room is held until these have left.
    VictimsLeave { node: NodeName, victims: Vec<String>, left: u32, deadline_in_millis: Millis },

    /// No GPU would do even if it were empty.
    NoGpuLargeEnough { needs_bytes: Bytes, largest_bytes: Bytes, node: NodeName, model: Option<GpuModel> },
    /// An engine that starts is all that is in the way.
    WaitForGate { gpu_candidate: GpuCandidate, by: Vec<String>, opens_in_millis: Option<Millis> },
    /// Others leave for it.
    Preempt { gpu_candidate: GpuCandidate, victims: Vec<Victim>, needs: PreemptionNeeds },
    /// The engines there have less to do.
    CalmEngines {
        gpu_candidate: GpuCandidate,
        by: Vec<String>,
        kv_cache_percent: Option<Percent>,
        kv_cache_limit_percent: Option<Percent>,
        queue: Option<u32>,
        queue_limit: Option<u32>,
    },
    /// The pod asks for less VRAM.
    AskLess { gpu_candidate: GpuCandidate, vram_bytes: Bytes, instead_of_bytes: Bytes },
    /// The pod is spread over more GPUs, or fewer.
    OtherCount { gpu_candidate: GpuCandidate, gpus: u32, instead_of: u32 },
    /// The pod does not want its GPUs to itself.
    Share { gpu_candidate: GpuCandidate },
    /// Its tenant may use more, by so much.
    RaiseLimit { gpu_candidate: GpuCandidate, tenant: String, by: ShareAmount },
    /// Nobody sees the GPUs of such a node; what it has is not known, so whether the pod fits there is not either.
    StartAgent { node: NodeName, nodes: u32, freshness: Freshness },
    /// The node's pool takes the pod's class.
    AdmitClass { gpu_candidate: GpuCandidate, class: String, pool: Option<String>, nodes: u32 },
    /// The node's GPUs are cut as its pool expects.
    Recut { gpu_candidate: GpuCandidate, pool: Option<String>, nodes: u32 },
    /// Both classes share a GPU with each other.
    ShareClasses { gpu_candidate: GpuCandidate, class: String, by: Vec<String>, nodes: u32 },
    /// The GPU takes pods again.
    Heal { gpu_candidate: GpuCandidate, health: Health, nodes: u32 },
    /// So much more is free there.
    FreeMore { gpu_candidate: GpuCandidate, short_bytes: Bytes },
    /// All others leave these GPUs.
    Empty { gpu_candidate: GpuCandidate, by: Vec<String>, nodes: u32 },
    /// The pod asks a device plugin for fewer.
    FewerDevices { gpu_candidate: GpuCandidate, resource: String, devices: u32, instead_of: u32 },
    /// So many more devices are free there.
    FreeDevices { gpu_candidate: GpuCandidate, resource: String, missing: u32 },
    /// No device plugin offers as many on one node; `node` offers most.
    NoNodeWithDevices { resource: String, asked: u32, most: u32, node: Option<NodeName> },
    /// Another GPU comes.
    AddGpu { needs_bytes: Bytes, total_bytes: Bytes, headroom_percent: Percent, gpus: u32 },
}

/// A pod that would have to leave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Victim {
    pub pod: String,
    pub class: String,
    pub priority: i32,
    /// Over all its GPUs.
    pub vram_bytes: Bytes,
    /// What its eviction loses.
    pub eviction_cost: PodEvictionCost,
}

/// What the pod lacks to evict others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PreemptionNeeds {
    /// The scheduler does it by itself, or the planner does.
    Nothing,
    /// A minute in which the limits on evictions leave enough.
    Allowance(EvictionLimit),
    /// `preemptionPolicy: Never` forbids it.
    PreemptionPolicy,
    /// At least this priority.
    Priority(i32),
}

/// All that helps, the easiest first.
pub fn remedies(
    node_states: &mut impl LedgerAccess,
    facts: &Facts,
    outline: &NodeOutline,
    verdict: PodVerdict,
) -> Vec<Remedy> {
    let mut changes = match verdict {
        PodVerdict::Bound | PodVerdict::Assumed => Vec::new(),
        PodVerdict::Fits if outline.fits_where_asked(facts) => next_step(facts).into_iter().collect(),
        PodVerdict::Fits => ruled_out(node_states, facts, outline),
        PodVerdict::Holding => victims_leave(facts).into_iter().collect(),
        PodVerdict::DoesNotFit => changes(node_states, facts, outline),
    };
    changes.sort_by_key(|change| effort(change, facts.demand()));
    changes.into_iter().map(|change| Remedy { text: change.to_string(), change }).collect()
}

/// It fits only where the scheduler did not ask: there another plugin would have to let it in, or elsewhere something must
/// change.
fn ruled_out(node_states: &mut impl LedgerAccess, facts: &Facts, outline: &NodeOutline) -> Vec<RemedyChange> {
    let node = |place: usize| facts.snapshot.nodes()[place].name.clone();
    let nodes = outline.counts.fit;
    let best = outline.best().map(|place| RemedyChange::RuledOut { node: node(place), nodes });
    best.into_iter().chain(changes(node_states, facts, outline)).collect()
}

fn changes(node_states: &mut impl LedgerAccess, facts: &Facts, outline: &NodeOutline) -> Vec<RemedyChange> {
    let mut changes: Vec<RemedyChange> = victims::preempt(node_states, facts, outline).into_iter().collect();
    changes.extend(request::other_requests(facts));
    changes.extend(devices::other_devices(facts, outline));
    changes.extend(raise_limit(facts));
    changes.extend(lift_one_obstacle::lifted(node_states, facts, outline));
    let is_one = |change: &RemedyChange| {
        change.gpu_candidate().is_some() && effort(change, facts.demand()) < MUCH_LESS
    };
    let seats_somebody = changes.iter().any(is_one);
    changes.extend(no_gpu_large_enough(facts));
    if !seats_somebody && !facts.demand().asks_plugin() {
        changes.push(add_gpu(facts));
    }
    // That everyone leaves a GPU is worth saying only where nothing smaller helps there.
    let is_smaller = |change: &RemedyChange| {
        use RemedyChange::{CalmEngines, FreeMore, Preempt, ShareClasses, WaitForGate};
        matches!(
            change,
            FreeMore { .. } | Preempt { .. } | ShareClasses { .. } | CalmEngines { .. } | WaitForGate { .. }
        )
    };
    if changes.iter().any(is_smaller) {
        changes.retain(|change| !matches!(change, RemedyChange::Empty { .. }));
    }
    changes
}

/// An engine with less than half of what it was meant to have is another engine.
const MUCH_LESS: u8 = 15;

/// What is asked of whom: nothing of anybody, of the pod's owner, of the policy's owner, of the cluster's owner.
fn effort(change: &RemedyChange, demand: &Demand) -> u8 {
    match change {
        RemedyChange::NotAsked
        | RemedyChange::NotBound { .. }
        | RemedyChange::AskAgain { .. }
        | RemedyChange::VictimsLeave { .. } => 0,
        RemedyChange::NoGpuLargeEnough { .. }
        | RemedyChange::NoNodeWithDevices { .. }
        | RemedyChange::RuledOut { .. } => 1,
        RemedyChange::WaitForGate { .. } => 2,
        RemedyChange::Preempt { needs: PreemptionNeeds::Nothing | PreemptionNeeds::Allowance(_), .. } => 3,
        RemedyChange::CalmEngines { .. } => 4,
        RemedyChange::AskLess { vram_bytes, .. } if vram_bytes.times(2) >= asked_vram(demand) => 5,
        RemedyChange::OtherCount { .. } | RemedyChange::FewerDevices { .. } => 6,
        RemedyChange::Share { .. } => 7,
        RemedyChange::Preempt { .. } => 8,
        RemedyChange::FreeMore { .. } | RemedyChange::FreeDevices { .. } => 9,
        RemedyChange::RaiseLimit { .. } => 10,
        RemedyChange::StartAgent { .. } => 11,
        RemedyChange::AdmitClass { .. } | RemedyChange::ShareClasses { .. } => 12,
        RemedyChange::Heal { .. } | RemedyChange::Recut { .. } => 13,
        RemedyChange::Empty { .. } => 14,
        RemedyChange::AskLess { .. } => MUCH_LESS,
        RemedyChange::AddGpu { .. } => 16,
    }
}

impl RemedyChange {
    /// Where the pod would fit.
    pub fn gpu_candidate(&self) -> Option<&GpuCandidate> {
        match self {
            Self::WaitForGate { gpu_candidate, .. }
            | Self::Preempt { gpu_candidate, .. }
            | Self::CalmEngines { gpu_candidate, .. }
            | Self::AskLess { gpu_candidate, .. }
            | Self::OtherCount { gpu_candidate, .. }
            | Self::Share { gpu_candidate }
            | Self::RaiseLimit { gpu_candidate, .. }
            | Self::AdmitClass { gpu_candidate, .. }
            | Self::Recut { gpu_candidate, .. }
            | Self::ShareClasses { gpu_candidate, .. }
            | Self::Heal { gpu_candidate, .. }
            | Self::FewerDevices { gpu_candidate, .. }
            | Self::FreeDevices { gpu_candidate, .. }
            | Self::FreeMore { gpu_candidate, .. }
            | Self::Empty { gpu_candidate, .. } => Some(gpu_candidate),
            _ => None,
        }
    }
}

fn gpu_candidate(node: &Node, gpus: GpuSet) -> GpuCandidate {
    let index = |place: usize| node.devices.get(place).map_or(place as u32, |device| device.index);
    GpuCandidate { node: node.name.clone(), gpus: gpus.iter().map(index).collect() }
}

/// The GPUs such a demand would get on a node, with what the tenant's limit leaves.
fn gpu_candidates(node: &Node, demand: &Demand, allowance: TenantLimit) -> Option<GpuSet> {
    fit(node, demand).ok().filter(|gpus| is_allowed(allowance, &node.gpus, demand, *gpus))
}

/// The best place in the cluster for such a demand.
fn best_gpu_candidate(facts: &Facts, demand: &Demand, allowance: TenantLimit) -> Option<(usize, GpuSet)> {
    let attempt = crate::scheduling::placing::rank::ScheduleAttempt {
        allowance,
        reserved_placement: None,
        ..facts.attempt(1)
    };
    let names: Vec<&str> =
        facts.open_places().map(|place| facts.snapshot.nodes()[place].name.as_str()).collect();
    let list = shortlist(&facts.snapshot, demand, names.into_iter(), attempt);
    list.best.first().map(|candidate| (candidate.node, candidate.gpus))
}

fn next_step(facts: &Facts) -> Option<RemedyChange> {
    let PodPhase::Waiting(waiting) = &facts.entry.phase else { return None };
    Some(match (&waiting.refused, &waiting.offered) {
        (Some(refused), _) => {
            RemedyChange::AskAgain { woken: refused.unanswered, ago_millis: facts.now.since(refused.at) }
        }
        (None, Some(node)) => RemedyChange::NotBound { node: node.clone(), tries: waiting.tries },
        (None, None) => RemedyChange::NotAsked,
    })
}

fn victims_leave(facts: &Facts) -> Option<RemedyChange> {
    let reservation = facts.entry.reservation()?;
    Some(RemedyChange::VictimsLeave {
        node: reservation.node.clone(),
        victims: facts.victims.iter().map(ToString::to_string).collect(),
        left: facts.victims_left,
        deadline_in_millis: reservation.deadline.since(facts.now),
    })
}

/// With a higher limit it would fit somewhere.
fn raise_limit(facts: &Facts) -> Option<RemedyChange> {
    let demand = facts.demand();
    if facts.allowance == TenantLimit::default() {
        return None;
    }
    let (place, gpus) = best_gpu_candidate(facts, demand, TenantLimit::default())?;
    let node = &facts.snapshot.nodes()[place];
    // Of a device plugin nobody knows which: each counts whole.
    let devices = TenantUsage { vram: demand.vram(), milli_gpus: u64::from(demand.gpus) * 1000 };
    let wanted: TenantUsage = if gpus.is_empty() {
        devices
    } else {
        gpus.iter().map(|place| node.gpus[place].part_of(demand)).sum()
    };
    let beyond =
        |wanted: u64, left: Option<u64>| left.map(|left| wanted.saturating_sub(left)).filter(|by| *by > 0);
    let by = ShareAmount {
        vram_bytes: beyond(wanted.vram.0, facts.allowance.vram.map(|left| left.0)).map(Bytes),
        milli_gpus: beyond(wanted.milli_gpus, facts.allowance.milli_gpus),
    };
    let tenant = facts.policy.tenant(demand.tenant?)?.name.clone();
    (by != ShareAmount::default()).then(|| RemedyChange::RaiseLimit {
        gpu_candidate: gpu_candidate(node, gpus),
        tenant,
        by,
    })
}

/// The largest GPU is too small.
fn no_gpu_large_enough(facts: &Facts) -> Option<RemedyChange> {
    let nodes = facts.snapshot.nodes().iter();
    let gpus = nodes
        .flat_map(|node| node.gpus.iter().enumerate().map(move |(place, gpu)| (gpu.capacity, node, place)));
    let (largest, node, place) = gpus.min_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.name.cmp(&b.1.name)))?;
    (largest < facts.demand().per_gpu).then(|| RemedyChange::NoGpuLargeEnough {
        needs_bytes: facts.demand().per_gpu,
        largest_bytes: largest,
        node: node.name.clone(),
        model: node.devices.get(place).map(|device| device.model.clone()),
    })
}

fn add_gpu(facts: &Facts) -> RemedyChange {
    let (demand, headroom) = (facts.demand(), facts.policy.headroom.default);
    let handed_out = u128::from(100 - headroom.get().min(99));
    let total = (u128::from(demand.per_gpu.0) * 100).div_ceil(handed_out);
    RemedyChange::AddGpu {
        needs_bytes: demand.per_gpu,
        total_bytes: Bytes(u64::try_from(total).unwrap_or(u64::MAX)),
        headroom_percent: headroom,
        gpus: demand.gpus,
    }
}

/// Whether the pod wants GPUs that nobody is on.
fn wants_empty(demand: &Demand) -> bool {
    demand.sharing == Sharing::Exclusive
}

//! Every node's verdict, the selection of nodes to show, and what is shown of one.

use super::explanation::{
    CalibrationPart, Counts, DevicesPart, EngineLoadPart, GpuPart, NodePart, OccupantLatencyPart,
    OccupantPart, OthersPart, Reason, RefusalGroup, ScorePart, StartPart, WakePart, WeightedPart,
};
use super::facts::{Facts, GpuOccupants, NodeDetails, max_shown_nodes};
use super::fleet::allocated_on;
use super::obstacle::{missing_vram, obstacles};
use super::{ShownNodes, loans};
use crate::ids::NodeName;
use crate::kube_filters::FilterReason;
use crate::ledger::{Occupant, OccupantPhase};
use crate::placing::fit::{Misfit, check_node_admission, sentence, writes_vram_limits};
use crate::placing::pack::{self, GpuChoice, WakeEstimate};
use crate::placing::rank::{self, Candidate, EngineLoadCost, ScoreParts, Shortlist, shortlist};
use crate::placing::start_model::{FactorsAndSource, StartEstimate};
use crate::policy::{PartAndWeight, Weights};
use crate::units::{Bytes, Micros};
use crate::vocabulary::demand::{Demand, MAX_GPUS};
use crate::vocabulary::device_plugin::{GpuRequest, PluginShare};
use crate::vocabulary::gpu::{Device, Gpu, GpuSet, Health};
use crate::vocabulary::latency::NeighborRoom;
use crate::vocabulary::node::Node;
use crate::vocabulary::smoothed_load::SmoothedLoad;
use std::collections::{BTreeMap, BTreeSet};

/// What both filters, Stowage's and kube-scheduler's own, would answer for each node, with the refused nodes from the nearest to the
/// furthest from fitting.
pub struct NodeOutline {
    shortlist: Shortlist,
    /// By index in the snapshot.
    refused: Vec<(usize, NodeRefusal)>,
    pub counts: Counts,
}

/// Why a node does not fit.
enum NodeRefusal {
    Stowage(Misfit),
    /// Only kube-scheduler's own filters refuse it.
    KubeScheduler(FilterReason),
}

/// Refused nodes are shown one by one up to this many; more are grouped by reason.
const MAX_REFUSED_SHOWN: usize = 10;

impl NodeOutline {
    pub fn new(facts: &Facts, options: &ShownNodes) -> Self {
        let nodes = facts.snapshot.nodes();
        let (accepted, filtered): (Vec<usize>, Vec<usize>) =
            (0..nodes.len()).partition(|node_index| facts.filter_reason(*node_index).is_none());
        let list_of = |node_indices: &[usize], limit| {
            let names = node_indices
                .iter()
                .map(|node_index| nodes[*node_index].name.as_str());
            shortlist(&facts.snapshot, facts.demand(), names, facts.attempt(limit))
        };
        let list = list_of(&accepted, max_shown_nodes(options, nodes.len()));
        let by_stowage = list.rejected.iter();
        let mut refused: Vec<(usize, NodeRefusal)> = by_stowage
            .map(|(query_index, misfit)| (accepted[*query_index], NodeRefusal::Stowage(*misfit)))
            .collect();
        let by_both = list_of(&filtered, 1).rejected;
        let by_both: BTreeMap<usize, Misfit> = by_both
            .into_iter()
            .map(|(query_index, misfit)| (filtered[query_index], misfit))
            .collect();
        refused.extend(filtered.iter().filter_map(|index| {
            let refusal = match by_both.get(index) {
                Some(misfit) => NodeRefusal::Stowage(*misfit),
                None => NodeRefusal::KubeScheduler(facts.filter_reason(*index)?.clone()),
            };
            Some((*index, refusal))
        }));
        refused.sort_by_cached_key(|(node_index, _)| {
            (distance(&nodes[*node_index], facts), *node_index)
        });
        let counts = Counts {
            nodes: nodes.len() as u32,
            gpus: nodes
                .iter()
                .flat_map(|node| node.gpus.iter())
                .filter(|gpu| gpu.health != Health::Lost)
                .count() as u32,
            fit: (nodes.len() - refused.len()) as u32,
            refused: refused.len() as u32,
        };
        Self {
            shortlist: list,
            refused,
            counts,
        }
    }

    /// The best node, if any fits.
    pub fn best(&self) -> Option<usize> {
        self.shortlist
            .best
            .first()
            .map(|candidate| candidate.node_index)
    }

    /// The indices of the nodes to show: those that fit, best first, then of the others the nearest.
    pub fn shown(&self, facts: &Facts, options: &ShownNodes) -> Vec<usize> {
        let best = self
            .shortlist
            .best
            .iter()
            .map(|candidate| candidate.node_index);
        let refused = self.refused.iter().map(|(node_index, _)| *node_index);
        match options {
            ShownNodes::Node(name) => facts.snapshot.index_of(name.as_str()).into_iter().collect(),
            ShownNodes::All => best.chain(refused).collect(),
            ShownNodes::Best(_) if facts.entry.node().is_some() => {
                reserved_node(facts).into_iter().collect()
            }
            ShownNodes::Best(_) if self.refused.len() <= MAX_REFUSED_SHOWN => {
                best.chain(refused).collect()
            }
            ShownNodes::Best(_) => best
                .chain(
                    self.examples(facts)
                        .into_iter()
                        .map(|(node_index, ..)| node_index),
                )
                .collect(),
        }
    }

    /// The reasons of refused nodes, if those are not all shown.
    pub fn groups(&self, facts: &Facts, options: &ShownNodes) -> Vec<RefusalGroup> {
        if !matches!(options, ShownNodes::Best(_)) || self.refused.len() <= MAX_REFUSED_SHOWN {
            return Vec::new();
        }
        let group = |(node_index, reason, count): (usize, Reason, u32)| RefusalGroup {
            code: reason.code,
            count,
            example: facts.snapshot.nodes()[node_index].name.clone(),
            text: reason.text,
        };
        let mut groups: Vec<RefusalGroup> = self.examples(facts).into_iter().map(group).collect();
        groups.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.code.cmp(&b.code)));
        groups
    }

    /// For each reason the nearest node with it, and the number of nodes; the nearest of all first.
    fn examples(&self, facts: &Facts) -> Vec<(usize, Reason, u32)> {
        examples(self.refused.iter(), facts)
    }

    /// For each reason of kube-scheduler's own filters the nearest node that only they refuse, and the number of such nodes.
    pub(crate) fn refused_by_kube_scheduler(&self, facts: &Facts) -> Vec<(usize, Reason, u32)> {
        let is_only = |refusal: &NodeRefusal| matches!(refusal, NodeRefusal::KubeScheduler(_));
        let only = self.refused.iter().filter(|(_, refusal)| is_only(refusal));
        examples(only, facts)
    }

    /// Whether a node fits that the scheduler would accept.
    pub(crate) fn fits_on_queried_node(&self, facts: &Facts) -> bool {
        let refused: BTreeSet<usize> = self
            .refused
            .iter()
            .map(|(node_index, _)| *node_index)
            .collect();
        facts
            .queried_indices()
            .any(|node_index| !refused.contains(&node_index))
    }

    /// The nodes that do not fit, the nearest first, as far as the scheduler would accept them.
    pub(crate) fn refused_and_queried(
        &self,
        facts: &Facts,
    ) -> impl Iterator<Item = (usize, Misfit)> {
        self.refused
            .iter()
            .filter(|(node_index, _)| facts.may_be_queried(*node_index))
            .filter_map(|(node_index, refusal)| Some((*node_index, refusal.misfit()?)))
    }

    /// The nodes on which the pod may fit once others have left, the nearest first, as far as the scheduler would accept them then.
    pub(crate) fn preemption_node_indices(&self, facts: &Facts) -> impl Iterator<Item = usize> {
        let may_fit = |node_index: usize| match facts.filter_reason(node_index) {
            Some(reason) => reason.entry(),
            None => facts.was_queried(node_index) != Some(false),
        };
        let refused = self.refused.iter().map(|(node_index, _)| *node_index);
        refused.filter(move |node_index| may_fit(*node_index))
    }

    /// What is shown of the node at `index` of the snapshot.
    pub fn part(&self, index: usize, facts: &Facts, details: &NodeDetails) -> NodePart {
        let node = &facts.snapshot.nodes()[index];
        let misfit = self
            .refused
            .iter()
            .find(|(refused, _)| *refused == index)
            .and_then(|(_, refusal)| refusal.misfit());
        let rank = self
            .shortlist
            .best
            .iter()
            .position(|candidate| candidate.node_index == index);
        let candidate = rank.map(|rank| (rank as u32 + 1, &self.shortlist.best[rank]));
        let is_own = facts
            .reserved_placement
            .as_ref()
            .is_some_and(|(own, _)| *own == node.name);
        let own_gpus = facts
            .reserved_placement
            .as_ref()
            .filter(|_| is_own)
            .and_then(|(_, verdict)| verdict.ok());
        let chosen = own_gpus
            .or(candidate.map(|(_, candidate)| candidate.gpus))
            .unwrap_or_default();
        let start = rank::estimate_start(
            node,
            facts.demand(),
            facts.snapshot.start_model(),
            &facts.policy.loading,
        );
        let wake = wake_on(node, chosen, facts);
        let ready = wake
            .map(|wake| wake.wake_time)
            .or(start.map(|start| start.total()));
        let ready = ready.filter(|_| facts.demand().model.is_some());
        let holding = facts
            .demand()
            .model
            .as_ref()
            .and_then(|model| node.holding(model));
        NodePart {
            name: node.name.clone(),
            misfit: misfit.map(|misfit| misfit_reason(&misfit, node)),
            kube_scheduler: facts.filter_reason(index).map(filter_reason),
            is_own,
            was_asked: facts.was_queried(index),
            devices: devices(node, facts.demand()),
            pool: details.pool.clone(),
            warnings: node.warnings.iter().map(ToString::to_string).collect(),
            keeps_vram_limits: writes_vram_limits(node, facts.demand()),
            isolation: details.isolation,
            freshness: node.freshness,
            report_age_millis: details.report_age,
            tier: holding.map(|holding| holding.tier),
            ready_in_millis: ready,
            start: start.map(|start| start_part(&start)),
            score: candidate
                .filter(|_| facts.entry.node().is_none())
                .map(|(rank, candidate)| score(node, rank, candidate, facts)),
            gpus: gpus(node, chosen, facts, details),
        }
    }
}

impl NodeRefusal {
    fn misfit(&self) -> Option<Misfit> {
        match self {
            Self::Stowage(misfit) => Some(*misfit),
            Self::KubeScheduler(_) => None,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            Self::Stowage(misfit) => misfit.code(),
            Self::KubeScheduler(reason) => reason.code(),
        }
    }

    fn reason(&self, node: &Node) -> Reason {
        match self {
            Self::Stowage(misfit) => misfit_reason(misfit, node),
            Self::KubeScheduler(reason) => filter_reason(reason),
        }
    }
}

fn examples<'r>(
    refused: impl Iterator<Item = &'r (usize, NodeRefusal)>,
    facts: &Facts,
) -> Vec<(usize, Reason, u32)> {
    let mut found: Vec<(usize, Reason, u32)> = Vec::new();
    for (index, refusal) in refused {
        let code = refusal.code();
        match found.iter_mut().find(|(_, reason, _)| reason.code == code) {
            Some((.., count)) => *count += 1,
            None => found.push((*index, refusal.reason(&facts.snapshot.nodes()[*index]), 1)),
        }
    }
    found
}

fn misfit_reason(misfit: &Misfit, node: &Node) -> Reason {
    Reason {
        code: misfit.code().into(),
        text: sentence(misfit, Some(node)),
    }
}

fn filter_reason(reason: &FilterReason) -> Reason {
    Reason {
        code: reason.code().into(),
        text: reason.to_string(),
    }
}

/// What the pod gains on these GPUs of a node by a wake.
fn wake_on(node: &Node, gpus: GpuSet, facts: &Facts) -> Option<WakeEstimate> {
    pack::estimate_wake(
        node,
        gpus,
        facts.demand(),
        facts.snapshot.start_model(),
        &facts.policy.loading,
    )
}

/// A node that does not exist in the cluster.
pub fn unknown_node(name: &NodeName) -> NodePart {
    let misfit = Misfit::UnknownNode;
    NodePart {
        name: name.clone(),
        misfit: Some(Reason {
            code: misfit.code().into(),
            text: misfit.to_string(),
        }),
        kube_scheduler: None,
        is_own: false,
        was_asked: None,
        devices: None,
        pool: None,
        warnings: Vec::new(),
        keeps_vram_limits: false,
        isolation: None,
        freshness: Default::default(),
        report_age_millis: None,
        tier: None,
        ready_in_millis: None,
        start: None,
        score: None,
        gpus: Vec::new(),
    }
}

fn start_part(start: &StartEstimate) -> StartPart {
    let StartEstimate { time, missing, .. } = start;
    StartPart {
        pull_millis: time.pull,
        fetch_millis: time.fetch,
        load_millis: time.load,
        init_millis: time.init,
        policy_millis: start.prior.total(),
        missing_images: missing.count,
        missing_image_bytes: missing.bytes,
        is_image_size_assumed: missing.is_assumed,
        pull: calibration(&start.pull_factors),
        engine: calibration(&start.engine_factors),
    }
}

fn calibration(FactorsAndSource { factors, source }: &FactorsAndSource) -> CalibrationPart {
    CalibrationPart {
        source: *source,
        starts: factors.samples,
        transfer_thousandths: factors.transfer.0,
        init_thousandths: factors.init.0,
    }
}

/// The devices on the node of the resource that the pod requests.
fn devices(node: &Node, demand: &Demand) -> Option<DevicesPart> {
    let GpuRequest::Plugin { resource, .. } = &demand.ask else {
        return None;
    };
    let share = node.plugin_share_of(resource)?;
    Some(DevicesPart {
        allocatable: share.allocatable,
        used: share.used,
        left: share.available(),
    })
}

fn reserved_node(facts: &Facts) -> Option<usize> {
    facts.snapshot.index_of(facts.entry.node()?.as_str())
}

/// How far a node is from fitting: whether it is excluded, and the obstacles of the last GPU that the pod would need.
fn distance(node: &Node, facts: &Facts) -> (bool, u8, Bytes) {
    let demand = facts.demand();
    if let GpuRequest::Plugin { resource, count } = &demand.ask {
        let left = node
            .plugin_share_of(resource)
            .map_or(0, PluginShare::available);
        return (
            check_node_admission(node, demand).is_err(),
            0,
            Bytes(count.saturating_sub(left).into()),
        );
    }
    let one = |gpu: &Gpu| {
        let against = obstacles(gpu, demand, GpuOccupants::none(facts));
        // The sum distinguishes one small obstacle from two.
        let weight: u8 = against.iter().map(|obstacle| obstacle.entry()).sum();
        (
            weight,
            against
                .iter()
                .filter_map(missing_vram)
                .max()
                .unwrap_or_default(),
        )
    };
    let mut each: Vec<(u8, Bytes)> = node.gpus.iter().map(one).collect();
    each.sort_unstable();
    let (weight, short) = each
        .get((demand.gpus as usize).saturating_sub(1))
        .copied()
        .unwrap_or((u8::MAX, Bytes(u64::MAX)));
    (check_node_admission(node, demand).is_err(), weight, short)
}

fn score(node: &Node, rank: u32, candidate: &Candidate, facts: &Facts) -> ScorePart {
    let evaluation = facts
        .snapshot
        .evaluate(candidate.node_index, facts.demand());
    let choice = GpuChoice::for_gpus(&evaluation, candidate.gpus);
    let parts = rank::score_parts(
        &evaluation,
        node,
        choice,
        facts.snapshot.start_model(),
        &facts.policy,
    );
    ScorePart {
        rank,
        contended: candidate.score.contended,
        cost: candidate.score.cost,
        parts: weighted(&parts, &facts.policy.scoring.weights),
        free_after_bytes: pack::leftover(&node.gpus, candidate.gpus, facts.demand()),
        unusable_after_bytes: evaluation.unusable_leftover(candidate.gpus),
    }
}

fn weighted(parts: &ScoreParts, weights: &Weights) -> Vec<WeightedPart> {
    let part = |one: PartAndWeight| WeightedPart {
        name: one.name.into(),
        part: one.part,
        weight: one.weight.into(),
        weighted: one.weighted(),
    };
    parts.with_weights(weights).map(part).into()
}

fn gpus(node: &Node, chosen: GpuSet, facts: &Facts, details: &NodeDetails) -> Vec<GpuPart> {
    let wake = wake_on(node, chosen, facts).map(
        |WakeEstimate {
             wake_time,
             start_time,
         }| WakePart {
            woken_in_millis: wake_time,
            loaded_in_millis: start_time,
        },
    );
    let both = node
        .gpus
        .iter()
        .zip(node.devices.iter())
        .take(MAX_GPUS as usize)
        .enumerate();
    both.map(|(gpu_index, (gpu, device))| {
        let gpu_occupants = details.occupants_of(&node.devices, GpuSet::single(gpu_index), facts);
        let engine_reading = details.engine_load(&device.uuid);
        let part = gpu_part(
            gpu,
            device,
            gpu_occupants,
            chosen.contains(gpu_index),
            facts,
        );
        GpuPart {
            kv_cache_percent: engine_reading
                .map_or(part.kv_cache_percent, |(reading, _)| reading.kv_cache),
            queue: engine_reading.map_or(part.queue, |(reading, _)| reading.queue),
            engine_load: engine_reading
                .map(|(_, smoothed)| engine_load(gpu, smoothed, facts, details)),
            activity: details.activities.get(&device.uuid).copied(),
            wake: wake.filter(|_| part.chosen),
            gone: details.is_gone(device),
            ..part
        }
    })
    .collect()
}

/// How the load of the engines on a GPU counts.
fn engine_load(
    gpu: &Gpu,
    smoothed: SmoothedLoad,
    facts: &Facts,
    details: &NodeDetails,
) -> EngineLoadPart {
    let counted = gpu.engine_load;
    EngineLoadPart {
        average_percent: smoothed.kv_cache(),
        trend_per_minute: smoothed.kv_cache_trend(facts.policy.telemetry.smoothing),
        counted_percent: counted.occupancy(),
        counted_queue: counted.queue,
        preempting: counted.preempting,
        age_millis: details.report_age.unwrap_or_default(),
        part: EngineLoadCost::for_gpu(gpu, facts.demand()).score_part(),
    }
}

fn gpu_part(
    gpu: &Gpu,
    device: &Device,
    gpu_occupants: GpuOccupants<'_>,
    chosen: bool,
    facts: &Facts,
) -> GpuPart {
    // A pod on its node has no obstacle, and least of all itself.
    let is_placed = facts.entry.node().is_some();
    // The GPU of a device plugin's pod is the kubelet's to pick.
    let against = if chosen || is_placed || facts.demand().is_allocated_externally() {
        Vec::new()
    } else {
        obstacles(gpu, facts.demand(), gpu_occupants)
    };
    let somewhere = gpu_occupants
        .iter()
        .filter(|one| one.phase == OccupantPhase::Somewhere)
        .map(|one| (one.per_gpu, one.sharing));
    GpuPart {
        uuid: device.uuid.clone(),
        index: device.index,
        model: device.model.clone(),
        parent: device.parent.clone(),
        health: gpu.health,
        gone: false,
        total_bytes: device.total,
        driver_reserved_bytes: device.reserved,
        headroom_bytes: facts
            .policy
            .headroom
            .percent_for(&device.model)
            .share_of(device.total),
        allocatable_bytes: gpu.capacity,
        allocated_bytes: allocated_on(gpu, somewhere),
        unaccounted_bytes: gpu.unaccounted_vram,
        soft_reserved_bytes: gpu.softly_reserved,
        free_bytes: gpu.free(),
        loans: loans::gpu_loans(gpu, gpu_occupants),
        kv_cache_percent: gpu.engine_load.kv_cache,
        queue: gpu.engine_load.queue,
        engine_load: None,
        activity: None,
        room_percent: (gpu.neighbors.room < NeighborRoom::ALL).then_some(gpu.neighbors.room),
        expected_time_per_token_micros: expected_time_per_token(gpu, facts),
        starting: gpu.starting,
        occupants: gpu_occupants
            .iter()
            .filter(|gpu_occupant| facts.may_see(&gpu_occupant.key))
            .map(|gpu_occupant| {
                occupant(
                    gpu_occupant,
                    gpu,
                    gpu_occupants.keep_reason(gpu_occupant),
                    facts,
                )
            })
            .collect(),
        others: others(gpu, gpu_occupants, facts),
        chosen,
        obstacles: against,
        wake: None,
    }
}

/// What a pending pod would take for a token, if its class limits that.
fn expected_time_per_token(gpu: &Gpu, facts: &Facts) -> Option<Micros> {
    let demand = facts.demand();
    let is_pending = facts.entry.node().is_none();
    demand.terms.max_time_per_token.filter(|_| is_pending)?;
    let alone = gpu
        .neighbors
        .step_alone(demand.expected, demand.weights_per_gpu())?;
    Some(gpu.neighbors.beside_all(alone))
}

fn others(gpu: &Gpu, gpu_occupants: GpuOccupants<'_>, facts: &Facts) -> Option<OthersPart> {
    let hidden = gpu_occupants
        .iter()
        .filter(|gpu_occupant| !facts.may_see(&gpu_occupant.key));
    OthersPart::sum(hidden.map(|one| gpu.charge_for(one.per_gpu, one.sharing)))
}

fn occupant(
    gpu_occupant: &Occupant,
    gpu: &Gpu,
    keep_reason: Option<String>,
    facts: &Facts,
) -> OccupantPart {
    OccupantPart {
        pod: gpu_occupant.key.clone(),
        class: facts.policy.class(gpu_occupant.class).name.clone(),
        priority: gpu_occupant.priority,
        presence: gpu_occupant.phase,
        bytes: gpu.charge_for(gpu_occupant.per_gpu, gpu_occupant.sharing),
        start_gate_opens_in_millis: gpu_occupant
            .starting_until
            .filter(|_| gpu_occupant.phase != OccupantPhase::Assumed)
            .map(|gate| gate.since(facts.now)),
        over_grant_bytes: gpu_occupant.over_grant,
        unread: gpu_occupant.is_unread,
        loan: gpu_occupant.loan,
        latency: gpu_occupant.latency.as_ref().map(|latency| {
            let limits = facts.policy.class(gpu_occupant.class).latency_limits();
            OccupantLatencyPart {
                time_per_token_micros: latency.time_per_token,
                expected_time_per_token_micros: gpu_occupant.expected_time_per_token,
                max_time_per_token_micros: limits.time_per_token,
                time_to_first_token_micros: latency.time_to_first_token,
                max_time_to_first_token_micros: limits.time_to_first_token,
                busy_percent: latency.busy,
            }
        }),
        keep_reason,
    }
}

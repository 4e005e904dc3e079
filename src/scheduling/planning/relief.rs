//! Relief of engines under pressure: which of their neighbors to evict, without a pending pod.
//!
//! An engine that shares its GPU with preemptible pods of lower priority and whose KV cache is full, whose queue grows, or which
//! takes longer than its class allows, gets relief: the cheapest of these pods are evicted one after the other until the pressure is over. Pressure begins at one figure
//! and ends at another, and must last before it counts, so that a spike evicts no pod.

use crate::evicting::EvictionCost;
use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::ledger::Ledger;
use crate::ledger::{PodState, PotentialVictim};
use crate::policy::{Preemptibility, PressureRules};
use crate::units::{Moment, Percent};
use crate::vocabulary::latency::LATENCY_WINDOW;
use crate::vocabulary::node_reading::{EngineLoad, Freshness, NodeReading};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Which GPUs are under pressure, and since when: the state between two checks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PressureWatch {
    pressed: BTreeMap<(NodeName, GpuUuid), Pressure>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pressure {
    since: Moment,
    /// By latency, and not by KV cache or queue: each ends at a figure of its own.
    is_slow: bool,
}

/// A pod to evict from a GPU for the engine there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReliefEviction {
    pub uid: PodUid,
    pub key: PodKey,
    /// The engine under pressure.
    pub engine: PodKey,
    pub gpu: GpuUuid,
}

impl PressureWatch {
    /// The pods to evict now, except `deferred`. The caller is expected to evict every pod that is named: the next pod of a GPU is
    /// named only when the eviction has had time to help.
    pub fn check(&mut self, ledger: &Ledger, deferred: &BTreeSet<PodUid>) -> Vec<ReliefEviction> {
        let Some(rules) = ledger.policy().planning.pressure else {
            self.pressed.clear();
            return Vec::new();
        };
        let now = ledger.now();
        let has_limits = ledger.policy().has_latency_limits();
        let mut still_pressed = BTreeMap::new();
        let mut leaving = Vec::new();
        for (name, node) in ledger
            .node_views()
            .filter(|(_, node)| node.freshness == Freshness::Fresh)
        {
            // As they were read: a pressure must last anyway before it counts.
            let Some(reading) = ledger.reading(name) else {
                continue;
            };
            for device in node.devices.iter() {
                let Some(observation) = reading.gpu(&device.uuid) else {
                    continue;
                };
                let key = (name.clone(), device.uuid.clone());
                let before = self.pressed.get(&key).copied();
                let was = |is_slow| before.is_some_and(|before| before.is_slow == is_slow);
                let is_loaded = is_pressed(observation.engine_load, &rules, was(false));
                if !is_loaded && !has_limits {
                    continue;
                }
                let residents = ledger.pods_on_gpu(name, &device.uuid);
                let slow = slow_engine(ledger, name, reading, &residents, was(true));
                if slow.is_none() && !is_loaded {
                    continue;
                }
                let is_slow = slow.is_some();
                let since = before.map_or(now, |before| before.since);
                // A pod on several GPUs is named for one of them, and helps all.
                let is_being_relieved = leaving
                    .iter()
                    .any(|relief: &ReliefEviction| residents.contains(&relief.uid));
                // Of the next pod it counts anew, once the eviction can show.
                let counts_again = match slow {
                    Some(_) => (now + LATENCY_WINDOW).before(rules.evict_after).max(now),
                    None => now,
                };
                let engine = slow.or_else(|| engine_on(ledger, &residents));
                let relief = (!is_being_relieved && since + rules.evict_after <= now)
                    .then_some(engine)
                    .flatten()
                    .and_then(|engine| {
                        let place = (name, &device.uuid, &*residents);
                        cheapest_neighbor(ledger, (&engine, is_slow), place, deferred, &leaving)
                    });
                still_pressed.insert(
                    key,
                    Pressure {
                        since: match is_being_relieved || relief.is_some() {
                            true => counts_again,
                            false => since,
                        },
                        is_slow,
                    },
                );
                leaving.extend(relief);
            }
        }
        // A node that is not observed now is not known to be without pressure either.
        let is_stale = |name: &NodeName| {
            ledger
                .node(name)
                .is_some_and(|node| node.freshness == Freshness::Stale)
        };
        let kept = std::mem::take(&mut self.pressed)
            .into_iter()
            .filter(|((name, _), _)| is_stale(name));
        still_pressed.extend(kept);
        self.pressed = still_pressed;
        leaving
    }
}

/// The most important of these pods' engines that takes longer than its class allows, which is over at nine tenths of the limit. An
/// unknown latency is no pressure, nor one that would be twice the limit beside nobody.
fn slow_engine(
    ledger: &Ledger,
    node: &NodeName,
    reading: &NodeReading,
    residents: &[PodUid],
    was_pressed: bool,
) -> Option<PodUid> {
    let is_slow = |uid: &&PodUid| {
        let limits = |pod_state: &PodState| {
            ledger
                .policy()
                .class(pod_state.demand.class)
                .latency_limits()
        };
        let limits = ledger.pod_state(uid).map(limits).unwrap_or_default();
        let Some(latency) = reading.latency_of(uid) else {
            return false;
        };
        let alone = ledger
            .node_state(node)
            .and_then(|node_state| node_state.time_per_token_alone(latency));
        let is_hopeless = alone
            .zip(limits.time_per_token)
            .is_some_and(|(alone, limit)| alone.0 > limit.0.saturating_mul(2));
        let nearest = limits.nearest(latency).filter(|_| !is_hopeless);
        nearest.is_some_and(|(latency, limit)| match was_pressed {
            false => latency > limit,
            true => latency.0 > limit.0 / 10 * 9,
        })
    };
    let slow: Vec<PodUid> = residents.iter().filter(is_slow).cloned().collect();
    engine_on(ledger, &slow)
}

/// Whether an engine is under pressure, which ends at a lower figure than it begins. Unknown load is no pressure.
pub(super) fn is_pressed(
    engine_load: EngineLoad,
    rules: &PressureRules,
    was_pressed: bool,
) -> bool {
    let (kv_cache, queue) = (engine_load.occupancy(), engine_load.queue);
    let (kv_limit, queue_limit) = (rules.kv_cache, rules.queue);
    match was_pressed {
        false => {
            kv_cache.is_some_and(|kv| kv >= kv_limit.high)
                || queue.is_some_and(|n| n >= queue_limit.high)
        }
        true => {
            kv_cache.is_some_and(|kv| kv > kv_limit.low)
                || queue.is_some_and(|n| n > queue_limit.low)
        }
    }
}

/// Whether the pod may still be evicted from a GPU for the engine there, which is still under pressure: it may have been ordered
/// a while ago.
pub fn is_relief_due(ledger: &Ledger, uid: &PodUid, gpu: &GpuUuid) -> bool {
    let Some(pod_state) = ledger.pod_state(uid) else {
        return false;
    };
    let Some((node, rules)) = pod_state.node().zip(ledger.policy().planning.pressure) else {
        return false;
    };
    let is_fresh = ledger
        .node(node)
        .is_some_and(|node| node.freshness == Freshness::Fresh);
    let Some(reading) = ledger.reading(node).filter(|_| is_fresh) else {
        return false;
    };
    let residents = ledger.pods_on_gpu(node, gpu);
    let is_loaded = reading
        .gpu(gpu)
        .is_some_and(|gpu| is_pressed(gpu.engine_load, &rules, true));
    let engine = slow_engine(ledger, node, reading, &residents, true)
        .or_else(|| engine_on(ledger, &residents).filter(|_| is_loaded))
        .and_then(|engine| ledger.pod_state(&engine));
    residents.contains(uid)
        && !residents.iter().any(|uid| ledger.is_leaving_soon(uid))
        && engine.is_some_and(|engine| {
            ledger
                .intrinsic_keep_reason(pod_state, &engine.demand)
                .is_none()
        })
}

/// The most important engine of these pods.
fn engine_on(ledger: &Ledger, residents: &[PodUid]) -> Option<PodUid> {
    let engine_priority = |uid: &PodUid| {
        let pod_state = ledger.pod_state(uid)?;
        let class = ledger.policy().class(pod_state.demand.class);
        (class.engine && class.eviction == Preemptibility::Never)
            .then_some(pod_state.demand.priority)
    };
    let engines = residents
        .iter()
        .filter_map(|uid| Some((engine_priority(uid)?, Reverse(uid))));
    engines.max().map(|(_, Reverse(uid))| uid.clone())
}

/// The cheapest evictable neighbor of an engine on a GPU, of the pods `residents`. `leaving` are those that this look has named
/// already.
fn cheapest_neighbor(
    ledger: &Ledger,
    (engine, is_slow): (&PodUid, bool),
    (node, gpu, residents): (&NodeName, &GpuUuid, &[PodUid]),
    deferred: &BTreeSet<PodUid>,
    leaving: &[ReliefEviction],
) -> Option<ReliefEviction> {
    let demand = &ledger.pod_state(engine)?.demand;
    // A pod is leaving already: that has to help first.
    if residents.iter().any(|uid| ledger.is_leaving_soon(uid)) {
        return None;
    }
    let index = ledger
        .node(node)?
        .devices
        .iter()
        .position(|device| device.uuid == *gpu)?;
    let candidate = ledger
        .candidates_for_demand(&ledger.preemptor(engine), demand, [node])
        .pop()?;
    // A group is evicted whole, which costs more than one engine's pressure justifies; and an exhausted budget is not tried. Nothing
    // keeps the VRAM from a replacement: one that can run on this node only would be back at once.
    let is_evictable = |resident: &&PotentialVictim| {
        let budgets = &resident.budgets;
        let has_left = |budget: &u16| {
            candidate
                .budgets
                .get(usize::from(*budget))
                .is_some_and(|left| *left > 0)
        };
        let is_allowed = resident.gang.is_none() && !deferred.contains(&resident.uid);
        let is_back = resident.eviction_cost.stranded > 0;
        is_allowed && !is_back && candidate.are_budgets_known && budgets.iter().all(has_left)
    };
    let neighbors = candidate
        .potential_victims
        .iter()
        .filter(|one| one.gpus.contains(index))
        // What has no work makes nobody slow.
        .filter(|one| !is_slow || one.busy > Percent::default())
        .filter(is_evictable);
    // Where a limit keeps a pod now, the pressure goes on lasting: the pod is named as soon as the limit allows it.
    let ordered: Vec<PodUid> = leaving.iter().map(|relief| relief.uid.clone()).collect();
    let neighbors =
        neighbors.filter(|resident| ledger.is_within_eviction_rates_after(&ordered, &resident.uid));
    let cheapest = neighbors.min_by_key(|resident: &&PotentialVictim| {
        (EvictionCost::default().plus(resident), resident.uid.clone())
    })?;
    let key = |uid: &PodUid| Some(ledger.pod_state(uid)?.key.clone());
    Some(ReliefEviction {
        uid: cheapest.uid.clone(),
        key: key(&cheapest.uid)?,
        engine: key(engine)?,
        gpu: gpu.clone(),
    })
}

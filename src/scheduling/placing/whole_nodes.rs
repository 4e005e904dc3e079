//! Fit and score of whole nodes, where others pick the GPUs: for a device plugin's pods the kubelet, and for pods with ResourceClaims
//! kube-scheduler. It knows which nodes have the devices of claims; what it cannot see is how busy the engines there are, which
//! models are near, and whether the GPUs are healthy.

use super::fit::Misfit;
use super::rank::{EngineLoadCost, ScoreParts, WHOLE_PART, crowding_part, time_to_ready_part};
use super::start_model::StartModel;
use crate::policy::Policy;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::device_plugin::{GpuRequest, PluginResource};
use crate::vocabulary::gpu::{Gpu, GpuSet, Health};
use crate::vocabulary::node::{Node, NodeKind};

/// Whether a node has `asked` devices left, if `released` of those in use were released.
pub fn check_devices(
    node: &Node,
    resource: &PluginResource,
    asked: u32,
    released: u32,
) -> Result<(), Misfit> {
    let share = node.plugin_share_of(resource);
    let allocatable = share.map_or(0, |share| share.allocatable);
    if allocatable == 0 && node.kind == NodeKind::Dra {
        // A DeviceClass may stand for the resource: kube-scheduler has found devices for it, or would not ask.
        return Ok(());
    }
    if allocatable < asked {
        return Err(Misfit::TooFewDevices { allocatable, asked });
    }
    let used = share.map_or(0, |share| share.used).saturating_sub(released);
    let left = allocatable.saturating_sub(used);
    if left < asked {
        Err(Misfit::DevicesInUse {
            left,
            allocatable,
            asked,
        })
    } else {
        Ok(())
    }
}

/// The score's parts for a pod that asks for `count` devices of a node. KV headroom is that of the calmest GPU an agent reports,
/// because the pod may get any; neither good nor bad where no agent does.
pub fn plugin_score_parts(
    node: &Node,
    demand: &Demand,
    starts: &StartModel,
    policy: &Policy,
) -> ScoreParts {
    let GpuRequest::Plugin { resource, count } = &demand.ask else {
        return ScoreParts::default();
    };
    ScoreParts {
        packing: leftover_part(node, resource, *count),
        kv_headroom: plugin_least_load(node, demand).score_part(),
        time_to_ready: time_to_ready_part(node, GpuSet::EMPTY, demand, starts, policy),
        topology: if *count < 2 || is_one_island(node) {
            0
        } else {
            WHOLE_PART
        },
        spread: match &demand.model {
            Some(model) if policy.scoring.weights.spread > 0 => {
                crowding_part(node.replicas_of(model))
            }
            _ => 0,
        },
        // What depends on the GPU is not known before the kubelet picks it.
        ..ScoreParts::default()
    }
}

/// The part of the node's devices that would stay free.
fn leftover_part(node: &Node, resource: &PluginResource, count: u32) -> u32 {
    let Some(share) = node.plugin_share_of(resource) else {
        return 0;
    };
    let left = u64::from(share.available().saturating_sub(count));
    (left * u64::from(WHOLE_PART) / u64::from(share.allocatable.max(1))) as u32
}

/// The load of the GPU with the least.
pub(crate) fn plugin_least_load(node: &Node, demand: &Demand) -> EngineLoadCost {
    EngineLoadCost::least(node.gpus.iter(), demand)
}

/// Whether an agent says that all GPUs of the node reach each other over NVLink.
fn is_one_island(node: &Node) -> bool {
    let first = node.gpus.first().and_then(|gpu| gpu.island);
    first.is_some() && node.gpus.iter().all(|gpu| gpu.island == first)
}

/// The score's parts for a pod with ResourceClaims. KV headroom is that of the calmest healthy GPU: neither good nor bad where no
/// agent reports, the worst where no GPU is healthy. The packing part is the share of the node's GPUs that are not healthy.
pub fn claims_score_parts(
    node: &Node,
    demand: &Demand,
    starts: &StartModel,
    policy: &Policy,
) -> ScoreParts {
    ScoreParts {
        packing: unhealthy_part(node),
        kv_headroom: kv_headroom_part(node, demand),
        time_to_ready: time_to_ready_part(node, GpuSet::EMPTY, demand, starts, policy),
        spread: match &demand.model {
            Some(model) if policy.scoring.weights.spread > 0 => {
                crowding_part(node.replicas_of(model))
            }
            _ => 0,
        },
        ..ScoreParts::default()
    }
}

fn healthy_gpus(node: &Node) -> impl Iterator<Item = &Gpu> {
    node.gpus.iter().filter(|gpu| gpu.health == Health::Healthy)
}

fn unhealthy_part(node: &Node) -> u32 {
    let (all, healthy) = (node.gpus.len() as u32, healthy_gpus(node).count() as u32);
    ((all - healthy) * WHOLE_PART).checked_div(all).unwrap_or(0)
}

fn kv_headroom_part(node: &Node, demand: &Demand) -> u32 {
    let has_none = !node.gpus.is_empty() && healthy_gpus(node).next().is_none();
    if has_none {
        WHOLE_PART
    } else {
        claims_least_load(node, demand).score_part()
    }
}

/// The load of the healthy GPU with the least.
pub(crate) fn claims_least_load(node: &Node, demand: &Demand) -> EngineLoadCost {
    EngineLoadCost::least(healthy_gpus(node), demand)
}

#[cfg(test)]
mod claims_tests {
    use super::*;
    use crate::placing::rank::{ScheduleAttempt, shortlist};
    use crate::testkit::{LedgerCluster, demand_of, gpu_at, h100, node};
    use crate::units::{Bytes, Percent};
    use crate::verbs::observe::ReadingReported;
    use crate::vocabulary::classification::ClassTerms;
    use crate::vocabulary::demand::Sharing;
    use crate::vocabulary::device_plugin::GpuRequest;
    use crate::vocabulary::gpu::Device;
    use crate::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading};

    fn claims() -> Demand {
        Demand {
            ask: GpuRequest::Claims,
            per_gpu: Bytes::ZERO,
            gpus: 0,
            ..demand_of(1, 1, Sharing::Shared, 0)
        }
    }

    fn report(cluster: &mut LedgerCluster, name: &str, kv_cache: u8) {
        let engine_load = EngineLoad::new(Percent::new(kv_cache), Some(0));
        let gpu = GpuReading {
            uuid: gpu_at(name, 0),
            used: None,
            attributed: Vec::new(),
            engine_load,
        };
        let reading = NodeReading {
            gpus: [gpu].into(),
            sampled: cluster.ledger().now(),
            ..NodeReading::default()
        };
        cluster.apply(ReadingReported {
            node: node(name),
            reading: reading.into(),
        });
    }

    fn order(cluster: &mut LedgerCluster, names: &[&str]) -> Vec<String> {
        let (snapshot, policy) = (cluster.snapshot(), cluster.ledger().policy().clone());
        let attempt = ScheduleAttempt {
            limit: 9,
            ..ScheduleAttempt::unreserved(&policy)
        };
        let list = shortlist(&snapshot, &claims(), names.iter().copied(), attempt);
        assert!(
            list.rejected.is_empty(),
            "fit is kube-scheduler's: {:?}",
            list.rejected
        );
        list.best
            .iter()
            .map(|candidate| names[candidate.query_index].to_owned())
            .collect()
    }

    /// A node without a report counts as a GPU whose engines do not report: a class without limits does not mind.
    #[test]
    fn a_node_without_a_report_costs_only_pods_whose_class_has_limits() {
        let unreported = Node::from_name(node("n"));
        let limitless = Demand {
            terms: ClassTerms::default(),
            ..claims()
        };
        for least_loaded in [claims_least_load, plugin_least_load] {
            assert_eq!(
                least_loaded(&unreported, &claims()),
                EngineLoadCost::UNKNOWN
            );
            assert_eq!(least_loaded(&unreported, &limitless), EngineLoadCost::NONE);
        }
    }

    #[test]
    fn calm_nodes_come_before_busy_ones_and_nodes_without_a_healthy_gpu_last() {
        let lost = Device {
            health: Health::Lost,
            ..h100("lost", 0)
        };
        let mut cluster =
            LedgerCluster::new(&[("busy", 1), ("calm", 1)]).with_node("lost", vec![lost]);
        report(&mut cluster, "busy", 89);
        report(&mut cluster, "calm", 2);
        assert_eq!(
            order(&mut cluster, &["busy", "calm", "lost"]),
            ["calm", "busy", "lost"]
        );
    }
}

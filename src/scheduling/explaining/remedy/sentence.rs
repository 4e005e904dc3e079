//! A remedy as a sentence for users: what to do, where, and with what figures.

use super::{PreemptionNeeds, RemedyPlacement, Victim};
use crate::explaining::explanation::OthersPart;
use crate::explaining::units::{gpu_list, human_duration};
use crate::ids::NodeName;
use crate::ledger::PodEvictionCost;
use crate::reasons::list_names;
use crate::units::{Bytes, Millis, Percent, plural};
use crate::vocabulary::node_reading::Freshness;
use std::fmt;

impl fmt::Display for RemedyPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.gpus[..] {
            // The kubelet picks a device plugin's devices.
            [] => write!(f, "{}", self.node),
            gpus => write!(f, "{} {}", self.node, gpu_list(gpus)),
        }
    }
}

impl RemedyPlacement {
    /// `node GPUs 0 and 1 fit`.
    pub(super) fn fits(&self) -> String {
        format!(
            "{self} {}",
            if self.gpus.len() > 1 { "fit" } else { "fits" }
        )
    }
}

pub(super) const DESCRIBE: &str =
    "kube-scheduler's own reasons are under Events in `kubectl describe pod`";

pub(super) fn not_bound(node: &NodeName, attempts: u32) -> String {
    match attempts {
        0 => format!("kube-scheduler was offered {node} a moment ago; the Binding should follow"),
        _ => format!(
            "kube-scheduler was offered nodes ({node} first) and did not bind the pod {}: another plugin rejects them, for \
             taints, affinity, CPU, memory or volumes; {DESCRIBE}",
            plural(attempts, "time")
        ),
    }
}

/// A victim that has ended is no pod any more, and its memory may be there still.
pub(super) fn victims_left_text(node: &NodeName, victims: &[String], left: u32) -> String {
    match victims {
        [] => format!("the GPUs reserved on {node} are not free yet"),
        _ => format!(
            "{} on {node} not terminated yet, of {}",
            plural(left, "victim"),
            list_names(victims)
        ),
    }
}

pub(super) fn requeued(requeues: u32, ago: Millis) -> String {
    match requeues {
        0 => format!(
            "it was rejected {} ago and fits now: it is requeued within seconds, and kube-scheduler asks again",
            human_duration(ago)
        ),
        _ => format!(
            "it fits now and was requeued {}, last {} ago, but kube-scheduler has not asked: something that Stowage \
             does not see holds it back; {DESCRIBE}",
            plural(requeues, "time"),
            human_duration(ago)
        ),
    }
}

pub(super) fn gpu_count_text(gpus: u32) -> String {
    match gpus {
        1 => "put it on one GPU (leave the annotation stowage.dev/gpus out)".into(),
        _ => format!(
            "split it over {gpus} GPUs (annotation stowage.dev/gpus: \"{gpus}\", and tell the engine, such as with \
             --tensor-parallel-size {gpus})"
        ),
    }
}

type Figure<T> = (Option<T>, Option<T>);

/// The figures that are over their limits.
pub(super) fn engine_load_text(
    (kv_cache, kv_limit): Figure<Percent>,
    (queue, queue_limit): Figure<u32>,
) -> String {
    let limit = kv_limit.map_or("no limit".into(), |limit| format!("limit {limit}"));
    let full = kv_cache.map(|kv_cache| format!("the KV cache is at {kv_cache} ({limit})"));
    let long = queue.map(|queue| {
        let wait = if queue == 1 { "waits" } else { "wait" };
        format!(
            "{} {wait} (limit {})",
            plural(queue, "request"),
            queue_limit.unwrap_or(u32::MAX)
        )
    });
    full.into_iter()
        .chain(long)
        .collect::<Vec<_>>()
        .join(" and ")
}

pub(super) fn start_agent(node: &NodeName, freshness: Freshness) -> String {
    match freshness {
        Freshness::Unreported => {
            format!("start the agent on {node}: its GPUs are unknown until it reports")
        }
        Freshness::Fresh | Freshness::Stale | Freshness::Expired => format!(
            "check the agent on {node}: its last report shows no GPU that can be used, or is too old for the policy"
        ),
    }
}

pub(super) fn add_gpu_text(needs: Bytes, total: Bytes, headroom: Percent, gpus: u32) -> String {
    let are_several = gpus > 1;
    // A device plugin hands out whole devices, whatever their memory.
    if needs == Bytes::ZERO {
        let devices = if are_several { "devices" } else { "device" };
        return format!("whose device plugin offers {gpus} free {devices}");
    }
    let empty = if are_several {
        format!("{gpus} empty GPUs")
    } else {
        "an empty GPU".into()
    };
    format!("with {empty} of at least {total} ({needs} and {headroom} headroom)")
}

pub(super) fn preempt(
    gpu_candidate: &RemedyPlacement,
    victims: &[Victim],
    others: Option<OthersPart>,
    needs: PreemptionNeeds,
) -> String {
    let named = |victim: &Victim| {
        let Victim {
            pod,
            class,
            priority,
            vram_bytes,
            eviction_cost,
            ..
        } = victim;
        let lost = eviction_cost_text(eviction_cost);
        format!(
            "{pod} ({class}, {vram_bytes}, priority {priority}, {lost}{})",
            group_restart_text(victim)
        )
    };
    let others = others.iter().map(ToString::to_string);
    let names = list_names(&others.chain(victims.iter().map(named)).collect::<Vec<_>>());
    let condition = match needs {
        PreemptionNeeds::Nothing => ": kube-scheduler preempts when it next asks".into(),
        PreemptionNeeds::Allowance(limit) => format!(", but {limit}"),
        PreemptionNeeds::PreemptionPolicy => " if its preemptionPolicy were not Never".into(),
        PreemptionNeeds::Priority(least) => format!(" if its priority were {least} or more"),
    };
    format!("{names} could be evicted from {gpu_candidate} for it{condition}")
}

/// The text on the group that restarts with a victim, and on its Kueue Workload.
fn group_restart_text(victim: &Victim) -> String {
    let group = victim.group.as_ref().map_or(String::new(), |group| {
        let cost = gpu_seconds(group.cost);
        format!(
            "; all {} of its {} restart, which loses {cost} GPU-seconds",
            plural(group.pods, "pod"),
            group.name
        )
    });
    match victim.is_kueues {
        true => {
            format!("{group}; its Workload is not requeued, and replacements wait inside its quota")
        }
        false => group,
    }
}

/// `loses 3.6 GPU-seconds: work 3.5, restart 0.1`: the parts that are not zero, the largest first.
pub fn eviction_cost_text(eviction_cost: &PodEvictionCost) -> String {
    let PodEvictionCost {
        restart,
        work,
        reload,
        drain,
        in_flight,
        again,
        stranded,
    } = *eviction_cost;
    let mut parts = [
        (restart, "restart"),
        (work, "work"),
        (reload, "reload"),
        (drain, "drain"),
        (in_flight, "requests in flight"),
        (again, "evicted recently"),
        (stranded, "its replacement could run on the same node only"),
    ];
    parts.sort_by_key(|(amount, _)| std::cmp::Reverse(*amount));
    let nonzero_parts = parts.iter().filter(|(amount, _)| *amount > 0);
    let part_texts: Vec<String> = nonzero_parts
        .map(|(amount, what)| format!("{what} {}", gpu_seconds(*amount)))
        .collect();
    let total = gpu_seconds(eviction_cost.total());
    if part_texts.is_empty() {
        "loses nothing".into()
    } else {
        format!("loses {total} GPU-seconds: {}", part_texts.join(", "))
    }
}

fn gpu_seconds(thousandths: u64) -> String {
    format!("{}.{}", thousandths / 1000, thousandths % 1000 / 100)
}

pub(super) fn start_gate_wait_text(opens_in: Option<Millis>) -> String {
    match opens_in {
        Some(opens_in) => format!(
            "its start gate opens when it is ready, in at most {}",
            human_duration(opens_in)
        ),
        None => "its start gate opens when it has begun and is ready".into(),
    }
}

/// The text on the number of other nodes where the same change helps.
pub(super) fn more_nodes_text(nodes: u32) -> String {
    match nodes {
        0 | 1 => String::new(),
        2 => " (1 more node is like it)".into(),
        nodes => format!(" ({} more nodes are like it)", nodes - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explaining::remedy::RemedyChange;

    #[test]
    fn several_gpus_are_named_and_counted() {
        let gpu_candidate = RemedyPlacement {
            node: NodeName::parse("a").unwrap(),
            gpus: vec![0, 2],
        };
        let text = RemedyChange::ChangeGpuCount {
            gpu_candidate,
            gpus: 2,
            instead_of: 1,
        }
        .to_string();
        assert!(
            text.ends_with("--tensor-parallel-size 2): a GPUs 0 and 2 fit then"),
            "{text}"
        );
    }
}

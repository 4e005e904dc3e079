//! A remedy as a sentence for users: what to do, where, and with what figures.

use super::{GpuCandidate, PreemptionNeeds, RemedyChange, Victim};
use crate::scheduling::explaining::obstacle::list;
use crate::scheduling::explaining::units::{amount, gpu_list, length, quantity};
use crate::scheduling::ledger::PodEvictionCost;
use crate::scheduling::vocabulary::gpu::Health;
use crate::scheduling::vocabulary::node_reading::Freshness;
use crate::units::{Millis, Percent, have, plural};
use std::fmt;

impl fmt::Display for GpuCandidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.gpus[..] {
            // The kubelet picks a device plugin's devices.
            [] => write!(f, "{}", self.node),
            gpus => write!(f, "{} {}", self.node, gpu_list(gpus)),
        }
    }
}

impl fmt::Display for RemedyChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAsked
            | Self::NotBound { .. }
            | Self::Requeued { .. }
            | Self::RejectedByOthers { .. }
            | Self::WaitForVictims { .. } => self.say_next_step(f),
            Self::RequestLess { .. } | Self::ChangeGpuCount { .. } | Self::Share { .. } => {
                self.say_request(f)
            }
            Self::Preempt { gpu_candidate, victims, needs } => say_preempt(f, gpu_candidate, victims, *needs),
            Self::RaiseLimit { .. }
            | Self::AdmitClass { .. }
            | Self::AddPoolToClass { .. }
            | Self::KeepFewerSpare { .. }
            | Self::Repartition { .. }
            | Self::ShareClasses { .. } => self.say_policy(f),
            Self::WaitForStartGate { .. }
            | Self::WaitForEngines { .. }
            | Self::FreeVram { .. }
            | Self::WaitForEmptyGpu { .. } => self.say_occupancy(f),
            Self::FewerDevices { .. } | Self::FreeDevices { .. } => self.say_devices(f),
            Self::StartAgent { .. } | Self::LabelGpuNodes | Self::RepairGpu { .. } | Self::AddGpu { .. } => {
                self.say_hardware(f)
            }
        }
    }
}

const DESCRIBE: &str = "kube-scheduler's own reasons are under Events in `kubectl describe pod`";

fn times(count: u32) -> String {
    plural(count, "time")
}

impl RemedyChange {
    fn say_next_step(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAsked => write!(
                f,
                "it fits, and kube-scheduler has not asked: check that spec.schedulerName is the profile with Stowage's \
                 extender, and look for scheduling gates, unbound volumes and quotas; {DESCRIBE}"
            ),
            Self::NotBound { node, attempts: 0 } => {
                write!(f, "kube-scheduler was offered {node} a moment ago; the Binding should follow")
            }
            Self::NotBound { node, attempts } => write!(
                f,
                "kube-scheduler was offered nodes ({node} first) and did not bind the pod {}: another plugin rejects them, for \
                 taints, affinity, CPU, memory or volumes; {DESCRIBE}",
                times(*attempts)
            ),
            Self::Requeued { woken: 0, ago_millis } => write!(
                f,
                "it was rejected {} ago and fits now: it is requeued within seconds, and kube-scheduler asks again",
                length(*ago_millis)
            ),
            Self::Requeued { woken, ago_millis } => write!(
                f,
                "it fits now and was requeued {}, last {} ago, but kube-scheduler has not asked: something that Stowage \
                 does not see holds it back; {DESCRIBE}",
                times(*woken),
                length(*ago_millis)
            ),
            Self::RejectedByOthers { node, nodes } => write!(
                f,
                "it fits on {node}{}, and kube-scheduler does not ask about it: another plugin rejects it, for taints, \
                 affinity, CPU, memory or volumes; {DESCRIBE}",
                others(*nodes)
            ),
            Self::WaitForVictims { node, victims, left, deadline_in_millis } => write!(
                f,
                "wait: {left} of {} ({}) on {node} not terminated yet; the reservation lasts for {} more",
                plural(victims.len(), "victim"),
                list(victims),
                length(*deadline_in_millis)
            ),
            _ => Ok(()),
        }
    }

    fn say_request(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RequestLess { gpu_candidate, vram_bytes, instead_of_bytes } => write!(
                f,
                "request {} of stowage.dev/vram instead of {}: {gpu_candidate} {} then",
                quantity(*vram_bytes),
                quantity(*instead_of_bytes),
                fits(gpu_candidate)
            ),
            Self::ChangeGpuCount { gpu_candidate, gpus: 1, .. } => write!(
                f,
                "put it on one GPU (leave the annotation stowage.dev/gpus out): {gpu_candidate} {} then",
                fits(gpu_candidate)
            ),
            Self::ChangeGpuCount { gpu_candidate, gpus, .. } => write!(
                f,
                "split it over {gpus} GPUs (annotation stowage.dev/gpus: \"{gpus}\", and tell the engine, such as with \
                 --tensor-parallel-size {gpus}): {gpu_candidate} {} then",
                fits(gpu_candidate)
            ),
            Self::Share { gpu_candidate } => write!(
                f,
                "let it share its GPU (leave the annotation stowage.dev/exclusive out): {gpu_candidate} {} then",
                fits(gpu_candidate)
            ),
            _ => Ok(()),
        }
    }

    fn say_policy(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RaiseLimit { gpu_candidate, tenant, by } => write!(
                f,
                "raise the limit of tenant {tenant} by {} (tenants in the policy), or wait until pods of its own have \
                 terminated: {gpu_candidate} {} then",
                amount(*by, "nothing"),
                fits(gpu_candidate)
            ),
            Self::AdmitClass { gpu_candidate, class, pool, nodes } => write!(
                f,
                "admit class {class} to {} (nodePools[].classes in the policy): {gpu_candidate} {} then{}",
                pool_name(pool.as_deref()),
                fits(gpu_candidate),
                others(*nodes)
            ),
            Self::AddPoolToClass { gpu_candidate, class, pool, nodes } => write!(
                f,
                "{} in the policy: {gpu_candidate} {} then{}",
                match pool {
                    Some(pool) => format!("add node pool {pool} to `pools` of class {class}"),
                    None =>
                        format!("add {} to a node pool that class {class} is kept in", gpu_candidate.node),
                },
                fits(gpu_candidate),
                others(*nodes)
            ),
            Self::KeepFewerSpare { gpu_candidate, class, nodes } => write!(
                f,
                "wait until more GPUs are free, or keep fewer of them from class {class} (planning.spare in the policy): \
                 {gpu_candidate} {} then{}",
                fits(gpu_candidate),
                others(*nodes)
            ),
            Self::Repartition { gpu_candidate, pool, nodes } => write!(
                f,
                "partition the GPUs of {} as {} expects, or change its `mig` in the policy: {} {} then{}",
                gpu_candidate.node,
                pool_name(pool.as_deref()),
                gpu_list(&gpu_candidate.gpus),
                fits(gpu_candidate),
                others(*nodes)
            ),
            Self::ShareClasses { gpu_candidate, class, by, nodes } => write!(
                f,
                "let class {class} share a GPU with the class of {} (mayShareWith of both, in the policy), or wait until \
                 those pods have terminated: {gpu_candidate} {} then{}",
                list(by),
                fits(gpu_candidate),
                others(*nodes)
            ),
            _ => Ok(()),
        }
    }

    fn say_occupancy(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WaitForStartGate { gpu_candidate, by, opens_in_millis } => {
                write!(f, "wait: the engine of {} is starting on {gpu_candidate}; ", list(by))?;
                say_gate(f, *opens_in_millis)
            }
            Self::WaitForEngines { gpu_candidate, by, .. } => {
                write!(f, "no VRAM is missing on {gpu_candidate}, but ")?;
                self.say_pressure(f)?;
                write!(
                    f,
                    " (the engine of {}): wait until it has less to do, or give it another replica",
                    list(by)
                )
            }
            Self::FreeVram { gpu_candidate, short_bytes } => {
                write!(f, "free {short_bytes} more on {gpu_candidate}: nothing else is missing there")
            }
            Self::WaitForEmptyGpu { gpu_candidate, by, nodes } => write!(
                f,
                "wait until {} {} left {gpu_candidate}: empty, {}{}",
                list(by),
                have(by.len().max(1)),
                if gpu_candidate.gpus.len() > 1 { "they fit" } else { "it fits" },
                others(*nodes)
            ),
            _ => Ok(()),
        }
    }

    fn say_pressure(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::WaitForEngines { kv_cache_percent, kv_cache_limit_percent, queue, queue_limit, .. } = self
        else {
            return Ok(());
        };
        let limit =
            |limit: Option<Percent>| limit.map_or("no limit".into(), |limit| format!("limit {limit}"));
        let kv = kv_cache_percent
            .map(|kv| format!("the KV cache is at {kv} ({})", limit(*kv_cache_limit_percent)));
        let long = queue.map(|queue| {
            let wait = if queue == 1 { "waits" } else { "wait" };
            format!("{} {wait} (limit {})", plural(queue, "request"), queue_limit.unwrap_or(u32::MAX))
        });
        let both: Vec<String> = kv.into_iter().chain(long).collect();
        f.write_str(&both.join(" and "))
    }

    fn say_devices(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FewerDevices { gpu_candidate, resource, devices, instead_of } => {
                write!(
                    f,
                    "request {devices} of {resource} instead of {instead_of}: {gpu_candidate} fits then"
                )
            }
            Self::FreeDevices { gpu_candidate, resource, missing } => write!(
                f,
                "wait until {missing} more of {resource} is free on {gpu_candidate}; kube-scheduler preempts pods for it as far as \
                 priorities and the policy allow"
            ),
            _ => Ok(()),
        }
    }

    fn say_hardware(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LabelGpuNodes => write!(
                f,
                "no node is known to have a GPU: label those that have one nvidia.com/gpu.present=true, so that the agent starts \
                 there and reports its GPUs"
            ),
            Self::StartAgent { node, nodes, freshness: Freshness::Unreported } => write!(
                f,
                "start the agent on {node}: its GPUs are unknown until it reports{}",
                others(*nodes)
            ),
            Self::StartAgent { node, nodes, .. } => write!(
                f,
                "check the agent on {node}: its last report shows no GPU that can be used, or is too old for the \
                 policy{}",
                others(*nodes)
            ),
            Self::RepairGpu { gpu_candidate, health, nodes } => write!(
                f,
                "{gpu_candidate} {}; once healthy, the pod fits{}",
                match health {
                    Health::Lost => "is lost",
                    Health::Draining | Health::Healthy => "is draining",
                },
                others(*nodes)
            ),
            // A device plugin hands out whole devices, whatever their memory.
            Self::AddGpu { needs_bytes, gpus, .. } if needs_bytes.0 == 0 => write!(
                f,
                "add a node whose device plugin offers {gpus} free {}",
                if *gpus > 1 { "devices" } else { "device" }
            ),
            Self::AddGpu { needs_bytes, total_bytes, headroom_percent, gpus } => write!(
                f,
                "add a node with {} of at least {total_bytes} ({needs_bytes} and {headroom_percent} headroom)",
                if *gpus > 1 { format!("{gpus} empty GPUs") } else { "an empty GPU".into() }
            ),
            _ => Ok(()),
        }
    }
}

fn say_preempt(
    f: &mut fmt::Formatter<'_>,
    gpu_candidate: &GpuCandidate,
    victims: &[Victim],
    needs: PreemptionNeeds,
) -> fmt::Result {
    let named = |victim: &Victim| {
        let Victim { pod, class, priority, vram_bytes, eviction_cost, .. } = victim;
        let lost = lost(eviction_cost);
        format!("{pod} ({class}, {vram_bytes}, priority {priority}, {lost}{})", with_others(victim))
    };
    let names = list(&victims.iter().map(named).collect::<Vec<_>>());
    match needs {
        PreemptionNeeds::Nothing => {
            write!(
                f,
                "{names} could be evicted from {gpu_candidate} for it: kube-scheduler preempts when it next asks"
            )
        }
        PreemptionNeeds::Allowance(limit) => {
            write!(f, "{names} could be evicted from {gpu_candidate} for it, but {limit}")
        }
        PreemptionNeeds::PreemptionPolicy => {
            write!(
                f,
                "{names} could be evicted from {gpu_candidate} for it if its preemptionPolicy were not Never"
            )
        }
        PreemptionNeeds::Priority(least) => {
            write!(
                f,
                "{names} could be evicted from {gpu_candidate} for it if its priority were {least} or more"
            )
        }
    }
}

/// What else goes or stays with a victim.
fn with_others(victim: &Victim) -> String {
    let group = victim.group.as_ref().map_or(String::new(), |group| {
        let cost = gpu_seconds(group.cost);
        format!(
            "; all {} of its {} restart, which loses {cost} GPU-seconds",
            plural(group.pods, "pod"),
            group.name
        )
    });
    match victim.is_kueues {
        true => format!("{group}; its Workload is not requeued, and replacements wait inside its quota"),
        false => group,
    }
}

/// `loses 3.6 GPU-seconds: work 3.5, restart 0.1`: the parts that are not zero, the largest first.
pub fn lost(eviction_cost: &PodEvictionCost) -> String {
    let PodEvictionCost { restart, work, reload, drain, in_flight, again } = *eviction_cost;
    let mut parts = [
        (restart, "restart"),
        (work, "work"),
        (reload, "reload"),
        (drain, "drain"),
        (in_flight, "requests in flight"),
        (again, "evicted recently"),
    ];
    parts.sort_by_key(|(amount, _)| std::cmp::Reverse(*amount));
    let said = parts.iter().filter(|(amount, _)| *amount > 0);
    let said: Vec<String> = said.map(|(amount, what)| format!("{what} {}", gpu_seconds(*amount))).collect();
    let total = gpu_seconds(eviction_cost.total());
    if said.is_empty() {
        "loses nothing".into()
    } else {
        format!("loses {total} GPU-seconds: {}", said.join(", "))
    }
}

fn gpu_seconds(thousandths: u64) -> String {
    format!("{}.{}", thousandths / 1000, thousandths % 1000 / 100)
}

fn say_gate(f: &mut fmt::Formatter<'_>, opens_in: Option<Millis>) -> fmt::Result {
    match opens_in {
        Some(opens_in) => {
            write!(f, "its start gate opens when it is ready, in at most {}", length(opens_in))
        }
        None => write!(f, "its start gate opens when it has begun and is ready"),
    }
}

fn fits(gpu_candidate: &GpuCandidate) -> &'static str {
    if gpu_candidate.gpus.len() > 1 { "fit" } else { "fits" }
}

fn pool_name(pool: Option<&str>) -> String {
    pool.map_or("its node pool".into(), |pool| format!("node pool {pool}"))
}

/// Other nodes where the same change helps.
fn others(nodes: u32) -> String {
    match nodes {
        0 | 1 => String::new(),
        2 => " (1 more node is like it)".into(),
        nodes => format!(" ({} more nodes are like it)", nodes - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::NodeName;

    #[test]
    fn several_gpus_are_named_and_counted() {
        let gpu_candidate = GpuCandidate { node: NodeName::parse("a").unwrap(), gpus: vec![0, 2] };
        let text = RemedyChange::ChangeGpuCount { gpu_candidate, gpus: 2, instead_of: 1 }.to_string();
        assert!(text.ends_with("--tensor-parallel-size 2): a GPUs 0 and 2 fit then"), "{text}");
    }
}

//! Parts of the sentences of reasons.

use crate::units::{Millis, human_duration, plural};
use crate::vocabulary::cluster_share::TenantLimit;
use crate::vocabulary::gpu::Health;
use crate::vocabulary::latency::NeighborRoom;

/// The greatest number of pods that a sentence names.
const MAX_NAMED_PODS: usize = 3;

/// `a, b and 2 more`; "another pod", if the ledger does not know the pods.
pub fn list_names(names: &[String]) -> String {
    match names {
        [] => "another pod".into(),
        [one] => one.clone(),
        _ if names.len() > MAX_NAMED_PODS => {
            format!(
                "{} and {} more",
                names[..MAX_NAMED_PODS].join(", "),
                names.len() - MAX_NAMED_PODS
            )
        }
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

/// `a, b and 2 more have`. Pods that the reader may not see are one name.
pub(super) fn pods_have(names: &[String]) -> String {
    let are_several = names.len() > 1 || names.iter().any(|name| name.ends_with("pods of others"));
    format!(
        "{} {}",
        list_names(names),
        if are_several { "have" } else { "has" }
    )
}

/// What room for others pods leave on a GPU, in per cent of the time.
pub fn room_text(room: i16) -> String {
    match room {
        NeighborRoom::CLOSED => "beside no other pod, or do not say how long they take".into(),
        room if room < 0 => "beside no pod more, and not beside those that are there".into(),
        0 => "beside no pod more".into(),
        room => format!("beside one more that has work for {room} % of the time"),
    }
}

pub(super) fn each_of(gpus: u32) -> String {
    if gpus == 1 {
        "1 GPU".into()
    } else {
        format!("each of {gpus} GPUs")
    }
}

pub(super) fn none_healthy(gpus: u32) -> String {
    match gpus {
        1 => "the node's GPU is not healthy".into(),
        _ => format!("none of the node's {gpus} GPUs is healthy"),
    }
}

pub(super) fn health_text(health: Health) -> &'static str {
    match health {
        Health::Lost => "lost",
        Health::Draining | Health::Healthy => "draining and takes no more pods",
    }
}

pub(super) fn start_gate_text(gate: Option<Millis>) -> String {
    gate.map_or(String::new(), |left| {
        format!("; its start gate opens in at most {}", human_duration(left))
    })
}

pub(super) fn nodes_matching(nodes: u32) -> String {
    format!(
        "{} {}",
        plural(nodes, "node"),
        if nodes == 1 { "matches" } else { "match" }
    )
}

pub(super) fn in_pool(pool: Option<&str>) -> String {
    pool.map_or("its node pool".into(), |pool| format!("node pool {pool}"))
}

/// `2.0 GiB of VRAM and 0.500 GPUs`.
pub(super) fn tenant_limit_text(limit: TenantLimit) -> String {
    let vram = limit.vram.map(|vram| format!("{vram} of VRAM"));
    let gpus = limit
        .milli_gpus
        .map(|milli| format!("{}.{:03} GPUs", milli / 1000, milli % 1000));
    vram.into_iter()
        .chain(gpus)
        .collect::<Vec<_>>()
        .join(" and ")
}

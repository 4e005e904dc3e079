//! Warnings about single pods in a report, recorded as Events: drift, use above the grant or without one, and GPUs that were lost
//! under them.
//!
//! Nothing is decided or charged here. An agent is trusted about pods that the ledger has on its own node only, and of several
//! replicas only the leader records Events.

use crate::extender::Extender;
use stowage_report::{GpuReport, NodeReport, ReportFinding, UnrecordedPod};
use stowage_scheduling::control_loop::{PodEvent, PodEventReason};
use stowage_scheduling::ids::{GpuUuid, NodeName, PodUid};
use stowage_scheduling::ledger::{LoansEndedUnasked, PodPhase, PodState};
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::vocabulary::classification::Isolation;
use stowage_scheduling::vocabulary::gpu::{Device, Health};
use stowage_scheduling::vocabulary::node::NodeKind;

/// Counts missing parts and findings, and records Events on the pods of the findings. `previous_findings`: the findings of the
/// node's previous report.
pub(crate) fn record_findings(
    extender: &Extender,
    previous_findings: &[ReportFinding],
    report: &NodeReport,
) {
    let metrics = &extender.state.metrics;
    for missing in &report.missing {
        metrics
            .report_missing
            .with_label_values(&[missing.part.into_str()])
            .inc();
    }
    for finding in &report.findings {
        let (pod, kind) = subject(finding);
        let was_reported = previous_findings
            .iter()
            .any(|found| subject(found) == (pod, kind));
        if !was_reported {
            metrics.report_findings.with_label_values(&[kind]).inc();
        }
    }
    if extender.state.leadership.is_leading() {
        report
            .findings
            .iter()
            .for_each(|finding| record_finding(extender, &report.node, finding));
        warn_of_ungranted(extender, report);
    }
}

/// Records Events on pods that use GPUs of a node whose GPUs only Stowage gives, and were given none.
fn warn_of_ungranted(extender: &Extender, report: &NodeReport) {
    if report.unrecorded.is_empty() {
        return;
    }
    let events: Vec<PodEvent> = {
        let cluster = extender.state.cluster();
        if cluster
            .ledger()
            .node(&report.node)
            .is_none_or(|node| node.kind != NodeKind::Stowage)
        {
            return;
        }
        report
            .unrecorded
            .iter()
            .filter_map(|pod| ungranted_event(&cluster, &report.node, pod))
            .collect()
    };
    events
        .into_iter()
        .for_each(|event| extender.control_plane.record_event(event));
}

/// `None` if the pod is not on the agent's node, or was bound there by another component, of which it has an Event.
fn ungranted_event(cluster: &Cluster, node: &NodeName, pod: &UnrecordedPod) -> Option<PodEvent> {
    let is_granted = cluster
        .ledger()
        .pod_state(&pod.pod)
        .is_some_and(|pod_state| !pod_state.demand.is_allocated_externally());
    if is_granted || cluster.kube_filters().node_of(&pod.pod) != Some(node) {
        return None;
    }
    let text = format!(
        "The pod's processes run on {} of {node}, and Stowage gave it no GPU: pods that were placed there lack this VRAM. Let it \
         request stowage.dev/vram, or delete it; if it has to see all GPUs, an administrator gives its namespace the label \
         stowage.dev/all-gpus.",
        uuid_list(&pod.gpus)
    );
    Some(PodEvent {
        key: pod.key()?,
        uid: pod.pod.clone(),
        kind: PodEventReason::Ungranted,
        text,
    })
}

/// Records Events on pods whose GPUs existed `before` this report and are gone or changed in it.
pub(crate) fn warn_of_lost_gpus(
    extender: &Extender,
    before: &[Device],
    report: &NodeReport,
    lost_after: Millis,
) {
    let Some(gpus) = report.gpus.as_deref() else {
        return;
    };
    let lost: Vec<(&Device, String)> = before
        .iter()
        .filter_map(|device| Some((device, describe_loss(device, gpus, lost_after)?)))
        .collect();
    if lost.is_empty() || !extender.state.leadership.is_leading() {
        return;
    }
    for (uid, entry, losses) in pods_that_lost(extender, &report.node, &lost) {
        let text = format!(
            "On {}: {losses}. The pod stays charged there, and no other pod is placed on a lost GPU. Delete the pod so \
             that it is placed again; see the log of the node's agent and the kernel log.",
            report.node
        );
        record_event(extender, uid, &entry, PodEventReason::GpuLost, text);
    }
}

/// Counts loans that engines ended without asking, and records Events on the pods of those that may have failed for want of VRAM.
pub(crate) fn warn_of_loans_ended_unasked(
    extender: &Extender,
    node: &NodeName,
    ended: LoansEndedUnasked,
) {
    let metrics = &extender.state.metrics.lending;
    metrics.taken_back.inc_by(u64::from(ended.taken_back));
    for uid in ended.woken {
        metrics.wakes.with_label_values(&["unasked"]).inc();
        let Some(entry) =
            bound_to(extender, node, &uid).filter(|_| extender.state.leadership.is_leading())
        else {
            continue;
        };
        let text = format!(
            "The engine woke on {node} while other pods had VRAM that it lent, and may have failed for want of it. They are \
             evicted now. Set the annotation stowage.dev/wake-requested first, and wake it when the condition \
             stowage.dev/Wakeable is True and its message is that request; or give its class `sleeping: keep`."
        );
        record_event(extender, uid, &entry, PodEventReason::WokeUnasked, text);
    }
}

/// Records Events on pods whose engines alone do not keep the time per token of their class.
pub(crate) fn warn_of_low_latency_limits(extender: &Extender, node: &NodeName) {
    if !extender.state.leadership.is_leading() {
        return;
    }
    let beyond: Vec<_> = {
        let cluster = extender.state.cluster();
        cluster.ledger().engines_beyond_limits_alone(node).collect()
    };
    for (uid, alone, limit) in beyond {
        let Some(entry) = bound_to(extender, node, &uid) else {
            continue;
        };
        let text = format!(
            "Beside no other pod its engine takes {alone} for a token on {node}, and its class allows {limit} (maxTimePerToken): no \
             eviction helps. Raise the limit, or give the pod faster GPUs, or more of them."
        );
        record_event(
            extender,
            uid,
            &entry,
            PodEventReason::LatencyLimitTooLow,
            text,
        );
    }
}

/// Reports in a row before this one that make it believed: a container may be read while its limits are being set.
const UNKEPT_BEFORE: u32 = 2;

/// Records Events on pods whose Bindings wrote limits that are not in force. `before`: the pods of which earlier reports in a row said
/// so.
pub(crate) fn warn_of_unkept_limits(
    extender: &Extender,
    before: &[(PodUid, u32)],
    report: &NodeReport,
) {
    let is_believed = |pod: &PodUid| {
        let mut before = before.iter();
        before.any(|(before, reports)| before == pod && *reports >= UNKEPT_BEFORE)
    };
    let fresh = extender.state.cluster().ledger().policy().telemetry.fresh;
    if before.is_empty() || report.age_millis >= fresh || !extender.state.leadership.is_leading() {
        return;
    }
    for gpu in report.gpus.iter().flatten() {
        let unkept = gpu.cgroups.iter().filter(|cgroup| is_believed(&cgroup.pod));
        for cgroup in unkept {
            let (Some(limit), Some(written)) = (cgroup.unkept_limit(), cgroup.written_bytes) else {
                continue;
            };
            let asks = |entry: &PodState| entry.demand.terms.isolation != Isolation::None;
            let Some(entry) = bound_to(extender, &report.node, &cgroup.pod).filter(asks) else {
                continue;
            };
            let in_force = match limit < gpu.total_bytes {
                true => format!("a limit of {limit} is in force"),
                false => "no limit is in force".to_owned(),
            };
            let text = format!(
                "On {} of {} {in_force}; the pod's Binding wrote {written}. Its containers can take VRAM of their neighbors. See the \
                 log of gpu-fractioning's pod on the node, then delete this pod: limits are set when containers are created.",
                gpu.uuid, report.node
            );
            record_event(
                extender,
                cgroup.pod.clone(),
                &entry,
                PodEventReason::LimitNotKept,
                text,
            );
        }
    }
}

fn record_finding(extender: &Extender, node: &NodeName, finding: &ReportFinding) {
    let (uid, _) = subject(finding);
    let Some(entry) = bound_to(extender, node, uid) else {
        return;
    };
    let (kind, text) = match finding {
        ReportFinding::Drift {
            recorded, actual, ..
        } => {
            let recorded = entry.devices().map_or(&recorded[..], |devices| devices);
            (PodEventReason::Drift, drift(node, recorded, actual))
        }
        ReportFinding::OverGrant {
            granted_bytes,
            used_bytes,
            ..
        } => (
            PodEventReason::OverGrant,
            over_grant(node, *granted_bytes, *used_bytes),
        ),
    };
    record_event(extender, uid.clone(), &entry, kind, text);
}

fn drift(node: &NodeName, recorded: &[GpuUuid], actual: &[GpuUuid]) -> String {
    format!(
        "The pod's processes run on {} of {node}; its Binding recorded {}. Its grant is charged where it \
         was recorded, and what it uses where it runs. Check that its container gets NVIDIA_VISIBLE_DEVICES from the annotation \
         stowage.dev/visible-devices (where the driver keeps VRAM limits, from gpu-fractioning) and that the node's runtime honors \
         it, then delete the pod.",
        uuid_list(actual),
        uuid_list(recorded)
    )
}

fn over_grant(node: &NodeName, granted: Bytes, used: Bytes) -> String {
    format!(
        "The pod's processes use {used} ({} bytes) of VRAM on {node}; it was granted {granted} ({} bytes). It takes the rest \
         from its neighbors. Start its engine with the share in the annotation stowage.dev/gpu-memory-fraction, or ask for \
         more stowage.dev/vram.",
        used.0, granted.0
    )
}

fn bound_to(extender: &Extender, node: &NodeName, uid: &PodUid) -> Option<PodState> {
    let cluster = extender.state.cluster();
    let entry = cluster
        .ledger()
        .pod_state(uid)
        .filter(|entry| entry.node() == Some(node))?;
    matches!(entry.phase, PodPhase::Bound(_)).then(|| entry.clone())
}

/// How a device changed for the worse. A device that was lost before has been reported already.
fn describe_loss(device: &Device, gpus: &[GpuReport], lost_after: Millis) -> Option<String> {
    // Node labels know indexes only: the first report replaces these devices.
    if device.uuid.index().is_some() || device.health == Health::Lost {
        return None;
    }
    let uuid = &device.uuid;
    if gpus.iter().any(|gpu| gpu.parent.as_ref() == Some(uuid)) {
        return Some(format!("GPU {uuid} has been partitioned into MIG slices"));
    }
    let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == *uuid) else {
        return Some(format!(
            "GPU {uuid} is gone: the agent no longer reports it"
        ));
    };
    if gpu.health(lost_after) == Health::Lost {
        let reason = gpu
            .health_reason
            .as_deref()
            .unwrap_or("the agent gives no reason");
        return Some(format!("GPU {uuid} is unhealthy: {reason}"));
    }
    (gpu.total_bytes < device.total).then(|| {
        format!(
            "GPU {uuid} has shrunk from {} to {}",
            device.total, gpu.total_bytes
        )
    })
}

/// The pods on these devices, each with what it lost, in order of UID.
fn pods_that_lost(
    extender: &Extender,
    node: &NodeName,
    lost: &[(&Device, String)],
) -> Vec<(PodUid, PodState, String)> {
    let cluster = extender.state.cluster();
    let losses = |entry: &PodState| -> String {
        let of_it = lost
            .iter()
            .filter(|(device, _)| is_on(entry, device))
            .map(|(_, text)| text.as_str());
        of_it.collect::<Vec<_>>().join("; ")
    };
    let pods = cluster.ledger().pods_on_node(node);
    pods.map(|(uid, entry)| (uid.clone(), entry.clone(), losses(entry)))
        .filter(|(.., losses)| !losses.is_empty())
        .collect()
}

fn is_on(entry: &PodState, device: &Device) -> bool {
    let is_it = |uuid: &GpuUuid| match uuid.index() {
        Some(index) => device.index == index && device.parent.is_none(),
        None => *uuid == device.uuid,
    };
    entry
        .devices()
        .is_some_and(|devices| devices.iter().any(is_it))
}

fn record_event(
    extender: &Extender,
    uid: PodUid,
    entry: &PodState,
    kind: PodEventReason,
    text: String,
) {
    extender.control_plane.record_event(PodEvent {
        key: entry.key.clone(),
        uid,
        kind,
        text,
    });
}

fn uuid_list(gpus: &[GpuUuid]) -> String {
    match gpus {
        [] => "no GPU".into(),
        gpus => gpus
            .iter()
            .map(GpuUuid::as_str)
            .collect::<Vec<_>>()
            .join(", "),
    }
}

/// The pod a finding is about, and the finding's name in metrics.
fn subject(finding: &ReportFinding) -> (&PodUid, &'static str) {
    match finding {
        ReportFinding::Drift { pod, .. } => (pod, "drift"),
        ReportFinding::OverGrant { pod, .. } => (pod, "over-grant"),
    }
}

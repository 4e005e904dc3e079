//! Checks whether a report can be true, and extracts the devices for placement.
//!
//! Checks the content only: the sender, the order and the effect of a report are handled elsewhere. Fields that this version
//! does not know have been ignored before, and a missing field has been named.

use std::collections::BTreeSet;
use stowage_report::engine_metrics::LATENCIES;
use stowage_report::limits::{
    MAX_AGE, MAX_BOOT_ID_BYTES, MAX_CGROUPS, MAX_ENGINES, MAX_FINDINGS, MAX_LISTED_GPUS,
    MAX_MISSING, MAX_MODELS, MAX_PROCESSES, MAX_TEXT_BYTES, MAX_TOKEN_RATE,
};
use stowage_report::{EngineReport, GpuReport, NodeReport, ReportFinding, ReportPart};
use stowage_scheduling::coded::coded;
use stowage_scheduling::ids::{GpuUuid, NodeName, PodUid};
use stowage_scheduling::units::{Bytes, Millis, Percent};
use stowage_scheduling::vocabulary::demand::MAX_GPUS;
use stowage_scheduling::vocabulary::gpu::Device;
use stowage_scheduling::vocabulary::health::ComputeMode;

coded! {
    #[derive(Debug, Clone, PartialEq)]
    pub enum ReportError {
        "unknown-node" UnknownNode(node: NodeName),
            "Stowage knows no node \"{node}\"; is the agent's node name its Node object's name?";
        "flawed" [flaw.code()] Flawed { node: NodeName, flaw: Flaw }, "node {node}: {flaw}";
        "old" Old { sequence: u64, known: u64 }, "report {sequence} is not newer than report {known} of the same boot";
        "old" EarlierBoot, "the report is of an earlier boot of the agent";
        "replaced-node" ReplacedNode(node: NodeName),
            "nothing shows that this agent is on the machine that has the Node {node} now; if it is, its reports count within \
             30 s, or as soon as Stowage's watch shows the Node that its token names";
        "wrong-node" WrongNode { node: NodeName, actual: NodeName },
            "the token is of an agent on {actual}, which cannot speak for {node}; each agent reports its own node";
        /// It is JSON, but no report.
        "malformed" Malformed(error: String), "{error}";
    }
}

coded! {
    /// An impossible value, and where it is.
    #[derive(Debug, Clone, PartialEq)]
    pub enum Flaw {
        "bad-token-rate" TokenRate { place: usize, pod: PodUid, rate: f64 },
            "engines[{place}]: pod {pod} processes {rate} tokens per second; write a number from 0 to {MAX_TOKEN_RATE}";
        "bad-busy-share" BusyShare { place: usize, pod: PodUid, share: f64 },
            "engines[{place}]: pod {pod}'s engine is busy for {share} of its time; a share of 0 to 1 is meant";
        "bad-latency" Latency { place: usize, pod: PodUid },
            "engines[{place}]: pod {pod}'s engine has a latency of 0, or of more than a day; leave out what was not measured";
        "gpu-twice" GpuTwice { place: usize, uuid: GpuUuid },
            "gpus[{place}]: GPU {uuid} is listed twice; a GPU and each of its slices come once";
        "reserved-above-total" ReservedAboveTotal { place: usize, uuid: GpuUuid, reserved: Bytes, total: Bytes },
            "gpus[{place}]: GPU {uuid} reserves {reserved} of a total of {total}";
        "used-above-total" UsedAboveTotal { place: usize, uuid: GpuUuid, used: Bytes, total: Bytes },
            "gpus[{place}]: GPU {uuid} has {used} in use of a total of {total}; both are bytes";
        "bad-uuid" BadUuid { place: usize, uuid: GpuUuid },
            "gpus[{place}]: {uuid} is no GPU's UUID: Stowage uses such names itself, or lists them with commas";
        "no-memory" NoMemory { place: usize, uuid: GpuUuid },
            "gpus[{place}]: GPU {uuid} has no memory; leave out what has none, or give the size by hand";
        "bad-utilization" Utilization { place: usize, uuid: GpuUuid, percent: u8 },
            "gpus[{place}]: GPU {uuid} is busy to {percent} %; 0 to 100 is meant";
        "too-many-gpus" TooManyGpus(count: usize),
            "the report lists {count} GPUs and slices; at most {MAX_GPUS} are supported on a node";
        "no-reason" NoReason,
            "gpus is null, and `missing` does not say why: add {{\"part\": \"gpus\", \"reason\": …}}";
        "bad-kv-usage" KvUsage { place: usize, pod: PodUid, usage: f64 },
            "engines[{place}]: the KV cache of pod {pod}'s engine is in use to {usage}; a share of 0 to 1 is meant";
        "too-many" TooMany { what: &'static str, count: usize, most: usize },
            "there are {count} {what}; at most {most} are taken";
        "too-long" TooLong { what: String, length: usize, most: usize },
            "{what} is {length} bytes long; at most {most} are kept";
        "too-aged" TooAged(age: Millis),
            "the sample is {} s old; what is older than {} s is reported as missing", age.0 / 1000, MAX_AGE.0 / 1000;
    }
}

/// The report as it counts: engines keep only GPUs that the report lists.
pub fn check(mut report: NodeReport) -> Result<NodeReport, ReportError> {
    if let Err(flaw) = check_content(&report) {
        return Err(ReportError::Flawed {
            node: report.node,
            flaw,
        });
    }
    if let Some(gpus) = &report.gpus {
        report
            .engines
            .iter_mut()
            .for_each(|engine| retain_listed(&mut engine.gpus, gpus));
        report
            .unread
            .iter_mut()
            .for_each(|unread| retain_listed(&mut unread.gpus, gpus));
    }
    Ok(report)
}

/// Devices for placement: MIG slices instead of the GPUs they are cut from. `None` if the agent could not read its GPUs.
pub fn devices(report: &NodeReport, lost_after: Millis) -> Option<Vec<Device>> {
    let gpus = report.gpus.as_deref()?;
    Some(
        placeable(gpus)
            .into_iter()
            .map(|gpu| device(gpu, lost_after))
            .collect(),
    )
}

/// Whether the agent left no GPU out because it could not read it.
pub(crate) fn lists_all_gpus(report: &NodeReport) -> bool {
    report.gpus.is_some()
        && report
            .missing
            .iter()
            .all(|missing| missing.part != ReportPart::Gpus)
}

/// A GPU that left between two samples may still be named by its engine.
fn retain_listed(named: &mut Vec<GpuUuid>, listed: &[GpuReport]) {
    match &named[..] {
        // Most engines have one GPU, for which no set over all GPUs has to be built.
        [only] if listed.iter().any(|gpu| gpu.uuid == *only) => {}
        _ => {
            let listed: BTreeSet<&GpuUuid> = listed.iter().map(|gpu| &gpu.uuid).collect();
            let mut seen = BTreeSet::new();
            named.retain(|uuid| listed.contains(uuid) && seen.insert(uuid.clone()));
        }
    }
}

fn check_content(report: &NodeReport) -> Result<(), Flaw> {
    check_length(&"bootId", &report.boot_id, MAX_BOOT_ID_BYTES)?;
    if report.age_millis > MAX_AGE {
        return Err(Flaw::TooAged(report.age_millis));
    }
    match &report.gpus {
        Some(gpus) => check_gpus(gpus)?,
        None if report
            .missing
            .iter()
            .any(|missing| missing.part == ReportPart::Gpus) => {}
        None => return Err(Flaw::NoReason),
    }
    check_engines(&report.engines)?;
    check_count("pods without an engine", report.unread.len(), MAX_ENGINES)?;
    for (place, unread) in report.unread.iter().enumerate() {
        check_count("GPUs of a pod", unread.gpus.len(), MAX_LISTED_GPUS)?;
        check_length(
            &format_args!("unread[{place}].reason"),
            &unread.reason,
            MAX_TEXT_BYTES,
        )?;
    }
    check_count("models", report.models.len(), MAX_MODELS)?;
    for (place, model) in report.models.iter().enumerate() {
        check_length(
            &format_args!("models[{place}].source"),
            &model.source,
            MAX_TEXT_BYTES,
        )?;
    }
    check_count("findings", report.findings.len(), MAX_FINDINGS)?;
    report.findings.iter().try_for_each(check_finding)?;
    check_count(
        "pods without a record",
        report.unrecorded.len(),
        MAX_FINDINGS,
    )?;
    for unrecorded in &report.unrecorded {
        check_count("GPUs of a pod", unrecorded.gpus.len(), MAX_LISTED_GPUS)?;
    }
    check_count("missing parts", report.missing.len(), MAX_MISSING)?;
    for (place, missing) in report.missing.iter().enumerate() {
        check_length(
            &format_args!("missing[{place}].reason"),
            &missing.reason,
            MAX_TEXT_BYTES,
        )?;
    }
    Ok(())
}

fn check_gpus(gpus: &[GpuReport]) -> Result<(), Flaw> {
    if gpus.len() > MAX_LISTED_GPUS {
        return Err(Flaw::TooManyGpus(gpus.len()));
    }
    let mut seen = BTreeSet::new();
    let mut processes = 0;
    for (place, gpu) in gpus.iter().enumerate() {
        if !seen.insert(&gpu.uuid) {
            return Err(Flaw::GpuTwice {
                place,
                uuid: gpu.uuid.clone(),
            });
        }
        check_gpu(place, gpu)?;
        check_count("cgroups on a GPU", gpu.cgroups.len(), MAX_CGROUPS)?;
        processes += gpu.processes.as_ref().map_or(0, Vec::len);
    }
    check_count("processes", processes, MAX_PROCESSES)?;
    let placeable = placeable(gpus).len();
    if placeable > MAX_GPUS as usize {
        Err(Flaw::TooManyGpus(placeable))
    } else {
        Ok(())
    }
}

fn check_gpu(place: usize, gpu: &GpuReport) -> Result<(), Flaw> {
    let (uuid, total, reserved) = (gpu.uuid.clone(), gpu.total_bytes, gpu.reserved_bytes);
    if gpu.uuid.index().is_some() || gpu.uuid.as_str().contains(',') {
        return Err(Flaw::BadUuid { place, uuid });
    }
    if reserved > total {
        return Err(Flaw::ReservedAboveTotal {
            place,
            uuid,
            reserved,
            total,
        });
    }
    if total == Bytes::ZERO {
        return Err(Flaw::NoMemory { place, uuid });
    }
    // Drivers differ in whether their reserve counts as used: only a value that is impossible in either reading is rejected.
    if let Some(used) = gpu.used_bytes.filter(|used| *used > total) {
        return Err(Flaw::UsedAboveTotal {
            place,
            uuid,
            used,
            total,
        });
    }
    let activity = gpu.activity.unwrap_or_default().percents();
    let percents = activity.into_iter().flatten().map(Percent::get);
    let mut percents = percents.chain(gpu.utilization_percent);
    if let Some(percent) = percents.find(|percent| *percent > 100) {
        return Err(Flaw::Utilization {
            place,
            uuid,
            percent,
        });
    }
    match &gpu.health_reason {
        Some(reason) => check_length(
            &format_args!("gpus[{place}].healthReason"),
            reason,
            MAX_TEXT_BYTES,
        ),
        None => Ok(()),
    }
}

fn check_engines(engines: &[EngineReport]) -> Result<(), Flaw> {
    check_count("engines", engines.len(), MAX_ENGINES)?;
    for (place, engine) in engines.iter().enumerate() {
        check_count("GPUs of an engine", engine.gpus.len(), MAX_LISTED_GPUS)?;
        check_length(
            &format_args!("engines[{place}].engine"),
            &engine.engine,
            MAX_TEXT_BYTES,
        )?;
        let problem = engine.problem.as_deref().unwrap_or_default();
        check_length(
            &format_args!("engines[{place}].problem"),
            problem,
            MAX_TEXT_BYTES,
        )?;
        let namespace = engine.reusable_in.as_deref().unwrap_or_default();
        check_length(
            &format_args!("engines[{place}].reusableIn"),
            namespace,
            MAX_TEXT_BYTES,
        )?;
        // Written so that NaN never passes.
        if let Some(usage) = engine
            .kv_cache_usage
            .filter(|usage| !(0.0..=1.0).contains(usage))
        {
            return Err(Flaw::KvUsage {
                place,
                pod: engine.pod.clone(),
                usage,
            });
        }
        if let Some(share) = engine.busy.filter(|share| !(0.0..=1.0).contains(share)) {
            return Err(Flaw::BusyShare {
                place,
                pod: engine.pod.clone(),
                share,
            });
        }
        let mut latencies = [engine.time_per_token, engine.time_to_first_token]
            .into_iter()
            .flatten();
        if latencies.any(|latency| !LATENCIES.contains(&latency.mean)) {
            return Err(Flaw::Latency {
                place,
                pod: engine.pod.clone(),
            });
        }
        let rates = [engine.tokens_per_second, engine.prompt_tokens_per_second];
        if let Some(rate) = rates
            .into_iter()
            .flatten()
            .find(|rate| !(0.0..=MAX_TOKEN_RATE).contains(rate))
        {
            return Err(Flaw::TokenRate {
                place,
                pod: engine.pod.clone(),
                rate,
            });
        }
    }
    Ok(())
}

fn check_finding(finding: &ReportFinding) -> Result<(), Flaw> {
    match finding {
        ReportFinding::Drift {
            recorded, actual, ..
        } => check_count(
            "GPUs of a drift",
            recorded.len().max(actual.len()),
            MAX_LISTED_GPUS,
        ),
        ReportFinding::OverGrant { .. } => Ok(()),
    }
}

fn check_count(what: &'static str, count: usize, most: usize) -> Result<(), Flaw> {
    if count > most {
        Err(Flaw::TooMany { what, count, most })
    } else {
        Ok(())
    }
}

fn check_length(what: &dyn std::fmt::Display, text: &str, most: usize) -> Result<(), Flaw> {
    if text.len() > most {
        Err(Flaw::TooLong {
            what: what.to_string(),
            length: text.len(),
            most,
        })
    } else {
        Ok(())
    }
}

fn placeable(gpus: &[GpuReport]) -> Vec<&GpuReport> {
    let parents: BTreeSet<&GpuUuid> = gpus.iter().filter_map(|gpu| gpu.parent.as_ref()).collect();
    gpus.iter()
        .filter(|gpu| !parents.contains(&gpu.uuid))
        .collect()
}

fn device(gpu: &GpuReport, lost_after: Millis) -> Device {
    Device {
        uuid: gpu.uuid.clone(),
        index: gpu.index,
        model: gpu.model.clone(),
        parent: gpu.parent.clone(),
        total: gpu.total_bytes,
        reserved: gpu.reserved_bytes,
        health: gpu.health(lost_after),
        exclusive_process: gpu.compute_mode == Some(ComputeMode::ExclusiveProcess),
        island: gpu
            .nvlink_island
            .and_then(|island| u8::try_from(island).ok()),
    }
}

//! Prints a report as tables.

use crate::cli::output::Columns;
use std::collections::BTreeMap;
use std::fmt::Write;
use stowage_agent::pods::PodOnNode;
use stowage_agent::print::missing_line;
use stowage_report::{
    EngineReport, EngineState, GpuReport, ModelReport, NodeReport, ProcessReport, ReportFinding,
};
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::vocabulary::gpu::Health;
use stowage_scheduling::vocabulary::model_tier::ModelTier;

/// The report, with the names of pods in place of their UIDs.
pub fn render_tables(report: &NodeReport, pods: &[PodOnNode], columns: Columns) -> String {
    let names: PodNames<'_> = pods.iter().map(|pod| (&pod.uid, pod)).collect();
    let mut text = format!("Node {}\n", report.node);
    match report.gpus.as_deref() {
        Some([]) => text += "\nNo GPU.\n",
        Some(gpus) => {
            text += &section("GPUs", &gpu_table(gpus, &names, columns));
            gpus.iter()
                .filter_map(health_line)
                .for_each(|line| text += &line);
        }
        None => {}
    }
    let gpus = report.gpus.as_deref().unwrap_or_default();
    if gpus.iter().any(|gpu| !gpu.cgroups.is_empty()) {
        text += &section("VRAM of cgroups", &cgroup_table(gpus, &names, columns));
    }
    if !report.engines.is_empty() {
        text += &section("Engines", &engine_table(&report.engines, &names, columns));
        report
            .engines
            .iter()
            .filter_map(|engine| problem_line(engine, &names))
            .for_each(|line| text += &line);
    }
    for unread in &report.unread {
        let pod = pod_name(&unread.pod, &names);
        write!(
            text,
            "\nNo engine of {pod} can be read: {}\n",
            unread.reason
        )
        .expect(WRITE_NEVER_FAILS);
    }
    if !report.models.is_empty() {
        text += &section("Models", &model_table(&report.models, columns));
    }
    for finding in &report.findings {
        write!(
            text,
            "\nNot as it was meant: {}\n",
            finding_line(finding, &names)
        )
        .expect(WRITE_NEVER_FAILS);
    }
    for missing in &report.missing {
        write!(text, "\nMissing: {}\n", missing_line(missing)).expect(WRITE_NEVER_FAILS);
    }
    columns.wrap(&text)
}

type PodNames<'a> = BTreeMap<&'a PodUid, &'a PodOnNode>;

const WRITE_NEVER_FAILS: &str = "a String takes any text";

fn section(title: &str, table: &str) -> String {
    format!("\n{title}\n{table}")
}

fn gpu_table(gpus: &[GpuReport], names: &PodNames<'_>, columns: Columns) -> String {
    let header = [
        "#",
        "GPU",
        "Model",
        "Used",
        "Total",
        "Busy",
        "Health",
        "NUMA",
        "NVLink",
        "Who has memory on it",
    ];
    let rows = gpus.iter().map(|gpu| {
        let mark = if gpu.parent.is_some() { "└" } else { "" };
        vec![
            format!("{mark}{}", gpu.index),
            gpu.uuid.to_string(),
            gpu.model.to_string(),
            or_unknown(gpu.used_bytes),
            gpu.total_bytes.to_string(),
            or_unknown(
                gpu.utilization_percent
                    .map(|percent| format!("{percent} %")),
            ),
            health_text(gpu).into(),
            or_unknown(gpu.numa_node),
            or_unknown(gpu.nvlink_island),
            processes_text(gpu.processes.as_deref(), names),
        ]
    });
    columns.table(&header, rows, &[0, 3, 4, 5])
}

fn cgroup_table(gpus: &[GpuReport], names: &PodNames<'_>, columns: Columns) -> String {
    let all = gpus
        .iter()
        .flat_map(|gpu| gpu.cgroups.iter().map(move |cgroup| (gpu, cgroup)));
    let rows = all.map(|(gpu, cgroup)| {
        let limit = cgroup
            .limit_bytes
            .map(|limit| match limit < gpu.total_bytes {
                true => limit.to_string(),
                false => "none".into(),
            });
        vec![
            gpu.index.to_string(),
            pod_name(&cgroup.pod, names),
            or_unknown(limit),
            or_unknown(cgroup.guaranteed_bytes),
            or_unknown(cgroup.used_bytes),
        ]
    });
    columns.table(
        &["#", "Pod", "Limit", "Guaranteed", "Used"],
        rows,
        &[0, 2, 3, 4],
    )
}

fn health_text(gpu: &GpuReport) -> &'static str {
    match gpu.health {
        Health::Healthy => "healthy",
        Health::Draining => "draining",
        Health::Lost => "lost",
    }
}

/// Reasons are sentences, and would make a table wider than any terminal.
fn health_line(gpu: &GpuReport) -> Option<String> {
    let reason = gpu.health_reason.as_ref()?;
    Some(format!(
        "\n{} is {}: {reason}\n",
        gpu.uuid,
        health_text(gpu)
    ))
}

fn problem_line(engine: &EngineReport, names: &PodNames<'_>) -> Option<String> {
    Some(format!(
        "\nThe engine of {}: {}\n",
        pod_name(&engine.pod, names),
        engine.problem.as_ref()?
    ))
}

/// `team-a/llama 12.0 GiB, no pod 0.3 GiB`
fn processes_text(processes: Option<&[ProcessReport]>, names: &PodNames<'_>) -> String {
    let Some(processes) = processes else {
        return UNKNOWN.into();
    };
    let mut by_owner: BTreeMap<String, Option<Bytes>> = BTreeMap::new();
    for process in processes {
        let owner = process
            .pod
            .as_ref()
            .map_or("no pod".into(), |pod| pod_name(pod, names));
        let sum = by_owner.entry(owner).or_insert(Some(Bytes::ZERO));
        *sum = sum.zip(process.used_bytes).map(|(sum, used)| sum + used);
    }
    let owners = by_owner
        .into_iter()
        .map(|(owner, bytes)| format!("{owner} {}", or_unknown(bytes)));
    owners.collect::<Vec<_>>().join(", ")
}

fn engine_table(engines: &[EngineReport], names: &PodNames<'_>, columns: Columns) -> String {
    let header = [
        "Pod", "Engine", "Model", "State", "KV cache", "Tokens", "Waiting", "Running", "Age",
    ];
    let rows = engines.iter().map(|engine| {
        vec![
            pod_name(&engine.pod, names),
            engine.engine.clone(),
            or_unknown(engine.model.as_ref()),
            state_text(engine),
            or_unknown(
                engine
                    .kv_cache_usage
                    .map(|share| format!("{:.0} %", share * 100.0)),
            ),
            or_unknown(engine.kv_cache_tokens),
            or_unknown(engine.waiting),
            or_unknown(engine.running),
            age_text(engine.age_millis),
        ]
    });
    columns.table(&header, rows, &[4, 5, 6, 7, 8])
}

fn state_text(engine: &EngineReport) -> String {
    match (engine.state, engine.sleep_level) {
        (EngineState::Sleeping, Some(level)) => format!("sleeping, level {level}"),
        (EngineState::Other, _) => UNKNOWN.into(),
        (state, _) => state.into_str().into(),
    }
}

fn model_table(models: &[ModelReport], columns: Columns) -> String {
    let rows = models.iter().map(|model| {
        let size = Some(model.bytes).filter(|bytes| *bytes > Bytes::ZERO);
        vec![
            model.model.to_string(),
            tier_text(model.tier).into(),
            or_unknown(size),
            model.source.clone(),
        ]
    });
    columns.table(&["Model", "Where", "Size", "Found by"], rows, &[2])
}

fn tier_text(tier: ModelTier) -> &'static str {
    match tier {
        ModelTier::Partial => "on disk, in part",
        ModelTier::Disk => "on disk",
        ModelTier::PageCache => "in page cache",
        ModelTier::Sleeping => "in a sleeping engine",
        ModelTier::Loading => "being loaded",
        ModelTier::Resident => "in a GPU",
    }
}

fn finding_line(finding: &ReportFinding, names: &PodNames<'_>) -> String {
    let list = |uuids: &[stowage_scheduling::ids::GpuUuid]| {
        uuids
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(", ")
    };
    match finding {
        ReportFinding::Drift {
            pod,
            recorded,
            actual,
        } => {
            format!(
                "{} was given {} and runs on {}",
                pod_name(pod, names),
                list(recorded),
                list(actual)
            )
        }
        ReportFinding::OverGrant {
            pod,
            granted_bytes,
            used_bytes,
        } => {
            format!(
                "{} was granted {granted_bytes} and uses {used_bytes}",
                pod_name(pod, names)
            )
        }
    }
}

fn pod_name(pod: &PodUid, names: &PodNames<'_>) -> String {
    names
        .get(pod)
        .map_or_else(|| format!("pod {pod}"), |pod| pod.key.to_string())
}

const UNKNOWN: &str = "?";

fn or_unknown(figure: Option<impl ToString>) -> String {
    figure.map_or_else(|| UNKNOWN.into(), |figure| figure.to_string())
}

fn age_text(age: Millis) -> String {
    format!("{}.{} s", age.0 / 1000, age.0 % 1000 / 100)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn known_figures_are_printed_and_unknown_ones_are_a_question_mark() {
        let report: NodeReport = serde_json::from_value(json!({
            "node": "node-a", "bootId": "b", "sequence": 1,
            "gpus": [{
                "uuid": "GPU-1", "index": 0, "model": "H100", "totalBytes": 80u64 << 30, "usedBytes": 13u64 << 30,
                "health": "draining", "healthReason": "it is worn",
                "processes": [{ "pid": 1, "usedBytes": 12u64 << 30, "pod": "u" }, { "pid": 2, "usedBytes": 1u64 << 30 }],
            }],
            "engines": [{ "pod": "u", "engine": "vllm", "gpus": ["GPU-1"], "state": "serving", "kvCacheUsage": 0.97, "ageMillis": 1234, "problem": "it is tired" }],
            "models": [{ "model": "org/m", "tier": "partial", "source": "huggingface" }],
            "missing": [{ "part": "pods", "reason": "no cluster" }],
        }))
        .unwrap();
        let text = render_tables(&report, &[], Columns(None));
        for part in [
            "Node node-a",
            "13.0 GiB",
            "pod u 12.0 GiB",
            "no pod 1.0 GiB",
            "97 %",
            "1.2 s\n",
            "The engine of pod u: it is tired",
            "GPU-1 is draining: it is worn",
            "on disk, in part",
            "Missing: pods of this node: no cluster",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }
}

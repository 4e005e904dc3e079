//! Formats one node of an explanation: whether the pod fits, its GPUs' figures as a table, and a remark on each GPU.

use super::{Paint, indented, loans, two_columns};
use crate::cli::output::Columns;
use owo_colors::Style;
use std::collections::BTreeMap;
use stowage_scheduling::explaining::explanation::{
    BoundStartPart, CalibrationPart, DevicesPart, EngineLoadPart, GpuPart, NodePart,
    OccupantLatencyPart, OccupantPart, ScorePart, StartPart, WakePart, WeightedPart,
};
use stowage_scheduling::explaining::units::human_duration;
use stowage_scheduling::ledger::OccupantPhase;
use stowage_scheduling::placing::start_model::FactorSource;
use stowage_scheduling::reasons::room_text;
use stowage_scheduling::units::{Bytes, Micros, Millis, Percent, plural};
use stowage_scheduling::vocabulary::gpu::Health;
use stowage_scheduling::vocabulary::model_tier::ModelTier;
use stowage_scheduling::vocabulary::node_reading::{Freshness, GpuActivity, NodeIsolation};

const INDENT: usize = 3;

pub fn text(node: &NodePart, columns: Columns, paint: Paint) -> String {
    let refused = node.misfit.as_ref().or(node.kube_scheduler.as_ref());
    let (verdict, style) = match (refused, &node.score) {
        (Some(misfit), _) => (
            format!("does not fit ({})", misfit.code),
            Style::new().red(),
        ),
        (None, Some(score)) => (format!("fits, rank {}", score.rank), Style::new().green()),
        (None, None) if node.is_own => ("has the pod".into(), Style::new().green()),
        (None, None) => ("fits".into(), Style::new().green()),
    };
    let mut text = format!(
        "\n{}\n",
        paint.styled(&format!("{}: {verdict}", node.name), style.bold())
    );
    let mut rows: Vec<(String, String)> = Vec::new();
    rows.extend(
        node.misfit
            .as_ref()
            .map(|misfit| ("why".into(), misfit.text.clone())),
    );
    rows.extend(node.kube_scheduler.as_ref().map(|reason| {
        let stowage = if node.misfit.is_none() {
            "; by Stowage it fits"
        } else {
            ""
        };
        (
            "scheduler".into(),
            format!("kube-scheduler refuses it: {}{stowage}", reason.text),
        )
    }));
    let is_new = |warning: &&String| {
        node.misfit
            .as_ref()
            .is_none_or(|misfit| misfit.text != **warning)
    };
    rows.extend(
        node.warnings
            .iter()
            .filter(is_new)
            .map(|warning| ("warning".into(), warning.clone())),
    );
    if node.keeps_vram_limits {
        let read = match node.isolation {
            Some(NodeIsolation { dmem: true, .. }) => "",
            Some(NodeIsolation { cgroup_version, .. }) => {
                &format!("; by cgroup v{cgroup_version} without dmem nothing says what is in force")
            }
            None => "; no agent says what is in force",
        };
        let text = "the driver keeps the pod's containers within their VRAM (gpu-fractioning)";
        rows.push(("limits".into(), format!("{text}{read}")));
    }
    rows.push(("report".into(), report_text(node)));
    rows.extend(node.devices.map(
        |DevicesPart {
             allocatable,
             used,
             left,
         }| {
            (
                "plugin".into(),
                format!("offers {allocatable}, of which {used} are in use and {left} free"),
            )
        },
    ));
    rows.extend(model_text(node).map(|model| ("model".into(), model)));
    rows.extend(
        node.start
            .as_ref()
            .and_then(start_text)
            .map(|start| ("start".into(), start)),
    );
    rows.extend(
        node.score
            .as_ref()
            .map(|score| ("score".into(), score_text(score))),
    );
    text += &two_columns(rows, INDENT, columns);
    if !node.gpus.is_empty() {
        text += &indented(&gpu_table(&node.gpus, columns.beside(INDENT)), INDENT);
        text += &gpu_remarks(&node.gpus, columns);
    }
    text
}

fn report_text(node: &NodePart) -> String {
    let age = node
        .report_age_millis
        .map(human_duration)
        .unwrap_or_default();
    let report = match node.freshness {
        Freshness::Unreported => "no agent has reported: by labels and the ledger only".into(),
        Freshness::Fresh => format!("{age} old"),
        Freshness::Stale => format!("{age} old, stale: the ledger counts, less a margin"),
        Freshness::Expired => format!("{age} old, expired: the ledger counts, less a margin"),
    };
    let not_asked_text = match node.was_asked {
        Some(false) => {
            "; kube-scheduler did not ask about it: another plugin rejects it (taints, affinity, CPU, …)"
        }
        _ => "",
    };
    let pool = node
        .pool
        .as_ref()
        .map_or(String::new(), |pool| format!("; node pool {pool}"));
    format!(
        "{report}{pool}; {}{not_asked_text}",
        models_text(&node.gpus)
    )
}

/// `2 × NVIDIA-H100-80GB-HBM3`, of the GPUs that are there.
fn models_text(gpus: &[GpuPart]) -> String {
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    let there = gpus.iter().filter(|gpu| !gpu.gone);
    there.for_each(|gpu| *counts.entry(gpu.model.as_str()).or_default() += 1);
    let counted = counts
        .iter()
        .map(|(model, count)| format!("{count} × {model}"));
    let gone = gpus.iter().filter(|gpu| gpu.gone).count();
    let gone = (gone > 0).then(|| format!("{gone} not reported"));
    match gpus.is_empty() {
        true => "no GPU is known".into(),
        false => counted.chain(gone).collect::<Vec<_>>().join(", "),
    }
}

fn model_text(node: &NodePart) -> Option<String> {
    let ready = human_duration(node.ready_in_millis?);
    let tier = match node.tier {
        None => "not on the node",
        Some(ModelTier::Partial) => "on disk, in part",
        Some(ModelTier::Disk) => "on disk",
        Some(ModelTier::PageCache) => "in page cache",
        Some(ModelTier::Sleeping) => "in a sleeping engine",
        Some(ModelTier::Loading) => "being loaded",
        Some(ModelTier::Resident) => "in a GPU",
    };
    Some(format!("{tier}; it would answer {ready} after binding"))
}

/// `17 s to fetch, 6 s to load and 20 s to start`, and what of it was learned; nothing where a pod has neither a model nor a pull.
fn start_text(start: &StartPart) -> Option<String> {
    let StartPart {
        missing_images,
        missing_image_bytes,
        ..
    } = start;
    let pull = format!(
        "to pull {} of {missing_image_bytes}{}",
        plural(*missing_images, "image"),
        if start.is_image_size_assumed {
            " (assumed)"
        } else {
            ""
        }
    );
    let parts = [
        (start.pull_millis, pull.as_str()),
        (start.fetch_millis, "to fetch the model"),
        (start.load_millis, "to load it"),
        (start.init_millis, "to start the engine"),
    ];
    let nonzero_parts = parts.iter().filter(|(time, _)| *time > Millis::default());
    let parts_text: Vec<String> = nonzero_parts
        .map(|(time, what)| format!("{} {what}", human_duration(*time)))
        .collect();
    if parts_text.is_empty() {
        return None;
    }
    let mut text = parts_text.join(", ");
    for (what, calibration) in [("pulls", &start.pull), ("engines", &start.engine)] {
        text += &calibration_text(what, calibration);
    }
    if start.pull.starts + start.engine.starts > 0 {
        text += &format!(
            "\nby the policy's speeds {}",
            human_duration(start.policy_millis)
        );
    }
    Some(text)
}

/// What was learned, if anything was.
fn calibration_text(what: &str, calibration: &CalibrationPart) -> String {
    let CalibrationPart {
        source,
        starts,
        transfer_thousandths,
        init_thousandths,
    } = *calibration;
    let of = match source {
        FactorSource::Policy => return String::new(),
        FactorSource::Cluster if what == "pulls" => "on other nodes",
        FactorSource::Cluster => "on such GPUs",
        FactorSource::Node => "on this node",
    };
    let times =
        |thousandths: u32| format!("{}.{:02} ×", thousandths / 1000, thousandths % 1000 / 10);
    let init = match what {
        "pulls" => String::new(),
        _ => format!(", the rest {} as long", times(init_thousandths)),
    };
    let starts = plural(starts, "start");
    format!(
        "\nby {starts} {of}, {what} move bytes in {} the policy's time{init}",
        times(transfer_thousandths)
    )
}

/// When a bound pod's engine was to answer, and when it did.
pub fn bound_start(start: &BoundStartPart) -> String {
    let BoundStartPart {
        expected_millis,
        policy_millis,
        took_millis,
    } = *start;
    let policy = match policy_millis == expected_millis {
        true => String::new(),
        false => format!(
            ", by the policy's speeds after {}",
            human_duration(policy_millis)
        ),
    };
    let took = took_millis.map_or("it has not yet".into(), |took| {
        format!("it did after {}", human_duration(took))
    });
    format!(
        "its engine was expected to answer {} after binding{policy}; {took}",
        human_duration(expected_millis)
    )
}

/// `1,053 = packing 333 × 1 + timeToReady 250 × 20`: the parts that are not zero; the least sum wins.
fn score_text(score: &ScorePart) -> String {
    let is_positive = |part: &&WeightedPart| part.weighted > 0;
    let part = |part: &WeightedPart| format!("{} {} × {}", part.name, part.part, part.weight);
    let parts: Vec<String> = score.parts.iter().filter(is_positive).map(part).collect();
    let sum = if parts.is_empty() {
        "no cost".into()
    } else {
        parts.join(" + ")
    };
    let contended = if score.contended {
        "; another pod has a soft reservation of these GPUs"
    } else {
        ""
    };
    let left = score.free_after_bytes;
    let useless = match score.unusable_after_bytes {
        Some(bytes) if bytes == Bytes::ZERO || left == Bytes::ZERO => String::new(),
        Some(bytes) if bytes == left => ", which no recent kind of pod can use".into(),
        Some(bytes) => format!(", of which no recent kind of pod can use {bytes}"),
        None => String::new(),
    };
    format!(
        "{} = {sum} (less is better); {left} would stay free{useless}{contended}",
        score.cost
    )
}

/// `total − reserved − headroom − allocated − unaccounted = free`.
fn gpu_table(gpus: &[GpuPart], columns: Columns) -> String {
    let row = |gpu: &GpuPart| {
        let chosen = if gpu.chosen { "→ " } else { "" };
        let slice = if gpu.parent.is_some() { "└" } else { "" };
        let gone = if gpu.gone { " gone" } else { "" };
        vec![
            format!("{chosen}{slice}{}{gone}", gpu.index),
            gpu.total_bytes.to_string(),
            subtracted(gpu.driver_reserved_bytes),
            subtracted(gpu.headroom_bytes),
            subtracted(gpu.allocated_bytes),
            subtracted(gpu.unaccounted_bytes),
            gpu.free_bytes.to_string(),
            gpu.soft_reserved_bytes.to_string(),
            gpu.kv_cache_percent.map_or("?".into(), |kv| kv.to_string()),
            gpu.queue.map_or("?".into(), |queue| queue.to_string()),
        ]
    };
    let mut header = vec![
        "GPU",
        "Total",
        "Driver",
        "Headroom",
        "Allocated",
        "Unaccounted",
        "Free",
        "Soft res.",
        "KV",
        "Waiting",
    ];
    let mut rows: Vec<Vec<String>> = gpus.iter().map(row).collect();
    // What no GPU has leaves its room to the others.
    let none = Bytes::ZERO;
    for (index, is_empty) in [
        (7, gpus.iter().all(|gpu| gpu.soft_reserved_bytes == none)),
        (5, gpus.iter().all(|gpu| gpu.unaccounted_bytes == none)),
    ] {
        if is_empty {
            header.remove(index);
            rows.iter_mut().for_each(|row| drop(row.remove(index)));
        }
    }
    let right: Vec<usize> = (0..header.len()).collect();
    columns.table(&header, rows, &right)
}

fn subtracted(bytes: Bytes) -> String {
    if bytes == Bytes::ZERO {
        "0".into()
    } else {
        format!("−{bytes}")
    }
}

fn gpu_remarks(gpus: &[GpuPart], columns: Columns) -> String {
    let mut rows: Vec<(String, String)> = Vec::new();
    for gpu in gpus {
        // A GPU that came after a loss may have the index of the lost one, and slices have their GPU's.
        let is_ambiguous = gpus.iter().filter(|other| other.index == gpu.index).count() > 1;
        let uuid = match gpu.gone {
            true => Some(format!("{}, which the agent does not report", gpu.uuid)),
            false => is_ambiguous.then(|| gpu.uuid.to_string()),
        };
        let is_unhealthy = gpu.health != Health::Healthy && gpu.chosen && !gpu.gone;
        let health = is_unhealthy.then(|| "it is not healthy".to_owned());
        let wake_sentence = gpu.wake.map(wake_text);
        let lent = gpu.loans.as_ref().map(loans::gpu_loans_text);
        let load = gpu.engine_load.and_then(|load| engine_load(gpu, &load));
        let activity = gpu.activity.map(activity_text);
        let room = gpu
            .room_percent
            .filter(|_| gpu.obstacles.is_empty())
            .map(|room| format!("its engines keep their classes' limits {}", room_text(room)));
        let expected = gpu
            .expected_time_per_token_micros
            .map(|expected| format!("a token is expected to take {expected} here"));
        let against = gpu.obstacles.iter().map(|obstacle| format!("✗ {obstacle}"));
        let others = gpu.others.iter().map(ToString::to_string);
        let occupants_text: Vec<String> = gpu
            .occupants
            .iter()
            .map(occupant_text)
            .chain(others)
            .collect();
        let occupants_text =
            (!occupants_text.is_empty()).then(|| format!("on it: {}", occupants_text.join(", ")));
        // If the pod fits, no pod has to be evicted.
        let kept = gpu.occupants.iter().filter(|_| !gpu.obstacles.is_empty());
        let kept = kept.filter_map(|one| {
            Some(format!(
                "{} is kept: {}",
                one.pod,
                one.keep_reason.as_ref()?
            ))
        });
        let remarks: Vec<String> = uuid
            .into_iter()
            .chain(health)
            .chain(wake_sentence)
            .chain(lent)
            .chain(load)
            .chain(activity)
            .chain(room)
            .chain(expected)
            .chain(against)
            .chain(occupants_text)
            .chain(kept)
            .collect();
        if !remarks.is_empty() {
            rows.push((format!("GPU {}", gpu.index), remarks.join("\n")));
        }
    }
    if rows.is_empty() {
        String::new()
    } else {
        two_columns(rows, INDENT, columns)
    }
}

/// `woken in 0.8 s instead of loaded in 66 s (saves 65 s)`.
fn wake_text(
    WakePart {
        woken_in_millis,
        loaded_in_millis,
    }: WakePart,
) -> String {
    let saved = Millis(loaded_in_millis.0.saturating_sub(woken_in_millis.0));
    let [wake_time, loaded, saved] = [woken_in_millis, loaded_in_millis, saved].map(human_duration);
    format!(
        "an engine of the model sleeps here: woken in {wake_time} instead of loaded in {loaded} (saves {saved})"
    )
}

/// `KV cache 66 % (average 64 %, +12 a minute, 1.0 s old), 3 waiting: costs 219 of 1000`; nothing of a GPU whose
/// engines are idle.
fn engine_load(gpu: &GpuPart, load: &EngineLoadPart) -> Option<String> {
    let idle = (Some(Percent::default()), Some(0));
    if (gpu.kv_cache_percent, gpu.queue) == idle
        && (load.counted_percent, load.counted_queue) == idle
    {
        return None;
    }
    let age = human_duration(load.age_millis);
    let read = match (
        gpu.kv_cache_percent,
        load.average_percent,
        load.trend_per_minute,
    ) {
        (Some(read), Some(average), Some(trend)) => {
            format!("KV cache {read} (average {average}, {trend:+} a minute, {age} old)")
        }
        _ => "KV cache unknown".into(),
    };
    let waiting = gpu
        .queue
        .map_or(String::new(), |queue| format!(", {queue} waiting"));
    let preempting = if load.preempting {
        ", preempts its own requests, which counts as full"
    } else {
        ""
    };
    Some(format!(
        "{read}{waiting}{preempting}: costs {} of 1000",
        load.part
    ))
}

/// `SM activity 42 %, memory bandwidth in use 71 %`; the node says how old that is.
fn activity_text(activity: GpuActivity) -> String {
    let text = |percent: Option<Percent>| percent.map_or("unknown".into(), |one| one.to_string());
    let [sms, bandwidth] = activity.percents().map(text);
    format!("SM activity {sms}, memory bandwidth in use {bandwidth}")
}

fn occupant_text(occupant: &OccupantPart) -> String {
    let presence = match occupant.presence {
        OccupantPhase::Bound => "",
        OccupantPhase::Somewhere => ", somewhere on the node",
        OccupantPhase::Assumed => ", assumed",
        OccupantPhase::Reserved => ", reserved",
        OccupantPhase::SoftlyReserved => ", soft reservation",
    };
    let gate = occupant
        .start_gate_opens_in_millis
        .map_or(String::new(), |opens_in| {
            format!(", starting, {} at most", human_duration(opens_in))
        });
    let over = match occupant.over_grant_bytes {
        Bytes::ZERO => String::new(),
        over => format!(", uses {over} beyond its grant"),
    };
    let unread = if occupant.unread {
        ", no engine of it can be read"
    } else {
        ""
    };
    let loan = occupant
        .loan
        .map_or(String::new(), loans::occupant_loan_text);
    let latency = occupant.latency.map_or(String::new(), latency_text);
    let OccupantPart {
        pod,
        class,
        bytes,
        priority,
        ..
    } = occupant;
    format!(
        "{pod} ({class}, {bytes}, priority {priority}{presence}{gate}{over}{unread}{loan}{latency})"
    )
}

/// `, 14.0 ms of 40.0 ms a token (13.8 ms expected), first token after 310.0 ms, has requests 60 % of the time`.
fn latency_text(latency: OccupantLatencyPart) -> String {
    let of = |value: Option<Micros>, limit: Option<Micros>| match (value, limit) {
        (Some(value), Some(limit)) => Some(format!("{value} of {limit}")),
        (Some(value), None) => Some(value.to_string()),
        (None, Some(limit)) => Some(format!("an unknown time of {limit}")),
        (None, None) => None,
    };
    let per_token = of(
        latency.time_per_token_micros,
        latency.max_time_per_token_micros,
    );
    let first = of(
        latency.time_to_first_token_micros,
        latency.max_time_to_first_token_micros,
    );
    let expected = latency
        .expected_time_per_token_micros
        .map(|expected| format!(" ({expected} expected)"))
        .unwrap_or_default();
    let parts = [
        per_token.map(|text| format!(", {text} a token{expected}")),
        first.map(|text| format!(", first token after {text}")),
        latency
            .busy_percent
            .map(|busy| format!(", has requests {busy} of the time")),
    ];
    parts.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start_part() -> StartPart {
        let policy = CalibrationPart {
            source: FactorSource::Policy,
            starts: 0,
            transfer_thousandths: 1000,
            init_thousandths: 1000,
        };
        StartPart {
            pull_millis: Millis::default(),
            fetch_millis: Millis::seconds(30),
            load_millis: Millis::seconds(10),
            init_millis: Millis::seconds(20),
            policy_millis: Millis::seconds(60),
            missing_images: 0,
            missing_image_bytes: Bytes::ZERO,
            is_image_size_assumed: false,
            pull: policy,
            engine: policy,
        }
    }

    #[test]
    fn a_start_is_shown_in_parts_with_what_was_learned_of_them() {
        assert_eq!(
            start_text(&start_part()).unwrap(),
            "30 s to fetch the model, 10 s to load it, 20 s to start the engine"
        );
        let learned = StartPart {
            pull_millis: Millis::seconds(90),
            missing_images: 2,
            missing_image_bytes: Bytes::gib(8),
            is_image_size_assumed: true,
            pull: CalibrationPart {
                source: FactorSource::Cluster,
                starts: 7,
                transfer_thousandths: 2250,
                ..start_part().pull
            },
            engine: CalibrationPart {
                source: FactorSource::Node,
                starts: 12,
                transfer_thousandths: 333,
                init_thousandths: 1040,
            },
            ..start_part()
        };
        assert_eq!(
            start_text(&learned).unwrap(),
            "90 s to pull 2 images of 8.0 GiB (assumed), 30 s to fetch the model, 10 s to load it, 20 s to start the engine\n\
             by 7 starts on other nodes, pulls move bytes in 2.25 × the policy's time\n\
             by 12 starts on this node, engines move bytes in 0.33 × the policy's time, the rest 1.04 × as long\n\
             by the policy's speeds 60 s"
        );
        assert_eq!(
            start_text(&StartPart {
                fetch_millis: Millis(0),
                load_millis: Millis(0),
                init_millis: Millis(0),
                ..start_part()
            }),
            None
        );
    }

    #[test]
    fn a_bound_pod_shows_when_its_engine_was_expected_and_when_it_answered() {
        let bound = BoundStartPart {
            expected_millis: Millis::seconds(42),
            policy_millis: Millis::seconds(42),
            took_millis: None,
        };
        assert_eq!(
            bound_start(&bound),
            "its engine was expected to answer 42 s after binding; it has not yet"
        );
        let late = BoundStartPart {
            policy_millis: Millis::seconds(20),
            took_millis: Some(Millis::seconds(50)),
            ..bound
        };
        assert_eq!(
            bound_start(&late),
            "its engine was expected to answer 42 s after binding, by the policy's speeds after 20 s; it did after 50 s"
        );
    }
}

//! Formats an explanation for people: the pod and the remedies; [`node`] formats the rest.

mod loans;
mod node;

use crate::cli::output::Columns;
use owo_colors::{OwoColorize, Style};
use std::fmt::Write;
use stowage_scheduling::explaining::explanation::{
    ClassPart, Condition, Explanation, GpuLimitPart, LimitsPart, PodStage, PodVerdict,
    RefusalGroup, RefusedPart, SparePart, TenantPart, UnsupportedPart,
};
use stowage_scheduling::explaining::units::{format_share, human_duration};
use stowage_scheduling::ledger::SchedulingGate;
use stowage_scheduling::policy::Mode;
use stowage_scheduling::units::{Bytes, is_or_are, plural};
use stowage_scheduling::vocabulary::demand::Sharing;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Paint {
    Plain,
    Colored,
}

impl Paint {
    fn styled(self, text: &str, style: Style) -> String {
        match self {
            Self::Plain => text.into(),
            Self::Colored => text.style(style).to_string(),
        }
    }
}

const WRITE_NEVER_FAILS: &str = "a String takes any text";

pub fn text(explanation: &Explanation, columns: Columns, paint: Paint) -> String {
    let headline = columns.wrap(&headline(explanation));
    let mut text = paint.styled(headline.trim_end(), headline_style(explanation.verdict)) + "\n\n";
    text += &two_columns(pod_rows(explanation), 2, columns);
    if !explanation.remedies.is_empty() {
        text += &title(remedies_title(explanation.verdict), paint);
        let numbered = explanation.remedies.iter().enumerate();
        let rows: Vec<_> = numbered
            .map(|(index, remedy)| (format!("{}.", index + 1), remedy.text.clone()))
            .collect();
        text += &two_columns(rows, 2, columns);
    }
    if !explanation.nodes.is_empty() {
        text += &title(&nodes_title(explanation), paint);
        explanation
            .nodes
            .iter()
            .for_each(|part| text += &node::text(part, columns, paint));
    }
    text += &more_nodes_text(explanation);
    text += &groups_text(&explanation.groups, columns, paint);
    text
}

fn headline(explanation: &Explanation) -> String {
    let (pod, counts) = (&explanation.pod, explanation.counts);
    match (&explanation.stage, explanation.verdict) {
        (PodStage::Bound { node, .. }, _) => format!("{pod} is on {node}."),
        (PodStage::Assumed { node, .. }, _) => format!("{pod} is on its way to {node}."),
        (PodStage::Reserved { node, .. }, PodVerdict::Reserved) => {
            format!("{pod} has a reservation on {node}, and waits for its victims to terminate.")
        }
        (_, PodVerdict::Fits) => {
            format!(
                "{pod} fits on {} of {}, and is pending.",
                counts.fit,
                plural(counts.nodes, "node")
            )
        }
        _ if counts.fit > 0 => {
            let nodes = plural(counts.nodes, "node");
            format!(
                "{pod} fits on {} of {nodes}, but its group does not.",
                counts.fit
            )
        }
        _ => format!("{pod} fits on none of {}.", plural(counts.nodes, "node")),
    }
}

fn headline_style(verdict: PodVerdict) -> Style {
    match verdict {
        PodVerdict::Bound | PodVerdict::Assumed | PodVerdict::Fits => Style::new().bold().green(),
        PodVerdict::Reserved => Style::new().bold().yellow(),
        PodVerdict::DoesNotFit => Style::new().bold().red(),
    }
}

fn title(text: &str, paint: Paint) -> String {
    format!("\n{}\n", paint.styled(text, Style::new().bold()))
}

fn remedies_title(verdict: PodVerdict) -> &'static str {
    match verdict {
        PodVerdict::DoesNotFit => "What would have to change: the easiest first, one is enough",
        _ => "What to check next",
    }
}

fn nodes_title(explanation: &Explanation) -> String {
    let counts = explanation.counts;
    match explanation.verdict {
        PodVerdict::Bound | PodVerdict::Assumed => "Its node".into(),
        _ => format!(
            "Nodes: {} fit, {} do not; {} in all",
            counts.fit,
            counts.refused,
            plural(counts.gpus, "GPU")
        ),
    }
}

fn pod_rows(explanation: &Explanation) -> Vec<(String, String)> {
    let mut rows = vec![
        ("requests".into(), requests(explanation)),
        ("class".into(), class(&explanation.class)),
        (
            "tenant".into(),
            explanation
                .tenant
                .as_ref()
                .map_or("none has its namespace".into(), tenant),
        ),
        ("policy".into(), policy(explanation)),
        ("state".into(), state(explanation)),
    ];
    if explanation.tenant.is_none() {
        rows.remove(2);
    }
    rows.extend(
        explanation
            .group
            .iter()
            .map(|reason| ("group".into(), format!("cannot be placed: {}", reason.text))),
    );
    rows.extend(
        explanation
            .standby
            .iter()
            .map(|part| ("replica".into(), part.text.clone())),
    );
    rows.extend(
        explanation
            .impasse
            .iter()
            .map(|part| ("waiting".into(), format!("will not help: {}", part.text))),
    );
    rows.extend(
        explanation
            .unsupported
            .iter()
            .map(|part| ("scheduler".into(), unsupported(part, explanation))),
    );
    rows.extend(
        explanation
            .spare
            .iter()
            .map(|part| ("spare".into(), spare(part))),
    );
    rows.extend(
        explanation
            .borrowing
            .as_ref()
            .map(|part| ("lending".into(), loans::borrowing_text(part))),
    );
    if let PodStage::Bound { loan, limits, .. } = &explanation.stage {
        let loan = loan.as_ref().map(loans::pod_loan_text);
        rows.extend(loan.map(|loan| ("lending".into(), loan)));
        let limits = limits.as_ref().map(limits_text);
        rows.extend(limits.map(|limits| ("limits".into(), limits)));
    }
    rows.extend(
        explanation
            .over_allocations
            .iter()
            .map(|part| ("conflict".into(), part.text.clone())),
    );
    rows
}

fn unsupported(part: &UnsupportedPart, explanation: &Explanation) -> String {
    format!(
        "whether kube-scheduler accepts {} of {} is unknown, and the planner evicts nothing there for it: {} ({})",
        part.nodes,
        plural(explanation.counts.nodes, "node"),
        part.text,
        part.rule
    )
}

fn requests(explanation: &Explanation) -> String {
    let request = &explanation.request;
    let mut text = match request.gpus {
        count if request.device_resource.is_some() => {
            format!(
                "{count} of {} from a device plugin",
                request.device_resource.as_deref().unwrap_or_default()
            )
        }
        1 => format!("{} of one GPU", request.vram_bytes),
        gpus => {
            format!(
                "{} over {gpus} GPUs of one node, {} on each",
                request.vram_bytes, request.bytes_per_gpu
            )
        }
    };
    text += match (&request.device_resource, request.sharing) {
        (Some(_), _) => "",
        (None, Sharing::Exclusive) => ", exclusive",
        (None, Sharing::Shared) => ", shared",
    };
    if let Some(kv_cache) = request.kv_cache_bytes {
        write!(text, "; {kv_cache} of it KV cache").expect(WRITE_NEVER_FAILS);
    }
    if let Some(model) = &request.model {
        write!(text, "; model {model}").expect(WRITE_NEVER_FAILS);
    }
    write!(text, "; priority {}", request.priority).expect(WRITE_NEVER_FAILS);
    if !request.may_preempt {
        text += ", never preempts (preemptionPolicy: Never)";
    }
    text
}

fn class(class: &ClassPart) -> String {
    let met = |condition: &Condition| format!("{} is {}", condition.field, condition.wants);
    let because = match &class.because[..] {
        [] => "it takes every pod that no earlier class takes".into(),
        conditions => conditions.iter().map(met).collect::<Vec<_>>().join(", "),
    };
    let mut text = format!("{}: {because}\n{}", class.name, terms(class));
    for passed in &class.passed_over {
        let Condition { field, wants, has } = &passed.unmet;
        match field.as_str() {
            "when" => write!(
                text,
                "\nnot {}: it takes pods when it is {wants}, and {has}",
                passed.class
            ),
            _ => write!(
                text,
                "\nnot {}: it requires {field} {wants}; the pod has {has}",
                passed.class
            ),
        }
        .expect(WRITE_NEVER_FAILS);
    }
    text
}

fn terms(class: &ClassPart) -> String {
    let kv = class
        .kv_cache_limit_percent
        .map(|limit| format!("joins no GPU with a KV cache above {limit}"));
    let queue = class
        .queue_limit
        .map(|limit| format!("nor with more than {limit} waiting"));
    let sharing = class.shares_with.as_ref().map(|names| match &names[..] {
        [] => "shares a GPU with no class".into(),
        names => format!("shares a GPU with {}", names.join(", ")),
    });
    let kind = class
        .engine
        .then(|| "an engine: one starts at a time on a GPU".to_owned());
    let leaves = class.preemptible.then(|| "preemptible".to_owned());
    let pools = class
        .pools
        .as_ref()
        .map(|names| format!("goes to nodes of {} only", names.join(", ")));
    let all: Vec<String> = [kind, kv, queue, sharing, pools, leaves]
        .into_iter()
        .flatten()
        .collect();
    if all.is_empty() {
        "no limits".into()
    } else {
        all.join("; ")
    }
}

fn tenant(tenant: &TenantPart) -> String {
    format!(
        "{}: uses {}; guaranteed {}; limit {}, of which {} left\nborrowed share {}.{:02} % of the cluster, by weight {}",
        tenant.name,
        format_share(tenant.used, "nothing"),
        format_share(tenant.guarantee, "nothing"),
        format_share(tenant.limit, "none"),
        format_share(tenant.left, "all is"),
        tenant.share_millionths / 10_000,
        tenant.share_millionths % 10_000 / 100,
        tenant.weight,
    )
}

/// `GPU 0: granted 20.0 GiB / limit in force 20.0 GiB / used 18.0 GiB`, for each GPU.
fn limits_text(part: &LimitsPart) -> String {
    let known = |bytes: Option<Bytes>| bytes.map_or("unknown".into(), |bytes| bytes.to_string());
    let gpu = |gpu: &GpuLimitPart| {
        let limit = match gpu.limit_bytes {
            Some(limit) if limit >= gpu.total_bytes => "none".into(),
            limit => known(limit),
        };
        let (index, granted, used) = (gpu.index, gpu.granted_bytes, known(gpu.used_bytes));
        format!("GPU {index}: granted {granted} / limit in force {limit} / used {used}")
    };
    let none = "its class asks for limits, and its node keeps none".to_owned();
    let none = part.node_keeps_none.then_some(none);
    let lines = none.into_iter().chain(part.gpus.iter().map(gpu));
    lines.collect::<Vec<_>>().join("\n")
}

fn spare(part: &SparePart) -> String {
    let SparePart {
        rule,
        keeps,
        free,
        kept_from_pod,
        window,
    } = part;
    let window = window
        .as_ref()
        .map_or(String::new(), |window| format!(" ({window})"));
    let free = match free {
        None => "no window of this is open".into(),
        Some(free) if *kept_from_pod => {
            format!("{free} {} free: none for this pod", is_or_are(*free))
        }
        Some(free) => format!("{free} {} free", is_or_are(*free)),
    };
    let stay = if *keeps == 1 { "stays" } else { "stay" };
    format!("{keeps} {rule} {stay} free of preemptible pods{window}; {free}")
}

fn policy(explanation: &Explanation) -> String {
    let policy = &explanation.policy;
    let mode = match policy.mode {
        Mode::Enforce => "enforced",
        Mode::Shadow => "in shadow mode: decisions are recorded, and kube-scheduler's own apply",
    };
    format!(
        "digest {}, version {}, {mode}",
        policy.digest, policy.version
    )
}

fn state(explanation: &Explanation) -> String {
    match &explanation.stage {
        PodStage::Bound {
            node,
            running_for_millis,
            ..
        } if explanation.request.device_resource.is_some() => {
            format!(
                "bound to {node} for {}; the kubelet picks its GPUs",
                human_duration(*running_for_millis)
            )
        }
        PodStage::Bound {
            node,
            gpus,
            granted_bytes,
            running_for_millis,
            start_gate_opens_in_millis,
            gate_time_taken_millis,
            start,
            ..
        } => {
            let on = gpus
                .as_ref()
                .map_or("its GPUs are unknown".into(), |gpus| join_uuids(gpus));
            let gate = start_gate_opens_in_millis.map_or(String::new(), |opens_in| {
                format!(
                    "; its engine is starting, and no other starts there for {} at most",
                    human_duration(opens_in)
                )
            });
            let taken = gate_time_taken_millis.map_or(String::new(), |taken| {
                format!(
                    "; starts of its tenant have taken {} of what they may keep others from starting there in an hour",
                    human_duration(taken)
                )
            });
            let start = start.map_or(String::new(), |start| {
                format!("\n{}", node::bound_start(&start))
            });
            format!(
                "bound to {node} for {}: {on}; granted {granted_bytes}{gate}{taken}{start}",
                human_duration(*running_for_millis)
            )
        }
        PodStage::Assumed {
            node,
            gpus,
            granted_bytes,
        } => {
            format!(
                "assumed: {granted_bytes} on {node} ({}); the Binding is being written",
                join_uuids(gpus)
            )
        }
        PodStage::Reserved {
            node,
            gpus,
            victims_left,
            deadline_in_millis,
            victims,
        } => {
            let leaving = format!("; {} not terminated yet", plural(*victims_left, "victim"));
            let leaving = if victims.is_empty() { "" } else { &leaving };
            format!(
                "reserved: {} of {node} for {} more{leaving}",
                join_uuids(gpus),
                human_duration(*deadline_in_millis)
            )
        }
        PodStage::Waiting {
            gate: SchedulingGate::Planned,
            failed_attempts,
            ..
        } => match failed_attempts {
            0 => "gated by stowage.dev/plan; the planner has not tried it yet".into(),
            attempts => {
                format!(
                    "gated by stowage.dev/plan; {} of the planner failed in a row",
                    plural(*attempts, "attempt")
                )
            }
        },
        PodStage::Waiting {
            gate: SchedulingGate::Others,
            ..
        } => "gated by a scheduling gate that is not Stowage's".into(),
        PodStage::Waiting {
            offered_node,
            attempts,
            refused,
            preemption_candidates,
            ..
        } => match (refused, offered_node) {
            (Some(refused), _) => refused_text(refused, *preemption_candidates),
            (None, Some(node)) => {
                format!(
                    "pending; was offered {node} after {}",
                    plural(*attempts, "failed attempt")
                )
            }
            (None, None) if explanation.standby.is_some() => "pending".into(),
            (None, None) => {
                "pending; kube-scheduler has not asked about it since this process started".into()
            }
        },
    }
}

fn refused_text(refused: &RefusedPart, preemption_candidates: Option<u32>) -> String {
    let RefusedPart {
        ago_millis,
        asked_about,
        requeues,
        failed_requeues,
        supposed,
    } = refused;
    if *supposed {
        let not_asked = "kube-scheduler has not asked about it since this replica began to act";
        return match *requeues {
            0 => format!("pending; {not_asked}"),
            requeues => format!(
                "pending; requeued {}, last {} ago; {not_asked}",
                plural(requeues, "time"),
                human_duration(*ago_millis)
            ),
        };
    }
    let requeued_text = match *requeues {
        0 => String::new(),
        requeues => format!(
            "; requeued {} since without being asked about",
            plural(requeues, "time")
        ),
    };
    let failed_text = match *failed_requeues {
        0 => String::new(),
        times => format!(
            "; before that requeued and rejected {} in a row",
            plural(times, "time")
        ),
    };
    let preempt = match preemption_candidates {
        None => String::new(),
        Some(nodes) => format!(
            "; kube-scheduler asked for victims on {}",
            plural(nodes, "node")
        ),
    };
    format!(
        "pending; rejected {} ago, asked about {}{requeued_text}{failed_text}{preempt}",
        human_duration(*ago_millis),
        plural(*asked_about, "node")
    )
}

fn join_uuids(gpus: &[stowage_scheduling::ids::GpuUuid]) -> String {
    gpus.iter()
        .map(|uuid| uuid.as_str())
        .collect::<Vec<_>>()
        .join(", ")
}

/// Fitting nodes that are not shown.
fn more_nodes_text(explanation: &Explanation) -> String {
    let shown = explanation
        .nodes
        .iter()
        .filter(|node| node.score.is_some())
        .count() as u32;
    match explanation.counts.fit.saturating_sub(shown) {
        more if more > 0 && shown > 1 => {
            format!("\n{} more fit; --all shows them.\n", plural(more, "node"))
        }
        _ => String::new(),
    }
}

fn groups_text(groups: &[RefusalGroup], columns: Columns, paint: Paint) -> String {
    if groups.is_empty() {
        return String::new();
    }
    let rows: Vec<_> = groups
        .iter()
        .map(|group| {
            (
                format!("{} ×", group.count),
                format!("{}, such as {}: {}", group.code, group.example, group.text),
            )
        })
        .collect();
    title(
        "Nodes that do not fit, by reason (--all or --node NAME shows them)",
        paint,
    ) + &two_columns(rows, 2, columns)
}

/// Titles, and a paragraph beside each.
fn two_columns(rows: Vec<(String, String)>, indent: usize, columns: Columns) -> String {
    let rows = rows.into_iter().map(|(title, text)| vec![title, text]);
    let columns = columns.paragraph().beside(indent);
    indented(&columns.table(&[], rows, &[]), indent)
}

fn indented(text: &str, indent: usize) -> String {
    let line = |line: &str| format!("{:indent$}{line}\n", "");
    text.lines().map(line).collect()
}

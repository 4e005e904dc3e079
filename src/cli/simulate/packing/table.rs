//! Results as a table: one line for each policy, beside its published result.

use super::source::PackingTrace;
use crate::cli::output::Columns;
use stowage_lab::simulate::openb::Trace;
use stowage_lab::simulate::openb::published::SeedMeans;
use stowage_lab::simulate::packing::report::RejectionLine;
use stowage_lab::simulate::packing::{AllocationBound, PackingLine, WorkloadTrace};

const LEGEND: &str = "\
at 100 %, 130 %: GPUs allocated, in per cent of all, when pods have asked for so much of them; means over seeds
fragmented: free, and of no use to a pod drawn from the typical ones, at 130 %";
const ADMISSION: &str = "\
admitted: of the GPUs that serving pods asked for (LS and Guaranteed), what they got; evicted: best-effort pods that left for them";
const CHURN: &str = "\
rejected: of the GPUs that pods asked for, the part that found no place, in per cent; mean over seeds";

pub fn allocation_table(
    source: &PackingTrace,
    setting: &WorkloadTrace,
    lines: &[PackingLine],
    bound: Option<&AllocationBound>,
    columns: Columns,
) -> String {
    let shows_admission = lines
        .iter()
        .any(|line| line.high_priority_admitted.is_some());
    let mut head = vec![
        "policy",
        "at 100 %",
        "published",
        "at 130 %",
        "published",
        "fragmented",
    ];
    let mut legend = LEGEND.to_owned();
    if shows_admission {
        head.extend(["admitted", "evicted"]);
        legend = format!("{legend}\n{ADMISSION}");
    }
    let rows = lines.iter().map(|line| {
        let published = source.published(line.policy, &line.seeds);
        let was = |of: fn(&SeedMeans) -> f64| figure(published.as_ref().map(of));
        let mut row = vec![
            line.policy.name().into(),
            figure(line.at_100),
            was(|means| means.at_100),
            figure(line.at_130),
            was(|means| means.at_130),
            figure(line.fragmented_at_130),
        ];
        if shows_admission {
            row.push(figure(line.high_priority_admitted));
            row.push(
                line.evicted
                    .map_or_else(String::new, |evicted| format!("{evicted:.0}")),
            );
        }
        row
    });
    let most = bound.map(|bound| {
        legend = format!("{legend}\n{}", bound_legend(bound));
        vec![
            "bound (LP)".into(),
            figure(bound.at_100),
            String::new(),
            figure(bound.at_130),
        ]
    });
    let rows = rows.chain(most);
    let seeds = lines.first().map_or(&[][..], |line| &line.seeds);
    let (title, never) = (title(source, setting, seeds), never_placed(&source.trace));
    format!(
        "{title}{never}\n\n{}\n{legend}\n",
        table(&head, rows, columns)
    )
}

fn bound_legend(bound: &AllocationBound) -> String {
    let AllocationBound {
        begins_as,
        placed,
        of_anybody_at_100,
        of_anybody_at_130,
        ..
    } = bound;
    let (policy, choosy) = (
        begins_as.name(),
        [figure(*of_anybody_at_100), figure(*of_anybody_at_130)].join(" and "),
    );
    format!(
        "bound (LP): the most that any policy could allocate that places every pod {policy} had placed before it first\n    \
         rejected one of the same GPU models ({placed:.1} % of the GPUs); {choosy} for a policy that may reject any pod"
    )
}

/// A note on pods that request more than any node of their models has; nothing if there are none.
fn never_placed(trace: &Trace) -> String {
    let mut never = trace.never_placed();
    let Some(first) = never.next().map(|pod| &pod.name) else {
        return String::new();
    };
    match never.count() {
        0 => format!(
            "\n1 pod, {first}, is larger than every node of the GPU models it names, and is never placed"
        ),
        more => {
            let pods = more + 1;
            format!(
                "\n{pods} pods, {first} first, are larger than every node of the GPU models they name, and are never placed"
            )
        }
    }
}

pub fn losses_table(
    source: &PackingTrace,
    setting: &WorkloadTrace,
    losses: &[RejectionLine],
    columns: Columns,
) -> String {
    let rows = losses
        .iter()
        .map(|line| vec![line.policy.name().to_owned(), figure(Some(line.rejected))]);
    let first = losses.first();
    let seeds = first.map_or(&[][..], |line| &line.seeds);
    let load = first.map_or(0.0, |line| line.load) * 100.0;
    format!(
        "{}; pods end, and would keep {load:.1} % of the GPUs busy{}\n\n{}\n{CHURN}\n",
        title(source, setting, seeds),
        never_placed(&source.trace),
        table(&["policy", "rejected"], rows, columns)
    )
}

/// The title of a table or picture: the trace, its size and the seeds.
pub fn title(source: &PackingTrace, setting: &WorkloadTrace, seeds: &[u64]) -> String {
    let of = match source.is_built_in {
        true => "made up (with --trace DIR the openb trace is played)".to_owned(),
        false => format!("openb, {}", source.variant),
    };
    let seeds = match seeds {
        [one] => format!("seed {one}"),
        [first, .., last] => format!("seeds {first} to {last}"),
        [] => "no seed".into(),
    };
    let (nodes, gpus) = (setting.nodes.len(), setting.capacity() / 1000);
    format!(
        "{of}: {nodes} nodes, {gpus} GPUs, {} pods; {seeds}",
        setting.pods.len()
    )
}

fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>, columns: Columns) -> String {
    let right: Vec<usize> = (1..head.len()).collect();
    columns.table(head, rows, &right)
}

fn figure(figure: Option<f64>) -> String {
    figure.map_or_else(String::new, |figure| format!("{figure:.2}"))
}

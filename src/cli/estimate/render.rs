//! An estimate for people: a table of its parts, the lines of a pod, the GPUs on which it fits, and what a running engine could
//! ask for.

use super::model::ListedModel;
use super::{EstimateOutput, ObservedEngine};
use crate::cli::output::Columns;
use stowage_scheduling::units::Bytes;
use stowage_sizing::estimate::gpus::GpuFit;
use stowage_sizing::estimate::pod::PodLines;
use stowage_sizing::estimate::right_size::Advice;
use stowage_sizing::estimate::{PartName, with_thousands_separators};

pub fn text(answer: &EstimateOutput, columns: Columns) -> String {
    let mut text = heading(answer) + "\n" + &table(answer, columns);
    if !answer.estimate.notes.is_empty() {
        let notes = answer
            .estimate
            .notes
            .iter()
            .map(|note| format!("- {note}\n"));
        text += &format!("\nNot counted, or assumed:\n{}", notes.collect::<String>());
    }
    match &answer.observed {
        Some(observed) => {
            text += &format!("\n{}", observed_text(observed, answer.workload.context))
        }
        None => {
            if let Some(pod) = &answer.pod {
                text += &format!("\nIn a pod:\n\n{}", pod_text(pod));
            }
            text += &format!("\n{}", fits_text(&answer.gpus, columns));
            if let Some(over) = &answer.fits_over {
                text += &format!(
                    "It fits on {} with --tensor-parallel {}.\n",
                    over.gpus.join(", "),
                    over.tensor_parallel
                );
            }
        }
    }
    columns.wrap(&text)
}

fn heading(answer: &EstimateOutput) -> String {
    let (workload, estimate) = (&answer.workload, &answer.estimate);
    let active = match estimate.active_parameters {
        active if active == estimate.parameters => String::new(),
        active => format!(", {} active", billions(active)),
    };
    let parameters = billions(estimate.parameters);
    let sequences = match workload.sequences {
        1 => "1 sequence".to_owned(),
        sequences => format!("{sequences} sequences"),
    };
    let gpus = if workload.tensor_parallel == 1 {
        "1 GPU".to_owned()
    } else {
        format!("{} GPUs, of which each has this", workload.tensor_parallel)
    };
    format!(
        "{} ({}): {parameters} parameters{active}\n{sequences} of {} tokens on {gpus}:\n",
        answer.model,
        answer.model_type,
        with_thousands_separators(workload.context.into()),
    )
}

fn billions(count: u64) -> String {
    match count {
        0..10_000_000 => with_thousands_separators(count.into()),
        _ => format!("{:.2} billion", count as f64 / 1e9),
    }
}

fn gib(bytes: Bytes) -> String {
    format!("{:.2}", bytes.0 as f64 / (1u64 << 30) as f64)
}

fn table(answer: &EstimateOutput, columns: Columns) -> String {
    let estimate = &answer.estimate;
    let parts = estimate.parts.iter();
    let rows = parts.map(|part| {
        vec![
            part_name(part.part).to_owned(),
            gib(part.bytes),
            part.formula.clone(),
            part.source.to_owned(),
        ]
    });
    let over = match answer.workload.tensor_parallel {
        1 => String::new(),
        gpus => format!("{} GiB over {gpus} GPUs", gib(estimate.total_bytes)),
    };
    let total = vec!["total".into(), gib(estimate.per_gpu_bytes), over];
    columns.table(
        &["PART", "GIB", "FORMULA", "SOURCE"],
        rows.chain([total]),
        &[1],
    )
}

fn part_name(part: PartName) -> &'static str {
    match part {
        PartName::Weights => "weights",
        PartName::KvCache => "KV cache",
        PartName::Activations => "activations",
        PartName::EngineBuffers => "engine buffers",
        PartName::CudaGraphs => "CUDA graphs",
        PartName::CudaContext => "CUDA context",
    }
}

/// The lines of a pod, where they belong.
fn pod_text(lines: &PodLines) -> String {
    let gpus = match lines.gpus {
        1 => String::new(),
        gpus => format!("    stowage.dev/gpus: \"{gpus}\"\n"),
    };
    let args: String = lines
        .args
        .iter()
        .map(|arg| format!("        - {arg}\n"))
        .collect();
    format!(
        "metadata:\n  annotations:\n    stowage.dev/kv-cache: {}\n{gpus}spec:\n  containers:\n    - args:\n{args}      \
         resources:\n        limits:\n          stowage.dev/vram: {}\n",
        lines.kv_cache, lines.vram
    )
}

fn fits_text(gpus: &[GpuFit], columns: Columns) -> String {
    let (fitting, too_small): (Vec<_>, Vec<_>) = gpus.iter().partition(|gpu| gpu.fits);
    let names = |gpus: &[&GpuFit]| {
        gpus.iter()
            .map(|gpu| gpu.gpu.name.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    };
    if fitting.is_empty() {
        return format!(
            "It fits on none of {}, of which a tenth is headroom.\n",
            names(&too_small)
        );
    }
    let rows = fitting.iter().map(|gpu| {
        vec![
            gpu.gpu.name.clone(),
            gib(gpu.gpu.memory_bytes),
            gpu.engines.to_string(),
            gib(gpu.vram_per_gpu_bytes),
            format!("{:.2}", gpu.fraction_percent as f64 / 100.0),
            gib(gpu.kv_cache_bytes),
        ]
    });
    let table = columns.table(
        &[
            "FITS ON", "GIB", "ENGINES", "ASKS FOR", "FRACTION", "KV CACHE",
        ],
        rows,
        &[1, 2, 3, 4, 5],
    );
    if too_small.is_empty() {
        table
    } else {
        format!("{table}\nNot on {}.\n", names(&too_small))
    }
}

/// What a running engine could reserve, as text; its longest sequence has `context` tokens.
fn observed_text(observed: &ObservedEngine, context: u64) -> String {
    let size = &observed.size;
    let reserved = match (size.reserved_bytes, size.used_bytes) {
        (Some(reserved), Some(used)) => format!("{reserved} reserved, its processes have {used}, "),
        (Some(reserved), None) => format!("{reserved} reserved, "),
        (None, Some(used)) => format!("its processes have {used}, "),
        (None, None) => String::new(),
    };
    let requests = match (size.running, size.waiting) {
        (None, None) => String::new(),
        (running, waiting) => {
            let count =
                |count: Option<u64>| count.map_or("?".to_owned(), |count| count.to_string());
            format!("; {} requests run, {} wait", count(running), count(waiting))
        }
    };
    let mut text = format!(
        "{}: {reserved}{}–{} needed.\nOf {} of KV cache {} are in use{requests}.\n",
        observed.what,
        gib_without_unit(size.needed_bytes),
        size.needed_with_margin_bytes,
        size.kv_cache_bytes,
        size.kv_cache_used_bytes,
    );
    let advice = match size.advice {
        Advice::Shrink => "Reserve less",
        Advice::Grow => "Reserve more",
        Advice::Keep => "Leave it",
    };
    text += &format!("{advice}: {}.\n", size.reason);
    if let Some(lines) = &size.pod {
        text += &format!(
            "\nLines to change:\n\nmetadata:\n  annotations:\n    stowage.dev/kv-cache: {}\nspec:\n  containers:\n    - \
             args:\n        - --max-model-len={context}\n      resources:\n        limits:\n          stowage.dev/vram: {}\n\n\
             This is one moment; give the highest usage of a week with --peak-usage before you change a pod. If the engine's \
             --max-model-len is another one, give it with --context.\n",
            lines.kv_cache, lines.vram
        );
    }
    text
}

/// GiB without the unit, for the first of two figures.
fn gib_without_unit(bytes: Bytes) -> String {
    format!("{:.1}", bytes.0 as f64 / (1u64 << 30) as f64)
}

pub fn list(models: &[ListedModel], columns: Columns) -> String {
    let rows = models.iter().map(|model| {
        vec![
            model.name.to_owned(),
            billions(model.parameters),
            gib(model.weights_bytes),
            model.kv_cache_bytes_per_token.to_string(),
            model.max_context.map_or(String::new(), |context| {
                with_thousands_separators(context.into())
            }),
            model.repository.to_owned(),
        ]
    });
    columns.table(
        &[
            "MODEL",
            "PARAMETERS",
            "WEIGHTS GIB",
            "KV PER TOKEN",
            "CONTEXT",
            "REPOSITORY",
        ],
        rows,
        &[1, 2, 3, 4],
    )
}

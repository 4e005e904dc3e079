//! The model that a pod's engine serves, and with which arguments, as its command line, annotation or metrics name it.

use k8s_openapi::api::core::v1::Pod;
use stowage_kubernetes_objects::{engine, user_annotations};
use stowage_scheduling::engines::Engine;
use stowage_scheduling::ids::printable;
use stowage_sizing::estimate::Workload;
use stowage_sizing::estimate::architecture::ModelArchitecture;
use stowage_sizing::estimate::kv_cache::KvCacheDtype;
use stowage_sizing::estimate::shipped::ShippedModel;

/// Flags that only engines have.
const ENGINE_FLAGS: [&str; 4] = [
    "--gpu-memory-utilization",
    "--mem-fraction-static",
    "--max-model-len",
    "--tensor-parallel-size",
];

/// The words of its containers' command lines; those of a shell's script are apart.
fn words(pod: &Pod) -> Vec<&str> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let lines = containers.flat_map(|one| one.command.iter().chain(&one.args));
    let words = lines
        .flatten()
        .flat_map(|text| text.split([' ', '\n', '=']));
    words.filter(|word| !word.is_empty()).collect()
}

fn value<'w>(words: &[&'w str], flags: &[&str]) -> Option<&'w str> {
    let at = words.iter().position(|word| flags.contains(word))?;
    words.get(at + 1).copied()
}

pub fn shows_engine(pod: &Pod) -> bool {
    engine(pod) != Engine::Other || value(&words(pod), &ENGINE_FLAGS).is_some()
}

/// The model and the engine's arguments, or why they are not known. `named` is what its metrics say.
pub fn find(pod: &Pod, named: Option<&str>) -> Result<(ModelArchitecture, Workload), String> {
    let words = words(pod);
    let annotations = pod.metadata.annotations.as_ref();
    let annotated = annotations.and_then(|all| all.get(user_annotations::MODEL));
    let served = value(&words, &["serve"]).filter(|word| !word.starts_with('-'));
    let by_flag = value(&words, &["--model", "--model-path"]);
    let name = by_flag
        .or(served)
        .or(annotated.map(String::as_str))
        .or(named);
    let name = &printable(name.ok_or("nothing names its model")?);
    // Tuned for instructions, a model has the shape that it had.
    let shipped =
        ShippedModel::find(name).or_else(|_| ShippedModel::find(&name.replace("-Instruct", "")));
    let model = shipped.ok().and_then(|shipped| shipped.read().ok());
    let model = model.ok_or_else(|| format!("the shape of its model {name} is not known"))?;
    if let Some(kind) = value(&words, &["--quantization", "-q"]) {
        return Err(format!(
            "it is quantized as it is loaded ({})",
            printable(kind)
        ));
    }
    let number = |flags: &[&str]| value(&words, flags).and_then(|text| text.parse().ok());
    let defaults = Workload::default();
    let context = number(&["--max-model-len", "--context-length"]).or(model.max_context);
    let workload = Workload {
        context: context.ok_or("its longest sequence is not known")?,
        sequences: 1,
        tensor_parallel: number(&["--tensor-parallel-size", "-tp", "--tp", "--tp-size"])
            .unwrap_or(1),
        max_num_seqs: number(&["--max-num-seqs"]).unwrap_or(defaults.max_num_seqs),
        kv_cache_dtype: match value(&words, &["--kv-cache-dtype"]) {
            Some(dtype) if dtype.starts_with("fp8") => KvCacheDtype::Fp8,
            _ => KvCacheDtype::Auto,
        },
        cuda_graphs: !words.contains(&"--enforce-eager"),
        ..defaults
    };
    Ok((model, workload))
}

//! The weights on each GPU: every matrix in its precision, and everything else in 16 bits.

use super::architecture::{Layer, ModelArchitecture};
use super::quantization::Precision;
use super::{PartName, VramPart, Workload, saturating_bytes, with_thousands_separators};
use stowage_scheduling::units::Bytes;

/// vLLM's kernels for mxfp4 pad experts to multiples of these, hidden size and intermediate size
/// (`fused_moe/oracle/mxfp4.py`: Marlin and TensorRT-LLM).
const MXFP4_MULTIPLES: (u64, u64) = (256, 128);

pub fn part(model: &ModelArchitecture, workload: &Workload) -> VramPart {
    let gpus = workload.tensor_parallel;
    let precision = model.quantization.precision;
    let split = if gpus > 1 {
        format!(", over {gpus} GPUs")
    } else {
        String::new()
    };
    let (what, source) = match &model.checkpoint {
        Some(checkpoint) if checkpoint.files > 0 => (
            match checkpoint.files {
                1 => "the tensors of its file".to_owned(),
                files => format!("the tensors of {files} files"),
            },
            "the files' headers",
        ),
        Some(_) => ("total_size".into(), "model.safetensors.index.json"),
        None => (
            format!(
                "{} parameters in {}",
                with_thousands_separators(model.parameters()),
                precision.name
            ),
            "config.json; shapes of transformers' modules",
        ),
    };
    VramPart {
        part: PartName::Weights,
        bytes: bytes_per_gpu(model, gpus),
        formula: what + &split,
        source,
    }
}

/// Bytes of the weights on each of so many GPUs. A GPU's share of a checkpoint is that of the weights that are counted.
pub(crate) fn bytes_per_gpu(model: &ModelArchitecture, gpus: u64) -> Bytes {
    let counted = counted_bytes(model, gpus, MXFP4_MULTIPLES);
    let Some(checkpoint) = &model.checkpoint else {
        return saturating_bytes(counted);
    };
    let whole = saturating_bytes(counted_bytes(model, 1, (1, 1))).0.max(1);
    let share = u128::from(saturating_bytes(counted).0);
    let stored = u128::from(saturating_bytes(checkpoint.loaded_bytes()).0);
    saturating_bytes((stored * share).div_ceil(whole.into()))
}

/// Bytes as they are counted; `multiples` are what an engine rounds experts up to.
pub(super) fn counted_bytes(model: &ModelArchitecture, gpus: u64, multiples: (u64, u64)) -> u128 {
    let layers = model.layers.iter();
    let of_layers = layers.map(|layer| layer_bytes(model, layer, gpus, multiples));
    let embeddings = Precision::HALF.bytes_of(model.embeddings(gpus));
    of_layers.fold(embeddings, u128::saturating_add)
}

fn layer_bytes(model: &ModelArchitecture, layer: &Layer, gpus: u64, multiples: (u64, u64)) -> u128 {
    let parameters = model.layer_parameters(layer, gpus, (1, 1));
    let padded = model.layer_parameters(layer, gpus, multiples);
    let matrices = parameters.matrices.iter().zip(&padded.matrices);
    let bytes = matrices
        .zip(&layer.precisions)
        .map(|((plain, padded), precision)| {
            let matrix = if *precision == Precision::MXFP4 {
                padded
            } else {
                plain
            };
            precision.bytes_of(matrix.parameters)
        });
    bytes.fold(
        Precision::HALF.bytes_of(parameters.unquantized),
        u128::saturating_add,
    )
}

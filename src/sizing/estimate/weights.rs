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
    VramPart {
        part: PartName::Weights,
        bytes: bytes_per_gpu(model, gpus),
        formula: format!(
            "{} parameters in {}{split}",
            with_thousands_separators(model.parameters()),
            precision.name
        ),
        source: "config.json; shapes of transformers' modules",
    }
}

/// Bytes of the weights on each of so many GPUs.
pub(crate) fn bytes_per_gpu(model: &ModelArchitecture, gpus: u64) -> Bytes {
    let of_layers = model
        .layers
        .iter()
        .map(|layer| layer_bytes(model, layer, gpus));
    let embeddings = Precision::HALF.bytes_of(model.embeddings(gpus));
    saturating_bytes(of_layers.fold(embeddings, u128::saturating_add))
}

fn layer_bytes(model: &ModelArchitecture, layer: &Layer, gpus: u64) -> u128 {
    let parameters = model.layer_parameters(layer, gpus, (1, 1));
    let padded = model.layer_parameters(layer, gpus, MXFP4_MULTIPLES);
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

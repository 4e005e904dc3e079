//! The weights on each GPU: every matrix in its precision, and everything else in 16 bits.

use super::architecture::{Layer, ModelArchitecture};
use super::quantization::{LayerPart, Precision};
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
    let layers = model.layers.iter().enumerate();
    let of_layers = layers.map(|(index, layer)| layer_bytes(model, index as u64, layer, gpus));
    let embeddings = Precision::HALF.bytes_of(model.embeddings(gpus));
    saturating_bytes(of_layers.fold(embeddings, u128::saturating_add))
}

fn layer_bytes(model: &ModelArchitecture, index: u64, layer: &Layer, gpus: u64) -> u128 {
    let precision_of = |part| model.quantization.precision_of(index, part);
    let mixer = layer.mixer.parameters(model.hidden, gpus).quantizable;
    let feed_forward = layer
        .feed_forward
        .parameters(model.hidden, gpus)
        .quantizable;
    let plain = model.layer_parameters(layer, gpus).unquantized;
    let experts = layer.feed_forward.experts().map_or(0, |experts| {
        let precision = precision_of(LayerPart::Experts);
        let multiples = if precision == Precision::MXFP4 {
            MXFP4_MULTIPLES
        } else {
            (1, 1)
        };
        precision.bytes_of(experts.weights(model.hidden, gpus, multiples))
    });
    [
        precision_of(LayerPart::Mixer).bytes_of(mixer),
        precision_of(LayerPart::FeedForward).bytes_of(feed_forward),
        experts,
        Precision::HALF.bytes_of(plain),
    ]
    .into_iter()
    .fold(0, u128::saturating_add)
}

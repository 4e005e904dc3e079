//! A small generated cluster and its pods, for use without a trace: figures from it show that the simulation works, and say
//! nothing about any real cluster.

use super::{Qos, Trace, TraceNode, TracePod, WHOLE_GPU};
use stowage_scheduling::ids::{GpuModel, NodeName};
use stowage_scheduling::units::{Bytes, MilliCpu};

const NODES: usize = 24;
const GPUS_PER_NODE: u32 = 8;

/// The distribution: percentage and size.
struct BuiltInShape {
    share: u32,
    qos: Qos,
    gpus: u32,
    milli: u32,
}

const fn shape(share: u32, qos: Qos, gpus: u32, milli: u32) -> BuiltInShape {
    BuiltInShape {
        share,
        qos,
        gpus,
        milli,
    }
}

/// Half of the pods serve, most on a whole GPU; the others are jobs, most on parts of GPUs.
const SHAPES: [BuiltInShape; 9] = [
    shape(30, Qos::LatencySensitive, 1, WHOLE_GPU),
    shape(10, Qos::LatencySensitive, 1, 500),
    shape(6, Qos::LatencySensitive, 2, WHOLE_GPU),
    shape(2, Qos::LatencySensitive, 4, WHOLE_GPU),
    shape(16, Qos::BestEffort, 1, 750),
    shape(14, Qos::BestEffort, 1, 500),
    shape(12, Qos::BestEffort, 1, 250),
    shape(8, Qos::BestEffort, 1, WHOLE_GPU),
    shape(2, Qos::Burstable, 1, WHOLE_GPU),
];

/// Rows of each share.
const ROWS_PER_SHARE: u32 = 4;

pub fn trace() -> Trace {
    let model = GpuModel::parse("made-up").expect("it is a plain word");
    let node = |index: usize| TraceNode {
        name: NodeName::parse(&format!("made-up-{index:02}"))
            .expect("it is short and has no spaces"),
        cpu: MilliCpu(128_000),
        memory: Bytes::gib(1024),
        gpus: GPUS_PER_NODE,
        model: model.clone(),
    };
    let rows = SHAPES
        .iter()
        .flat_map(|shape| (0..shape.share * ROWS_PER_SHARE).map(move |_| shape));
    let pods = rows
        .enumerate()
        .map(|(index, shape)| pod(index, shape))
        .collect();
    Trace {
        nodes: (0..NODES).map(node).collect(),
        pods,
    }
}

fn pod(index: usize, shape: &BuiltInShape) -> TracePod {
    TracePod {
        name: format!("made-up-pod-{index:03}").into(),
        cpu: MilliCpu(8000 * u64::from(shape.gpus)),
        memory: Bytes::gib(64).times(shape.gpus.into()),
        gpus: shape.gpus,
        milli_per_gpu: shape.milli,
        models: [].into(),
        qos: Some(shape.qos),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pod_could_run() {
        let made = trace();
        assert_eq!(SHAPES.iter().map(|shape| shape.share).sum::<u32>(), 100);
        assert!(
            made.pods
                .iter()
                .all(|pod| made.nodes.iter().any(|node| node.could_fit(pod)))
        );
    }
}

//! A small generated cluster and its pods, for use without a trace: figures from it show that the simulation works, and say
//! nothing about any real cluster. The same each time.

use super::{Life, Qos, Trace, TraceNode, TracePod, WHOLE_GPU};
use stowage_scheduling::ids::{GpuModel, NodeName};
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, MilliCpu, Millis};

const NODES: usize = 24;
const GPUS_PER_NODE: u32 = 8;

/// The distribution: percentage, size, and the range of running times in seconds.
struct BuiltInShape {
    share: u32,
    qos: Qos,
    gpus: u32,
    milli: u32,
    runs: (u64, u64),
}

const fn shape(share: u32, qos: Qos, (gpus, milli): (u32, u32), runs: (u64, u64)) -> BuiltInShape {
    BuiltInShape { share, qos, gpus, milli, runs }
}

/// Half of the pods serve, most on a whole GPU; the others are jobs on parts of GPUs, from minutes to half a day.
const SHAPES: [BuiltInShape; 9] = [
    shape(30, Qos::LatencySensitive, (1, WHOLE_GPU), (300, 28_800)),
    shape(10, Qos::LatencySensitive, (1, 500), (300, 28_800)),
    shape(6, Qos::LatencySensitive, (2, WHOLE_GPU), (600, 28_800)),
    shape(2, Qos::LatencySensitive, (4, WHOLE_GPU), (600, 28_800)),
    shape(16, Qos::BestEffort, (1, 750), (120, 43_200)),
    shape(14, Qos::BestEffort, (1, 500), (120, 43_200)),
    shape(12, Qos::BestEffort, (1, 250), (120, 43_200)),
    shape(8, Qos::BestEffort, (1, WHOLE_GPU), (120, 43_200)),
    shape(2, Qos::Burstable, (1, WHOLE_GPU), (3600, 43_200)),
];

/// Rows of each share: enough that running times are spread well over their range.
const ROWS_PER_SHARE: u32 = 4;

pub fn trace() -> Trace {
    let model = GpuModel::parse("made-up").expect("it is a plain word");
    let node = |place: usize| TraceNode {
        name: NodeName::parse(&format!("made-up-{place:02}")).expect("it is short and has no spaces"),
        cpu: MilliCpu(128_000),
        memory: Bytes::gib(1024),
        gpus: GPUS_PER_NODE,
        model: model.clone(),
    };
    let mut random = Random::seeded(0, 0);
    let rows = SHAPES.iter().flat_map(|shape| (0..shape.share * ROWS_PER_SHARE).map(move |_| shape));
    let pods = rows.enumerate().map(|(place, shape)| pod(place, shape, &mut random)).collect();
    Trace { nodes: (0..NODES).map(node).collect(), pods }
}

fn pod(place: usize, shape: &BuiltInShape, random: &mut Random) -> TracePod {
    let (least, most) = shape.runs;
    let ran = random.log_uniform(Millis::seconds(least), Millis::seconds(most));
    TracePod {
        name: format!("made-up-pod-{place:03}").into(),
        cpu: MilliCpu(8000 * u64::from(shape.gpus)),
        memory: Bytes::gib(64).times(shape.gpus.into()),
        gpus: shape.gpus,
        milli: shape.milli,
        models: [].into(),
        life: Some(Life { qos: shape.qos, ran }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_same_each_time_and_every_pod_could_run() {
        let made = trace();
        assert_eq!(made, trace());
        assert_eq!(SHAPES.iter().map(|shape| shape.share).sum::<u32>(), 100);
        assert!(made.pods.iter().all(|pod| made.nodes.iter().any(|node| node.could_fit(pod))));
    }
}

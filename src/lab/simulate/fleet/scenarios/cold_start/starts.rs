//! Starts that are counted, and engines that sleep on after their pods.

use super::{HOST_MEMORY, Timer};
use crate::simulate::fleet::machines::SleepingEngine;
use crate::simulate::fleet::stage::Stage;
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::units::Millis;

pub(crate) struct CountedStart {
    pub seconds: f64,
    pub shortest: f64,
    pub woke_engine: bool,
}

impl CountedStart {
    /// The start of a pod that is ready.
    pub fn from_ready_pod(stage: &Stage<'_, Timer>, uid: &PodUid, shortest: Millis) -> Self {
        let seconds = |time: Millis| time.0 as f64 / 1000.0;
        let pod = stage.pod(uid).expect("it is ready");
        Self {
            seconds: seconds(stage.now().since(pod.submitted_at)),
            shortest: seconds(shortest),
            woke_engine: pod.start.is_some_and(|start| start.woke_engine),
        }
    }
}

/// The pod ends, and its engine sleeps on.
pub(crate) fn finish_and_sleep(stage: &mut Stage<'_, Timer>, uid: &PodUid) {
    let Some(pod) = stage.pod(uid).cloned() else {
        return;
    };
    stage.finish(uid);
    let (Some(bound), Some(model)) = (pod.binding, pod.spec.model.clone()) else {
        return;
    };
    let Some(machine) = stage.machines.get_mut(&bound.node) else {
        return;
    };
    let mut gpus: Vec<usize> = bound
        .devices
        .iter()
        .filter_map(|device| machine.index_of(device))
        .collect();
    gpus.sort_unstable();
    let namespace = pod.spec.namespace.as_str().into();
    machine.put_to_sleep(
        SleepingEngine {
            pod: uid.clone(),
            model,
            weights: pod.spec.weights,
            gpus,
            namespace,
        },
        HOST_MEMORY,
    );
}

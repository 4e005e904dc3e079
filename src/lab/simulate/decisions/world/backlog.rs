//! A backlog: small pods that may be evicted fill the GPUs, and larger ones of higher priority wait for the planner. Limits of
//! evictions matter only then.

use super::World;
use crate::simulate::decisions::oracle::Checked;
use crate::simulate::decisions::record::{GIB, PodSpec};
use crate::simulate::decisions::rules::{APPS, NAMESPACES};

/// Beyond the pods that a world has otherwise.
const MORE_PODS: usize = 12;

impl World<'_> {
    pub(super) fn backlog(&mut self) -> Checked {
        for _ in 0..self.draws.between(4, MORE_PODS) {
            if self.alive.len() >= self.most_pods + MORE_PODS {
                break;
            }
            let (class, priority) = (self.draws.of(&[1, 1, 2]), self.draws.of(&[-100, -100, -10]));
            let per_gpu = self.draws.of(&[8, 17, 17, 20, 30]) * GIB;
            let spec = self.plain_pod(class, priority, per_gpu);
            let pod = self.comes(spec, false);
            self.ask_filter(pod)?;
            if let Some(node) = self.api[pod as usize].passed.first().copied() {
                self.ask_bind(pod, node)?;
            }
        }
        for _ in 0..self.draws.between(1, 4) {
            let per_gpu = self.draws.of(&[17, 30, 35, 36, 60, 71]) * GIB;
            let spec = PodSpec {
                gpus: self.draws.of(&[1, 1, 1, 2]),
                ..self.plain_pod(0, 100, per_gpu)
            };
            self.comes(spec, true);
        }
        for _ in 0..4 {
            let millis = self.draws.of(&[500, 1_000, 3_000, 6_000]);
            self.pass_by(millis)?;
            self.plan()?;
        }
        Ok(())
    }

    fn plain_pod(&mut self, class: u8, priority: i32, per_gpu: u64) -> PodSpec {
        PodSpec {
            per_gpu,
            gpus: 1,
            is_exclusive: false,
            priority,
            class,
            namespace: self.draws.below(NAMESPACES.len()) as u8,
            app: self.draws.below(APPS.len()) as u8,
            may_preempt: true,
            do_not_disrupt: false,
            group: None,
            grace: self.draws.of(&[0, 1_000, 30_000]),
        }
    }

    fn comes(&mut self, spec: PodSpec, is_gated: bool) -> u32 {
        let pod = self.add_pod(spec, is_gated);
        self.note(|| {
            format!(
                "pod {pod} comes, {}gated: {spec:?}",
                if is_gated { "" } else { "not " }
            )
        });
        self.show_pod(pod);
        self.show_to_filters(pod);
        pod
    }
}

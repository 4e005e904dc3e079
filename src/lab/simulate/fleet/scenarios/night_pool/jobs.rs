//! The jobs of the night.

use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::scenarios::endless_jobs::JobKind;
use crate::simulate::fleet::scenarios::running_jobs::{Checkpointing, Job};
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Millis};

pub(crate) const JOBS: JobKind = JobKind {
    pending: 8,
    draw,
    pod,
};

const MIN_WORK: Millis = Millis::seconds(600);
const MAX_WORK: Millis = Millis::seconds(7200);

fn draw(draws: &mut Random) -> Job {
    let gpus = [1, 1, 1, 1, 1, 1, 1, 2, 2, 4][draws.below(10)];
    let work = draws.log_uniform(MIN_WORK, MAX_WORK);
    Job::new(
        gpus,
        work,
        if draws.below(5) > 0 {
            Checkpointing::RegularlyAndOnEviction
        } else {
            Checkpointing::Never
        },
    )
}

fn pod(job: &Job) -> PodSpec {
    let checkpoints = [("stowage.dev/checkpoints".to_owned(), "true".to_owned())];
    PodSpec {
        labels: checkpoints
            .into_iter()
            .filter(|_| job.checkpointing != Checkpointing::Never)
            .collect(),
        priority: -10,
        gpus: job.gpus,
        is_exclusive: true,
        ..PodSpec::plain("harvest", Bytes::gib(70).times(u64::from(job.gpus)))
    }
}

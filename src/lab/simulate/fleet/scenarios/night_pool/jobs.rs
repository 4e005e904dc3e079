//! The jobs of the night.

use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::scenarios::endless_jobs::JobKind;
use crate::simulate::fleet::scenarios::running_jobs::{Job, Saving};
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Millis};

pub(crate) const JOBS: JobKind = JobKind {
    pending: 8,
    draw,
    pod,
};

const LEAST_WORK: Millis = Millis::seconds(600);
const MOST_WORK: Millis = Millis::seconds(7200);

fn draw(draws: &mut Random) -> Job {
    let gpus = [1, 1, 1, 1, 1, 1, 1, 2, 2, 4][draws.below(10)];
    let work = draws.log_uniform(LEAST_WORK, MOST_WORK);
    Job::new(
        gpus,
        work,
        if draws.below(5) > 0 {
            Saving::AndWhenAsked
        } else {
            Saving::Never
        },
    )
}

fn pod(job: &Job) -> PodSpec {
    let checkpoints = [("stowage.dev/checkpoints".to_owned(), "true".to_owned())];
    PodSpec {
        labels: checkpoints
            .into_iter()
            .filter(|_| job.saving != Saving::Never)
            .collect(),
        priority: -10,
        gpus: job.gpus,
        exclusive: true,
        ..PodSpec::plain("harvest", Bytes::gib(70).times(u64::from(job.gpus)))
    }
}

//! Jobs that fill what the engines leave of the pool: evaluations of small models, which keep a GPU busy as long as they run.

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

const VRAM: Bytes = Bytes::gib(8);
/// They write their results as they come, and have little to save.
const GRACE: Millis = Millis::seconds(10);
const WORK: (Millis, Millis) = (Millis::seconds(300), Millis::seconds(1800));

fn draw(draws: &mut Random) -> Job {
    Job::new(
        1,
        draws.log_uniform(WORK.0, WORK.1),
        Checkpointing::RegularlyAndOnEviction,
    )
}

fn pod(_: &Job) -> PodSpec {
    PodSpec {
        priority: -10,
        grace: GRACE,
        ..PodSpec::plain("evaluations", VRAM)
    }
}

//! Generates the pods of one run from a trace and a seed. The run decides what happens to them.

use crate::simulate::openb::{Qos, Trace, TracePod};
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Millis, Moment};

/// How much of a trace is simulated, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkloadExtent {
    /// Every n-th node of the trace is used.
    pub node_step: usize,
    /// Nothing is counted before this time.
    pub warm_up: Millis,
    pub counted: Millis,
}

#[derive(Debug)]
pub struct Workload {
    pub seed: u64,
    pub extent: WorkloadExtent,
    /// Names, and how many GPUs each has.
    pub nodes: Vec<(NodeName, u32)>,
    /// In their order of arrival.
    pub jobs: Vec<Job>,
}

/// Work to be done; a resident's pods may be evicted, and it returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job {
    pub comes: Moment,
    pub role: JobRole,
    pub size: JobSize,
    /// On its GPUs, without loading.
    pub work: Millis,
    /// For a resident.
    pub saves_every: Millis,
}

/// The number of GPUs, and the thousandths of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobSize {
    pub gpus: u32,
    pub milli: u32,
}

/// Higher priorities first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum JobRole {
    Arrival,
    Burstable,
    BestEffort,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkloadError {
    #[error(
        "the trace's pods have neither qos nor times, so it is unknown which are preemptible and how long they run; give openb_pod_list_default.csv"
    )]
    NoHistory,
    #[error("no pod of the trace is {what}, on GPUs that the part that is played has; give a larger trace")]
    NoneOf { what: &'static str },
    #[error("the trace has no GPU; give a list of nodes with some")]
    NoGpu,
}

/// A day: longer jobs count as this long, so that arrivals are in equilibrium after the first day.
const LONGEST: Millis = DAY;
const DAY: Millis = Millis::seconds(86_400);
/// A pod that is evicted before this time would have lost nothing measurable.
const SHORTEST: Millis = Millis::seconds(1);

impl WorkloadExtent {
    /// A part that is simulated in seconds.
    pub const OPENB: Self = Self { node_step: 12, warm_up: DAY, counted: DAY };
    /// All of the generated cluster.
    pub const BUILT_IN: Self = Self { node_step: 1, warm_up: DAY, counted: DAY };

    pub fn ends(self) -> Moment {
        Moment::default() + self.warm_up + self.counted
    }

    pub fn is_counted(self, when: Moment) -> bool {
        when >= Moment::default() + self.warm_up
    }
}

impl JobRole {
    const ALL: [Self; 3] = [Self::Arrival, Self::Burstable, Self::BestEffort];

    pub fn priority(self) -> i32 {
        match self {
            Self::Arrival => 1000,
            Self::Burstable => -10,
            Self::BestEffort => -20,
        }
    }

    /// The percentage of the cluster that its jobs would keep busy if all were placed.
    fn load(self) -> u64 {
        match self {
            Self::Arrival => 50,
            Self::Burstable => 5,
            Self::BestEffort => 55,
        }
    }

    fn of(qos: Qos) -> Self {
        match qos {
            Qos::LatencySensitive | Qos::Guaranteed => Self::Arrival,
            Qos::Burstable => Self::Burstable,
            Qos::BestEffort => Self::BestEffort,
        }
    }

    fn said(self) -> &'static str {
        match self {
            Self::Arrival => "LS or Guaranteed",
            Self::Burstable => "Burstable",
            Self::BestEffort => "BE",
        }
    }
}

impl JobSize {
    /// Over all its GPUs, in thousandths of one.
    pub fn milli_gpus(self) -> u64 {
        u64::from(self.gpus) * u64::from(self.milli)
    }
}

impl Workload {
    pub fn of(trace: &Trace, extent: WorkloadExtent, seed: u64) -> Result<Self, WorkloadError> {
        let part = trace.nodes.iter().step_by(extent.node_step.max(1)).filter(|node| node.gpus > 0);
        let nodes: Vec<(NodeName, u32)> = part.map(|node| (node.name.clone(), node.gpus)).collect();
        let most = nodes.iter().map(|(_, gpus)| *gpus).max().ok_or(WorkloadError::NoGpu)?;
        let gpus = nodes.iter().map(|(_, gpus)| u64::from(*gpus)).sum();
        let mut jobs = Vec::new();
        for role in JobRole::ALL {
            let rows = rows(trace, role, most)?;
            jobs.extend(JobStream::new(role, &rows, gpus, seed).take_while(|job| job.comes < extent.ends()));
        }
        jobs.sort_by_key(|job| (job.comes, job.role));
        Ok(Self { seed, extent, nodes, jobs })
    }

    pub fn gpus(&self) -> u64 {
        self.nodes.iter().map(|(_, gpus)| u64::from(*gpus)).sum()
    }
}

/// Size and running time of every pod that could be drawn.
fn rows(trace: &Trace, role: JobRole, most: u32) -> Result<Vec<(JobSize, Millis)>, WorkloadError> {
    let row = |pod: &TracePod| {
        let life = pod.life.filter(|life| JobRole::of(life.qos) == role)?;
        let size = JobSize { gpus: pod.gpus, milli: pod.milli };
        (pod.gpus > 0 && pod.gpus <= most).then(|| (size, life.ran.clamp(SHORTEST, LONGEST)))
    };
    let rows: Vec<(JobSize, Millis)> = trace.pods.iter().filter_map(row).collect();
    match rows.is_empty() {
        false => Ok(rows),
        true if trace.pods.iter().all(|pod| pod.life.is_none()) => Err(WorkloadError::NoHistory),
        true => Err(WorkloadError::NoneOf { what: role.said() }),
    }
}

/// An endless sequence of jobs of one role.
struct JobStream<'r> {
    role: JobRole,
    rows: &'r [(JobSize, Millis)],
    mean_gap: f64,
    at: Moment,
    gaps: Random,
    draws: Random,
    intervals: Random,
}

impl<'r> JobStream<'r> {
    fn new(role: JobRole, rows: &'r [(JobSize, Millis)], gpus: u64, seed: u64) -> Self {
        let dice = |of: u64| Random::seeded(seed, role as u64 * 3 + of);
        let work: u128 =
            rows.iter().map(|(size, ran)| u128::from(size.milli_gpus()) * u128::from(ran.0)).sum();
        let mean_work = work as f64 / rows.len() as f64;
        let milli_gpus = (gpus * 1000 * role.load()) as f64 / 100.0;
        Self {
            role,
            rows,
            mean_gap: mean_work / milli_gpus,
            at: Moment::default(),
            gaps: dice(0),
            draws: dice(1),
            intervals: dice(2),
        }
    }
}

impl Iterator for JobStream<'_> {
    type Item = Job;

    fn next(&mut self) -> Option<Job> {
        self.at = self.at + self.gaps.gap(self.mean_gap);
        let (size, work) = self.rows[self.draws.below(self.rows.len())];
        let saves_every = self.intervals.log_uniform(Millis::seconds(300), Millis::seconds(4 * 3600));
        Some(Job { comes: self.at, role: self.role, size, work, saves_every })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::openb::built_in;

    #[test]
    fn jobs_come_in_order_and_ask_for_what_their_roles_load_says() {
        let workload = Workload::of(&built_in::trace(), WorkloadExtent::BUILT_IN, 42).unwrap();
        assert!(workload.jobs.is_sorted_by_key(|job| job.comes));
        for role in JobRole::ALL {
            let jobs = workload.jobs.iter().filter(|job| job.role == role);
            let asked: u64 = jobs.map(|job| job.size.milli_gpus() * job.work.0).sum();
            let whole = workload.gpus() * 1000 * workload.extent.ends().0;
            let load = asked * 100 / whole;
            assert!(load.abs_diff(role.load()) <= role.load() / 4, "{role:?}: {load} %");
        }
    }

    #[test]
    fn a_trace_without_history_is_refused_with_the_way_out() {
        let mut trace = built_in::trace();
        trace.pods.iter_mut().for_each(|pod| pod.life = None);
        let error = Workload::of(&trace, WorkloadExtent::BUILT_IN, 42).unwrap_err();
        assert!(error.to_string().contains("openb_pod_list_default.csv"), "{error}");
    }
}

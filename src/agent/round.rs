//! One round: samples every source and builds one report of the results.
//!
//! Each source may fail alone; the report then says which part is missing and why. Sources that can hang get a part of the
//! round's second.

use super::blocking::{Blocking, BlockingResult};
use super::engines::{EngineRound, EngineWatcher};
use super::findings::{findings, unrecorded};
use super::models::{self, ModelScan, ModelSource};
use super::nvml::{GpuSample, GpuSensors, GpuSource};
use super::ownership::OwnerSource;
use super::ownership::dual_pods::give_to_requesters;
use super::pods::{PodOnNode, PodSource};
use std::io;
use std::time::{Duration, Instant};
use stowage_report::{GpuReport, MissingPart, NodeReport, ReportPart};
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::units::Millis;

/// NVML answers in milliseconds; the report does not wait for a driver that takes longer.
const GPU_PATIENCE: Duration = Duration::from_millis(300);
/// Files on disk change slowly, and the last scan's result is available at once.
const MODEL_PATIENCE: Duration = Duration::from_millis(50);

/// The sources of the figures.
pub struct ReportSources {
    pub gpus: Box<dyn GpuSource>,
    pub owners: Box<dyn OwnerSource>,
    pub pods: Box<dyn PodSource>,
    pub models: Box<dyn ModelSource>,
    pub engines: EngineWatcher,
}

/// One node, sampled round after round.
pub struct Rounds {
    node: NodeName,
    boot_id: String,
    sequence: u64,
    pub legacy_runtime: bool,
    gpus: Blocking<Result<GpuSample, String>>,
    owners: Box<dyn OwnerSource>,
    pods: Box<dyn PodSource>,
    models: Blocking<ModelScan>,
    /// The last scan's result.
    scanned: ModelScan,
    engines: EngineWatcher,
}

/// A report, and the moment at which its ages were right.
pub struct Round {
    pub report: NodeReport,
    /// What the GPUs' sensors say, for metrics.
    pub sensors: GpuSensors,
    pub as_of: Instant,
    /// The pods on the node, so that their names can be printed.
    pub pods: Vec<PodOnNode>,
}

impl Rounds {
    /// `boot_id` must differ at each start.
    pub fn new(node: NodeName, boot_id: String, sources: ReportSources) -> io::Result<Self> {
        let ReportSources {
            mut gpus,
            owners,
            pods,
            mut models,
            engines,
        } = sources;
        Ok(Self {
            node,
            boot_id,
            sequence: 0,
            legacy_runtime: false,
            gpus: Blocking::start("nvml", move || gpus.sample())?,
            owners,
            pods,
            models: Blocking::start("models", move || models.models())?,
            scanned: ModelScan::default(),
            engines,
        })
    }

    pub async fn next(&mut self) -> Round {
        let mut missing = Vec::new();
        let pods = self.pods(&mut missing);
        let sample = self.sample(&mut missing).await;
        let (mut gpus, sensors, taken) = match sample {
            Some(sample) => (Some(sample.gpus), sample.sensors, Some(sample.taken)),
            None => (None, GpuSensors::new(), None),
        };
        let listed: &mut [GpuReport] = gpus.as_deref_mut().unwrap_or_default();
        missing.extend(self.owners.owners(listed, &pods).await);
        let EngineRound { engines, unread } = self.engines.round(&pods, listed).await;
        // An engine is probed where it runs, and counted for the pod that it runs for.
        give_to_requesters(listed, &pods);
        let findings = findings(&pods, listed);
        let unrecorded = unrecorded(&pods, listed);
        self.scan(&mut missing).await;
        self.sequence += 1;
        let scanned = self.scanned.models.iter().cloned();
        let mut report = NodeReport {
            node: self.node.clone(),
            boot_id: self.boot_id.clone(),
            sequence: self.sequence,
            age_millis: age(taken),
            models: models::merged(scanned.chain(models::held_by_engines(&engines))),
            gpus,
            engines,
            unread,
            findings,
            unrecorded,
            legacy_runtime: self.legacy_runtime,
            missing,
        };
        report.keep_to_limits();
        Round {
            report,
            sensors,
            as_of: Instant::now(),
            pods,
        }
    }

    /// The latest round, for a single sample. If no process was there to find the owner of, it also says what would have
    /// prevented finding it.
    pub async fn look(&mut self) -> Round {
        let mut round = self.next().await;
        let mut gpus = round.report.gpus.iter().flatten();
        if gpus.all(|gpu| gpu.processes.as_ref().is_none_or(Vec::is_empty)) {
            round.report.missing.extend(self.owners.lacks());
        }
        round
    }

    fn pods(&mut self, missing: &mut Vec<MissingPart>) -> Vec<PodOnNode> {
        self.pods.pods().unwrap_or_else(|reason| {
            missing.push(MissingPart {
                part: ReportPart::Pods,
                reason,
            });
            Vec::new()
        })
    }

    async fn sample(&mut self, missing: &mut Vec<MissingPart>) -> Option<GpuSample> {
        let reason = match self.gpus.ask(GPU_PATIENCE).await {
            BlockingResult::Answer(Ok(sample)) => {
                missing.extend(sample.missing.iter().cloned());
                return Some(sample);
            }
            BlockingResult::Answer(Err(reason)) => reason,
            // Without the duration: a changed reason is logged, and this would change each time.
            BlockingResult::Hangs => {
                "the driver does not answer; if it stays so, the node's kernel log says more".into()
            }
            BlockingResult::Gone => {
                "the thread that asks the driver has failed; restart the agent".into()
            }
        };
        missing.push(MissingPart {
            part: ReportPart::Gpus,
            reason,
        });
        None
    }

    async fn scan(&mut self, missing: &mut Vec<MissingPart>) {
        match self.models.ask(MODEL_PATIENCE).await {
            BlockingResult::Answer(scan) => self.scanned = scan,
            // The first scan of a large disk takes a while.
            BlockingResult::Hangs => {}
            BlockingResult::Gone => {
                self.scanned.problems = vec!["the thread that looks for models has failed".into()]
            }
        }
        let problems = self.scanned.problems.iter();
        missing.extend(problems.map(|reason| MissingPart {
            part: ReportPart::Models,
            reason: reason.clone(),
        }));
    }
}

/// Whether NVIDIA's container runtime gave this container its GPUs by the hook of its legacy mode, which leaves
/// `NVIDIA_VISIBLE_DEVICES` as it is: with CDI, in whichever mode, it becomes `void`.
pub fn is_of_legacy_runtime(visible_devices: Option<&str>) -> bool {
    !matches!(visible_devices, None | Some("" | "void" | "none"))
}

fn age(taken: Option<Instant>) -> Millis {
    Millis(taken.map_or(0, |taken| taken.elapsed().as_millis() as u64))
}

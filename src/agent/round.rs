//! One round: samples every source and builds one report of the results.
//!
//! Each source may fail alone; the report then says which part is missing and why. Sources that can hang get a part of the
//! round's second.

use super::blocking::{BlockingResult, BlockingSource};
use super::engines::{EngineRound, EngineWatcher};
use super::findings::{findings, unrecorded_pods};
use super::models::{self, ModelScan, ModelSource};
use super::nvml::{GpuSample, GpuSensors, GpuSource};
use super::ownership::OwnerSource;
use super::ownership::dual_pods::attribute_to_requesters;
use super::ownership::fill_written_limits;
use super::pods::{PodOnNode, PodSource};
use std::io;
use std::time::{Duration, Instant};
use stowage_report::{GpuReport, MissingPart, NodeReport, ReportPart};
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::units::Millis;

/// NVML answers in milliseconds; the report does not wait for a driver that takes longer.
const GPU_TIMEOUT: Duration = Duration::from_millis(300);
/// Files on disk change slowly, and the last scan's result is available at once.
const MODEL_TIMEOUT: Duration = Duration::from_millis(50);

/// The sources of the figures.
pub struct ReportSources {
    pub gpus: Box<dyn GpuSource>,
    pub owners: Box<dyn OwnerSource>,
    pub pods: Box<dyn PodSource>,
    pub models: Box<dyn ModelSource>,
    pub engines: EngineWatcher,
}

/// One node, sampled round after round.
pub struct NodeSampler {
    node: NodeName,
    boot_id: String,
    sequence: u64,
    pub is_legacy_runtime: bool,
    gpus: BlockingSource<Result<GpuSample, String>>,
    owners: Box<dyn OwnerSource>,
    pods: Box<dyn PodSource>,
    models: BlockingSource<ModelScan>,
    /// The last scan's result.
    last_scan: ModelScan,
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

impl NodeSampler {
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
            is_legacy_runtime: false,
            gpus: BlockingSource::start("nvml", move || gpus.sample())?,
            owners,
            pods,
            models: BlockingSource::start("models", move || models.models())?,
            last_scan: ModelScan::default(),
            engines,
        })
    }

    pub async fn run_round(&mut self) -> Round {
        let mut missing = Vec::new();
        let pods = self.pods(&mut missing);
        let sample = self.sample_gpus(&mut missing).await;
        let (mut gpus, sensors, taken) = match sample {
            Some(sample) => (Some(sample.gpus), sample.sensors, Some(sample.taken_at)),
            None => (None, GpuSensors::new(), None),
        };
        let gpu_reports: &mut [GpuReport] = gpus.as_deref_mut().unwrap_or_default();
        missing.extend(self.owners.owners(gpu_reports, &pods).await);
        let EngineRound { engines, unread } = self.engines.round(&pods, gpu_reports).await;
        // An engine is probed where it runs, and counted for the pod that it runs for.
        attribute_to_requesters(gpu_reports, &pods);
        let (isolation, problem) = self.owners.read_cgroups(gpu_reports);
        fill_written_limits(gpu_reports, &pods);
        missing.extend(problem.map(|reason| MissingPart {
            part: ReportPart::Limits,
            reason,
        }));
        let findings = findings(&pods, gpu_reports);
        let unrecorded = unrecorded_pods(&pods, gpu_reports);
        self.scan_models(&mut missing).await;
        self.sequence += 1;
        let scanned = self.last_scan.models.iter().cloned();
        let mut report = NodeReport {
            node: self.node.clone(),
            boot_id: self.boot_id.clone(),
            sequence: self.sequence,
            age_millis: age_since(taken),
            models: models::merge_models(scanned.chain(models::loaded_by_engines(&engines))),
            gpus,
            engines,
            unread,
            findings,
            unrecorded,
            legacy_runtime: self.is_legacy_runtime,
            isolation,
            missing,
        };
        report.truncate_to_limits();
        Round {
            report,
            sensors,
            as_of: Instant::now(),
            pods,
        }
    }

    /// The latest round, for a single sample. If no process was there to find the owner of, it also says what would have
    /// prevented finding it.
    pub async fn single_sample(&mut self) -> Round {
        let mut round = self.run_round().await;
        let mut gpus = round.report.gpus.iter().flatten();
        if gpus.all(|gpu| gpu.processes.as_ref().is_none_or(Vec::is_empty)) {
            round
                .report
                .missing
                .extend(self.owners.missing_prerequisites());
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

    async fn sample_gpus(&mut self, missing: &mut Vec<MissingPart>) -> Option<GpuSample> {
        let reason = match self.gpus.call(GPU_TIMEOUT).await {
            BlockingResult::Answer(Ok(sample)) => {
                missing.extend(sample.missing.iter().cloned());
                return Some(sample);
            }
            BlockingResult::Answer(Err(reason)) => reason,
            // Without the duration: a changed reason is logged, and this would change each time.
            BlockingResult::TimedOut => {
                "the driver does not answer; if it stays so, the node's kernel log says more".into()
            }
            BlockingResult::ThreadEnded => {
                "the thread that asks the driver has failed; restart the agent".into()
            }
        };
        missing.push(MissingPart {
            part: ReportPart::Gpus,
            reason,
        });
        None
    }

    async fn scan_models(&mut self, missing: &mut Vec<MissingPart>) {
        match self.models.call(MODEL_TIMEOUT).await {
            BlockingResult::Answer(scan) => self.last_scan = scan,
            // The first scan of a large disk takes a while.
            BlockingResult::TimedOut => {}
            BlockingResult::ThreadEnded => {
                self.last_scan.problems = vec!["the thread that looks for models has failed".into()]
            }
        }
        let problems = self.last_scan.problems.iter();
        missing.extend(problems.map(|reason| MissingPart {
            part: ReportPart::Models,
            reason: reason.clone(),
        }));
    }
}

/// Whether NVIDIA's container runtime gave this container its GPUs by the hook of its legacy mode, which leaves
/// `NVIDIA_VISIBLE_DEVICES` as it is: with CDI, in whichever mode, it becomes `void`.
pub fn is_legacy_runtime(visible_devices: Option<&str>) -> bool {
    !matches!(visible_devices, None | Some("" | "void" | "none"))
}

fn age_since(taken: Option<Instant>) -> Millis {
    Millis(taken.map_or(0, |taken| taken.elapsed().as_millis() as u64))
}

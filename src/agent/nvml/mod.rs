//! NVML's view of the node's GPUs: memory, processes, load, health, links, MIG slices.
//!
//! [`Nvml`] opens the driver's library at the first call, and again when the driver is reloaded. One figure that cannot be read
//! leaves only that figure out; a GPU that was seen once stays in the sample until NVML no longer counts it. Calls block, so
//! make them on a thread of their own. The pods of processes are not known here.
//!
//! - `session`: one opening of the library, and a sample through it. `gpu`: one GPU and its slices.
//! - `compute_instance`: how those of one GPU instance share its memory.
//! - `activity`: how busy a GPU's SMs and memory are, on a thread of its own.
//! - `health`: what makes a GPU draining or lost. `xids`: the driver's error events, on a thread of their own.
//! - `islands`: which GPUs reach each other over NVLink.

mod activity;
mod compute_instance;
mod gpu;
mod health;
mod islands;
mod session;
#[cfg(test)]
mod tests;
mod xids;

use nvml_wrapper::error::NvmlError;
use session::Session;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use stowage_report::{GpuReport, MissingPart};
use stowage_scheduling::ids::GpuUuid;
use stowage_scheduling::units::{Bytes, Moment};
use stowage_scheduling::vocabulary::health::AnswerState;
use stowage_telemetry::agent::SensorReading;

/// A source of GPUs' figures. A call may block for as long as the driver does.
pub trait GpuSource: Send {
    /// The GPUs now, or why they cannot be read.
    fn sample(&mut self) -> Result<GpuSample, String>;
}

/// The node's GPUs at one moment, by index, a MIG slice after the GPU it is cut from. No process has its pod yet.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuSample {
    pub gpus: Vec<GpuReport>,
    /// What each GPU's sensors say. Not part of a report: no decision depends on it.
    pub sensors: GpuSensors,
    /// Figures that could not be read.
    pub missing: Vec<MissingPart>,
    pub taken_at: Instant,
}

/// By GPU. A MIG slice has no sensors of its own.
pub(crate) type GpuSensors = BTreeMap<GpuUuid, SensorReading>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmlOptions {
    /// A library in place of the driver's own (`--nvml-lib`).
    pub library: Option<PathBuf>,
    /// The size of GPUs that share the host's memory and do not report it (`--gpu-memory`).
    pub gpu_memory: Option<Bytes>,
    /// An MPS daemon lets several pods use a GPU in compute mode exclusive-process (`--mps`).
    pub mps: bool,
    /// Where the kernel lists PCI devices: `/sys`.
    pub sys: PathBuf,
}

impl Default for NvmlOptions {
    fn default() -> Self {
        Self {
            library: None,
            gpu_memory: None,
            mps: false,
            sys: "/sys".into(),
        }
    }
}

/// The last reading of each GPU with its slices, by NVML's index: used for a GPU that cannot be read.
type LastReports = BTreeMap<u32, Vec<GpuReport>>;

/// GPUs and slices for which NVML has answered in a way that is not known to be harmless, each with the answer.
type Failures = BTreeMap<GpuUuid, String>;

/// State of the GPUs that outlives a session of NVML.
#[derive(Debug, Default)]
struct GpuHistory {
    last_reports: LastReports,
    answers: BTreeMap<GpuUuid, AnswerState>,
}

/// The driver library's name on every Linux.
const DRIVER_LIBRARY: &str = "libnvidia-ml.so.1";
/// First pause between two attempts to open NVML: a driver upgrade takes seconds.
const INITIAL_REOPEN_BACKOFF: Duration = Duration::from_secs(1);
/// Longest pause: opening loads a library of several megabytes, and a node without GPUs never gets one.
const MAX_REOPEN_BACKOFF: Duration = Duration::from_secs(30);

/// NVML through the driver's library.
#[derive(Debug)]
pub struct Nvml {
    options: NvmlOptions,
    state: LibraryState,
    history: GpuHistory,
    started: Instant,
}

#[derive(Debug)]
enum LibraryState {
    /// Opened at the first call.
    Closed,
    Open(Session),
    Failed(NvmlFailure),
}

#[derive(Debug)]
struct NvmlFailure {
    reason: String,
    retry_at: Instant,
    backoff: Duration,
}

/// Why NVML cannot be used, and the fix.
#[derive(Debug, thiserror::Error)]
enum NvmlProblem {
    #[error(
        "no NVIDIA driver: {cause}; on a GPU node, mount the driver's libraries into the agent or name the library with \
         --nvml-lib"
    )]
    NoLibrary { cause: String },
    #[error(
        "{library} is there, but the NVIDIA kernel module is not loaded; see that nvidia-smi works on the node"
    )]
    NoModule { library: String },
    #[error(
        "{library} and the loaded kernel module are of different versions: the driver was upgraded; \
         reload the module or reboot the node"
    )]
    Mismatch { library: String },
    #[error("{library} is no NVML: it has no {symbol}; name the right library with --nvml-lib")]
    NotNvml { library: String, symbol: String },
    #[error("NVML ({library}) does not answer: {cause}")]
    Refused { library: String, cause: NvmlError },
}

impl Nvml {
    pub fn new(options: NvmlOptions) -> Self {
        Self {
            options,
            state: LibraryState::Closed,
            history: GpuHistory::default(),
            started: Instant::now(),
        }
    }

    fn sample_at(&mut self, now: Instant) -> Result<GpuSample, String> {
        match std::mem::replace(&mut self.state, LibraryState::Closed) {
            LibraryState::Failed(failure) if now < failure.retry_at => {
                let reason = failure.reason.clone();
                self.state = LibraryState::Failed(failure);
                Err(reason)
            }
            LibraryState::Failed(failure) => {
                self.open(now, (failure.backoff * 2).min(MAX_REOPEN_BACKOFF))
            }
            LibraryState::Closed => self.open(now, INITIAL_REOPEN_BACKOFF),
            LibraryState::Open(session) => self.read(session, now, INITIAL_REOPEN_BACKOFF),
        }
    }

    fn open(&mut self, now: Instant, wait: Duration) -> Result<GpuSample, String> {
        match session::open(&self.options) {
            Ok(session) => self.read(session, now, wait),
            Err(problem) => self.fail(problem, now, wait),
        }
    }

    fn read(
        &mut self,
        mut session: Session,
        now: Instant,
        wait: Duration,
    ) -> Result<GpuSample, String> {
        let moment = self.moment(now);
        match session.sample(&self.options, &mut self.history, moment) {
            Ok((gpus, sensors, missing)) => {
                self.state = LibraryState::Open(session);
                Ok(GpuSample {
                    gpus,
                    sensors,
                    missing,
                    taken_at: now,
                })
            }
            Err(cause) => self.fail(NvmlProblem::from_error(cause, &self.options), now, wait),
        }
    }

    fn fail(
        &mut self,
        problem: NvmlProblem,
        now: Instant,
        wait: Duration,
    ) -> Result<GpuSample, String> {
        let reason = problem.to_string();
        let moment = self.moment(now);
        self.history
            .answers
            .values_mut()
            .for_each(|state| *state = state.next(false, moment));
        self.state = LibraryState::Failed(NvmlFailure {
            reason: reason.clone(),
            retry_at: now + wait,
            backoff: wait,
        });
        Err(reason)
    }

    fn moment(&self, now: Instant) -> Moment {
        Moment(now.saturating_duration_since(self.started).as_millis() as u64)
    }
}

impl GpuSource for Nvml {
    fn sample(&mut self) -> Result<GpuSample, String> {
        self.sample_at(Instant::now())
    }
}

impl NvmlOptions {
    fn library_name(&self) -> String {
        self.library
            .as_ref()
            .map_or_else(|| DRIVER_LIBRARY.into(), |path| path.display().to_string())
    }
}

impl NvmlProblem {
    fn from_error(cause: NvmlError, options: &NvmlOptions) -> Self {
        let library = options.library_name();
        match cause {
            // The loader names the library itself.
            NvmlError::LibloadingError(cause) => Self::NoLibrary {
                cause: cause.to_string(),
            },
            NvmlError::DriverNotLoaded => Self::NoModule { library },
            NvmlError::LibRmVersionMismatch => Self::Mismatch { library },
            NvmlError::FailedToLoadSymbol(symbol) => Self::NotNvml { library, symbol },
            cause => Self::Refused { library, cause },
        }
    }
}

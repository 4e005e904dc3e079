//! `stowage demo`: a small cluster in one process, and a short story on it.
//!
//! Stand-ins for the API server, the kube-scheduler, the kubelets, the GPUs and the engines surround the same Stowage that
//! `serve` runs and the same rounds that `agent` makes, over real loopback HTTP. The integration tests use the same stand-ins.
//! They behave as kube-scheduler v1.36.2 was measured to behave; they are not Kubernetes, and none of Stowage's own decisions
//! may be made here.

pub mod agents;
pub mod api_server;
mod change_tracker;
pub mod engines;
mod hardware;
pub mod kubelet;
pub mod machine;
mod placement_cost;
mod play;
mod reported;
pub mod scheduler;
mod screen;
pub mod setup;
mod sleeping;
pub mod start_times;
mod story;
pub mod stowage;
pub mod summary;
pub mod termination;
mod vram;
mod watching;
mod what_if;
mod writes;

use anyhow::Result;
use play::Play;
use screen::Screen;
use setup::Setup;
use start_times::StartTimesTable;
use std::path::PathBuf;
use std::time::Duration;
use stowage_server::flight_recorder::{FlightRecorder, RecordOptions, RingLimits};
use summary::Summary;

/// Seed of the start-time simulation.
const START_TIMES_SEED: u64 = 42;
/// Limits of the demo's recording: more than a story comes to.
const RECORDING_LIMITS: RingLimits = RingLimits {
    max_bytes: 1 << 30,
    max_age: Duration::from_secs(24 * 3600),
};

/// How the demo is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DemoMode {
    /// The story; then the cluster stays until Ctrl-C, to explore it.
    Stay,
    /// The story only.
    Once,
    /// The story on stderr: the caller prints the summary.
    Data,
}

/// Plays the story.
pub async fn run(show: DemoMode, record: Option<PathBuf>) -> Result<Summary> {
    let mut screen = if show == DemoMode::Data {
        Screen::stderr()
    } else {
        Screen::stdout()
    };
    screen.line("Stowage on a cluster of stand-ins: 3 nodes, 10 GPUs, an API server and a kube-scheduler, in this process.");
    screen.line(
        "█ serving  ▒ opportunistic  · free      (a tenth of each GPU is headroom and never allocated)",
    );
    let mut play = Play::new(
        Setup::with_policy(story::policy()?, &story::MACHINES).await?,
        screen,
    );
    let recording = record.map(|directory| RecordOptions {
        directory,
        limits: RECORDING_LIMITS,
    });
    let recorder =
        recording.map(|options| FlightRecorder::start(&options, &play.setup.stowage.state));
    let recorder = recorder.transpose()?;
    // On a clock of their own, while the story waits.
    let start_times = tokio::task::spawn_blocking(|| StartTimesTable::play(START_TIMES_SEED));
    play.play_story().await?;
    let mut summary = play.summary();
    summary.add_start_times(start_times.await??);
    summary
        .lines()
        .iter()
        .for_each(|line| play.screen.line(line));
    play.screen.check()?;
    if show == DemoMode::Stay {
        let operators = play.setup.stowage.addresses.operators;
        play.screen.line(&format!(
            "\nLook around: http://{operators}/ in a browser; curl …/metrics, …/debug/snapshot. Ctrl-C ends."
        ));
        tokio::signal::ctrl_c().await?;
    }
    play.setup.stop().await?;
    recorder.into_iter().for_each(FlightRecorder::stop);
    Ok(summary)
}

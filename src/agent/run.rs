//! `stowage agent`: reports round after round to every replica until shutdown; or samples once and prints.

use super::engines::EngineWatcher;
use super::engines::limits::EngineLimits;
use super::metrics_page::{self, MetricsPage};
use super::models::ModelSource;
use super::nvml::GpuSource;
use super::ownership::OwnerSource;
use super::pods::{PodOnNode, PodSource};
use super::print;
use super::publish::{PublishOutcome, PublishState, Publisher};
use super::round::{NodeSampler, ReportSources, Round, is_legacy_runtime};
use super::turns;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stowage_report::{MissingPart, NodeReport, ReportPart};
use stowage_scheduling::ids::NodeName;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::MissedTickBehavior;
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

/// Rounds of a single sample (`--once`), and the pause between two: the list of pods and an engine's first answer need a few.
const SINGLE_SAMPLE_ROUNDS: (u32, Duration) = (6, Duration::from_millis(250));
/// A replica's share of the second between two reports; the round needs the rest.
const PUBLISH_TIMEOUT: Duration = Duration::from_millis(500);

pub struct AgentOptions {
    pub node: NodeName,
    pub interval: Duration,
    pub gpus: Box<dyn GpuSource>,
    pub owners: Box<dyn OwnerSource>,
    pub pods: Box<dyn PodSource>,
    pub models: Box<dyn ModelSource>,
    pub publisher: Option<Publisher>,
    /// Where its metrics are served, if they are.
    pub metrics: Option<TcpListener>,
    /// Where pods ask for their turn to start, and the host's `/proc`.
    pub turns: Option<(PathBuf, PathBuf)>,
}

/// Reports until shutdown.
pub async fn run(mut options: AgentOptions) -> Result<()> {
    let (interval, node) = (options.interval, options.node.clone());
    let metrics_page = Arc::new(MetricsPage::default());
    // Ends with the runtime, which ends with this function.
    let _served = options
        .metrics
        .take()
        .map(|listener| serve_metrics(listener, &metrics_page))
        .transpose()?;
    let turns = options
        .turns
        .take()
        .map(|(socket, proc)| turns::serve(&socket, proc))
        .transpose()?;
    let (mut sampler, publisher) = start_sampler(options)?;
    let publisher =
        publisher.context("no extender to report to: give --extender https://HOST:PORT")?;
    let mut publisher = publisher.with_replica_timeout(PUBLISH_TIMEOUT);
    // Once for all turns: a signal between two of them would be lost on a listener that each turn makes anew.
    let mut terminate = signal(SignalKind::terminate()).context("no signal handler")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("no signal handler")?;
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last_missing = Vec::new();
    info!(%node, "reporting every {} ms", interval.as_millis());
    loop {
        let stop = async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        let round = async {
            ticks.tick().await;
            let begun = Instant::now();
            let Round {
                report,
                as_of,
                sensors,
                pods,
            } = sampler.run_round().await;
            if let Some((turns, _)) = &turns {
                turns.lock().advance(&pods, Instant::now());
            }
            metrics_page.record_round(&report, sensors, begun.elapsed());
            log_changes(&report.missing, &mut last_missing);
            publisher.publish(report, as_of).await;
            metrics_page.record_published(&publisher.state());
        };
        tokio::select! {
            () = round => {}
            () = stop => break,
        }
    }
    info!("stopped");
    Ok(())
}

/// Samples once, prints, and reports the result if a destination is given; an error if no replica accepts it.
pub async fn sample_once(
    options: AgentOptions,
    print: impl FnOnce(&NodeReport, &[PodOnNode]) -> Result<()>,
) -> Result<()> {
    let (mut rounds, publisher) = start_sampler(options)?;
    let (times, pause) = SINGLE_SAMPLE_ROUNDS;
    for _ in 1..times {
        rounds.run_round().await;
        tokio::time::sleep(pause).await;
    }
    let round = rounds.single_sample().await;
    print(&round.report, &round.pods)?;
    match publisher {
        Some(publisher) => report_once(publisher, round).await,
        None => Ok(()),
    }
}

/// Reports once, and prints the result on stderr.
async fn report_once(mut publisher: Publisher, round: Round) -> Result<()> {
    publisher.publish(round.report, round.as_of).await;
    let PublishState { replicas, problems } = publisher.state();
    let lines: Vec<String> = replicas
        .iter()
        .map(|(name, state)| format!("{name}: {}", state.latest))
        .collect();
    // Errors that a replica's line shows already are not repeated.
    let others = problems
        .iter()
        .filter(|problem| !lines.iter().any(|line| line.contains(problem.as_str())));
    for line in others.chain(&lines) {
        // If nobody reads standard error, the exit code still says it.
        let _ = writeln!(std::io::stderr(), "{line}");
    }
    let is_accepted = replicas
        .values()
        .any(|replica| replica.latest == PublishOutcome::Accepted);
    ensure!(is_accepted, "no extender accepted the report");
    Ok(())
}

fn start_sampler(options: AgentOptions) -> Result<(NodeSampler, Option<Publisher>)> {
    let AgentOptions {
        node,
        gpus,
        owners,
        pods,
        models,
        publisher,
        ..
    } = options;
    let engines = EngineWatcher::new(EngineLimits::default());
    let sources = ReportSources {
        gpus,
        owners,
        pods,
        models,
        engines,
    };
    let mut sampler = NodeSampler::new(node, boot_id(), sources).context("no thread")?;
    sampler.is_legacy_runtime =
        is_legacy_runtime(std::env::var("NVIDIA_VISIBLE_DEVICES").ok().as_deref());
    Ok((sampler, publisher))
}

fn serve_metrics(
    listener: TcpListener,
    metrics_page: &Arc<MetricsPage>,
) -> Result<AbortOnDropHandle<()>> {
    info!("metrics: http://{}/metrics", listener.local_addr()?);
    let listener = tokio::net::TcpListener::from_std(listener)?;
    Ok(AbortOnDropHandle::new(tokio::spawn(metrics_page::serve(
        listener,
        metrics_page.clone(),
    ))))
}

/// A random id of this start of the agent.
fn boot_id() -> String {
    // The standard library seeds each of these at random.
    let draw = || RandomState::new().hash_one(std::process::id());
    format!("{:016x}{:016x}", draw(), draw())
}

/// Logs what is missing when that changes, not each second.
fn log_changes(missing: &[MissingPart], last_missing: &mut Vec<MissingPart>) {
    for news in missing
        .iter()
        .filter(|missing| !last_missing.contains(missing))
    {
        warn!("missing: {}", print::missing_line(news));
    }
    let parts = |list: &[MissingPart]| -> BTreeSet<ReportPart> {
        list.iter().map(|missing| missing.part).collect()
    };
    for part in parts(last_missing).difference(&parts(missing)) {
        info!("no longer missing: {}", print::part_name(*part));
    }
    *last_missing = missing.to_vec();
}

//! The agents' latest report of each GPU: the board, read as an operator would read it. Nothing is written to it from here.

use stowage_report::EngineState;
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::policy::TelemetryRules;
use stowage_scheduling::units::{Micros, Moment};
use stowage_scheduling::vocabulary::node_reading::EngineLoad;
use stowage_server::extender::reports::Board;

/// The engines of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReportedEngines {
    pub engine_load: EngineLoad,
    /// One for each engine.
    pub states: Vec<EngineState>,
}

/// `None` where its node has not reported, or no engine is on it.
pub fn engines(board: &Board, node: &str, gpu: &str) -> Option<ReportedEngines> {
    let report = board.latest(&NodeName::parse(node).ok()?)?.report;
    let here = report
        .engines
        .iter()
        .filter(|engine| engine.gpus.iter().any(|uuid| uuid.as_str() == gpu));
    let states: Vec<EngineState> = here.map(|engine| engine.state).collect();
    let reading = report.reading(Moment::default(), TelemetryRules::default().fresh)?;
    let engine_load = reading
        .gpus
        .iter()
        .find(|gpu_reading| gpu_reading.uuid.as_str() == gpu)?
        .engine_load;
    (!states.is_empty()).then_some(ReportedEngines {
        engine_load,
        states,
    })
}

/// The number of a node's latest report.
pub fn sequence(board: &Board, node: &NodeName) -> Option<u64> {
    board.latest(node).map(|latest| latest.report.sequence)
}

/// The mean time per token of this pod's engine of late.
pub fn time_per_token(board: &Board, node: &str, pod: &PodUid) -> Option<Micros> {
    let report = board.latest(&NodeName::parse(node).ok()?)?.report;
    let engine = report.engines.iter().find(|engine| engine.pod == *pod)?;
    Some(engine.time_per_token?.mean)
}

/// Whether the agent has seen this pod's engine serve, and its figures.
pub fn is_serving(board: &Board, node: &str, pod: &PodUid) -> bool {
    let latest = NodeName::parse(node)
        .ok()
        .and_then(|node| board.latest(&node));
    latest.is_some_and(|latest| {
        latest.report.engines.iter().any(|engine| {
            engine.pod == *pod
                && engine.state == EngineState::Serving
                && engine.kv_cache_usage.is_some()
        })
    })
}

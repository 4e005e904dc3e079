//! `GET /v1/explain?pod=NAMESPACE/NAME`: why a pod is where it is, as `stowage explain` prints it. Read only.
//!
//! The ledger is locked for a few short reads. The work in between runs outside the lock, on a thread that does not answer
//! kube-scheduler.

use super::Extender;
use super::operators::{PageClient, with_slot};
use super::request::{BadRequest, json};
use super::server::PeerAddress;
use crate::service::{ServerState, WorkKind};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use stowage_scheduling::explaining::explanation::{OverAllocationPart, PodStage, StandbyPart};
use stowage_scheduling::explaining::remedy::RemedyChange;
use stowage_scheduling::explaining::{Explanation, PodAccess, ShownNodes, explain_for};
use stowage_scheduling::ids::{NodeName, PodKey};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExplainQuery {
    /// `NAMESPACE/NAME`, or the name of a pod in the namespace `default`.
    pod: String,
    /// Every node in detail.
    #[serde(default)]
    all: bool,
    /// This node only.
    node: Option<String>,
}

/// Why there is no explanation. The client gets the text.
#[derive(Debug, thiserror::Error)]
enum ExplainError {
    #[error(
        "{0}; write /v1/explain?pod=NAMESPACE/NAME, with &all=true for every node or &node=NAME for one"
    )]
    Query(String),
    #[error("pod is {0:?}; write NAMESPACE/NAME")]
    Pod(String),
    #[error("node is {0:?}, which is no node's name")]
    Node(String),
    #[error("the ledger is not complete yet: {0}")]
    NotSynced(&'static str),
    #[error(
        "Stowage knows no pod {0}. Look whether it exists and has not ended (`kubectl -n {namespace} get pod {name}`), whether \
         a container of it asks for stowage.dev/vram or a device plugin's GPU, and whether it can be understood: what is wrong with a pod stands in its \
         Events as StowageInvalidRequest (`kubectl -n {namespace} describe pod {name}`)",
        namespace = .0.namespace,
        name = .0.name
    )]
    UnknownPod(PodKey),
    #[error("Stowage failed on this pod, which is a defect of its own; its log says where")]
    Panicked,
}

impl IntoResponse for ExplainError {
    fn into_response(self) -> Response {
        let status = match self {
            Self::Query(_) | Self::Pod(_) | Self::Node(_) => StatusCode::BAD_REQUEST,
            Self::NotSynced(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::UnknownPod(_) => StatusCode::NOT_FOUND,
            Self::Panicked => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, format!("{self}\n")).into_response()
    }
}

pub async fn answer(
    State(extender): State<Extender>,
    source: Option<Extension<PeerAddress>>,
    headers: HeaderMap,
    query: Result<Query<ExplainQuery>, QueryRejection>,
) -> Response {
    let Query(query) = match query {
        Ok(query) => query,
        Err(rejection) => return ExplainError::Query(rejection.body_text()).into_response(),
    };
    let (key, options) = match parse_pod(&query).and_then(|key| Ok((key, parse_nodes(&query)?))) {
        Ok(understood) => understood,
        Err(unexplained) => return unexplained.into_response(),
    };
    let client = PageClient::new(source, headers);
    let admitted = async {
        let reader = extender
            .page_auth
            .pod_access(&client.headers, client.source, &key)
            .await?;
        Ok::<_, BadRequest>((reader, extender.take_slot(&extender.pages.small).await?))
    };
    let (reader, slot) = match admitted.await {
        Ok(admitted) => admitted,
        Err(refused) => return refused.into_response(),
    };
    match explain_pod(&extender, key, reader, options).await {
        Ok(explanation) => with_slot(json(StatusCode::OK, &explanation), slot),
        Err(unexplained) => unexplained.into_response(),
    }
}

fn parse_pod(query: &ExplainQuery) -> Result<PodKey, ExplainError> {
    let (namespace, name) = query.pod.split_once('/').unwrap_or(("default", &query.pod));
    PodKey::parse(namespace, name).map_err(|_| ExplainError::Pod(query.pod.clone()))
}

async fn explain_pod(
    extender: &Extender,
    key: PodKey,
    reader: PodAccess,
    options: ShownNodes,
) -> Result<Explanation, ExplainError> {
    let state = extender.state.clone();
    if let Some(reason) = state.leadership.reason_not_synced() {
        return Err(ExplainError::NotSynced(reason));
    }
    let named = key.clone();
    let explaining = move || {
        let mut cluster = state.cluster_copy();
        let uid = cluster.ledger().uid_of(&named)?;
        let explanation = explain_for(reader, &mut cluster, &uid, &options)?;
        let over_allocations = state.over_allocations().involving(&uid);
        let over_allocation_parts = over_allocations
            .iter()
            .map(|over_allocation| OverAllocationPart::for_reader(reader, &named, over_allocation))
            .collect();
        let explanation = Explanation {
            over_allocations: over_allocation_parts,
            ..explanation
        };
        Some(if state.leadership.is_leading() {
            explanation
        } else {
            with_standby_part(explanation, &state)
        })
    };
    let explaining = extender
        .state
        .heavy_work
        .with_panic_count(WorkKind::Page, explaining);
    let explained = tokio::task::spawn_blocking(explaining)
        .await
        .map_err(|_| ExplainError::Panicked)?;
    // A pod that ends meanwhile is unknown, too.
    explained.ok_or(ExplainError::UnknownPod(key))
}

/// The explanation as a standby gives it: without the next step, because only the leader knows what kube-scheduler asked.
fn with_standby_part(mut explanation: Explanation, state: &ServerState) -> Explanation {
    let leader = state.leadership.leader();
    let ask = match &leader {
        Some(leader) => {
            format!("ask the leader, {leader}: without --server, stowage explain asks it")
        }
        None => "no replica is known to hold the Lease; ask again in a few seconds".into(),
    };
    let text = format!(
        "this replica is on standby, and kube-scheduler asks the leader: which nodes it asked about, refusals and soft \
         reservations are not known here; {ask}"
    );
    if matches!(explanation.stage, PodStage::Waiting { .. }) {
        explanation
            .remedies
            .retain(|remedy| !is_leaders_next_step(&remedy.change));
    }
    explanation.standby = Some(StandbyPart {
        leader: leader.map(|leader| leader.to_string()),
        text,
    });
    explanation
}

fn is_leaders_next_step(change: &RemedyChange) -> bool {
    use RemedyChange::{NotAsked, NotBound, Requeued};
    matches!(change, NotAsked | NotBound { .. } | Requeued { .. })
}

fn parse_nodes(query: &ExplainQuery) -> Result<ShownNodes, ExplainError> {
    let node = query
        .node
        .as_deref()
        .map(|name| NodeName::parse(name).map_err(|_| ExplainError::Node(name.into())));
    Ok(match (node.transpose()?, query.all) {
        (Some(node), _) => ShownNodes::Node(node),
        (None, true) => ShownNodes::All,
        (None, false) => ShownNodes::default(),
    })
}

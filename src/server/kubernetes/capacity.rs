//! Maintains `stowage.dev/vram` in `node.status.capacity`: patches it where it differs from the sum over the node's GPUs.
//!
//! kube-scheduler, quotas and autoscalers count by it, and a kubelet that restarts re-admits its pods against it, so it is never
//! lowered below what is bound. What engines lend is added to it, so that kube-scheduler sees room for the pods that
//! borrow; those are bound, so that it is lowered only after they are gone. A difference is written once it has lasted for a
//! while; a node that advertises nothing is written at once. Placement does not read it. Nodes whose GPUs a device plugin or a
//! DRA driver allocates are left alone, and so are all nodes in shadow mode.

use super::index::{ClusterIndex, IndexedNode, NodeKind};
use super::request::within;
use crate::service::{ServerState, WorkKind};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use stowage_kubernetes_objects::VRAM;
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_scheduling::control_loop::retry::Backoff;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::ledger::{CapacityBasis, Ledger, NodesBaseline};
use stowage_scheduling::policy::Mode;
use stowage_scheduling::units::{Bytes, Millis, Moment};

/// How often due figures are written: a figure that pods wait for is late by about this much.
const RECONCILE_INTERVAL: Duration = Duration::from_secs(1);
/// How long a different figure must last before it replaces the advertised one. After a restart, labels are read before agents
/// report, and both are nearly right: a figure that goes down and up again helps no client.
const STABLE_BEFORE_WRITE: Millis = Millis::seconds(10);
/// How long a write may take to appear in the watch before it is repeated. With each repetition it gets longer: the watch may be
/// silent for minutes.
const WATCH_CONFIRMATION_BACKOFF: Backoff = Backoff {
    min: Millis::seconds(5),
    max: Millis::seconds(60),
};
/// Pauses after failed writes of one node: others go first.
const FAILED_WRITE_BACKOFF: Backoff = Backoff {
    min: Millis::seconds(1),
    max: Millis::seconds(60),
};
/// The largest quantity of an extended resource that the API can express.
const MAX_QUANTITY: Bytes = Bytes(i64::MAX as u64);
/// Concurrent writes: a thousand new nodes take seconds, and the load on the API server stays small.
const MAX_CONCURRENT_WRITES: usize = 8;
/// A round begins writes for this long; what is left is decided again. A figure that was decided earlier may be below what is bound
/// by now.
const ROUND_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs until it is dropped.
pub async fn run(
    client: Client,
    state: Arc<ServerState>,
    index: Arc<Mutex<ClusterIndex>>,
    times: WriteTimes,
) {
    let nodes: Api<Node> = Api::all(client);
    let mut capacity = CapacityWriter::default();
    loop {
        tokio::time::sleep(RECONCILE_INTERVAL).await;
        if !state.leadership.is_open() {
            capacity = CapacityWriter::default();
            continue;
        }
        // After a change of policy all nodes are looked at, which takes a second of tens of thousands.
        let (reconciler_service, reconciler_index) = (state.clone(), index.clone());
        let reconciliation = state
            .heavy_work
            .spawn_in_background(WorkKind::Capacity, move || {
                let due = capacity.due_writes(
                    &reconciler_service,
                    &reconciler_index,
                    reconciler_service.now(),
                );
                (capacity, due)
            });
        capacity = match reconciliation.await {
            Ok((mut writer, due)) => {
                writer.write(&state, &nodes, due, times.client).await;
                writer
            }
            Err(error) => {
                tracing::error!(%error, "the capacity of nodes was not reconciled; the next round retries");
                CapacityWriter::default()
            }
        };
    }
}

/// Inputs to the VRAM that a node should advertise, and the VRAM that it advertises.
#[derive(Debug, Clone, Copy)]
struct NodeCapacityState {
    /// From its labels and capacity, and its pool in the policy.
    kind: NodeKind,
    advertised: Option<Bytes>,
    /// Total VRAM of its GPUs, healthy or not.
    gpu_vram: Bytes,
    /// VRAM that its engines lend, in addition to `gpu_vram`: borrowing pods count beside the lenders' grants.
    lent_vram: Bytes,
    /// VRAM of pods that are bound or assumed there.
    allocated_vram: Bytes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CapacityAction {
    /// It advertises the right figure, or the right figure is unknown.
    Keep,
    Advertise(Bytes),
    /// A device plugin or a DRA driver allocates its GPUs: it is left alone.
    AllocatedElsewhere,
}

fn capacity_action(state: &NodeCapacityState) -> CapacityAction {
    let NodeCapacityState {
        kind,
        advertised,
        gpu_vram: gpus,
        lent_vram: lent,
        allocated_vram: reserved,
    } = *state;
    // A bound pod with an invalid request counts as more than a quantity can express.
    let bound = if reserved > MAX_QUANTITY {
        advertised.unwrap_or_default()
    } else {
        reserved
    };
    let wanted = (gpus + lent).max(bound);
    match kind {
        // Without a GPU nothing is known: after a restart an agent has yet to report.
        _ if gpus == Bytes::ZERO => CapacityAction::Keep,
        NodeKind::DevicePlugin | NodeKind::Dra => CapacityAction::AllocatedElsewhere,
        NodeKind::Stowage if advertised == Some(wanted) => CapacityAction::Keep,
        NodeKind::Stowage => CapacityAction::Advertise(wanted),
    }
}

#[derive(Debug, Default)]
struct CapacityWriter {
    /// Nodes that advertise the wrong figure.
    pending: BTreeMap<NodeName, PendingPatch>,
    /// Nodes whose GPUs something else allocates, reported already.
    reported: BTreeSet<NodeName>,
    /// The nodes at the last check: only those that have changed since are checked again.
    checked_nodes: Option<NodesBaseline>,
}

/// A node that advertises the wrong figure: what to write, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PendingPatch {
    wanted: Bytes,
    /// The figure that the watch shows now.
    advertised: Option<Bytes>,
    not_before: Moment,
    /// Consecutive failed writes.
    failed_writes: u32,
    /// Successful writes that the watch has not shown yet.
    unconfirmed_writes: u32,
}

impl PendingPatch {
    /// Counts a write, and returns the pause before the next one.
    fn pause_after(&mut self, is_written: bool) -> Millis {
        if is_written {
            self.failed_writes = 0;
            self.unconfirmed_writes = self.unconfirmed_writes.saturating_add(1);
            WATCH_CONFIRMATION_BACKOFF.pause_after(self.unconfirmed_writes - 1)
        } else {
            self.failed_writes = self.failed_writes.saturating_add(1);
            FAILED_WRITE_BACKOFF.pause_after(self.failed_writes - 1)
        }
    }
}

impl CapacityWriter {
    /// The figures to write now: those that pods wait for, then the others, each from the longest due.
    fn due_writes(
        &mut self,
        state: &ServerState,
        index: &Mutex<ClusterIndex>,
        now: Moment,
    ) -> Vec<(NodeName, Bytes)> {
        let ledger = state.scratch_ledger();
        if ledger.policy().mode == Mode::Shadow {
            *self = Self::default();
            return Vec::new();
        }
        // A statement of its own, so that the lock is released with it.
        let nodes = self.nodes_to_check(&ledger, &mut index.lock());
        let mut due = Vec::new();
        for (name, record) in &nodes {
            let node_capacity = node_capacity_state(&ledger, name, *record);
            match capacity_action(&node_capacity) {
                CapacityAction::Keep => drop(self.pending.remove(name)),
                CapacityAction::AllocatedElsewhere => {
                    self.report_other_allocator(&ledger, name, &node_capacity)
                }
                CapacityAction::Advertise(wanted) => {
                    let is_lent = node_capacity.lent_vram > Bytes::ZERO
                        && record.advertised_vram < Some(wanted);
                    // What engines lend was watched for a while already, and nothing borrows before the node advertises it.
                    if self.is_due(
                        name,
                        wanted,
                        record.advertised_vram.filter(|_| !is_lent),
                        now,
                    ) {
                        due.push((name.clone(), wanted));
                    }
                }
            }
        }
        self.checked_nodes = Some(ledger.nodes_baseline());
        // A round may end before the last: nodes whose writes fail must not come first again.
        due.sort_by_key(|(name, _)| {
            let pending = &self.pending[name];
            (!advertises_nothing(pending.advertised), pending.not_before)
        });
        due
    }

    /// The nodes that have changed since the last check, and those that still advertise the wrong figure. Forgets nodes that are
    /// gone.
    fn nodes_to_check(
        &mut self,
        ledger: &Ledger,
        index: &mut ClusterIndex,
    ) -> Vec<(NodeName, IndexedNode)> {
        self.pending
            .retain(|name, _| index.nodes().contains_key(name));
        self.reported
            .retain(|name| index.nodes().contains_key(name));
        let mut names = index.take_changed_nodes();
        let Some(earlier) = &self.checked_nodes else {
            return index
                .nodes()
                .iter()
                .map(|(name, record)| (name.clone(), *record))
                .collect();
        };
        names.extend(ledger.nodes_changed_since(earlier).cloned());
        names.extend(self.pending.keys().cloned());
        let records = names.into_iter().filter_map(|name| {
            let record = *index.nodes().get(&name)?;
            Some((name, record))
        });
        records.collect()
    }

    fn is_due(
        &mut self,
        name: &NodeName,
        wanted: Bytes,
        advertised: Option<Bytes>,
        now: Moment,
    ) -> bool {
        let is_unadvertised = advertises_nothing(advertised);
        let fresh = PendingPatch {
            wanted,
            advertised,
            not_before: if is_unadvertised {
                now
            } else {
                now + STABLE_BEFORE_WRITE
            },
            failed_writes: 0,
            unconfirmed_writes: 0,
        };
        let pending = self.pending.entry(name.clone()).or_insert(fresh);
        if pending.wanted != wanted {
            *pending = fresh;
        } else if pending.advertised != advertised {
            pending.advertised = advertised;
            if pending.unconfirmed_writes > 0 && pending.failed_writes == 0 {
                // The last write landed, and something else has set the figure since.
                let soon = if is_unadvertised {
                    now
                } else {
                    now + WATCH_CONFIRMATION_BACKOFF.min
                };
                *pending = PendingPatch {
                    not_before: pending.not_before.min(soon),
                    ..fresh
                };
            }
        }
        now >= pending.not_before
    }

    fn report_other_allocator(
        &mut self,
        ledger: &Ledger,
        name: &NodeName,
        state: &NodeCapacityState,
    ) {
        self.pending.remove(name);
        if !self.reported.insert(name.clone()) {
            return;
        }
        let by = if state.kind == NodeKind::Dra {
            "a DRA driver"
        } else {
            "a device plugin"
        };
        let figure = match state
            .advertised
            .filter(|advertised| *advertised > Bytes::ZERO)
        {
            // The kubelet that restarts would fail pods for which a lower figure leaves no room.
            Some(advertised) => format!("stays at {advertised}, and no pod is placed there"),
            None => "is not advertised, and reports only inform scores".into(),
        };
        let owner = ledger
            .node(name)
            .and_then(|node| node.warnings.first())
            .map(ToString::to_string);
        tracing::info!(
            node = %name,
            owner,
            "the node has GPUs that {by} allocates: {VRAM} {figure}. Remove it from the node to let Stowage allocate them"
        );
    }

    async fn write(
        &mut self,
        state: &ServerState,
        nodes: &Api<Node>,
        due: Vec<(NodeName, Bytes)>,
        limit: Duration,
    ) {
        let due = futures::stream::iter(due).take_until(tokio::time::sleep(ROUND_TIMEOUT));
        let writes = due.map(async |(name, wanted)| {
            let written = patch(state, nodes, &name, wanted, limit).await;
            (name, written)
        });
        let outcomes: Vec<(NodeName, Result<(), String>)> = writes
            .buffer_unordered(MAX_CONCURRENT_WRITES)
            .collect()
            .await;
        for (name, outcome) in outcomes {
            self.record_outcome(state, &name, outcome);
        }
    }

    fn record_outcome(
        &mut self,
        state: &ServerState,
        name: &NodeName,
        outcome: Result<(), String>,
    ) {
        let code = if outcome.is_ok() { "written" } else { "failed" };
        state
            .metrics
            .writes
            .with_label_values(&["capacity", code])
            .inc();
        if let Err(error) = &outcome {
            tracing::warn!(node = %name, %error, "the capacity was not patched");
        }
        let now = state.now();
        if let Some(pending) = self.pending.get_mut(name) {
            if outcome.is_ok() && pending.failed_writes > 0 {
                tracing::info!(node = %name, failures = pending.failed_writes, "the capacity was patched in the end");
            }
            pending.not_before = now + pending.pause_after(outcome.is_ok());
        }
    }
}

fn advertises_nothing(advertised: Option<Bytes>) -> bool {
    advertised.is_none_or(|advertised| advertised == Bytes::ZERO)
}

fn node_capacity_state(ledger: &Ledger, name: &NodeName, record: IndexedNode) -> NodeCapacityState {
    let unknown = CapacityBasis {
        kind: record.kind,
        ..CapacityBasis::default()
    };
    let CapacityBasis {
        kind,
        gpus,
        lent,
        requested: reserved,
    } = ledger.capacity_basis(name).unwrap_or(unknown);
    NodeCapacityState {
        kind,
        advertised: record.advertised_vram,
        gpu_vram: gpus,
        lent_vram: lent,
        allocated_vram: reserved,
    }
}

async fn patch(
    state: &ServerState,
    nodes: &Api<Node>,
    name: &NodeName,
    wanted: Bytes,
    limit: Duration,
) -> Result<(), String> {
    // There may be many nodes before this one, and the Lease may have passed to another replica meanwhile.
    if let Some(reason) = state.leadership.reason_not_leading() {
        return Err(reason.into());
    }
    let patch = Patch::Merge(
        serde_json::json!({ "status": { "capacity": { VRAM: wanted.0.to_string() } } }),
    );
    let params = PatchParams::default();
    let answer = within(limit, nodes.patch_status(name.as_str(), &params, &patch)).await;
    answer.map(drop).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use stowage_scheduling::policy::{Policy, Pool};

    const GIB: u64 = 1 << 30;

    #[test]
    fn what_is_lent_raises_capacity_and_what_is_still_borrowed_keeps_it_from_falling() {
        let capacity_state = says(NodeKind::Stowage, Some(160 * GIB), 160 * GIB, 150 * GIB);
        let lending = NodeCapacityState {
            lent_vram: Bytes::gib(50),
            ..capacity_state
        };
        assert_eq!(
            capacity_action(&lending),
            CapacityAction::Advertise(Bytes::gib(210))
        );
        let borrowed = says(NodeKind::Stowage, Some(210 * GIB), 160 * GIB, 190 * GIB);
        assert_eq!(
            capacity_action(&borrowed),
            CapacityAction::Advertise(Bytes::gib(190))
        );
    }

    /// A node with two GPUs, which advertises nothing, in the pool of this label.
    fn node_in(name: &str, pool: &str) -> Node {
        let labels = serde_json::json!({
            "nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": "H100", "pool": pool,
        });
        let metadata = serde_json::json!({ "name": name, "labels": labels });
        serde_json::from_value(serde_json::json!({ "metadata": metadata })).unwrap()
    }

    fn says(
        kind: NodeKind,
        advertised: Option<u64>,
        gpus: u64,
        reserved: u64,
    ) -> NodeCapacityState {
        NodeCapacityState {
            kind,
            advertised: advertised.map(Bytes),
            gpu_vram: Bytes(gpus),
            lent_vram: Bytes::ZERO,
            allocated_vram: Bytes(reserved),
        }
    }

    proptest! {
        #[test]
        fn capacity_is_never_advertised_below_what_is_bound(
            advertised in proptest::option::of(0u64..10),
            gpus in 0u64..10,
            reserved in 0u64..10,
        ) {
            match capacity_action(&says(NodeKind::Stowage, advertised, gpus, reserved)) {
                CapacityAction::Advertise(wanted) => {
                    prop_assert!(wanted >= Bytes(reserved) && wanted >= Bytes(gpus));
                    prop_assert_ne!(Some(wanted), advertised.map(Bytes));
                }
                CapacityAction::Keep => prop_assert!(gpus == 0 || advertised == Some(gpus.max(reserved))),
                CapacityAction::AllocatedElsewhere => prop_assert!(false, "the node is Stowage's"),
            }
        }
    }

    #[test]
    fn a_lost_gpu_lowers_capacity_to_what_is_bound_and_no_further() {
        let capacity_state = says(NodeKind::Stowage, Some(160 * GIB), 80 * GIB, 100 * GIB);
        assert_eq!(
            capacity_action(&capacity_state),
            CapacityAction::Advertise(Bytes::gib(100))
        );
    }

    #[test]
    fn a_bound_pod_that_cannot_be_understood_keeps_capacity_from_falling_and_does_not_raise_it() {
        let capacity_state = says(NodeKind::Stowage, Some(90 * GIB), 80 * GIB, u64::MAX);
        assert_eq!(capacity_action(&capacity_state), CapacityAction::Keep);
        let capacity_state = says(NodeKind::Stowage, None, 80 * GIB, u64::MAX);
        assert_eq!(
            capacity_action(&capacity_state),
            CapacityAction::Advertise(Bytes::gib(80))
        );
    }

    #[test]
    fn a_node_without_a_known_gpu_is_left_as_it_is() {
        for advertised in [None, Some(0), Some(160 * GIB)] {
            assert_eq!(
                capacity_action(&says(NodeKind::Stowage, advertised, 0, 40 * GIB)),
                CapacityAction::Keep
            );
            assert_eq!(
                capacity_action(&says(NodeKind::DevicePlugin, advertised, 0, 0)),
                CapacityAction::Keep
            );
        }
    }

    #[test]
    fn a_device_plugin_node_is_never_advertised_on() {
        assert_eq!(
            capacity_action(&says(NodeKind::DevicePlugin, None, 80 * GIB, 0)),
            CapacityAction::AllocatedElsewhere
        );
        assert_eq!(
            capacity_action(&says(NodeKind::DevicePlugin, Some(1), 80 * GIB, 0)),
            CapacityAction::AllocatedElsewhere
        );
        assert_eq!(
            capacity_action(&says(NodeKind::Dra, None, 80 * GIB, 0)),
            CapacityAction::AllocatedElsewhere
        );
    }

    #[test]
    fn only_stowages_nodes_are_advertised_on_and_none_in_shadow_mode() {
        let due = |mode| {
            let pool = Pool {
                selector: BTreeMap::from([("pool".into(), "plugin".into())]),
                allocator: NodeKind::DevicePlugin,
                ..Pool::new("plugin")
            };
            let mut policy = Policy::default().with_pools(vec![pool]).unwrap();
            policy.mode = mode;
            let state = ServerState::new(policy);
            let mut index = ClusterIndex::default();
            index.replace_nodes(&state, &[node_in("a", "own"), node_in("b", "plugin")]);
            let due = CapacityWriter::default().due_writes(&state, &Mutex::new(index), state.now());
            due.into_iter()
                .map(|(name, _)| name.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            due(Mode::Enforce),
            ["a"],
            "the policy says that a plugin hands out b's"
        );
        assert!(due(Mode::Shadow).is_empty());
    }

    #[test]
    fn a_missing_figure_is_written_at_once_and_a_different_one_once_it_has_settled() {
        let mut capacity = CapacityWriter::default();
        let (a, b) = (NodeName::parse("a").unwrap(), NodeName::parse("b").unwrap());
        let at = |seconds| Moment(0) + Millis::seconds(seconds);
        assert!(capacity.is_due(&a, Bytes::gib(80), None, at(0)));
        let old = Some(Bytes::gib(90));
        assert!(!capacity.is_due(&b, Bytes::gib(80), old, at(0)));
        assert!(
            !capacity.is_due(&b, Bytes::gib(79), old, at(9)),
            "it moves, so it has not settled"
        );
        assert!(!capacity.is_due(&b, Bytes::gib(79), old, at(18)));
        assert!(capacity.is_due(&b, Bytes::gib(79), old, at(19)));
    }

    #[test]
    fn another_advertised_figure_shortens_only_the_pause_after_a_successful_write() {
        let state = ServerState::with_stopped_clock(Policy::default());
        let (node, now, wanted) = (NodeName::parse("a").unwrap(), state.now(), Bytes::gib(80));
        let (before, after) = (Some(Bytes::gib(90)), Some(Bytes::gib(91)));
        let at = |seconds| now + Millis::seconds(seconds);
        let mut settling = CapacityWriter::default();
        assert!(!settling.is_due(&node, wanted, before, at(0)));
        let is_due = |seconds: &u64| settling.is_due(&node, wanted, after, at(*seconds));
        assert_eq!((0..60).find(is_due), Some(10));
        let mut failing = CapacityWriter::default();
        failing.is_due(&node, wanted, before, at(0));
        (0..7).for_each(|_| failing.record_outcome(&state, &node, Err("503".into())));
        let is_due = |seconds: &u64| failing.is_due(&node, wanted, after, at(*seconds));
        assert_eq!((0..600).find(is_due), Some(60));
    }

    #[test]
    fn a_node_that_advertises_nothing_is_written_before_those_that_advertise_another_figure() {
        let node = |name: &str, capacity: serde_json::Value| {
            let mut node = node_in(name, "own");
            node.status =
                serde_json::from_value(serde_json::json!({ "capacity": capacity })).unwrap();
            node
        };
        let other = || serde_json::json!({ VRAM: "40Gi" });
        let nodes = [
            node("a", other()),
            node("b", other()),
            node("c", serde_json::json!({})),
            node("d", other()),
        ];
        let state = ServerState::with_stopped_clock(Policy::default());
        let mut index = ClusterIndex::default();
        index.replace_nodes(&state, &nodes);
        let (mut capacity, index) = (CapacityWriter::default(), Mutex::new(index));
        let mut due = |now| {
            let due = capacity
                .due_writes(&state, &index, now)
                .into_iter()
                .map(|(name, _)| name.to_string());
            due.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(due(state.now()), "c");
        assert_eq!(due(state.now() + STABLE_BEFORE_WRITE), "c a b d");
    }

    #[test]
    fn a_node_whose_writes_fail_lets_others_go_first() {
        let state = ServerState::with_stopped_clock(Policy::default());
        let mut index = ClusterIndex::default();
        index.replace_nodes(&state, &[node_in("a", "own"), node_in("b", "own")]);
        let (mut capacity, index) = (CapacityWriter::default(), Mutex::new(index));
        let names = |due: Vec<(NodeName, Bytes)>| {
            due.into_iter()
                .map(|(name, _)| name.to_string())
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            names(capacity.due_writes(&state, &index, state.now())),
            "a b"
        );
        // The round ended before b's turn.
        capacity.record_outcome(
            &state,
            &NodeName::parse("a").unwrap(),
            Err("timed out".into()),
        );
        assert_eq!(
            names(capacity.due_writes(&state, &index, state.now() + FAILED_WRITE_BACKOFF.min)),
            "b a"
        );
    }

    /// What is written was decided at the last look.
    #[tokio::test(start_paused = true)]
    async fn a_slow_api_server_does_not_delay_the_next_round() {
        let written = async |answer_takes: Duration| {
            let requests = Arc::new(AtomicUsize::new(0));
            let counted = requests.clone();
            let server = tower::service_fn(move |_: http::Request<kube::client::Body>| {
                counted.fetch_add(1, Ordering::Relaxed);
                async move {
                    tokio::time::sleep(answer_takes).await;
                    Ok::<_, std::io::Error>(http::Response::new(kube::client::Body::from(
                        b"{}".to_vec(),
                    )))
                }
            });
            let nodes: Api<Node> = Api::all(Client::new(server, "default"));
            let state = ServerState::with_stopped_clock(Policy::default());
            state.lead_from_the_start();
            state.record_synced(
                state.leadership.list_generation(),
                state.leadership.takeover(),
            );
            let due =
                (0..5000).map(|at| (NodeName::parse(&format!("n{at}")).unwrap(), Bytes::gib(80)));
            let begun = tokio::time::Instant::now();
            CapacityWriter::default()
                .write(&state, &nodes, due.collect(), Duration::from_secs(5))
                .await;
            (requests.load(Ordering::Relaxed), begun.elapsed().as_secs())
        };
        let (requests, seconds) = written(Duration::from_millis(900)).await;
        assert!(
            (40..=56).contains(&requests) && (5..=6).contains(&seconds),
            "{requests} in {seconds} s"
        );
        let (requests, seconds) = written(Duration::from_secs(60)).await;
        assert!(
            (8..=16).contains(&requests) && (5..=10).contains(&seconds),
            "{requests} in {seconds} s"
        );
    }

    #[test]
    fn after_a_failure_a_node_is_left_alone_for_longer_each_time() {
        let (wanted, advertised) = (Bytes::gib(80), None);
        let mut pending = PendingPatch {
            wanted,
            advertised,
            not_before: Moment(0),
            failed_writes: 0,
            unconfirmed_writes: 0,
        };
        let pauses: Vec<u64> = (0..8)
            .map(|_| pending.pause_after(false).0 / 1000)
            .collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        let state = ServerState::new(Policy::default());
        let mut capacity = CapacityWriter::default();
        let node = NodeName::parse("a").unwrap();
        let now = state.now();
        assert!(capacity.is_due(&node, Bytes::gib(80), None, now));
        capacity.record_outcome(&state, &node, Err("503".into()));
        assert!(!capacity.is_due(&node, Bytes::gib(80), None, now));
        assert!(capacity.is_due(
            &node,
            Bytes::gib(80),
            None,
            state.now() + FAILED_WRITE_BACKOFF.min
        ));
    }

    #[test]
    fn a_figure_shown_after_a_silent_watch_is_corrected_without_a_longer_pause() {
        let state = ServerState::with_stopped_clock(Policy::default());
        let (node, now, wanted) = (NodeName::parse("a").unwrap(), state.now(), Bytes::gib(80));
        let (before, long_after) = (Some(Bytes::gib(40)), now + Millis::seconds(600));
        for (shown, seconds) in [(None, 0), (Some(Bytes::ZERO), 0), (Some(Bytes::gib(20)), 5)] {
            let mut capacity = CapacityWriter::default();
            capacity.is_due(&node, wanted, before, now);
            for _ in 0..5 {
                assert!(capacity.is_due(&node, wanted, before, long_after));
                capacity.record_outcome(&state, &node, Ok(()));
            }
            assert!(!capacity.is_due(&node, wanted, before, now + Millis::seconds(59)));
            let is_due =
                |after: &u64| capacity.is_due(&node, wanted, shown, now + Millis::seconds(*after));
            assert_eq!((0..600).find(is_due), Some(seconds), "{shown:?}");
        }
    }

    /// A watch may be silent for minutes.
    #[test]
    fn a_write_that_the_watch_does_not_show_is_repeated_ever_more_rarely() {
        let state = ServerState::with_stopped_clock(Policy::default());
        let mut capacity = CapacityWriter::default();
        let node = NodeName::parse("a").unwrap();
        let now = state.now();
        let mut pauses = Vec::new();
        for _ in 0..6 {
            assert!(capacity.is_due(&node, Bytes::gib(80), None, now + Millis::seconds(600)));
            capacity.record_outcome(&state, &node, Ok(()));
            let is_due = |seconds: &u64| {
                capacity.is_due(&node, Bytes::gib(80), None, now + Millis::seconds(*seconds))
            };
            pauses.push((0..600).find(is_due).unwrap());
        }
        assert_eq!(pauses, [5, 10, 20, 40, 60, 60]);
    }
}

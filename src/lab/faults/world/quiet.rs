//! The end of a history: everything works again, nothing new comes, and what is on its way lands. Then what can be bound has to
//! be bound, and nothing may be left of what is over.

use super::super::oracle::{
    ALLOCATABLE_BYTES, PodShare, allocations, beyond_capacity, doubly_reserved, is_engine,
    repairable_over_allocations, requested_gpus, requests_exclusive, reservations_by_pod,
    shown_reservation,
};
use super::observations::audit_count;
use super::pods::{GROUP_SIZE, is_group_member};
use super::*;
use serde_json::json;
use stowage_scheduling::ledger::{PodPhase, ReservationStatus};
use stowage_scheduling::vocabulary::placement::Reservation;

/// A pod that fits for so long without a fault, and is asked for by kube-scheduler at every step, is bound. It has to wait for a
/// leader, for late writes and for reservations that end by their deadline.
const BIND_TIMEOUT: Duration = Duration::from_secs(100);

/// Beyond the second sweep after a pod's end, nothing is left of a request about it.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(125);

/// A reservation lasts little longer than a minute. Writes that failed before all was quiet are written again within the first.
const CONDITION_TIMEOUT: Duration = Duration::from_secs(45);
/// Writes that failed for long before all was quiet are written again after a minute.
const REWRITE_TIMEOUT: Duration = Duration::from_secs(90);

/// What a kube-scheduler without a backlog takes for all of its pods.
const SCHEDULING_ROUND: Duration = Duration::from_secs(1);

/// When each problem of the quiet period was first found.
#[derive(Default)]
pub(crate) struct QuietChecks {
    /// Since when each waiting pod has fitted somewhere, by name.
    fits_since: BTreeMap<String, Instant>,
    /// Since when each condition that is not so has stood, in words.
    untrue_since: BTreeMap<String, Instant>,
}

impl FaultyCluster {
    pub(super) async fn run_quiet_period(&mut self) {
        let quiet = Instant::now();
        self.log("from here on all is quiet".into());
        self.is_quiet = true;
        self.api.faults().clear();
        self.recover_agents();
        self.restore_policy();
        (0..HOSTS.len()).for_each(|host| clock::set_wall_clock_ahead(host, 0));
        let mut watch = QuietChecks::default();
        while quiet.elapsed() < QUIET_PERIOD && self.violations.is_empty() {
            self.reconnects.iter_mut().for_each(|(at, _)| *at = quiet);
            self.token_renewals
                .iter_mut()
                .for_each(|(at, _)| *at = quiet);
            self.watch_resumes
                .iter_mut()
                .for_each(|(at, ..)| *at = quiet);
            self.replica_returns_at
                .iter_mut()
                .flatten()
                .for_each(|at| *at = quiet);
            self.node_returns_at
                .iter_mut()
                .flatten()
                .for_each(|at| *at = quiet);
            self.recreate_nodes();
            self.restore_connections_and_replicas();
            self.schedule_all();
            self.run_pods(false);
            tokio::time::sleep(SCHEDULING_ROUND).await;
            self.advance_and_check();
            self.check_waiting(&mut watch);
            self.check_conditions(&mut watch);
        }
        if self.violations.is_empty() {
            self.check_final_state();
        }
    }

    /// Pods that fit by the objects alone, and are not bound.
    fn check_waiting(&mut self, watch: &mut QuietChecks) {
        let pods = self.pods_on_machines();
        let promises = allocations(&pods);
        let active: Vec<Arc<Value>> = pods
            .iter()
            .filter(|pod| !is_past_deadline(pod))
            .cloned()
            .collect();
        let held = reservations_by_pod(&active);
        let waiting = self.waiting_pods();
        let fits = |pod: &Value| (0..self.nodes).find(|n| self.fits(pod, *n, &promises, &held));
        let fitting: BTreeMap<String, usize> = waiting
            .iter()
            .filter(|pod| !is_group_member(pod))
            .filter_map(|pod| Some((pod_name(pod), fits(pod)?)))
            .collect();
        watch.fits_since.retain(|pod, _| fitting.contains_key(pod));
        for (pod, node) in fitting {
            let since = *watch
                .fits_since
                .entry(pod.clone())
                .or_insert_with(Instant::now);
            if since.elapsed() >= BIND_TIMEOUT {
                self.fail(format!(
                    "{pod} fits on {} for {BIND_TIMEOUT:?} of quiet, and is not bound",
                    node_name(node)
                ));
            }
        }
    }

    /// Conditions that say something else than what is so.
    fn check_conditions(&mut self, watch: &mut QuietChecks) {
        let pods = self.pods();
        let unshown = self
            .unshown_reservations(&pods)
            .into_iter()
            .map(|what| (what, CONDITION_TIMEOUT));
        let unwanted = unwanted_evictions(&pods).map(|what| (what, REWRITE_TIMEOUT));
        let ended = ended_reservations(&pods).map(|what| (what, REWRITE_TIMEOUT));
        let untrue: BTreeMap<String, Duration> = unshown.chain(unwanted).chain(ended).collect();
        watch
            .untrue_since
            .retain(|what, _| untrue.contains_key(what));
        for (what, lasts) in untrue {
            let since = *watch
                .untrue_since
                .entry(what.clone())
                .or_insert_with(Instant::now);
            if since.elapsed() >= lasts {
                self.fail(format!("{what} for {lasts:?} of quiet"));
            }
        }
    }

    /// Reservations with victims that the leader knows, and that their pods do not show. That a pod is gone, or was bound by a late
    /// write, it may not know yet; and nothing of pods while its watch is silent.
    fn unshown_reservations(&self, pods: &[Arc<Value>]) -> Vec<String> {
        let there: BTreeMap<&str, Option<Value>> = pods
            .iter()
            .filter(|pod| !pod["spec"]["nodeName"].is_string())
            .filter_map(|pod| Some((pod["metadata"]["uid"].as_str()?, shown_reservation(pod))))
            .collect();
        let acting = self
            .acting_replica()
            .and_then(|acting| self.replicas[acting].as_ref());
        let acting =
            acting.filter(|replica| !self.late_reservations.hides_pods_from(&replica.client));
        let reservations = acting
            .map(|replica| replica.state.cluster().ledger().reservation_statuses())
            .unwrap_or_default();
        let lacks = |status: &&ReservationStatus| {
            let Reservation {
                node,
                devices,
                victims,
                ..
            } = &status.reservation;
            let expected = json!({ "node": node, "devices": devices, "victims": victims });
            let is_it = |shown: &Value| {
                ["node", "devices", "victims"]
                    .iter()
                    .all(|it| shown[*it] == expected[*it])
            };
            there
                .get(status.uid.as_str())
                .is_some_and(|shown| !shown.as_ref().is_some_and(is_it))
        };
        let unshown = reservations
            .iter()
            .filter(|status| !status.reservation.victims.is_empty())
            .filter(lacks);
        let words = |status: &ReservationStatus| {
            let victims = status.reservation.victims.len();
            format!(
                "{} does not show its reservation on {} of {victims}",
                status.key.name, status.reservation.node
            )
        };
        unshown.map(words).collect()
    }

    /// Whether a node has GPUs for the pod: free of other pods' grants and reservations, and of memory of ended pods.
    fn fits(
        &self,
        pod: &Value,
        n: usize,
        promises: &BTreeMap<String, Vec<PodShare>>,
        held: &BTreeMap<String, Vec<String>>,
    ) -> bool {
        let (gpus, bytes) = requested_gpus(pod);
        let this_pod = pod_name(pod);
        let has_free_vram = |gpu: &usize| {
            let gpu_name = format!("{}/{gpu}", node_name(n));
            let parts = promises.get(&gpu_name).map_or(&[][..], Vec::as_slice);
            let is_reserved = held
                .iter()
                .any(|(holder, gpus)| *holder != this_pod && gpus.contains(&gpu_name));
            let has_left_over = self
                .machines
                .processes_on(&node_name(n), *gpu)
                .any(|(_, process)| process.ended_and_freed.is_some());
            let used: u64 = parts.iter().map(|part| part.bytes).sum();
            let has_start = self.features.has_engines && parts.iter().any(|part| part.is_starting);
            let is_alone = parts.iter().any(|part| part.is_exclusive);
            let is_taken = is_reserved || has_left_over || is_alone || has_start && is_engine(pod);
            !is_taken
                && used + bytes <= ALLOCATABLE_BYTES
                && (parts.is_empty() || !requests_exclusive(pod))
        };
        (0..GPUS).filter(has_free_vram).count() as u64 >= gpus
    }

    fn check_final_state(&mut self) {
        let pods = self.pods_on_machines();
        let held_twice = doubly_reserved(&pods);
        if !held_twice.is_empty() {
            self.fail(format!("held twice, and nobody ends it: {held_twice:?}"));
        }
        let mendable = repairable_over_allocations(&pods);
        if !mendable.is_empty() {
            self.fail(format!("promised twice, and nobody leaves: {mendable:?}"));
        }
        self.check_leftovers(&pods);
        self.count_groups(&pods);
        let Some(acting) = self.acting_replica() else {
            return self.fail(format!("no replica acts after {QUIET_PERIOD:?} of quiet"));
        };
        let replica = self.replicas[acting].as_ref().expect("it acts");
        let twice = beyond_capacity(&pods);
        let found = audit_count(replica, "stowage_gpu_conflicts");
        let listed = self.pods();
        let existing: BTreeSet<&str> = listed
            .iter()
            .filter_map(|pod| pod["metadata"]["uid"].as_str())
            .collect();
        let gone: Vec<String> = {
            let cluster = replica.state.cluster();
            let pods = cluster.ledger().pod_states().into_iter();
            let gone = pods.filter(|(uid, pod)| {
                let late = matches!(pod.phase, PodPhase::Waiting(_))
                    && self.is_recently_deleted(uid.as_str());
                !existing.contains(uid.as_str()) && !late
            });
            gone.map(|(uid, pod)| format!("{} {uid} {:?}", pod.key, pod.phase))
                .collect()
        };
        if !twice.is_empty() && found == 0 {
            self.fail(format!(
                "promised beyond what there is, and not reported: {twice:?}"
            ));
        }
        // What ended pods leave behind would grow without bound.
        if !gone.is_empty() {
            self.fail(format!("the ledger knows pods that are gone: {gone:?}"));
        }
    }

    /// A request of kube-scheduler may come after the pod's end; two sweeps later what it left has ended.
    fn is_recently_deleted(&self, uid: &str) -> bool {
        self.deleted_at
            .get(uid)
            .is_some_and(|at| at.elapsed() < CLEANUP_TIMEOUT)
    }

    /// Groups of which nobody was deleted: how many are bound whole, and how many in part.
    fn count_groups(&mut self, pods: &[Arc<Value>]) {
        let mut groups: BTreeMap<&str, Vec<bool>> = BTreeMap::new();
        for pod in pods
            .iter()
            .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null())
        {
            if let Some(group) = pod["metadata"]["labels"]["stowage.dev/group"].as_str() {
                groups
                    .entry(group)
                    .or_default()
                    .push(pod["spec"]["nodeName"].is_string());
            }
        }
        for members in groups
            .values()
            .filter(|members| members.len() == GROUP_SIZE)
        {
            match members.iter().filter(|is_bound| **is_bound).count() {
                0 => {}
                GROUP_SIZE => self.tally.whole_groups += 1,
                _ => self.tally.partial_groups += 1,
            }
        }
    }

    /// No gate outlives its longest time, and no condition shows a reservation for long that is over.
    fn check_leftovers(&mut self, pods: &[Arc<Value>]) {
        let shows_reservation = |pod: &&Arc<Value>| {
            pod["metadata"]["deletionTimestamp"].is_null() && shown_reservation(pod).is_some()
        };
        let over: Vec<String> = pods
            .iter()
            .filter(shows_reservation)
            .filter(|pod| is_past_deadline(pod))
            .map(|pod| pod_name(pod))
            .collect();
        if !over.is_empty() {
            self.fail(format!("{over:?} still show reservations that are over"));
        }
        // A group stays behind the gate until all of it has a place.
        let is_left = |pod: &&Arc<Value>| {
            super::scheduling::is_gated(pod)
                && !is_group_member(pod)
                && pod["metadata"]["deletionTimestamp"].is_null()
        };
        let gated: Vec<String> = pods
            .iter()
            .filter(is_left)
            .map(|pod| pod_name(pod))
            .collect();
        if !gated.is_empty() {
            self.fail(format!(
                "{gated:?} are still behind the gate, whose longest time is over"
            ));
        }
    }
}

/// Bound pods that still show a reservation.
fn ended_reservations(pods: &[Arc<Value>]) -> impl Iterator<Item = String> {
    let is_running = |pod: &&Arc<Value>| {
        pod["spec"]["nodeName"].is_string()
            && pod["metadata"]["deletionTimestamp"].is_null()
            && !["Succeeded", "Failed"]
                .map(Some)
                .contains(&pod["status"]["phase"].as_str())
    };
    let showing = pods
        .iter()
        .filter(is_running)
        .filter(|pod| is_true(pod, "stowage.dev/Reserved"));
    showing.map(|pod| format!("{} is bound and shows a reservation", pod_name(pod)))
}

fn is_true(pod: &Value, condition: &str) -> bool {
    let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.any(|one| one["type"] == condition && one["status"] == "True")
}

/// Pods that show that they are preempted, and that no reservation names.
fn unwanted_evictions(pods: &[Arc<Value>]) -> impl Iterator<Item = String> {
    let reservations = pods.iter().filter_map(|pod| shown_reservation(pod));
    let victims: BTreeSet<String> = reservations
        .flat_map(|message| message["victims"].as_array().cloned().unwrap_or_default())
        .filter_map(|victim| Some(victim.as_str()?.to_owned()))
        .collect();
    let shows_one = |pod: &Value| {
        let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        conditions.any(|one| {
            one["type"] == "stowage.dev/DisruptionTarget"
                && one["status"] == "True"
                && ["Preempted", "GroupEvicted", "Reclaimed", "Consolidated"]
                    .map(Some)
                    .contains(&one["reason"].as_str())
        })
    };
    let staying = pods
        .iter()
        .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    staying
        .filter(move |pod| {
            shows_one(pod)
                && pod["metadata"]["uid"]
                    .as_str()
                    .is_some_and(|uid| !victims.contains(uid))
        })
        .map(|pod| {
            format!(
                "{} shows that it is preempted, and nobody preempts it",
                pod_name(pod)
            )
        })
}

/// Whether the reservation that a pod shows is past its deadline, by more than a clock that was wrong when it was written.
fn is_past_deadline(pod: &Value) -> bool {
    let deadline = shown_reservation(pod).and_then(|message| {
        message["deadline"]
            .as_str()?
            .parse::<jiff::Timestamp>()
            .ok()
    });
    deadline.is_some_and(|deadline| deadline + jiff::SignedDuration::from_secs(60) < clock::wall())
}

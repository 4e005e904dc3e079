//! The end of a history: everything works again, nothing new comes, and what is on its way lands. Then what can be bound has to
//! be bound, and nothing may be left of what is over.

use super::super::oracle::{
    PROMISABLE, PodShare, asked, asks_alone, could_be_mended, held_twice, holds, is_engine,
    overcommitted, promises, reservation,
};
use super::observations::audit;
use super::pods::{GROUP_SIZE, is_of_group};
use super::*;
use serde_json::json;
use stowage_scheduling::ledger::{PodPhase, ReservationStatus};
use stowage_scheduling::vocabulary::placement::Reservation;

/// A pod that fits for so long without a fault, and is asked for by kube-scheduler at every step, is bound. It has to wait for a
/// leader, for late writes and for reservations that end by their deadline.
const BOUND_WITHIN: Duration = Duration::from_secs(100);

/// Beyond the second sweep after a pod's end, nothing is left of a request about it.
const FORGOTTEN_WITHIN: Duration = Duration::from_secs(125);

/// A reservation lasts little longer than a minute. Writes that failed before all was quiet are written again within the first.
const SHOWN_WITHIN: Duration = Duration::from_secs(45);
/// Writes that failed for long before all was quiet are written again after a minute.
const WRITTEN_AGAIN_WITHIN: Duration = Duration::from_secs(90);

/// What a kube-scheduler without a backlog takes for all of its pods.
const ROUND: Duration = Duration::from_secs(1);

/// When each problem of the quiet period was first found.
#[derive(Default)]
pub(crate) struct QuietWatch {
    /// Since when each waiting pod has fitted somewhere, by name.
    fits_since: BTreeMap<String, Instant>,
    /// Since when each condition that is not so has stood, in words.
    untrue_since: BTreeMap<String, Instant>,
}

impl FaultyCluster {
    pub(super) async fn be_quiet(&mut self) {
        let quiet = Instant::now();
        self.say("from here on all is quiet".into());
        self.is_quiet = true;
        self.api.faults().clear();
        self.mend_agents();
        self.mend_policy();
        (0..HOSTS.len()).for_each(|host| clock::set_ahead(host, 0));
        let mut watch = QuietWatch::default();
        while quiet.elapsed() < QUIET && self.broken.is_empty() {
            self.reconnects.iter_mut().for_each(|(at, _)| *at = quiet);
            self.renewals.iter_mut().for_each(|(at, _)| *at = quiet);
            self.resumes.iter_mut().for_each(|(at, ..)| *at = quiet);
            self.returns.iter_mut().flatten().for_each(|at| *at = quiet);
            self.node_returns
                .iter_mut()
                .flatten()
                .for_each(|at| *at = quiet);
            self.bring_nodes_back();
            self.bring_back();
            self.schedule_all();
            self.run_pods(false);
            tokio::time::sleep(ROUND).await;
            self.go_on();
            self.check_waiting(&mut watch);
            self.check_conditions(&mut watch);
        }
        if self.broken.is_empty() {
            self.check_end();
        }
    }

    /// Pods that fit by the objects alone, and are not bound.
    fn check_waiting(&mut self, watch: &mut QuietWatch) {
        let pods = self.pods_on_machines();
        let promises = promises(&pods);
        let standing: Vec<Arc<Value>> = pods.iter().filter(|pod| !is_over(pod)).cloned().collect();
        let held = holds(&standing);
        let waiting = self.waiting();
        let fits = |pod: &Value| (0..self.nodes).find(|n| self.fits(pod, *n, &promises, &held));
        let fitting: BTreeMap<String, usize> = waiting
            .iter()
            .filter(|pod| !is_of_group(pod))
            .filter_map(|pod| Some((name(pod), fits(pod)?)))
            .collect();
        watch.fits_since.retain(|pod, _| fitting.contains_key(pod));
        for (pod, node) in fitting {
            let since = *watch
                .fits_since
                .entry(pod.clone())
                .or_insert_with(Instant::now);
            if since.elapsed() >= BOUND_WITHIN {
                self.break_with(format!(
                    "{pod} fits on {} for {BOUND_WITHIN:?} of quiet, and is not bound",
                    node_name(node)
                ));
            }
        }
    }

    /// Conditions that say something else than what is so.
    fn check_conditions(&mut self, watch: &mut QuietWatch) {
        let pods = self.pods();
        let unshown = self
            .unshown_reservations(&pods)
            .into_iter()
            .map(|what| (what, SHOWN_WITHIN));
        let unwanted = unwanted_evictions(&pods).map(|what| (what, WRITTEN_AGAIN_WITHIN));
        let ended = ended_reservations(&pods).map(|what| (what, WRITTEN_AGAIN_WITHIN));
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
                self.break_with(format!("{what} for {lasts:?} of quiet"));
            }
        }
    }

    /// Reservations with victims that the leader knows, and that their pods do not show. That a pod is gone, or was bound by a late
    /// write, it may not know yet; and nothing of pods while its watch is silent.
    fn unshown_reservations(&self, pods: &[Arc<Value>]) -> Vec<String> {
        let there: BTreeMap<&str, Option<Value>> = pods
            .iter()
            .filter(|pod| !pod["spec"]["nodeName"].is_string())
            .filter_map(|pod| Some((pod["metadata"]["uid"].as_str()?, reservation(pod))))
            .collect();
        let acting = self
            .acting()
            .and_then(|acting| self.replicas[acting].as_ref());
        let acting =
            acting.filter(|replica| !self.late_reservations.hides_pods_from(&replica.client));
        let known = acting
            .map(|replica| replica.service.cluster().ledger().reservation_status())
            .unwrap_or_default();
        let lacks = |known: &&ReservationStatus| {
            let Reservation {
                node,
                devices,
                victims,
                ..
            } = &known.reservation;
            let expected = json!({ "node": node, "devices": devices, "victims": victims });
            let is_it = |shown: &Value| {
                ["node", "devices", "victims"]
                    .iter()
                    .all(|it| shown[*it] == expected[*it])
            };
            there
                .get(known.uid.as_str())
                .is_some_and(|shown| !shown.as_ref().is_some_and(is_it))
        };
        let unshown = known
            .iter()
            .filter(|known| !known.reservation.victims.is_empty())
            .filter(lacks);
        let words = |known: &ReservationStatus| {
            let victims = known.reservation.victims.len();
            format!(
                "{} does not show its reservation on {} of {victims}",
                known.key.name, known.reservation.node
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
        let (gpus, bytes) = asked(pod);
        let own = name(pod);
        let has_room = |gpu: &usize| {
            let gpu_name = format!("{}/{gpu}", node_name(n));
            let parts = promises.get(&gpu_name).map_or(&[][..], Vec::as_slice);
            let is_held = held
                .iter()
                .any(|(holder, gpus)| *holder != own && gpus.contains(&gpu_name));
            let has_left_over = self
                .machines
                .on(&node_name(n), *gpu)
                .any(|(_, process)| process.ends.is_some());
            let used: u64 = parts.iter().map(|part| part.bytes).sum();
            let has_start = self.features.has_engines && parts.iter().any(|part| part.is_starting);
            let is_alone = parts.iter().any(|part| part.is_exclusive);
            let is_taken = is_held || has_left_over || is_alone || has_start && is_engine(pod);
            !is_taken && used + bytes <= PROMISABLE && (parts.is_empty() || !asks_alone(pod))
        };
        (0..GPUS).filter(has_room).count() as u64 >= gpus
    }

    fn check_end(&mut self) {
        let pods = self.pods_on_machines();
        let held_twice = held_twice(&pods);
        if !held_twice.is_empty() {
            self.break_with(format!("held twice, and nobody ends it: {held_twice:?}"));
        }
        let mendable = could_be_mended(&pods);
        if !mendable.is_empty() {
            self.break_with(format!("promised twice, and nobody leaves: {mendable:?}"));
        }
        self.check_leftovers(&pods);
        self.count_groups(&pods);
        let Some(acting) = self.acting() else {
            return self.break_with(format!("no replica acts after {QUIET:?} of quiet"));
        };
        let replica = self.replicas[acting].as_ref().expect("it acts");
        let twice = overcommitted(&pods);
        let found = audit(replica, "stowage_gpu_conflicts");
        let listed = self.pods();
        let existing: BTreeSet<&str> = listed
            .iter()
            .filter_map(|pod| pod["metadata"]["uid"].as_str())
            .collect();
        let gone: Vec<String> = {
            let cluster = replica.service.cluster();
            let known = cluster.ledger().pod_states().into_iter();
            let gone = known.filter(|(uid, pod)| {
                let late =
                    matches!(pod.phase, PodPhase::Waiting(_)) && self.is_just_gone(uid.as_str());
                !existing.contains(uid.as_str()) && !late
            });
            gone.map(|(uid, pod)| format!("{} {uid} {:?}", pod.key, pod.phase))
                .collect()
        };
        if !twice.is_empty() && found == 0 {
            self.break_with(format!(
                "promised beyond what there is, and not reported: {twice:?}"
            ));
        }
        // What ended pods leave behind would grow without bound.
        if !gone.is_empty() {
            self.break_with(format!("the ledger knows pods that are gone: {gone:?}"));
        }
    }

    /// A request of kube-scheduler may come after the pod's end; two sweeps later what it left has ended.
    fn is_just_gone(&self, uid: &str) -> bool {
        self.gone_at
            .get(uid)
            .is_some_and(|at| at.elapsed() < FORGOTTEN_WITHIN)
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
                _ => self.tally.half_groups += 1,
            }
        }
    }

    /// No gate outlives its longest time, and no condition shows a reservation for long that is over.
    fn check_leftovers(&mut self, pods: &[Arc<Value>]) {
        let standing = |pod: &&Arc<Value>| {
            pod["metadata"]["deletionTimestamp"].is_null() && reservation(pod).is_some()
        };
        let over: Vec<String> = pods
            .iter()
            .filter(standing)
            .filter(|pod| is_over(pod))
            .map(|pod| name(pod))
            .collect();
        if !over.is_empty() {
            self.break_with(format!("{over:?} still show reservations that are over"));
        }
        // A group stays behind the gate until all of it has a place.
        let is_left = |pod: &&Arc<Value>| {
            super::scheduling::is_gated(pod)
                && !is_of_group(pod)
                && pod["metadata"]["deletionTimestamp"].is_null()
        };
        let gated: Vec<String> = pods.iter().filter(is_left).map(|pod| name(pod)).collect();
        if !gated.is_empty() {
            self.break_with(format!(
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
    showing.map(|pod| format!("{} is bound and shows a reservation", name(pod)))
}

fn is_true(pod: &Value, condition: &str) -> bool {
    let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.any(|one| one["type"] == condition && one["status"] == "True")
}

/// Pods that show that they are preempted, and that no reservation names.
fn unwanted_evictions(pods: &[Arc<Value>]) -> impl Iterator<Item = String> {
    let reservations = pods.iter().filter_map(|pod| reservation(pod));
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
                name(pod)
            )
        })
}

/// Whether the reservation that a pod shows is past its deadline, by more than a clock that was wrong when it was written.
fn is_over(pod: &Value) -> bool {
    let deadline = reservation(pod).and_then(|message| {
        message["deadline"]
            .as_str()?
            .parse::<jiff::Timestamp>()
            .ok()
    });
    deadline.is_some_and(|deadline| deadline + jiff::SignedDuration::from_secs(60) < clock::wall())
}

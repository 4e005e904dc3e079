//! Victims: for whom pods are to leave, as reservations that pods show and answers of `preempt` say it, and whether those that
//! leave may.

use super::super::oracle::shown_reservation;
use super::pods::is_group_member;
use super::scheduling::priority;
use super::*;
use stowage_scheduling::testkit::oracle::{BrokenInvariant, VictimFacts};
use stowage_scheduling::testkit::uid;

/// Victims that reservations and `preempt` answers named, and those that were evicted.
#[derive(Default)]
pub struct Victims {
    /// Reservations that were shown, each once.
    reservations: BTreeSet<ShownReservation>,
    /// By the victim's UID: the reservations that named it.
    reserved: BTreeMap<String, Vec<NamedBy>>,
    /// By UID: the pod for which `preempt` named it, with its priority.
    preempted: BTreeMap<String, (i64, String)>,
    evicted: BTreeSet<String>,
}

/// A reservation, without its deadline, which its leader moves.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ShownReservation {
    /// UID of the pod that shows it.
    uid: String,
    placement_and_victims: String,
    /// Another leader may decide the same again.
    epoch: String,
}

/// A reservation that names a victim.
struct NamedBy {
    reservation: ShownReservation,
    preemptor: String,
    priority: i64,
    /// It landed while another leader acted than the one that made it, and no leader has listed it since.
    is_late: bool,
}

impl ShownReservation {
    pub fn new(pod: &Value, message: &Value) -> Self {
        Self {
            uid: pod["metadata"]["uid"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            placement_and_victims: format!(
                "{} {} {}",
                message["node"], message["devices"], message["victims"]
            ),
            epoch: message["epoch"].as_str().unwrap_or_default().to_owned(),
        }
    }

    pub fn uid(&self) -> &str {
        &self.uid
    }

    pub fn is_same_decision(&self, other: &Self) -> bool {
        (&self.uid, &self.placement_and_victims) == (&other.uid, &other.placement_and_victims)
    }
}

impl FaultyCluster {
    /// `preempt` answered: these victims leave for the pod.
    pub(super) fn record_preemption(&mut self, victim: String, priority: i64, preemptor: String) {
        self.victims.preempted.insert(victim, (priority, preemptor));
    }

    /// Reservations that pods show.
    pub(super) fn observe_reservations(&mut self, pods: &[Arc<Value>]) {
        for pod in pods {
            let Some(message) = shown_reservation(pod) else {
                continue;
            };
            let shown = ShownReservation::new(pod, &message);
            let is_new = !self
                .victims
                .reservations
                .iter()
                .any(|one| one.is_same_decision(&shown));
            if !self.victims.reservations.insert(shown.clone()) {
                continue;
            }
            let is_late = self.committed_in_another_term(message["epoch"].as_str());
            let names = message["victims"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str);
            let names: Vec<String> = names.map(str::to_owned).collect();
            if is_late {
                self.check_commit(&format!("the reservation of {}", pod_name(pod)));
                self.record_late_reservation(shown.clone(), pod_name(pod));
            }
            for victim in &names {
                let (reservation, preemptor) = (shown.clone(), pod_name(pod));
                let named_by = NamedBy {
                    reservation,
                    preemptor,
                    priority: priority(pod),
                    is_late,
                };
                self.victims
                    .reserved
                    .entry(victim.clone())
                    .or_default()
                    .push(named_by);
            }
            // A victim that had not started needs no budget, and may have started by the time that a delayed write lands: no leader
            // acts on one of another term before it has checked it anew.
            if is_new && self.acts_in_term(message["epoch"].as_str()) {
                self.check_guarded_victims(&names, &pod_name(pod));
            }
        }
    }

    /// A leader has begun a term with a list of everything, and checks each reservation that a pod shows as it would check a new
    /// one. Nothing tells it that one of them landed late, in an earlier term, whose leader did not get to end it.
    pub(super) fn confirm_listed_reservations(&mut self) {
        let pods = self.pods();
        let listed: BTreeSet<ShownReservation> = pods
            .iter()
            .filter_map(|pod| Some(ShownReservation::new(pod, &shown_reservation(pod)?)))
            .collect();
        for named_by in self.victims.reserved.values_mut().flatten() {
            named_by.is_late &= !listed.contains(&named_by.reservation);
        }
    }

    /// Victims are of a preemptible class (here: a negative priority), and leave for pods of higher priority.
    pub(super) fn observe_eviction(&mut self, pod: &Value) {
        let conditions = || pod["status"]["conditions"].as_array().into_iter().flatten();
        let by_api = conditions().any(|one| one["reason"] == "EvictionByEvictionAPI");
        let by_scheduler = conditions().any(|one| one["reason"] == "PreemptionByScheduler");
        let uid = pod["metadata"]["uid"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        if !(by_api || by_scheduler) || !self.victims.evicted.insert(uid.clone()) {
            return;
        }
        self.tally.evicted += 1;
        let why = conditions().find(|one| one["type"] == "stowage.dev/DisruptionTarget");
        let why = why
            .and_then(|one| one["reason"].as_str())
            .unwrap_or("none")
            .to_owned();
        self.log(format!("{} is evicted: {why}", pod_name(pod)));
        let own = priority(pod);
        if by_scheduler && let Some((higher, preemptor)) = self.victims.preempted.get(&uid).cloned()
        {
            self.tally.preempted += 1;
            if let Err(broken) = check_victim(&pod_name(pod), own, &preemptor, higher) {
                self.fail(broken.to_string());
            }
            return;
        }
        let in_group = self.features.has_groups && is_group_member(pod);
        match why.as_str() {
            "Preempted" | "GroupEvicted" if own < 0 => self.check_preempted(pod, &uid),
            "GroupIncomplete" if in_group => {}
            "GpuConflict" if self.has_proxy => {}
            // The condition may not have been written: the Event has the reason too. One that was refused may arrive once more.
            "none" | "Cancelled" if in_group || self.has_proxy => {}
            "none" | "Cancelled" if own < 0 => self.check_preempted(pod, &uid),
            _ => self.fail(format!(
                "{} of priority {own} is evicted: {why}",
                pod_name(pod)
            )),
        }
    }

    /// Of the reservations that name it one is of a pod of higher priority, and was known to its leader. A pod that has the
    /// reservation may be gone by the next look.
    fn check_preempted(&mut self, pod: &Value, uid: &str) {
        let own = priority(pod);
        let named_by = self
            .victims
            .reserved
            .get(uid)
            .map_or(&[][..], Vec::as_slice);
        let is_rightful = |one: &NamedBy| {
            !one.is_late && check_victim(&pod_name(pod), own, &one.preemptor, one.priority).is_ok()
        };
        if named_by.is_empty() || named_by.iter().any(is_rightful) {
            return;
        }
        let describe = |one: &NamedBy| {
            let late = if one.is_late {
                ", which landed while another leader acted"
            } else {
                ""
            };
            format!("{} of priority {}{late}", one.preemptor, one.priority)
        };
        let reservations: Vec<String> = named_by.iter().map(describe).collect();
        self.fail(format!(
            "{} of priority {own} leaves for reservations of {}",
            pod_name(pod),
            reservations.join(" and ")
        ));
    }
}

/// What the oracle says of a victim. Classes of negative priority are preemptible here.
fn check_victim(
    victim: &str,
    priority: i64,
    preemptor: &str,
    above: i64,
) -> Result<(), BrokenInvariant> {
    let number = |priority: i64| i32::try_from(priority).expect("the API has no others");
    let facts = VictimFacts {
        priority: number(priority),
        is_preemptible: priority < 0,
        is_protected: false,
    };
    facts.check(&uid(victim), &uid(preemptor), number(above))
}

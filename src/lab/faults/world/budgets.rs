//! A disruption budget over some of the preemptible pods, and its controller.

use super::*;
use stowage_scheduling::testkit::oracle::check_budget;
use stowage_scheduling::testkit::uid;

/// Longer than any watch lags, and than a request is under way.
const ALLOWANCE_MEMORY: Duration = Duration::from_secs(75);

/// The budget, and what it has allowed.
pub struct Budget {
    /// How many ready pods the budget keeps.
    min_available: usize,
    /// The most that it has allowed since then, until the next entry.
    allowed_since: VecDeque<(Instant, usize)>,
}

impl Budget {
    pub fn with_min_available(min_available: usize) -> Self {
        Self {
            min_available,
            allowed_since: VecDeque::new(),
        }
    }
}

pub(crate) fn is_guarded(pod: &Value) -> bool {
    pod["metadata"]["labels"]["guarded"] == "yes"
}

/// Whether an eviction of the pod takes a disruption of the budget.
pub fn needs_budget(pod: &Value) -> bool {
    is_guarded(pod) && is_staying(pod) && pod["status"]["phase"] == "Running"
}

/// Whether the pod is not terminating.
pub fn is_staying(pod: &Value) -> bool {
    pod["metadata"]["deletionTimestamp"].is_null()
}

impl FaultyCluster {
    pub(super) fn create_budget(&self) {
        let kept = self.budget.min_available;
        let spec =
            json!({ "minAvailable": kept, "selector": { "matchLabels": { "guarded": "yes" } } });
        let status = json!({ "disruptionsAllowed": 0, "currentHealthy": 0, "desiredHealthy": kept, "expectedPods": 0 });
        let budget = json!({ "metadata": { "name": "guard" }, "spec": spec, "status": status });
        self.api
            .create("poddisruptionbudgets", budget)
            .expect("its name is new");
    }

    /// What the disruption controller does: some of the pods that are ready stay.
    pub(super) fn run_disruption_controller(&mut self) {
        if !self.features.has_budget {
            return;
        }
        let ready = self.pods().iter().filter(|pod| needs_budget(pod)).count();
        let kept = self.budget.min_available;
        let allowed = ready.saturating_sub(kept);
        let status = json!({ "disruptionsAllowed": allowed, "currentHealthy": ready, "desiredHealthy": kept });
        self.api
            .patch_status(
                "poddisruptionbudgets/default/guard",
                &json!({ "status": status }),
            )
            .expect("nobody deletes it");
        let history = &mut self.budget.allowed_since;
        if history.back().is_none_or(|(_, last)| *last != allowed) {
            history.push_back((Instant::now(), allowed));
        }
        while history
            .get(1)
            .is_some_and(|(next, _)| next.elapsed() > ALLOWANCE_MEMORY)
        {
            history.pop_front();
        }
    }

    /// Of the victims that an answer of `preempt` or a reservation names, those that run and would stay otherwise are no more than
    /// the budget has allowed at any recent time. Of pods that have not started, the API server asks no budget.
    pub(super) fn check_guarded_victims(&mut self, victims: &[String], preemptor: &str) {
        let is_named = |pod: &Arc<Value>| {
            pod["metadata"]["uid"]
                .as_str()
                .is_some_and(|uid| victims.iter().any(|victim| victim == uid))
        };
        let pods = self.pods();
        let count = pods
            .iter()
            .filter(|pod| needs_budget(pod) && is_named(pod))
            .count();
        self.check_disruptions(count, preemptor);
    }

    pub(super) fn check_disruptions(&mut self, count: usize, preemptor: &str) {
        let most = self
            .budget
            .allowed_since
            .iter()
            .map(|(_, allowed)| *allowed)
            .max()
            .unwrap_or(0);
        if let Err(broken) = check_budget(&uid(preemptor), count, most) {
            self.fail(broken.to_string());
        }
    }
}

//! A disruption budget over some of the preemptible pods, and its controller.

use super::*;

/// Longer than any watch lags, and than a request is under way.
const SEEN_AFTER: Duration = Duration::from_secs(75);

/// The budget, and what it has allowed.
#[derive(Default)]
pub struct Budget {
    /// The most that it has allowed since then, until the next entry.
    allowed: VecDeque<(Instant, i64)>,
    /// Since when pods have been ready, by UID.
    ready: BTreeMap<String, Instant>,
}

pub fn is_guarded(pod: &Value) -> bool {
    pod["metadata"]["labels"]["guarded"] == "yes"
}

impl FaultyCluster {
    pub(super) fn create_budget(&self) {
        let spec = json!({ "minAvailable": 1, "selector": { "matchLabels": { "guarded": "yes" } } });
        let status =
            json!({ "disruptionsAllowed": 0, "currentHealthy": 0, "desiredHealthy": 1, "expectedPods": 0 });
        let budget = json!({ "metadata": { "name": "guard" }, "spec": spec, "status": status });
        self.api.create("poddisruptionbudgets", budget).expect("its name is new");
    }

    /// What the disruption controller does: one of the pods that are ready stays.
    pub(super) fn control_budget(&mut self) {
        if !self.features.has_budget {
            return;
        }
        let is_ready = |pod: &&Arc<Value>| {
            is_guarded(pod)
                && pod["status"]["phase"] == "Running"
                && pod["metadata"]["deletionTimestamp"].is_null()
        };
        let pods = self.api.list("pods");
        let ready: Vec<String> = pods
            .iter()
            .filter(is_ready)
            .filter_map(|pod| Some(pod["metadata"]["uid"].as_str()?.to_owned()))
            .collect();
        let allowed = (ready.len() as i64 - 1).max(0);
        let status =
            json!({ "disruptionsAllowed": allowed, "currentHealthy": ready.len(), "desiredHealthy": 1 });
        self.api
            .patch_status("poddisruptionbudgets/default/guard", &json!({ "status": status }))
            .expect("nobody deletes it");
        let now = Instant::now();
        let Budget { allowed: history, ready: since } = &mut self.budget;
        if history.back().is_none_or(|(_, last)| *last != allowed) {
            history.push_back((now, allowed));
        }
        while history.get(1).is_some_and(|(next, _)| next.elapsed() > SEEN_AFTER) {
            history.pop_front();
        }
        since.retain(|uid, _| ready.contains(uid));
        ready.into_iter().for_each(|uid| _ = since.entry(uid).or_insert(now));
    }

    /// Victims that a preemption names at once are no more than the budget has allowed at any recent time.
    pub(super) fn judge_guarded(&mut self, victims: &[String], preemptor: &str) {
        let is_known =
            |uid: &&String| self.budget.ready.get(*uid).is_some_and(|since| since.elapsed() > SEEN_AFTER);
        let count = victims.iter().filter(is_known).count() as i64;
        let most = self.budget.allowed.iter().map(|(_, allowed)| *allowed).max().unwrap_or(0);
        if count > most {
            self.break_with(format!(
                "{count} ready pods are to leave for {preemptor}, and their budget allows {most}"
            ));
        }
    }
}

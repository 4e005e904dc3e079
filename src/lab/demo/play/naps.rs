//! Engines that sleep while jobs use their VRAM, and wake: with asking first, and without.

use super::Play;
use crate::demo::sleeping;
use crate::demo::story::StoryPod;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use stowage_kubernetes_objects::{WAKEABLE_CONDITION, binding_annotations, user_annotations};
use stowage_scheduling::ids::PodUid;

impl Play {
    /// The engine of a pod sleeps until jobs borrow from it, asks, and wakes when it is told that it may.
    pub(super) async fn sleep_and_ask_to_wake(
        &mut self,
        engine: &'static str,
        jobs: Vec<StoryPod>,
    ) -> Result<()> {
        let uid = self.sleep_until_borrowed(engine, &jobs).await?;
        self.asked_wakes += 1;
        let request = format!("nap-{}", self.asked_wakes);
        self.annotate(engine, user_annotations::WAKE_REQUESTED, json!(request))?;
        self.screen.note(&format!("{engine} is to wake: it asks"));
        self.wait_until("the engine may wake", |play| {
            play.is_wake_granted(engine, &request)
        })
        .await?;
        let borrowing = match self.borrowers(&uid) {
            1 => "1 pod borrows from it".into(),
            pods => format!("{pods} pods borrow from it"),
        };
        self.screen.note(&format!("{engine} may wake: {borrowing}"));
        if !sleeping::try_wake(&self.setup.api, engine, &self.gpus()) {
            self.violations.push(format!(
                "{engine} asked, was told that it may wake, and lacked memory"
            ));
        }
        Ok(())
    }

    /// The engine of a pod sleeps until jobs borrow from it, and wakes without asking: that fails until the jobs are gone.
    pub(super) async fn sleep_and_wake_unasked(
        &mut self,
        engine: &'static str,
        jobs: Vec<StoryPod>,
    ) -> Result<()> {
        self.sleep_until_borrowed(engine, &jobs).await?;
        if sleeping::try_wake(&self.setup.api, engine, &self.gpus()) {
            self.violations
                .push(format!("{engine} woke into memory that jobs had"));
            return Ok(());
        }
        self.failed_wakes += 1;
        self.screen.note(&format!(
            "{engine} wakes without asking, and fails: too little memory. It tries again"
        ));
        self.annotate(engine, sleeping::STARTS_AGAIN, json!("true"))?;
        let has_woken = |play: &Self| sleeping::try_wake(&play.setup.api, engine, &play.gpus());
        self.wait_until("there is memory for it", has_woken).await?;
        self.annotate(engine, sleeping::STARTS_AGAIN, Value::Null)
    }

    /// Ends when a job borrows from the engine. What it slept on is lent only if nobody may wake it any more.
    async fn sleep_until_borrowed(
        &mut self,
        engine: &'static str,
        jobs: &[StoryPod],
    ) -> Result<PodUid> {
        self.annotate(engine, sleeping::ASLEEP, json!("true"))?;
        self.annotate(engine, user_annotations::WAKE_REQUESTED, Value::Null)?;
        self.screen.note(&format!("{engine} goes to sleep"));
        self.create_pods(jobs).await?;
        let uid = self.uid_of(engine)?;
        self.wait_until("jobs borrow from it", |play| play.borrowers(&uid) > 0)
            .await?;
        // What the screen shows comes a moment after what the API server has; memory is counted by what is shown.
        self.wait_until("they are shown beside it", |play| {
            play.is_shown_with_borrowers(&uid)
        })
        .await?;
        Ok(uid)
    }

    pub(super) fn uid_of(&self, pod: &str) -> Result<PodUid> {
        let pod = self.setup.api.get(&pod_path(pod));
        let pod = pod.context("the engine's pod is there")?;
        Ok(PodUid::parse(
            pod["metadata"]["uid"].as_str().unwrap_or_default(),
        )?)
    }

    /// Pods that borrow from the pod, by what their Bindings say.
    pub(super) fn borrowers(&self, lender: &PodUid) -> usize {
        self.setup
            .api
            .list("pods")
            .iter()
            .filter(|pod| borrows_from(pod, lender))
            .count()
    }

    /// Whether all of them are on the GPUs that the screen shows.
    fn is_shown_with_borrowers(&self, lender: &PodUid) -> bool {
        let gpus = self.gpus();
        let is_shown = |name: &str| {
            gpus.iter()
                .any(|gpu| gpu.pods.iter().any(|(pod, _)| pod.name == name))
        };
        let pods = self.setup.api.list("pods");
        pods.iter()
            .filter(|pod| borrows_from(pod, lender))
            .all(|pod| is_shown(pod["metadata"]["name"].as_str().unwrap_or_default()))
    }

    fn is_wake_granted(&self, engine: &str, request: &str) -> bool {
        let Some(pod) = self.setup.api.get(&pod_path(engine)) else {
            return false;
        };
        let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        conditions.any(|one| {
            one["type"] == WAKEABLE_CONDITION
                && one["status"] == "True"
                && one["message"] == request
        })
    }

    fn annotate(&self, pod: &str, key: &str, value: Value) -> Result<()> {
        let patch = json!({"metadata": {"annotations": {key: value}}});
        let patched = self.setup.api.patch(&pod_path(pod), &patch);
        patched
            .map(drop)
            .map_err(|error| anyhow::anyhow!("{pod} cannot be annotated: {error:?}"))
    }
}

fn borrows_from(pod: &Value, lender: &PodUid) -> bool {
    let lenders = pod["metadata"]["annotations"][binding_annotations::BORROWED_FROM]
        .as_str()
        .unwrap_or_default();
    lenders.split(',').any(|uid| uid == lender.as_str())
}

fn pod_path(pod: &str) -> String {
    format!("pods/default/{pod}")
}

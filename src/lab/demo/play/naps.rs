//! Engines that sleep while jobs use their VRAM, and wake: with asking first, and without.

use super::Play;
use crate::demo::sleeping;
use crate::demo::story::StoryPod;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use stowage_kubernetes_objects::{WAKEABLE_CONDITION, asked, written};
use stowage_scheduling::ids::PodUid;

impl Play {
    /// The engine of a pod sleeps until jobs borrow from it, asks, and wakes when it is told that it may.
    pub(super) async fn nap(&mut self, engine: &'static str, jobs: Vec<StoryPod>) -> Result<()> {
        let uid = self.sleep(engine, &jobs).await?;
        self.naps += 1;
        let request = format!("nap-{}", self.naps);
        self.annotate(engine, asked::WAKE_REQUESTED, json!(request))?;
        self.screen.aside(&format!("{engine} is to wake: it asks"));
        self.until("the engine may wake", |play| play.is_told(engine, &request))
            .await?;
        let borrowing = match self.borrowers(&uid) {
            1 => "1 pod borrows from it".into(),
            pods => format!("{pods} pods borrow from it"),
        };
        self.screen
            .aside(&format!("{engine} may wake: {borrowing}"));
        if !sleeping::wake(&self.setup.api, engine, &self.gpus()) {
            self.violations.push(format!(
                "{engine} asked, was told that it may wake, and lacked memory"
            ));
        }
        Ok(())
    }

    /// The engine of a pod sleeps until jobs borrow from it, and wakes without asking: that fails until the jobs are gone.
    pub(super) async fn nap_without_asking(
        &mut self,
        engine: &'static str,
        jobs: Vec<StoryPod>,
    ) -> Result<()> {
        self.sleep(engine, &jobs).await?;
        if sleeping::wake(&self.setup.api, engine, &self.gpus()) {
            self.violations
                .push(format!("{engine} woke into memory that jobs had"));
            return Ok(());
        }
        self.failed_wakes += 1;
        self.screen.aside(&format!(
            "{engine} wakes without asking, and fails: too little memory. It tries again"
        ));
        self.annotate(engine, sleeping::STARTS_AGAIN, json!("true"))?;
        let wakes = |play: &Self| sleeping::wake(&play.setup.api, engine, &play.gpus());
        self.until("there is memory for it", wakes).await?;
        self.annotate(engine, sleeping::STARTS_AGAIN, Value::Null)
    }

    /// Ends when a job borrows from the engine. What it slept on is lent only if nobody may wake it any more.
    async fn sleep(&mut self, engine: &'static str, jobs: &[StoryPod]) -> Result<PodUid> {
        self.annotate(engine, sleeping::ASLEEP, json!("true"))?;
        self.annotate(engine, asked::WAKE_REQUESTED, Value::Null)?;
        self.screen.aside(&format!("{engine} goes to sleep"));
        self.bring(jobs).await?;
        let pod = self
            .setup
            .api
            .get(&path(engine))
            .context("the engine's pod is there")?;
        let uid = PodUid::parse(pod["metadata"]["uid"].as_str().unwrap_or_default())?;
        self.until("jobs borrow from it", |play| play.borrowers(&uid) > 0)
            .await?;
        // What the screen shows comes a moment after what the API server has; memory is counted by what is shown.
        self.until("they are shown beside it", |play| {
            play.is_shown_with_borrowers(&uid)
        })
        .await?;
        Ok(uid)
    }

    /// Pods that borrow from the pod, by what their Bindings say.
    fn borrowers(&self, lender: &PodUid) -> usize {
        self.setup
            .api
            .list("pods")
            .iter()
            .filter(|pod| borrows(pod, lender))
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
            .filter(|pod| borrows(pod, lender))
            .all(|pod| is_shown(pod["metadata"]["name"].as_str().unwrap_or_default()))
    }

    fn is_told(&self, engine: &str, request: &str) -> bool {
        let Some(pod) = self.setup.api.get(&path(engine)) else {
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
        let patched = self.setup.api.patch(&path(pod), &patch);
        patched
            .map(drop)
            .map_err(|error| anyhow::anyhow!("{pod} cannot be annotated: {error:?}"))
    }
}

fn borrows(pod: &Value, lender: &PodUid) -> bool {
    let lenders = pod["metadata"]["annotations"][written::BORROWED_FROM]
        .as_str()
        .unwrap_or_default();
    lenders.split(',').any(|uid| uid == lender.as_str())
}

fn path(pod: &str) -> String {
    format!("pods/default/{pod}")
}

//! Engines on one GPU share its time: what each takes for a token, and one that a busy neighbor slows beyond its limit.

use super::Play;
use crate::demo::change_tracker::{GpuView, PodView};
use crate::demo::engines::FakeEngineLoad;
use crate::demo::reported;
use crate::demo::sleeping;
use crate::demo::story::TIME_PER_TOKEN_LIMIT;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use stowage_scheduling::contention::{
    ComputeSharing, EngineWork, GpuSpeed, STEP_OVERHEAD_S, contention,
};
use stowage_scheduling::units::Micros;

/// Enough requests to have some all the time, and a KV cache that has room for more.
const BUSY: FakeEngineLoad = FakeEngineLoad {
    kv_percent: 40,
    waiting: 0,
    running: 48,
};

impl Play {
    /// Each engine takes as long for a token as the others that have work on its GPU make it, and on several GPUs as long as on the
    /// slowest.
    pub(super) fn share_time(&self, gpus: &[GpuView]) {
        let mut steps: BTreeMap<&str, f64> = BTreeMap::new();
        for gpu in gpus {
            let pods = gpu.pods.iter();
            let works: Vec<EngineWork> = pods
                .map(|(pod, bytes)| self.work(gpu, pod, *bytes))
                .collect();
            let under = contention(&works, ComputeSharing::TimeSlicing);
            for ((pod, _), (work, under)) in gpu.pods.iter().zip(works.iter().zip(under)) {
                let slowest = steps.entry(&pod.name).or_default();
                *slowest = slowest.max(work.step_s(&under));
            }
        }
        for (pod, step_s) in steps {
            if let Some(engine) = self.engines.get(pod) {
                engine.set_step(step_s);
            }
        }
    }

    /// Half of an engine's VRAM is its weights. A job works all the time.
    fn work(&self, gpu: &GpuView, pod: &PodView, bytes: u64) -> EngineWork {
        let engine = self.engines.get(&pod.name);
        let Some((engine, speed)) = engine.zip(GpuSpeed::of(gpu.model)) else {
            return EngineWork::job(1.0);
        };
        let object = self.setup.api.get(&format!("pods/default/{}", pod.name));
        let is_asleep = object.is_some_and(|object| sleeping::is_asleep(&object));
        EngineWork {
            overhead_s: STEP_OVERHEAD_S,
            memory_s: speed.memory_s(bytes as f64 / 2.0),
            compute_s: 0.0,
            busy: f64::from(u8::from(engine.has_requests() && !is_asleep)),
            sms: 1.0,
        }
    }

    /// An engine gets busy. Its neighbor `slowed` takes longer for a token than its class allows, until a job is evicted for it.
    pub(super) async fn crowd(&mut self, busy: &str, slowed: &str) -> Result<()> {
        let limit = Micros::from(TIME_PER_TOKEN_LIMIT);
        let is_settled = |play: &Self| play.up_to_date(slowed).is_some();
        let is_slow = |play: &Self| play.reported(slowed).is_ok_and(|takes| takes > limit);
        self.wait_until("its page says how long it takes beside a job", |play| {
            is_settled(play) && !is_slow(play)
        })
        .await?;
        let before = self.page_line(slowed)?;
        self.screen.note(&format!(
            "{before}, of at most {} ms; {busy} beside it is idle",
            TIME_PER_TOKEN_LIMIT.0
        ));
        let evicted = self.evicted;
        let engine = self.engines.get(busy);
        engine
            .with_context(|| format!("{busy} has no engine"))?
            .set_load(BUSY);
        self.screen
            .note(&format!("{busy}'s page: {} requests", BUSY.running));
        self.wait_until("its neighbor takes longer than its class allows", |play| {
            is_slow(play) && (is_settled(play) || play.evicted > evicted)
        })
        .await?;
        let slow = self.page_line(slowed)?;
        self.screen.note(&slow);
        self.wait_until(
            "a job is evicted for it, and it takes no longer than that",
            |play| play.evicted > evicted && is_settled(play) && !is_slow(play),
        )
        .await?;
        let after = self.page_line(slowed)?;
        self.screen.note(&after);
        self.kept_latencies += 1;
        Ok(())
    }

    fn page_line(&self, pod: &str) -> Result<String> {
        let millis = self.reported(pod)?.as_seconds() * 1e3;
        Ok(format!("{pod}'s page: {millis:.0} ms a token"))
    }

    /// What the agent says that the pod's engine takes for a token.
    fn reported(&self, pod: &str) -> Result<Micros> {
        let found = self.chronicle.pods().find(|view| view.name == pod);
        let view = found.with_context(|| format!("{pod} is not there"))?;
        let node = view.node.as_deref();
        let takes = node
            .and_then(|node| reported::time_per_token(&self.setup.stowage.board, node, &view.uid));
        takes.with_context(|| format!("{pod} says nothing of its time per token"))
    }

    /// That, once it is what the engine takes now.
    fn up_to_date(&self, pod: &str) -> Option<Micros> {
        let takes = self.reported(pod).ok()?;
        let now = self.engines.get(pod)?.step_s();
        ((takes.as_seconds() / now - 1.0).abs() < 0.02).then_some(takes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::screen::Screen;
    use crate::demo::setup::Setup;
    use crate::demo::story;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_job_is_evicted_for_an_engine_that_its_busy_neighbor_slows() {
        let setup = Setup::with_policy(story::policy().unwrap(), &[]);
        let mut play = Play::new(setup.await.unwrap(), Screen::unseen());
        play.create_priority_classes().unwrap();
        play.play_steps(story::chapter_on_latency().steps)
            .await
            .unwrap();
        assert_eq!(play.violations, Vec::<String>::new());
        let left = play.setup.api.list("pods");
        let left: Vec<_> = left
            .iter()
            .map(|pod| pod["metadata"]["name"].clone())
            .collect();
        assert_eq!(left, ["chat", "code"]);
        assert_eq!((play.kept_latencies, play.evicted), (1, 1));
        // Alone, beside one that works, and beside two.
        let chat = EngineWork {
            overhead_s: STEP_OVERHEAD_S,
            memory_s: GpuSpeed::H100.memory_s((10u64 << 30) as f64),
            compute_s: 0.0,
            ..EngineWork::job(1.0)
        };
        let takes = |jobs: usize| {
            let works = [vec![chat], vec![EngineWork::job(1.0); jobs]].concat();
            chat.step_s(&contention(&works, ComputeSharing::TimeSlicing)[0])
        };
        let limit = Micros::from(TIME_PER_TOKEN_LIMIT).as_seconds();
        assert!(takes(1) < 0.9 * limit && takes(2) > limit);
        let reported = play.reported("chat").unwrap().as_seconds();
        assert!((reported / takes(1) - 1.0).abs() < 0.02, "{reported}");
    }
}

//! Plays the story: creates the pods that arrive, shows what happens, and checks the invariants at every step.

mod limits;
mod naps;
mod neighbors;

use super::change_tracker::{ChangeTracker, GpuView, PodChange, invariant_violations};
use super::engines::{FakeEngine, FakeEngineLoad};
use super::machine::DemoMachine;
use super::placement_cost::{PlacementCalls, PlacementMode};
use super::reported;
use super::scheduler::observations::Verb;
use super::screen::{Screen, gpu_name};
use super::setup::Setup;
use super::story::{self, Chapter, OVERLOAD, StoryPod, StoryStep};
use super::summary::Summary;
use super::vram;
use super::what_if::{HypotheticalPod, PredictedGpu, is_any_engine_starting};
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use stowage_scheduling::audit::ledger::audit;
use stowage_scheduling::autoscaling::DesiredReplicas;
use stowage_scheduling::ids::ModelId;
use stowage_scheduling::units::Millis;
use tokio::time::MissedTickBehavior;

/// Far longer than any chapter takes: a demo that hangs is a failed demo.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// How often the story checks whether it may continue. No API event announces a report.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

pub struct Play {
    pub setup: Setup,
    pub screen: Screen,
    chronicle: ChangeTracker,
    engines: BTreeMap<String, FakeEngine>,
    /// The GPU with the busy engine, since decisions know of it.
    busy_gpu: Option<BusyGpu>,
    /// Pods that are being placed, with the expected node and the reason.
    expected_nodes: BTreeMap<String, String>,
    /// Pods that the story deletes.
    deleted_by_story: Vec<&'static str>,
    kv_observed_after: Option<Millis>,
    evicted: usize,
    /// How often engines slept and asked before they woke, and how often one woke without asking and failed.
    asked_wakes: usize,
    failed_wakes: usize,
    /// How often an allocation beyond a grant failed alone, borrowers left ahead, and the driver ended one.
    kept_grants: usize,
    left_ahead: usize,
    ended_by_driver: usize,
    /// How often an engine came back within its limit on latency.
    kept_latencies: usize,
    placement_calls: Vec<PlacementCalls>,
    violations: Vec<String>,
}

struct BusyGpu {
    gpu: PredictedGpu,
    /// The pod whose engine it is, and its load before.
    engine: String,
    previous_load: FakeEngineLoad,
    /// The model that the engine serves.
    model: ModelId,
    /// The pods for which it is too busy.
    excluded_pod: StoryPod,
}

impl Play {
    pub fn new(setup: Setup, screen: Screen) -> Self {
        Self {
            setup,
            screen,
            chronicle: ChangeTracker::default(),
            engines: BTreeMap::new(),
            busy_gpu: None,
            expected_nodes: BTreeMap::new(),
            deleted_by_story: Vec::new(),
            kv_observed_after: None,
            evicted: 0,
            asked_wakes: 0,
            failed_wakes: 0,
            kept_grants: 0,
            left_ahead: 0,
            ended_by_driver: 0,
            kept_latencies: 0,
            placement_calls: Vec::new(),
            violations: Vec::new(),
        }
    }

    pub async fn play_story(&mut self) -> Result<()> {
        self.create_priority_classes()?;
        let chapters = story::chapters()
            .into_iter()
            .chain(story::chapters_on_limits())
            .chain([story::chapter_on_latency()]);
        for (number, chapter) in chapters.enumerate() {
            self.play_chapter(number + 1, chapter).await?;
        }
        Ok(())
    }

    fn create_priority_classes(&self) -> Result<()> {
        story::PRIORITY_CLASSES
            .into_iter()
            .try_for_each(|(name, value)| {
                let class = json!({"metadata": {"name": name}, "value": value});
                self.create("priorityclasses", class)
            })
    }

    async fn play_chapter(&mut self, number: usize, chapter: Chapter) -> Result<()> {
        self.screen
            .chapter(number, chapter.title, chapter.text)
            .await;
        let played = self.play_steps(chapter.steps).await;
        let gpus = self.gpus();
        self.screen.finish_chapter(&gpus);
        played.with_context(|| format!("chapter {number} did not come to its end"))
    }

    /// A chapter ends when the agents have reported its changes.
    async fn play_steps(&mut self, acts: Vec<StoryStep>) -> Result<()> {
        for act in acts {
            self.play_step(act).await?;
        }
        self.wait_until(
            "the agents have seen every engine serve",
            Self::are_engines_reported,
        )
        .await
    }

    async fn play_step(&mut self, act: StoryStep) -> Result<()> {
        match act {
            StoryStep::Arrive(arrivals) => self.arrive(arrivals).await,
            StoryStep::CompareModes { ordinary, planned } => {
                self.compare_placement_modes(ordinary, planned).await
            }
            StoryStep::Fill(arrivals) => self.fill(arrivals).await,
            StoryStep::ScaleDown {
                pods: who,
                successors: takers,
            } => self.delete_pods(who, takers).await,
            StoryStep::OverloadEngine(newcomer) => self.overload_engine(newcomer).await,
            StoryStep::RelieveEngine => self.relieve_engine().await,
            StoryStep::PredictStart(arrival) => self.predict_fastest_node(&arrival),
            StoryStep::SleepAndWake {
                engine,
                jobs,
                asks_first: true,
            } => self.sleep_and_ask_to_wake(engine, jobs).await,
            StoryStep::SleepAndWake {
                engine,
                jobs,
                asks_first: false,
            } => self.sleep_and_wake_unasked(engine, jobs).await,
            StoryStep::Join(machine) => self.join(machine).await,
            StoryStep::AllocateBeyondGrant {
                engine,
                gib,
                neighbour,
            } => self.allocate_beyond_grant(engine, gib << 30, neighbour),
            StoryStep::Crowd { busy, slowed } => self.crowd(busy, slowed).await,
            StoryStep::TakeBack { engine, first_gib } => {
                self.take_back(engine, first_gib << 30).await
            }
        }
    }

    async fn join(&mut self, machine: DemoMachine) -> Result<()> {
        self.setup.join(machine, story::late_node(machine)).await?;
        let limits = match vram::keeps_limits(&self.setup.api, machine.node) {
            true => ": its driver keeps VRAM limits",
            false => "",
        };
        self.screen.note(&format!("{} joins{limits}", machine.node));
        Ok(())
    }

    async fn arrive(&mut self, arrivals: Vec<StoryPod>) -> Result<()> {
        self.create_pods(&arrivals).await?;
        let all_bound = |play: &Self| {
            arrivals
                .iter()
                .all(|arrival| play.chronicle.is_bound(&arrival.name))
        };
        self.wait_until("all who arrived are bound", all_bound)
            .await?;
        let all_up = |play: &Self| !is_any_engine_starting(&play.setup.stowage.state);
        self.wait_until("their engines are up", all_up).await
    }

    async fn compare_placement_modes(
        &mut self,
        ordinary: Vec<StoryPod>,
        planned: Vec<StoryPod>,
    ) -> Result<()> {
        for (manner, batch) in [
            (PlacementMode::Ordinary, ordinary),
            (PlacementMode::Planned, planned),
        ] {
            self.arrive(batch.clone()).await?;
            let way = PlacementCalls::from_observations(
                manner,
                &batch,
                self.setup.scheduler.observations(),
            );
            self.screen.note(&way.line());
            self.placement_calls.push(way);
        }
        Ok(())
    }

    async fn fill(&mut self, arrivals: Vec<StoryPod>) -> Result<()> {
        self.create_pods(&arrivals).await?;
        let all = |play: &Self| {
            arrivals
                .iter()
                .all(|arrival| play.chronicle.is_bound_or_refused(&arrival.name))
        };
        self.wait_until("all who arrived are answered", all).await
    }

    async fn create_pods(&mut self, arrivals: &[StoryPod]) -> Result<()> {
        for arrival in arrivals {
            let mut port = None;
            if let Some(load) = arrival.load {
                let api = self.setup.api.clone();
                let engine = FakeEngine::start(api, &arrival.name, arrival.model(), load).await?;
                port = Some(engine.port());
                self.engines.insert(arrival.name.clone(), engine);
            }
            self.create("pods", arrival.manifest(port))?;
        }
        Ok(())
    }

    async fn delete_pods(&mut self, who: &'static [&'static str], takers: usize) -> Result<()> {
        let waiting = self.chronicle.pending_pods();
        self.deleted_by_story.extend(who);
        for name in who {
            let left = self.setup.api.delete(&format!("pods/default/{name}"));
            left.map_err(|error| anyhow::anyhow!("{name} cannot leave: {error:?}"))?;
        }
        let taken = |play: &Self| {
            waiting
                .iter()
                .filter(|name| play.chronicle.is_bound(name))
                .count()
        };
        self.wait_until("pods that waited have taken the room", |play| {
            taken(play) >= takers
        })
        .await
    }

    async fn overload_engine(&mut self, newcomer: StoryPod) -> Result<()> {
        let foresight =
            HypotheticalPod::for_manifest(&self.setup.stowage.state, newcomer.manifest(None))?;
        let seat = foresight
            .predicted_gpu()
            .context("there is no room for the chapter's pod")?;
        let gpu = gpu_name(seat.gpu.as_str());
        let server = self.chronicle.first_serving_pod_on(seat.gpu.as_str());
        let engine = server
            .with_context(|| format!("no engine serves on {gpu}"))?
            .name
            .clone();
        let FakeEngineLoad {
            kv_percent,
            waiting,
            ..
        } = OVERLOAD;
        self.screen.note(&format!(
            "{} would go to {gpu}, beside {engine}",
            newcomer.name
        ));
        self.screen.note(&format!(
            "{engine}'s page: KV cache {kv_percent} % full, {waiting} requests waiting"
        ));
        // Begins just after a report, so that the measured time is the longest one and not a matter of luck.
        let reported_sequence = reported::sequence(&self.setup.stowage.board, &seat.node);
        let has_new_report = |play: &Self| {
            reported::sequence(&play.setup.stowage.board, &seat.node) != reported_sequence
        };
        self.wait_until("the node's agent reports", has_new_report)
            .await?;
        let started = Instant::now();
        let before = self.engines[&engine].set_load(OVERLOAD);
        let is_excluded = |play: &Self| play.is_excluded_from(&newcomer, &seat);
        self.wait_until("decisions know of the full KV cache", is_excluded)
            .await?;
        let Millis(after) = *self
            .kv_observed_after
            .insert(Millis(started.elapsed().as_millis() as u64));
        self.screen.note(&format!(
            "{after} ms later decisions know: no more serving pods for {gpu}"
        ));
        let model = self.model_of(&engine)?;
        let desired = self
            .until_replicas(&model, "more replicas", |needed, there| needed > there)
            .await?;
        let (needed, there) = (desired.replicas, desired.current());
        self.screen.note(&format!(
            "{model} has {there} replicas and needs {needed}: an HPA that reads stowage_model_desired_replicas starts {} more",
            needed - there
        ));
        self.busy_gpu = Some(BusyGpu {
            gpu: seat,
            engine,
            previous_load: before,
            model,
            excluded_pod: newcomer,
        });
        Ok(())
    }

    async fn relieve_engine(&mut self) -> Result<()> {
        let BusyGpu {
            gpu: seat,
            engine,
            previous_load: before,
            model,
            excluded_pod: newcomer,
        } = self.busy_gpu.take().context("no engine is busy")?;
        let FakeEngineLoad {
            kv_percent,
            waiting,
            ..
        } = before;
        self.screen.note(&format!(
            "{engine}'s page: KV cache {kv_percent} % full, {waiting} requests waiting"
        ));
        self.engines[&engine].set_load(before);
        self.wait_until("decisions know of the room in the KV cache", |play| {
            !play.is_excluded_from(&newcomer, &seat)
        })
        .await?;
        let desired = self
            .until_replicas(&model, "no more replicas", |needed, there| needed <= there)
            .await?;
        self.screen.note(&format!(
            "{model} needs {} replicas again",
            desired.replicas
        ));
        Ok(())
    }

    /// Continues when the replicas that a model needs, and those that it has, are so.
    async fn until_replicas(
        &mut self,
        model: &ModelId,
        what: &str,
        is_reached: impl Fn(u32, u32) -> bool,
    ) -> Result<DesiredReplicas> {
        // Another evaluation may come before it is printed.
        let found = OnceLock::new();
        let check = |play: &Self| {
            let desired = play.setup.stowage.autoscaling.desired(model);
            desired
                .filter(|desired| is_reached(desired.replicas, desired.current()))
                .is_some_and(|desired| found.set(desired).is_ok())
        };
        self.wait_until(&format!("{model} needs {what}"), check)
            .await?;
        found.into_inner().context("it was found")
    }

    fn model_of(&self, pod: &str) -> Result<ModelId> {
        let pod = self
            .setup
            .api
            .get(&format!("pods/default/{pod}"))
            .context("the engine's pod is there")?;
        let model = pod["metadata"]["annotations"]["stowage.dev/model"].as_str();
        Ok(ModelId::parse(model.unwrap_or_default())?)
    }

    fn is_excluded_from(&self, newcomer: &StoryPod, seat: &PredictedGpu) -> bool {
        let foresight =
            HypotheticalPod::for_manifest(&self.setup.stowage.state, newcomer.manifest(None));
        foresight.is_ok_and(|foresight| foresight.is_excluded_from(seat))
    }

    fn predict_fastest_node(&mut self, arrival: &StoryPod) -> Result<()> {
        let foresight =
            HypotheticalPod::for_manifest(&self.setup.stowage.state, arrival.manifest(None))?;
        let times = foresight.start_times();
        let (first, rest) = times.split_first().context("there are no nodes")?;
        let seconds = |(time, _): &(Millis, _)| time.0.div_ceil(1000);
        let elsewhere = rest.iter().map(seconds).min().unwrap_or_default();
        let tightest = foresight
            .without_model()
            .predicted_gpu()
            .context("there is no room for the chapter's pod")?;
        let (name, gpu) = (&arrival.name, gpu_name(tightest.gpu.as_str()));
        let (nearest_models, node) = (seconds(first), &first.1);
        self.screen.note(&format!("{name} would fit best on {gpu}"));
        self.screen.note(&format!(
            "from {node}'s disk it answers after {nearest_models} s, elsewhere over the network after {elsewhere} s"
        ));
        self.expected_nodes.insert(name.clone(), node.to_string());
        Ok(())
    }

    /// Continues when the condition holds, and meanwhile shows what happens.
    async fn wait_until(&mut self, what: &str, holds: impl Fn(&Self) -> bool) -> Result<()> {
        let mut revisions = self.setup.api.subscribe();
        let mut ticks = tokio::time::interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let started = Instant::now();
        loop {
            self.observe();
            self.screen.check()?;
            if holds(self) {
                return Ok(());
            }
            if started.elapsed() > STEP_TIMEOUT {
                bail!("it never came that {what}, in {} s", STEP_TIMEOUT.as_secs());
            }
            tokio::select! {
                _ = revisions.changed() => {}
                _ = ticks.tick() => {}
            }
        }
    }

    /// Shows what is new, and checks every allocation.
    fn observe(&mut self) {
        for news in self.chronicle.changes(&self.setup.api) {
            match &news {
                PodChange::Bound(pod) => {
                    self.check_placement(&pod.name, pod.node.as_deref(), &pod.devices)
                }
                PodChange::Terminating(pod)
                    if !self.deleted_by_story.contains(&pod.name.as_str()) =>
                {
                    self.evicted += 1
                }
                PodChange::Deleted(pod) => drop(self.engines.remove(&pod.name)),
                PodChange::Terminating(_) | PodChange::Refused(_) => {}
            }
            self.screen.news(&news);
        }
        let gpus = self.gpus();
        self.share_time(&gpus);
        self.screen.update(&gpus);
        let pods: Vec<_> = self.chronicle.pods().collect();
        let violations = invariant_violations(&gpus, &pods);
        let audited = audit(self.setup.stowage.state.cluster().ledger());
        self.violations.extend(
            violations
                .into_iter()
                .chain(audited.iter().map(ToString::to_string)),
        );
    }

    /// Checks that a pod that was just bound is where the measurements say it should be.
    fn check_placement(&mut self, pod: &str, node: Option<&str>, gpus: &[String]) {
        let joins = |crowd: &&BusyGpu| gpus.iter().any(|gpu| gpu == crowd.gpu.gpu.as_str());
        let crowd = self.busy_gpu.as_ref().filter(joins);
        if let Some(crowd) =
            crowd.filter(|crowd| self.is_excluded_from(&crowd.excluded_pod, &crowd.gpu))
        {
            let gpu = gpu_name(crowd.gpu.gpu.as_str());
            self.violations.push(format!(
                "{pod} joined {gpu}, where the KV cache was known to be full"
            ));
        }
        if let Some(best) = self
            .expected_nodes
            .get(pod)
            .filter(|best| node != Some(best.as_str()))
        {
            self.violations.push(format!(
                "{pod} went to {}, though {best} has its weights",
                node.unwrap_or("no node")
            ));
        }
    }

    fn are_engines_reported(&self) -> bool {
        let with_engine = |name: &str| self.engines.contains_key(name);
        let mut engines = self
            .chronicle
            .pods()
            .filter(|pod| with_engine(&pod.name) && !pod.is_terminating);
        engines.all(|pod| match &pod.node {
            Some(node) => reported::is_serving(&self.setup.stowage.board, node, &pod.uid),
            None => true,
        })
    }

    fn gpus(&self) -> Vec<GpuView> {
        let mut gpus = self.chronicle.gpus(&self.setup.machines);
        gpus.iter_mut().for_each(|gpu| {
            gpu.engines = reported::engines(&self.setup.stowage.board, gpu.node, &gpu.uuid)
        });
        gpus
    }

    fn create(&self, kind: &str, object: serde_json::Value) -> Result<()> {
        match self.setup.api.create(kind, object) {
            Ok(_) => Ok(()),
            Err(error) => bail!("{kind} cannot be created: {error:?}"),
        }
    }

    pub fn summary(&self) -> Summary {
        let gpus = self.gpus();
        let pods = gpus.iter().flat_map(|gpu| &gpu.pods);
        let bytes_where = |borrow: bool| -> u64 {
            let pods = pods.clone().filter(|(pod, _)| pod.is_borrower == borrow);
            pods.map(|(_, bytes)| bytes).sum()
        };
        let (allocated, borrowed) = (bytes_where(false), bytes_where(true));
        let allocatable: u64 = gpus.iter().map(|gpu| gpu.allocatable).sum();
        let observations = self.setup.scheduler.observations();
        let lending = &self.setup.stowage.state.metrics.lending;
        Summary {
            gpus: gpus.len(),
            pods_bound: self
                .chronicle
                .pods()
                .filter(|pod| pod.node.is_some())
                .count(),
            pods_waiting: self.chronicle.pending_pods().len(),
            evicted: self.evicted,
            allocated_bytes: allocated,
            borrowed_bytes: borrowed,
            allocatable_bytes: allocatable,
            allocated_percent: (allocated as f64 / allocatable as f64 * 1000.0).round() / 10.0,
            filter_calls: observations.count(Verb::Filter),
            bind_calls: observations.count(Verb::Bind),
            ways: self.placement_calls.clone(),
            kv_seen_after_millis: self.kv_observed_after,
            asked_wakes: self.asked_wakes,
            failed_wakes: self.failed_wakes,
            unasked_wakes: lending.wakes.with_label_values(&["unasked"]).get(),
            kept_grants: self.kept_grants,
            left_ahead: self.left_ahead,
            ended_by_driver: self.ended_by_driver,
            kept_latencies: self.kept_latencies,
            taken_back: lending.taken_back.get(),
            start_times: None,
            violations: self.violations.clone(),
        }
    }
}

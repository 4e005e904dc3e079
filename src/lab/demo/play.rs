//! Plays the story: creates the pods that arrive, shows what happens, and checks the invariants at every step.

mod naps;

use super::chronicle::{Chronicle, GpuView, News, broken_promises};
use super::engines::{FakeEngine, StubEngineLoad};
use super::placement_cost::{Manner, PlacementManner};
use super::reported;
use super::scheduler::observations::Verb;
use super::screen::{Screen, gpu_name};
use super::setup::Setup;
use super::story::{self, CROWD, Chapter, MACHINES, StoryPod, StoryStep};
use super::summary::Summary;
use super::what_if::{ForeseenGpu, Foresight, is_any_engine_starting};
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
const PATIENCE: Duration = Duration::from_secs(60);
/// How often the story checks whether it may continue. No API event announces a report.
const LOOK: Duration = Duration::from_millis(10);

pub struct Play {
    pub setup: Setup,
    pub screen: Screen,
    chronicle: Chronicle,
    engines: BTreeMap<String, FakeEngine>,
    /// The GPU with the busy engine, since decisions know of it.
    crowd: Option<Crowd>,
    /// Pods that are being placed, with the expected node and the reason.
    expected: BTreeMap<String, String>,
    /// Pods that the story deletes.
    dismissed: Vec<&'static str>,
    kv_seen_after: Option<Millis>,
    evicted: usize,
    /// How often engines slept and asked before they woke, and how often one woke without asking and failed.
    naps: usize,
    failed_wakes: usize,
    ways: Vec<PlacementManner>,
    violations: Vec<String>,
}

struct Crowd {
    seat: ForeseenGpu,
    /// The pod whose engine it is, and its load before.
    engine: String,
    before: StubEngineLoad,
    /// The model that the engine serves.
    model: ModelId,
    /// The pods for which it is too busy.
    newcomer: StoryPod,
}

impl Play {
    pub fn new(setup: Setup, screen: Screen) -> Self {
        Self {
            setup,
            screen,
            chronicle: Chronicle::default(),
            engines: BTreeMap::new(),
            crowd: None,
            expected: BTreeMap::new(),
            dismissed: Vec::new(),
            kv_seen_after: None,
            evicted: 0,
            naps: 0,
            failed_wakes: 0,
            ways: Vec::new(),
            violations: Vec::new(),
        }
    }

    pub async fn story(&mut self) -> Result<()> {
        for (name, value) in story::PRIORITY_CLASSES {
            let class = json!({"metadata": {"name": name}, "value": value});
            self.create("priorityclasses", class)?;
        }
        for (number, chapter) in story::chapters().into_iter().enumerate() {
            self.chapter(number + 1, chapter).await?;
        }
        Ok(())
    }

    async fn chapter(&mut self, number: usize, chapter: Chapter) -> Result<()> {
        self.screen
            .chapter(number, chapter.title, chapter.text)
            .await;
        let played = self.acts(chapter.acts).await;
        let gpus = self.gpus();
        self.screen.finish_chapter(&gpus);
        played.with_context(|| format!("chapter {number} did not come to its end"))
    }

    /// A chapter ends when the agents have reported its changes.
    async fn acts(&mut self, acts: Vec<StoryStep>) -> Result<()> {
        for act in acts {
            self.act(act).await?;
        }
        self.until(
            "the agents have seen every engine serve",
            Self::are_engines_reported,
        )
        .await
    }

    async fn act(&mut self, act: StoryStep) -> Result<()> {
        match act {
            StoryStep::Arrive(arrivals) => self.arrive(arrivals).await,
            StoryStep::Twice { ordinary, planned } => self.twice(ordinary, planned).await,
            StoryStep::Fill(arrivals) => self.fill(arrivals).await,
            StoryStep::Leave { who, takers } => self.leave(who, takers).await,
            StoryStep::Crowd(newcomer) => self.crowd(newcomer).await,
            StoryStep::Calm => self.calm().await,
            StoryStep::Compare(arrival) => self.compare(&arrival),
            StoryStep::Nap {
                engine,
                jobs,
                asks: true,
            } => self.nap(engine, jobs).await,
            StoryStep::Nap {
                engine,
                jobs,
                asks: false,
            } => self.nap_without_asking(engine, jobs).await,
        }
    }

    async fn arrive(&mut self, arrivals: Vec<StoryPod>) -> Result<()> {
        self.bring(&arrivals).await?;
        let all_bound = |play: &Self| {
            arrivals
                .iter()
                .all(|arrival| play.chronicle.is_bound(&arrival.name))
        };
        self.until("all who arrived are bound", all_bound).await?;
        let all_up = |play: &Self| !is_any_engine_starting(&play.setup.stowage.service);
        self.until("their engines are up", all_up).await
    }

    async fn twice(&mut self, ordinary: Vec<StoryPod>, planned: Vec<StoryPod>) -> Result<()> {
        for (manner, batch) in [(Manner::Ordinary, ordinary), (Manner::Planned, planned)] {
            self.arrive(batch.clone()).await?;
            let way = PlacementManner::of(manner, &batch, self.setup.scheduler.observations());
            self.screen.aside(&way.line());
            self.ways.push(way);
        }
        Ok(())
    }

    async fn fill(&mut self, arrivals: Vec<StoryPod>) -> Result<()> {
        self.bring(&arrivals).await?;
        let all = |play: &Self| {
            arrivals
                .iter()
                .all(|arrival| play.chronicle.is_answered(&arrival.name))
        };
        self.until("all who arrived are answered", all).await
    }

    async fn bring(&mut self, arrivals: &[StoryPod]) -> Result<()> {
        for arrival in arrivals {
            let mut port = None;
            if let Some(load) = arrival.load {
                let api = self.setup.api.clone();
                let engine = FakeEngine::start(api, &arrival.name, arrival.model(), load).await?;
                port = Some(engine.port());
                self.engines.insert(arrival.name.clone(), engine);
            }
            self.create("pods", arrival.pod(port))?;
        }
        Ok(())
    }

    async fn leave(&mut self, who: &'static [&'static str], takers: usize) -> Result<()> {
        let waiting = self.chronicle.waiting();
        self.dismissed.extend(who);
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
        self.until("pods that waited have taken the room", |play| {
            taken(play) >= takers
        })
        .await
    }

    async fn crowd(&mut self, newcomer: StoryPod) -> Result<()> {
        let foresight = Foresight::of(&self.setup.stowage.service, newcomer.pod(None))?;
        let seat = foresight
            .seat()
            .context("there is no room for the chapter's pod")?;
        let place = gpu_name(seat.gpu.as_str());
        let server = self.chronicle.server_on(seat.gpu.as_str());
        let engine = server
            .with_context(|| format!("no engine serves on {place}"))?
            .name
            .clone();
        let StubEngineLoad {
            kv_percent,
            waiting,
            ..
        } = CROWD;
        self.screen.aside(&format!(
            "{} would go to {place}, beside {engine}",
            newcomer.name
        ));
        self.screen.aside(&format!(
            "{engine}'s page: KV cache {kv_percent} % full, {waiting} requests waiting"
        ));
        // Begins just after a report, so that the measured time is the longest one and not a matter of luck.
        let told = reported::sequence(&self.setup.stowage.board, &seat.node);
        let news = |play: &Self| reported::sequence(&play.setup.stowage.board, &seat.node) != told;
        self.until("the node's agent reports", news).await?;
        let started = Instant::now();
        let before = self.engines[&engine].set(CROWD);
        let known = |play: &Self| play.is_kept_off(&newcomer, &seat);
        self.until("decisions know of the full KV cache", known)
            .await?;
        let Millis(after) = *self
            .kv_seen_after
            .insert(Millis(started.elapsed().as_millis() as u64));
        self.screen.aside(&format!(
            "{after} ms later decisions know: no more serving pods for {place}"
        ));
        let model = self.model_of(&engine)?;
        let desired = self
            .until_replicas(&model, "more replicas", |needed, there| needed > there)
            .await?;
        let (needed, there) = (desired.replicas, desired.current());
        self.screen.aside(&format!(
            "{model} has {there} replicas and needs {needed}: an HPA that reads stowage_model_desired_replicas starts {} more",
            needed - there
        ));
        self.crowd = Some(Crowd {
            seat,
            engine,
            before,
            model,
            newcomer,
        });
        Ok(())
    }

    async fn calm(&mut self) -> Result<()> {
        let Crowd {
            seat,
            engine,
            before,
            model,
            newcomer,
        } = self.crowd.take().context("no engine is busy")?;
        let StubEngineLoad {
            kv_percent,
            waiting,
            ..
        } = before;
        self.screen.aside(&format!(
            "{engine}'s page: KV cache {kv_percent} % full, {waiting} requests waiting"
        ));
        self.engines[&engine].set(before);
        self.until("decisions know of the room in the KV cache", |play| {
            !play.is_kept_off(&newcomer, &seat)
        })
        .await?;
        let desired = self
            .until_replicas(&model, "no more replicas", |needed, there| needed <= there)
            .await?;
        self.screen.aside(&format!(
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
        is_so: impl Fn(u32, u32) -> bool,
    ) -> Result<DesiredReplicas> {
        // Another evaluation may come before it is printed.
        let found = OnceLock::new();
        let look = |play: &Self| {
            let desired = play.setup.stowage.replicas.desired(model);
            desired
                .filter(|desired| is_so(desired.replicas, desired.current()))
                .is_some_and(|desired| found.set(desired).is_ok())
        };
        self.until(&format!("{model} needs {what}"), look).await?;
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

    fn is_kept_off(&self, newcomer: &StoryPod, seat: &ForeseenGpu) -> bool {
        let foresight = Foresight::of(&self.setup.stowage.service, newcomer.pod(None));
        foresight.is_ok_and(|foresight| foresight.is_kept_off(seat))
    }

    fn compare(&mut self, arrival: &StoryPod) -> Result<()> {
        let foresight = Foresight::of(&self.setup.stowage.service, arrival.pod(None))?;
        let times = foresight.ready();
        let (first, rest) = times.split_first().context("there are no nodes")?;
        let seconds = |(time, _): &(Millis, _)| time.0.div_ceil(1000);
        let elsewhere = rest.iter().map(seconds).min().unwrap_or_default();
        let tightest = foresight
            .without_model()
            .seat()
            .context("there is no room for the chapter's pod")?;
        let (name, place) = (&arrival.name, gpu_name(tightest.gpu.as_str()));
        let (nearest_models, node) = (seconds(first), &first.1);
        self.screen
            .aside(&format!("{name} would fit best on {place}"));
        self.screen.aside(&format!(
            "from {node}'s disk it answers after {nearest_models} s, elsewhere over the network after {elsewhere} s"
        ));
        self.expected.insert(name.clone(), node.to_string());
        Ok(())
    }

    /// Continues when the condition holds, and meanwhile shows what happens.
    async fn until(&mut self, what: &str, holds: impl Fn(&Self) -> bool) -> Result<()> {
        let mut revisions = self.setup.api.subscribe();
        let mut ticks = tokio::time::interval(LOOK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let started = Instant::now();
        loop {
            self.look();
            if holds(self) {
                return Ok(());
            }
            if started.elapsed() > PATIENCE {
                bail!("it never came that {what}, in {} s", PATIENCE.as_secs());
            }
            tokio::select! {
                _ = revisions.changed() => {}
                _ = ticks.tick() => {}
            }
        }
    }

    /// Shows what is new, and checks every allocation.
    fn look(&mut self) {
        for news in self.chronicle.news(&self.setup.api) {
            match &news {
                News::Bound(pod) => self.check_seat(&pod.name, pod.node.as_deref(), &pod.devices),
                News::Leaving(pod) if !self.dismissed.contains(&pod.name.as_str()) => {
                    self.evicted += 1
                }
                News::Gone(pod) => drop(self.engines.remove(&pod.name)),
                News::Leaving(_) | News::Refused(_) => {}
            }
            self.screen.news(&news);
        }
        let gpus = self.gpus();
        self.screen.update(&gpus);
        let pods: Vec<_> = self.chronicle.pods().collect();
        let seen = broken_promises(&gpus, &pods);
        let audited = audit(self.setup.stowage.service.cluster().ledger());
        self.violations.extend(
            seen.into_iter()
                .chain(audited.iter().map(ToString::to_string)),
        );
    }

    /// Checks that a pod that was just bound is where the measurements say it should be.
    fn check_seat(&mut self, pod: &str, node: Option<&str>, gpus: &[String]) {
        let joins = |crowd: &&Crowd| gpus.iter().any(|gpu| gpu == crowd.seat.gpu.as_str());
        let crowd = self.crowd.as_ref().filter(joins);
        if let Some(crowd) = crowd.filter(|crowd| self.is_kept_off(&crowd.newcomer, &crowd.seat)) {
            let place = gpu_name(crowd.seat.gpu.as_str());
            self.violations.push(format!(
                "{pod} joined {place}, where the KV cache was known to be full"
            ));
        }
        if let Some(best) = self
            .expected
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
            .filter(|pod| with_engine(&pod.name) && !pod.leaving);
        engines.all(|pod| match &pod.node {
            Some(node) => reported::serves(&self.setup.stowage.board, node, &pod.uid),
            None => true,
        })
    }

    fn gpus(&self) -> Vec<GpuView> {
        let mut gpus = self.chronicle.gpus(&MACHINES);
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
        let promised: u64 = gpus
            .iter()
            .flat_map(|gpu| &gpu.pods)
            .map(|(_, bytes)| bytes)
            .sum();
        let promisable: u64 = gpus.iter().map(|gpu| gpu.promisable).sum();
        let observations = self.setup.scheduler.observations();
        Summary {
            gpus: gpus.len(),
            pods_bound: self
                .chronicle
                .pods()
                .filter(|pod| pod.node.is_some())
                .count(),
            pods_waiting: self.chronicle.waiting().len(),
            evicted: self.evicted,
            allocated_bytes: promised,
            allocatable_bytes: promisable,
            allocated_percent: (promised as f64 / promisable as f64 * 1000.0).round() / 10.0,
            filter_calls: observations.count(Verb::Filter),
            bind_calls: observations.count(Verb::Bind),
            ways: self.ways.clone(),
            kv_seen_after_millis: self.kv_seen_after,
            asked_wakes: self.naps,
            failed_wakes: self.failed_wakes,
            unasked_wakes: self
                .setup
                .stowage
                .service
                .metrics
                .lending
                .wakes
                .with_label_values(&["unasked"])
                .get(),
            start_times: None,
            violations: self.violations.clone(),
        }
    }
}

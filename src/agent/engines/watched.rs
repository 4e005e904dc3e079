//! The state of one pod's engine from round to round: when to probe it, and what to report of it.
//!
//! A state machine without I/O: `now` is an argument, an [`EngineProbe`] comes out, a [`ProbeResult`] goes in.

use super::address::{EngineEvidence, EngineQuery, MetricsAddress, health};
use super::limits::EngineLimits;
use super::probe::{EngineFigures, EngineHealth, EngineProbe, NoPage, ProbeKind, ProbeResult, SecondProbe};
use super::reuse;
use super::token_rate::TokenRate;
use crate::agent::pods::PodOnNode;
use crate::engine_metrics::{Engine, Figures};
use crate::ids::{GpuUuid, ModelId};
use crate::report::{EngineReport, EngineState};
use crate::units::Millis;
use std::net::IpAddr;
use std::time::Duration;
use tokio::time::Instant;

#[derive(Debug)]
pub struct WatchedEngine {
    sought: EngineQuery,
    /// Since when it is looked for there.
    since: Instant,
    /// Where its page was found.
    home: Option<MetricsAddress>,
    /// Index of the address that is tried next.
    turn: usize,
    /// The engine that its page identified.
    engine: Option<Engine>,
    latest: Option<(Figures, Instant)>,
    /// How often it had interrupted its own requests by the latest page, and when that number last rose.
    preemptions: Option<u64>,
    preempted: Option<Instant>,
    token_rate: TokenRate,
    health: Option<EngineHealth>,
    /// The KV cache's size from llama.cpp's properties; requested once of each process.
    kv_cache_tokens: Option<u64>,
    properties: CacheSizeProbe,
    contact: EngineContact,
    /// Consecutive failed attempts.
    failures: u32,
    /// Not probed before.
    next: Instant,
    /// The pod's readiness, as last seen.
    was_ready: bool,
    trouble: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CacheSizeProbe {
    NotYet,
    Done,
}

/// Whether a server has ever answered, and whether one may now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EngineContact {
    Never,
    Had,
    /// It was found, and now nothing listens there.
    Lost,
}

/// The first pause after a failed attempt; it doubles with each.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// A report contains a sentence or two.
const MAX_PROBLEM: usize = 300;

impl WatchedEngine {
    pub fn new(sought: EngineQuery, now: Instant) -> Self {
        Self {
            sought,
            since: now,
            home: None,
            turn: 0,
            engine: None,
            latest: None,
            preemptions: None,
            preempted: None,
            token_rate: TokenRate::default(),
            health: None,
            kv_cache_tokens: None,
            properties: CacheSizeProbe::NotYet,
            contact: EngineContact::Never,
            failures: 0,
            next: now,
            was_ready: false,
            trouble: None,
        }
    }

    /// Sets the addresses. The state is kept if they are unchanged.
    pub fn seek(&mut self, sought: EngineQuery, now: Instant) {
        if self.sought != sought {
            *self = Self::new(sought, now);
        }
    }

    /// The probe to make now, if one is due.
    pub fn due(
        &mut self,
        pod: &PodOnNode,
        ip: IpAddr,
        now: Instant,
        limits: &EngineLimits,
    ) -> Option<EngineProbe> {
        if pod.is_ready && !self.was_ready {
            // The pod's readiness probe has succeeded: no reason to wait any longer.
            self.next = now;
        }
        self.was_ready = pod.is_ready;
        if now < self.next {
            return None;
        }
        let probe_kind = match (&self.home, self.sought.claim) {
            (Some(home), _) => ProbeKind::Metrics(home.clone(), self.beside(home)),
            (None, EngineEvidence::Declared) => {
                let metrics = self.candidates().next()?;
                ProbeKind::Metrics(metrics.clone(), self.beside(metrics))
            }
            (None, EngineEvidence::Guessed) => {
                let addresses: Vec<_> = self.candidates().take(limits.probes).cloned().collect();
                (!addresses.is_empty()).then_some(ProbeKind::Search(addresses))?
            }
        };
        Some(EngineProbe { ip, engine: self.sought.engine.or(self.engine), probe_kind })
    }

    /// The addresses from the next one to the last.
    fn candidates(&self) -> impl Iterator<Item = &MetricsAddress> {
        self.sought.addresses.iter().skip(self.turn)
    }

    /// Health is probed until the engine is known to serve, and again when its metrics fail.
    fn beside(&self, metrics: &MetricsAddress) -> SecondProbe {
        let is_known = matches!(self.health, Some(EngineHealth::Ready | EngineHealth::Unclear))
            && self.trouble.is_none();
        match health(self.known_engine(), metrics) {
            Some(address) if !is_known => SecondProbe::Health(address),
            _ if self.engine == Some(Engine::LlamaCpp) && self.properties == CacheSizeProbe::NotYet => {
                SecondProbe::Properties
            }
            _ => SecondProbe::Nothing,
        }
    }

    fn known_engine(&self) -> Option<Engine> {
        self.engine.or(self.sought.engine)
    }

    /// Applies the result of a probe; of one that began before the addresses changed, nothing.
    pub fn note(&mut self, probe_kind: &ProbeKind, answer: ProbeResult, limits: &EngineLimits) {
        if answer.asked < self.since {
            return;
        }
        self.health = answer.health.or(self.health);
        if matches!(probe_kind, ProbeKind::Metrics(_, SecondProbe::Properties)) && answer.page.is_ok() {
            self.properties = CacheSizeProbe::Done;
            self.kv_cache_tokens = answer.properties.and_then(|properties| properties.kv_cache_tokens());
        }
        match answer.page {
            Ok(found) => self.found(found, answer.asked),
            Err(nothing) => self.not_found(probe_kind, &nothing, answer.health, answer.asked, limits),
        }
    }

    fn found(&mut self, found: EngineFigures, asked: Instant) {
        self.home = Some(found.at);
        self.engine = Some(found.figures.engine);
        self.note_preemptions(found.figures.preemptions, asked);
        self.token_rate.note(found.figures.generated_tokens, asked);
        self.latest = Some((found.figures, asked));
        self.contact = EngineContact::Had;
        self.failures = 0;
        self.next = asked;
        self.trouble = None;
    }

    /// The first number says nothing: what it counts may be long ago. A number that falls is that of a new process.
    fn note_preemptions(&mut self, count: Option<u64>, asked: Instant) {
        if self.preemptions.zip(count).is_some_and(|(before, now)| now > before) {
            self.preempted = Some(asked);
        }
        self.preemptions = count;
    }

    fn not_found(
        &mut self,
        probe_kind: &ProbeKind,
        nothing: &NoPage,
        health: Option<EngineHealth>,
        asked: Instant,
        limits: &EngineLimits,
    ) {
        let (is_refused, is_not_ready) = match nothing {
            NoPage::Fetch(error) => (error.is_refused(), error.is_not_ready()),
            NoPage::Unknown(..) => (false, false),
        };
        if is_not_ready && matches!(probe_kind, ProbeKind::Metrics(..)) {
            self.health = Some(EngineHealth::NotReady);
        }
        let is_somebody =
            is_not_ready || matches!(health, Some(EngineHealth::Ready | EngineHealth::NotReady));
        match (is_somebody, self.contact) {
            (true, _) => self.contact = EngineContact::Had,
            (false, EngineContact::Had) if is_refused => self.lose(),
            _ => {}
        }
        if self.health == Some(EngineHealth::NotReady) {
            // Its page is from before the restart.
            self.latest = None;
        }
        self.trouble = Some(nothing.to_string());
        self.failures = self.failures.saturating_add(1);
        match probe_kind {
            ProbeKind::Metrics(..) if self.home.is_some() || is_somebody => {
                self.pause(asked, limits.retry_engine)
            }
            ProbeKind::Metrics(..) => self.turn_over(1, asked, limits.retry_engine),
            ProbeKind::Search(addresses) => self.turn_over(addresses.len(), asked, limits.retry_guess),
        }
    }

    /// Its process is gone; the next one is probed from scratch.
    fn lose(&mut self) {
        self.contact = EngineContact::Lost;
        self.health = None;
        self.properties = CacheSizeProbe::NotYet;
        self.kv_cache_tokens = None;
        (self.preemptions, self.preempted) = (None, None);
        self.token_rate = TokenRate::default();
    }

    /// Continues with the next addresses; after the last, with a pause.
    fn turn_over(&mut self, tried: usize, asked: Instant, longest: Duration) {
        self.turn += tried;
        if self.turn < self.sought.addresses.len() {
            self.failures -= 1;
        } else {
            self.turn = 0;
            self.pause(asked, longest);
        }
    }

    fn pause(&mut self, asked: Instant, longest: Duration) {
        // From the sixth failure on it is the longest anyway.
        let doubled = FIRST_PAUSE * (1 << (self.failures - 1).min(6));
        self.next = asked + doubled.min(longest);
    }

    /// What to report of it; nothing if it may be no engine at all.
    pub fn report(
        &self,
        pod: &PodOnNode,
        gpus: Vec<GpuUuid>,
        now: Instant,
        limits: &EngineLimits,
    ) -> Option<EngineReport> {
        if self.engine.is_none() && self.sought.claim == EngineEvidence::Guessed {
            return None;
        }
        let latest = self.latest.as_ref().filter(|(_, at)| now.duration_since(*at) <= limits.keep);
        let age = latest.map_or(Duration::ZERO, |(_, at)| now.duration_since(*at));
        let figures = latest.map(|(figures, _)| figures);
        let state = self.state(pod, figures);
        Some(EngineReport {
            pod: pod.uid.clone(),
            engine: self.known_engine().map_or("unknown", Engine::as_str).into(),
            gpus,
            state,
            sleep_level: figures.and_then(|figures| figures.sleep_level),
            model: figures.and_then(|figures| figures.model.clone()).or_else(|| declared_model(pod)),
            kv_cache_usage: figures.and_then(|figures| figures.kv_cache_usage),
            kv_cache_tokens: figures.and_then(|figures| figures.kv_cache_tokens.or(self.kv_cache_tokens)),
            waiting: figures.and_then(|figures| figures.waiting),
            preempting: self.preempted.is_some_and(|at| now.duration_since(at) <= limits.preempting),
            running: figures.and_then(|figures| figures.running),
            tokens_per_second: latest.and_then(|_| self.token_rate.per_second()),
            reusable_in: reuse::reusable_in(pod),
            age_millis: Millis(u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
            problem: self.problem(figures),
        })
    }

    fn state(&self, pod: &PodOnNode, figures: Option<&Figures>) -> EngineState {
        if pod.is_leaving {
            return EngineState::Draining;
        }
        match (self.contact, self.health, figures) {
            // The engine started before this agent did: if it hangs now it is not starting.
            (EngineContact::Never, ..) if pod.is_ready => EngineState::Unreachable,
            (EngineContact::Never, ..) => EngineState::Starting,
            (EngineContact::Lost, ..) => EngineState::Unreachable,
            (_, Some(EngineHealth::NotReady), _) => EngineState::Loading,
            (_, _, Some(figures)) if figures.sleep_level.is_some() => EngineState::Sleeping,
            (_, None, Some(_)) if self.has_health() => EngineState::Loading,
            (_, _, Some(_)) => EngineState::Serving,
            // Its metrics are not available, but it exists.
            (_, Some(EngineHealth::Ready), None) => EngineState::Serving,
            (_, _, None) => EngineState::Unreachable,
        }
    }

    fn has_health(&self) -> bool {
        self.home.as_ref().is_some_and(|home| health(self.known_engine(), home).is_some())
    }

    fn problem(&self, figures: Option<&Figures>) -> Option<String> {
        let of_page = figures.into_iter().flat_map(|figures| &figures.problems).map(ToString::to_string);
        let mut text = self.trouble.iter().cloned().chain(of_page).collect::<Vec<_>>().join("; ");
        if let Some((end, _)) = text.char_indices().nth(MAX_PROBLEM) {
            text.truncate(end);
        }
        (!text.is_empty()).then_some(text)
    }
}

/// The model that the pod declares.
pub fn declared_model(pod: &PodOnNode) -> Option<ModelId> {
    let said = pod.annotations.get("stowage.dev/model").or_else(|| pod.labels.get("llm-d.ai/model"));
    said.and_then(|text| ModelId::parse_named(text).ok().flatten())
}

//! The story, played: what arrives is created, what happens is shown, and after each chapter the promises are checked.

use super::chronicle::{Chronicle, News, broken_promises};
use super::scheduler::observations::Verb;
use super::screen::Screen;
use super::setup::Setup;
use super::story::{self, Chapter, Expect, MACHINES};
use crate::scheduling::audit::audit;
use anyhow::{Result, bail};
use serde::Serialize;
use serde_json::json;
use std::time::Duration;

/// Far longer than any chapter takes: a demo that hangs is a failed demo.
const PATIENCE: Duration = Duration::from_secs(60);

/// What came of it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    pub gpus: usize,
    pub pods_bound: usize,
    pub pods_waiting: usize,
    /// Pods that were evicted so that another could be placed.
    pub evicted: usize,
    pub promised_bytes: u64,
    pub promisable_bytes: u64,
    pub promised_percent: f64,
    pub filter_calls: usize,
    pub bind_calls: usize,
    /// Invariants that did not hold at some point; empty if all is well.
    pub violations: Vec<String>,
}

pub struct Play {
    pub setup: Setup,
    pub screen: Screen,
    chronicle: Chronicle,
    evicted: usize,
    violations: Vec<String>,
}

impl Play {
    pub fn new(setup: Setup, screen: Screen) -> Self {
        Self { setup, screen, chronicle: Chronicle::default(), evicted: 0, violations: Vec::new() }
    }

    pub async fn story(&mut self) -> Result<()> {
        for (name, value) in story::PRIORITY_CLASSES {
            let class = json!({"metadata": {"name": name}, "value": value});
            self.create("priorityclasses", class)?;
        }
        for (number, chapter) in story::chapters().iter().enumerate() {
            self.chapter(number + 1, chapter).await?;
        }
        Ok(())
    }

    async fn chapter(&mut self, number: usize, chapter: &Chapter) -> Result<()> {
        self.screen.chapter(number, chapter.title, chapter.text).await;
        let waiting_before = self.waiting();
        for arrival in &chapter.arrive {
            self.create("pods", arrival.pod())?;
        }
        for name in chapter.leave {
            let left = self.setup.api.delete(&format!("pods/default/{name}"));
            left.map_err(|error| anyhow::anyhow!("{name} cannot leave: {error:?}"))?;
        }
        let over = tokio::time::timeout(PATIENCE, self.until_over(chapter, &waiting_before)).await;
        self.screen.finish_chapter(&self.chronicle.gpus(&MACHINES));
        match over {
            Ok(()) => Ok(()),
            Err(_) => bail!("chapter {number} did not come to its end within {} s", PATIENCE.as_secs()),
        }
    }

    async fn until_over(&mut self, chapter: &Chapter, waiting_before: &[String]) {
        let mut revisions = self.setup.api.subscribe();
        loop {
            self.look(chapter);
            if self.is_over(chapter, waiting_before) {
                return;
            }
            if revisions.changed().await.is_err() {
                return;
            }
        }
    }

    /// Shows what is new, and checks every promise as it stands.
    fn look(&mut self, chapter: &Chapter) {
        for news in self.chronicle.news(&self.setup.api) {
            let leaves_by_itself = |name: &str| chapter.leave.contains(&name);
            self.evicted += usize::from(matches!(&news, News::Leaving(pod) if !leaves_by_itself(&pod.name)));
            self.screen.news(&news);
        }
        let gpus = self.chronicle.gpus(&MACHINES);
        self.screen.update(&gpus);
        let pods: Vec<_> = self.chronicle.pods().collect();
        let seen = broken_promises(&gpus, &pods);
        let audited = audit(&self.setup.service.ledger());
        self.violations.extend(seen.into_iter().chain(audited.iter().map(ToString::to_string)));
    }

    fn is_over(&self, chapter: &Chapter, waiting_before: &[String]) -> bool {
        let bound = |name: &str| self.chronicle.pods().any(|pod| pod.name == name && pod.node.is_some());
        let answered = |name: &str| {
            self.chronicle.pods().any(|pod| pod.name == name && (pod.node.is_some() || pod.refusal.is_some()))
        };
        match chapter.expect {
            Expect::AllBound => chapter.arrive.iter().all(|arrival| bound(&arrival.name)),
            Expect::AllAnswered => chapter.arrive.iter().all(|arrival| answered(&arrival.name)),
            Expect::WaitingBound(least) => waiting_before.iter().filter(|name| bound(name)).count() >= least,
        }
    }

    fn waiting(&self) -> Vec<String> {
        self.chronicle.pods().filter(|pod| pod.node.is_none()).map(|pod| pod.name.clone()).collect()
    }

    fn create(&self, kind: &str, object: serde_json::Value) -> Result<()> {
        match self.setup.api.create(kind, object) {
            Ok(_) => Ok(()),
            Err(error) => bail!("{kind} cannot be created: {error:?}"),
        }
    }

    pub fn summary(&self) -> Summary {
        let gpus = self.chronicle.gpus(&MACHINES);
        let promised: u64 = gpus.iter().flat_map(|gpu| &gpu.pods).map(|(_, bytes)| bytes).sum();
        let promisable: u64 = gpus.iter().map(|gpu| gpu.promisable).sum();
        let observations = self.setup.scheduler.observations();
        Summary {
            gpus: gpus.len(),
            pods_bound: self.chronicle.pods().filter(|pod| pod.node.is_some()).count(),
            pods_waiting: self.waiting().len(),
            evicted: self.evicted,
            promised_bytes: promised,
            promisable_bytes: promisable,
            promised_percent: (promised as f64 / promisable as f64 * 1000.0).round() / 10.0,
            filter_calls: observations.count(Verb::Filter),
            bind_calls: observations.count(Verb::Bind),
            violations: self.violations.clone(),
        }
    }
}

impl Summary {
    pub fn lines(&self) -> Vec<String> {
        let verdict = match self.violations.len() {
            0 => "No GPU was ever promised more than it has, and no exclusive GPU was shared.".to_owned(),
            n => format!("{n} invariant violation(s):"),
        };
        let mut lines = vec![
            String::new(),
            format!(
                "{} pods share {} GPUs: {:.1} % of the VRAM that can be promised is ({} pods wait; evicted for a serving pod: {}).",
                self.pods_bound, self.gpus, self.promised_percent, self.pods_waiting, self.evicted
            ),
            format!(
                "The scheduler asked filter {} times and bind {} times.",
                self.filter_calls, self.bind_calls
            ),
            verdict,
        ];
        lines.extend(self.violations.iter().map(|violation| format!("  {violation}")));
        lines
    }
}

//! One engine that lends, as readings show it: what it does not use, since when, and what it keeps. Which pods may have the rest, and
//! where the driver gives it back, is not decided here.

use crate::ids::GpuUuid;
use crate::policy::LendingRules;
use crate::units::{Bytes, Millis, Moment};
use serde::{Deserialize, Serialize};

/// How many reports in a row must show what an engine does not use before it lends: one may be late, or of the moment it falls
/// asleep.
pub const MIN_REPORTS: u32 = 3;

/// How long an ended loan counts: each one that counts doubles the time for which the engine must sleep before it lends again.
const ENDED_LOAN_WINDOW: Millis = Millis::seconds(3600);

/// The least time that is doubled, so that doubling works even if the policy lends at once.
const MIN_LENDING_PAUSE: Millis = Millis::seconds(1);

/// The most ended loans that are remembered: with more, the pause is longer than they count anyway.
const MAX_REMEMBERED_LOANS: usize = 16;

/// After a longer time without a reading it is unknown what an engine used at most.
const MAX_READING_GAP: Millis = Millis::seconds(30);

/// By how much an awake engine grows is measured over this time, and over less right after it.
const GROWTH_WINDOW: Millis = Millis::seconds(60);

/// What readings say of one engine.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Lender {
    /// `None` if it has, or is to have, the use of all it was granted.
    #[serde(rename = "sleep")]
    pub unused: Option<UnusedGrant>,
    /// The last reading that says it shows it awake.
    pub is_awake: bool,
    /// It gets back what it lent, because it will be needed soon. It sleeps still, and has not asked.
    #[serde(default)]
    pub is_recalled: bool,
    /// Readings in a row that show nothing of it on its GPUs.
    #[serde(default)]
    pub gone: u32,
    /// When its latest loans ended, the oldest first.
    pub ended: Vec<Moment>,
    /// What it used of its GPUs a while ago: by how much it grew since then, it may grow again.
    #[serde(default)]
    earlier: Vec<(GpuUuid, Bytes)>,
    #[serde(default)]
    earlier_sampled: Moment,
}

/// How a lender gets back what it lent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recovery {
    /// It sleeps, asks before it wakes, and waits until its borrowers have left.
    #[default]
    OnRequest,
    /// It allocates it: the driver ends a borrower.
    ByDriver,
}

/// What an engine does not use of its grant, as far as readings show it without a break.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct UnusedGrant {
    #[serde(default)]
    pub recovery: Recovery,
    pub since: Moment,
    /// When the latest reading that shows it was sampled.
    last: Moment,
    reports: u32,
    /// What it keeps of each of its GPUs: more than it uses.
    pub kept: Vec<(GpuUuid, Bytes)>,
    pub lends: bool,
    /// The latest reading does not say whether it sleeps, or how much it uses.
    pub is_silent: bool,
    /// The most that an engine that need not ask has used since then.
    #[serde(default)]
    peak: Vec<(GpuUuid, Bytes)>,
}

impl UnusedGrant {
    /// Of an engine that uses so much, and keeps so much more.
    fn new(
        recovery: Recovery,
        sampled: Moment,
        used: &[(GpuUuid, Bytes)],
        kept: Vec<(GpuUuid, Bytes)>,
    ) -> Self {
        Self {
            recovery,
            since: sampled,
            last: sampled,
            reports: 0,
            kept,
            lends: false,
            is_silent: false,
            peak: used.to_vec(),
        }
    }

    pub fn kept_of(&self, gpu: &GpuUuid) -> Option<Bytes> {
        figure_of(&self.kept, gpu)
    }

    /// Whether an engine that sleeps still uses no more than it keeps, and, as long as it does not lend, not much less either: it
    /// gives its memory back step by step.
    fn is_continued_by(&self, used: &[(GpuUuid, Bytes)], margin: Bytes) -> bool {
        used.iter().all(|(gpu, used)| {
            self.kept_of(gpu).is_some_and(|kept| {
                *used <= kept && (self.lends || kept <= *used + margin.times(2))
            })
        })
    }

    fn record_reading(&mut self, sampled: Moment) {
        self.reports = self.reports.saturating_add(1);
        (self.last, self.is_silent) = (sampled, false);
    }

    /// Whether it has lasted long enough that it is lent.
    fn has_lasted(&self, pause: Millis) -> bool {
        self.reports >= MIN_REPORTS && self.last.since(self.since) >= pause
    }
}

/// The figure of a GPU.
fn figure_of(figures: &[(GpuUuid, Bytes)], gpu: &GpuUuid) -> Option<Bytes> {
    let figure = figures.iter().find(|(uuid, _)| uuid == gpu);
    figure.map(|(_, bytes)| *bytes)
}

/// For each GPU of the first, its figure and that of the second, or nothing, in one.
fn combined(
    figures: &[(GpuUuid, Bytes)],
    others: &[(GpuUuid, Bytes)],
    combine: impl Fn(Bytes, Bytes) -> Bytes,
) -> Vec<(GpuUuid, Bytes)> {
    let one = |(gpu, figure): &(GpuUuid, Bytes)| {
        let other = figure_of(others, gpu).unwrap_or_default();
        (gpu.clone(), combine(*figure, other))
    };
    figures.iter().map(one).collect()
}

impl Lender {
    pub fn is_asleep(&self) -> bool {
        !self.is_awake && self.unused.is_some()
    }

    pub fn is_lending(&self) -> bool {
        self.unused.as_ref().is_some_and(|unused| unused.lends)
    }

    pub fn end_loan(&mut self) {
        if let Some(UnusedGrant {
            lends: true, last, ..
        }) = self.unused.take()
        {
            self.ended.push(last);
            let surplus = self.ended.len().saturating_sub(MAX_REMEMBERED_LOANS);
            self.ended.drain(..surplus);
        }
    }

    /// How long an engine does not use what it lends then: `after`, and twice as long for each loan that it ended lately.
    pub fn lending_pause(&self, now: Moment, after: Millis) -> Millis {
        let recent = self
            .ended
            .iter()
            .filter(|ended| now.since(**ended) < ENDED_LOAN_WINDOW)
            .count();
        match recent {
            0 => after,
            // However short the policy's time is, an engine that flaps costs few evictions.
            _ => after.max(MIN_LENDING_PAUSE).times(1 << recent),
        }
    }

    pub fn observe_asleep(
        &mut self,
        sampled: Moment,
        used: &[(GpuUuid, Bytes)],
        rules: &LendingRules,
    ) {
        self.is_awake = false;
        // It fell asleep, which ends no loan.
        self.unused
            .take_if(|unused| unused.recovery == Recovery::ByDriver);
        let is_continued = |unused: &UnusedGrant| unused.is_continued_by(used, rules.margin);
        if !self.unused.as_ref().is_some_and(is_continued) {
            self.end_loan();
            let kept = combined(used, &[], |used, _| used + rules.margin);
            let unused = UnusedGrant::new(Recovery::OnRequest, sampled, used, kept);
            self.unused = Some(unused);
        }
        let pause = self.lending_pause(sampled, rules.after);
        if let Some(unused) = &mut self.unused {
            unused.record_reading(sampled);
            unused.lends |= unused.has_lasted(pause);
        }
    }

    /// The latest reading does not say whether it sleeps, or how much it uses.
    pub fn observe_nothing(&mut self) {
        self.unused
            .iter_mut()
            .for_each(|unused| unused.is_silent = true);
    }

    /// Records what an engine uses that need not ask. It keeps the most that it used within the policy's time, by how much it grew
    /// within a minute, and a margin; when half of that is left, its borrowers leave, with their grace period if there is time for
    /// it. Returns whether it takes back what it lent.
    pub fn observe_use(
        &mut self,
        sampled: Moment,
        used: &[(GpuUuid, Bytes)],
        rules: &LendingRules,
    ) -> bool {
        let slept = self.recovery() == Some(Recovery::OnRequest);
        let woke_over_loan = slept && self.is_lending();
        if slept {
            self.end_loan();
        }
        let earlier = self.earlier_peak(sampled, used);
        let growth = combined(used, &earlier, Bytes::minus);
        let with_growth = |figures: &[(GpuUuid, Bytes)], margin| {
            combined(figures, &growth, |figure, growth| figure + growth + margin)
        };
        let needed = with_growth(used, Bytes(rules.unused_margin.0 / 2));
        let is_beyond = |unused: &UnusedGrant| {
            let is_kept = |(gpu, needed): &(GpuUuid, Bytes)| Some(*needed) <= unused.kept_of(gpu);
            unused.lends && !needed.iter().all(is_kept)
        };
        let is_taken_back = self.unused.as_ref().is_some_and(is_beyond);
        if is_taken_back {
            self.end_loan();
        }
        let pause = self.lending_pause(sampled, rules.unused_after);
        let unused = self.unused.get_or_insert_with(|| {
            let kept = with_growth(used, rules.unused_margin);
            UnusedGrant::new(Recovery::ByDriver, sampled, used, kept)
        });
        // What it used meanwhile is unknown.
        if unused.is_silent || sampled.since(unused.last) > MAX_READING_GAP {
            (unused.since, unused.reports, unused.peak) = (sampled, 0, used.to_vec());
        }
        unused.record_reading(sampled);
        unused.peak = combined(used, &unused.peak, Bytes::max);
        let kept = with_growth(&unused.peak, rules.unused_margin);
        let (is_over, was_lending) = (unused.has_lasted(pause), unused.lends);
        unused.kept = match (was_lending, is_over) {
            (false, true) => kept,
            (false, false) => combined(&kept, &unused.kept, Bytes::max),
            // What is lent becomes less by the end of the loan alone.
            (true, true) => combined(&kept, &unused.kept, Bytes::min),
            (true, false) => std::mem::take(&mut unused.kept),
        };
        if is_over {
            (unused.lends, unused.since, unused.peak) = (true, sampled, used.to_vec());
        }
        is_taken_back || woke_over_loan
    }

    pub fn recovery(&self) -> Option<Recovery> {
        self.unused.as_ref().map(|unused| unused.recovery)
    }

    /// The most that was known a minute ago, or less, to be used: to come back to that is no growth.
    fn earlier_peak(
        &mut self,
        sampled: Moment,
        used: &[(GpuUuid, Bytes)],
    ) -> Vec<(GpuUuid, Bytes)> {
        let is_known = |(gpu, _): &(GpuUuid, Bytes)| figure_of(&self.earlier, gpu).is_some();
        if sampled.since(self.earlier_sampled) >= GROWTH_WINDOW || !used.iter().all(is_known) {
            let peak = self.unused.as_ref().map(|unused| &*unused.peak);
            let peak = combined(used, peak.unwrap_or_default(), Bytes::max);
            (self.earlier, self.earlier_sampled) = (peak, sampled);
        }
        self.earlier.clone()
    }
}

//! The oracle's record: what the core was told, what it answered, and what follows by the documented rules for each GPU.
//!
//! Nothing here is read from the ledger. A pod's place is the one that was answered or shown, a reading is the one that was
//! reported, and sums are added up again from the pods of a node. The arithmetic is that of `docs/use/run-day.md` and
//! `docs/use/pod-contract.md`, written a second time: a mistake would have to be made twice to pass.

use super::gpu_views::GpuView;
use super::limits::EvictionRecord;
use super::rules::{FRESH, PolicyRules, STALE, START_GATE};

/// GPUs of one node, by bit. A node has at most eight.
pub(crate) type Mask = u8;
pub const MOST_GPUS: usize = 8;
pub const GIB: u64 = 1 << 30;

/// A pod that has ended, on a node of which nothing is reported, is not waited for longer than this.
const FIRST_REPORT_WITHIN: u64 = 10_000;
/// A Binding is written for so long after its decision.
const WRITTEN_FOR: u64 = 10_000;

/// What a pod asks for and shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodSpec {
    /// On each of its GPUs, in bytes.
    pub per_gpu: u64,
    pub gpus: u32,
    pub is_exclusive: bool,
    pub priority: i32,
    pub class: u8,
    pub namespace: u8,
    pub app: u8,
    pub may_preempt: bool,
    pub do_not_disrupt: bool,
    /// The number and the size of its group.
    pub group: Option<(u8, u32)>,
    pub grace: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub node: u8,
    pub gpus: Mask,
}

/// What the core knows of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KnownState {
    Nothing,
    Waiting,
    /// A Binding was answered, and may be on its way.
    Assumed(Place),
    /// Since when the core knows it.
    Bound(Place, u64),
}

/// GPUs that are reserved for a waiting pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    pub place: Place,
    pub victims: Vec<u32>,
    pub deadline: u64,
    pub made: u64,
}

/// Bindings of a pod that may land.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct OpenWrites {
    pub under_way: u32,
    /// When the last one began of which it is open whether it was written.
    pub may_land: Option<u64>,
}

#[derive(Debug, Clone)]
pub(crate) struct PodRecord {
    pub spec: PodSpec,
    pub told: KnownState,
    /// It is being deleted: when its grace ends.
    pub leaving: Option<u64>,
    pub kept: Option<Kept>,
    /// GPUs were kept for it, now or before. After a reservation of which nothing came, the planner waits before it evicts for the
    /// pod again.
    pub was_kept: bool,
    /// Since when it runs, by what was shown of it.
    pub started: u64,
    /// Until when its engine starts.
    pub starting: Option<u64>,
    /// When it was assumed.
    pub assumed_at: u64,
    pub open: OpenWrites,
    /// The node that was ranked first when it asked last.
    pub offered: Option<u8>,
}

/// What a GPU is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hardware {
    pub total: u64,
    /// VRAM that pods may have.
    pub capacity: u64,
    pub is_slice: bool,
}

/// What an agent measured of a node.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReadingRecord {
    pub sampled: u64,
    /// By GPU; `None` for one that it does not list.
    pub gpus: [Option<GpuReadingRecord>; MOST_GPUS],
}

#[derive(Debug, Clone, Default)]
pub(crate) struct GpuReadingRecord {
    pub used: Option<u64>,
    pub attributed: Vec<(u32, u64)>,
    /// KV cache in per cent, and requests that wait.
    pub load: Option<(u8, u32)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Age {
    Unreported,
    Fresh,
    Stale,
    Expired,
}

#[derive(Debug, Clone)]
pub(crate) struct NodeRecord {
    pub hardware: Vec<Hardware>,
    /// GPUs that the core knows, and those of them that take pods.
    pub listed: Mask,
    pub healthy: Mask,
    /// Some GPUs come with a later report: what the core knows is less than what was reported.
    pub is_kept_back: bool,
    /// When its list of GPUs changed last, and each time when it gained some.
    pub changed: u64,
    pub(super) gains: Vec<u64>,
    is_listed: bool,
    pub(super) reading: Option<ReadingRecord>,
    /// What the last three readings left unexplained.
    pub(super) rests: [[u64; 3]; MOST_GPUS],
    /// Pods that have ended here, and whose memory no later reading has shown to be free: when, and on which GPUs they were.
    departed: Vec<(u32, u64, Mask)>,
    /// Pods with a place or a reservation here.
    pub here: Vec<u32>,
    pub(super) views: Option<[GpuView; MOST_GPUS]>,
}

#[derive(Debug, Clone)]
pub struct Record {
    pub now: u64,
    pub rules: PolicyRules,
    pub nodes: Vec<NodeRecord>,
    pub pods: Vec<PodRecord>,
    /// Pods that the core knows.
    pub known: Vec<u32>,
    /// Evictions that a budget allows, by namespace and app.
    pub budgets: [[Option<u32>; 3]; 2],
    /// Evictions of the last minute.
    pub(super) evictions: Vec<EvictionRecord>,
    /// Pods for which a whole minute of evictions is kept, and until when.
    pub(super) minute_reserved: Vec<(u32, u64)>,
}

impl PodSpec {
    pub fn vram(&self) -> u64 {
        self.per_gpu * u64::from(self.gpus)
    }

    /// What it is charged on a GPU of that capacity.
    pub fn charge(&self, capacity: u64) -> u64 {
        if self.is_exclusive {
            capacity
        } else {
            self.per_gpu
        }
    }
}

impl KnownState {
    pub fn place(&self) -> Option<Place> {
        match *self {
            Self::Nothing | Self::Waiting => None,
            Self::Assumed(place) | Self::Bound(place, _) => Some(place),
        }
    }
}

pub fn each(mask: Mask) -> impl Iterator<Item = usize> {
    (0..MOST_GPUS).filter(move |gpu| mask >> gpu & 1 == 1)
}

impl NodeRecord {
    pub fn new(hardware: Vec<Hardware>) -> Self {
        Self {
            hardware,
            listed: 0,
            healthy: 0,
            is_kept_back: false,
            changed: 0,
            gains: Vec::new(),
            is_listed: false,
            reading: None,
            rests: [[0; 3]; MOST_GPUS],
            departed: Vec::new(),
            here: Vec::new(),
            views: None,
        }
    }

    pub(super) fn age(&self, now: u64) -> Age {
        match self
            .reading
            .as_ref()
            .map(|reading| now.saturating_sub(reading.sampled))
        {
            None => Age::Unreported,
            Some(age) if age < FRESH => Age::Fresh,
            Some(age) if age < STALE => Age::Stale,
            Some(_) => Age::Expired,
        }
    }

    /// Pods that have ended, and whose memory may be here.
    pub(super) fn departed_pods(&self) -> Vec<u32> {
        self.departed.iter().map(|(pod, ..)| *pod).collect()
    }

    pub fn sampled(&self) -> u64 {
        self.reading.as_ref().map_or(0, |reading| reading.sampled)
    }
}

impl Record {
    pub fn spec(&self, pod: u32) -> &PodSpec {
        &self.pods[pod as usize].spec
    }

    pub fn told(&self, pod: u32) -> KnownState {
        self.pods[pod as usize].told
    }

    /// Where a pod is charged: on those of its GPUs that the node lists.
    pub fn charged(&self, pod: u32) -> Option<Place> {
        let place = self.told(pod).place()?;
        Some(Place {
            gpus: place.gpus & self.nodes[usize::from(place.node)].listed,
            ..place
        })
    }

    /// The same, if it is charged on that GPU.
    pub(super) fn is_charged_on(&self, pod: u32, node: u8, gpu: usize) -> bool {
        self.charged(pod)
            .is_some_and(|place| place.node == node && place.gpus >> gpu & 1 == 1)
    }

    /// The reservation that keeps GPUs for the pod now.
    pub fn kept(&self, pod: u32) -> Option<&Kept> {
        let entry = &self.pods[pod as usize];
        entry
            .kept
            .as_ref()
            .filter(|_| entry.told == KnownState::Waiting)
    }

    /// Brings the record to a change of one pod.
    pub fn edit(&mut self, pod: u32, edit: impl FnOnce(&mut PodRecord)) {
        let nodes = |entry: &PodRecord| {
            [
                entry.told.place().map(|place| place.node),
                entry.kept.as_ref().map(|kept| kept.place.node),
            ]
        };
        let entry = &mut self.pods[pod as usize];
        let before = nodes(entry);
        edit(entry);
        let after = nodes(entry);
        for node in before
            .into_iter()
            .flatten()
            .chain(after.into_iter().flatten())
        {
            let entry = &mut self.nodes[usize::from(node)];
            entry.views = None;
            match (
                after.contains(&Some(node)),
                entry.here.iter().position(|here| *here == pod),
            ) {
                (true, None) => entry.here.push(pod),
                (false, Some(place)) => drop(entry.here.swap_remove(place)),
                _ => {}
            }
        }
    }

    pub(crate) fn set_told(&mut self, pod: u32, told: KnownState) {
        self.edit(pod, |entry| entry.told = told);
    }

    /// The pod is shown as waiting.
    pub fn note_waiting(&mut self, pod: u32) {
        if self.told(pod) == KnownState::Nothing {
            self.known.push(pod);
            self.set_told(pod, KnownState::Waiting);
        }
    }

    /// The pod is shown as bound, or its Binding was answered.
    pub(crate) fn note_bound(&mut self, pod: u32, place: Place) {
        let now = self.now;
        match self.told(pod) {
            KnownState::Nothing => self.known.push(pod),
            KnownState::Bound(known, _) if known.node == place.node => return,
            _ => {}
        }
        let is_engine = self.rules.class(self.spec(pod).class).engine;
        self.edit(pod, |entry| {
            let starts = match entry.told {
                KnownState::Assumed(assumed) if assumed.node == place.node => {
                    entry.starting.is_some()
                }
                KnownState::Bound(..) => false,
                _ => is_engine,
            };
            // An engine begins to start when its Binding lands.
            if starts {
                entry.starting = Some(now + START_GATE);
            }
            (entry.told, entry.kept) = (KnownState::Bound(place, now), None);
            entry.started = now;
        });
    }

    /// Whether its Binding is not written again: it was assumed long ago.
    pub fn is_old(&self, pod: u32) -> bool {
        self.now - self.pods[pod as usize].assumed_at >= WRITTEN_FOR
    }

    /// The Binding of an assumed pod was not written.
    pub(crate) fn note_unbound(&mut self, pod: u32) {
        if let KnownState::Assumed(place) = self.told(pod) {
            self.edit(pod, |entry| {
                (entry.told, entry.starting, entry.offered) =
                    (KnownState::Waiting, None, Some(place.node));
            });
        }
    }

    /// The pod is gone.
    pub(crate) fn note_gone(&mut self, pod: u32) {
        let told = self.told(pod);
        if told == KnownState::Nothing {
            return;
        }
        if let Some(Place { node, gpus }) = told.place() {
            let (now, node) = (self.now, &mut self.nodes[usize::from(node)]);
            if node.reading.is_some() {
                node.departed.retain(|(departed, ..)| *departed != pod);
                node.departed.push((pod, now, gpus));
            }
        }
        self.known.retain(|known| *known != pod);
        self.edit(pod, |entry| {
            (entry.told, entry.kept, entry.starting) = (KnownState::Nothing, None, None)
        });
    }

    pub(crate) fn touch_all(&mut self) {
        self.nodes.iter_mut().for_each(|node| node.views = None);
    }

    /// An agent lists these GPUs, of which some take no pod.
    pub fn report_devices(&mut self, node: u8, listed: Mask, healthy: Mask, is_kept_back: bool) {
        let charged = self.nodes[usize::from(node)]
            .here
            .iter()
            .filter_map(|pod| self.charged(*pod));
        let charged = charged
            .filter(|place| place.node == node)
            .fold(0, |mask, place| mask | place.gpus);
        let now = self.now;
        let entry = &mut self.nodes[usize::from(node)];
        // What comes with a later report is not known before.
        let (listed, healthy) = match is_kept_back {
            true => (listed & entry.listed, healthy & entry.healthy),
            false => (listed, healthy),
        };
        let listed = listed | entry.listed & charged;
        let gains = (listed & !entry.listed | healthy & !entry.healthy) != 0;
        // The first list is no gain.
        if std::mem::replace(&mut entry.is_listed, true) && gains && !is_kept_back {
            entry.gains.push(now);
        }
        if (entry.listed, entry.healthy) != (listed, healthy) || is_kept_back {
            (entry.listed, entry.healthy, entry.changed) = (listed, healthy, now);
        }
        (entry.is_kept_back, entry.views) = (is_kept_back, None);
    }

    /// An agent measured a node.
    pub fn report(&mut self, node: u8, reading: ReadingRecord) {
        let place = usize::from(node);
        for gpu in 0..self.nodes[place].hardware.len() {
            let is_listed = self.nodes[place].listed >> gpu & 1 == 1;
            let rest = match reading.gpus[gpu].as_ref().filter(|_| is_listed) {
                None => Some([0; 3]),
                Some(GpuReadingRecord { used: None, .. }) => None,
                Some(
                    seen @ GpuReadingRecord {
                        used: Some(used), ..
                    },
                ) => {
                    let [first, second, _] = self.nodes[place].rests[gpu];
                    Some([
                        self.rest(node, gpu, seen, *used, reading.sampled),
                        first,
                        second,
                    ])
                }
            };
            if let Some(rest) = rest {
                self.nodes[place].rests[gpu] = rest;
            }
        }
        let entry = &mut self.nodes[place];
        let shows = |pod: u32| shows(&reading, pod);
        entry
            .departed
            .retain(|(pod, at, _)| reading.sampled < *at || shows(*pod));
        (entry.reading, entry.views) = (Some(reading), None);
    }

    /// What of a GPU's use no pod explains that was bound before the sample.
    fn rest(&self, node: u8, gpu: usize, seen: &GpuReadingRecord, used: u64, sampled: u64) -> u64 {
        let attributed: u64 = seen.attributed.iter().map(|(_, bytes)| bytes).sum();
        let entry = &self.nodes[usize::from(node)];
        let growing = entry.here.iter().map(|pod| {
            let KnownState::Bound(_, since) = self.told(*pod) else {
                return 0;
            };
            if since > sampled || !self.is_charged_on(*pod, node, gpu) {
                return 0;
            }
            let shown = seen
                .attributed
                .iter()
                .find(|(shown, _)| shown == pod)
                .map_or(0, |(_, bytes)| *bytes);
            self.spec(*pod)
                .charge(entry.hardware[gpu].capacity)
                .saturating_sub(shown)
        });
        used.saturating_sub(attributed)
            .saturating_sub(growing.sum())
    }

    /// Whether a pod that has ended on the node may still have memory there.
    pub fn may_have_memory(&self, node: u8, pod: u32) -> bool {
        let entry = &self.nodes[usize::from(node)];
        let age = entry.age(self.now);
        let is_seen = || {
            matches!(age, Age::Fresh | Age::Stale)
                && entry
                    .reading
                    .as_ref()
                    .is_some_and(|reading| shows(reading, pod))
        };
        let departed = entry
            .departed
            .iter()
            .rev()
            .find(|(departed, ..)| *departed == pod);
        departed
            .is_some_and(|(_, at, _)| age != Age::Unreported || self.now < at + FIRST_REPORT_WITHIN)
            || is_seen()
    }

    /// A reservation of before the core began names a victim that it does not know.
    pub fn note_missed(&mut self, node: u8, pod: u32) {
        let now = self.now;
        self.nodes[usize::from(node)].departed.push((pod, now, 0));
    }

    /// How far the node's reading may be believed.
    pub(crate) fn age_of(&self, node: u8) -> Age {
        self.nodes[usize::from(node)].age(self.now)
    }

    /// Whether the policy places nothing on the node for want of reports.
    pub fn is_closed(&self, node: u8) -> bool {
        self.rules.refuses_expired && matches!(self.age_of(node), Age::Unreported | Age::Expired)
    }

    /// Whether the core knows all the GPUs of a reservation.
    pub(crate) fn is_resolved(&self, kept: &Kept) -> bool {
        kept.place.gpus & !self.nodes[usize::from(kept.place.node)].listed == 0
    }

    /// What a pod that has ended, and that a reading still shows on a GPU, keeps of it: what it was granted there.
    pub(super) fn kept_by_departed(&self, node: u8, gpu: usize, pod: u32) -> u64 {
        let entry = &self.nodes[usize::from(node)];
        let has_ended =
            |(departed, _, gpus): &(u32, u64, Mask)| *departed == pod && gpus >> gpu & 1 == 1;
        let total = entry.hardware[gpu].total;
        if entry.departed.iter().any(has_ended) {
            self.spec(pod).charge(total).min(total)
        } else {
            0
        }
    }

    /// What the latest reading shows of a pod on a GPU, or the pod keeps of it.
    pub fn attributed(&self, node: u8, gpu: usize, pod: u32) -> u64 {
        let reading = self.nodes[usize::from(node)].reading.as_ref();
        let seen = reading.and_then(|reading| reading.gpus[gpu].as_ref());
        let of_pod = |seen: &GpuReadingRecord| {
            seen.attributed
                .iter()
                .find(|(shown, _)| *shown == pod)
                .copied()
        };
        seen.and_then(of_pod).map_or(0, |(_, bytes)| {
            bytes.max(self.kept_by_departed(node, gpu, pod))
        })
    }

    /// Whether it is certain what the core knows of the node's GPUs.
    pub(crate) fn is_certain(&self, node: u8) -> bool {
        let entry = &self.nodes[usize::from(node)];
        !entry.is_kept_back
            && entry
                .here
                .iter()
                .filter_map(|pod| self.kept(*pod))
                .all(|kept| self.is_resolved(kept))
    }

    /// What the tenant of the pod's namespace may still take, beside what this pod has and once these pods have left; `None`
    /// without a limit.
    pub fn allowance(&self, pod: u32, leaving: &[u32]) -> Option<u64> {
        let limit = self
            .rules
            .tenant_limit
            .filter(|_| self.spec(pod).namespace == 0)?;
        let is_other = |other: &&u32| **other != pod && !leaving.contains(other);
        let others = self
            .known
            .iter()
            .filter(is_other)
            .filter(|other| self.spec(**other).namespace == 0);
        let used: u64 = others.map(|other| self.used(*other)).sum();
        Some(limit.saturating_sub(used))
    }

    fn used(&self, pod: u32) -> u64 {
        let spec = self.spec(pod);
        match (self.charged(pod), self.kept(pod)) {
            // Of a GPU that is not listed it has what it requests.
            (Some(place), _) => {
                let lost = u64::from(spec.gpus.saturating_sub(place.gpus.count_ones()));
                self.vram_on(spec, place) + lost * spec.per_gpu
            }
            (None, Some(kept)) if self.is_resolved(kept) => self.vram_on(spec, kept.place),
            (None, Some(_)) => spec.vram(),
            (None, None) => 0,
        }
    }

    /// What a pod takes on these GPUs.
    pub(crate) fn vram_on(&self, spec: &PodSpec, place: Place) -> u64 {
        let hardware = &self.nodes[usize::from(place.node)].hardware;
        each(place.gpus)
            .map(|gpu| spec.charge(hardware[gpu].capacity))
            .sum()
    }
}

fn shows(reading: &ReadingRecord, pod: u32) -> bool {
    reading
        .gpus
        .iter()
        .flatten()
        .any(|gpu| gpu.attributed.iter().any(|(shown, _)| *shown == pod))
}

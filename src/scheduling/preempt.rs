//! Who must leave a node so that a pod fits on it: the cheapest set on the very GPUs it needs, found exactly
//! unless the search runs into its budget ([`VictimSet::exact`] says which).
//!
//! For each set of GPUs the pod could get, a branch and bound over the pods there; the best over all sets wins.
//! Prices only grow as victims are added, so a branch that already costs as much as the best set found is cut.

use super::device::{Gpu, GpuSet};
use super::fit::usable;
use super::policy::{ClassId, ClassSet};
use super::reading::Pressure;
use super::request::{Companion, Demand, Sharing};
use crate::ids::{NodeName, PodUid};
use crate::units::{Bytes, Millis};
use serde::Serialize;
use std::ops::ControlFlow;

/// Branches looked at on one node before the best set found so far has to do. Pods of equal size are told apart by name
/// only, so even sixteen of them on each of eight GPUs stay far below it.
pub const SEARCH_BUDGET: u32 = 20_000;

/// One node with everyone who could leave it.
#[derive(Debug, Clone)]
pub struct Room {
    pub node: NodeName,
    pub gpus: Vec<Gpu>,
    /// Pods that may be evicted for the one who asks: of a preemptible class, of lower priority, placed,
    /// and not already leaving for someone else.
    pub candidates: Vec<Resident>,
    /// Who keeps classes off which GPUs: a class is let in again when the last that bars it has left.
    pub bars: Vec<Bar>,
}

/// A tenant of some GPUs that does not share them with everyone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bar {
    pub uid: PodUid,
    pub gpus: GpuSet,
    pub classes: ClassSet,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resident {
    pub uid: PodUid,
    pub gpus: GpuSet,
    pub per_gpu: Bytes,
    /// What its processes have beyond that, on each of its GPUs at least.
    pub beyond: Bytes,
    pub sharing: Sharing,
    pub priority: i32,
    pub class: ClassId,
    pub companion: Companion,
    /// How long it may take to leave.
    pub grace: Millis,
    /// What its eviction costs, in thousandths of a GPU for a second.
    pub cost: u64,
    pub standing: Standing,
}

/// Whose share a victim lives on: what is borrowed goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// Beyond its tenant's guarantee, if it has one. The more its tenant has borrowed for its weight, the less it is spared:
    /// its share in millionths, counted from above.
    Borrowed {
        spared: u32,
    },
    Guaranteed,
}

/// What the scheduler itself must see freed on the node: the sum over the victims it proposed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shortfall {
    pub vram: Bytes,
    pub companion: Companion,
}

/// What a victim set costs; less is better, the first field that differs decides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Price {
    /// Somebody loses what is guaranteed: only where what is borrowed is not enough.
    pub from_guarantee: bool,
    /// The highest priority among the victims, counted from the lowest possible.
    pub priority: u32,
    /// How much the most spared of the borrowers among them is spared.
    pub spared: u32,
    /// In thousandths of a GPU for a second.
    pub cost: u64,
    pub victims: u32,
    pub evicted: Bytes,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VictimSet {
    pub node: NodeName,
    /// The GPUs the pod will get.
    pub gpus: GpuSet,
    /// In order of UID.
    pub victims: Vec<PodUid>,
    pub price: Price,
    pub longest_grace: Millis,
    /// False if the search ended early: cheaper sets may exist.
    pub exact: bool,
}

impl Resident {
    pub fn vram(&self) -> Bytes {
        self.per_gpu.times(u64::from(self.gpus.len()))
    }
}

impl Shortfall {
    pub fn of<'a>(residents: impl Iterator<Item = &'a Resident>) -> Self {
        residents.fold(Self::default(), |sum, resident| sum.plus(resident))
    }

    fn plus(self, resident: &Resident) -> Self {
        Self {
            vram: self.vram + resident.vram(),
            companion: Companion {
                cpu: crate::units::MilliCpu(self.companion.cpu.0 + resident.companion.cpu.0),
                memory: self.companion.memory + resident.companion.memory,
            },
        }
    }

    fn is_covered_by(&self, freed: &Self) -> bool {
        self.vram <= freed.vram
            && self.companion.cpu <= freed.companion.cpu
            && self.companion.memory <= freed.companion.memory
    }
}

impl Price {
    /// With one more who leaves.
    pub fn plus(self, resident: &Resident) -> Self {
        let (guaranteed, spared) = match resident.standing {
            Standing::Guaranteed => (true, 0),
            Standing::Borrowed { spared } => (false, spared),
        };
        Self {
            from_guarantee: self.from_guarantee || guaranteed,
            priority: self.priority.max(resident.priority.abs_diff(i32::MIN)),
            spared: self.spared.max(spared),
            cost: self.cost.saturating_add(resident.cost),
            victims: self.victims + 1,
            evicted: self.evicted + resident.vram(),
        }
    }
}

/// The cheapest candidates of `room` whose leaving makes `demand` fit and covers `shortfall`. Empty if nobody has
/// to leave; `None` if no set is enough.
pub fn cheapest_victims(room: &Room, demand: &Demand, shortfall: Shortfall) -> Option<VictimSet> {
    let mut search = Search::new(room, demand, shortfall);
    let mut emptied = room.gpus.clone();
    room.candidates.iter().for_each(|resident| discharge(&mut emptied, resident));
    let leaves = |uid: &PodUid| room.candidates.iter().any(|resident| resident.uid == *uid);
    settle_bars(&room.bars, &mut emptied, leaves);
    let could_do = |gpu: &Gpu| usable(gpu, demand) && gpu.has_room(demand);
    let seats: Vec<usize> = (0..emptied.len()).filter(|place| could_do(&emptied[*place])).collect();
    // Breaks when the budget is spent; the search remembers that.
    let _ = for_each_subset(&seats, demand.gpus as usize, GpuSet::EMPTY, &mut |gpus| search.try_gpus(gpus));
    search.best()
}

struct Search<'a> {
    room: &'a Room,
    demand: &'a Demand,
    shortfall: Shortfall,
    steps: u32,
    best: Option<(Price, Vec<PodUid>, GpuSet, Millis)>,
}

/// One search for one set of GPUs: who could leave (those on the GPUs first), who has been chosen, and what is free then.
struct Branch<'a> {
    gpus: GpuSet,
    order: Vec<&'a Resident>,
    /// How many of `order` are on `gpus`.
    on_gpus: usize,
    chosen: Vec<&'a Resident>,
    state: Vec<Gpu>,
    freed: Shortfall,
}

impl<'a> Search<'a> {
    fn new(room: &'a Room, demand: &'a Demand, shortfall: Shortfall) -> Self {
        Self { room, demand, shortfall, steps: 0, best: None }
    }

    fn try_gpus(&mut self, gpus: GpuSet) -> ControlFlow<()> {
        // Equals stand side by side, so that one of them can be skipped for all.
        let cheapest_first = |resident: &&Resident| {
            (Price::default().plus(resident), likeness(resident), resident.uid.clone())
        };
        let (mut order, mut elsewhere): (Vec<_>, Vec<_>) =
            self.room.candidates.iter().partition(|resident| resident.gpus.meets(gpus));
        order.sort_by_cached_key(cheapest_first);
        elsewhere.sort_by_cached_key(cheapest_first);
        let on_gpus = order.len();
        order.append(&mut elsewhere);
        let state = self.room.gpus.clone();
        let mut branch = Branch { gpus, order, on_gpus, chosen: vec![], state, freed: Shortfall::default() };
        self.descend(&mut branch, 0, Price::default());
        if self.steps > SEARCH_BUDGET { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Decides over `branch.order[next]` and all after it.
    fn descend(&mut self, branch: &mut Branch<'a>, next: usize, price: Price) {
        self.steps += 1;
        if self.steps > SEARCH_BUDGET || self.best.as_ref().is_some_and(|(best, ..)| price >= *best) {
            return;
        }
        if self.is_enough(branch) {
            return self.offer(branch, price);
        }
        if next == branch.order.len() || !self.could_be_enough(branch, next) {
            return;
        }
        // Past those on the GPUs, the rest can only help to cover the scheduler's shortfall.
        if next >= branch.on_gpus && !self.has_seats(branch.gpus, &branch.state) {
            return;
        }
        let resident = branch.order[next];
        branch.take(resident, &self.room.bars);
        self.descend(branch, next + 1, price.plus(resident));
        branch.put_back(resident, self.room);
        // Without this one its equals are no better: it would have been taken in their place.
        let equals =
            branch.order[next..].iter().take_while(|other| likeness(other) == likeness(resident)).count();
        self.descend(branch, next + equals, price);
    }

    fn has_seats(&self, gpus: GpuSet, state: &[Gpu]) -> bool {
        gpus.iter().all(|place| state[place].has_room(self.demand))
    }

    fn is_enough(&self, branch: &Branch<'_>) -> bool {
        self.has_seats(branch.gpus, &branch.state) && self.shortfall.is_covered_by(&branch.freed)
    }

    /// Whether it would do if everyone left who is still undecided.
    fn could_be_enough(&self, branch: &Branch<'_>, next: usize) -> bool {
        let mut state = branch.state.clone();
        let mut freed = branch.freed;
        for resident in &branch.order[next..] {
            discharge(&mut state, resident);
            freed = freed.plus(resident);
        }
        let leaves = |uid: &PodUid| {
            branch.chosen.iter().chain(&branch.order[next..]).any(|resident| resident.uid == *uid)
        };
        settle_bars(&self.room.bars, &mut state, leaves);
        self.has_seats(branch.gpus, &state) && self.shortfall.is_covered_by(&freed)
    }

    /// Only a cheaper set comes here: of equal ones the first in the order of the search stays, and that is always the same.
    fn offer(&mut self, branch: &Branch<'_>, price: Price) {
        let mut victims: Vec<PodUid> = branch.chosen.iter().map(|resident| resident.uid.clone()).collect();
        victims.sort_unstable();
        let grace = branch.chosen.iter().map(|resident| resident.grace).max().unwrap_or_default();
        self.best = Some((price, victims, branch.gpus, grace));
    }

    fn best(self) -> Option<VictimSet> {
        let (price, victims, gpus, longest_grace) = self.best?;
        let exact = self.steps <= SEARCH_BUDGET;
        Some(VictimSet { node: self.room.node.clone(), gpus, victims, price, longest_grace, exact })
    }
}

impl<'a> Branch<'a> {
    fn take(&mut self, resident: &'a Resident, bars: &[Bar]) {
        discharge(&mut self.state, resident);
        self.chosen.push(resident);
        self.freed = self.freed.plus(resident);
        self.settle_bars(bars);
    }

    fn settle_bars(&mut self, bars: &[Bar]) {
        let Self { chosen, state, .. } = self;
        settle_bars(bars, state, |uid| chosen.iter().any(|resident| resident.uid == *uid));
    }

    fn put_back(&mut self, resident: &'a Resident, room: &Room) {
        let before = &room.gpus;
        for place in resident.gpus.iter() {
            let gpu = &mut self.state[place];
            gpu.charge(resident.per_gpu, resident.sharing);
            let (pressure, starting) = (before[place].pressure, before[place].starting);
            *gpu = Gpu { taken: gpu.taken + resident.beyond, pressure, starting, ..*gpu };
        }
        self.chosen.pop();
        self.freed = Shortfall::of(self.chosen.iter().copied());
        self.settle_bars(&room.bars);
    }
}

/// What tells residents apart in the search; those that are alike can stand in for each other.
fn likeness(resident: &Resident) -> impl Ord + use<> {
    let Companion { cpu, memory } = resident.companion;
    let vram = [resident.per_gpu, resident.beyond];
    let Resident { gpus, sharing, priority, cost, standing, .. } = *resident;
    (gpus, vram, sharing, cpu.0, memory, priority, cost, standing, resident.class)
}

/// Lets in whom nobody bars any more.
pub fn settle_bars(bars: &[Bar], state: &mut [Gpu], has_left: impl Fn(&PodUid) -> bool) {
    if bars.is_empty() {
        return;
    }
    state.iter_mut().for_each(|gpu| gpu.barred = ClassSet::NONE);
    for bar in bars.iter().filter(|bar| !has_left(&bar.uid)) {
        bar.gpus.iter().for_each(|place| state[place].barred = state[place].barred.with(bar.classes));
    }
}

/// The resident leaves: what it was promised is free, what it had beyond that is given back, and where nobody is left no
/// engine is busy.
pub fn discharge(state: &mut [Gpu], resident: &Resident) {
    for place in resident.gpus.iter() {
        let gpu = &mut state[place];
        gpu.discharge(resident.per_gpu, resident.sharing);
        gpu.taken = gpu.taken.minus(resident.beyond);
        if gpu.tenants == 0 {
            gpu.pressure = Pressure::NONE;
            gpu.starting = false;
        }
    }
}

/// Calls `visit` with `chosen` and each subset of `size` of the `places`, in lexicographic order, until it breaks.
fn for_each_subset(
    places: &[usize],
    size: usize,
    chosen: GpuSet,
    visit: &mut impl FnMut(GpuSet) -> ControlFlow<()>,
) -> ControlFlow<()> {
    if size == 0 {
        return visit(chosen);
    }
    for (i, place) in places.iter().enumerate().take((places.len() + 1).saturating_sub(size)) {
        let mut chosen = chosen;
        chosen.insert(*place);
        for_each_subset(&places[i + 1..], size - 1, chosen, visit)?;
    }
    ControlFlow::Continue(())
}

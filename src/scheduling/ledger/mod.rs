//! Who holds what: the one truth about promised VRAM.
//!
//! What is durable is read back from the API server (bound pods, holds); hints may be lost. The ledger knows no
//! clock: whoever calls passes `now`. It takes one lock outside, held for single calls and never across an await.
//!
//! A pod is charged from [`Ledger::assume`], before its Binding is written, to [`Ledger::release`]. What it is charged
//! on each GPU is what it asked for, or the whole GPU if it wants it to itself, or, if nobody knows on which GPUs it
//! runs, that much on every GPU of its node.

mod book;
mod entry;

pub use entry::{Assumed, Bound, Hint, Phase, PodEntry, Waiting};

use super::decision::{Hold, Placement};
use super::device::{Device, GpuSet};
use super::fit::{Misfit, misfit};
use super::node::{Node, NodeKind};
use super::pack;
use super::policy::{Eviction, Policy};
use super::preempt::{Resident, Room};
use super::request::{Demand, Sharing};
use super::snapshot::Snapshot;
use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::units::{Bytes, Moment};
use book::{Book, Entries};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

#[derive(Debug, Default)]
pub struct Ledger {
    policy: Arc<Policy>,
    entries: Entries,
    books: BTreeMap<NodeName, Book>,
    /// When hints and holds run out.
    deadlines: BTreeSet<(Moment, PodUid)>,
    generation: u64,
    /// The latest view handed out, and the nodes that changed since.
    published: Arc<Snapshot>,
    changed: BTreeSet<NodeName>,
    /// A node came or went since.
    nodes_changed: bool,
}

/// A pod as the API server shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub uid: PodUid,
    pub key: PodKey,
    pub demand: Demand,
    pub state: SeenState,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SeenState {
    Waiting { hold: Option<Hold> },
    Bound { node: NodeName, devices: Option<Arc<[GpuUuid]>> },
}

/// What is remarkable about a pod that was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remark {
    Nothing,
    /// Its recorded devices were edited after it was bound. The edit is ignored.
    DevicesEdited,
    /// What it asks for was edited after it was bound. The edit is ignored.
    DemandEdited,
    /// It is on a node, and nobody recorded on which GPUs.
    Unplaced,
}

/// Why a promise could not be made. Every one of them is retried by the scheduler from filter on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    #[error("no pod of this UID waits for a node")]
    UnknownPod,
    #[error("the pod is already bound to {node}")]
    BoundElsewhere { node: NodeName },
    #[error("an earlier Binding of this pod to {node} is not settled yet")]
    Unsettled { node: NodeName },
    #[error("the node does not fit any more: {0}")]
    NoLongerFits(#[from] Misfit),
    #[error("a victim is not there any more")]
    VictimGone,
    #[error("the pod already holds room on {node}")]
    AlreadyHolds { node: NodeName },
}

impl Conflict {
    /// A short name for metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::UnknownPod => "unknown-pod",
            Self::BoundElsewhere { .. } => "bound-elsewhere",
            Self::Unsettled { .. } => "unsettled",
            Self::NoLongerFits(misfit) => misfit.code(),
            Self::VictimGone => "victim-gone",
            Self::AlreadyHolds { .. } => "already-holds",
        }
    }

    /// What goes on the wire; the same text each time.
    pub fn phrase(&self) -> &'static str {
        match self {
            Self::UnknownPod => "conflict: pod unknown to Stowage or gone",
            Self::BoundElsewhere { .. } => "conflict: pod is bound to another node",
            Self::Unsettled { .. } => "conflict: an earlier binding is not settled",
            Self::NoLongerFits(Misfit::UnknownNode) => "conflict: node unknown to Stowage",
            Self::NoLongerFits(_) => "conflict: the GPU was taken meanwhile",
            Self::VictimGone => "conflict: a victim left meanwhile",
            Self::AlreadyHolds { .. } => "conflict: pod already holds room",
        }
    }
}

/// A promise that is in the books.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Assumption {
    /// Charged by this call.
    New(Placement),
    /// Charged by an earlier call that is still on its way.
    InFlight(Placement),
    /// Bound there already.
    Bound,
}

/// Sums over the cluster, for gauges.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    pub waiting: u64,
    pub assumed: u64,
    pub bound: u64,
    pub unplaced: u64,
    pub holds: u64,
    pub hints: u64,
    pub nodes: u64,
    pub gpus: u64,
    pub capacity: Bytes,
    pub charged: Bytes,
}

impl Ledger {
    pub fn new(policy: Arc<Policy>) -> Self {
        Self { policy, ..Self::default() }
    }

    // ---- what is seen ----

    /// The node exists. What its labels say of its devices counts until an agent reports.
    pub fn set_node(&mut self, name: &NodeName, kind: NodeKind, labelled: Option<Vec<Device>>) {
        let book = self.books.entry(name.clone()).or_insert_with(|| Book::new(name.clone()));
        if !book.exists || book.kind != kind {
            book.exists = true;
            book.kind = kind;
            self.nodes_changed = true;
            self.refresh(name);
        }
        if let Some(devices) = labelled.filter(|_| !self.books[name].reported) {
            self.set_devices(name, devices);
        }
    }

    /// The devices of a node as its agent reports them.
    pub fn report_devices(&mut self, name: &NodeName, devices: Vec<Device>) -> Result<(), Misfit> {
        let book = self.books.get_mut(name).filter(|book| book.exists).ok_or(Misfit::UnknownNode)?;
        book.reported = true;
        self.set_devices(name, devices);
        Ok(())
    }

    /// The node is gone. Its pods keep their charge until they are gone too.
    pub fn remove_node(&mut self, name: &NodeName) {
        if let Some(book) = self.books.get_mut(name).filter(|book| book.exists) {
            book.exists = false;
            self.nodes_changed = true;
            self.generation += 1;
            self.drop_hints_on(name);
            self.forget_empty_book(name);
        }
    }

    /// Brings the books to what the API server shows of a pod.
    pub fn see(&mut self, seen: Seen) -> Remark {
        match seen.state {
            SeenState::Waiting { hold } => {
                self.see_waiting(seen.uid, seen.key, seen.demand, hold);
                Remark::Nothing
            }
            SeenState::Bound { node, devices } => {
                self.see_bound(seen.uid, seen.key, seen.demand, Bound { node, devices })
            }
        }
    }

    /// The pod is gone or finished; what it held is free.
    pub fn release(&mut self, uid: &PodUid) -> Option<PodEntry> {
        let entry = self.entries.get(uid)?.clone();
        self.change(uid, |entries| {
            entries.remove(uid);
        });
        Some(entry)
    }

    fn set_devices(&mut self, name: &NodeName, devices: Vec<Device>) {
        let book = self.books.get_mut(name).expect("the caller has the node's page");
        let devices: Arc<[Device]> = book.merge_devices(devices, &self.entries).into();
        if devices != book.devices {
            // Hints name places, and those may be others now.
            self.drop_hints_on(name);
            self.books.get_mut(name).expect("hints do not remove a node that exists").devices = devices;
            self.refresh(name);
            self.end_broken_holds(name);
        }
    }

    /// A hold that has lost one of its GPUs keeps nothing any more: it runs out at the next look at the clock.
    fn end_broken_holds(&mut self, name: &NodeName) {
        let book = &self.books[name];
        let broken = |uid: &&PodUid| {
            let hold = self.entries[*uid].hold().filter(|hold| hold.node == *name);
            hold.is_some_and(|hold| book.resolve(&hold.devices).is_none())
        };
        let broken: Vec<PodUid> = book.pods.iter().filter(broken).cloned().collect();
        for uid in broken {
            let hold = self.entries[&uid].hold().cloned();
            self.set_hold(&uid, hold.map(|hold| Hold { deadline: Moment::default(), ..hold }));
        }
    }

    fn see_waiting(&mut self, uid: PodUid, key: PodKey, demand: Demand, hold: Option<Hold>) {
        match self.entries.get(&uid).map(|entry| (&entry.phase, &entry.demand)) {
            // Not bound yet in what is seen, which is older than what is known.
            Some((Phase::Assumed(_) | Phase::Bound(_), _)) => {}
            Some((Phase::Waiting(waiting), known))
                if *known == demand && (hold.is_none() || hold == waiting.hold) => {}
            _ => self.change(&uid.clone(), |entries| {
                let fresh =
                    PodEntry { key, demand: demand.clone(), phase: Phase::Waiting(Waiting::default()) };
                let entry = entries.entry(uid).or_insert(fresh);
                entry.demand = demand;
                if let Phase::Waiting(waiting) = &mut entry.phase {
                    // A hold is taken from the API server only where none is known: what is known is never older.
                    waiting.hold = waiting.hold.take().or(hold);
                }
            }),
        }
    }

    fn see_bound(&mut self, uid: PodUid, key: PodKey, demand: Demand, bound: Bound) -> Remark {
        let known = self.entries.get(&uid);
        let remark = match known.map(|entry| (entry, entry.node())) {
            Some((entry, Some(node))) if *node == bound.node => {
                let same_devices = entry.devices() == bound.devices.as_ref();
                if matches!(entry.phase, Phase::Assumed(_)) {
                    self.confirm(&uid);
                }
                let entry = &self.entries[&uid];
                return match () {
                    () if entry.devices().is_some() && !same_devices => Remark::DevicesEdited,
                    () if entry.devices().is_none() => Remark::Unplaced,
                    () if entry.demand != demand => Remark::DemandEdited,
                    () => Remark::Nothing,
                };
            }
            _ if bound.devices.is_none() => Remark::Unplaced,
            _ => Remark::Nothing,
        };
        let node = bound.node.clone();
        self.books.entry(node.clone()).or_insert_with(|| Book::new(node));
        self.change(&uid.clone(), |entries| {
            entries.insert(uid, PodEntry { key, demand, phase: Phase::Bound(bound) });
        });
        remark
    }

    // ---- what is decided ----

    /// Lets hints and holds run out. Answers whose holds did.
    pub fn expire(&mut self, now: Moment) -> Vec<PodUid> {
        let mut ended = Vec::new();
        while let Some((deadline, uid)) =
            self.deadlines.first().cloned().filter(|(deadline, _)| *deadline <= now)
        {
            self.deadlines.pop_first();
            let Some(entry) = self.entries.get(&uid) else { continue };
            if entry.hint().is_some_and(|hint| hint.expires <= deadline) {
                self.set_hint(&uid, None);
            } else if entry.hold().is_some_and(|hold| hold.deadline <= deadline) {
                self.drop_hold(&uid);
                ended.push(uid);
            }
        }
        ended
    }

    /// The pod asks for a node (again): what it was offered before is open, and did not lead to a bind.
    pub fn begin_attempt(&mut self, uid: &PodUid) {
        self.set_hint(uid, None);
        if let Some(Phase::Waiting(waiting)) = self.entries.get_mut(uid).map(|entry| &mut entry.phase) {
            waiting.tries += u32::from(waiting.offered.is_some());
        }
    }

    /// Notes that these GPUs of `node` were offered to the pod, in place of any earlier offer: a hint that the next pod
    /// steers around for a while.
    pub fn offer(&mut self, uid: &PodUid, node: &NodeName, gpus: GpuSet, now: Moment) {
        let expires = now + self.policy.hint_lifetime;
        self.set_hint(uid, Some(Hint { node: node.clone(), gpus, expires }));
        if let Some(Phase::Waiting(waiting)) = self.entries.get_mut(uid).map(|entry| &mut entry.phase) {
            waiting.offered = Some(node.clone());
        }
    }

    /// Keeps room for a waiting pod until its victims are gone.
    pub fn hold(&mut self, uid: &PodUid, hold: Hold) -> Result<(), Conflict> {
        let entry = self.waiting(uid)?;
        if let Some(held) = entry.hold() {
            return Err(Conflict::AlreadyHolds { node: held.node.clone() });
        }
        let book = self.books.get(&hold.node).ok_or(Misfit::UnknownNode)?;
        let mut gpus = book.gpus(&self.entries, self.policy.headroom, Some(uid));
        let leaving = self.victims_of_holds(book);
        for victim in hold.victims.iter() {
            if leaving.contains(victim) {
                return Err(Conflict::VictimGone);
            }
            let victim = self.entries.get(victim).ok_or(Conflict::VictimGone)?;
            let charge = book.charge_of(victim).ok_or(Conflict::VictimGone)?;
            charge.gpus.iter().for_each(|g| gpus[g].discharge(victim.demand.per_gpu, victim.demand.sharing));
        }
        let demand = &entry.demand;
        let seats = book.resolve(&hold.devices).ok_or_else(|| misfit(&gpus, demand))?;
        if !seats.iter().all(|g| gpus[g].has_room(demand.per_gpu, demand.sharing)) {
            return Err(misfit(&gpus, demand).into());
        }
        self.set_hold(uid, Some(hold));
        Ok(())
    }

    pub fn drop_hold(&mut self, uid: &PodUid) {
        self.set_hold(uid, None);
    }

    /// The room that is the pod's already: where it is bound or assumed, or what its hold keeps, with how many victims
    /// are still in the way.
    pub fn own_room(&self, uid: &PodUid) -> Option<(NodeName, Result<GpuSet, Misfit>)> {
        let entry = self.entries.get(uid)?;
        let node = entry.node().or(entry.hold().map(|hold| &hold.node))?;
        let verdict = match (self.books.get(node).filter(|book| book.exists), entry.hold()) {
            (None, _) => Err(Misfit::UnknownNode),
            (Some(book), Some(hold)) => self.room_of_hold(uid, &entry.demand, hold, book),
            (Some(book), None) => Ok(book.charge_of(entry).map(|charge| charge.gpus).unwrap_or_default()),
        };
        Some((node.clone(), verdict))
    }

    /// Promises the pod its GPUs on `node`, checking again that they are free. Idempotent.
    pub fn assume(&mut self, uid: &PodUid, node: &NodeName) -> Result<Assumption, Conflict> {
        let entry = self.entries.get(uid).ok_or(Conflict::UnknownPod)?;
        match &entry.phase {
            Phase::Bound(bound) if bound.node == *node => return Ok(Assumption::Bound),
            Phase::Bound(bound) => return Err(Conflict::BoundElsewhere { node: bound.node.clone() }),
            Phase::Assumed(assumed) if assumed.placement.node == *node => {
                return Ok(Assumption::InFlight(assumed.placement.clone()));
            }
            Phase::Assumed(assumed) => {
                return Err(Conflict::Unsettled { node: assumed.placement.node.clone() });
            }
            Phase::Waiting(_) => {}
        }
        let book = self.books.get(node).filter(|book| book.exists).ok_or(Misfit::UnknownNode)?;
        let gpus = match entry.hold().filter(|hold| hold.node == *node) {
            Some(hold) => self.room_of_hold(uid, &entry.demand, hold, book)?,
            None => self.free_room(uid, &entry.demand, book)?,
        };
        let placement = self.placement(book, &entry.demand, gpus);
        self.change(uid, |entries| {
            let phase = &mut entries.get_mut(uid).expect("the entry was just read").phase;
            if let Phase::Waiting(before) = phase {
                let before = std::mem::take(before);
                *phase = Phase::Assumed(Assumed { placement: placement.clone(), before });
            }
        });
        Ok(Assumption::New(placement))
    }

    /// The Binding is written.
    pub fn confirm(&mut self, uid: &PodUid) {
        if let Some(entry) = self.entries.get_mut(uid)
            && let Phase::Assumed(Assumed { placement, .. }) = &entry.phase
        {
            let bound = Bound { node: placement.node.clone(), devices: Some(placement.devices.clone()) };
            entry.phase = Phase::Bound(bound);
        }
    }

    /// The pod is on `node` with these devices, whatever was assumed: a read past every cache said so.
    pub fn settle(&mut self, uid: &PodUid, node: &NodeName, devices: Option<Arc<[GpuUuid]>>) {
        self.change(uid, |entries| {
            if let Some(entry) = entries.get_mut(uid) {
                entry.phase = Phase::Bound(Bound { node: node.clone(), devices });
            }
        });
    }

    /// The Binding was not written. The pod waits again, with the hold it had before.
    pub fn forget(&mut self, uid: &PodUid) {
        self.change(uid, |entries| {
            let Some(entry) = entries.get_mut(uid) else { return };
            if let Phase::Assumed(Assumed { placement, before }) = &mut entry.phase {
                let offered = Some(placement.node.clone());
                entry.phase = Phase::Waiting(Waiting { offered, hint: None, ..std::mem::take(before) });
            }
        });
    }

    // ---- what is asked ----

    /// The cluster as it stands. Cheap: only what changed since the last call is copied.
    pub fn snapshot(&mut self) -> Arc<Snapshot> {
        if self.nodes_changed {
            let nodes =
                self.books.values().filter(|book| book.exists).map(|book| book.view.clone()).collect();
            self.published = Arc::new(Snapshot::new(self.generation, nodes));
        } else if self.published.generation() != self.generation {
            let changed = self.changed.iter().map(|name| &self.books[name]).filter(|book| book.exists);
            Arc::make_mut(&mut self.published).update(self.generation, changed.map(|book| book.view.clone()));
        }
        self.nodes_changed = false;
        self.changed.clear();
        self.published.clone()
    }

    pub fn entry(&self, uid: &PodUid) -> Option<&PodEntry> {
        self.entries.get(uid)
    }

    pub fn policy(&self) -> &Arc<Policy> {
        &self.policy
    }

    /// All pods, in order of UID.
    pub fn entries(&self) -> BTreeMap<&PodUid, &PodEntry> {
        #[expect(clippy::disallowed_methods, reason = "collected into an order")]
        self.entries.iter().collect()
    }

    /// Whether a Node object of this name exists.
    pub fn has_node(&self, name: &NodeName) -> bool {
        self.books.get(name).is_some_and(|book| book.exists)
    }

    /// A node's devices and its share of the books.
    pub fn node(&self, name: &NodeName) -> Option<&Node> {
        self.books.get(name).map(|book| &book.view)
    }

    /// The node with everyone on it who may be evicted for the pod of `uid`.
    pub fn room_for(&self, uid: &PodUid, node: &NodeName) -> Option<Room> {
        let preemptor = self.entries.get(uid)?;
        let book = self.books.get(node).filter(|book| book.exists && book.kind == NodeKind::Stowage)?;
        let leaving = self.victims_of_holds(book);
        let may_leave = |victim: &PodUid, entry: &PodEntry| {
            entry.demand.priority < preemptor.demand.priority
                && self.policy.class(entry.demand.class).eviction == Eviction::ForHigherPriority
                && matches!(entry.phase, Phase::Bound(_))
                && !leaving.contains(victim)
        };
        let residents = book.pods.iter().map(|uid| (uid, &self.entries[uid]));
        let candidates = residents
            .filter(|(uid, entry)| may_leave(uid, entry))
            .filter_map(|(uid, entry)| self.resident(uid, entry, book))
            .collect();
        let gpus = book.gpus(&self.entries, self.policy.headroom, Some(uid));
        Some(Room { node: node.clone(), gpus, candidates })
    }

    /// A pod as part of what its node holds, if it is placed there.
    pub fn resident_on(&self, uid: &PodUid, node: &NodeName) -> Option<Resident> {
        self.resident(uid, self.entries.get(uid)?, self.books.get(node)?)
    }

    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for entry in self.entries().values() {
            match &entry.phase {
                Phase::Waiting(_) => totals.waiting += 1,
                Phase::Assumed(_) => totals.assumed += 1,
                Phase::Bound(_) if self.is_placed(entry) => totals.bound += 1,
                Phase::Bound(_) => totals.unplaced += 1,
            }
            totals.holds += u64::from(entry.hold().is_some());
            totals.hints += u64::from(entry.hint().is_some());
        }
        for book in self.books.values().filter(|book| book.exists) {
            totals.nodes += 1;
            totals.gpus += book.devices.len() as u64;
            totals.capacity += book.view.capacity();
            totals.charged += book.view.charged();
        }
        totals
    }

    /// Whether the books know on which GPUs a pod is.
    pub fn is_placed(&self, entry: &PodEntry) -> bool {
        let charge = || self.books.get(entry.node()?)?.charge_of(entry);
        charge().is_some_and(|charge| charge.placed)
    }

    /// What is bound or promised on a node, as the node's sum would show it.
    pub fn promised_on(&self, name: &NodeName) -> Bytes {
        let Some(book) = self.books.get(name) else { return Bytes::ZERO };
        book.pods
            .iter()
            .map(|uid| &self.entries[uid])
            .filter(|e| e.node() == Some(name))
            .map(|e| e.demand.vram())
            .sum()
    }

    pub(super) fn books(&self) -> impl Iterator<Item = (&NodeName, &Node)> {
        self.books.iter().map(|(name, book)| (name, &book.view))
    }

    // ---- inside ----

    fn waiting(&self, uid: &PodUid) -> Result<&PodEntry, Conflict> {
        let entry = self.entries.get(uid).ok_or(Conflict::UnknownPod)?;
        match &entry.phase {
            Phase::Waiting(_) => Ok(entry),
            Phase::Assumed(assumed) => Err(Conflict::Unsettled { node: assumed.placement.node.clone() }),
            Phase::Bound(bound) => Err(Conflict::BoundElsewhere { node: bound.node.clone() }),
        }
    }

    fn free_room(&self, uid: &PodUid, demand: &Demand, book: &Book) -> Result<GpuSet, Misfit> {
        if book.kind == NodeKind::DevicePlugin {
            return Err(Misfit::DevicePluginNode);
        }
        let gpus = book.gpus(&self.entries, self.policy.headroom, Some(uid));
        pack::choose(&gpus, demand, GpuSet::first(gpus.len())).ok_or_else(|| misfit(&gpus, demand))
    }

    fn room_of_hold(
        &self,
        uid: &PodUid,
        demand: &Demand,
        hold: &Hold,
        book: &Book,
    ) -> Result<GpuSet, Misfit> {
        let gpus = book.gpus(&self.entries, self.policy.headroom, Some(uid));
        let still_here =
            |victim: &&PodUid| self.entries.get(*victim).is_some_and(|v| book.charge_of(v).is_some());
        let remaining = hold.victims.iter().filter(still_here).count() as u32;
        if remaining > 0 {
            return Err(Misfit::VictimsLeaving { remaining });
        }
        let held = book.resolve(&hold.devices).and_then(|held| pack::choose(&gpus, demand, held));
        held.ok_or_else(|| misfit(&gpus, demand))
    }

    fn placement(&self, book: &Book, demand: &Demand, gpus: GpuSet) -> Placement {
        let headroom = self.policy.headroom;
        let granted_on = |device: &Device| match demand.sharing {
            Sharing::Shared => demand.per_gpu,
            Sharing::Exclusive => device.capacity(headroom),
        };
        let hundredths = |device: &Device| {
            (u128::from(granted_on(device).0) * 100)
                .checked_div(u128::from(device.total.0))
                .unwrap_or(0)
                .min(100) as u8
        };
        let devices = || gpus.iter().map(|place| &book.devices[place]);
        Placement {
            node: book.view.name.clone(),
            devices: devices().map(|device| device.uuid.clone()).collect(),
            granted: devices().map(granted_on).sum(),
            memory_hundredths: devices().map(hundredths).min().unwrap_or(0),
        }
    }

    fn resident(&self, uid: &PodUid, entry: &PodEntry, book: &Book) -> Option<Resident> {
        let charge = book.charge_of(entry).filter(|charge| charge.placed)?;
        Some(Resident {
            uid: uid.clone(),
            gpus: charge.gpus,
            per_gpu: entry.demand.per_gpu,
            sharing: entry.demand.sharing,
            priority: entry.demand.priority,
            companion: entry.demand.companion,
            grace: entry.demand.grace,
        })
    }

    fn victims_of_holds(&self, book: &Book) -> BTreeSet<&PodUid> {
        let holds = book.pods.iter().filter_map(|uid| self.entries[uid].hold());
        holds.filter(|hold| hold.node == book.view.name).flat_map(|hold| hold.victims.iter()).collect()
    }

    fn set_hint(&mut self, uid: &PodUid, hint: Option<Hint>) {
        let Some(Phase::Waiting(waiting)) = self.entries.get(uid).map(|entry| &entry.phase) else { return };
        if waiting.hint == hint {
            return;
        }
        self.change(uid, |entries| {
            if let Some(Phase::Waiting(waiting)) = entries.get_mut(uid).map(|entry| &mut entry.phase) {
                waiting.hint = hint;
            }
        });
    }

    fn set_hold(&mut self, uid: &PodUid, hold: Option<Hold>) {
        self.change(uid, |entries| {
            if let Some(Phase::Waiting(waiting)) = entries.get_mut(uid).map(|entry| &mut entry.phase) {
                waiting.hold = hold;
            }
        });
    }

    fn drop_hints_on(&mut self, node: &NodeName) {
        let Some(book) = self.books.get(node) else { return };
        let hinted = |uid: &&PodUid| self.entries[*uid].hint().is_some_and(|hint| hint.node == *node);
        let uids: Vec<PodUid> = book.pods.iter().filter(hinted).cloned().collect();
        uids.iter().for_each(|uid| self.set_hint(uid, None));
    }

    /// Every change of an entry goes through here: the pages it stood on and the pages it stands on now are
    /// brought up to date, and so are its deadlines.
    fn change(&mut self, uid: &PodUid, edit: impl FnOnce(&mut Entries)) {
        let before = self.entries.get(uid).map(footprint).unwrap_or_default();
        edit(&mut self.entries);
        let after = self.entries.get(uid).map(footprint).unwrap_or_default();
        for deadline in &before.deadlines {
            self.deadlines.remove(&(*deadline, uid.clone()));
        }
        self.deadlines.extend(after.deadlines.iter().map(|deadline| (*deadline, uid.clone())));
        for node in before.nodes.iter().filter(|node| !after.nodes.contains(*node)) {
            self.books.get_mut(node).expect("a page with a pod stays").pods.remove(uid);
        }
        for node in &after.nodes {
            self.books
                .entry(node.clone())
                .or_insert_with(|| Book::new(node.clone()))
                .pods
                .insert(uid.clone());
        }
        for node in before.nodes.union(&after.nodes) {
            self.refresh(node);
            self.forget_empty_book(node);
        }
    }

    fn refresh(&mut self, name: &NodeName) {
        let Some(book) = self.books.get_mut(name) else { return };
        let gpus = book.gpus(&self.entries, self.policy.headroom, None);
        self.generation += 1;
        book.view = Node {
            name: name.clone(),
            kind: book.kind,
            generation: self.generation,
            gpus: gpus.into(),
            devices: book.devices.clone(),
        };
        self.changed.insert(name.clone());
    }

    fn forget_empty_book(&mut self, name: &NodeName) {
        if self.books.get(name).is_some_and(|book| !book.exists && book.pods.is_empty()) {
            self.books.remove(name);
            self.changed.remove(name);
        }
    }
}

/// Where an entry stands in the books.
#[derive(Default)]
struct Footprint {
    nodes: BTreeSet<NodeName>,
    deadlines: Vec<Moment>,
}

fn footprint(entry: &PodEntry) -> Footprint {
    let hint = entry.hint();
    let hold = entry.hold();
    let nodes = [entry.node(), hint.map(|hint| &hint.node), hold.map(|hold| &hold.node)];
    Footprint {
        nodes: nodes.into_iter().flatten().cloned().collect(),
        deadlines: hint.map(|hint| hint.expires).into_iter().chain(hold.map(|hold| hold.deadline)).collect(),
    }
}

#[cfg(test)]
mod tests;

//! One GPU: what the hardware is ([`Device`]), and what is left of it ([`Gpu`]). A MIG slice is a GPU with a parent.

use super::classification::ClassSet;
use super::cluster_share::TenantUsage;
use super::demand::{Demand, MAX_GPUS, Sharing};
use super::gpu_wish::GpuTraits;
use super::headroom::Headroom;
pub use super::health::Health;
use super::is_default;
use super::latency::NeighborRoom;
use super::node_reading::EngineLoad;
use super::spare::SpareSet;
use crate::ids::{GpuModel, GpuUuid, PodUid};
use crate::units::{Bytes, Micros, Percent};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A GPU or MIG slice as its node reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    pub uuid: GpuUuid,
    /// NVML's index on its node.
    pub index: u32,
    pub model: GpuModel,
    /// The GPU a MIG slice is cut from.
    pub parent: Option<GpuUuid>,
    pub total: Bytes,
    /// What the driver keeps for itself (NVML's `reserved`).
    pub reserved: Bytes,
    pub health: Health,
    /// NVML's compute mode is exclusive-process: it takes only a pod that has it exclusively.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub exclusive_process: bool,
    /// GPUs of one node with the same number reach each other over NVLink.
    pub island: Option<u8>,
}

impl Device {
    /// VRAM that pods may be allocated: total − driver's reserve − headroom.
    pub fn capacity(&self, headroom: &Headroom) -> Bytes {
        self.total
            .minus(self.reserved)
            .minus(headroom.percent_for(&self.model).share_of(self.total))
    }
}

/// Allocations and load of one GPU. Small and flat: a decision reads thousands of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// VRAM that pods may be allocated, all together.
    pub capacity: Bytes,
    /// VRAM that pods and reservations have.
    pub charged: Bytes,
    /// VRAM softly reserved for pods that are not bound yet. Advisory.
    pub softly_reserved: Bytes,
    /// One of these pods is an engine: if it comes, no other may start beside it for a while.
    pub engine_softly_reserved: bool,
    /// Classes that these pods would not share it with.
    pub excluded_by_soft_reservations: ClassSet,
    /// VRAM in use that no pod's grant explains, or a margin where no agent reports.
    pub unaccounted_vram: Bytes,
    /// VRAM that engines on it lend to pods that may borrow, used or not.
    #[serde(default, skip_serializing_if = "is_default")]
    pub lendable: Bytes,
    /// They lend to pods of a lower priority than this.
    #[serde(default, skip_serializing_if = "is_default")]
    pub lends_below: i32,
    /// They lend only to pods that have VRAM limits: one of them takes back what it lent by allocating it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lends_within_limits: bool,
    /// How busy the engines on it are.
    pub engine_load: EngineLoad,
    /// What its pods leave to one more of their time, and cost it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub neighbors: NeighborRoom,
    /// Classes that its pods do not share it with.
    pub excluded_classes: ClassSet,
    /// Pods and reservations on it.
    #[serde(rename = "tenants")]
    pub residents: u16,
    /// Its one pod shares it with no other.
    pub exclusive: bool,
    /// An engine is starting on it.
    pub starting: bool,
    pub slice: bool,
    /// Its NVLink island among the node's, if it is on one.
    pub island: Option<u8>,
    pub health: Health,
    /// Its compute mode lets no two pods share it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub exclusive_process: bool,
    /// The rules of `planning.spare` for which it counts as a free GPU now; none while anything is on it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub spare: SpareSet,
    /// What sets it apart from others of its node.
    #[serde(default, skip_serializing_if = "is_default")]
    pub traits: GpuTraits,
}

impl Gpu {
    pub fn from_device(device: &Device, headroom: &Headroom) -> Self {
        Self {
            capacity: device.capacity(headroom),
            charged: Bytes::ZERO,
            softly_reserved: Bytes::ZERO,
            engine_softly_reserved: false,
            excluded_by_soft_reservations: ClassSet::NONE,
            unaccounted_vram: Bytes::ZERO,
            lendable: Bytes::ZERO,
            lends_below: 0,
            lends_within_limits: false,
            engine_load: EngineLoad::default(),
            neighbors: NeighborRoom::EMPTY,
            excluded_classes: ClassSet::NONE,
            residents: 0,
            exclusive: false,
            starting: false,
            slice: device.parent.is_some(),
            island: device.island,
            health: device.health,
            exclusive_process: device.exclusive_process,
            spare: SpareSet::NONE,
            traits: GpuTraits::default(),
        }
    }

    /// Whether a pod that comes has all of it: nothing is on it, and of its VRAM at most a `margin` is used by what is no pod.
    pub fn is_wholly_free(&self, margin: Bytes) -> bool {
        let is_empty =
            self.residents == 0 && self.charged == Bytes::ZERO && self.unaccounted_vram <= margin;
        is_empty && self.health == Health::Healthy && !self.slice
    }

    /// Whether it is one of those that the pod asks for by labels.
    pub(crate) fn matches_selector_of(&self, demand: &Demand) -> bool {
        demand
            .wish
            .as_ref()
            .is_none_or(|wish| wish.matches(self.traits))
    }

    /// Whether it is one of the last free GPUs, which the demand's class may not take.
    pub(crate) fn is_kept_spare_from(&self, demand: &Demand) -> bool {
        self.spare.intersects(demand.kept)
    }

    pub fn free(&self) -> Bytes {
        self.capacity
            .minus(self.charged)
            .minus(self.unaccounted_vram)
    }

    /// VRAM that such a pod may have here: what is free, and what engines lend to it.
    pub(crate) fn free_for(&self, demand: &Demand) -> Bytes {
        let may_borrow = demand.terms.borrows
            && demand.priority < self.lends_below
            && (!self.lends_within_limits || demand.can_have_vram_limits());
        let lent = if may_borrow {
            self.lendable
        } else {
            Bytes::ZERO
        };
        (self.capacity + lent)
            .minus(self.charged)
            .minus(self.unaccounted_vram)
    }

    /// VRAM that would be free if every pod left: capacity − unaccounted VRAM.
    pub fn free_without_pods(&self) -> Bytes {
        self.capacity.minus(self.unaccounted_vram)
    }

    /// What a pod of this kind is charged here: the whole GPU if it is exclusive.
    pub(crate) fn charge_for(&self, per_gpu: Bytes, sharing: Sharing) -> Bytes {
        match sharing {
            Sharing::Shared => per_gpu,
            Sharing::Exclusive => self.capacity,
        }
    }

    /// What a pod with this demand adds to its tenant's usage if it runs on this GPU.
    pub fn usage_of(&self, demand: &Demand) -> TenantUsage {
        let vram = self.charge_for(demand.per_gpu, demand.sharing);
        let thousandths = (u128::from(vram.0) * 1000).div_ceil(u128::from(self.capacity.0.max(1)));
        TenantUsage {
            vram,
            milli_gpus: thousandths.min(1000) as u64,
        }
    }

    /// Adds a pod, which has work all the time as far as is known.
    pub fn charge(&mut self, per_gpu: Bytes, sharing: Sharing) {
        self.charged += self.charge_for(per_gpu, sharing);
        self.residents += 1;
        self.neighbors = self.neighbors.charged();
        self.exclusive |= sharing == Sharing::Exclusive;
    }

    /// The reverse of [`Gpu::charge`], of a pod that has work for that share of the time.
    pub fn discharge(&mut self, per_gpu: Bytes, sharing: Sharing, busy: Percent) {
        self.charged = self.charged.minus(self.charge_for(per_gpu, sharing));
        self.residents -= 1;
        self.neighbors = match self.residents {
            0 => self.neighbors.emptied(),
            _ => self.neighbors.discharged(busy),
        };
        // An exclusive GPU has one pod, so it is exclusive no longer when that one leaves.
        self.exclusive &= sharing == Sharing::Shared;
    }

    /// Whether the demand may come here now: it fits, no engine is in its start, those that serve are not too busy, it is not
    /// kept free of such pods, and it is one of those that it asks for. Soft reservations do not count.
    pub fn can_take(&self, demand: &Demand) -> bool {
        self.has_free_vram(demand)
            && self.admits(demand)
            && !self.is_kept_spare_from(demand)
            && self.matches_selector_of(demand)
    }

    /// Whether its compute mode lets such a pod run there.
    pub(crate) fn compute_mode_allows(&self, sharing: Sharing) -> bool {
        !self.exclusive_process || sharing == Sharing::Exclusive
    }

    /// Whether there is VRAM for such a pod.
    pub(crate) fn has_free_vram(&self, demand: &Demand) -> bool {
        self.health == Health::Healthy
            && self.compute_mode_allows(demand.sharing)
            && !self.exclusive
            && (demand.sharing == Sharing::Shared || self.residents == 0)
            && demand.per_gpu <= self.free_for(demand)
    }

    /// Whether what runs here lets such a pod join.
    pub fn admits(&self, demand: &Demand) -> bool {
        let would_disturb = demand.terms.engine && self.starting;
        !would_disturb
            && !self.excluded_classes.contains(demand.class)
            && !demand.terms.is_exceeded_by(self.engine_load)
            && self.leaves_time_to(demand)
    }

    /// Whether the limits on latency of those that are here, and of the pod, would be kept.
    pub(crate) fn leaves_time_to(&self, demand: &Demand) -> bool {
        self.neighbors.leaves_room_to(demand.expected) && self.beyond_limit_of(demand).is_none()
    }

    /// What the pod would take for a token here, if others make that more than its class allows.
    pub(crate) fn beyond_limit_of(&self, demand: &Demand) -> Option<Micros> {
        self.neighbors.beyond_limit(
            demand.expected,
            demand.weights_per_gpu(),
            demand.terms.max_time_per_token,
        )
    }

    /// Whether the demand would still fit if every soft reservation became a bound pod.
    pub(crate) fn fits_beside_soft_reservations(&self, demand: &Demand) -> bool {
        if demand.terms.engine && self.engine_softly_reserved
            || self.excluded_by_soft_reservations.contains(demand.class)
        {
            return false;
        }
        match demand.sharing {
            Sharing::Shared => demand.per_gpu <= self.free_for(demand).minus(self.softly_reserved),
            Sharing::Exclusive => self.softly_reserved == Bytes::ZERO,
        }
    }
}

/// A set of GPUs of one node, by their index in the node's list.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GpuSet(#[serde(with = "super::bits")] u64);

impl GpuSet {
    pub(crate) const EMPTY: Self = Self(0);
    /// Every GPU that a node can have.
    pub const ALL: Self = Self(u64::MAX);

    /// The first `n` GPUs.
    pub fn first(n: usize) -> Self {
        debug_assert!(n <= MAX_GPUS as usize);
        if n >= 64 {
            Self::ALL
        } else {
            Self((1 << n) - 1)
        }
    }

    pub fn single(index: usize) -> Self {
        Self(1 << index)
    }

    pub fn contains(self, index: usize) -> bool {
        self.0 >> index & 1 == 1
    }

    pub fn insert(&mut self, index: usize) {
        self.0 |= 1 << index;
    }

    pub fn intersects(self, other: Self) -> bool {
        !self.intersection(other).is_empty()
    }

    /// The GPUs that are in both sets.
    pub fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The GPUs that are in this set only.
    pub fn difference(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The set of its lowest GPU alone.
    pub fn lowest(self) -> Self {
        Self(self.0 & self.0.wrapping_neg())
    }

    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The indices in it, lowest first.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        let mut remaining = self.0;
        std::iter::from_fn(move || {
            let index = remaining.trailing_zeros() as usize;
            (remaining != 0).then(|| {
                remaining &= remaining - 1;
                index
            })
        })
    }
}

impl FromIterator<usize> for GpuSet {
    fn from_iter<I: IntoIterator<Item = usize>>(indices: I) -> Self {
        let mut set = Self::EMPTY;
        indices.into_iter().for_each(|index| set.insert(index));
        set
    }
}

impl fmt::Debug for GpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// A resident pod that does not share its GPUs with every class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClassExclusion {
    pub uid: PodUid,
    pub gpus: GpuSet,
    pub classes: ClassSet,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_gives_back_the_places_put_in() {
        let set: GpuSet = [63, 0, 5].into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 5, 63]);
        assert_eq!(
            (set.len(), set.contains(5), set.contains(6)),
            (3, true, false)
        );
        assert_eq!(
            [set.lowest(), set.difference(GpuSet::single(0)).lowest()],
            [GpuSet::single(0), GpuSet::single(5)]
        );
        assert_eq!(GpuSet::EMPTY.lowest(), GpuSet::EMPTY);
        assert_eq!(GpuSet::first(64).len(), 64);
        assert_eq!(GpuSet::first(0), GpuSet::EMPTY);
    }
}

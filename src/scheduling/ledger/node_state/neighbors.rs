//! What the pods on a GPU leave to one more, by the limits on latency of their classes.
//!
//! The latencies of an engine grow by as much as its step does ([`contention`]): with each share of time for which its neighbors have
//! work. How large a share one more pod may have is found by trying it. What is not known of a pod's work counts as all of the time;
//! an engine without requests takes as long as its weights take to read; one that has requests and does not say how long they take
//! lets no neighbor come. Pods that came within the window of the latencies are not in them yet: they count on top.

use super::unaccounted_vram::find_near;
use super::{NodeState, ResidentPod};
use crate::contention::{ComputeSharing, EngineWork, GpuSpeed, STEP_OVERHEAD_S, contention};
use crate::ids::PodUid;
use crate::policy::{Policy, Preemptibility};
use crate::units::{Micros, Percent};
use crate::vocabulary::classification::ComputeMode;
use crate::vocabulary::gpu::{Device, Gpu};
use crate::vocabulary::latency::{EngineLatency, ExpectedWork, LATENCY_WINDOW, NeighborRoom};
use crate::vocabulary::node_reading::{Freshness, SleepState};

/// The steps in which room and work are counted, in per cent.
const ROOM_STEP: i16 = 10;
/// Room that has grown by less is not counted yet, nor work that has become less by less: decisions are not made again for each wave
/// of a load.
const ROOM_GAIN: i16 = 20;
/// With requests for no more of the time, an engine that has measured none of them yet counts as one without any.
const FEW_REQUESTS: u8 = 20;

/// A pod on a GPU.
struct Neighbor {
    work: EngineWork,
    /// Its share of the time in what the latencies here were measured beside.
    measured_busy: f64,
    limit: StepLimit,
    /// Pods of higher priority may evict it.
    may_leave: bool,
}

/// What the limits on a pod's latencies say of its step.
#[derive(Clone, Copy, PartialEq)]
enum StepLimit {
    None,
    /// It may take so many seconds.
    Seconds(f64),
    /// It may grow by that factor over what it takes now.
    Growth(f64),
}

/// What is known of the requests of a pod's engines.
#[derive(Clone, Copy)]
enum Requests<'a> {
    /// They have none, or few of which none was measured yet.
    None(Percent),
    Asleep,
    Some(&'a EngineLatency),
    /// They are starting.
    ToCome,
    Unknown,
}

impl NodeState {
    /// Finds again what the pods of each GPU leave to others, after a reading or a change of a pod.
    pub(in crate::ledger) fn update_neighbors(&mut self, policy: &Policy) {
        if !policy.counts_neighbors() {
            self.neighbors.clear();
            return;
        }
        let found = self.neighbor_rooms(policy, None);
        let devices = self.devices.iter().enumerate();
        let counted = devices.map(|(index, device)| {
            let before = find_near(&self.neighbors, index, |(gpu, _)| *gpu == device.uuid);
            let room = before.map_or(found[index], |(_, before)| counted(*before, found[index]));
            (device.uuid.clone(), room)
        });
        self.neighbors = counted.collect();
    }

    /// Adds what the pods of each GPU leave to others; without the pod `except`, if there is one.
    pub(super) fn add_neighbors(&self, gpus: &mut [Gpu], policy: &Policy, except: Option<&PodUid>) {
        let except = except.filter(|uid| self.has_resident(uid) || self.has_reservation_of(uid));
        let rooms = match except.filter(|_| policy.counts_neighbors()) {
            None => self.neighbors.iter().map(|(_, room)| *room).collect(),
            Some(_) => self.neighbor_rooms(policy, except),
        };
        for (gpu, room) in gpus.iter_mut().zip(rooms) {
            gpu.neighbors = room;
        }
    }

    /// For how much of the time a pod has work, as far as that is known.
    pub(crate) fn busy_of(&self, resident: &ResidentPod) -> Percent {
        match self.requests_of(resident) {
            Requests::Asleep => Percent::default(),
            Requests::None(busy) => busy,
            Requests::Some(latency) => latency.busy.unwrap_or(Percent::FULL),
            Requests::ToCome | Requests::Unknown => Percent::FULL,
        }
    }

    /// What an engine's time per token would be beside nobody; `None` if it says none, or if a neighbor has come or left within its window.
    pub(crate) fn time_per_token_alone(&self, latency: &EngineLatency) -> Option<Micros> {
        let measured = latency.time_per_token?;
        let resident = self.resident_of(&latency.pod)?;
        let sampled = self.reading.as_ref()?.sampled;
        let mut left = self.left.iter();
        let has_lost_one =
            left.any(|(gpus, at)| gpus.intersects(resident.gpus) && *at + LATENCY_WINDOW > sampled);
        if has_lost_one || !self.beside(resident).all(|other| self.is_measured(other)) {
            return None;
        }
        let beside = NeighborRoom {
            busy: self.busy(self.beside(resident)),
            ..NeighborRoom::EMPTY
        };
        // Of a second: the factor is the same for all.
        let factor = beside.beside_all(Micros(1_000_000)).0;
        Some(Micros(measured.0.saturating_mul(1_000_000) / factor))
    }

    /// What a token is expected to take beside those that have work now, by what engines of its model take; `None` for a GPU whose speed
    /// is not known.
    pub(in crate::ledger) fn expected_time_per_token(
        &self,
        pod: &PodUid,
        expected: ExpectedWork,
    ) -> Option<Micros> {
        let resident = self.resident_of(pod)?;
        let beside = NeighborRoom {
            busy: self.busy(self.beside(resident)),
            micros_per_gib: micros_per_gib(&self.devices[resident.gpus.iter().next()?]),
            ..NeighborRoom::EMPTY
        };
        let alone = beside.step_alone(expected, resident.weights_per_gpu)?;
        Some(beside.beside_all(alone))
    }

    /// The others on any of a pod's GPUs: each step waits for the slowest of them.
    fn beside(&self, resident: &ResidentPod) -> impl Iterator<Item = &ResidentPod> {
        let here = self.residents().iter();
        here.filter(move |one| one.gpus.intersects(resident.gpus) && one.uid != resident.uid)
    }

    /// How long the steps of a pod's engine take beside nobody, in per cent of what its weights take to read; `None` if that is not
    /// known.
    pub(in crate::ledger) fn slowness_of(&self, latency: &EngineLatency) -> Option<u16> {
        let alone = self.time_per_token_alone(latency)?;
        let resident = self.resident_of(&latency.pod)?;
        let index = resident.gpus.iter().next()?;
        let estimate = estimated_step(resident, &self.devices[index])?;
        let percent = u128::from(alone.0) * 100 / u128::from(estimate.0.max(1));
        Some(percent.min(u16::MAX.into()) as u16)
    }

    fn neighbor_rooms(&self, policy: &Policy, except: Option<&PodUid>) -> Vec<NeighborRoom> {
        let devices = self.devices.iter().enumerate();
        let rooms = devices.map(|(index, device)| {
            let here = self
                .residents()
                .iter()
                .filter(|resident| resident.gpus.contains(index) && Some(&resident.uid) != except);
            let limits = |resident: &ResidentPod| policy.class(resident.class).latency_limits();
            let is_limited = here.clone().any(|resident| !limits(resident).is_none());
            let reserved = self.reservations().iter();
            let reserved =
                reserved.filter(|(uid, gpus)| gpus.contains(index) && Some(uid) != except);
            let reserved = reserved.count();
            let busy = self
                .busy(here.clone())
                .saturating_add(100 * reserved as u16);
            NeighborRoom {
                busy: busy.next_multiple_of(ROOM_STEP as u16),
                room: match is_limited {
                    true => self.room(here, reserved, device, policy),
                    false => NeighborRoom::EMPTY.room,
                },
                micros_per_gib: micros_per_gib(device),
            }
        });
        rooms.collect()
    }

    /// For how much of the time these pods have work, added up, in per cent.
    fn busy<'a>(&self, pods: impl Iterator<Item = &'a ResidentPod>) -> u16 {
        let each = pods.map(|resident| u16::from(self.busy_of(resident).get()));
        each.fold(0, u16::saturating_add).min(i16::MAX as u16 / 2)
    }

    fn room<'a>(
        &self,
        here: impl Iterator<Item = &'a ResidentPod> + Clone,
        reserved: usize,
        device: &Device,
        policy: &Policy,
    ) -> i16 {
        let sharing = match here.clone().all(|resident| shares_sms(resident, policy)) {
            true => ComputeSharing::SmSharing,
            false => ComputeSharing::TimeSlicing,
        };
        let neighbors = here.map(|resident| self.neighbor(resident, device, policy));
        let to_come = (0..reserved).map(|_| Neighbor {
            work: EngineWork::job(1.0),
            measured_busy: 0.0,
            limit: StepLimit::None,
            may_leave: false,
        });
        room(neighbors.chain(to_come).collect(), sharing)
    }

    fn neighbor(&self, resident: &ResidentPod, device: &Device, policy: &Policy) -> Neighbor {
        let class = policy.class(resident.class);
        let limits = class.latency_limits();
        let requests = self.requests_of(resident);
        let measured = match requests {
            Requests::Some(latency) => latency.time_per_token,
            _ => None,
        };
        let estimate = estimated_step(resident, device);
        let limit = match requests {
            _ if limits.is_none() => StepLimit::None,
            Requests::Asleep => StepLimit::None,
            Requests::Some(latency) => match (limits.nearest(latency), measured) {
                (Some((now, limit)), _) => StepLimit::Growth(limit.0 as f64 / now.0.max(1) as f64),
                // There was no first token within the window.
                (None, Some(_)) => StepLimit::None,
                (None, None) => StepLimit::Growth(0.0),
            },
            // Of its first token nothing is known before it has requests. A limit that it would not keep alone is none.
            Requests::None(_) | Requests::ToCome => match (limits.time_per_token, estimate) {
                (Some(limit), Some(alone)) if alone <= limit => {
                    StepLimit::Seconds(limit.as_seconds())
                }
                (Some(_), None) => StepLimit::Growth(0.0),
                _ => StepLimit::None,
            },
            Requests::Unknown => StepLimit::Growth(0.0),
        };
        let mut work = EngineWork::job(1.0);
        if let Some(step) = measured.or(estimate).filter(|_| class.engine) {
            let step_s = step.as_seconds();
            work.overhead_s = STEP_OVERHEAD_S.min(step_s);
            (work.memory_s, work.compute_s) = (step_s - work.overhead_s, 0.0);
        }
        work.busy = f64::from(self.busy_of(resident).get()) / 100.0;
        Neighbor {
            work,
            measured_busy: match self.is_measured(resident) {
                true => work.busy,
                false => 0.0,
            },
            limit,
            may_leave: class.eviction == Preemptibility::ForHigherPriority,
        }
    }

    /// Whether the latencies of its neighbors were measured beside it.
    fn is_measured(&self, resident: &ResidentPod) -> bool {
        let sampled = self.reading.as_ref().map(|reading| reading.sampled);
        let came = resident.bound_since.filter(|_| !resident.is_starting);
        came.zip(sampled)
            .is_some_and(|(came, sampled)| came + LATENCY_WINDOW <= sampled)
    }

    fn requests_of(&self, resident: &ResidentPod) -> Requests<'_> {
        let reading = self
            .reading
            .as_ref()
            .filter(|_| self.freshness == Freshness::Fresh);
        let latency = reading.and_then(|reading| reading.latency_of(&resident.uid));
        match latency {
            Some(latency) => match latency.busy {
                Some(busy) if !latency.is_measured() && busy.get() <= FEW_REQUESTS => {
                    Requests::None(busy)
                }
                _ => Requests::Some(latency),
            },
            None if self.is_asleep(resident) => Requests::Asleep,
            None if resident.is_starting || resident.bound_since.is_none() => Requests::ToCome,
            None => Requests::Unknown,
        }
    }

    fn is_asleep(&self, resident: &ResidentPod) -> bool {
        let reading = self.believed_reading();
        reading.and_then(|reading| reading.sleep_of(&resident.uid)) == Some(SleepState::Asleep)
    }
}

fn shares_sms(resident: &ResidentPod, policy: &Policy) -> bool {
    let compute = policy.class(resident.class).compute;
    resident.has_vram_limits && compute == Some(ComputeMode::SmSharing)
}

fn micros_per_gib(device: &Device) -> Option<u16> {
    let seconds = GpuSpeed::of(device.model.as_str())?.memory_s((1u64 << 30) as f64);
    Some((seconds * 1e6).round() as u16)
}

/// What a step takes that only reads the pod's weights; `None` for a GPU whose speed is not known.
fn estimated_step(resident: &ResidentPod, device: &Device) -> Option<Micros> {
    let speed = NeighborRoom {
        micros_per_gib: micros_per_gib(device),
        ..NeighborRoom::EMPTY
    };
    speed.step_alone(ExpectedWork::UNKNOWN, resident.weights_per_gpu)
}

/// The largest share of time for which one more pod may have work, in steps; negative, if as much has to leave before.
fn room(mut neighbors: Vec<Neighbor>, sharing: ComputeSharing) -> i16 {
    let measured = neighbors.iter().map(|one| EngineWork {
        busy: one.measured_busy,
        ..one.work
    });
    let now = steps(measured.collect(), sharing);
    for (one, step) in neighbors.iter_mut().zip(now) {
        if let StepLimit::Growth(growth) = one.limit {
            one.limit = StepLimit::Seconds(step * growth);
        }
    }
    // Those that may leave come last.
    neighbors.sort_by_key(|one| one.may_leave);
    let staying = neighbors.iter().filter(|one| !one.may_leave).count();
    let keeps = |left: usize, share: i16| {
        let work = neighbors[..left].iter().map(|one| one.work);
        let newcomer = EngineWork {
            busy: f64::from(share) / 100.0,
            ..EngineWork::job(1.0)
        };
        let steps = steps(work.chain([newcomer]).collect(), sharing);
        let mut pairs = neighbors[..left].iter().zip(steps);
        pairs.all(|(one, step)| match one.limit {
            StepLimit::Seconds(limit) => step <= limit,
            StepLimit::None | StepLimit::Growth(_) => true,
        })
    };
    // The fewer pods, the shorter the steps of those that are left.
    let leaving: Vec<usize> = (staying..=neighbors.len()).collect();
    let keeping = leaving.partition_point(|left| keeps(*left, 0));
    let Some(left) = keeping.checked_sub(1).map(|index| leaving[index]) else {
        return NeighborRoom::CLOSED;
    };
    let shares: Vec<i16> = (0..=NeighborRoom::ALL)
        .step_by(ROOM_STEP as usize)
        .collect();
    let share = shares[shares.partition_point(|share| keeps(left, *share)) - 1];
    let gone: f64 = neighbors[left..].iter().map(|one| one.work.busy).sum();
    share.saturating_sub((100.0 * gone).ceil() as i16)
}

/// The step of each of these pods beside the others.
fn steps(works: Vec<EngineWork>, sharing: ComputeSharing) -> Vec<f64> {
    let under = contention(&works, sharing);
    let each = works.iter().zip(under);
    each.map(|(work, under)| work.step_s(&under)).collect()
}

/// What decisions count of it: less room and more work at once, the contrary only once it is worth a decision.
fn counted(before: NeighborRoom, found: NeighborRoom) -> NeighborRoom {
    let has_gained =
        found.room >= before.room.saturating_add(ROOM_GAIN) || found.room >= NeighborRoom::ALL;
    let is_near = (0..ROOM_GAIN as u16).contains(&before.busy.saturating_sub(found.busy))
        && found.busy > 0
        && found.busy <= before.busy;
    NeighborRoom {
        busy: if is_near { before.busy } else { found.busy },
        room: match found.room < before.room || has_gained {
            true => found.room,
            false => before.room,
        },
        ..found
    }
}

#[cfg(test)]
mod tests;

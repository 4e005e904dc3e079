//! What the pods on a GPU leave to one more, by the limits on latency of their classes.
//!
//! The latencies of an engine grow by as much as its step does ([`contention`]): with each share of time for which its neighbors have
//! work. How large a share one more pod may have is found by trying it. What is not known of a pod's work counts as all of the time;
//! an engine without requests takes as long as its weights take to read; one that has requests and does not say how long they take
//! lets no neighbor come.

use super::unaccounted_vram::find_near;
use super::{NodeState, ResidentPod};
use crate::contention::{ComputeSharing, EngineWork, GpuSpeed, STEP_OVERHEAD_S, contention};
use crate::ids::PodUid;
use crate::policy::Policy;
use crate::units::{Micros, Percent};
use crate::vocabulary::classification::{ClassTerms, ComputeMode};
use crate::vocabulary::gpu::{Device, Gpu};
use crate::vocabulary::latency::{EngineLatency, ExpectedWork, NeighborRoom};
use crate::vocabulary::node_reading::{Freshness, SleepState};

/// The steps in which room is found and counted, in per cent.
const ROOM_STEP: i16 = 10;
/// Room that has grown by less is not counted yet: decisions are not made again for each wave of a load.
const ROOM_GAIN: i16 = 20;

/// A pod on a GPU.
struct Neighbor {
    work: EngineWork,
    limit: StepLimit,
    /// It may leave, and has work all the time.
    is_job: bool,
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

impl NodeState {
    /// Finds again what the pods of each GPU leave to others, after a reading or a change of a pod.
    pub(in crate::ledger) fn update_neighbors(&mut self, policy: &Policy) {
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
        match except {
            None => {
                for (gpu, (_, room)) in gpus.iter_mut().zip(&self.neighbors) {
                    gpu.neighbors = *room;
                }
            }
            Some(_) => {
                let rooms = self.neighbor_rooms(policy, except);
                for (gpu, room) in gpus.iter_mut().zip(rooms) {
                    gpu.neighbors = room;
                }
            }
        }
    }

    /// How long the steps of a pod's engine take beside nobody, in per cent of what its weights take to read: by its latency, and by
    /// what its neighbors cost it now. `None` if that is not known.
    pub(in crate::ledger) fn slowness_of(&self, latency: &EngineLatency) -> Option<u16> {
        let measured = latency.time_per_token?;
        let resident = self.resident_of(&latency.pod)?;
        let index = resident.gpus.iter().next()?;
        let estimate = estimated_step(resident, &self.devices[index])?;
        let here = self.residents().iter();
        let here = here.filter(|one| one.gpus.contains(index) && one.uid != resident.uid);
        let beside = NeighborRoom {
            busy: self.busy(here),
            ..NeighborRoom::EMPTY
        };
        let contended = beside.beside_all(estimate);
        let percent = u128::from(measured.0) * 100 / u128::from(contended.0.max(1));
        Some(percent.min(u16::MAX.into()) as u16)
    }

    fn neighbor_rooms(&self, policy: &Policy, except: Option<&PodUid>) -> Vec<NeighborRoom> {
        let limits_steps = |terms: &ClassTerms| terms.max_time_per_token.is_some();
        let needs_speed = policy.terms().iter().any(limits_steps);
        let devices = self.devices.iter().enumerate();
        let rooms = devices.map(|(index, device)| {
            let here = self
                .residents()
                .iter()
                .filter(|resident| resident.gpus.contains(index) && Some(&resident.uid) != except);
            let limits = |resident: &ResidentPod| policy.class(resident.class).latency_limits();
            let is_limited = here.clone().any(|resident| !limits(resident).is_none());
            NeighborRoom {
                busy: self.busy(here.clone()),
                room: match is_limited {
                    true => self.room(here, device, policy),
                    false => NeighborRoom::EMPTY.room,
                },
                micros_per_gib: needs_speed.then(|| micros_per_gib(device)).flatten(),
            }
        });
        rooms.collect()
    }

    /// For how much of the time these pods have work, added up, in per cent.
    fn busy<'a>(&self, pods: impl Iterator<Item = &'a ResidentPod>) -> u16 {
        let each = pods.map(|resident| u16::from(self.busy_of(resident).get()));
        each.fold(0, u16::saturating_add)
    }

    fn busy_of(&self, resident: &ResidentPod) -> Percent {
        match self.requests_of(resident) {
            Requests::None => Percent::default(),
            Requests::Some(latency) => latency.busy.unwrap_or(Percent::FULL),
            Requests::ToCome | Requests::Unknown => Percent::FULL,
        }
    }

    fn room<'a>(
        &self,
        here: impl Iterator<Item = &'a ResidentPod> + Clone,
        device: &Device,
        policy: &Policy,
    ) -> i16 {
        let sharing = match here.clone().all(|resident| shares_sms(resident, policy)) {
            true => ComputeSharing::SmSharing,
            false => ComputeSharing::TimeSlicing,
        };
        let neighbors = here.map(|resident| self.neighbor(resident, device, policy));
        room(neighbors.collect(), sharing)
    }

    fn neighbor(&self, resident: &ResidentPod, device: &Device, policy: &Policy) -> Neighbor {
        let class = policy.class(resident.class);
        let limits = class.latency_limits();
        let requests = self.requests_of(resident);
        let measured = match requests {
            Requests::Some(latency) => latency.time_per_token,
            _ => None,
        };
        let step = measured.or_else(|| estimated_step(resident, device));
        let limit = match requests {
            _ if limits.is_none() => StepLimit::None,
            Requests::None if self.is_asleep(resident) => StepLimit::None,
            Requests::Some(latency) => {
                let nearest = limits.nearest(latency);
                StepLimit::Growth(
                    nearest.map_or(0.0, |(now, limit)| limit.0 as f64 / now.0.max(1) as f64),
                )
            }
            // Of its first token nothing is known before it has requests, nor of a step on a GPU that is not known.
            Requests::None | Requests::ToCome => match (limits.time_per_token, step) {
                (None, _) => StepLimit::None,
                (Some(limit), Some(_)) => StepLimit::Seconds(limit.as_seconds()),
                (Some(_), None) => StepLimit::Growth(0.0),
            },
            Requests::Unknown => StepLimit::Growth(0.0),
        };
        let mut work = EngineWork::job(1.0);
        if let Some(step) = step.filter(|_| class.engine) {
            let step_s = step.as_seconds();
            work.overhead_s = STEP_OVERHEAD_S.min(step_s);
            (work.memory_s, work.compute_s) = (step_s - work.overhead_s, 0.0);
        }
        work.busy = f64::from(self.busy_of(resident).get()) / 100.0;
        Neighbor {
            work,
            limit,
            is_job: !class.engine,
        }
    }

    fn requests_of(&self, resident: &ResidentPod) -> Requests<'_> {
        let reading = self
            .reading
            .as_ref()
            .filter(|_| self.freshness == Freshness::Fresh);
        match reading.and_then(|reading| reading.latency_of(&resident.uid)) {
            Some(latency) if latency.busy == Some(Percent::default()) => Requests::None,
            Some(latency) => Requests::Some(latency),
            None if self.is_asleep(resident) => Requests::None,
            None if resident.is_starting || resident.bound_since.is_none() => Requests::ToCome,
            None => Requests::Unknown,
        }
    }

    fn is_asleep(&self, resident: &ResidentPod) -> bool {
        let reading = self.believed_reading();
        reading.and_then(|reading| reading.sleep_of(&resident.uid)) == Some(SleepState::Asleep)
    }
}

/// What is known of the requests of a pod's engines.
#[derive(Clone, Copy)]
enum Requests<'a> {
    /// They had none in the last half minute, or sleep.
    None,
    Some(&'a EngineLatency),
    /// They are starting.
    ToCome,
    Unknown,
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

/// The largest share of time for which one more pod may have work, in steps; with jobs gone if it has to be.
fn room(mut neighbors: Vec<Neighbor>, sharing: ComputeSharing) -> i16 {
    let now = steps(&neighbors, sharing, None);
    let limit = |(one, step): (&Neighbor, f64)| match one.limit {
        StepLimit::None => f64::INFINITY,
        StepLimit::Seconds(limit) => limit,
        StepLimit::Growth(growth) => step * growth,
    };
    let mut limits: Vec<f64> = neighbors.iter().zip(now).map(limit).collect();
    let mut jobs_gone = 0;
    loop {
        let keeps = |share: i16| {
            let with = steps(&neighbors, sharing, Some(f64::from(share) / 100.0));
            with.iter().zip(&limits).all(|(step, limit)| step <= limit)
        };
        let shares = (0..=NeighborRoom::EMPTY.room)
            .rev()
            .step_by(ROOM_STEP as usize);
        if let Some(share) = shares.into_iter().find(|share| keeps(*share)) {
            return share - jobs_gone * 100;
        }
        let Some(job) = neighbors.iter().position(|one| one.is_job) else {
            return NeighborRoom::CLOSED;
        };
        neighbors.remove(job);
        limits.remove(job);
        jobs_gone += 1;
    }
}

/// The step of each of these pods, beside one more that has work for this share of the time.
fn steps(neighbors: &[Neighbor], sharing: ComputeSharing, more: Option<f64>) -> Vec<f64> {
    let newcomer = more.map(|busy| EngineWork {
        busy,
        ..EngineWork::job(1.0)
    });
    let works: Vec<EngineWork> = neighbors
        .iter()
        .map(|one| one.work)
        .chain(newcomer)
        .collect();
    let under = contention(&works, sharing);
    let each = neighbors.iter().zip(under);
    each.map(|(one, under)| one.work.step_s(&under)).collect()
}

/// What decisions count of it: less room at once, more only once it is worth a decision.
fn counted(before: NeighborRoom, found: NeighborRoom) -> NeighborRoom {
    let has_gained = found.room >= before.room.saturating_add(ROOM_GAIN)
        || found.room == NeighborRoom::EMPTY.room;
    let is_near = found.busy.abs_diff(before.busy) < ROOM_GAIN as u16 && found.busy > 0;
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

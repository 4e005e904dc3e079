//! The list of a node's devices: what a report makes of it, and how often it may gain something.

use super::NodeState;
use crate::ids::GpuUuid;
use crate::ledger::pod_states::PodStates;
use crate::policy::Policy;
use crate::units::{Millis, Moment};
use crate::vocabulary::demand::MAX_GPUS;
use crate::vocabulary::gpu::{Device, GpuSet, Health};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The average time between two gains of a node's list of devices. Each change costs every decision, because cached results of
/// the node are void.
const GAIN_INTERVAL: Millis = Millis::seconds(10);
/// How many gains may come at once: a driver that starts shows its GPUs one after the other.
const MAX_GAINS_AT_ONCE: u64 = 4;

/// When a node's list of devices may gain something again.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct GainLimit {
    /// When all gains that were taken are paid for.
    paid_at: Moment,
}

impl GainLimit {
    /// Whether one more is taken at `now`.
    fn try_take(&mut self, now: Moment) -> bool {
        let is_taken = self.paid_at.since(now) <= GAIN_INTERVAL.times(MAX_GAINS_AT_ONCE - 1);
        if is_taken {
            self.paid_at = self.paid_at.max(now) + GAIN_INTERVAL;
        }
        is_taken
    }
}

/// What follows from a report of devices.
#[derive(Debug, Default)]
pub(in crate::ledger) struct DeviceReport {
    /// The devices that count; `None` if nothing has changed.
    pub devices: Option<Vec<Device>>,
    /// How many devices gain something only with a later report.
    pub waiting: usize,
    /// No agent had reported before.
    pub is_first: bool,
}

/// The card a device is, or is a slice of.
fn card(device: &Device) -> &GpuUuid {
    device.parent.as_ref().unwrap_or(&device.uuid)
}

impl NodeState {
    /// Takes an agent's list of devices. Returns those to keep, and how many gains are delayed; fails with how many devices there
    /// would be, if they are more than [`MAX_GPUS`].
    pub(in crate::ledger) fn take_report(
        &mut self,
        reported: &Arc<[Device]>,
        now: Moment,
        pod_states: &PodStates,
    ) -> Result<DeviceReport, usize> {
        if self.reported && self.devices == *reported {
            return Ok(DeviceReport::default());
        }
        let merged = self.merge_devices(reported.to_vec(), pod_states).len();
        if merged > MAX_GPUS as usize {
            return Err(merged);
        }
        let gains = reported
            .iter()
            .filter(|device| is_gain(&self.devices, device))
            .count();
        let is_delayed = self.reported && gains > 0 && !self.gain_limit.try_take(now);
        let is_first = !std::mem::replace(&mut self.reported, true);
        Ok(match is_delayed {
            true => DeviceReport {
                devices: Some(without_gains(&self.devices, reported.to_vec())),
                waiting: gains,
                is_first,
            },
            false => DeviceReport {
                devices: Some(reported.to_vec()),
                waiting: 0,
                is_first,
            },
        })
    }

    /// Whether a report has listed all devices that the machine has.
    pub(in crate::ledger) fn lists_all_devices(&self) -> bool {
        self.lists_all_devices
    }

    pub(in crate::ledger) fn mark_all_devices_listed(&mut self) {
        self.lists_all_devices = true;
    }

    /// The indices of a pod's devices, without those that are lost. `None` if it is not certain which index one of them has.
    pub(super) fn resolve_without_lost(&self, devices: &[GpuUuid]) -> Option<GpuSet> {
        let all = self.resolve(devices);
        if all.is_some() || !devices.iter().any(|uuid| self.is_lost(uuid)) {
            return all;
        }
        let (lost, left): (Vec<GpuUuid>, Vec<GpuUuid>) =
            devices.iter().cloned().partition(|uuid| self.is_lost(uuid));
        let is_repeated = lost.iter().collect::<BTreeSet<_>>().len() < lost.len();
        match (is_repeated, left.is_empty()) {
            (true, _) => None,
            (false, true) => Some(GpuSet::EMPTY),
            (false, false) => self.resolve(&left),
        }
    }

    /// Whether the machine has no such device, nor a part of it. A slice that is not listed may be a part of any card.
    fn is_lost(&self, uuid: &GpuUuid) -> bool {
        let is_of = |device: &Device| device.uuid == *uuid || device.parent.as_ref() == Some(uuid);
        let names_a_card = uuid.index().is_none() && !uuid.is_slice();
        self.lists_all_devices && names_a_card && !self.devices.iter().any(is_of)
    }

    /// Whether any pod is charged on a device that is known by its UUID.
    pub(in crate::ledger) fn has_charged_devices(&self, pod_states: &PodStates) -> bool {
        !self.merge_devices(Vec::new(), pod_states).is_empty()
    }

    /// The list of devices after this report, if it differs from the current one.
    pub(in crate::ledger) fn changed_devices(
        &self,
        reported: Vec<Device>,
        pod_states: &PodStates,
    ) -> Option<Arc<[Device]>> {
        let devices: Arc<[Device]> = self.merge_devices(reported, pod_states).into();
        (devices != self.devices).then_some(devices)
    }

    pub(in crate::ledger) fn set_devices(&mut self, devices: Arc<[Device]>, policy: &Policy) {
        self.devices = devices;
        self.update_warnings(policy);
    }

    /// Forgets everything about the machine, because another one has the name now.
    pub(in crate::ledger) fn forget_machine(&mut self) {
        self.departed.clear();
        (self.reported, self.lists_all_devices) = (false, false);
        self.forget_starts();
    }

    /// The devices to keep after a report that lists `reported`: those, and the missing ones that still have pods, as
    /// lost. Devices of which only the index was known become the reported ones of that index.
    fn merge_devices(&self, mut reported: Vec<Device>, pod_states: &PodStates) -> Vec<Device> {
        let missing = self.devices.iter().enumerate().filter(|(_, device)| {
            device.uuid.index().is_none() && !reported.iter().any(|new| new.uuid == device.uuid)
        });
        let lost: Vec<Device> = missing
            .filter(|(gpu_index, _)| self.is_recorded_on(*gpu_index, pod_states))
            .map(|(_, device)| Device {
                health: Health::Lost,
                ..device.clone()
            })
            .collect();
        // A GPU that was cut again while pods have parts of it is one card still: what they have cannot be given again.
        let cards: BTreeSet<GpuUuid> = lost.iter().map(card).cloned().collect();
        for device in reported
            .iter_mut()
            .filter(|device| cards.contains(card(device)))
        {
            device.health = device.health.max(Health::Draining);
        }
        reported.extend(lost);
        reported.sort_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
        reported
    }

    fn is_recorded_on(&self, gpu_index: usize, pod_states: &PodStates) -> bool {
        self.pods
            .iter()
            .filter_map(|uid| self.charge_of(&pod_states[uid]))
            .any(|c| c.is_placed && c.gpus.contains(gpu_index))
    }
}

/// Whether a reported device is new, or has changed in any way but for the worse.
fn is_gain(current: &[Device], reported: &Device) -> bool {
    let Some(previous) = current.iter().find(|device| device.uuid == reported.uuid) else {
        return true;
    };
    let Device {
        health,
        total,
        reserved,
        exclusive_process,
        ..
    } = reported.clone();
    let has_same_identity = Device {
        health,
        total,
        reserved,
        exclusive_process,
        ..previous.clone()
    } == *reported;
    let is_worse = health >= previous.health
        && total <= previous.total
        && reserved >= previous.reserved
        && exclusive_process >= previous.exclusive_process;
    !(has_same_identity && is_worse)
}

/// The reported devices, with those that gain something as they are known, if they are known.
fn without_gains(current: &[Device], reported: Vec<Device>) -> Vec<Device> {
    let as_known = |device: Device| match is_gain(current, &device) {
        true => current
            .iter()
            .find(|current_device| current_device.uuid == device.uuid)
            .cloned(),
        false => Some(device),
    };
    reported.into_iter().filter_map(as_known).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::NodeName;
    use crate::ledger::Ledger;
    use crate::testkit::whole_gpu;
    use crate::units::Bytes;
    use crate::vocabulary::node::NodeKind;

    fn name() -> NodeName {
        NodeName::parse("n").unwrap()
    }

    fn gpus(count: u32) -> Vec<Device> {
        let uuid = |index| GpuUuid::parse(&format!("GPU-{index}")).unwrap();
        (0..count)
            .map(|index| whole_gpu(uuid(index), index, Bytes(100)))
            .collect()
    }

    fn report(ledger: &mut Ledger, count: u32) -> (usize, usize) {
        let waiting = ledger.report_devices(&name(), gpus(count).into()).unwrap();
        (waiting, ledger.node(&name()).unwrap().devices.len())
    }

    #[test]
    fn devices_that_flap_with_every_report_are_added_a_few_times_and_then_delayed() {
        let mut ledger = Ledger::new(Arc::new(Policy::default()));
        ledger.set_node(&name(), NodeKind::Stowage, None);
        assert_eq!(
            report(&mut ledger, 2),
            (0, 2),
            "the first report is no change"
        );
        for _ in 0..MAX_GAINS_AT_ONCE {
            assert_eq!(
                report(&mut ledger, 1),
                (0, 1),
                "what is lost is lost at once"
            );
            assert_eq!(report(&mut ledger, 2), (0, 2));
        }
        assert_eq!(report(&mut ledger, 1), (0, 1));
        let generation = ledger.generation();
        for _ in 0..100 {
            assert_eq!(report(&mut ledger, 2), (1, 1), "it waits");
            assert_eq!(report(&mut ledger, 1), (0, 1));
        }
        assert_eq!(
            ledger.generation(),
            generation,
            "no cached result of the node is void"
        );
        ledger.set_now(Moment::default() + GAIN_INTERVAL);
        assert_eq!(report(&mut ledger, 2), (0, 2), "its time has come");
        assert_eq!(report(&mut ledger, 1), (0, 1));
        assert_eq!(report(&mut ledger, 2), (1, 1));
    }

    #[test]
    fn only_a_device_that_gets_worse_is_no_gain() {
        let known = gpus(1);
        let with = |edit: fn(&mut Device)| {
            let mut device = known[0].clone();
            edit(&mut device);
            is_gain(&known, &device)
        };
        assert!(!with(|_| {}) && !with(|device| device.health = Health::Lost));
        assert!(
            !with(|device| device.total = Bytes(90)) && !with(|device| device.reserved = Bytes(1))
        );
        assert!(!with(|device| device.exclusive_process = true));
        assert!(with(|device| device.total = Bytes(101)) && with(|device| device.index = 7));
        assert!(is_gain(
            &[Device {
                health: Health::Lost,
                ..known[0].clone()
            }],
            &known[0]
        ));
        assert!(is_gain(&[], &known[0]));
    }
}

//! The devices of a node: as its labels say, as its agent reports them, and after another machine has taken its name.
//!
//! What is promised on a device stays charged there whatever becomes of it. How often an agent may change its list is
//! bounded here; what was measured on the devices is [`super::unaccounted_vram`]'s.

use super::Ledger;
use super::pod_state::PodPhase;
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::scheduling::vocabulary::demand::MAX_GPUS;
use crate::scheduling::vocabulary::gpu::{Device, Health};
use crate::scheduling::vocabulary::node::NodeIdentity;
use crate::units::{Millis, Moment};
use std::sync::Arc;

/// A list of devices that gains something is taken once in this time, in the long run. Each change costs everyone who
/// decides: what is remembered of the node is void.
const GAIN_EVERY: Millis = Millis::seconds(10);
/// So many gains may come at once: a driver that starts shows its GPUs one after the other.
const GAINS_AT_ONCE: u64 = 4;

/// Why a report of devices is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DevicesRefused {
    UnknownNode,
    TooMany(usize),
}

/// When a node's list of devices may gain something again.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct GainLimit {
    /// When all gains that were taken are paid for.
    paid_at: Moment,
}

impl GainLimit {
    /// Whether one more is taken at `now`.
    fn take(&mut self, now: Moment) -> bool {
        let is_taken = self.paid_at.since(now) <= GAIN_EVERY.times(GAINS_AT_ONCE - 1);
        if is_taken {
            self.paid_at = self.paid_at.max(now) + GAIN_EVERY;
        }
        is_taken
    }
}

impl Ledger {
    /// The devices of a node as its agent reports them. Returns how many of them wait: the node's list gained something too
    /// often of late, so that what is new or better than it was comes with a later report. What is worse counts at once.
    ///
    /// Refused as a whole, with how many there would be, if they and the lost ones that still have pods are more than
    /// [`MAX_GPUS`].
    pub(in crate::scheduling) fn report_devices(
        &mut self,
        name: &NodeName,
        mut devices: Vec<Device>,
    ) -> Result<usize, DevicesRefused> {
        let pod_states = &self.pod_states;
        let node_state = self
            .node_states
            .get_mut(name)
            .filter(|node_state| node_state.exists)
            .ok_or(DevicesRefused::UnknownNode)?;
        if node_state.reported && *node_state.devices == *devices {
            return Ok(0);
        }
        let merged = node_state.merge_devices(devices.clone(), pod_states).len();
        if merged > MAX_GPUS as usize {
            return Err(DevicesRefused::TooMany(merged));
        }
        let gains = devices.iter().filter(|device| is_gain(&node_state.devices, device)).count();
        let waiting =
            if node_state.reported && gains > 0 && !node_state.gain_limit.take(self.now) { gains } else { 0 };
        if waiting > 0 {
            devices = without_gains(&node_state.devices, devices);
        }
        let is_first = !std::mem::replace(&mut node_state.reported, true);
        self.set_devices(name, devices);
        if is_first {
            self.pin_indices(name);
            self.adopt_reservations_on(name);
        }
        Ok(waiting)
    }

    /// Which Node object it is that bears the name, and which machine that is. Another machine has nothing of what the one
    /// before it had; what was promised there stays charged on GPUs that are lost, until their pods are gone.
    pub(in crate::scheduling) fn identify_node(&mut self, name: &NodeName, identity: NodeIdentity) {
        let known = self.node_states.open(name).identity.replace(identity.clone());
        if known.is_some_and(|known| !known.is_same_machine(&identity)) {
            self.forget_machine(name);
        }
    }

    /// Which Node object bears the name, if anybody said.
    pub fn node_identity(&self, name: &NodeName) -> Option<&NodeIdentity> {
        self.node_states.get(name)?.identity.as_ref()
    }

    fn forget_machine(&mut self, name: &NodeName) {
        self.forget_reading(name);
        let Some(node_state) = self.node_states.get_mut(name) else { return };
        node_state.forget_departed();
        node_state.reported = false;
        self.drop_soft_reservations_on(name);
        self.set_devices(name, Vec::new());
        self.expire_reservations_on(name, |_, _| true);
        self.refresh(name);
    }

    /// What a node's labels say of its devices. It is left aside while pods are charged on devices that are known by UUID:
    /// the second GPU of the labels may be one of those.
    pub(super) fn set_labelled_devices(&mut self, name: &NodeName, devices: Vec<Device>) {
        let still_charged = self.node_states[name].merge_devices(Vec::new(), &self.pod_states);
        self.set_devices(name, if still_charged.is_empty() { devices } else { Vec::new() });
    }

    fn set_devices(&mut self, name: &NodeName, devices: Vec<Device>) {
        let node_state = self.node_states.get_mut(name).expect("the caller has the node's page");
        let devices: Arc<[Device]> = node_state.merge_devices(devices, &self.pod_states).into();
        if devices != node_state.devices {
            // Hints name places, and those may be others now.
            self.drop_soft_reservations_on(name);
            self.node_states.get_mut(name).expect("hints do not remove a node that exists").devices = devices;
            self.refresh(name);
            // Before the agent reports, nobody knows which GPUs a hold names.
            if self.node_states[name].reported {
                self.expire_broken_reservations(name);
            }
        }
    }

    /// A hold that has lost one of its GPUs keeps nothing any more: it runs out at the next look at the clock.
    fn expire_broken_reservations(&mut self, name: &NodeName) {
        self.expire_reservations_on(name, |node_state, reservation| {
            node_state.resolve(&reservation.devices).is_none()
        });
    }

    /// Pods that were bound when only indices were known are on the GPUs that have these indices now. NVML may number them
    /// otherwise after its next start.
    pub(super) fn pin_indices(&mut self, name: &NodeName) {
        let node_state = &self.node_states[name];
        let by_index = |uid: &PodUid| match &self.pod_states[uid].phase {
            PodPhase::Bound(bound)
                if !bound.is_recorded() && bound.located.is_none() && bound.node == *name =>
            {
                let places = node_state.resolve(bound.devices.as_ref()?)?;
                let uuids = places.iter().map(|place| node_state.devices[place].uuid.clone()).collect();
                Some((uid.clone(), uuids))
            }
            _ => None,
        };
        let pinned: Vec<(PodUid, Arc<[GpuUuid]>)> = node_state.pods.iter().filter_map(by_index).collect();
        pinned.into_iter().for_each(|(uid, gpus)| self.locate(&uid, gpus));
    }
}

/// Whether a reported device is new, or anything but worse than what is known of it.
fn is_gain(known: &[Device], reported: &Device) -> bool {
    let Some(known) = known.iter().find(|known| known.uuid == reported.uuid) else { return true };
    let Device { health, total, reserved, .. } = reported.clone();
    let is_like = Device { health, total, reserved, ..known.clone() } == *reported;
    let is_worse =
        badness(health) >= badness(known.health) && total <= known.total && reserved >= known.reserved;
    !(is_like && is_worse)
}

fn badness(health: Health) -> u8 {
    match health {
        Health::Healthy => 0,
        Health::Draining => 1,
        Health::Lost => 2,
    }
}

/// The reported devices, with those that gain something as they are known, if they are known.
fn without_gains(known: &[Device], reported: Vec<Device>) -> Vec<Device> {
    let as_known = |device: Device| match is_gain(known, &device) {
        true => known.iter().find(|known| known.uuid == device.uuid).cloned(),
        false => Some(device),
    };
    reported.into_iter().filter_map(as_known).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduling::policy::Policy;
    use crate::scheduling::proptests::whole_gpu;
    use crate::scheduling::vocabulary::node::NodeKind;
    use crate::units::Bytes;

    fn name() -> NodeName {
        NodeName::parse("n").unwrap()
    }

    fn gpus(count: u32) -> Vec<Device> {
        let uuid = |index| GpuUuid::parse(&format!("GPU-{index}")).unwrap();
        (0..count).map(|index| whole_gpu(uuid(index), index, Bytes(100))).collect()
    }

    fn report(ledger: &mut Ledger, count: u32) -> (usize, usize) {
        let waiting = ledger.report_devices(&name(), gpus(count)).unwrap();
        (waiting, ledger.node(&name()).unwrap().devices.len())
    }

    #[test]
    fn b12_gpus_that_come_and_go_with_every_report_come_a_few_times_and_then_wait() {
        let mut ledger = Ledger::new(Arc::new(Policy::default()));
        ledger.set_node(&name(), NodeKind::Stowage, None);
        assert_eq!(report(&mut ledger, 2), (0, 2), "the first report is no change");
        for _ in 0..GAINS_AT_ONCE {
            assert_eq!(report(&mut ledger, 1), (0, 1), "what is lost is lost at once");
            assert_eq!(report(&mut ledger, 2), (0, 2));
        }
        assert_eq!(report(&mut ledger, 1), (0, 1));
        let generation = ledger.generation();
        for _ in 0..100 {
            assert_eq!(report(&mut ledger, 2), (1, 1), "it waits");
            assert_eq!(report(&mut ledger, 1), (0, 1));
        }
        assert_eq!(ledger.generation(), generation, "nobody has to look at the node again");
        ledger.set_now(Moment::default() + GAIN_EVERY);
        assert_eq!(report(&mut ledger, 2), (0, 2), "its time has come");
        assert_eq!(report(&mut ledger, 1), (0, 1));
        assert_eq!(report(&mut ledger, 2), (1, 1));
    }

    #[test]
    fn b12_a_device_that_gets_worse_is_no_gain_and_any_other_change_is_one() {
        let known = gpus(1);
        let with = |edit: fn(&mut Device)| {
            let mut device = known[0].clone();
            edit(&mut device);
            is_gain(&known, &device)
        };
        assert!(!with(|_| {}) && !with(|device| device.health = Health::Lost));
        assert!(!with(|device| device.total = Bytes(90)) && !with(|device| device.reserved = Bytes(1)));
        assert!(with(|device| device.total = Bytes(101)) && with(|device| device.index = 7));
        assert!(is_gain(&[Device { health: Health::Lost, ..known[0].clone() }], &known[0]));
        assert!(is_gain(&[], &known[0]));
    }
}

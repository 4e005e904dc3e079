//! The devices of a node: as its labels say, as its agent reports them, and after another machine has taken its name. What is allocated
//! on a device stays charged there whatever becomes of it.
//!
//! Devices that a device plugin allocates are counted as whole ones per node. A pod with such devices is charged on no single GPU, and
//! neither reserves nor softly reserves any.

use super::Ledger;
use super::node_state::{DeviceReport, NodeState};
use super::pod_state::{PodPhase, PodState};
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::policy::Mode;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::device_plugin::{GpuRequest, PluginDevices};
use crate::vocabulary::gpu::{Device, Health};
use crate::vocabulary::node::NodeIdentity;
use crate::vocabulary::node_reading::Freshness;
use std::sync::Arc;

/// Why a report of devices is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceReportError {
    UnknownNode,
    TooMany(usize),
}

impl Ledger {
    /// The devices of a node as its agent reports them. Returns how many of them wait: the node's list gained something too
    /// often of late, so that what is new or better than it was comes with a later report. What is worse counts at once.
    ///
    /// Refused as a whole, with how many there would be, if they and the lost ones that still have pods are more than
    /// [`MAX_GPUS`](crate::vocabulary::demand::MAX_GPUS).
    pub(crate) fn report_devices(
        &mut self,
        name: &NodeName,
        devices: Arc<[Device]>,
    ) -> Result<usize, DeviceReportError> {
        self.take_device_report(name, &devices, false)
    }

    /// Takes a report that lists all devices of the machine: pods recorded on other devices have none of these.
    pub(crate) fn report_all_devices(
        &mut self,
        name: &NodeName,
        devices: Arc<[Device]>,
    ) -> Result<usize, DeviceReportError> {
        self.take_device_report(name, &devices, true)
    }

    /// The devices of a node whose agent cannot read any GPU now, all draining, once its last reading is not fresh any more.
    /// `None` before that, and where no agent has listed any.
    pub fn unread_devices(&self, name: &NodeName) -> Option<Vec<Device>> {
        let is_reported = self
            .node_states
            .get(name)
            .is_some_and(NodeState::is_reported);
        let node = self
            .node(name)
            .filter(|node| is_reported && node.freshness != Freshness::Fresh)?;
        let as_draining = |device: &Device| Device {
            health: device.health.max(Health::Draining),
            ..device.clone()
        };
        Some(node.devices.iter().map(as_draining).collect())
    }

    fn take_device_report(
        &mut self,
        name: &NodeName,
        devices: &Arc<[Device]>,
        are_all: bool,
    ) -> Result<usize, DeviceReportError> {
        let node_state = self
            .node_states
            .existing_mut(name)
            .ok_or(DeviceReportError::UnknownNode)?;
        let report = node_state.take_report(devices, self.now, &self.pod_states);
        let DeviceReport {
            devices,
            waiting,
            is_first,
        } = report.map_err(DeviceReportError::TooMany)?;
        if let Some(devices) = devices {
            self.set_devices(name, devices);
            self.pin_indices(name);
        }
        if are_all {
            self.mark_all_devices_listed(name);
        }
        // What is on lost devices is not charged on these any more.
        if is_first {
            self.node_states
                .get_or_create(name)
                .update_warnings(&self.policy);
            self.refresh(name);
            self.adopt_reservations_on(name);
        }
        Ok(waiting)
    }

    fn mark_all_devices_listed(&mut self, name: &NodeName) {
        if self
            .node_states
            .get(name)
            .is_some_and(|node_state| !node_state.lists_all_devices())
        {
            self.node_states
                .get_or_create(name)
                .mark_all_devices_listed();
            self.refresh(name);
        }
    }

    /// Whether a report has listed all GPUs of the node that its machine has.
    pub(crate) fn lists_all_devices(&self, name: &NodeName) -> bool {
        self.node_states
            .get(name)
            .is_some_and(NodeState::lists_all_devices)
    }

    /// Records which Node object and which machine has the name now. A new machine has nothing of what the one before it had;
    /// what was allocated there stays charged on GPUs that are lost, until their pods are gone.
    pub(crate) fn identify_node(&mut self, name: &NodeName, identity: NodeIdentity) {
        if self.node_states.get_or_create(name).identify(identity) {
            self.forget_machine(name);
        }
    }

    /// Which Node object bears the name, if that is known.
    pub fn node_identity(&self, name: &NodeName) -> Option<&NodeIdentity> {
        self.node_states.get(name)?.identity()
    }

    fn forget_machine(&mut self, name: &NodeName) {
        self.node_states.forget_reading(name, &self.policy);
        let Some(node_state) = self.node_states.get_mut(name) else {
            return;
        };
        node_state.forget_machine();
        self.forget_locations(name);
        self.remove_soft_reservations_on(name);
        self.set_devices(name, Vec::new());
        self.expire_reservations_on(name, |_, _| true);
        self.refresh(name);
    }

    /// Where an agent found pods that no UUID records says nothing of another machine: its kubelet starts what is bound to the
    /// node, by the recorded index or wherever there is room.
    fn forget_locations(&mut self, name: &NodeName) {
        let is_located = |uid: &&PodUid| {
            self.pod_states[*uid]
                .bound()
                .is_some_and(|bound| bound.node == *name && bound.located.is_some())
        };
        let located: Vec<PodUid> = self.node_states[name]
            .pods()
            .iter()
            .filter(is_located)
            .cloned()
            .collect();
        located
            .iter()
            .for_each(|uid| self.edit_pod(uid, PodState::forget_location));
    }

    /// What a node's labels say of its devices. It is left aside while pods are charged on devices that are known by UUID:
    /// the second GPU of the labels may be one of those.
    pub(super) fn set_labelled_devices(&mut self, name: &NodeName, devices: Vec<Device>) {
        let is_charged = self.node_states[name].has_charged_devices(&self.pod_states);
        self.set_devices(name, if is_charged { Vec::new() } else { devices });
    }

    fn set_devices(&mut self, name: &NodeName, devices: Vec<Device>) {
        let node_state = &self.node_states[name];
        let Some(devices) = node_state.changed_devices(devices, &self.pod_states) else {
            return;
        };
        // Soft reservations name places, and those may be others now.
        self.remove_soft_reservations_on(name);
        self.node_states
            .get_or_create(name)
            .set_devices(devices, &self.policy);
        self.refresh(name);
        self.update_published(name);
        // Before the agent reports, it is unknown which GPUs a reservation names.
        if self.node_states[name].is_reported() {
            self.expire_broken_reservations(name);
        }
    }

    /// A reservation that has lost one of its GPUs keeps nothing any more: it expires with the next tick of the clock.
    fn expire_broken_reservations(&mut self, name: &NodeName) {
        self.expire_reservations_on(name, |node_state, reservation| {
            node_state.resolve(&reservation.devices).is_none()
        });
    }

    /// Pods that were bound when only indices were known are on the GPUs that have these indices now. NVML may number them
    /// otherwise after its next start.
    pub(super) fn pin_indices(&mut self, name: &NodeName) {
        let node_state = &self.node_states[name];
        let pinned_to_uuids = |uid: &PodUid| match &self.pod_states[uid].phase {
            PodPhase::Bound(bound)
                if !bound.has_recorded_uuids()
                    && bound.located.is_none()
                    && bound.node == *name =>
            {
                let gpus = node_state.resolve(bound.devices.as_ref()?)?;
                let uuids = gpus
                    .iter()
                    .map(|index| node_state.devices()[index].uuid.clone())
                    .collect();
                Some((uid.clone(), uuids))
            }
            _ => None,
        };
        let pinned: Vec<(PodUid, Arc<[GpuUuid]>)> = node_state
            .pods()
            .iter()
            .filter_map(pinned_to_uuids)
            .collect();
        pinned
            .into_iter()
            .for_each(|(uid, gpus)| self.set_located_gpus(&uid, gpus));
    }
}

impl Ledger {
    /// What device plugins offer on a node that exists.
    pub(crate) fn set_plugin_devices(&mut self, name: &NodeName, offered: PluginDevices) {
        if self
            .node_states
            .get_mut(name)
            .is_some_and(|node_state| node_state.set_offered(offered))
        {
            self.refresh(name);
        }
    }

    /// Whether evicting these victims would leave members of the pod's group behind.
    pub(crate) fn would_break_group(&self, leaver: &PodState, group_victims: &[PodUid]) -> bool {
        let Some(group) = &leaver.disruption_info.group else {
            return false;
        };
        let stays = |uid: &PodUid| {
            let pod_state = &self.pod_states[uid];
            let is_there = pod_state.waiting().is_none() && self.departure_of(pod_state).is_none();
            is_there && !group_victims.contains(uid)
        };
        self.member_uids(group).any(stays)
    }

    /// Whether kube-scheduler's choice is accepted for such a pod, whatever the ledger says: it requests nothing that is counted here, or
    /// nothing is decided here.
    pub(super) fn passes_through(&self, demand: &Demand) -> bool {
        demand.ask == GpuRequest::Claims
            || self.policy.mode == Mode::Shadow && demand.is_allocated_externally()
    }
}

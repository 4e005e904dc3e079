//! The machines under the nodes: GPUs, the processes on them, and what agents report of both.

use super::World;
use crate::simulate::decisions::core_under_test::gpu_name;
use crate::simulate::decisions::draws::Draws;
use crate::simulate::decisions::oracle::Checked;
use crate::simulate::decisions::planted::PlantedBug;
use crate::simulate::decisions::record::{
    GIB, GpuReadingRecord, Hardware, MOST_GPUS, Mask, Place, ReadingRecord,
};
use stowage_scheduling::ids::GpuModel;
use stowage_scheduling::units::{Bytes, Moment, Percent};
use stowage_scheduling::verbs::observe::{DevicesReported, ReadingReported};
use stowage_scheduling::vocabulary::gpu::{Device, Health};
use stowage_scheduling::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading};

/// A pod's process on its GPUs.
#[derive(Debug, Clone, Copy)]
struct Process {
    pod: u32,
    gpus: Mask,
    /// On each of them.
    used: u64,
    from: u64,
    until: Option<u64>,
}

#[derive(Debug, Clone)]
pub struct Machine {
    devices: Vec<Device>,
    /// GPUs that are on the bus, and of these the ones that are in order.
    there: Mask,
    healthy: Mask,
    /// VRAM that processes of no pod use.
    foreign: [u64; MOST_GPUS],
    /// How busy the engines are.
    load: [Option<(u8, u32)>; MOST_GPUS],
    processes: Vec<Process>,
}

impl Machine {
    pub fn new(hardware: &[Hardware], draws: &mut Draws<'_>) -> Self {
        let all = ((1u16 << hardware.len()) - 1) as Mask;
        let mut load = [None; MOST_GPUS];
        for load in load.iter_mut().take(hardware.len()) {
            *load = draws.of(&[
                None,
                None,
                Some((30, 0)),
                Some((79, 4)),
                Some((90, 2)),
                Some((10, 20)),
            ]);
        }
        Self {
            devices: Vec::new(),
            there: all,
            healthy: all,
            foreign: [0; MOST_GPUS],
            load,
            processes: Vec::new(),
        }
    }

    fn devices(&mut self, node: u8, hardware: &[Hardware]) -> &[Device] {
        if self.devices.is_empty() {
            let model = GpuModel::parse("GPU").expect("it is a name");
            let device = |(index, hardware): (usize, &Hardware)| Device {
                uuid: gpu_name(node, index as u32),
                index: index as u32,
                model: model.clone(),
                parent: hardware
                    .is_slice
                    .then(|| gpu_name(100 + node, index as u32)),
                total: Bytes(hardware.total),
                reserved: Bytes(hardware.total - hardware.total / 10 - hardware.capacity),
                health: Health::Healthy,
                exclusive_process: false,
                island: Some((index / 2) as u8),
            };
            self.devices = hardware.iter().enumerate().map(device).collect();
        }
        &self.devices
    }
}

impl World<'_> {
    /// An agent lists the GPUs of a node.
    pub(super) fn report_devices(&mut self, node: u8) {
        let (hardware, place) = (
            &self.record.nodes[usize::from(node)].hardware,
            usize::from(node),
        );
        let lies = self.core.has(PlantedBug::KeepsLostGpus);
        let machine = &mut self.machines[place];
        let (there, healthy) = (machine.there, machine.healthy);
        let (shown, sound) = if lies {
            (u8::MAX, u8::MAX)
        } else {
            (there, healthy)
        };
        let health = |gpu: u32| {
            if sound >> gpu & 1 == 1 {
                Health::Healthy
            } else {
                Health::Draining
            }
        };
        let listed = machine
            .devices(node, hardware)
            .iter()
            .filter(|device| shown >> device.index & 1 == 1);
        let devices = listed
            .map(|device| Device {
                health: health(device.index),
                ..device.clone()
            })
            .collect();
        let report = DevicesReported {
            node: self.node_names[place].clone(),
            devices,
            are_all: true,
        };
        let waiting = self
            .core
            .apply(report)
            .expect("a node has no more GPUs than a node may");
        self.record
            .report_devices(node, there, healthy & there, waiting > 0);
    }

    /// A GPU is drained, lost, or comes back; or it comes and goes with every report.
    pub(super) fn change_device(&mut self) -> Checked {
        let node = self.random_node();
        let gpu: Mask = 1
            << self
                .draws
                .below(self.record.nodes[usize::from(node)].hardware.len());
        let kind = self.draws.below(16);
        let times = if kind == 0 {
            self.draws.between(2, 12)
        } else {
            1
        };
        for _ in 0..times {
            let machine = &mut self.machines[usize::from(node)];
            match kind {
                0 => machine.there ^= gpu,
                1..5 => machine.there &= !gpu,
                5..9 => machine.healthy &= !gpu,
                _ => {
                    (machine.there, machine.healthy) = (machine.there | gpu, machine.healthy | gpu)
                }
            }
            let (there, healthy) = (machine.there, machine.healthy);
            self.note(|| format!("node {node} has GPUs {there:08b}, in order {healthy:08b}"));
            self.report_devices(node);
            self.record.check_gains(node)?;
        }
        Ok(())
    }

    /// A process starts with its pod: it uses half of its grant, all of it, or more.
    pub(super) fn start_process(&mut self, pod: u32, place: Place, from: u64) {
        let granted = self.record.spec(pod).per_gpu;
        let used = match self.draws.below(8) {
            0..3 => granted / 2,
            3..7 => granted,
            _ => granted + GIB,
        };
        let process = Process {
            pod,
            gpus: place.gpus,
            used,
            from,
            until: None,
        };
        self.machines[usize::from(place.node)]
            .processes
            .push(process);
    }

    /// A process ends with its pod, or soon after.
    pub(super) fn end_process(&mut self, pod: u32, node: u8) {
        let linger = self.draws.of(&[0, 0, 500, 3_000, 40_000]);
        let until = self.record.now + linger;
        let processes = &mut self.machines[usize::from(node)].processes;
        processes
            .iter_mut()
            .filter(|process| process.pod == pod)
            .for_each(|process| process.until = Some(until));
    }

    /// An agent reports what it measured a while ago.
    pub(super) fn report(&mut self) -> Checked {
        let node = self.random_node();
        if self.draws.chance(25) {
            let gpu = self
                .draws
                .below(self.record.nodes[usize::from(node)].hardware.len());
            self.machines[usize::from(node)].foreign[gpu] =
                self.draws.of(&[0, 0, 0, 1, 2, 10]) * GIB;
        }
        // Three times, so that what they leave unexplained is believed.
        let times = self.draws.of(&[1, 1, 3]);
        for _ in 0..times {
            self.report_of(node);
        }
        self.record.check_gains(node)
    }

    pub(super) fn report_of(&mut self, node: u8) {
        if self.record.nodes[usize::from(node)].is_kept_back {
            self.report_devices(node);
        }
        let age = match self.draws.below(20) {
            0 => 40_000,
            1 => 8_000,
            2..5 => 2_000,
            _ => self.draws.below(200) as u64,
        };
        let sampled = (self.record.now - age).max(self.record.nodes[usize::from(node)].sampled());
        let is_unread = self.draws.chance(5);
        let machine = &mut self.machines[usize::from(node)];
        machine
            .processes
            .retain(|process| process.until.is_none_or(|until| until + 60_000 > sampled));
        let mut entry = ReadingRecord {
            sampled,
            ..ReadingRecord::default()
        };
        let mut gpus = Vec::with_capacity(machine.devices.len());
        for (gpu, device) in machine.devices.iter().enumerate() {
            if machine.there >> gpu & 1 == 0 {
                continue;
            }
            let is_seen = |process: &&Process| {
                process.gpus >> gpu & 1 == 1
                    && process.from <= sampled
                    && process.until.is_none_or(|until| sampled < until)
            };
            let here = machine.processes.iter().filter(is_seen);
            let mut attributed: Vec<(u32, u64)> =
                here.map(|process| (process.pod, process.used)).collect();
            attributed.sort_unstable();
            let sum: u64 = attributed.iter().map(|(_, bytes)| bytes).sum();
            let used = (!is_unread).then_some(sum + machine.foreign[gpu]);
            let load = machine.load[gpu];
            let is_forgotten = self.core.has(PlantedBug::BelievesNoReading);
            gpus.push(GpuReading {
                uuid: device.uuid.clone(),
                used: if is_forgotten {
                    Some(Bytes(0))
                } else {
                    used.map(Bytes)
                },
                attributed: attributed
                    .iter()
                    .filter(|_| !is_forgotten)
                    .map(|(pod, bytes)| (self.pods[*pod as usize].uid.clone(), Bytes(*bytes)))
                    .collect(),
                engine_load: load.map_or(EngineLoad::NONE, |(kv_cache, queue)| {
                    EngineLoad::of(Percent::new(kv_cache), Some(queue))
                }),
            });
            entry.gpus[gpu] = Some(GpuReadingRecord {
                used,
                attributed,
                load,
            });
        }
        let reading = NodeReading {
            sampled: Moment(sampled),
            gpus,
            ..NodeReading::default()
        };
        let name = self.node_names[usize::from(node)].clone();
        self.core.apply(ReadingReported {
            node: name,
            reading: reading.into(),
        });
        self.record.report(node, entry);
        self.note(|| format!("node {node} reports what it measured {age} ms ago"));
    }
}

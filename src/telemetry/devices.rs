//! Families about each node and each of its GPUs: what Stowage alone knows of it. Its temperature, power and utilization are on
//! the page of the node's agent.
//!
//! At most [`MAX_SERIES_PER_GPU`] series a GPU; `--gpu-metrics=false` leaves them out.

use super::family::{Families, Label, Sampled, known, open};
use super::scrape::Scrape;
use super::usage::{bytes, seconds};
use std::io;
use stowage_scheduling::explaining::usage::{DeviceUsage, devices, nodes};
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::ledger::Ledger;
use stowage_scheduling::units::Millis;
use stowage_scheduling::vocabulary::gpu::Health;
use stowage_scheduling::vocabulary::node::{Node, NodeKind};
use stowage_scheduling::vocabulary::node_signs::NodeWarning;

/// Five thousand nodes with eight GPUs each are a quarter of a million series then, which one Prometheus takes.
pub const MAX_SERIES_PER_GPU: usize = 6;

pub struct DeviceMetrics {
    node_info: Sampled,
    warnings: Sampled,
    report_age: Sampled,
    gpu_info: Sampled,
    allocatable: Sampled,
    allocated: Sampled,
    unaccounted: Sampled,
    healthy: Sampled,
    pods: Sampled,
    unknown_load: Sampled,
}

/// Whether each GPU has series of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GpuSeries {
    #[default]
    Exported,
    LeftOut,
}

type Figure = fn(&Node, &DeviceUsage<'_>) -> f64;

impl DeviceMetrics {
    pub(super) fn new(families: &mut Families) -> Self {
        let node = || open("node", "the cluster's GPU nodes");
        let gpu = || {
            open(
                "gpu",
                "the nodes' GPUs and MIG slices; none with --gpu-metrics=false",
            )
        };
        Self {
            node_info: families.sampled(
                "stowage_node_info",
                "1; what allocates the node's GPUs, and its node pool.",
                [
                    node(),
                    known("kind", NODE_KINDS.map(|(_, name)| name)),
                    open("pool", "the policy's node pools; none for a node that is in no pool"),
                ],
            ),
            warnings: families.sampled(
                "stowage_node_warnings",
                "1 for what is remarkable about a node's GPUs by its Node object; stowage explain says what it is.",
                [node(), known("code", NodeWarning::CODES.iter().copied())],
            ),
            report_age: families.sampled(
                "stowage_node_report_age_seconds",
                "Time since the latest report of the node's agent; absent until the first.",
                [node()],
            ),
            gpu_info: families.sampled(
                "stowage_gpu_info",
                "1; NVML's index of the GPU on its node, and its product name.",
                [node(), gpu(), open("index", "one for each GPU"), open("model_name", "one for each GPU")],
            ),
            allocatable: gpu_family(
                families,
                "stowage_gpu_vram_allocatable_bytes",
                "VRAM of a GPU that pods can be allocated: total less the driver's reserve and the headroom.",
                [node(), gpu()],
            ),
            allocated: gpu_family(
                families,
                "stowage_gpu_vram_allocated_bytes",
                "VRAM of a GPU that is allocated to or reserved for pods; more than it has while engines lend.",
                [node(), gpu()],
            ),
            unaccounted: gpu_family(
                families,
                "stowage_gpu_vram_unaccounted_bytes",
                "VRAM of a GPU in use that no pod's grant explains, or the margin that is kept where no agent reports.",
                [node(), gpu()],
            ),
            healthy: gpu_family(
                families,
                "stowage_gpu_healthy",
                "1 if the GPU takes pods, 0 if it is draining or lost.",
                [node(), gpu()],
            ),
            pods: gpu_family(families, "stowage_gpu_pods", "Pods and reservations on a GPU.", [node(), gpu()]),
            unknown_load: families.sampled(
                "stowage_gpus_unknown_engine_load",
                "GPUs with an engine, or a pod that may be one, that does not say how busy it is.",
                [],
            ),
        }
    }

    /// `ages`: of each node with a report, the age of its latest one.
    pub fn write(
        &self,
        scrape: &mut Scrape<'_>,
        ledger: &Ledger,
        ages: &[(NodeName, Millis)],
        series: GpuSeries,
    ) -> io::Result<()> {
        let info = nodes(ledger).map(|(node, pool)| {
            (
                [
                    node.name.as_str(),
                    kind_label(node.kind),
                    pool.unwrap_or("none"),
                ],
                1.0,
            )
        });
        scrape.write_samples(&self.node_info, info)?;
        let warnings = nodes(ledger)
            .flat_map(|(node, _)| node.warnings.iter().map(move |warning| (node, warning)));
        let warnings = warnings.map(|(node, warning)| ([node.name.as_str(), warning.code()], 1.0));
        scrape.write_samples(&self.warnings, warnings)?;
        let gpus = nodes(ledger).flat_map(|(node, _)| devices(node));
        scrape.write_value(
            &self.unknown_load,
            gpus.filter(|one| one.gpu.engine_load.partial).count() as f64,
        )?;
        scrape.write_samples(
            &self.report_age,
            ages.iter()
                .map(|(node, age)| ([node.as_str()], seconds(*age))),
        )?;
        match series {
            GpuSeries::Exported => self.write_gpus(scrape, ledger),
            GpuSeries::LeftOut => Ok(()),
        }
    }

    fn write_gpus(&self, scrape: &mut Scrape<'_>, ledger: &Ledger) -> io::Result<()> {
        let all = || nodes(ledger).flat_map(|(node, _)| devices(node).map(move |one| (node, one)));
        let info = all().map(|(node, DeviceUsage { device, .. })| {
            let index = device.index.to_string();
            let [node, gpu, model] = [
                node.name.as_str(),
                device.uuid.as_str(),
                device.model.as_str(),
            ];
            (
                [node.to_owned(), gpu.to_owned(), index, model.to_owned()],
                1.0,
            )
        });
        scrape.write_samples(&self.gpu_info, info)?;
        let figures: [(&Sampled, Figure); 5] = [
            (&self.allocatable, |node, one| bytes(one.allocatable(node))),
            (&self.allocated, |_, one| bytes(one.gpu.charged)),
            (&self.unaccounted, |_, one| bytes(one.gpu.unaccounted_vram)),
            (&self.healthy, |_, one| {
                f64::from(u8::from(one.device.health == Health::Healthy))
            }),
            (&self.pods, |_, one| f64::from(one.gpu.residents)),
        ];
        for (family, figure) in figures {
            let samples = all().map(|(node, one)| {
                (
                    [node.name.as_str(), one.device.uuid.as_str()],
                    figure(node, &one),
                )
            });
            scrape.write_samples(family, samples)?;
        }
        Ok(())
    }
}

fn gpu_family(
    families: &mut Families,
    name: &'static str,
    help: &'static str,
    labels: [Label; 2],
) -> Sampled {
    families.sampled(name, help, labels)
}

const NODE_KINDS: [(NodeKind, &str); 3] = [
    (NodeKind::Stowage, "stowage"),
    (NodeKind::DevicePlugin, "device-plugin"),
    (NodeKind::Dra, "dra"),
];

fn kind_label(kind: NodeKind) -> &'static str {
    NODE_KINDS
        .iter()
        .find(|(of_kind, _)| *of_kind == kind)
        .map_or("", |(_, name)| name)
}

//! How many GPUs hold one pod of each model, as `stowage plan capacity` finds it; and the MIG geometries that would do.

use super::app::App;
use super::{GPU_VRAM, Sizes, Variant};
use crate::simulate::fleet::pods::PodSpec;
use std::sync::Arc;
use stowage_scheduling::ids::PodKey;
use stowage_scheduling::kube_filters::Requirements;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Bytes;
use stowage_sizing::capacity_plan::geometry::Geometry;
use stowage_sizing::capacity_plan::gpu_types::GpuType;
use stowage_sizing::capacity_plan::plan;
use stowage_sizing::capacity_plan::question::{
    CapacityQuestion, NodeTemplate, PodToPlace, TemplateGpu, TemplateHost,
};

/// GPUs that suffice, and what the plan says of them.
pub fn gpus_needed(variant: Variant, bank: &Policy) -> (u32, String) {
    // A plan knows no load, and would let nothing join an engine with a limit.
    let policy = match variant {
        Variant::WholeGpus | Variant::TimeSlicing => Policy::default(),
        _ => bank.clone().without_latency_limits(),
    };
    let Sizes { fraud, replica } = variant.sizes();
    let pods = [
        (App::Fraud, fraud),
        (App::Credit, replica),
        (App::Chatbot, replica),
    ];
    // Without Stowage, a pod that asks for a GPU has all of it, unless GPUs are sliced.
    let pod = |(app, vram): (App, Bytes)| PodSpec {
        is_exclusive: variant == Variant::WholeGpus,
        ..app.pod(vram)
    };
    let pods = pods
        .map(pod)
        .into_iter()
        .enumerate()
        .map(|(workload, pod)| to_place(workload, &pod, &policy));
    let question = CapacityQuestion {
        pods: pods.collect(),
        policy: Arc::new(policy),
        node_kinds: vec![node()],
    };
    let planned = plan(&question);
    let more = planned.one_more.map_or(String::new(), |more| {
        format!(
            "; with {} they would stand {} % idle",
            more.gpus, more.idle_percent_then
        )
    });
    let (held, lower) = (planned.held, planned.lower_bound.gpus);
    (
        planned.gpus,
        format!(
            "{} A100 suffice for {held} pods, and no fewer than {lower} do{more}",
            planned.gpus
        ),
    )
}

/// Whether the shared GPU can be cut instead.
pub fn mig_geometries() -> [String; 2] {
    ["3g.40gb,3g.40gb", "2g.20gb,2g.20gb,2g.20gb,2g.20gb"].map(|wanted| {
        match Geometry::parse(wanted, a100()) {
            Ok(geometry) => format!("an A100 can be cut into {geometry}"),
            Err(why) => why.to_string(),
        }
    })
}

fn a100() -> &'static GpuType {
    GpuType::find("A100-80GB").expect("it is a known type")
}

fn to_place(workload: usize, pod: &PodSpec, policy: &Policy) -> PodToPlace {
    let label = &pod.labels["app"];
    PodToPlace {
        key: PodKey::parse(&pod.namespace, label).expect("a label is a name"),
        workload,
        source: format!("Pod {}/{label}", pod.namespace).into(),
        demand: pod.demand(policy).expect("its request is valid"),
        requirements: Requirements {
            namespace: pod.namespace.clone(),
            ..Requirements::default()
        },
    }
}

fn node() -> NodeTemplate {
    let gpu_type = a100();
    NodeTemplate {
        name: "bank".into(),
        gpus: 4,
        gpu: TemplateGpu {
            name: gpu_type.name.into(),
            model: gpu_type.model(),
            total: GPU_VRAM,
            gpu_type: Some(gpu_type),
        },
        geometry: None,
        plugin_devices: None,
        labels: [("gpu-pool".into(), "bank".into())].into(),
        taints: Vec::new(),
        host: TemplateHost::Described {
            cpu: None,
            memory: None,
        },
        max_nodes: None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::policy;
    use super::*;

    #[test]
    fn two_gpus_suffice_and_a_geometry_that_the_gpu_does_not_have_is_refused() {
        let needed = |variant| gpus_needed(variant, &policy()).0;
        assert_eq!(needed(Variant::Stowage), 2);
        assert_eq!(needed(Variant::WholeGpus), 3);
        let [accepted, refused] = mig_geometries();
        assert!(
            accepted.contains("can be cut into") && refused.contains("cannot be cut into"),
            "{refused}"
        );
    }
}

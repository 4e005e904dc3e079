//! What Stowage writes on a pod, against what NVIDIA's container runtime and its NRI plugin take:
//! `tests/fixtures/container-toolkit.csv` has what they do in each mode.

use crate::served::{ServedCluster, gpu_uuid, pod, report};
use serde_json::json;
use std::collections::BTreeMap;
use stowage::ids::LeaderEpoch;
use stowage::kubernetes::{CDI_KIND, objects};

const NRI: &str = "nvidia.cdi.k8s.io/container.engine";

/// What a container gets for a value of its variable, or an annotation of its pod.
struct Row {
    toolkits: Vec<&'static str>,
    mode: &'static str,
    has_spec: bool,
    value: &'static str,
    gpus: &'static str,
    /// The variable, as the container sees it.
    env: &'static str,
    error: &'static str,
}

fn table() -> Vec<Row> {
    let text = include_str!("../fixtures/container-toolkit.csv");
    let rows = text.lines().filter(|line| !line.starts_with('#')).skip(1).map(|line| {
        let [toolkits, mode, spec, value, gpus, env, error] = line.split('|').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        Row {
            toolkits: toolkits.split(' ').collect(),
            mode,
            has_spec: spec == "yes",
            value,
            gpus,
            env,
            error,
        }
    });
    rows.collect()
}

/// The annotations of a pod that is bound to a node whose agent reports that, with the GPU's UUID as the table writes it.
fn annotations(kind: &str, is_legacy: bool) -> BTreeMap<String, String> {
    let llama = pod("llama", "20Gi");
    let served = ServedCluster::of(&[("a", 1)]).with([llama.clone()]).serve();
    let mut news = report("a", "boot", 2, 1);
    news["legacyRuntime"] = json!(is_legacy);
    assert_eq!(served.report(news).status, 200);
    assert_eq!(served.bind(&llama, "a"), "");
    let (order, _) = served.control_plane.orders.lock()[0].clone();
    let epoch = LeaderEpoch::new("lease", 1, "nonce");
    let binding = objects::binding(&order.key, &order.uid, &order.demand, &order.placement, kind, &epoch);
    let written = binding.metadata.annotations.unwrap();
    written.into_iter().map(|(key, value)| (key, value.replace(&gpu_uuid("a", 0), "UUID"))).collect()
}

#[test]
fn nvidias_nri_plugin_finds_nothing_on_a_pod_that_it_could_not_resolve() {
    let written = annotations(CDI_KIND, false);
    assert_eq!(written["stowage.dev/visible-devices"], "runtime.nvidia.com/gpu=UUID");
    let unresolvable =
        |row: &Row| row.mode == "nri" && Some(&row.value) == written.get(NRI).map(|v| &**v).as_ref();
    let failing: Vec<&str> = table().iter().filter(|row| unresolvable(row)).map(|row| row.error).collect();
    assert_eq!(failing, [""; 0]);
    assert!(!written.contains_key(NRI), "{written:?}");
}

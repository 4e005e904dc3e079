//! What Stowage writes on a pod, against what NVIDIA's container runtime and its NRI plugin take:
//! `tests/fixtures/container-toolkit.csv` has what they do in each mode.

use crate::served::{ServedCluster, gpu_uuid, pod, report};
use serde_json::json;
use stowage_agent::round::is_legacy_runtime;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::ids::LeaderEpoch;
use stowage_server::kubernetes::CDI_KIND;

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
    let rows = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .skip(1)
        .map(|line| {
            let [toolkits, mode, spec, value, gpus, env, error] =
                line.split('|').collect::<Vec<_>>()[..]
            else {
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

/// What Stowage writes on a pod with one GPU, whose UUID is as the table writes it.
struct Written {
    visible_devices: String,
    /// For NVIDIA's NRI plugin.
    nri: Option<String>,
}

/// `agent_sees` is the variable in the container of the node's agent.
fn written(cdi_kind: &str, agent_sees: &str) -> Written {
    let llama = pod("llama", "20Gi");
    let served = ServedCluster::with_gpus(&[("a", 1)])
        .with([llama.clone()])
        .serve();
    let mut news = report("a", "boot", 2, 1);
    news["legacyRuntime"] = json!(is_legacy_runtime(Some(agent_sees)));
    assert_eq!(served.report(news).status, 200);
    assert_eq!(served.bind(&llama, "a"), "");
    let (order, _) = served.control_plane.orders.lock()[0].clone();
    let kind = (!order.legacy_runtime).then_some(cdi_kind);
    let epoch = LeaderEpoch::new("lease", 1, "nonce");
    let binding = objects::binding(
        &order.key,
        &order.uid,
        &order.demand,
        &order.placement,
        kind,
        &epoch,
    );
    let annotations = binding.metadata.annotations.unwrap();
    let text = |key: &str| Some(annotations.get(key)?.replace(&gpu_uuid("a", 0), "UUID"));
    let visible_devices = text("stowage.dev/visible-devices").unwrap();
    Written {
        visible_devices,
        nri: text("nvidia.cdi.k8s.io/container.engine"),
    }
}

fn row<'a>(table: &'a [Row], toolkit: &str, mode: &str, has_spec: bool, value: &str) -> &'a Row {
    let is_it = |row: &&Row| {
        row.toolkits.contains(&toolkit)
            && (row.mode, row.has_spec, row.value) == (mode, has_spec, value)
    };
    table
        .iter()
        .find(is_it)
        .unwrap_or_else(|| panic!("{toolkit} {mode} {has_spec} {value}"))
}

/// Each toolkit and mode, with and without a specification on the node, where an agent can run at all, and what it sees.
fn nodes(table: &[Row]) -> Vec<(&'static str, &'static str, bool, &'static str)> {
    let agents = table
        .iter()
        .filter(|row| row.value == "all" && row.gpus == "all");
    agents
        .flat_map(|row| {
            row.toolkits
                .iter()
                .map(|kit| (*kit, row.mode, row.has_spec, row.env))
        })
        .collect()
}

#[test]
fn a_container_gets_its_gpu_in_each_mode_of_nvidias_runtime() {
    let table = table();
    let nodes = nodes(&table);
    assert_eq!(
        nodes.len(),
        3 * (2 + 1 + 2),
        "without a specification no agent runs in mode cdi"
    );
    for (toolkit, mode, has_spec, agent_sees) in nodes {
        let value = written(CDI_KIND, agent_sees).visible_devices;
        let row = row(&table, toolkit, mode, has_spec, &value);
        assert_eq!(row.gpus, "one", "{toolkit} {mode} {value}: {}", row.error);
    }
}

#[test]
fn where_the_nodes_have_a_specification_a_kind_of_it_works_in_each_mode_and_for_the_nri_plugin() {
    let table = table();
    for (toolkit, mode, has_spec, agent_sees) in nodes(&table) {
        let Written {
            visible_devices,
            nri,
        } = written("nvidia.com/gpu", agent_sees);
        if has_spec {
            assert_eq!(
                row(&table, toolkit, mode, true, &visible_devices).gpus,
                "one",
                "{toolkit} {mode}"
            );
        }
        if let Some(nri) = nri {
            assert_eq!(
                row(&table, "1.20.0", "nri", true, &nri).gpus,
                "one",
                "{nri}"
            );
        }
    }
    assert_eq!(
        written("nvidia.com/gpu", "void").nri.as_deref(),
        Some("nvidia.com/gpu=UUID")
    );
}

#[test]
fn nvidias_nri_plugin_finds_nothing_on_a_pod_that_it_could_not_resolve() {
    let table = table();
    assert_eq!(
        row(
            &table,
            "1.20.0",
            "nri",
            true,
            &written(CDI_KIND, "void").visible_devices
        )
        .gpus,
        "fails"
    );
    for agent_sees in ["void", "all"] {
        assert_eq!(written(CDI_KIND, agent_sees).nri, None);
    }
}

/// What the admission policy and the defaults for pods write for containers without a GPU.
#[test]
fn a_void_or_empty_variable_gives_no_gpu_in_any_mode() {
    for row in table()
        .iter()
        .filter(|row| matches!(row.value, "void" | ""))
    {
        assert_eq!(row.gpus, "none", "{}: {}", row.mode, row.error);
    }
}

/// The nodes' own setting against variables of images, under which Stowage gives GPUs by the NRI plugin alone.
#[test]
fn where_containers_without_privileges_get_nothing_by_the_variable_the_nri_plugin_gives_them_their_gpu()
 {
    let table = table();
    let off: Vec<&Row> = table
        .iter()
        .filter(|row| row.mode.ends_with(" off"))
        .collect();
    assert_eq!(
        off.len(),
        3 * 2 * 4,
        "each mode, with and without a specification"
    );
    for row in off {
        assert_eq!((row.gpus, row.env), ("none", row.value), "{}", row.mode);
    }
    let nri = written("nvidia.com/gpu", "void").nri.unwrap();
    assert_eq!(row(&table, "1.20.0", "nri", true, &nri).gpus, "one");
}

#[test]
fn troubleshooting_has_a_row_for_each_error_of_the_runtime() {
    let page = include_str!("../../docs/use/troubleshooting.md");
    // A kind and a device are `KIND=…` there.
    let is_device = |word: &str| word.contains('=');
    for row in table()
        .iter()
        .filter(|row| row.error.split(' ').any(is_device))
    {
        let start = row
            .error
            .find("unresolvable")
            .or(row.error.find("device error"))
            .unwrap();
        let words = row.error[start..]
            .split(' ')
            .map(|word| match word.split_once('=') {
                Some((kind, device)) => {
                    format!("{kind}=…{}", if device.ends_with(':') { ":" } else { "" })
                }
                None => word.to_owned(),
            });
        let error = words.collect::<Vec<_>>().join(" ");
        assert!(
            page.lines()
                .any(|line| line.starts_with('|') && line.contains(&error)),
            "{error}"
        );
    }
}

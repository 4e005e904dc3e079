//! What a container gets by which toolkit, driver and cgroup: the page's table is `tests/fixtures/vram-limits.csv`, and what Stowage
//! writes never keeps a container from starting.

use super::root;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::ids::LeaderEpoch;
use stowage_scheduling::testkit::{demand_of, gpu, key, node, uid};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::demand::{Demand, Sharing, VramContainer};
use stowage_scheduling::vocabulary::placement::Placement;

const TABLE: &str = include_str!("../../fixtures/vram-limits.csv");

fn rows() -> Vec<[&'static str; 6]> {
    let lines = TABLE.lines().filter(|line| !line.starts_with('#'));
    let fields = |line: &'static str| -> Vec<_> { line.split(',').collect() };
    let rows = lines.skip(1).map(fields);
    rows.map(|row| row.try_into().expect("six columns"))
        .collect()
}

#[test]
fn the_page_has_the_table_of_what_keeps_limits() {
    let page = std::fs::read_to_string(root().join("docs/use/isolation.md")).unwrap();
    let lines: Vec<String> = rows()
        .iter()
        .map(|row| format!("| {} |", row.join(" | ")))
        .collect();
    let table = lines.join("\n");
    assert!(
        page.contains(&table),
        "docs/use/isolation.md lacks:\n{table}"
    );
}

/// The variables that reach a container by the Binding of its pod: gpu-fractioning makes both of its annotations, and nobody else reads
/// them.
fn variables(has_vram_limits: bool) -> &'static str {
    let container = VramContainer {
        name: "engine".into(),
        vram: Bytes::gib(40),
    };
    let demand = Demand {
        containers: [container].into(),
        ..demand_of(40 << 30, 1, Sharing::Shared, 0)
    };
    let placement = Placement {
        devices: [gpu("GPU-a")].into(),
        has_vram_limits,
        ..Placement::from_plugin(node("n"))
    };
    let (key, uid) = (key("pod"), uid("pod"));
    let epoch = LeaderEpoch::new("lease", 1, "nonce");
    let binding = objects::binding(&key, &uid, &demand, &placement, None, &epoch);
    let keys = binding.metadata.annotations.unwrap();
    let has =
        |what: &str| keys.contains_key(&format!("nvidia.com/container.engine.gpu-memory.{what}"));
    match (has("request"), has("limit")) {
        (true, true) => "both",
        (false, false) => "none",
        _ => panic!("one without the other: {keys:?}"),
    }
}

/// A node on which gpu-fractioning is ready keeps limits, and no other does. What the annotations say is held by a property test beside
/// the Binding; admission refuses the variables to others.
#[test]
fn what_a_binding_writes_keeps_no_container_from_starting() {
    let mut seen = 0;
    for [
        toolkit,
        driver,
        cgroup,
        fractioning,
        variables_there,
        outcome,
    ] in rows()
    {
        let written = variables(fractioning == "ready");
        if variables_there == written || variables_there == "any" {
            seen += 1;
            assert_ne!(
                outcome, "fails",
                "{toolkit}, driver {driver}, cgroup {cgroup}"
            );
        }
    }
    assert_eq!(seen, 4);
}

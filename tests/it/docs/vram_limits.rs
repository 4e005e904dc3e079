//! What a container gets by which toolkit, driver and cgroup: the page's table is `tests/fixtures/vram-limits.csv`, and what Stowage
//! writes never keeps a container from starting.

use super::root;

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

/// On a node on which gpu-fractioning is ready a Binding's annotations become both variables (a property test beside the Binding has
/// their form); elsewhere it writes none, and admission refuses them to others.
#[test]
fn what_a_binding_writes_keeps_no_container_from_starting() {
    let mut seen = 0;
    for [toolkit, driver, cgroup, fractioning, variables, outcome] in rows() {
        let by_stowage = match fractioning {
            "ready" => variables == "both",
            _ => variables == "none" || variables == "any",
        };
        if by_stowage {
            seen += 1;
            assert_ne!(
                outcome, "fails",
                "{toolkit}, driver {driver}, cgroup {cgroup}"
            );
        }
    }
    assert_eq!(seen, 4);
}

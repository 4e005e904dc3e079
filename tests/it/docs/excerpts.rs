//! Whatever the README and the pages in `docs` show in full equals what is shipped.

use std::path::Path;
use stowage_scheduling::control_loop::PodEventReason;
use strum::VariantArray;

#[test]
fn the_two_lines_of_the_readmes_pod_that_are_stowages_are_those_of_the_shipped_pod() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for file in ["README.md", "manifests/examples/pod.yaml"] {
        let text = std::fs::read_to_string(root.join(file)).unwrap();
        for line in [
            "stowage.dev/vram: 40Gi",
            "--gpu-memory-utilization=$(GPU_MEMORY_FRACTION)",
        ] {
            assert!(text.contains(line), "{file} lacks {line}");
        }
    }
}

#[test]
fn the_settings_of_the_scheduler_that_must_not_change_are_shipped_so() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("docs/inside/kube-scheduler.md")).unwrap();
    let shipped = root.join("manifests/base/kube-scheduler-config.yaml");
    let shipped = std::fs::read_to_string(shipped).unwrap();
    let table = page.split("Do not change these:").nth(1).unwrap();
    let table = table.split("\n## ").next().unwrap();
    let settings: Vec<&str> = table
        .lines()
        .filter_map(|row| row.strip_prefix("| `")?.split('`').next())
        .collect();
    assert!(settings.len() > 4, "{settings:?}");
    for setting in settings {
        assert!(
            shipped.lines().any(|line| line.trim() == setting),
            "{setting}"
        );
    }
}

#[test]
fn the_diagnostic_in_the_docs_is_one_that_policy_check_prints() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("docs/use/policies.md")).unwrap();
    let shown = page
        .split("```text\n")
        .find(|block| block.starts_with("error["))
        .unwrap();
    let shown = shown
        .split_once("\n```")
        .unwrap()
        .0
        .replace("--> policy.yaml", "--> 10-base.yaml");
    let golden = root.join("tests/golden/policy/broken/many-at-once/expected.txt");
    let printed = std::fs::read_to_string(golden).unwrap();
    let lines = |text: &str| {
        text.lines()
            .map(|line| line.trim().to_owned())
            .collect::<Vec<_>>()
    };
    let (shown, printed) = (lines(&shown), lines(&printed));
    assert!(
        printed.windows(shown.len()).any(|window| window == shown),
        "{}",
        shown.join("\n")
    );
}

#[test]
fn the_table_of_refusals_has_every_reason_why_a_node_does_not_fit() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/reasons.md");
    let page = std::fs::read_to_string(page).unwrap();
    let table = page
        .split("\n### Refusals\n")
        .nth(1)
        .unwrap()
        .split("\n### ")
        .next()
        .unwrap();
    let codes: Vec<&str> = table
        .lines()
        .filter_map(|row| row.strip_prefix("| `")?.split(" | ").next())
        .collect();
    for code in stowage_scheduling::reasons::Misfit::CODES {
        assert!(
            codes
                .iter()
                .any(|codes| format!("`{codes}").contains(&format!("`{code}`"))),
            "{code}"
        );
    }
}

#[test]
fn the_readmes_pictures_exist_and_have_descriptions() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let pictures: Vec<(&str, &str)> = readme
        .split("![")
        .skip(1)
        .map(|rest| {
            let (words, rest) = rest.split_once("](").unwrap();
            (words, rest.split_once(')').unwrap().0)
        })
        .collect();
    assert!(!pictures.is_empty());
    for (words, file) in pictures {
        assert!(
            words.len() > 20,
            "{file} has no words for those who cannot see it"
        );
        let svg = std::fs::read_to_string(root.join(file)).unwrap();
        assert!(
            svg.contains("<title") && svg.contains("prefers-color-scheme: dark"),
            "{file}"
        );
    }
}

/// What stands between quotes and begins so, in a source file.
fn quoted<'a>(source: &'a str, begins: &'a str) -> impl Iterator<Item = &'a str> {
    source
        .split('"')
        .skip(1)
        .step_by(2)
        .filter(move |text| text.starts_with(begins))
}

#[test]
fn the_docs_have_every_reason_of_an_eviction_every_event_and_every_metric() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let evictions = read("src/scheduling/control_loop/status_change.rs");
    let reason =
        |line| -> Option<&str> { str::trim(line).strip_prefix("=> (\"")?.split('"').next() };
    let reasons: Vec<&str> = evictions.lines().filter_map(reason).collect();
    assert!(reasons.len() > 8, "{reasons:?}");
    let page = read("docs/reference/reasons.md");
    let events = PodEventReason::VARIANTS
        .iter()
        .map(|event| event.into_str());
    for reason in reasons.into_iter().chain(events) {
        assert!(
            page.contains(&format!("`{reason}`")),
            "docs/reference/reasons.md lacks {reason}"
        );
    }
    let pages = read("docs/reference/metrics.md");
    // The folders in it register none.
    let files = std::fs::read_dir(root.join("src/telemetry"))
        .unwrap()
        .map(|file| file.unwrap().path());
    for file in files.filter(|path| path.is_file()) {
        let source = std::fs::read_to_string(file).unwrap();
        for metric in quoted(&source, "stowage_")
            .filter(|text| text.chars().all(|c| c == '_' || c.is_ascii_alphanumeric()))
        {
            assert!(
                pages.contains(&format!("`{metric}")),
                "docs/reference/metrics.md lacks the metric {metric}"
            );
        }
    }
}

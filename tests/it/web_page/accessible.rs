//! What axe-core finds: nothing serious, in light and dark, in each view, with the drawer open and on a phone.
//!
//! axe-core is not in the repository: it is five times the page, and of another licence.

use super::{served, visiting};
use crate::browser::Browser;
use crate::needs::report_skipped;
use serde_json::Value;
use std::path::PathBuf;

/// Names `axe.min.js`.
const AXE: &str = "STOWAGE_AXE";
/// Where `.ci/run` has npm put it, from the repository's root.
const INSTALLED: &str = "target/axe/node_modules/axe-core/axe.min.js";
const HOW: &str = "npm install --no-save --prefix target/axe axe-core@4.14.1";

/// The script; `None`, with a line that says so, where there is none.
fn axe() -> Option<String> {
    let beside = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(INSTALLED);
    let file = std::env::var_os(AXE).map_or_else(beside, PathBuf::from);
    let script = std::fs::read_to_string(&file);
    if let Err(error) = &script {
        report_skipped(format_args!(
            "axe-core: {}: {error}; fetch it with `{HOW}`, or name it in {AXE}",
            file.display()
        ));
    }
    script.ok()
}

/// What axe-core finds here that is serious or critical: the rule, and the elements.
fn findings(browser: &mut Browser, place: &str) -> Vec<String> {
    let all = browser.evaluate(
        "axe.run().then((all) => ({ passed: all.passes.length, found: all.violations.map((one) => ({ rule: one.id, \
         impact: one.impact, nodes: one.nodes.map((node) => `${node.html} ${node.failureSummary}`) })) }))",
    );
    assert!(
        all["passed"].as_u64() > Some(15),
        "{place}: it looked at little: {all:#}"
    );
    let serious = |one: &&Value| one["impact"] == "serious" || one["impact"] == "critical";
    all["found"]
        .as_array()
        .unwrap()
        .iter()
        .filter(serious)
        .map(|one| format!("{place}: {one:#}"))
        .collect()
}

#[test]
fn axe_finds_nothing_serious() {
    let Some(axe) = axe() else { return };
    let served = served();
    let Some(mut browser) = visiting(&served) else {
        return;
    };
    browser.evaluate(&axe);
    let mut found = Vec::new();
    for theme in ["light", "dark"] {
        browser.emulate_theme(theme);
        for view in ["bars", "heat", "table"] {
            browser.view(view);
            found.extend(findings(&mut browser, &format!("{theme}, {view}")));
        }
        browser.click("#pending [data-key='default/large']");
        browser.wait_for(
            "a pod is explained",
            "document.querySelector('#drawer .headline')&&1",
        );
        found.extend(findings(&mut browser, &format!("{theme}, explanation")));
        browser.press("Escape");
        browser.view("bars");
        browser.wait_for("a GPU is there", "document.querySelector('.gpu')&&1");
        browser.click("[data-key=GPU-node-a-0]");
        found.extend(findings(&mut browser, &format!("{theme}, GPU")));
        browser.press("Escape");
    }
    browser.resize((390, 800), true);
    found.extend(findings(&mut browser, "phone"));
    assert!(found.is_empty(), "{}", found.join("\n"));
}

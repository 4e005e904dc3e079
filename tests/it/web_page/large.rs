//! A thousand nodes of eight GPUs: the page appears and follows. How fast is printed; no test asserts a time.

use super::{IS_DRAWN, url};
use crate::browser::Browser;
use crate::served::{Served, ServedCluster, bound_on, gpu_uuid, pod, with_priority};
use serde_json::Value;
use std::time::Instant;

pub(super) const NODES: usize = 1000;

/// A pod on most GPUs, two on some.
pub(super) fn served() -> Served {
    let names: Vec<String> = (0..NODES).map(|node| format!("node-{node:04}")).collect();
    let gpus: Vec<(&str, u32)> = names.iter().map(|name| (name.as_str(), 8)).collect();
    let place = |at: usize| (at / 8, u32::try_from(at % 8).unwrap());
    let pods = (0..8 * NODES).filter(|at| at % 5 != 0).map(|at| {
        let (node, gpu) = place(at);
        let size = 10 + at as u64 * 7 % 50;
        let one = pod(&format!("pod-{at}"), &format!("{size}Gi"));
        bound_on(
            if at % 3 == 0 {
                with_priority(one, -5)
            } else {
                one
            },
            &names[node],
            &[gpu],
            size << 30,
        )
    });
    ServedCluster::with_gpus(&gpus)
        .with(pods)
        .with([pod("late", "30Gi")])
        .serve()
}

fn millis(browser: &mut Browser, expression: &str) -> f64 {
    browser
        .evaluate(expression)
        .as_f64()
        .unwrap_or_else(|| panic!("{expression} is no time"))
}

#[test]
fn a_thousand_nodes_are_drawn_and_one_gpus_change_arrives() {
    let Some(mut browser) = Browser::start() else {
        return;
    };
    let served = served();
    browser.go(&url(&served));
    browser.wait_for("the page is drawn", IS_DRAWN);
    let paint = millis(
        &mut browser,
        "performance.getEntriesByName('first-contentful-paint')[0].startTime",
    );
    let fleet = millis(
        &mut browser,
        "performance.getEntriesByName('first-fleet')[0].startTime",
    );
    let said = browser.text("document.getElementById('totals').innerText");
    assert!(
        said.contains("8,000") && said.contains("1,000 nodes"),
        "{said}"
    );

    let bars = millis(
        &mut browser,
        "new Promise((done) => { const from = performance.now(); document.querySelector('[data-view=bars]').click(); \
         const look = () => document.querySelector('.gpu') ? done(performance.now() - from) : requestAnimationFrame(look); look(); })",
    );
    let drawn = browser.evaluate("document.querySelectorAll('.gpu').length");
    assert!(
        drawn.as_u64() < Some(400),
        "only what is near the screen is in the document: {drawn}"
    );

    browser.evaluate("scrollTo(0, document.body.scrollHeight)");
    browser.wait_for(
        "the last node is drawn",
        "document.body.innerText.includes('node-0999')",
    );
    browser.evaluate("scrollTo(0, 0)");
    browser.wait_for(
        "the first node is drawn again",
        "document.body.innerText.includes('node-0000')",
    );
    let order =
        browser.evaluate("[...document.querySelectorAll('.node h3')].map((one) => one.innerText)");
    let order: Vec<&str> = order
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap())
        .collect();
    assert!(order.is_sorted(), "the Tab key goes this way: {order:?}");

    let began = Instant::now();
    assert_eq!(served.bind(&pod("late", "30Gi"), "node-0000"), "");
    let place: Value = browser.wait_for(
        "the pod is on its GPU",
        "document.querySelector('.segment[title^=\"default/late: 30.0 GiB\"]')?.closest('.gpu').dataset.key",
    );
    let late = began.elapsed().as_millis();
    assert!(
        (0..8).any(|gpu| place == *gpu_uuid("node-0000", gpu)),
        "{place}"
    );
    assert_eq!(browser.take_errors(), [""; 0]);
    println!(
        "{NODES} nodes: first contentful paint {paint:.0} ms, the cluster {fleet:.0} ms, bars {bars:.0} ms after the click, \
         a bind {late} ms"
    );
}

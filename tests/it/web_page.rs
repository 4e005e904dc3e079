//! The operators' page in a headless Chromium, served by a Stowage in this process: what it shows, how it is used, and that it
//! neither complains nor runs what others wrote.

mod accessible;
mod hostile;
mod large;
mod pictures;
mod stream;
mod using;

use crate::browser::Browser;
use crate::served::{
    Served, ServedCluster, bound_on, eventually, gpu_report, key_of, pod, policy_without_engines,
    report, uid_of, with_exclusive_gpu, with_priority,
};
use serde_json::{Value, json};
use stowage_scheduling::control_loop::{PodEvent, PodEventReason};
use stowage_scheduling::policy::{Policy, Tenant};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::cluster_share::TenantUsage;

/// Holds once the first view of the cluster is drawn.
const IS_DRAWN: &str = "document.documentElement?.dataset.ready === ''";
const GIB: u64 = 1 << 30;

fn with_tenants() -> Policy {
    let guarantee = TenantUsage {
        vram: Bytes::gib(80),
        milli_gpus: u64::MAX,
    };
    let team = Tenant {
        guarantee,
        ..Tenant::new("team-default", &["default"])
    };
    policy_without_engines()
        .with_tenants(vec![team, Tenant::new("team-idle", &["idle"])])
        .unwrap()
}

/// Three nodes, pods of three classes, one that has just been bound and two that wait: `large` fits nowhere.
fn cluster() -> ServedCluster {
    let mut cluster = ServedCluster::with_gpus(&[("node-a", 4), ("node-b", 2), ("node-c", 8)]);
    cluster.policy = with_tenants();
    cluster.with([
        bound_on(
            serving("chat", "acme/Chat-8B", "40Gi"),
            "node-a",
            &[0],
            40 * GIB,
        ),
        bound_on(
            with_priority(pod("job", "20Gi"), -5),
            "node-a",
            &[0],
            20 * GIB,
        ),
        bound_on(
            with_exclusive_gpu(pod("alone", "60Gi")),
            "node-b",
            &[1],
            60 * GIB,
        ),
        pod("new", "30Gi"),
        pod("large", "100Gi"),
        with_priority(pod("later", "10Gi"), -10),
    ])
}

fn serving(name: &str, model: &str, vram: &str) -> Value {
    let mut pod = pod(name, vram);
    pod["metadata"]["annotations"]["stowage.dev/model"] = json!(model);
    pod
}

fn served() -> Served {
    let served = cluster().serve();
    assert_eq!(served.bind(&pod("new", "30Gi"), "node-c"), "");
    let large = pod("large", "100Gi");
    assert_eq!(
        served.filter_passed(&large, &["node-a", "node-b", "node-c"]),
        [""; 0]
    );
    // The planner says so once a pod has been refused for a while.
    served.extender.control_plane.record_event(PodEvent {
        key: key_of(&large),
        uid: uid_of(&large),
        kind: PodEventReason::Unschedulable,
        text: "0/3 nodes fit".into(),
    });
    // What is used without being allocated is believed after three readings.
    for sequence in 2..5 {
        assert_eq!(
            served.report(report_of_use("node-a", 4, sequence)).status,
            200
        );
    }
    served
}

/// A report of a node: the engine of `chat` is busy on its first GPU, and something unknown has memory on its last.
fn report_of_use(node: &str, gpus: u32, sequence: u64) -> Value {
    let mut report = report(node, "boot", sequence, gpus);
    report["gpus"][0]["usedBytes"] = json!(45 * GIB);
    report["gpus"][gpus as usize - 1]["usedBytes"] = json!(20 * GIB);
    report["engines"] = json!([{
        "pod": "uid-chat", "engine": "vllm", "gpus": [gpu_report(node, 0)["uuid"]], "state": "serving",
        "model": "acme/Chat-8B", "kvCacheUsage": 0.91, "waiting": 12,
    }]);
    report
}

fn url(served: &Served) -> String {
    format!("http://{}/", served.operators)
}

/// At the page of this cluster, drawn. `None`, with a line that says so, where there is no Chromium.
fn visiting(served: &Served) -> Option<Browser> {
    let mut browser = Browser::start()?;
    browser.go(&url(served));
    browser.wait_for("the page is drawn", IS_DRAWN);
    Some(browser)
}

impl Browser {
    /// Something of this role comes to have a name that contains this.
    fn expect(&mut self, role: &str, name: &str) {
        eventually(&format!("there is a {role} {name:?}"), || {
            self.accessible_names(role)
                .iter()
                .any(|of| of.contains(name))
        });
    }

    /// By keyboard, to what has this text.
    fn tab_to(&mut self, text: &str) {
        let focused = "(document.activeElement.innerText ?? '').trim()";
        for _ in 0..200 {
            self.press("Tab");
            if self.text(focused).contains(text) {
                return;
            }
        }
        panic!("no Tab leads to {text:?}");
    }

    fn view(&mut self, name: &str) {
        self.click(&format!("[data-view={name}]"));
        let chosen = format!("document.querySelector('[data-view={name}][aria-pressed=true]')&&1");
        self.wait_for("the view is chosen", &chosen);
    }
}

#[test]
fn the_page_shows_nodes_pods_tenants_and_decisions() {
    let served = served();
    let Some(mut browser) = visiting(&served) else {
        return;
    };
    for (role, name) in [
        ("heading", "Stowage"),
        ("heading", "node-a"),
        ("heading", "node-c"),
        (
            "button",
            "node-a, GPU 0, 83 % of 72.0 GiB allocated, KV cache 91 %, 12 requests waiting, 2 pods",
        ),
        (
            "button",
            "node-a, GPU 3, 0 % of 72.0 GiB allocated, KV cache 0 %, 20.0 GiB unaccounted, no pods",
        ),
        ("button", "node-c, GPU 7"),
        ("button", "default/large"),
        ("button", "default/later"),
        ("button", "default/new"),
        ("searchbox", "Search pods, nodes, models and classes"),
    ] {
        browser.expect(role, name);
    }
    let said = browser.text("document.querySelector('main').innerText");
    for part in [
        "14",
        "3 nodes",
        "No node fits",
        "Bound",
        "no node fits",
        "team-default",
        "80.0 GiB guaranteed",
        "team-idle",
    ] {
        assert!(said.contains(part), "{part:?}: {said}");
    }
    let segments = browser.evaluate(
        "[...document.querySelectorAll('.gpu[data-key=GPU-node-a-0] .segment')].map((one) => \
         [one.title, Math.round(parseFloat(one.style.flexBasis))])",
    );
    let expected = json!([
        ["default/chat: 40.0 GiB, serving", 50],
        ["default/job: 20.0 GiB, opportunistic", 25]
    ]);
    assert_eq!(segments, expected);
    let classes = browser.evaluate(
        "[...document.querySelectorAll('.gpu[data-key=GPU-node-a-0] .segment')].map((one) => getComputedStyle(one).backgroundColor)",
    );
    assert_ne!(classes[0], classes[1], "classes differ by color");
    assert_eq!(browser.take_errors(), [""; 0]);
}

#[test]
fn a_decision_appears_without_a_reload() {
    let served = served();
    let Some(mut browser) = visiting(&served) else {
        return;
    };
    assert_eq!(
        served.bind(&with_priority(pod("later", "10Gi"), -10), "node-b"),
        ""
    );
    browser.wait_for(
        "the pod is on its GPU",
        "document.querySelector('.segment[title^=\"default/later: 10.0 GiB\"]')&&1",
    );
    browser.wait_for(
        "the decision is listed",
        "document.getElementById('activity').innerText.includes('default/later')",
    );
    browser.wait_for(
        "it waits no more",
        "!document.getElementById('pending').innerText.includes('default/later')",
    );
    served.delete(&bound_on(pod("chat", "40Gi"), "node-a", &[0], 40 * GIB));
    browser.wait_for(
        "a pod leaves",
        "!document.querySelector('.segment[title^=\"default/chat\"]')",
    );
    assert_eq!(browser.take_errors(), [""; 0]);
}

//! Policy changes while pods are being scheduled: no request fails, no decision mixes two policies, and an invalid policy changes
//! nothing but the log and the metrics.

mod at_start;
mod under_load;

use crate::client::{Client, HttpAnswer};
use crate::process::{RunningServe, expect_failure, json_dump};
use crate::served::{
    Served, ServedCluster, args, bind_args, bound_on, eventually, pod, policy_without_engines,
    preempt_args, uid_of, with_priority,
};
use serde_json::{Value, json};
use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use stowage_scheduling::control_loop::PodEventReason;
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_scheduling::policy::Digest;
use stowage_scheduling::verbs::prioritize::PrioritizeAsked;
use stowage_server::extender::filter::read_pod;
use stowage_server::extender::preempt::preempt;
use stowage_server::policy_watch::{self, OwnPod};
use tempfile::TempDir;

const NODES: [&str; 4] = ["a-1", "a-2", "b-1", "b-2"];
const SIDES: [&str; 2] = ["a", "b"];
/// Who asks at the same time.
const CLIENTS: usize = 4;
/// How often the policy changes under them.
const CHANGES: usize = 4;

/// A policy by which pods of the class `moving` may be placed on one side only. By side b's policy it is the second class, and
/// the first may be placed on side a: a pod that is classified by one policy and placed by the other is detected.
fn policy_for_side(side: &str) -> String {
    let other = "  - name: other\n    match:\n      labels: {app: other}\n";
    let pool = |name: &str| {
        let class = match (name == side, side) {
            (true, _) => "moving",
            (false, "b") => "other",
            (false, _) => "batch",
        };
        format!("  - name: side-{name}\n    selector: {{side: {name}}}\n    classes: [{class}]\n")
    };
    let first = if side == "b" { other } else { "" };
    let moving = "  - name: moving\n    match:\n      labels: {app: moving}\n    engine: false\n";
    let telemetry = "kind: SchedulingPolicy\ntelemetry: {fresh: 24h, stale: 48h}\n";
    format!(
        "{telemetry}classes:\n{first}{moving}nodePools:\n{}{}",
        pool("a"),
        pool("b")
    )
}

fn pod_of_either_side(name: &str) -> Value {
    let mut pod = pod(name, "1Gi");
    pod["metadata"]["labels"] = json!({ "app": "moving" });
    pod
}

/// Two sides of two nodes, and a policy in a directory that is watched.
struct Reloading {
    served: Served,
    folder: TempDir,
    pods: Vec<Value>,
}

impl Reloading {
    fn new() -> Self {
        Self::with(|folder| fs::write(folder.join("policy.yaml"), policy_for_side("a")).unwrap())
    }

    fn with(write: impl FnOnce(&Path)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let policies = folder.path().join("policies");
        fs::create_dir(&policies).unwrap();
        write(&policies);
        let (policy, watch) = policy_watch::open(policies, None).unwrap();
        let pods: Vec<Value> = (0..800)
            .map(|n| pod_of_either_side(&format!("pod-{n:03}")))
            .collect();
        let mut cluster =
            ServedCluster::with_gpus(&NODES.map(|name| (name, 8))).with(pods.iter().cloned());
        for node in &mut cluster.nodes {
            let side = side_of(node["metadata"]["name"].as_str().unwrap());
            node["metadata"]["labels"] = json!({ "side": side });
        }
        cluster.policy = policy;
        let served = cluster.serve();
        let own_pod = OwnPod {
            key: PodKey::parse("kube-system", "stowage-0").unwrap(),
            uid: PodUid::parse("uid-stowage-0").unwrap(),
        };
        served.spawn(watch.run(
            served.service.clone(),
            served.control_plane.clone(),
            Some(own_pod),
        ));
        Self {
            served,
            folder,
            pods,
        }
    }

    fn policies(&self) -> PathBuf {
        self.folder.path().join("policies")
    }

    fn write(&self, text: &str) {
        replace(&self.policies().join("policy.yaml"), text);
    }

    fn is_in_force(&self, digest: Digest) -> bool {
        self.served.metric(&format!(
            "stowage_policy_info{{digest=\"{digest}\",mode=\"enforce\"}}"
        )) == 1
    }

    fn wait_until_in_force(&self, digest: Digest) {
        eventually("the policy is in force", || self.is_in_force(digest));
    }

    fn reloads(&self, outcome: &str) -> u64 {
        self.served.metric(&format!(
            "stowage_policy_reloads_total{{outcome=\"{outcome}\"}}"
        ))
    }

    fn readyz(&self) -> HttpAnswer {
        Client::connect(self.served.operators).get("/readyz")
    }

    /// What was said to Stowage's own pod.
    fn recorded_events(&self) -> Vec<(PodEventReason, String)> {
        let events = self.served.events().into_iter();
        events
            .filter(|(name, ..)| name == "stowage-0")
            .map(|(_, kind, text)| (kind, text))
            .collect()
    }
}

/// Writes a file again without a moment at which it is empty, which would be a policy, too. A name with a dot is not read.
fn replace(file: &Path, text: &str) {
    let new = file.with_file_name(".new");
    fs::write(&new, text).unwrap();
    fs::rename(new, file).unwrap();
}

fn side_of(node: &str) -> &str {
    node.split('-').next().unwrap()
}

/// What the policy of this text is called.
fn digest_of(text: &str) -> Digest {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    fs::write(&file, text).unwrap();
    policy_watch::open(file, None).unwrap().0.digest
}

/// The one side that these nodes are of.
fn common_side<'a>(nodes: impl Iterator<Item = &'a str>) -> String {
    let mut sides: Vec<&str> = nodes.map(side_of).collect();
    sides.sort_unstable();
    sides.dedup();
    assert_eq!(sides.len(), 1, "an answer of two policies");
    sides[0].to_owned()
}

#[test]
fn a_pod_is_classified_anew_after_a_policy_change() {
    let reloading = Reloading::new();
    let pod = serde_json::from_value(reloading.pods[0].clone()).unwrap();
    let request = read_pod(&reloading.served.extender, &pod).unwrap().unwrap();
    let before = request.demand.clone();
    reloading.write(&policy_for_side("b"));
    reloading.wait_until_in_force(digest_of(&policy_for_side("b")));
    let view = reloading
        .served
        .service
        .cluster()
        .apply(PrioritizeAsked(request));
    let after = &view.request.demand;
    assert_eq!(Some(after.class), view.policy.class_named("moving"));
    assert_ne!(after.class, before.class);
    assert_eq!(
        (before.classified_by + 1, after.classified_by),
        (view.policy.version, view.policy.version)
    );
}

#[test]
fn a_policy_change_during_victim_selection_evicts_no_pod() {
    let tenant = with_priority(
        bound_on(pod("tenant", "60Gi"), "node-a", &[0], 60 << 30),
        -10,
    );
    let urgent = with_priority(pod("urgent", "40Gi"), 1000);
    let served = ServedCluster::with_gpus(&[("node-a", 1)])
        .with([tenant.clone(), urgent.clone()])
        .serve();
    let body = preempt_args(&urgent, &[("node-a", &[&tenant])]).to_string();
    // The search waits behind this one's thread until the policy has changed.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .max_blocking_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let mut other = policy_without_engines();
    other.scoring.shortlist = 2;
    let (changed, wait) = std::sync::mpsc::channel::<()>();
    let preempted = |changes: bool| {
        let args = serde_json::from_str(&body).unwrap();
        runtime.block_on(async {
            let mut asking = std::pin::pin!(preempt(&served.extender, &args));
            if changes {
                assert!(
                    futures::poll!(&mut asking).is_pending(),
                    "the search has not begun"
                );
                served.service.set_policy(other.clone());
                changed.send(()).unwrap();
            }
            asking.await.unwrap().node_name_to_meta_victims.len()
        })
    };
    runtime.spawn_blocking(move || wait.recv().unwrap());
    assert_eq!(preempted(true), 0);
    assert!(served.pod_state(&urgent).unwrap().reservation().is_none());
    assert_eq!(
        served.metric(
            "stowage_answers_total{code=\"not-reserved\",outcome=\"none\",verb=\"preempt\"}"
        ),
        1
    );
    assert_eq!(
        preempted(false),
        1,
        "the next time it asks, the new policy answers"
    );
    assert!(
        served
            .service
            .cluster()
            .ledger()
            .pod_state(&uid_of(&urgent))
            .unwrap()
            .reservation()
            .is_some()
    );
}

// ---- what is found on disk ----

#[test]
fn a_config_map_swapped_by_its_symlink_comes_into_force() {
    let swap = |policies: &Path, generation: &str, text: &str| {
        let data = policies.join(format!("..{generation}"));
        fs::create_dir(&data).unwrap();
        fs::write(data.join("policy.yaml"), text).unwrap();
        std::os::unix::fs::symlink(format!("..{generation}"), policies.join("..data_tmp")).unwrap();
        fs::rename(policies.join("..data_tmp"), policies.join("..data")).unwrap();
    };
    let reloading = Reloading::with(|policies| {
        swap(policies, "2026_01", &policy_for_side("a"));
        std::os::unix::fs::symlink("..data/policy.yaml", policies.join("policy.yaml")).unwrap();
    });
    let pod = &reloading.pods[0];
    let passed = || {
        common_side(
            reloading
                .served
                .filter_passed(pod, &NODES)
                .iter()
                .map(String::as_str),
        )
    };
    assert_eq!(passed(), "a");
    swap(&reloading.policies(), "2026_02", &policy_for_side("b"));
    fs::remove_dir_all(reloading.policies().join("..2026_01")).unwrap();
    reloading.wait_until_in_force(digest_of(&policy_for_side("b")));
    assert_eq!(passed(), "b");
    assert_eq!(
        reloading.reloads("rejected"),
        0,
        "nothing of it was seen half done"
    );
}

#[test]
fn an_edit_that_changes_no_setting_changes_nothing() {
    let reloading = Reloading::new();
    let version = reloading.served.service.cluster().ledger().policy().version;
    reloading.write(&format!("# Written again.\n{}", policy_for_side("a")));
    eventually("the change is dealt with", || {
        reloading.reloads("unchanged") == 1
    });
    assert_eq!(
        reloading.served.service.cluster().ledger().policy().version,
        version
    );
    assert_eq!(reloading.recorded_events(), []);
}

/// Nine times nine aliases of aliases: some gigabytes, once they are followed.
fn yaml_bomb() -> String {
    let level = |n: usize| {
        format!(
            "a{n}: &a{n} [{}]\n",
            vec![format!("*a{}", n - 1); 9].join(", ")
        )
    };
    let levels: String = (1..=9).map(level).collect();
    format!("a0: &a0 [lol]\n{levels}")
}

/// Breaks the policy in one way, and looks at all that must be so.
fn assert_refused(reloading: &Reloading, what: &str, part: &str, spoil: impl FnOnce()) {
    let good = reloading.served.service.cluster().ledger().policy().clone();
    let (refused, told) = (
        reloading.reloads("rejected"),
        reloading.recorded_events().len(),
    );
    spoil();
    eventually(what, || reloading.reloads("rejected") == refused + 1);
    let ready = reloading.readyz();
    let lines: Vec<&str> = ready.text().lines().collect();
    assert_eq!(
        (ready.status, lines.len(), lines[0]),
        (200, 2, "ok"),
        "{what}: {lines:?}"
    );
    assert!(
        lines[1].starts_with("policy: files rejected since 2"),
        "{lines:?}"
    );
    for said in [part, &good.digest.to_string()] {
        assert!(
            lines[1].contains(said),
            "{what}: {lines:?} does not say {said:?}"
        );
    }
    assert_eq!(
        *reloading.served.service.cluster().ledger().policy(),
        good,
        "{what}"
    );
    assert!(reloading.is_in_force(good.digest), "{what}");
    assert_eq!(reloading.served.metric("stowage_policy_reload_failed"), 1);
    let said = reloading.recorded_events();
    let (kind, text) = &said[said.len() - 1];
    assert_eq!(
        (said.len(), *kind),
        (told + 1, PodEventReason::PolicyRejected),
        "{what}: it is said once"
    );
    assert!(
        text.contains(part) && text.contains("stays in force"),
        "{text}"
    );
    let passed = reloading.served.filter_passed(&reloading.pods[0], &NODES);
    assert_eq!(
        common_side(passed.iter().map(String::as_str)),
        "a",
        "{what}"
    );
    let page = Client::connect(reloading.served.operators)
        .get("/debug/policy")
        .json();
    assert!(
        page["refused"]["problems"].as_str().unwrap().contains(part),
        "{page}"
    );
    assert_eq!(page["digest"], json!(good.digest.to_string()));
}

#[test]
fn an_invalid_policy_is_refused_with_a_log_line_and_the_last_good_one_stays() {
    let reloading = Reloading::new();
    let policies = reloading.policies();
    let away = reloading.folder.path().join("away");
    let large = format!(
        "{}{}",
        policy_for_side("b"),
        "# and so on\n".repeat(1 << 20)
    );
    assert_refused(&reloading, "a broken edit", "policy.yaml:1", || {
        reloading.write("scorring: {shortlist: 8}\n")
    });
    assert_refused(&reloading, "a torn edit", "policy.yaml", || {
        reloading.write("classes: [{name: moving\n")
    });
    assert_refused(&reloading, "a bomb of anchors", "policy.yaml", || {
        reloading.write(&yaml_bomb())
    });
    assert_refused(
        &reloading,
        "ten megabytes",
        "the file is larger than 1 MiB",
        || reloading.write(&large),
    );
    assert_refused(&reloading, "an empty directory", "is no policy", || {
        fs::remove_file(policies.join("policy.yaml")).unwrap();
    });
    assert_refused(
        &reloading,
        "a directory that is gone",
        "No such file",
        || {
            fs::rename(&policies, &away).unwrap();
        },
    );
    fs::rename(&away, &policies).unwrap();
    reloading.write(&policy_for_side("b"));
    eventually("the policy is in force", || {
        reloading.reloads("applied") == 1
    });
    assert!(reloading.is_in_force(digest_of(&policy_for_side("b"))));
    assert_eq!(reloading.readyz().text(), "ok\n");
    assert_eq!(reloading.served.metric("stowage_policy_reload_failed"), 0);
    let (kind, text) = reloading.recorded_events().pop().unwrap();
    assert_eq!(kind, PodEventReason::PolicyApplied);
    for side in SIDES {
        assert!(
            text.contains(&digest_of(&policy_for_side(side)).to_string()),
            "{text}"
        );
    }
    let passed = reloading.served.filter_passed(&reloading.pods[0], &NODES);
    assert_eq!(common_side(passed.iter().map(String::as_str)), "b");
}

#[test]
fn a_reverted_broken_edit_changes_nothing() {
    let reloading = Reloading::new();
    let version = reloading.served.service.cluster().ledger().policy().version;
    assert_refused(&reloading, "a broken edit", "policy.yaml:1", || {
        reloading.write("nodepools: []\n")
    });
    reloading.write(&policy_for_side("a"));
    eventually("the refusal is over", || {
        reloading.readyz().text() == "ok\n"
    });
    assert_eq!(
        reloading.served.service.cluster().ledger().policy().version,
        version
    );
}

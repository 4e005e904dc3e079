//! Policy changes while pods are being scheduled: no request fails, no decision mixes two policies, and an invalid policy changes
//! nothing but the log and the metrics.

use crate::client::{Client, HttpAnswer};
use crate::process::{RunningServe, fails, json_dump};
use crate::served::{
    Served, ServedCluster, args, bind_args, eventually, on, pod, preempt_args, priority, uid_of,
    without_engines,
};
use serde_json::{Value, json};
use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use stowage::extender::filter::read_pod;
use stowage::extender::preempt::preempt;
use stowage::ids::{PodKey, PodUid};
use stowage::kubernetes::port::PodEventReason;
use stowage::policy_watch::{self, OwnPod};
use stowage::scheduling::policy::Digest;
use stowage::scheduling::verbs::prioritize::PrioritizeAsked;
use tempfile::TempDir;

const NODES: [&str; 4] = ["a-1", "a-2", "b-1", "b-2"];
const SIDES: [&str; 2] = ["a", "b"];
/// Who asks at the same time.
const CLIENTS: usize = 4;
/// How often the policy changes under them.
const CHANGES: usize = 4;

/// A policy by which pods of the class `moving` may be placed on one side only. By side b's policy it is the second class, and
/// the first may be placed on side a: a pod that is classified by one policy and placed by the other is detected.
fn one_sided(side: &str) -> String {
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
    let telemetry = "telemetry: {fresh: 24h, stale: 48h}\n";
    format!("{telemetry}classes:\n{first}{moving}nodePools:\n{}{}", pool("a"), pool("b"))
}

fn moving(name: &str) -> Value {
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
        Self::with(|folder| fs::write(folder.join("policy.yaml"), one_sided("a")).unwrap())
    }

    fn with(write: impl FnOnce(&Path)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let policies = folder.path().join("policies");
        fs::create_dir(&policies).unwrap();
        write(&policies);
        let (policy, watch) = policy_watch::open(policies, None).unwrap();
        let pods: Vec<Value> = (0..800).map(|n| moving(&format!("pod-{n:03}"))).collect();
        let mut cluster = ServedCluster::of(&NODES.map(|name| (name, 8))).with(pods.iter().cloned());
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
        served.spawn(watch.run(served.service.clone(), served.control_plane.clone(), Some(own_pod)));
        Self { served, folder, pods }
    }

    fn policies(&self) -> PathBuf {
        self.folder.path().join("policies")
    }

    fn write(&self, text: &str) {
        replace(&self.policies().join("policy.yaml"), text);
    }

    fn is_in_force(&self, digest: Digest) -> bool {
        self.served.metric(&format!("stowage_policy_info{{digest=\"{digest}\",mode=\"enforce\"}}")) == 1
    }

    fn until_in_force(&self, digest: Digest) {
        eventually("the policy is in force", || self.is_in_force(digest));
    }

    fn reloads(&self, outcome: &str) -> u64 {
        self.served.metric(&format!("stowage_policy_reloads_total{{outcome=\"{outcome}\"}}"))
    }

    fn readyz(&self) -> HttpAnswer {
        Client::connect(self.served.operators).get("/readyz")
    }

    /// What was said to Stowage's own pod.
    fn told(&self) -> Vec<(PodEventReason, String)> {
        let events = self.served.events().into_iter();
        events.filter(|(name, ..)| name == "stowage-0").map(|(_, kind, text)| (kind, text)).collect()
    }
}

/// Writes a file anew without a moment at which it is empty, which would be a policy, too. A name with a dot is not read.
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
fn one_side<'a>(nodes: impl Iterator<Item = &'a str>) -> String {
    let mut sides: Vec<&str> = nodes.map(side_of).collect();
    sides.sort_unstable();
    sides.dedup();
    assert_eq!(sides.len(), 1, "an answer of two policies");
    sides[0].to_owned()
}

// ---- at full speed ----

/// Which changes were begun and which are known to be in force, by their number; the policy's side is the number's parity.
#[derive(Default)]
struct ReloadProgress {
    begun: AtomicUsize,
    in_force: AtomicUsize,
    is_over: AtomicBool,
    asked: AtomicUsize,
}

impl ReloadProgress {
    /// Asks, and looks whether a policy answered that can have been in force.
    fn answered(&self, ask: impl FnOnce() -> String) -> String {
        let before = self.in_force.load(Ordering::SeqCst);
        let side = ask();
        let after = self.begun.load(Ordering::SeqCst);
        if before == after {
            assert_eq!(side, SIDES[before % 2], "a policy that is not in force any more");
        }
        self.asked.fetch_add(1, Ordering::Relaxed);
        side
    }
}

fn filtered(client: &mut Client<TcpStream>, pod: &Value) -> Vec<String> {
    let answer = client.post("/scheduler/filter", args(pod, &NODES).to_string());
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    let passed: Vec<String> = serde_json::from_value(answer["NodeNames"].clone()).unwrap();
    let refused: Vec<String> =
        answer["FailedAndUnresolvableNodes"].as_object().unwrap().keys().cloned().collect();
    if passed.len() == 2 && !refused.is_empty() {
        assert_ne!(one_side(passed.iter().map(String::as_str)), one_side(refused.iter().map(String::as_str)));
    }
    passed
}

fn ranked(client: &mut Client<TcpStream>, pod: &Value) -> String {
    let answer = client.post("/scheduler/prioritize", args(pod, &NODES).to_string());
    assert_eq!(answer.status, 200, "{}", answer.text());
    let scores = answer.json();
    let scored = scores.as_array().unwrap().iter().filter(|one| one["Score"] != 0);
    one_side(scored.map(|one| one["Host"].as_str().unwrap()))
}

/// Filters, prioritizes and, each time in a while, binds, until it is over.
fn schedule(served: &Served, pods: &[Value], next: &AtomicUsize, progress: &ReloadProgress) {
    let mut client = served.client();
    for round in 0.. {
        if progress.is_over.load(Ordering::SeqCst) {
            return;
        }
        let binds = round % 16 == 0;
        let place = if binds { next.fetch_add(1, Ordering::Relaxed) } else { pods.len() - 1 };
        // The last pod only sends filter requests; it is never bound.
        let pod = &pods[place.min(pods.len() - 1)];
        let mut passed = Vec::new();
        progress.answered(|| {
            passed = filtered(&mut client, pod);
            one_side(passed.iter().map(String::as_str))
        });
        progress.answered(|| ranked(&mut client, pod));
        if place < pods.len() - 1 {
            let answer = client.post("/scheduler/bind", bind_args(pod, &passed[0]).to_string());
            assert_eq!(answer.status, 200, "{}", answer.text());
            let error = answer.json()["Error"].as_str().unwrap().to_owned();
            // Between its filter and its bind the policy changed: the scheduler asks again.
            assert!(["", "conflict: the node's pool has changed"].contains(&error.as_str()), "{error}");
        }
    }
}

#[test]
fn a_policy_that_changes_under_load_fails_no_request_and_mixes_no_decision() {
    let reloading = Reloading::new();
    let digests = SIDES.map(|side| digest_of(&one_sided(side)));
    let (progress, next) = (ReloadProgress::default(), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        // A failed assertion here must not let the clients run for ever.
        let _over = Over(&progress);
        for _ in 0..CLIENTS {
            scope.spawn(|| schedule(&reloading.served, &reloading.pods, &next, &progress));
        }
        for change in 1..=CHANGES {
            let asked = progress.asked.load(Ordering::Relaxed);
            eventually("they ask", || progress.asked.load(Ordering::Relaxed) > asked + 100);
            progress.begun.store(change, Ordering::SeqCst);
            reloading.write(&one_sided(SIDES[change % 2]));
            reloading.until_in_force(digests[change % 2]);
            progress.in_force.store(change, Ordering::SeqCst);
        }
    });
    eventually("each is counted", || reloading.reloads("applied") == CHANGES as u64);
    assert_eq!(reloading.reloads("rejected"), 0);
    let orders = reloading.served.control_plane.orders.lock();
    assert!(orders.len() > 10, "{} were bound", orders.len());
    for (order, _) in orders.iter() {
        let side = SIDES.iter().position(|side| *side == side_of(order.placement.node.as_str())).unwrap();
        assert_eq!(order.policy, digests[side], "{} was placed by the other policy", order.key);
    }
}

struct Over<'a>(&'a ReloadProgress);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::SeqCst);
    }
}

#[test]
fn a_pod_is_classified_anew_after_a_policy_change() {
    let reloading = Reloading::new();
    let pod = serde_json::from_value(reloading.pods[0].clone()).unwrap();
    let request = read_pod(&reloading.served.extender, &pod).unwrap().unwrap();
    let before = request.demand.clone();
    reloading.write(&one_sided("b"));
    reloading.until_in_force(digest_of(&one_sided("b")));
    let view = reloading.served.service.cluster().apply(PrioritizeAsked(request));
    let after = &view.request.demand;
    assert_eq!(Some(after.class), view.policy.class_named("moving"));
    assert_ne!(after.class, before.class);
    assert_eq!((before.classified_by + 1, after.classified_by), (view.policy.version, view.policy.version));
}

#[test]
fn a_policy_change_during_victim_selection_evicts_no_pod() {
    let tenant = priority(on(pod("tenant", "60Gi"), "node-a", &[0], 60 << 30), -10);
    let urgent = priority(pod("urgent", "40Gi"), 1000);
    let served = ServedCluster::of(&[("node-a", 1)]).with([tenant.clone(), urgent.clone()]).serve();
    let body = preempt_args(&urgent, &[("node-a", &[&tenant])]).to_string();
    // The search waits behind this one's thread until the policy has changed.
    let runtime =
        tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).enable_all().build().unwrap();
    let mut other = without_engines();
    other.shortlist = 2;
    let (changed, wait) = std::sync::mpsc::channel::<()>();
    let preempted = |changes: bool| {
        let args = serde_json::from_str(&body).unwrap();
        runtime.block_on(async {
            let mut asking = std::pin::pin!(preempt(&served.extender, &args));
            if changes {
                assert!(futures::poll!(&mut asking).is_pending(), "the search has not begun");
                served.service.set_policy(other.clone());
                changed.send(()).unwrap();
            }
            asking.await.unwrap().node_name_to_meta_victims.len()
        })
    };
    runtime.spawn_blocking(move || wait.recv().unwrap());
    assert_eq!(preempted(true), 0);
    assert!(served.entry(&urgent).unwrap().reservation().is_none());
    assert_eq!(
        served.metric("stowage_answers_total{code=\"not-reserved\",outcome=\"none\",verb=\"preempt\"}"),
        1
    );
    assert_eq!(preempted(false), 1, "the next time it asks, the new policy answers");
    assert!(served.service.cluster().pod_state(&uid_of(&urgent)).unwrap().reservation().is_some());
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
        swap(policies, "2026_01", &one_sided("a"));
        std::os::unix::fs::symlink("..data/policy.yaml", policies.join("policy.yaml")).unwrap();
    });
    let pod = &reloading.pods[0];
    let passed = || one_side(reloading.served.passed(pod, &NODES).iter().map(String::as_str));
    assert_eq!(passed(), "a");
    swap(&reloading.policies(), "2026_02", &one_sided("b"));
    fs::remove_dir_all(reloading.policies().join("..2026_01")).unwrap();
    reloading.until_in_force(digest_of(&one_sided("b")));
    assert_eq!(passed(), "b");
    assert_eq!(reloading.reloads("rejected"), 0, "nothing of it was seen half done");
}

#[test]
fn an_edit_that_changes_no_setting_changes_nothing() {
    let reloading = Reloading::new();
    let version = reloading.served.service.cluster().policy().version;
    reloading.write(&format!("# Written anew.\n{}", one_sided("a")));
    eventually("the change is dealt with", || reloading.reloads("unchanged") == 1);
    assert_eq!(reloading.served.service.cluster().policy().version, version);
    assert_eq!(reloading.told(), []);
}

/// Nine times nine aliases of aliases: some gigabytes, once they are followed.
fn bomb() -> String {
    let level = |n: usize| format!("a{n}: &a{n} [{}]\n", vec![format!("*a{}", n - 1); 9].join(", "));
    let levels: String = (1..=9).map(level).collect();
    format!("a0: &a0 [lol]\n{levels}")
}

/// Breaks the policy in one way, and looks at all that must be so.
fn is_refused(reloading: &Reloading, what: &str, part: &str, spoil: impl FnOnce()) {
    let good = reloading.served.service.cluster().policy().clone();
    let (refused, told) = (reloading.reloads("rejected"), reloading.told().len());
    spoil();
    eventually(what, || reloading.reloads("rejected") == refused + 1);
    let ready = reloading.readyz();
    let lines: Vec<&str> = ready.text().lines().collect();
    assert_eq!((ready.status, lines.len(), lines[0]), (200, 2, "ok"), "{what}: {lines:?}");
    assert!(lines[1].starts_with("policy: files rejected since 2"), "{lines:?}");
    for said in [part, &good.digest.to_string()] {
        assert!(lines[1].contains(said), "{what}: {lines:?} does not say {said:?}");
    }
    assert_eq!(*reloading.served.service.cluster().policy(), good, "{what}");
    assert!(reloading.is_in_force(good.digest), "{what}");
    assert_eq!(reloading.served.metric("stowage_policy_reload_failed"), 1);
    let said = reloading.told();
    let (kind, text) = &said[said.len() - 1];
    assert_eq!((said.len(), *kind), (told + 1, PodEventReason::PolicyRejected), "{what}: it is said once");
    assert!(text.contains(part) && text.contains("stays in force"), "{text}");
    let passed = reloading.served.passed(&reloading.pods[0], &NODES);
    assert_eq!(one_side(passed.iter().map(String::as_str)), "a", "{what}");
    let page = Client::connect(reloading.served.operators).get("/debug/policy").json();
    assert!(page["refused"]["problems"].as_str().unwrap().contains(part), "{page}");
    assert_eq!(page["digest"], json!(good.digest.to_string()));
}

#[test]
fn an_invalid_policy_is_refused_with_a_log_line_and_the_last_good_one_stays() {
    let reloading = Reloading::new();
    let policies = reloading.policies();
    let away = reloading.folder.path().join("away");
    let large = format!("{}{}", one_sided("b"), "# and so on\n".repeat(1 << 20));
    is_refused(&reloading, "a broken edit", "policy.yaml:1", || {
        reloading.write("scorring: {shortlist: 8}\n")
    });
    is_refused(&reloading, "a torn edit", "policy.yaml", || reloading.write("classes: [{name: moving\n"));
    is_refused(&reloading, "a bomb of anchors", "policy.yaml", || reloading.write(&bomb()));
    is_refused(&reloading, "ten megabytes", "the file is larger than 1 MiB", || reloading.write(&large));
    is_refused(&reloading, "an empty directory", "is no policy", || {
        fs::remove_file(policies.join("policy.yaml")).unwrap();
    });
    is_refused(&reloading, "a directory that is gone", "No such file", || {
        fs::rename(&policies, &away).unwrap();
    });
    fs::rename(&away, &policies).unwrap();
    reloading.write(&one_sided("b"));
    eventually("the policy is in force", || reloading.reloads("applied") == 1);
    assert!(reloading.is_in_force(digest_of(&one_sided("b"))));
    assert_eq!(reloading.readyz().text(), "ok\n");
    assert_eq!(reloading.served.metric("stowage_policy_reload_failed"), 0);
    let (kind, text) = reloading.told().pop().unwrap();
    assert_eq!(kind, PodEventReason::PolicyApplied);
    for side in SIDES {
        assert!(text.contains(&digest_of(&one_sided(side)).to_string()), "{text}");
    }
    let passed = reloading.served.passed(&reloading.pods[0], &NODES);
    assert_eq!(one_side(passed.iter().map(String::as_str)), "b");
}

#[test]
fn a_reverted_broken_edit_changes_nothing() {
    let reloading = Reloading::new();
    let version = reloading.served.service.cluster().policy().version;
    is_refused(&reloading, "a broken edit", "policy.yaml:1", || reloading.write("nodepools: []\n"));
    reloading.write(&one_sided("a"));
    eventually("the refusal is over", || reloading.readyz().text() == "ok\n");
    assert_eq!(reloading.served.service.cluster().policy().version, version);
}

// ---- as a person runs it ----

#[test]
fn the_shipped_config_map_is_the_built_in_policy_where_the_service_looks_for_it() {
    let manifests = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/stowage.yaml");
    let objects: Vec<Value> = serde_saphyr::from_multiple(&fs::read_to_string(manifests).unwrap()).unwrap();
    let named = |kind: &str, name: &str| {
        objects.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name).unwrap()
    };
    let text = named("ConfigMap", "stowage-policy")["data"]["policy.yaml"].as_str().unwrap();
    assert_eq!(digest_of(text), policy_watch::built_in().digest);
    let spec = &named("Deployment", "stowage")["spec"]["template"]["spec"];
    let stowage = &spec["containers"][0];
    let argument =
        stowage["args"].as_array().unwrap().iter().find_map(|arg| arg.as_str()?.strip_prefix("--policy="));
    let mount =
        stowage["volumeMounts"].as_array().unwrap().iter().find(|mount| mount["name"] == "policy").unwrap();
    assert_eq!(mount["mountPath"].as_str(), argument);
    assert_eq!(mount["subPath"], Value::Null);
    let volume =
        spec["volumes"].as_array().unwrap().iter().find(|volume| volume["name"] == "policy").unwrap();
    assert_eq!(volume["configMap"]["name"], "stowage-policy");
}

#[test]
fn a_path_without_a_policy_is_an_error_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let dump = json_dump(&folder);
    let cache = folder.path().join("cache");
    for path in ["policy.yaml", "."] {
        let policy = folder.path().join(path);
        let addresses = ["--listen", "127.0.0.1:0", "--agents", "127.0.0.1:0", "--admin", "127.0.0.1:0"];
        let files = ["--cluster", dump.to_str().unwrap(), "--policy", policy.to_str().unwrap()];
        let kept = ["--policy-cache", cache.to_str().unwrap()];
        let (code, error) = fails(&[&["serve"], &addresses[..], &files[..], &kept[..]].concat());
        assert_eq!(code, 1, "{error}");
        assert!(error.contains("--policy") && error.contains(policy.to_str().unwrap()), "{error}");
    }
}

/// A `stowage serve` whose policy is the file `policy.yaml` of a folder.
fn start(folder: &TempDir, arguments: &[&str]) -> RunningServe {
    let policy = folder.path().join("policy.yaml");
    let policy = ["--policy", policy.to_str().unwrap()];
    RunningServe::serve_with(&json_dump(folder), &[&policy[..], arguments].concat())
}

fn in_force(running: &RunningServe) -> Value {
    Client::connect(running.operators).get("/debug/policy").json()["digest"].clone()
}

#[test]
fn b8_a_corrupt_policy_on_disk_does_not_keep_the_service_from_starting() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("policy.yaml"), "scorring: {shortlist: 8}\n").unwrap();
    let running = start(&folder, &[]);
    running.line_with("policy files rejected");
    // With its diagnostics, each with its place.
    running.line_with("scorring");
    let mut client = Client::connect(running.operators);
    let ready = client.get("/readyz");
    assert_eq!(ready.status, 200);
    for part in ["policy.yaml:1", "scorring", "the built-in policy decides: no --policy-cache"] {
        assert!(ready.text().contains(part), "{}", ready.text());
    }
    assert_eq!(in_force(&running), json!(policy_watch::built_in().digest.to_string()));
    assert!(client.get("/metrics").text().contains("stowage_policy_reload_failed 1"));
    // A corrected file takes effect without a restart.
    replace(&folder.path().join("policy.yaml"), &one_sided("b"));
    running.line_with("policy applied");
    assert_eq!(in_force(&running), json!(digest_of(&one_sided("b")).to_string()));
}

#[test]
fn b8_a_restart_on_a_corrupt_policy_acts_by_the_last_good_one() {
    let folder = tempfile::tempdir().unwrap();
    let (policy, cache) = (folder.path().join("policy.yaml"), folder.path().join("cache"));
    let kept = ["--policy-cache", cache.to_str().unwrap()];
    fs::write(&policy, one_sided("a")).unwrap();
    {
        let running = start(&folder, &kept);
        replace(&policy, &one_sided("b"));
        running.line_with("policy applied");
        // The copy is on disk before that is said; a file that is refused changes nothing of it.
        replace(&policy, "");
        running.line_with("policy files rejected");
    }
    let last_good = json!(digest_of(&one_sided("b")).to_string());
    let running = start(&folder, &kept);
    running.line_with("policy files rejected");
    let ready = Client::connect(running.operators).get("/readyz");
    assert!(ready.text().contains("the file is empty (the last good policy decides)"), "{}", ready.text());
    assert_eq!(in_force(&running), last_good);
    drop(running);
    // A file that is gone, and was a policy once, is not a wrong flag.
    fs::remove_file(&policy).unwrap();
    assert_eq!(in_force(&start(&folder, &kept)), last_good);
    // A copy that is not whole is no policy.
    let copy = cache.join("last-good-policy.json");
    let whole = fs::read_to_string(&copy).unwrap();
    fs::write(&copy, &whole[..whole.len() - 20]).unwrap();
    fs::write(&policy, "mode: shadow\nscorring: {}\n").unwrap();
    let running = start(&folder, &kept);
    running.line_with("policy files rejected");
    let page = Client::connect(running.operators).get("/debug/policy").json();
    assert_eq!(page["policy"]["mode"], "shadow", "what was to be watched only is not enforced");
}

#[test]
fn a_service_logs_that_it_took_over_a_changed_file() {
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.yaml");
    fs::write(&policy, one_sided("a")).unwrap();
    let running = RunningServe::serve_with(&json_dump(&folder), &["--policy", policy.to_str().unwrap()]);
    replace(&policy, &one_sided("b"));
    let line = running.line_with("policy applied");
    for side in SIDES {
        assert!(line.contains(&digest_of(&one_sided(side)).to_string()), "{line}");
    }
    let page = Client::connect(running.operators).get("/debug/policy").json();
    assert_eq!(page["source"], json!(policy.to_str().unwrap()));
    assert_eq!(page["refused"], Value::Null);
    assert_eq!(page["policy"]["classes"][1]["name"], "moving");
}

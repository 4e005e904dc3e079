//! Groups with members that have ended, that ask for no GPU, or that were made again.

use super::*;

const NODES: [&str; 4] = ["k", "l", "m", "n"];

fn phase(mut pod: Value, phase: &str) -> Value {
    pod["status"]["phase"] = json!(phase);
    pod
}

/// A member of a group of three that is on the node's GPU.
fn placed(name: &str, node: &str) -> Value {
    let mut pod = member(name, 50, "train", 3);
    pod["spec"] = bound(name, node, 50, 100)["spec"].clone();
    pod["metadata"]["annotations"]["stowage.dev/devices"] =
        bound(name, node, 50, 100)["metadata"]["annotations"]["stowage.dev/devices"].clone();
    pod["metadata"]["annotations"]["stowage.dev/vram-granted"] = json!((50u64 << 30).to_string());
    phase(pod, "Running")
}

fn pending(name: &str) -> Value {
    phase(member(name, 50, "train", 3), "Pending")
}

fn without_gpu(name: &str, now: &str) -> Value {
    let mut pod = phase(member(name, 50, "train", 3), now);
    pod["spec"]["containers"] =
        json!([{ "name": "launcher", "resources": { "limits": { "cpu": "1" } } }]);
    pod["spec"]["schedulingGates"] = json!([]);
    pod
}

fn of_job(mut pod: Value, job: &str, index: u32) -> Value {
    let owner = json!({
        "apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": format!("uid-{job}"), "controller": true,
    });
    pod["metadata"]["ownerReferences"] = json!([owner]);
    pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] =
        json!(index.to_string());
    pod
}

/// The pods of which the gate is lifted within some seconds.
async fn lifted(bench: &mut PlannerFixture, seconds: u64) -> Vec<String> {
    let mut written = bench.tick().await;
    written.extend(bench.written_within(seconds).await);
    written
        .iter()
        .filter_map(|line| Some(line.strip_suffix(": lift")?.to_owned()))
        .collect()
}

#[tokio::test]
async fn a_member_that_has_succeeded_needs_no_place_whenever_it_is_shown() {
    for is_seen_running in [true, false] {
        let mut bench = PlannerFixture::new(&NODES);
        let first = placed("first", "k");
        if is_seen_running {
            bench.show(first.clone());
        }
        bench.show(phase(first, "Succeeded"));
        bench.show(placed("second", "l"));
        bench.show(pending("third"));
        assert_eq!(lifted(&mut bench, 5).await, ["third"], "{is_seen_running}");
    }
}

#[tokio::test]
async fn the_last_member_is_placed_when_all_others_have_succeeded() {
    let mut bench = PlannerFixture::new(&NODES);
    bench.show(of_job(phase(placed("first", "k"), "Succeeded"), "train", 0));
    bench.show(of_job(
        phase(placed("second", "l"), "Succeeded"),
        "train",
        1,
    ));
    bench.show(of_job(pending("third"), "train", 2));
    assert_eq!(lifted(&mut bench, 5).await, ["third"]);
}

#[tokio::test]
async fn a_member_that_asks_for_no_gpu_counts_while_it_is_there_or_has_succeeded() {
    for (now, counts) in [
        ("Pending", true),
        ("Running", true),
        ("Succeeded", true),
        ("Failed", false),
    ] {
        let mut bench = PlannerFixture::new(&NODES);
        bench.show(without_gpu("launcher", now));
        bench.show(pending("one"));
        bench.show(pending("two"));
        let expected: &[&str] = if counts { &["one", "two"] } else { &[] };
        assert_eq!(lifted(&mut bench, 5).await, expected, "{now}");
    }
}

#[tokio::test]
async fn a_member_without_gpu_that_is_deleted_counts_no_longer() {
    let mut bench = PlannerFixture::new(&NODES);
    bench.show(without_gpu("launcher", "Running"));
    bench.delete("launcher");
    bench.show(pending("one"));
    bench.show(pending("two"));
    assert!(lifted(&mut bench, 60).await.is_empty());
    bench.show(without_gpu("launcher", "Running"));
    assert_eq!(lifted(&mut bench, 5).await, ["one", "two"]);
}

#[tokio::test]
async fn a_member_without_gpu_that_a_new_list_does_not_have_counts_no_longer() {
    let mut bench = PlannerFixture::new(&NODES);
    bench.show(without_gpu("launcher", "Running"));
    bench.index.replace_pods(&bench.state, &[]);
    bench.show(pending("one"));
    bench.show(pending("two"));
    assert!(lifted(&mut bench, 60).await.is_empty());
}

#[tokio::test]
async fn a_member_that_failed_and_its_replacement_are_one_member() {
    for index in [None, Some(0)] {
        let indexed = |pod| {
            index.map_or_else(
                || Value::clone(&pod),
                |index| of_job(pod.clone(), "train", index),
            )
        };
        let mut bench = PlannerFixture::new(&NODES);
        bench.show(indexed(placed("first", "k")));
        bench.show(indexed(phase(placed("first", "k"), "Failed")));
        bench.show(indexed(pending("again")));
        bench.show(pending("second"));
        assert!(
            lifted(&mut bench, 60).await.is_empty(),
            "the third is not there"
        );
        bench.show(pending("third"));
        assert_eq!(lifted(&mut bench, 5).await, ["again", "second", "third"]);
    }
}

#[tokio::test]
async fn a_member_that_is_being_deleted_and_its_replacement_are_one_member() {
    let mut bench = PlannerFixture::new(&NODES);
    let mut leaving = placed("first", "k");
    leaving["metadata"]["deletionTimestamp"] = json!(jiff::Timestamp::now().to_string());
    leaving["metadata"]["deletionGracePeriodSeconds"] = json!(30);
    bench.show(leaving);
    bench.show(pending("again"));
    bench.show(pending("second"));
    assert!(
        lifted(&mut bench, 5).await.is_empty(),
        "the third is not there"
    );
    bench.show(pending("third"));
    assert_eq!(lifted(&mut bench, 5).await, ["again", "second", "third"]);
}

#[tokio::test]
async fn two_pods_of_one_index_that_have_succeeded_are_one_member() {
    let mut bench = PlannerFixture::new(&NODES);
    bench.show(of_job(phase(placed("first", "k"), "Succeeded"), "train", 0));
    bench.show(of_job(phase(placed("twice", "l"), "Succeeded"), "train", 0));
    bench.show(of_job(pending("second"), "train", 1));
    assert!(
        lifted(&mut bench, 5).await.is_empty(),
        "index 2 is not there"
    );
    bench.show(of_job(pending("third"), "train", 2));
    assert_eq!(lifted(&mut bench, 5).await, ["second", "third"]);
}

#[tokio::test]
async fn the_ended_pods_of_an_earlier_job_are_no_members() {
    let mut bench = PlannerFixture::new(&NODES);
    for (index, (name, node)) in (0..).zip([("x", "k"), ("y", "l"), ("z", "m")]) {
        bench.show(of_job(
            phase(placed(name, node), "Succeeded"),
            "earlier",
            index,
        ));
    }
    bench.show(of_job(pending("first"), "later", 0));
    assert!(
        lifted(&mut bench, 5).await.is_empty(),
        "two are not there yet"
    );
    bench.show(of_job(pending("second"), "later", 1));
    bench.show(of_job(pending("third"), "later", 2));
    assert_eq!(lifted(&mut bench, 5).await, ["first", "second", "third"]);
}

#[tokio::test]
async fn a_group_of_which_some_run_waits_for_a_missing_member_no_longer_than_a_gated_pod() {
    let mut bench = PlannerFixture::new(&NODES);
    bench.show(placed("second", "l"));
    bench.show(pending("third"));
    assert!(
        lifted(&mut bench, 25).await.is_empty(),
        "the first may come yet"
    );
    assert_eq!(
        lifted(&mut bench, 15).await,
        ["third"],
        "it may have ended and be deleted"
    );
}

#[tokio::test]
async fn a_group_of_which_none_runs_waits_for_its_members_however_long_that_takes() {
    let mut bench = PlannerFixture::new(&NODES);
    bench.show(pending("second"));
    bench.show(pending("third"));
    assert!(lifted(&mut bench, 120).await.is_empty());
}

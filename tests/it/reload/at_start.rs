//! The policy that `stowage serve` starts with: the shipped one, one that is missing, and one that is corrupt.

use super::*;

#[test]
fn the_shipped_policy_is_the_built_in_one_where_the_service_looks_for_it() {
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/base");
    let of = |file: &str| fs::read_to_string(base.join(file)).unwrap();
    let objects: Vec<Value> = serde_saphyr::from_multiple(&of("stowage.yaml")).unwrap();
    assert_eq!(
        digest_of(&of("policy.yaml")),
        policy_watch::built_in().digest
    );
    let stowage = objects
        .iter()
        .find(|object| object["kind"] == "Deployment")
        .unwrap();
    let spec = &stowage["spec"]["template"]["spec"];
    let stowage = &spec["containers"][0];
    let argument = stowage["args"]
        .as_array()
        .unwrap()
        .iter()
        .find_map(|arg| arg.as_str()?.strip_prefix("--policy="));
    let mount = stowage["volumeMounts"]
        .as_array()
        .unwrap()
        .iter()
        .find(|mount| mount["name"] == "policy")
        .unwrap();
    assert_eq!(mount["mountPath"].as_str(), argument);
    assert_eq!(mount["subPath"], Value::Null);
    let volume = spec["volumes"]
        .as_array()
        .unwrap()
        .iter()
        .find(|volume| volume["name"] == "policy")
        .unwrap();
    assert_eq!(volume["configMap"]["name"], "stowage-policy");
}

#[test]
fn a_path_without_a_policy_is_an_error_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let dump = json_dump(&folder);
    let cache = folder.path().join("cache");
    for path in ["policy.yaml", "."] {
        let policy = folder.path().join(path);
        let addresses = [
            "--listen",
            "127.0.0.1:0",
            "--agents",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
        ];
        let files = [
            "--cluster",
            dump.to_str().unwrap(),
            "--policy",
            policy.to_str().unwrap(),
        ];
        let kept = ["--policy-cache", cache.to_str().unwrap()];
        let (code, error) =
            expect_failure(&[&["serve"], &addresses[..], &files[..], &kept[..]].concat());
        assert_eq!(code, 1, "{error}");
        assert!(
            error.contains("--policy") && error.contains(policy.to_str().unwrap()),
            "{error}"
        );
    }
}

/// A `stowage serve` whose policy is the file `policy.yaml` of a folder.
fn start(folder: &TempDir, arguments: &[&str]) -> RunningServe {
    let policy = folder.path().join("policy.yaml");
    let policy = ["--policy", policy.to_str().unwrap()];
    RunningServe::serve_with(&json_dump(folder), &[&policy[..], arguments].concat())
}

fn in_force(running: &RunningServe) -> Value {
    Client::connect(running.operators)
        .get("/debug/policy")
        .json()["digest"]
        .clone()
}

#[test]
fn a_corrupt_policy_on_disk_does_not_keep_the_service_from_starting() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(
        folder.path().join("policy.yaml"),
        "scorring: {shortlist: 8}\n",
    )
    .unwrap();
    let running = start(&folder, &[]);
    let line = running.wait_for_line("policy files rejected");
    assert!(
        line.contains("the built-in policy decides: no --policy-cache"),
        "there is no previous one: {line}"
    );
    // With its diagnostics, each with its place.
    running.wait_for_line("scorring");
    let mut client = Client::connect(running.operators);
    let ready = client.get("/readyz");
    assert_eq!(ready.status, 200);
    for part in [
        "policy.yaml:1",
        "scorring",
        "the built-in policy decides: no --policy-cache",
    ] {
        assert!(ready.text().contains(part), "{}", ready.text());
    }
    assert_eq!(
        in_force(&running),
        json!(policy_watch::built_in().digest.to_string())
    );
    assert!(
        client
            .get_page("/metrics")
            .text()
            .contains("stowage_policy_reload_failed 1")
    );
    // A corrected file takes effect without a restart.
    replace(&folder.path().join("policy.yaml"), &policy_for_side("b"));
    running.wait_for_line("policy applied");
    assert_eq!(
        in_force(&running),
        json!(digest_of(&policy_for_side("b")).to_string())
    );
}

#[test]
fn a_restart_with_a_corrupt_policy_uses_the_last_good_one() {
    let folder = tempfile::tempdir().unwrap();
    let (policy, cache) = (
        folder.path().join("policy.yaml"),
        folder.path().join("cache"),
    );
    let kept = ["--policy-cache", cache.to_str().unwrap()];
    fs::write(&policy, policy_for_side("a")).unwrap();
    {
        let running = start(&folder, &kept);
        replace(&policy, &policy_for_side("b"));
        running.wait_for_line("policy applied");
        // The copy is on disk before that is said; a file that is refused changes nothing of it.
        replace(&policy, "");
        running.wait_for_line("policy files rejected");
    }
    let last_good = json!(digest_of(&policy_for_side("b")).to_string());
    let running = start(&folder, &kept);
    running.wait_for_line("policy files rejected");
    let ready = Client::connect(running.operators).get("/readyz");
    assert!(
        ready
            .text()
            .contains("the file has no content (the last good policy decides)"),
        "{}",
        ready.text()
    );
    assert_eq!(in_force(&running), last_good);
    drop(running);
    // A file that is gone, and was a policy once, is not a wrong flag.
    fs::remove_file(&policy).unwrap();
    assert_eq!(in_force(&start(&folder, &kept)), last_good);
    // A copy that is not whole is no policy.
    let copy = cache.join("last-good-policy.json");
    let whole = fs::read_to_string(&copy).unwrap();
    fs::write(&copy, &whole[..whole.len() - 20]).unwrap();
    fs::write(
        &policy,
        "kind: SchedulingPolicy\nmode: shadow\nscorring: {}\n",
    )
    .unwrap();
    let running = start(&folder, &kept);
    running.wait_for_line("policy files rejected");
    let page = Client::connect(running.operators)
        .get("/debug/policy")
        .json();
    assert_eq!(
        page["policy"]["mode"], "shadow",
        "what was to be watched only is not enforced"
    );
}

#[test]
fn a_service_logs_that_it_took_over_a_changed_file() {
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.yaml");
    fs::write(&policy, policy_for_side("a")).unwrap();
    let running =
        RunningServe::serve_with(&json_dump(&folder), &["--policy", policy.to_str().unwrap()]);
    replace(&policy, &policy_for_side("b"));
    let line = running.wait_for_line("policy applied");
    for side in SIDES {
        assert!(
            line.contains(&digest_of(&policy_for_side(side)).to_string()),
            "{line}"
        );
    }
    let page = Client::connect(running.operators)
        .get("/debug/policy")
        .json();
    assert_eq!(page["source"], json!(policy.to_str().unwrap()));
    assert_eq!(page["refused"], Value::Null);
    assert_eq!(page["policy"]["classes"][1]["name"], "moving");
}

//! The README's install block, run as it is written on a fresh API server: what a new user copies is what is tested, so none of
//! its commands is repeated here.

use super::processes::{Ran, run};
use super::world::{RealControlPlane, yaml};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

#[tokio::test(flavor = "multi_thread")]
async fn n9_the_install_block_of_the_readme_runs_as_written() {
    let Some(world) = RealControlPlane::start().await else { return };
    let block = install_block();
    println!("{block}");
    let installed = run_as_written(&world, &block);
    assert!(installed.ok, "{}", installed.said);
    for (workload, replicas) in [("deployment/stowage", 2), ("daemonset/stowage-agent", 0)] {
        let object = get(&world, &["--namespace", "kube-system", workload]);
        assert_eq!(object["spec"]["replicas"].as_u64().unwrap_or(0), replicas, "{workload}");
        what_it_mounts_is_there(&world, &object);
    }
    let policies = get(&world, &["validatingadmissionpolicybindings"]);
    assert!(!policies["items"].as_array().unwrap().is_empty());
    let pods = get(&world, &["pods", "--all-namespaces"]);
    assert_eq!(pods["items"], Value::Array(vec![]), "an example is not installed");
}

/// The README's one shell block that applies the manifests.
fn install_block() -> String {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let readme = std::fs::read_to_string(readme).unwrap();
    let blocks = readme.split("```sh\n").skip(1).map(|rest| rest.split_once("\n```").unwrap().0);
    let installs: Vec<&str> = blocks.filter(|block| block.contains("kubectl apply")).collect();
    assert_eq!(installs.len(), 1, "{installs:?}");
    installs[0].to_owned()
}

/// In a folder of its own that has the manifests, as a clone has; each command must succeed.
fn run_as_written(world: &RealControlPlane, block: &str) -> Ran {
    let clone = tempfile::tempdir().unwrap();
    let manifests = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests");
    std::os::unix::fs::symlink(manifests, clone.path().join("manifests")).unwrap();
    let binaries = world.command("kubectl");
    let binaries = Path::new(binaries.get_program()).parent().unwrap().display().to_string();
    let path = format!("{binaries}:{}", std::env::var("PATH").unwrap_or_default());
    let mut shell = Command::new("sh");
    shell.args(["-e", "-c", block]).current_dir(clone.path());
    run(shell.env("PATH", path).env("KUBECONFIG", world.admin()))
}

fn get(world: &RealControlPlane, what: &[&str]) -> Value {
    let ran = world.kubectl(&[&["get", "-o", "json"], what].concat());
    assert!(ran.ok, "{what:?}: {}", ran.said);
    yaml(&ran.said)
}

/// The Secrets and ConfigMaps without which its pods would never start.
fn what_it_mounts_is_there(world: &RealControlPlane, workload: &Value) {
    let volumes = workload["spec"]["template"]["spec"]["volumes"].as_array().unwrap();
    for volume in volumes {
        for (kind, name) in
            [("secret", &volume["secret"]["secretName"]), ("configmap", &volume["configMap"]["name"])]
        {
            if let Some(name) = name.as_str() {
                get(world, &["--namespace", "kube-system", &format!("{kind}/{name}")]);
            }
        }
    }
}

//! The README's install block and the blocks of the install page, run as they are written on a fresh API server: what a new user
//! copies is what is tested, so none of their commands is repeated here.

use super::processes::{CommandOutput, run};
use super::world::{RealControlPlane, yaml};
use crate::docs::markdown::{Fence, Page};
use crate::helm::Helm;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// kubectl sends the selector of a PodDisruptionBudget with every apply, because its schema says that it is replaced and never
/// merged; the API server changes nothing.
const ALWAYS_SENT: &str = "poddisruptionbudget.policy/stowage configured";

#[tokio::test(flavor = "multi_thread")]
async fn the_install_block_of_the_readme_runs_as_written() {
    let Some(world) = RealControlPlane::start().await else {
        return;
    };
    let blocks = blocks("README.md");
    let blocks: Vec<&String> = blocks
        .iter()
        .filter(|block| block.contains("kubectl apply"))
        .collect();
    assert_eq!(blocks.len(), 1, "{blocks:?}");
    println!("{}", blocks[0]);
    let clone = RepositoryClone::new(&world, None);
    let installed = clone.run(blocks[0]);
    assert!(installed.is_success, "{}", installed.output);
    for (workload, replicas) in [("deployment/stowage", 2), ("daemonset/stowage-agent", 0)] {
        let object = get(&world, &["--namespace", "kube-system", workload]);
        assert_eq!(
            object["spec"]["replicas"].as_u64().unwrap_or(0),
            replicas,
            "{workload}"
        );
        what_it_mounts_is_there(&world, &object);
    }
    let policies = get(&world, &["validatingadmissionpolicybindings"]);
    assert!(!policies["items"].as_array().unwrap().is_empty());
    let pods = get(&world, &["pods", "--all-namespaces"]);
    assert_eq!(
        pods["items"],
        Value::Array(vec![]),
        "an example is not installed"
    );

    what_stowage_writes_is_there(&world);
    let budget = || {
        get(
            &world,
            &["--namespace", "kube-system", "poddisruptionbudget/stowage"],
        )
    };
    let before = budget();
    let again = clone.run(blocks[0]);
    assert!(again.is_success, "{}", again.output);
    let changed: Vec<&str> = again
        .output
        .lines()
        .filter(|line| !line.ends_with(" unchanged"))
        .collect();
    assert_eq!(changed, [ALWAYS_SENT], "a second apply changes nothing");
    assert_eq!(budget(), before, "nor the disruption budget");
    let written = get(
        &world,
        &["--namespace", "kube-system", "secret/stowage-agents-tls"],
    );
    assert_eq!(
        written["data"]["tls.crt"], "Y2VydGlmaWNhdGU=",
        "what Stowage wrote stays"
    );
    let written = get(
        &world,
        &["--namespace", "kube-system", "configmap/stowage-agents-ca"],
    );
    assert_eq!(written["data"]["ca.crt"], "CA");
    let difference = clone.run("kubectl diff -k manifests/");
    assert!(
        difference.is_success && difference.output.is_empty(),
        "{}",
        difference.output
    );
}

/// As Stowage fills them with a certificate: by replacing the whole object.
fn what_stowage_writes_is_there(world: &RealControlPlane) {
    let secret = json!({ "tls.crt": "Y2VydGlmaWNhdGU=", "tls.key": "a2V5" });
    let map = json!({ "ca.crt": "CA" });
    for (kind, name, data) in [
        ("secrets", "stowage-agents-tls", secret),
        ("configmaps", "stowage-agents-ca", map),
    ] {
        let mut object = get(
            world,
            &["--namespace", "kube-system", &format!("{kind}/{name}")],
        );
        object["data"] = data;
        let file = world.folder().join("written.json");
        std::fs::write(&file, object.to_string()).unwrap();
        let account = "--as=system:serviceaccount:kube-system:stowage";
        let path = format!("/api/v1/namespaces/kube-system/{kind}/{name}");
        // Without it kubectl would write its own annotation, too.
        let replaced = world.kubectl(&[
            "replace",
            "--raw",
            &path,
            "-f",
            file.to_str().unwrap(),
            account,
        ]);
        assert!(replaced.is_success, "{}", replaced.output);
    }
    for (object, verb) in [
        ("secret/other", "get"),
        ("secrets", "create"),
        ("configmap/stowage-policy", "patch"),
    ] {
        let question = ["auth", "can-i", verb, object, "--namespace", "kube-system"];
        let account = "--as=system:serviceaccount:kube-system:stowage";
        let answer = world.kubectl(&[&question[..], &[account]].concat());
        assert!(!answer.is_success, "Stowage may {verb} {object}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_block_of_the_install_page_runs_as_written() {
    let Some(world) = RealControlPlane::start().await else {
        return;
    };
    let page = blocks("docs/start/install.md");
    let (helm, kubectl): (Vec<String>, Vec<String>) =
        page.into_iter().partition(|block| block.contains("helm "));
    assert!(
        kubectl.len() >= 5 && !helm.is_empty(),
        "{kubectl:?} {helm:?}"
    );
    let clone = RepositoryClone::new(&world, None);
    for block in &kubectl {
        let ran = clone.run(block);
        assert!(ran.is_success, "{block}\n{}", ran.output);
    }
    drop((clone, world));
    let Some(found) = Helm::find() else { return };
    // On a server of its own: Helm adopts no object that another tool has made.
    let world = RealControlPlane::start()
        .await
        .expect("it was there before");
    let clone = RepositoryClone::new(&world, Some(&found));
    for block in &helm {
        for _ in 0..2 {
            let ran = clone.run(block);
            assert!(ran.is_success, "{block}\n{}", ran.output);
            what_stowage_writes_is_there(&world);
        }
    }
    let ran = clone.run(helm.last().unwrap());
    assert!(ran.is_success, "{}", ran.output);
    let written = get(
        &world,
        &["--namespace", "kube-system", "secret/stowage-agents-tls"],
    );
    assert_eq!(
        written["data"]["tls.crt"], "Y2VydGlmaWNhdGU=",
        "an upgrade keeps what Stowage wrote"
    );
}

#[test]
fn the_blocks_in_a_list_are_blocks_of_the_page() {
    let found = blocks("docs/start/upgrade-and-removal.md");
    for block in [
        "kubectl delete -f manifests/components/leader-fence/leader-fence.yaml",
        "kubectl -n kube-system rollout status deployment/stowage\nkubectl -n kube-system rollout status daemonset/stowage-agent",
    ] {
        assert!(
            found.iter().any(|shown| shown == block),
            "{block}: {found:#?}"
        );
    }
    let runnable = blocks("docs/use/policies.md");
    assert!(
        runnable[0].starts_with("cargo run -- policy check"),
        "{runnable:#?}"
    );
}

/// The shell blocks of a page, in their order.
fn blocks(page: &str) -> Vec<String> {
    let page = Page::read(Path::new(env!("CARGO_MANIFEST_DIR")), Path::new(page));
    let shell = page.fences().into_iter();
    let shell = shell.filter(|fence| fence.info.starts_with("sh"));
    let text = |fence: Fence<'_>| {
        let lines: Vec<&str> = fence.lines.iter().map(|(_, line)| *line).collect();
        lines.join("\n")
    };
    shell.map(text).collect()
}

/// A folder that has the manifests, as a clone has.
struct RepositoryClone {
    folder: tempfile::TempDir,
    path: String,
    kubeconfig: std::path::PathBuf,
}

impl RepositoryClone {
    fn new(world: &RealControlPlane, helm: Option<&Helm>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let manifests = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests");
        std::os::unix::fs::symlink(manifests, folder.path().join("manifests")).unwrap();
        let kubectl = world.command("kubectl");
        let binaries = Path::new(kubectl.get_program())
            .parent()
            .unwrap()
            .to_owned();
        let folders = helm
            .map(|helm| helm.folder.clone())
            .into_iter()
            .chain([binaries]);
        let folders: Vec<String> = folders.map(|folder| folder.display().to_string()).collect();
        let path = format!(
            "{}:{}",
            folders.join(":"),
            std::env::var("PATH").unwrap_or_default()
        );
        Self {
            folder,
            path,
            kubeconfig: world.admin(),
        }
    }

    /// The whole block in one shell; each of its commands must succeed.
    fn run(&self, block: &str) -> CommandOutput {
        let mut shell = Command::new("sh");
        shell
            .args(["-e", "-c", block])
            .current_dir(self.folder.path());
        run(shell
            .env("PATH", &self.path)
            .env("KUBECONFIG", &self.kubeconfig))
    }
}

fn get(world: &RealControlPlane, what: &[&str]) -> Value {
    let ran = world.kubectl(&[&["get", "-o", "json"], what].concat());
    assert!(ran.is_success, "{what:?}: {}", ran.output);
    yaml(&ran.output)
}

/// The Secrets and ConfigMaps without which its pods would never start.
fn what_it_mounts_is_there(world: &RealControlPlane, workload: &Value) {
    let volumes = workload["spec"]["template"]["spec"]["volumes"]
        .as_array()
        .unwrap();
    for volume in volumes {
        for (kind, name) in [
            ("secret", &volume["secret"]["secretName"]),
            ("configmap", &volume["configMap"]["name"]),
        ] {
            if let Some(name) = name.as_str() {
                get(
                    world,
                    &["--namespace", "kube-system", &format!("{kind}/{name}")],
                );
            }
        }
    }
}

//! What Kustomize and Helm make of the manifests: every overlay and the chart are accepted by a real API server, have the same
//! guards and sound policies, and the chart's defaults are what `kubectl apply -k manifests/` applies.

use super::processes::{CommandOutput, eventually, run};
use super::servers::binaries;
use super::world::{RealControlPlane, manifest};
use crate::helm::Helm;
use crate::shipped_manifests::assert_guards;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Every folder that `kubectl apply -k` takes.
const FOLDERS: [&str; 7] = [
    "",
    "base",
    "overlays/cert-manager",
    "overlays/device-plugin-nodes",
    "overlays/shadow",
    "overlays/single-replica",
    "overlays/webhook",
];

/// Kinds of the overlays and examples that others define: group, version, kind, plural.
const OTHERS: [[&str; 4]; 11] = [
    [
        "monitoring.coreos.com",
        "v1",
        "ServiceMonitor",
        "servicemonitors",
    ],
    ["monitoring.coreos.com", "v1", "PodMonitor", "podmonitors"],
    [
        "monitoring.coreos.com",
        "v1",
        "PrometheusRule",
        "prometheusrules",
    ],
    ["cert-manager.io", "v1", "Issuer", "issuers"],
    ["cert-manager.io", "v1", "Certificate", "certificates"],
    [
        "leaderworkerset.x-k8s.io",
        "v1",
        "LeaderWorkerSet",
        "leaderworkersets",
    ],
    ["jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets"],
    [
        "serving.kserve.io",
        "v1beta1",
        "InferenceService",
        "inferenceservices",
    ],
    ["argoproj.io", "v1alpha1", "CronWorkflow", "cronworkflows"],
    ["keda.sh", "v1alpha1", "ScaledObject", "scaledobjects"],
    [
        "keda.sh",
        "v1alpha1",
        "TriggerAuthentication",
        "triggerauthentications",
    ],
];

/// What `kubectl kustomize` makes of a folder.
fn kustomized(kubectl: &mut Command, folder: &Path) -> Vec<Value> {
    let ran = run(kubectl.arg("kustomize").arg(folder));
    assert!(ran.is_success, "{}: {}", folder.display(), ran.output);
    serde_saphyr::from_multiple(&ran.output).unwrap()
}

fn folders() -> Vec<String> {
    let overlays = std::fs::read_dir(manifest("overlays")).unwrap();
    let overlays = overlays.map(|overlay| overlay.unwrap().file_name().into_string().unwrap());
    let overlays = overlays.map(|overlay| format!("overlays/{overlay}"));
    let mut folders: Vec<String> = ["", "base"]
        .map(str::to_owned)
        .into_iter()
        .chain(overlays)
        .collect();
    folders.sort();
    folders
}

#[tokio::test(flavor = "multi_thread")]
async fn every_overlay_the_chart_and_the_examples_pass_a_servers_dry_run() {
    let Some(world) = RealControlPlane::start().await else {
        return;
    };
    assert_eq!(folders(), FOLDERS);
    define_what_others_define(&world).await;
    for folder in FOLDERS {
        let objects = kustomized(&mut world.command("kubectl"), &manifest(folder));
        assert_guards(&objects);
        its_policy_is_sound(&world, folder, &objects);
        accepted(
            folder,
            &world.kubectl(&[
                "apply",
                "--dry-run=server",
                "-k",
                manifest(folder).to_str().unwrap(),
            ]),
        );
    }
    for component in std::fs::read_dir(manifest("components")).unwrap() {
        let component = component.unwrap().file_name().into_string().unwrap();
        combined(&world, &component);
    }
    world.install_of("");
    world.create_runtime_class("nvidia");
    let pod = manifest("examples/pod.yaml");
    eventually(
        "the API server applies the admission policies",
        async || {
            let dry_run = ["apply", "--dry-run=server", "-o", "json", "-f"];
            let ran = world.kubectl(&[&dry_run[..], &[pod.to_str().unwrap()]].concat());
            ran.output
                .contains("stowage.dev/visible-devices")
                .then_some(())
        },
    )
    .await;
    for example in std::fs::read_dir(manifest("examples")).unwrap() {
        let example = example.unwrap().path();
        let strict = [
            "apply",
            "--validate=strict",
            "--dry-run=server",
            "-f",
            example.to_str().unwrap(),
        ];
        accepted(&example.display().to_string(), &world.kubectl(&strict));
    }
    let Some(helm) = Helm::find() else { return };
    for flags in [
        "replicas=2",
        "kubeScheduler.mode=shadow",
        "kubeScheduler.mode=device-plugin-nodes",
        "certificates.mode=cert-manager",
        "certificates.mode=files,replicas=1,leaderFence.enabled=true",
        "monitoring.serviceMonitor=true,monitoring.prometheusRule=true",
        "flightRecorder.enabled=true,extraArgs.agent={--interval=15s},extraArgs.stowage={--gpu-metrics=false}",
    ] {
        let objects = helm.render("kube-system", &["--set", flags]).unwrap();
        its_policy_is_sound(&world, flags, &objects);
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects }).to_string();
        accepted(flags, &world.apply(&list, &["--dry-run=server"]));
    }
}

fn accepted(what: &str, ran: &CommandOutput) {
    assert!(ran.is_success, "{what}: {}", ran.output);
}

/// A kustomization of one's own, as the install page shows one, takes the component beside the base.
fn combined(world: &RealControlPlane, component: &str) {
    let folder = own_kustomization(world.folder(), "base", component);
    accepted(
        component,
        &world.kubectl(&["apply", "--dry-run=server", "-k", folder.to_str().unwrap()]),
    );
}

/// The folder of a kustomization that takes the component beside a folder of the manifests.
fn own_kustomization(parent: &Path, beside: &str, component: &str) -> PathBuf {
    let folder = parent.join(format!("own-{component}"));
    std::fs::create_dir_all(&folder).unwrap();
    // Kustomize takes relative paths only.
    let link = parent.join("manifests");
    let _ = std::os::unix::fs::symlink(manifest(""), &link);
    let text = format!(
        "resources: [../manifests/{beside}]\ncomponents: [../manifests/components/{component}]\n"
    );
    std::fs::write(folder.join("kustomization.yaml"), text).unwrap();
    folder
}

fn its_policy_is_sound(world: &RealControlPlane, of: &str, objects: &[Value]) {
    let is_it = |object: &&Value| {
        object["kind"] == "ConfigMap" && object["metadata"]["name"] == "stowage-policy"
    };
    let policy = objects
        .iter()
        .find(is_it)
        .unwrap_or_else(|| panic!("{of}: no policy"));
    let file = world.folder().join("policy.yaml");
    std::fs::write(&file, policy.to_string()).unwrap();
    let mut check = Command::new(env!("CARGO_BIN_EXE_stowage"));
    accepted(of, &run(check.args(["policy", "check"]).arg(file)));
}

/// The kinds by name only: their own fields are not checked.
async fn define_what_others_define(world: &RealControlPlane) {
    for [group, version, kind, plural] in OTHERS {
        let anything = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
        let version = json!({
            "name": version, "served": true, "storage": true, "schema": { "openAPIV3Schema": anything },
        });
        let names = json!({ "kind": kind, "plural": plural });
        let definition = json!({
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": { "name": format!("{plural}.{group}") },
            "spec": { "group": group, "scope": "Namespaced", "names": names, "versions": [version] },
        });
        accepted(kind, &world.apply(&definition.to_string(), &[]));
    }
    for [group, _, kind, plural] in OTHERS {
        let kinds = format!("{plural}.{group}");
        eventually(&format!("{kind} is served"), async || {
            world.kubectl(&["get", &kinds]).is_success.then_some(())
        })
        .await;
    }
}

#[test]
fn the_charts_defaults_are_what_kustomize_applies() {
    let (Some(binaries), Some(helm)) = (binaries(), Helm::find()) else {
        return;
    };
    let kubectl = || Command::new(binaries.join("kubectl"));
    for (folder, flags) in [
        ("", ""),
        ("overlays/single-replica", "replicas=1"),
        ("overlays/shadow", "kubeScheduler.mode=shadow"),
        (
            "overlays/device-plugin-nodes",
            "kubeScheduler.mode=device-plugin-nodes",
        ),
        ("overlays/cert-manager", "certificates.mode=cert-manager"),
        ("overlays/webhook", "podDefaults.webhook=true"),
    ] {
        assert_same(
            folder,
            &helm,
            flags,
            kustomized(&mut kubectl(), &manifest(folder)),
        );
    }
}

#[test]
fn a_value_of_the_chart_adds_what_its_component_adds() {
    let (Some(binaries), Some(helm)) = (binaries(), Helm::find()) else {
        return;
    };
    let parent = tempfile::tempdir().unwrap();
    for (component, flags) in [
        ("leader-fence", "leaderFence.enabled=true"),
        ("start-turns", "startTurns.enabled=true"),
        ("service-monitor", "monitoring.serviceMonitor=true"),
        ("prometheus-rules", "monitoring.prometheusRule=true"),
    ] {
        let folder = own_kustomization(parent.path(), "", component);
        let applied = kustomized(&mut Command::new(binaries.join("kubectl")), &folder);
        assert_same(component, &helm, flags, applied);
    }
}

/// What Kustomize makes is what the chart makes under these values.
fn assert_same(of: &str, helm: &Helm, flags: &str, applied: Vec<Value>) {
    let applied = comparable(applied);
    let rendered = comparable(helm.render("kube-system", &["--set", flags]).unwrap());
    let names = |objects: &BTreeMap<String, Value>| objects.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&rendered), names(&applied), "{of}");
    for (name, object) in &applied {
        assert_eq!(rendered[name], *object, "{of}: {name}");
    }
}

/// By kind and name, without what differs on purpose: labels of the tool, and how a changed configuration rolls the pods
/// (Kustomize puts a hash into its name, the chart into an annotation).
fn comparable(objects: Vec<Value>) -> BTreeMap<String, Value> {
    let each = objects.into_iter().map(|mut object| {
        let kind = object["kind"].as_str().unwrap().to_owned();
        let mut name = object["metadata"]["name"].as_str().unwrap().to_owned();
        if kind == "ConfigMap" {
            unhash(&mut name);
        }
        object["metadata"]["name"] = name.clone().into();
        if let Some(labels) = object
            .pointer_mut("/metadata/labels")
            .and_then(Value::as_object_mut)
        {
            labels.retain(|label, _| label == "app.kubernetes.io/name");
        }
        object["metadata"]
            .as_object_mut()
            .unwrap()
            .retain(|_, value| *value != json!({}));
        if let Some(template) = object.pointer_mut("/spec/template") {
            template["metadata"]
                .as_object_mut()
                .unwrap()
                .remove("annotations");
            of_pods(&mut template["spec"]);
        }
        (format!("{kind}/{name}"), object)
    });
    each.collect()
}

fn of_pods(pod: &mut Value) {
    for container in pod["containers"].as_array_mut().unwrap() {
        // The chart says what is the default.
        container
            .as_object_mut()
            .unwrap()
            .retain(|key, value| key != "imagePullPolicy" || value != "IfNotPresent");
    }
    for volume in pod["volumes"].as_array_mut().unwrap() {
        if let Some(Value::String(name)) = volume.pointer_mut("/configMap/name") {
            unhash(name);
        }
    }
}

fn unhash(name: &mut String) {
    const HASHED: &str = "stowage-kube-scheduler";
    if name.starts_with(HASHED) {
        name.truncate(HASHED.len());
    }
}

//! The Helm chart without a cluster: what its values do, and which values it refuses. That its defaults are the base is checked
//! in `control_plane/rendered.rs`.

use crate::helm::Helm;
use serde_json::Value;
use std::path::Path;

const KUBE_SYSTEM: &str = "kube-system";

fn rendered(helm: &Helm, flags: &[&str]) -> Vec<Value> {
    helm.render(KUBE_SYSTEM, flags)
        .unwrap_or_else(|said| panic!("{flags:?}: {said}"))
}

fn named<'a>(objects: &'a [Value], kind: &str, name: &str) -> Option<&'a Value> {
    objects
        .iter()
        .find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
}

fn arguments(objects: &[Value]) -> Vec<&str> {
    let stowage = named(objects, "Deployment", "stowage").unwrap();
    let arguments = stowage["spec"]["template"]["spec"]["containers"][0]["args"]
        .as_array()
        .unwrap();
    arguments
        .iter()
        .map(|argument| argument.as_str().unwrap())
        .collect()
}

#[test]
fn a_value_of_a_wrong_type_or_name_is_refused_with_its_place() {
    let Some(helm) = Helm::find() else { return };
    for (set, place) in [
        ("replicas=two", "/replicas"),
        ("replicas=0", "/replicas"),
        ("replica=2", "replica"),
        ("image=stowage", "/image"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        (
            "resources.stowage.limits.memory=1 GB",
            "/resources/stowage/limits/memory",
        ),
        ("resources.agents.limits.memory=64Mi", "agents"),
        ("podDefaults.enabled=maybe", "/podDefaults/enabled"),
        ("networkPolicy=true", "/networkPolicy"),
        ("monitoring.namespace=No_Name", "/monitoring/namespace"),
        (
            "monitoring.serviceMonitor=yes",
            "/monitoring/serviceMonitor",
        ),
        ("startTurns.enabled=yes", "/startTurns/enabled"),
        (
            "monitoring.prometheusRule=yes",
            "/monitoring/prometheusRule",
        ),
        ("certificates.mode=openssl", "/certificates/mode"),
        ("runtimeClass=7", "/runtimeClass"),
        ("kubeScheduler.mode=enforce", "/kubeScheduler/mode"),
    ] {
        let said = helm.render(KUBE_SYSTEM, &["--set", set]).expect_err(set);
        assert!(
            said.contains(place) && said.contains("schema"),
            "{set}: {said}"
        );
    }
}

#[test]
fn the_chart_is_for_kube_system_only() {
    let Some(helm) = Helm::find() else { return };
    let said = helm.render("gpu", &[]).unwrap_err();
    assert!(said.contains("--namespace kube-system"), "{said}");
}

#[test]
fn guards_are_rendered_with_every_choice_of_values() {
    let Some(helm) = Helm::find() else { return };
    for flags in [
        &[][..],
        &["--set", "kubeScheduler.mode=shadow"],
        &["--set", "kubeScheduler.mode=device-plugin-nodes"],
        &[
            "--set",
            "replicas=1,podDefaults.enabled=false,runtimeClass=",
        ],
        &["--set", "certificates.mode=cert-manager"],
        &["--set", "certificates.mode=files"],
    ] {
        let objects = rendered(&helm, flags);
        crate::shipped_manifests::assert_guards(&objects);
    }
}

#[test]
fn every_value_changes_its_object() {
    let Some(helm) = Helm::find() else { return };
    let one = rendered(
        &helm,
        &[
            "--set",
            "replicas=1,image.tag=9.9.9,monitoring.namespace=observability",
        ],
    );
    let stowage = named(&one, "Deployment", "stowage").unwrap();
    assert_eq!(stowage["spec"]["replicas"], 1);
    let budget = named(&one, "PodDisruptionBudget", "stowage").unwrap();
    assert_eq!(
        budget["spec"]["maxUnavailable"], 1,
        "one that wants a pod available blocks every drain"
    );
    let images = one.iter().flat_map(|object| {
        let containers = object["spec"]["template"]["spec"]["containers"].as_array();
        containers
            .into_iter()
            .flatten()
            .map(|container| container["image"].as_str().unwrap())
    });
    let images: Vec<&str> = images.filter(|image| image.contains("/stowage:")).collect();
    assert_eq!(images, ["ghcr.io/stowage-dev/stowage:9.9.9"; 2]);
    let policy = named(&one, "NetworkPolicy", "stowage").unwrap().to_string();
    assert!(
        policy.contains("\"observability\"") && !policy.contains("\"monitoring\""),
        "{policy}"
    );

    let renamed = rendered(&helm, &["--set", "runtimeClass=gpu-runtime"]);
    let agent = named(&renamed, "DaemonSet", "stowage-agent").unwrap();
    assert_eq!(
        agent["spec"]["template"]["spec"]["runtimeClassName"],
        "gpu-runtime"
    );
    let binding = named(
        &renamed,
        "MutatingAdmissionPolicyBinding",
        "stowage-pod-runtime-class",
    )
    .unwrap();
    assert_eq!(binding["spec"]["paramRef"]["name"], "gpu-runtime");
    let guard = named(
        &renamed,
        "ValidatingAdmissionPolicy",
        "stowage-visible-devices",
    )
    .unwrap();
    assert!(
        guard["spec"]["variables"][0]["expression"]
            .as_str()
            .unwrap()
            .contains("\"gpu-runtime\"")
    );

    let without = rendered(&helm, &["--set", "podDefaults.enabled=false,runtimeClass="]);
    assert!(
        without
            .iter()
            .all(|object| !object["kind"].as_str().unwrap().starts_with("Mutating"))
    );
    let agent = named(&without, "DaemonSet", "stowage-agent").unwrap();
    assert_eq!(
        agent["spec"]["template"]["spec"]["runtimeClassName"],
        Value::Null
    );

    let policy = rendered(&helm, &["--set", "policy=mode: shadow"]);
    assert_eq!(
        named(&policy, "ConfigMap", "stowage-policy").unwrap()["data"]["policy.yaml"],
        "mode: shadow\n"
    );
    assert!(
        named(
            &rendered(&helm, &["--set", "networkPolicy.enabled=false"]),
            "NetworkPolicy",
            "stowage"
        )
        .is_none()
    );
    let in_turns = rendered(&helm, &["--set", "startTurns.enabled=true"]);
    let agent = named(&in_turns, "DaemonSet", "stowage-agent")
        .unwrap()
        .to_string();
    assert!(
        agent.contains("--turns=/run/stowage/turns.sock")
            && agent.contains("\"mountPath\":\"/run/stowage\"")
    );
    assert!(
        named(
            &in_turns,
            "MutatingAdmissionPolicyBinding",
            "stowage-start-turns"
        )
        .is_some()
    );
    let fenced = rendered(&helm, &["--set", "leaderFence.enabled=true"]);
    assert!(
        named(
            &fenced,
            "ValidatingAdmissionPolicyBinding",
            "stowage-leader-fence"
        )
        .is_some()
    );
}

#[test]
fn a_component_is_in_the_chart_if_its_value_says_so() {
    let Some(helm) = Helm::find() else { return };
    let without = rendered(&helm, &[]);
    for (value, component) in [
        ("leaderFence.enabled", "leader-fence/leader-fence.yaml"),
        (
            "monitoring.serviceMonitor",
            "service-monitor/service-monitor.yaml",
        ),
        (
            "monitoring.prometheusRule",
            "prometheus-rules/prometheus-rules.yaml",
        ),
    ] {
        let with = rendered(&helm, &["--set", &format!("{value}=true")]);
        let added: Vec<&Value> = with
            .iter()
            .filter(|object| !without.contains(object))
            .collect();
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("manifests/components")
            .join(component);
        let objects: Vec<Value> =
            serde_saphyr::from_multiple(&std::fs::read_to_string(file).unwrap()).unwrap();
        assert_eq!(added, objects.iter().collect::<Vec<_>>(), "{value}");
        assert_eq!(with.len(), without.len() + objects.len(), "{value}");
    }
    // Alerts need no certificate of a certain kind: any Prometheus may scrape.
    let others = rendered(
        &helm,
        &[
            "--set",
            "certificates.mode=files,monitoring.prometheusRule=true",
        ],
    );
    assert!(named(&others, "PrometheusRule", "stowage").is_some());
}

#[test]
fn with_certificates_of_others_stowage_has_no_right_to_a_secret() {
    let Some(helm) = Helm::find() else { return };
    let own = rendered(&helm, &[]);
    assert!(arguments(&own).contains(&"--agents-tls-secret=kube-system/stowage-agents-tls"));
    for mode in ["cert-manager", "files"] {
        let objects = rendered(&helm, &["--set", &format!("certificates.mode={mode}")]);
        let arguments = arguments(&objects);
        assert!(
            arguments.contains(&"--admin-tls-key=/etc/stowage-agents/tls.key"),
            "{arguments:?}"
        );
        assert!(
            !arguments
                .iter()
                .any(|argument| argument.starts_with("--agents-tls-secret"))
        );
        assert!(named(&objects, "Role", "stowage-certificates").is_none());
        assert!(named(&objects, "Secret", "stowage-agents-tls").is_none());
        let certificates = objects
            .iter()
            .filter(|object| object["kind"] == "Certificate")
            .count();
        assert_eq!(certificates, if mode == "cert-manager" { 3 } else { 0 });
    }
}

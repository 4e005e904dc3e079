//! The Helm chart without a cluster: what its values do, and which values it refuses. That its defaults are the base is checked
//! in `control_plane/rendered.rs`.

use crate::helm::Helm;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

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

/// Those of the service.
fn arguments(objects: &[Value]) -> Vec<&str> {
    arguments_of(objects, SERVICE)
}

/// The kind and the name of a workload, and under which name `extraArgs` has its arguments.
type Workload = [&'static str; 3];
const SERVICE: Workload = ["Deployment", "stowage", "stowage"];
const AGENTS: Workload = ["DaemonSet", "stowage-agent", "agent"];

/// Those of a workload's first container.
fn arguments_of(objects: &[Value], [kind, name, _]: Workload) -> Vec<&str> {
    let workload = named(objects, kind, name).unwrap();
    let arguments = workload["spec"]["template"]["spec"]["containers"][0]["args"]
        .as_array()
        .unwrap();
    arguments
        .iter()
        .map(|argument| argument.as_str().unwrap())
        .collect()
}

/// Values under which the chart sets flags that it does not set by default.
const SET_FLAGS: [&str; 2] = [
    "certificates.mode=files,startTurns.enabled=true",
    "flightRecorder.enabled=true",
];

/// The flags that the chart sets by itself, under any values.
fn flags_set(helm: &Helm, workload: Workload) -> BTreeSet<String> {
    let mut flags = BTreeSet::new();
    for set in SET_FLAGS {
        let objects = rendered(helm, &["--set", set]);
        let arguments = arguments_of(&objects, workload).into_iter();
        let names = arguments.map(|argument| argument.split('=').next().unwrap());
        flags.extend(
            names
                .filter(|name| name.starts_with("--"))
                .map(str::to_owned),
        );
    }
    assert!(flags.len() > 6, "{flags:?}");
    flags
}

#[test]
fn every_flag_that_the_pages_name_can_be_set() {
    let Some(helm) = Helm::find() else { return };
    let mut settable = 0;
    for (command, workload) in [("serve", SERVICE), ("agent", AGENTS)] {
        let mut stowage = Command::new(env!("CARGO_BIN_EXE_stowage"));
        let help = stowage.args([command, "--help"]).output().unwrap();
        let help = String::from_utf8(help.stdout).unwrap();
        let is_end = |c: char| c != '-' && !c.is_ascii_lowercase();
        let there: BTreeSet<&str> = help
            .split(is_end)
            .filter(|word| word.starts_with("--"))
            .collect();
        let set = flags_set(&helm, workload);
        for page in [
            "start/install.md",
            "use/install-day.md",
            "use/run-day.md",
            "use/flight-recorder.md",
        ] {
            let text = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("docs")
                .join(page);
            let text = std::fs::read_to_string(text).unwrap();
            let named: BTreeSet<&str> = text
                .split(is_end)
                .filter(|word| there.contains(word))
                .collect();
            for flag in named.into_iter().filter(|flag| !set.contains(*flag)) {
                let extra = format!("extraArgs.{}={{{flag}=15s}}", workload[2]);
                let objects = rendered(&helm, &["--set", &extra]);
                let last = arguments_of(&objects, workload).pop().unwrap();
                assert_eq!(last, format!("{flag}=15s"), "{page}");
                settable += 1;
            }
        }
    }
    assert!(settable > 5, "only {settable} flags were found");
}

/// A flag twice: the container does not start.
#[test]
fn a_flag_that_the_chart_sets_is_no_extra_one() {
    let Some(helm) = Helm::find() else { return };
    for workload in [SERVICE, AGENTS] {
        for flag in flags_set(&helm, workload) {
            // It may be given more than once: a folder each.
            if flag == "--hf-cache" {
                continue;
            }
            let place = format!("/extraArgs/{}/0", workload[2]);
            for argument in [flag.clone(), format!("{flag}=x")] {
                let set = format!("extraArgs.{}={{{argument}}}", workload[2]);
                let refused = helm.render(KUBE_SYSTEM, &["--set", &set]);
                let said = refused.expect_err(&set);
                assert!(said.contains(&place), "{set}: {said}");
            }
        }
    }
    let longer = "extraArgs.stowage={--agents-connections=40000}";
    let objects = rendered(&helm, &["--set", longer]);
    assert!(arguments(&objects).contains(&"--agents-connections=40000"));
}

#[test]
fn the_flight_recorder_writes_to_a_volume_that_is_large_enough() {
    let Some(helm) = Helm::find() else { return };
    let records = |argument: &&str| argument.starts_with("--record");
    let without = rendered(&helm, &[]);
    assert_eq!(arguments(&without).into_iter().find(records), None);
    for size in [8_u64, 512, 2048] {
        let set = format!("flightRecorder.enabled=true,flightRecorder.size={size}");
        let objects = rendered(&helm, &["--set", &set]);
        let pod = &named(&objects, "Deployment", "stowage").unwrap()["spec"]["template"]["spec"];
        let of_size = format!("--record-size={size}");
        let recorded: Vec<&str> = arguments(&objects).into_iter().filter(records).collect();
        assert_eq!(recorded, ["--record=/var/lib/stowage/recording", &of_size]);
        let called = |list: &Value| {
            let all = list.as_array().unwrap().iter();
            all.clone()
                .find(|one| one["name"] == "recording")
                .unwrap()
                .clone()
        };
        let mount = called(&pod["containers"][0]["volumeMounts"]);
        assert_eq!(
            (&mount["mountPath"], &mount["readOnly"]),
            (&"/var/lib/stowage".into(), &Value::Null)
        );
        let limit = called(&pod["volumes"])["emptyDir"]["sizeLimit"].clone();
        let limit = limit
            .as_str()
            .unwrap()
            .strip_suffix("Mi")
            .unwrap()
            .parse::<u64>()
            .unwrap();
        // By two segments, each of up to an eighth.
        assert!(limit > size + size.div_ceil(4), "{limit} MiB for {size}");
    }
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
        ("flightRecorder.enabled=yes", "/flightRecorder/enabled"),
        ("flightRecorder.size=7", "/flightRecorder/size"),
        ("extraArgs.agent=--mps", "/extraArgs/agent"),
        ("extraArgs.agent={--mps,interval=15s}", "/extraArgs/agent/1"),
        ("extraArgs.scheduler={--mps}", "scheduler"),
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
        &[
            "--set",
            "flightRecorder.enabled=true,extraArgs.agent={--mps},extraArgs.stowage={--gpu-metrics=false}",
        ],
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

    let policy = rendered(
        &helm,
        &["--set", "policy=kind: SchedulingPolicy\nmode: shadow"],
    );
    assert_eq!(
        named(&policy, "ConfigMap", "stowage-policy").unwrap()["data"]["policy.yaml"],
        "kind: SchedulingPolicy\nmode: shadow\n"
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

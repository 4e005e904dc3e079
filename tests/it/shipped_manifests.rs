//! The shipped manifests agree with each other: needs no cluster.

use serde_json::{Map, Value};
use std::fs;
use std::path::Path;
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The objects of `manifests/base`: what every overlay has.
fn applied() -> Vec<Value> {
    let kustomization = one("base/kustomization.yaml");
    let files = items(&kustomization, "resources")
        .iter()
        .map(|file| text(&format!("base/{}", as_str(file))));
    files.flat_map(|text| objects(&text)).collect()
}

fn text(file: &str) -> String {
    let file = root().join("manifests").join(file);
    fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

fn objects(text: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(text).unwrap()
}

fn one(file: &str) -> Value {
    serde_saphyr::from_str(&text(file)).unwrap()
}

fn as_str(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// A YAML text without its comments: two files may say the same in other words around it.
fn without_comments(text: &str) -> Vec<&str> {
    text.lines()
        .filter(|line| !line.trim_start().starts_with('#'))
        .collect()
}

fn of_kind<'a>(objects: &'a [Value], kinds: &[&str]) -> Vec<&'a Value> {
    objects
        .iter()
        .filter(|object| kinds.contains(&object["kind"].as_str().unwrap()))
        .collect()
}

fn items<'a>(value: &'a Value, field: &str) -> &'a [Value] {
    value[field].as_array().map_or(&[], Vec::as_slice)
}

/// Whether the pods of a workload have all of these labels; an empty selector takes every pod.
fn is_selected(selector: &Value, workload: &Value) -> bool {
    let labels = &workload["spec"]["template"]["metadata"]["labels"];
    let wanted = selector["matchLabels"]
        .as_object()
        .cloned()
        .unwrap_or_else(Map::new);
    wanted.iter().all(|(key, value)| labels[key] == *value)
}

fn port_names(workload: &Value) -> Vec<&str> {
    let containers = items(&workload["spec"]["template"]["spec"], "containers");
    let ports = containers
        .iter()
        .flat_map(|container| items(container, "ports"));
    ports.map(|port| port["name"].as_str().unwrap()).collect()
}

#[test]
fn a_network_policy_guards_every_port_of_the_shipped_pods() {
    network_policies_guard_every_port(&applied());
}

/// What no way to install may leave out: network policies, and admission rules that deny. In shadow mode the rule about the GPUs
/// that a container sees warns: pods of a device plugin's cluster do not know it yet.
pub fn assert_guards(objects: &[Value]) {
    network_policies_guard_every_port(objects);
    let is_shadow = of_kind(objects, &["ConfigMap"]).iter().any(|config_map| {
        let policy = config_map["data"]["policy.yaml"].as_str();
        policy.is_some_and(|policy| policy.lines().any(|line| line == "mode: shadow"))
    });
    let rules = [
        "devices",
        "exemptions",
        "nodes",
        "placement",
        "updates",
        "visible-devices",
    ];
    for rule in rules.map(|rule| format!("stowage-{rule}")) {
        let named = |kind: &str| {
            let of_kind = of_kind(objects, &[kind]);
            of_kind
                .into_iter()
                .find(|object| object["metadata"]["name"] == *rule)
                .cloned()
                .unwrap_or_default()
        };
        assert_eq!(
            named("ValidatingAdmissionPolicy")["spec"]["failurePolicy"],
            "Fail",
            "{rule}"
        );
        let actions = match is_shadow && rule == "stowage-visible-devices" {
            true => serde_json::json!(["Warn", "Audit"]),
            false => serde_json::json!(["Deny"]),
        };
        assert_eq!(
            named("ValidatingAdmissionPolicyBinding")["spec"]["validationActions"],
            actions,
            "{rule}"
        );
    }
}

fn network_policies_guard_every_port(applied: &[Value]) {
    let policies = of_kind(applied, &["NetworkPolicy"]);
    let workloads = of_kind(applied, &["Deployment", "DaemonSet"]);
    assert_eq!(workloads.len(), 2);
    for workload in &workloads {
        let name = &workload["metadata"]["name"];
        let of_it = policies
            .iter()
            .filter(|policy| is_selected(&policy["spec"]["podSelector"], workload));
        let mut open: Vec<&str> = Vec::new();
        let mut rules = Vec::new();
        for policy in of_it {
            let spec = &policy["spec"];
            assert_eq!(
                spec["policyTypes"],
                serde_json::json!(["Ingress"]),
                "{name}"
            );
            rules.extend(items(spec, "ingress"));
        }
        for rule in rules {
            let ports = items(rule, "ports").iter();
            let ports: Vec<&str> = ports.map(|port| port["port"].as_str().unwrap()).collect();
            // A rule without peers would admit every client.
            assert!(!items(rule, "from").is_empty(), "{name}: {rule}");
            for peer in items(rule, "from")
                .iter()
                .filter(|peer| peer["namespaceSelector"].is_null())
            {
                // Where the API server is, a policy cannot know.
                let is_api_server = ports == ["webhook"] && peer["ipBlock"].is_object();
                let reaches = workloads
                    .iter()
                    .any(|workload| is_selected(&peer["podSelector"], workload));
                assert!(is_api_server || reaches, "{name}: nobody is {peer}");
            }
            open.extend(ports);
        }
        open.sort_unstable();
        let mut ports = port_names(workload);
        ports.sort_unstable();
        assert_eq!(open, ports, "{name}");
    }
}

#[test]
fn the_memory_limit_exceeds_the_measured_use_with_a_margin() {
    let page = fs::read_to_string(root().join("docs/inside/measurements.md")).unwrap();
    let rows = page
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    let rows = rows.map(|row| row.split(" | ").collect::<Vec<_>>());
    let row = rows
        .into_iter()
        .find(|row| row.len() == 5 && row[0] == "5,000" && row[1] == "80,000");
    let row = row.expect("the page's table of memory has a row of 5,000 nodes and 80,000 pods");
    let peak = row[3].strip_suffix(" MiB").unwrap().parse::<u64>().unwrap();
    let applied = applied();
    let stowage = of_kind(&applied, &["Deployment"])[0];
    let container = &stowage["spec"]["template"]["spec"]["containers"][0];
    let limit = container["resources"]["limits"]["memory"].as_str().unwrap();
    assert_eq!(
        row[4],
        format!("`{limit}`"),
        "the table says what is shipped"
    );
    let limit = stowage_scheduling::units::Bytes::parse_quantity(limit)
        .unwrap()
        .0
        >> 20;
    assert!(
        limit * 2 >= peak * 3,
        "{limit} MiB for a measured peak of {peak} MiB: half as much again is room"
    );
}

#[test]
fn the_shipped_deployment_keeps_its_last_good_policy_on_a_volume() {
    let applied = applied();
    let pod = &of_kind(&applied, &["Deployment"])[0]["spec"]["template"]["spec"];
    let stowage = &items(pod, "containers")[0];
    let arguments = items(stowage, "args").iter().filter_map(Value::as_str);
    let folder = arguments
        .filter_map(|argument| argument.strip_prefix("--policy-cache="))
        .next();
    let mount = items(stowage, "volumeMounts")
        .iter()
        .find(|mount| mount["mountPath"].as_str() == folder);
    let mount = mount.expect("a volume at --policy-cache");
    assert!(!mount["readOnly"].as_bool().unwrap_or(false));
    let volume = items(pod, "volumes")
        .iter()
        .find(|volume| volume["name"] == mount["name"])
        .unwrap();
    // A container that crashes finds it again; a pod that is made again reads the ConfigMap.
    assert!(volume["emptyDir"]["sizeLimit"].is_string(), "{volume}");
}

#[test]
fn every_file_of_the_base_is_installed_or_made_into_a_config_map() {
    let kustomization = one("base/kustomization.yaml");
    let inputs = items(&kustomization, "configMapGenerator")
        .iter()
        .flat_map(|one| items(one, "files"));
    let named = items(&kustomization, "resources")
        .iter()
        .chain(inputs)
        .map(|file| as_str(file).to_owned());
    let mut named: Vec<String> = named.chain(["kustomization.yaml".to_owned()]).collect();
    named.sort();
    let files = fs::read_dir(root().join("manifests/base")).unwrap();
    let mut files: Vec<String> = files
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    assert_eq!(files, named);
    assert_guards(&applied());
    let kinds = applied();
    let kinds = kinds.iter().map(|object| as_str(&object["kind"]));
    assert!(
        !kinds.into_iter().any(|kind| kind == "Pod"),
        "no example is among them"
    );
}

#[test]
fn a_changed_configuration_of_the_scheduler_rolls_the_pods_and_a_changed_policy_does_not() {
    for file in ["base", "overlays/shadow", "components/device-plugin-nodes"] {
        let kustomization = one(&format!("{file}/kustomization.yaml"));
        for map in items(&kustomization, "configMapGenerator") {
            let is_policy = as_str(&map["name"]) == "stowage-policy";
            let keeps_its_name = map["options"]["disableNameSuffixHash"]
                .as_bool()
                .unwrap_or(false);
            assert_eq!(keeps_its_name, is_policy, "{file}: {}", map["name"]);
        }
    }
}

/// A change of overlay leaves the disruption budget of two replicas behind.
#[test]
fn the_disruption_budget_blocks_no_drain_whatever_the_number_of_replicas() {
    let applied = applied();
    let [budget] = of_kind(&applied, &["PodDisruptionBudget"])[..] else {
        panic!("one budget")
    };
    assert_eq!(budget["spec"]["maxUnavailable"], 1);
    assert!(budget["spec"]["minAvailable"].is_null());
    let single = text("components/single-replica/kustomization.yaml");
    assert!(
        !single.contains("delete"),
        "what a component leaves out stays on the API server"
    );
}

#[test]
fn the_component_of_turns_asks_the_socket_that_it_gives_the_agent() {
    let component = text("components/start-turns/kustomization.yaml");
    let policy = text("components/start-turns/start-turns.yaml");
    let socket = component
        .lines()
        .find_map(|line| line.trim().strip_prefix("value: --turns="))
        .unwrap();
    let folder = socket.rsplit_once('/').unwrap().0;
    for text in [&component, &policy] {
        assert!(
            text.contains(&format!("ountPath: {folder} "))
                || text.contains(&format!("dyn(\"{folder}\")"))
        );
    }
    let run = |arguments: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_stowage"))
            .args(arguments)
            .arg("--help")
            .output()
            .unwrap()
    };
    assert!(
        run(&["agent", &format!("--turns={socket}")])
            .status
            .success()
    );
    let help = String::from_utf8(run(&["wait-turn"]).stdout).unwrap();
    let asked = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(asked.contains(&format!("[default: {socket}]")), "{asked}");
}

#[test]
fn files_in_two_folders_are_identical() {
    let shipped = fs::read_to_string(root().join("policies/first-day-shadow/policy.yaml")).unwrap();
    assert_eq!(
        text("overlays/shadow/policy.yaml"),
        shipped,
        "Kustomize reads no file above its folder"
    );
    let base = text("base/kube-scheduler-config.yaml");
    let more = text("components/device-plugin-nodes/kube-scheduler-config.yaml");
    let (base, more) = (without_comments(&base), without_comments(&more));
    assert_eq!(
        more[..base.len()],
        base,
        "the one with device plugins begins as the other"
    );
    let names = more[base.len()..]
        .iter()
        .filter_map(|line| line.trim().strip_prefix("- name: "));
    let names: Vec<&str> = names.collect();
    assert!(
        names.contains(&"nvidia.com/gpu") && names.len() > 10,
        "{names:?}"
    );
    let shadow: Value = one("overlays/shadow/kube-scheduler-config.yaml");
    let managed = items(&shadow["extenders"][0], "managedResources")
        .iter()
        .map(|one| as_str(&one["name"]));
    let managed: Vec<&str> = managed.filter(|name| *name != "stowage.dev/vram").collect();
    assert_eq!(managed, names, "in shadow the same pods are watched");
}

#[test]
fn an_agent_runs_on_nodes_with_any_of_the_gpu_labels() {
    let applied = applied();
    let agent = &of_kind(&applied, &["DaemonSet"])[0]["spec"]["template"]["spec"];
    assert!(
        agent["nodeSelector"].is_null(),
        "a selector would require one label of all"
    );
    let required =
        &agent["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let terms = items(required, "nodeSelectorTerms");
    // Terms are alternatives; the expressions of one are not.
    let labels = terms.iter().map(|term| {
        let [one] = items(term, "matchExpressions") else {
            panic!("{term}")
        };
        assert_eq!(
            (&one["operator"], &one["values"]),
            (&"In".into(), &serde_json::json!(["true"]))
        );
        as_str(&one["key"])
    });
    let labels: Vec<&str> = labels.collect();
    let page = fs::read_to_string(root().join("docs/start/install.md")).unwrap();
    for label in &labels {
        assert!(
            page.contains(&format!("`{label}`")),
            "docs/start/install.md does not name {label}"
        );
    }
    for wanted in [
        "nvidia.com/gpu.present",
        "feature.node.kubernetes.io/pci-10de.present",
    ] {
        assert!(labels.contains(&wanted), "{labels:?}");
    }
}

#[test]
fn stowage_may_access_its_own_secret_and_config_map_only() {
    let applied = applied();
    let roles = of_kind(&applied, &["ClusterRole", "Role"]);
    let mut touched = Vec::new();
    for role in roles {
        for rule in items(role, "rules") {
            let of = |field: &str| items(rule, field).iter().map(as_str).collect::<Vec<_>>();
            assert!(
                !of("resources").contains(&"*") && !of("verbs").contains(&"*"),
                "{rule}"
            );
            for resource in of("resources")
                .into_iter()
                .filter(|one| ["secrets", "configmaps"].contains(one))
            {
                assert_eq!(
                    role["kind"], "Role",
                    "{resource}: in its own namespace only"
                );
                assert_eq!(of("verbs"), ["get", "update"], "{resource}");
                touched.push((resource.to_owned(), of("resourceNames").join(",")));
            }
        }
    }
    touched.sort();
    let own = [
        ("configmaps", "stowage-agents-ca"),
        ("secrets", "stowage-agents-tls"),
    ];
    assert_eq!(
        touched,
        own.map(|(resource, name)| (resource.to_owned(), name.to_owned()))
    );
    for (resource, name) in own {
        let kind = if resource == "secrets" {
            "Secret"
        } else {
            "ConfigMap"
        };
        let objects = of_kind(&applied, &[kind]);
        let object = objects
            .iter()
            .find(|object| object["metadata"]["name"] == name)
            .unwrap();
        // Whatever stood here would be put back by the next `kubectl apply`.
        assert!(
            object["data"].is_null() && object["stringData"].is_null() && object["type"].is_null()
        );
    }
}

#[test]
fn the_shipped_binary_knows_every_flag_of_the_manifests() {
    let applied = applied();
    let workloads = of_kind(&applied, &["Deployment", "DaemonSet"]);
    let files = [
        "--agents-tls-cert=a",
        "--agents-tls-key=b",
        "--admin-tls-cert=a",
        "--admin-tls-key=b",
    ];
    let mut lines: Vec<Vec<&str>> = Vec::new();
    for workload in workloads {
        let container = &items(&workload["spec"]["template"]["spec"], "containers")[0];
        lines.push(items(container, "args").iter().map(as_str).collect());
    }
    assert!(
        lines[0].contains(&"--agents-tls-secret=kube-system/stowage-agents-tls"),
        "{:?}",
        lines[0]
    );
    // As the component cert-manager has it.
    let own = |argument: &&str| {
        argument.starts_with("--agents-tls-secret") || argument.starts_with("--agents-ca-")
    };
    let of_files = lines[0]
        .iter()
        .copied()
        .filter(|argument| !own(argument))
        .chain(files);
    lines.push(of_files.collect());
    for line in lines {
        let mut stowage = Command::new(env!("CARGO_BIN_EXE_stowage"));
        // It reads all arguments before it helps.
        let said = stowage.args(&line).arg("--help").output().unwrap();
        assert!(
            said.status.success(),
            "{line:?}: {}",
            String::from_utf8_lossy(&said.stderr)
        );
    }
}

#[test]
fn advice_knows_gpu_nodes_by_the_labels_that_the_agents_daemon_set_selects() {
    let applied = applied();
    let agents = of_kind(&applied, &["DaemonSet"]);
    let affinity = &agents[0]["spec"]["template"]["spec"]["affinity"]["nodeAffinity"];
    let required = &affinity["requiredDuringSchedulingIgnoredDuringExecution"];
    let terms = items(required, "nodeSelectorTerms").iter();
    let selected: Vec<&str> = terms
        .map(|term| as_str(&items(term, "matchExpressions")[0]["key"]))
        .collect();
    assert_eq!(selected, stowage_scheduling::ledger::GPU_LABELS);
}

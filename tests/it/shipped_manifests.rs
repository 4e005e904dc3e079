//! The shipped manifests agree with each other: needs no cluster.

use serde_json::{Map, Value};
use std::fs;
use std::path::Path;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Everything that `kubectl apply -f manifests/` applies.
fn applied() -> Vec<Value> {
    let files = fs::read_dir(root().join("manifests")).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.is_file());
    files.flat_map(|file| objects(&fs::read_to_string(file).unwrap())).collect()
}

fn objects(text: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(text).unwrap()
}

fn of_kind<'a>(objects: &'a [Value], kinds: &[&str]) -> Vec<&'a Value> {
    objects.iter().filter(|object| kinds.contains(&object["kind"].as_str().unwrap())).collect()
}

fn items<'a>(value: &'a Value, field: &str) -> &'a [Value] {
    value[field].as_array().map_or(&[], Vec::as_slice)
}

/// Whether the pods of a workload have all of these labels; an empty selector takes every pod.
fn selects(selector: &Value, workload: &Value) -> bool {
    let labels = &workload["spec"]["template"]["metadata"]["labels"];
    let wanted = selector["matchLabels"].as_object().cloned().unwrap_or_else(Map::new);
    wanted.iter().all(|(key, value)| labels[key] == *value)
}

fn port_names(workload: &Value) -> Vec<&str> {
    let containers = items(&workload["spec"]["template"]["spec"], "containers");
    let ports = containers.iter().flat_map(|container| items(container, "ports"));
    ports.map(|port| port["name"].as_str().unwrap()).collect()
}

#[test]
fn s2_a_network_policy_guards_every_port_of_the_shipped_pods() {
    let applied = applied();
    let policies = of_kind(&applied, &["NetworkPolicy"]);
    let workloads = of_kind(&applied, &["Deployment", "DaemonSet"]);
    assert_eq!(workloads.len(), 2);
    for workload in &workloads {
        let name = &workload["metadata"]["name"];
        let of_it = policies.iter().filter(|policy| selects(&policy["spec"]["podSelector"], workload));
        let of_it: Vec<_> = of_it.collect();
        assert_eq!(of_it.len(), 1, "{name}");
        let spec = &of_it[0]["spec"];
        assert_eq!(spec["policyTypes"], serde_json::json!(["Ingress"]), "{name}");
        let mut open: Vec<&str> = Vec::new();
        for rule in items(spec, "ingress") {
            let ports = items(rule, "ports").iter().map(|port| port["port"].as_str().unwrap());
            open.extend(ports);
            // A rule without peers would admit every client.
            assert!(!items(rule, "from").is_empty(), "{name}: {rule}");
            for peer in items(rule, "from").iter().filter(|peer| peer["namespaceSelector"].is_null()) {
                let reaches = workloads.iter().any(|workload| selects(&peer["podSelector"], workload));
                assert!(reaches, "{name}: nobody is {peer}");
            }
        }
        open.sort_unstable();
        let mut ports = port_names(workload);
        ports.sort_unstable();
        assert_eq!(open, ports, "{name}");
    }
}

#[test]
fn s5_the_memory_limit_exceeds_the_measured_use_with_a_margin() {
    let page = fs::read_to_string(root().join("docs/measurements.md")).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    let rows = rows.map(|row| row.split(" | ").collect::<Vec<_>>());
    let row = rows.into_iter().find(|row| row.len() == 5 && row[0] == "5,000" && row[1] == "80,000");
    let row = row.expect("the page's table of memory has a row of 5,000 nodes and 80,000 pods");
    let peak = row[3].strip_suffix(" MiB").unwrap().parse::<u64>().unwrap();
    let applied = applied();
    let stowage = of_kind(&applied, &["Deployment"])[0];
    let container = &stowage["spec"]["template"]["spec"]["containers"][0];
    let limit = container["resources"]["limits"]["memory"].as_str().unwrap();
    assert_eq!(row[4], format!("`{limit}`"), "the table says what is shipped");
    let limit = stowage::units::Bytes::parse_quantity(limit).unwrap().0 >> 20;
    assert!(
        limit * 2 >= peak * 3,
        "{limit} MiB for a measured peak of {peak} MiB: half as much again is room"
    );
}

#[test]
fn b8_the_shipped_deployment_keeps_its_last_good_policy_where_a_restart_finds_it() {
    let applied = applied();
    let pod = &of_kind(&applied, &["Deployment"])[0]["spec"]["template"]["spec"];
    let stowage = &items(pod, "containers")[0];
    let arguments = items(stowage, "args").iter().filter_map(Value::as_str);
    let folder = arguments.filter_map(|argument| argument.strip_prefix("--policy-cache=")).next();
    let mount = items(stowage, "volumeMounts").iter().find(|mount| mount["mountPath"].as_str() == folder);
    let mount = mount.expect("a volume at --policy-cache");
    assert!(!mount["readOnly"].as_bool().unwrap_or(false));
    let volume = items(pod, "volumes").iter().find(|volume| volume["name"] == mount["name"]).unwrap();
    // A container that crashes finds it again; a pod that is made anew reads the ConfigMap.
    assert!(volume["emptyDir"]["sizeLimit"].is_string(), "{volume}");
}

//! Objects as an API server shows them, converted for kube-scheduler's filters.

use super::*;
use serde_json::{Value, json};
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::kube_filters::node::{
    TaintEffect, Toleration, TolerationRule, UNSCHEDULABLE_TAINT,
};
use stowage_scheduling::kube_filters::{
    AntiAffinity, AssumedNodeChange, ClusterFilters, FilterVerdict, NamespaceScope,
};
use stowage_scheduling::vocabulary::label_selector::{Requirement, Rule, Selector};

fn pod(spec: Value) -> Pod {
    with_status(spec, Value::Null)
}

fn with_status(mut spec: Value, status: Value) -> Pod {
    if spec.get("containers").is_none() {
        spec["containers"] = json!([]);
    }
    let metadata =
        json!({ "name": "p", "namespace": "team", "uid": "p", "labels": { "app": "chat" } });
    serde_json::from_value(json!({ "metadata": metadata, "spec": spec, "status": status })).unwrap()
}

fn node(spec: Value, allocatable: Value) -> FilterNode {
    let object = json!({
        "metadata": { "name": "a", "labels": { "zone": "z" } },
        "spec": spec,
        "status": { "allocatable": allocatable },
    });
    filter_node(&serde_json::from_value(object).unwrap()).unwrap()
}

fn named(pod: &Pod) -> Vec<(String, u64)> {
    let amounts = requirements(pod).amounts;
    amounts
        .nonzero()
        .map(|(name, amount)| (name.to_owned(), amount))
        .collect()
}

fn unsupported(spec: Value) -> Option<UnsupportedRule> {
    requirements(&pod(spec)).unsupported
}

#[test]
fn gpus_and_their_memory_are_left_to_the_ledger() {
    let limits = json!({
        "cpu": "1500m", "memory": "1Gi", "stowage.dev/vram": "40Gi", "nvidia.com/gpu": "1",
        "nvidia.com/mig-1g.5gb": "1", "example.com/nic": "2", "hugepages-2Mi": "4Mi", "ephemeral-storage": "1k",
    });
    let pod =
        pod(json!({ "containers": [{ "name": "engine", "resources": { "limits": limits } }] }));
    let expected = [
        ("cpu", 1500),
        ("memory", 1 << 30),
        ("ephemeral-storage", 1000),
        ("example.com/nic", 2),
        ("hugepages-2Mi", 4 << 20),
    ];
    assert_eq!(
        named(&pod),
        expected.map(|(name, amount)| (name.to_owned(), amount))
    );
}

#[test]
fn a_pods_own_resources_stand_for_its_containers_and_overhead_comes_on_top() {
    let pod = pod(json!({
        "containers": [{ "name": "engine", "resources": { "requests": { "cpu": "1", "memory": "100m" } } }],
        "resources": { "requests": { "cpu": "3" } },
        "overhead": { "cpu": "250m" },
    }));
    assert_eq!(
        named(&pod),
        [("cpu".to_owned(), 3250), ("memory".to_owned(), 1)]
    );
}

#[test]
fn a_resized_container_counts_with_the_largest_of_what_it_asks_for_has_and_runs_with() {
    let spec = json!({
        "nodeName": "a",
        "containers": [{ "name": "engine", "resources": { "requests": { "cpu": "4" } } }],
    });
    let taken = |conditions: Value| {
        let status = json!({
            "containerStatuses": [{
                "name": "engine", "ready": true, "restartCount": 0, "image": "", "imageID": "",
                "resources": { "requests": { "cpu": "2" } }, "allocatedResources": { "cpu": "3" },
            }],
            "conditions": conditions,
        });
        footprint(&with_status(spec.clone(), status))
            .unwrap()
            .amounts
            .cpu
            .0
    };
    assert_eq!(taken(json!([])), 4000);
    assert_eq!(
        taken(json!([{ "type": "PodResizePending", "status": "True", "reason": "Infeasible" }])),
        3000
    );
}

#[test]
fn an_unreadable_quantity_is_infinite_for_a_pod_and_zero_for_a_node() {
    let asks = json!([{ "name": "engine", "resources": { "requests": { "cpu": "much" } } }]);
    assert_eq!(
        named(&pod(json!({ "containers": asks }))),
        [("cpu".to_owned(), u64::MAX)]
    );
    let machine = node(
        json!({}),
        json!({ "cpu": "much", "memory": "1Ki", "pods": "-1" }),
    );
    assert_eq!(
        (
            machine.allocatable.cpu.0,
            machine.allocatable.memory.0,
            machine.pods
        ),
        (0, 1024, 0)
    );
}

#[test]
fn a_cordoned_node_has_the_taint_that_says_so() {
    let machine = node(
        json!({ "unschedulable": true, "taints": [
            { "key": "soft", "effect": "PreferNoSchedule" }, { "key": "gpu", "value": "h100", "effect": "NoExecute" },
        ] }),
        json!({ "pods": "110" }),
    );
    let taints: Vec<_> = machine
        .taints
        .iter()
        .map(|taint| (taint.key.as_str(), taint.effect))
        .collect();
    assert_eq!(
        taints,
        [
            ("gpu", TaintEffect::NoExecute),
            (UNSCHEDULABLE_TAINT, TaintEffect::NoSchedule)
        ]
    );
    assert_eq!(machine.pods, 110);
}

#[test]
fn a_toleration_is_read_and_one_that_is_not_understood_tolerates_nothing() {
    let tolerations = requirements(&pod(json!({ "tolerations": [
        { "key": "gpu", "value": "h100" },
        { "operator": "Exists", "effect": "NoExecute" },
        { "key": "gpu", "operator": "Gt", "value": "3" },
        { "key": "gpu", "operator": "Exists", "effect": "PreferNoSchedule" },
    ] })))
    .tolerations;
    let equal = TolerationRule::Equal("h100".into());
    assert_eq!(
        tolerations,
        [
            Toleration {
                key: "gpu".into(),
                rule: equal,
                effect: None
            },
            Toleration {
                key: String::new(),
                rule: TolerationRule::Exists,
                effect: Some(TaintEffect::NoExecute)
            },
        ]
    );
}

fn required(terms: Value) -> Value {
    json!({ "affinity": { "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": terms },
    } } })
}

#[test]
fn a_node_affinity_is_read_with_its_fields() {
    let terms = json!([{
        "matchExpressions": [{ "key": "mem", "operator": "Gt", "values": ["79"] }],
        "matchFields": [{ "key": "metadata.name", "operator": "NotIn", "values": ["a"] }],
    }]);
    let terms = requirements(&pod(required(terms))).node_affinity.unwrap();
    assert_eq!(
        terms[0].labels,
        [Requirement {
            key: "mem".into(),
            rule: Rule::Above(79)
        }]
    );
    assert_eq!(terms[0].name, [Rule::NotIn(["a".to_owned()].into())]);
}

#[test]
fn a_node_affinity_that_cannot_be_read_is_unsupported() {
    for terms in [
        json!([{ "matchExpressions": [{ "key": "mem", "operator": "Near", "values": ["79"] }] }]),
        json!([{ "matchFields": [{ "key": "spec.podCIDR", "operator": "In", "values": ["a"] }] }]),
    ] {
        assert_eq!(
            unsupported(required(terms.clone())),
            Some(UnsupportedRule::Unreadable),
            "{terms}"
        );
    }
}

#[test]
fn parts_of_a_pod_that_filter_nodes_in_an_unsupported_way_are_named() {
    let near = json!([{ "topologyKey": "zone", "labelSelector": {} }]);
    let volume = |source: &str| json!({ "volumes": [{ "name": "v", source: {} }] });
    let claim =
        json!({ "volumes": [{ "name": "v", "persistentVolumeClaim": { "claimName": "c" } }] });
    let spread = |rule: &str| {
        let constraint = json!({ "maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": rule });
        json!({ "topologySpreadConstraints": [constraint] })
    };
    let affinity = |kind: &str, rule: &str| json!({ "affinity": { kind: { rule: near } } });
    let requires = "requiredDuringSchedulingIgnoredDuringExecution";
    for (spec, expected) in [
        (json!({}), None),
        (
            affinity("podAffinity", requires),
            Some(UnsupportedRule::InterPodAffinity),
        ),
        (
            affinity("podAntiAffinity", requires),
            Some(UnsupportedRule::InterPodAffinity),
        ),
        (
            json!({ "affinity": { "podAffinity": {}, "podAntiAffinity": {} } }),
            None,
        ),
        (
            spread("DoNotSchedule"),
            Some(UnsupportedRule::TopologySpread),
        ),
        (spread("ScheduleAnyway"), None),
        (
            json!({ "resourceClaims": [{ "name": "nic" }] }),
            Some(UnsupportedRule::ResourceClaims),
        ),
        (claim, None),
        (volume("ephemeral"), None),
        (volume("iscsi"), Some(UnsupportedRule::Volumes)),
        (volume("emptyDir"), None),
        (volume("configMap"), None),
        (volume("projected"), None),
        (
            json!({ "schedulingGates": [{ "name": "stowage.dev/plan" }] }),
            None,
        ),
        (
            json!({ "schedulingGates": [{ "name": "other" }] }),
            Some(UnsupportedRule::SchedulingGate),
        ),
        (
            json!({ "nodeName": "a" }),
            Some(UnsupportedRule::NodeNamePreset),
        ),
    ] {
        assert_eq!(unsupported(spec.clone()), expected, "{spec}");
    }
}

#[test]
fn claims_are_read_by_name_and_those_of_ephemeral_volumes_after_pod_and_volume() {
    let mut pod = pod(json!({
        "nodeName": "a",
        "volumes": [
            { "name": "weights", "persistentVolumeClaim": { "claimName": "llama" } },
            { "name": "scratch", "ephemeral": {} },
            { "name": "shm", "emptyDir": {} },
        ],
    }));
    pod.metadata.name = Some("engine".into());
    let names: Vec<_> = requirements(&pod)
        .claims
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(names, ["llama", "engine-scratch"]);
    assert_eq!(footprint(&pod).unwrap().volumes, 2);
}

#[test]
fn the_required_anti_affinity_of_a_pod_is_read() {
    let far = |term: Value| {
        let rule = json!({ "requiredDuringSchedulingIgnoredDuringExecution": [term] });
        let spec = json!({ "nodeName": "a", "affinity": { "podAntiAffinity": rule } });
        footprint(&pod(spec)).unwrap().repels[0].clone()
    };
    let of = |namespaces: &[&str]| {
        NamespaceScope::Of(namespaces.iter().map(|name| (*name).to_owned()).collect())
    };
    let own = far(
        json!({ "topologyKey": "zone", "labelSelector": { "matchLabels": { "app": "chat" } } }),
    );
    assert_eq!(
        (&own.scope, own.topology.as_str()),
        (&of(&["team"]), "zone")
    );
    assert!(own.may_exclude(&requirements(&pod(json!({})))));
    assert_eq!(
        far(json!({ "topologyKey": "zone", "namespaces": ["x", "y"] })).scope,
        of(&["x", "y"])
    );
    assert_eq!(
        far(json!({ "topologyKey": "zone" })).selector,
        Selector::Nothing
    );
    assert_eq!(
        far(json!({ "topologyKey": "zone", "namespaceSelector": {} })).scope,
        NamespaceScope::Selected
    );
}

#[test]
fn ports_of_the_host_are_taken_and_those_of_the_pod_alone_are_not() {
    let ports = |spec: Value| {
        let all = requirements(&pod(spec)).ports;
        all.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let containers = json!([{ "name": "engine", "ports": [
        { "containerPort": 8000 }, { "containerPort": 9000, "hostPort": 90, "protocol": "UDP", "hostIP": "10.0.0.1" },
    ] }]);
    let sidecar = json!([
        { "name": "proxy", "restartPolicy": "Always", "ports": [{ "containerPort": 1, "hostPort": 1 }] },
        { "name": "fetch", "ports": [{ "containerPort": 2, "hostPort": 2 }] },
    ]);
    assert_eq!(
        ports(json!({ "containers": containers, "initContainers": sidecar })),
        ["1/TCP on 0.0.0.0", "90/UDP on 10.0.0.1"]
    );
    assert_eq!(
        ports(json!({ "containers": containers, "hostNetwork": true })),
        ["8000/TCP on 0.0.0.0", "90/UDP on 10.0.0.1"]
    );
}

#[test]
fn a_pod_counts_on_its_node_until_it_is_gone_or_has_ended() {
    let on_a = |phase: &str| with_status(json!({ "nodeName": "a" }), json!({ "phase": phase }));
    assert!(footprint(&on_a("Running")).is_some());
    assert_eq!(footprint(&on_a("Succeeded")), None);
    assert_eq!(footprint(&on_a("Failed")), None);
    assert_eq!(footprint(&pod(json!({}))), None);
    let mut leaving = on_a("Running");
    leaving.metadata.deletion_timestamp =
        serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    assert!(footprint(&leaving).is_some());
}

#[test]
fn objects_as_a_cluster_shows_them_make_a_verdict() {
    let mut view = ClusterFilters::default();
    view.set_node(node(
        json!({}),
        json!({ "cpu": "4", "memory": "8Gi", "pods": "2" }),
    ));
    let asks = |cpu: &str| {
        pod(
            json!({ "containers": [{ "name": "engine", "resources": { "requests": { "cpu": cpu } } }] }),
        )
    };
    let uid = |uid: &str| PodUid::parse(uid).unwrap();
    let verdict = |view: &ClusterFilters, cpu: &str| {
        let name = NodeName::parse("a").unwrap();
        view.snapshot().verdict(
            &uid("new"),
            &requirements(&asks(cpu)),
            &name,
            &AssumedNodeChange::default(),
        )
    };
    assert_eq!(verdict(&view, "4"), FilterVerdict::Accepts);
    let mut bound = asks("1500m");
    bound.spec.as_mut().unwrap().node_name = Some("a".into());
    view.set_pod(uid("old"), footprint(&bound).unwrap());
    assert_eq!(verdict(&view, "2500m"), FilterVerdict::Accepts);
    assert!(matches!(verdict(&view, "2501m"), FilterVerdict::Rejects(_)));
}

/// A pod may have a megabyte of them, and they are looked at for each node.
#[test]
fn a_pod_with_thousands_of_rules_is_unsupported() {
    let hosts = |n: usize| (0..n).map(|n| format!("host-{n}")).collect::<Vec<_>>();
    let names = |hosts: Vec<String>| json!([{ "key": "kubernetes.io/hostname", "operator": "In", "values": hosts }]);
    let required = |terms: Value| {
        let required = json!({ "nodeSelectorTerms": terms });
        json!({ "affinity": { "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": required } } })
    };
    let few = requirements(&pod(required(
        json!([{ "matchExpressions": names(hosts(900)) }]),
    )));
    assert_eq!(
        (few.unsupported, few.node_affinity.map(|terms| terms.len())),
        (None, Some(1))
    );
    let term = |host: String| json!({ "matchExpressions": names(vec![host]) });
    let tolerations: Vec<Value> = hosts(2000)
        .into_iter()
        .map(|key| json!({ "key": key, "operator": "Exists" }))
        .collect();
    let selector: Value = hosts(2000)
        .into_iter()
        .map(|key| (key, json!("1")))
        .collect::<serde_json::Map<_, _>>()
        .into();
    for spec in [
        required(hosts(2000).into_iter().map(term).collect()),
        required(json!([{ "matchExpressions": names(hosts(2000)) }])),
        json!({ "tolerations": tolerations }),
        json!({ "nodeSelector": selector }),
    ] {
        let kept = requirements(&pod(spec));
        assert_eq!(kept.unsupported, Some(UnsupportedRule::TooManyRules));
        assert!(
            kept.node_affinity.is_none()
                && kept.tolerations.is_empty()
                && kept.node_selector.is_empty()
        );
    }
}

/// They are compared with every pod that waits.
#[test]
fn a_bound_pods_anti_affinity_with_thousands_of_rules_may_exclude_any_pod_in_its_topologies() {
    let values = (0..2000).map(|n| format!("app-{n}")).collect::<Vec<_>>();
    let apps = |apps: &[String]| json!({ "matchExpressions": [{ "key": "app", "operator": "In", "values": apps }] });
    let bound = |terms: &[Value]| {
        let required = json!({ "requiredDuringSchedulingIgnoredDuringExecution": terms });
        pod(json!({ "nodeName": "a", "affinity": { "podAntiAffinity": required } }))
    };
    let repels = |terms: &[Value]| footprint(&bound(terms)).unwrap().repels;
    let own = NamespaceScope::Of(["team".to_owned()].into());
    let few = json!({ "topologyKey": "rack", "labelSelector": apps(&values[..900]) });
    assert!(
        repels(std::slice::from_ref(&few))
            .iter()
            .all(|one| one.selector != Selector::EVERYTHING)
    );
    let many = json!({ "topologyKey": "zone", "labelSelector": apps(&values) });
    let kept = repels(&[many.clone(), few.clone(), few.clone()]);
    let all = |topology: &str, scope| AntiAffinity {
        scope,
        selector: Selector::EVERYTHING,
        topology: topology.into(),
    };
    let kept: Vec<_> = kept.iter().map(|one| (**one).clone()).collect();
    assert_eq!(kept, [all("rack", own.clone()), all("zone", own)]);
    // Many terms, and names of namespaces.
    let terms: Vec<Value> = values
        .iter()
        .map(|app| json!({ "topologyKey": "zone", "labelSelector": apps(std::slice::from_ref(app)) }))
        .collect();
    assert_eq!(repels(&terms).len(), 1);
    for wide in [
        json!({ "namespaces": values }),
        json!({ "namespaceSelector": {}, "labelSelector": apps(&values) }),
    ] {
        let mut term = wide.clone();
        term["topologyKey"] = json!("zone");
        let kept = repels(&[term]);
        assert_eq!(
            kept.iter().map(|one| (**one).clone()).collect::<Vec<_>>(),
            [all("zone", NamespaceScope::Selected)]
        );
    }
}

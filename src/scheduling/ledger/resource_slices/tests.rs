//! Which nodes slices publish, case by case and, in any order of changes, against an oracle that looks at all slices again.

use super::*;
use crate::ledger::{AllocationFailure, AssumeResult};
use crate::placing::fit::Misfit;
use crate::policy::Policy;
use crate::testkit::{LedgerCluster, demand_of, gpu, gpu_at, h100, node, uid, whole_gpu};
use crate::units::Bytes;
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::gpu::Device;
use crate::vocabulary::label_selector::Requirement;
use crate::vocabulary::node::NodeKind;
use proptest::prelude::*;

thread_local! {
    /// How often a node was compared with the slices.
    pub(super) static CHECKED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

const GPU_DRIVER: &str = "gpu.nvidia.com";

fn slice(
    driver: &str,
    generation: i64,
    slices_of_pool: i64,
    devices: Vec<PublishedDevices>,
) -> DeviceSlice {
    DeviceSlice {
        driver: driver.into(),
        pool: "pool".into(),
        scope: "".into(),
        generation,
        slices_of_pool,
        devices,
    }
}

fn on(name: &str) -> Vec<PublishedDevices> {
    vec![PublishedDevices::OnNode(node(name))]
}

fn shared(uuids: &[&str]) -> Vec<PublishedDevices> {
    let uuids = DeviceUuids::Known(uuids.iter().map(|uuid| gpu(uuid)).collect());
    vec![PublishedDevices::Shared { terms: None, uuids }]
}

fn set(ledger: &mut LedgerCluster, name: &str, slice: DeviceSlice) -> Vec<NodeName> {
    ledger
        .ledger_mut()
        .set_slice(&name.into(), Some(slice))
        .nodes
}

fn delete(ledger: &mut LedgerCluster, name: &str) {
    ledger.ledger_mut().set_slice(&name.into(), None);
}

/// Nodes `a` and `b`, each with two GPUs.
fn two_nodes() -> LedgerCluster {
    LedgerCluster::new(&[("a", 2), ("b", 2)])
}

/// The nodes on which a pod would get a GPU.
fn open(ledger: &mut LedgerCluster) -> Vec<String> {
    let snapshot = ledger.snapshot();
    let open = snapshot
        .nodes()
        .iter()
        .filter(|node| node.kind == NodeKind::Stowage);
    open.map(|node| node.name.to_string()).collect()
}

#[test]
fn a_node_is_published_while_a_gpu_driver_has_a_slice_for_it() {
    let mut ledger = two_nodes();
    set(&mut ledger, "s", slice(GPU_DRIVER, 1, 1, on("a")));
    assert_eq!(open(&mut ledger), ["b"]);
    ledger.add_waiting("pod", demand_of(1 << 30, 1, Sharing::Shared, 0));
    let refused = ledger.ledger_mut().assume(&uid("pod"), &node("a"));
    assert_eq!(
        refused,
        Err(AllocationFailure::NoLongerFits(Misfit::DraNode))
    );
    assert!(matches!(
        ledger.ledger_mut().assume(&uid("pod"), &node("b")),
        Ok(AssumeResult::New(_))
    ));
    delete(&mut ledger, "s");
    assert_eq!(open(&mut ledger), ["a", "b"]);
}

#[test]
fn slices_of_other_drivers_and_slices_without_devices_publish_no_node() {
    let mut ledger = two_nodes();
    set(
        &mut ledger,
        "nics",
        slice("networking.example.com", 1, 1, on("a")),
    );
    set(
        &mut ledger,
        "domains",
        slice("compute-domain.nvidia.com", 1, 1, shared(&["GPU-a-0"])),
    );
    set(&mut ledger, "empty", slice(GPU_DRIVER, 1, 1, Vec::new()));
    assert_eq!(open(&mut ledger), ["a", "b"]);
}

#[test]
fn another_list_of_gpu_drivers_takes_and_gives_back_nodes() {
    let mut ledger = two_nodes();
    set(&mut ledger, "s", slice("gpu.example.com", 1, 1, on("a")));
    assert_eq!(open(&mut ledger), ["a", "b"]);
    let mut policy = Policy::default();
    policy.dra.gpu_drivers = vec!["gpu.example.com".into()];
    ledger.ledger_mut().set_policy(policy);
    assert_eq!(open(&mut ledger), ["b"]);
    ledger.ledger_mut().set_policy(Policy::default());
    assert_eq!(open(&mut ledger), ["a", "b"]);
}

#[test]
fn shared_devices_publish_the_nodes_whose_gpus_they_are() {
    let mut ledger = two_nodes();
    set(
        &mut ledger,
        "s",
        slice(GPU_DRIVER, 1, 1, shared(&["GPU-b-1", "GPU-elsewhere"])),
    );
    assert_eq!(open(&mut ledger), ["a"]);
    let unknown = PublishedDevices::Shared {
        terms: None,
        uuids: DeviceUuids::Unknown,
    };
    set(&mut ledger, "s", slice(GPU_DRIVER, 1, 1, vec![unknown]));
    assert!(
        open(&mut ledger).is_empty(),
        "a device of which nothing says what it is may be any"
    );
    let in_rack = NodeTerm {
        labels: vec![Requirement::equals("rack", "7")],
        name: Vec::new(),
    };
    let racked = PublishedDevices::Shared {
        terms: Some(vec![in_rack]),
        uuids: DeviceUuids::Unknown,
    };
    set(&mut ledger, "s", slice(GPU_DRIVER, 1, 1, vec![racked]));
    assert_eq!(open(&mut ledger), ["a", "b"]);
    ledger.ledger_mut().set_labels(
        &node("b"),
        BTreeMap::from([("rack".to_owned(), "7".to_owned())]),
    );
    assert_eq!(open(&mut ledger), ["a"]);
}

#[test]
fn a_part_of_a_gpu_and_a_gpu_that_is_not_known_yet_count_as_published() {
    let mut ledger = two_nodes();
    let part = Device {
        parent: Some(gpu("GPU-card")),
        ..whole_gpu(gpu("MIG-1"), 0, Bytes::gib(40))
    };
    ledger.add_node("cut", vec![part]);
    ledger.ledger_mut().set_node(
        &node("labelled"),
        NodeKind::Stowage,
        Some(vec![whole_gpu(gpu("index-0"), 0, Bytes::gib(80))]),
    );
    set(
        &mut ledger,
        "s",
        slice(GPU_DRIVER, 1, 1, shared(&["GPU-card"])),
    );
    assert_eq!(
        open(&mut ledger),
        ["a", "b"],
        "the labelled node's GPU may be the published one"
    );
    ledger
        .ledger_mut()
        .report_devices(&node("labelled"), [h100("labelled", 0)].into())
        .unwrap();
    assert_eq!(open(&mut ledger), ["a", "b", "labelled"]);
}

#[test]
fn an_older_generation_counts_until_the_newer_one_is_complete() {
    let mut ledger = two_nodes();
    set(&mut ledger, "old-a", slice(GPU_DRIVER, 1, 2, on("a")));
    set(&mut ledger, "old-b", slice(GPU_DRIVER, 1, 2, on("b")));
    set(&mut ledger, "new-1", slice(GPU_DRIVER, 2, 2, Vec::new()));
    assert!(
        open(&mut ledger).is_empty(),
        "the new generation is incomplete"
    );
    set(&mut ledger, "new-2", slice(GPU_DRIVER, 2, 2, on("b")));
    assert_eq!(open(&mut ledger), ["a"]);
    delete(&mut ledger, "new-1");
    assert!(open(&mut ledger).is_empty(), "it is incomplete again");
}

#[test]
fn pods_that_were_there_before_the_slice_keep_their_charge_and_are_named() {
    let mut ledger = two_nodes();
    ledger.add_waiting("pod", demand_of(1 << 30, 1, Sharing::Shared, 0));
    ledger.ledger_mut().assume(&uid("pod"), &node("a")).unwrap();
    ledger
        .ledger_mut()
        .confirm(&uid("pod"), &node("a"), Some(Arc::from([gpu_at("a", 0)])));
    assert_eq!(
        set(&mut ledger, "s", slice(GPU_DRIVER, 1, 1, on("a"))),
        [node("a")]
    );
    assert_eq!(ledger.free_gib("a").iter().min(), Some(&71));
    assert!(
        set(&mut ledger, "s", slice(GPU_DRIVER, 2, 1, on("a"))).is_empty(),
        "it was published before"
    );
    assert!(
        set(&mut ledger, "t", slice(GPU_DRIVER, 2, 1, on("b"))).is_empty(),
        "no pod is there"
    );
}

#[test]
fn a_node_whose_slices_are_gone_stays_the_drivers_until_pods_with_claims_are_gone() {
    let mut ledger = two_nodes();
    set(&mut ledger, "s", slice(GPU_DRIVER, 1, 1, on("a")));
    ledger.ledger_mut().set_device_claims(&node("a"), true);
    ledger.ledger_mut().set_device_claims(&node("b"), true);
    delete(&mut ledger, "s");
    assert_eq!(
        open(&mut ledger),
        ["b"],
        "a claim for a network card takes no node"
    );
    ledger.ledger_mut().set_device_claims(&node("a"), false);
    assert_eq!(open(&mut ledger), ["a", "b"]);
}

#[test]
fn a_reservation_on_a_node_that_is_published_ends() {
    let mut ledger = two_nodes();
    ledger.add_waiting("pod", demand_of(1 << 30, 1, Sharing::Shared, 0));
    let reservation = crate::vocabulary::placement::Reservation {
        node: node("a"),
        devices: Arc::from([gpu_at("a", 0)]),
        victims: Arc::from([]),
        deadline: ledger.ledger().now() + crate::units::Millis::seconds(60),
    };
    ledger
        .ledger_mut()
        .reserve(&uid("pod"), reservation)
        .unwrap();
    set(&mut ledger, "s", slice(GPU_DRIVER, 1, 1, on("a")));
    assert!(ledger.ledger_mut().assume(&uid("pod"), &node("a")).is_err());
    assert_eq!(ledger.advance(1), [uid("pod")]);
}

#[test]
fn a_slice_of_thousands_of_devices_costs_what_one_costs() {
    let mut ledger = two_nodes();
    let thousands: Vec<String> = (0..1000).map(|n| format!("GPU-{n}")).collect();
    let named: Vec<&str> = thousands.iter().map(String::as_str).collect();
    set(&mut ledger, "s", slice(GPU_DRIVER, 1, 1, shared(&named)));
    assert_eq!(open(&mut ledger), ["a", "b"]);
    set(
        &mut ledger,
        "s",
        slice(
            GPU_DRIVER,
            2,
            1,
            shared(&[&named[..], &["GPU-a-1"]].concat()),
        ),
    );
    assert_eq!(open(&mut ledger), ["b"]);
}

#[test]
fn shared_slices_of_other_drivers_are_compared_with_no_node() {
    let mut ledger = two_nodes();
    let before = CHECKED.get();
    let devices = || {
        vec![PublishedDevices::Shared {
            terms: None,
            uuids: DeviceUuids::Unknown,
        }]
    };
    for number in 0..100 {
        set(
            &mut ledger,
            &number.to_string(),
            slice("fabric.example.com", 1, 100, devices()),
        );
    }
    set(
        &mut ledger,
        "7",
        slice("fabric.example.com", 2, 1, devices()),
    );
    delete(&mut ledger, "8");
    assert_eq!(
        CHECKED.get() - before,
        0,
        "there may be thousands of them, and of nodes"
    );
}

/// A change of a cluster of three nodes, four slices in two pools and four pods.
#[derive(Debug, Clone)]
enum Step {
    Slice {
        name: u8,
        pool: u8,
        scope: u8,
        gpu_driver: bool,
        generation: i64,
        of: i64,
        devices: Vec<PublishedDevices>,
    },
    Delete(u8),
    NodeGone(u8),
    NodeThere(u8),
    Report(u8, u8),
    Label(u8, bool),
    Drivers(bool),
    Assume(u8, u8),
    Release(u8),
    Reload,
}

fn devices() -> impl Strategy<Value = PublishedDevices> {
    let uuids = prop_oneof![
        Just(DeviceUuids::Unknown),
        prop::collection::btree_set((0u8..3, 0u8..3).prop_map(|(n, gpu)| gpu_at(n, gpu)), 0..3)
            .prop_map(DeviceUuids::Known),
    ];
    let racked = NodeTerm {
        labels: vec![Requirement::equals("rack", "7")],
        name: Vec::new(),
    };
    prop_oneof![
        (0u8..3).prop_map(|n| PublishedDevices::OnNode(node(&n.to_string()))),
        (prop::option::of(Just(vec![racked])), uuids)
            .prop_map(|(terms, uuids)| PublishedDevices::Shared { terms, uuids }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let pool = (0u8..2, 0u8..2);
    let slice = (
        0u8..4,
        pool,
        prop::bool::weighted(0.8),
        1i64..4,
        1i64..4,
        prop::collection::vec(devices(), 0..3),
    );
    let slice = slice.prop_map(
        |(name, (pool, scope), gpu_driver, generation, of, devices)| Step::Slice {
            name,
            pool,
            scope,
            gpu_driver,
            generation,
            of,
            devices,
        },
    );
    prop_oneof![
        6 => slice,
        2 => (0u8..4).prop_map(Step::Delete),
        1 => (0u8..3).prop_map(Step::NodeGone),
        2 => (0u8..3).prop_map(Step::NodeThere),
        3 => (0u8..3, 0u8..3).prop_map(|(node, gpus)| Step::Report(node, gpus)),
        2 => (0u8..3, any::<bool>()).prop_map(|(node, rack)| Step::Label(node, rack)),
        1 => any::<bool>().prop_map(Step::Drivers),
        6 => (0u8..4, 0u8..3).prop_map(|(pod, node)| Step::Assume(pod, node)),
        2 => (0u8..4).prop_map(Step::Release),
        1 => Just(Step::Reload),
    ]
}

/// Whether any slice takes the node, by all slices that there are.
fn is_taken(slices: &BTreeMap<u8, DeviceSlice>, rules: &DraRules, node_state: &NodeState) -> bool {
    slices.values().any(|slice| {
        let pool_of = |slice: &DeviceSlice| {
            (
                slice.driver.clone(),
                slice.pool.clone(),
                slice.scope.clone(),
            )
        };
        let of_pool = slices
            .values()
            .filter(|other| pool_of(other) == pool_of(slice));
        let newest = of_pool.clone().map(|other| other.generation).max().unwrap();
        let current: Vec<_> = of_pool.filter(|other| other.generation == newest).collect();
        let expected = current
            .iter()
            .map(|other| other.slices_of_pool)
            .max()
            .unwrap();
        let counts = slice.generation == newest || (current.len() as i64) < expected;
        let name = &node_state.view().name;
        let reaches = |devices: &PublishedDevices| match devices {
            PublishedDevices::OnNode(other) => other == name,
            PublishedDevices::Shared { terms, uuids } => {
                let racked = node_state
                    .labels()
                    .get("rack")
                    .is_some_and(|rack| rack == "7");
                let mut own = node_state.devices().iter().map(|device| &device.uuid);
                (terms.is_none() || racked)
                    && match uuids {
                        DeviceUuids::Unknown => true,
                        DeviceUuids::Known(uuids) => own.any(|uuid| uuids.contains(uuid)),
                    }
            }
        };
        rules
            .gpu_drivers
            .iter()
            .any(|driver| *driver == *slice.driver)
            && counts
            && slice.devices.iter().any(reaches)
    })
}

proptest! {
    #[test]
    fn no_gpu_in_a_slice_is_promised_in_any_order_of_changes(steps in prop::collection::vec(step(), 1..60)) {
        let name = |n: u8| node(&n.to_string());
        let mut ledger = LedgerCluster::new(&[("0", 2), ("1", 2), ("2", 2)]);
        let mut slices = BTreeMap::new();
        for step in steps {
            match step {
                Step::Slice { name, pool, scope, gpu_driver, generation, of, devices } => {
                    let driver = if gpu_driver { GPU_DRIVER } else { "nic.example.com" };
                    let slice = DeviceSlice {
                        driver: driver.into(),
                        pool: format!("pool-{pool}").into(),
                        scope: format!("scope-{scope}").into(),
                        generation,
                        slices_of_pool: of,
                        devices,
                    };
                    slices.insert(name, slice.clone());
                    set(&mut ledger, &name.to_string(), slice);
                }
                Step::Delete(name) => {
                    slices.remove(&name);
                    delete(&mut ledger, &name.to_string());
                }
                Step::NodeGone(n) => ledger.ledger_mut().remove_node(&name(n)),
                Step::NodeThere(n) => ledger.ledger_mut().set_node(&name(n), NodeKind::Stowage, None),
                Step::Report(n, gpus) => {
                    let devices = (0..u32::from(gpus)).map(|gpu| h100(n, gpu)).collect();
                    let _ = ledger.ledger_mut().report_devices(&name(n), devices);
                }
                Step::Label(n, racked) => {
                    let rack = if racked { "7" } else { "8" };
                    ledger.ledger_mut().set_labels(&name(n), BTreeMap::from([("rack".to_owned(), rack.to_owned())]));
                }
                Step::Drivers(any) => {
                    let mut policy = Policy::default();
                    policy.dra.gpu_drivers.retain(|_| any);
                    ledger.ledger_mut().set_policy(policy);
                }
                Step::Assume(pod, n) => {
                    let pod = pod.to_string();
                    ledger.add_waiting(&pod, demand_of(1 << 30, 1, Sharing::Shared, 0));
                    let taken = ledger.ledger().node_state(&name(n)).is_some_and(|node_state| {
                        is_taken(&slices, &ledger.ledger().policy().dra, node_state)
                    });
                    if let Ok(AssumeResult::New(_)) = ledger.ledger_mut().assume(&uid(&pod), &name(n)) {
                        prop_assert!(!taken, "{pod} was promised a GPU of {n}");
                    }
                }
                Step::Release(pod) => drop(ledger.ledger_mut().release(&uid(&pod.to_string()))),
                Step::Reload => {
                    let stored = serde_json::to_string(&ledger.export()).unwrap();
                    *ledger = crate::verbs::Cluster::load(serde_json::from_str(&stored).unwrap()).unwrap();
                }
            }
            for (name, node_state) in ledger.ledger().node_states.iter() {
                let taken = is_taken(&slices, &ledger.ledger().policy().dra, node_state);
                prop_assert_eq!(node_state.is_published(), taken, "{}", name);
            }
        }
    }
}

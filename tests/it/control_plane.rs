//! End to end on a real control plane: etcd, kube-apiserver and kube-scheduler of Kubernetes, and Stowage's own binary with the
//! shipped manifests. Runs if `KUBEBUILDER_ASSETS` (or its default folder) has the binaries, and says so if it has not.

mod acts;
mod admission;
mod certificates;
mod dra;
mod engine_load;
mod explaining;
mod fence;
mod fleet;
mod flight_recorder;
mod install;
mod isolation;
mod journal;
mod killings;
mod leading;
mod lending;
mod load;
mod manifests;
mod planner;
mod pod_defaults;
mod preflight;
mod processes;
mod recording;
mod removal;
mod rendered;
pub mod servers;
mod shadow;
mod upgrade;
mod viewing;
mod world;

use fleet::{GpuNode, node, pod};
use journal::{ClusterJournal, PodChange};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::events::v1::Event;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use processes::{eventually, throughout};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use stowage_agent::publish::{PublishOutcome, Publisher};
use stowage_kubernetes_objects as objects;
use stowage_scheduling::ids::PodKey;
use world::{RealControlPlane, amount};

const ALWAYS: [&str; 4] = ["--lead-with", "always", "--write-deadline", "1s"];
const GIB: u64 = 1 << 30;

#[tokio::test(flavor = "multi_thread")]
async fn sixty_mixed_pods_are_bound_and_restarts_in_between_lose_nothing() {
    let nodes = vec![
        node("h100-a", 8, 81_559, "NVIDIA-H100-80GB-HBM3"),
        node("h100-b", 8, 81_559, "NVIDIA-H100-80GB-HBM3"),
        // In whatever order kube-scheduler tries the pods, a GPU is left for the last exclusive one.
        GpuNode {
            reserved_mib: 512,
            ..node("l40s-a", 8, 46_068, "NVIDIA-L40S")
        },
        node("l40s-b", 8, 46_068, "NVIDIA-L40S"),
    ];
    let Some(mut world) = RealControlPlane::start_all(nodes.clone(), &ALWAYS).await else {
        return;
    };
    let pods = sixty();
    let journal = ClusterJournal::start(world.client.clone());
    world.begin_scheduling().await;

    submit(&world.client, &pods[..30]).await;
    wait_until_all_bound(&mut world, 30).await;
    let before = charged(&world.ledger().await.unwrap());
    world.restart_stowage(&ALWAYS);
    let after = eventually(
        "the ledger after the restart is that before it",
        async || Some(charged(&world.ledger().await?)).filter(|after| *after == before),
    );
    println!(
        "30 pods bound, then a restart: {} GPUs charged as before",
        after.await.len()
    );

    // A crash with Bindings in flight, and pods that arrive while Stowage is down.
    submit(&world.client, &pods[30..45]).await;
    world.stowage.take().expect("it runs").kill();
    let so_far = wait_until_all_bound(&mut world, 30).await.len();
    submit(&world.client, &pods[45..]).await;
    world.stowage = Some(world.serve("stowage", world.ports, &ALWAYS));
    let bound = wait_until_all_bound(&mut world, 60).await;
    assert_devices_in_bindings(&journal, &bound, &nodes).await;
    assert_no_gpu_is_allocated_twice(&bound, &nodes);
    eventually("the watches have shown everything", async || {
        let ledger = world.ledger().await?;
        (ledger["violations"] == json!([])
            && world.count("stowage_ledger_pods", "bound").await == 60)
            .then_some(())
    })
    .await;
    println!(
        "60 pods bound in spite of a crash after {so_far} of 45; {}",
        world.versions()
    );

    assert_unfitting_pod_is_refused_with_one_event(&mut world, &bound).await;
    assert_capacity_is_restored(&mut world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_serving_pod_preempts_the_cheapest_opportunistic_pod() {
    let nodes = vec![
        node("a", 2, 81_559, "NVIDIA-H100-80GB-HBM3"),
        node("b", 2, 81_559, "NVIDIA-H100-80GB-HBM3"),
    ];
    let Some(mut world) = RealControlPlane::start_all(nodes.clone(), &ALWAYS).await else {
        return;
    };
    let journal = ClusterJournal::start(world.client.clone());
    world.begin_scheduling().await;
    // 71.7 GiB of each GPU are allocatable: two pods of 28 leave 15.7 free, 31.4 on a node. Where reports come late a twentieth
    // of the GPU is kept back, and all of this is true as well.
    let fillers: Vec<Pod> = (0..7)
        .map(|i| {
            pod(
                &format!("filler-{i}"),
                28,
                &json!({}),
                "stowage-opportunistic",
            )
        })
        .collect();
    submit(&world.client, &fillers).await;
    wait_until_all_bound(&mut world, 7).await;
    wait_past_last_start(&world.client).await;
    // The scheduler would evict the youngest; this one is the cheapest too.
    submit(
        &world.client,
        &[pod("cheapest", 27, &json!({}), "stowage-opportunistic")],
    )
    .await;
    wait_until_all_bound(&mut world, 8).await;

    submit(
        &world.client,
        &[pod("serving", 38, &json!({}), "stowage-serving")],
    )
    .await;
    let (bound_at, bound_to, annotations) = journal.binding_of("serving").await;
    world.check();
    let (held_at, reservation) = journal
        .entries_of("serving")
        .into_iter()
        .find_map(|(place, happening)| match happening {
            PodChange::Holds(message) => Some((place, message)),
            _ => None,
        })
        .expect("room was held");
    println!("held at {held_at}, bound at {bound_at}: {reservation}");
    assert_eq!(
        journal.pods_with(|happening| *happening == PodChange::Leaving),
        ["cheapest"]
    );
    let left_at = journal
        .position_of("cheapest", |happening| *happening == PodChange::Leaving)
        .unwrap();
    let gone_at = journal
        .position_of("cheapest", |happening| *happening == PodChange::Gone)
        .unwrap();
    assert!(
        held_at < left_at && left_at < gone_at && gone_at < bound_at,
        "{reservation}"
    );
    let (_, victim_of, of_victim) = journal.binding_of("cheapest").await;
    let held = reservation["devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|uuid| uuid.as_str().unwrap());
    let held: Vec<&str> = held.collect();
    assert_eq!(
        (bound_to, &annotations["stowage.dev/devices"]),
        (victim_of, &of_victim["stowage.dev/devices"])
    );
    assert_eq!(held, [annotations["stowage.dev/devices"].as_str()]);
    assert_eq!(reservation["victims"].as_array().unwrap().len(), 1);
    let told = eventually("the pod is told", async || {
        events_of_stowage(&world.client, "serving")
            .await
            .into_iter()
            .find_map(|event| event.note)
    });
    let told = told.await;
    assert!(told.contains(held[0]), "{told}");
    let pods = pods(&world.client).await;
    assert_eq!(pods.len(), 8, "seven fillers and the serving pod");
    assert_no_gpu_is_allocated_twice(&pods, &nodes);
    eventually("nothing is held any more", async || {
        (world.count("stowage_ledger_pods", "reserved").await == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_is_authenticated_by_its_pods_token() {
    let Some(mut world) = RealControlPlane::start().await else {
        return;
    };
    world.install();
    world
        .add_nodes(&[node("a", 2, 81_559, "NVIDIA-H100-80GB-HBM3")])
        .await;
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: agent, namespace: kube-system}, spec: {nodeName: a, \
               serviceAccountName: stowage-agent, containers: [{name: agent, image: stowage}]}}";
    let applied = world.apply(pod, &[]);
    assert!(applied.is_success, "{}", applied.output);
    world.stowage = Some(world.serve(
        "stowage",
        world.ports,
        &[
            "--lead-with",
            "always",
            "--write-deadline",
            "1s",
            "--agents-auth",
            "token",
        ],
    ));
    let token_file = world.folder().join("token");
    let agents = format!("http://127.0.0.1:{}", world.ports.agents);
    let publisher = Publisher::new(
        vec![agents.parse().unwrap()],
        Some(token_file.clone()),
        None,
    );
    let mut publisher = publisher
        .unwrap()
        .with_replica_timeout(Duration::from_secs(30));
    let mut sequence = 0;
    let mut post = async |of: &str, token: &str| {
        std::fs::write(&token_file, token).unwrap();
        sequence += 1;
        let report = json!({ "node": of, "bootId": "1", "sequence": sequence, "gpus": [
            { "uuid": "GPU-1", "index": 0, "model": "H100", "totalBytes": 80 * GIB },
        ] });
        publisher
            .publish(serde_json::from_value(report).unwrap(), Instant::now())
            .await;
        publisher
            .state()
            .replicas
            .into_values()
            .next()
            .unwrap()
            .latest
    };
    let bound = ["--bound-object-kind", "Pod", "--bound-object-name", "agent"];
    let audience = ["--audience", "stowage.dev/reports"];
    let token = |account: &str, flags: &[&[&str]]| {
        let issued = [
            &["create", "token", account, "--namespace", "kube-system"][..],
            &flags.concat(),
        ]
        .concat();
        let token = world.kubectl(&issued);
        assert!(token.is_success, "{}", token.output);
        token.output.trim().to_owned()
    };
    let good = token("stowage-agent", &[&audience, &bound]);
    eventually("the agent's report is taken", async || {
        (post("a", &good).await == PublishOutcome::Accepted).then_some(())
    })
    .await;
    let ledger = world.ledger().await.unwrap();
    assert_eq!(
        ledger["snapshot"]["nodes"][0]["devices"][0]["uuid"],
        "GPU-1"
    );
    for (of, token, status, reason) in [
        (
            "b",
            good.clone(),
            403,
            "an agent on a, which cannot speak for b",
        ),
        ("a", token("stowage-agent", &[&bound]), 401, "the token"),
        (
            "a",
            token("stowage-agent", &[&audience]),
            403,
            "names no node",
        ),
        (
            "a",
            token("stowage", &[&audience]),
            403,
            "system:serviceaccount:kube-system:stowage,",
        ),
        ("a", format!("{good}x"), 401, "does not accept the token"),
    ] {
        // Until the API server has been asked: a slow answer is no verdict.
        let verdict = eventually(reason, async || match post(of, &token).await {
            PublishOutcome::Refused { status, reason } if status.as_u16() < 500 => {
                Some((status.as_u16(), reason))
            }
            PublishOutcome::Accepted => panic!("accepted, where it should be said that {reason}"),
            _ => None,
        });
        let (actual, said) = verdict.await;
        assert!(
            actual == status && said.contains(reason),
            "{actual}: {said}"
        );
    }
    world.check();
}

// ---- pods ----

/// 46 on a part of one GPU, 8 over two, 6 that require exclusive GPUs.
fn sixty() -> Vec<Pod> {
    let one = |i: usize| {
        let class = ["stowage-serving", "stowage-batch", "stowage-opportunistic"][i % 3];
        pod(
            &format!("pod-{i:02}"),
            [4, 6, 8, 12][i % 4],
            &json!({}),
            class,
        )
    };
    let make = |i: usize| match i {
        _ if i % 7 == 3 && i < 56 => pod(
            &format!("pod-{i:02}"),
            48,
            &json!({ "stowage.dev/gpus": "2" }),
            "stowage-serving",
        ),
        _ if i % 10 == 9 => pod(
            &format!("pod-{i:02}"),
            30,
            &json!({ "stowage.dev/exclusive": "true" }),
            "stowage-serving",
        ),
        _ => one(i),
    };
    (0..60).map(make).collect()
}

fn key(name: &str) -> PodKey {
    PodKey::parse("default", name).unwrap()
}

/// Behind the planner's gate.
fn gated(mut pod: Pod) -> Pod {
    let gates = serde_json::from_value(json!([{ "name": objects::PLAN_GATE }])).unwrap();
    pod.spec.as_mut().unwrap().scheduling_gates = Some(gates);
    pod
}

async fn submit(client: &Client, pods: &[Pod]) {
    let api: Api<Pod> = Api::default_namespaced(client.clone());
    for pod in pods {
        api.create(&PostParams::default(), pod).await.unwrap();
    }
}

async fn pods(client: &Client) -> Vec<Pod> {
    let api: Api<Pod> = Api::default_namespaced(client.clone());
    api.list(&ListParams::default()).await.unwrap().items
}

/// The bound pods, once there are so many.
async fn wait_until_all_bound(world: &mut RealControlPlane, count: usize) -> Vec<Pod> {
    let what = format!("{count} pods are bound");
    eventually(&what, async || {
        world.check();
        let mut pods = pods(&world.client).await;
        pods.retain(|pod| node_of(pod).is_some());
        (pods.len() >= count).then_some(pods)
    })
    .await
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

fn name_of(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap()
}

fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata
        .annotations
        .as_ref()?
        .get(key)
        .map(String::as_str)
}

/// What it asks for, over all its GPUs.
fn requested_gib(pod: &Pod) -> u64 {
    let resources = pod.spec.as_ref().unwrap().containers[0]
        .resources
        .as_ref()
        .unwrap();
    let asked = &resources.limits.as_ref().unwrap()["stowage.dev/vram"].0;
    asked.strip_suffix("Gi").unwrap().parse().unwrap()
}

/// The charge of each GPU by the ledger, which a restart must find again. Start gates and soft reservations pass by themselves.
fn charged(ledger: &Value) -> BTreeMap<String, Value> {
    let lasting = |gpu: &Value| {
        let of = |field: &str| {
            gpu.get(field)
                .unwrap_or_else(|| panic!("{gpu}: no {field}"))
                .clone()
        };
        json!([
            of("capacity"),
            of("charged"),
            of("tenants"),
            of("exclusive")
        ])
    };
    let nodes = ledger["snapshot"]["nodes"].as_array().unwrap();
    let gpus = nodes.iter().flat_map(|node| {
        let devices = node["devices"].as_array().unwrap().iter();
        devices
            .map(|device| device["uuid"].as_str().unwrap().to_owned())
            .zip(node["gpus"].as_array().unwrap().iter().map(lasting))
    });
    gpus.collect()
}

// ---- what must be true ----

/// In the very write that gave the pod its node.
async fn assert_devices_in_bindings(journal: &ClusterJournal, bound: &[Pod], nodes: &[GpuNode]) {
    for pod in bound {
        let name = name_of(pod);
        let (_, node, annotations) = journal.binding_of(name).await;
        let node = nodes.iter().find(|known| known.name == node).unwrap();
        let text = |key: &str| {
            annotations
                .get(key)
                .map(String::as_str)
                .unwrap_or_else(|| panic!("{name}: no {key}"))
        };
        let devices: Vec<&str> = text("stowage.dev/devices").split(',').collect();
        let gpus = annotations
            .get("stowage.dev/gpus")
            .map_or(1, |gpus| gpus.parse().unwrap());
        assert_eq!(devices.len(), gpus, "{name}");
        devices.iter().for_each(|device| drop(gpu_of(node, device)));
        // A GPU that has no UUID yet goes by its index there.
        let cdi = |device: &&str| {
            format!(
                "runtime.nvidia.com/gpu={}",
                device.trim_start_matches("index-")
            )
        };
        let visible: Vec<String> = devices.iter().map(cdi).collect();
        assert_eq!(text("stowage.dev/visible-devices"), visible.join(","));
        assert!(
            !annotations.contains_key("nvidia.cdi.k8s.io/container.engine"),
            "{name}"
        );
        let granted: u64 = text("stowage.dev/vram-granted").parse().unwrap();
        let fraction: f64 = text("stowage.dev/gpu-memory-fraction").parse().unwrap();
        let share = granted as f64 / gpus as f64 / (node.mib << 20) as f64;
        assert!(
            (share - 0.01..=share).contains(&fraction),
            "{name}: {fraction} of {share}"
        );
    }
}

/// The UUID of a recorded device: its own, or by its index, where a restarted Stowage bound before the agent's next report.
fn gpu_of(node: &GpuNode, device: &str) -> String {
    let is_it = |gpu: &u32| node.uuid(*gpu) == device || format!("index-{gpu}") == device;
    let index = (0..node.gpus)
        .find(is_it)
        .unwrap_or_else(|| panic!("{}: no {device}", node.name));
    node.uuid(index)
}

/// Added up from nothing but what the API server shows: the requests, the annotations, the sizes of the GPUs.
fn assert_no_gpu_is_allocated_twice(bound: &[Pod], nodes: &[GpuNode]) {
    let mut tenants: BTreeMap<(&str, String), Vec<(u64, bool)>> = BTreeMap::new();
    for pod in bound {
        let devices: Vec<&str> = annotation(pod, "stowage.dev/devices")
            .unwrap()
            .split(',')
            .collect();
        let alone = annotation(pod, "stowage.dev/exclusive") == Some("true");
        let node = nodes
            .iter()
            .find(|node| Some(&*node.name) == node_of(pod))
            .unwrap();
        for device in &devices {
            let part = requested_gib(pod) * GIB / devices.len() as u64;
            tenants
                .entry((&node.name, gpu_of(node, device)))
                .or_default()
                .push((part, alone));
        }
    }
    for ((name, uuid), tenants) in &tenants {
        let node = nodes.iter().find(|node| node.name == *name).unwrap();
        let can_be_promised =
            ((node.mib << 20) / 10 * 9).saturating_sub(node.reserved_mib << 20) + 10;
        let promised: u64 = tenants.iter().map(|(part, _)| part).sum();
        assert!(promised <= can_be_promised, "{uuid} of {name}: {tenants:?}");
        assert!(
            tenants.len() == 1 || !tenants.iter().any(|(_, alone)| *alone),
            "{uuid} of {name}: {tenants:?}"
        );
    }
    println!("{} pods on {} GPUs", bound.len(), tenants.len());
}

/// A text that never changes, few calls, one Event; also while VRAM becomes free beside it.
async fn assert_unfitting_pod_is_refused_with_one_event(
    world: &mut RealControlPlane,
    bound: &[Pod],
) {
    // On a node where the scheduler's own sum suffices, so that it asks.
    let asked_on = |node: &str| -> u64 {
        bound
            .iter()
            .filter(|pod| node_of(pod) == Some(node))
            .map(requested_gib)
            .sum()
    };
    let roomy = ["h100-a", "h100-b"]
        .into_iter()
        .min_by_key(|node| asked_on(node))
        .unwrap();
    let mut too_large = pod("too-large", 75, &json!({}), "stowage-serving");
    let spec = too_large.spec.as_mut().unwrap();
    spec.node_selector = Some(BTreeMap::from([(
        "kubernetes.io/hostname".into(),
        roomy.into(),
    )]));

    let runs = |pod: &Pod| {
        pod.status
            .as_ref()
            .and_then(|status| status.phase.as_deref())
            == Some("Running")
    };
    // Each pod that starts to run wakes the refused pods.
    eventually("all that are bound run", async || {
        pods(&world.client).await.iter().all(runs).then_some(())
    })
    .await;
    let filters = "verb=\"filter\"";
    let calls_before = world.count("stowage_answers_total", filters).await;
    submit(&world.client, &[too_large]).await;
    let api: Api<Pod> = Api::default_namespaced(world.client.clone());
    let refusal = async || {
        let pod = api.get("too-large").await.ok()?;
        assert_eq!(node_of(&pod), None);
        let conditions = pod.status?.conditions?;
        let condition = conditions
            .into_iter()
            .find(|condition| condition.type_ == "PodScheduled")?;
        (condition.reason.as_deref() == Some("Unschedulable"))
            .then(|| condition.message.unwrap_or_default())
    };
    let text = eventually("the pod is refused", refusal).await;
    assert!(text.contains("1 no GPU is large enough"), "{text}");
    // On the same node, if there is one, and beside others.
    let comes_last = |pod: &&Pod| {
        (
            node_of(pod) != Some(roomy),
            annotation(pod, "stowage.dev/exclusive").is_some(),
        )
    };
    let leaves = bound.iter().min_by_key(comes_last).unwrap();
    api.delete(name_of(leaves), &DeleteParams::default())
        .await
        .unwrap();
    throughout(Duration::from_secs(8), async || {
        world.check();
        // A request that fails says nothing of the text.
        refusal()
            .await
            .into_iter()
            .for_each(|now| assert_eq!(now, text));
    })
    .await;
    let calls = world.count("stowage_answers_total", filters).await - calls_before;
    println!("refused in {calls} filter calls: {text}");
    assert!(
        (1..=8).contains(&calls),
        "{calls} filter calls in eight seconds in which one pod left"
    );
    let ours = eventually("the pod is told", async || {
        Some(events_of_stowage(&world.client, "too-large").await)
            .filter(|events| !events.is_empty())
    });
    let ours = ours.await;
    assert_eq!(
        ours.iter()
            .map(|event| event.reason.as_deref())
            .collect::<Vec<_>>(),
        [Some("StowageUnschedulable")]
    );
    api.delete("too-large", &DeleteParams::default().grace_period(0))
        .await
        .unwrap();
}

async fn events_of_stowage(client: &Client, pod: &str) -> Vec<Event> {
    let api: Api<Event> = Api::default_namespaced(client.clone());
    let mut events = api.list(&ListParams::default()).await.unwrap().items;
    events.retain(|event| {
        event
            .regarding
            .as_ref()
            .and_then(|regarding| regarding.name.as_deref())
            == Some(pod)
            && event.reporting_controller.as_deref() == Some("stowage.dev/scheduler")
    });
    events
}

/// Zero at once, another wrong figure once it has stood for a while; and what the agents said of the driver's reserve.
async fn assert_capacity_is_restored(world: &mut RealControlPlane) {
    let nodes: Api<Node> = Api::all(world.client.clone());
    let right = |mib: u64, reserved_mib: u64, gpus: u64| {
        let total = mib << 20;
        gpus * (total - (reserved_mib << 20) - total.div_ceil(10))
    };
    let near = |is: u64, right: u64| is.abs_diff(right) <= 16;
    let figures = [
        ("h100-a", right(81_559, 0, 8)),
        ("h100-b", right(81_559, 0, 8)),
        ("l40s-a", right(46_068, 512, 8)),
    ];
    let are_right = async || {
        for (name, figure) in figures {
            let node = nodes.get(name).await.ok()?;
            if !near(amount(&node, "capacity"), figure)
                || !near(amount(&node, "allocatable"), figure)
            {
                return None;
            }
        }
        Some(())
    };
    eventually("the nodes offer what their GPUs can be promised", are_right).await;
    for (name, wrong) in [("h100-a", "0"), ("h100-b", "1Ti")] {
        let patch = json!({ "status": { "capacity": { "stowage.dev/vram": wrong } } });
        nodes
            .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .unwrap();
    }
    let drifted = Instant::now();
    eventually("what drifted is put back", are_right).await;
    println!("capacity put back after {:.1?}", drifted.elapsed());
    world.check();
}

/// Until a pod that starts now is younger, to the second, than all that run.
async fn wait_past_last_start(client: &Client) {
    eventually("all pods have started, in an earlier second", async || {
        let starts: Option<BTreeSet<jiff::Timestamp>> = pods(client)
            .await
            .iter()
            .map(|pod| Some(pod.status.as_ref()?.start_time.as_ref()?.0))
            .collect();
        let last = *starts?.last()?;
        (jiff::Timestamp::now().as_second() > last.as_second()).then_some(())
    })
    .await;
}

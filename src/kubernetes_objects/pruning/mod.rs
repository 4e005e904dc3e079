//! Drops what Stowage does not use from the API server's answers, while they arrive.
//!
//! A pod's environment alone may be megabytes of JSON, which take a hundred times as much once they are decoded. Below the decoder
//! of kube's client nothing of it is there any more, whatever the list, watch or write. [`kept`] names what is used, [`scanner`]
//! finds it. Nothing here knows what a field means.

mod kept;
mod scanner;

use futures::future::BoxFuture;
use futures::{FutureExt, TryStreamExt};
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Body as HttpBody, Frame};
use kept::Resource;
use kube::client::Body;
use scanner::Scanner;
use std::task::{Context, Poll};
use tower::{BoxError, Service};

/// Which part of the API server's answers a client takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResponseMode {
    Whole,
    /// Only what Stowage uses.
    Pruned,
}

type PrunedBody = UnsyncBoxBody<bytes::Bytes, BoxError>;

/// A client of the API server, by the answers that it takes.
#[derive(Debug, Clone)]
pub struct Pruning<S>(pub S, pub ResponseMode);

impl<S, B> Service<Request<Body>> for Pruning<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
    B: HttpBody<Data = bytes::Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<PrunedBody>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let resource =
            Resource::from_path(request.uri().path()).filter(|_| self.1 == ResponseMode::Pruned);
        let answer = self.0.call(request);
        async move {
            let answer = answer.await?;
            let resource = resource.filter(|_| answer.status().is_success());
            Ok(answer.map(|body| match resource {
                Some(resource) => prune_body(body, Scanner::new(resource)),
                None => body.map_err(Into::into).boxed_unsync(),
            }))
        }
        .boxed()
    }
}

/// Prunes the JSON of one whole pod.
pub fn prune_pod(whole: &str) -> Vec<u8> {
    Scanner::new(Resource::pods()).feed(whole.as_bytes())
}

fn prune_body<B>(body: B, mut scanner: Scanner) -> PrunedBody
where
    B: HttpBody<Data = bytes::Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let pieces = body
        .into_data_stream()
        .map_ok(move |piece| Frame::data(scanner.feed(&piece).into()));
    StreamBody::new(pieces.map_err(Into::into)).boxed_unsync()
}

#[cfg(test)]
mod kept_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{self as objects, BEYOND_BOUND, StorageResource, is_stand_in};
    use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
    use k8s_openapi::api::policy::v1::PodDisruptionBudget;
    use k8s_openapi::api::resource::v1::ResourceSlice;
    use kube::api::ListParams;
    use kube::{Api, Client, Resource as KubeResource};
    use serde_json::{Value, json};
    use std::sync::Arc;
    use stowage_scheduling::ids::PodUid;
    use stowage_scheduling::kube_filters::volumes::{ClaimBinding, StorageObject};
    use stowage_scheduling::kube_filters::{
        AssumedNodeChange, ClusterFilters, FilterNode, FilterVerdict, NodeFootprint, Requirements,
        ResourceList,
    };
    use stowage_scheduling::ledger::ObservedPhase;
    use stowage_scheduling::planning::PlanStep;
    use stowage_scheduling::policy::Policy;
    use stowage_scheduling::testkit::{LedgerCluster, demand_of, node, steps_with_filters, uid};
    use stowage_scheduling::units::{Bytes, MilliCpu, Millis};
    use stowage_scheduling::vocabulary::classification::PodTraits;
    use stowage_scheduling::vocabulary::demand::{Demand, HostResources, Sharing};
    use stowage_scheduling::vocabulary::device_plugin::{GpuRequest, PluginResource};

    /// The first object of a list of this one.
    async fn listed<K>(object: Value, answers: ResponseMode) -> K
    where
        K: KubeResource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
    {
        let list = json!({ "metadata": { "resourceVersion": "1" }, "items": [object] }).to_string();
        // As the API server's encoder writes them.
        let list = list
            .replace('<', "\\u003c")
            .replace('é', "\\u00E9")
            .replace('😀', "\\ud83d\\ude00");
        let server = tower::service_fn(move |_: Request<Body>| {
            let body = Body::from(list.clone().into_bytes());
            std::future::ready(Ok::<_, std::io::Error>(Response::new(body)))
        });
        let api = Api::<K>::all(Client::new(Pruning(server, answers), "default"));
        api.list(&ListParams::default())
            .await
            .unwrap()
            .items
            .remove(0)
    }

    async fn stand_in<K>(spec: Value) -> K
    where
        K: KubeResource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
    {
        let metadata =
            json!({ "name": "a", "namespace": "b", "uid": "c", "labels": { "app": "x" } });
        let object = listed::<K>(
            json!({ "metadata": metadata, "spec": spec }),
            ResponseMode::Pruned,
        )
        .await;
        assert!(is_stand_in(object.meta()));
        object
    }

    fn many(entry: &Value) -> Vec<&Value> {
        vec![entry; 20_000]
    }

    #[tokio::test]
    async fn a_stand_in_is_read_in_the_safe_way() {
        let container = json!({ "name": "c", "ports": many(&json!({ "containerPort": 1 })), "resources": { "limits": { "stowage.dev/vram": "1Gi" } } });
        let pod: Pod = stand_in(json!({ "nodeName": "n", "containers": [container] })).await;
        let now = jiff::Timestamp::UNIX_EPOCH;
        let observed =
            objects::observation(&pod, &Policy::default(), None, now).expect("it asks for a GPU");
        assert!(matches!(
            observed.state,
            ObservedPhase::Bound { devices: None, .. }
        ));
        assert!(
            observed.observed.unwrap().disruption_info.do_not_disrupt,
            "it is nobody's victim"
        );

        let rule = json!({ "key": "app", "operator": "In", "values": many(&json!("nobody's")) });
        let budget: PodDisruptionBudget =
            stand_in(json!({ "selector": { "matchExpressions": [rule] } })).await;
        let budget = objects::budget(&budget).unwrap();
        assert!(budget.covers(&PodTraits {
            namespace: "b".into(),
            ..PodTraits::default()
        }));
        assert_eq!((budget.allowed, budget.unhealthy_may_go), (0, false));

        let claim: PersistentVolumeClaim =
            stand_in(json!({ "accessModes": many(&json!("x")) })).await;
        let StorageObject::Claim(claim) = claim.to_storage_object() else {
            panic!("{claim:?}")
        };
        assert_eq!(claim.binding, ClaimBinding::Unusable);
        let volume: PersistentVolume = stand_in(json!({ "accessModes": many(&json!("x")) })).await;
        let StorageObject::Volume(volume) = volume.to_storage_object() else {
            panic!("{volume:?}")
        };
        assert!(volume.unreadable);
    }

    /// A pod of the namespace `b` that is beyond its bound by its labels.
    async fn labelled(spec: Value) -> Pod {
        let labels: serde_json::Map<String, Value> =
            (0..5000).map(|n| (format!("{n:060}"), json!(""))).collect();
        let metadata = json!({ "name": "a", "namespace": "b", "uid": "c", "labels": labels });
        let pod: Pod = listed(
            json!({ "metadata": metadata, "spec": spec }),
            ResponseMode::Pruned,
        )
        .await;
        assert!(is_stand_in(&pod.metadata));
        pod
    }

    fn asking(name: &str, cpu: &str) -> Value {
        let requests =
            json!({ "cpu": cpu, "memory": "1Gi", "example.com/nic": "1", "example.com/none": "0" });
        json!({ "name": name, "resources": { "requests": requests } })
    }

    /// Pods of three cores that are beyond their bound by what other tools wrote, by what their owner created, and by their ports.
    async fn pods_of_three_cores() -> [Pod; 3] {
        let init: Vec<Value> = (0..71).map(|n| asking(&format!("i{n}"), "2500m")).collect();
        let port = json!({ "containerPort": 1, "protocol": "TCP" });
        let mut ports = many(&port);
        let on_host = json!({ "hostPort": 80, "containerPort": 8080, "protocol": "UDP", "hostIP": "10.0.0.1" });
        ports.push(&on_host);
        let mut serving = asking("c", "3");
        serving["ports"] = json!(ports);
        let mut sidecar = asking("s", "1");
        sidecar["restartPolicy"] = json!("Always");
        [
            labelled(json!({ "nodeName": "n", "initContainers": [sidecar], "containers": [asking("c", "1500m")], "overhead": { "cpu": "500m" } })).await,
            stand_in(json!({ "nodeName": "n", "initContainers": init, "containers": [asking("c", "1"), asking("d", "2")] })).await,
            stand_in(json!({ "nodeName": "n", "containers": [serving] })).await,
        ]
    }

    fn nodes_of_four_cores(nodes: &[&str]) -> ClusterFilters {
        let mut filters = ClusterFilters::default();
        for name in nodes {
            let labels = Arc::new([("kubernetes.io/hostname".into(), (*name).into())].into());
            let allocatable = ResourceList::from_amounts(
                &[("cpu", 4000), ("memory", 8 << 30), ("example.com/nic", 8)].into(),
            );
            let (name, taints) = (node(name), Arc::new([]));
            filters.set_node(FilterNode {
                name,
                labels,
                taints,
                allocatable,
                pods: 110,
            });
        }
        filters
    }

    fn wants(namespace: &str, cpu: u64) -> Requirements {
        let (namespace, amounts) = (
            namespace.into(),
            ResourceList::from_amounts(&[("cpu", cpu)].into()),
        );
        Requirements {
            namespace,
            amounts,
            ..Requirements::default()
        }
    }

    fn code(filters: &ClusterFilters, wants: &Requirements, leaving: &[PodUid]) -> &'static str {
        let beside = AssumedNodeChange {
            leaving,
            coming: &[],
        };
        match filters
            .snapshot()
            .verdict(&uid("new"), wants, &node("n"), &beside)
        {
            FilterVerdict::Unsupported(rule) => rule.code(),
            FilterVerdict::Rejects(reason) => reason.code(),
            FilterVerdict::Accepts => "accepts",
        }
    }

    #[tokio::test]
    async fn requests_of_a_stand_in_count_on_its_node() {
        for (large, nics) in pods_of_three_cores().await.iter().zip([2, 2, 1]) {
            let footprint = objects::kube_filters::footprint(large).unwrap();
            let amounts: Vec<_> = footprint.amounts.nonzero().collect();
            assert_eq!(
                amounts,
                [
                    ("cpu", 3000),
                    ("memory", nics << 30),
                    ("example.com/nic", nics)
                ]
            );
            assert!(
                footprint.claims_devices,
                "devices of its node may be its own"
            );
            let ports: Vec<String> = footprint.ports.iter().map(ToString::to_string).collect();
            assert_eq!(!ports.is_empty(), nics == 1, "{ports:?}");
            assert!(
                footprint
                    .ports
                    .iter()
                    .all(|port| (port.port, &*port.protocol, &*port.ip) == (80, "UDP", "10.0.0.1"))
            );
            let mut filters = nodes_of_four_cores(&["n"]);
            filters.set_pod(uid("large"), footprint);
            assert_eq!(code(&filters, &wants("b", 1000), &[]), "accepts");
            assert_eq!(
                code(&filters, &wants("other", 2000), &[]),
                "insufficient-free"
            );
            assert_eq!(
                code(&filters, &wants("other", 2000), &[uid("large")]),
                "accepts",
                "once it is gone"
            );
            assert_eq!(
                code(&filters, &wants("b", 5000), &[]),
                "insufficient-allocatable"
            );
            assert_eq!(
                filters.free_host(&node("n")).map(|free| free.cpu.0),
                Some(1000)
            );
        }
    }

    #[tokio::test]
    async fn pods_are_placed_beside_a_stand_in_after_evictions() {
        for large in pods_of_three_cores().await {
            let mut cluster = LedgerCluster::new(&[("n", 1)]);
            let host_resources = HostResources {
                cpu: MilliCpu(1000),
                memory: Bytes::ZERO,
            };
            let job = Demand {
                host_resources,
                ..demand_of(72 << 30, 1, Sharing::Shared, -10)
            };
            cluster.add_running(
                "job",
                ("n", 0),
                job,
                Some(Millis::seconds(600)),
                Default::default(),
            );
            cluster.add_gated("serving", demand_of(50 << 30, 1, Sharing::Shared, 100));
            let mut filters = nodes_of_four_cores(&["n"]);
            let footprint = objects::kube_filters::footprint(&large).unwrap();
            let job = NodeFootprint {
                amounts: wants("b", 1000).amounts,
                ports: Arc::default(),
                ..footprint.clone()
            };
            filters.set_pod(uid("large"), footprint);
            filters.set_pod(uid("job"), job);
            filters.set_pending(uid("serving"), wants("other", 1000));
            let steps = steps_with_filters(cluster.ledger_mut(), &filters.snapshot(), 64);
            let [PlanStep::Place(placements)] = &*steps else {
                panic!("{steps:?}")
            };
            assert_eq!(&*placements[0].reservation.victims, [uid("job")]);
        }
    }

    #[tokio::test]
    async fn a_stand_in_keeps_its_anti_affinity() {
        let term = json!({ "topologyKey": "kubernetes.io/hostname", "labelSelector": { "matchLabels": { "app": "x" } } });
        let with = |scope: Value| {
            let mut term = term.clone();
            term.as_object_mut()
                .unwrap()
                .extend(scope.as_object().unwrap().clone());
            json!({ "podAntiAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": [term] } })
        };
        let (repelled, accepted) = ("anti-affinity-of-another-pod", "accepts");
        for (affinity, own, others) in [
            (Value::Null, accepted, accepted),
            (with(json!({})), repelled, accepted),
            (with(json!({ "namespaceSelector": {} })), repelled, repelled),
            (
                with(json!({ "namespaceSelector": { "matchLabels": { "x": "y" } } })),
                repelled,
                repelled,
            ),
            (
                with(json!({ "namespaces": ["other", "more"] })),
                repelled,
                repelled,
            ),
        ] {
            let large =
                labelled(json!({ "nodeName": "n", "affinity": affinity, "containers": [] })).await;
            let mut filters = nodes_of_four_cores(&["n"]);
            filters.set_pod(
                uid("large"),
                objects::kube_filters::footprint(&large).unwrap(),
            );
            let codes = ["b", "other"].map(|namespace| code(&filters, &wants(namespace, 1), &[]));
            assert_eq!(codes, [own, others], "{affinity}");
        }
    }

    #[tokio::test]
    async fn a_pending_stand_in_fits_no_node_and_counts_on_the_node_it_comes_to() {
        let waiting = labelled(json!({ "containers": [asking("c", "3")] })).await;
        let coming_wants = objects::kube_filters::requirements(&waiting);
        assert!(
            coming_wants.unsupported.is_some(),
            "nobody knows where it may be"
        );
        let mut filters = nodes_of_four_cores(&["n"]);
        filters.set_pending(uid("coming"), coming_wants);
        let beside = AssumedNodeChange {
            leaving: &[],
            coming: &[uid("coming")],
        };
        let verdict = |cpu| {
            filters
                .snapshot()
                .verdict(&uid("new"), &wants("other", cpu), &node("n"), &beside)
        };
        assert_eq!(verdict(1000), FilterVerdict::Accepts);
        assert!(matches!(verdict(2000), FilterVerdict::Rejects(_)));
    }

    #[tokio::test]
    async fn plugin_devices_of_a_stand_in_count() {
        let container = |limits: Value| {
            let resources = json!({ "limits": limits, "requests": limits });
            json!({ "name": "c", "ports": many(&json!({ "containerPort": 1 })), "resources": resources })
        };
        let ask = async |limits: [Value; 2]| {
            let containers = limits.map(container);
            let pod: Pod = stand_in(json!({ "nodeName": "n", "containers": containers })).await;
            let now = jiff::Timestamp::UNIX_EPOCH;
            objects::observation(&pod, &Policy::default(), None, now)
                .expect("it asks for a GPU")
                .demand
                .ask
        };
        let plugin = |name: &str, count| GpuRequest::Plugin {
            resource: PluginResource::parse(name).unwrap(),
            count,
        };
        let gpu = "nvidia.com/gpu";
        assert_eq!(
            ask([json!({ gpu: "2", "cpu": "1" }), json!({ gpu: "3" })]).await,
            plugin(gpu, 5)
        );
        let slice = "nvidia.com/mig-1g.10gb";
        assert_eq!(
            ask([json!({ slice: "4" }), json!({ "cpu": "1" })]).await,
            plugin(slice, 4)
        );
        let many: serde_json::Map<String, Value> = (0..9)
            .map(|n| (format!("nvidia.com/mig-{n}"), json!("1")))
            .collect();
        assert_eq!(
            ask([many.into(), json!({ "stowage.dev/vram": "1Gi" })]).await,
            GpuRequest::Vram
        );
    }

    #[tokio::test]
    async fn annotations_that_are_dropped_count_for_what_a_binding_may_add() {
        let pod = |annotations: &Value| {
            let container =
                json!({ "name": "c", "resources": { "limits": { "stowage.dev/vram": "1Gi" } } });
            let metadata =
                json!({ "name": "a", "namespace": "b", "uid": "c", "annotations": annotations });
            json!({ "metadata": metadata, "spec": { "containers": [container] } })
        };
        let demand = async |annotations: &Value, answers| {
            objects::demand(
                &listed::<Pod>(pod(annotations), answers).await,
                &Policy::default(),
            )
        };
        let keys: serde_json::Map<String, Value> = (0..20_000)
            .map(|n| (format!("{n:013}"), json!("")))
            .collect();
        for (annotations, is_refused) in [
            (json!({ "x.example/y": "z".repeat(255 << 10) }), true),
            (
                json!({ "a": "z".repeat(100 << 10), "stowage.dev/model": "m", "z": "z".repeat(160 << 10) }),
                true,
            ),
            (Value::Object(keys), true),
            // Of text that is written with escapes, what it stands for counts.
            (json!({ "x": "\"<é😀\\\n\u{2028}".repeat(20_000) }), true),
            (
                json!({ "x": "<é😀\"".repeat(20_000), "y": "a\u{1}" }),
                false,
            ),
            (json!({ "x": "z".repeat(200 << 10) }), false),
        ] {
            let whole = demand(&annotations, ResponseMode::Whole).await;
            assert_eq!(whole.is_err(), is_refused, "{whole:?}");
            assert_eq!(demand(&annotations, ResponseMode::Pruned).await, whole);
        }
    }

    #[tokio::test]
    async fn the_node_of_a_resource_slice_beyond_its_bound_is_its_drivers() {
        let device = json!({ "name": "gpu-0", "attributes": { "uuid": { "string": "GPU-1" } } });
        let spec = json!({ "driver": "gpu.nvidia.com", "nodeName": "n", "pool": { "name": "p", "generation": 1, "resourceSliceCount": 1 }, "devices": many(&device) });
        let slice: ResourceSlice = stand_in(spec).await;
        assert_eq!(
            (slice.spec.driver.as_str(), slice.spec.node_name.as_deref()),
            ("gpu.nvidia.com", Some("n"))
        );
        assert_eq!(slice.spec.devices.iter().flatten().count(), 1);
    }

    #[tokio::test]
    async fn other_answers_and_other_clients_answers_are_whole() {
        let pod = json!({ "metadata": { "name": "a", "annotations": { BEYOND_BOUND: "forged", "example.com/x": "y" } } });
        let whole: Pod = listed(pod.clone(), ResponseMode::Whole).await;
        assert_eq!(whole.metadata.annotations.unwrap().len(), 2);
        let pruned: Pod = listed(pod, ResponseMode::Pruned).await;
        assert!(
            !is_stand_in(&pruned.metadata),
            "nobody makes its pod one that is never evicted"
        );
    }
}

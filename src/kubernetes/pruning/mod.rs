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
pub enum Answers {
    Whole,
    /// Only what Stowage uses.
    Pruned,
}

type PrunedBody = UnsyncBoxBody<bytes::Bytes, BoxError>;

/// A client of the API server, by the answers that it takes.
#[derive(Debug, Clone)]
pub struct Pruning<S>(pub S, pub Answers);

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
        let resource = Resource::of_path(request.uri().path()).filter(|_| self.1 == Answers::Pruned);
        let answer = self.0.call(request);
        async move {
            let answer = answer.await?;
            let resource = resource.filter(|_| answer.status().is_success());
            Ok(answer.map(|body| match resource {
                Some(resource) => pruned(body, Scanner::new(resource)),
                None => body.map_err(Into::into).boxed_unsync(),
            }))
        }
        .boxed()
    }
}

fn pruned<B>(body: B, mut scanner: Scanner) -> PrunedBody
where
    B: HttpBody<Data = bytes::Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let pieces = body.into_data_stream().map_ok(move |piece| Frame::data(scanner.feed(&piece).into()));
    StreamBody::new(pieces.map_err(Into::into)).boxed_unsync()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubernetes::objects::{self, BEYOND_BOUND, StorageResource, is_stand_in};
    use crate::scheduling::kube_filters::volumes::{ClaimBinding, StorageObject};
    use crate::scheduling::ledger::ObservedPhase;
    use crate::scheduling::policy::Policy;
    use crate::scheduling::vocabulary::classification::PodTraits;
    use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
    use k8s_openapi::api::policy::v1::PodDisruptionBudget;
    use kube::api::ListParams;
    use kube::{Api, Client, Resource as KubeResource};
    use serde_json::{Value, json};

    /// The first object of a list of this one.
    async fn listed<K>(object: Value, answers: Answers) -> K
    where
        K: KubeResource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
    {
        let list = json!({ "metadata": { "resourceVersion": "1" }, "items": [object] }).to_string();
        let server = tower::service_fn(move |_: Request<Body>| {
            let body = Body::from(list.clone().into_bytes());
            std::future::ready(Ok::<_, std::io::Error>(Response::new(body)))
        });
        let api = Api::<K>::all(Client::new(Pruning(server, answers), "default"));
        api.list(&ListParams::default()).await.unwrap().items.remove(0)
    }

    async fn stand_in<K>(spec: Value) -> K
    where
        K: KubeResource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
    {
        let metadata = json!({ "name": "a", "namespace": "b", "uid": "c", "labels": { "app": "x" } });
        let object = listed::<K>(json!({ "metadata": metadata, "spec": spec }), Answers::Pruned).await;
        assert!(is_stand_in(object.meta()));
        object
    }

    fn many(entry: &Value) -> Vec<&Value> {
        vec![entry; 20_000]
    }

    #[tokio::test]
    async fn what_stands_for_an_object_beyond_its_bound_has_the_safe_answers() {
        let container = json!({ "name": "c", "ports": many(&json!({ "containerPort": 1 })), "resources": { "limits": { "stowage.dev/vram": "1Gi" } } });
        let pod: Pod = stand_in(json!({ "nodeName": "n", "containers": [container] })).await;
        let now = jiff::Timestamp::UNIX_EPOCH;
        let observed = objects::observation(&pod, &Policy::default(), None, now).expect("it asks for a GPU");
        assert!(matches!(observed.state, ObservedPhase::Bound { devices: None, .. }));
        assert!(observed.observed.unwrap().disruption_info.do_not_disrupt, "it is nobody's victim");

        let rule = json!({ "key": "app", "operator": "In", "values": many(&json!("nobody's")) });
        let budget: PodDisruptionBudget =
            stand_in(json!({ "selector": { "matchExpressions": [rule] } })).await;
        let budget = objects::budget(&budget).unwrap();
        assert!(budget.covers(&PodTraits { namespace: "b".into(), ..PodTraits::default() }));
        assert_eq!((budget.allowed, budget.unhealthy_may_go), (0, false));

        let claim: PersistentVolumeClaim = stand_in(json!({ "accessModes": many(&json!("x")) })).await;
        let StorageObject::Claim(claim) = claim.object() else { panic!("{claim:?}") };
        assert_eq!(claim.binding, ClaimBinding::Unusable);
        let volume: PersistentVolume = stand_in(json!({ "accessModes": many(&json!("x")) })).await;
        let StorageObject::Volume(volume) = volume.object() else { panic!("{volume:?}") };
        assert!(volume.unreadable);
    }

    #[tokio::test]
    async fn other_answers_and_other_clients_answers_are_whole() {
        let pod = json!({ "metadata": { "name": "a", "annotations": { BEYOND_BOUND: "forged", "example.com/x": "y" } } });
        let whole: Pod = listed(pod.clone(), Answers::Whole).await;
        assert_eq!(whole.metadata.annotations.unwrap().len(), 2);
        let pruned: Pod = listed(pod, Answers::Pruned).await;
        assert!(!is_stand_in(&pruned.metadata), "nobody makes its pod one that is never evicted");
    }
}

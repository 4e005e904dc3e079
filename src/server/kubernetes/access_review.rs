//! Access to an operators' page, reviewed by the API server: `TokenReview` for the user, `SubjectAccessReview` for the page.
//!
//! Nothing is cached here; the caller decides how often to ask. The token is one for the API server itself: Stowage has no
//! audience of its own for this, so that the tokens which users and Prometheus already have are accepted.

use super::request::within;
use super::token_review::{REVIEW_TIMEOUT, unavailable};
use futures::future::BoxFuture;
use k8s_openapi::api::authentication::v1::{
    TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo,
};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use serde::Serialize;
use serde::de::DeserializeOwned;
use stowage_kubernetes_objects::port::{AuthError, OperatorPage, PageAuthority};
use stowage_scheduling::units::Millis;

pub struct AccessReviews {
    client: Client,
}

impl AccessReviews {
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    async fn review_access(
        &self,
        token: &str,
        operator_page: &OperatorPage,
    ) -> Result<(), AuthError> {
        let token_review = TokenReview {
            spec: TokenReviewSpec {
                token: token.to_owned(),
                audiences: None,
            },
            ..TokenReview::default()
        };
        let answer = create_review(Api::all(self.client.clone()), &token_review).await?;
        let user = authenticated_user(answer.status.unwrap_or_default())?;
        let name = user.username.clone().unwrap_or_default();
        let answer = create_review(
            Api::all(self.client.clone()),
            &access_review_for(user, operator_page),
        )
        .await?;
        let status = answer
            .status
            .ok_or_else(|| unavailable("the API server's answer has no status"))?;
        match status.allowed && status.denied != Some(true) {
            true => Ok(()),
            false => Err(AuthError::NotAllowed {
                user: name,
                what: operator_page.to_string(),
            }),
        }
    }
}

impl PageAuthority for AccessReviews {
    fn may_see<'a>(
        &'a self,
        token: &'a str,
        operator_page: &'a OperatorPage,
    ) -> BoxFuture<'a, Result<Option<Millis>, AuthError>> {
        Box::pin(async move {
            self.review_access(token, operator_page).await?;
            Ok(super::token_review::remaining_validity(
                token,
                jiff::Timestamp::now(),
            ))
        })
    }
}

async fn create_review<K>(reviews: Api<K>, question: &K) -> Result<K, AuthError>
where
    K: Serialize + DeserializeOwned + Clone + std::fmt::Debug,
{
    let params = PostParams::default();
    within(REVIEW_TIMEOUT, reviews.create(&params, question))
        .await
        .map_err(unavailable)
}

fn authenticated_user(status: TokenReviewStatus) -> Result<UserInfo, AuthError> {
    if status.authenticated == Some(true) {
        return Ok(status.user.unwrap_or_default());
    }
    let why = status.error.filter(|error| !error.is_empty());
    Err(AuthError::Invalid(
        why.unwrap_or_else(|| "it gives no reason".into()),
    ))
}

fn access_review_for(user: UserInfo, operator_page: &OperatorPage) -> SubjectAccessReview {
    let mut spec = SubjectAccessReviewSpec {
        user: user.username,
        groups: user.groups,
        uid: user.uid,
        extra: user.extra,
        ..SubjectAccessReviewSpec::default()
    };
    match operator_page {
        OperatorPage::Cluster(path) => {
            spec.non_resource_attributes = Some(NonResourceAttributes {
                path: Some((*path).into()),
                verb: Some("get".into()),
            });
        }
        OperatorPage::Pods(namespace) => {
            spec.resource_attributes = Some(pod_read_attributes(namespace.as_deref(), None))
        }
        OperatorPage::Pod(pod) => {
            spec.resource_attributes =
                Some(pod_read_attributes(Some(&pod.namespace), Some(&pod.name)));
        }
    }
    SubjectAccessReview {
        spec,
        ..SubjectAccessReview::default()
    }
}

/// Attributes of reading one pod; without a name, all pods of the namespace; without a namespace, all pods.
fn pod_read_attributes(namespace: Option<&str>, name: Option<&str>) -> ResourceAttributes {
    ResourceAttributes {
        namespace: namespace.map(str::to_owned),
        name: name.map(str::to_owned),
        resource: Some("pods".into()),
        version: Some("v1".into()),
        verb: Some("get".into()),
        ..ResourceAttributes::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::ids::PodKey;

    #[test]
    fn pod_pages_are_reviewed_as_resources_and_cluster_pages_by_path() {
        let user = || UserInfo {
            username: Some("jane".into()),
            groups: Some(vec!["dev".into()]),
            ..UserInfo::default()
        };
        let pod = access_review_for(
            user(),
            &OperatorPage::Pod(PodKey::parse("team-a", "llm").unwrap()),
        )
        .spec;
        let of_pod = pod.resource_attributes.unwrap();
        assert_eq!(
            [
                of_pod.verb,
                of_pod.resource,
                of_pod.namespace,
                of_pod.name,
                of_pod.group
            ]
            .map(Option::unwrap_or_default),
            ["get", "pods", "team-a", "llm", ""]
        );
        assert_eq!(
            (pod.user.as_deref(), pod.groups, pod.non_resource_attributes),
            (Some("jane"), Some(vec!["dev".into()]), None)
        );
        for namespace in [None, Some("team-a")] {
            let asked =
                access_review_for(user(), &OperatorPage::Pods(namespace.map(Into::into))).spec;
            let attributes = asked.resource_attributes.unwrap();
            assert_eq!(
                (attributes.namespace.as_deref(), attributes.name),
                (namespace, None)
            );
        }
        let review_spec = access_review_for(user(), &OperatorPage::Cluster("/metrics")).spec;
        let of_page = review_spec.non_resource_attributes.unwrap();
        assert_eq!(
            (of_page.verb.as_deref(), of_page.path.as_deref()),
            (Some("get"), Some("/metrics"))
        );
        assert_eq!(review_spec.resource_attributes, None);
    }
}

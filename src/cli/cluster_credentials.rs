//! Credentials for the operators' address from a kubeconfig: its token or exec plugin, and the CA that Stowage publishes in the
//! cluster. A kubeconfig with only a client certificate has no token to show; the API server issues one for the shipped account
//! of viewers then.

use anyhow::{Context, Result, anyhow};
use http::{HeaderValue, Request, Response, header};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{ConfigMap, ServiceAccount};
use kube::api::PostParams;
use kube::client::{Body, ConfigExt};
use kube::{Api, Client, Config};
use std::path::Path;
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_kubernetes_objects::pruning::ResponseMode;
use stowage_server::kubernetes::connect::{self, ConnectError};
use stowage_telemetry::trust::Trust;
use tower::{BoxError, Layer, ServiceExt, service_fn};

/// The namespace of the shipped manifests.
pub const NAMESPACE: &str = "kube-system";
const VIEWER: &str = "stowage-viewer";
const CA_CONFIG_MAP: &str = "stowage-agents-ca";
const CA_KEY: &str = "ca.crt";
/// The name in the certificate that Stowage makes for itself, whatever the address at which it is reached.
pub const SERVER_NAME: &str = "stowage-agents.kube-system.svc";

/// Enough for one page; the API server gives no shorter one.
const TOKEN_LIFETIME_SECONDS: i64 = 600;

/// What a kubeconfig's current context gives access with.
pub struct ClusterCredentials {
    config: Config,
    client: Client,
}

impl ClusterCredentials {
    /// Without a path the usual places are looked at; `None` if nothing is there.
    pub async fn find(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Option<Self>> {
        let config = match connect::config(kubeconfig, context).await {
            Err(ConnectError::NoConfig) => return Ok(None),
            config => config?,
        };
        let client = connect::client(config.clone(), WriteTimes::default(), ResponseMode::Pruned)?;
        Ok(Some(Self { config, client }))
    }

    /// A client that waits for an answer however long it takes: a port-forward may be silent for minutes.
    pub fn patient_client(&self) -> Result<Client> {
        Ok(Client::try_from(self.config.clone())?)
    }

    /// The `Authorization` header for Stowage, which asks the API server whose it is.
    pub async fn authorization(&self) -> Result<HeaderValue> {
        let mut value = match self.kubeconfig_authorization().await? {
            Some(value) => value,
            None => self.viewer_authorization().await?,
        };
        value.set_sensitive(true);
        Ok(value)
    }

    /// The CA of Stowage's certificate, from the ConfigMap in which agents find it.
    pub async fn trust(&self) -> Result<Trust> {
        let config_map_name = || format!("the ConfigMap {NAMESPACE}/{CA_CONFIG_MAP}");
        let instead = "give its CA with --ca FILE";
        let maps = Api::<ConfigMap>::namespaced(self.client.clone(), NAMESPACE);
        let map = maps
            .get(CA_CONFIG_MAP)
            .await
            .with_context(|| format!("{}: {instead}", config_map_name()))?;
        let text = map
            .data
            .unwrap_or_default()
            .remove(CA_KEY)
            .unwrap_or_default();
        Trust::from_pem(text.as_bytes(), &config_map_name()).with_context(|| instead.to_owned())
    }

    /// What the library's own client would send: a token, a token from a file, or what an exec plugin prints.
    async fn kubeconfig_authorization(&self) -> Result<Option<HeaderValue>> {
        let Some(layer) = self.config.auth_layer()? else {
            return Ok(None);
        };
        let sent = service_fn(async |request: Request<Body>| {
            Ok::<_, BoxError>(Response::new(
                request.headers().get(header::AUTHORIZATION).cloned(),
            ))
        });
        let value = layer.layer(sent).oneshot(Request::new(Body::empty())).await;
        let value = value
            .map_err(|error| anyhow!("the kubeconfig gives no token: {error}"))?
            .into_body();
        // Stowage reviews tokens; a password is none of its business.
        Ok(value.filter(|value| value.as_bytes().starts_with(b"Bearer ")))
    }

    async fn viewer_authorization(&self) -> Result<HeaderValue> {
        let accounts = Api::<ServiceAccount>::namespaced(self.client.clone(), NAMESPACE);
        let spec = TokenRequestSpec {
            expiration_seconds: Some(TOKEN_LIFETIME_SECONDS),
            ..Default::default()
        };
        let request = TokenRequest {
            spec: Some(spec),
            ..TokenRequest::default()
        };
        let issued = accounts
            .create_token_request(VIEWER, &PostParams::default(), &request)
            .await;
        let issued = issued.with_context(|| {
            format!(
                "the kubeconfig has a client certificate and no token, and the API server issues none for the account \
                 {NAMESPACE}/{VIEWER}; give a token with --token-file FILE"
            )
        })?;
        let token = issued
            .status
            .and_then(|status| status.token)
            .unwrap_or_default();
        HeaderValue::from_str(&format!("Bearer {token}"))
            .context("the API server issued no usable token")
    }
}

//! Reads the Secret and the ConfigMap at intervals, serves what is there, and makes what is due.
//!
//! They are read and not watched: two small reads every few seconds, each as the store has it, show the same as a watch, and
//! are retried by themselves.

use super::change::apply_change;
use super::keys::{CaCertificate, ServingCertificate};
use super::plan::{CertificateInputs, SecretChange, Step, servable_certificate, step};
use super::stored::{SecretContents, read_bundle, write_bundle};
use super::{CertificateOptions, ObjectName};
use crate::kubernetes::request::{ApiRequestError, within};
use crate::service::{FailureStreak, ServerState};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;
use stowage_scheduling::units::{Moment, is_or_are, plural};
use tracing::{error, info, warn};

/// A request that takes longer is given up: the next read shows what became of it.
const CERTIFICATE_REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after a write before the objects are read again, because more may be due.
const REREAD_DELAY: Duration = Duration::from_millis(100);

/// How the names of Stowage's webhooks end; others in the same configuration are not touched.
const OWN_WEBHOOKS: &str = ".stowage.dev";

/// Puts a certificate into use; an error if it does not work.
type InstallCertificate = Box<dyn FnMut(&ServingCertificate) -> Result<(), String> + Send + Sync>;

/// Keeps the certificate until it is dropped. `serve` puts one into use; `addresses` are where, for the metrics.
pub async fn run(
    client: Client,
    state: Arc<ServerState>,
    options: CertificateOptions,
    addresses: Vec<&'static str>,
    serve: impl FnMut(&ServingCertificate) -> Result<(), String> + Send + Sync + 'static,
) {
    let mut keeper = CertificateKeeper {
        secrets: Api::namespaced(client.clone(), &options.secret.namespace),
        webhooks: Api::all(client.clone()),
        config_maps: Api::namespaced(client, &options.config_map.namespace),
        served: ServedCertificate::new(state.clone(), &options.secret, addresses, Box::new(serve)),
        state,
        observed_versions: None,
        out_of_reach: FailureStreak::default(),
        webhook_problem: None,
        options,
    };
    loop {
        let pause = match keeper.reconcile().await {
            Ok(true) => REREAD_DELAY.min(keeper.options.read_interval),
            Ok(false) => keeper.options.read_interval,
            Err(error) => {
                keeper.report_unreachable(&error);
                keeper.options.read_interval
            }
        };
        tokio::time::sleep(pause).await;
    }
}

struct CertificateKeeper {
    secrets: Api<Secret>,
    config_maps: Api<ConfigMap>,
    webhooks: Api<MutatingWebhookConfiguration>,
    state: Arc<ServerState>,
    served: ServedCertificate,
    /// The latest resourceVersions of the two objects, and since when they have not changed.
    observed_versions: Option<(ObjectVersions, Moment)>,
    out_of_reach: FailureStreak,
    /// Why the webhook's configuration could not be kept, the last time.
    webhook_problem: Option<String>,
    options: CertificateOptions,
}

type ObjectVersions = [Option<String>; 2];

impl CertificateKeeper {
    /// Reads both objects, serves, and does what is due; `true` if something was, so that more may be.
    async fn reconcile(&mut self) -> Result<bool, ApiRequestError> {
        let read_at = self.state.now();
        let (secret, config_map) = self.read().await?;
        if let Some(lasted) = self.out_of_reach.end(self.state.now()) {
            let seconds = lasted.0 / 1000;
            info!(secret = %self.options.secret, seconds, "the certificate's Secret is within reach again");
        }
        let Some(secret) = secret else {
            self.served
                .report_problem(&missing("Secret", &self.options.secret));
            return Ok(false);
        };
        let state = SecretContents::read(&secret);
        let published = config_map.as_ref().map(read_bundle);
        self.served
            .update(&state, published.as_deref(), &self.options);
        if let SecretContents::Managed(managed) = &state
            && self.state.leadership.is_leading()
        {
            // The agents' certificate does not depend on it.
            let kept = self.keep_webhook(&managed.bundle()).await;
            self.report_webhook(kept);
        }
        let inputs = CertificateInputs {
            secret: &state,
            published: published.as_deref(),
            is_leading: self.state.leadership.is_leading(),
            now: self.state.clock.to_wall(read_at),
            unchanged_for: self.unchanged_for(read_at, &secret, config_map.as_ref()),
        };
        match step(&inputs, &self.options.settings) {
            Step::Nothing => Ok(false),
            Step::WriteSecret(change) => {
                let published = published.unwrap_or_default();
                self.write_secret(secret, &state, &published, change).await
            }
            Step::Publish => match (config_map, &state) {
                (Some(config_map), SecretContents::Managed(managed)) => {
                    self.publish(config_map, &managed.bundle()).await
                }
                _ => Ok(false),
            },
        }
    }

    async fn read(&self) -> Result<(Option<Secret>, Option<ConfigMap>), ApiRequestError> {
        // The ConfigMap second: what it shows is not older than what the Secret says of it.
        let secret = within(
            CERTIFICATE_REQUEST_TIMEOUT,
            self.secrets.get_opt(&self.options.secret.name),
        )
        .await?;
        let config_map = within(
            CERTIFICATE_REQUEST_TIMEOUT,
            self.config_maps.get_opt(&self.options.config_map.name),
        )
        .await?;
        Ok((secret, config_map))
    }

    /// How long the two objects have not changed: from the end of the first read that showed these versions to the beginning of the
    /// latest.
    fn unchanged_for(
        &mut self,
        read_at: Moment,
        secret: &Secret,
        map: Option<&ConfigMap>,
    ) -> Duration {
        let versions = [
            secret.metadata.resource_version.clone(),
            map.and_then(|map| map.metadata.resource_version.clone()),
        ];
        match &self.observed_versions {
            Some((observed, since)) if *observed == versions => {
                Duration::from_millis(read_at.since(*since).0)
            }
            _ => {
                self.observed_versions = Some((versions, self.state.now()));
                Duration::ZERO
            }
        }
    }

    async fn write_secret(
        &mut self,
        secret: Secret,
        state: &SecretContents,
        published: &[CaCertificate],
        change: SecretChange,
    ) -> Result<bool, ApiRequestError> {
        let now = self.state.clock.to_wall(self.state.now());
        let changed = match apply_change(state, published, change, now, &self.options.settings) {
            Ok(changed) => changed.write(secret),
            Err(error) => {
                self.served.report_problem(&error.to_string());
                return Ok(false);
            }
        };
        // With the resourceVersion that was read: of two replicas one is refused.
        let name = &self.options.secret.name;
        let written = within(
            CERTIFICATE_REQUEST_TIMEOUT,
            self.secrets.replace(name, &PostParams::default(), &changed),
        )
        .await;
        if self.record_write(written, "Secret", &self.options.secret)? {
            self.log_change(change);
        }
        Ok(true)
    }

    async fn publish(
        &self,
        config_map: ConfigMap,
        bundle: &[&CaCertificate],
    ) -> Result<bool, ApiRequestError> {
        let (name, changed) = (
            &self.options.config_map.name,
            write_bundle(config_map, bundle),
        );
        let written = within(
            CERTIFICATE_REQUEST_TIMEOUT,
            self.config_maps
                .replace(name, &PostParams::default(), &changed),
        )
        .await;
        if self.record_write(written, "ConfigMap", &self.options.config_map)? {
            let count = bundle.len();
            info!(config_map = %self.options.config_map, "{} {} published for agents", plural(count, "CA"), is_or_are(count));
        }
        Ok(true)
    }

    /// Gives the webhook configuration the CAs, if it has others or none.
    async fn keep_webhook(&self, bundle: &[&CaCertificate]) -> Result<(), ApiRequestError> {
        let Some(name) = &self.options.webhook_configuration else {
            return Ok(());
        };
        let read = self.webhooks.get_opt(name);
        let Some(configuration) = within(CERTIFICATE_REQUEST_TIMEOUT, read).await? else {
            return Ok(());
        };
        let pem: String = bundle.iter().map(|ca| &*ca.pem).collect();
        let bundle = Some(ByteString(pem.into_bytes()));
        let webhooks = configuration.webhooks.iter().flatten();
        let own = webhooks.filter(|webhook| webhook.name.ends_with(OWN_WEBHOOKS));
        let others = own.filter(|webhook| webhook.client_config.ca_bundle != bundle);
        let patches: Vec<_> = others
            .map(|webhook| json!({ "name": webhook.name, "clientConfig": { "caBundle": bundle } }))
            .collect();
        if patches.is_empty() {
            return Ok(());
        }
        // Of what a newer API server knows of it, nothing is lost; against the version that was read.
        let version = configuration.metadata.resource_version;
        let patch = json!({ "metadata": { "resourceVersion": version }, "webhooks": patches });
        let (params, patch) = (PatchParams::default(), Patch::Strategic(patch));
        let writing = self.webhooks.patch(name, &params, &patch);
        let written = within(CERTIFICATE_REQUEST_TIMEOUT, writing).await;
        let kind = "MutatingWebhookConfiguration";
        if self.record_write(written, kind, name)? {
            info!(
                webhook = name,
                "the API server trusts the certificate of the webhook"
            );
        }
        Ok(())
    }

    /// Logs that the webhook's configuration could not be kept, once until it can be again.
    fn report_webhook(&mut self, kept: Result<(), ApiRequestError>) {
        let failed = kept.as_ref().err().map(ToString::to_string);
        if let Some(error) = &failed
            && self.webhook_problem.is_none()
        {
            warn!(
                "the webhook's configuration cannot be read or written: {error}; without the CA in it the API server admits pods as they are. \
                 The component pod-defaults-webhook lets Stowage get and patch it"
            );
        }
        self.webhook_problem = failed;
    }

    /// Counts a write's outcome. Returns whether it was written; `false` if another replica has written the object meanwhile.
    fn record_write<T>(
        &self,
        written: Result<T, ApiRequestError>,
        kind: &str,
        name: impl Display,
    ) -> Result<bool, ApiRequestError> {
        let is_conflict = |error: &ApiRequestError| {
            matches!(error, ApiRequestError::Failed(error)
                if matches!(&**error, kube::Error::Api(status) if status.code == 409))
        };
        let outcome = match &written {
            Ok(_) => "written",
            Err(error) if is_conflict(error) => "conflict",
            Err(_) => "failed",
        };
        self.state
            .metrics
            .writes
            .with_label_values(&["certificates", outcome])
            .inc();
        match written {
            Ok(_) => Ok(true),
            Err(error) if is_conflict(&error) => {
                warn!("another replica has written the {kind} {name} meanwhile; it is read again");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn log_change(&self, change: SecretChange) {
        let (secret, delay) = (
            &self.options.secret,
            self.options.settings.publication_delay,
        );
        match change {
            SecretChange::Fill => {
                info!(%secret, "made a CA and a certificate for the agents' address")
            }
            SecretChange::AddNextCa => info!(
                %secret,
                "made another CA; it signs from {} s after its publication on, when every agent has it", delay.as_secs()
            ),
            SecretChange::Promote => {
                info!(%secret, "the next CA signs from now on; made a certificate of it")
            }
            SecretChange::Issue => {
                info!(%secret, "made another certificate for the agents' address")
            }
            SecretChange::ForgetPublication => warn!(
                config_map = %self.options.config_map,
                "somebody has removed the next CA; it is published again, and its time counts again"
            ),
            SecretChange::DropPrevious => {
                info!(%secret, "no certificate of an earlier CA is in use any more")
            }
            SecretChange::CountPublication(_) => {}
        }
    }

    /// Logs that the objects are unreachable, at longer and longer intervals until they are reachable again.
    fn report_unreachable(&mut self, error: &ApiRequestError) {
        if self.out_of_reach.record_failure(self.state.now()) {
            let CertificateOptions {
                secret, config_map, ..
            } = &self.options;
            warn!(
                "the Secret {secret} or the ConfigMap {config_map} is out of reach: {error}; the certificate in use stays. The \
                 Role in the manifests lets Stowage get and update these two"
            );
        }
        self.served.mark_not_ready(&error.to_string());
    }
}

fn missing(kind: &str, name: &ObjectName) -> String {
    format!(
        "there is no {kind} {name}, and Stowage may not create it: apply the manifests again (kubectl apply), which have it empty"
    )
}

/// The certificate in use, and the problems that were reported.
struct ServedCertificate {
    state: Arc<ServerState>,
    secret: ObjectName,
    addresses: Vec<&'static str>,
    serve: InstallCertificate,
    current: Option<ServingCertificate>,
    reported_problems: Vec<String>,
}

impl ServedCertificate {
    fn new(
        state: Arc<ServerState>,
        secret: &ObjectName,
        addresses: Vec<&'static str>,
        serve: InstallCertificate,
    ) -> Self {
        let served = Self {
            state,
            secret: secret.clone(),
            addresses,
            serve,
            current: None,
            reported_problems: Vec::new(),
        };
        served.mark_not_ready("the Secret was not read yet");
        served
    }

    fn update(
        &mut self,
        state: &SecretContents,
        published: Option<&[CaCertificate]>,
        options: &CertificateOptions,
    ) {
        let found = servable_certificate(state, published, &options.settings.dns_names);
        let mut problems = match state {
            SecretContents::Managed(managed) => managed.problems.clone(),
            _ => Vec::new(),
        };
        if published.is_none() && !matches!(state, SecretContents::Foreign(_)) {
            problems.push(missing("ConfigMap", &options.config_map));
        }
        if let (SecretContents::Foreign(Ok(serving)), Some(published)) = (state, published) {
            let cas: Vec<&CaCertificate> = published.iter().collect();
            let names = &options.settings.dns_names;
            if !names
                .iter()
                .any(|name| serving.is_trusted_by(&cas, std::slice::from_ref(name)))
            {
                problems.push(format!(
                    "the ConfigMap {} has no CA of this certificate, or it is for none of Stowage's names: agents refuse it. Put \
                     the CA there under ca.crt, or empty the Secret's data, and Stowage makes both",
                    options.config_map
                ));
            }
        }
        match found {
            Ok(Some(found)) => problems.extend(self.put_into_use(found).err()),
            Ok(None) => self
                .mark_not_ready("its first certificate is being made, and its CA published before"),
            Err(error) => {
                self.mark_not_ready(&error);
                problems.push(error);
            }
        }
        let (now, current) = (
            self.state.clock.to_wall(self.state.now()),
            self.current.as_ref(),
        );
        if let Some(ended) = current
            .map(|current| current.not_after)
            .filter(|end| *end <= now)
        {
            problems.push(format!("the certificate in use has expired at {ended}"));
        }
        let edge = &self.state.metrics.edge;
        if let SecretContents::Managed(managed) = state
            && let Some(ca) = &managed.signing
        {
            edge.set_certificate_end("ca", ca.certificate.not_after.as_second());
            if ca.certificate.not_after <= now {
                problems.push(format!(
                    "the CA has expired at {}",
                    ca.certificate.not_after
                ));
            }
        }
        match problems.is_empty() {
            true => self.clear_problems(),
            false => self.report_problems(problems),
        }
    }

    fn put_into_use(&mut self, found: &ServingCertificate) -> Result<(), String> {
        if self.current.as_ref() == Some(found) {
            return Ok(());
        }
        (self.serve)(found)?;
        self.current = Some(found.clone());
        let edge = &self.state.metrics.edge;
        edge.set_certificate_end("serving", found.not_after.as_second());
        for address in &self.addresses {
            edge.tls_reloads
                .with_label_values(&[address, "applied"])
                .inc();
        }
        info!(secret = %self.secret, until = %found.not_after, "a new certificate is in use");
        self.state.missing_certificate_reason.send_replace(None);
        Ok(())
    }

    /// Makes this replica not ready for the given reason, unless a certificate is in use.
    fn mark_not_ready(&self, why: &str) {
        if self.current.is_none() {
            let why = format!(
                "no certificate for the agents' address: Secret {}: {why}",
                self.secret
            );
            self.state
                .missing_certificate_reason
                .send_replace(Some(why));
        }
    }

    fn report_problem(&mut self, problem: &str) {
        self.mark_not_ready(problem);
        self.report_problems(vec![problem.to_owned()]);
    }

    /// Logs each problem once.
    fn report_problems(&mut self, problems: Vec<String>) {
        let edge = &self.state.metrics.edge;
        let is_new = problems
            .iter()
            .any(|problem| !self.reported_problems.contains(problem));
        for address in &self.addresses {
            edge.tls_refused.with_label_values(&[address]).set(1);
            if is_new {
                edge.tls_reloads
                    .with_label_values(&[address, "rejected"])
                    .inc();
            }
        }
        for problem in problems
            .iter()
            .filter(|problem| !self.reported_problems.contains(problem))
        {
            error!(secret = %self.secret, "--agents-tls-secret: {problem}. A certificate that is in use stays");
        }
        self.reported_problems = problems;
    }

    fn clear_problems(&mut self) {
        for address in &self.addresses {
            self.state
                .metrics
                .edge
                .tls_refused
                .with_label_values(&[address])
                .set(0);
        }
        if !std::mem::take(&mut self.reported_problems).is_empty() {
            info!(secret = %self.secret, "the certificate's Secret is good again");
        }
    }
}

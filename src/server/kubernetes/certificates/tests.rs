//! What is due, state by state, and what is served of Secrets that cannot be used.

use super::change::apply_change;
use super::keys::{Ca, CaCertificate, ServingCertificate};
use super::plan::{CertificateInputs, SecretChange, Step, servable_certificate, step};
use super::stored::{ManagedSecret, SecretContents, read_bundle, write_bundle};
use super::{CertificateSettings, MANAGED, service_names};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use std::time::Duration;

const DAY: Duration = Duration::from_secs(24 * 3600);
const DELAY: Duration = Duration::from_secs(300);

/// The two objects, and a replica that looks at them.
struct Cluster {
    secret: Secret,
    /// `None` if somebody has deleted it.
    config_map: Option<ConfigMap>,
    now: Timestamp,
    settings: CertificateSettings,
}

impl Cluster {
    fn empty() -> Self {
        let names = service_names("stowage-agents", "kube-system");
        let settings = CertificateSettings {
            dns_names: names,
            lifetime: 90 * DAY,
            ca_lifetime: 365 * DAY,
            publication_delay: DELAY,
        };
        let now = "2026-11-23T00:00:00Z".parse().unwrap();
        Self {
            secret: Secret::default(),
            config_map: Some(ConfigMap::default()),
            now,
            settings,
        }
    }

    /// With a first CA, a certificate of it, and both published.
    fn filled() -> Self {
        let mut cluster = Self::empty();
        assert_eq!(
            cluster.act(false, Duration::ZERO),
            Step::WriteSecret(SecretChange::Fill)
        );
        assert_eq!(cluster.act(false, Duration::ZERO), Step::Publish);
        assert_eq!(cluster.act(true, DELAY), Step::Nothing);
        cluster
    }

    fn state(&self) -> SecretContents {
        SecretContents::read(&self.secret)
    }

    fn managed(&self) -> ManagedSecret {
        match self.state() {
            SecretContents::Managed(managed) => *managed,
            other => panic!("{other:?}"),
        }
    }

    fn published(&self) -> Vec<CaCertificate> {
        self.config_map
            .as_ref()
            .map(read_bundle)
            .unwrap_or_default()
    }

    fn step(&self, is_leading: bool, unchanged_for: Duration) -> Step {
        let (secret, published) = (self.state(), self.config_map.as_ref().map(read_bundle));
        let look = CertificateInputs {
            secret: &secret,
            published: published.as_deref(),
            is_leading,
            now: self.now,
            unchanged_for,
        };
        step(&look, &self.settings)
    }

    /// Does what is due.
    fn act(&mut self, is_leading: bool, unchanged_for: Duration) -> Step {
        let step = self.step(is_leading, unchanged_for);
        match step {
            Step::Nothing => {}
            Step::WriteSecret(change) => {
                let changed = apply_change(
                    &self.state(),
                    &self.published(),
                    change,
                    self.now,
                    &self.settings,
                )
                .unwrap();
                self.secret = changed.write(self.secret.clone());
            }
            Step::Publish => {
                let config_map = self.config_map.take().unwrap();
                self.config_map = Some(write_bundle(config_map, &self.managed().bundle()));
            }
        }
        step
    }

    fn served(&self) -> Result<Option<ServingCertificate>, String> {
        let (secret, published) = (self.state(), self.published());
        servable_certificate(&secret, Some(&published), &self.settings.dns_names)
            .map(|served| served.cloned())
    }

    fn pass(&mut self, time: Duration) {
        self.now += SignedDuration::try_from(time).unwrap();
    }

    fn set(&mut self, key: &str, text: &str) {
        let data = self.secret.data.get_or_insert_default();
        data.insert(key.into(), ByteString(text.as_bytes().to_vec()));
    }

    fn text(&self, key: &str) -> String {
        String::from_utf8(self.secret.data.as_ref().unwrap()[key].0.clone()).unwrap()
    }
}

fn signing(managed: &ManagedSecret) -> &Ca {
    managed.signing.as_ref().unwrap()
}

#[test]
fn any_replica_fills_an_empty_secret_and_publishes_its_ca() {
    let cluster = Cluster::filled();
    let managed = cluster.managed();
    assert_eq!(managed.problems, [""; 0]);
    assert_eq!(cluster.published(), [signing(&managed).certificate.clone()]);
    let serving = cluster.served().unwrap().unwrap();
    assert!(serving.is_trusted_by(
        &[&signing(&managed).certificate],
        &cluster.settings.dns_names
    ));
    assert!(!serving.is_trusted_by(&[&signing(&managed).certificate], &["elsewhere".to_owned()]));
    let until = |not_after: Timestamp| not_after.duration_since(cluster.now).as_secs();
    assert_eq!(until(serving.not_after), 90 * 24 * 3600);
    assert_eq!(
        until(signing(&managed).certificate.not_after),
        365 * 24 * 3600
    );
    assert!(
        !format!("{managed:?}").contains("PRIVATE"),
        "keys are never shown"
    );
}

#[test]
fn a_certificate_is_renewed_after_two_thirds_of_its_lifetime_and_only_by_the_leader() {
    let mut cluster = Cluster::filled();
    cluster.pass(59 * DAY);
    assert_eq!(cluster.step(true, DELAY), Step::Nothing);
    cluster.pass(DAY);
    assert_eq!(cluster.step(false, DELAY), Step::Nothing);
    let before = (cluster.served().unwrap().unwrap(), cluster.published());
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::Issue)
    );
    let after = cluster.served().unwrap().unwrap();
    assert!(
        after != before.0 && after.is_trusted_by(&[&before.1[0]], &cluster.settings.dns_names),
        "of the same CA"
    );
    assert_eq!(cluster.step(true, DELAY), Step::Nothing);
    // Other names, as of another Service, come at once.
    cluster.settings.dns_names.push("agents.example.com".into());
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::Issue)
    );
    assert_eq!(cluster.step(true, DELAY), Step::Nothing);
}

#[test]
fn a_ca_signs_when_its_publication_is_old_enough_and_a_restart_counts_on() {
    let mut cluster = Cluster::filled();
    let first = signing(&cluster.managed()).certificate.clone();
    cluster.pass(250 * DAY);
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::Issue),
        "the certificate is due as well"
    );
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::AddNextCa)
    );
    assert_eq!(cluster.act(true, Duration::ZERO), Step::Publish);
    assert_eq!(cluster.published().len(), 2);
    let counted = |time| Step::WriteSecret(SecretChange::CountPublication(time));
    assert_eq!(
        cluster.act(true, 10 * DELAY),
        counted(Duration::ZERO),
        "it counts from where it was found published"
    );
    assert_eq!(cluster.step(true, DELAY / 5), Step::Nothing);
    assert_eq!(cluster.act(true, DELAY / 4), counted(DELAY / 4));
    assert_eq!(cluster.act(true, DELAY / 4), counted(DELAY / 2));
    // The wall clock says nothing of it.
    cluster.pass(5 * DAY);
    assert_eq!(cluster.step(true, Duration::ZERO), Step::Nothing);
    assert_eq!(
        cluster.step(false, DELAY / 2),
        Step::Nothing,
        "the leader's"
    );
    assert_eq!(
        cluster.act(true, DELAY / 2),
        Step::WriteSecret(SecretChange::Promote)
    );
    let managed = cluster.managed();
    assert_eq!(
        (
            managed.next.as_ref(),
            managed.published_for,
            &managed.previous[..]
        ),
        (None, None, &[first][..])
    );
    let served = cluster.served().unwrap().unwrap();
    assert!(served.is_trusted_by(
        &[&signing(&managed).certificate],
        &cluster.settings.dns_names
    ));
    assert_eq!(
        (cluster.step(true, DELAY), cluster.published().len()),
        (Step::Nothing, 2)
    );
    // The previous CA is trusted until the last certificate of it has ended, though its own end is later.
    cluster.pass(85 * DAY);
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::Issue)
    );
    cluster.pass(10 * DAY);
    assert_eq!(
        cluster.step(true, DELAY / 2),
        Step::Nothing,
        "not before every replica has looked"
    );
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::DropPrevious)
    );
    assert_eq!(cluster.act(true, Duration::ZERO), Step::Publish);
    assert_eq!(cluster.published(), [signing(&managed).certificate.clone()]);
}

#[test]
fn a_next_ca_that_somebody_unpublishes_is_published_and_counted_anew() {
    let mut cluster = Cluster::filled();
    cluster.pass(250 * DAY);
    for _ in 0..5 {
        cluster.act(true, DELAY / 4);
    }
    assert_eq!(cluster.managed().published_for, Some(DELAY / 4));
    cluster.config_map = Some(ConfigMap::default());
    assert_eq!(
        cluster.step(false, Duration::ZERO),
        Step::Nothing,
        "its time is forgotten first, by the leader"
    );
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::ForgetPublication)
    );
    assert_eq!(cluster.act(true, DELAY), Step::Publish);
    let counted = Step::WriteSecret(SecretChange::CountPublication(Duration::ZERO));
    assert_eq!(cluster.act(true, DELAY), counted);
    cluster.config_map = None;
    assert_eq!(
        cluster.step(true, DELAY),
        Step::Nothing,
        "nothing signs that is not published"
    );
}

#[test]
fn a_ca_that_expired_is_replaced_and_the_old_certificate_served_meanwhile() {
    let mut cluster = Cluster::filled();
    let old = cluster.served().unwrap().unwrap();
    cluster.pass(400 * DAY);
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::AddNextCa)
    );
    assert_eq!(cluster.act(true, DELAY), Step::Publish);
    assert_eq!(cluster.served(), Ok(Some(old)));
    cluster.act(true, DELAY);
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::Promote)
    );
    assert!(cluster.served().unwrap().unwrap().not_after > cluster.now);
}

#[test]
fn a_secret_that_was_emptied_gets_another_ca_beside_the_one_that_agents_trust() {
    let mut cluster = Cluster::filled();
    let trusted = cluster.published();
    cluster.secret = Secret::default();
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::AddNextCa)
    );
    assert_eq!(cluster.served(), Ok(None), "what is in use stays");
    assert_eq!(cluster.step(false, DELAY), Step::Nothing);
    assert_eq!(cluster.act(true, DELAY), Step::Publish);
    assert!(cluster.published().contains(&trusted[0]) && cluster.published().len() == 2);
    cluster.act(true, DELAY);
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::Promote)
    );
    assert!(cluster.served().unwrap().is_some());
    assert_eq!(cluster.step(true, DELAY), Step::Nothing);
    assert!(
        cluster.published().contains(&trusted[0]),
        "a replica may serve a certificate of it"
    );
}

#[test]
fn a_secret_of_another_is_served_and_never_written() {
    let mut ours = Cluster::filled();
    let mut cluster = Cluster::empty();
    for key in ["tls.crt", "tls.key"] {
        cluster.set(key, &ours.text(key));
    }
    cluster.pass(1000 * DAY);
    assert_eq!(cluster.step(true, DELAY), Step::Nothing);
    assert_eq!(cluster.served(), ours.served());
    // Half a key.
    let key = ours.text("tls.key");
    for (key, text, says) in [
        ("tls.key", &key[..key.len() / 2], "tls.key cannot be read"),
        ("tls.key", "", "tls.key cannot be read"),
        ("tls.crt", "", "tls.crt holds no certificate"),
        (
            "tls.crt",
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            "tls.crt cannot be read",
        ),
    ] {
        let before = cluster.text(key);
        cluster.set(key, text);
        let error = cluster.served().unwrap_err();
        assert!(error.contains(says), "{error}");
        assert_eq!(cluster.step(true, DELAY), Step::Nothing);
        cluster.set(key, &before);
    }
    ours.pass(60 * DAY);
    ours.act(true, DELAY);
    cluster.set("tls.key", &ours.text("tls.key"));
    assert_eq!(
        cluster.served(),
        Err("tls.key does not belong to tls.crt".into())
    );
}

#[test]
fn a_managed_secret_with_half_a_key_is_repaired() {
    let mut cluster = Cluster::filled();
    cluster.set("tls.key", "half");
    assert!(
        cluster
            .served()
            .unwrap_err()
            .contains("tls.key cannot be read")
    );
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::Issue)
    );
    assert!(cluster.served().unwrap().is_some());
    // A CA that lost its key signs no more; what it signed is trusted until the next one may sign.
    let (old, trusted) = (cluster.served(), cluster.published());
    cluster.set("ca.key", "half");
    assert_eq!(
        cluster.managed().problems,
        ["ca.key is not the key of ca.crt"]
    );
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::AddNextCa)
    );
    assert_eq!(cluster.act(true, DELAY), Step::Publish);
    assert_eq!(
        (cluster.served(), cluster.published()[0].clone()),
        (old.clone(), trusted[0].clone())
    );
    // And one that lost its certificate is still trusted.
    cluster.set("ca.crt", "");
    cluster.set(
        "next-ca.crt",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    );
    assert!(cluster.managed().problems[0].starts_with("next-ca.crt cannot be used"));
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::AddNextCa)
    );
    assert_eq!(cluster.act(true, DELAY), Step::Publish);
    assert!(cluster.published().contains(&trusted[0]));
    assert_eq!(cluster.served(), old);
    cluster.act(true, DELAY);
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::Promote)
    );
    assert!(cluster.managed().problems.is_empty() && cluster.served().unwrap().is_some());
}

#[test]
fn a_certificate_of_an_unknown_ca_is_not_served_and_anothers_ca_does_not_sign() {
    let (mut cluster, other) = (Cluster::filled(), Cluster::filled());
    for key in ["tls.crt", "tls.key"] {
        cluster.set(key, &other.text(key));
    }
    assert!(
        cluster
            .served()
            .unwrap_err()
            .contains("of no CA that agents are to trust")
    );
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::Issue)
    );
    assert!(cluster.served().unwrap().is_some());
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    cluster.set("ca.crt", &params.self_signed(&key).unwrap().pem());
    cluster.set("ca.key", &key.serialize_pem());
    assert!(!signing(&cluster.managed()).can_sign());
}

#[test]
fn a_clock_that_was_ahead_leaves_nothing_that_is_not_valid_today() {
    let mut cluster = Cluster::empty();
    cluster.pass(3650 * DAY);
    cluster.act(true, DELAY);
    cluster.act(true, DELAY);
    let far = cluster.managed();
    cluster.now = "2026-11-23T00:00:00Z".parse().unwrap();
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::Issue),
        "it would last for years"
    );
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::AddNextCa)
    );
    assert_eq!(
        signing(&cluster.managed()).certificate,
        signing(&far).certificate
    );
    assert!(
        cluster.served().unwrap().unwrap().not_after
            < cluster.now + SignedDuration::from_hours(91 * 24)
    );
}

#[test]
fn what_else_is_in_the_objects_stays() {
    let mut cluster = Cluster::empty();
    cluster.secret.type_ = Some("kubernetes.io/tls".into());
    cluster.set("tls.crt", "");
    cluster.set("tls.key", "");
    cluster.secret.metadata.annotations = Some([("team".to_owned(), "a".to_owned())].into());
    cluster.secret.metadata.resource_version = Some("7".into());
    assert_eq!(
        cluster.act(true, DELAY),
        Step::WriteSecret(SecretChange::Fill)
    );
    let metadata = &cluster.secret.metadata;
    let annotations = metadata.annotations.as_ref().unwrap();
    assert_eq!(
        (&*annotations["team"], &*annotations[MANAGED]),
        ("a", "managed")
    );
    assert_eq!(
        metadata.resource_version.as_deref(),
        Some("7"),
        "what the write is conditional on"
    );
    let data = [("notes".to_owned(), "mine".to_owned())].into();
    cluster.config_map = Some(ConfigMap {
        data: Some(data),
        ..ConfigMap::default()
    });
    cluster.act(true, DELAY);
    assert_eq!(
        cluster
            .config_map
            .as_ref()
            .unwrap()
            .data
            .as_ref()
            .unwrap()
            .len(),
        2
    );
}

//! What is due: one step from the state of the Secret and the ConfigMap, and what of it may be served.
//!
//! Pure: no clock, no network, no randomness. The step is made by [`super::change`].

use super::CertificateSettings;
use super::issue::serving_validity_end;
use super::keys::{Ca, CaCertificate, ServingCertificate};
use super::stored::{ManagedSecret, SecretContents};
use jiff::{SignedDuration, Timestamp};
use std::time::Duration;

/// Inputs of a step: one read of the Secret and the ConfigMap, leadership and time.
#[derive(Debug, Clone)]
pub struct CertificateInputs<'a> {
    pub secret: &'a SecretContents,
    /// The published CAs; `None` if there is no ConfigMap.
    pub published: Option<&'a [CaCertificate]>,
    pub is_leading: bool,
    /// By the wall clock, which may jump.
    pub now: Timestamp,
    /// For how long this process has seen the two objects as they are, by a clock that never jumps.
    pub unchanged_for: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Nothing,
    WriteSecret(SecretChange),
    /// Publish what the Secret says is to be trusted.
    Publish,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SecretChange {
    /// The first CA and a certificate of it: no agent trusts another yet.
    Fill,
    /// Another CA, which signs nothing yet. What is published stays so.
    AddNextCa,
    /// The next CA was found published, for so long.
    CountPublication(Duration),
    /// It is published no more: counting restarts when it is again.
    ForgetPublication,
    /// The next CA signs from now on, first of all a certificate.
    Promote,
    /// Another certificate of the signing CA.
    Issue,
    /// No certificate of the previous CAs is in use any more.
    DropPrevious,
}

/// What is due now. Any replica fills a Secret and publishes what no agent has yet, because none is ready without; all else is
/// the leader's.
pub fn step(inputs: &CertificateInputs<'_>, settings: &CertificateSettings) -> Step {
    match inputs.secret {
        SecretContents::Foreign(_) => Step::Nothing,
        // Agents that trust another CA must get the new one first.
        SecretContents::Empty => match inputs.published {
            None => Step::Nothing,
            Some([]) => Step::WriteSecret(SecretChange::Fill),
            Some(_) => Step::WriteSecret(SecretChange::AddNextCa),
        },
        SecretContents::Managed(managed) => step_for_managed(managed, inputs, settings),
    }
}

fn step_for_managed(
    managed: &ManagedSecret,
    inputs: &CertificateInputs<'_>,
    settings: &CertificateSettings,
) -> Step {
    let if_leading = |change| {
        if inputs.is_leading {
            Step::WriteSecret(change)
        } else {
            Step::Nothing
        }
    };
    if needs_serving_certificate(managed, inputs.now, settings) {
        return if_leading(SecretChange::Issue);
    }
    let Some(published) = inputs.published else {
        return Step::Nothing;
    };
    let is_published = |ca: &CaCertificate| published.iter().any(|one| one.der == ca.der);
    if managed.signing.is_none() && managed.next.is_none() {
        return if_leading(SecretChange::AddNextCa);
    }
    let trusted = managed.bundle();
    if trusted.len() != published.len() || !trusted.iter().all(|ca| is_published(ca)) {
        let lacks_next = managed
            .next
            .as_ref()
            .is_some_and(|ca| !is_published(&ca.certificate));
        if lacks_next && managed.published_for.is_some() {
            return if_leading(SecretChange::ForgetPublication);
        }
        let lacks_signing = managed
            .signing
            .as_ref()
            .is_some_and(|ca| !is_published(&ca.certificate));
        return if inputs.is_leading || lacks_signing {
            Step::Publish
        } else {
            Step::Nothing
        };
    }
    match ca_change(managed, inputs, settings) {
        Some(change) => if_leading(change),
        None => Step::Nothing,
    }
}

/// The change that is due to the CAs when every trusted CA is published.
fn ca_change(
    managed: &ManagedSecret,
    inputs: &CertificateInputs<'_>,
    settings: &CertificateSettings,
) -> Option<SecretChange> {
    let delay = settings.publication_delay;
    let is_good = |ca: &Ca| {
        ca.can_sign() && !is_due(ca.certificate.not_after, settings.ca_lifetime, inputs.now)
    };
    match &managed.next {
        Some(next) if !is_good(next) => return Some(SecretChange::AddNextCa),
        Some(_) => {
            let Some(counted) = managed.published_for else {
                return Some(SecretChange::CountPublication(Duration::ZERO));
            };
            let published_for = counted.saturating_add(inputs.unchanged_for);
            if published_for >= delay {
                return Some(SecretChange::Promote);
            }
            // A restart loses what is not counted yet.
            if inputs.unchanged_for >= delay / 4 {
                return Some(SecretChange::CountPublication(published_for));
            }
        }
        None if !managed.signing.as_ref().is_some_and(is_good) => {
            return Some(SecretChange::AddNextCa);
        }
        None => {}
    }
    let has_ended = |until: Timestamp| until <= inputs.now;
    let have_all_ended = managed.previous.iter().all(|ca| has_ended(ca.not_after))
        || managed.previous_until.is_some_and(has_ended);
    // By the other clock as well: where the wall clock has jumped, every replica has read the new certificate by then.
    (!managed.previous.is_empty() && have_all_ended && inputs.unchanged_for >= delay)
        .then_some(SecretChange::DropPrevious)
}

/// Whether the signing CA is to sign another certificate now.
fn needs_serving_certificate(
    managed: &ManagedSecret,
    now: Timestamp,
    settings: &CertificateSettings,
) -> bool {
    let Some(ca) = managed.signing.as_ref().filter(|ca| ca.can_sign()) else {
        return false;
    };
    let end = serving_validity_end(&ca.certificate, now, settings.lifetime);
    // A certificate of a CA that has expired helps nobody: the next CA is on its way.
    if end <= now {
        return false;
    }
    match &managed.serving {
        Err(_) => true,
        Ok(serving) if !serving.is_trusted_by(&[&ca.certificate], &settings.dns_names) => true,
        Ok(serving) => {
            is_due(serving.not_after, settings.lifetime, now) && serving.not_after != end
        }
    }
}

/// Whether to renew a certificate: two thirds of its lifetime have passed, or it ends well after a new one would.
fn is_due(not_after: Timestamp, lifetime: Duration, now: Timestamp) -> bool {
    let lifetime = SignedDuration::try_from(lifetime).unwrap_or(SignedDuration::MAX);
    let (left, third) = (not_after.duration_since(now), lifetime / 3);
    left <= third || left > lifetime.saturating_add(third)
}

/// The certificate to serve; an error if there is one that cannot be used. `None` while there is none yet.
pub fn servable_certificate<'a>(
    secret: &'a SecretContents,
    published: Option<&[CaCertificate]>,
    names: &[String],
) -> Result<Option<&'a ServingCertificate>, String> {
    match secret {
        SecretContents::Empty => Ok(None),
        SecretContents::Foreign(serving) => serving.as_ref().map(Some).map_err(Clone::clone),
        SecretContents::Managed(managed) => match &managed.serving {
            Err(_) if managed.awaits_first_publication() => Ok(None),
            Err(error) => Err(error.clone()),
            Ok(serving) => {
                let mut cas = managed.bundle();
                cas.extend(published.unwrap_or_default());
                // Under any of its names: new ones come with the next certificate.
                match names
                    .iter()
                    .any(|name| serving.is_trusted_by(&cas, std::slice::from_ref(name)))
                {
                    true => Ok(Some(serving)),
                    false => Err("tls.crt is of no CA that agents are to trust".into()),
                }
            }
        },
    }
}

impl ManagedSecret {
    /// Whether it has no certificate because its first CA is still being published.
    fn awaits_first_publication(&self) -> bool {
        self.signing.is_none() && self.next.is_some()
    }
}

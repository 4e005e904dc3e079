//! Makes the changes that [`super::plan`] decides on. Pure but for the keys that are drawn.

use super::CertificateSettings;
use super::issue::{IssueError, new_ca, new_serving_certificate};
use super::keys::{Ca, CaCertificate};
use super::plan::SecretChange;
use super::stored::{ManagedSecret, SecretContents};
use jiff::Timestamp;

/// The Secret's new content.
pub fn apply_change(
    secret: &SecretContents,
    published: &[CaCertificate],
    change: SecretChange,
    now: Timestamp,
    settings: &CertificateSettings,
) -> Result<ManagedSecret, IssueError> {
    let mut managed = match secret {
        SecretContents::Managed(managed) => ManagedSecret::clone(managed),
        SecretContents::Empty | SecretContents::Foreign(_) => ManagedSecret::empty(),
    };
    managed.problems.clear();
    match change {
        SecretChange::Fill => {
            managed.sign_with(new_ca(now, settings.ca_lifetime)?, now, settings)?
        }
        SecretChange::AddNextCa => {
            if managed.signing.is_none() {
                managed.adopt(published);
            }
            managed.next = Some(new_ca(now, settings.ca_lifetime)?);
            managed.published_for = None;
        }
        SecretChange::CountPublication(time) => managed.published_for = Some(time),
        SecretChange::ForgetPublication => managed.published_for = None,
        SecretChange::Promote => {
            let next = managed.next.take().ok_or(IssueError::NoKey)?;
            managed.published_for = None;
            managed.retire(now, settings);
            managed.sign_with(next, now, settings)?;
        }
        SecretChange::Issue => {
            let ca = managed.signing.as_ref().ok_or(IssueError::NoKey)?;
            managed.serving = Ok(new_serving_certificate(
                ca,
                &settings.dns_names,
                now,
                settings.lifetime,
            )?);
        }
        SecretChange::DropPrevious => {
            managed.previous.clear();
            managed.previous_until = None;
        }
    }
    Ok(managed)
}

impl ManagedSecret {
    fn empty() -> Self {
        Self {
            signing: None,
            next: None,
            published_for: None,
            previous: Vec::new(),
            previous_until: None,
            serving: Err("there is none".into()),
            problems: Vec::new(),
        }
    }

    fn sign_with(
        &mut self,
        ca: Ca,
        now: Timestamp,
        settings: &CertificateSettings,
    ) -> Result<(), IssueError> {
        self.serving = Ok(new_serving_certificate(
            &ca,
            &settings.dns_names,
            now,
            settings.lifetime,
        )?);
        self.signing = Some(ca);
        Ok(())
    }

    /// Keeps the published CAs trusted as previous ones, whoever made them: a replica may serve a certificate of them.
    fn adopt(&mut self, published: &[CaCertificate]) {
        for ca in published {
            if self
                .previous
                .iter()
                .all(|previous_ca| previous_ca.der != ca.der)
            {
                self.previous.push(ca.clone());
            }
        }
        self.previous_until = None;
    }

    /// Makes the signing CA a previous one, trusted until its last certificate has expired: a replica without contact to the API
    /// server may serve one until then.
    fn retire(&mut self, now: Timestamp, settings: &CertificateSettings) {
        let serving_ends = match &self.serving {
            Ok(serving) => serving.not_after,
            Err(_) => now
                .saturating_add(settings.lifetime)
                .unwrap_or(Timestamp::MAX),
        };
        self.previous.retain(|ca| ca.not_after > now);
        self.previous_until = match (self.previous.is_empty(), self.previous_until) {
            (true, _) => Some(serving_ends),
            (false, Some(until)) => Some(until.max(serving_ends)),
            (false, None) => None,
        };
        if let Some(ca) = self.signing.take() {
            self.previous.insert(0, ca.certificate);
        }
        if self.previous.is_empty() {
            self.previous_until = None;
        }
    }
}

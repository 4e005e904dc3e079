//! The part of a pod that admission reads, borrowed from its text. What is not said stays not said, so that a rule's `has()` finds
//! what it would find on an API server.

use crate::VRAM;
use serde::{Deserialize, Serialize};
use std::borrow::{Borrow, Cow};
use std::collections::BTreeMap;
use std::ops::Deref;

/// A string, borrowed where the text has it without escapes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

impl Deref for Text<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for Text<'_> {
    fn borrow(&self) -> &str {
        &self.0
    }
}

pub type Texts<'a> = BTreeMap<Text<'a>, Text<'a>>;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AdmittedPod<'a> {
    #[serde(borrow, default)]
    pub metadata: AdmittedMetadata<'a>,
    #[serde(borrow)]
    pub spec: AdmittedSpec<'a>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct AdmittedMetadata<'a> {
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub labels: Option<Texts<'a>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub annotations: Option<Texts<'a>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmittedSpec<'a> {
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub scheduler_name: Option<Text<'a>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub runtime_class_name: Option<Text<'a>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub node_name: Option<Text<'a>>,
    #[serde(borrow)]
    pub containers: Vec<AdmittedContainer<'a>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub init_containers: Option<Vec<AdmittedContainer<'a>>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub ephemeral_containers: Option<Vec<AdmittedContainer<'a>>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmittedContainer<'a> {
    #[serde(borrow)]
    pub name: Text<'a>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub image: Option<Text<'a>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub env: Option<Vec<AdmittedVariable<'a>>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub resources: Option<AdmittedResources<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ports: Option<Vec<AdmittedPort>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub volume_mounts: Option<Vec<AdmittedMount<'a>>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmittedVariable<'a> {
    #[serde(borrow)]
    pub name: Text<'a>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub value: Option<Text<'a>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub value_from: Option<AdmittedSource<'a>>,
}

/// Where a variable's value comes from; sources other than fields are not told apart.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmittedSource<'a> {
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub field_ref: Option<AdmittedField<'a>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmittedField<'a> {
    #[serde(borrow)]
    pub field_path: Text<'a>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AdmittedResources<'a> {
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Texts<'a>>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    pub requests: Option<Texts<'a>>,
}

/// That there is a port is all that counts.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AdmittedPort {}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmittedMount<'a> {
    #[serde(borrow)]
    pub mount_path: Text<'a>,
}

/// The label by which a pod or a namespace wants no defaults.
const OPT_OUT: &str = "stowage.dev/pod-defaults";

impl AdmittedPod<'_> {
    pub(super) fn has_opted_out(&self) -> bool {
        let label = self
            .metadata
            .labels
            .as_ref()
            .and_then(|all| all.get(OPT_OUT));
        label.is_some_and(|value| &**value == "false")
    }

    /// Whether it asks for VRAM; zero is no request.
    pub fn asks_for_vram(&self) -> bool {
        let init = self.spec.init_containers.iter().flatten();
        (self.spec.containers.iter().chain(init)).any(AdmittedContainer::asks_for_vram)
    }
}

impl AdmittedContainer<'_> {
    pub(super) fn asks_for_vram(&self) -> bool {
        let both = |resources: &AdmittedResources<'_>| {
            let mut amounts = [&resources.limits, &resources.requests]
                .into_iter()
                .flatten();
            amounts.any(|all| all.get(VRAM).is_some_and(|amount| is_positive(amount)))
        };
        self.resources.as_ref().is_some_and(both)
    }

    pub(super) fn has_variable(&self, name: &str) -> bool {
        self.env.iter().flatten().any(|one| *one.name == *name)
    }
}

/// Of a quantity that an API server has taken, such as `40Gi`, `0.5` or `1e3`.
fn is_positive(quantity: &str) -> bool {
    let mut digits = quantity
        .chars()
        .take_while(|one| !one.is_ascii_alphabetic());
    !quantity.starts_with('-') && digits.any(|one| ('1'..='9').contains(&one))
}

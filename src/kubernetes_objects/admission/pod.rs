//! The part of a pod that its defaults depend on, borrowed from its text.

use crate::VRAM;
use serde::Deserialize;
use std::borrow::{Borrow, Cow};
use std::collections::BTreeMap;
use std::ops::Deref;

/// A string, borrowed where the text has it without escapes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
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

#[derive(Debug, Clone, Deserialize)]
pub struct AdmittedPod<'a> {
    #[serde(borrow, default)]
    pub metadata: AdmittedMetadata<'a>,
    #[serde(borrow)]
    pub spec: AdmittedSpec<'a>,
}

#[derive(Debug, Clone, Default, Deserialize)]
pub struct AdmittedMetadata<'a> {
    #[serde(borrow)]
    pub labels: Option<Texts<'a>>,
    #[serde(borrow)]
    pub annotations: Option<Texts<'a>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmittedSpec<'a> {
    #[serde(borrow)]
    pub scheduler_name: Option<Text<'a>>,
    #[serde(borrow)]
    pub runtime_class_name: Option<Text<'a>>,
    #[serde(borrow)]
    pub containers: Vec<AdmittedContainer<'a>>,
    #[serde(borrow)]
    pub init_containers: Option<Vec<AdmittedContainer<'a>>>,
    #[serde(borrow)]
    pub ephemeral_containers: Option<Vec<AdmittedContainer<'a>>>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct AdmittedContainer<'a> {
    #[serde(borrow)]
    pub name: Text<'a>,
    #[serde(borrow)]
    pub image: Option<Text<'a>>,
    #[serde(borrow)]
    pub env: Option<Vec<AdmittedVariable<'a>>>,
    #[serde(borrow, default)]
    pub resources: AdmittedResources<'a>,
    pub ports: Option<Vec<AdmittedPort>>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct AdmittedVariable<'a> {
    #[serde(borrow)]
    pub name: Text<'a>,
}

#[derive(Debug, Clone, Default, Deserialize)]
pub struct AdmittedResources<'a> {
    #[serde(borrow)]
    pub limits: Option<Texts<'a>>,
    #[serde(borrow)]
    pub requests: Option<Texts<'a>>,
}

/// That there is a port is all that counts.
#[derive(Debug, Clone, Deserialize)]
pub struct AdmittedPort {}

/// The label by which a pod or a namespace wants no defaults.
const OPT_OUT: &str = "stowage.dev/pod-defaults";

impl<'a> AdmittedPod<'a> {
    pub(super) fn has_opted_out(&self) -> bool {
        let label = self.metadata.labels.as_ref();
        label.is_some_and(|all| all.get(OPT_OUT).is_some_and(|value| &**value == "false"))
    }

    /// Each container, and where it is.
    pub(super) fn containers(&self) -> impl Iterator<Item = (String, &AdmittedContainer<'a>)> {
        let at = |list| move |(n, one)| (format!("/spec/{list}/{n}"), one);
        let init = self.spec.init_containers.iter().flatten().enumerate();
        let all = self.spec.containers.iter().enumerate();
        all.map(at("containers"))
            .chain(init.map(at("initContainers")))
    }

    pub fn names_runtime_class(&self) -> bool {
        let name = self.spec.runtime_class_name.as_deref();
        name.is_some_and(|name| !name.is_empty())
    }

    /// Containers of every kind.
    pub fn container_count(&self) -> usize {
        let others = [&self.spec.init_containers, &self.spec.ephemeral_containers];
        self.spec.containers.len() + others.into_iter().flatten().map(Vec::len).sum::<usize>()
    }

    /// Whether it asks for VRAM; zero is no request.
    pub fn asks_for_vram(&self) -> bool {
        self.containers().any(|(_, one)| one.asks_for_vram())
    }
}

impl AdmittedContainer<'_> {
    pub(super) fn asks_for_vram(&self) -> bool {
        let AdmittedResources { limits, requests } = &self.resources;
        let mut amounts = [limits, requests].into_iter().flatten();
        amounts.any(|all| all.get(VRAM).is_some_and(|amount| is_positive(amount)))
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

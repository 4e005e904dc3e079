//! Which new pods the shipped admission policies refuse: their own text (manifests/base/admission-policy.yaml), evaluated here, so
//! that there is no second account of what they say.

use super::AdmittedPod;
use cel::extractors::This;
use cel::{Context, Env, ExecutionError, Program};
use regex::Regex;
use serde::Deserialize;
use serde_json::json;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, LazyLock};
use stowage_scheduling::units::Bytes;

const SHIPPED: &str = include_str!("../../../manifests/base/admission-policy.yaml");

/// Who asks the API server to create a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Creator {
    Anyone,
    /// The mirror of a static pod.
    Kubelet,
}

/// The namespace of a new pod; `labels` are `None` where they are not known.
#[derive(Debug, Clone, Copy)]
pub struct NamespaceFacts<'a> {
    pub name: &'a str,
    pub labels: Option<&'a BTreeMap<String, String>>,
}

/// One rule that refuses a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Refusal {
    pub policy: &'static str,
    pub message: &'static str,
    /// Not so where the namespace's labels may exempt it, and are not known.
    pub is_certain: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Object {
    kind: String,
    metadata: Named,
    spec: Spec,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    match_constraints: Constraints,
    match_conditions: Vec<Written>,
    variables: Vec<Written>,
    validations: Vec<Written>,
    policy_name: String,
    match_resources: Constraints,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Constraints {
    resource_rules: Vec<ResourceRule>,
    namespace_selector: Selector,
}

#[derive(Deserialize)]
struct ResourceRule {
    operations: Vec<String>,
    resources: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Selector {
    match_expressions: Vec<Requirement>,
}

#[derive(Deserialize)]
struct Requirement {
    key: String,
    operator: String,
    #[serde(default)]
    values: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Written {
    name: String,
    expression: String,
    message: String,
}

/// A policy about new pods, compiled.
struct Policy {
    name: String,
    conditions: Vec<Program>,
    variables: Vec<(String, Program)>,
    validations: Vec<(String, Program)>,
    selector: Selector,
}

static POLICIES: LazyLock<Vec<Policy>> = LazyLock::new(|| {
    let objects: Vec<Object> = serde_saphyr::from_multiple(SHIPPED).expect("tests read it");
    let (bindings, policies): (Vec<Object>, Vec<Object>) = objects
        .into_iter()
        .partition(|one| one.kind.ends_with("Binding"));
    let mut selectors: BTreeMap<String, Selector> = bindings
        .into_iter()
        .map(|one| {
            (
                one.spec.policy_name,
                one.spec.match_resources.namespace_selector,
            )
        })
        .collect();
    let is_about = |rule: &ResourceRule| {
        rule.operations.iter().any(|one| one == "CREATE")
            && rule.resources.iter().any(|one| one == "pods")
    };
    let about_pods = policies.into_iter().filter(|one| {
        one.spec
            .match_constraints
            .resource_rules
            .iter()
            .any(is_about)
    });
    about_pods
        .map(
            |Object {
                 metadata: Named { name },
                 spec,
                 ..
             }| Policy {
                conditions: spec.match_conditions.iter().map(compile).collect(),
                variables: spec
                    .variables
                    .iter()
                    .map(|one| (one.name.clone(), compile(one)))
                    .collect(),
                validations: spec
                    .validations
                    .iter()
                    .map(|one| (one.message.clone(), compile(one)))
                    .collect(),
                selector: selectors.remove(&name).unwrap_or_default(),
                name,
            },
        )
        .collect()
});

static ENV: LazyLock<Arc<Env>> = LazyLock::new(|| Arc::new(Env::stdlib()));

fn compile(written: &Written) -> Program {
    ENV.compile(&written.expression).expect("tests evaluate it")
}

/// The rules that refuse the creation of a pod, none if it is taken. What the API server and its mutating policies add is there
/// already.
pub fn refusals(pod: &AdmittedPod<'_>, namespace: NamespaceFacts<'_>, by: Creator) -> Vec<Refusal> {
    let groups = match by {
        Creator::Anyone => json!([]),
        Creator::Kubelet => json!(["system:nodes"]),
    };
    let request = json!({
        "operation": "CREATE", "kind": { "kind": "Pod" }, "userInfo": { "username": "", "groups": groups },
    });
    let mut context = Context::with_env(ENV.clone());
    let object = cel::to_value(pod).expect("names and texts only");
    context.add_variable_from_value("object", object);
    context.add_variable_from_value(
        "request",
        cel::to_value(request).expect("names and texts only"),
    );
    add_functions(&mut context).expect("none of them is CEL's own");
    let judge = |policy: &'static Policy| {
        let selected = policy.selector.takes(namespace);
        let broken = match selected {
            Some(false) => Vec::new(),
            _ => policy.broken(&mut context),
        };
        broken.into_iter().map(move |message| Refusal {
            policy: &policy.name,
            message,
            is_certain: selected.is_some(),
        })
    };
    POLICIES.iter().flat_map(judge).collect()
}

impl Policy {
    /// The messages of the rules that the pod breaks. A rule that fails refuses: `failurePolicy: Fail`.
    fn broken(&'static self, context: &mut Context<'_, '_>) -> Vec<&'static str> {
        let is = |program: &Program, context: &Context<'_, '_>, value: bool| {
            program.execute(context) == Ok(value.into())
        };
        if self
            .conditions
            .iter()
            .any(|condition| is(condition, context, false))
        {
            return Vec::new();
        }
        let mut variables = HashMap::new();
        for (name, program) in &self.variables {
            context.add_variable_from_value("variables", variables.clone());
            // Only a rule that uses it fails with it.
            if let Ok(value) = program.execute(context) {
                variables.insert(name.clone(), value);
            }
        }
        context.add_variable_from_value("variables", variables);
        let broken = self
            .validations
            .iter()
            .filter(|(_, rule)| !is(rule, context, true));
        broken.map(|(message, _)| message.as_str()).collect()
    }
}

impl Selector {
    /// `None` where that depends on labels that are not known.
    fn takes(&self, namespace: NamespaceFacts<'_>) -> Option<bool> {
        let met = self.match_expressions.iter().map(|one| {
            let value = match (one.key.as_str(), namespace.labels) {
                ("kubernetes.io/metadata.name", _) => Some(namespace.name),
                (key, Some(labels)) => labels.get(key).map(String::as_str),
                (_, None) => return None,
            };
            let is_listed =
                value.is_some_and(|value| one.values.iter().any(|listed| listed == value));
            Some(match one.operator.as_str() {
                "In" => is_listed,
                "NotIn" => !is_listed,
                "Exists" => value.is_some(),
                _ => value.is_none(),
            })
        });
        let met: Vec<Option<bool>> = met.collect();
        match met.contains(&Some(false)) {
            true => Some(false),
            false => met.into_iter().collect::<Option<Vec<bool>>>().map(|_| true),
        }
    }
}

/// What Kubernetes adds to CEL, as far as the policies use it.
fn add_functions(context: &mut Context<'_, '_>) -> Result<(), cel::DeclarationError> {
    thread_local! {
        static PATTERNS: RefCell<HashMap<String, Regex>> = RefCell::default();
    }
    let quantity = |text: Arc<String>| {
        let amount = Bytes::parse_quantity_rounding_up(&text);
        amount
            .map(|amount| amount.0)
            .map_err(|_| ExecutionError::function_error("quantity", text))
    };
    let matches = |This(text): This<Arc<String>>, pattern: Arc<String>| {
        PATTERNS.with_borrow_mut(|known| {
            if !known.contains_key(pattern.as_str()) {
                let compiled = Regex::new(&pattern)
                    .map_err(|error| ExecutionError::function_error("matches", error))?;
                known.insert(pattern.to_string(), compiled);
            }
            Ok(known[pattern.as_str()].is_match(&text))
        })
    };
    context.add_function("quantity", quantity)?;
    context.add_function("compareTo", |This(one): This<u64>, other: u64| {
        one.cmp(&other) as i64
    })?;
    context.add_function("isGreaterThan", |This(one): This<u64>, other: u64| {
        one > other
    })?;
    context.add_function("matches", matches)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    /// As an API server has it: amounts are texts, and names and a scheduler are there.
    fn stored(mut pod: Value) -> Value {
        let spec = pod
            .as_object_mut()
            .unwrap()
            .entry("spec")
            .or_insert(json!({}));
        let spec = spec.as_object_mut().unwrap();
        spec.entry("schedulerName")
            .or_insert("default-scheduler".into());
        spec.entry("containers").or_insert(json!([{}]));
        for list in ["containers", "initContainers"] {
            for container in spec
                .get_mut(list)
                .and_then(Value::as_array_mut)
                .into_iter()
                .flatten()
            {
                container["name"] = "c".into();
                let limits = container
                    .pointer_mut("/resources/limits")
                    .and_then(Value::as_object_mut);
                for amount in limits.into_iter().flat_map(|limits| limits.values_mut()) {
                    *amount = amount
                        .as_str()
                        .map_or(amount.to_string(), str::to_owned)
                        .into();
                }
            }
        }
        pod
    }

    /// The table that a real API server is asked, too.
    #[test]
    fn pods_of_the_table_are_refused_as_an_api_server_refuses_them() {
        let table = include_str!("../../../tests/fixtures/admission.yaml");
        let table: Vec<BTreeMap<String, Vec<Value>>> = serde_saphyr::from_str(table).unwrap();
        let rows = table.into_iter().flat_map(BTreeMap::into_values).flatten();
        let mut seen = 0;
        for row in rows
            .filter(|row| row["pod"].is_object() && row["debug"].is_null() && row["bind"].is_null())
        {
            let pod = stored(row["pod"].clone());
            let pod =
                AdmittedPod::deserialize(&pod).unwrap_or_else(|error| panic!("{row}: {error}"));
            let name = row["in"].as_str().unwrap_or("team-a");
            let exempt =
                BTreeMap::from([("stowage.dev/all-gpus".to_owned(), "allowed".to_owned())]);
            let labels = match name {
                "gpu-operator" | "monitoring" => exempt,
                _ => BTreeMap::new(),
            };
            let by = match row["by"].as_str() {
                Some("kubelet") => Creator::Kubelet,
                _ => Creator::Anyone,
            };
            let said = refusals(
                &pod,
                NamespaceFacts {
                    name,
                    labels: Some(&labels),
                },
                by,
            );
            let is_right = match row["refused"].as_str() {
                Some(reason) => said.iter().any(|refusal| refusal.message.contains(reason)),
                None => said.is_empty(),
            };
            assert!(is_right, "{row}: {said:?}");
            seen += 1;
        }
        assert!(seen > 90, "{seen}");
    }
}

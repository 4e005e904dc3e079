//! Which new pods the shipped admission policies refuse: their own text (manifests/base/admission-policy.yaml), evaluated here, so
//! that there is no second account of what they say.

use cel::extractors::This;
use cel::{Context, Env, ExecutionError, Program};
use regex::Regex;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::HashMap;
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
    pub labels: Option<&'a Value>,
}

/// One rule that refuses a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub policy: &'static str,
    pub message: &'static str,
    /// Not so where the namespace's labels may exempt it, and are not known.
    pub is_certain: bool,
}

type Named = Vec<(&'static str, Program)>;

/// A policy about new pods, compiled.
struct Policy {
    name: &'static str,
    conditions: Named,
    variables: Named,
    /// By their messages.
    validations: Named,
    /// What the binding requires of a namespace.
    selector: &'static [Value],
}

static OBJECTS: LazyLock<Vec<Value>> =
    LazyLock::new(|| serde_saphyr::from_multiple(SHIPPED).expect("a test reads it"));
static ENV: LazyLock<Arc<Env>> = LazyLock::new(|| Arc::new(Env::stdlib()));
static POLICIES: LazyLock<Vec<Policy>> = LazyLock::new(|| {
    let has = |list: &Value, what: &str| items(list).iter().any(|one| one == what);
    let is_about_new_pods =
        |rule: &Value| has(&rule["operations"], "CREATE") && has(&rule["resources"], "pods");
    let policy = |object: &'static Value| {
        let spec = &object["spec"];
        let rules = items(&spec["matchConstraints"]["resourceRules"]);
        rules.iter().find(|rule| is_about_new_pods(rule))?;
        let name = &object["metadata"]["name"];
        let binding = OBJECTS
            .iter()
            .find(|one| one["spec"]["policyName"] == *name)?;
        let selector = &binding["spec"]["matchResources"]["namespaceSelector"];
        Some(Policy {
            name: text(name),
            conditions: compiled(&spec["matchConditions"], "name"),
            variables: compiled(&spec["variables"], "name"),
            validations: compiled(&spec["validations"], "message"),
            selector: items(&selector["matchExpressions"]),
        })
    };
    OBJECTS.iter().filter_map(policy).collect()
});

fn items(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn compiled(list: &'static Value, key: &str) -> Named {
    let compile = |text: &str| ENV.compile(text).expect("a test evaluates it");
    let all = items(list).iter();
    all.map(|one| (text(&one[key]), compile(text(&one["expression"]))))
        .collect()
}

/// The rules that refuse the creation of a pod, none if it is taken. What the API server and its mutating policies add is there
/// already; of the pod, only `metadata` and `spec` count.
pub fn refusals(pod: &Value, namespace: NamespaceFacts<'_>, by: Creator) -> Vec<Refusal> {
    let groups = match by {
        Creator::Anyone => json!([]),
        Creator::Kubelet => json!(["system:nodes"]),
    };
    let request = json!({
        "operation": "CREATE", "kind": { "kind": "Pod" }, "userInfo": { "username": "", "groups": groups },
    });
    let mut context = Context::with_env(ENV.clone());
    for (name, value) in [("object", pod), ("request", &request)] {
        let value = cel::to_value(value).expect("JSON is a part of CEL");
        context.add_variable_from_value(name, value);
    }
    add_functions(&mut context).expect("none of them is CEL's own");
    let judge = |policy: &'static Policy| {
        let selected = selects(policy.selector, namespace);
        let broken = match selected {
            Some(false) => Vec::new(),
            _ => policy.broken(&mut context),
        };
        let refusal = move |message| Refusal {
            policy: policy.name,
            message,
            is_certain: selected.is_some(),
        };
        broken.into_iter().map(refusal)
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
            .any(|(_, one)| is(one, context, false))
        {
            return Vec::new();
        }
        let mut variables = HashMap::new();
        for (name, program) in &self.variables {
            context.add_variable_from_value("variables", variables.clone());
            // Only a rule that uses it fails with it.
            variables.extend(program.execute(context).ok().map(|value| (*name, value)));
        }
        context.add_variable_from_value("variables", variables);
        let broken = self
            .validations
            .iter()
            .filter(|(_, rule)| !is(rule, context, true));
        broken.map(|(message, _)| *message).collect()
    }
}

/// Whether a selector takes a namespace; `None` where that depends on labels that are not known.
fn selects(requirements: &[Value], namespace: NamespaceFacts<'_>) -> Option<bool> {
    let is_met = |one: &Value| {
        let value = match text(&one["key"]) {
            "kubernetes.io/metadata.name" => Some(namespace.name),
            key => namespace.labels?[key].as_str(),
        };
        match text(&one["operator"]) {
            "NotIn" => Some(
                !items(&one["values"])
                    .iter()
                    .any(|listed| listed.as_str() == value),
            ),
            "DoesNotExist" => Some(value.is_none()),
            _ => None,
        }
    };
    let met: Vec<Option<bool>> = requirements.iter().map(is_met).collect();
    let first = |what| met.iter().find(|one| **one == what);
    *first(Some(false))
        .or_else(|| first(None))
        .unwrap_or(&Some(true))
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

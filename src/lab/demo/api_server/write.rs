//! Performs writes: create, replace, patch and delete, with the rules that Stowage's clients depend on.
//!
//! Synchronous: a store, a key, a body and the time in; the new object or an error out. Bindings and evictions are in `pods`.

use super::defaults;
use super::error::ApiError;
use super::patch::PatchKind;
use super::resource::RequestTarget;
use super::store::{ObjectKey, Store};
use jiff::Timestamp;
use serde_json::{Value, json};
use std::sync::Arc;

/// Which half of an object a write may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ObjectPart {
    Main,
    Status,
}

pub fn create(
    store: &mut Store,
    target: &RequestTarget,
    mut object: Value,
    now: Timestamp,
) -> Result<Arc<Value>, ApiError> {
    let resource = target.resource;
    if !object.is_object() || !(object["metadata"].is_object() || object["metadata"].is_null()) {
        return Err(ApiError::bad_request("the body is no object with metadata"));
    }
    let name = object_name(store, &object)?;
    let namespace = namespace_of(target, &object)?;
    object["metadata"]["name"] = json!(name);
    if resource.namespaced {
        object["metadata"]["namespace"] = json!(namespace);
    }
    let classes: Vec<(String, i64)> = priority_classes(store);
    defaults::set_defaults(&mut object, resource, |class| {
        classes
            .iter()
            .find(|(name, _)| name == class)
            .map(|(_, value)| *value)
    });
    let key = ObjectKey {
        resource,
        namespace,
        name,
    };
    if resource.is_pods() && is_gated(&object) {
        check_new_gated_pod(&key, &object)?;
        super::pods::set_condition(&mut object, gated_condition(), now);
    }
    store.create(key, object, &format_time(now))
}

pub fn replace(
    store: &mut Store,
    key: &ObjectKey,
    part: ObjectPart,
    object: Value,
) -> Result<Arc<Value>, ApiError> {
    let current = store.get(key)?.clone();
    check_preconditions(key, &current, &object)?;
    let merged = restrict_to_part(key, part, &current, object)?;
    update(store, key, merged)
}

pub fn patch(
    store: &mut Store,
    key: &ObjectKey,
    part: ObjectPart,
    kind: PatchKind,
    patch: &Value,
) -> Result<Arc<Value>, ApiError> {
    let current = store.get(key)?.clone();
    if kind != PatchKind::Json {
        check_patched_uid(key, &current, patch)?;
        check_preconditions(key, &current, patch)?;
    }
    let mut patched = Value::clone(&current);
    kind.apply(&mut patched, patch)?;
    let merged = restrict_to_part(key, part, &current, patched)?;
    update(store, key, merged)
}

/// Deletes, or marks a running pod as terminating until its kubelet is done.
pub fn delete(
    store: &mut Store,
    key: &ObjectKey,
    options: &Value,
    now: Timestamp,
) -> Result<Arc<Value>, ApiError> {
    let current = store.get(key)?.clone();
    check_preconditions(
        key,
        &current,
        &json!({"metadata": options["preconditions"]}),
    )?;
    let grace = if key.resource.is_pods() {
        grace_seconds(&current, options)
    } else {
        0
    };
    let is_terminating = !current["metadata"]["deletionTimestamp"].is_null();
    match (grace, has_finalizers(&current)) {
        (0, false) => return store.remove(key),
        (1.., _) if is_terminating => {
            return shorten_grace_period(store, key, &current, options, now);
        }
        _ => {}
    }
    let deletion_time = now
        .checked_add(jiff::SignedDuration::from_secs(grace))
        .unwrap_or(now);
    set_deletion(store, key, &current, deletion_time, grace)
}

/// The grace period of a pod that is being deleted only becomes shorter. It counts from the first deletion on, and is a second if it
/// would be over.
fn shorten_grace_period(
    store: &mut Store,
    key: &ObjectKey,
    current: &Arc<Value>,
    options: &Value,
    now: Timestamp,
) -> Result<Arc<Value>, ApiError> {
    let current_grace = current["metadata"]["deletionGracePeriodSeconds"]
        .as_i64()
        .unwrap_or_default();
    let ends = current["metadata"]["deletionTimestamp"]
        .as_str()
        .and_then(|text| text.parse().ok());
    let requested_grace = options["gracePeriodSeconds"]
        .as_i64()
        .filter(|requested| *requested < current_grace);
    let (Some(ends), Some(grace)) = (ends, requested_grace) else {
        return Ok(current.clone());
    };
    let sooner: Option<Timestamp> =
        Timestamp::checked_sub(ends, jiff::SignedDuration::from_secs(current_grace - grace)).ok();
    match sooner.filter(|sooner| *sooner >= now) {
        Some(sooner) => set_deletion(store, key, current, sooner, grace),
        None => set_deletion(store, key, current, now, 1),
    }
}

fn set_deletion(
    store: &mut Store,
    key: &ObjectKey,
    current: &Value,
    gone_at: Timestamp,
    grace: i64,
) -> Result<Arc<Value>, ApiError> {
    let mut terminating = current.clone();
    terminating["metadata"]["deletionTimestamp"] = json!(format_time(gone_at));
    terminating["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
    store.update(key, terminating)
}

/// A finalizer keeps the object.
fn has_finalizers(object: &Value) -> bool {
    object["metadata"]["finalizers"]
        .as_array()
        .is_some_and(|finalizers| !finalizers.is_empty())
}

/// Stores the change, or removes the object if its last finalizer is gone.
fn update(store: &mut Store, key: &ObjectKey, object: Value) -> Result<Arc<Value>, ApiError> {
    let is_grace_over = object["metadata"]["deletionTimestamp"].is_string()
        && object["metadata"]["deletionGracePeriodSeconds"] == 0;
    if is_grace_over && !has_finalizers(&object) {
        store.remove(key)
    } else {
        store.update(key, object)
    }
}

/// A time as Kubernetes writes it: UTC, whole seconds.
pub fn format_time(timestamp: Timestamp) -> String {
    timestamp.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn object_name(store: &Store, object: &Value) -> Result<String, ApiError> {
    let metadata = &object["metadata"];
    match (metadata["name"].as_str(), metadata["generateName"].as_str()) {
        (Some(name), _) if !name.is_empty() => Ok(name.to_owned()),
        (_, Some(prefix)) => Ok(format!("{prefix}{:05x}", store.revision())),
        _ => Err(ApiError::bad_request(
            "metadata.name: Required value: name or generateName is required",
        )),
    }
}

fn namespace_of(target: &RequestTarget, object: &Value) -> Result<String, ApiError> {
    let object_namespace = object["metadata"]["namespace"].as_str().unwrap_or_default();
    match (target.resource.namespaced, target.namespace.as_str()) {
        (false, _) => Ok(String::new()),
        (true, "") if object_namespace.is_empty() => Ok("default".to_owned()),
        (true, "") => Ok(object_namespace.to_owned()),
        (true, namespace) if object_namespace.is_empty() || object_namespace == namespace => {
            Ok(namespace.to_owned())
        }
        (true, _) => Err(ApiError::bad_request(
            "the namespace of the provided object does not match the request",
        )),
    }
}

fn priority_classes(store: &Store) -> Vec<(String, i64)> {
    let Some(resource) = super::resource::Resource::named("priorityclasses") else {
        return Vec::new();
    };
    let name_and_value = |class: &Arc<Value>| {
        Some((
            class["metadata"]["name"].as_str()?.to_owned(),
            class["value"].as_i64()?,
        ))
    };
    store.list(resource).filter_map(name_and_value).collect()
}

fn is_gated(pod: &Value) -> bool {
    pod["spec"]["schedulingGates"]
        .as_array()
        .is_some_and(|gates| !gates.is_empty())
}

fn check_new_gated_pod(key: &ObjectKey, pod: &Value) -> Result<(), ApiError> {
    if pod["spec"]["nodeName"].as_str().is_none_or(str::is_empty) {
        return Ok(());
    }
    let why = "spec.nodeName: Forbidden: cannot be set until all schedulingGates have been cleared";
    Err(ApiError::invalid(key.resource, &key.name, why))
}

/// The `PodScheduled` condition of a gated pod; it lasts until a scheduler writes another one.
fn gated_condition() -> Value {
    json!({
        "type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
        "message": "Scheduling is blocked due to non-empty scheduling gates",
    })
}

/// In a patch a UID is a value like any other, and one that may not change.
fn check_patched_uid(key: &ObjectKey, current: &Value, patch: &Value) -> Result<(), ApiError> {
    match patch["metadata"]["uid"].as_str() {
        Some(uid) if current["metadata"]["uid"] != uid => {
            Err(ApiError::other_uid(key.resource, &key.name, uid))
        }
        _ => Ok(()),
    }
}

/// A body that names a UID or a version applies only to that object.
pub(crate) fn check_preconditions(
    key: &ObjectKey,
    current: &Value,
    body: &Value,
) -> Result<(), ApiError> {
    let precondition = |field: &str| {
        body["metadata"][field]
            .as_str()
            .filter(|text| !text.is_empty())
    };
    let actual = |field: &str| current["metadata"][field].as_str().unwrap_or_default();
    let conflict = |why: String| {
        Err(ApiError::conflict(
            &key.resource.qualified(),
            &key.name,
            why,
        ))
    };
    match (precondition("uid"), precondition("resourceVersion")) {
        (Some(uid), _) if uid != actual("uid") => conflict(format!(
            "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
            actual("uid")
        )),
        (_, Some(version)) if version != actual("resourceVersion") => conflict(
            "the object has been modified; please apply your changes to the latest version and try again"
                .into(),
        ),
        _ => Ok(()),
    }
}

/// Restricts a write to its part of the object, and restores immutable fields.
fn restrict_to_part(
    key: &ObjectKey,
    part: ObjectPart,
    current: &Value,
    mut wanted: Value,
) -> Result<Value, ApiError> {
    if !wanted.is_object() {
        return Err(ApiError::bad_request("the result is no object"));
    }
    if part == ObjectPart::Status {
        let mut merged = current.clone();
        merged["status"] = wanted["status"].take();
        return Ok(merged);
    }
    for field in IMMUTABLE_METADATA {
        restore(&mut wanted["metadata"], &current["metadata"], field);
    }
    restore(&mut wanted, current, "kind");
    restore(&mut wanted, current, "apiVersion");
    if key.resource.has_status() {
        restore(&mut wanted, current, "status");
    }
    if key.resource.is_pods() {
        check_pod_update(key, current, &wanted)?;
    }
    if wanted["spec"] != current["spec"]
        && let Some(generation) = current["metadata"]["generation"].as_i64()
    {
        wanted["metadata"]["generation"] = json!(generation + 1);
    }
    Ok(wanted)
}

const IMMUTABLE_METADATA: [&str; 8] = [
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
];

fn restore(wanted: &mut Value, current: &Value, field: &str) {
    let fields = defaults::fields_of(wanted);
    match current.get(field) {
        Some(value) => fields.insert(field.to_owned(), value.clone()),
        None => fields.remove(field),
    };
}

/// In a pod's spec, gates may be removed; only a Binding sets the node.
fn check_pod_update(key: &ObjectKey, current: &Value, wanted: &Value) -> Result<(), ApiError> {
    if wanted["spec"]["nodeName"] != current["spec"]["nodeName"] {
        return Err(ApiError::invalid(
            key.resource,
            &key.name,
            "spec.nodeName: Forbidden: may not be changed",
        ));
    }
    let gates = |pod: &Value| {
        pod["spec"]["schedulingGates"]
            .as_array()
            .cloned()
            .unwrap_or_default()
    };
    let before = gates(current);
    if gates(wanted).iter().all(|gate| before.contains(gate)) {
        return Ok(());
    }
    let why = "metadata.schedulingGates: Forbidden: only deletion is allowed";
    Err(ApiError::invalid(key.resource, &key.name, why))
}

/// No kubelet waits for a pod that was never bound or has ended.
fn grace_seconds(pod: &Value, options: &Value) -> i64 {
    let bound = pod["spec"]["nodeName"]
        .as_str()
        .is_some_and(|node| !node.is_empty());
    let ended = matches!(
        pod["status"]["phase"].as_str(),
        Some("Succeeded" | "Failed")
    );
    if !bound || ended {
        return 0;
    }
    let requested_grace = options["gracePeriodSeconds"].as_i64();
    requested_grace
        .or_else(|| pod["spec"]["terminationGracePeriodSeconds"].as_i64())
        .unwrap_or(0)
        .max(0)
}

//! Takes an answer's JSON in pieces and hands out the part of it that is kept.
//!
//! One object, at most its bound, is held back until it is whole: an object beyond its bound is replaced by a stand-in with what
//! is known of it all the same. What is no JSON comes out as no JSON, for the decoder to say so.

use super::kept::{KeptField, Resource};
use crate::kube_filters::amount;
use crate::{BEYOND_BOUND, DROPPED_BYTES, VRAM};
use memchr::memchr2;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use stowage_scheduling::kube_filters::resources::{CPU, EPHEMERAL_STORAGE, MEMORY};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::demand::{ContainerRole, total_pod_request};
use stowage_scheduling::vocabulary::device_plugin::PluginResource;

/// Bytes of decoded JSON beside its text: of any value, of an object, and of an object whose many fields are mostly empty.
const VALUE_OVERHEAD: usize = 32;
const OBJECT_OVERHEAD: usize = 96;
const HEAVY_OVERHEAD: usize = 3 << 10;
/// The field of which the length of what is dropped counts.
const ANNOTATIONS: &str = "annotations";
/// Longer names are of no field that is kept, nor valid in Kubernetes.
const MAX_NAME_BYTES: usize = 512;
/// Maximum bytes of an essential value; the list of a pod's devices is the longest.
const MAX_ESSENTIAL_BYTES: usize = 8 << 10;
/// Maximum resources that a stand-in lists beside those that every node has.
const MAX_OTHER_RESOURCES: usize = 16;
/// Maximum host ports of a stand-in, and topologies of its anti-affinity.
const MAX_TERMS: usize = 1000;
/// Deeper than any object of Kubernetes.
const MAX_DEPTH: usize = 64;

pub(crate) struct Scanner {
    resource: &'static Resource,
    output: Vec<u8>,
    frames: Vec<Frame>,
    token: Token,
    /// In a string, behind a backslash.
    is_escaped: bool,
    /// The last name, whose value is in progress or comes next.
    name: Vec<u8>,
    /// What is kept of that value; `None` if nothing is.
    value: Option<&'static KeptField>,
    /// Brackets that are open in a value that is dropped.
    dropped_depth: usize,
    object: Option<ObjectInProgress>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    Between,
    Name,
    Text,
    /// A number, `true`, `false` or `null`.
    Word,
}

/// What a value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// The whole: one object, a list or a watch event.
    Answer,
    /// The objects of a list.
    List,
    /// One of those, or the object of a watch event.
    Object,
    Field,
}

/// An object or a list that is open and kept.
#[derive(Debug)]
struct Frame {
    kept: &'static KeptField,
    role: Role,
    is_object: bool,
    is_empty: bool,
    /// A value comes next, not its name.
    is_named: bool,
    /// Tells the objects of a list apart: what came before the one that it is, or is in.
    item: usize,
}

/// The object that is held back.
#[derive(Debug, Default)]
struct ObjectInProgress {
    /// Where it begins in the output.
    start: usize,
    decoded_bytes: usize,
    exceeds_bound: bool,
    /// Each with the item of a list that it is in, its name and its value.
    essentials: Vec<(&'static KeptField, usize, Vec<u8>, Vec<u8>)>,
    dropped_annotations: TextLength,
}

/// How long JSON strings are without quotes and escapes.
#[derive(Debug, Default)]
struct TextLength {
    bytes: usize,
    /// As much of an escape as has come.
    escape: Vec<u8>,
}

impl TextLength {
    fn add(&mut self, part: &[u8]) {
        for byte in part {
            if self.escape.is_empty() && *byte != b'\\' {
                self.bytes += usize::from(*byte != b'"');
                continue;
            }
            self.escape.push(*byte);
            self.bytes += match self.escape[..] {
                [_, b'u', b'0', b'0', b'0'..=b'7', _] => 1,
                // The latter is half of four.
                [_, b'u', b'0', b'0'..=b'7', _, _] | [_, b'u', b'd' | b'D', b'8'..=b'f', _, _] => 2,
                [_, b'u', _, _, _, _] => 3,
                [_] | [_, b'u', ..] => continue,
                _ => 1,
            };
            self.escape.clear();
        }
    }
}

impl Scanner {
    pub fn new(resource: &'static Resource) -> Self {
        Self {
            resource,
            output: Vec::new(),
            frames: Vec::new(),
            token: Token::Between,
            is_escaped: false,
            name: Vec::new(),
            value: None,
            dropped_depth: 0,
            object: None,
        }
    }

    /// Takes the next piece of an answer, and hands out what is whole.
    pub fn feed(&mut self, mut piece: &[u8]) -> Vec<u8> {
        while let Some(first) = piece.first() {
            let used = match self.token {
                Token::Between if self.dropped_depth > 0 => self.skip_dropped(piece),
                Token::Between => self.scan_structure(*first),
                Token::Name | Token::Text => self.scan_string(piece),
                Token::Word => self.scan_literal(piece),
            };
            piece = &piece[used..];
        }
        let from = self.object.as_mut().map_or(self.output.len(), |object| {
            std::mem::take(&mut object.start)
        });
        let held_back = self.output.split_off(from);
        std::mem::replace(&mut self.output, held_back)
    }

    fn scan_structure(&mut self, byte: u8) -> usize {
        match byte {
            b'"' if self
                .frames
                .last()
                .is_some_and(|frame| frame.is_object && !frame.is_named) =>
            {
                self.token = Token::Name;
                self.name.clear();
            }
            b'{' | b'[' => self.open(byte == b'{'),
            b'}' | b']' => self.close(),
            b'\n' if self.frames.is_empty() => self.write(b"\n"),
            b',' | b':' | b' ' | b'\t' | b'\r' | b'\n' => {}
            _ => {
                self.begin_scalar();
                self.token = if byte == b'"' {
                    Token::Text
                } else {
                    Token::Word
                };
                self.write_scalar(&[byte]);
            }
        }
        1
    }

    /// In a value that is dropped only brackets matter, and strings, which may have brackets in them.
    fn skip_dropped(&mut self, piece: &[u8]) -> usize {
        let matters = |byte: &u8| matches!(byte, b'"' | b'{' | b'[' | b'}' | b']');
        let Some(index) = piece.iter().position(matters) else {
            return piece.len();
        };
        match piece[index] {
            b'"' => self.token = Token::Text,
            b'{' | b'[' => self.dropped_depth += 1,
            _ => self.dropped_depth -= 1,
        }
        index + 1
    }

    fn scan_string(&mut self, piece: &[u8]) -> usize {
        let (used, is_end) = match std::mem::take(&mut self.is_escaped) {
            true => (1, false),
            false => match memchr2(b'"', b'\\', piece) {
                Some(index) => {
                    self.is_escaped = piece[index] == b'\\';
                    (index + 1, !self.is_escaped)
                }
                None => (piece.len(), false),
            },
        };
        match self.token {
            Token::Name if self.name.len() <= MAX_NAME_BYTES => {
                self.name.extend_from_slice(&piece[..used])
            }
            Token::Name => {}
            Token::Text | Token::Word | Token::Between => self.write_scalar(&piece[..used]),
        }
        if is_end && std::mem::replace(&mut self.token, Token::Between) == Token::Name {
            self.end_name();
        }
        used
    }

    fn scan_literal(&mut self, piece: &[u8]) -> usize {
        let ends = |byte: &u8| matches!(byte, b',' | b']' | b'}' | b' ' | b'\t' | b'\r' | b'\n');
        let used = piece.iter().position(ends);
        if used.is_some() {
            self.token = Token::Between;
        }
        let used = used.unwrap_or(piece.len());
        self.write_scalar(&piece[..used]);
        used
    }

    fn end_name(&mut self) {
        let Some(frame) = self.frames.last_mut() else {
            return;
        };
        frame.is_named = true;
        let is_whole = self.name.pop() == Some(b'"') && self.name.len() < MAX_NAME_BYTES;
        self.value = match (frame.role, &self.name[..]) {
            _ if !is_whole => None,
            (Role::Answer, b"items" | b"object") => Some(&self.resource.kept),
            (_, name) => frame.kept.member(name),
        };
        if self.value.is_none() {
            let name = std::mem::take(&mut self.name);
            self.count_dropped(&name);
            self.name = name;
        }
    }

    /// Writes what comes before a value that is kept.
    fn begin(&mut self) -> Role {
        let is_deep = self.frames.len() >= MAX_DEPTH;
        let Some(frame) = self.frames.last_mut() else {
            self.value = Some(&self.resource.kept);
            return Role::Answer;
        };
        let role = match (frame.role, &self.name[..]) {
            (Role::List, _) => Role::Object,
            (Role::Answer, b"items") => Role::List,
            (Role::Answer, b"object") => Role::Object,
            (Role::Answer | Role::Object | Role::Field, _) => Role::Field,
        };
        if !frame.is_object {
            self.value = Some(frame.kept);
        }
        self.value = self.value.filter(|_| !is_deep);
        let is_named = std::mem::take(&mut frame.is_named);
        if self.value.is_some() {
            let is_first = std::mem::take(&mut frame.is_empty);
            let name = std::mem::take(&mut self.name);
            self.write(if is_first { b"" } else { b"," });
            if is_named {
                [&b"\""[..], &name, b"\":"]
                    .into_iter()
                    .for_each(|part| self.write(part));
            }
            self.name = name;
            self.charge(VALUE_OVERHEAD);
        }
        role
    }

    fn begin_scalar(&mut self) {
        self.begin();
        self.record_essential();
    }

    fn record_essential(&mut self) {
        if let (Some(object), Some(kept)) = (
            &mut self.object,
            self.value.filter(|kept| kept.is_essential),
        ) {
            let item = self.frames.last().map_or(0, |frame| frame.item);
            object
                .essentials
                .push((kept, item, self.name.clone(), Vec::new()));
        }
    }

    fn open(&mut self, is_object: bool) {
        let role = self.begin();
        let Some(kept) = self.value else {
            self.dropped_depth = 1;
            return;
        };
        match role {
            Role::Answer | Role::Object => {
                self.object = Some(ObjectInProgress {
                    start: self.output.len(),
                    ..ObjectInProgress::default()
                });
            }
            Role::List => self.object = None,
            Role::Field => {}
        }
        if is_object {
            self.charge(if kept.is_heavy {
                HEAVY_OVERHEAD
            } else {
                OBJECT_OVERHEAD
            });
            self.record_essential();
        }
        let item = match self.frames.last() {
            Some(frame) if frame.is_object || !is_object => frame.item,
            _ => self
                .object
                .as_ref()
                .map_or(0, |object| object.decoded_bytes),
        };
        self.write(if is_object { b"{" } else { b"[" });
        self.frames.push(Frame {
            kept,
            role,
            is_object,
            is_empty: true,
            is_named: false,
            item,
        });
    }

    fn close(&mut self) {
        let Some(frame) = self.frames.pop() else {
            return;
        };
        let dropped = self
            .object
            .as_ref()
            .map_or(0, |object| object.dropped_annotations.bytes);
        if frame.kept.name == ANNOTATIONS && dropped > 0 {
            let comma = if frame.is_empty { "" } else { "," };
            self.write(format!("{comma}\"{DROPPED_BYTES}\":\"{dropped}\"").as_bytes());
        }
        self.write(if frame.is_object { b"}" } else { b"]" });
        if matches!(frame.role, Role::Answer | Role::Object)
            && let Some(object) = self.object.take().filter(|object| object.exceeds_bound)
        {
            self.output
                .extend(stand_in(self.resource, object).to_string().into_bytes());
        }
    }

    fn write_scalar(&mut self, part: &[u8]) {
        let Some(kept) = self.value.filter(|_| self.dropped_depth == 0) else {
            return self.count_dropped(part);
        };
        if let Some((.., text)) = self
            .object
            .as_mut()
            .and_then(|object| object.essentials.last_mut())
            && kept.is_essential
            && text.len() <= MAX_ESSENTIAL_BYTES
        {
            text.extend_from_slice(part);
        }
        self.write(part);
    }

    /// Counts a dropped part of an annotation: the API server limits the sum of them all.
    fn count_dropped(&mut self, part: &[u8]) {
        let is_annotation =
            |frame: &Frame| self.dropped_depth == 0 && frame.kept.name == ANNOTATIONS;
        if let Some(object) = self
            .object
            .as_mut()
            .filter(|_| self.frames.last().is_some_and(is_annotation))
        {
            object.dropped_annotations.add(part);
        }
    }

    fn write(&mut self, part: &[u8]) {
        self.charge(part.len());
        if !self
            .object
            .as_ref()
            .is_some_and(|object| object.exceeds_bound)
        {
            self.output.extend_from_slice(part);
        }
    }

    fn charge(&mut self, bytes: usize) {
        let Some(object) = &mut self.object else {
            return;
        };
        object.decoded_bytes = object.decoded_bytes.saturating_add(bytes);
        if object.decoded_bytes > self.resource.max_bytes
            && !std::mem::replace(&mut object.exceeds_bound, true)
        {
            self.output.truncate(object.start);
        }
    }
}

fn stand_in(resource: &Resource, object: ObjectInProgress) -> Value {
    let mut object_json: Value = serde_json::from_str(resource.stand_in).unwrap_or_default();
    object_json["metadata"]["annotations"][BEYOND_BOUND] = json!("");
    let is_sidecar_policy = |(.., text): &&(_, _, _, Vec<u8>)| text == b"\"Always\"";
    let sidecars: BTreeSet<usize> = object
        .essentials
        .iter()
        .filter(is_sidecar_policy)
        .map(|one| one.1)
        .collect();
    let mut amounts = BTreeMap::<&str, BTreeMap<String, Vec<_>>>::new();
    let [mut ports, mut terms] = <[BTreeMap<usize, Value>; 2]>::default();
    for (kept, item, name, text) in object.essentials {
        let name: String = String::from_utf8_lossy(&name).into();
        let value: Option<Value> = serde_json::from_slice(&text)
            .ok()
            .filter(|_| text.len() <= MAX_ESSENTIAL_BYTES);
        match (&kept.path[..], value) {
            (["spec", list, "resources", kind, _], value) => {
                let role = match *list {
                    "containers" => ContainerRole::Main,
                    _ if sidecars.contains(&item) => ContainerRole::Sidecar,
                    _ => ContainerRole::Init,
                };
                // It may be that this is not known.
                let amount = value.and_then(|value| amount(&name, value.as_str()?).ok());
                let parts = amounts.entry(*kind).or_default().entry(name).or_default();
                parts.push(amount.map(|amount| (role, Bytes(amount))));
            }
            // Which pods of these namespaces it means is not known.
            ([.., "podAntiAffinity", _, "namespaces" | "namespaceSelector"], _) => {
                terms.entry(item).or_default()["namespaceSelector"] = json!({});
            }
            ([.., "restartPolicy"], _) | (_, None) => {}
            ([.., "podAntiAffinity", _, _], Some(topology)) => {
                let term = terms.entry(item).or_default();
                (term["labelSelector"], term["topologyKey"]) = (json!({}), topology);
            }
            ([.., "ports", _], Some(value)) => ports.entry(item).or_default()[name] = value,
            (path, Some(value)) => {
                *path
                    .iter()
                    .fold(&mut object_json, |value: &mut Value, name| {
                        &mut value[*name]
                    }) = value;
            }
        }
    }
    let mut container = json!({ "name": "?" });
    for (kind, mut sums) in amounts {
        let first = [CPU, MEMORY, EPHEMERAL_STORAGE, VRAM].map(|name| sums.remove_entry(name));
        // A device plugin's resources count by their limits, and all others by their requests.
        let is_counted = |(name, parts): &(String, Vec<Option<(_, Bytes)>>)| {
            let is_any =
                |part: &Option<(_, Bytes)>| part.is_none_or(|(_, amount)| amount > Bytes::ZERO);
            PluginResource::is_plugin_resource(name) == (kind == "limits")
                && parts.iter().any(is_any)
        };
        let others = sums
            .into_iter()
            .filter(is_counted)
            .take(MAX_OTHER_RESOURCES);
        for (name, parts) in first.into_iter().flatten().chain(others) {
            let sum = parts
                .into_iter()
                .collect::<Option<Vec<_>>>()
                .map(total_pod_request);
            let unit = if name == CPU { "m" } else { "" };
            let text = sum.map_or_else(|| "?".to_owned(), |sum| format!("{}{unit}", sum.0));
            container["resources"][kind][name] = text.into();
        }
    }
    let on_host = ports
        .into_values()
        .filter(|port| !port["hostPort"].is_null());
    container["ports"] = on_host.take(MAX_TERMS).collect();
    object_json["spec"]["containers"] = json!([container]);
    let terms: BTreeMap<String, Value> = terms
        .into_values()
        .map(|term| (term.to_string(), term))
        .collect();
    object_json["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] =
        terms.into_values().take(MAX_TERMS).collect();
    object_json
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn resource(plural: &str) -> &'static Resource {
        Resource::from_path(&format!("/api/v1/{plural}")).unwrap()
    }

    /// What comes out of an answer that arrives in pieces of this size.
    fn text(plural: &str, answer: &str, size: usize) -> String {
        let mut scanner = Scanner::new(resource(plural));
        let out: Vec<u8> = answer
            .as_bytes()
            .chunks(size)
            .flat_map(|piece| scanner.feed(piece))
            .collect();
        String::from_utf8(out).unwrap()
    }

    fn scanned(plural: &str, answer: &Value) -> Value {
        let answer = answer.to_string();
        let outs = [1, 2, 7, answer.len()].map(|size| text(plural, &answer, size));
        assert!(outs.iter().all(|out| *out == outs[0]), "{outs:?}");
        serde_json::from_str(&outs[0]).unwrap()
    }

    fn env(entries: usize) -> Vec<Value> {
        (0..entries)
            .map(|n| json!({ "name": format!("E{n}"), "value": "}{\\\"][,:" }))
            .collect()
    }

    fn pod(name: &str) -> Value {
        json!({
            "metadata": {
                "name": name, "namespace": "a", "uid": name, "labels": { "app": "\"x\\" },
                "managedFields": [{ "manager": "kubectl", "fieldsV1": { "f:a": {} } }],
                "annotations": { "stowage.dev/gpus": "2", "kubectl.kubernetes.io/last-applied-configuration": "{}" },
            },
            "spec": {
                "nodeName": "n", "priority": -7,
                "containers": [{ "name": "c", "env": env(3), "resources": { "limits": { "stowage.dev/vram": "1Gi" } }, "readinessProbe": { "exec": {} } }],
            },
            "status": { "phase": "Running", "conditions": [] },
        })
    }

    fn kept_pod(name: &str) -> Value {
        let mut pod = pod(name);
        let metadata = pod["metadata"].as_object_mut().unwrap();
        metadata.remove("managedFields");
        metadata["annotations"] = json!({ "stowage.dev/gpus": "2", DROPPED_BYTES: "50" });
        let container = pod["spec"]["containers"][0].as_object_mut().unwrap();
        container.remove("env");
        container["readinessProbe"] = json!({});
        pod
    }

    #[test]
    fn pods_lists_and_watch_events_are_pruned_to_the_used_fields() {
        assert_eq!(scanned("pods", &pod("a")), kept_pod("a"));
        let list = |pods: [Value; 2]| json!({ "kind": "PodList", "metadata": { "resourceVersion": "7", "continue": "x" }, "items": pods });
        assert_eq!(
            scanned("pods", &list([pod("a"), pod("b")])),
            list([kept_pod("a"), kept_pod("b")])
        );
        let event = |pod: Value| json!({ "type": "ADDED", "object": pod });
        assert_eq!(scanned("pods", &event(pod("a"))), event(kept_pod("a")));
        let events = format!("{}\n{}\n", event(pod("a")), event(pod("b")));
        let lines: Vec<Value> = text("pods", &events, 3)
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines, [event(kept_pod("a")), event(kept_pod("b"))]);
        let error = json!({ "type": "ERROR", "object": { "kind": "Status", "status": "Failure", "code": 410, "message": "too old" } });
        assert_eq!(scanned("pods", &error), error);
    }

    #[test]
    fn an_event_is_handed_out_as_soon_as_it_is_whole() {
        let mut scanner = Scanner::new(resource("pods"));
        let mut pod = kept_pod("a");
        pod["metadata"]["annotations"] = json!({});
        let line = format!("{}\n", json!({ "type": "ADDED", "object": pod }));
        assert_eq!(scanner.feed(line.as_bytes()), line.as_bytes());
    }

    #[test]
    fn a_stand_in_has_only_what_identifies_and_protects_the_pod() {
        let ports: Vec<Value> = (0..10_000)
            .map(|port| json!({ "containerPort": port }))
            .collect();
        let mut large = pod("large");
        large["spec"]["containers"][0]["ports"] = json!(ports);
        large["metadata"]["annotations"]["stowage.dev/devices"] = json!("GPU-1");
        // It comes first.
        let list = json!({ "items": [large.clone(), pod("a"), large] });
        let out = scanned("pods", &list);
        let left = json!({
            "metadata": {
                "name": "large", "namespace": "a", "uid": "large",
                "annotations": { BEYOND_BOUND: "", "karpenter.sh/do-not-disrupt": "true", "stowage.dev/devices": "GPU-1", "stowage.dev/gpus": "2" },
            },
            "spec": {
                "nodeName": "n", "priority": -7,
                "containers": [{ "name": "?", "ports": [], "resources": { "limits": { "stowage.dev/vram": "1073741824" } } }],
                "affinity": { "podAntiAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": [] } },
            },
            "status": { "phase": "Running" },
        });
        assert_eq!(out["items"], json!([left, kept_pod("a"), left]));
    }

    #[test]
    fn gpu_requests_of_a_stand_in_are_summed_and_stay_small() {
        let ports: Vec<Value> = (0..10_000)
            .map(|port| json!({ "containerPort": port }))
            .collect();
        let slices: Value = (10..50)
            .rev()
            .map(|n| (format!("nvidia.com/mig-{n}"), json!("1")))
            .collect();
        let asking = |limits: Value| json!({ "name": "c", "resources": { "limits": limits, "requests": limits } });
        let large = json!({
            "metadata": { "annotations": { "stowage.dev/gpus": "2", "stowage.dev/exclusive": "true" } },
            "spec": {
                "initContainers": [asking(json!({ "nvidia.com/gpu": "1", "nvidia.com/other": "7" }))],
                "containers": [asking(slices), asking(json!({ "stowage.dev/vram": "?" })), asking(json!({ "nvidia.com/gpu": "1k" })), { "ports": ports }],
            },
            "status": { "containerStatuses": [asking(json!({ "nvidia.com/gpu": "1" }))] },
        });
        let out = scanned("pods", &large);
        let mut limits: Value = (10..25)
            .map(|n| (format!("nvidia.com/mig-{n}"), json!("1")))
            .collect();
        (limits["nvidia.com/gpu"], limits["stowage.dev/vram"]) = (json!("1000"), json!("?"));
        let requests = json!({ "nvidia.com/other": "7", "stowage.dev/vram": "?" });
        let resources = json!({ "limits": limits, "requests": requests });
        assert_eq!(
            out["spec"]["containers"],
            json!([{ "name": "?", "ports": [], "resources": resources }])
        );
        assert_eq!(out["metadata"]["annotations"]["stowage.dev/gpus"], "2");
        assert_eq!(
            out["metadata"]["annotations"]["stowage.dev/exclusive"],
            "true"
        );
    }

    #[test]
    fn an_essential_value_beyond_all_measure_is_left_out() {
        let mut large = pod("large");
        large["metadata"]["annotations"]["stowage.dev/devices"] = json!("x".repeat(300 << 10));
        large["spec"]["containers"] = json!([]);
        let out = scanned("pods", &large);
        assert_eq!(out["metadata"]["name"], "large");
        assert_eq!(
            out["metadata"]["annotations"]["stowage.dev/devices"],
            Value::Null
        );
        assert_eq!(
            out["spec"]["containers"],
            json!([{ "name": "?", "ports": [] }])
        );
    }

    #[test]
    fn what_an_object_takes_counts_and_not_its_text_alone() {
        for (containers, is_beyond) in [(60, false), (100, true)] {
            let containers: Vec<Value> = (0..containers).map(|_| json!({ "name": "" })).collect();
            let pod = json!({ "metadata": { "name": "a" }, "spec": { "containers": containers } });
            let out = scanned("pods", &pod);
            assert_eq!(
                out["metadata"]["annotations"][BEYOND_BOUND].is_string(),
                is_beyond
            );
        }
    }

    fn json_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 64, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::hash_map("[a-z\"\\\\{}]{0,4}", inner, 0..6)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// A budget is kept whole but parts of its metadata.
        #[test]
        fn any_value_that_is_kept_comes_out_as_it_was(spec in json_value(), size in 1usize..40) {
            let budget = json!({ "metadata": { "managedFields": spec, "name": "b" }, "spec": spec });
            let out = text("poddisruptionbudgets", &budget.to_string(), size);
            prop_assert_eq!(serde_json::from_str::<Value>(&out).unwrap(), json!({ "metadata": { "name": "b" }, "spec": spec }));
        }

        #[test]
        fn what_is_no_json_ends(bytes in prop::collection::vec(prop_oneof![Just(b'{'), Just(b'}'), Just(b'['), Just(b']'), Just(b'"'), Just(b'\\'), Just(b':'), Just(b','), any::<u8>()], 0..200)) {
            let mut scanner = Scanner::new(resource("pods"));
            scanner.feed(&bytes);
        }
    }
}

//! Takes an answer's JSON in pieces and hands out the part of it that is kept.
//!
//! One object, at most its bound, is held back until it is whole: an object beyond its bound is replaced by a stand-in with what
//! is known of it all the same. What is no JSON comes out as no JSON, for the decoder to say so.

use super::kept::{Kept, Resource};
use crate::kubernetes::objects::{BEYOND_BOUND, DROPPED_BYTES, VRAM};
use crate::scheduling::vocabulary::device_plugin::PluginResource;
use crate::units::Bytes;
use memchr::memchr2;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// What decoded JSON takes beside its text: any value, an object, and one of those that are mostly empty places.
const VALUE: usize = 32;
const OBJECT: usize = 96;
const HEAVY: usize = 3 << 10;
/// The field of which the length of what is dropped counts.
const ANNOTATIONS: &str = "annotations";
/// Longer names are of no field that is kept, nor valid in Kubernetes.
const LONGEST_NAME: usize = 512;
/// Of an essential value; the list of a pod's devices is the longest.
const LONGEST_ESSENTIAL: usize = 8 << 10;
/// A device plugin's resources kept of a pod beyond its bound.
const MOST_GPU_NAMES: usize = 4;
/// Deeper than any object of Kubernetes.
const DEEPEST: usize = 64;

pub struct Scanner {
    resource: &'static Resource,
    output: Vec<u8>,
    frames: Vec<Frame>,
    token: Token,
    /// In a string, behind a backslash.
    is_escaped: bool,
    /// The last name, whose value is in progress or comes next.
    name: Vec<u8>,
    /// What is kept of that value; `None` if nothing is.
    value: Option<&'static Kept>,
    /// Brackets that are open in a value that is dropped.
    dropped: usize,
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
    kept: &'static Kept,
    role: Role,
    is_object: bool,
    is_empty: bool,
    /// A value comes next, not its name.
    is_named: bool,
}

/// The object that is held back.
#[derive(Debug, Default)]
struct ObjectInProgress {
    /// Where it begins in the output.
    from: usize,
    takes: usize,
    is_beyond: bool,
    /// Each with its name and its value.
    essentials: Vec<(&'static Kept, Vec<u8>, Vec<u8>)>,
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
            dropped: 0,
            object: None,
        }
    }

    /// Takes the next piece of an answer, and hands out what is whole.
    pub fn feed(&mut self, mut piece: &[u8]) -> Vec<u8> {
        while let Some(first) = piece.first() {
            let used = match self.token {
                Token::Between if self.dropped > 0 => self.drop_between(piece),
                Token::Between => self.between(*first),
                Token::Name | Token::Text => self.text(piece),
                Token::Word => self.word(piece),
            };
            piece = &piece[used..];
        }
        let from = self.object.as_mut().map_or(self.output.len(), |object| std::mem::take(&mut object.from));
        let held_back = self.output.split_off(from);
        std::mem::replace(&mut self.output, held_back)
    }

    fn between(&mut self, byte: u8) -> usize {
        match byte {
            b'"' if self.frames.last().is_some_and(|frame| frame.is_object && !frame.is_named) => {
                self.token = Token::Name;
                self.name.clear();
            }
            b'{' | b'[' => self.open(byte == b'{'),
            b'}' | b']' => self.close(),
            b'\n' if self.frames.is_empty() => self.put(b"\n"),
            b',' | b':' | b' ' | b'\t' | b'\r' | b'\n' => {}
            _ => {
                self.begin_scalar();
                self.token = if byte == b'"' { Token::Text } else { Token::Word };
                self.put_scalar(&[byte]);
            }
        }
        1
    }

    /// In a value that is dropped only brackets matter, and strings, which may have brackets in them.
    fn drop_between(&mut self, piece: &[u8]) -> usize {
        let matters = |byte: &u8| matches!(byte, b'"' | b'{' | b'[' | b'}' | b']');
        let Some(place) = piece.iter().position(matters) else { return piece.len() };
        match piece[place] {
            b'"' => self.token = Token::Text,
            b'{' | b'[' => self.dropped += 1,
            _ => self.dropped -= 1,
        }
        place + 1
    }

    fn text(&mut self, piece: &[u8]) -> usize {
        let (used, is_end) = match std::mem::take(&mut self.is_escaped) {
            true => (1, false),
            false => match memchr2(b'"', b'\\', piece) {
                Some(place) => {
                    self.is_escaped = piece[place] == b'\\';
                    (place + 1, !self.is_escaped)
                }
                None => (piece.len(), false),
            },
        };
        match self.token {
            Token::Name if self.name.len() <= LONGEST_NAME => self.name.extend_from_slice(&piece[..used]),
            Token::Name => {}
            Token::Text | Token::Word | Token::Between => self.put_scalar(&piece[..used]),
        }
        if is_end && std::mem::replace(&mut self.token, Token::Between) == Token::Name {
            self.end_name();
        }
        used
    }

    fn word(&mut self, piece: &[u8]) -> usize {
        let ends = |byte: &u8| matches!(byte, b',' | b']' | b'}' | b' ' | b'\t' | b'\r' | b'\n');
        let used = piece.iter().position(ends);
        if used.is_some() {
            self.token = Token::Between;
        }
        let used = used.unwrap_or(piece.len());
        self.put_scalar(&piece[..used]);
        used
    }

    fn end_name(&mut self) {
        let Some(frame) = self.frames.last_mut() else { return };
        frame.is_named = true;
        let is_whole = self.name.pop() == Some(b'"') && self.name.len() < LONGEST_NAME;
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
        let is_deep = self.frames.len() >= DEEPEST;
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
            self.put(if is_first { b"" } else { b"," });
            if is_named {
                [&b"\""[..], &name, b"\":"].into_iter().for_each(|part| self.put(part));
            }
            self.name = name;
            self.charge(VALUE);
        }
        role
    }

    fn begin_scalar(&mut self) {
        self.begin();
        if let (Some(object), Some(kept)) = (&mut self.object, self.value.filter(|kept| kept.is_essential)) {
            object.essentials.push((kept, self.name.clone(), Vec::new()));
        }
    }

    fn open(&mut self, is_object: bool) {
        let role = self.begin();
        let Some(kept) = self.value else {
            self.dropped = 1;
            return;
        };
        match role {
            Role::Answer | Role::Object => {
                self.object =
                    Some(ObjectInProgress { from: self.output.len(), ..ObjectInProgress::default() });
            }
            Role::List => self.object = None,
            Role::Field => {}
        }
        if is_object {
            self.charge(if kept.is_heavy { HEAVY } else { OBJECT });
        }
        self.put(if is_object { b"{" } else { b"[" });
        self.frames.push(Frame { kept, role, is_object, is_empty: true, is_named: false });
    }

    fn close(&mut self) {
        let Some(frame) = self.frames.pop() else { return };
        let dropped = self.object.as_ref().map_or(0, |object| object.dropped_annotations.bytes);
        if frame.kept.name == ANNOTATIONS && dropped > 0 {
            let comma = if frame.is_empty { "" } else { "," };
            self.put(format!("{comma}\"{DROPPED_BYTES}\":\"{dropped}\"").as_bytes());
        }
        self.put(if frame.is_object { b"}" } else { b"]" });
        if matches!(frame.role, Role::Answer | Role::Object)
            && let Some(object) = self.object.take().filter(|object| object.is_beyond)
        {
            self.output.extend(stand_in(self.resource, object).to_string().into_bytes());
        }
    }

    fn put_scalar(&mut self, part: &[u8]) {
        let Some(kept) = self.value.filter(|_| self.dropped == 0) else { return self.count_dropped(part) };
        if let Some((.., text)) = self.object.as_mut().and_then(|object| object.essentials.last_mut())
            && kept.is_essential
            && text.len() <= LONGEST_ESSENTIAL
        {
            text.extend_from_slice(part);
        }
        self.put(part);
    }

    /// If it is of an annotation: the API server limits the sum of them all.
    fn count_dropped(&mut self, part: &[u8]) {
        let is_annotation = |frame: &Frame| self.dropped == 0 && frame.kept.name == ANNOTATIONS;
        if let Some(object) = self.object.as_mut().filter(|_| self.frames.last().is_some_and(is_annotation)) {
            object.dropped_annotations.add(part);
        }
    }

    fn put(&mut self, part: &[u8]) {
        self.charge(part.len());
        if !self.object.as_ref().is_some_and(|object| object.is_beyond) {
            self.output.extend_from_slice(part);
        }
    }

    fn charge(&mut self, bytes: usize) {
        let Some(object) = &mut self.object else { return };
        object.takes = object.takes.saturating_add(bytes);
        if object.takes > self.resource.bound && !std::mem::replace(&mut object.is_beyond, true) {
            self.output.truncate(object.from);
        }
    }
}

fn stand_in(resource: &Resource, object: ObjectInProgress) -> Value {
    let mut known: Value = serde_json::from_str(resource.stand_in).unwrap_or_default();
    known["metadata"]["annotations"][BEYOND_BOUND] = json!("");
    let mut limits = BTreeMap::<String, Option<Bytes>>::new();
    for (kept, name, text) in object.essentials {
        let value: Option<Value> =
            serde_json::from_slice(&text).ok().filter(|_| text.len() <= LONGEST_ESSENTIAL);
        if kept.path.contains(&"limits") {
            // As if all containers ran at once: no less than it asks for. It may be that this is not known.
            let amount = value.and_then(|value| Bytes::parse_quantity(value.as_str()?).ok());
            let sum = limits.entry(String::from_utf8_lossy(&name).into()).or_insert(Some(Bytes::ZERO));
            *sum = sum.zip(amount).map(|(sum, amount)| sum + amount);
        } else if let Some(value) = value {
            *kept.path.iter().fold(&mut known, |value: &mut Value, name| &mut value[*name]) = value;
        }
    }
    let vram = limits.remove_entry(VRAM);
    let devices = limits.into_iter().filter(|(name, _)| PluginResource::is_one(name)).take(MOST_GPU_NAMES);
    let text = |sum: Option<Bytes>| sum.map_or("?".into(), |sum| sum.0.to_string());
    let limits: BTreeMap<String, String> = devices.chain(vram).map(|(name, sum)| (name, text(sum))).collect();
    if !limits.is_empty() {
        known["spec"]["containers"] = json!([{ "name": "?", "resources": { "limits": limits } }]);
    }
    known
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn resource(plural: &str) -> &'static Resource {
        Resource::of_path(&format!("/api/v1/{plural}")).unwrap()
    }

    /// What comes out of an answer that arrives in pieces of this size.
    fn text(plural: &str, answer: &str, size: usize) -> String {
        let mut scanner = Scanner::new(resource(plural));
        let out: Vec<u8> = answer.as_bytes().chunks(size).flat_map(|piece| scanner.feed(piece)).collect();
        String::from_utf8(out).unwrap()
    }

    fn scanned(plural: &str, answer: &Value) -> Value {
        let answer = answer.to_string();
        let outs = [1, 2, 7, answer.len()].map(|size| text(plural, &answer, size));
        assert!(outs.iter().all(|out| *out == outs[0]), "{outs:?}");
        serde_json::from_str(&outs[0]).unwrap()
    }

    fn env(entries: usize) -> Vec<Value> {
        (0..entries).map(|n| json!({ "name": format!("E{n}"), "value": "}{\\\"][,:" })).collect()
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
    fn of_a_pod_a_list_and_a_watch_event_only_what_is_used_is_kept() {
        assert_eq!(scanned("pods", &pod("a")), kept_pod("a"));
        let list = |pods: [Value; 2]| json!({ "kind": "PodList", "metadata": { "resourceVersion": "7", "continue": "x" }, "items": pods });
        assert_eq!(scanned("pods", &list([pod("a"), pod("b")])), list([kept_pod("a"), kept_pod("b")]));
        let event = |pod: Value| json!({ "type": "ADDED", "object": pod });
        assert_eq!(scanned("pods", &event(pod("a"))), event(kept_pod("a")));
        let events = format!("{}\n{}\n", event(pod("a")), event(pod("b")));
        let lines: Vec<Value> =
            text("pods", &events, 3).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
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
    fn of_a_pod_beyond_its_bound_only_what_identifies_and_protects_it_is_left() {
        let ports: Vec<Value> = (0..10_000).map(|port| json!({ "containerPort": port })).collect();
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
            "spec": { "nodeName": "n", "priority": -7, "containers": [{ "name": "?", "resources": { "limits": { "stowage.dev/vram": "1073741824" } } }] },
            "status": { "phase": "Running" },
        });
        assert_eq!(out["items"], json!([left, kept_pod("a"), left]));
    }

    #[test]
    fn what_the_containers_of_a_pod_beyond_its_bound_ask_of_gpus_is_summed_and_stays_small() {
        let ports: Vec<Value> = (0..10_000).map(|port| json!({ "containerPort": port })).collect();
        let slices: Value = (0..6).rev().map(|n| (format!("nvidia.com/mig-{n}"), json!("1"))).collect();
        let asking =
            |limits: Value| json!({ "name": "c", "resources": { "limits": limits, "requests": limits } });
        let large = json!({
            "metadata": { "annotations": { "stowage.dev/gpus": "2", "stowage.dev/exclusive": "true" } },
            "spec": {
                "initContainers": [asking(json!({ "nvidia.com/gpu": "1", "nvidia.com/other": "7" }))],
                "containers": [asking(slices), asking(json!({ "stowage.dev/vram": "?" })), asking(json!({ "nvidia.com/gpu": "1k" })), { "ports": ports }],
            },
            "status": { "containerStatuses": [asking(json!({ "nvidia.com/gpu": "1" }))] },
        });
        let out = scanned("pods", &large);
        let limits = json!({ "nvidia.com/gpu": "1001", "nvidia.com/mig-0": "1", "nvidia.com/mig-1": "1", "nvidia.com/mig-2": "1", "stowage.dev/vram": "?" });
        assert_eq!(out["spec"]["containers"], json!([{ "name": "?", "resources": { "limits": limits } }]));
        assert_eq!(out["metadata"]["annotations"]["stowage.dev/gpus"], "2");
        assert_eq!(out["metadata"]["annotations"]["stowage.dev/exclusive"], "true");
    }

    #[test]
    fn an_essential_value_beyond_all_measure_is_left_out() {
        let mut large = pod("large");
        large["metadata"]["annotations"]["stowage.dev/devices"] = json!("x".repeat(300 << 10));
        large["spec"]["containers"] = json!([]);
        let out = scanned("pods", &large);
        assert_eq!(out["metadata"]["name"], "large");
        assert_eq!(out["metadata"]["annotations"]["stowage.dev/devices"], Value::Null);
        assert_eq!(out["spec"]["containers"], Value::Null);
    }

    #[test]
    fn what_an_object_takes_counts_and_not_its_text_alone() {
        for (containers, is_beyond) in [(60, false), (100, true)] {
            let containers: Vec<Value> = (0..containers).map(|_| json!({ "name": "" })).collect();
            let pod = json!({ "metadata": { "name": "a" }, "spec": { "containers": containers } });
            let out = scanned("pods", &pod);
            assert_eq!(out["metadata"]["annotations"][BEYOND_BOUND].is_string(), is_beyond);
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
        /// Of a budget everything is kept but parts of its metadata.
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

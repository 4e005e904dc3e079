//! Recorded objects without what differs from run to run: UIDs, times, versions, nonces and generated names. What names the same
//! thing in two objects still does.

use super::Recording;
use serde_json::{Map, Value, json};
use stowage_kubernetes_objects as objects;

const TIME: &str = "2026-01-01T00:00:00";
/// Not past when the fixture is read.
const DEADLINE: &str = "2099-12-31T23:59:59";
/// What stands before a reservation's deadline, in a message that is JSON in a JSON text.
const BEFORE_DEADLINE: &str = r#"\"deadline\":\""#;

pub fn normalized(recording: Recording) -> Recording {
    let mut replaced: Vec<(String, String)> = Vec::new();
    for object in recording.values() {
        for uid in [&object["metadata"]["uid"], &object["regarding"]["uid"]] {
            let number = replaced.len();
            let normal = format!("00000000-0000-4000-8000-{number:012}");
            replace(&mut replaced, uid.as_str().unwrap_or_default(), normal);
        }
        let epoch =
            object["metadata"]["annotations"][objects::binding_annotations::LEADER_EPOCH].as_str();
        let nonce = epoch
            .and_then(|epoch| epoch.rsplit('/').next())
            .unwrap_or_default();
        replace(&mut replaced, nonce, "nonce".into());
        if object["kind"] == "Event" {
            let name = object["metadata"]["name"].as_str().unwrap();
            replace(
                &mut replaced,
                name,
                format!("{}.0", object["regarding"]["name"].as_str().unwrap()),
            );
        }
        // The holder is the identity and what tells it from an earlier process of that name.
        let holder = object["spec"]["holderIdentity"]
            .as_str()
            .unwrap_or_default();
        let identity = holder.split('_').next().unwrap();
        replace(&mut replaced, holder, format!("{identity}_process"));
    }
    let normal = |(name, mut object): (String, Value)| {
        if let Some(metadata) = object["metadata"].as_object_mut() {
            metadata.remove("managedFields");
            metadata.insert("resourceVersion".into(), json!("1"));
        }
        let mut text = object.to_string();
        for (from, to) in &replaced {
            text = text.replace(from, to);
        }
        (name, serde_json::from_str(&timeless(&text)).unwrap())
    };
    recording.into_iter().map(normal).collect()
}

/// Also in other objects that name it.
fn replace(replaced: &mut Vec<(String, String)>, from: &str, to: String) {
    if !from.is_empty() && !replaced.iter().any(|(known, _)| known == from) {
        replaced.push((from.to_owned(), to));
    }
}

/// The text with one time in place of each; a fraction stays one.
fn timeless(text: &str) -> String {
    const SHAPE: &[u8] = b"dddd-dd-ddTdd:dd:dd";
    let is_time = |bytes: &[u8]| {
        bytes.len() > SHAPE.len()
            && bytes.iter().zip(SHAPE).all(|(byte, shape)| match shape {
                b'd' => byte.is_ascii_digit(),
                _ => byte == shape,
            })
    };
    let mut normal = String::new();
    let mut rest = text;
    while let Some(at) = (0..rest.len()).find(|at| is_time(&rest.as_bytes()[*at..])) {
        normal.push_str(&rest[..at]);
        normal.push_str(if normal.ends_with(BEFORE_DEADLINE) {
            DEADLINE
        } else {
            TIME
        });
        rest = &rest[at + SHAPE.len()..];
        if let Some(fraction) = rest.strip_prefix('.') {
            normal.push_str(".000000");
            rest = fraction.trim_start_matches(|c: char| c.is_ascii_digit());
        }
    }
    normal + rest
}

/// What of an object Stowage wrote; the rest is the API server's, the scheduler's and the kubelet's.
pub fn written(object: &Value) -> Value {
    let ours = |key: &String| {
        key.starts_with("stowage.dev/") || key.starts_with(objects::binding_annotations::NRI_PREFIX)
    };
    let entries = |map: &Value| -> Map<String, Value> {
        let entries = map.as_object().into_iter().flatten();
        entries
            .filter(|(key, _)| ours(key))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect()
    };
    let conditions = object["status"]["conditions"]
        .as_array()
        .into_iter()
        .flatten();
    let is_ours = |condition: &&Value| {
        condition["type"]
            .as_str()
            .is_some_and(|kind| objects::CONDITIONS.contains(&kind))
    };
    match object["kind"].as_str().unwrap_or_default() {
        // A shared Event says of which pods: what is left of it are its words.
        "Event" => json!([
            object["reason"],
            object["type"],
            object["action"],
            object["reportingController"]
        ]),
        "Lease" => object["spec"].clone(),
        _ => json!({
            "annotations": entries(&object["metadata"]["annotations"]),
            "conditions": conditions.filter(is_ours).collect::<Vec<_>>(),
            "nominatedNodeName": object["status"]["nominatedNodeName"],
            "capacity": entries(&object["status"]["capacity"]),
        }),
    }
}

#[test]
fn two_runs_are_the_same_when_they_are_normalized() {
    let run = |uid: &str, nonce: &str, time: &str| {
        let message = json!({ "victims": [uid], "deadline": time }).to_string();
        let pod = json!({ "kind": "Pod", "metadata": {
            "name": "victim", "uid": uid, "managedFields": [{ "time": time }], "resourceVersion": nonce,
            "annotations": { objects::binding_annotations::LEADER_EPOCH: format!("{uid}/0/{nonce}") },
        } });
        let other = json!({ "metadata": {}, "status": { "message": message, "at": time } });
        normalized([("pod".to_owned(), pod), ("other".to_owned(), other)].into())
    };
    let first = run(
        "0b6c6bd0-0000-4000-8000-000000000001",
        "abc",
        "2026-05-06T07:08:09.123Z",
    );
    assert_eq!(
        first,
        run(
            "0b6c6bd0-0000-4000-8000-000000000002",
            "def",
            "2027-05-06T07:08:09.1Z"
        )
    );
    let message = first["other"]["status"]["message"].as_str().unwrap();
    assert!(message.contains("2099-12-31T23:59:59.000000Z"), "{message}");
    assert!(
        message.contains(first["pod"]["metadata"]["uid"].as_str().unwrap()),
        "{message}"
    );
    assert_eq!(
        first["other"]["status"]["at"],
        "2026-01-01T00:00:00.000000Z"
    );
}

//! The shipped configurations of kube-scheduler, decoded strictly by the Go types of each minor version that Stowage supports.
//! Needs Go and its modules; says so where they are missing.

use crate::needs;
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Kubernetes 1.31 to 1.36.
const MINORS: std::ops::RangeInclusive<u32> = 31..=36;

/// Decodes standard input and each known plugin's arguments, rejects every field that it does not know, and prints what it read.
const DECODER: &str = r#"package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"

	config "k8s.io/kube-scheduler/config/v1"
)

func strictly(text []byte, into any) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		panic(err)
	}
	var read config.KubeSchedulerConfiguration
	strictly(text, &read)
	for _, profile := range read.Profiles {
		for _, plugin := range profile.PluginConfig {
			if plugin.Name != "PodTopologySpread" {
				fmt.Fprintln(os.Stderr, "no arguments are known here for", plugin.Name)
				os.Exit(1)
			}
			strictly(plugin.Args.Raw, &config.PodTopologySpreadArgs{})
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(read); err != nil {
		panic(err)
	}
}
"#;

#[test]
fn every_supported_kube_scheduler_reads_every_shipped_configuration() {
    let configurations = configurations();
    assert!(configurations.len() >= 2, "{configurations:?}");
    for minor in MINORS {
        let folder = tempfile::tempdir().unwrap();
        let Some(decoder) = decoder(folder.path(), minor) else {
            return;
        };
        for file in &configurations {
            let shipped: Value =
                serde_saphyr::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
            let read = decoded(&decoder, &shipped)
                .unwrap_or_else(|why| panic!("1.{minor}, {}: {why}", file.display()));
            for (ours, theirs) in of_extenders(&shipped).zip(of_extenders(&read)) {
                assert_eq!(ours, theirs, "1.{minor}, {}", file.display());
            }
            assert_eq!(of_extenders(&shipped).count(), of_extenders(&read).count());
        }
        let mut misspelt: Value =
            serde_saphyr::from_str(&std::fs::read_to_string(&configurations[0]).unwrap()).unwrap();
        misspelt["extenders"][0]["bindVerbs"] = "bind".into();
        assert!(
            decoded(&decoder, &misspelt)
                .unwrap_err()
                .contains("bindVerbs"),
            "it would find a mistake"
        );
        println!(
            "kube-scheduler 1.{minor} reads {} configurations",
            configurations.len()
        );
    }
}

/// Every file of the manifests that configures a kube-scheduler.
fn configurations() -> Vec<PathBuf> {
    fn find(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
        {
            let name = entry.file_name().unwrap().to_string_lossy().into_owned();
            match entry.is_dir() {
                true => find(&entry, found),
                false if name.contains("kube-scheduler-config") => found.push(entry),
                false => {}
            }
        }
    }
    let mut found = Vec::new();
    find(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests"),
        &mut found,
    );
    found.sort();
    found
}

/// What matters of the extenders, and is written back as it was read: fields that are false or durations are not.
fn of_extenders(configuration: &Value) -> impl Iterator<Item = (Vec<Value>, Vec<Value>)> {
    let fields = [
        "urlPrefix",
        "filterVerb",
        "prioritizeVerb",
        "preemptVerb",
        "bindVerb",
        "weight",
        "nodeCacheCapable",
    ];
    let extenders = configuration["extenders"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    extenders.into_iter().map(move |extender| {
        let resources = extender["managedResources"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let names = resources
            .into_iter()
            .map(|resource| resource["name"].clone());
        (
            fields.map(|field| extender[field].clone()).to_vec(),
            names.collect(),
        )
    })
}

/// The decoder built with the types of that minor version; `None`, with a line that says why, where it cannot be.
fn decoder(folder: &Path, minor: u32) -> Option<PathBuf> {
    let version = Command::new("go").arg("version").output();
    if !version.is_ok_and(|ran| ran.status.success()) {
        needs::report_skipped(
            "Go, whose types kube-scheduler's configuration is decoded with, is not installed",
        );
        return None;
    }
    let module =
        format!("module decoder\n\ngo 1.22\n\nrequire k8s.io/kube-scheduler v0.{minor}.0\n");
    std::fs::write(folder.join("go.mod"), module).unwrap();
    std::fs::write(folder.join("main.go"), DECODER).unwrap();
    let go = |arguments: &[&str]| {
        let mut command = Command::new("go");
        command
            .args(arguments)
            .current_dir(folder)
            .env("GOFLAGS", "-mod=mod")
            .output()
            .unwrap()
    };
    if !go(&["mod", "download", "k8s.io/kube-scheduler"])
        .status
        .success()
    {
        needs::report_skipped(format_args!(
            "Go cannot get the module k8s.io/kube-scheduler v0.{minor}.0"
        ));
        return None;
    }
    let built = go(&["build", "-o", "decoder", "."]);
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    Some(folder.join("decoder"))
}

fn decoded(decoder: &Path, configuration: &Value) -> Result<Value, String> {
    let mut command = Command::new(decoder);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(configuration.to_string().as_bytes())
        .unwrap();
    let ran = child.wait_with_output().unwrap();
    match ran.status.success() {
        true => Ok(serde_json::from_slice(&ran.stdout).unwrap()),
        false => Err(String::from_utf8_lossy(&ran.stderr).into_owned()),
    }
}

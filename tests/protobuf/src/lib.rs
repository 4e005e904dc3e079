//! The client of the kubelet's pod-resources API is generated, and committed so that no build of Stowage compiles a generator.
//! This generates it again: `cargo test -p protobuf-code` fails if the committed code is another, and with `STOWAGE_BLESS=1`
//! writes it.

#![cfg(test)]

use std::path::Path;

const HEADER: &str = "\
//! The messages and the client of the kubelet's pod-resources API; the server is for tests that stand in for a kubelet. Generated
//! from `pod_resources.proto`: change that, then run `STOWAGE_BLESS=1 cargo test -p protobuf-code`.

";

/// Without `protoc`. The server is compiled for tests alone, since the agent is a client.
fn generated(proto: &Path) -> String {
    let out = tempfile::tempdir().unwrap();
    let files = protox::compile([proto], [proto.parent().unwrap()]).unwrap();
    tonic_prost_build::configure()
        .out_dir(out.path())
        .emit_rerun_if_changed(false)
        .server_mod_attribute("v1", "#[cfg(any(test, feature = \"testkit\"))]")
        .compile_fds(files)
        .unwrap();
    HEADER.to_owned() + &std::fs::read_to_string(out.path().join("v1.rs")).unwrap()
}

#[test]
fn the_committed_code_is_what_the_proto_file_generates() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../src/agent/ownership");
    let committed = folder.join("pod_resources/api.rs");
    let generated = generated(&folder.join("pod_resources.proto"));
    if std::env::var_os("STOWAGE_BLESS").is_some() {
        std::fs::write(&committed, &generated).unwrap();
    }
    let is_same = std::fs::read_to_string(&committed).is_ok_and(|text| text == generated);
    assert!(
        is_same,
        "{} is not what its proto file generates",
        committed.display()
    );
}

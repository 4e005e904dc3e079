//! Generates the pod-resources client (and, for the tests, the server) without needing `protoc`.

fn main() {
    println!("cargo::rerun-if-changed=src/agent/ownership/pod_resources.proto");
    #[cfg(feature = "service")]
    generate();
}

#[cfg(feature = "service")]
fn generate() {
    let files = protox::compile(["pod_resources.proto"], ["src/agent/ownership"])
        .expect("the proto file is well formed");
    tonic_prost_build::configure().compile_fds(files).expect("the generated code can be written");
}

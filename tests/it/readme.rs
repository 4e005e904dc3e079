//! What the README shows in full is what is shipped.

use std::path::Path;

#[test]
fn the_manifests_in_the_readme_are_the_shipped_ones() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    for manifest in ["example-pod.yaml", "kube-scheduler-config.yaml"] {
        let text = std::fs::read_to_string(root.join("manifests").join(manifest)).unwrap();
        let shown = format!("```yaml\n{}\n```", text.trim_end());
        assert!(readme.contains(&shown), "README.md does not show manifests/{manifest} as it is");
    }
}

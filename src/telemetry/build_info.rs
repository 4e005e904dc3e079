//! Which build this is: the version, and the commit, where the build was given it.

use std::sync::OnceLock;

pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit, from `STOWAGE_COMMIT` at build time. The image's and the releases' builds set it; there is no Git in an image's
/// build.
pub(crate) const COMMIT: Option<&str> = option_env!("STOWAGE_COMMIT");

/// `0.4.0`, or `0.4.0 (commit 0123abcd)`.
pub fn text() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| version_text(COMMIT))
}

fn version_text(commit: Option<&str>) -> String {
    match commit.filter(|commit| !commit.is_empty()) {
        Some(commit) => format!("{VERSION} (commit {commit})"),
        None => VERSION.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_a_commit_has_a_version_alone() {
        assert_eq!(
            version_text(Some("0123abcd")),
            format!("{VERSION} (commit 0123abcd)")
        );
        assert_eq!(version_text(None), VERSION);
        assert_eq!(
            version_text(Some("")),
            VERSION,
            "a build argument that was left empty"
        );
    }
}

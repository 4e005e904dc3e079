//! Names as Kubernetes allows them. A rule with a name that no object can have would never match.

use super::Malformed;
use crate::diagnostic::quoted;
use stowage_scheduling::policy::selection::is_pattern;

/// The longest DNS label, in characters (RFC 1123).
const MAX_LABEL_LENGTH: usize = 63;
const MAX_SUBDOMAIN_LENGTH: usize = 253;

/// A DNS label, such as a namespace.
pub fn check_label(text: &str) -> Result<(), Malformed> {
    if text.len() > MAX_LABEL_LENGTH {
        return Err(too_long(MAX_LABEL_LENGTH));
    }
    match is_label(text) {
        true => Ok(()),
        false => Err(Malformed::new(
            "not a name that Kubernetes allows",
            label_help(text),
        )),
    }
}

fn is_label(text: &str) -> bool {
    let ends = text.starts_with('-') || text.ends_with('-');
    let allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
    !text.is_empty() && !ends && text.bytes().all(allowed)
}

fn label_help(text: &str) -> String {
    let rule = "use small letters, digits and `-` between them";
    let fixed = text
        .trim()
        .to_ascii_lowercase()
        .replace(['_', ' ', '.'], "-");
    if is_label(&fixed) {
        format!("{rule}, such as {}", quoted(&fixed))
    } else {
        rule.into()
    }
}

/// A DNS label in which `*` stands for any text.
pub fn check_pattern(text: &str) -> Result<(), Malformed> {
    if !is_pattern(text) {
        return check_label(text);
    }
    // Whatever the `*` stand for, the rest is in a name.
    match check_label(&text.replace('*', "x")) {
        Err(_) if text.len() > MAX_LABEL_LENGTH => Err(too_long(MAX_LABEL_LENGTH)),
        Err(_) => Err(Malformed::new(
            "not a pattern of names that Kubernetes allows",
            "use small letters, digits, `-` between them, and `*` for any text",
        )),
        Ok(()) => Ok(()),
    }
}

/// Labels with dots between them, such as a node's name.
pub fn check_subdomain(text: &str) -> Result<(), Malformed> {
    if text.len() > MAX_SUBDOMAIN_LENGTH {
        return Err(too_long(MAX_SUBDOMAIN_LENGTH));
    }
    match text.split('.').all(is_label) {
        true => Ok(()),
        false => Err(Malformed::new(
            "not a name that Kubernetes allows",
            label_help(text),
        )),
    }
}

/// `app`, `example.com/team`: a label's key or an extended resource.
pub fn check_qualified_name(text: &str) -> Result<(), Malformed> {
    let (prefix, name) = text
        .split_once('/')
        .map_or((None, text), |(prefix, name)| (Some(prefix), name));
    if prefix.is_some_and(|prefix| check_subdomain(prefix).is_err()) {
        return Err(Malformed::new(
            "not a key that Kubernetes allows",
            "what stands before the `/` is a domain, such as `example.com/team`",
        ));
    }
    match !name.is_empty() && is_label_text(name) {
        true => Ok(()),
        false => Err(Malformed::new(
            "not a key that Kubernetes allows",
            "use at most 63 letters, digits, `-`, `_` and `.`, and a letter or digit at both ends",
        )),
    }
}

/// `example.com/gpu`, in which `*` stands for any text: an extended resource has a domain.
pub(crate) fn check_resource_pattern(text: &str) -> Result<(), Malformed> {
    match text.contains('/') {
        true => check_qualified_name(&text.replace('*', "x")),
        false => Err(Malformed::new(
            "no extended resource",
            "write its domain, too, such as `example.com/gpu` or `example.com/*`",
        )),
    }
}

pub(crate) fn check_label_value(text: &str) -> Result<(), Malformed> {
    match is_label_text(text) {
        true => Ok(()),
        false => Err(Malformed::new(
            "not a label's value that Kubernetes allows",
            "use at most 63 letters, digits, `-`, `_` and `.`, and a letter or digit at both ends; no pod can \
             carry another",
        )),
    }
}

fn is_label_text(text: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || b"-_.".contains(&c);
    let ends = |c: Option<&u8>| c.is_none_or(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    text.len() <= MAX_LABEL_LENGTH
        && text.bytes().all(allowed)
        && ends(bytes.first())
        && ends(bytes.last())
}

fn too_long(limit: usize) -> Malformed {
    Malformed::new(
        format!("longer than {limit} characters"),
        "Kubernetes allows no longer name: shorten it",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_what_kubernetes_allows() {
        assert!(check_label("team-a").is_ok() && check_label("7b").is_ok());
        assert!(
            ["", "Team", "a_b", "-a", "a-", "a.b", &"x".repeat(64)]
                .iter()
                .all(|name| check_label(name).is_err())
        );
        assert!(check_subdomain("gpu-1.example.com").is_ok() && check_subdomain("a..b").is_err());
        assert!(
            check_qualified_name("nvidia.com/mig-1g.10gb").is_ok()
                && check_qualified_name("app").is_ok()
        );
        assert!(
            ["", "/a", "a/", "a/b/c", "A.com/x", "-a"]
                .iter()
                .all(|key| check_qualified_name(key).is_err())
        );
        assert!(
            check_label_value("").is_ok()
                && check_label_value("v1.2_x").is_ok()
                && check_label_value("a b").is_err()
        );
    }

    #[test]
    fn a_pattern_is_a_name_with_wildcards() {
        assert!(
            ["*", "team-*", "*-x-*", "a**", "team-a"]
                .iter()
                .all(|text| check_pattern(text).is_ok())
        );
        assert!(
            ["Team-*", "-*", "a_*", "*.b", "a ?", ""]
                .iter()
                .all(|text| check_pattern(text).is_err())
        );
    }

    #[test]
    fn an_invalid_name_suggests_the_nearest_valid_one() {
        assert!(
            check_label("Team_A")
                .unwrap_err()
                .help
                .ends_with("such as `team-a`")
        );
    }
}

//! Finds the valid name that was probably meant.

/// The name in `names` most similar to `text`, if it is similar at all. Of two equally similar ones, the first.
pub fn nearest<'a, S: AsRef<str>>(text: &str, names: &'a [S]) -> Option<&'a str> {
    // A whole value pasted in the wrong place is not compared.
    const LONGEST: usize = 80;
    if text.len() > LONGEST {
        return None;
    }
    let wanted = folded(text);
    let distance = |name: &str| strsim::damerau_levenshtein(&wanted, &folded(name));
    let near = names
        .iter()
        .map(|name| (distance(name.as_ref()), name.as_ref()))
        .min_by_key(|(far, _)| *far);
    near.filter(|(far, name)| *far <= allowed(&wanted, name))
        .map(|(_, name)| name)
}

/// Case and word separators do not count: `may_share_with` means `mayShareWith`.
fn folded(text: &str) -> String {
    text.chars()
        .filter(|c| !matches!(c, '_' | '-' | ' '))
        .flat_map(char::to_lowercase)
        .collect()
}

/// A third of the letters may be wrong, and one of a short word.
fn allowed(text: &str, name: &str) -> usize {
    (text.chars().count().min(name.chars().count()) / 3).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_seen_and_a_stranger_is_not() {
        let names = ["namespaces", "labels", "mayShareWith", "h", "mode"];
        assert_eq!(nearest("namespace", &names), Some("namespaces"));
        assert_eq!(nearest("may_share_with", &names), Some("mayShareWith"));
        assert_eq!(nearest("lables", &names), Some("labels"));
        assert_eq!(nearest("moed", &names), Some("mode"));
        assert_eq!(nearest("replicas", &names), None);
        assert_eq!(nearest(&"labels".repeat(100), &names), None);
    }
}

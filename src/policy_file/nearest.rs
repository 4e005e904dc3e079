//! Finds the valid name that was probably meant.

/// The name in `names` most similar to `text`, if it is similar at all. Of two equally similar ones, the first.
pub fn nearest<'a, S: AsRef<str>>(text: &str, names: &'a [S]) -> Option<&'a str> {
    // A whole value pasted in the wrong place is not compared.
    const MAX_COMPARED_LENGTH: usize = 80;
    if text.len() > MAX_COMPARED_LENGTH {
        return None;
    }
    let wanted = normalized(text);
    let distance = |name: &str| strsim::damerau_levenshtein(&wanted, &normalized(name));
    let nearest_with_distance = names
        .iter()
        .map(|name| (distance(name.as_ref()), name.as_ref()))
        .min_by_key(|(far, _)| *far);
    nearest_with_distance
        .filter(|(far, name)| *far <= max_distance(&wanted, name))
        .filter(|(far, name)| *far == 0 || begins_alike(&wanted, &normalized(name)))
        .map(|(_, name)| name)
}

/// Case and word separators do not count: `may_share_with` means `mayShareWith`.
fn normalized(text: &str) -> String {
    text.chars()
        .filter(|c| !matches!(c, '_' | '-' | ' '))
        .flat_map(char::to_lowercase)
        .collect()
}

/// Whether one of the first two letters of one is the first of the other: people misspell what stands later, and with another
/// beginning it is mostly another word.
fn begins_alike(one: &str, other: &str) -> bool {
    let begins = |name: &str, with: &str| name.chars().take(2).any(|c| with.starts_with(c));
    begins(one, other) || begins(other, one)
}

/// A third of the letters may be wrong, and one of a short word.
fn max_distance(text: &str, name: &str) -> usize {
    (text.chars().count().min(name.chars().count()) / 3).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelled_name_is_found_and_an_unrelated_one_is_not() {
        let names = ["namespaces", "labels", "mayShareWith", "h", "mode"];
        assert_eq!(nearest("namespace", &names), Some("namespaces"));
        assert_eq!(nearest("may_share_with", &names), Some("mayShareWith"));
        assert_eq!(nearest("lables", &names), Some("labels"));
        assert_eq!(nearest("moed", &names), Some("mode"));
        assert_eq!(nearest("replicas", &names), None);
        assert_eq!(nearest("sspec", &["spec"]), Some("spec"));
        for (other, known) in [("mpt", "opt"), ("pixtral", "mixtral"), ("bart", "dart")] {
            assert_eq!(nearest(other, &[known]), None, "{other} is no {known}");
        }
        assert_eq!(nearest(&"labels".repeat(100), &names), None);
    }
}

//! Pseudonyms in the order of the names that they stand for: names take part in tie-breaks, and sets of names are kept in their
//! order.

use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use stowage_scheduling::units::Bytes;

/// Words that the core, or kube-scheduler, knows: hiding them would change what they mean, and they say nothing of a cluster's
/// owner.
const KEPT_WORDS: [&str; 12] = [
    "",
    "0.0.0.0",
    "SCTP",
    "TCP",
    "UDP",
    "cpu",
    "ephemeral-storage",
    "false",
    "gpu.nvidia.com",
    "memory",
    "metadata.name",
    "true",
];
/// Domains whose keys of labels, taints and resources are public: `topology.kubernetes.io/zone`.
const KNOWN_KEY_DOMAINS: [&str; 5] = [
    "k8s.io",
    "karpenter.sh",
    "kubernetes.io",
    "nvidia.com",
    "stowage.dev",
];
const HUGE_PAGES_PREFIX: &str = "hugepages-";
/// Prefix of the UUIDs of MIG slices, which count in another way than GPUs if their node does not list them.
const MIG_PREFIX: &str = "MIG-";
/// A text that sorts after the pseudonyms of all MIG slices.
const AFTER_MIG_NAMES: &str = "MJ";
/// Prefix of GPUs of which only the index on their node is known.
const INDEX_PREFIX: &str = "index-";

/// Whether a text is kept wherever it stands: a word of [`KEPT_WORDS`], or a whole number, which rules compare.
pub fn is_kept(text: &str) -> bool {
    let is_number = |text: &str| text.parse::<i64>().is_ok();
    KEPT_WORDS.contains(&text)
        || is_number(text)
        || text.strip_prefix(INDEX_PREFIX).is_some_and(is_number)
        || text
            .strip_prefix(HUGE_PAGES_PREFIX)
            .is_some_and(|size| Bytes::parse_quantity(size).is_ok())
}

/// Whether a key of a label, taint or resource is kept: its domain is one of [`KNOWN_KEY_DOMAINS`]. A name may look the same: a
/// model may be named after its registry.
pub(crate) fn is_known_key(key: &str) -> bool {
    key.split_once('/').is_some_and(|(domain, _)| {
        KNOWN_KEY_DOMAINS.iter().any(|known_domain| {
            domain
                .strip_suffix(known_domain)
                .is_some_and(|before| before.is_empty() || before.ends_with('.'))
        })
    })
}

/// Pseudonyms of all texts that are neither kept words nor among `keys`. They sort as the texts do.
pub fn pseudonyms(
    texts: &BTreeSet<Box<str>>,
    keys: &BTreeSet<Box<str>>,
) -> FxHashMap<Box<str>, Box<str>> {
    let is_kept_here = |text: &str| is_kept(text) || keys.contains(text);
    let hidden = texts.iter().filter(|text| !is_kept_here(text)).count();
    let digits = hidden.max(1).ilog10() as usize + 1;
    let mut pseudonyms = FxHashMap::default();
    let (mut number, mut above) = (0, "");
    let mut gap: Vec<&str> = Vec::new();
    let is_slice = |text: &str| text.starts_with(MIG_PREFIX);
    let mut name_gap = |gap: &mut Vec<&str>, above: &str, below: Option<&str>| {
        let prefix = match gap.first() {
            None => String::new(),
            Some(first) if is_slice(first) => MIG_PREFIX.to_owned(),
            Some(_) => between(above, below),
        };
        for name in gap.drain(..) {
            number += 1;
            pseudonyms.insert(name.into(), format!("{prefix}{number:0digits$}").into());
        }
    };
    for text in texts {
        if gap
            .first()
            .is_some_and(|first| is_slice(first) != is_slice(text))
        {
            let edge = if is_slice(text) {
                MIG_PREFIX
            } else {
                AFTER_MIG_NAMES
            };
            name_gap(&mut gap, above, Some(edge));
            above = edge;
        }
        if is_kept_here(text) {
            name_gap(&mut gap, above, Some(text));
            above = text;
        } else {
            gap.push(text);
        }
    }
    name_gap(&mut gap, above, None);
    pseudonyms
}

/// Prefix that sorts between two texts, together with everything that begins with it.
fn between(above: &str, below: Option<&str>) -> String {
    let fits = |text: &String| {
        text.as_str() > above
            && below.is_none_or(|below| text.as_str() < below && !below.starts_with(text.as_str()))
    };
    let letters = ('a'..='z')
        .cycle()
        .skip(usize::from(b'x' - b'a'))
        .take(26)
        .chain('A'..='Z')
        .map(String::from);
    let longer = ['x', '-', '.', '!']
        .into_iter()
        .map(|end| format!("{above}{end}"));
    // Between a text and one that begins with it there are only such that go on with a lesser character, and `!` is the least
    // that a name may have.
    letters
        .chain(longer)
        .find(fits)
        .unwrap_or_else(|| format!("{above}!"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// All texts that look like known keys are keys.
    fn written(texts: &[&str]) -> Vec<String> {
        written_with(
            texts,
            &texts
                .iter()
                .copied()
                .filter(|text| is_known_key(text))
                .collect::<Vec<_>>(),
        )
    }

    fn written_with(texts: &[&str], keys: &[&str]) -> Vec<String> {
        let set = |texts: &[&str]| {
            texts
                .iter()
                .map(|text| Box::from(*text))
                .collect::<BTreeSet<Box<str>>>()
        };
        let (texts, keys) = (set(texts), set(keys));
        let pseudonyms = pseudonyms(&texts, &keys);
        texts
            .iter()
            .map(|text| pseudonyms.get(text).unwrap_or(text).to_string())
            .collect()
    }

    #[test]
    fn names_are_numbered_in_their_order_and_known_words_stay() {
        let texts = [
            "team-a",
            "true",
            "17",
            "node-b",
            "kubernetes.io/hostname",
            "node-a",
        ];
        assert_eq!(
            written(&texts),
            ["17", "kubernetes.io/hostname", "l1", "l2", "l3", "true"]
        );
    }

    /// A GPU's name says whether it is a slice of one, and what an unknown device costs depends on that.
    #[test]
    fn mig_slices_stay_mig_slices() {
        let texts = [
            "Acme",
            "GPU-b",
            "MIG-a",
            "MIG-b",
            "NVIDIA-H100",
            "TCP",
            "node-a",
        ];
        assert_eq!(
            written(&texts),
            ["A1", "A2", "MIG-3", "MIG-4", "N5", "TCP", "x6"]
        );
        assert_eq!(written(&["MIG-a"]), ["MIG-1"]);
    }

    #[test]
    fn only_the_sizes_of_huge_pages_stay() {
        assert!(is_kept("hugepages-1Gi") && !is_kept("hugepages-acme-merger"));
    }

    #[test]
    fn keys_of_known_domains_stay_and_such_that_only_end_alike_do_not() {
        assert!(
            ["hugepages-2Mi", "index-3", "-4"]
                .iter()
                .all(|text| is_kept(text))
        );
        assert!(
            ["nvidia.com/gpu.present", "node-role.kubernetes.io/gpu"]
                .iter()
                .all(|key| is_known_key(key))
        );
        let go = [
            "evilnvidia.com/gpu",
            "nvidia.com",
            "gpu-1.nvidia.com",
            "index-a",
            "1.5",
            "True",
        ];
        assert!(go.iter().all(|text| !is_kept(text) && !is_known_key(text)));
    }

    #[test]
    fn a_name_that_looks_like_a_key_goes() {
        let texts = ["models.nvidia.com/secret", "nvidia.com/gpu"]
            .map(Box::from)
            .into();
        let pseudonyms = pseudonyms(&texts, &["nvidia.com/gpu".into()].into());
        assert!(!pseudonyms.contains_key("nvidia.com/gpu"));
        let pseudonym = &*pseudonyms["models.nvidia.com/secret"];
        assert!(
            pseudonym < "nvidia.com/gpu" && !pseudonym.contains("models"),
            "{pseudonym}"
        );
    }

    proptest! {
        #[test]
        fn the_order_of_all_texts_is_kept_and_no_two_become_one(
            names in prop::collection::vec("[0-9a-z.:/_-]{0,5}", 0..40),
            words in prop::collection::vec(prop::sample::select([&KEPT_WORDS[..], &["5", "50", "-5", "index-1"]].concat()), 0..8),
            keys in prop::collection::vec("(nvidia.com/gpu|k8s.io/-)[.a-z0-9-]{0,2}", 0..6),
            alike in prop::collection::vec("(nvidia.com/gpu|k8s.io/-)[.a-z0-9-]{0,2}", 0..6),
        ) {
            let all = [&names[..], &keys, &alike].concat();
            let texts: Vec<&str> = all.iter().map(String::as_str).chain(words).collect();
            let written = written_with(&texts, &keys.iter().map(String::as_str).collect::<Vec<_>>());
            prop_assert!(written.is_sorted_by(|a, b| a < b), "{:?}", written);
        }
    }
}

//! The whole way, from texts to a policy.

use super::diagnostic::text::{Colors, render};
use super::*;
use proptest::prelude::*;

fn files(texts: &[&str]) -> Vec<SourceText> {
    texts
        .iter()
        .enumerate()
        .map(|(at, text)| SourceText::new(format!("{at}.yaml"), *text))
        .collect()
}

/// The same texts as documents of a policy.
fn policies(texts: &[&str]) -> Vec<SourceText> {
    let texts: Vec<String> = texts.iter().map(|text| of_kind(text)).collect();
    files(&texts.iter().map(String::as_str).collect::<Vec<_>>())
}

fn of_kind(text: &str) -> String {
    match text.contains("kind: ") {
        true => text.to_owned(),
        false => format!("{text}\nkind: SchedulingPolicy\n"),
    }
}

fn loaded(texts: &[&str]) -> LoadedPolicy {
    let files = policies(texts);
    load(&files).unwrap_or_else(|found| {
        panic!(
            "{}",
            render(&found, &PolicySources::new(&files), Colors::Off)
        )
    })
}

fn codes(text: &str) -> Vec<&'static str> {
    match load(&files(&[text])) {
        Ok(loaded) => loaded.warnings.iter().map(|one| one.code).collect(),
        Err(found) => found.iter().map(|one| one.code).collect(),
    }
}

#[test]
fn no_file_at_all_is_the_default_policy() {
    let policy = loaded(&[]).policy;
    let mut default = Policy::default();
    assert_ne!(policy.digest, default.digest);
    default.digest = policy.digest;
    assert_eq!(policy, default);
}

#[test]
fn an_empty_file_is_rejected_and_a_kind_alone_is_the_default_policy() {
    // The default policy begins with comments: cut off among them, it must not become the policy in force.
    let cut = &include_str!("../../policies/first-day-shadow/policy.yaml")[..100];
    for text in [
        "",
        "\n",
        " \t\r\n\n",
        "---\n",
        "# nothing yet\n",
        "null\n",
        "~",
        "---\n---\n# a\n",
        cut,
    ] {
        assert_eq!(codes(text), ["empty-file"], "{text:?}");
        assert!(
            load(&files(&["kind: SchedulingPolicy\n", text])).is_err(),
            "beside another file, too"
        );
        if !text.trim().is_empty() {
            let indented: String = text.lines().map(|line| format!("    {line}\n")).collect();
            let map = format!("kind: ConfigMap\ndata:\n  a.yaml: |\n{indented}");
            assert_eq!(codes(&map), ["empty-file"], "{map}");
        }
    }
    assert_eq!(
        loaded(&["kind: SchedulingPolicy\nmode: shadow\n---\n# nothing more\n"])
            .policy
            .mode,
        stowage_scheduling::policy::Mode::Shadow
    );
    assert_eq!(
        loaded(&["kind: SchedulingPolicy\n"]).policy.digest,
        loaded(&[]).policy.digest
    );
}

#[test]
fn the_digest_depends_on_the_settings_only() {
    let digest = |texts: &[&str]| loaded(texts).policy.digest;
    let plain = digest(&["mode: shadow\nscoring: {shortlist: 4}\n"]);
    assert_eq!(
        plain,
        digest(&[
            "# a comment\nkind: SchedulingPolicy\nscoring:\n  shortlist: 4\n---\nkind: SchedulingPolicy\nmode: shadow\n"
        ])
    );
    assert_eq!(
        plain,
        digest(&["mode: shadow\n", "mode: shadow\n"]),
        "the default shortlist is 4"
    );
    assert_ne!(plain, digest(&["mode: shadow\nscoring: {shortlist: 5}\n"]));
    assert_eq!(digest(&["startGate: {max: 600s}\n"]), digest(&[]));
}

#[test]
fn cases_beside_a_policy_are_no_part_of_it() {
    let test = "kind: PolicyTest\ncases:\n- {name: a, pod: {name: p}, expect: {class: serving}}\n";
    let loaded = loaded(&["kind: SchedulingPolicy\n---\nkind: PolicyTest\n", test]);
    assert_eq!(loaded.tests.len(), 2);
    assert_eq!(loaded.tests[1].file, FileId::at(1));
    assert_eq!(loaded.tests[1].test.cases.as_ref().map(Vec::len), Some(1));
}

#[test]
fn a_shown_policy_parses_again_and_names_the_origin_of_each_value() {
    let texts = [
        "mode: shadow\nstartGate: {max: 5m}\n",
        "classes:\n- name: chat\n  match: {labels: {app: '7'}}\n  limits:\n    queue: 5\n",
    ];
    let shown = loaded(&texts).show(&policies(&texts));
    let line = |start: &str| {
        shown
            .lines()
            .find(|line| line.trim_start().starts_with(start))
            .unwrap_or_else(|| panic!("{start}: {shown}"))
    };
    assert!(line("mode: shadow").ends_with("# 0.yaml:1"));
    assert!(line("- name: chat").ends_with("# 1.yaml:2"));
    assert!(line("app: \"7\"").ends_with("# 1.yaml:3"));
    assert!(line("queue: 5").ends_with("# 1.yaml:5"));
    assert!(line("max: 5m").ends_with("# 0.yaml:2"));
    assert!(line("kvCache: 90%").ends_with("# default"));
    assert_eq!(
        loaded(&[&shown]).policy.digest,
        loaded(&texts).policy.digest,
        "{shown}"
    );
}

#[test]
fn a_policy_that_is_written_out_is_unchanged_whatever_it_says() {
    let text = "headroom: {models: {'A100 \"x\"': 8%}}\n\
                classes: [{name: a, match: {expression: \"pod.labels['x'] == \\\"y\\\"\", priority: {min: -5}}, \
                mayShareWith: []}]\n\
                tenants: [{name: t, namespaces: [t], guarantee: {vram: 1Ti}}]\nnodePools: [{name: p, mig: []}]\n";
    let shown = loaded(&[text]).show(&policies(&[text]));
    assert_eq!(loaded(&[&shown]).policy, loaded(&[text]).policy, "{shown}");
}

#[test]
fn exponential_documents_are_rejected_quickly() {
    let deep = "[".repeat(500_000);
    let wide = "a: 1\n".repeat(200_000);
    let mut anchors = String::from("a0: &a0 [x]\n");
    for level in 1..60 {
        anchors += &format!("a{level}: &a{level} [*a{0}, *a{0}]\n", level - 1);
    }
    let unknown: String = (0..20_000).map(|n| format!("clases{n}: 1\n")).collect();
    let pools: String = (0..9_000).map(|n| format!("- {{name: p{n}}}\n")).collect();
    let neighbors = format!(
        "classes:\n- name: a\n  mayShareWith: [{}]\n",
        "nobody, ".repeat(40_000)
    );
    for bomb in [
        unknown,
        format!("nodePools:\n{pools}"),
        neighbors,
        deep,
        wide,
        anchors,
        format!("classes: [{}]", "{name: a}, ".repeat(20_000)),
        format!("mode: {}", "x".repeat(900_000)),
    ] {
        let files = files(&[&bomb]);
        let found = load(&files).unwrap_err();
        let text = render(&found, &PolicySources::new(&files), Colors::Off);
        assert!(text.len() < 100_000, "{} bytes", text.len());
    }
    assert_eq!(codes(&"#".repeat((1 << 20) + 1)), ["file-too-large"]);
    let models = |file: usize| {
        (0..30_000)
            .map(|n| format!("  m{}: 8%\n", n * 3 + file))
            .collect::<String>()
    };
    let many = [0, 1].map(|file| format!("headroom:\n models:\n{}", models(file)));
    assert_eq!(
        load(&files(&[&many[0], &many[1]])).map(drop).unwrap_err()[0].code,
        "too-many-values"
    );
}

/// One of each: of a shape, a value, a reference and a case.
#[test]
fn mistakes_of_all_kinds_are_told_in_one_run() {
    let text = "kind: SchedulingPolicy\n\
        headroom: {default: 10}\n\
        telemetry: {fresh: 40s}\n\
        classes:\n\
        - {name: a, limits: {kvcache: 90%}}\n\
        - {name: b, match: {namespaces: [b]}, mayShareWith: [nobody]}\n\
        - {name: c, match: {priority: {min: 5, max: 1}}}\n\
        - {name: d, match: {namespaces: [d]}}\n\
        - {name: e, match: {namespaces: [d]}}\n\
        nodePools:\n\
        - {name: p, selector: {a: b}, classes: [nobody]}\n\
        - {name: all}\n\
        ---\n\
        kind: PolicyTest\n\
        cases: [{name: x, pod: {name: p}}]\n";
    assert_eq!(
        codes(text),
        [
            "malformed",
            "stale-before-fresh",
            "unknown-field",
            "unknown-class",
            "no-pod-matches",
            "unreachable-class",
            "unknown-class",
            "missing-field",
        ]
    );
    let of_others = "kind: SchedulingPolicy\nplanning:\n  pressure: {evictAfter: soon}\n  spare: [{gpus: 1, pool: x}]\n";
    assert_eq!(codes(of_others), ["malformed", "unknown-pool"]);
    let twice = ["mode: shadow\n", "mode: enforce\nscoring: {weights: {packing: 0, kvHeadroom: 0, timeToReady: 0, topology: 0}}\n"]
        .map(|text| format!("kind: SchedulingPolicy\n{text}"));
    let found = load(&files(&[&twice[0], &twice[1]])).unwrap_err();
    let found: Vec<_> = found.iter().map(|one| one.code).collect();
    assert_eq!(found, ["conflict", "weights-all-zero"]);
}

#[test]
fn a_policy_as_data_has_its_words_as_they_were_written() {
    let text = "kind: SchedulingPolicy\nclasses:\n- {name: \"on\", match: {namespaces: [\"yes\", \"0x1f\"], labels: {a: \"1_000\"}}}\n\
                tenants: [{name: \"0777\", namespaces: [\"no\"], guarantee: {gpus: 1}}]\n";
    let data = load(&[SourceText::new("policy.yaml", text)])
        .unwrap()
        .to_json();
    let class = &data["classes"][0];
    assert_eq!(class["name"], "on");
    assert_eq!(
        class["match"]["namespaces"],
        serde_json::json!(["yes", "0x1f"])
    );
    assert_eq!(class["match"]["labels"]["a"], "1_000");
    assert_eq!(data["tenants"][0]["name"], "0777");
}

/// What is told of the rest must be true once the mistake is mended.
#[test]
fn a_mistake_draws_no_others_after_it() {
    for (text, expected) in [
        // The class is there, under a misspelled section.
        (
            "clases: [{name: chat}]\nnodePools: [{name: p, classes: [chat]}]\n",
            "unknown-field",
        ),
        (
            "nodePool: [{name: p}]\nclasses: [{name: chat, match: {namespaces: [c]}, pools: [p]}]\n",
            "unknown-field",
        ),
        (
            "classes: {chat: {}}\nnodePools: [{name: p, classes: [chat]}]\n",
            "wrong-type",
        ),
        // A class without its conditions would take the pods of all others.
        (
            "classes: [{name: a, match: {namespace: [a]}}, {name: b, match: {namespaces: [b]}}]\n",
            "unknown-field",
        ),
        ("tenants: [{name: a, namespaces: a}]\n", "wrong-type"),
        // The class is there, under another name.
        (
            "classes: [{name: Chat, match: {namespaces: [c]}}]\nnodePools: [{name: p, classes: [chat]}]\n",
            "malformed",
        ),
        ("telemetry: {fresh: 5, stale: 3s}\n", "malformed"),
        (
            "startGate: {max: 1}\nclasses: [{name: a, match: {namespaces: [a]}, startGate: {min: 15m}}]\n",
            "malformed",
        ),
        (
            "classes: [{name: a, match: {namespaces: [a]}, preemptible: soon}, {name: b, match: {namespaces: [b]}, mayShareWith: [a]}]\n",
            "wrong-type",
        ),
    ] {
        assert_eq!(
            codes(&format!("kind: SchedulingPolicy\n{text}")),
            [expected],
            "{text}"
        );
    }
}

#[test]
fn a_document_says_what_kind_it_is() {
    for text in [
        "mode: shadow\n",
        "{}",
        "apiVersion: stowage.dev/v1alpha1\n",
        "kind: SchedulingPolicy\n---\nmode: shadow\n",
    ] {
        let files = files(&[text]);
        let found = load(&files).map(drop).unwrap_err();
        assert_eq!(
            found.iter().map(|one| one.code).collect::<Vec<_>>(),
            ["missing-field"],
            "{text}"
        );
        let told = render(&found, &PolicySources::new(&files), Colors::Off);
        assert!(told.contains("add `kind: SchedulingPolicy`"), "{told}");
    }
    assert!(codes("cases: []\n").contains(&"missing-field"));
    assert_eq!(codes("kind: Deployment\nreplicas: 3\n"), ["not-a-policy"]);
}

/// By day its pods would start as engines that nobody may evict.
#[test]
fn a_class_whose_pods_have_more_rights_outside_its_windows_gets_a_warning() {
    let night = "when: [{from: '20:00', to: '06:00', timeZone: UTC}]";
    let policy = |classes: &str| {
        format!("kind: SchedulingPolicy\nclasses:\n{classes}nodePools: [{{name: jobs}}]\n")
    };
    let trap =
        format!("- {{name: night, match: {{namespaces: [jobs]}}, {night}, preemptible: true}}\n");
    let files = files(&[&policy(&trap)]);
    let warnings = load(&files).unwrap().warnings;
    let told = render(&warnings, &PolicySources::new(&files), Colors::Off);
    assert!(told.contains("outside its windows, pods of `night` are of class `dedicated` or `serving`: never evicted"), "{told}");
    for (classes, expected) in [
        // Negative priorities are of the preemptible `opportunistic`.
        (
            format!(
                "- {{name: night, match: {{priority: {{max: -1}}}}, engine: false, {night}, preemptible: true}}\n"
            ),
            0,
        ),
        (
            format!("- {{name: night, match: {{namespaces: [jobs]}}, {night}}}\n"),
            0,
        ),
        (
            format!("- {{name: night, match: {{namespaces: [jobs]}}, engine: false, {night}}}\n"),
            1,
        ),
        (
            format!("- {{name: night, match: {{namespaces: [jobs]}}, pools: [jobs], {night}}}\n"),
            1,
        ),
        (
            format!("{trap}- {{name: day, match: {{namespaces: ['job*']}}, preemptible: true}}\n"),
            0,
        ),
        (
            format!("{trap}- {{name: day, match: {{namespaces: [other]}}, preemptible: true}}\n"),
            1,
        ),
        // Its owner wrote what holds by day.
        (
            format!("{trap}- {{name: day, match: {{namespaces: [jobs]}}}}\n"),
            0,
        ),
        // Two that together take all.
        (
            format!(
                "{trap}- {{name: low, match: {{namespaces: [jobs], priority: {{max: 0}}}}, preemptible: true}}\n\
            - {{name: high, match: {{namespaces: [jobs], priority: {{min: 1}}}}, preemptible: true}}\n"
            ),
            0,
        ),
        // A second class has the other hours, or all but one.
        (
            format!(
                "{trap}- {{name: day, match: {{namespaces: [jobs]}}, when: [{{from: '06:00', to: '20:00', timeZone: UTC}}]}}\n"
            ),
            0,
        ),
        (
            format!(
                "{trap}- {{name: day, match: {{namespaces: [jobs]}}, when: [{{from: '06:00', to: '19:00', timeZone: UTC}}]}}\n"
            ),
            1,
        ),
        (
            format!(
                "{trap}- {{name: day, match: {{namespaces: [jobs]}}, when: [{{from: '06:00', to: '20:00', timeZone: Asia/Tokyo}}]}}\n"
            ),
            1,
        ),
    ] {
        let found = codes(&policy(&classes));
        let count = found
            .iter()
            .filter(|code| **code == "outside-windows")
            .count();
        assert_eq!(
            (count, found.len()),
            (expected, expected),
            "{classes}: {found:?}"
        );
    }
}

#[test]
fn nights_and_weekends_are_two_windows() {
    let text = "kind: SchedulingPolicy\nclasses:\n- name: low\n  match: {namespaces: [low]}\n  when:\n\
        \x20 - {from: '20:00', to: '06:00', timeZone: Europe/Berlin}\n  - {days: [sat-sun], timeZone: Europe/Berlin}\n";
    assert_eq!(codes(text), [""; 0]);
}

/// Each is compared with each other, and all are looked at twice a second.
#[test]
fn a_class_with_a_window_for_every_minute_is_refused() {
    let minute = |n: usize| {
        let (begin, end) = (n, n + 1);
        let time = |minute: usize| format!("\"{:02}:{:02}\"", minute / 60, minute % 60);
        format!(
            "      - {{from: {}, to: {}, timeZone: UTC}}\n",
            time(begin),
            time(end)
        )
    };
    let windows = |count: usize| (0..count).map(minute).collect::<String>();
    let class = |count| {
        format!(
            "kind: SchedulingPolicy\nclasses:\n- name: a\n  match: {{namespaces: [a]}}\n  when:\n{}",
            windows(count)
        )
    };
    assert_eq!(codes(&class(1440)), ["too-many-entries"]);
    assert!(load(&files(&[&class(64)])).is_ok());
    let spare = |count| {
        format!(
            "kind: SchedulingPolicy\nplanning:\n spare:\n - gpus: 1\n   when:\n{}",
            windows(count)
        )
    };
    assert_eq!(codes(&spare(65)), ["too-many-entries"]);
}

#[test]
fn an_expression_that_nests_without_end_is_refused() {
    for open in [
        "(",
        "[",
        "!",
        "-",
        "pod[",
        "size(",
        "{1:",
        "true?true:",
        "pod.labels.all(x,",
    ] {
        let expression = open.repeat(1000 / open.len());
        let text = of_kind(&format!(
            "classes: [{{name: a, match: {{expression: {expression:?}}}}}]\n"
        ));
        assert_eq!(codes(&text), ["expression"], "{open}");
    }
}

/// Pieces of policies, put together at random: likelier to come far than letters are.
fn policyish() -> impl Strategy<Value = String> {
    let words = vec![
        "classes:\n",
        "- name: a\n",
        "  match: ",
        "{",
        "}",
        "[",
        "]",
        ", ",
        ": ",
        "\n",
        "  ",
        "- ",
        "mode: shadow\n",
        "tenants: ",
        "name: ",
        "&a ",
        "*a",
        "'",
        "\"",
        "|\n",
        ">\n",
        "10%",
        "\t",
        "#",
        "---\n",
        "kind: PolicyTest\n",
        "expression: ",
        "pod.x",
        "ü",
        "\u{0}",
        "\u{1b}[1m",
        "? ",
        "!x ",
        "<<: ",
        "namespaces",
        "priority: {min: 5}",
        "nodePools: ",
        "mig: ",
        "3g.40gb",
        "\r\n",
        "\u{feff}",
        "🦀",
    ];
    proptest::collection::vec(proptest::sample::select(words), 0..24)
        .prop_map(|words| words.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn no_text_makes_it_panic_and_every_mark_lies_inside_its_file(
        texts in proptest::collection::vec(prop_oneof![policyish(), "\\PC{0,60}"], 1..3)
    ) {
        let files: Vec<SourceText> = texts.iter().map(|text| SourceText::new("x.yaml", text.as_str())).collect();
        let found = match load(&files) {
            Ok(loaded) => loaded.warnings,
            Err(found) => found,
        };
        let sources = PolicySources::new(&files);
        for (span, _) in found.iter().flat_map(|one| one.related.iter().cloned().chain([(one.span, String::new())])) {
            let text = sources.text(span.file);
            prop_assert!(text.get(span.range()).is_some(), "{span:?} in {text:?}");
        }
        let _ = render(&found, &sources, Colors::Off);
        let _ = diagnostic::json::json_diagnostics(&found, &sources);
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
        let files = [SourceText::new("x.yaml", bytes)];
        if let Err(found) = load(&files) {
            let _ = render(&found, &PolicySources::new(&files), Colors::Off);
        }
    }
}

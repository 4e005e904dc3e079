//! A ConfigMap with policy files under its `data` is read as these files are, and each problem is shown where it stands in it.

use super::*;

const POLICY: &str = "# the policy\nmode: shadow\nclasses:\n- name: chat\n  match: {namespaces: [chat]}\nkind: SchedulingPolicy\n---\nkind: PolicyTest\n";

fn config_map(block: &str, text: &str) -> String {
    let indented: String = text.lines().map(|line| format!("    {line}\n")).collect();
    format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: größe\ndata:\n  README.md: 'not: a: policy'\n  policy.yaml: {block}\n{indented}"
    )
}

fn found(text: &str) -> Vec<(&'static str, String)> {
    let files = [SourceText::new("map.yaml", text)];
    let sources = PolicySources::new(&files);
    let at = |one: &Diagnostic| {
        let at = sources.position(one.span.file, one.span.start as usize);
        (
            one.code,
            format!("{}:{} {}", at.line, at.column, sources.slice(one.span)),
        )
    };
    match load(&files) {
        Ok(loaded) => loaded.warnings.iter().map(at).collect(),
        Err(found) => found.iter().map(at).collect(),
    }
}

#[test]
fn files_in_a_config_map_load_like_plain_files() {
    let alone = load(&[SourceText::new("a.yaml", POLICY)]).unwrap();
    for text in [
        config_map("|", POLICY),
        config_map("|2+", POLICY),
        format!(
            "kind: ConfigMap\ndata: {{p.yaml: {}}}\n",
            serde_json::json!(POLICY)
        ),
        format!(
            "kind: ConfigMap\ndata: {{a.yml: '{{kind: SchedulingPolicy, mode: shadow}}', b.yaml: {}}}\n",
            serde_json::json!(POLICY.replace("mode: shadow\n", ""))
        ),
    ] {
        let files = [SourceText::new("map.yaml", text.as_str())];
        let loaded = load(&files).unwrap_or_else(|found| panic!("{found:?}\n{text}"));
        assert_eq!(loaded.policy.digest, alone.policy.digest, "{text}");
        assert_eq!(loaded.tests.len(), 1);
    }
}

#[test]
fn a_problem_in_a_config_map_is_shown_at_its_line() {
    let broken = POLICY.replace("mode", "mood");
    assert_eq!(
        found(&config_map("|", &broken)),
        [("unknown-field", "9:5 mood".to_owned())]
    );
    assert_eq!(
        found(&config_map("|-", &POLICY.replace("[chat]", "[Chat]")))[0],
        ("malformed", "12:28 Chat".into())
    );
    let cut = POLICY.replace("[chat]", "[chat");
    assert_eq!(
        found(&config_map("|", &cut))[0].1.split(':').next(),
        Some("12"),
        "{:?}",
        found(&config_map("|", &cut))
    );
    let quoted = format!(
        "kind: ConfigMap\ndata:\n  p.yaml: {}\n",
        serde_json::json!(broken)
    );
    assert_eq!(found(&quoted), [("unknown-field", "3:26 mood".to_owned())]);
}

#[test]
fn a_config_map_without_a_policy_is_rejected() {
    assert_eq!(
        found("kind: ConfigMap\ndata: {readme: hello}\n")[0].0,
        "not-a-policy"
    );
    assert_eq!(found("kind: ConfigMap\n")[0].0, "not-a-policy");
    assert_eq!(
        found("kind: ConfigMap\ndata: {a.yaml: ''}\n")[0].0,
        "empty-file"
    );
    assert_eq!(
        found("kind: ConfigMap\ndata: {a.yaml: {mode: shadow}}\n")[0].0,
        "wrong-type"
    );
    let nested = format!(
        "kind: ConfigMap\ndata: {{a.yaml: {}}}\n",
        serde_json::json!("kind: ConfigMap\ndata: {a.yaml: '{}'}\n")
    );
    assert_eq!(
        found(&nested)[0].0,
        "not-a-policy",
        "a ConfigMap in a ConfigMap is none"
    );
}

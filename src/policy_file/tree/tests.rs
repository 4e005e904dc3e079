//! YAML with its places, and all that is refused as none.

use super::super::diagnostic::Diagnostic;
use super::super::source::FileId;
use super::read::{MAX_DEPTH, MAX_NODES};
use super::*;

fn read_text(text: &str) -> (Vec<YamlNode>, Vec<Diagnostic>) {
    read(text.as_bytes(), FileId::at(0), &mut MAX_NODES.clone())
}

fn tree(text: &str) -> YamlNode {
    let (mut documents, diagnostics) = read_text(text);
    assert_eq!(diagnostics, []);
    assert_eq!(documents.len(), 1);
    documents.remove(0)
}

fn codes(text: &str) -> Vec<&'static str> {
    read_text(text).1.iter().map(|one| one.code).collect()
}

#[test]
fn each_value_knows_its_place() {
    let text = "a: 1\nb:\n  - 'x y'\n  - {c: größe}\n# end\nd: 2\n";
    let root = tree(text);
    let at = |node: &YamlNode| &text[node.span.range()];
    assert_eq!(at(root.get("a").unwrap()), "1");
    assert_eq!(at(&root.get("b").unwrap().items()[0]), "'x y'");
    assert_eq!(at(&root.get("b").unwrap().items()[1]), "{c: größe}");
    assert_eq!(
        at(root.get("b").unwrap().items()[1].get("c").unwrap()),
        "größe"
    );
    assert_eq!(at(root.get("b").unwrap()), "- 'x y'\n  - {c: größe}");
    assert_eq!(&text[root.entry("d").unwrap().0.span.range()], "d");
}

#[test]
fn a_key_without_a_value_is_marked_at_the_key() {
    let text = "classes:\n\n\nmode: shadow\n";
    let root = tree(text);
    assert_eq!(&text[root.get("classes").unwrap().span.range()], "classes");
}

#[test]
fn a_byte_order_mark_shifts_no_place() {
    let text = "\u{feff}mode: shadow\n";
    let root = tree(text);
    assert_eq!(&text[root.get("mode").unwrap().span.range()], "shadow");
}

#[test]
fn a_file_of_comments_is_an_empty_policy() {
    for text in ["", "\n\n", "# nothing yet\n", "---\n", "---\n---\n# b\n"] {
        let (documents, diagnostics) = read_text(text);
        assert_eq!((documents.len(), diagnostics.len()), (0, 0), "{text:?}");
    }
}

#[test]
fn scalars_are_what_yaml_1_2_says() {
    let atom = |text: &str| {
        Scalar {
            text: text.into(),
            style: Style::Plain,
        }
        .atom()
        .to_owned_debug()
    };
    for (text, expected) in [
        ("", "Null"),
        ("~", "Null"),
        ("true", "Bool(true)"),
        ("yes", "Text(\"yes\")"),
        ("12", "Int(12)"),
        ("-12", "Int(-12)"),
        ("012", "Text(\"012\")"),
        ("1.5", "Float(1.5)"),
        ("1e3", "Float(1000.0)"),
        ("inf", "Text(\"inf\")"),
        ("nan", "Text(\"nan\")"),
        ("10%", "Text(\"10%\")"),
        ("-", "Text(\"-\")"),
    ] {
        assert_eq!(atom(text), expected, "{text}");
    }
    assert_eq!(
        Scalar {
            text: "12".into(),
            style: Style::Text
        }
        .atom(),
        Atom::Text("12")
    );
}

impl Atom<'_> {
    fn to_owned_debug(&self) -> String {
        format!("{self:?}")
    }
}

#[test]
fn an_alias_expands_to_its_anchor() {
    let root = tree("a: &x [1, 2]\nb: *x\n");
    assert_eq!(root.get("a"), root.get("b"));
}

#[test]
fn an_exponential_alias_is_rejected_before_it_expands() {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..20 {
        let inner = vec![format!("*a{}", level - 1); 10].join(", ");
        text += &format!("a{level}: &a{level} [{inner}]\n");
    }
    assert_eq!(codes(&text), ["too-many-values"]);
}

#[test]
fn an_alias_inside_what_it_stands_for_is_refused() {
    assert_eq!(codes("a: &x [1, *x]\n"), ["endless-alias"]);
}

#[test]
fn an_unknown_alias_is_reported_and_the_rest_is_read() {
    let (documents, diagnostics) = read_text("a: *nobody\nb: *nothing\nc: 1\n");
    assert_eq!(diagnostics.len(), 2);
    assert!(documents[0].get("c").is_some());
}

#[test]
fn what_is_nested_too_deep_is_refused_however_it_is_written() {
    let flow = "[".repeat(100_000);
    let block: String = (0..100)
        .map(|depth| format!("{}a:\n", " ".repeat(depth)))
        .collect();
    let mixed = format!("{}{}{}", "- ".repeat(20), "[".repeat(20), "]".repeat(20));
    let aliased = format!(
        "a: &x {}{}\nb: {}*x{}\n",
        "[".repeat(20),
        "]".repeat(20),
        "[".repeat(20),
        "]".repeat(20)
    );
    for text in [flow, block, mixed, aliased] {
        assert_eq!(codes(&text), ["too-deep"], "{}", &text[..60]);
    }
    let deepest = format!("{}{}", "[".repeat(MAX_DEPTH), "]".repeat(MAX_DEPTH));
    assert_eq!(codes(&deepest), [""; 0]);
}

#[test]
fn a_file_with_too_many_values_is_refused() {
    assert_eq!(codes(&"- 1\n".repeat(MAX_NODES - 1)), [""; 0]);
    assert_eq!(codes(&"- 1\n".repeat(MAX_NODES)), ["too-many-values"]);
    assert_eq!(
        codes(&"- [[], {}]\n".repeat(MAX_NODES / 2)),
        ["too-many-values"]
    );
}

#[test]
fn a_file_above_the_limit_is_refused_unread() {
    assert_eq!(codes(&"#".repeat((1 << 20) + 1)), ["file-too-large"]);
    assert_eq!(codes(&"#".repeat(1 << 20)), [""; 0]);
}

#[test]
fn a_key_twice_is_refused_with_both_places() {
    let (_, diagnostics) = read_text("mode: shadow\nmode: enforce\n");
    assert_eq!(diagnostics[0].code, "duplicate-key");
    assert_eq!(
        (
            diagnostics[0].span.range(),
            diagnostics[0].related[0].0.range()
        ),
        (13..17, 0..4)
    );
}

#[test]
fn many_keys_twice_are_found_quickly() {
    let text: String = (0..20_000)
        .map(|n| format!("k{}: 1\n", n % 15_000))
        .collect();
    assert_eq!(codes(&text).len(), 5_000);
}

#[test]
fn tags_and_merge_keys_are_rejected() {
    assert_eq!(codes("a: !secret x\n"), ["tag"]);
    assert_eq!(codes("a: !!binary x\n"), ["tag"]);
    assert_eq!(codes("a: &x {b: 1}\nc:\n  <<: *x\n"), ["merge-key"]);
    assert_eq!(codes("? [a]\n: b\n"), ["key-not-text"]);
    assert_eq!(codes("a: !!str 5\n"), [""; 0]);
}

#[test]
fn a_broken_document_does_not_hide_the_next() {
    let (documents, diagnostics) = read_text("a: [1\n---\nb: 1\n---\nc: 'x\n---\nd: 1\n");
    assert_eq!(diagnostics.len(), 2, "{diagnostics:?}");
    let keys: Vec<&str> = documents
        .iter()
        .map(|one| one.entries()[0].0.text.as_str())
        .collect();
    assert_eq!(keys, ["b", "d"]);
}

#[test]
fn text_that_is_not_utf8_is_marked_at_the_first_bad_byte() {
    let (_, diagnostics) = read(b"mode: sh\xffdow\n", FileId::at(0), &mut MAX_NODES.clone());
    assert_eq!(
        (diagnostics[0].code, diagnostics[0].span.range()),
        ("not-utf8", 8..11)
    );
    assert_eq!(
        read(b"\xff\xfem\0", FileId::at(0), &mut MAX_NODES.clone()).1[0].message,
        "the file is UTF-16"
    );
}

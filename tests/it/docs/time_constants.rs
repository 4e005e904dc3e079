//! The page of time constants has each one of the product, with its value and its reason, as they stand in the sources.
//! `STOWAGE_BLESS=1` writes it again.

use super::root;
use std::collections::BTreeMap;
use std::path::Path;
use stowage_scheduling::units::Millis;
use stowage_scheduling::units::text::format_duration;
use syn::{Attribute, BinOp, Expr, ImplItem, Item, Lit, Meta, Type};

const PAGE: &str = "docs/reference/time-constants.md";
/// Folders of `src` that only simulations and tests use.
const NOT_SHIPPED: [&str; 5] = ["lab", "simulate", "testkit", "proptests", "tests"];
/// Types of which a constant is a time.
const TIME_TYPES: [&str; 3] = ["Backoff", "Duration", "Millis"];

struct TimeConstant {
    name: String,
    value: String,
    reason: String,
}

#[test]
fn the_page_of_time_constants_has_each_with_its_value_and_reason() {
    let mut by_file = BTreeMap::new();
    add_constants(&root().join("src"), &mut by_file);
    let count: usize = by_file.values().map(Vec::len).sum();
    assert!(count > 100, "{count} are found");
    let without_reason: Vec<String> = by_file
        .iter()
        .flat_map(|(file, all)| all.iter().map(move |one| (file, one)))
        .filter(|(_, one)| one.reason.is_empty())
        .map(|(file, one)| format!("{file}: {}", one.name))
        .collect();
    assert!(
        without_reason.is_empty(),
        "no doc comment says why: {without_reason:#?}"
    );
    let page = root().join(PAGE);
    let written = std::fs::read_to_string(&page).unwrap_or_default();
    let (before, _) = written.split_once("\n## ").unwrap_or((&written, ""));
    let expected = format!("{}\n{}", before.trim_end(), sections(&by_file));
    if std::env::var_os("STOWAGE_BLESS").is_some() {
        std::fs::write(&page, &expected).unwrap();
    } else {
        assert!(
            written == expected,
            "{PAGE} is not as the sources: write it again with STOWAGE_BLESS=1"
        );
    }
}

fn sections(by_file: &BTreeMap<String, Vec<TimeConstant>>) -> String {
    let mut text = String::new();
    let mut package = "";
    for (file, constants) in by_file {
        let (this, path) = file.split_once('/').unwrap_or((file, file));
        if package != this {
            package = this;
            text += &format!("\n## {package}\n\n");
        }
        for TimeConstant {
            name,
            value,
            reason,
        } in constants
        {
            text += &format!("- [`{name}`](../../src/{package}/{path}) **{value}**: {reason}\n");
        }
    }
    text
}

fn add_constants(folder: &Path, by_file: &mut BTreeMap<String, Vec<TimeConstant>>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        if NOT_SHIPPED.contains(&name) || name.ends_with("_tests") || name.starts_with("tests_") {
            continue;
        }
        if path.is_dir() {
            add_constants(&path, by_file);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let mut found = Vec::new();
            let file = syn::parse_file(&std::fs::read_to_string(&path).unwrap()).unwrap();
            add_of_items(&file.items, &mut found);
            if !found.is_empty() {
                let file = path.strip_prefix(root().join("src")).unwrap();
                by_file.insert(file.to_str().unwrap().to_owned(), found);
            }
        }
    }
}

fn add_of_items(items: &[Item], found: &mut Vec<TimeConstant>) {
    for item in items {
        match item {
            Item::Const(one) if is_time(&one.ty) || unit_in_name(&one.ident).is_some() => {
                found.push(time_constant(&one.ident, &one.expr, &one.attrs));
            }
            Item::Impl(block) => {
                for item in &block.items {
                    if let ImplItem::Const(one) = item
                        && is_time(&one.ty)
                        && number_of(&one.expr).is_some_and(|millis| millis > 0)
                    {
                        found.push(time_constant(&one.ident, &one.expr, &one.attrs));
                    }
                }
            }
            Item::Mod(module) if !is_test(&module.attrs) => {
                if let Some((_, items)) = &module.content {
                    add_of_items(items, found);
                }
            }
            _ => {}
        }
    }
}

fn is_time(of: &Type) -> bool {
    let Type::Path(path) = of else { return false };
    let last = path.path.segments.last();
    last.is_some_and(|last| TIME_TYPES.iter().any(|name| last.ident == name))
}

/// Milliseconds of the unit with which the name of an integer ends.
fn unit_in_name(name: &syn::Ident) -> Option<u64> {
    match name.to_string().rsplit_once('_')?.1 {
        "MILLIS" | "MS" => Some(1),
        "SECONDS" => Some(1000),
        _ => None,
    }
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|one| {
        one.path().is_ident("cfg")
            && matches!(&one.meta, Meta::List(list) if list.tokens.to_string().contains("test"))
    })
}

fn time_constant(name: &syn::Ident, value: &Expr, attributes: &[Attribute]) -> TimeConstant {
    TimeConstant {
        name: name.to_string(),
        value: match (unit_in_name(name), whole(value)) {
            (Some(millis), Some(number)) => format_duration(Millis(number * millis)),
            _ => value_text(value),
        },
        reason: doc_of(attributes),
    }
}

/// The doc comment in one line; a link of rustdoc is the name that it shows.
fn doc_of(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter_map(|one| match &one.meta {
        Meta::NameValue(doc) if doc.path.is_ident("doc") => match &doc.value {
            Expr::Lit(text) => match &text.lit {
                Lit::Str(text) => Some(text.value().trim().to_owned()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    });
    let text = lines.collect::<Vec<_>>().join(" ");
    text.replace("[`", "`").replace("`]", "`")
}

fn value_text(value: &Expr) -> String {
    if let Expr::Struct(back_off) = value {
        let values = back_off.fields.iter().map(|field| value_text(&field.expr));
        return values.collect::<Vec<_>>().join(" to ");
    }
    match (number_of(value), value) {
        (Some(millis), _) => format_duration(Millis(millis)),
        (None, Expr::Path(path)) => {
            let segments = path.path.segments.iter().map(|one| one.ident.to_string());
            format!("`{}`", segments.collect::<Vec<_>>().join("::"))
        }
        (None, _) => "by calculation".into(),
    }
}

/// Milliseconds, if the value is one of the usual constructors on numbers.
fn number_of(value: &Expr) -> Option<u64> {
    let Expr::Call(call) = value else { return None };
    let Expr::Path(function) = &*call.func else {
        return None;
    };
    let unit = match function.path.segments.last()?.ident.to_string().as_str() {
        "from_millis" | "Millis" => 1,
        "from_secs" | "seconds" => 1000,
        _ => return None,
    };
    Some(whole(call.args.first()?)? * unit)
}

fn whole(value: &Expr) -> Option<u64> {
    match value {
        Expr::Lit(number) => match &number.lit {
            Lit::Int(number) => number.base10_parse().ok(),
            _ => None,
        },
        Expr::Paren(inner) => whole(&inner.expr),
        Expr::Binary(product) if matches!(product.op, BinOp::Mul(_)) => {
            Some(whole(&product.left)? * whole(&product.right)?)
        }
        _ => None,
    }
}

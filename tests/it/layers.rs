//! The layers of a package: which module may import from which. The list in the header of its `lib.rs` is the truth; this test reads
//! it, and every path in the code except that of tests. What packages may import, Cargo says.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, Token, UseTree};

/// Names of modules, from the crate's root.
type Module = Vec<String>;

/// Each listed module with its layer, counted from below.
struct Layers(BTreeMap<Module, usize>);

impl Layers {
    fn read(src: &Path) -> Self {
        let listed_modules = listed(&src.join("lib.rs"));
        let on_layer = |(layer, listed_modules): (usize, Vec<Module>)| {
            listed_modules
                .into_iter()
                .map(move |listed_module| (listed_module, layer))
        };
        Self(
            listed_modules
                .into_iter()
                .enumerate()
                .flat_map(on_layer)
                .collect(),
        )
    }

    /// The listed module that contains a module, or what a path names.
    fn listed_module_of(&self, path: &[String]) -> Option<(&Module, usize)> {
        (1..=path.len())
            .rev()
            .find_map(|n| self.0.get_key_value(&path[..n]))
            .map(|(listed_module, layer)| (listed_module, *layer))
    }
}

/// The layers that the list in a module's header names: a bullet is a layer, its links are the modules on it.
fn listed(file: &Path) -> Vec<Vec<Module>> {
    let text = std::fs::read_to_string(file).unwrap();
    let header = text.lines().map_while(|line| line.strip_prefix("//!"));
    let mut layers: Vec<Vec<Module>> = Vec::new();
    let mut is_listed = false;
    for line in header {
        let line = line.strip_prefix(' ').unwrap_or(line);
        is_listed = line.starts_with("- ") || is_listed && line.starts_with("  ");
        if line.starts_with("- ") {
            layers.push(Vec::new());
        }
        if is_listed {
            let links = line
                .split("[`")
                .skip(1)
                .filter_map(|link| link.split_once("`]"));
            let listed_modules = links.map(|(name, _)| {
                name.trim_start_matches("mod@")
                    .split("::")
                    .map(str::to_owned)
                    .collect()
            });
            layers.last_mut().unwrap().extend(listed_modules);
        }
    }
    layers
}

/// Whether a condition holds in tests only: `test`, `any(test, …)` or `all(test, …)`.
fn is_for_tests(cfg: &syn::Meta) -> bool {
    match cfg {
        syn::Meta::Path(path) => path.is_ident("test"),
        syn::Meta::List(list) if list.path.is_ident("all") || list.path.is_ident("any") => {
            let all = list.parse_args_with(Punctuated::<syn::Meta, Token![,]>::parse_terminated);
            all.is_ok_and(|all| all.iter().any(is_for_tests))
        }
        _ => false,
    }
}

/// What a module's code names of the crate, tests left out.
struct Imports {
    module: Module,
    paths: BTreeSet<Module>,
    /// Modules in files of their own.
    children: Vec<String>,
}

impl Imports {
    fn add(&mut self, path: &[String]) {
        let (first, rest) = path.split_first().unwrap();
        let base = match first.as_str() {
            "crate" => Vec::new(),
            "self" => self.module.clone(),
            "super" => {
                let ups = path.iter().take_while(|name| *name == "super").count();
                let base = self.module[..self.module.len() - ups].to_vec();
                self.paths.insert([&base, &path[ups..]].concat());
                return;
            }
            _ => return,
        };
        self.paths.insert([&base, rest].concat());
    }

    fn add_tree(&mut self, tree: &UseTree, before: &mut Vec<String>) {
        match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.add_tree(&path.tree, before);
                before.pop();
            }
            UseTree::Group(group) => group
                .items
                .iter()
                .for_each(|tree| self.add_tree(tree, before)),
            UseTree::Name(name) => self.add(&[&before[..], &[name.ident.to_string()]].concat()),
            UseTree::Rename(name) => self.add(&[&before[..], &[name.ident.to_string()]].concat()),
            UseTree::Glob(_) => self.add(before),
        }
    }
}

impl<'s> Visit<'s> for Imports {
    fn visit_item(&mut self, item: &'s Item) {
        let attributes: &[Attribute] = match item {
            Item::Mod(module) => &module.attrs,
            Item::Fn(function) => &function.attrs,
            Item::Impl(block) => &block.attrs,
            Item::Use(import) => &import.attrs,
            _ => &[],
        };
        let is_test = |attribute: &Attribute| {
            attribute.path().is_ident("cfg")
                && attribute
                    .parse_args::<syn::Meta>()
                    .is_ok_and(|cfg| is_for_tests(&cfg))
        };
        if attributes.iter().any(is_test) {
            return;
        }
        match item {
            Item::Use(import) => self.add_tree(&import.tree, &mut Vec::new()),
            Item::Mod(module) if module.content.is_none() => {
                self.children.push(module.ident.to_string())
            }
            Item::Mod(module) => {
                self.module.push(module.ident.to_string());
                visit::visit_item(self, item);
                self.module.pop();
            }
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_path(&mut self, path: &'s syn::Path) {
        if path.segments.len() > 1 {
            let names: Vec<String> = path
                .segments
                .iter()
                .map(|segment| segment.ident.to_string())
                .collect();
            self.add(&names);
        }
        visit::visit_path(self, path);
    }
}

/// Of every module of the crate, what it names.
fn imports(src: &Path) -> Vec<(Module, BTreeSet<Module>)> {
    let mut found = Vec::new();
    let mut left: Vec<(Module, PathBuf, PathBuf)> =
        vec![(Vec::new(), src.join("lib.rs"), src.to_owned())];
    while let Some((module, file, folder)) = left.pop() {
        let code = syn::parse_file(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let mut imports = Imports {
            module: module.clone(),
            paths: BTreeSet::new(),
            children: Vec::new(),
        };
        imports.visit_file(&code);
        for child in imports.children {
            let (alone, inner) = (folder.join(format!("{child}.rs")), folder.join(&child));
            let file = if alone.is_file() {
                alone
            } else {
                inner.join("mod.rs")
            };
            left.push(([&module[..], &[child]].concat(), file, inner));
        }
        found.push((module, imports.paths));
    }
    found
}

/// The packages whose modules have an order.
const LAYERED: [&str; 2] = ["scheduling", "server"];

fn folder(package: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("src")
        .join(package)
}

#[test]
fn no_module_imports_from_its_own_layer_or_from_one_above() {
    let mut wrong = BTreeSet::new();
    let mut read = 0;
    for package in LAYERED {
        let layers = Layers::read(&folder(package));
        for (module, paths) in imports(&folder(package)) {
            let Some((listed_module, layer)) = layers.listed_module_of(&module) else {
                continue;
            };
            read += 1;
            for path in paths {
                if let Some((other, above)) = layers.listed_module_of(&path)
                    && other != listed_module
                    && above >= layer
                {
                    wrong.insert(format!(
                        "{package}: {} imports {}",
                        module.join("::"),
                        path.join("::")
                    ));
                }
            }
        }
    }
    assert!(read > 250, "{read} modules were read");
    assert!(
        wrong.is_empty(),
        "{} imports lead upwards:\n{}",
        wrong.len(),
        Vec::from_iter(wrong).join("\n")
    );
}

#[test]
fn every_listed_module_exists_and_every_module_is_in_one() {
    for package in LAYERED {
        let layers = Layers::read(&folder(package));
        let modules: BTreeSet<Module> = imports(&folder(package))
            .into_iter()
            .map(|(module, _)| module)
            .collect();
        for listed_module in layers.0.keys() {
            assert!(
                modules.contains(listed_module),
                "{package}: {} is listed and is not there",
                listed_module.join("::")
            );
        }
        for module in modules.iter().filter(|module| !module.is_empty()) {
            assert!(
                layers.listed_module_of(module).is_some(),
                "{package}: {} is on no layer",
                module.join("::")
            );
        }
    }
}

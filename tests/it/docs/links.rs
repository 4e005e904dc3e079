//! Every relative link of the pages leads to a file of the repository, and to a heading or a test of it where it names one.

use super::markdown::Page;
use super::{pages, root};
use std::path::{Component, Path, PathBuf};

#[test]
fn every_relative_link_leads_somewhere() {
    let (mut followed, mut dangling) = (0, Vec::new());
    for page in pages() {
        for link in page.links() {
            if link.target.contains("://") || link.target.starts_with("mailto:") {
                continue;
            }
            followed += 1;
            if let Err(why) = follow(&page, &link.target) {
                dangling.push(format!(
                    "{}:{}: {}: {why}",
                    page.file.display(),
                    link.line,
                    link.target
                ));
            }
        }
    }
    assert!(
        dangling.is_empty(),
        "{} of {followed} links dangle:\n{}",
        dangling.len(),
        dangling.join("\n")
    );
    assert!(followed > 100, "only {followed} links were found");
}

/// A reader who is sent to a file finds it.
#[test]
fn every_path_of_the_sources_that_a_page_names_is_there() {
    let mut missing = Vec::new();
    for page in pages() {
        for named in page.text.split('`').skip(1).step_by(2) {
            let path = named.trim_end_matches('/');
            let is_path = path.starts_with("src/")
                && path
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
            if is_path && !root().join(path).exists() {
                missing.push(format!("{}: {path}", page.file.display()));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

fn follow(page: &Page, target: &str) -> Result<(), String> {
    let (file, anchor) = target
        .split_once('#')
        .map_or((target, None), |(file, anchor)| (file, Some(anchor)));
    let folder = page.file.parent().unwrap();
    let file = if file.is_empty() {
        page.file.clone()
    } else {
        within(&folder.join(file))?
    };
    if !root().join(&file).exists() {
        return Err(format!("there is no {}", file.display()));
    }
    match anchor {
        Some(test) if file.extension().is_some_and(|extension| extension == "rs") => {
            let code = std::fs::read_to_string(root().join(&file)).unwrap();
            let is_there = code.contains(&format!("fn {test}("));
            is_there
                .then_some(())
                .ok_or_else(|| format!("{} has no test {test}", file.display()))
        }
        Some(anchor)
            if !Page::read(root(), &file)
                .anchors()
                .iter()
                .any(|known| known == anchor) =>
        {
            Err(format!("{} has no heading for #{anchor}", file.display()))
        }
        _ => Ok(()),
    }
}

/// The path without `..`: a page leads to nothing outside of the repository.
fn within(path: &Path) -> Result<PathBuf, String> {
    let mut inner = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => inner.push(name),
            Component::CurDir => {}
            Component::ParentDir if inner.pop() => {}
            _ => return Err("it leads out of the repository".to_owned()),
        }
    }
    Ok(inner)
}

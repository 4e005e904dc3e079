//! As much Markdown as the pages use: fenced blocks, headings and links, each with its line.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub struct Page {
    /// Below the repository's root.
    pub file: PathBuf,
    pub text: String,
}

/// A block between fences, in a list, too.
pub struct Fence<'a> {
    /// The line of the opening fence, from 1.
    pub line: usize,
    /// What stands after the opening fence.
    pub info: &'a str,
    /// Each with its number, without the indentation of the fence.
    pub lines: Vec<(usize, &'a str)>,
}

pub struct Link {
    pub line: usize,
    pub target: String,
}

impl Page {
    pub fn read(root: &Path, file: &Path) -> Self {
        let text = std::fs::read_to_string(root.join(file)).unwrap();
        Self {
            file: file.to_owned(),
            text,
        }
    }

    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text
            .lines()
            .enumerate()
            .map(|(before, line)| (before + 1, line))
    }

    pub fn fences(&self) -> Vec<Fence<'_>> {
        let mut fences = Vec::new();
        let mut open: Option<(Fence<'_>, usize)> = None;
        for (line, text) in self.lines() {
            let unindented = text.trim_start();
            match (unindented.strip_prefix("```"), &mut open) {
                (Some(info), None) => {
                    let fence = Fence {
                        line,
                        info: info.trim(),
                        lines: Vec::new(),
                    };
                    open = Some((fence, text.len() - unindented.len()));
                }
                (Some(_), Some(_)) => fences.extend(open.take().map(|(fence, _)| fence)),
                (None, Some((fence, indentation))) => {
                    let spaces = (text.len() - unindented.len()).min(*indentation);
                    fence.lines.push((line, &text[spaces..]));
                }
                (None, None) => {}
            }
        }
        assert!(
            open.is_none(),
            "{}: a fence is not closed",
            self.file.display()
        );
        fences
    }

    /// The lines outside of fences. What is between backticks is blank: nothing in there is a link.
    fn prose(&self) -> Vec<(usize, String)> {
        let (mut is_fenced, mut is_code) = (false, false);
        let mut prose = Vec::new();
        for (line, text) in self.lines() {
            if text.trim_start().starts_with("```") {
                is_fenced = !is_fenced;
            } else if !is_fenced {
                let mut blank_code = |c: char| {
                    is_code ^= c == '`';
                    if is_code || c == '`' { ' ' } else { c }
                };
                prose.push((line, text.chars().map(&mut blank_code).collect()));
            }
            // A code span ends with its paragraph.
            is_code &= !text.trim().is_empty();
        }
        prose
    }

    /// Links and images; a link may begin on an earlier line than its target stands on.
    pub fn links(&self) -> Vec<Link> {
        let of = |(line, text): &(usize, String)| {
            let (line, targets) = (*line, text.split("](").skip(1));
            let targets =
                targets.map(|rest| rest.split_once(')').map_or(rest, |(target, _)| target));
            targets
                .map(|target| Link {
                    line,
                    target: target.to_owned(),
                })
                .collect::<Vec<_>>()
        };
        self.prose().iter().flat_map(of).collect()
    }

    /// What a link may name behind `#`: GitHub's anchor of each heading.
    pub fn anchors(&self) -> Vec<String> {
        let prose: Vec<usize> = self.prose().into_iter().map(|(line, _)| line).collect();
        let headings = self
            .lines()
            .filter(|(line, _)| prose.binary_search(line).is_ok());
        let headings = headings.filter_map(|(_, text)| {
            let title = text.trim_start_matches('#');
            (title.len() < text.len())
                .then(|| title.strip_prefix(' '))
                .flatten()
        });
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        let anchors = headings.map(|title| {
            let slug = slug(title);
            let before = seen.entry(slug.clone()).or_default();
            *before += 1;
            if *before == 1 {
                slug
            } else {
                format!("{slug}-{}", *before - 1)
            }
        });
        anchors.collect()
    }
}

/// GitHub's rule: lower case, no punctuation but `-` and `_`, a hyphen for each space. A link in a heading counts as its text.
fn slug(title: &str) -> String {
    let mut text = String::new();
    let mut rest = title.trim();
    while let Some((before, (_, after))) = rest
        .split_once("](")
        .and_then(|(before, after)| Some((before, after.split_once(')')?)))
    {
        text.push_str(before);
        rest = after;
    }
    text.push_str(rest);
    let kept = text
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c })
        .flat_map(char::to_lowercase)
        .collect()
}

#[test]
fn every_block_of_code_is_between_fences_of_backticks() {
    for page in super::pages() {
        let prose: Vec<usize> = page.prose().into_iter().map(|(line, _)| line).collect();
        let mut before = "";
        for (line, text) in page.lines() {
            if prose.binary_search(&line).is_err() {
                continue;
            }
            // What `fences` does not see: after a blank line, four spaces make a block.
            let is_block =
                before.is_empty() && (text.starts_with("    ") || text.starts_with('\t'));
            let unquoted = text.trim_start_matches(['>', ' ']);
            let is_fence = unquoted.starts_with("~~~") || unquoted.starts_with("```");
            assert!(
                !is_block && !is_fence,
                "{}:{line}: {text}",
                page.file.display()
            );
            before = text.trim();
        }
    }
}

#[test]
fn an_anchor_is_githubs() {
    for (title, anchor) in [
        ("`stowage serve`", "stowage-serve"),
        ("Free on two GPUs: not one's", "free-on-two-gpus-not-ones"),
        ("[The planner](planner.md), again", "the-planner-again"),
        ("Größe – 5 %", "größe--5-"),
        ("kv_cache-full", "kv_cache-full"),
    ] {
        assert_eq!(slug(title), anchor);
    }
}

#[test]
fn links_are_found_outside_of_code_and_headings_outside_of_fences() {
    let text = "# A\n[a](b.md) `[c](d.md)` ![e\nf](g.svg#h)\n```sh runnable\n# no heading [x](y)\nls\n```\n# A\n- b\n  ```sh\n  ls\n    -l\n  ```\n";
    let page = Page {
        file: "page.md".into(),
        text: text.into(),
    };
    let links: Vec<_> = page
        .links()
        .into_iter()
        .map(|link| (link.line, link.target))
        .collect();
    assert_eq!(links, [(2, "b.md".to_owned()), (3, "g.svg#h".to_owned())]);
    assert_eq!(page.anchors(), ["a", "a-1"]);
    let fences = page.fences();
    assert_eq!((fences[0].line, fences[0].info), (4, "sh runnable"));
    assert_eq!(fences[0].lines, [(5, "# no heading [x](y)"), (6, "ls")]);
    assert_eq!(fences[1].lines, [(11, "ls"), (12, "  -l")]);
}

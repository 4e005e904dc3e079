//! Builds one document's tree from the parser's events, without recursion: open nodes are on a stack.
//!
//! Aliases are expanded, and counted as their expansion, so an exploding anchor reaches the limit long before memory runs out.

use super::super::diagnostic::{Diagnostic, quoted};
use super::super::source::{FileId, Span};
use super::read::{MAX_DEPTH, MAX_NODES};
use super::{Atom, Scalar, Style, Value, YamlKey, YamlNode};
use granit_parser::{Event, ScalarStyle, StructureStyle, Tag};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Why parsing cannot continue.
#[derive(Debug)]
pub enum Stop {
    /// For this document; the next one may be valid.
    Document(Box<Diagnostic>),
    /// For the whole file.
    File(Box<Diagnostic>),
}

pub struct Builder {
    file: FileId,
    /// How many more nodes the file may have.
    remaining: usize,
    open: Vec<OpenCollection>,
    anchors: BTreeMap<usize, Anchored>,
    root: Option<YamlNode>,
    diagnostics: Vec<Diagnostic>,
}

/// A list or map that has not ended yet.
struct OpenCollection {
    parts: CollectionParts,
    style: StructureStyle,
    span: Span,
    anchor: usize,
    size: TreeSize,
}

enum CollectionParts {
    List(Vec<YamlNode>),
    Map(Vec<(YamlKey, YamlNode)>, Option<YamlKey>),
}

struct Anchored {
    node: YamlNode,
    size: TreeSize,
}

/// The number of nodes in a node, including itself.
#[derive(Debug, Clone, Copy)]
struct TreeSize {
    nodes: usize,
    depth: usize,
}

impl TreeSize {
    const ONE: Self = Self { nodes: 1, depth: 1 };

    fn add(&mut self, part: Self) {
        self.nodes += part.nodes;
        self.depth = self.depth.max(part.depth + 1);
    }
}

impl Builder {
    pub fn new(file: FileId, nodes: usize) -> Self {
        let (open, anchors) = (Vec::new(), BTreeMap::new());
        Self {
            file,
            remaining: nodes,
            open,
            anchors,
            root: None,
            diagnostics: Vec::new(),
        }
    }

    pub(crate) fn nodes_left(&self) -> usize {
        self.remaining
    }

    /// The document that has just ended; `None` if it was empty.
    pub fn finish(&mut self) -> (Option<YamlNode>, Vec<Diagnostic>) {
        let root = self.root.take().filter(|root| !is_empty(root));
        (root, self.abandon())
    }

    /// Discards the document, and returns its problems so far.
    pub fn abandon(&mut self) -> Vec<Diagnostic> {
        self.open.clear();
        self.anchors.clear();
        self.root = None;
        std::mem::take(&mut self.diagnostics)
    }

    pub fn handle_event(
        &mut self,
        event: Event<'_>,
        span: granit_parser::Span,
    ) -> Result<(), Stop> {
        let at = self.span_in_file(span);
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let style = self.scalar_style(style, tag.as_deref(), span);
                let scalar = style.map(|style| Scalar {
                    text: text.into_owned(),
                    style,
                });
                self.charge_nodes(1, at)?;
                let value = scalar.map_or(Value::Broken, Value::Scalar);
                self.close(YamlNode { value, span: at }, TreeSize::ONE, anchor)
            }
            Event::SequenceStart(style, anchor, tag) => {
                self.check_tag("seq", tag, span);
                self.open(CollectionParts::List(Vec::new()), style, at, anchor)
            }
            Event::MappingStart(style, anchor, tag) => {
                self.check_tag("map", tag, span);
                self.open(CollectionParts::Map(Vec::new(), None), style, at, anchor)
            }
            Event::SequenceEnd | Event::MappingEnd => self.end(at),
            Event::Alias(anchor) => self.alias(anchor, at),
            Event::UnresolvedAlias(name) => self.unknown_alias(&name, at),
            _ => Ok(()),
        }
    }

    fn span_in_file(&self, span: granit_parser::Span) -> Span {
        Span::new(self.file, span.byte_range().unwrap_or_default())
    }

    /// The bracket that was opened last and is not closed yet.
    pub(crate) fn open_bracket(&self) -> Option<Span> {
        let last = self
            .open
            .iter()
            .rev()
            .find(|open| open.style == StructureStyle::Flow);
        last.map(|open| open.span)
    }

    fn open(
        &mut self,
        parts: CollectionParts,
        style: StructureStyle,
        span: Span,
        anchor: usize,
    ) -> Result<(), Stop> {
        self.charge_nodes(1, span)?;
        self.reject_as_key(span)?;
        if self.open.len() >= MAX_DEPTH {
            return Err(Stop::File(Box::new(too_deep(span))));
        }
        self.open.push(OpenCollection {
            parts,
            style,
            span,
            anchor,
            size: TreeSize::ONE,
        });
        Ok(())
    }

    /// A key that is a list or a map cannot name a setting.
    fn reject_as_key(&self, span: Span) -> Result<(), Stop> {
        match self.open.last() {
            Some(OpenCollection {
                parts: CollectionParts::Map(_, None),
                ..
            }) => Err(Stop::Document(Box::new(
                Diagnostic::error(
                    "key-not-text",
                    span,
                    "a key is a list or a map; only texts can be keys",
                )
                .help("write `name: value`; a text that begins with `[` or `{` needs quotes"),
            ))),
            _ => Ok(()),
        }
    }

    fn end(&mut self, at: Span) -> Result<(), Stop> {
        let Some(open) = self.open.pop() else {
            return Ok(());
        };
        let (value, last) = match open.parts {
            CollectionParts::List(items) => {
                let last = items.last().map(|item| item.span);
                (Value::List(items), last)
            }
            CollectionParts::Map(entries, _) => {
                self.find_duplicates(&entries);
                let last = entries.last().map(|(_, node)| node.span);
                (Value::Map(entries), last)
            }
        };
        // The end of a block is reported where the next thing begins; its content ends with its last part.
        let end = if at.is_empty() {
            last.map_or(open.span.end, |last| last.end)
        } else {
            at.end
        };
        let span = Span {
            end: end.max(open.span.end),
            ..open.span
        };
        self.close(YamlNode { value, span }, open.size, open.anchor)
    }

    /// Inserts a complete node.
    fn close(&mut self, node: YamlNode, size: TreeSize, anchor: usize) -> Result<(), Stop> {
        if anchor != 0 {
            self.anchors.insert(
                anchor,
                Anchored {
                    node: node.clone(),
                    size,
                },
            );
        }
        self.insert(node, size)
    }

    fn insert(&mut self, node: YamlNode, size: TreeSize) -> Result<(), Stop> {
        let Some(open) = self.open.last_mut() else {
            self.root = Some(node);
            return Ok(());
        };
        open.size.add(size);
        match &mut open.parts {
            CollectionParts::List(items) => items.push(node),
            CollectionParts::Map(entries, key) => match key.take() {
                // A missing value has no place of its own: the key is used.
                Some(key) => {
                    let span = if node.span.is_empty() {
                        key.span
                    } else {
                        node.span
                    };
                    entries.push((key, YamlNode { span, ..node }));
                }
                None => *key = Some(self::to_key(node, &mut self.diagnostics)),
            },
        }
        Ok(())
    }

    fn charge_nodes(&mut self, nodes: usize, span: Span) -> Result<(), Stop> {
        match self.remaining.checked_sub(nodes) {
            Some(left) => self.remaining = left,
            None => {
                self.remaining = 0;
                return Err(Stop::File(Box::new(too_many(span))));
            }
        }
        Ok(())
    }

    fn alias(&mut self, anchor: usize, at: Span) -> Result<(), Stop> {
        let Some(Anchored { node, size }) = self.anchors.get(&anchor) else {
            return Err(Stop::Document(Box::new(
                Diagnostic::error(
                    "endless-alias",
                    at,
                    "this alias stands for something that it is part of",
                )
                .help("write out what you mean"),
            )));
        };
        let size = *size;
        if size.nodes > self.remaining {
            return Err(Stop::File(Box::new(too_many(at))));
        }
        if self.open.len() + size.depth > MAX_DEPTH {
            return Err(Stop::File(Box::new(too_deep(at))));
        }
        let node = node.clone();
        if !matches!(node.value, Value::Scalar(_) | Value::Broken) {
            self.reject_as_key(at)?;
        }
        self.charge_nodes(size.nodes, at)?;
        self.insert(node, size)
    }

    fn unknown_alias(&mut self, name: &str, at: Span) -> Result<(), Stop> {
        let message = format!("nothing before this is called `&{name}`");
        self.diagnostics.push(
            Diagnostic::error("unknown-alias", at, message)
                .help("a text that begins with `*` needs quotes; an alias needs its anchor earlier in the same document"),
        );
        self.close(
            YamlNode {
                value: Value::Broken,
                span: at,
            },
            TreeSize::ONE,
            0,
        )
    }

    /// `None` for a scalar whose tag gives it an unsupported type.
    fn scalar_style(
        &mut self,
        style: ScalarStyle,
        tag: Option<&Tag>,
        span: granit_parser::Span,
    ) -> Option<Style> {
        match tag {
            // `!` alone and `!!str` mean the same as quotes.
            Some(tag) if tag.is_yaml_core_schema_tag("str") || tag.original() == "!" => {
                Some(Style::Text)
            }
            Some(tag) => {
                self.reject_tag(tag, span);
                None
            }
            None if style == ScalarStyle::Plain => Some(Style::Plain),
            None => Some(Style::Text),
        }
    }

    fn check_tag(&mut self, kind: &str, tag: Option<Cow<'_, Tag>>, span: granit_parser::Span) {
        if let Some(tag) = tag.filter(|tag| !tag.is_yaml_core_schema_tag(kind)) {
            self.reject_tag(&tag, span);
        }
    }

    fn reject_tag(&mut self, tag: &Tag, span: granit_parser::Span) {
        let at = self.span_in_file(span.tag_span().unwrap_or(span));
        self.diagnostics.push(
            Diagnostic::error(
                "tag",
                at,
                format!("a policy has no tags such as {}", quoted(&tag.original())),
            )
            .help("take the tag away; a text that begins with `!` needs quotes"),
        );
    }

    fn find_duplicates(&mut self, entries: &[(YamlKey, YamlNode)]) {
        let mut keys: Vec<&YamlKey> = entries.iter().map(|(key, _)| key).collect();
        // Sorted, since comparing each with each takes minutes on a file made for that.
        keys.sort_by(|a, b| a.text.cmp(&b.text).then(a.span.cmp(&b.span)));
        for pair in keys.windows(2).filter(|pair| pair[0].text == pair[1].text) {
            let message = format!("{} is said twice", quoted(&pair[1].text));
            self.diagnostics.push(
                Diagnostic::error("duplicate-key", pair[1].span, message)
                    .label("again here")
                    .related(pair[0].span, "first here")
                    .help("keep one of them"),
            );
        }
    }
}

fn to_key(node: YamlNode, diagnostics: &mut Vec<Diagnostic>) -> YamlKey {
    let span = node.span;
    let text = match node.value {
        Value::Scalar(Scalar {
            text,
            style: Style::Plain,
        }) if text == "<<" => {
            diagnostics.push(
                Diagnostic::error("merge-key", span, "merge keys (`<<`) are not read")
                    .help("repeat the settings, or give the whole map an anchor and use its alias"),
            );
            text
        }
        // The parser writes `~` for a missing value.
        Value::Scalar(Scalar { text, .. }) if !text.is_empty() && !span.is_empty() => text,
        _ => {
            diagnostics.push(
                Diagnostic::error("empty-key", span, "a key is empty").help("write `name: value`"),
            );
            String::new()
        }
    };
    YamlKey { text, span }
}

fn is_empty(root: &YamlNode) -> bool {
    matches!(&root.value, Value::Scalar(scalar) if scalar.atom() == Atom::Null)
}

pub fn too_deep(span: Span) -> Diagnostic {
    Diagnostic::error(
        "too-deep",
        span,
        format!("more than {MAX_DEPTH} lists and maps inside each other"),
    )
    .help("no policy is that deep; check the brackets and the indentation")
}

fn too_many(span: Span) -> Diagnostic {
    Diagnostic::error(
        "too-many-values",
        span,
        format!("the policy has more than {MAX_NODES} values"),
    )
    .label("the limit is passed here")
    .help("an alias counts as all that it stands for; no policy needs that many")
}

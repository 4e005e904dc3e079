//! Parses the bytes of a file into trees, one for each document that is not empty. A document that cannot be parsed is reported
//! and skipped, so that the later ones are still checked.

use super::super::diagnostic::Diagnostic;
use super::super::source::{FileId, MAX_FILE_BYTES, Span};
use super::build::{Builder, Stop};
use super::{YamlNode, syntax};
use granit_parser::{Event, Parser, ScanError, options};

/// Deeper than any policy, shallow enough for all recursive code.
pub const MAX_DEPTH: usize = 32;
/// Far more than any policy needs, in all its files. Aliases count as their expansion.
pub(crate) const MAX_NODES: usize = 50_000;
/// A file with more broken documents is no policy.
const MAX_SYNTAX_ERRORS: usize = 20;

/// The documents of a file that can be parsed, and the problems of the rest. `nodes` is how many values it may have, and what
/// is left of them afterwards.
pub fn read(bytes: &[u8], file: FileId, nodes: &mut usize) -> (Vec<YamlNode>, Vec<Diagnostic>) {
    match as_text(bytes, file) {
        Ok(text) => YamlReader::new(text, file).read(nodes),
        Err(diagnostic) => (Vec::new(), vec![*diagnostic]),
    }
}

fn as_text(bytes: &[u8], file: FileId) -> Result<&str, Box<Diagnostic>> {
    if bytes.len() > MAX_FILE_BYTES {
        let message = "the file is larger than 1 MiB, which no policy is";
        return Err(Box::new(
            Diagnostic::error("file-too-large", Span::new(file, 0..0), message)
                .help("check that this is a policy; a large one may be cut into several files"),
        ));
    }
    std::str::from_utf8(bytes).map_err(|error| Box::new(not_utf8(bytes, error.valid_up_to(), file)))
}

/// The length of U+FFFD, which replaces the bad byte where the file is displayed.
const REPLACEMENT: usize = 3;

fn not_utf8(bytes: &[u8], at: usize, file: FileId) -> Diagnostic {
    let (what, help) = match bytes {
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => {
            ("UTF-16", "save it as UTF-8; editors call it an encoding")
        }
        _ => (
            "not UTF-8",
            "save it as UTF-8, or take the broken character out",
        ),
    };
    Diagnostic::error(
        "not-utf8",
        Span::new(file, at..at + REPLACEMENT),
        format!("the file is {what}"),
    )
    .label("the first byte that is not UTF-8")
    .help(help)
}

struct YamlReader<'a> {
    text: &'a str,
    file: FileId,
    documents: Vec<YamlNode>,
    diagnostics: Vec<Diagnostic>,
}

impl<'a> YamlReader<'a> {
    fn new(text: &'a str, file: FileId) -> Self {
        Self {
            text,
            file,
            documents: Vec::new(),
            diagnostics: Vec::new(),
        }
    }

    fn read(mut self, nodes: &mut usize) -> (Vec<YamlNode>, Vec<Diagnostic>) {
        let options = options! {
            emit_comments: false,
            emit_unresolved_aliases: true,
            // The builder counts both together and reports it better; these limits keep the parser's own stacks small.
            flow_nesting_limit: MAX_DEPTH + 2,
            block_nesting_limit: MAX_DEPTH + 2,
        };
        let mut parser = Parser::new_from_str_with_options(self.text, options);
        let mut builder = Builder::new(self.file, *nodes);
        while let Some(next) = parser.next_event() {
            let step = match next {
                Ok((Event::DocumentEnd, _)) => {
                    self.finish(&mut builder);
                    Ok(())
                }
                Ok((event, span)) => builder.handle_event(event, span),
                Err(error) => Err(self.syntax(&error, &builder)),
            };
            match step {
                Ok(()) => {}
                Err(Stop::Document(problem)) => {
                    self.diagnostics.push(*problem);
                    self.diagnostics.append(&mut builder.abandon());
                    let more = matches!(parser.proceed_next_document(), Ok(true));
                    if !more || self.diagnostics.len() >= MAX_SYNTAX_ERRORS {
                        break;
                    }
                }
                Err(Stop::File(problem)) => {
                    self.diagnostics.push(*problem);
                    break;
                }
            }
        }
        *nodes = builder.nodes_left();
        (self.documents, self.diagnostics)
    }

    fn syntax(&self, error: &ScanError, builder: &Builder) -> Stop {
        let problem = syntax::diagnostic(error, self.text, self.file);
        Stop::Document(Box::new(match builder.open_bracket() {
            Some(bracket) if problem.code == "yaml" && bracket.start < problem.span.start => {
                problem.related(bracket.part(0..1), "this bracket is still open")
            }
            _ => problem,
        }))
    }

    fn finish(&mut self, builder: &mut Builder) {
        let (root, mut diagnostics) = builder.finish();
        self.documents.extend(root);
        self.diagnostics.append(&mut diagnostics);
    }
}

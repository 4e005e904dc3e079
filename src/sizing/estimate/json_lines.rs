//! The line of a file that has a field, for messages. What the file says is read elsewhere.

/// Line, counted from 1, of the field with this path (names joined by dots); if it is missing, of the object that lacks it.
/// The text must be valid JSON: the search ends at the first error.
pub fn line_of(text: &str, path: &str) -> usize {
    let mut scan = LineScanner {
        text,
        offset: 0,
        line: 1,
        found_line: 1,
    };
    scan.skip_blanks();
    scan.found_line = scan.line;
    scan.skip_value(Some(path));
    scan.found_line
}

struct LineScanner<'a> {
    text: &'a str,
    offset: usize,
    line: usize,
    /// The line of the innermost part of the path so far. Of equal names the last counts, as it does to the reader.
    found_line: usize,
}

impl LineScanner<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.offset).copied()
    }

    fn skip_blanks(&mut self) {
        while let Some(byte) = self.peek().filter(u8::is_ascii_whitespace) {
            self.line += usize::from(byte == b'\n');
            self.offset += 1;
        }
    }

    /// Skips a value; within one on the path, `wanted` is the remaining path. Returns whether there was a value.
    fn skip_value(&mut self, wanted: Option<&str>) -> bool {
        self.skip_blanks();
        match self.peek() {
            Some(b'{') => self.skip_items(b'}', |scan| scan.skip_field(wanted)),
            Some(b'[') => self.skip_items(b']', |scan| scan.skip_value(None)),
            Some(b'"') => self.read_string().is_some(),
            _ => {
                let rest = &self.text[self.offset..];
                let length = rest
                    .find([',', ']', '}', ' ', '\t', '\r', '\n'])
                    .unwrap_or(rest.len());
                self.offset += length;
                length > 0
            }
        }
    }

    fn skip_items(&mut self, end: u8, mut item: impl FnMut(&mut Self) -> bool) -> bool {
        loop {
            // The bracket, or a comma.
            self.offset += 1;
            self.skip_blanks();
            if self.peek() == Some(end) {
                self.offset += 1;
                return true;
            }
            if !item(self) {
                return false;
            }
            self.skip_blanks();
            match self.peek() {
                Some(b',') => {}
                Some(byte) if byte == end => {
                    self.offset += 1;
                    return true;
                }
                _ => return false,
            }
        }
    }

    fn skip_field(&mut self, wanted: Option<&str>) -> bool {
        let line = self.line;
        let Some(name) = self.read_string() else {
            return false;
        };
        self.skip_blanks();
        if self.peek() != Some(b':') {
            return false;
        }
        self.offset += 1;
        let remaining_path = wanted.and_then(|wanted| wanted.strip_prefix(name.as_str()));
        let within = remaining_path.and_then(|rest| rest.strip_prefix('.'));
        if within.is_some() || remaining_path == Some("") {
            self.found_line = line;
        }
        self.skip_value(within)
    }

    fn read_string(&mut self) -> Option<String> {
        let rest = &self.text[self.offset..];
        let length = super::config::string_length(rest);
        self.offset += length;
        serde_json::from_str(&rest[..length]).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
{
  "a": [1, {"b": "}\n\"{"}, []],
  "c": {
    "d": true, "e": null,
    "f.g": {"\u0068": 1},
    "c": 3
  },
  "b": -1.5e3, "last": {}
}
"#;

    #[test]
    fn a_field_is_found_by_its_path_and_a_missing_one_by_its_object() {
        for (path, line) in [
            ("a", 3),
            ("b", 9),
            ("last", 9),
            ("c", 4),
            ("c.d", 5),
            ("c.c", 7),
            ("c.f.g.h", 6),
            ("c.missing", 4),
            ("c.last", 4),
            ("missing", 2),
            ("a.b", 3),
        ] {
            assert_eq!(line_of(TEXT, path), line, "{path}");
        }
    }

    #[test]
    fn of_equal_names_the_last_counts_and_a_broken_text_ends() {
        assert_eq!(line_of("{\"a\": 1,\n\"a\": 2}", "a"), 2);
        for text in [
            "",
            "{",
            "{\"a",
            "{\"a\"",
            "{\"a\":",
            "{\"a\":}",
            "[1,",
            "{\"a\":1 \"b\":2}",
            "}",
        ] {
            assert_eq!(line_of(text, "b"), 1, "{text}");
        }
    }
}

//! Field and label selectors of lists and watches.
//!
//! Pure. Fields are selected by their path, which is more than the real server allows; set-based label selectors (`in (…)`)
//! are not understood and select nothing.

use serde_json::Value;

/// One comparison: a path or label, and the text it must (or must not) have.
#[derive(Debug, Clone, PartialEq, Eq)]
enum SelectorTerm {
    Equal(String, String),
    NotEqual(String, String),
    Present(String),
    Absent(String),
}

/// Which objects a list or watch is about.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ListSelector {
    pub namespace: String,
    fields: Vec<SelectorTerm>,
    labels: Vec<SelectorTerm>,
}

impl ListSelector {
    pub fn new(namespace: &str, fields: &str, labels: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            fields: parse(fields),
            labels: parse(labels),
        }
    }

    pub fn matches(&self, object: &Value) -> bool {
        let in_namespace =
            self.namespace.is_empty() || object["metadata"]["namespace"] == *self.namespace;
        in_namespace
            && self
                .fields
                .iter()
                .all(|term| term.holds(|path| field(object, path)))
            && self
                .labels
                .iter()
                .all(|term| term.holds(|label| object["metadata"]["labels"][label].as_str()))
    }
}

impl SelectorTerm {
    fn parse(text: &str) -> Self {
        let text = text.trim();
        let pair = |(key, value): (&str, &str)| (key.trim().to_owned(), value.trim().to_owned());
        if let Some((key, value)) = text.split_once("!=").map(pair) {
            Self::NotEqual(key, value)
        } else if let Some((key, value)) = text
            .split_once("==")
            .or_else(|| text.split_once('='))
            .map(pair)
        {
            Self::Equal(key, value)
        } else if let Some(key) = text.strip_prefix('!') {
            Self::Absent(key.to_owned())
        } else {
            Self::Present(text.to_owned())
        }
    }

    fn holds<'a>(&self, text_of: impl Fn(&str) -> Option<&'a str>) -> bool {
        match self {
            Self::Equal(key, value) => text_of(key).unwrap_or_default() == value,
            Self::NotEqual(key, value) => text_of(key).unwrap_or_default() != value,
            Self::Present(key) => text_of(key).is_some(),
            Self::Absent(key) => text_of(key).is_none(),
        }
    }
}

fn parse(text: &str) -> Vec<SelectorTerm> {
    text.split(',')
        .filter(|term| !term.trim().is_empty())
        .map(SelectorTerm::parse)
        .collect()
}

fn field<'a>(object: &'a Value, path: &str) -> Option<&'a str> {
    path.split('.')
        .try_fold(object, |value, key| value.get(key))
        .and_then(Value::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_absent_field_equals_the_empty_text() {
        let unbound = ListSelector::new("", "spec.nodeName=", "");
        assert!(unbound.matches(&json!({"spec": {}})));
        assert!(!unbound.matches(&json!({"spec": {"nodeName": "a"}})));
    }

    #[test]
    fn every_term_must_hold() {
        let selector = ListSelector::new(
            "default",
            "spec.nodeName=a,status.phase!=Failed",
            "app=llm,!old",
        );
        let pod = json!({
            "metadata": {"namespace": "default", "labels": {"app": "llm"}},
            "spec": {"nodeName": "a"}, "status": {"phase": "Running"},
        });
        assert!(selector.matches(&pod));
        assert!(!ListSelector::new("other", "", "").matches(&pod));
    }
}

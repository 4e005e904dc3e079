//! A condition in CEL over one variable, `pod`: checked and compiled once, so that classifying a pod only evaluates it.
//!
//! A CEL expression always terminates, but nested loops can take arbitrarily long and build arbitrarily large strings. Its
//! worst-case cost, in steps and in bytes, is computed before the expression is accepted ([`check`], [`cost`]). That cost holds
//! for every pod within the bounds of [`cost`]; on any other pod the expression fails. An expression that fails on a pod does not
//! match it.

mod check;
mod cost;
mod kind;

pub(crate) use cost::Cost;
pub use cost::is_within_bounds;

use crate::units::text::Malformed;
use crate::vocabulary::classification::PodTraits;
use crate::vocabulary::demand::Sharing;
use cel::objects::{Key, Map};
use cel::{Context, Env, Program, Value};
use check::ExpressionCheck;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::cell::OnceCell;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};

/// Longer than any condition that a person can read.
const LONGEST: usize = 1024;
/// The parser recurses several times for each bracket, sign and `?`, on the stack of whichever thread reads the policy.
const DEEPEST: usize = 32;

/// What an expression may ask of `pod`.
pub(crate) const FIELDS: [&str; 11] = [
    "exclusive",
    "gpus",
    "kvCache",
    "labels",
    "model",
    "namespace",
    "priority",
    "priorityClass",
    "resources",
    "serviceAccount",
    "vram",
];

/// What it may call, beside operators.
pub(crate) const FUNCTIONS: [&str; 6] = [
    "contains",
    "endsWith",
    "int",
    "size",
    "startsWith",
    "string",
];

#[derive(Clone)]
pub struct Expression {
    text: Arc<str>,
    program: Arc<Program>,
    cost: Cost,
}

/// A mistake in an expression, and where in its text it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ExpressionError {
    /// Where in the text, in bytes.
    pub span: Range<usize>,
    pub message: String,
    pub help: String,
}

impl From<ExpressionError> for Malformed {
    fn from(error: ExpressionError) -> Self {
        // The parser's list of expected tokens is long and not helpful.
        let is = error
            .message
            .split(" expecting ")
            .next()
            .unwrap_or_default()
            .to_owned();
        let words = ["'and'", "'or'", "'not'"];
        let help = match words.iter().any(|word| is.contains(word)) {
            true => "CEL writes `&&` for and, `||` for or, `!` for not".into(),
            false => error.help,
        };
        Self {
            span: Some(error.span),
            is,
            help,
        }
    }
}

/// A pod as CEL expressions see it; its context is built by the first expression that is evaluated.
pub struct ExpressionPod<'a> {
    pub traits: &'a PodTraits,
    /// The CEL context, in which `pod` is set; `None` for a pod beyond the bounds that costs are counted by.
    context: OnceCell<Option<Context<'static, 'static>>>,
}

static ENV: LazyLock<Arc<Env>> = LazyLock::new(|| Arc::new(Env::stdlib()));

impl Expression {
    pub fn compile(text: &str) -> Result<Self, ExpressionError> {
        if text.len() > LONGEST {
            return Err(ExpressionError {
                span: LONGEST..text.len(),
                message: format!("the expression has {} bytes; {LONGEST} are the most", text.len()),
                help: "say the simple conditions by namespaces, labels and priorityClasses, or make two classes of it"
                    .into(),
            });
        }
        if let Some(at) = too_deeply_nested(text) {
            return Err(ExpressionError {
                span: at,
                message: format!("it is nested more than {DEEPEST} deep"),
                help: "make two classes of it, or say the simple conditions by namespaces, labels and priorityClasses".into(),
            });
        }
        // A parser that fails on a text must not take the process with it.
        let program = catch_unwind(|| ENV.compile(text)).map_err(|_| parser_failure(text))?;
        let program = program.map_err(|errors| syntax_error(text, &errors))?;
        let cost = ExpressionCheck::new(text, &program).check()?;
        Ok(Self {
            text: text.into(),
            program: Arc::new(program),
            cost,
        })
    }

    /// What evaluating it takes at worst, for any pod.
    pub fn cost(&self) -> Cost {
        self.cost
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the pod meets it; an error if it fails on this pod, as when a label it reads is not there.
    pub fn holds_for(&self, pod: &ExpressionPod<'_>) -> Result<bool, String> {
        #[cfg(all(debug_assertions, any(test, feature = "testkit")))]
        evaluations::count();
        let context = pod
            .context()
            .ok_or("the pod shows more than expressions are evaluated for")?;
        let value = catch_unwind(AssertUnwindSafe(|| self.program.execute(context)));
        match value.map_err(|_| "its evaluation failed, which is a defect of the CEL library")? {
            Ok(Value::Bool(holds)) => Ok(holds),
            Ok(other) => Err(format!("it gives {:?}, not a boolean", other.type_of())),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// How many expressions this thread has evaluated: a test shows by it that a result was cached.
#[cfg(any(test, feature = "testkit"))]
pub mod evaluations {
    use std::cell::Cell;

    thread_local!(static EVALUATED: Cell<u64> = const { Cell::new(0) });

    #[cfg(debug_assertions)]
    pub(super) fn count() {
        EVALUATED.set(EVALUATED.get() + 1);
    }

    pub fn so_far() -> u64 {
        EVALUATED.get()
    }
}

impl PartialEq for Expression {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Expression {}

impl fmt::Debug for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.text, f)
    }
}

impl Serialize for Expression {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.text.serialize(serializer)
    }
}

/// Compiles the text again.
impl<'de> Deserialize<'de> for Expression {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::compile(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

impl<'a> ExpressionPod<'a> {
    pub fn new(traits: &'a PodTraits) -> Self {
        Self {
            traits,
            context: OnceCell::new(),
        }
    }

    fn context(&self) -> Option<&Context<'static, 'static>> {
        let context = self.context.get_or_init(|| {
            cost::is_within_bounds(self.traits).then(|| {
                let mut context = Context::with_env(ENV.clone());
                context.add_variable_from_value("pod", pod_value(self.traits));
                context
            })
        });
        context.as_ref()
    }
}

/// VRAM in MiB: whole numbers that a person can compare.
fn pod_value(pod: &PodTraits) -> Value {
    let labels = pod
        .labels
        .iter()
        .map(|(key, value)| (Key::from(key.as_str()), value.as_str().into()));
    // CEL's own map has no order, and nothing here loops over one (`check`).
    let labels = Value::Map(Map {
        map: Arc::new(labels.collect()),
    });
    let resources: Vec<Value> = pod
        .resources
        .iter()
        .map(|name| name.as_str().into())
        .collect();
    let mib = |bytes: crate::units::Bytes| Value::Int((bytes.0 >> 20) as i64);
    let fields: [(&str, Value); FIELDS.len()] = [
        ("exclusive", Value::Bool(pod.sharing == Sharing::Exclusive)),
        ("gpus", Value::Int(pod.gpus.into())),
        ("kvCache", mib(pod.kv_cache)),
        ("labels", labels),
        ("model", pod.model.as_str().into()),
        ("namespace", pod.namespace.as_str().into()),
        ("priority", Value::Int(pod.priority.into())),
        ("priorityClass", pod.priority_class.as_str().into()),
        ("resources", Value::List(Arc::new(resources))),
        ("serviceAccount", pod.service_account.as_str().into()),
        ("vram", mib(pod.vram)),
    ];
    let map = fields
        .into_iter()
        .map(|(name, value)| (Key::from(name), value))
        .collect();
    Value::Map(Map { map: Arc::new(map) })
}

fn syntax_error(text: &str, errors: &cel::ParseErrors) -> ExpressionError {
    let first = errors.errors.first();
    let (line, column) = first.map_or((1, 1), |error| error.pos);
    let before: usize = text
        .split_inclusive('\n')
        .take((line - 1).max(0) as usize)
        .map(str::len)
        .sum();
    let start = before + (column - 1).max(0) as usize;
    let start = (0..=start.min(text.len()))
        .rev()
        .find(|at| text.is_char_boundary(*at))
        .unwrap_or(0);
    let end = text[start..]
        .chars()
        .next()
        .map_or(start, |c| start + c.len_utf8());
    let message = match first.map(|error| error.msg.as_str()) {
        None => "it is no CEL expression",
        // The parser says it in its own types.
        Some(message) if message.contains("Recursion limit") => "it is nested too deeply",
        Some(message) => message,
    };
    // A word that CEL reserves.
    let help = match text.trim_start().starts_with("namespace") {
        true => "write pod.namespace",
        false => "a condition reads like pod.labels['team'] == 'search' && pod.priority >= 0",
    };
    ExpressionError {
        span: start..end,
        message: format!("this is not CEL: {message}"),
        help: help.into(),
    }
}

/// Where a text is nested too deeply to be given to the parser. Brackets inside quotes count like others: no condition needs so
/// many.
fn too_deeply_nested(text: &str) -> Option<Range<usize>> {
    let (mut brackets, mut signs, mut choices) = (0usize, 0usize, 0usize);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'(' | b'[' | b'{' => brackets += 1,
            b')' | b']' | b'}' => brackets = brackets.saturating_sub(1),
            b'?' => choices += 1,
            _ => {}
        }
        match byte {
            b'!' | b'-' => signs += 1,
            b' ' | b'\t' | b'\r' | b'\n' => {}
            _ => signs = 0,
        }
        if brackets.max(signs).max(choices) > DEEPEST {
            return Some(at..at + 1);
        }
    }
    None
}

/// A parser that panics is a defect of the library; the expression is refused as any other that cannot be read.
fn parser_failure(text: &str) -> ExpressionError {
    ExpressionError {
        span: 0..text.len(),
        message: "this is not CEL: the parser fails on it".into(),
        help: "a condition reads like pod.labels['team'] == 'search' && pod.priority >= 0".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> PodTraits {
        PodTraits {
            namespace: "search".into(),
            labels: [("team", "x"), ("app", "chat")]
                .map(|(k, v)| (k.into(), v.into()))
                .into(),
            priority: 5,
            gpus: 2,
            vram: crate::units::Bytes::gib(80),
            resources: ["stowage.dev/vram".to_owned()].into(),
            ..PodTraits::default()
        }
    }

    fn holds(text: &str) -> Result<bool, String> {
        let traits = pod();
        Expression::compile(text)
            .map_err(|error| error.to_string())?
            .holds_for(&ExpressionPod::new(&traits))
    }

    #[test]
    fn conditions_over_a_pod_hold_or_do_not() {
        for text in [
            "pod.labels['team'] == 'x' && pod.priority > 4",
            "pod.vram >= 80 * 1024",
            "'stowage.dev/vram' in pod.resources",
            "pod.resources.exists(name, name.startsWith('stowage'))",
            "['team', 'app'].all(key, key in pod.labels)",
            "has(pod.labels.team)",
            "pod.namespace in ['search', 'chat'] ? pod.gpus == 2 : false",
            "!pod.exclusive && size(pod.labels) == 2 && pod.model == ''",
        ] {
            assert_eq!(holds(text), Ok(true), "{text}");
        }
        assert_eq!(
            holds("pod.resources.all(name, name == 'nvidia.com/gpu')"),
            Ok(false)
        );
        assert!(
            holds("pod.labels['absent'] == 'x'").is_err(),
            "a label that is not there"
        );
        assert!(holds("pod.labels['team'] > 5").is_err());
    }

    #[test]
    fn an_invalid_expression_is_refused_with_the_span_of_its_mistake() {
        let refused = |text: &str| {
            let error = Expression::compile(text).expect_err(text);
            (
                text[error.span.clone()].to_owned(),
                error.message,
                error.help,
            )
        };
        let (at, message, help) = refused("pod.prority > 3");
        assert_eq!(
            (at.contains("prority") || at == ".", help.as_str()),
            (true, "did you mean pod.priority?"),
            "{at}"
        );
        assert_eq!(message, "a pod has no \"prority\" here");
        assert_eq!(refused("labels['team'] == 'x'").2, "write pod.labels");
        assert_eq!(refused("namespace == 'x'").2, "write pod.namespace");
        assert_eq!(
            refused("pod.model.matches('a+')").1,
            "there is no function \"matches\" here"
        );
        assert_eq!(refused("true").1, "it has the same result for every pod");
        assert_eq!(
            refused("pod.gpus + 1").1,
            "it does not evaluate to a boolean"
        );
        assert_eq!(refused("pod.gpus").1, "it does not evaluate to a boolean");
        assert!(refused("pod.gpus >").1.starts_with("this is not CEL"));
        assert!(refused("").1.starts_with("this is not CEL"));
    }

    #[test]
    fn what_fails_on_every_pod_is_refused() {
        let message = |text: &str| Expression::compile(text).expect_err(text).message;
        for (text, describe) in [
            (
                "pod.vram > '40Gi'",
                "it compares an int with a string, which is never met",
            ),
            (
                "pod.labels['rank'] == 5",
                "it compares a string with an int, which is never met",
            ),
            (
                "pod.labels.rank >= 5",
                "it compares a string with an int, which is never met",
            ),
            (
                "pod.exclusive == 'true'",
                "it compares a boolean with a string, which is never met",
            ),
            (
                "pod.gpus > 1 && pod.resources == 'x'",
                "it compares a list with a string, which is never met",
            ),
            (
                "pod.vram > 1.5 * 1024",
                "it computes with a double and an int, which always fails",
            ),
            (
                "pod.model + pod.gpus == 'a1'",
                "it computes with a string and an int, which always fails",
            ),
            ("pod.gpus && pod.exclusive", "it takes an int for a boolean"),
            ("!pod.model", "it takes a string for a boolean"),
            ("'llama' in pod.model", "it looks into a string"),
            (
                "pod.gpus > 1 ? 'a' : 'b'",
                "it does not evaluate to a boolean",
            ),
            ("pod['namespac'] == 'a'", "a pod has no \"namespac\" here"),
            ("1 % 2 == 1", "it has the same result for every pod"),
            ("true || false", "it has the same result for every pod"),
        ] {
            assert_eq!(message(text), describe, "{text}");
        }
        let deep = format!("{}pod.exclusive{}", "(".repeat(300), ")".repeat(300));
        assert_eq!(message(&deep), "it is nested more than 32 deep");
    }

    #[test]
    fn what_depends_on_the_pod_is_accepted() {
        for text in [
            "pod['namespace'] == 'search'",
            "pod.vram > 1.5",
            "int(pod.labels['rank']) >= 5 || pod.gpus == 2",
            "pod.model + '-x' == '-x'",
            "string(pod.gpus) == '2'",
            "[1, 2].exists(n, n == pod.gpus)",
            "'team' in pod.labels && pod.labels == pod.labels",
            "(pod.exclusive ? pod.gpus : pod.priority) > 1",
        ] {
            assert!(Expression::compile(text).is_ok(), "{text}");
        }
    }

    /// The text of the innermost loop is `terms` to the power of `loops` times as long as the one it began with.
    fn bomb(loops: usize, terms: usize) -> String {
        let open = |level: usize| {
            let before = level
                .checked_sub(1)
                .map_or("pod.model".into(), |before| format!("x{before}"));
            format!("[{}].exists(x{level}, ", vec![before; terms].join("+"))
        };
        let opened: String = (0..loops).map(open).collect();
        format!("{opened}x{} == ''{}", loops - 1, ")".repeat(loops))
    }

    #[test]
    fn a_text_that_grows_in_every_loop_is_refused_for_its_size() {
        assert!(Expression::compile(&bomb(4, 2)).is_ok());
        let text = bomb(4, 24);
        assert!(
            text.len() < 633,
            "its text would have 162 MiB, of {} bytes of CEL",
            text.len()
        );
        let refused = Expression::compile(&text).unwrap_err();
        assert!(
            refused.message.starts_with("it may go through "),
            "{}",
            refused.message
        );
    }

    #[test]
    fn what_could_run_for_ever_is_refused() {
        let unordered =
            Expression::compile("pod.labels.exists(key, pod.labels[key] == 'x')").unwrap_err();
        assert!(unordered.message.contains("a loop goes over a list"));
        let nested =
            "pod.resources.all(a, pod.resources.all(b, pod.resources.all(c, a + b + c != '')))";
        assert!(
            Expression::compile(nested)
                .unwrap_err()
                .message
                .contains("steps")
        );
        let long = format!("pod.model == '{}'", "x".repeat(2000));
        assert!(
            Expression::compile(&long)
                .unwrap_err()
                .message
                .contains("bytes")
        );
        let deep = format!("{}pod.exclusive{}", "(".repeat(400), ")".repeat(400));
        // Accepted or not: it comes back.
        let _ = Expression::compile(&deep);
        let deep = format!("{}pod.exclusive", "!".repeat(900));
        let _ = Expression::compile(&deep);
        let lists = format!("{}{} == []", "[".repeat(400), "]".repeat(400));
        let _ = Expression::compile(&lists);
    }
}

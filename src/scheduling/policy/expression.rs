//! A condition in CEL over one variable, `pod`: checked and compiled once, so that judging a pod only walks it.
//!
//! CEL ends always, but an expression with loops inside loops may take as long as it likes. What an expression costs at
//! worst is added up before it is accepted.

mod kind;

use super::traits::Traits;
use crate::scheduling::request::Sharing;
use cel::common::ast::{CallExpr, ComprehensionExpr, EntryExpr, Expr};
use cel::objects::{Key, Map};
use cel::{Context, Env, IdedExpr, Program, Value};
use kind::Kind;
use serde::{Serialize, Serializer};
use std::cell::OnceCell;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

/// Longer than any condition that a person can read.
const LONGEST: usize = 1024;
/// Steps at worst: some milliseconds, once per kind of pod.
const MAX_STEPS: u64 = 10_000;
/// What a list or map of a pod's may have; the API server bounds them by the object's size only.
const LENGTH_OF_UNKNOWN: u64 = 1000;

/// What an expression may ask of `pod`.
pub const FIELDS: [&str; 11] = [
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
pub const FUNCTIONS: [&str; 6] = ["contains", "endsWith", "int", "size", "startsWith", "string"];

/// Operators and what macros expand to.
const OPERATORS: [&str; 19] = [
    "_?_:_",
    "_&&_",
    "_||_",
    "!_",
    "_-_",
    "_+_",
    "_*_",
    "_/_",
    "_%_",
    "_==_",
    "_!=_",
    "_>=_",
    "_<=_",
    "_>_",
    "_<_",
    "-_",
    "_[_]",
    "@in",
    "@not_strictly_false",
];

#[derive(Clone)]
pub struct Expression {
    text: Arc<str>,
    program: Arc<Program>,
}

/// What is wrong with an expression, and where in its text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ExpressionError {
    /// Bytes of the text.
    pub at: Range<usize>,
    pub message: String,
    pub help: String,
}

/// A pod as expressions see it; made at the first one that looks.
pub struct Subject<'a> {
    pub traits: &'a Traits,
    value: OnceCell<Value>,
}

static ENV: LazyLock<Arc<Env>> = LazyLock::new(|| Arc::new(Env::stdlib()));

impl Expression {
    pub fn compile(text: &str) -> Result<Self, ExpressionError> {
        if text.len() > LONGEST {
            return Err(ExpressionError {
                at: LONGEST..text.len(),
                message: format!("the expression has {} bytes; {LONGEST} are the most", text.len()),
                help: "say the simple conditions by namespaces, labels and priorityClasses, or make two classes of it"
                    .into(),
            });
        }
        let program = ENV.compile(text).map_err(|errors| syntax(text, &errors))?;
        Check { text, program: &program, loops: Vec::new(), asks: Asks::Nothing }.whole()?;
        Ok(Self { text: text.into(), program: Arc::new(program) })
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the pod meets it; an error if it fails on this pod, as when a label it reads is not there.
    pub fn holds_for(&self, pod: &Subject<'_>) -> Result<bool, String> {
        let mut context = Context::with_env(ENV.clone());
        context.add_variable_from_value("pod", pod.value().clone());
        match self.program.execute(&context) {
            Ok(Value::Bool(holds)) => Ok(holds),
            Ok(other) => Err(format!("it gives {:?}, not true or false", other.type_of())),
            Err(error) => Err(error.to_string()),
        }
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

impl<'a> Subject<'a> {
    pub fn new(traits: &'a Traits) -> Self {
        Self { traits, value: OnceCell::new() }
    }

    fn value(&self) -> &Value {
        self.value.get_or_init(|| value(self.traits))
    }
}

/// VRAM in MiB: whole numbers that a person can compare.
fn value(pod: &Traits) -> Value {
    let labels = pod.labels.iter().map(|(key, value)| (Key::from(key.as_str()), value.as_str().into()));
    // CEL's own map has no order, and nothing here loops over one (`Check::each`).
    let labels = Value::Map(Map { map: Arc::new(labels.collect()) });
    let resources: Vec<Value> = pod.resources.iter().map(|name| name.as_str().into()).collect();
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
    let map = fields.into_iter().map(|(name, value)| (Key::from(name), value)).collect();
    Value::Map(Map { map: Arc::new(map) })
}

fn syntax(text: &str, errors: &cel::ParseErrors) -> ExpressionError {
    let first = errors.errors.first();
    let (line, column) = first.map_or((1, 1), |error| error.pos);
    let before: usize = text.split_inclusive('\n').take((line - 1).max(0) as usize).map(str::len).sum();
    let start = before + (column - 1).max(0) as usize;
    let start = (0..=start.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    let end = text[start..].chars().next().map_or(start, |c| start + c.len_utf8());
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
    ExpressionError { at: start..end, message: format!("this is not CEL: {message}"), help: help.into() }
}

/// The walk over a compiled expression: names, fields, functions, kind, and cost.
struct Check<'a> {
    text: &'a str,
    program: &'a Program,
    /// Names that loops around the present place have given.
    loops: Vec<String>,
    asks: Asks,
}

/// Whether an expression looks at the pod at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asks {
    Nothing,
    ThePod,
}

impl Check<'_> {
    fn whole(&mut self) -> Result<(), ExpressionError> {
        let root = self.program.expression();
        let steps = self.steps(root)?;
        if steps > MAX_STEPS {
            let message = format!("it may take {steps} steps for one pod; {MAX_STEPS} are the most");
            let help = "loop over one list of the pod only, and not inside another loop".into();
            return Err(ExpressionError { at: 0..self.text.len(), message, help });
        }
        let help = "compare something of the pod, such as pod.gpus > 1";
        if Kind::of(&root.expr).is_some_and(|kind| kind != Kind::Bool) {
            return Err(self.error(root, "it gives no true or false".into(), help));
        }
        if self.asks == Asks::Nothing {
            return Err(self.error(root, "it says the same of every pod".into(), help));
        }
        Ok(())
    }

    /// What evaluating it costs at worst, or what may not be in it.
    fn steps(&mut self, at: &IdedExpr) -> Result<u64, ExpressionError> {
        let parts = match &at.expr {
            Expr::Unspecified | Expr::Literal(_) => 0,
            Expr::Ident(name) => self.name(at, name)?,
            Expr::Select(select) => {
                self.field(at, &select.operand, &select.field)?;
                self.steps(&select.operand)?
            }
            Expr::Call(call) => self.call(at, call)?,
            Expr::List(list) => self.sum(&list.elements)?,
            Expr::Map(map) => {
                let mut steps = 0u64;
                for entry in &map.entries {
                    if let EntryExpr::MapEntry(entry) = &entry.expr {
                        steps = steps.saturating_add(self.steps(&entry.key)?);
                        steps = steps.saturating_add(self.steps(&entry.value)?);
                    }
                }
                steps
            }
            Expr::Comprehension(comprehension) => self.each(comprehension)?,
            Expr::Struct(_) => {
                return Err(self.error(
                    at,
                    "there are no message types here".into(),
                    "compare fields of pod",
                ));
            }
        };
        Ok(parts.saturating_add(1))
    }

    fn sum(&mut self, parts: &[IdedExpr]) -> Result<u64, ExpressionError> {
        parts.iter().try_fold(0u64, |sum, part| Ok(sum.saturating_add(self.steps(part)?)))
    }

    fn name(&mut self, at: &IdedExpr, name: &str) -> Result<u64, ExpressionError> {
        if name == "pod" {
            self.asks = Asks::ThePod;
            return Ok(0);
        }
        if name.starts_with('@') || self.loops.iter().any(|known| known == name) {
            return Ok(0);
        }
        let help = match FIELDS.contains(&name) {
            true => format!("write pod.{name}"),
            false => "the only name is pod; texts stand in quotes".into(),
        };
        Err(self.error(at, format!("there is no {name:?} here"), &help))
    }

    fn field(&self, at: &IdedExpr, of: &IdedExpr, field: &str) -> Result<(), ExpressionError> {
        let is_of_pod = matches!(&of.expr, Expr::Ident(name) if name == "pod");
        if is_of_pod { self.field_of_pod(at, field) } else { Ok(()) }
    }

    fn field_of_pod(&self, at: &IdedExpr, field: &str) -> Result<(), ExpressionError> {
        if FIELDS.contains(&field) {
            return Ok(());
        }
        let message = format!("a pod has no {field:?} here");
        let help = match nearest(field, &FIELDS) {
            Some(near) => format!("did you mean pod.{near}?"),
            None => format!("it has {}", FIELDS.join(", ")),
        };
        Err(self.error(at, message, &help))
    }

    fn call(&mut self, at: &IdedExpr, call: &CallExpr) -> Result<u64, ExpressionError> {
        let name = call.func_name.as_str();
        if !OPERATORS.contains(&name) && !FUNCTIONS.contains(&name) {
            let help = match nearest(name, &FUNCTIONS) {
                Some(near) => format!("did you mean {near}?"),
                None => format!("there are {}, and the loops all, exists, exists_one", FUNCTIONS.join(", ")),
            };
            return Err(self.error(at, format!("there is no function {name:?} here"), &help));
        }
        let target = call.target.as_deref().map_or(Ok(0), |target| self.steps(target))?;
        let args = self.sum(&call.args)?;
        if let Some(field) = kind::indexed(call) {
            self.field_of_pod(at, field)?;
        }
        if let Some((message, help)) = kind::misfit(call) {
            return Err(self.error(at, message, help));
        }
        Ok(target.saturating_add(args))
    }

    fn each(&mut self, each: &ComprehensionExpr) -> Result<u64, ExpressionError> {
        let range = self.steps(&each.iter_range)?;
        if !has_an_order(&each.iter_range.expr) {
            let message =
                "a loop goes over a list: over what is written in brackets, or pod.resources".into();
            let help = "labels have no order; ask for one by its name: 'team' in pod.labels";
            return Err(self.error(&each.iter_range, message, help));
        }
        let rounds = match &each.iter_range.expr {
            Expr::List(list) => list.elements.len() as u64,
            _ => LENGTH_OF_UNKNOWN,
        };
        let before = self.loops.len();
        self.loops.extend([each.iter_var.clone(), each.accu_var.clone()]);
        self.loops.extend(each.iter_var2.clone());
        let start = self.steps(&each.accu_init)?;
        let round = self.steps(&each.loop_cond)?.saturating_add(self.steps(&each.loop_step)?);
        let end = self.steps(&each.result)?;
        self.loops.truncate(before);
        Ok([range, start, end].into_iter().fold(rounds.saturating_mul(round), u64::saturating_add))
    }

    fn error(&self, at: &IdedExpr, message: String, help: &str) -> ExpressionError {
        let (start, stop) = self.program.source_info().offset_for(at.id).unwrap_or_default();
        // Characters, the last one included.
        let byte = |chars: usize| self.text.char_indices().nth(chars).map_or(self.text.len(), |(at, _)| at);
        let (start, end) = (byte(start as usize), byte(stop as usize + 1));
        ExpressionError { at: start..end.max(start), message, help: help.into() }
    }
}

/// Whether a loop over it takes the same way each time.
fn has_an_order(range: &Expr) -> bool {
    match range {
        Expr::List(_) | Expr::Comprehension(_) => true,
        Expr::Select(select) => {
            select.field == "resources" && matches!(&select.operand.expr, Expr::Ident(name) if name == "pod")
        }
        _ => false,
    }
}

fn nearest<'a>(word: &str, words: &[&'a str]) -> Option<&'a str> {
    let near = words.iter().map(|known| (strsim::damerau_levenshtein(word, known), *known)).min()?;
    (near.0 <= word.len().max(3) / 3).then_some(near.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Traits {
        Traits {
            namespace: "search".into(),
            labels: [("team", "x"), ("app", "chat")].map(|(k, v)| (k.into(), v.into())).into(),
            priority: 5,
            gpus: 2,
            vram: crate::units::Bytes::gib(80),
            resources: ["stowage.dev/vram".to_owned()].into(),
            ..Traits::default()
        }
    }

    fn holds(text: &str) -> Result<bool, String> {
        let traits = pod();
        Expression::compile(text).map_err(|error| error.to_string())?.holds_for(&Subject::new(&traits))
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
        assert_eq!(holds("pod.resources.all(name, name == 'nvidia.com/gpu')"), Ok(false));
        assert!(holds("pod.labels['absent'] == 'x'").is_err(), "a label that is not there");
        assert!(holds("pod.labels['team'] > 5").is_err());
    }

    #[test]
    fn what_cannot_be_meant_is_refused_where_it_stands() {
        let refused = |text: &str| {
            let error = Expression::compile(text).expect_err(text);
            (text[error.at.clone()].to_owned(), error.message, error.help)
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
        assert_eq!(refused("pod.model.matches('a+')").1, "there is no function \"matches\" here");
        assert_eq!(refused("true").1, "it says the same of every pod");
        assert_eq!(refused("pod.gpus + 1").1, "it gives no true or false");
        assert_eq!(refused("pod.gpus").1, "it gives no true or false");
        assert!(refused("pod.gpus >").1.starts_with("this is not CEL"));
        assert!(refused("").1.starts_with("this is not CEL"));
    }

    #[test]
    fn what_fails_on_every_pod_is_refused() {
        let message = |text: &str| Expression::compile(text).expect_err(text).message;
        for (text, said) in [
            ("pod.vram > '40Gi'", "it compares a whole number with a text, which is never met"),
            ("pod.labels['rank'] == 5", "it compares a text with a whole number, which is never met"),
            ("pod.labels.rank >= 5", "it compares a text with a whole number, which is never met"),
            ("pod.exclusive == 'true'", "it compares true or false with a text, which is never met"),
            ("pod.gpus > 1 && pod.resources == 'x'", "it compares a list with a text, which is never met"),
            (
                "pod.vram > 1.5 * 1024",
                "it computes with a number with a fraction and a whole number, which always fails",
            ),
            (
                "pod.model + pod.gpus == 'a1'",
                "it computes with a text and a whole number, which always fails",
            ),
            ("pod.gpus && pod.exclusive", "it takes a whole number for true or false"),
            ("!pod.model", "it takes a text for true or false"),
            ("'llama' in pod.model", "it looks into a text"),
            ("pod.gpus > 1 ? 'a' : 'b'", "it gives no true or false"),
            ("pod['namespac'] == 'a'", "a pod has no \"namespac\" here"),
            ("1 % 2 == 1", "it says the same of every pod"),
            ("true || false", "it says the same of every pod"),
        ] {
            assert_eq!(message(text), said, "{text}");
        }
        let deep = format!("{}pod.exclusive{}", "(".repeat(300), ")".repeat(300));
        assert_eq!(message(&deep), "this is not CEL: it is nested too deeply");
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

    /// The text of the innermost loop is 2^(levels + 1) times as long as the one it began with.
    fn bomb(levels: usize) -> String {
        let open = |level: usize| match level {
            0 => "[pod.priorityClass+pod.priorityClass].exists(x0, ".to_owned(),
            _ => format!("[x{}+x{}].exists(x{level}, ", level - 1, level - 1),
        };
        let opened: String = (0..levels).map(open).collect();
        format!("{opened}x{} == ''{}", levels - 1, ")".repeat(levels))
    }

    #[test]
    fn b7_a_text_that_doubles_in_every_loop_is_refused() {
        let text = bomb(25);
        assert!(text.len() < 633 && Expression::compile(&bomb(3)).is_ok());
        assert!(Expression::compile(&text).is_err(), "its text would have 8 GiB, of 633 bytes of CEL");
    }

    #[test]
    fn what_could_run_for_ever_is_refused() {
        let unordered = Expression::compile("pod.labels.exists(key, pod.labels[key] == 'x')").unwrap_err();
        assert!(unordered.message.contains("a loop goes over a list"));
        let nested = "pod.resources.all(a, pod.resources.all(b, pod.resources.all(c, a + b + c != '')))";
        assert!(Expression::compile(nested).unwrap_err().message.contains("steps"));
        let long = format!("pod.model == '{}'", "x".repeat(2000));
        assert!(Expression::compile(&long).unwrap_err().message.contains("bytes"));
        let deep = format!("{}pod.exclusive{}", "(".repeat(400), ")".repeat(400));
        // Accepted or not: it comes back.
        let _ = Expression::compile(&deep);
        let deep = format!("{}pod.exclusive", "!".repeat(900));
        let _ = Expression::compile(&deep);
        let lists = format!("{}{} == []", "[".repeat(400), "]".repeat(400));
        let _ = Expression::compile(&lists);
    }
}

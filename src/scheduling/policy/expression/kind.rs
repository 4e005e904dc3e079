//! The kind of value that a part of an expression gives, as far as it can be seen without a pod: CEL fails when it meets a
//! number where a string should be, and an expression that fails on every pod is a class without pods.
//!
//! Here is no evaluation. What depends on the pod, such as a loop's variable, is of no known kind and never refused.

use cel::IdedExpr;
use cel::common::ast::{CallExpr, Expr, LiteralValue};
use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValueKind {
    Bool,
    Whole,
    Unsigned,
    Fraction,
    Text,
    List,
    Map,
    /// Another one, which pods have nothing of.
    Other,
}

impl ValueKind {
    /// The kind of value that `expr` gives, if it is known without a pod.
    pub fn from_expr(expr: &Expr) -> Option<Self> {
        match expr {
            Expr::Literal(literal) => Some(Self::from_literal(literal)),
            Expr::List(_) => Some(Self::List),
            Expr::Map(_) => Some(Self::Map),
            Expr::Ident(name) => (name == "pod").then_some(Self::Map),
            Expr::Select(select) if select.test => Some(Self::Bool),
            Expr::Select(select) => Self::from_field(&select.operand.expr, &select.field),
            Expr::Call(call) => Self::from_call(call),
            _ => None,
        }
    }

    fn from_literal(literal: &LiteralValue) -> Self {
        match literal {
            LiteralValue::Boolean(_) => Self::Bool,
            LiteralValue::Int(_) => Self::Whole,
            LiteralValue::UInt(_) => Self::Unsigned,
            LiteralValue::Double(_) => Self::Fraction,
            LiteralValue::String(_) => Self::Text,
            _ => Self::Other,
        }
    }

    /// The kind of a field of `pod`, or of a label.
    fn from_field(whole: &Expr, field: &str) -> Option<Self> {
        if is_pod(whole) {
            return match field {
                "exclusive" => Some(Self::Bool),
                "gpus" | "kvCache" | "priority" | "vram" => Some(Self::Whole),
                "labels" => Some(Self::Map),
                "resources" => Some(Self::List),
                "model" | "namespace" | "priorityClass" | "serviceAccount" => Some(Self::Text),
                _ => None,
            };
        }
        is_labels(whole).then_some(Self::Text)
    }

    fn from_call(call: &CallExpr) -> Option<Self> {
        let argument_kind = |at: usize| {
            call.args
                .get(at)
                .and_then(|part| Self::from_expr(&part.expr))
        };
        match call.func_name.as_str() {
            "_&&_" | "_||_" | "!_" | "_==_" | "_!=_" | "_>=_" | "_<=_" | "_>_" | "_<_" | "@in"
            | "contains" | "endsWith" | "startsWith" => Some(Self::Bool),
            "_-_" | "_+_" | "_*_" | "_/_" | "_%_" => argument_kind(0).or_else(|| argument_kind(1)),
            "-_" => argument_kind(0),
            "size" | "int" => Some(Self::Whole),
            "string" => Some(Self::Text),
            "_?_:_" => argument_kind(1).filter(|then| argument_kind(2) == Some(*then)),
            "_[_]" => {
                let field = call.args.get(1).and_then(string_literal)?;
                Self::from_field(&call.args.first()?.expr, field)
            }
            _ => None,
        }
    }

    fn is_number(self) -> bool {
        matches!(self, Self::Whole | Self::Unsigned | Self::Fraction)
    }

    fn compares_with(self, other: Self) -> bool {
        self == other || self.is_number() && other.is_number()
    }
}

impl fmt::Display for ValueKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bool => "a boolean",
            Self::Whole => "an int",
            Self::Unsigned => "a uint",
            Self::Fraction => "a double",
            Self::Text => "a string",
            Self::List => "a list",
            Self::Map => "a map",
            Self::Other => "of another kind",
        })
    }
}

/// A type error of one operator, which fails on every pod or is false for every pod: the message, and the fix.
pub fn type_error(call: &CallExpr) -> Option<(String, &'static str)> {
    let kinds: Vec<Option<ValueKind>> = call
        .args
        .iter()
        .map(|part| ValueKind::from_expr(&part.expr))
        .collect();
    match (call.func_name.as_str(), kinds.as_slice()) {
        ("_==_" | "_!=_" | "_>=_" | "_<=_" | "_>_" | "_<_", [Some(left), Some(right)])
            if !left.compares_with(*right) =>
        {
            Some((
                format!("it compares {left} with {right}, which is never met"),
                comparison_help(*left, *right),
            ))
        }
        ("_-_" | "_+_" | "_*_" | "_/_" | "_%_", [Some(left), Some(right)]) if left != right => {
            let help = "compute with ints; a string has quotes, a number has none";
            Some((
                format!("it computes with {left} and {right}, which always fails"),
                help,
            ))
        }
        ("_&&_" | "_||_" | "!_", parts) => {
            let non_boolean = parts
                .iter()
                .flatten()
                .find(|kind| **kind != ValueKind::Bool)?;
            Some((
                format!("it takes {non_boolean} for a boolean"),
                "compare it with something, such as pod.gpus > 1",
            ))
        }
        ("@in", [_, Some(right)]) if !matches!(right, ValueKind::List | ValueKind::Map) => {
            let help = "`in` looks into a list or the labels; of a string, ask pod.model.contains('llama')";
            Some((format!("it looks into {right}"), help))
        }
        _ => None,
    }
}

fn comparison_help(left: ValueKind, right: ValueKind) -> &'static str {
    match (
        left.is_number() || right.is_number(),
        left == ValueKind::Text || right == ValueKind::Text,
    ) {
        (true, true) => {
            "write numbers without quotes, strings (labels too) with them; vram and kvCache are in MiB: pod.vram > 40 * 1024"
        }
        _ => "compare like with like, such as pod.gpus > 1 or pod.namespace == 'search'",
    }
}

/// The field that `pod['field']` asks for.
pub fn indexed_field(call: &CallExpr) -> Option<&str> {
    let [whole, field] = call.args.as_slice() else {
        return None;
    };
    string_literal(field).filter(|_| call.func_name == "_[_]" && is_pod(&whole.expr))
}

fn is_pod(expr: &Expr) -> bool {
    matches!(expr, Expr::Ident(name) if name == "pod")
}

fn is_labels(expr: &Expr) -> bool {
    matches!(expr, Expr::Select(select) if select.field == "labels" && is_pod(&select.operand.expr))
}

/// The text that is written there, if one is.
pub fn string_literal(expr: &IdedExpr) -> Option<&str> {
    match &expr.expr {
        Expr::Literal(LiteralValue::String(text)) => Some(text.inner()),
        _ => None,
    }
}

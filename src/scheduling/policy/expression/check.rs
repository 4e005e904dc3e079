//! The walk over a compiled expression: which names, fields and functions are in it, of what kind its parts are, and what
//! they cost. Whatever is wrong is said with its place in the text and the way out.
//!
//! Nothing is evaluated here, and what a cost is stands in [`super::cost`].

use super::cost::{Cost, ExpressionPart, MAX_BYTES, MAX_STEPS, ValueSize, field_size};
use super::kind::{self, ValueKind};
use super::{ExpressionError, FIELDS, FUNCTIONS};
use crate::units::Bytes;
use cel::common::ast::{CallExpr, ComprehensionExpr, EntryExpr, Expr, SelectExpr};
use cel::{IdedExpr, Program};

/// Evaluation recurses as deep as an expression is nested, on the stack of the thread that answers the scheduler.
const MAX_DEPTH: usize = 64;
const MAX_LOOP_DEPTH: usize = 4;

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

/// The walk over a compiled expression: names, fields, functions, kind, and cost.
pub(crate) struct ExpressionCheck<'a> {
    text: &'a str,
    program: &'a Program,
    /// Names that loops around the present place have given, and how large their values are.
    loops: Vec<(String, ValueSize)>,
    /// How many parts and how many loops are around the present place.
    depth: usize,
    loop_depth: usize,
    pod_use: PodUse,
}

/// Whether an expression looks at the pod at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PodUse {
    Unused,
    Used,
}

impl<'a> ExpressionCheck<'a> {
    pub fn new(text: &'a str, program: &'a Program) -> Self {
        Self {
            text,
            program,
            loops: Vec::new(),
            depth: 0,
            loop_depth: 0,
            pod_use: PodUse::Unused,
        }
    }

    /// What the whole expression costs, or the first thing that is wrong with it.
    pub fn check(mut self) -> Result<Cost, ExpressionError> {
        let root = self.program.expression();
        let part = self.check_part(root)?;
        let help = "compare something of the pod, such as pod.gpus > 1";
        if ValueKind::from_expr(&root.expr).is_some_and(|kind| kind != ValueKind::Bool) {
            return Err(self.error(root, "it does not evaluate to a boolean".into(), help));
        }
        if self.pod_use == PodUse::Unused {
            return Err(self.error(root, "it has the same result for every pod".into(), help));
        }
        Ok(part.cost)
    }

    /// What evaluating a part costs at worst and how large its value may be, or what may not be in it.
    fn check_part(&mut self, at: &IdedExpr) -> Result<ExpressionPart, ExpressionError> {
        if self.depth == MAX_DEPTH {
            let help = "make two classes of it, or say the simple conditions by namespaces, labels and priorityClasses";
            return Err(self.error(at, format!("it is nested more than {MAX_DEPTH} deep"), help));
        }
        self.depth += 1;
        let part = match &at.expr {
            Expr::Unspecified => ExpressionPart::new(ValueSize::SMALL),
            Expr::Literal(literal) => ExpressionPart::new(ValueSize::for_literal(literal)),
            Expr::Ident(name) => ExpressionPart::new(self.check_name(at, name)?),
            Expr::Select(select) => self.check_select(at, select)?,
            Expr::Call(call) => self.check_call(at, call)?,
            Expr::List(list) => ExpressionPart::list(&self.check_parts(&list.elements)?),
            Expr::Map(map) => {
                let mut parts = Vec::new();
                for entry in &map.entries {
                    if let EntryExpr::MapEntry(entry) = &entry.expr {
                        parts.push(self.check_part(&entry.key)?);
                        parts.push(self.check_part(&entry.value)?);
                    }
                }
                ExpressionPart::list(&parts)
            }
            Expr::Comprehension(comprehension) => self.check_comprehension(comprehension)?,
            Expr::Struct(_) => {
                return Err(self.error(
                    at,
                    "there are no message types here".into(),
                    "compare fields of pod",
                ));
            }
        };
        self.depth -= 1;
        // A name, a field or a literal is looked at where it is; what an operator makes is new.
        let is_made = !matches!(
            &at.expr,
            Expr::Unspecified | Expr::Literal(_) | Expr::Ident(_) | Expr::Select(_)
        );
        self.check_budget(
            at,
            if is_made {
                part.with_allocation()
            } else {
                part.with_step()
            },
        )
    }

    /// Refuses a part whose cost is too high by itself; the error points at the innermost such part.
    fn check_budget(
        &self,
        at: &IdedExpr,
        part: ExpressionPart,
    ) -> Result<ExpressionPart, ExpressionError> {
        let Cost { steps, bytes } = part.cost;
        if steps > MAX_STEPS {
            let message =
                format!("it may take {steps} steps for one pod; {MAX_STEPS} are the most");
            let help = "loop over one list of the pod only, and not inside another loop";
            return Err(self.error(at, message, help));
        }
        if bytes > MAX_BYTES {
            let (may, most) = (Bytes(bytes), Bytes(MAX_BYTES));
            let message = format!("it may go through {may} for one pod; {most} are the most");
            let help = "compare texts one by one instead of joining them with +, and loop over one list only";
            return Err(self.error(at, message, help));
        }
        Ok(part)
    }

    fn check_parts(&mut self, parts: &[IdedExpr]) -> Result<Vec<ExpressionPart>, ExpressionError> {
        parts.iter().map(|part| self.check_part(part)).collect()
    }

    fn check_name(&mut self, at: &IdedExpr, name: &str) -> Result<ValueSize, ExpressionError> {
        if let Some((_, size)) = self
            .loops
            .iter()
            .rev()
            .find(|(variable, _)| variable == name)
        {
            return Ok(*size);
        }
        if name == "pod" {
            self.pod_use = PodUse::Used;
            return Ok(ValueSize::POD);
        }
        if name.starts_with('@') {
            return Ok(ValueSize::SMALL);
        }
        let help = match FIELDS.contains(&name) {
            true => format!("write pod.{name}"),
            false => "the only name is pod; texts stand in quotes".into(),
        };
        Err(self.error(at, format!("there is no {name:?} here"), &help))
    }

    fn check_select(
        &mut self,
        at: &IdedExpr,
        select: &SelectExpr,
    ) -> Result<ExpressionPart, ExpressionError> {
        self.check_field(at, &select.operand, &select.field)?;
        let whole = self.check_part(&select.operand)?;
        let size = if select.test {
            ValueSize::SMALL
        } else {
            field_size(&select.operand.expr, &select.field, whole)
        };
        Ok(whole.with_size(size))
    }

    fn check_field(
        &self,
        at: &IdedExpr,
        of: &IdedExpr,
        field: &str,
    ) -> Result<(), ExpressionError> {
        let is_of_pod = matches!(&of.expr, Expr::Ident(name) if name == "pod");
        if is_of_pod {
            self.check_pod_field(at, field)
        } else {
            Ok(())
        }
    }

    fn check_pod_field(&self, at: &IdedExpr, field: &str) -> Result<(), ExpressionError> {
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

    fn check_call(
        &mut self,
        at: &IdedExpr,
        call: &CallExpr,
    ) -> Result<ExpressionPart, ExpressionError> {
        let name = call.func_name.as_str();
        if !OPERATORS.contains(&name) && !FUNCTIONS.contains(&name) {
            let help = match nearest(name, &FUNCTIONS) {
                Some(near) => format!("did you mean {near}?"),
                None => format!(
                    "there are {}, and the loops all, exists, exists_one",
                    FUNCTIONS.join(", ")
                ),
            };
            return Err(self.error(at, format!("there is no function {name:?} here"), &help));
        }
        let mut parts = match call.target.as_deref() {
            Some(target) => vec![self.check_part(target)?],
            None => Vec::new(),
        };
        parts.extend(self.check_parts(&call.args)?);
        if let Some(field) = kind::indexed_field(call) {
            self.check_pod_field(at, field)?;
        }
        if let Some((message, help)) = kind::type_error(call) {
            return Err(self.error(at, message, help));
        }
        Ok(ExpressionPart::call(call, &parts))
    }

    fn check_comprehension(
        &mut self,
        each: &ComprehensionExpr,
    ) -> Result<ExpressionPart, ExpressionError> {
        let range = self.check_part(&each.iter_range)?;
        if !has_fixed_order(&each.iter_range.expr) {
            let message =
                "a loop goes over a list: over what is written in brackets, or pod.resources"
                    .into();
            let help = "labels have no order; ask for one by its name: 'team' in pod.labels";
            return Err(self.error(&each.iter_range, message, help));
        }
        if self.loop_depth == MAX_LOOP_DEPTH {
            let message = format!("more than {MAX_LOOP_DEPTH} loops are inside each other");
            return Err(self.error(
                &each.iter_range,
                message,
                "loop over one list, and make two classes of the rest",
            ));
        }
        self.loop_depth += 1;
        let start = self.check_part(&each.accu_init)?;
        let before = self.loops.len();
        let names = [Some(&each.iter_var), each.iter_var2.as_ref()]
            .into_iter()
            .flatten();
        self.loops
            .extend(names.map(|name| (name.clone(), ValueSize::for_item_of(range.size))));
        self.loops.push((each.accu_var.clone(), start.size));
        let condition = self.check_part(&each.loop_cond)?;
        let step = self.check_part(&each.loop_step)?;
        let outcome = ValueSize::after_loop(range.size.items, start.size, step.size);
        if let Some((_, size)) = self.loops.last_mut() {
            *size = outcome;
        }
        let end = self.check_part(&each.result)?;
        self.loops.truncate(before);
        self.loop_depth -= 1;
        Ok(ExpressionPart::comprehension(
            range,
            start,
            [condition, step],
            outcome,
            end,
        ))
    }

    fn error(&self, at: &IdedExpr, message: String, help: &str) -> ExpressionError {
        let (start, stop) = self
            .program
            .source_info()
            .offset_for(at.id)
            .unwrap_or_default();
        // Characters, the last one included.
        let byte = |chars: usize| {
            self.text
                .char_indices()
                .nth(chars)
                .map_or(self.text.len(), |(at, _)| at)
        };
        let (start, end) = (byte(start as usize), byte(stop as usize + 1));
        ExpressionError {
            span: start..end.max(start),
            message,
            help: help.into(),
        }
    }
}

/// Whether a loop over it takes the same way each time.
fn has_fixed_order(range: &Expr) -> bool {
    match range {
        Expr::List(_) | Expr::Comprehension(_) => true,
        Expr::Select(select) => {
            select.field == "resources"
                && matches!(&select.operand.expr, Expr::Ident(name) if name == "pod")
        }
        _ => false,
    }
}

fn nearest<'a>(word: &str, words: &[&'a str]) -> Option<&'a str> {
    let near = words
        .iter()
        .map(|candidate| (strsim::damerau_levenshtein(word, candidate), *candidate))
        .min()?;
    (near.0 <= word.len().max(3) / 3).then_some(near.1)
}

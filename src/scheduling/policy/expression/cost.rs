//! What evaluating an expression costs at worst: steps, and bytes that are made, copied or looked through on the way.
//!
//! Sizes are counted, not guessed: a pod shows a bounded amount ([`is_within_bounds`]), and every operator's result is
//! bounded by its operands. Arithmetic saturates: what is too large to count is too large.

use crate::vocabulary::classification::PodTraits;
use cel::common::ast::{CallExpr, Expr, LiteralValue};

/// Steps at worst: some milliseconds, once per kind of pod.
pub(crate) const MAX_STEPS: u64 = 10_000;
/// Bytes at worst.
pub const MAX_BYTES: u64 = 4 << 20;

/// One text of a pod. No name in Kubernetes is longer than 317 bytes, and no label's value than 63.
const MAX_TEXT_BYTES: u64 = 512;
/// All labels of a pod, keys and values. The API server bounds them by the object's size only.
const MAX_LABEL_BYTES: u64 = 64 << 10;
/// Resources that a pod names.
const MAX_RESOURCES: u64 = 256;
/// What a value takes beside its text, in a list or a map.
const ITEM_OVERHEAD_BYTES: u64 = 64;
/// A number written out; the largest with a fraction has 309 digits before the point.
const MAX_NUMBER_BYTES: u64 = 400;

/// What evaluating takes at worst.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    pub steps: u64,
    pub bytes: u64,
}

/// How large a value may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ValueSize {
    pub bytes: u64,
    /// Number of items of a list; the largest has at most `item` bytes.
    pub items: u64,
    item: u64,
}

/// A part of an expression: what it costs, and what it gives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpressionPart {
    pub cost: Cost,
    pub size: ValueSize,
}

/// Whether what a pod shows is within the bounds that costs are counted by.
pub fn is_within_bounds(pod: &PodTraits) -> bool {
    let is_short = |text: &String| text.len() as u64 <= MAX_TEXT_BYTES;
    let labels = pod
        .labels
        .iter()
        .map(|(key, value)| (key.len() + value.len()) as u64 + ITEM_OVERHEAD_BYTES);
    [
        &pod.namespace,
        &pod.priority_class,
        &pod.model,
        &pod.service_account,
    ]
    .into_iter()
    .all(is_short)
        && pod
            .labels
            .iter()
            .all(|(key, value)| is_short(key) && is_short(value))
        && labels.sum::<u64>() <= MAX_LABEL_BYTES
        && pod.resources.len() as u64 <= MAX_RESOURCES
        && pod.resources.iter().all(is_short)
}

impl ValueSize {
    /// A number, or true or false.
    pub const SMALL: Self = Self::for_text(8);
    pub(crate) const POD: Self = Self::for_text(
        MAX_LABEL_BYTES
            + MAX_RESOURCES * (MAX_TEXT_BYTES + ITEM_OVERHEAD_BYTES)
            + 16 * MAX_TEXT_BYTES,
    );

    const fn for_text(bytes: u64) -> Self {
        Self {
            bytes,
            items: 0,
            item: bytes,
        }
    }

    pub(crate) fn for_literal(literal: &LiteralValue) -> Self {
        match literal {
            LiteralValue::String(text) => Self::for_text(text.inner().len() as u64),
            LiteralValue::Bytes(_) => Self::for_text(super::LONGEST as u64),
            _ => Self::SMALL,
        }
    }

    /// The size of one item of a list.
    pub(crate) fn for_item_of(list: Self) -> Self {
        Self {
            bytes: list.item,
            items: list.item / ITEM_OVERHEAD_BYTES,
            item: list.item,
        }
    }

    /// What a loop has gathered after so many rounds, if each adds as much as the first.
    pub fn after_loop(rounds: u64, start: Self, first: Self) -> Self {
        let grown = |start: u64, first: u64| {
            first
                .saturating_sub(start)
                .saturating_mul(rounds)
                .saturating_add(start)
        };
        Self {
            bytes: grown(start.bytes, first.bytes).max(first.bytes),
            items: grown(start.items, first.items).max(first.items),
            item: start.item.max(first.item),
        }
    }

    fn concatenated(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            items: self.items.saturating_add(other.items),
            item: self.item.max(other.item),
        }
    }

    fn larger(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.max(other.bytes),
            items: self.items.max(other.items),
            item: self.item.max(other.item),
        }
    }
}

/// How large a field of a pod, or a label, may be; a part of anything else is no larger than the whole.
pub(crate) fn field_size(whole: &Expr, field: &str, part: ExpressionPart) -> ValueSize {
    match whole {
        Expr::Ident(name) if name == "pod" => match field {
            "labels" => ValueSize::for_text(MAX_LABEL_BYTES),
            "resources" => {
                let item = MAX_TEXT_BYTES + ITEM_OVERHEAD_BYTES;
                ValueSize {
                    bytes: MAX_RESOURCES * item,
                    items: MAX_RESOURCES,
                    item,
                }
            }
            "model" | "namespace" | "priorityClass" | "serviceAccount" => {
                ValueSize::for_text(MAX_TEXT_BYTES)
            }
            "exclusive" | "gpus" | "kvCache" | "priority" | "vram" => ValueSize::SMALL,
            _ => part.size,
        },
        Expr::Select(select) if select.field == "labels" && is_pod(&select.operand.expr) => {
            ValueSize::for_text(MAX_TEXT_BYTES)
        }
        _ => part.size,
    }
}

fn is_pod(expr: &Expr) -> bool {
    matches!(expr, Expr::Ident(name) if name == "pod")
}

impl ExpressionPart {
    pub fn new(size: ValueSize) -> Self {
        Self {
            cost: Cost::default(),
            size,
        }
    }

    /// Adds one step to the cost.
    pub fn with_step(self) -> Self {
        let cost = Cost {
            steps: self.cost.steps.saturating_add(1),
            ..self.cost
        };
        Self { cost, ..self }
    }

    /// Adds one step to the cost, in which the value is allocated.
    pub fn with_allocation(self) -> Self {
        let mut part = self.with_step();
        part.cost.bytes = part.cost.bytes.saturating_add(self.size.bytes);
        part
    }

    pub(crate) fn with_size(self, size: ValueSize) -> Self {
        Self { size, ..self }
    }

    pub fn list(parts: &[Self]) -> Self {
        let item = |part: &Self| part.size.bytes.saturating_add(ITEM_OVERHEAD_BYTES);
        let bytes = parts.iter().map(item).fold(0, u64::saturating_add);
        let largest = parts.iter().map(item).max().unwrap_or_default();
        Self {
            cost: sum(parts),
            size: ValueSize {
                bytes,
                items: parts.len() as u64,
                item: largest,
            },
        }
    }

    pub fn call(call: &CallExpr, parts: &[Self]) -> Self {
        let all = || {
            parts
                .iter()
                .map(|part| part.size)
                .fold(ValueSize::for_text(0), ValueSize::concatenated)
        };
        let largest = || {
            parts
                .iter()
                .map(|part| part.size)
                .fold(ValueSize::SMALL, ValueSize::larger)
        };
        let size = match call.func_name.as_str() {
            "_+_" => all(),
            "_?_:_" => largest(),
            "_[_]" => match (call.args.as_slice(), parts) {
                ([whole, field], [part, _]) => {
                    let of_field = super::kind::string_literal(field)
                        .map(|field| field_size(&whole.expr, field, *part));
                    of_field.unwrap_or(part.size)
                }
                _ => largest(),
            },
            "string" => largest().larger(ValueSize::for_text(MAX_NUMBER_BYTES)),
            // True or false, or a number.
            _ => ValueSize::SMALL,
        };
        let scanned_bytes = match (call.func_name.as_str(), parts) {
            ("_?_:_", _) => 0,
            ("_[_]", [_, index]) => index.size.bytes,
            // Whatever it gives, it may have to look through all that it is given.
            _ => all().bytes,
        };
        let mut cost = sum(parts);
        cost.bytes = cost.bytes.saturating_add(scanned_bytes);
        Self { cost, size }
    }

    /// A loop: over `range`, from `start`, with what each round does, to what it has gathered and what is made of that.
    pub fn comprehension(
        range: Self,
        start: Self,
        round: [Self; 2],
        outcome: ValueSize,
        end: Self,
    ) -> Self {
        let rounds = range.size.items;
        let once = sum(&round);
        let gathered = outcome.bytes.saturating_add(range.size.item);
        let looped = Cost {
            steps: rounds.saturating_mul(once.steps),
            bytes: rounds.saturating_mul(once.bytes.saturating_add(gathered)),
        };
        let parts = [
            range,
            start,
            end,
            Self {
                cost: looped,
                size: ValueSize::SMALL,
            },
        ];
        Self {
            cost: sum(&parts),
            size: end.size,
        }
    }
}

fn sum(parts: &[ExpressionPart]) -> Cost {
    parts.iter().fold(Cost::default(), |sum, part| Cost {
        steps: sum.steps.saturating_add(part.cost.steps),
        bytes: sum.bytes.saturating_add(part.cost.bytes),
    })
}

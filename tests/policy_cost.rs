//! The worst cost of a policy's expressions: a thousand generated ones, hostile and harmless, each refused with its position or
//! evaluated for the largest pods within its counted bounds.
//!
//! A test binary of its own, because its allocator counts. Memory and steps are measured, never time.

use peak_alloc::PeakAlloc;
use std::fmt::Write as _;
use stowage_scheduling::policy::{Expression, ExpressionError, ExpressionPod};
use stowage_scheduling::vocabulary::classification::PodTraits;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Half of what a thread that answers requests has.
const STACK: usize = 1 << 20;
/// What an expression may take for one pod, at most.
const MOST_STEPS: u64 = 10_000;
const MOST_BYTES: u64 = 4 << 20;
/// Each seed is an expression.
const SEEDS: u64 = 1000;

/// SplitMix64: the same expressions on every machine.
struct ExpressionDice(u64);

impl ExpressionDice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn one_of<'a>(&mut self, all: &[&'a str]) -> &'a str {
        all[self.below(all.len())]
    }
}

const TEXTS: [&str; 7] = [
    "pod.model",
    "pod.namespace",
    "pod.priorityClass",
    "pod.serviceAccount",
    "pod.labels['a']",
    "pod.labels.a",
    "'aaaa'",
];
const NUMBERS: [&str; 6] = [
    "pod.gpus",
    "pod.priority",
    "pod.vram",
    "pod.kvCache",
    "9223372036854775807",
    "-1",
];

/// The bomb of issue 15: a text that doubles in every loop.
fn doubling(levels: usize, text: &str) -> String {
    let mut all = String::new();
    for level in 0..levels {
        let inner = if level == 0 {
            text.to_owned()
        } else {
            format!("x{}", level - 1)
        };
        write!(all, "[{inner}+{inner}].exists(x{level}, ").unwrap();
    }
    format!(
        "{all}x{} == ''{}",
        levels.saturating_sub(1),
        ")".repeat(levels)
    )
}

fn nested(dice: &mut ExpressionDice) -> String {
    let (levels, list) = (
        1 + dice.below(6),
        dice.one_of(&["pod.resources", "[1,2,3,4,5,6,7,8]", "['a','b']"]),
    );
    let kind = dice.one_of(&["all", "exists", "exists_one"]);
    let opened: String = (0..levels)
        .map(|level| format!("{list}.{kind}(x{level}, "))
        .collect();
    format!("{opened}x0 == x{}{}", levels - 1, ")".repeat(levels))
}

fn gathered(dice: &mut ExpressionDice) -> String {
    let mut list = dice
        .one_of(&["pod.resources", "[1,2,3]", "[pod.model,pod.namespace]"])
        .to_owned();
    for level in 0..dice.below(5) {
        list = match dice.below(4) {
            0 => format!("{list}.map(m{level}, [m{level}, m{level}])"),
            1 => format!("{list}.map(m{level}, {{'a': m{level}, 'b': [m{level}]}})"),
            2 => format!("{list}.filter(m{level}, m{level} != 'x')"),
            _ => format!("({list}+{list})"),
        };
    }
    format!("size({list}) > 0")
}

fn joined(dice: &mut ExpressionDice) -> String {
    let mut text = dice.one_of(&TEXTS).to_owned();
    for _ in 0..dice.below(9) {
        text = format!("({text}+{text})");
    }
    format!(
        "{text}.{}({})",
        dice.one_of(&["contains", "startsWith", "endsWith", "matches"]),
        dice.one_of(&TEXTS)
    )
}

fn deep(dice: &mut ExpressionDice) -> String {
    let levels = dice.below(500);
    let (open, close) = [
        ("(", ")"),
        ("!", ""),
        ("[", "]"),
        ("-", ""),
        ("pod.exclusive?true:", ""),
        ("size([", "])"),
    ][dice.below(6)];
    match dice.below(3) {
        0 => format!("pod{}", ".labels".repeat(levels / 4)),
        1 => vec!["pod.gpus"; levels / 5 + 1].join(dice.one_of(&["+", "==", "<", "-"])) + " > 1",
        _ => format!(
            "{}pod.exclusive{}",
            open.repeat(levels),
            close.repeat(levels)
        ),
    }
}

fn huge(dice: &mut ExpressionDice) -> String {
    let size = dice.below(1400);
    match dice.below(5) {
        0 => format!("pod.model == '{}'", "a".repeat(size)),
        1 => format!("pod.model in [{}]", vec!["''"; size / 3 + 1].join(",")),
        2 => format!("pod.gpus < {}", "9".repeat(size / 20 + 1)),
        3 => format!("pod.model.matches('({}+)+b')", "a".repeat(size / 40)),
        _ => format!(
            "{{{}}} == {{}} || pod.exclusive",
            vec!["1:pod"; size / 8].join(",")
        ),
    }
}

/// Anything that may stand in a class, of any depth.
fn condition(dice: &mut ExpressionDice, depth: usize) -> String {
    let next = |dice: &mut ExpressionDice| condition(dice, depth.saturating_sub(1));
    match if depth == 0 {
        3 + dice.below(5)
    } else {
        dice.below(8)
    } {
        0 => format!("({} && {})", next(dice), next(dice)),
        1 => format!("({} || !{})", next(dice), next(dice)),
        2 => format!("({} ? {} : {})", next(dice), next(dice), next(dice)),
        3 => {
            format!(
                "{} {} {}",
                dice.one_of(&NUMBERS),
                dice.one_of(&["<", "==", ">="]),
                dice.one_of(&NUMBERS)
            )
        }
        4 => format!(
            "{} {} {} > 0",
            dice.one_of(&NUMBERS),
            dice.one_of(&["+", "*", "/", "%", "-"]),
            dice.one_of(&NUMBERS)
        ),
        5 => format!("{}.contains({})", dice.one_of(&TEXTS), dice.one_of(&TEXTS)),
        6 => format!(
            "{} in [{}, {}]",
            dice.one_of(&TEXTS),
            dice.one_of(&TEXTS),
            dice.one_of(&TEXTS)
        ),
        _ => format!(
            "pod.resources.exists(r, r.endsWith({}))",
            dice.one_of(&TEXTS)
        ),
    }
}

fn generate(dice: &mut ExpressionDice) -> String {
    match dice.below(8) {
        0 => {
            let levels = 1 + dice.below(30);
            doubling(levels, dice.one_of(&TEXTS))
        }
        1 => nested(dice),
        2 => gathered(dice),
        3 => joined(dice),
        4 => deep(dice),
        5 => huge(dice),
        _ => {
            let depth = dice.below(5);
            condition(dice, depth)
        }
    }
}

/// As much as a pod may show: texts of the longest kind, and alike, so that a comparison goes to the end.
fn largest(labels: usize, text: usize) -> PodTraits {
    let long = "a".repeat(text);
    let mut pod = PodTraits {
        namespace: long.clone(),
        priority_class: long.clone(),
        model: long.clone(),
        service_account: long.clone(),
        gpus: u32::MAX,
        priority: i32::MIN,
        vram: stowage_scheduling::units::Bytes(u64::MAX),
        ..PodTraits::default()
    };
    pod.labels = (0..labels)
        .map(|n| (format!("{n:063}"), "a".repeat(63)))
        .collect();
    pod.labels.insert("a".into(), "a".repeat(63));
    pod.resources = (0..256)
        .map(|n| format!("{n:04}{}", "a".repeat(text - 4)))
        .collect();
    pod
}

/// What came of one expression.
enum ExpressionOutcome {
    Refused(ExpressionError),
    /// Evaluated for every pod: the most memory that took at once, beyond what was in use before.
    Evaluated {
        most: usize,
        bound: u64,
        steps: u64,
    },
}

fn try_out(text: &str, pods: &[PodTraits]) -> ExpressionOutcome {
    let expression = match Expression::compile(text) {
        Ok(expression) => expression,
        Err(error) => return ExpressionOutcome::Refused(error),
    };
    let cost = expression.cost();
    let (bound, steps) = (cost.bytes, cost.steps);
    let mut most = 0;
    // What costs more than it may is not evaluated: it may take all memory.
    let is_within = steps <= MOST_STEPS && bound <= MOST_BYTES;
    for pod in pods.iter().filter(|_| is_within) {
        let subject = ExpressionPod::new(pod);
        // What a pod takes as a value is the same for every expression, and made by the first.
        let _ = expression.holds_for(&subject);
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        let _ = expression.holds_for(&subject);
        most = most.max(MEMORY.peak_usage().saturating_sub(before));
    }
    ExpressionOutcome::Evaluated { most, bound, steps }
}

fn check_all() -> (u64, u64) {
    let pods = [
        largest(300, 512),
        largest(0, 253),
        largest(12_000, 253),
        PodTraits::default(),
    ];
    let (mut refused, mut evaluated) = (0, 0);
    for seed in 0..SEEDS {
        let text = generate(&mut ExpressionDice(seed));
        match try_out(&text, &pods) {
            ExpressionOutcome::Refused(error) => {
                refused += 1;
                assert!(
                    text.get(error.span.clone()).is_some(),
                    "{text}: {:?} is no place in it",
                    error.span
                );
                assert!(
                    !error.message.is_empty() && !error.help.is_empty(),
                    "{text}"
                );
            }
            ExpressionOutcome::Evaluated { most, bound, steps } => {
                evaluated += 1;
                assert!(
                    steps <= MOST_STEPS && bound <= MOST_BYTES,
                    "expression {seed}: it is accepted, and may take {steps} steps and {bound} bytes\n{text}"
                );
                // A small value has its box, its type and its place in a list beside it.
                let allowed = 4 * bound + 64 * steps + (64 << 10);
                assert!(
                    most as u64 <= allowed,
                    "expression {seed}: {most} bytes at once, and {allowed} would be expected\n{text}"
                );
            }
        }
    }
    let bombs = [25, 30, 33].map(|levels| doubling(levels, "pod.priorityClass"));
    assert!(bombs.iter().all(|bomb| Expression::compile(bomb).is_err()));
    (refused, evaluated)
}

#[test]
fn b7_a_thousand_generated_expressions_are_refused_or_cheap() {
    let checking = std::thread::Builder::new()
        .stack_size(STACK)
        .spawn(check_all)
        .unwrap();
    let (refused, evaluated) = checking.join().unwrap();
    assert_eq!(refused + evaluated, SEEDS);
    assert!(
        refused > 200 && evaluated > 200,
        "{refused} refused, {evaluated} evaluated: both kinds are there"
    );
}

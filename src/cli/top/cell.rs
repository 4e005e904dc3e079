//! One figure of a table: what it sorts by, and its text. The text is made when it is shown, so that a table of thousands of rows
//! costs what is on the screen.

use std::cmp::Ordering;
use stowage_scheduling::explaining::units::human_duration;
use stowage_scheduling::ids::printable;
use stowage_scheduling::units::{Bytes, Micros, Millis, Percent};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cell {
    Text(String),
    Count(u64),
    /// What is not known sorts before everything that is.
    MaybeCount(Option<u64>),
    Bytes(Bytes),
    Priority(i32),
    /// On each of so many GPUs.
    Request {
        per_gpu: Bytes,
        gpus: u32,
    },
    /// So much of so much, with a bar.
    Share {
        part: Bytes,
        of: Bytes,
    },
    /// With a bar.
    Percent(Option<Percent>),
    Age(Option<Millis>),
    Latency(Option<Micros>),
}

/// Cells of a bar.
const SHARE_BAR: usize = 10;
const PERCENT_BAR: usize = 6;

impl Cell {
    /// Text that a user or another program chose.
    pub fn untrusted_text(text: &str) -> Self {
        Self::Text(printable(text))
    }

    pub fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Count(count) => count.to_string(),
            Self::MaybeCount(count) => count.map_or("?".into(), |count| count.to_string()),
            Self::Bytes(bytes) => bytes.to_string(),
            Self::Priority(priority) => priority.to_string(),
            Self::Request {
                per_gpu,
                gpus: 0 | 1,
            } => per_gpu.to_string(),
            Self::Request { per_gpu, gpus } => format!("{gpus} × {per_gpu}"),
            Self::Share { part, of } => {
                format!(
                    "{} {}",
                    bar(thousandths(*part, *of), SHARE_BAR),
                    share_text(*part, *of)
                )
            }
            Self::Percent(None) => "?".into(),
            Self::Percent(Some(percent)) => {
                format!(
                    "{} {percent}",
                    bar(u64::from(percent.get()) * 10, PERCENT_BAR)
                )
            }
            Self::Age(age) => age.map_or("?".into(), human_duration),
            Self::Latency(latency) => latency.map_or("?".into(), |latency| latency.to_string()),
        }
    }

    /// The text, without its bar where that has no room.
    pub fn text_within(&self, width: usize) -> String {
        let text = self.text();
        match self {
            Self::Share { part, of } if text.chars().count() > width => share_text(*part, *of),
            Self::Percent(Some(percent)) if text.chars().count() > width => percent.to_string(),
            _ => text,
        }
    }

    /// How full it is, in thousandths; `None` of what has no bound.
    pub fn fill_thousandths(&self) -> Option<u64> {
        match self {
            Self::Share { part, of } => Some(thousandths(*part, *of)),
            Self::Percent(percent) => percent.map(|percent| u64::from(percent.get()) * 10),
            _ => None,
        }
    }

    /// Numbers by size, shares by how full they are, texts as they read.
    pub fn compare(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Text(a), Self::Text(b)) => natural_order(a, b),
            (Self::Share { .. }, Self::Share { .. }) => {
                self.fill_thousandths().cmp(&other.fill_thousandths())
            }
            _ => self.sort_key().cmp(&other.sort_key()),
        }
    }

    fn sort_key(&self) -> Option<i128> {
        match self {
            Self::Text(_) | Self::Share { .. } => None,
            Self::Count(count) => Some((*count).into()),
            Self::MaybeCount(count) => count.map(Into::into),
            Self::Bytes(bytes) => Some(bytes.0.into()),
            Self::Priority(priority) => Some((*priority).into()),
            Self::Request { per_gpu, gpus } => Some(i128::from(per_gpu.0) * i128::from(*gpus)),
            Self::Percent(percent) => percent.map(|percent| percent.get().into()),
            Self::Age(age) => age.map(|age| age.0.into()),
            Self::Latency(latency) => latency.map(|latency| latency.0.into()),
        }
    }
}

fn thousandths(part: Bytes, of: Bytes) -> u64 {
    if of == Bytes::ZERO {
        return 0;
    }
    u64::try_from(u128::from(part.0) * 1000 / u128::from(of.0)).unwrap_or(u64::MAX)
}

/// `███▌······`, by eighths of a cell.
pub fn bar(thousandths: u64, cells: usize) -> String {
    const EIGHTHS: [char; 7] = ['▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let eighths = usize::try_from(thousandths.min(1000)).unwrap_or(1000) * cells * 8 / 1000;
    let mut bar = "█".repeat(eighths / 8);
    bar.extend(EIGHTHS.get((eighths % 8).wrapping_sub(1)));
    let filled = eighths.div_ceil(8);
    bar + &"·".repeat(cells - filled)
}

/// `40.0/72.0 GiB`, or `312/720 GiB` where tenths do not matter.
fn share_text(part: Bytes, of: Bytes) -> String {
    let gib = |bytes: Bytes| bytes.0 as f64 / (1u64 << 30) as f64;
    match gib(of) {
        whole if whole >= 100.0 => format!("{:.0}/{whole:.0} GiB", gib(part)),
        whole => format!("{:.1}/{whole:.1} GiB", gib(part)),
    }
}

/// As a person orders names: `node-2` before `node-10`.
pub fn natural_order(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a, b);
    loop {
        let (of_left, of_right) = (leading_digits(left), leading_digits(right));
        if of_left > 0 && of_right > 0 {
            let (x, y) = (
                left[..of_left].trim_start_matches('0'),
                right[..of_right].trim_start_matches('0'),
            );
            let order = x.len().cmp(&y.len()).then_with(|| x.cmp(y));
            if order.is_ne() {
                return order;
            }
            (left, right) = (&left[of_left..], &right[of_right..]);
            continue;
        }
        match (left.chars().next(), right.chars().next()) {
            (Some(x), Some(y)) if x == y => {
                (left, right) = (&left[x.len_utf8()..], &right[y.len_utf8()..])
            }
            // Equal but for leading zeros.
            (None, None) => return a.cmp(b),
            (x, y) => return x.cmp(&y),
        }
    }
}

fn leading_digits(text: &str) -> usize {
    text.bytes().take_while(u8::is_ascii_digit).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_as_a_person_counts() {
        let mut names = ["node-10", "node-2", "node-2-b", "node-02", "node", "Node-1"];
        names.sort_by(|a, b| natural_order(a, b));
        assert_eq!(
            names,
            ["Node-1", "node", "node-02", "node-2", "node-2-b", "node-10"]
        );
    }

    #[test]
    fn bars_have_their_width_and_grow_by_eighths() {
        assert_eq!(bar(0, 4), "····");
        assert_eq!(bar(500, 4), "██··");
        assert_eq!(bar(540, 4), "██▏·");
        assert_eq!(bar(1000, 4), "████");
        assert_eq!(bar(5000, 4), "████", "more than there is");
        assert!((0..=1000).all(|thousandths| bar(thousandths, 7).chars().count() == 7));
    }

    #[test]
    fn unknown_figures_sort_first_and_shares_by_how_full_they_are() {
        let share = |part, of| Cell::Share {
            part: Bytes::gib(part),
            of: Bytes::gib(of),
        };
        assert_eq!(share(40, 80).compare(&share(100, 720)), Ordering::Greater);
        assert_eq!(
            Cell::Percent(None).compare(&Cell::Percent(Percent::new(0))),
            Ordering::Less
        );
        assert_eq!(share(1, 0).fill_thousandths(), Some(0));
        assert_eq!(share(40, 72).text(), "█████▌···· 40.0/72.0 GiB");
        assert_eq!(share(312, 720).text(), "████▎····· 312/720 GiB");
    }

    #[test]
    fn a_name_has_no_control_characters() {
        let hostile = "a\u{1b}[2J\u{9b}31m\nb\u{202e}c\u{200b}\u{7}";
        let shown = printable(hostile);
        assert_eq!(
            shown,
            "a\u{fffd}[2J\u{fffd}31m\u{fffd}b\u{fffd}c\u{fffd}\u{fffd}"
        );
        assert_eq!(printable("naïve-モデル"), "naïve-モデル");
    }
}

//! The grammar of quantities in policies and command lines: `10%`, `1h30m`, `40Gi`, `3GB/s`. Each can be rendered, so that what
//! Stowage prints can be parsed again.
//!
//! Durations are not jiff's: the core has no library of clocks, and a number without its unit is told which one may be meant.
//!
//! Nothing here knows where a value is or what it is for.

use super::{Bytes, Millis, Percent, QuantityError};
use std::ops::Range;

/// A mistake in a text, and its fix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{is}: {help}")]
pub struct Malformed {
    /// The affected bytes of the text, if not all.
    pub span: Option<Range<usize>>,
    /// The problem, as the end of "`…` is …"; for a CEL expression a whole sentence.
    pub is: String,
    /// The fix.
    pub help: String,
}

impl Malformed {
    pub fn new(is: impl Into<String>, help: impl Into<String>) -> Self {
        Self {
            span: None,
            is: is.into(),
            help: help.into(),
        }
    }
}

/// A year: longer than any intended wait, and safe to add up.
const MAX_DURATION: Millis = Millis::seconds(365 * 24 * 3600);

/// Largest unit first, which is the order they are written in.
const TIME_UNITS: [(&str, u64); 5] = [
    ("d", 24 * 3_600_000),
    ("h", 3_600_000),
    ("m", 60_000),
    ("s", 1000),
    ("ms", 1),
];

/// Whole per cent: `10%`.
pub fn parse_percent(text: &str, at_most: u8) -> Result<Percent, Malformed> {
    let range = format!("write a whole number from 0% to {at_most}%");
    let Some(number) = text.strip_suffix('%') else {
        return Err(match is_digits(text) {
            true => Malformed::new("a number without a `%`", format!("did you mean `{text}%`?")),
            false => Malformed::new("not a percentage", format!("{range}, such as `10%`")),
        });
    };
    let number = number.trim_end();
    if !is_digits(number) {
        return Err(Malformed::new("not a whole percentage", range));
    }
    let value = number
        .parse()
        .ok()
        .filter(|&value| value <= at_most)
        .and_then(Percent::new);
    value.ok_or_else(|| Malformed::new(format!("more than {at_most}%"), range))
}

/// Whole numbers with units, the largest first: `1h30m`, `500ms`.
pub fn parse_duration(text: &str) -> Result<Millis, Malformed> {
    let malformed = || {
        Malformed::new(
            "not a duration",
            "write whole numbers with ms, s, m, h or d, such as `30s` or `1h30m`",
        )
    };
    if is_digits(text) && text != "0" {
        return Err(Malformed::new(
            "a number without a unit",
            format!("did you mean `{text}s`?"),
        ));
    }
    let (mut rest, mut total, mut units) = (text, 0u64, TIME_UNITS.iter());
    if text == "0" {
        return Ok(Millis(0));
    }
    while !rest.is_empty() {
        let digits = rest
            .find(|c: char| !c.is_ascii_digit())
            .ok_or_else(malformed)?;
        let (number, behind) = rest.split_at(digits);
        let unit = &behind[..behind
            .find(|c: char| !c.is_ascii_lowercase())
            .unwrap_or(behind.len())];
        let (_, millis) = units
            .find(|(name, _)| *name == unit)
            .ok_or_else(malformed)?;
        let number = if is_digits(number) {
            number.parse().unwrap_or(u64::MAX)
        } else {
            return Err(malformed());
        };
        total = total.saturating_add(number.saturating_mul(*millis));
        rest = &behind[unit.len()..];
    }
    match text.is_empty() {
        true => Err(malformed()),
        false if Millis(total) > MAX_DURATION => {
            Err(Malformed::new("longer than a year", "write at most `365d`"))
        }
        false => Ok(Millis(total)),
    }
}

/// No amount of memory that this project is about is smaller: a number that is less has lost its unit.
const LEAST_WITHOUT_UNIT: Bytes = Bytes(1 << 20);

/// Refuses an amount of memory that has lost its unit. What Stowage writes itself is exact, and may be a few bytes.
pub fn check_unit(text: &str) -> Result<(), Malformed> {
    let number = text.strip_prefix('+').unwrap_or(text);
    let has_unit = number.contains(|c: char| !c.is_ascii_digit() && c != '.');
    let amount = Bytes::parse_quantity_rounding_up(number).unwrap_or_default();
    if !has_unit && amount != Bytes::ZERO && amount < LEAST_WITHOUT_UNIT {
        let unit = if amount < Bytes(1000) { "Gi" } else { "Mi" };
        let help = format!("did you mean `{number}{unit}`?");
        return Err(Malformed::new("a few bytes: it has no unit", help));
    }
    Ok(())
}

/// Memory as Kubernetes writes it.
pub fn parse_quantity(text: &str) -> Result<Bytes, Malformed> {
    Bytes::parse_quantity(text).map_err(|error| match error {
        QuantityError::Malformed => Malformed::new("not an amount of memory", quantity_help(text)),
        QuantityError::Negative => Malformed::new("less than nothing", "write 0 or more"),
        QuantityError::Fractional => {
            Malformed::new("not a whole number of bytes", "write it in a smaller unit")
        }
        QuantityError::TooLarge => Malformed::new(
            "more than any machine has",
            "check the unit: `40Gi` is 40 GiB",
        ),
    })
}

/// `40GB`, `40 GiB` and `40gi` are common mistakes.
fn quantity_help(text: &str) -> String {
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim().to_ascii_lowercase();
    let unit = unit.strip_suffix('b').unwrap_or(&unit);
    let unit = unit.strip_suffix('i').unwrap_or(unit);
    let known = ["k", "m", "g", "t"]
        .into_iter()
        .find(|prefix| *prefix == unit);
    match known.filter(|_| !number.is_empty()) {
        Some(unit) => format!(
            "write `{number}{}i`; Kubernetes' units have no B",
            unit.to_ascii_uppercase()
        ),
        None => "write a number with Mi, Gi or Ti, such as `40Gi`".into(),
    }
}

/// Bytes a second, in decimal or binary units: `3GB/s`, `3GiB/s`, `1.5GB/s`.
pub fn parse_speed(text: &str) -> Result<Bytes, Malformed> {
    let malformed = || {
        Malformed::new(
            "not a speed",
            "write a number with MB/s, GB/s or GiB/s, such as `3GB/s`",
        )
    };
    let Some(amount) = text.strip_suffix("/s") else {
        return Err(Malformed::new(
            "not a speed: it says no time",
            format!("did you mean `{}/s`?", text.trim()),
        ));
    };
    if amount.ends_with("bit") {
        return Err(Malformed::new(
            "in bits",
            "write bytes: 8 Gbit/s are `1GB/s`",
        ));
    }
    let amount = amount.strip_suffix('B').ok_or_else(malformed)?;
    if !amount.ends_with(|c: char| c.is_ascii_digit() || "kMGTi".contains(c)) {
        return Err(malformed());
    }
    match Bytes::parse_quantity(amount) {
        Ok(Bytes::ZERO) => Err(Malformed::new("no speed at all", "write more than 0")),
        Ok(speed) => Ok(speed),
        Err(_) => Err(malformed()),
    }
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Renders what [`parse_duration`] parses.
pub fn format_duration(length: Millis) -> String {
    let mut left = length.0;
    // Days are parsed but not rendered: 36 hours are clearer than a day and a half.
    let parts: String = TIME_UNITS[1..]
        .iter()
        .filter_map(|(unit, millis)| {
            let n = left / millis;
            left %= millis;
            (n > 0).then(|| format!("{n}{unit}"))
        })
        .collect();
    if parts.is_empty() { "0s".into() } else { parts }
}

/// Renders what [`parse_quantity`] parses: in the largest binary unit that leaves a whole number.
pub fn format_quantity(amount: Bytes) -> String {
    format_with_unit(
        amount.0,
        [
            ("Ti", 1 << 40),
            ("Gi", 1 << 30),
            ("Mi", 1 << 20),
            ("Ki", 1 << 10),
        ],
    )
}

/// Renders what [`parse_speed`] parses: in decimal units if they fit, as in data sheets.
pub fn format_speed(speed: Bytes) -> String {
    let decimal = [("G", 1_000_000_000), ("M", 1_000_000), ("k", 1000)];
    let binary = [("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)];
    let text = if speed.0.is_multiple_of(1_000_000) {
        format_with_unit(speed.0, decimal)
    } else {
        format_with_unit(speed.0, binary)
    };
    format!("{text}B/s")
}

fn format_with_unit<const N: usize>(n: u64, units: [(&str, u64); N]) -> String {
    let unit = units
        .into_iter()
        .find(|(_, size)| n > 0 && n.is_multiple_of(*size));
    unit.map_or_else(
        || n.to_string(),
        |(name, size)| format!("{}{name}", n / size),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn durations_read_as_go_reads_whole_ones() {
        for (text, millis) in [
            ("500ms", 500),
            ("30s", 30_000),
            ("1h30m", 5_400_000),
            ("2d", 172_800_000),
            ("0", 0),
        ] {
            assert_eq!(parse_duration(text), Ok(Millis(millis)), "{text}");
        }
        for text in [
            "",
            "s",
            "10",
            "1.5h",
            "30m1h",
            "5 s",
            "-5s",
            "10S",
            "1s1s",
            "400d",
            "99999999999999999999h",
        ] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_people_write_instead_gets_the_right_hint() {
        assert_eq!(
            parse_percent("10", 90).unwrap_err().help,
            "did you mean `10%`?"
        );
        assert_eq!(parse_percent("95%", 90).unwrap_err().is, "more than 90%");
        assert_eq!(
            parse_duration("30").unwrap_err().help,
            "did you mean `30s`?"
        );
        for text in ["40GB", "40 GiB", "40gi", "40g"] {
            assert!(
                parse_quantity(text)
                    .unwrap_err()
                    .help
                    .starts_with("write `40Gi`"),
                "{text}"
            );
        }
        for (text, meant) in [
            ("40", "40Gi"),
            ("16", "16Gi"),
            ("40000", "40000Mi"),
            ("+1.5", "1.5Gi"),
        ] {
            let error = check_unit(text).unwrap_err();
            assert_eq!(error.help, format!("did you mean `{meant}`?"), "{text}");
        }
        for text in ["0", "40960Ki", "1048576", "40000000000"] {
            assert_eq!(check_unit(text), Ok(()), "{text}");
        }
        assert_eq!(
            parse_speed("3GB").unwrap_err().help,
            "did you mean `3GB/s`?"
        );
        assert_eq!(parse_speed("8Gbit/s").unwrap_err().is, "in bits");
        assert!(
            parse_speed("0GB/s").is_err()
                && parse_speed("3G/s").is_err()
                && parse_speed("3eB/s").is_err()
        );
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(n in 0u64..31_536_000_000, bytes: u64) {
            prop_assert_eq!(parse_duration(&format_duration(Millis(n))), Ok(Millis(n)));
            prop_assert_eq!(parse_quantity(&format_quantity(Bytes(bytes))), Ok(Bytes(bytes)));
            prop_assert_eq!(parse_speed(&format_speed(Bytes(bytes.max(1)))), Ok(Bytes(bytes.max(1))));
        }

        #[test]
        fn no_text_makes_a_reader_panic(text in "\\PC{0,24}|[0-9.%a-zA-Z/ ]{0,12}") {
            let _ = (parse_percent(&text, 90), parse_duration(&text), parse_quantity(&text), parse_speed(&text));
        }
    }
}

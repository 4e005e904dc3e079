//! Windows: the hours of a week, in a time zone, in which a class or a rule of a policy holds.
//!
//! The core has no clock and no calendar. A policy names its windows and carries those that are open
//! ([`Policy::open_windows`](super::Policy::open_windows)); the edge compares them with the wall clock and sets the policy again
//! when one opens or closes.

use crate::units::setting::serde_as_text;
use crate::units::text::Malformed;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// Minutes of a day.
pub const MINUTES_PER_DAY: u16 = 24 * 60;

/// The names of weekdays, Monday first.
const WEEKDAY_NAMES: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];

/// Hours of a week. It opens on each of its days when the clock of its time zone reaches `from`, and closes when that reaches
/// `to`; on the next day, if `to` is before `from`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(description = "Hours of a week, in a time zone.")]
pub struct Window {
    /// Weekdays on which it opens, such as `mon` or `mon-fri`. Default: all.
    #[serde(default)]
    pub days: Weekdays,
    /// When it opens, such as `20:00`. Default: at midnight.
    #[serde(default)]
    pub from: TimeOfDay,
    /// When it closes, such as `06:00`: on the next day, if that is before `from`. Default: at midnight, the end of the day.
    #[serde(default = "TimeOfDay::end_of_day")]
    pub to: TimeOfDay,
    /// A name of the IANA time zone database, such as `Europe/Berlin`.
    #[schemars(extend("format" = "time-zone"))]
    pub time_zone: String,
}

/// A set of weekdays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Weekdays(u8);

/// Whole minutes since midnight, by a wall clock: 0 to [`MINUTES_PER_DAY`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimeOfDay(u16);

/// One weekday, or several in a row, as a policy writes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DayRange {
    /// Counted from Monday.
    first: u8,
    last: u8,
}

impl Window {
    /// Whether it closes on the day after the one on which it opened.
    pub fn ends_on_the_next_day(&self) -> bool {
        self.to < self.from
    }
}

impl fmt::Display for Window {
    /// `mon-fri 20:00-06:00 Europe/Berlin`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.days != Weekdays::default() {
            let ranges: Vec<String> = self.days.ranges().iter().map(ToString::to_string).collect();
            write!(f, "{} ", ranges.join(","))?;
        }
        write!(f, "{}-{} {}", self.from, self.to, self.time_zone)
    }
}

impl Weekdays {
    /// Whether a day is in it, counted from Monday as 0.
    pub fn contains(self, day: u8) -> bool {
        self.0 >> day & 1 == 1
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The fewest ranges, from Monday on.
    fn ranges(self) -> Vec<DayRange> {
        let mut ranges: Vec<DayRange> = Vec::new();
        for day in (0..7).filter(|day| self.contains(*day)) {
            match ranges.last_mut().filter(|range| range.last + 1 == day) {
                Some(range) => range.last = day,
                None => ranges.push(DayRange {
                    first: day,
                    last: day,
                }),
            }
        }
        ranges
    }
}

impl Default for Weekdays {
    /// All seven.
    fn default() -> Self {
        Self(0x7f)
    }
}

impl FromIterator<u8> for Weekdays {
    fn from_iter<I: IntoIterator<Item = u8>>(days: I) -> Self {
        Self(days.into_iter().fold(0, |set, day| set | 1 << day))
    }
}

impl Serialize for Weekdays {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.ranges().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Weekdays {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let ranges = Vec::<DayRange>::deserialize(deserializer)?;
        Ok(ranges.into_iter().flat_map(DayRange::days).collect())
    }
}

impl JsonSchema for Weekdays {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Weekdays".into()
    }

    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        Vec::<DayRange>::json_schema(generator)
    }
}

impl DayRange {
    /// `mon`, or `fri-mon`, which goes over the end of the week.
    pub fn parse(text: &str) -> Result<Self, Malformed> {
        let day = |name: &str| {
            WEEKDAY_NAMES
                .iter()
                .position(|weekday| *weekday == name)
                .map(|day| day as u8)
        };
        let range = match text.split_once('-') {
            Some((first, last)) => day(first).zip(day(last)),
            None => day(text).map(|day| (day, day)),
        };
        range
            .map(|(first, last)| Self { first, last })
            .ok_or_else(|| {
                let long = text
                    .get(..3)
                    .map(str::to_ascii_lowercase)
                    .filter(|short| day(short).is_some());
                let help = match long.filter(|_| !text.contains('-')) {
                    Some(short) => format!("did you mean `{short}`?"),
                    None => format!(
                        "write {}, or a range such as `mon-fri`",
                        WEEKDAY_NAMES.join(", ")
                    ),
                };
                Malformed::new("no weekday", help)
            })
    }

    /// Counted from Monday, in the order of the range.
    pub fn days(self) -> impl Iterator<Item = u8> {
        let count = (self.last + 7 - self.first) % 7 + 1;
        (0..count).map(move |n| (self.first + n) % 7)
    }

    /// The name of a day, counted from Monday.
    pub fn name_of(day: u8) -> &'static str {
        WEEKDAY_NAMES[usize::from(day) % 7]
    }
}

impl fmt::Display for DayRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::name_of(self.first))?;
        if self.first == self.last {
            Ok(())
        } else {
            write!(f, "-{}", Self::name_of(self.last))
        }
    }
}

serde_as_text!(
    [] DayRange, "DayRange",
    DayRange::parse,
    |range: &Self| range.to_string(),
    {
        "type": "string",
        "format": "weekdays",
        "pattern": "^(mon|tue|wed|thu|fri|sat|sun)(-(mon|tue|wed|thu|fri|sat|sun))?$",
    }
);

impl TimeOfDay {
    fn end_of_day() -> Self {
        Self(MINUTES_PER_DAY)
    }

    /// `06:00`; `24:00` is the end of the day.
    pub fn parse(text: &str) -> Result<Self, Malformed> {
        let digits = |part: &str| {
            let is_number =
                (1..=2).contains(&part.len()) && part.bytes().all(|c| c.is_ascii_digit());
            part.parse::<u16>().ok().filter(|_| is_number)
        };
        let parts = text.split_once(':').and_then(|(hours, minutes)| {
            digits(hours).zip(digits(minutes).filter(|_| minutes.len() == 2))
        });
        let help = "write hours and minutes from \"00:00\" to \"24:00\", such as \"20:00\"";
        let (hours, minutes) = parts.ok_or_else(|| Malformed::new("no time of day", help))?;
        let is_one = hours < 24 && minutes < 60 || (hours, minutes) == (24, 0);
        is_one
            .then_some(Self(hours * 60 + minutes))
            .ok_or_else(|| Malformed::new("beyond the end of a day", help))
    }

    /// Minutes since midnight.
    pub fn minutes(self) -> u16 {
        self.0
    }
}

impl fmt::Display for TimeOfDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02}:{:02}", self.0 / 60, self.0 % 60)
    }
}

serde_as_text!(
    [] TimeOfDay, "TimeOfDay",
    TimeOfDay::parse,
    |time: &Self| time.to_string(),
    {"type": "string", "format": "time-of-day", "pattern": "^([01]?[0-9]|2[0-3]):[0-5][0-9]$|^24:00$"}
);

#[cfg(test)]
mod tests {
    use super::*;

    fn days(text: &str) -> Vec<u8> {
        DayRange::parse(text).unwrap().days().collect()
    }

    #[test]
    fn a_range_of_days_may_go_over_the_end_of_the_week() {
        assert_eq!(days("wed"), [2]);
        assert_eq!(days("mon-fri"), [0, 1, 2, 3, 4]);
        assert_eq!(days("fri-mon"), [4, 5, 6, 0]);
        assert_eq!(days("tue-mon").len(), 7);
        for text in ["", "Monday", "mon-", "-mon", "mon-fry", "1", "mon - fri"] {
            assert!(DayRange::parse(text).is_err(), "{text:?}");
        }
        assert_eq!(
            DayRange::parse("Monday").unwrap_err().help,
            "did you mean `mon`?"
        );
    }

    #[test]
    fn days_are_written_in_one_way_however_they_were_said() {
        let said = |text: &str| serde_json::from_str::<Weekdays>(text).unwrap();
        let written = |days: Weekdays| serde_json::to_string(&days).unwrap();
        assert_eq!(
            written(said(r#"["sat","mon-wed","thu"]"#)),
            r#"["mon-thu","sat"]"#
        );
        assert_eq!(written(said(r#"["fri-mon"]"#)), r#"["mon","fri-sun"]"#);
        assert_eq!(said(r#"["fri-mon"]"#), said(r#"["mon","fri-sun"]"#));
    }

    #[test]
    fn a_time_of_day_has_hours_and_minutes() {
        let minutes = |text: &str| TimeOfDay::parse(text).map(TimeOfDay::minutes);
        assert_eq!(
            (minutes("00:00"), minutes("6:05"), minutes("24:00")),
            (Ok(0), Ok(365), Ok(MINUTES_PER_DAY))
        );
        for text in [
            "24:01", "25:00", "12:60", "12", "12:5", "12:00:00", "8pm", "+1:00", "-1:00", "",
        ] {
            assert!(minutes(text).is_err(), "{text:?}");
        }
    }
}

//! A week of one service from Monday on, as rates by the minute: a trace in steps of some minutes (`service`, `day0_utc`,
//! `minute_of_week`, `req_per_min_low`, `req_per_min_high`), or the built-in working day.

use super::built_in::working_day;
use super::day::MINUTES;
use super::{RequestSize, Service, TrafficError, TrafficText};
use crate::simulate::table::{Table, TableError};
use jiff::civil::Date;
use stowage_scheduling::testkit::random::Random;

pub const WEEK_MINUTES: usize = 7 * MINUTES;
const MAX_REQUESTS: f64 = 1e9;
/// What a Saturday or Sunday of the built-in week has of a working day.
const WEEKEND_SHARE: f64 = 0.3;

/// Requests of each minute; where a step has a range of them, each minute is drawn from it.
pub fn read(
    source: TrafficText<'_>,
    service: Service,
    draws: &mut Random,
) -> Result<Vec<f64>, TrafficError> {
    let table = Table::read(source)?;
    let [name, day, minute, low, high] = table.columns([
        "service",
        "day0_utc",
        "minute_of_week",
        "req_per_min_low",
        "req_per_min_high",
    ])?;
    let mut steps: Vec<(f64, f64, f64)> = Vec::new();
    let mut first_day = 0;
    for row in table.rows() {
        if Service::from_row(row, name)? != service {
            continue;
        }
        let date: Result<Date, _> = row.text(day).parse();
        let date = date.map_err(|_| TableError::NoNumber {
            file: row.file.into(),
            line: row.line,
            column: day.name(),
            text: row.text(day).into(),
            wanted: "a day, such as 2024-05-10",
        })?;
        first_day = date.weekday().to_monday_zero_offset() as usize;
        // A label may be the end of the week's last step.
        let at = row.number(minute, 2.0 * WEEK_MINUTES as f64)?;
        let (low, high) = (
            row.number(low, MAX_REQUESTS)?,
            row.number(high, MAX_REQUESTS)?,
        );
        steps.push((at, low, high));
    }
    if steps.is_empty() {
        return Err(TrafficError::NoService {
            file: table.file.to_owned(),
            service: service.name(),
            found: "none of it".into(),
        });
    }
    steps.sort_by(|one, other| one.0.total_cmp(&other.0));
    let minute = |minute: usize| {
        let at = (minute + WEEK_MINUTES - first_day * MINUTES) % WEEK_MINUTES;
        let step = steps.partition_point(|step| step.0 < at as f64);
        let (_, low, high) = steps[step.min(steps.len() - 1)];
        low + (high - low) * draws.unit_interval()
    };
    Ok((0..WEEK_MINUTES).map(minute).collect())
}

/// Five working days, and two on which few work; the busiest minute of each working day is 1.
pub(crate) fn built_in(seed: u64, size: RequestSize) -> Vec<f64> {
    let day = |day: u64| {
        let share = if day < 5 { 1.0 } else { WEEKEND_SHARE };
        let minutes = working_day(seed.wrapping_mul(7).wrapping_add(day), 1.0 / 60.0, size);
        let minutes: Vec<f64> = minutes.minutes().iter().map(|it| it.requests).collect();
        minutes.into_iter().map(move |requests| requests * share)
    };
    (0..7).flat_map(day).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_week_that_begins_on_a_friday_is_turned_so_that_it_begins_on_a_monday() {
        let text = "service,day0_utc,minute_of_week,req_per_min_low,req_per_min_high\n\
                    code,2024-05-10,1440,5,5\ncode,2024-05-10,10080,1,1\nconv,2024-05-10,10080,9,9\n";
        let source = TrafficText {
            file: "week.csv",
            text,
        };
        let mut draws = Random::seeded(1, 1);
        let week = read(source, Service::Code, &mut draws).unwrap();
        assert_eq!(week.len(), WEEK_MINUTES);
        assert_eq!(
            (week[0], week[4 * MINUTES + 5], week[5 * MINUTES + 5]),
            (1.0, 5.0, 1.0)
        );
        let wrong = text.replace("2024-05-10,1440", "Friday,1440");
        let source = TrafficText {
            file: "week.csv",
            text: &wrong,
        };
        let error = read(source, Service::Code, &mut draws).unwrap_err();
        assert!(
            error.to_string().contains("day0_utc is \"Friday\""),
            "{error}"
        );
    }
}

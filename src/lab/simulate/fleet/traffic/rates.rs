//! Traces of rates without tokens: a week in steps of 7.2 minutes, and a profile of the hours of a day. The size of a request is
//! the reader's to say.

use super::day::{DayOfTraffic, MINUTES, Minute};
use super::{RequestSize, Service, TrafficError, TrafficText};
use crate::simulate::table::Table;
use stowage_scheduling::testkit::random::Random;

const MOST_RATE: f64 = 1e9;
const WEEK: f64 = 7.0 * MINUTES as f64;
const HOURS: usize = 24;
/// What the numbers drawn here are for; see [`Random::seeded`].
const PURPOSE: u64 = 64;

/// One step of the week.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct WeekStep {
    /// At its end, in minutes since the week's start.
    pub minute: f64,
    /// Requests a minute: the quietest and the busiest minute of the step, and the middle.
    pub low: f64,
    pub high: f64,
    pub mid: f64,
}

/// A week of one service's rates.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct WeekOfRates {
    /// In order of time.
    pub steps: Vec<WeekStep>,
}

/// `service`, `minute_of_week`, `req_per_min_low`, `req_per_min_high`, `req_per_min_mid`.
pub(crate) fn read_week(source: TrafficText<'_>, service: Service) -> Result<WeekOfRates, TrafficError> {
    let table = Table::read(source)?;
    let (of, minute) = (table.column("service")?, table.column("minute_of_week")?);
    let (low, high, mid) = (
        table.column("req_per_min_low")?,
        table.column("req_per_min_high")?,
        table.column("req_per_min_mid")?,
    );
    let mut steps: Vec<(usize, WeekStep)> = Vec::new();
    for row in table.rows() {
        let high_of_step = row.number(high, MOST_RATE)?;
        let step = WeekStep {
            minute: row.number(minute, WEEK)?,
            low: row.number(low, high_of_step)?,
            high: high_of_step,
            mid: row.number(mid, high_of_step)?,
        };
        if Service::of(row, of)? == service {
            steps.push((row.line, step));
        }
    }
    steps.sort_by(|(_, a), (_, b)| a.minute.total_cmp(&b.minute));
    let (file, service) = (table.file.to_owned(), service.name());
    if steps.is_empty() {
        let found = if service == "code" { "conv" } else { "code" }.to_owned();
        return Err(TrafficError::NoService { file, service, found });
    }
    if let Some(pair) = steps.windows(2).find(|pair| pair[0].1.minute == pair[1].1.minute) {
        let (first, line, at) = (pair[0].0, pair[1].0, pair[1].1.minute as u64);
        return Err(TrafficError::Twice { file, line, first, column: "minute_of_week", at, service });
    }
    Ok(WeekOfRates { steps: steps.into_iter().map(|(_, step)| step).collect() })
}

impl WeekOfRates {
    pub fn requests(&self) -> f64 {
        let length = WEEK / self.steps.len() as f64;
        self.steps.iter().map(|step| step.mid * length).sum()
    }

    /// One day of it, 0 to 6: each minute is drawn between the quietest and the busiest of its step.
    pub fn day(&self, day: usize, size: RequestSize, seed: u64) -> DayOfTraffic {
        let mut random = Random::seeded(seed, PURPOSE);
        let minute = |minute: usize| {
            let at = ((day % 7) * MINUTES + minute) as f64;
            let place = self.steps.partition_point(|step| step.minute <= at).min(self.steps.len() - 1);
            let step = self.steps[place];
            let requests = step.low + (step.high - step.low) * random.share();
            Minute { requests, prompt: size.prompt, output: size.output }
        };
        DayOfTraffic::new((0..MINUTES).map(minute).collect()).expect("a day has minutes")
    }
}

/// How busy each hour of a day is, as a share of the mean.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct HourProfile(pub [f64; HOURS]);

/// `hour_local`, `relative_to_mean`.
pub(crate) fn read_hours(source: TrafficText<'_>) -> Result<HourProfile, TrafficError> {
    let table = Table::read(source)?;
    let (hour, relative) = (table.column("hour_local")?, table.column("relative_to_mean")?);
    let mut hours: [Option<(usize, f64)>; HOURS] = [None; HOURS];
    let (column, service) = ("hour_local", "the profile");
    for row in table.rows() {
        let at = row.whole(hour, HOURS as u64 - 1)?;
        let (line, share) = (row.line, row.number(relative, HOURS as f64)?);
        if let Some((first, _)) = hours[at as usize].replace((line, share)) {
            return Err(TrafficError::Twice { file: table.file.into(), line, first, column, at, service });
        }
    }
    if let Some(at) = hours.iter().position(Option::is_none) {
        let missing = hours.iter().filter(|hour| hour.is_none()).count();
        let (file, at) = (table.file.into(), at as u64);
        return Err(TrafficError::Gap { file, column, at, missing, service });
    }
    Ok(HourProfile(hours.map(|hour| hour.map_or(0.0, |(_, share)| share))))
}

impl HourProfile {
    /// A day with so many requests a second on average. A rate goes from the middle of an hour to that of the next in a line.
    pub fn day(&self, mean_per_s: f64, size: RequestSize) -> DayOfTraffic {
        let minute = |minute: usize| {
            let since_middle = (minute + MINUTES - 30) % MINUTES;
            let (hour, way) = (since_middle / 60, (since_middle % 60) as f64 / 60.0);
            let share = self.0[hour] + (self.0[(hour + 1) % HOURS] - self.0[hour]) * way;
            Minute { requests: share * mean_per_s * 60.0, prompt: size.prompt, output: size.output }
        };
        DayOfTraffic::new((0..MINUTES).map(minute).collect()).expect("a day has minutes")
    }
}

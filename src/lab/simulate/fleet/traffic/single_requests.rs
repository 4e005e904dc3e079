//! Traces with a row for each request: `offset_ms`, `prompt_tokens`, `output_tokens`; with `service` where there are several,
//! and with `prefix_blocks` and `cached_prefix_blocks` where prefixes are known.

#[cfg(test)]
use super::day::{DayOfTraffic, Minute};
use super::{Service, TrafficError, TrafficText};
use crate::simulate::table::Table;
use stowage_scheduling::units::Moment;

/// The latest offset that a trace may have, in milliseconds: a year.
const MAX_OFFSET_MS: u64 = 365 * 86_400_000;
const MAX_TOKENS: u64 = 1_000_000_000;

/// One request of a trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TracedRequest {
    /// Time since the trace's start.
    pub at: Moment,
    /// `None` in a trace of one service.
    pub service: Option<Service>,
    pub prompt: u64,
    pub output: u64,
    /// The share of its prompt that an earlier request had, too, with an infinite prefix cache; 0 where the trace does not say.
    pub cached: f64,
}

/// All requests of a file, of each service in order of time.
pub fn read(source: TrafficText<'_>) -> Result<Vec<TracedRequest>, TrafficError> {
    let table = Table::read(source)?;
    let [offset, prompt, output] =
        table.columns(["offset_ms", "prompt_tokens", "output_tokens"])?;
    let service = table.column_if_any("service");
    let blocks = table
        .column_if_any("prefix_blocks")
        .zip(table.column_if_any("cached_prefix_blocks"));
    let mut latest = [0u64; 3];
    let mut requests = Vec::with_capacity(table.rows().len());
    for row in table.rows() {
        let at = row.whole(offset, MAX_OFFSET_MS)?;
        let service = service
            .map(|column| Service::from_row(row, column))
            .transpose()?;
        let before = &mut latest[service.map_or(2, |service| service as usize)];
        if at < *before {
            let (file, line, before) = (table.file.to_owned(), row.line, *before);
            return Err(TrafficError::Backwards {
                file,
                line,
                at,
                before,
            });
        }
        *before = at;
        let cached = match blocks {
            Some((all, cached)) => {
                let all = row.number(all, MAX_TOKENS as f64)?;
                row.number(cached, all)? / all.max(1.0)
            }
            None => 0.0,
        };
        requests.push(TracedRequest {
            at: Moment(at),
            service,
            prompt: row.whole(prompt, MAX_TOKENS)?,
            output: row.whole(output, MAX_TOKENS)?,
            cached,
        });
    }
    Ok(requests)
}

/// The requests by minute, from the trace's start to its last one. Prompts count without what a prefix cache would have had, if
/// asked for. `None` without a request.
#[cfg(test)]
pub(crate) fn by_minute(
    requests: impl IntoIterator<Item = TracedRequest>,
    with_prefix_cache: bool,
) -> Option<DayOfTraffic> {
    let mut minutes: Vec<Minute> = Vec::new();
    for request in requests {
        let minute_index = (request.at.0 / 60_000) as usize;
        if minutes.len() <= minute_index {
            minutes.resize(minute_index + 1, Minute::default());
        }
        let minute = &mut minutes[minute_index];
        let cached = if with_prefix_cache {
            request.cached
        } else {
            0.0
        };
        minute.requests += 1.0;
        minute.prompt += (request.prompt as f64 * (1.0 - cached)).max(1.0);
        minute.output += request.output.max(1) as f64;
    }
    for minute in &mut minutes {
        let requests = minute.requests.max(1.0);
        (minute.prompt, minute.output) = (minute.prompt / requests, minute.output / requests);
    }
    DayOfTraffic::new(minutes)
}

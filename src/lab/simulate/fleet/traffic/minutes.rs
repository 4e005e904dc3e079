//! A day by minute and service: `minute`, `service`, `requests`, `prompt_tokens`, `output_tokens`, the tokens in sums.

use super::day::{DayOfTraffic, MINUTES, Minute};
use super::{Gaps, Service, TrafficError, TrafficText};
use crate::simulate::table::Table;

const MAX_REQUESTS: f64 = 1e9;
const MAX_TOKENS: f64 = 1e15;

/// A minute's row: its line, and what it says.
type MinuteRow = Option<(usize, Minute)>;

/// The day of one service.
pub fn read(
    source: TrafficText<'_>,
    service: Service,
    gaps: Gaps,
) -> Result<DayOfTraffic, TrafficError> {
    let table = Table::read(source)?;
    let file = table.file.to_owned();
    let [minute, service_column, requests, prompt, output] = table.columns([
        "minute",
        "service",
        "requests",
        "prompt_tokens",
        "output_tokens",
    ])?;
    let mut found: Vec<MinuteRow> = vec![None; MINUTES];
    for row in table.rows() {
        let at = row.whole(minute, MINUTES as u64 - 1)?;
        let (line, name) = (row.line, Service::from_row(row, service_column)?);
        let requests = row.number(requests, MAX_REQUESTS)?;
        let (prompt, output) = (
            row.number(prompt, MAX_TOKENS)?,
            row.number(output, MAX_TOKENS)?,
        );
        if requests > 0.0 && (prompt < requests || output < requests)
            || requests == 0.0 && prompt + output > 0.0
        {
            return Err(TrafficError::Tokens {
                file,
                line,
                requests,
                prompt,
                output,
            });
        }
        if name != service {
            continue;
        }
        let per_request = |tokens: f64| {
            if requests > 0.0 {
                tokens / requests
            } else {
                0.0
            }
        };
        let row = Minute {
            requests,
            prompt: per_request(prompt),
            output: per_request(output),
        };
        if let Some((first, _)) = found[at as usize].replace((line, row)) {
            return Err(TrafficError::Twice {
                file,
                line,
                first,
                column: "minute",
                at,
                service: service.name(),
            });
        }
    }
    without_gaps(file, service, gaps, &found)
}

fn without_gaps(
    file: String,
    service: Service,
    gaps: Gaps,
    found: &[MinuteRow],
) -> Result<DayOfTraffic, TrafficError> {
    let service = service.name();
    let missing = found.iter().filter(|minute| minute.is_none()).count();
    if missing == found.len() {
        let other = if service == "code" { "conv" } else { "code" };
        return Err(TrafficError::NoService {
            file,
            service,
            found: other.to_owned(),
        });
    }
    if let (Gaps::Refuse, Some(at)) = (gaps, found.iter().position(Option::is_none)) {
        return Err(TrafficError::Gap {
            file,
            column: "minute",
            at: at as u64,
            missing,
            service,
        });
    }
    let minutes = (0..found.len()).map(|at| interpolated(found, at)).collect();
    Ok(DayOfTraffic::new(minutes).expect("a day has minutes"))
}

/// A minute that is missing is the mean of the two beside the gap, as near as each is; at an end of the day, the one there is.
fn interpolated(found: &[MinuteRow], at: usize) -> Minute {
    let row_at = |index: usize| found[index].map(|(_, minute)| (index, minute));
    let before = (0..=at).rev().find_map(row_at);
    let after = (at..found.len()).find_map(row_at);
    let (Some((first, a)), Some((last, b))) = (before, after) else {
        return before
            .or(after)
            .map_or(Minute::default(), |(_, minute)| minute);
    };
    if first == last {
        return a;
    }
    let weight = (at - first) as f64 / (last - first) as f64;
    let mean = |a: f64, b: f64| a + (b - a) * weight;
    Minute {
        requests: mean(a.requests, b.requests),
        prompt: mean(a.prompt, b.prompt),
        output: mean(a.output, b.output),
    }
}

//! An explanation as it would have been at a time in the past: the recording is replayed up to there.

use crate::cli::replay::source::RecordingSource;
use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use std::io::Write;
use std::path::Path;
use std::time::Duration;
use stowage_policy_file::format;
use stowage_recording::entry::{Entry, SegmentHeader};
use stowage_recording::read::RecordingPart;
use stowage_recording::replay::Replay;
use stowage_scheduling::explaining::{Explanation, ShownNodes, explain};
use stowage_scheduling::ids::PodKey;
use stowage_scheduling::units::{Millis, Moment};

/// A recording that ends before `--at` by less than this is one up to now.
const END_TOLERANCE: Millis = Millis::seconds(5);

/// What explain says of the pod on the state that the recording had at this time; without one, at its end. Warns if that is
/// earlier.
pub fn explain_recording(
    path: &Path,
    at: Option<Timestamp>,
    pod: &PodKey,
    options: &ShownNodes,
) -> Result<Explanation> {
    let mut replay = Replay::default();
    if let (Some(end), Some(at)) = (
        replay_until(&mut replay, RecordingSource::open(path)?, at)?,
        at,
    ) {
        writeln!(
            std::io::stderr(),
            "warning: nothing is recorded from {end} to --at {at}: this is the state before that"
        )?;
    }
    let then = at.map_or("at its end".to_owned(), |at| format!("at {at}"));
    let Some(cluster) = replay.cluster() else {
        bail!("the recording has nothing {then}")
    };
    let mut cluster = cluster.copy();
    let uid = cluster.ledger().uid_of(pod);
    uid.and_then(|uid| explain(&mut cluster, &uid, options)).with_context(|| {
        format!(
            "the recording has no pod {pod} {then}; `stowage replay RECORDING` prints which time it covers, for --at"
        )
    })
}

/// Replays up to a time; returns when the recording ends, if that is earlier.
fn replay_until(
    replay: &mut Replay,
    mut source: RecordingSource,
    at: Option<Timestamp>,
) -> Result<Option<Timestamp>> {
    // The same moment on the clock of the present segment, and what its clock showed last.
    let (mut until, mut latest) = (None, None);
    while let Some(part) = source.next() {
        let part = part?;
        match (&part, at) {
            (RecordingPart::Segment(header), Some(at)) => {
                let before = (until, latest);
                until = moment_in(header, at);
                if until.is_none() && replay.cluster().is_none() {
                    let begins = Timestamp::from_millisecond(header.wall_ms).unwrap_or_default();
                    bail!("the recording begins at {begins}, after --at {at}");
                }
                if until.is_none() {
                    return Ok(end_if_earlier(at, before));
                }
                latest = Some(header.began);
            }
            (RecordingPart::Entry(Entry::Clock(now)), Some(_))
                if until.is_some_and(|until| *now > until) =>
            {
                return Ok(None);
            }
            (RecordingPart::Entry(Entry::Clock(now)), _) => latest = Some(*now),
            _ => {}
        }
        replay
            .step(part)
            .with_context(|| source.name().to_owned())?;
    }
    Ok(at.and_then(|at| end_if_earlier(at, (until, latest))))
}

/// When what was recorded up to a time ends, if that is earlier: by the time and by the last moment, both on the recording's clock.
fn end_if_earlier(
    at: Timestamp,
    (until, latest): (Option<Moment>, Option<Moment>),
) -> Option<Timestamp> {
    let early = until?.since(latest?);
    (early > END_TOLERANCE).then(|| at - Duration::from_millis(early.0))
}

/// The time on the clock of this segment; `None` if that begins later.
fn moment_in(header: &SegmentHeader, at: Timestamp) -> Option<Moment> {
    let since = at.as_millisecond().checked_sub(header.wall_ms)?;
    Some(header.began + Millis(u64::try_from(since).ok()?))
}

pub fn time(text: &str) -> Result<Timestamp, String> {
    format::parse_timestamp(text).map_err(|malformed| malformed.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_moment_of_the_segment_that_had_begun_by_then() {
        let header = SegmentHeader {
            stowage: "0".into(),
            wall_ms: 1_000_000,
            began: Moment(77),
        };
        let at = |millis| moment_in(&header, Timestamp::from_millisecond(millis).unwrap());
        assert_eq!(
            (at(1_000_000), at(1_000_500), at(999_999)),
            (Some(Moment(77)), Some(Moment(577)), None)
        );
    }
}

//! Formats where models are as tables.

use crate::cli::output::Columns;
use stowage_scheduling::explaining::models::{
    ModelCounts, ModelList, ModelLocation, ModelLocationState, ModelLocations,
};
use stowage_scheduling::explaining::units::human_duration;
use stowage_scheduling::ids::GpuUuid;
use stowage_scheduling::units::Millis;

/// UUIDs up to this length are shown whole; NVML's have 40 characters.
const WHOLE_UUID: usize = 16;

/// One model: a sentence, and a row for each place.
pub fn model_table(located: &ModelLocations, columns: Columns) -> String {
    let weights = located
        .weights_bytes
        .map_or("weights of unknown size".into(), |bytes| {
            format!("{bytes} of weights")
        });
    let mut text = format!(
        "{}: {weights}; {}\n",
        located.model,
        counts_text(&located.counts)
    );
    if let (Some(ready), true) = (located.absent_ready_in_millis, located.counts.absent > 0) {
        text += &format!(
            "Where nothing of it is, a new pod would answer after {}.\n",
            human_duration(ready)
        );
    }
    if !located.locations.is_empty() {
        let rows = located.locations.iter().map(location_row);
        text += &columns.table(
            &["NODE", "STATE", "READY IN", "SEEN", "GPUS", "POD"],
            rows,
            &[],
        );
    }
    columns.wrap(&text) + &continuation(located.next.as_ref().map(ToString::to_string))
}

/// All models: a row for each.
pub fn models_table(list: &ModelList, columns: Columns) -> String {
    if list.models.is_empty() {
        return "No agent reports a model.\n".into();
    }
    let header = [
        "MODEL",
        "RESIDENT",
        "ASLEEP",
        "LOADING",
        "PAGE CACHE",
        "DISK",
        "PARTIAL",
        "ABSENT",
    ];
    let rows = list.models.iter().map(|summary| {
        let counts = summary
            .counts
            .by_state()
            .map(|(_, count)| count.to_string());
        let name = std::iter::once(summary.model.to_string());
        name.chain(counts)
            .chain([summary.counts.absent.to_string()])
            .collect()
    });
    columns.table(&header, rows, &[1, 2, 3, 4, 5, 6, 7])
        + &continuation(list.next.as_ref().map(ToString::to_string))
}

fn location_row(location: &ModelLocation) -> Vec<String> {
    let level = location
        .sleep_level
        .map_or(String::new(), |level| format!(" (level {level})"));
    let reuse = if location.reusable_in.is_some() {
        ", reusable"
    } else {
        ""
    };
    let ask = if location.wakeable == Some(false) {
        ", ask first"
    } else {
        ""
    };
    let uid = || location.pod_uid.as_ref().map(|uid| format!("UID {uid}"));
    vec![
        location.node.to_string(),
        format!("{}{level}{reuse}{ask}", state_name(location.state)),
        location
            .ready_in_millis
            .map_or("unknown".into(), ready_text),
        format!("{} ago", human_duration(location.age_millis)),
        location
            .gpus
            .iter()
            .map(short_uuid)
            .collect::<Vec<_>>()
            .join(" "),
        location
            .pod
            .as_ref()
            .map(ToString::to_string)
            .or_else(uid)
            .unwrap_or_default(),
    ]
}

fn ready_text(time: Millis) -> String {
    if time == Millis::default() {
        "now".into()
    } else {
        human_duration(time)
    }
}

/// The first part of a long UUID, which tells the GPUs of a node apart.
fn short_uuid(uuid: &GpuUuid) -> String {
    if uuid.as_str().len() <= WHOLE_UUID {
        return uuid.to_string();
    }
    uuid.as_str()
        .split_inclusive('-')
        .take(2)
        .collect::<String>()
        .trim_end_matches('-')
        .to_owned()
}

fn state_name(state: ModelLocationState) -> &'static str {
    match state {
        ModelLocationState::Resident => "resident",
        ModelLocationState::Asleep => "asleep",
        ModelLocationState::Loading => "loading",
        ModelLocationState::PageCache => "page cache",
        ModelLocationState::Disk => "disk",
        ModelLocationState::Partial => "partial",
    }
}

/// `1 resident, 2 asleep, 40 disk; nothing of it on 900 nodes; 3 nodes do not report`.
fn counts_text(counts: &ModelCounts) -> String {
    let there = counts
        .by_state()
        .into_iter()
        .filter(|(_, count)| *count > 0);
    let there: Vec<String> = there
        .map(|(state, count)| format!("{count} {}", state_name(state)))
        .collect();
    let there = if there.is_empty() {
        "nowhere".into()
    } else {
        there.join(", ")
    };
    let absent = match counts.absent {
        0 => String::new(),
        1 => "; nothing of it on 1 node".into(),
        absent => format!("; nothing of it on {absent} nodes"),
    };
    let unknown = match counts.unknown {
        0 => String::new(),
        1 => "; 1 node does not report".into(),
        unknown => format!("; {unknown} nodes do not report"),
    };
    format!("{there}{absent}{unknown}")
}

fn continuation(next: Option<String>) -> String {
    next.map_or(String::new(), |next| format!("More with --after {next}\n"))
}

//! Names what a report lacks, for people.

use stowage_report::{MissingPart, ReportPart};

/// What is missing, and why.
pub fn missing_line(missing: &MissingPart) -> String {
    format!("{}: {}", part_name(missing.part), missing.reason)
}

/// The name of a report's part.
pub fn part_name(part: ReportPart) -> &'static str {
    match part {
        ReportPart::Gpus => "GPUs",
        ReportPart::Processes => "processes on the GPUs",
        ReportPart::Owners => "the pods of processes",
        ReportPart::Pods => "pods of this node",
        ReportPart::Engines => "engines",
        ReportPart::Models => "models",
        ReportPart::Limits => "VRAM limits of containers",
        ReportPart::Other => "something",
    }
}

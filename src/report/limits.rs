//! Limits of a report. The agent cuts its report to them, and the extender rejects a report that exceeds them.

use super::{MissingPart, NodeReport, ReportPart};
use serde::Serialize;
use std::collections::BTreeSet;
use stowage_scheduling::units::Millis;
use stowage_scheduling::vocabulary::demand::MAX_GPUS;

/// A UUID has 36 bytes; several are kept for each node.
pub const MAX_BOOT_ID_BYTES: usize = 128;
/// GPUs and the cards they are cut from: no card is listed without at least one slice in its place.
pub const MAX_LISTED_GPUS: usize = 2 * MAX_GPUS as usize;
/// Over all GPUs. A kernel's default limit on PIDs is 32,768, and few of those reach a GPU.
pub const MAX_PROCESSES: usize = 4096;
/// Of one GPU: twice the pods that a node has by Kubernetes' own advice.
pub const MAX_CGROUPS: usize = 512;
/// A node has at most 250 pods by Kubernetes' own advice, and some have two engines.
pub const MAX_ENGINES: usize = 512;
/// Some twenty models a terabyte: more than a node's whole disk.
pub const MAX_MODELS: usize = 4096;
/// Two for each pod of a full node.
pub const MAX_FINDINGS: usize = 512;
/// Each part once, and some for later versions.
pub const MAX_MISSING: usize = 64;
/// Tokens per second of one engine: a thousand times what a node of eight GPUs generates.
pub const MAX_TOKEN_RATE: f64 = 1e9;
/// A reason is a sentence.
pub const MAX_TEXT_BYTES: usize = 1024;
/// The whole report as JSON. Ordinary nodes report some kilobytes; all the limits above reached at once would be several times
/// this.
pub const MAX_BYTES: usize = 1 << 20;
/// An hour: older figures say nothing about the node as it is, and an agent that cannot sample reports that.
pub const MAX_AGE: Millis = Millis::seconds(3600);

impl NodeReport {
    /// Cuts what exceeds the limits and lists it under `missing`: a folder with an odd name must not cost the node its report.
    pub fn truncate_to_limits(&mut self) {
        let mut cut = Vec::new();
        shorten(&mut self.models, MAX_MODELS, ReportPart::Models, &mut cut);
        shorten(
            &mut self.engines,
            MAX_ENGINES,
            ReportPart::Engines,
            &mut cut,
        );
        shorten(&mut self.unread, MAX_ENGINES, ReportPart::Engines, &mut cut);
        shorten(
            &mut self.findings,
            MAX_FINDINGS,
            ReportPart::Other,
            &mut cut,
        );
        shorten(
            &mut self.unrecorded,
            MAX_FINDINGS,
            ReportPart::Other,
            &mut cut,
        );
        let mut remaining = MAX_PROCESSES;
        for gpu in self.gpus.iter_mut().flatten() {
            if let Some(processes) = &mut gpu.processes {
                shorten(processes, remaining, ReportPart::Processes, &mut cut);
                remaining -= processes.len();
            }
            shorten(&mut gpu.cgroups, MAX_CGROUPS, ReportPart::Limits, &mut cut);
            gpu.health_reason.iter_mut().for_each(sanitize);
        }
        self.engines
            .iter_mut()
            .filter_map(|engine| engine.problem.as_mut())
            .for_each(sanitize);
        self.unread
            .iter_mut()
            .for_each(|unread| sanitize(&mut unread.reason));
        self.record_cut(cut);
        self.missing
            .iter_mut()
            .for_each(|missing| sanitize(&mut missing.reason));
        self.truncate_to_size();
    }

    /// Halves the longest of the expendable lists until the report fits, and records it. There are so few GPUs that they always
    /// fit.
    fn truncate_to_size(&mut self) {
        if json_size(self) <= MAX_BYTES {
            return;
        }
        let mut cut = BTreeSet::new();
        while json_size(self) > MAX_BYTES - MISSING_PARTS_RESERVE {
            let processes = |report: &Self| -> usize {
                report
                    .gpus
                    .iter()
                    .flatten()
                    .map(|gpu| json_size(&gpu.processes) + json_size(&gpu.cgroups))
                    .sum()
            };
            let sizes = [
                (json_size(&self.models), ReportPart::Models),
                (json_size(&self.findings), ReportPart::Other),
                (processes(self), ReportPart::Processes),
                (json_size(&self.engines), ReportPart::Engines),
                (json_size(&self.unread), ReportPart::Engines),
                (json_size(&self.unrecorded), ReportPart::Other),
                (json_size(&self.missing), ReportPart::Other),
            ];
            let longest = (0..sizes.len())
                .max_by_key(|index| sizes[*index].0)
                .unwrap_or(0);
            match longest {
                0 => self.models.truncate(self.models.len() / 2),
                1 => self.findings.truncate(self.findings.len() / 2),
                2 => self.gpus.iter_mut().flatten().for_each(|gpu| {
                    gpu.cgroups.truncate(gpu.cgroups.len() / 2);
                    if let Some(list) = &mut gpu.processes {
                        list.truncate(list.len() / 2);
                    }
                }),
                3 => self.engines.truncate(self.engines.len() / 2),
                4 => self.unread.truncate(self.unread.len() / 2),
                5 => self.unrecorded.truncate(self.unrecorded.len() / 2),
                _ => self.missing.truncate(self.missing.len() / 2),
            }
            cut.insert(sizes[longest].1);
        }
        let reason = || format!("not all of it fits: a report has at most {MAX_BYTES} bytes");
        self.record_cut(cut.into_iter().map(|part| MissingPart {
            part,
            reason: reason(),
        }));
    }

    /// Records cut parts first in `missing`: a part that is not listed there would be read as absent from the node.
    fn record_cut(&mut self, cut: impl IntoIterator<Item = MissingPart>) {
        self.missing.splice(0..0, cut);
        self.missing.truncate(MAX_MISSING);
    }
}

/// Reserve for the entries about cut parts.
const MISSING_PARTS_RESERVE: usize = 1024;

/// Bytes of a value as JSON.
fn json_size(value: &impl Serialize) -> usize {
    struct ByteCounter(usize);
    impl std::io::Write for ByteCounter {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut counted = ByteCounter(0);
    serde_json::to_writer(&mut counted, value).expect("a report is plain data");
    counted.0
}

fn shorten<T>(list: &mut Vec<T>, most: usize, part: ReportPart, cut: &mut Vec<MissingPart>) {
    if list.len() > most {
        let reason = format!(
            "there are {}; a report takes no more than {most}",
            list.len()
        );
        cut.push(MissingPart { part, reason });
        list.truncate(most);
    }
}

/// Makes a text one line within the limits. A name from a disk or a metrics page may contain anything.
fn sanitize(text: &mut String) {
    if text.chars().any(char::is_control) {
        *text = text
            .chars()
            .map(|c| if c.is_control() { '\u{fffd}' } else { c })
            .collect();
    }
    text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_report_at_all_its_limits_is_cut_to_size_and_lists_what_is_missing() {
        let text = "x".repeat(MAX_TEXT_BYTES);
        let uid = "12345678-1234-1234-1234-123456789012";
        let gpus: Vec<_> = (0..8).map(|n| format!("GPU-{n}-{uid}")).collect();
        let process = |pid| json!({ "pid": pid, "usedBytes": 80_000_000_000_u64, "pod": uid });
        let mut report: NodeReport = serde_json::from_value(json!({
            "node": "n", "bootId": "b", "sequence": 1,
            "gpus": gpus.iter().map(|gpu| json!({
                "uuid": gpu, "index": 0, "model": "m", "totalBytes": 1, "healthReason": text,
                "processes": (0..512).map(process).collect::<Vec<_>>(),
            })).collect::<Vec<_>>(),
            "engines": (0..MAX_ENGINES).map(|_| json!({
                "pod": uid, "engine": "vllm", "gpus": gpus, "state": "serving", "problem": text,
            })).collect::<Vec<_>>(),
            "models": (0..MAX_MODELS).map(|n| json!({
                "model": format!("organization/model-{n}"), "tier": "disk", "source": text,
            })).collect::<Vec<_>>(),
            "findings": (0..MAX_FINDINGS).map(|_| json!({
                "kind": "drift", "pod": uid, "recorded": gpus, "actual": gpus,
            })).collect::<Vec<_>>(),
        }))
        .unwrap();
        assert!(json_size(&report) > 4 * MAX_BYTES);
        report.truncate_to_limits();
        assert!(
            json_size(&report) <= MAX_BYTES,
            "{} bytes",
            json_size(&report)
        );
        assert_eq!(
            report.gpus.as_ref().map(Vec::len),
            Some(8),
            "what counts most is all there"
        );
        assert!(
            report
                .missing
                .iter()
                .any(|missing| missing.part == ReportPart::Models),
            "{:?}",
            report.missing
        );
        let before = report.clone();
        report.truncate_to_limits();
        assert_eq!(report, before, "what fits stays as it is");
    }

    #[test]
    fn lists_beyond_their_limits_are_cut_and_reported() {
        let process = |pid| json!({ "pid": pid });
        let processes: Vec<_> = (0..3000).map(process).collect();
        let gpu = |uuid: &str| json!({ "uuid": uuid, "index": 0, "model": "m", "totalBytes": 1, "processes": processes });
        let model =
            |n| json!({ "model": format!("m{n}"), "tier": "disk", "source": "huggingface" });
        let mut report: NodeReport = serde_json::from_value(json!({
            "node": "n", "bootId": "b", "sequence": 1, "gpus": [gpu("GPU-a"), gpu("GPU-b")],
            "models": (0..5000).map(model).collect::<Vec<_>>(),
            "missing": [{ "part": "models", "reason": format!("\u{1b}[31m\n{}", "ä".repeat(1000)) }],
        }))
        .unwrap();
        report.truncate_to_limits();
        assert_eq!(report.models.len(), MAX_MODELS);
        let listed: Vec<usize> = report
            .gpus
            .iter()
            .flatten()
            .map(|gpu| gpu.processes.as_ref().unwrap().len())
            .collect();
        assert_eq!(listed, [3000, 1096]);
        let reasons: Vec<&str> = report
            .missing
            .iter()
            .map(|missing| missing.reason.as_str())
            .collect();
        assert_eq!(
            reasons[0],
            "there are 5000; a report takes no more than 4096"
        );
        assert_eq!(
            reasons[1],
            "there are 3000; a report takes no more than 1096"
        );
        assert!(reasons[2].len() <= MAX_TEXT_BYTES && !reasons[2].contains(char::is_control));
    }

    #[test]
    fn cut_parts_are_listed_before_other_missing_parts() {
        let odd_folder = || json!({ "part": "models", "reason": "an odd name ".repeat(80) });
        let engine = |text: &str| json!({ "pod": "p", "engine": "vllm", "gpus": [], "state": "serving", "problem": text });
        for engines in [vec![engine(""); 600], vec![engine(&"x".repeat(4000)); 512]] {
            let mut report: NodeReport = serde_json::from_value(json!({
                "node": "n", "bootId": "b", "sequence": 1, "gpus": [], "engines": engines,
                "models": (0..4000).map(|n| json!({ "model": format!("m{n}"), "tier": "disk", "source": "x".repeat(200) })).collect::<Vec<_>>(),
                "missing": (0..200).map(|_| odd_folder()).collect::<Vec<_>>(),
            }))
            .unwrap();
            let before = report.engines.len();
            report.truncate_to_limits();
            let is_said = report
                .missing
                .iter()
                .any(|missing| missing.part == ReportPart::Engines);
            assert_eq!(is_said, report.engines.len() < before);
            assert!(
                is_said || report.missing[0].reason.contains("not all of it fits"),
                "{:?}",
                report.missing[0]
            );
        }
    }
}

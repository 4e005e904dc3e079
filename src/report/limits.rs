//! How much a report may say. Who writes one keeps to it, and who reads one refuses what does not.

use super::{Missing, NodeReport, Part};
use crate::scheduling::request::MAX_GPUS;
use crate::units::Millis;

/// A UUID has 36 bytes; several are kept for each node.
pub const MAX_BOOT_ID: usize = 128;
/// GPUs and the cards they are cut from: no card is listed without at least one slice in its place.
pub const MAX_LISTED: usize = 2 * MAX_GPUS as usize;
/// Over all GPUs. A kernel's default limit on PIDs is 32,768, and few of those reach a GPU.
pub const MAX_PROCESSES: usize = 4096;
/// A node has at most 250 pods by Kubernetes' own advice, and some have two engines.
pub const MAX_ENGINES: usize = 512;
/// Some twenty models a terabyte: a node's whole disk and then some.
pub const MAX_MODELS: usize = 4096;
/// Two for each pod of a full node.
pub const MAX_FINDINGS: usize = 512;
/// Each part once, and room for those of later versions.
pub const MAX_MISSING: usize = 64;
/// A reason is a sentence.
pub const MAX_TEXT: usize = 1024;
/// An hour: what is older says nothing of the node as it is, and an agent that cannot sample says so.
pub const MAX_AGE: Millis = Millis::seconds(3600);

impl NodeReport {
    /// Cuts what is too much, and says so under `missing`: a folder with an odd name must not cost the node its report.
    pub fn keep_to_limits(&mut self) {
        let mut cut = Vec::new();
        shorten(&mut self.models, MAX_MODELS, Part::Models, &mut cut);
        shorten(&mut self.engines, MAX_ENGINES, Part::Engines, &mut cut);
        shorten(&mut self.findings, MAX_FINDINGS, Part::Other, &mut cut);
        let mut left = MAX_PROCESSES;
        for gpu in self.gpus.iter_mut().flatten() {
            if let Some(processes) = &mut gpu.processes {
                shorten(processes, left, Part::Processes, &mut cut);
                left -= processes.len();
            }
            gpu.health_reason.iter_mut().for_each(tidy);
        }
        self.engines.iter_mut().filter_map(|engine| engine.problem.as_mut()).for_each(tidy);
        self.missing.extend(cut);
        self.missing.truncate(MAX_MISSING);
        self.missing.iter_mut().for_each(|missing| tidy(&mut missing.reason));
    }
}

fn shorten<T>(list: &mut Vec<T>, most: usize, part: Part, cut: &mut Vec<Missing>) {
    if list.len() > most {
        let reason = format!("there are {}; a report takes no more than {most}", list.len());
        cut.push(Missing { part, reason });
        list.truncate(most);
    }
}

/// One line, that fits. A name from a disk or a page may have anything in it.
fn tidy(text: &mut String) {
    if text.chars().any(char::is_control) {
        *text = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    }
    text.truncate(text.floor_char_boundary(MAX_TEXT));
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_too_much_is_cut_and_said() {
        let process = |pid| json!({ "pid": pid });
        let processes: Vec<_> = (0..3000).map(process).collect();
        let gpu = |uuid: &str| json!({ "uuid": uuid, "index": 0, "model": "m", "totalBytes": 1, "processes": processes });
        let model = |n| json!({ "model": format!("m{n}"), "tier": "disk", "source": "huggingface" });
        let mut report: NodeReport = serde_json::from_value(json!({
            "node": "n", "bootId": "b", "sequence": 1, "gpus": [gpu("GPU-a"), gpu("GPU-b")],
            "models": (0..5000).map(model).collect::<Vec<_>>(),
            "missing": [{ "part": "models", "reason": format!("\u{1b}[31m\n{}", "ä".repeat(1000)) }],
        }))
        .unwrap();
        report.keep_to_limits();
        assert_eq!(report.models.len(), MAX_MODELS);
        let listed: Vec<usize> =
            report.gpus.iter().flatten().map(|gpu| gpu.processes.as_ref().unwrap().len()).collect();
        assert_eq!(listed, [3000, 1096]);
        let reasons: Vec<&str> = report.missing.iter().map(|missing| missing.reason.as_str()).collect();
        assert!(reasons[0].len() <= MAX_TEXT && !reasons[0].contains(char::is_control));
        assert_eq!(reasons[1], "there are 5000; a report takes no more than 4096");
        assert_eq!(reasons[2], "there are 3000; a report takes no more than 1096");
    }
}

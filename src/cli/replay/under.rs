//! `stowage replay --policy`, `--packing`: what would have differed under another policy, as a table.

#[cfg(feature = "lab")]
use super::picture;
use super::source::{RecordingSource, can_be_read_twice};
use crate::cli::NO_ANSWER;
use crate::cli::output::{Columns, OutputArgs};
use crate::cli::policy::policy_at;
use crate::cli::print_to_stderr;
use crate::cli::standard_input::{display_name, is_standard_input};
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
#[cfg(feature = "lab")]
use stowage_lab::picture::PictureFile;
use stowage_recording::closed_loop::comparison::{
    Comparison, LoopFigures, PodComparison, PodPlacement, PolicyComparison,
};
use stowage_recording::closed_loop::demand::RecordedDemand;
use stowage_recording::closed_loop::policies::LoopPolicy;
use stowage_recording::read::RecordingPart;
use stowage_scheduling::policy::{Mode, PackingPolicy};
use stowage_scheduling::units::{Bytes, Millis, plural};

/// The most pods whose placements the text shows; `-o json` has all.
const MAX_PODS_SHOWN: usize = 10;

#[derive(Debug, Args)]
#[command(next_help_heading = "Another policy")]
pub struct OtherPolicyArgs {
    /// Play the recorded demand under this policy, a directory of YAML files or a file, and under the recorded one, and show what
    /// differs: placements, waits, evictions, and free VRAM that no pod can use
    #[arg(long, value_name = "PATH")]
    policy: Option<PathBuf>,

    /// The same with this packing in place of what the policy says
    #[arg(long, value_enum, value_name = "PACKING")]
    packing: Option<Packing>,

    /// Draw what differs over time: allocated and stranded VRAM, and pods that wait
    #[cfg(feature = "lab")]
    #[arg(long, value_name = "FILE.svg|png")]
    plot: Option<PictureFile>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Packing {
    /// By the learned value of free VRAM
    Learned,
    /// The least VRAM left free on the GPU
    BestFit,
}

impl OtherPolicyArgs {
    pub fn is_requested(&self) -> bool {
        #[cfg(feature = "lab")]
        if self.plot.is_some() {
            return true;
        }
        self.policy.is_some() || self.packing.is_some()
    }

    pub fn run(self, recording: &Path, output: &OutputArgs) -> Result<ExitCode> {
        if !can_be_read_twice(recording) && (is_standard_input(recording) || recording.exists()) {
            bail!(
                "another policy needs the recording twice, and {} can be read once: write it to a file first",
                display_name(recording)
            );
        }
        if self.policy.is_none() && self.packing.is_none() {
            bail!("a picture shows two policies: name the other one with --policy or --packing");
        }
        let given = match &self.policy {
            None => None,
            Some(path) => match policy_at(path, None)? {
                Ok(policy) => Some(policy),
                Err(code) => return Ok(code),
            },
        };
        let packing = self.packing.map(|packing| match packing {
            Packing::Learned => PackingPolicy::Learned,
            Packing::BestFit => PackingPolicy::BestFit,
        });
        if given
            .as_ref()
            .is_some_and(|policy| policy.settings.mode == Mode::Shadow)
        {
            print_to_stderr(format_args!(
                "note: the other policy has `mode: shadow`, and is played as if it were enforced"
            ));
        }
        let other = LoopPolicy {
            replacement: given,
            packing_override: packing,
        };
        let compared = match compare(recording, other) {
            Ok(compared) => compared,
            Err(error) => {
                print_to_stderr(format_args!("error: {error:#}"));
                return Ok(ExitCode::from(NO_ANSWER));
            }
        };
        output.print(&compared, |compared, columns| {
            text(compared, &self.describe(), columns)
        })?;
        #[cfg(feature = "lab")]
        if let Some(file) = &self.plot {
            let title = format!(
                "The recorded demand under the recorded policy and under {}",
                self.describe()
            );
            file.write(&title, &picture::panels(&compared))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn describe(&self) -> String {
        let packing = self.packing.and_then(|packing| packing.to_possible_value());
        let packing = packing.map(|packing| format!("packing {}", packing.get_name()));
        let path = self.policy.as_ref().map(|path| path.display().to_string());
        [path, packing]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join(", ")
    }
}

fn compare(recording: &Path, other: LoopPolicy) -> Result<PolicyComparison> {
    let mut demand = RecordedDemand::default();
    each_part(recording, |part| Ok(demand.step(part)?))?;
    if !demand.has_begun() {
        bail!(
            "{} has no checkpoint to begin at: record with `stowage serve --record DIR`",
            recording.display()
        );
    }
    let mut comparison = Comparison::new(&demand, other);
    each_part(recording, |part| Ok(comparison.step(part)?))?;
    comparison
        .finish()
        .context("the recording was changed while it was read: run it again")
}

/// Each part, as long as `visit` goes on.
fn each_part(
    recording: &Path,
    mut visit: impl FnMut(&RecordingPart) -> Result<bool>,
) -> Result<()> {
    let mut source = RecordingSource::open(recording)?;
    while let Some(part) = source.next() {
        if !visit(&part?).with_context(|| source.name().to_owned())? {
            break;
        }
    }
    Ok(())
}

fn text(compared: &PolicyComparison, other: &str, columns: Columns) -> String {
    let PolicyComparison {
        lasted,
        stops_at_gap,
        agreement,
        pods,
        ..
    } = compared;
    let (old, new) = (&compared.recorded, &compared.other);
    let mut text = format!(
        "{} of recorded demand, played under the recorded policy and under {other}\n\n",
        DurationText(*lasted)
    );
    type Figure = fn(&LoopFigures) -> String;
    let rows: [(&str, Figure); 11] = [
        ("pods that came", |one| one.pods.to_string()),
        ("placed", |one| one.placed.to_string()),
        ("waiting at the end", |one| {
            one.waiting_at_the_end.to_string()
        }),
        ("wait, mean", |one| DurationText(one.waits.mean).to_string()),
        ("wait, p50", |one| DurationText(one.waits.p50).to_string()),
        ("wait, p99", |one| DurationText(one.waits.p99).to_string()),
        ("wait, longest", |one| {
            DurationText(one.waits.longest).to_string()
        }),
        ("evictions", |one| one.evictions.to_string()),
        ("VRAM allocated, mean", |one| {
            one.allocated_percent
                .map_or("–".into(), |part| format!("{part:.1} %"))
        }),
        ("VRAM stranded, mean", |one| gib(one.stranded)),
        ("VRAM stranded, at the end", |one| {
            gib(one.stranded_at_the_end)
        }),
    ];
    let rows = rows
        .into_iter()
        .map(|(what, figure)| vec![what.to_owned(), figure(old), figure(new)]);
    text += &columns.table(&["", "RECORDED POLICY", "OTHER POLICY"], rows, &[1, 2]);
    let differences: Vec<&PodComparison> = pods.iter().filter(|pod| pod.differs()).collect();
    text += "\n";
    text += &match differences.len() {
        0 => "Every pod has the same GPUs under both\n".to_owned(),
        n => format!(
            "{} on other GPUs, or without a place under one of them\n",
            plural(n, "pod")
        ),
    };
    let shown = differences.iter().take(MAX_PODS_SHOWN).map(
        |PodComparison {
             pod,
             recorded,
             other,
             ..
         }| vec![pod.clone(), placement_text(recorded), placement_text(other)],
    );
    if !differences.is_empty() {
        text += &columns.table(&["POD", "RECORDED POLICY", "OTHER POLICY"], shown, &[]);
    }
    if differences.len() > MAX_PODS_SHOWN {
        text += &format!(
            "and {} more: -o json has all\n",
            differences.len() - MAX_PODS_SHOWN
        );
    }
    if agreement.placements > 0 {
        text += &format!(
            "\nBoth columns are simulated. Of {} in the recording, the simulation under the recorded policy repeats {} on the same node \
             and {} on the same GPUs\n",
            plural(agreement.placements, "placement"),
            percent_text(agreement.same_node, agreement.placements),
            percent_text(agreement.same_gpus, agreement.placements),
        );
    }
    if old.pods == 0 {
        text += "No pod came: a replica on standby is not asked, so take the recording of the leader, or a longer one\n";
    }
    if *stops_at_gap {
        text += "The recording has a gap: what comes after it is not compared\n";
    }
    columns.wrap(&text)
}

fn placement_text(placement: &PodPlacement) -> String {
    let waited = DurationText(placement.waited);
    let Some(node) = &placement.node else {
        return format!("none, waited {waited}");
    };
    let evicted = match placement.evictions {
        0 => String::new(),
        n => format!(", evicted {n} ×"),
    };
    let gpus = placement
        .gpus
        .iter()
        .map(|gpu| gpu.as_str())
        .collect::<Vec<_>>()
        .join(" ");
    let gpus = if gpus.is_empty() {
        String::new()
    } else {
        format!(" {gpus}")
    };
    format!("{node}{gpus} after {waited}{evicted}")
}

fn percent_text(part: u64, of: u64) -> String {
    format!("{:.0} %", part as f64 * 100.0 / of as f64)
}

fn gib(bytes: Bytes) -> String {
    format!("{:.1} GiB", bytes.0 as f64 / Bytes::gib(1).0 as f64)
}

/// A length of time with one decimal, in the unit that suits it.
struct DurationText(Millis);

impl std::fmt::Display for DurationText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let seconds = self.0.0 as f64 / 1000.0;
        match self.0.0 {
            0..60_000 => write!(f, "{seconds:.1} s"),
            60_000..7_200_000 => write!(f, "{:.1} min", seconds / 60.0),
            _ => write!(f, "{:.1} h", seconds / 3600.0),
        }
    }
}

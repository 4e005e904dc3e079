//! The demo's output: a table of GPUs with bars that is updated in place, or plain lines without a terminal.

use super::change_tracker::{GpuView, PodChange, PodView};
use super::reported::ReportedEngines;
use owo_colors::{OwoColorize, Style};
use std::io::{self, IsTerminal, Write};
use std::time::Duration;
use stowage_report::EngineState;
use stowage_scheduling::units::Bytes;
use stowage_telemetry::wants_no_color;

const BAR_WIDTH: usize = 16;
/// Width of the engine column: `KV 97 % · 40 waiting · serving`, and a little.
const ENGINES: usize = 31;
/// Width of the column of a GPU's pods: the rest of 120 columns.
const RESIDENTS_WIDTH: usize = 41;
/// Long enough to read a chapter's two lines.
const READING_TIME: Duration = Duration::from_millis(1800);

pub(crate) struct Screen {
    out: Box<dyn Write + Send>,
    /// Why a line was not printed, where the lines are the demo's answer.
    failed: io::Result<()>,
    is_answer: bool,
    is_terminal: bool,
    /// `NO_COLOR` is not set.
    has_color: bool,
    /// The table at the bottom of the terminal.
    drawn_rows: Vec<String>,
}

impl Screen {
    pub fn stdout() -> Self {
        Self {
            is_terminal: std::io::stdout().is_terminal(),
            has_color: std::io::stdout().is_terminal() && !wants_no_color(),
            out: Box::new(std::io::stdout()),
            failed: Ok(()),
            is_answer: true,
            drawn_rows: Vec::new(),
        }
    }

    #[cfg(test)]
    pub fn unseen() -> Self {
        Self {
            is_terminal: false,
            has_color: false,
            out: Box::new(io::sink()),
            ..Self::stderr()
        }
    }

    /// For when stdout is read by a program.
    pub fn stderr() -> Self {
        Self {
            is_terminal: std::io::stderr().is_terminal(),
            has_color: std::io::stderr().is_terminal() && !wants_no_color(),
            out: Box::new(std::io::stderr()),
            failed: Ok(()),
            is_answer: false,
            drawn_rows: Vec::new(),
        }
    }

    /// An error if the reader has gone, or the disk is full: nobody watches the rest.
    pub fn check(&mut self) -> io::Result<()> {
        std::mem::replace(&mut self.failed, Ok(()))
    }

    pub fn line(&mut self, text: &str) {
        self.erase();
        self.put(text);
    }

    pub async fn chapter(&mut self, number: usize, title: &str, text: &str) {
        self.line("");
        let title = format!("{number}. {title}");
        let styled = self.paint(&title, Style::new().bold());
        self.line(&styled);
        self.line(&format!("   {text}"));
        if self.is_terminal {
            tokio::time::sleep(READING_TIME).await;
        }
    }

    /// Prints a line about something that no API object shows.
    pub fn note(&mut self, text: &str) {
        let styled = self.paint(&format!("   ~ {text}"), Style::new().bold());
        self.line(&styled);
    }

    pub fn news(&mut self, news: &PodChange) {
        let text = match news {
            PodChange::Bound(pod) => {
                let amount = Bytes(pod.granted_bytes);
                let whole = if pod.is_exclusive { ", to itself" } else { "" };
                format!(
                    "   + {:<17} {} → {}{whole}",
                    pod.name,
                    amount,
                    placement_text(pod)
                )
            }
            PodChange::Refused(pod) => {
                format!(
                    "   · {:<17} pending: {}",
                    pod.name,
                    short_refusal(pod.refusal.as_deref().unwrap_or_default())
                )
            }
            PodChange::Terminating(pod) => {
                format!("   − {:<17} evicted from {}", pod.name, placement_text(pod))
            }
            PodChange::Deleted(pod) => format!("   − {:<17} is gone", pod.name),
        };
        let style = match news {
            PodChange::Bound(_) => Style::new().green(),
            PodChange::Refused(_) => Style::new().dimmed(),
            PodChange::Terminating(_) | PodChange::Deleted(_) => Style::new().yellow(),
        };
        let styled = self.paint(&text, style);
        self.line(&styled);
    }

    /// On a terminal the table stays at the bottom and is redrawn; elsewhere nothing is drawn between chapters.
    pub fn update(&mut self, gpus: &[GpuView]) {
        if self.is_terminal {
            let rows = self.rows(gpus);
            if rows != self.drawn_rows {
                self.table(rows);
            }
        }
    }

    /// Prints the present table permanently.
    pub(crate) fn finish_chapter(&mut self, gpus: &[GpuView]) {
        let rows = self.rows(gpus);
        self.table(rows);
        self.drawn_rows.clear();
    }

    /// Lines longer than the terminal is wide are cut, not wrapped: the table's height must be known to redraw it.
    fn table(&mut self, rows: Vec<String>) {
        self.erase();
        let (cut, wrap) = if self.is_terminal {
            ("\x1b[?7l", "\x1b[?7h")
        } else {
            ("", "")
        };
        rows.iter()
            .for_each(|row| self.put(&format!("{cut}{row}{wrap}")));
        self.drawn_rows = rows;
    }

    fn rows(&self, gpus: &[GpuView]) -> Vec<String> {
        let names_node = |i: usize| i == 0 || gpus[i - 1].node != gpus[i].node;
        gpus.iter()
            .enumerate()
            .map(|(i, gpu)| self.row(gpu, names_node(i)))
            .collect()
    }

    fn row(&self, gpu: &GpuView, names_node: bool) -> String {
        let used: u64 = gpu.pods.iter().map(|(_, bytes)| bytes).sum();
        let cells = |bytes: u64| {
            ((bytes * BAR_WIDTH as u64).div_ceil(gpu.allocatable.max(1)) as usize).min(BAR_WIDTH)
        };
        let serving_bytes: u64 = gpu
            .pods
            .iter()
            .filter(|(pod, _)| !pod.is_opportunistic)
            .map(|(_, bytes)| bytes)
            .sum();
        let (firm, used_cells) = (cells(serving_bytes), cells(used));
        let bar = format!(
            "{}{}{}",
            self.paint(&"█".repeat(firm), Style::new().cyan()),
            self.paint(
                &"▒".repeat(used_cells.saturating_sub(firm)),
                Style::new().magenta()
            ),
            "·".repeat(BAR_WIDTH - used_cells.max(firm))
        );
        let node = if names_node { gpu.node } else { "" };
        let model = gpu
            .model
            .trim_start_matches("NVIDIA-")
            .split('-')
            .next()
            .unwrap_or_default();
        let amounts = format!("{:>3}/{:<2} GiB", used >> 30, gpu.allocatable >> 30);
        let engines = gpu.engines.as_ref().map(engines).unwrap_or_default();
        let is_busy = gpu
            .engines
            .as_ref()
            .is_some_and(|engines| engines.engine_load.queue > Some(0));
        let style = if is_busy {
            Style::new().red()
        } else {
            Style::new()
        };
        let engines = self.paint(&format!("{engines:<ENGINES$}"), style);
        let row = format!(
            "   {node:<7} {} {model:<5} {bar} {amounts}  {engines} {}",
            gpu.index,
            residents(gpu)
        );
        row.trim_end().to_owned()
    }

    fn erase(&mut self) {
        let up = self.drawn_rows.len();
        if up > 0 {
            // What a terminal misses, the next line tells.
            let _ = write!(self.out, "\x1b[{up}A\x1b[J");
            self.drawn_rows.clear();
        }
    }

    fn put(&mut self, line: &str) {
        let written = writeln!(self.out, "{line}").and_then(|()| self.out.flush());
        if self.is_answer && self.failed.is_ok() {
            self.failed = written;
        }
    }

    fn paint(&self, text: &str, style: Style) -> String {
        if self.has_color {
            text.style(style).to_string()
        } else {
            text.to_owned()
        }
    }
}

/// `embedder ×3, llama-8b`: the pods on a GPU, in short.
fn residents(gpu: &GpuView) -> String {
    let mut groups: Vec<(String, usize)> = Vec::new();
    for (pod, _) in &gpu.pods {
        let model = pod
            .name
            .trim_end_matches(|c: char| c.is_ascii_digit())
            .trim_end_matches('-')
            .to_owned();
        match groups.iter_mut().find(|(name, _)| *name == model) {
            Some((_, count)) => *count += 1,
            None => groups.push((model, 1)),
        }
    }
    let named = groups.into_iter().map(|(name, count)| {
        if count > 1 {
            format!("{name} ×{count}")
        } else {
            name
        }
    });
    shorten(named.collect::<Vec<_>>().join(", "), RESIDENTS_WIDTH)
}

fn shorten(mut text: String, length: usize) -> String {
    if text.chars().count() > length
        && let Some((end, _)) = text.char_indices().nth(length - 1)
    {
        text.truncate(end);
        text.push('…');
    }
    text
}

/// `KV 35 % · 0 waiting · serving`, as the agent reported it.
fn engines(engines: &ReportedEngines) -> String {
    let states = states(&engines.states);
    let serves = |state: &EngineState| {
        !matches!(
            state,
            EngineState::Starting | EngineState::Loading | EngineState::Sleeping
        )
    };
    if !engines.states.iter().any(serves) {
        return states;
    }
    let kv = engines
        .engine_load
        .kv_cache
        .map_or("?".into(), |kv| kv.get().to_string());
    let waiting = engines
        .engine_load
        .queue
        .map_or("?".into(), |queue| queue.to_string());
    format!("KV {kv} % · {waiting} waiting · {states}")
}

/// `serving`, or `2 serving, 1 loading`.
fn states(states: &[EngineState]) -> String {
    use EngineState::{Draining, Loading, Serving, Sleeping, Starting, Unreachable};
    const IN_ORDER: [EngineState; 6] =
        [Serving, Starting, Loading, Sleeping, Draining, Unreachable];
    let count = |state| states.iter().filter(|one| **one == state).count();
    let present: Vec<_> = IN_ORDER
        .map(|state| (count(state), state.into_str()))
        .into_iter()
        .filter(|(n, _)| *n > 0)
        .collect();
    match present[..] {
        [(_, word)] => word.to_owned(),
        _ => present
            .iter()
            .map(|(n, word)| format!("{n} {word}"))
            .collect::<Vec<_>>()
            .join(", "),
    }
}

/// `node-a GPU 0 and 1`
fn placement_text(pod: &PodView) -> String {
    let node = pod.node.as_deref().unwrap_or_default();
    let index = |uuid: &String| uuid.rsplit('-').next().unwrap_or_default().to_owned();
    format!(
        "{node} GPU {}",
        pod.devices
            .iter()
            .map(index)
            .collect::<Vec<_>>()
            .join(" and ")
    )
}

/// `node-a GPU 0` of `GPU-node-a-0`, as the demo's GPUs are called.
pub(crate) fn gpu_name(uuid: &str) -> String {
    let name = uuid.trim_start_matches("GPU-");
    let (node, index) = name.rsplit_once('-').unwrap_or((name, "?"));
    format!("{node} GPU {index}")
}

/// The reasons alone: the message begins with the number of nodes, and repeats the reasons about preemption.
fn short_refusal(message: &str) -> &str {
    let reasons = message
        .split_once(": ")
        .map_or(message, |(_, reasons)| reasons);
    reasons
        .split_once(". ")
        .map_or(reasons, |(first, _)| first)
        .trim_end_matches('.')
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::units::Percent;
    use stowage_scheduling::vocabulary::node_reading::EngineLoad;

    fn shown(kv_percent: u8, queue: Option<u32>, states: &[EngineState]) -> String {
        let engine_load = EngineLoad::new(Percent::new(kv_percent), queue);
        engines(&ReportedEngines {
            engine_load,
            states: states.to_vec(),
        })
    }

    #[test]
    fn a_gpus_engines_are_shown_with_load_and_state() {
        use EngineState::{Loading, Serving, Starting, Unreachable};
        assert_eq!(
            shown(97, Some(40), &[Serving]),
            "KV 97 % · 40 waiting · serving"
        );
        assert_eq!(
            shown(5, Some(0), &[Loading, Serving, Serving]),
            "KV 5 % · 0 waiting · 2 serving, 1 loading"
        );
        assert_eq!(
            shown(0, Some(0), &[Starting, Starting]),
            "starting",
            "an engine that serves nobody has no figures"
        );
        assert_eq!(
            shown(101, None, &[Unreachable]),
            "KV ? % · ? waiting · unreachable",
            "unknown is not zero"
        );
    }

    #[test]
    fn long_names_are_cut_with_an_ellipsis() {
        assert_eq!(
            (shorten("abcé".into(), 4), shorten("abcéf".into(), 4)),
            ("abcé".into(), "abc…".to_owned())
        );
    }
}

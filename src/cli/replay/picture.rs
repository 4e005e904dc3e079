//! The picture of `stowage replay --policy`: what differs over time between the recorded policy and the other one.

use stowage_lab::picture::{Panel, PanelLine};
use stowage_recording::closed_loop::comparison::{LoopFigures, LoopSample, PolicyComparison};
use stowage_scheduling::units::{Bytes, Millis};

/// About so many figures along an axis.
const FIGURES_PER_AXIS: f64 = 4.0;
/// The horizontal axis is in the first unit of which the recording has no more than this.
const MAX_UNITS_ON_AXIS: f64 = 180.0;
const UNITS: [(&str, f64); 3] = [("s", 1.0), ("min", 60.0), ("h", 3600.0)];

pub fn panels(compared: &PolicyComparison) -> [Panel; 3] {
    let percent = |part: Bytes, sample: &LoopSample| match sample.capacity.0 {
        0 => 0.0,
        whole => part.0 as f64 * 100.0 / whole as f64,
    };
    [
        panel("VRAM allocated, %", compared, |sample| {
            percent(sample.allocated, sample)
        }),
        panel(
            "VRAM free but of no use to pods like the latest, %",
            compared,
            |sample| percent(sample.stranded, sample),
        ),
        panel("pods that wait", compared, |sample| sample.waiting as f64),
    ]
}

fn panel(title: &str, compared: &PolicyComparison, figure: impl Fn(&LoopSample) -> f64) -> Panel {
    let (unit, seconds) = unit(compared.lasted);
    let line = |one: &LoopFigures, name: &str, color, stands_out| {
        let point =
            |sample: &LoopSample| (sample.after.0 as f64 / 1000.0 / seconds, figure(sample));
        PanelLine {
            name: name.into(),
            color,
            is_highlighted: stands_out,
            points: one.samples.iter().map(point).collect(),
        }
    };
    // The narrow one lies on the wide one, so that both show where they are equal.
    let lines = vec![
        line(&compared.recorded, "recorded", "#0072b2", true),
        line(&compared.other, "other", "#d55e00", false),
    ];
    let figures = || {
        lines
            .iter()
            .flat_map(|line| line.points.iter().map(|(_, figure)| *figure))
    };
    let range = figures().fold(0.0, f64::max) - figures().fold(f64::INFINITY, f64::min).min(1e9);
    let last = (compared.lasted.0 as f64 / 1000.0 / seconds).max(1.0);
    Panel {
        title: title.into(),
        x_label: format!("since the recording began, {unit}"),
        x: (0.0, last, round_step(last / FIGURES_PER_AXIS)),
        y_step: round_step(range / FIGURES_PER_AXIS),
        lines,
    }
}

fn unit(lasted: Millis) -> (&'static str, f64) {
    let seconds = lasted.0 as f64 / 1000.0;
    let fits = |(_, unit): &&(&str, f64)| seconds / unit <= MAX_UNITS_ON_AXIS;
    *UNITS.iter().find(fits).unwrap_or(&UNITS[2])
}

/// The least of 1, 2, 5, 10, 20 … that is no less.
fn round_step(least: f64) -> f64 {
    let decade = 10_f64.powf(least.max(1.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|times| times * decade);
    steps
        .into_iter()
        .find(|step| *step >= least)
        .unwrap_or(decade * 10.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_figures() {
        assert_eq!(
            [0.0, 0.7, 1.5, 3.0, 7.0, 11.0, 240.0].map(round_step),
            [1.0, 1.0, 2.0, 5.0, 10.0, 20.0, 500.0]
        );
        let units = [30, 180, 181, 10_800, 10_801, 1_000_000]
            .map(|seconds| unit(Millis::seconds(seconds)).0);
        assert_eq!(units, ["s", "s", "min", "min", "h", "h"]);
    }
}

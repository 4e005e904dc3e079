//! The picture of `stowage simulate packing`: the allocated and the fragmented share over the requested share.

use stowage_lab::picture::{Panel, PanelLine};
use stowage_lab::simulate::packing::arrivals::MAX_LOAD_PERCENT;
use stowage_lab::simulate::packing::curve::Point;
use stowage_lab::simulate::packing::{PackingLine, SimulatedPolicy};

/// Below this requested share, in percent, no policy has rejected a pod yet, and all lines coincide.
const FIRST_LOAD: u64 = 70;

pub fn panels(lines: &[PackingLine]) -> [Panel; 2] {
    [
        panel("GPUs allocated, %", lines, |point| point.allocated),
        panel(
            "GPUs free but of no use to typical pods, %",
            lines,
            |point| point.fragmented,
        ),
    ]
}

fn panel(title: &str, lines: &[PackingLine], of: fn(&Point) -> f64) -> Panel {
    let shown = |line: &&PackingLine| {
        let points = line.points.iter().filter(|point| point.load >= FIRST_LOAD);
        PanelLine {
            name: line.policy.name().into(),
            color: color(line.policy),
            is_highlighted: line.policy == SimulatedPolicy::Stowage,
            points: points.map(|point| (point.load as f64, of(point))).collect(),
        }
    };
    // Stowage is drawn last, so it lies on top.
    let mut order: Vec<&PackingLine> = lines.iter().collect();
    order.sort_by_key(|line| line.policy);
    Panel {
        title: title.into(),
        x_label: "GPUs asked for so far, % of all".into(),
        x: (FIRST_LOAD as f64, MAX_LOAD_PERCENT as f64, 10.0),
        y_step: 5.0,
        lines: order.iter().map(shown).collect(),
    }
}

/// Colors that people with color vision deficiency can distinguish (Okabe and Ito, 2008).
fn color(policy: SimulatedPolicy) -> &'static str {
    match policy {
        SimulatedPolicy::Random => "#7f7f7f",
        SimulatedPolicy::DotProduct => "#b8860b",
        SimulatedPolicy::Clustering => "#56b4e9",
        SimulatedPolicy::Packing => "#009e73",
        SimulatedPolicy::BestFit => "#cc79a7",
        SimulatedPolicy::Fgd => "#0072b2",
        SimulatedPolicy::Stowage => "#d55e00",
        SimulatedPolicy::StowageKnownDemand => "#e69f00",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stowage_lies_on_top_and_lines_begin_where_they_differ() {
        let points: Vec<Point> = (0..=130)
            .map(|load| Point {
                load,
                allocated: 90.0,
                fragmented: 5.0,
            })
            .collect();
        let line = |policy| PackingLine {
            points: points.clone(),
            ..PackingLine::from_replays(policy, &[], false)
        };
        let [allocated, _] = panels(&[line(SimulatedPolicy::Stowage), line(SimulatedPolicy::Fgd)]);
        let names: Vec<&str> = allocated
            .lines
            .iter()
            .map(|line| line.name.as_str())
            .collect();
        assert_eq!(names, ["fgd", "stowage"]);
        assert_eq!(allocated.lines[0].points.first(), Some(&(70.0, 90.0)));
    }
}

//! One panel: axes, a line for each policy, and at each line's end the policy's name in the same colour. Names that would
//! overlap are moved apart.

use crate::lab::simulate::packing::arrivals::LAST_LOAD;
use crate::lab::simulate::packing::curve::Point;
use crate::lab::simulate::packing::{PackingLine, PlayedPolicy};
use kuva::plot::LinePlot;
use kuva::render::layout::{ComputedLayout, Layout, TickFormat};
use kuva::render::plots::Plot;
use kuva::render::render::{Primitive, Scene, TextAnchor, render_multiple};

/// Margins in pixels: left, for the axis' figures, and right, for the names at the lines' ends.
const MARGINS: (f64, f64) = (80.0, 215.0);
const NAME_SIZE: u32 = 19;
/// The least distance between two names, in pixels.
const NAME_HEIGHT: f64 = 25.0;

pub struct Panel {
    pub title: &'static str,
    pub of: fn(&Point) -> f64,
}

/// A name at the end of a line, in pixels.
struct LineLabel {
    policy: PlayedPolicy,
    text: String,
    /// Where the policy's line ends.
    end: f64,
    y: f64,
}

impl Panel {
    pub fn draw(&self, lines: &[PackingLine], first_load: u64, (width, height): (f64, f64)) -> Scene {
        let shown = |line: &PackingLine| {
            let points = line.points.iter().filter(|point| point.load >= first_load);
            points.map(|point| (point.load as f64, (self.of)(point))).collect::<Vec<_>>()
        };
        let curves: Vec<(PlayedPolicy, Vec<(f64, f64)>)> =
            lines.iter().map(|line| (line.policy, shown(line))).collect();
        let layout = || self.layout(&curves, first_load, (width, height));
        // Stowage is drawn last, so it lies on top.
        let mut order: Vec<&(PlayedPolicy, Vec<(f64, f64)>)> = curves.iter().collect();
        order.sort_by_key(|(policy, _)| *policy);
        let plots = order.iter().map(|(policy, points)| plot(*policy, points)).collect();
        let mut scene = render_multiple(plots, layout());
        let computed = ComputedLayout::from_layout(&layout());
        names(&curves, &computed).into_iter().for_each(|name| write(&mut scene, &computed, &name));
        scene
    }

    fn layout(
        &self,
        curves: &[(PlayedPolicy, Vec<(f64, f64)>)],
        first_load: u64,
        (width, height): (f64, f64),
    ) -> Layout {
        let loads = (first_load as f64, LAST_LOAD as f64);
        let (low, high) = range(curves);
        Layout::new(loads, (low, high))
            .with_width(width)
            .with_height(height)
            .with_title(self.title)
            .with_x_label("GPUs asked for so far, % of all")
            .with_title_size(22)
            .with_label_size(19)
            .with_tick_size(18)
            .with_force_margins(MARGINS.0, MARGINS.1)
            .with_x_axis_min(loads.0)
            .with_x_axis_max(loads.1)
            .with_y_axis_min(low)
            .with_y_axis_max(high)
            .with_x_tick_step(10.0)
            .with_y_tick_step(STEP)
            .with_tick_format(TickFormat::Integer)
    }
}

/// The step of the vertical axis, in percent.
const STEP: f64 = 5.0;

/// The range of the vertical axis: from the lowest to the highest figure, rounded outwards to the axis' steps.
fn range(curves: &[(PlayedPolicy, Vec<(f64, f64)>)]) -> (f64, f64) {
    let figures = || curves.iter().flat_map(|(_, points)| points.iter().map(|(_, figure)| *figure));
    let low = figures().fold(100.0, f64::min);
    let high = figures().fold(0.0, f64::max);
    let (low, high) = ((low / STEP).floor() * STEP, (high / STEP).ceil() * STEP);
    (low, high.max(low + STEP))
}

fn plot(policy: PlayedPolicy, points: &[(f64, f64)]) -> Plot {
    let width = if policy == PlayedPolicy::Stowage { 5.0 } else { 2.5 };
    LinePlot::new().with_data(points.to_vec()).with_color(colour(policy)).with_stroke_width(width).into()
}

/// Colours that people with colour vision deficiency can distinguish (Okabe and Ito, 2008).
fn colour(policy: PlayedPolicy) -> &'static str {
    match policy {
        PlayedPolicy::Random => "#7f7f7f",
        PlayedPolicy::DotProduct => "#b8860b",
        PlayedPolicy::Clustering => "#56b4e9",
        PlayedPolicy::Packing => "#009e73",
        PlayedPolicy::BestFit => "#cc79a7",
        PlayedPolicy::Fgd => "#0072b2",
        PlayedPolicy::Stowage => "#d55e00",
        PlayedPolicy::StowageKnownDemand => "#e69f00",
    }
}

fn names(curves: &[(PlayedPolicy, Vec<(f64, f64)>)], computed: &ComputedLayout) -> Vec<LineLabel> {
    let name = |(policy, points): &(PlayedPolicy, Vec<(f64, f64)>)| {
        let (_, figure) = points.last()?;
        let end = computed.map_y(*figure);
        Some(LineLabel { policy: *policy, text: format!("{} {figure:.1}", policy.name()), end, y: end })
    };
    let mut names: Vec<LineLabel> = curves.iter().filter_map(name).collect();
    names.sort_by(|a, b| a.end.total_cmp(&b.end));
    let (top, bottom) = (computed.margin_top, computed.height - computed.margin_bottom);
    let mut ys: Vec<f64> = names.iter().map(|name| name.end).collect();
    apart(&mut ys, top, bottom);
    names.iter_mut().zip(ys).for_each(|(name, y)| name.y = y);
    names
}

/// Moves positions that are closer than a name's height apart. Keeps their order and the bounds, and moves each as little as
/// possible: names that push each other form a block around the mean of their positions.
fn apart(ys: &mut [f64], top: f64, bottom: f64) {
    // Each block: the position of its first name, and its number of names.
    let mut blocks: Vec<(f64, usize)> = Vec::new();
    for (place, wanted) in ys.iter().enumerate() {
        blocks.push((*wanted, 1));
        while let [.., (above, n), (below, m)] = blocks[..] {
            if above + n as f64 * NAME_HEIGHT <= below {
                break;
            }
            let members = &ys[place + 1 - m - n..=place];
            let mean = members.iter().enumerate().map(|(k, y)| y - k as f64 * NAME_HEIGHT).sum::<f64>();
            blocks.truncate(blocks.len() - 2);
            blocks.push((mean / (n + m) as f64, n + m));
        }
    }
    let mut place = 0;
    for (start, count) in blocks {
        let last = (bottom - (count - 1) as f64 * NAME_HEIGHT).max(top);
        for member in 0..count {
            ys[place] = start.clamp(top, last) + member as f64 * NAME_HEIGHT;
            place += 1;
        }
    }
}

fn write(scene: &mut Scene, computed: &ComputedLayout, name: &LineLabel) {
    let right = computed.width - computed.margin_right;
    let stroke = || colour(name.policy).into();
    scene.add(Primitive::Line {
        x1: right + 2.0,
        y1: name.end,
        x2: right + 16.0,
        y2: name.y,
        stroke: stroke(),
        stroke_width: 1.5,
        stroke_dasharray: None,
    });
    scene.add(Primitive::Text {
        x: right + 20.0,
        // The middle of lower-case letters, not their baseline, is level with the line's end.
        y: name.y + f64::from(NAME_SIZE) / 3.0,
        content: name.text.clone(),
        size: NAME_SIZE,
        anchor: TextAnchor::Start,
        rotate: None,
        bold: name.policy == PlayedPolicy::Stowage,
        color: Some(stroke()),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(mut ys: Vec<f64>) -> Vec<f64> {
        apart(&mut ys, 0.0, 500.0);
        ys
    }

    #[test]
    fn overlapping_names_are_moved_apart_around_their_middle() {
        assert_eq!(moved(vec![100.0, 200.0]), [100.0, 200.0]);
        assert_eq!(moved(vec![100.0, 101.0]), [88.0, 113.0]);
        assert_eq!(moved(vec![100.0, 100.0, 100.0]), [75.0, 100.0, 125.0]);
        // A block that grows into the one above becomes one with it.
        assert_eq!(
            moved(vec![80.0, 100.0, 100.0]),
            [68.333_333_333_333_33, 93.333_333_333_333_33, 118.333_333_333_333_33]
        );
    }

    #[test]
    fn names_stay_in_the_panel() {
        assert_eq!(moved(vec![-3.0, 2.0]), [0.0, 25.0]);
        assert_eq!(moved(vec![498.0, 500.0]), [475.0, 500.0]);
        assert!(moved(vec![]).is_empty());
    }

    #[test]
    fn the_axis_begins_and_ends_at_a_step() {
        let of =
            |figures: [f64; 2]| range(&[(PlayedPolicy::Fgd, vec![(70.0, figures[0]), (71.0, figures[1])])]);
        assert_eq!(of([71.0, 96.2]), (70.0, 100.0));
        assert_eq!(of([0.0, 0.0]), (0.0, 5.0));
    }
}

//! One panel: axes, a line for each thing compared, and at each line's end its name in the same color. Long names are broken into
//! lines, and names that would overlap are moved apart.

use kuva::plot::LinePlot;
use kuva::render::layout::{ComputedLayout, Layout, TickFormat};
use kuva::render::plots::Plot;
use kuva::render::render::{Primitive, Scene, TextAnchor, render_multiple};

/// Margins in pixels: left, for the axis' figures, and right, for the names at the lines' ends.
const MARGINS: (f64, f64) = (80.0, 215.0);
const NAME_SIZE: u32 = 19;
/// The least distance between two names, in pixels, and between two lines of one.
const NAME_HEIGHT: f64 = 25.0;
const LINE_HEIGHT: f64 = 21.0;
/// Characters of a name's line that the right margin has room for.
const NAME_WIDTH: usize = 17;
/// What a figure of the horizontal axis takes, in pixels.
const TICK_WIDTH: f64 = 50.0;

/// What a panel shows.
#[derive(Debug, Clone)]
pub struct Panel {
    pub title: String,
    pub x_label: String,
    /// Where the horizontal axis begins and ends, and its least step.
    pub x: (f64, f64, f64),
    /// The step of the vertical axis.
    pub y_step: f64,
    pub lines: Vec<PanelLine>,
}

/// One line. The last of a panel lies on top.
#[derive(Debug, Clone)]
pub struct PanelLine {
    pub name: String,
    pub color: &'static str,
    /// Drawn wider, with its name in bold: Stowage's.
    pub is_highlighted: bool,
    pub points: Vec<(f64, f64)>,
}

/// A name at the end of a line, in pixels.
struct LineLabel<'a> {
    line: &'a PanelLine,
    text: Vec<String>,
    /// Where the line ends.
    end: f64,
    /// The middle of its first line.
    y: f64,
}

impl LineLabel<'_> {
    /// From the middle of its first line to that of its last.
    fn text_depth(&self) -> f64 {
        (self.text.len() - 1) as f64 * LINE_HEIGHT
    }
}

impl Panel {
    pub fn draw(&self, (width, height): (f64, f64)) -> Scene {
        let plots = self.lines.iter().map(PanelLine::plot).collect();
        let mut scene = render_multiple(plots, self.layout((width, height)));
        let computed = ComputedLayout::from_layout(&self.layout((width, height)));
        self.labels(&computed)
            .into_iter()
            .for_each(|name| write(&mut scene, &computed, &name));
        scene
    }

    fn layout(&self, (width, height): (f64, f64)) -> Layout {
        let (first, last, step) = self.x;
        let max_ticks = ((width - MARGINS.0 - MARGINS.1) / TICK_WIDTH).max(1.0);
        // Whole steps, so that the figures stay round.
        let step = step * ((last - first) / step / max_ticks).ceil().max(1.0);
        let (low, high) = self.range();
        Layout::new((first, last), (low, high))
            .with_width(width)
            .with_height(height)
            .with_title(&self.title)
            .with_x_label(&self.x_label)
            .with_title_size(22)
            .with_label_size(19)
            .with_tick_size(18)
            .with_force_margins(MARGINS.0, MARGINS.1)
            .with_x_axis_min(first)
            .with_x_axis_max(last)
            .with_y_axis_min(low)
            .with_y_axis_max(high)
            .with_x_tick_step(step)
            .with_y_tick_step(self.y_step)
            .with_tick_format(TickFormat::Integer)
    }

    /// The range of the vertical axis: from the lowest to the highest figure, rounded outwards to the axis' steps.
    fn range(&self) -> (f64, f64) {
        let figures = || {
            self.lines
                .iter()
                .flat_map(|line| line.points.iter().map(|(_, figure)| *figure))
        };
        let low = figures().fold(f64::INFINITY, f64::min);
        let high = figures().fold(f64::NEG_INFINITY, f64::max);
        if !low.is_finite() || !high.is_finite() {
            return (0.0, self.y_step);
        }
        let (low, high) = (
            (low / self.y_step).floor() * self.y_step,
            (high / self.y_step).ceil() * self.y_step,
        );
        (low, high.max(low + self.y_step))
    }

    fn labels<'a>(&'a self, computed: &ComputedLayout) -> Vec<LineLabel<'a>> {
        let name = |line: &'a PanelLine| {
            let PanelLine { name, points, .. } = line;
            let (_, figure) = points.last()?;
            let end = computed.map_y(*figure);
            Some(LineLabel {
                line,
                text: wrap_lines(&format!("{name} {figure:.1}")),
                end,
                y: end,
            })
        };
        let mut names: Vec<LineLabel<'_>> = self.lines.iter().filter_map(name).collect();
        names.sort_by(|a, b| a.end.total_cmp(&b.end));
        let (top, bottom) = (
            computed.margin_top,
            computed.height - computed.margin_bottom,
        );
        let mut ys: Vec<f64> = names
            .iter()
            .map(|name| name.end - name.text_depth() / 2.0)
            .collect();
        let heights: Vec<f64> = names
            .iter()
            .map(|name| NAME_HEIGHT + name.text_depth())
            .collect();
        spread(&mut ys, &heights, top, bottom);
        names.iter_mut().zip(ys).for_each(|(name, y)| name.y = y);
        names
    }
}

impl PanelLine {
    fn plot(&self) -> Plot {
        let width = if self.is_highlighted { 5.0 } else { 2.5 };
        LinePlot::new()
            .with_data(self.points.clone())
            .with_color(self.color)
            .with_stroke_width(width)
            .into()
    }
}

/// Lines of at most [`NAME_WIDTH`] characters, as far as words allow.
fn wrap_lines(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= NAME_WIDTH => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.into()),
        }
    }
    lines
}

/// Moves positions apart that are closer than the height of the upper one. Keeps their order and the bounds, and moves each as
/// little as possible: names that push each other form a block around the mean of their positions.
fn spread(ys: &mut [f64], heights: &[f64], top: f64, bottom: f64) {
    // Each block: the position of its first name, and its number of names.
    let mut blocks: Vec<(f64, usize)> = Vec::new();
    for (index, wanted) in ys.iter().enumerate() {
        blocks.push((*wanted, 1));
        while let [.., (above, n), (below, m)] = blocks[..] {
            let first = index + 1 - m - n;
            if above + heights[first..first + n].iter().sum::<f64>() <= below {
                break;
            }
            let mut offset = 0.0;
            let mut sum = 0.0;
            for (y, height) in ys[first..=index].iter().zip(&heights[first..=index]) {
                sum += y - offset;
                offset += height;
            }
            blocks.truncate(blocks.len() - 2);
            blocks.push((sum / (n + m) as f64, n + m));
        }
    }
    let mut first = 0;
    for (start, count) in blocks {
        let height: f64 = heights[first..first + count].iter().sum();
        let mut y = start.clamp(top, (bottom - height + NAME_HEIGHT).max(top));
        for (member, height) in ys[first..first + count]
            .iter_mut()
            .zip(&heights[first..first + count])
        {
            *member = y;
            y += height;
        }
        first += count;
    }
}

fn write(scene: &mut Scene, computed: &ComputedLayout, name: &LineLabel<'_>) {
    let right = computed.width - computed.margin_right;
    let stroke = || name.line.color.into();
    scene.add(Primitive::Line {
        x1: right + 2.0,
        y1: name.end,
        x2: right + 16.0,
        y2: name.y + name.text_depth() / 2.0,
        stroke: stroke(),
        stroke_width: 1.5,
        stroke_dasharray: None,
    });
    for (line, text) in name.text.iter().enumerate() {
        scene.add(Primitive::Text {
            x: right + 20.0,
            // The middle of lower-case letters, not their baseline, is level with the line's end.
            y: name.y + line as f64 * LINE_HEIGHT + f64::from(NAME_SIZE) / 3.0,
            content: text.clone(),
            size: NAME_SIZE,
            anchor: TextAnchor::Start,
            rotate: None,
            bold: name.line.is_highlighted,
            color: Some(stroke()),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(mut ys: Vec<f64>) -> Vec<f64> {
        let heights = vec![NAME_HEIGHT; ys.len()];
        spread(&mut ys, &heights, 0.0, 500.0);
        ys
    }

    #[test]
    fn a_long_name_is_broken_between_words_and_pushes_by_its_height() {
        assert_eq!(wrap_lines("stowage 95.0"), ["stowage 95.0"]);
        assert_eq!(
            wrap_lines("replicas by GPU utilization 9.5"),
            ["replicas by GPU", "utilization 9.5"]
        );
        let mut ys = vec![100.0, 100.0];
        spread(
            &mut ys,
            &[NAME_HEIGHT + LINE_HEIGHT, NAME_HEIGHT],
            0.0,
            500.0,
        );
        assert_eq!(ys, [77.0, 123.0]);
    }

    #[test]
    fn overlapping_names_are_moved_apart_around_their_middle() {
        assert_eq!(moved(vec![100.0, 200.0]), [100.0, 200.0]);
        assert_eq!(moved(vec![100.0, 101.0]), [88.0, 113.0]);
        assert_eq!(moved(vec![100.0, 100.0, 100.0]), [75.0, 100.0, 125.0]);
        // A block that grows into the one above becomes one with it.
        assert_eq!(
            moved(vec![80.0, 100.0, 100.0]),
            [
                68.333_333_333_333_33,
                93.333_333_333_333_33,
                118.333_333_333_333_33
            ]
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
        let of = |figures: Vec<f64>| {
            let points = figures.into_iter().map(|figure| (70.0, figure)).collect();
            let line = PanelLine {
                name: "a".into(),
                color: "#000000",
                is_highlighted: false,
                points,
            };
            let (title, x_label) = (String::new(), String::new());
            Panel {
                title,
                x_label,
                x: (0.0, 1.0, 1.0),
                y_step: 5.0,
                lines: vec![line],
            }
            .range()
        };
        assert_eq!(of(vec![71.0, 96.2]), (70.0, 100.0));
        assert_eq!(of(vec![0.0, 0.0]), (0.0, 5.0));
        assert_eq!(of(vec![]), (0.0, 5.0));
    }
}

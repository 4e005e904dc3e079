//! Draws what [`Top`] shows. Of a table only the rows on the screen are made into text, however many there are.

use super::cell::Cell;
use super::state::Top;
use super::view::{View, allocated, widths};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use stowage_scheduling::explaining::fleet::Fleet;
use stowage_scheduling::ids::printable;
use stowage_scheduling::units::plural;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colors {
    On,
    Off,
}

impl Colors {
    fn foreground(self, color: Color) -> Style {
        match self {
            Self::On => Style::new().fg(color),
            Self::Off => Style::new(),
        }
    }

    /// A GPU that is allocated whole is well used; a KV cache that is full holds up requests.
    fn cell_style(self, cell: &Cell) -> Style {
        match cell {
            Cell::Share { .. } => self.foreground(Color::Green),
            Cell::Percent(Some(percent)) => match percent.get() {
                0..80 => self.foreground(Color::Green),
                80..95 => self.foreground(Color::Yellow),
                _ => self.foreground(Color::Red),
            },
            _ => Style::new(),
        }
    }
}

/// Lines above the rows (summary, views, header) and below (status).
const LINES_ABOVE: u16 = 3;
const LINES_BELOW: u16 = 1;
/// Answers that are older are marked: three intervals were missed.
const OLD_AFTER_SECONDS: u64 = 4;

const HELP: [&str; 16] = [
    "1 … 5, Tab      the views: nodes, GPUs, pods, pending, models",
    "↑ ↓ j k         one row",
    "PgUp PgDn       one page",
    "Home End g G    the first and the last row",
    "> s   < S       sort by the next column, by the one before",
    "r               reverse the order",
    "/               show only rows with this text; Enter keeps it, Esc clears it",
    "? h             this help",
    "q Ctrl-C        quit",
    "",
    "ALLOCATED is what pods and reservations have of what pods may have.",
    "KV CACHE is that of the fullest engine, A TOKEN what the slowest one takes.",
    "QUEUE counts requests that wait.",
    "SMS is how much of the time SMs have work, MEM BW the bandwidth in use.",
    "? is unknown: no agent reports it.",
    "Any key closes this.",
];

pub fn draw(top: &mut Top, area: Rect, buffer: &mut Buffer, colors: Colors) {
    if area.height <= LINES_ABOVE + LINES_BELOW || area.width == 0 {
        return draw_line(buffer, area, 0, "the terminal is too small", Style::new());
    }
    let page_height = area.height - LINES_ABOVE - LINES_BELOW;
    top.page_rows = page_height.into();
    top.offset = top.offset.clamp(
        (top.selected + 1).saturating_sub(top.page_rows),
        top.selected,
    );
    let (summary, style) = summary(top, colors);
    draw_line(buffer, area, 0, &summary, style);
    draw_views(top, area, buffer, colors);
    draw_table(
        top,
        Rect {
            y: area.y + 2,
            height: page_height + 1,
            ..area
        },
        buffer,
        colors,
    );
    draw_status(top, area, buffer, colors);
    if top.is_help_open {
        draw_help(
            Rect {
                y: area.y + LINES_ABOVE,
                height: page_height,
                ..area
            },
            buffer,
        );
    }
}

fn draw_line(buffer: &mut Buffer, area: Rect, row: u16, text: &str, style: Style) {
    if row < area.height {
        buffer.set_stringn(area.x, area.y + row, text, area.width.into(), style);
    }
}

/// The cluster in a line.
pub fn summary_of(fleet: &Fleet) -> String {
    let gpus = fleet.nodes.iter().flat_map(|node| &node.gpus);
    let (part, of) = allocated(gpus.clone());
    let percent = Cell::Share { part, of }.fill_thousandths().unwrap_or(0) / 10;
    let pods: usize = fleet.nodes.iter().map(|node| node.pods.len()).sum();
    format!(
        "{}, {}, {part} of {of} allocated ({percent} %), {}, {} pending",
        plural(fleet.nodes.len(), "node"),
        plural(gpus.count(), "GPU"),
        plural(pods, "pod"),
        fleet.pending_count
    )
}

fn summary(top: &Top, colors: Colors) -> (String, Style) {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let seconds = top.displayed.age.as_secs();
    match (&top.displayed.fleet, &top.displayed.problem) {
        (None, None) => (format!("asking {} …", printable(&top.server)), bold),
        (None, Some(problem)) => (printable(problem), colors.foreground(Color::Red)),
        (Some(fleet), None) if seconds < OLD_AFTER_SECONDS => (summary_of(fleet), bold),
        (Some(fleet), None) => (
            format!("OLD, {seconds} s: {}", summary_of(fleet)),
            colors.foreground(Color::Yellow),
        ),
        (Some(fleet), Some(_)) => (
            format!("OLD, {seconds} s: {}", summary_of(fleet)),
            colors.foreground(Color::Red),
        ),
    }
}

fn draw_views(top: &Top, area: Rect, buffer: &mut Buffer, colors: Colors) {
    let (mut x, end) = (area.x, area.right());
    for (index, view) in View::ALL.into_iter().enumerate() {
        let style = match view == top.view {
            true => colors
                .foreground(Color::Cyan)
                .add_modifier(Modifier::REVERSED),
            false => colors.foreground(Color::Cyan),
        };
        if x < end {
            let name = format!(" {} {} ", index + 1, view.title());
            x = buffer
                .set_stringn(x, area.y + 1, name, (end - x).into(), style)
                .0;
        }
    }
    if !top.filter.is_empty() || top.is_typing {
        let cursor = if top.is_typing { "_" } else { "" };
        let filter = format!(
            "  /{}{cursor}  {}",
            printable(&top.filter),
            plural(top.rows().len(), "row")
        );
        if x < end {
            buffer.set_stringn(
                x,
                area.y + 1,
                filter,
                (end - x).into(),
                colors.foreground(Color::Yellow),
            );
        }
    }
}

fn draw_table(top: &Top, area: Rect, buffer: &mut Buffer, colors: Colors) {
    let columns = top.view.columns();
    let widths = widths(columns, area.width);
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let mut column_spans = Vec::with_capacity(columns.len());
    let mut x = area.x;
    for (index, column) in columns.iter().enumerate() {
        let width = widths[index].min(area.right().saturating_sub(x));
        column_spans.push((x, width));
        if width == 0 {
            continue;
        }
        let mark = match top.sorting().filter(|sorting| sorting.column == index) {
            Some(sorting) if sorting.is_reversed => "▼",
            Some(_) => "▲",
            None => "",
        };
        draw_cell(
            buffer,
            (x, area.y),
            width,
            &format!("{}{mark}", column.title),
            column.is_right,
            bold,
        );
        x = x.saturating_add(width).saturating_add(1).min(area.right());
    }
    let visible = top
        .rows()
        .iter()
        .enumerate()
        .skip(top.offset)
        .take(area.height.saturating_sub(1).into());
    for ((row, cells), y) in visible.zip(area.y + 1..) {
        let is_selected = row == top.selected;
        let selected = if is_selected {
            Modifier::REVERSED
        } else {
            Modifier::empty()
        };
        if is_selected {
            buffer.set_style(
                Rect {
                    y,
                    height: 1,
                    ..area
                },
                Style::new().add_modifier(selected),
            );
        }
        for ((cell, column), (x, width)) in cells.iter().zip(columns).zip(&column_spans) {
            let style = colors.cell_style(cell).add_modifier(selected);
            draw_cell(
                buffer,
                (*x, y),
                *width,
                &cell.text_within(usize::from(*width)),
                column.is_right,
                style,
            );
        }
    }
    if top.rows().is_empty() && top.displayed.fleet.is_some() {
        let nothing = match (&*top.filter, top.view) {
            ("", View::Pending) => "No pod is pending.",
            ("", _) => "There is nothing to show.",
            _ => "No row has this text; Esc clears the filter.",
        };
        draw_line(buffer, area, 1, nothing, Style::new());
    }
}

/// Draws the text of a cell; one that is too long ends in an ellipsis.
fn draw_cell(
    buffer: &mut Buffer,
    at: (u16, u16),
    width: u16,
    text: &str,
    is_right: bool,
    style: Style,
) {
    let length = ratatui::text::Span::raw(text).width();
    let available = usize::from(width);
    let (x, y) = at;
    if length <= available {
        let shift = if is_right { available - length } else { 0 };
        buffer.set_stringn(x + shift as u16, y, text, length, style);
    } else if available > 0 {
        let (end, _) = buffer.set_stringn(x, y, text, available - 1, style);
        buffer.set_stringn(end, y, "…", 1, style);
    }
}

fn draw_status(top: &Top, area: Rect, buffer: &mut Buffer, colors: Colors) {
    let row = area.height - LINES_BELOW;
    if let (Some(problem), Some(_)) = (&top.displayed.problem, &top.displayed.fleet) {
        return draw_line(
            buffer,
            area,
            row,
            &printable(problem),
            colors.foreground(Color::Red),
        );
    }
    let count = top.rows().len();
    let row_number = if count == 0 { 0 } else { top.selected + 1 };
    let text = format!("{row_number}/{count}  ? help  / filter  > sort  r reverse  q quit");
    draw_line(buffer, area, row, &text, colors.foreground(Color::DarkGray));
}

fn draw_help(area: Rect, buffer: &mut Buffer) {
    let width = HELP
        .iter()
        .map(|text| text.chars().count())
        .max()
        .unwrap_or(0) as u16;
    let at = Rect {
        x: area.x + 2.min(area.width),
        width: (width + 2).min(area.width.saturating_sub(2)),
        height: area.height.min(HELP.len() as u16),
        ..area
    };
    for (row, text) in (0..at.height).zip(HELP) {
        let blank = " ".repeat(at.width.into());
        draw_line(buffer, at, row, &blank, Style::new());
        draw_line(
            buffer,
            Rect {
                x: at.x + 1,
                width: at.width.saturating_sub(1),
                ..at
            },
            row,
            text,
            Style::new(),
        );
    }
    buffer.set_style(at, Style::reset().add_modifier(Modifier::REVERSED));
}

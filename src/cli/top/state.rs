//! What `stowage top` shows, as keys and new figures change it: the view, how it is sorted and filtered, and where in it the
//! selection is. It knows no terminal and no clock; the time since the last answer is told to it.

use super::cell::Cell;
use super::view::View;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::time::Duration;
use stowage_scheduling::explaining::fleet::Fleet;

/// A sort by one of the view's columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sorting {
    pub column: usize,
    pub is_reversed: bool,
}

/// The figures and their age.
#[derive(Debug, Clone, Default)]
pub struct DisplayedFleet {
    pub fleet: Option<Fleet>,
    /// Time since the last answer.
    pub age: Duration,
    /// Why there is no newer one.
    pub problem: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyOutcome {
    Continue,
    Quit,
}

#[derive(Debug)]
pub struct Top {
    pub server: String,
    pub displayed: DisplayedFleet,
    pub view: View,
    /// The sorting of each view; `None` is the fleet's order.
    sorting: [Option<Sorting>; View::ALL.len()],
    pub filter: String,
    pub is_typing: bool,
    pub is_help_open: bool,
    pub selected: usize,
    /// The first row on the screen.
    pub offset: usize,
    /// Rows on the screen, as last drawn.
    pub page_rows: usize,
    rows: Vec<Vec<Cell>>,
}

/// The longest filter, in bytes: longer than a name that Kubernetes allows.
const MAX_FILTER_LENGTH: usize = 300;

impl Top {
    pub fn new(server: String, view: View) -> Self {
        Self {
            server,
            displayed: DisplayedFleet::default(),
            view,
            sorting: [None; View::ALL.len()],
            filter: String::new(),
            is_typing: false,
            is_help_open: false,
            selected: 0,
            offset: 0,
            page_rows: 1,
            rows: Vec::new(),
        }
    }

    /// The rows that pass the filter, in their order.
    pub fn rows(&self) -> &[Vec<Cell>] {
        &self.rows
    }

    pub fn sorting(&self) -> Option<Sorting> {
        self.sorting[self.view as usize]
    }

    pub fn set_fleet(&mut self, fleet: Fleet) {
        self.displayed = DisplayedFleet {
            fleet: Some(fleet),
            ..DisplayedFleet::default()
        };
        self.arrange();
    }

    /// The last figures stay, marked as old.
    pub fn set_problem(&mut self, problem: String) {
        self.displayed.problem = Some(problem);
    }

    pub fn handle_key(&mut self, key: KeyEvent) -> KeyOutcome {
        if key.kind == KeyEventKind::Release {
            return KeyOutcome::Continue;
        }
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if is_control && matches!(key.code, KeyCode::Char('c' | 'd')) {
            return KeyOutcome::Quit;
        }
        if self.is_typing {
            self.handle_filter_key(key.code, is_control);
            return KeyOutcome::Continue;
        }
        if self.is_help_open {
            self.is_help_open = false;
            return KeyOutcome::Continue;
        }
        match key.code {
            KeyCode::Char('q') => return KeyOutcome::Quit,
            KeyCode::Esc => self.set_filter(String::new()),
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.is_help_open = true,
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Char(digit @ '1'..='5') => self.show(View::ALL[digit as usize - '1' as usize]),
            KeyCode::Tab | KeyCode::Right => self.switch_view(1),
            KeyCode::BackTab | KeyCode::Left => self.switch_view(View::ALL.len() - 1),
            KeyCode::Char('>' | 's') => self.sort_by_offset(1),
            KeyCode::Char('<' | 'S') => self.sort_by_offset(self.view.columns().len() - 1),
            KeyCode::Char('r') => self.reverse(),
            code => self.move_selection(code),
        }
        KeyOutcome::Continue
    }

    fn handle_filter_key(&mut self, code: KeyCode, is_control: bool) {
        match code {
            KeyCode::Enter => self.is_typing = false,
            KeyCode::Esc => {
                self.is_typing = false;
                self.set_filter(String::new());
            }
            KeyCode::Char('u') if is_control => self.set_filter(String::new()),
            KeyCode::Char(c) if !is_control && self.filter.len() < MAX_FILTER_LENGTH => {
                self.set_filter(self.filter.clone() + &c.to_string());
            }
            KeyCode::Backspace => {
                let mut filter = self.filter.clone();
                filter.pop();
                self.set_filter(filter);
            }
            code => self.move_selection(code),
        }
    }

    fn move_selection(&mut self, code: KeyCode) {
        let last = self.rows.len().saturating_sub(1);
        self.selected = match code {
            KeyCode::Up | KeyCode::Char('k') => self.selected.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.selected + 1,
            KeyCode::PageUp => self.selected.saturating_sub(self.page_rows),
            KeyCode::PageDown | KeyCode::Char(' ') => self.selected + self.page_rows,
            KeyCode::Home | KeyCode::Char('g') => 0,
            KeyCode::End | KeyCode::Char('G') => last,
            _ => self.selected,
        }
        .min(last);
    }

    fn switch_view(&mut self, by: usize) {
        self.show(View::ALL[(self.view as usize + by) % View::ALL.len()]);
    }

    fn show(&mut self, view: View) {
        self.view = view;
        (self.selected, self.offset) = (0, 0);
        self.arrange();
    }

    fn set_filter(&mut self, filter: String) {
        self.filter = filter;
        self.arrange();
    }

    /// Sorts by the column so many places further; at first by the first one.
    fn sort_by_offset(&mut self, by: usize) {
        let columns = self.view.columns().len();
        let column = match self.sorting() {
            Some(sorting) => (sorting.column + by) % columns,
            None => (columns + by - 1) % columns,
        };
        self.sorting[self.view as usize] = Some(Sorting {
            column,
            is_reversed: false,
        });
        self.arrange();
    }

    fn reverse(&mut self) {
        let sorting = self.sorting().unwrap_or(Sorting {
            column: 0,
            is_reversed: false,
        });
        self.sorting[self.view as usize] = Some(Sorting {
            is_reversed: !sorting.is_reversed,
            ..sorting
        });
        self.arrange();
    }

    /// Makes the rows again. The selection keeps its place.
    fn arrange(&mut self) {
        let rows = self
            .displayed
            .fleet
            .as_ref()
            .map(|fleet| self.view.rows(fleet))
            .unwrap_or_default();
        self.rows = filter_rows(rows, &self.filter);
        if let Some(Sorting {
            column,
            is_reversed,
        }) = self.sorting()
        {
            // Stable: of equal ones the fleet's order stays.
            self.rows.sort_by(|a, b| {
                let order = a[column].compare(&b[column]);
                if is_reversed { order.reverse() } else { order }
            });
        }
        self.selected = self.selected.min(self.rows.len().saturating_sub(1));
    }
}

/// Rows with the text in one of their names, whatever its case.
fn filter_rows(mut rows: Vec<Vec<Cell>>, filter: &str) -> Vec<Vec<Cell>> {
    if !filter.is_empty() {
        let filter = filter.to_lowercase();
        let has =
            |cell: &Cell| matches!(cell, Cell::Text(text) if text.to_lowercase().contains(&filter));
        rows.retain(|row| row.iter().any(has));
    }
    rows
}

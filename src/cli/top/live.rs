//! The terminal: keys in, frames out, and the terminal as it was at the end, whatever the end is.

use super::draw::{Colors, draw};
use super::state::{KeyOutcome, Top};
use anyhow::{Context, Result};
use ratatui::crossterm::event::{self, Event};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};
use stowage_scheduling::explaining::fleet::Fleet;

/// How long a wait for keys lasts at most: how soon a new answer, or a signal, is noticed.
const EVENT_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How often the screen is drawn without news: the age of the figures is shown in seconds.
const REDRAW_INTERVAL: Duration = Duration::from_secs(1);

/// The answer of the server, or why there is none.
pub type Answer = Result<Box<Fleet>, String>;

/// Shows answers until the user quits or `is_over` is set.
pub fn run(
    mut top: Top,
    answers: &Receiver<Answer>,
    colors: Colors,
    is_over: &AtomicBool,
) -> Result<()> {
    // It restores the terminal on a panic, too.
    let mut terminal =
        ratatui::try_init().context("this terminal cannot be used; --once needs none")?;
    let shown = show(&mut top, &mut terminal, answers, colors, is_over);
    ratatui::try_restore().context("the terminal could not be restored; `reset` does it")?;
    shown
}

fn show(
    top: &mut Top,
    terminal: &mut ratatui::DefaultTerminal,
    answers: &Receiver<Answer>,
    colors: Colors,
    is_over: &AtomicBool,
) -> Result<()> {
    let (mut answered_at, mut drawn_at) = (Instant::now(), None::<Instant>);
    while !is_over.load(Ordering::Relaxed) {
        let mut is_changed = drawn_at.is_none_or(|drawn| drawn.elapsed() >= REDRAW_INTERVAL);
        loop {
            match answers.try_recv() {
                Ok(Ok(fleet)) => {
                    answered_at = Instant::now();
                    top.set_fleet(*fleet);
                }
                Ok(Err(problem)) => top.set_problem(problem),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
            is_changed = true;
        }
        if is_changed {
            top.displayed.age = answered_at.elapsed();
            terminal.draw(|frame| draw(top, frame.area(), frame.buffer_mut(), colors))?;
            drawn_at = Some(Instant::now());
        }
        // All keys that are there, before the next frame: held down, a key shall not run on after it is let go.
        let mut wait = EVENT_POLL_INTERVAL;
        while event::poll(wait)? {
            wait = Duration::ZERO;
            match event::read()? {
                Event::Key(key) if top.handle_key(key) == KeyOutcome::Quit => return Ok(()),
                _ => drawn_at = None,
            }
        }
    }
    Ok(())
}

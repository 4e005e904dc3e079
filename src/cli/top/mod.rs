//! `stowage top`: the fleet in a terminal, live: nodes, GPUs, pods, what waits, and models.
//!
//! [`view`] makes tables of the fleet, [`state`] is what is shown of them, [`draw`] draws it, [`live`] has the terminal. With
//! `--once` or `-o` one answer is printed. Nothing is decided here.

mod cell;
mod draw;
mod live;
mod state;
mod view;

use super::access::{Access, ContextAccessArgs};
use super::operators_client::{self, OperatorsClientError};
use super::output::{Columns, OutputArgs};
use super::{duration, exit_without_answer};
use anyhow::{Result, bail};
use cell::Cell;
use clap::Args;
use draw::{Colors, summary_of};
use live::Answer;
use state::Top;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use stowage_scheduling::explaining::fleet::Fleet;
use stowage_telemetry::wants_no_color;
use tokio::signal::unix::{SignalKind, signal};
use view::{Column, View, widths};

const EXIT_CODES: &str = "Exit codes: 0 after q or Ctrl-C, or when the table is printed, 2 if nothing answers, there is no terminal, \
                          or the arguments are invalid.";

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct TopArgs {
    #[command(flatten)]
    access: ContextAccessArgs,

    /// What to show at first
    #[arg(long, value_enum, value_name = "VIEW", default_value_t = View::Nodes)]
    view: View,

    /// Time from one question to the next, from 500ms to 5m
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = interval)]
    interval: Duration,

    /// Print the table once, without a terminal
    #[arg(long)]
    once: bool,

    #[command(flatten)]
    output: OutputArgs,
}

const FLEET_PATH: &str = "/v1/fleet";

/// Shorter, a large cluster would be asked again before its answer is read.
fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration(text)?;
    match interval.as_millis() {
        500..=300_000 => Ok(interval),
        _ => Err("write a duration from 500ms to 5m, such as 2s".into()),
    }
}

impl TopArgs {
    pub async fn run(self) -> Result<ExitCode> {
        self.try_run().await.or_else(exit_without_answer)
    }

    async fn try_run(self) -> Result<ExitCode> {
        let access = self.access.read().await?;
        if self.once || self.output.is_data() {
            let fleet: Fleet = operators_client::get(&access, FLEET_PATH, "fleet").await?;
            self.output
                .print(&fleet, |fleet, columns| table(fleet, self.view, columns))?;
            return Ok(ExitCode::SUCCESS);
        }
        if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
            bail!(
                "top draws on a terminal, and this is none: --once prints the table, -o json the figures"
            );
        }
        let colors = if wants_no_color() {
            Colors::Off
        } else {
            Colors::On
        };
        let top = Top::new(access.server_name(), self.view);
        let is_over = Arc::new(AtomicBool::new(false));
        end_on_signal(is_over.clone())?;
        let (sender, answers) = channel();
        let shown = tokio::task::spawn_blocking(move || live::run(top, &answers, colors, &is_over));
        let asking = self.poll_fleet(access, sender);
        tokio::pin!(shown, asking);
        let shown = tokio::select! {
            shown = &mut shown => shown,
            // Nothing takes the answers any more.
            () = asking => shown.await,
        };
        shown??;
        Ok(ExitCode::SUCCESS)
    }

    /// Asks again and again, until nothing takes the answers.
    async fn poll_fleet(self, mut access: Access, answers: Sender<Answer>) {
        loop {
            let answer = operators_client::get::<Fleet>(&access, FLEET_PATH, "fleet").await;
            // A token lasts for minutes, and this runs for hours.
            if matches!(answer, Err(OperatorsClientError::NotAllowed { .. }))
                && let Ok(renewed) = self.access.renew(&access).await
            {
                access = renewed;
            }
            if answers
                .send(answer.map(Box::new).map_err(|error| error.to_string()))
                .is_err()
            {
                return;
            }
            tokio::time::sleep(self.interval).await;
        }
    }
}

/// How long the screen has to end after a signal: it takes far less, unless its terminal is gone.
const SIGNAL_EXIT_TIMEOUT: Duration = Duration::from_secs(1);
/// What a shell says of a program that SIGHUP has ended.
const HUNG_UP: i32 = 128 + 1;

/// A signal ends it as a key does, so that the terminal is restored.
fn end_on_signal(is_over: Arc<AtomicBool>) -> Result<()> {
    let (mut terminate, mut hangup) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::hangup())?,
    );
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
        is_over.store(true, Ordering::Relaxed);
        // Where the terminal is gone, crossterm reads its end again and again and never returns. Nothing is left to restore there.
        tokio::time::sleep(SIGNAL_EXIT_TIMEOUT).await;
        std::process::exit(HUNG_UP);
    });
    Ok(())
}

/// The summary and the whole table of a view.
fn table(fleet: &Fleet, view: View, columns: Columns) -> String {
    let mut text = summary_of(fleet) + "\n\n";
    let rows = view.rows(fleet);
    if rows.is_empty() {
        return text + "There is nothing to show.\n";
    }
    let screen = columns.0.unwrap_or(u16::MAX.into());
    let widths = widths(view.columns(), u16::try_from(screen).unwrap_or(u16::MAX));
    let shown: Vec<(usize, &Column)> = view
        .columns()
        .iter()
        .enumerate()
        .filter(|(index, _)| widths[*index] > 0)
        .collect();
    let header: Vec<&str> = shown.iter().map(|(_, column)| column.title).collect();
    let right: Vec<usize> = (0..shown.len())
        .filter(|place| shown[*place].1.is_right)
        .collect();
    let row = |row: &Vec<Cell>| {
        let cell = |(index, _): &(usize, _)| row[*index].text_within(widths[*index].into());
        shown.iter().map(cell).collect()
    };
    text += &columns.table(&header, rows.iter().map(row), &right);
    columns.wrap(&text)
}

#[cfg(test)]
mod tests;

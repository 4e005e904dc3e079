//! `stowage bundle`: fetches what a running service has recorded of the last minutes, into a file for `stowage replay`; or makes
//! such a file of a recording that is here.

use super::access::ContextAccessArgs;
use super::duration;
use super::operators_client;
use super::standard_input::display_name;
use anyhow::{Context, Result, bail};
use clap::Args;
use std::fs::OpenOptions;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;
use stowage_recording::frame::MAGIC;
use stowage_scheduling::units::plural;
use stowage_server::flight_recorder::{LeftOut, write_recording_bundle};
use stowage_server::service::BundleNames;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;

#[derive(Debug, Args)]
pub struct BundleArgs {
    /// Where to write it; `-` is standard output
    #[arg(
        short = 'f',
        long,
        value_name = "FILE",
        default_value = "stowage.bundle"
    )]
    file: PathBuf,

    /// How much of the past
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = minutes)]
    last: u64,

    /// Bundle a whole local recording instead of asking a running service: a directory that `serve --record` writes, or a file;
    /// `-` is standard input
    #[arg(long, value_name = "RECORDING", conflicts_with_all = ["last", "AccessArgs", "context"])]
    from: Option<PathBuf>,

    /// Put pseudonyms in place of the names of pods, namespaces, nodes, GPUs, models and images, of labels' values, and of what a
    /// policy calls its classes and tenants. The bundle replays as it would with them
    #[arg(long)]
    redact: bool,

    #[command(flatten)]
    access: ContextAccessArgs,
}

/// The exit codes that a shell gives a command that SIGHUP, SIGINT or SIGTERM ended.
const HUNG_UP: i32 = 129;
const INTERRUPTED: i32 = 130;
const TERMINATED: i32 = 143;

/// Where the bundle goes.
struct BundleOut {
    out: BufWriter<Box<dyn Write + Send>>,
    bytes: u64,
    /// Why it could not be written, which is not the recording's fault.
    write_error: Option<io::Error>,
}

/// A file that is not whole yet. It has a name that no other file has, because `--from` may read any, and goes away if it does not
/// become whole.
struct PartFile {
    path: PathBuf,
    signal_task: JoinHandle<()>,
}

impl BundleArgs {
    pub async fn run(self) -> Result<ExitCode> {
        if self.file == Path::new("-") {
            let (_, left_out) = self.write_to(Box::new(io::stdout())).await?;
            return Ok(warn_left_out(&left_out));
        }
        let unwritten = || format!("the bundle {} cannot be written", self.file.display());
        // A pipe or a device takes it as it comes.
        if std::fs::metadata(&self.file).is_ok_and(|about| !about.is_file()) {
            let out = OpenOptions::new()
                .write(true)
                .open(&self.file)
                .with_context(unwritten)?;
            let (_, left_out) = self.write_to(Box::new(out)).await?;
            return Ok(warn_left_out(&left_out));
        }
        // What a link names is replaced, and not the link.
        let whole = std::fs::canonicalize(&self.file).unwrap_or_else(|_| self.file.clone());
        let (part, out) = PartFile::create_beside(&whole).with_context(unwritten)?;
        let (bytes, left_out) = self.write_to(Box::new(out)).await?;
        part.rename_to(&whole).with_context(unwritten)?;
        let file = self.file.display();
        let code = warn_left_out(&left_out);
        writeln!(
            io::stdout(),
            "{file}: {}. Replay it with `stowage replay {file}`",
            plural(bytes, "byte")
        )?;
        Ok(code)
    }

    /// Writes the bundle; returns its length in bytes, and the parts of a local recording that are not in it.
    async fn write_to(&self, out: Box<dyn Write + Send>) -> Result<(u64, Vec<LeftOut>)> {
        let mut out = BundleOut {
            out: BufWriter::new(out),
            bytes: 0,
            write_error: None,
        };
        let written = self.write_parts(&mut out).await;
        let written =
            written.and_then(|left_out| out.flush().map(|()| left_out).map_err(Into::into));
        if let Some(error) = out.write_error {
            return Err(error)
                .with_context(|| format!("the bundle {} cannot be written", self.file.display()));
        }
        let left_out = written.context("there is no bundle")?;
        if out.bytes > 0 {
            return Ok((out.bytes, left_out));
        }
        match &self.from {
            Some(from) => {
                let why = left_out
                    .first()
                    .map_or(String::new(), |LeftOut { end, .. }| format!(": it {end}"));
                bail!("{} has no recording{why}", display_name(from))
            }
            None => bail!(
                "nothing was recorded in the last {} min. Ask for more with --last. If stowage_recorder_recording is 0 on its \
                 /metrics, it does not record now, and its log says why",
                self.last
            ),
        }
    }

    async fn write_parts(&self, out: &mut BundleOut) -> Result<Vec<LeftOut>> {
        if let Some(from) = &self.from {
            let names = if self.redact {
                BundleNames::Pseudonyms
            } else {
                BundleNames::AsRecorded
            };
            return Ok(write_recording_bundle(from, names, out)?);
        }
        let access = self.access.read().await?;
        let redact = if self.redact { "&redact=true" } else { "" };
        let path = format!("/v1/bundle?minutes={}{redact}", self.last);
        operators_client::download(&access, &path, ("bundle", &MAGIC), out).await?;
        Ok(Vec::new())
    }
}

impl Write for BundleOut {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self
            .out
            .write(bytes)
            .map_err(|error| self.record_error(error))?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush().map_err(|error| self.record_error(error))
    }
}

impl BundleOut {
    /// The reader of the recording gets the error, too, and may take it for its own.
    fn record_error(&mut self, error: io::Error) -> io::Error {
        let copy = io::Error::from(error.kind());
        self.write_error.get_or_insert(error);
        copy
    }
}

impl PartFile {
    fn create_beside(whole: &Path) -> io::Result<(Self, std::fs::File)> {
        let name = whole
            .file_name()
            .ok_or(io::ErrorKind::IsADirectory)?
            .to_string_lossy();
        // Another machine that writes here may have a process of this number.
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default()
            .as_nanos();
        let path = whole.with_file_name(format!(".{name}.{}-{now:x}.part", std::process::id()));
        // From here on a signal ends the process by way of the task.
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hangup = signal(SignalKind::hangup())?;
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        let unfinished = path.clone();
        let interrupted = tokio::spawn(async move {
            let code = tokio::select! {
                _ = interrupt.recv() => INTERRUPTED,
                _ = terminate.recv() => TERMINATED,
                _ = hangup.recv() => HUNG_UP,
            };
            let _ = std::fs::remove_file(unfinished);
            std::process::exit(code);
        });
        Ok((
            Self {
                path,
                signal_task: interrupted,
            },
            file,
        ))
    }

    fn rename_to(self, whole: &Path) -> io::Result<()> {
        std::fs::rename(&self.path, whole)
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        self.signal_task.abort();
        // There is none any more once it is whole.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// 1 if something is not in the bundle: it replays as a whole one does.
fn warn_left_out(left_out: &[LeftOut]) -> ExitCode {
    for LeftOut { path, end, bytes } in left_out {
        let path = display_name(path);
        let rest = bytes.map_or("the rest".to_owned(), |bytes| plural(bytes, "byte"));
        // A reader of the warnings that has gone does not take the bundle with it.
        let _ = writeln!(
            io::stderr(),
            "warning: {path} {end}: the bundle lacks {rest} of it"
        );
    }
    if left_out.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    }
}

/// Whole minutes, rounded up.
fn minutes(text: &str) -> Result<u64, String> {
    if text.parse().is_ok_and(|number: u64| number > 0) {
        return Err(format!("the unit is missing: write {text}m for minutes"));
    }
    match duration(text)?.as_millis().div_ceil(60_000) as u64 {
        minutes @ 1..=10_080 => Ok(minutes),
        _ => Err("write a duration from 1m to a week, such as 15m".into()),
    }
}

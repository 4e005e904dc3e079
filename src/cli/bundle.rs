//! `stowage bundle`: fetches what a running service has recorded of the last minutes, into a file for `stowage replay`; or makes
//! such a file of a recording that is here.

use super::access::AccessArgs;
use super::duration;
use super::operators_client;
use crate::flight_recorder::{LeftOut, write_bundle_of};
use crate::service::BundleNames;
use anyhow::{Context, Result, bail};
use clap::Args;
use std::fs::OpenOptions;
use std::io::{BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Debug, Args)]
pub struct BundleArgs {
    /// Where to write it; `-` is standard output
    #[arg(short = 'f', long, value_name = "FILE", default_value = "stowage.bundle")]
    file: PathBuf,

    /// How much of the past
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = minutes)]
    last: u64,

    /// The operators' address of a running `stowage serve` (--admin there)
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9445")]
    server: String,

    /// Bundle a whole local recording instead of asking a running service: a directory that `serve --record` writes, or a file
    #[arg(long, value_name = "RECORDING", conflicts_with_all = ["last", "server"])]
    from: Option<PathBuf>,

    /// Put pseudonyms in place of the names of pods, namespaces, nodes, GPUs, models and images, of labels' values, and of what a
    /// policy calls its classes and tenants. The bundle replays as it would with them
    #[arg(long)]
    redact: bool,

    #[command(flatten)]
    access: AccessArgs,
}

impl BundleArgs {
    pub async fn run(self) -> Result<ExitCode> {
        if self.file == Path::new("-") {
            let left_out = self.write_to(&mut std::io::stdout()).await?;
            return Ok(warned_of(&left_out));
        }
        let unwritten = || format!("the bundle {} cannot be written", self.file.display());
        // A pipe or a device takes it as it comes.
        if std::fs::metadata(&self.file).is_ok_and(|about| !about.is_file()) {
            let mut out = OpenOptions::new().write(true).open(&self.file).with_context(unwritten)?;
            return Ok(warned_of(&self.write_to(&mut out).await?));
        }
        // It comes under its name when it is whole. Until then it has a name that no file has: `--from` may read any.
        let name = self.file.file_name().with_context(unwritten)?.to_string_lossy();
        let part = self.file.with_file_name(format!(".{name}.{}.part", std::process::id()));
        let new = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part);
        let mut out = BufWriter::new(new.with_context(unwritten)?);
        let written = self.write_to(&mut out).await.and_then(|left_out| {
            out.flush().with_context(unwritten)?;
            Ok((out.get_ref().metadata().with_context(unwritten)?.len(), left_out))
        });
        let (bytes, left_out) = match written {
            Ok((bytes, left_out)) if bytes > 0 => (bytes, left_out),
            not_written => {
                let _ = std::fs::remove_file(&part);
                not_written?;
                match &self.from {
                    Some(from) => bail!("{} has no recording", from.display()),
                    None => {
                        bail!("nothing was recorded in the last {} min: ask for more with --last", self.last)
                    }
                }
            }
        };
        std::fs::rename(&part, &self.file).with_context(unwritten)?;
        let file = self.file.display();
        let code = warned_of(&left_out);
        writeln!(std::io::stdout(), "{file}: {bytes} bytes. Replay it with `stowage replay {file}`")?;
        Ok(code)
    }

    /// Answers what of a local recording is not in the bundle.
    async fn write_to(&self, out: &mut (dyn Write + Send)) -> Result<Vec<LeftOut>> {
        if let Some(from) = &self.from {
            let names = if self.redact { BundleNames::Pseudonyms } else { BundleNames::AsRecorded };
            let unread = || format!("no bundle of {}", from.display());
            return write_bundle_of(from, names, out).with_context(unread);
        }
        let access = self.access.read(&self.server).await?;
        let redact = if self.redact { "&redact=true" } else { "" };
        let page = format!("/v1/bundle?minutes={}{redact}", self.last);
        operators_client::download(&self.server, &access, &page, out).await?;
        Ok(Vec::new())
    }
}

/// 1 if something is not in the bundle: it replays as a whole one does.
fn warned_of(left_out: &[LeftOut]) -> ExitCode {
    for LeftOut { path, at, bytes } in left_out {
        let path = path.display();
        // A reader of the warnings that has gone does not take the bundle with it.
        let _ = writeln!(
            std::io::stderr(),
            "warning: {path} is cut or damaged at byte {at}: {bytes} bytes of it are not in the bundle"
        );
    }
    if left_out.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) }
}

/// Whole minutes, rounded up.
fn minutes(text: &str) -> Result<u64, String> {
    match duration(text)?.as_millis().div_ceil(60_000) as u64 {
        minutes @ 1..=10_080 => Ok(minutes),
        _ => Err("write a duration from 1m to a week, such as 15m".into()),
    }
}

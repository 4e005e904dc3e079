//! The policy's files, watched: a change is read, checked, and brought into force without a restart; one that is refused
//! changes nothing and is said loudly.
//!
//! ```text
//!  path ─► read ─► step ─► load ─┬─► Service::set_policy ─► announce   (one step: no decision sees half a policy)
//!    twice a second              └─► refused: the last good one stays ─► announce
//! ```
//!
//! It looks at the contents twice a second in place of asking the kernel to tell of changes: that is a few kilobytes, and it
//! works alike for files, directories, the links of a mounted ConfigMap and network file systems, of which some tell of
//! nothing.
//!
//! Nothing here knows what a policy says, and nothing here is waited for by a request.

mod announce;
pub mod read;
mod step;

pub use announce::OwnPod;

use crate::control_plane::ControlPlane;
use crate::policy_file::diagnostic::text::{Colours, render};
use crate::policy_file::diagnostic::{Diagnostic, Severity};
use crate::policy_file::{self, SourceText, Sources};
use crate::scheduling::policy::Policy;
use crate::service::Service;
use announce::Announcer;
use read::{ReadError, read};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use step::{Step, Watching};

/// A change is in force within two seconds: it is seen after this, settled after the next, and judging all pods takes the
/// rest.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long a change must stand still. An editor writes a file in a few milliseconds, and a kubelet swaps one link.
const SETTLES_IN: Duration = Duration::from_millis(250);

/// Why there is no policy to start with.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("--policy: {0}")]
    Read(#[from] ReadError),
    #[error("--policy {}: the policy is refused\n\n{}", .path.display(), .problems.whole.trim_end())]
    Refused { path: PathBuf, problems: Problems },
}

/// What is wrong with a policy, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems {
    /// The first of them in one line, with its place.
    pub headline: String,
    /// All of them, over several lines.
    pub whole: String,
}

/// A policy as it was found, and what its author should know.
struct Found {
    policy: Policy,
    warnings: Option<String>,
}

/// Files that were a policy once, to be watched from there on.
#[derive(Debug)]
pub struct PolicyWatch {
    path: PathBuf,
    watching: Watching,
}

/// Reads the policy at `path`: a file, or a directory of them. To start with, a bad one is an error.
pub fn open(path: PathBuf) -> Result<(Policy, PolicyWatch), OpenError> {
    let texts = read(&path)?;
    let found = match load(&texts) {
        Ok(found) => found,
        Err(problems) => return Err(OpenError::Refused { path, problems }),
    };
    if let Some(warnings) = found.warnings {
        tracing::warn!("--policy {}:\n{warnings}", path.display());
    }
    Ok((found.policy, PolicyWatch { path, watching: Watching::from(texts) }))
}

/// The policy of those who name none.
pub fn built_in() -> Policy {
    load(&[]).map(|found| found.policy).unwrap_or_default()
}

impl PolicyWatch {
    /// Runs until it is dropped. What it has to say goes into the log, the metrics and `service.standing`, and into Events on
    /// `own_pod`, if that is known.
    pub async fn run(
        mut self,
        service: Arc<Service>,
        control_plane: Arc<dyn ControlPlane>,
        own_pod: Option<OwnPod>,
    ) {
        service.standing.set_source(&self.path.display().to_string());
        let announcer = Announcer::new(service.clone(), control_plane, own_pod);
        let mut pause = LOOK_EVERY;
        loop {
            tokio::time::sleep(pause).await;
            let path = self.path.clone();
            // A file system that hangs has a thread, and nobody waits for it but the next policy.
            let Ok(seen) = tokio::task::spawn_blocking(move || read(&path)).await else { continue };
            pause = LOOK_EVERY;
            match self.watching.look(seen) {
                Step::Nothing => {}
                Step::LookAgain => pause = SETTLES_IN,
                Step::Load(texts) => take_over(&service, &announcer, texts).await,
                Step::Refuse(error) => announcer.refused(&error.into()),
            }
        }
    }
}

/// What became of a change.
enum Outcome {
    InForce {
        warnings: Option<String>,
        before: Arc<Policy>,
    },
    /// It says the same in other words.
    Unchanged {
        warnings: Option<String>,
    },
    Refused(Problems),
}

/// On a thread of its own: judging every pod of a large cluster takes a while.
async fn take_over(service: &Arc<Service>, announcer: &Announcer, texts: Vec<SourceText>) {
    let judging = service.clone();
    let outcome = tokio::task::spawn_blocking(move || take(&judging, &texts)).await;
    match outcome.unwrap_or_else(|_| Outcome::Refused(Problems::of_a_panic())) {
        Outcome::InForce { warnings, before } => announcer.in_force(&before, warnings.as_deref()),
        Outcome::Unchanged { warnings } => announcer.unchanged(warnings.as_deref()),
        Outcome::Refused(problems) => announcer.refused(&problems),
    }
}

fn take(service: &Service, texts: &[SourceText]) -> Outcome {
    let Found { mut policy, warnings } = match load(texts) {
        Ok(found) => found,
        Err(problems) => return Outcome::Refused(problems),
    };
    let before = service.ledger().policy().clone();
    policy.version = before.version;
    if policy == *before {
        return Outcome::Unchanged { warnings };
    }
    service.set_policy(policy);
    Outcome::InForce { warnings, before }
}

fn load(texts: &[SourceText]) -> Result<Found, Problems> {
    let describe = |diagnostics: &[Diagnostic]| render(diagnostics, &Sources::new(texts), Colours::Off);
    match policy_file::load(texts) {
        Ok(loaded) => {
            let warnings = (!loaded.warnings.is_empty()).then(|| describe(&loaded.warnings));
            Ok(Found { policy: loaded.policy, warnings })
        }
        Err(diagnostics) => {
            Err(Problems { headline: headline(&diagnostics, texts), whole: describe(&diagnostics) })
        }
    }
}

/// `policies/a.yaml:7: there is no class `chta` (and 2 more)`.
fn headline(diagnostics: &[Diagnostic], texts: &[SourceText]) -> String {
    let mut errors = diagnostics.iter().filter(|one| one.severity == Severity::Error);
    let Some(first) = errors.next() else { return "it is refused without a word".into() };
    let more = match errors.count() {
        0 => String::new(),
        more => format!(" (and {more} more)"),
    };
    format!("{}: {}{more}", Sources::new(texts).line_of(first.span), first.message)
}

impl Problems {
    /// A defect of Stowage's own. The last good policy is worth more than a process that ends.
    fn of_a_panic() -> Self {
        let text = "Stowage failed on this policy, which is a defect of its own; its log says where";
        Self { headline: text.into(), whole: text.into() }
    }
}

impl From<ReadError> for Problems {
    fn from(error: ReadError) -> Self {
        Self { headline: error.to_string(), whole: error.to_string() }
    }
}

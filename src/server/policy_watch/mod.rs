//! Watches the policy's files: a change is read, checked, and becomes current without a restart; an invalid change has no
//! effect and is announced.
//!
//! ```text
//!  path ─► read ─► step ─► load ─┬─► ServerState::set_policy ─► announce   (one step: no decision sees half a policy)
//!    twice a second              └─► refused: the last good one stays ─► announce
//! ```
//!
//! [`last_good`] stores the current policy, so that a start that finds an invalid one uses it; without it the built-in policy
//! is used.
//!
//! The contents are read twice a second instead of relying on file notifications: that is a few kilobytes, and it works alike
//! for files, directories, the links of a mounted ConfigMap and network file systems, some of which send no notifications.
//!
//! [`windows`] opens and closes the windows of the policy in force, beside that: it does not wait for a file system that hangs.
//!
//! Nothing else here knows the meaning of a policy, and no request waits for anything here.

mod announce;
mod last_good;
pub mod read;
mod step;
mod windows;

pub use announce::OwnPod;
pub use last_good::LastGood;

use crate::service::{Service, WorkKind};
use announce::Announcer;
use read::{ReadError, read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use step::{PolicyTexts, ReloadStep, Watching};
use stowage_kubernetes_objects::port::ControlPlane;
use stowage_policy_file::diagnostic::text::{Colors, render};
use stowage_policy_file::diagnostic::{Diagnostic, Severity};
use stowage_policy_file::windows::TimeZones;
use stowage_policy_file::{self as policy_file, PolicySources, SourceText};
use stowage_scheduling::policy::Policy;
use windows::{ChangeOfPolicy, open_now};

/// A change is current within two seconds: it is seen after this time, settled after the next, and classifying all pods takes
/// the rest.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long a change must be stable. An editor writes a file in a few milliseconds, and a kubelet swaps one link.
const SETTLES_IN: Duration = Duration::from_millis(250);

/// After this many reads, ten seconds, it is announced that a policy still waits for the labels of namespaces.
const LOOKS_IN_VAIN: u32 = 20;

/// There is no policy to start with: nothing at its path, and no last good one.
#[derive(Debug, thiserror::Error)]
#[error("--policy")]
pub struct OpenError(#[from] ReadError);

/// The problems of a policy, as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems {
    /// The first problem on one line, with its place.
    pub headline: String,
    /// All problems, on several lines.
    pub whole: String,
}

/// A policy as it was found, with its warnings.
struct LoadedPolicy {
    policy: Policy,
    warnings: Option<String>,
}

/// The files of a policy, watched from here on.
#[derive(Debug)]
pub struct PolicyWatch {
    path: PathBuf,
    watching: Watching,
    last_good: Option<LastGood>,
    /// The problems of the files at the start, and which policy is used instead.
    refused: Option<(Problems, String)>,
    awaiting: Option<AwaitingPolicy>,
}

/// A policy that selects namespaces by label, while their labels are not known yet.
#[derive(Debug)]
struct AwaitingPolicy {
    texts: Vec<SourceText>,
    /// How often the files were read while the labels were unknown.
    looks: u32,
}

/// Reads the policy at `path`: a file, or a directory of them. An invalid one does not prevent the start: the last good one of
/// that path is used or, if there is none, the built-in one, and [`PolicyWatch::run`] announces it. It is an error if nothing
/// there can be read and there is no last good one: then the path is wrong.
///
/// The policy's windows are those that are open by this machine's clock.
pub fn open(
    path: PathBuf,
    last_good: Option<LastGood>,
) -> Result<(Policy, PolicyWatch), OpenError> {
    let (policy, watch) = open_files(path, last_good)?;
    Ok((
        stowage_policy_file::windows::at(policy, jiff::Timestamp::now()),
        watch,
    ))
}

fn open_files(
    path: PathBuf,
    last_good: Option<LastGood>,
) -> Result<(Policy, PolicyWatch), OpenError> {
    let seen = read(&path);
    let problems = match seen.as_ref().map(|texts| load(texts)) {
        Ok(Ok(found)) => return Ok(good(path, last_good, seen, found)),
        Ok(Err(problems)) => problems,
        Err(error) => error.clone().into(),
    };
    let (policy, acting) = match (last_good_of(&path, last_good.as_ref()), &seen) {
        (Ok(policy), _) => (policy, "the last good policy decides".to_owned()),
        (Err(_), Err(error)) => return Err(error.clone().into()),
        (Err(why), Ok(texts)) => (
            instead_of(texts),
            format!("the built-in policy decides: {why}"),
        ),
    };
    let watching = Watching::from(seen);
    let refused = Some((problems, acting));
    Ok((
        policy,
        PolicyWatch {
            path,
            watching,
            last_good,
            refused,
            awaiting: None,
        },
    ))
}

fn good(
    path: PathBuf,
    last_good: Option<LastGood>,
    seen: PolicyTexts,
    found: LoadedPolicy,
) -> (Policy, PolicyWatch) {
    if let Some(warnings) = found.warnings {
        tracing::warn!("--policy {}:\n{warnings}", path.display());
    }
    if let Ok(texts) = &seen {
        keep(last_good.as_ref(), &path, texts);
    }
    let watching = Watching::from(seen);
    (
        found.policy,
        PolicyWatch {
            path,
            watching,
            last_good,
            refused: None,
            awaiting: None,
        },
    )
}

/// The last good policy of that path, or why there is none.
fn last_good_of(path: &Path, last_good: Option<&LastGood>) -> Result<Policy, String> {
    let last_good = last_good.ok_or("no --policy-cache keeps a last good one")?;
    let texts = last_good.of(path).map_err(|error| error.to_string())?;
    // Another version of Stowage stored it, and this one may reject it.
    let found = load(&texts)
        .map_err(|problems| format!("the last good one is refused: {}", problems.headline))?;
    Ok(found.policy)
}

/// The built-in policy in place of an invalid one. If the invalid one says `mode: shadow`, the built-in one only shadows, so
/// that nothing unrequested is enforced.
fn instead_of(texts: &[SourceText]) -> Policy {
    let says_shadow = |text: &SourceText| {
        let text = String::from_utf8_lossy(&text.bytes);
        text.lines().any(|line| {
            line.trim_start()
                .strip_prefix("mode:")
                .is_some_and(|mode| mode.contains("shadow"))
        })
    };
    let policy = match texts.iter().any(says_shadow) {
        true => load(&[SourceText::new("built in", "mode: shadow\n")])
            .map(|found| found.policy)
            .ok(),
        false => None,
    };
    policy.unwrap_or_else(built_in)
}

/// Stores the policy as the last good one. A failure is only logged: this process has the policy in memory.
fn keep(last_good: Option<&LastGood>, path: &Path, texts: &[SourceText]) {
    if let Some(Err(error)) = last_good.map(|last_good| last_good.keep(path, texts)) {
        tracing::warn!(
            "--policy-cache: the policy in force cannot be kept for the next start: {error}"
        );
    }
}

/// The policy if no path is given.
pub fn built_in() -> Policy {
    load(&[]).map(|found| found.policy).unwrap_or_default()
}

impl PolicyWatch {
    /// Runs until it is dropped. Announces changes in the log, the metrics and `service.policy_status`, and as Events on
    /// `own_pod`, if that is known.
    pub async fn run(
        self,
        service: Arc<Service>,
        control_plane: Arc<dyn ControlPlane>,
        own_pod: Option<OwnPod>,
    ) {
        let change = ChangeOfPolicy::default();
        let windows = windows::watch(service.clone(), change.clone());
        futures::join!(
            self.watch_files(service, control_plane, own_pod, change),
            windows
        );
    }

    async fn watch_files(
        mut self,
        service: Arc<Service>,
        control_plane: Arc<dyn ControlPlane>,
        own_pod: Option<OwnPod>,
        change: ChangeOfPolicy,
    ) {
        service
            .policy_status
            .set_source(&self.path.display().to_string());
        let announcer = Announcer::new(service.clone(), control_plane, own_pod);
        if let Some((problems, acting)) = self.refused.take() {
            announcer.refused_at_start(&problems, &acting);
        }
        let mut pause = LOOK_EVERY;
        loop {
            tokio::time::sleep(pause).await;
            let path = self.path.clone();
            // A file system that hangs takes up one thread in the background, and only the next policy waits for it.
            let read = service
                .heavy_work
                .begin_in_background(WorkKind::Policy, move || read(&path));
            let Ok(seen) = read.await else { continue };
            pause = LOOK_EVERY;
            match self.watching.look(seen) {
                ReloadStep::Nothing => {
                    if let Some(awaiting) = self.awaiting.take_if(|_| service.namespaces_known()) {
                        self.take_over(&service, &announcer, awaiting.texts, &change)
                            .await;
                    } else if self
                        .awaiting
                        .as_mut()
                        .is_some_and(AwaitingPolicy::is_overdue)
                    {
                        announcer.refused(&Problems::of_unknown_namespaces());
                    }
                }
                ReloadStep::LookAgain => pause = SETTLES_IN,
                ReloadStep::Load(texts) => {
                    self.take_over(&service, &announcer, texts, &change).await
                }
                ReloadStep::Refuse(error) => {
                    // What waited for namespaces is not what the files say any more.
                    self.awaiting = None;
                    service.want_namespaces(service.reads_namespaces());
                    announcer.refused(&error.into());
                }
            }
        }
    }

    /// Applies the texts in the background: classifying every pod of a large cluster takes a while.
    async fn take_over(
        &mut self,
        service: &Arc<Service>,
        announcer: &Announcer,
        texts: Vec<SourceText>,
        change: &ChangeOfPolicy,
    ) {
        let (taking, last_good, path) =
            (service.clone(), self.last_good.clone(), self.path.clone());
        let (given, change) = (texts.clone(), change.clone());
        let taken = service
            .heavy_work
            .begin_in_background(WorkKind::Policy, move || {
                let outcome = take(&taking, &texts, &change);
                if !matches!(outcome, ReloadOutcome::Refused(_) | ReloadOutcome::Awaits) {
                    keep(last_good.as_ref(), &path, &texts);
                }
                outcome
            });
        self.awaiting = None;
        match taken
            .await
            .unwrap_or_else(|_| ReloadOutcome::Refused(Problems::of_a_panic()))
        {
            ReloadOutcome::InForce { warnings, before } => {
                announcer.in_force(&before, warnings.as_deref())
            }
            ReloadOutcome::Unchanged { warnings } => announcer.unchanged(warnings.as_deref()),
            ReloadOutcome::Refused(problems) => announcer.refused(&problems),
            ReloadOutcome::Awaits => {
                self.awaiting = Some(AwaitingPolicy {
                    texts: given,
                    looks: 0,
                })
            }
        }
    }
}

impl AwaitingPolicy {
    /// Counts a read. Returns `true` once, after a time in which every permitted list of namespaces has arrived.
    fn is_overdue(&mut self) -> bool {
        self.looks = self.looks.saturating_add(1);
        self.looks == LOOKS_IN_VAIN
    }
}

/// The result of a change.
enum ReloadOutcome {
    InForce {
        warnings: Option<String>,
        before: Arc<Policy>,
    },
    /// The same policy in other words.
    Unchanged {
        warnings: Option<String>,
    },
    Refused(Problems),
    /// It is tried again when the labels of namespaces are known; the policy before stays in force.
    Awaits,
}

/// Brings these texts into force, if they are a policy that may.
fn take(service: &Service, texts: &[SourceText], change: &ChangeOfPolicy) -> ReloadOutcome {
    let outcome = try_to_take(service, texts, change);
    // A policy that has waited for them may have been withdrawn.
    let waits = matches!(outcome, ReloadOutcome::Awaits);
    service.want_namespaces(waits || service.reads_namespaces());
    outcome
}

fn try_to_take(service: &Service, texts: &[SourceText], change: &ChangeOfPolicy) -> ReloadOutcome {
    let LoadedPolicy {
        mut policy,
        warnings,
    } = match load(texts) {
        Ok(found) => found,
        Err(problems) => return ReloadOutcome::Refused(problems),
    };
    let _whole = change.lock();
    let before = service.cluster().ledger().policy().clone();
    if policy.reads_namespaces() && !service.namespaces_known() {
        return ReloadOutcome::Awaits;
    }
    policy.version = before.version;
    // Which windows are open, and which namespaces have which labels, is no change of the files.
    policy = policy.with_open_windows(before.open_windows().clone());
    policy = service.cluster().ledger().under_namespaces(policy);
    if policy == *before {
        return ReloadOutcome::Unchanged { warnings };
    }
    let open = open_now(service, &mut TimeZones::default(), &policy);
    if !service.set_policy(policy.with_open_windows(open)) {
        return ReloadOutcome::Awaits;
    }
    ReloadOutcome::InForce { warnings, before }
}

fn load(texts: &[SourceText]) -> Result<LoadedPolicy, Problems> {
    let describe =
        |diagnostics: &[Diagnostic]| render(diagnostics, &PolicySources::new(texts), Colors::Off);
    match policy_file::load(texts) {
        Ok(loaded) => {
            let warnings = (!loaded.warnings.is_empty()).then(|| describe(&loaded.warnings));
            Ok(LoadedPolicy {
                policy: loaded.policy,
                warnings,
            })
        }
        Err(diagnostics) => Err(Problems {
            headline: headline(&diagnostics, texts),
            whole: describe(&diagnostics),
        }),
    }
}

/// `policies/a.yaml:7: there is no class `chta` (and 2 more)`.
fn headline(diagnostics: &[Diagnostic], texts: &[SourceText]) -> String {
    let mut errors = diagnostics
        .iter()
        .filter(|one| one.severity == Severity::Error);
    let Some(first) = errors.next() else {
        return "it is refused without a word".into();
    };
    let more = match errors.count() {
        0 => String::new(),
        more => format!(" (and {more} more)"),
    };
    format!(
        "{}: {}{more}",
        PolicySources::new(texts).line_of(first.span),
        first.message
    )
}

impl Problems {
    /// The problem that namespaces could not be listed for ten seconds; usually Stowage may not read them.
    fn of_unknown_namespaces() -> Self {
        let text = "it selects namespaces by label (namespaceSelector), and these could not be listed for ten seconds; it comes \
                    into force when they can. May Stowage's service account list and watch namespaces?";
        Self {
            headline: text.into(),
            whole: text.into(),
        }
    }

    /// The problem that Stowage panicked on this policy. Serving the last good policy is better than ending the process.
    fn of_a_panic() -> Self {
        let text =
            "Stowage failed on this policy, which is a defect of its own; its log says where";
        Self {
            headline: text.into(),
            whole: text.into(),
        }
    }
}

impl From<ReadError> for Problems {
    fn from(error: ReadError) -> Self {
        Self {
            headline: error.to_string(),
            whole: error.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f_a_policy_that_selects_namespaces_waits_for_their_labels_and_then_comes_into_force() {
        let service = Service::with_stopped_clock(built_in());
        let text = "classes: [{name: own, match: {namespaceSelector: {matchLabels: {team: a}}}}]\n";
        let texts = [SourceText::new("policy.yaml", text)];
        let (before, change) = (
            service.cluster().ledger().policy().digest,
            ChangeOfPolicy::default(),
        );
        assert!(matches!(
            take(&service, &texts, &change),
            ReloadOutcome::Awaits
        ));
        assert_eq!(
            service.cluster().ledger().policy().digest,
            before,
            "the policy before stays in force"
        );
        assert!(
            *service.namespaces_wanted().borrow(),
            "and the namespaces are asked for"
        );
        let labels = Arc::new([("team".to_owned(), "a".to_owned())].into());
        service.list_namespaces([("chat".to_owned(), labels)].into());
        assert!(matches!(
            take(&service, &texts, &change),
            ReloadOutcome::InForce { .. }
        ));
        assert!(matches!(
            take(&service, &texts, &change),
            ReloadOutcome::Unchanged { .. }
        ));
        let mut awaiting = AwaitingPolicy {
            texts: texts.to_vec(),
            looks: 0,
        };
        let announced = (0..100).filter(|_| awaiting.is_overdue()).count();
        assert_eq!(announced, 1, "it is said once that it takes long");
    }

    #[test]
    fn a_policy_that_is_withdrawn_before_it_came_into_force_leaves_no_watch_of_namespaces() {
        let service = Service::with_stopped_clock(built_in());
        let selects =
            "classes: [{name: own, match: {namespaceSelector: {matchLabels: {team: a}}}}]\n";
        let change = ChangeOfPolicy::default();
        for then in ["", "classes: [{nmae: typo}]\n"] {
            let [selects, then] =
                [selects, then].map(|text| [SourceText::new("policy.yaml", text)]);
            assert!(matches!(
                take(&service, &selects, &change),
                ReloadOutcome::Awaits
            ));
            take(&service, &then, &change);
            assert!(
                !*service.namespaces_wanted().borrow(),
                "nothing asks for them any more"
            );
        }
    }
}

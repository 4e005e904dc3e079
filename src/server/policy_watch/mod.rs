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
pub use last_good::LastGoodStore;

use crate::service::{ServerState, WorkKind};
use announce::Announcer;
use read::{ReadError, read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use step::{FileChangeDetector, PolicyTexts, ReloadStep};
use stowage_kubernetes_objects::port::ControlPlane;
use stowage_policy_file::diagnostic::text::{Colors, render};
use stowage_policy_file::diagnostic::{Diagnostic, Severity};
use stowage_policy_file::windows::TimeZones;
use stowage_policy_file::{self as policy_file, PolicySources, SourceText};
use stowage_scheduling::policy::Policy;
use windows::{PolicyChangeLock, open_now};

/// A change is current within two seconds: it is seen after this time, settled after the next, and classifying all pods takes
/// the rest.
const READ_INTERVAL: Duration = Duration::from_millis(500);
/// How long a change must be stable. An editor writes a file in a few milliseconds, and a kubelet swaps one link.
const SETTLE_TIME: Duration = Duration::from_millis(250);

/// After this many reads, ten seconds, it is announced that a policy still waits for the labels of namespaces.
const READS_UNTIL_OVERDUE: u32 = 20;

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
    pub text: String,
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
    detector: FileChangeDetector,
    last_good: Option<LastGoodStore>,
    /// The problems of the files at the start, and which policy is used instead.
    refused_at_start: Option<(Problems, String)>,
    awaiting: Option<AwaitingPolicy>,
}

/// A policy that selects namespaces by label, while their labels are not known yet.
#[derive(Debug)]
struct AwaitingPolicy {
    texts: Vec<SourceText>,
    /// How often the files were read while the labels were unknown.
    reads: u32,
}

/// Reads the policy at `path`: a file, or a directory of them. An invalid one does not prevent the start: the last good one of
/// that path is used or, if there is none, the built-in one, and [`PolicyWatch::run`] announces it. It is an error if nothing
/// there can be read and there is no last good one: then the path is wrong.
///
/// The policy's windows are those that are open by this machine's clock.
pub fn open(
    path: PathBuf,
    last_good: Option<LastGoodStore>,
) -> Result<(Policy, PolicyWatch), OpenError> {
    let (policy, watch) = open_without_windows(path, last_good)?;
    Ok((
        stowage_policy_file::windows::policy_at(policy, jiff::Timestamp::now()),
        watch,
    ))
}

fn open_without_windows(
    path: PathBuf,
    last_good: Option<LastGoodStore>,
) -> Result<(Policy, PolicyWatch), OpenError> {
    let read_texts = read(&path);
    let problems = match read_texts.as_ref().map(|texts| load(texts)) {
        Ok(Ok(found)) => return Ok(watch_valid(path, last_good, read_texts, found)),
        Ok(Err(problems)) => problems,
        Err(error) => error.clone().into(),
    };
    let (policy, acting) = match (load_last_good(&path, last_good.as_ref()), &read_texts) {
        (Ok(policy), _) => (policy, "the last good policy decides".to_owned()),
        (Err(_), Err(error)) => return Err(error.clone().into()),
        (Err(why), Ok(texts)) => (
            built_in_instead_of(texts),
            format!("the built-in policy decides: {why}"),
        ),
    };
    let detector = FileChangeDetector::from(read_texts);
    let refused = Some((problems, acting));
    Ok((
        policy,
        PolicyWatch {
            path,
            detector,
            last_good,
            refused_at_start: refused,
            awaiting: None,
        },
    ))
}

fn watch_valid(
    path: PathBuf,
    last_good: Option<LastGoodStore>,
    texts: PolicyTexts,
    loaded: LoadedPolicy,
) -> (Policy, PolicyWatch) {
    if let Some(warnings) = loaded.warnings {
        tracing::warn!("--policy {}:\n{warnings}", path.display());
    }
    if let Ok(texts) = &texts {
        store_last_good(last_good.as_ref(), &path, texts);
    }
    let detector = FileChangeDetector::from(texts);
    (
        loaded.policy,
        PolicyWatch {
            path,
            detector,
            last_good,
            refused_at_start: None,
            awaiting: None,
        },
    )
}

/// The last good policy of that path, or why there is none.
fn load_last_good(path: &Path, last_good: Option<&LastGoodStore>) -> Result<Policy, String> {
    let last_good = last_good.ok_or("no --policy-cache keeps a last good one")?;
    let texts = last_good.load(path).map_err(|error| error.to_string())?;
    // Another version of Stowage stored it, and this one may reject it.
    let found = load(&texts)
        .map_err(|problems| format!("the last good one is refused: {}", problems.headline))?;
    Ok(found.policy)
}

/// The built-in policy in place of an invalid one. If the invalid one says `mode: shadow`, the built-in one only shadows, so
/// that nothing unrequested is enforced.
fn built_in_instead_of(texts: &[SourceText]) -> Policy {
    let says_shadow = |text: &SourceText| {
        let text = String::from_utf8_lossy(&text.bytes);
        text.lines().any(|line| {
            line.trim_start()
                .strip_prefix("mode:")
                .is_some_and(|mode| mode.contains("shadow"))
        })
    };
    let policy = match texts.iter().any(says_shadow) {
        true => load(&[SourceText::new(
            "built in",
            "kind: SchedulingPolicy\nmode: shadow\n",
        )])
        .map(|found| found.policy)
        .ok(),
        false => None,
    };
    policy.unwrap_or_else(built_in)
}

/// Stores the policy as the last good one. A failure is only logged: this process has the policy in memory.
fn store_last_good(last_good: Option<&LastGoodStore>, path: &Path, texts: &[SourceText]) {
    if let Some(Err(error)) = last_good.map(|last_good| last_good.store(path, texts)) {
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
        state: Arc<ServerState>,
        control_plane: Arc<dyn ControlPlane>,
        own_pod: Option<OwnPod>,
    ) {
        let change = PolicyChangeLock::default();
        let windows = windows::watch(state.clone(), change.clone());
        futures::join!(
            self.watch_files(state, control_plane, own_pod, change),
            windows
        );
    }

    async fn watch_files(
        mut self,
        state: Arc<ServerState>,
        control_plane: Arc<dyn ControlPlane>,
        own_pod: Option<OwnPod>,
        change: PolicyChangeLock,
    ) {
        state
            .policy_status
            .set_source(&self.path.display().to_string());
        let announcer = Announcer::new(state.clone(), control_plane, own_pod);
        if let Some((problems, acting)) = self.refused_at_start.take() {
            announcer.refused_at_start(&problems, &acting);
        }
        let mut pause = READ_INTERVAL;
        loop {
            tokio::time::sleep(pause).await;
            let path = self.path.clone();
            // A file system that hangs takes up one thread in the background, and only the next policy waits for it.
            let read = state
                .heavy_work
                .spawn_in_background(WorkKind::Policy, move || read(&path));
            let Ok(read_texts) = read.await else { continue };
            pause = READ_INTERVAL;
            match self.detector.observe(read_texts) {
                ReloadStep::Nothing => {
                    if let Some(awaiting) = self.awaiting.take_if(|_| state.namespaces_listed()) {
                        self.apply(&state, &announcer, awaiting.texts, &change)
                            .await;
                    } else if self
                        .awaiting
                        .as_mut()
                        .is_some_and(AwaitingPolicy::is_overdue)
                    {
                        announcer.refused(&Problems::for_unknown_namespaces());
                    }
                }
                ReloadStep::ReadAgain => pause = SETTLE_TIME,
                ReloadStep::Load(texts) => self.apply(&state, &announcer, texts, &change).await,
                ReloadStep::Refuse(error) => {
                    // What waited for namespaces is not what the files say any more.
                    self.awaiting = None;
                    state.want_namespaces(state.reads_namespaces());
                    announcer.refused(&error.into());
                }
            }
        }
    }

    /// Applies the texts in the background: classifying every pod of a large cluster takes a while.
    async fn apply(
        &mut self,
        state: &Arc<ServerState>,
        announcer: &Announcer,
        texts: Vec<SourceText>,
        change: &PolicyChangeLock,
    ) {
        let (shared_state, last_good, path) =
            (state.clone(), self.last_good.clone(), self.path.clone());
        let (kept_texts, change) = (texts.clone(), change.clone());
        let applied = state
            .heavy_work
            .spawn_in_background(WorkKind::Policy, move || {
                let outcome = apply_texts(&shared_state, &texts, &change);
                if !matches!(
                    outcome,
                    ReloadOutcome::Refused(_) | ReloadOutcome::AwaitsNamespaces
                ) {
                    store_last_good(last_good.as_ref(), &path, &texts);
                }
                outcome
            });
        self.awaiting = None;
        match applied
            .await
            .unwrap_or_else(|_| ReloadOutcome::Refused(Problems::for_panic()))
        {
            ReloadOutcome::InForce { warnings, before } => {
                announcer.applied(&before, warnings.as_deref())
            }
            ReloadOutcome::Unchanged { warnings } => announcer.unchanged(warnings.as_deref()),
            ReloadOutcome::Refused(problems) => announcer.refused(&problems),
            ReloadOutcome::AwaitsNamespaces => {
                self.awaiting = Some(AwaitingPolicy {
                    texts: kept_texts,
                    reads: 0,
                })
            }
        }
    }
}

impl AwaitingPolicy {
    /// Counts a read. Returns `true` once, after a time in which every permitted list of namespaces has arrived.
    fn is_overdue(&mut self) -> bool {
        self.reads = self.reads.saturating_add(1);
        self.reads == READS_UNTIL_OVERDUE
    }
}

/// The result of a change.
enum ReloadOutcome {
    InForce {
        warnings: Option<String>,
        before: Arc<Policy>,
    },
    /// Other words say the policy that is in force.
    Unchanged {
        warnings: Option<String>,
    },
    Refused(Problems),
    /// It is tried again when the labels of namespaces are known; the policy before stays in force.
    AwaitsNamespaces,
}

/// Brings these texts into force, if they are a policy that may.
fn apply_texts(
    state: &ServerState,
    texts: &[SourceText],
    change: &PolicyChangeLock,
) -> ReloadOutcome {
    let outcome = try_apply_texts(state, texts, change);
    // A policy that has waited for them may have been withdrawn.
    let awaits_namespaces = matches!(outcome, ReloadOutcome::AwaitsNamespaces);
    state.want_namespaces(awaits_namespaces || state.reads_namespaces());
    outcome
}

fn try_apply_texts(
    state: &ServerState,
    texts: &[SourceText],
    change: &PolicyChangeLock,
) -> ReloadOutcome {
    let LoadedPolicy {
        mut policy,
        warnings,
    } = match load(texts) {
        Ok(found) => found,
        Err(problems) => return ReloadOutcome::Refused(problems),
    };
    let _guard = change.lock();
    let before = state.cluster().ledger().policy().clone();
    if policy.depends_on_namespace_labels() && !state.namespaces_listed() {
        return ReloadOutcome::AwaitsNamespaces;
    }
    policy.version = before.version;
    // Which windows are open, and which namespaces have which labels, is no change of the files.
    policy = policy.with_open_windows(before.open_windows().clone());
    policy = state.cluster().ledger().under_namespaces(policy);
    if policy == *before {
        return ReloadOutcome::Unchanged { warnings };
    }
    let open = open_now(state, &mut TimeZones::default(), &policy);
    if !state.set_policy(policy.with_open_windows(open)) {
        return ReloadOutcome::AwaitsNamespaces;
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
            text: describe(&diagnostics),
        }),
    }
}

/// `policies/a.yaml:7: there is no class `chta` (and 2 more)`.
fn headline(diagnostics: &[Diagnostic], texts: &[SourceText]) -> String {
    let mut errors = diagnostics
        .iter()
        .filter(|diagnostic| diagnostic.severity == Severity::Error);
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
    fn for_unknown_namespaces() -> Self {
        let text = "it selects namespaces by label (namespaceSelector), and these could not be listed for ten seconds; it comes \
                    into force when they can. May Stowage's service account list and watch namespaces?";
        Self {
            headline: text.into(),
            text: text.into(),
        }
    }

    /// The problem that Stowage panicked on this policy. Serving the last good policy is better than ending the process.
    fn for_panic() -> Self {
        let text =
            "Stowage failed on this policy, which is a defect of its own; its log says where";
        Self {
            headline: text.into(),
            text: text.into(),
        }
    }
}

impl From<ReadError> for Problems {
    fn from(error: ReadError) -> Self {
        Self {
            headline: error.to_string(),
            text: error.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_with_namespace_selectors_waits_for_the_labels_of_namespaces() {
        let state = ServerState::with_stopped_clock(built_in());
        let text = "kind: SchedulingPolicy\nclasses: [{name: own, match: {namespaceSelector: {matchLabels: {team: a}}}}]\n";
        let texts = [SourceText::new("policy.yaml", text)];
        let (before, change) = (
            state.cluster().ledger().policy().digest,
            PolicyChangeLock::default(),
        );
        assert!(matches!(
            apply_texts(&state, &texts, &change),
            ReloadOutcome::AwaitsNamespaces
        ));
        assert_eq!(
            state.cluster().ledger().policy().digest,
            before,
            "the policy before stays in force"
        );
        assert!(
            *state.namespaces_wanted().borrow(),
            "and the namespaces are asked for"
        );
        let labels = Arc::new([("team".to_owned(), "a".to_owned())].into());
        state.record_namespaces([("chat".to_owned(), labels)].into());
        assert!(matches!(
            apply_texts(&state, &texts, &change),
            ReloadOutcome::InForce { .. }
        ));
        assert!(matches!(
            apply_texts(&state, &texts, &change),
            ReloadOutcome::Unchanged { .. }
        ));
        let mut awaiting = AwaitingPolicy {
            texts: texts.to_vec(),
            reads: 0,
        };
        let announced = (0..100).filter(|_| awaiting.is_overdue()).count();
        assert_eq!(announced, 1, "it is said once that it takes long");
    }

    #[test]
    fn a_policy_that_is_withdrawn_before_it_came_into_force_leaves_no_watch_of_namespaces() {
        let state = ServerState::with_stopped_clock(built_in());
        let selects = "kind: SchedulingPolicy\nclasses: [{name: own, match: {namespaceSelector: {matchLabels: {team: a}}}}]\n";
        let change = PolicyChangeLock::default();
        for then in ["", "classes: [{nmae: typo}]\n"] {
            let [selects, then] =
                [selects, then].map(|text| [SourceText::new("policy.yaml", text)]);
            assert!(matches!(
                apply_texts(&state, &selects, &change),
                ReloadOutcome::AwaitsNamespaces
            ));
            apply_texts(&state, &then, &change);
            assert!(
                !*state.namespaces_wanted().borrow(),
                "nothing asks for them any more"
            );
        }
    }
}

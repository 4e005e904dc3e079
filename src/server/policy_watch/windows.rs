//! Opens and closes the windows of the policy in force at their minute.
//!
//! ```text
//!  wall clock ─► TimeZones::open_at ─┬─► the same windows: nothing
//!    twice a second                  └─► others ─► ServerState::set_policy   (as a reload: one step, all pods reclassified)
//! ```
//!
//! Which windows are open follows from the wall clock alone, at each look: a clock that is set, a machine that was suspended and a
//! process that starts in the middle of a window all come to what the clock says. A clock that jumps to and fro changes the policy
//! once in [`PAUSE_AFTER_CHANGE`] at most. Two replicas go by their own clocks, and only the leader's decisions count.

use crate::service::{ServerState, WorkKind};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use stowage_policy_file::windows::TimeZones;
use stowage_scheduling::policy::{Policy, Window};
use tracing::{error, info};

/// A window opens this late at most, beside the time that classifying all pods takes.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// The pause after a change, so that a jumping clock costs little: classifying a large cluster takes a second, windows differ by minutes.
const PAUSE_AFTER_CHANGE: Duration = Duration::from_secs(10);

/// The lock held while a new policy is computed from the one in force and set: of two changes, the later builds on the earlier.
pub(crate) type PolicyChangeLock = Arc<Mutex<()>>;

/// Runs until it is dropped.
pub async fn watch(state: Arc<ServerState>, change: PolicyChangeLock) {
    let mut zones = TimeZones::default();
    loop {
        let policy = state.cluster().ledger().policy().clone();
        let pause = match open_now(&state, &mut zones, &policy) == *policy.open_windows() {
            true => CHECK_INTERVAL,
            false => {
                let (shared_state, change) = (state.clone(), change.clone());
                // Classifying every pod of a large cluster takes a while.
                let applied = state
                    .heavy_work
                    .spawn_in_background(WorkKind::Policy, move || {
                        apply_open_windows(&shared_state, &change)
                    })
                    .await;
                applied.unwrap_or_else(|_| error!("the policy's windows could not be changed"));
                PAUSE_AFTER_CHANGE
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// The windows of a policy that are open by the wall clock.
pub(crate) fn open_now(
    state: &ServerState,
    zones: &mut TimeZones,
    policy: &Policy,
) -> BTreeSet<Window> {
    zones.open_at(policy, state.clock.to_wall(state.now()))
}

/// Sets the windows that are open by the wall clock, if they differ from those of the policy in force.
fn apply_open_windows(state: &ServerState, change: &PolicyChangeLock) {
    let _guard = change.lock();
    // The policy's files may have changed since the check.
    let before = state.cluster().ledger().policy().clone();
    let open = open_now(state, &mut TimeZones::default(), &before);
    if open == *before.open_windows() {
        return;
    }
    let listed = |windows: Vec<&Window>| {
        windows
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join("; ")
    };
    let (opened, closed) = (
        open.difference(before.open_windows()).collect(),
        before.open_windows().difference(&open).collect(),
    );
    let (opened, closed) = (listed(opened), listed(closed));
    if !state.set_policy(Policy::clone(&before).with_open_windows(open)) {
        // The namespaces that it selects by are not listed yet: the next check tries again.
        return;
    }
    state.metrics.policy.window_changes.inc();
    info!(policy = %before.digest, opened, closed, "the policy's windows changed");
}

#[cfg(test)]
mod tests {
    use super::super::{ReloadOutcome, apply_texts};
    use super::*;
    use crate::service::TimeSource;
    use jiff::Timestamp;
    use std::cell::Cell;
    use stowage_policy_file::{SourceText, load};

    thread_local! {
        /// Seconds since 1970, as this test's machine shows them.
        static WALL: Cell<i64> = const { Cell::new(0) };
    }

    fn at(text: &str) {
        WALL.set(text.parse::<Timestamp>().unwrap().as_second());
    }

    fn by_wall() -> TimeSource {
        TimeSource {
            wall: || Timestamp::from_second(WALL.get()).unwrap(),
            ..TimeSource::SYSTEM
        }
    }

    const NIGHTS: &str = r#"
classes:
  - name: night
    match: {namespaces: [jobs]}
    when: [{days: [mon-fri], from: "20:00", to: "06:00", timeZone: Europe/Berlin}]
"#;

    fn sources(text: &str) -> Vec<SourceText> {
        vec![SourceText::new(
            "policy.yaml",
            format!("kind: SchedulingPolicy\n{text}"),
        )]
    }

    fn service(text: &str) -> Arc<ServerState> {
        ServerState::with_time_source(by_wall(), load(&sources(text)).unwrap().policy)
    }

    /// The version of the policy, and how many of its windows are open.
    fn version_and_open_windows(state: &ServerState) -> (u64, usize) {
        let policy = state.cluster().ledger().policy().clone();
        (policy.version, policy.open_windows().len())
    }

    #[test]
    fn windows_follow_the_wall_clock_and_nothing_else() {
        let (state, change) = (service(NIGHTS), PolicyChangeLock::default());
        let check_at = |time| {
            at(time);
            apply_open_windows(&state, &change);
            version_and_open_windows(&state)
        };
        assert_eq!(check_at("2026-11-23T19:59:59+01:00"), (0, 0));
        assert_eq!(
            check_at("2026-11-23T20:00:00+01:00"),
            (1, 1),
            "at its minute"
        );
        assert_eq!(
            check_at("2026-11-24T02:00:00+01:00"),
            (1, 1),
            "as long as nothing changes, nothing is set"
        );
        assert_eq!(
            check_at("2026-11-23T19:59:00+01:00"),
            (2, 0),
            "the clock was set back"
        );
        assert_eq!(
            check_at("2026-11-27T23:00:00+01:00"),
            (3, 1),
            "the machine was suspended for four days"
        );
        assert_eq!(check_at("2026-11-28T06:00:00+01:00"), (4, 0));
        assert_eq!(state.metrics.policy.window_changes.get(), 4);
    }

    #[test]
    fn a_policy_that_is_read_within_a_window_has_it_open_at_once() {
        at("2026-11-23T12:00:00+01:00");
        let (service, change) = (service(""), PolicyChangeLock::default());
        at("2026-11-23T23:00:00+01:00");
        assert!(matches!(
            apply_texts(&service, &sources(NIGHTS), &change),
            ReloadOutcome::InForce { .. }
        ));
        assert_eq!(version_and_open_windows(&service), (1, 1));
        apply_open_windows(&service, &change);
        assert_eq!(version_and_open_windows(&service), (1, 1));
        // The same files in other words, after the window has closed: the files did not change the policy, the clock does.
        at("2026-11-24T07:00:00+01:00");
        let again = apply_texts(&service, &sources(&format!("# nights\n{NIGHTS}")), &change);
        assert!(matches!(again, ReloadOutcome::Unchanged { .. }));
        assert_eq!(version_and_open_windows(&service), (1, 1));
        apply_open_windows(&service, &change);
        assert_eq!(version_and_open_windows(&service), (2, 0));
    }

    #[test]
    fn a_window_that_opens_builds_on_the_files_that_were_read_last() {
        at("2026-11-23T12:00:00+01:00");
        let (state, change) = (service(NIGHTS), PolicyChangeLock::default());
        apply_texts(
            &state,
            &sources(&format!("mode: shadow\n{NIGHTS}")),
            &change,
        );
        at("2026-11-23T23:00:00+01:00");
        apply_open_windows(&state, &change);
        let policy = state.cluster().ledger().policy().clone();
        assert_eq!(
            (policy.mode, policy.open_windows().len()),
            (stowage_scheduling::policy::Mode::Shadow, 1)
        );
    }

    #[test]
    fn a_policy_that_waits_for_namespaces_still_waits_for_them_when_a_window_opens() {
        at("2026-11-23T12:00:00+01:00");
        let (state, change) = (service(NIGHTS), PolicyChangeLock::default());
        let selects =
            "classes: [{name: own, match: {namespaceSelector: {matchLabels: {team: a}}}}]\n";
        assert!(matches!(
            apply_texts(&state, &sources(selects), &change),
            ReloadOutcome::AwaitsNamespaces
        ));
        at("2026-11-23T23:00:00+01:00");
        apply_open_windows(&state, &change);
        assert_eq!(version_and_open_windows(&state), (1, 1));
        assert!(
            *state.namespaces_wanted().borrow(),
            "otherwise nothing shows them, and it waits for good"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_jumps_to_and_fro_changes_the_policy_a_few_times_a_minute_at_most() {
        use std::sync::atomic::{AtomicI64, Ordering};
        // A look is on one thread and the step on another.
        static JUMPS: AtomicI64 = AtomicI64::new(0);
        fn jumping() -> Timestamp {
            let hour = if JUMPS.fetch_add(1, Ordering::Relaxed) % 2 == 0 {
                "12"
            } else {
                "22"
            };
            format!("2026-11-23T{hour}:00:00Z").parse().unwrap()
        }
        let source = TimeSource {
            wall: jumping,
            ..TimeSource::SYSTEM
        };
        let state = ServerState::with_time_source(source, load(&sources(NIGHTS)).unwrap().policy);
        let watching = watch(state.clone(), PolicyChangeLock::default());
        let _ = tokio::time::timeout(Duration::from_secs(60), watching).await;
        assert!(
            version_and_open_windows(&state).0 <= 7,
            "{:?}",
            version_and_open_windows(&state)
        );
    }
}

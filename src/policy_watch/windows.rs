//! Opens and closes the windows of the policy in force at their minute.
//!
//! ```text
//!  wall clock ─► TimeZones::open_at ─┬─► the same windows: nothing
//!    twice a second                  └─► others ─► Service::set_policy   (as a reload: one step, all pods classified anew)
//! ```
//!
//! Which windows are open follows from the wall clock alone, at each look: a clock that is set, a machine that was suspended and a
//! process that starts in the middle of a window all come to what the clock says. A clock that jumps to and fro changes the policy
//! once in [`AFTER_A_CHANGE`] at most. Two replicas go by their own clocks, and only the leader's decisions count.

use crate::policy_windows::TimeZones;
use crate::scheduling::policy::{Policy, Window};
use crate::service::Service;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tracing::{error, info};

/// A window opens this late at most, beside the time that classifying all pods takes.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Classifying all pods of a large cluster takes a second, and windows differ by minutes.
const AFTER_A_CHANGE: Duration = Duration::from_secs(10);

/// Held while another policy is worked out from the one in force and set: of two changes, the later one builds on the earlier.
pub type ChangeOfPolicy = Arc<Mutex<()>>;

/// Runs until it is dropped.
pub async fn watch(service: Arc<Service>, change: ChangeOfPolicy) {
    let mut zones = TimeZones::default();
    loop {
        let policy = service.cluster().policy().clone();
        let pause = match open_now(&service, &mut zones, &policy) == *policy.open_windows() {
            true => LOOK_EVERY,
            false => {
                let (service, change) = (service.clone(), change.clone());
                // On a thread of its own: classifying every pod of a large cluster takes a while.
                let moved = tokio::task::spawn_blocking(move || step(&service, &change)).await;
                moved.unwrap_or_else(|_| error!("the policy's windows could not be changed"));
                AFTER_A_CHANGE
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// The windows of a policy that are open by the wall clock.
pub fn open_now(service: &Service, zones: &mut TimeZones, policy: &Policy) -> BTreeSet<Window> {
    zones.open_at(policy, service.clock.to_wall(service.now()))
}

/// Brings the policy in force to the wall clock.
fn step(service: &Service, change: &ChangeOfPolicy) {
    let _whole = change.lock();
    // Its files may have changed since the look.
    let before = service.cluster().policy().clone();
    let open = open_now(service, &mut TimeZones::default(), &before);
    if open == *before.open_windows() {
        return;
    }
    let listed =
        |windows: Vec<&Window>| windows.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    let (opened, closed) =
        (open.difference(before.open_windows()).collect(), before.open_windows().difference(&open).collect());
    let (opened, closed) = (listed(opened), listed(closed));
    service.set_policy(Policy::clone(&before).with_open_windows(open));
    service.metrics.policy.window_changes.inc();
    info!(policy = %before.digest, opened, closed, "the policy's windows changed");
}

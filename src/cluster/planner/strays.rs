//! Lets through who came behind the planner's gate and is nobody that it places.

use super::Planner;
use crate::ids::{PodKey, PodUid};
use crate::scheduling::plan::Why;
use crate::units::{Millis, Moment};
use std::collections::BTreeMap;

/// A pod that was let through shows without its gate soon; if not, it is let through again.
const SHOWS_WITHIN: Millis = Millis::seconds(10);

/// Since when each was let through.
#[derive(Debug, Default)]
pub struct LetThrough(BTreeMap<PodUid, Moment>);

impl Planner {
    /// `strays` are all there are.
    pub fn let_through<'a>(&mut self, strays: impl Iterator<Item = (&'a PodUid, &'a PodKey, Why)>) {
        let now = self.service.ledger().now();
        let mut before = std::mem::take(&mut self.let_through.0);
        for (uid, key, why) in strays {
            let at = match before.remove(uid) {
                Some(at) if now < at + SHOWS_WITHIN => at,
                _ => {
                    self.release(uid.clone(), key.clone(), why);
                    now
                }
            };
            self.let_through.0.insert(uid.clone(), at);
        }
    }
}

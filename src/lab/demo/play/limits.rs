//! Engines whose VRAM the driver keeps: one that allocates more than its grant, and one that lends while it is awake.

use super::Play;
use crate::demo::vram::{self, Allocation};
use anyhow::{Context, Result};
use stowage_scheduling::units::Bytes;

impl Play {
    /// An engine allocates more than its grant. It starts again, and its neighbour allocates all of its own.
    pub(super) fn allocate_beyond_grant(
        &mut self,
        engine: &str,
        bytes: u64,
        neighbour: &str,
    ) -> Result<()> {
        let (limit, wanted) = (Bytes(self.granted(engine)?), Bytes(bytes));
        let before = self.allocated(engine)?;
        match self.allocate(engine, bytes)? {
            Allocation::BeyondLimit => self.screen.note(&format!(
                "{engine}'s flag is wrong: it allocates {wanted}, and fails at its limit of {limit}. It starts again, with a right one"
            )),
            _ => self.violations.push(format!(
                "{engine} allocated {wanted}, and no limit of {limit} kept it from that"
            )),
        }
        let whole = self.granted(neighbour)?;
        let neighbours = self.allocate(neighbour, whole)?;
        vram::restart(&self.setup.api, engine, before)?;
        if neighbours == (Allocation::Done { ended: Vec::new() }) {
            self.kept_grants += 1;
            self.screen.note(&format!(
                "{neighbour} beside it allocates all of its {}, and has them",
                Bytes(whole)
            ));
        } else {
            self.violations.push(format!(
                "{neighbour} lacked VRAM that it was granted: {engine} had it"
            ));
            self.allocate(neighbour, whole)?;
        }
        Ok(())
    }

    /// An engine that is awake grows until a borrower leaves, and then allocates all of its grant at once.
    pub(super) async fn take_back(&mut self, engine: &'static str, first: u64) -> Result<()> {
        let uid = self.uid_of(engine)?;
        let borrowers = self.borrowers(&uid);
        let used = self.allocated(engine)?;
        self.screen.note(&format!(
            "{engine} uses {} of its {}; {borrowers} pods borrow from it",
            Bytes(used),
            Bytes(self.granted(engine)?)
        ));
        self.allocate(engine, first)?;
        self.screen.note(&format!(
            "{engine} grows to {}: half of its margin is used up",
            Bytes(first)
        ));
        self.wait_until("a borrower leaves ahead", |play| {
            play.borrowers(&uid) < borrowers
        })
        .await?;
        let left = self.borrowers(&uid);
        self.left_ahead += borrowers - left;
        let whole = self.granted(engine)?;
        match self.allocate(engine, whole)? {
            Allocation::Done { ended } => {
                self.ended_by_driver += ended.len();
                self.screen.note(&format!(
                    "{engine} needs all of its {} at once, and has them: the driver ends {}",
                    Bytes(whole),
                    ended.join(" and ")
                ));
            }
            Allocation::BeyondLimit | Allocation::OutOfMemory => {
                self.violations.push(format!(
                    "{engine} lacked VRAM that it was granted: jobs that borrow had it"
                ));
                return Ok(());
            }
        }
        self.wait_until("no pod borrows from it", |play| play.borrowers(&uid) == 0)
            .await
    }

    fn allocate(&self, pod: &str, bytes: u64) -> Result<Allocation> {
        vram::allocate(&self.setup.api, &self.gpus(), pod, bytes)
    }

    /// Bytes that a pod was granted of each of its GPUs.
    fn granted(&self, pod: &str) -> Result<u64> {
        let gpus = self.gpus();
        let mut pods = gpus.iter().flat_map(|gpu| &gpu.pods);
        let found = pods.find(|(view, _)| view.name == pod);
        Ok(found.with_context(|| format!("{pod} is on no GPU"))?.1)
    }

    fn allocated(&self, pod: &str) -> Result<u64> {
        let found = self.setup.api.get(&format!("pods/default/{pod}"));
        let allocated = found.and_then(|pod| vram::allocated(&pod));
        allocated.with_context(|| format!("{pod} says nothing of its VRAM"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::screen::Screen;
    use crate::demo::setup::Setup;
    use crate::demo::story;
    use crate::demo::story::StoryStep;
    use serde_json::json;

    /// Plays the chapters on the node whose driver keeps limits. Returns what they broke.
    async fn broken(has_driver: bool) -> (Vec<String>, [usize; 3]) {
        let setup = Setup::with_policy(story::policy().unwrap(), &[]);
        let mut play = Play::new(setup.await.unwrap(), Screen::unseen());
        play.create_priority_classes().unwrap();
        for step in story::chapters_on_limits()
            .into_iter()
            .flat_map(|chapter| chapter.steps)
        {
            let joins = matches!(step, StoryStep::Join(_));
            play.play_step(step).await.unwrap();
            if joins && !has_driver {
                let without = json!({"metadata": {"annotations": {vram::KEEPS_LIMITS: null}}});
                play.setup.api.patch("nodes/node-d", &without).unwrap();
            }
        }
        let counts = [play.kept_grants, play.left_ahead, play.ended_by_driver];
        (play.violations, counts)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn each_engine_has_its_vram_where_the_driver_keeps_it() {
        assert_eq!(broken(true).await, (Vec::new(), [1, 1, 1]));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn without_the_drivers_hand_the_neighbour_and_the_lender_lack_theirs() {
        let (violations, counts) = broken(false).await;
        let expected = [
            "translator allocated 52.0 GiB, and no limit of 42.0 GiB kept it from that",
            "assistant lacked VRAM that it was granted: translator had it",
            "translator lacked VRAM that it was granted: jobs that borrow had it",
        ];
        assert_eq!(violations, expected);
        assert_eq!(counts, [0, 1, 0]);
    }
}

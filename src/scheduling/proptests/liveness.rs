//! A preemptor that waits gets its place, whatever single victims do.
//!
//! The oracle knows how each pod behaves, and counts by sizes alone: where the pods that go when they are told to free enough on one
//! node, the preemptor's reservation must be free within a time that depends on the number of the others only. Those are cheaper
//! victims, so that every search finds them first.

use crate::ids::PodUid;
use crate::ledger::{Ledger, RemainingVictim, ReservationStatus};
use crate::planning::{PlanStep, plan};
use crate::testkit::{LedgerCluster, accepting_filters, demand_of, uid};
use crate::units::{Millis, Moment};
use crate::verbs::observe::PodDeleted;
use crate::verbs::wait::{
    EvictionRefused, EvictionsNotMade, NoPlacementFound, PodEvicted, ReleaseReservation,
    ReservePlaces, TakePending,
};
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::disruption_info::{
    DisruptionInfo, ObservedDisruptionInfo, PodDeletion, PodHealth,
};
use proptest::prelude::*;

/// Of 80 GiB.
const CAPACITY: u64 = 72;
const NODES: [&str; 3] = ["a", "b", "c"];
const YEAR: Millis = Millis::seconds(31_536_000);
const GRACE: Millis = Millis::seconds(30);

/// What a pod does when it is to be evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum VictimBehavior {
    Goes,
    /// The same, and it is being deleted already, with a year to end.
    GoesFromAYear,
    IsRefused,
    /// The same, and it shows something else every second.
    IsRefusedAndChanges,
    IsNotAnswered,
    Stays,
    EndsLate,
}

#[derive(Debug, Clone)]
struct Victim {
    name: String,
    node: &'static str,
    gib: u64,
    conduct: VictimBehavior,
    /// It was told to end.
    told: bool,
    ends: Option<Moment>,
}

fn misbehaving() -> impl Strategy<Value = VictimBehavior> {
    use VictimBehavior::{EndsLate, IsNotAnswered, IsRefused, IsRefusedAndChanges, Stays};
    prop::sample::select(vec![
        IsRefused,
        IsRefusedAndChanges,
        IsNotAnswered,
        Stays,
        EndsLate,
    ])
}

/// Pods that behave on one node, and others there and on the other nodes.
fn victims() -> impl Strategy<Value = Vec<Victim>> {
    let good = prop::collection::vec((12u64..=24, any::<bool>()), 1..=3);
    let others = prop::collection::vec((0usize..3, 12u64..=24, misbehaving()), 0..=6);
    (good, others, 0usize..3).prop_map(|(good, others, home)| {
        let goes = |from_a_year| {
            if from_a_year {
                VictimBehavior::GoesFromAYear
            } else {
                VictimBehavior::Goes
            }
        };
        let good = good
            .into_iter()
            .map(|(gib, from_a_year)| (home, gib, goes(from_a_year)));
        let mut free = [CAPACITY; 3];
        let fits = good.chain(others).filter(|(node, gib, _)| {
            let is_room = free[*node] >= *gib;
            free[*node] -= if is_room { *gib } else { 0 };
            is_room
        });
        let victim = |(n, (node, gib, conduct))| Victim {
            name: format!("v-{n}"),
            node: NODES[node],
            gib,
            conduct,
            told: false,
            ends: None,
        };
        fits.enumerate().map(victim).collect()
    })
}

impl Victim {
    fn is_good(&self) -> bool {
        matches!(
            self.conduct,
            VictimBehavior::Goes | VictimBehavior::GoesFromAYear
        )
    }

    fn show(&self, cluster: &mut LedgerCluster, health: PodHealth, grace: Option<Millis>) {
        let leaving = grace.map(|grace| PodDeletion {
            asked_ago: Millis::default(),
            grace,
        });
        let disruption_info = DisruptionInfo {
            health,
            ..DisruptionInfo::default()
        };
        let observed = ObservedDisruptionInfo {
            disruption_info,
            leaving,
            ..ObservedDisruptionInfo::default()
        };
        let ran = Millis::seconds(if self.is_good() { 3000 } else { 60 });
        let demand = demand_of(self.gib << 30, 1, Sharing::Shared, -10);
        cluster.add_running(&self.name, (self.node, 0), demand, Some(ran), observed);
    }
}

struct World {
    cluster: LedgerCluster,
    victims: Vec<Victim>,
}

impl World {
    fn new(victims: Vec<Victim>, needed: u64) -> Self {
        let mut cluster = LedgerCluster::new(&NODES.map(|name| (name, 1)));
        for victim in &victims {
            let deleted = (victim.conduct == VictimBehavior::GoesFromAYear).then_some(YEAR);
            victim.show(&mut cluster, PodHealth::Ready, deleted);
        }
        // No other room than the victims'.
        for name in NODES {
            let taken: u64 = victims
                .iter()
                .filter(|one| one.node == name)
                .map(|one| one.gib)
                .sum();
            let kept = demand_of((CAPACITY - taken) << 30, 1, Sharing::Shared, 1000);
            let observed = ObservedDisruptionInfo::default();
            cluster.add_running(&format!("kept-{name}"), (name, 0), kept, None, observed);
        }
        cluster.add_gated("asks", demand_of(needed << 30, 1, Sharing::Shared, 100));
        Self { cluster, victims }
    }

    /// Whether the needed VRAM could become free, by the sizes and the behavior of the victims alone.
    fn could_be_free(&self, needed: u64) -> bool {
        let free = |name| {
            let good = self
                .victims
                .iter()
                .filter(|one| one.node == name && one.is_good());
            good.map(|one| one.gib).sum::<u64>()
        };
        NODES.into_iter().any(|name| free(name) >= needed)
    }

    /// One second. Answers whether the place is free.
    fn run_second(&mut self, second: u64) -> bool {
        self.cluster.advance(1);
        let now = self.cluster.ledger().now();
        for victim in &mut self.victims {
            if victim.ends.is_some_and(|ends| ends <= now) {
                victim.ends = None;
                self.cluster.apply(PodDeleted(uid(&victim.name)));
            } else if victim.conduct == VictimBehavior::IsRefusedAndChanges {
                let health = if second.is_multiple_of(2) {
                    PodHealth::Ready
                } else {
                    PodHealth::Unready
                };
                victim.show(&mut self.cluster, health, None);
            }
        }
        match self.cluster.ledger().reservation_status_of(&uid("asks")) {
            None => self.plan(),
            Some(status) if status.is_free => return true,
            Some(status) => self.evict(&status, now),
        }
        false
    }

    fn plan(&mut self) {
        let pending = self.cluster.apply(TakePending { limit: 8 });
        let generation = self.cluster.ledger().generation();
        for step in plan(
            Ledger::clone(self.cluster.ledger()),
            &accepting_filters(self.cluster.ledger()),
            &pending,
        ) {
            match step {
                PlanStep::Place(placements) => {
                    self.cluster
                        .apply(ReservePlaces {
                            placements,
                            generation,
                        })
                        .unwrap();
                }
                PlanStep::Wait { uid, .. } => {
                    self.cluster.apply(NoPlacementFound { uid, generation })
                }
                PlanStep::Requeue { .. } => {}
            }
        }
    }

    fn evict(&mut self, status: &ReservationStatus, now: Moment) {
        for RemainingVictim {
            uid,
            is_leaving,
            is_protected,
            termination_time: takes,
            ..
        } in &status.remaining
        {
            if *is_leaving {
                continue;
            }
            if *is_protected || now + *takes > status.reservation.deadline {
                return self.call_off(uid, "late");
            }
            let victim = self.victims.iter_mut().find(|one| one.name == uid.as_str());
            let victim = victim.expect("only pods of lower priority are victims");
            match victim.conduct {
                VictimBehavior::IsRefused | VictimBehavior::IsRefusedAndChanges => {
                    return self.call_off(uid, "refused");
                }
                VictimBehavior::IsNotAnswered => continue,
                VictimBehavior::Goes | VictimBehavior::GoesFromAYear => {
                    victim.ends = Some(now + Millis::seconds(20))
                }
                VictimBehavior::EndsLate => victim.ends = Some(now + GRACE.times(10)),
                VictimBehavior::Stays => {}
            }
            assert!(
                !std::mem::replace(&mut victim.told, true),
                "{} leaves in time",
                victim.name
            );
            victim.show(&mut self.cluster, PodHealth::Ready, Some(GRACE));
            self.cluster.apply(PodEvicted(uid.clone()));
        }
    }

    fn call_off(&mut self, victim: &PodUid, why: &str) {
        self.cluster.apply(EvictionsNotMade(vec![victim.clone()]));
        self.cluster
            .apply(EvictionRefused::new(victim.clone(), why));
        self.cluster.apply(ReleaseReservation(uid("asks")));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_preemptor_is_placed_whatever_single_victims_do(victims in victims(), needed in 12u64..=48) {
        let mut world = World::new(victims, needed);
        let misbehave = world.victims.iter().filter(|one| !one.is_good()).count() as u64;
        let within = 120 * (misbehave + 1) * (misbehave + 1);
        if world.could_be_free(needed) {
            let is_free = (0..within).any(|second| world.run_second(second));
            prop_assert!(is_free, "no place within {} s: {:?}", within, world.victims);
        }
    }
}

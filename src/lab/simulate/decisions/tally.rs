//! Counts of what was decided and checked: a campaign in which nothing is checked proves nothing.

use std::fmt;
use std::ops::AddAssign;

macro_rules! tally {
    ($($field:ident $what:literal)*) => {
        #[derive(Debug, Default, Clone, PartialEq, Eq)]
        pub struct DecisionTally { $(#[doc = $what] pub $field: u64),* }

        impl DecisionTally {
            /// Each count with its name, in order.
            pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field)),*].into_iter()
            }
        }

        impl AddAssign for DecisionTally {
            fn add_assign(&mut self, other: Self) {
                $(self.$field += other.$field;)*
            }
        }
    };
}

tally! {
    sequences "Sequences that were played."
    steps "Steps of all of them."
    filter "Answers of filter."
    prioritize "Answers of prioritize."
    preempt "Answers of preempt."
    bind "Answers of bind."
    plan "Runs of the planner."
    world_nodes "Nodes, summed over decisions."
    world_gpus "GPUs, summed over decisions."
    world_pods "Pods that the core knew, summed over decisions."
    passes "Nodes that passed, each checked to fit."
    refusals "Nodes that were refused, each checked not to fit."
    uncertain "Refusals that were not checked: it was not certain what the core knew of the node's GPUs."
    no_victims "Answers that no pod may be evicted, checked where no group, budget or limit of a tenant was in the way."
    no_planned_victims "Nodes on which the planner evicts no pod for one that waits, checked where pods may leave."
    limited "Of these, the ones on which only a limit of evictions keeps enough pods from leaving."
    victims "Pods that were chosen to leave, each checked."
    reservations "Reservations that were made."
    bound "Bindings that landed."
    late "Bindings that landed after their answer was lost."
    restarts "Processes that began again, from what pods show."
    swaps "Policies that came into force."
}

impl DecisionTally {
    /// Verbs that were answered, and runs of the planner.
    pub fn decisions(&self) -> u64 {
        self.filter + self.prioritize + self.preempt + self.bind + self.plan
    }
}

impl fmt::Display for DecisionTally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decisions = self.decisions();
        let mean = |sum: u64| sum as f64 / decisions.max(1) as f64;
        writeln!(
            f,
            "{decisions} decisions in {} sequences: {} filter, {} prioritize, {} preempt, {} bind, {} plan",
            self.sequences, self.filter, self.prioritize, self.preempt, self.bind, self.plan
        )?;
        writeln!(
            f,
            "in worlds of {:.1} nodes, {:.1} GPUs and {:.1} pods on average",
            mean(self.world_nodes),
            mean(self.world_gpus),
            mean(self.world_pods)
        )?;
        writeln!(
            f,
            "checked: {} nodes that passed, {} that were refused ({} refusals were uncertain), {} victims, {} answers without victims",
            self.passes, self.refusals, self.uncertain, self.victims, self.no_victims
        )?;
        write!(
            f,
            "{} pods bound ({} after their answer was lost), {} reservations, {} restarts, {} other policies",
            self.bound, self.late, self.reservations, self.restarts, self.swaps
        )
    }
}

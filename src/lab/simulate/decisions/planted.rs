//! Bugs that the oracle has to find, planted at the core: the core is told something wrong, or its answer is changed on its way
//! to the caller. The core itself contains none of it.

macro_rules! planted_bugs {
    ($($bug:ident $what:literal)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum PlantedBug { $(#[doc = $what] $bug),* }

        impl PlantedBug {
            pub const ALL: &[Self] = &[$(Self::$bug),*];

            /// What is wrong.
            pub fn what(self) -> &'static str {
                match self { $(Self::$bug => $what),* }
            }
        }
    };
}

planted_bugs! {
    PassesRefusedNodes "filter passes a node that it has refused"
    RefusesFittingNodes "filter refuses a node that it has passed"
    DropsNodes "filter neither passes nor refuses a node that fits"
    OffersOtherGpus "filter passes a node for its first GPUs, whatever is on them"
    AnswersOtherwiseAgain "filter answers less when it is asked the same again"
    RanksBackwards "prioritize ranks the worst node first"
    BindsToFirstGpus "bind allocates the first GPUs of the node, whatever is on them"
    BindsBesideReservations "bind allocates other GPUs than those that are reserved for the pod"
    RefusesBinds "bind refuses a node that fits"
    GrantsTooMuch "bind grants more than the pod requests"
    EvictsProtectedPods "preempt evicts one more pod, whatever protects it"
    SparesAVictim "preempt evicts one pod too few"
    FindsNoVictims "preempt finds no victims"
    PlansWithoutVictims "the planner reserves GPUs as if its victims had left"
    LeavesPodsWaiting "the planner lets pods wait that fit"
    EvictsAnyClass "every class is preemptible"
    EvictsAtOnce "the least run time of a class is forgotten"
    ForgetsBudgets "disruption budgets are forgotten"
    ForgetsStartGates "engines start beside each other"
    MixesClasses "classes that share no GPU do"
    ForgetsTenants "the limit of a tenant is forgotten"
    ForgetsSpare "the last free GPUs are not kept"
    ForgetsExclusiveness "a pod whose GPUs are exclusive is shown as one that shares them"
    ForgetsLostAnswers "a Binding whose answer is lost counts as not written"
    ConfirmsRefusedBindings "a refused Binding counts as written"
    ForgetsReservations "a restarted process does not see the reservations on pods"
    KeepsReservations "no reservation ends at its deadline"
    KeepsLostGpus "GPUs that are lost count as there"
    BelievesNoReading "what agents measure is forgotten"
    ForgetsDeletions "every fourth deletion of a pod is not shown"
}

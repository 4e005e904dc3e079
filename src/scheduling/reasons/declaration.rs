//! The form of the one list of reasons: an enum for each level on which a reason may occur. Nothing here knows a reason.

/// The one list. An entry has a code, and what is said by it on each level where the reason occurs, with its figures there:
///
/// - `node`: why a node does not fit ([`Misfit`](super::Misfit)): the sentence, and what is answered;
/// - `gpu`: what excludes a pod from one GPU ([`Obstacle`](super::Obstacle)): the sentence, and how far it is from going away;
/// - `pod`: why the planner has no place for a pod ([`WaitReason`](super::WaitReason)): the sentence, and what a condition has in its
///   place, if the sentence has figures that change;
/// - `bind`: why a placement is not taken ([`AllocationFailure`](super::AllocationFailure)): the sentence, and what `bind` answers;
/// - `lift`: the change that would take it away ([`Lift`](super::Lift)).
macro_rules! reasons {
    ($($Value:ident = $code:literal {
        $(node $({ $($nf:ident: $nt:ty),* })? $ntext:literal $(, $narg:expr)* => $node:expr;)?
        $(gpu $({ $($gf:ident: $gt:ty),* })? $gtext:literal $(, $garg:expr)* => $gpu:expr;)?
        $(pod $({ $($pf:ident: $pt:ty),* })? $(($pn:ident: $pnt:ty))? $ptext:literal $(, $parg:expr)* => $pod:expr;)?
        $(bind $([$own:expr])? $({ $($bf:ident: $bt:ty),* })? $(($bn:ident: $bnt:ty))? $btext:literal $(, $barg:expr)* => $bind:expr;)?
        $(lift $lift:expr;)?
    })*) => {
        coded! {
            /// Why a node does not fit, with the numbers. "Does not fit" is an answer, not a failure.
            #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
            pub enum Misfit: NodeAnswers {
                $($($code $Value $({ $($nf: $nt),* })?, $ntext $(, $narg)* => $node;)?)*
            }
        }
        coded! {
            /// What excludes a pod from one GPU, by how much, and which pods cause it.
            #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
            #[serde(rename_all_fields = "camelCase", tag = "code")]
            pub enum Obstacle: u8 {
                $($(#[serde(rename = $code)] $code $Value $({ $($gf: $gt),* })?, $gtext $(, $garg)* => $gpu;)?)*
            }
        }
        coded! {
            /// Why the planner has no place for a pod.
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            pub enum WaitReason: Option<String> {
                $($($code $Value $({ $($pf: $pt),* })? $(($pn: $pnt))?, $ptext $(, $parg)* => $pod;)?)*
            }
        }
        coded! {
            /// Why a pod gets no GPUs, no reservation or no Binding although a node was chosen. The scheduler retries from filter on.
            #[derive(Debug, Clone, PartialEq, Eq)]
            pub enum AllocationFailure: &'static str {
                $($($code $([$own])? $Value $({ $($bf: $bt),* })? $(($bn: $bnt))?, $btext $(, $barg)* => $bind;)?)*
            }
        }

        /// The changes that would take a reason away, by its code.
        pub(crate) const LIFTS: &[(&str, Lift)] = &[$($(($code, $lift),)?)*];
    };
}

pub(super) use reasons;

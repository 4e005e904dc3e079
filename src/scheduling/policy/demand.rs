//! What a pod asks for, classified by a policy.

use super::Policy;
use crate::vocabulary::demand::{Demand, PodRequest, RequestError};

impl Demand {
    pub fn of(pod: &PodRequest<'_>, policy: &Policy) -> Result<Self, RequestError> {
        Self::classified(pod, |traits| policy.classify(traits))
    }

    /// [`Demand::worst_case_classified`] by a policy.
    pub fn worst_case(pod: &PodRequest<'_>, policy: &Policy) -> Self {
        Self::worst_case_classified(pod, |traits| policy.classify(traits))
    }
}

//! NVLink islands: which GPUs reach each other over NVLink. Pure: the links are an argument.

/// For each of `count` GPUs the lowest-indexed GPU that it reaches over links, itself included; `None` if it is alone. Checks
/// each pair once.
pub fn nvlink_islands(count: usize, are_linked: impl Fn(usize, usize) -> bool) -> Vec<Option<u32>> {
    let mut leader: Vec<usize> = (0..count).collect();
    for other in 0..count {
        for one in 0..other {
            if are_linked(one, other) {
                join(&mut leader, one, other);
            }
        }
    }
    let leaders: Vec<usize> = (0..count).map(|gpu| find_leader(&leader, gpu)).collect();
    let is_alone = |gpu: usize| {
        leaders
            .iter()
            .filter(|leader| **leader == leaders[gpu])
            .count()
            == 1
    };
    (0..count)
        .map(|gpu| (!is_alone(gpu)).then_some(leaders[gpu] as u32))
        .collect()
}

fn find_leader(leader: &[usize], mut gpu: usize) -> usize {
    while leader[gpu] != gpu {
        gpu = leader[gpu];
    }
    gpu
}

/// The lower leader leads both.
fn join(leader: &mut [usize], one: usize, other: usize) {
    let (one, other) = (find_leader(leader, one), find_leader(leader, other));
    leader[one.max(other)] = one.min(other);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn two_pairs_are_two_islands_and_a_lone_gpu_is_none() {
        let linked = |one, other| matches!((one, other), (0, 3) | (1, 2));
        assert_eq!(
            nvlink_islands(5, linked),
            [Some(0), Some(1), Some(1), Some(0), None]
        );
        assert_eq!(nvlink_islands(0, linked), []);
    }

    proptest! {
        /// The oracle walks the links from each GPU until it finds no more.
        #[test]
        fn gpus_share_an_island_exactly_if_links_lead_from_one_to_the_other(
            links in prop::collection::vec((0usize..8, 0usize..8), 0..12)
        ) {
            let linked = |one: usize, other: usize| links.contains(&(one, other)) || links.contains(&(other, one));
            for (from, island) in nvlink_islands(8, linked).into_iter().enumerate() {
                let mut reached = vec![from];
                let mut next = 0;
                while next < reached.len() {
                    let here = reached[next];
                    reached.extend((0..8).filter(|to| linked(here, *to) && !reached.contains(to)).collect::<Vec<_>>());
                    next += 1;
                }
                let lowest = reached.iter().min().map(|gpu| *gpu as u32);
                prop_assert_eq!(island, lowest.filter(|_| reached.len() > 1));
            }
        }
    }
}

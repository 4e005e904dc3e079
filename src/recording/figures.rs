//! The figures of a node's reading, apart from what they are figures of. A report each second names the same GPUs, pods and models
//! in each; what changes are some numbers. A recording has those as differences from the reading before.

use stowage_scheduling::units::{Bytes, Micros, Moment, Percent};
use stowage_scheduling::vocabulary::node_reading::{GpuReading, NodeReading};

/// Figures of a reading. Its times come first: in most readings nothing else changes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Figures(Vec<u64>);

impl Figures {
    /// Figures in a fixed order; `None` if one is too large to leave a number for "unknown".
    pub fn from_reading(reading: &NodeReading) -> Option<Self> {
        let gpus = |gpu: &GpuReading| 4 + gpu.attributed.len();
        let count = 1
            + reading.engines.len()
            + reading.in_flight.len()
            + 3 * reading.latencies.len()
            + 2 * reading.activities.len()
            + reading.gpus.iter().map(gpus).sum::<usize>();
        let mut figures = Vec::with_capacity(count);
        let percent =
            |percent: Option<Percent>| encode_optional(percent.map(|one| one.get().into()));
        figures.push(reading.sampled.0);
        figures.extend(reading.engines.iter().map(|engine| engine.observed_at.0));
        for gpu in &reading.gpus {
            let load = gpu.engine_load;
            figures.push(encode_optional(gpu.used.map(|used| used.0))?);
            figures.extend(gpu.attributed.iter().map(|(_, used)| used.0));
            figures.push(percent(load.kv_cache)?);
            figures.push(encode_optional(load.queue.map(u64::from))?);
            figures.push(u64::from(load.partial) | u64::from(load.preempting) << 1);
        }
        figures.extend(
            reading
                .in_flight
                .iter()
                .map(|(_, requests)| u64::from(*requests)),
        );
        for activity in reading.activities.values() {
            for one in activity.percents() {
                figures.push(percent(one)?);
            }
        }
        for latency in &reading.latencies {
            let micros = |latency: Option<Micros>| encode_optional(latency.map(|one| one.0));
            figures.push(micros(latency.time_per_token)?);
            figures.push(micros(latency.time_to_first_token)?);
            figures.push(percent(latency.busy)?);
        }
        Some(Self(figures))
    }

    /// Differences from an earlier reading of the same shape, without trailing zeros.
    pub fn differences_from(&self, before: &Self) -> Vec<i64> {
        let pairs = self.0.iter().zip(&before.0);
        let mut differences: Vec<i64> = pairs
            .map(|(now, before)| now.wrapping_sub(*before) as i64)
            .collect();
        let last = differences.iter().rposition(|difference| *difference != 0);
        differences.truncate(last.map_or(0, |last| last + 1));
        differences
    }

    /// These figures with differences added; `None` if there are more differences than figures.
    pub fn with_differences(&self, differences: &[i64]) -> Option<Self> {
        let mut figures = self.0.clone();
        let changed = figures.get_mut(..differences.len())?;
        changed
            .iter_mut()
            .zip(differences)
            .for_each(|(figure, more)| *figure = figure.wrapping_add(*more as u64));
        Some(Self(figures))
    }

    /// Writes the figures into a reading; `None` if they do not match its shape.
    pub(crate) fn write_into(&self, reading: &mut NodeReading) -> Option<()> {
        let mut figures = self.0.iter().copied();
        reading.sampled = Moment(figures.next()?);
        for engine in &mut reading.engines {
            engine.observed_at = Moment(figures.next()?);
        }
        for gpu in &mut reading.gpus {
            gpu.used = figures.next()?.checked_sub(1).map(Bytes);
            for (_, used) in &mut gpu.attributed {
                *used = Bytes(figures.next()?);
            }
            let load = &mut gpu.engine_load;
            load.kv_cache = decode_percent(figures.next()?)?;
            load.queue = match figures.next()?.checked_sub(1) {
                None => None,
                Some(queue) => Some(u32::try_from(queue).ok()?),
            };
            let flags = figures.next()?;
            (load.partial, load.preempting) = (flags & 1 == 1, flags & 2 == 2);
        }
        for (_, requests) in &mut reading.in_flight {
            *requests = u32::try_from(figures.next()?).ok()?;
        }
        for activity in reading.activities.values_mut() {
            activity.sm_percent = decode_percent(figures.next()?)?;
            activity.memory_bandwidth_percent = decode_percent(figures.next()?)?;
        }
        for latency in &mut reading.latencies {
            latency.time_per_token = figures.next()?.checked_sub(1).map(Micros);
            latency.time_to_first_token = figures.next()?.checked_sub(1).map(Micros);
            latency.busy = decode_percent(figures.next()?)?;
        }
        figures.next().is_none().then_some(())
    }
}

/// Number of times at the beginning of a reading's figures.
pub fn time_count(reading: &NodeReading) -> usize {
    1 + reading.engines.len()
}

/// Whether two readings differ in nothing but figures.
pub(crate) fn have_same_shape(one: &NodeReading, other: &NodeReading) -> bool {
    let have_same_names = |one: &GpuReading, other: &GpuReading| {
        one.uuid == other.uuid
            && one.attributed.len() == other.attributed.len()
            && one
                .attributed
                .iter()
                .zip(&other.attributed)
                .all(|((one, _), (other, _))| one == other)
    };
    one.gpus.len() == other.gpus.len()
        && one.engines.len() == other.engines.len()
        && one.in_flight.len() == other.in_flight.len()
        && one
            .gpus
            .iter()
            .zip(&other.gpus)
            .all(|(one, other)| have_same_names(one, other))
        && one
            .in_flight
            .iter()
            .zip(&other.in_flight)
            .all(|((one, _), (other, _))| one == other)
        && one.activities.keys().eq(other.activities.keys())
        && one.latencies.len() == other.latencies.len()
        && one
            .latencies
            .iter()
            .zip(&other.latencies)
            .all(|(one, other)| one.pod == other.pod)
        && one.engines.iter().zip(&other.engines).all(|(one, other)| {
            (&one.pod, &one.model, &one.gpus) == (&other.pod, &other.model, &other.gpus)
                && (one.state, &one.reusable_in) == (other.state, &other.reusable_in)
        })
        && (&one.holdings, &one.sleep, &one.over_grant, &one.unread)
            == (
                &other.holdings,
                &other.sleep,
                &other.over_grant,
                &other.unread,
            )
        && (one.isolation, one.has_legacy_runtime) == (other.isolation, other.has_legacy_runtime)
        && (&one.limits, &one.unmeasured) == (&other.limits, &other.unmeasured)
}

/// `None` for what is no percentage.
fn decode_percent(figure: u64) -> Option<Option<Percent>> {
    match figure.checked_sub(1) {
        None => Some(None),
        Some(percent) => Some(Some(Percent::new(u8::try_from(percent).ok()?)?)),
    }
}

/// Encodes an optional figure: 0 for `None`, and one more than the figure otherwise.
fn encode_optional(figure: Option<u64>) -> Option<u64> {
    figure.map_or(Some(0), |figure| figure.checked_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use stowage_scheduling::ids::{GpuUuid, PodUid};
    use stowage_scheduling::vocabulary::node_reading::{EngineLoad, GpuActivity};

    /// Two pods on one GPU, one of them with requests in flight.
    fn reading(
        used: Option<u64>,
        attributed: [u64; 2],
        load: EngineLoad,
        in_flight: u32,
    ) -> NodeReading {
        let pod = |name: &str| PodUid::parse(name).unwrap();
        let attributed = vec![
            (pod("a"), Bytes(attributed[0])),
            (pod("b"), Bytes(attributed[1])),
        ];
        let gpu = GpuReading {
            uuid: GpuUuid::parse("GPU-0").unwrap(),
            used: used.map(Bytes),
            attributed,
            engine_load: load,
        };
        NodeReading {
            sampled: Moment(u64::from(in_flight)),
            gpus: vec![gpu],
            in_flight: vec![(pod("a"), in_flight)],
            ..NodeReading::default()
        }
    }

    prop_compose! {
        fn any_reading()(
            used in proptest::option::of(any::<u64>()), attributed in any::<[u64; 2]>(), kv in proptest::option::of(0u8..=100),
            queue in proptest::option::of(any::<u32>()), flags in any::<[bool; 2]>(), in_flight in any::<u32>(),
            busy in any::<[Option<u8>; 2]>(),
        ) -> NodeReading {
            let kv_cache = kv.and_then(Percent::new);
            let load = EngineLoad { kv_cache, queue, partial: flags[0], preempting: flags[1] };
            let [sm_percent, memory_bandwidth_percent] = busy.map(|one| Percent::new(one? % 101));
            let activity = GpuActivity { sm_percent, memory_bandwidth_percent };
            let reading = reading(used, attributed, load, in_flight);
            NodeReading { activities: [(reading.gpus[0].uuid.clone(), activity)].into(), ..reading }
        }
    }

    proptest! {
        #[test]
        fn a_reading_follows_from_the_one_before_and_the_differences(before in any_reading(), after in any_reading()) {
            prop_assert!(have_same_shape(&before, &after));
            let (Some(known), Some(now)) = (Figures::from_reading(&before), Figures::from_reading(&after)) else {
                prop_assert!([&before, &after].iter().any(|one| one.gpus[0].used == Some(Bytes(u64::MAX))));
                return Ok(());
            };
            let differences = now.differences_from(&known);
            let mut restored = before;
            prop_assert_eq!(known.with_differences(&differences), Some(now.clone()));
            prop_assert_eq!(now.write_into(&mut restored), Some(()));
            prop_assert_eq!(restored, after);
        }

        #[test]
        fn differences_of_another_shape_are_noticed(before in any_reading(), differences in prop::collection::vec(any::<i64>(), 0..20)) {
            let Some(known) = Figures::from_reading(&before) else { return Ok(()) };
            match known.with_differences(&differences) {
                None => prop_assert!(differences.len() > known.0.len()),
                // Lies about how full a cache is are noticed; other numbers may be anything.
                Some(figures) => _ = figures.write_into(&mut before.clone()),
            }
        }
    }

    #[test]
    fn a_reading_of_other_pods_has_another_shape() {
        let one = reading(None, [1, 2], EngineLoad::NONE, 3);
        let mut other = one.clone();
        other.gpus[0].attributed[1].0 = PodUid::parse("c").unwrap();
        assert!(!have_same_shape(&one, &other));
        let mut other = one.clone();
        other.gpus[0].attributed.pop();
        assert!(!have_same_shape(&one, &other));
        let mut other = one.clone();
        let gpu = other.gpus[0].uuid.clone();
        other.activities = [(gpu, GpuActivity::default())].into();
        assert!(!have_same_shape(&one, &other));
    }
}

//! A MIG geometry: the slices that each GPU is cut into, checked against where the GPU's profiles can be placed.
//!
//! It places nothing: slices are GPUs of their own to the rest of a plan. Where profiles can be is data of
//! `policy_file::format::mig`.

use super::gpu_types::GpuType;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use stowage_policy_file::format::mig::{Family, compute_slices};
use stowage_policy_file::nearest::nearest;
use stowage_scheduling::units::plural;

/// The profiles of one GPU's slices, in the order in which they were written. The GPU can be cut so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry(Vec<String>);

/// Why a GPU cannot be cut so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    #[error(
        "no profile is named; write those of one GPU with commas between them, such as 3g.40gb,3g.40gb"
    )]
    Empty,
    #[error(
        "a GPU of type {gpu} cannot be cut into MIG slices; leave the geometry out, or name a GPU that can"
    )]
    NoMig { gpu: String },
    #[error("{gpu} has no MIG profile {profile}; {help}")]
    UnknownProfile {
        gpu: String,
        profile: String,
        help: String,
    },
    #[error("{gpu} cannot be cut into {wanted}: {why}")]
    Impossible {
        gpu: String,
        wanted: String,
        why: String,
    },
}

impl Geometry {
    /// `3g.40gb,3g.40gb`: the slices of one GPU of that type.
    pub fn parse(text: &str, gpu: &GpuType) -> Result<Self, GeometryError> {
        let profiles: Vec<&str> = text
            .split(',')
            .map(str::trim)
            .filter(|one| !one.is_empty())
            .collect();
        if profiles.is_empty() {
            return Err(GeometryError::Empty);
        }
        let family = gpu.family().ok_or_else(|| GeometryError::NoMig {
            gpu: gpu.name.into(),
        })?;
        for profile in &profiles {
            check_profile(profile, gpu, family)?;
        }
        match family.can_be_partitioned_into(&profiles) {
            true => Ok(Self(profiles.into_iter().map(str::to_owned).collect())),
            false => Err(GeometryError::Impossible {
                gpu: gpu.name.into(),
                wanted: format_counts(&profiles),
                why: explain_impossible(&profiles, family),
            }),
        }
    }

    pub fn profiles(&self) -> impl ExactSizeIterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format_counts(&self.profiles().collect::<Vec<_>>()))
    }
}

impl Serialize for Geometry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

/// Maximum number of slices of that profile on one GPU.
pub(crate) fn max_slices(family: &Family, profile: &str) -> usize {
    let fits = |count: &usize| family.can_be_partitioned_into(&vec![profile; *count]);
    (1..=usize::from(family.memory_slices()))
        .take_while(fits)
        .count()
}

fn check_profile(profile: &str, gpu: &GpuType, family: &Family) -> Result<(), GeometryError> {
    if family.slot(profile).is_some() {
        return Ok(());
    }
    let help = match nearest(profile, family.profiles()) {
        Some(near) => format!("did you mean {near}?"),
        None => format!("it has {}", family.profiles().join(", ")),
    };
    Err(GeometryError::UnknownProfile {
        gpu: gpu.name.into(),
        profile: profile.into(),
        help,
    })
}

/// Explains why the profiles do not fit: one that is requested too often by itself, or else the placements of all of them.
fn explain_impossible(profiles: &[&str], family: &Family) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    profiles
        .iter()
        .for_each(|profile| *counts.entry(profile).or_default() += 1);
    let media = profiles
        .iter()
        .filter(|profile| profile.ends_with("+me"))
        .count();
    if media > 1 {
        return "one slice of a GPU has the media engines, so one profile may end in +me".into();
    }
    let too_many = counts
        .iter()
        .find(|(profile, count)| **count > max_slices(family, profile));
    if let Some((profile, _)) = too_many {
        let most = max_slices(family, profile);
        return format!(
            "{}, so at most {most} fit{}",
            describe_placements(profile, family),
            describe_compute_shortage(profiles, family)
        );
    }
    let all: Vec<String> = counts
        .keys()
        .map(|profile| describe_placements(profile, family))
        .collect();
    format!(
        "{}; no choice of these keeps the slices apart{}",
        all.join("; "),
        describe_compute_shortage(profiles, family)
    )
}

/// `2g.20gb takes 2 of 8 memory slices and has placements at 0, 2, 4`.
fn describe_placements(profile: &str, family: &Family) -> String {
    let Some(slot) = family.slot(profile) else {
        return profile.into();
    };
    let starts: Vec<String> = slot.starts.iter().map(u8::to_string).collect();
    let placements = if starts.len() == 1 {
        "a placement"
    } else {
        "placements"
    };
    let (of, starts) = (family.memory_slices(), starts.join(", "));
    format!(
        "{profile} takes {} of {of} memory slices and has {placements} at {starts}",
        slot.slices
    )
}

/// `; they would take 8 of 7 compute slices`, where that is so.
fn describe_compute_shortage(profiles: &[&str], family: &Family) -> String {
    let (wanted, has): (u32, u32) = (
        profiles
            .iter()
            .filter_map(|profile| compute_slices(profile))
            .sum(),
        family.compute_slices(),
    );
    match wanted > has {
        true => format!(
            "; together they would take {} of {has}",
            plural(wanted, "compute slice")
        ),
        false => String::new(),
    }
}

/// `3g.40gb × 2 + 1g.10gb`, in the order of their first mention.
fn format_counts(profiles: &[&str]) -> String {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for profile in profiles {
        match counts.iter_mut().find(|(counted, _)| counted == profile) {
            Some((_, count)) => *count += 1,
            None => counts.push((profile, 1)),
        }
    }
    let one = |(profile, count): &(&str, usize)| match count {
        1 => (*profile).to_owned(),
        _ => format!("{profile} × {count}"),
    };
    counts.iter().map(one).collect::<Vec<_>>().join(" + ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(gpu: &str, text: &str) -> Result<String, String> {
        let geometry = Geometry::parse(text, GpuType::find(gpu).unwrap());
        geometry
            .map(|geometry| geometry.to_string())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn geometries_that_the_user_guide_shows_are_accepted() {
        let a100 = |text: &str| parsed("A100-80GB", text);
        assert_eq!(a100("3g.40gb,3g.40gb").as_deref(), Ok("3g.40gb × 2"));
        assert_eq!(
            a100(&["1g.10gb"; 7].join(",")).as_deref(),
            Ok("1g.10gb × 7")
        );
        assert_eq!(a100("4g.40gb, 3g.40gb").as_deref(), Ok("4g.40gb + 3g.40gb"));
        assert!(a100("2g.20gb,2g.20gb,2g.20gb,1g.10gb").is_ok());
        assert!(parsed("A30", "2g.12gb,1g.6gb,1g.6gb").is_ok());
        assert!(parsed("H200", "3g.71gb,3g.71gb").is_ok());
    }

    #[test]
    fn a_profile_that_is_too_many_is_refused_with_its_placements() {
        assert_eq!(
            parsed("A100-80GB", &["2g.20gb"; 4].join(",")).unwrap_err(),
            "A100-80GB cannot be cut into 2g.20gb × 4: 2g.20gb takes 2 of 8 memory slices and has placements at 0, 2, 4, so at \
             most 3 fit; together they would take 8 compute slices of 7"
        );
        let threes = parsed("A100-80GB", &["3g.40gb"; 3].join(",")).unwrap_err();
        assert!(
            threes.contains("placements at 0, 4, so at most 2 fit"),
            "{threes}"
        );
    }

    #[test]
    fn profiles_that_only_together_do_not_fit_are_refused_with_all_their_placements() {
        let why = parsed("A100-80GB", "4g.40gb,3g.40gb,1g.10gb").unwrap_err();
        assert!(
            why.contains("4g.40gb takes 4 of 8 memory slices and has a placement at 0"),
            "{why}"
        );
        assert!(
            why.contains("no choice of these keeps the slices apart"),
            "{why}"
        );
        let media = parsed("A100-80GB", "1g.10gb+me,1g.10gb+me").unwrap_err();
        assert!(media.contains("one profile may end in +me"), "{media}");
    }

    #[test]
    fn what_the_gpu_does_not_have_is_refused_with_what_it_has() {
        assert!(
            parsed("A100-80GB", "3g.40g")
                .unwrap_err()
                .ends_with("did you mean 3g.40gb?")
        );
        assert!(
            parsed("A100-40GB", "7g.80gb")
                .unwrap_err()
                .contains("has no MIG profile 7g.80gb")
        );
        assert!(
            parsed("L40S", "3g.40gb")
                .unwrap_err()
                .contains("cannot be cut into MIG slices")
        );
        assert!(
            parsed("A100-80GB", " , ")
                .unwrap_err()
                .contains("3g.40gb,3g.40gb")
        );
    }
}

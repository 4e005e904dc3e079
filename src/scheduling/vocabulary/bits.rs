//! Serde of 64-bit masks as text: hexadecimal digits, the lowest bit last.
//!
//! As a JSON number a mask with bits beyond the 53rd would be rounded by whatever reads numbers as JavaScript does.

use serde::{Deserialize, Deserializer, Serializer, de};
use std::borrow::Cow;

pub fn serialize<S: Serializer>(bits: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{bits:x}"))
}

pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let text = Cow::<str>::deserialize(deserializer)?;
    u64::from_str_radix(&text, 16)
        .map_err(|error| de::Error::custom(format_args!("{text:?} is no set of places: {error}")))
}

#[cfg(test)]
mod tests {
    use crate::vocabulary::classification::ClassSet;
    use crate::vocabulary::gpu::GpuSet;

    #[test]
    fn no_set_is_a_number_that_javascript_would_round() {
        for (set, text) in [
            (GpuSet::ALL, "\"ffffffffffffffff\""),
            (GpuSet::EMPTY, "\"0\""),
        ] {
            assert_eq!(serde_json::to_string(&set).unwrap(), text);
            assert_eq!(serde_json::from_str::<GpuSet>(text).unwrap(), set);
        }
        let all = serde_json::to_string(&ClassSet::ALL).unwrap();
        assert_eq!(
            serde_json::from_str::<ClassSet>(&all).unwrap(),
            ClassSet::ALL
        );
        for bad in [
            "18446744073709551615",
            "\"\"",
            "\"g\"",
            "\"10000000000000000\"",
        ] {
            assert!(serde_json::from_str::<GpuSet>(bad).is_err(), "{bad}");
        }
    }
}

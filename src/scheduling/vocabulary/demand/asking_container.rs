//! A container that asks for VRAM. Recordings of version 0.3 have only its name; what it asked for is unknown then.

use crate::units::Bytes;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The longest name for which the pod's annotations have a place: the prefix of a key, at most 253 bytes long, ends with
/// `.container.stowage.dev`.
pub(crate) const LONGEST_CONTAINER_NAME: usize = 253 - ".container.stowage.dev".len();

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "Recorded")]
pub struct AskingContainer {
    pub name: Arc<str>,
    /// Over all GPUs of the pod; zero if it is unknown.
    pub vram: Bytes,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Recorded {
    Name(Arc<str>),
    Container { name: Arc<str>, vram: Bytes },
}

impl From<Recorded> for AskingContainer {
    fn from(recorded: Recorded) -> Self {
        match recorded {
            Recorded::Name(name) => Self {
                name,
                vram: Bytes::ZERO,
            },
            Recorded::Container { name, vram } => Self { name, vram },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_that_an_earlier_version_recorded_are_read() {
        let read = |text| serde_json::from_str::<Vec<AskingContainer>>(text).unwrap();
        let [old, new] = [
            read(r#"["engine"]"#),
            read(r#"[{"name":"engine","vram":7}]"#),
        ];
        assert_eq!(
            (&*old[0].name, old[0].vram, new[0].vram),
            ("engine", Bytes::ZERO, Bytes(7))
        );
        assert_eq!(read(&serde_json::to_string(&new).unwrap()), new);
    }
}

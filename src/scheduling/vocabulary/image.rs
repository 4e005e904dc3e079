//! Container images: which of them a node has, and which of them a pod needs.
//!
//! A cluster has tens of thousands of image names, and each is a long text. Here an image is a 64-bit number, derived from its
//! name alone, so that nodes and pods that are read by different processes agree on it.

use crate::units::Bytes;
use serde::{Deserialize, Serialize, Serializer};
use std::cmp::Reverse;
use std::sync::Arc;

/// The name of an image, as a hash of its complete reference. Two names with the same hash would be taken for one image, which
/// costs a wrong start time and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ImageId(u64);

/// Names of images that are kept of one node at most, the largest images first. A kubelet lists fifty images unless it is told
/// otherwise, with up to five names each.
pub const MAX_NODE_IMAGES: usize = 512;

/// Names of images that count of one pod at most.
pub const MAX_POD_IMAGES: usize = 32;

/// The registry, and the user, that a container runtime adds to a name without one.
const DEFAULT_REGISTRY: &str = "docker.io";
const DEFAULT_USER: &str = "library";

impl ImageId {
    /// The image of a reference such as `vllm/vllm-openai` or `ghcr.io/org/image:tag`; `None` if it is empty. A short name means
    /// what a container runtime makes of it: the registry `docker.io`, the tag `latest`. Beside a digest a tag means nothing, and
    /// a node lists such an image by its digest.
    pub fn from_reference(reference: &str) -> Option<Self> {
        let reference = reference.trim();
        if reference.is_empty() {
            return None;
        }
        let (name, digest) = reference
            .split_once('@')
            .map_or((reference, None), |(name, digest)| (name, Some(digest)));
        let (first, rest) = name.split_once('/').unwrap_or(("", name));
        let is_registry = first == "localhost" || first.contains(['.', ':']);
        let mut hash = Fnv1a::default();
        if !is_registry {
            hash.write(DEFAULT_REGISTRY).write("/");
            if first.is_empty() {
                hash.write(DEFAULT_USER).write("/");
            }
        }
        // A colon before the last slash is that of a port.
        let tag = rest
            .rfind(':')
            .filter(|colon| !rest[*colon..].contains('/'))
            .map(|colon| name.len() - rest.len() + colon);
        match (digest, tag) {
            (Some(digest), tag) => hash
                .write(&name[..tag.unwrap_or(name.len())])
                .write("@")
                .write(digest),
            (None, Some(_)) => hash.write(name),
            (None, None) => hash.write(name).write(":latest"),
        };
        Some(Self(hash.0))
    }
}

/// FNV-1a of 64 bits: the same in every process and every version, because inputs are stored with it.
struct Fnv1a(u64);

impl Default for Fnv1a {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv1a {
    fn write(&mut self, text: &str) -> &mut Self {
        for byte in text.bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        self
    }
}

/// An image on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeImage {
    pub image: ImageId,
    pub bytes: Bytes,
}

/// The largest [`MAX_NODE_IMAGES`] of a node's images, in order of name. What is left out is smaller than all of them.
pub fn largest_images(mut images: Vec<NodeImage>) -> Vec<NodeImage> {
    // Each once, by the largest size that it is listed with: a name that is repeated takes no other's place.
    images.sort_unstable_by_key(|image| (image.image, Reverse(image.bytes)));
    images.dedup_by_key(|image| image.image);
    if images.len() > MAX_NODE_IMAGES {
        images.sort_unstable_by_key(|image| (Reverse(image.bytes), image.image));
        images.truncate(MAX_NODE_IMAGES);
        images.sort_unstable_by_key(|image| image.image);
    }
    images
}

/// The set of images that a node has. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "Option<Vec<ImageId>>")]
pub struct NodeImageSet {
    /// A bit for each image. Most nodes lack the image that a decision asks for, and there the list is not read.
    image_bits: u64,
    /// In order; `None` if the node lists none, so that nothing is known.
    list: Option<Arc<[ImageId]>>,
}

impl NodeImageSet {
    /// Whether the node says anything of its images.
    pub fn is_known(&self) -> bool {
        self.list.is_some()
    }

    pub fn contains(&self, image: ImageId) -> bool {
        self.image_bits & bloom_bit(image) != 0
            && self
                .list
                .as_ref()
                .is_some_and(|list| list.binary_search(&image).is_ok())
    }

    pub fn iter(&self) -> impl Iterator<Item = ImageId> + '_ {
        self.list.iter().flat_map(|list| list.iter().copied())
    }
}

impl From<Option<Vec<ImageId>>> for NodeImageSet {
    fn from(images: Option<Vec<ImageId>>) -> Self {
        let list = images.map(|mut images| {
            images.sort_unstable();
            images.dedup();
            Arc::<[ImageId]>::from(images)
        });
        let marks = list
            .iter()
            .flat_map(|list| list.iter())
            .fold(0, |marks, image| marks | bloom_bit(*image));
        Self {
            image_bits: marks,
            list,
        }
    }
}

impl Serialize for NodeImageSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.list.serialize(serializer)
    }
}

/// One of 64 bits. The high bits of the hash: its low bits follow from the last letters alone.
fn bloom_bit(image: ImageId) -> u64 {
    1 << (image.0 >> 58)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(reference: &str) -> ImageId {
        ImageId::from_reference(reference).unwrap()
    }

    #[test]
    fn a_short_name_means_what_a_container_runtime_makes_of_it() {
        for (short, complete) in [
            ("nginx", "docker.io/library/nginx:latest"),
            (
                "vllm/vllm-openai:v0.33.0",
                "docker.io/vllm/vllm-openai:v0.33.0",
            ),
            ("ghcr.io/org/engine", "ghcr.io/org/engine:latest"),
            ("localhost/engine:1", " localhost/engine:1 "),
        ] {
            assert_eq!(id(short), id(complete), "{short}");
        }
        assert_ne!(id("r.io:5000/engine"), id("r.io:5000/engine:1"));
        assert_eq!(id("r.io:5000/engine"), id("r.io:5000/engine:latest"));
        assert_ne!(
            id("r.io/engine@sha256:00"),
            id("r.io/engine@sha256:00:latest")
        );
        assert_eq!(ImageId::from_reference(" "), None);
    }

    #[test]
    fn a_tag_beside_a_digest_means_nothing_as_on_the_node_that_lists_the_digest_alone() {
        assert_eq!(
            id("vllm/vllm-openai:v0.33.0@sha256:00"),
            id("docker.io/vllm/vllm-openai@sha256:00")
        );
        assert_eq!(
            id("r.io:5000/engine:1@sha256:00"),
            id("r.io:5000/engine@sha256:00")
        );
        assert_eq!(
            id("engine:1@sha256:00"),
            id("docker.io/library/engine@sha256:00")
        );
        assert_ne!(
            id("r.io:5000/engine:1@sha256:00"),
            id("r.io:5000/engine@sha256:01")
        );
    }

    #[test]
    fn an_image_that_is_named_a_thousand_times_pushes_out_no_other() {
        let image = |n: u64, mib: u64| NodeImage {
            image: id(&format!("r.io/image-{n}:1")),
            bytes: Bytes::mib(mib),
        };
        let repeated = (0..1000).map(|n| image(0, 1000 + n % 2));
        let kept = largest_images(repeated.chain((1..10).map(|n| image(n, n))).collect());
        assert_eq!(kept.len(), 10);
        assert!(
            kept.contains(&image(0, 1001)),
            "by the largest size that was said"
        );
    }

    #[test]
    fn of_ten_thousand_images_the_largest_are_kept_and_found() {
        let image = |n: u64| NodeImage {
            image: id(&format!("r.io/image-{n}:1")),
            bytes: Bytes::mib(n),
        };
        let kept = largest_images((0..10_000).map(image).collect());
        assert_eq!(kept.len(), MAX_NODE_IMAGES);
        let set = NodeImageSet::from(Some(kept.iter().map(|image| image.image).collect()));
        for n in 0..10_000 {
            assert_eq!(
                set.contains(image(n).image),
                n >= 10_000 - MAX_NODE_IMAGES as u64,
                "{n}"
            );
        }
    }

    #[test]
    fn an_unknown_list_has_nothing_and_an_empty_list_is_known() {
        let (unknown, empty) = (
            NodeImageSet::default(),
            NodeImageSet::from(Some(Vec::new())),
        );
        assert_eq!([unknown.is_known(), empty.is_known()], [false, true]);
        assert!(!unknown.contains(id("nginx")) && !empty.contains(id("nginx")));
        let text = serde_json::to_string(&[unknown.clone(), empty.clone()]).unwrap();
        assert_eq!(
            serde_json::from_str::<Vec<NodeImageSet>>(&text).unwrap(),
            [unknown, empty]
        );
    }
}

//! Models in a Hugging Face cache: `models--org--name/{refs,blobs,snapshots}`.
//!
//! A snapshot is a folder of links to blobs; a download in progress is a blob called `….incomplete`. A model that has not
//! changed since the last scan is not scanned again.

use super::FoundModel;
use super::walk::{ScanProblem, Walk, modified_at};
use super::weights::{ModelWeights, WeightExtent, read_weights};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime};
use stowage_scheduling::ids::ModelId;

/// Prefix of models' folders; a cache contains datasets too.
const MODEL_PREFIX: &str = "models--";

/// A commit is 40 characters.
const MAX_REF_BYTES: u64 = 256;

/// A folder that changed more recently may change again without a new modification time: file systems count in ticks, and some
/// in seconds.
const SETTLE_TIME: Duration = Duration::from_secs(2);

/// One cache, and the models found in it.
#[derive(Debug)]
pub(crate) struct HuggingFace {
    folder: PathBuf,
    scanned: BTreeMap<String, ScannedModel>,
}

#[derive(Debug, Clone)]
struct ScannedModel {
    mark: ChangeMark,
    weights: Option<ModelWeights>,
}

/// Changes whenever a model does.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ChangeMark {
    snapshot: PathBuf,
    snapshot_changed: Option<SystemTime>,
    blobs_changed: Option<SystemTime>,
}

impl HuggingFace {
    /// `folder` is a `HF_HUB_CACHE`, or a `HF_HOME` with one in it.
    pub fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            scanned: BTreeMap::new(),
        }
    }

    pub fn scan(&mut self, walk: &mut Walk, now: SystemTime) -> Vec<FoundModel> {
        let hub = Some(self.folder.join("hub"))
            .filter(|hub| hub.is_dir())
            .unwrap_or_else(|| self.folder.clone());
        // A mounted HF_HOME in which nothing has been downloaded yet.
        if hub.ends_with("hub") && !hub.exists() && hub.parent().is_some_and(Path::is_dir) {
            return Vec::new();
        }
        let names = walk.entry_names(&hub);
        self.scanned.retain(|name, _| names.contains(name));
        names
            .iter()
            .filter_map(|name| self.scan_model(&hub, name, walk, now))
            .collect()
    }

    fn scan_model(
        &mut self,
        hub: &Path,
        name: &str,
        walk: &mut Walk,
        now: SystemTime,
    ) -> Option<FoundModel> {
        let model = name.strip_prefix(MODEL_PREFIX)?.replace("--", "/");
        let folder = hub.join(name);
        match ModelId::parse(&model) {
            Ok(model) => {
                let weights = self.model_weights(&folder, name, walk, now)?;
                Some(FoundModel { model, weights })
            }
            Err(error) => {
                walk.record_problem(ScanProblem::NoModelName {
                    path: folder,
                    error,
                });
                None
            }
        }
    }

    fn model_weights(
        &mut self,
        folder: &Path,
        name: &str,
        walk: &mut Walk,
        now: SystemTime,
    ) -> Option<ModelWeights> {
        if !walk.has_time_for(folder) {
            return self.scanned.get(name)?.weights.clone();
        }
        let mark = ChangeMark::read_from(folder, walk);
        if let Some(cached) = self.scanned.get(name).filter(|cached| cached.mark == mark) {
            let files = cached
                .weights
                .as_ref()
                .map_or(0, |weights| weights.files.len());
            walk.reserve_files(folder, files);
            return cached.weights.clone();
        }
        let weights = read_snapshot(folder, &mark.snapshot, walk);
        if walk.is_over() {
            return self.scanned.get(name)?.weights.clone();
        }
        if mark.is_settled(now) {
            self.scanned.insert(
                name.into(),
                ScannedModel {
                    mark,
                    weights: weights.clone(),
                },
            );
        }
        weights
    }
}

impl ChangeMark {
    fn read_from(folder: &Path, walk: &mut Walk) -> Self {
        let snapshot = default_snapshot(folder, walk);
        let (snapshot_changed, blobs_changed) =
            (modified_at(&snapshot), modified_at(&folder.join("blobs")));
        Self {
            snapshot,
            snapshot_changed,
            blobs_changed,
        }
    }

    fn is_settled(&self, now: SystemTime) -> bool {
        let is_old = |changed: &SystemTime| {
            now.duration_since(*changed)
                .is_ok_and(|age| age >= SETTLE_TIME)
        };
        [self.snapshot_changed, self.blobs_changed]
            .iter()
            .flatten()
            .all(is_old)
    }
}

/// The revision that an engine loads by default: the one that `refs/main` names. A download of a specific commit leaves no
/// reference: then the newest.
fn default_snapshot(folder: &Path, walk: &mut Walk) -> PathBuf {
    let snapshots = folder.join("snapshots");
    if let Some(commit) = read_commit(&folder.join("refs/main"), walk) {
        return snapshots.join(commit);
    }
    let paths = walk
        .entry_names_if_present(&snapshots)
        .into_iter()
        .map(|name| snapshots.join(name));
    let newest = paths.max_by_key(|path| (modified_at(path), path.clone()));
    newest.unwrap_or(snapshots)
}

fn read_commit(reference: &Path, walk: &mut Walk) -> Option<String> {
    let mut text = String::new();
    walk.open(reference, MAX_REF_BYTES)?
        .read_to_string(&mut text)
        .ok()?;
    let commit = text.trim();
    let mut parts = Path::new(commit).components();
    let is_name = matches!(
        (parts.next(), parts.next()),
        (Some(Component::Normal(_)), None)
    );
    is_name.then(|| commit.into())
}

fn read_snapshot(folder: &Path, snapshot: &Path, walk: &mut Walk) -> Option<ModelWeights> {
    let blobs = walk.entry_names_if_present(&folder.join("blobs"));
    let found = if snapshot.is_dir() {
        read_weights(snapshot, walk)
    } else {
        None
    };
    match has_unfinished_download(&blobs) {
        true => Some(ModelWeights {
            extent: WeightExtent::Part,
            ..found.unwrap_or_default()
        }),
        false => found,
    }
}

/// Whether a folder into which the hub's client downloads contains an unfinished file.
pub(crate) fn has_unfinished_download(names: &BTreeSet<String>) -> bool {
    names.iter().any(|name| name.ends_with(".incomplete"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::os::unix::fs::symlink;
    use std::time::Instant;
    use stowage_scheduling::units::Bytes;
    use tempfile::TempDir;

    struct Cache {
        folder: TempDir,
        source: HuggingFace,
    }

    fn cache() -> Cache {
        let folder = tempfile::tempdir().unwrap();
        let source = HuggingFace::new(folder.path().into());
        Cache { folder, source }
    }

    impl Cache {
        fn path(&self, path: &str) -> PathBuf {
            self.folder.path().join(path)
        }

        /// A model of one blob, as the hub's client leaves it.
        fn fetched(&self, model: &str, commit: &str, bytes: u64) {
            let folder = self.path(model);
            for sub in ["refs", "blobs", &format!("snapshots/{commit}")] {
                fs::create_dir_all(folder.join(sub)).unwrap();
            }
            fs::write(folder.join("refs/main"), commit).unwrap();
            File::create(folder.join(format!("blobs/of-{commit}")))
                .unwrap()
                .set_len(bytes)
                .unwrap();
            let link = folder.join(format!("snapshots/{commit}/model.safetensors"));
            symlink(format!("../../blobs/of-{commit}"), link).unwrap();
        }

        /// Each model's name, extent and bytes; and the reasons.
        fn scan_at(&mut self, now: SystemTime) -> (Vec<(String, WeightExtent, u64)>, Vec<String>) {
            let mut walk = Walk::start(Instant::now());
            let found = self.source.scan(&mut walk, now);
            let of = |found: FoundModel| {
                (
                    found.model.to_string(),
                    found.weights.extent,
                    found.weights.bytes.0,
                )
            };
            (found.into_iter().map(of).collect(), walk.reasons())
        }

        fn scan(&mut self) -> (Vec<(String, WeightExtent, u64)>, Vec<String>) {
            self.scan_at(SystemTime::now())
        }
    }

    fn whole(model: &str, bytes: u64) -> (String, WeightExtent, u64) {
        (model.into(), WeightExtent::Whole, bytes)
    }

    fn part(model: &str, bytes: u64) -> (String, WeightExtent, u64) {
        (model.into(), WeightExtent::Part, bytes)
    }

    #[test]
    fn models_are_found_by_their_folders_and_nothing_else_is() {
        let mut cache = cache();
        cache.fetched("models--meta-llama--Llama-3.1-8B", "c1", 16);
        cache.fetched("models--gpt2", "c1", 5);
        cache.fetched("datasets--squad", "c1", 7);
        fs::create_dir_all(cache.path("models--empty/snapshots/x")).unwrap();
        fs::write(cache.path("models--file"), "").unwrap();
        fs::write(cache.path("version.txt"), "1").unwrap();
        assert_eq!(
            cache.scan(),
            (
                vec![whole("gpt2", 5), whole("meta-llama/Llama-3.1-8B", 16)],
                vec![]
            )
        );
    }

    #[test]
    fn an_hf_home_with_a_hub_folder_works() {
        let mut cache = cache();
        cache.fetched("hub/models--gpt2", "c1", 5);
        assert_eq!(cache.scan().0, [whole("gpt2", 5)]);
    }

    #[test]
    fn a_model_being_downloaded_is_partial() {
        let mut cache = cache();
        cache.fetched("models--a", "c1", 5);
        fs::write(cache.path("models--a/blobs/x.incomplete"), "123").unwrap();
        fs::create_dir_all(cache.path("models--b/blobs")).unwrap();
        fs::write(cache.path("models--b/blobs/x.incomplete"), "123").unwrap();
        assert_eq!(cache.scan(), (vec![part("a", 5), part("b", 0)], vec![]));
    }

    #[test]
    fn the_revision_that_main_names_counts_and_without_one_the_newest() {
        let mut cache = cache();
        cache.fetched("models--a", "c1", 5);
        cache.fetched("models--a", "c2", 6);
        assert_eq!(cache.scan().0, [whole("a", 6)]);
        fs::write(cache.path("models--a/refs/main"), "c1\n").unwrap();
        assert_eq!(cache.scan().0, [whole("a", 5)]);
        fs::write(cache.path("models--a/refs/main"), "c3").unwrap();
        assert_eq!(cache.scan().0, [], "it has not begun");
        let newer = SystemTime::now() + Duration::from_secs(9);
        File::open(cache.path("models--a/snapshots/c1"))
            .unwrap()
            .set_modified(newer)
            .unwrap();
        for none in ["../../../etc", "", "/", "..", &"x".repeat(999)] {
            fs::write(cache.path("models--a/refs/main"), none).unwrap();
            assert_eq!(cache.scan().0, [whole("a", 5)], "{none}");
        }
    }

    #[test]
    fn a_model_with_a_removed_blob_is_partial() {
        let mut cache = cache();
        cache.fetched("models--a", "c1", 5);
        let later = SystemTime::now() + SETTLE_TIME;
        assert_eq!(cache.scan_at(later).0, [whole("a", 5)]);
        fs::remove_file(cache.path("models--a/blobs/of-c1")).unwrap();
        assert_eq!(cache.scan_at(later).0, [part("a", 0)]);
        fs::remove_dir_all(cache.path("models--a")).unwrap();
        assert_eq!(cache.scan_at(later).0, []);
        assert!(cache.source.scanned.is_empty());
    }

    #[test]
    fn an_unchanged_model_is_not_scanned_again() {
        let mut cache = cache();
        cache.fetched("models--a", "c1", 5);
        assert_eq!(cache.scan().0, [whole("a", 5)]);
        assert!(cache.source.scanned.is_empty(), "it may be changing");
        let later = SystemTime::now() + SETTLE_TIME;
        assert_eq!(cache.scan_at(later).0, [whole("a", 5)]);
        cache
            .source
            .scanned
            .get_mut("models--a")
            .unwrap()
            .weights
            .as_mut()
            .unwrap()
            .bytes = Bytes(77);
        assert_eq!(cache.scan_at(later).0, [whole("a", 77)]);
    }

    #[test]
    fn a_folder_whose_name_is_no_models_is_reported() {
        let mut cache = cache();
        cache.fetched("models--a b", "c1", 5);
        cache.fetched("models--", "c1", 5);
        let (found, reasons) = cache.scan();
        assert_eq!(found, []);
        assert!(
            reasons.len() == 2
                && reasons
                    .iter()
                    .all(|reason| reason.contains("no name of a model")),
            "{reasons:?}"
        );
    }
}

//! Models that KServe keeps on the node: `models/<name>/…` below the local path of the node group's volume.
//!
//! Its agent downloads each model of the node's LocalModelNode into a folder of the model's name, and removes those that are
//! not listed any more. That name is the LocalModelCache's, not the model's own: pods that use it name it in their label.

use super::FoundModel;
use super::hugging_face::has_unfinished_download;
use super::walk::{ScanProblem, Walk};
use super::weights::{ModelWeights, WeightExtent, read_weights};
use std::path::{Path, PathBuf};
use stowage_scheduling::ids::ModelId;

/// Where the hub's client keeps unfinished files, if it downloads into a plain folder.
const UNFINISHED_DOWNLOADS: &str = ".cache/huggingface/download";

/// One volume of local models.
#[derive(Debug)]
pub(crate) struct Kserve {
    folder: PathBuf,
}

impl Kserve {
    /// `folder` is the volume's local path.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Scans everything again: a file that grows leaves its folder's time unchanged.
    pub fn scan(&self, walk: &mut Walk) -> Vec<FoundModel> {
        let models = self.folder.join("models");
        let names = walk.entry_names(&models);
        names
            .iter()
            .filter_map(|name| scan_model(&models.join(name), name, walk))
            .collect()
    }
}

fn scan_model(folder: &Path, name: &str, walk: &mut Walk) -> Option<FoundModel> {
    if !walk.has_time_for(folder) || !folder.is_dir() {
        return None;
    }
    match ModelId::parse(name) {
        Ok(model) => read_model_folder(folder, walk)
            .filter(|_| !walk.is_over())
            .map(|weights| FoundModel { model, weights }),
        Err(error) => {
            walk.record_problem(ScanProblem::NoModelName {
                path: folder.into(),
                error,
            });
            None
        }
    }
}

fn read_model_folder(folder: &Path, walk: &mut Walk) -> Option<ModelWeights> {
    let unfinished = walk.entry_names_if_present(&folder.join(UNFINISHED_DOWNLOADS));
    let found = read_weights(folder, walk);
    match has_unfinished_download(&unfinished) {
        true => Some(ModelWeights {
            extent: WeightExtent::Part,
            ..found.unwrap_or_default()
        }),
        false => found,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::time::Instant;

    #[test]
    fn each_folder_of_weights_is_a_model_and_what_is_unfinished_a_part() {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in [
            ("models/llama/model.safetensors", "12345"),
            ("models/llama/config.json", "{}"),
            ("models/qwen/model-00001-of-00002.safetensors", "123"),
            ("models/phi/model.safetensors", "12"),
            ("models/phi/.cache/huggingface/download/x.incomplete", "1"),
            ("models/none/readme", "1"),
            ("models/file", ""),
            ("models/a b/model.safetensors", "1"),
        ] {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let mut walk = Walk::start(Instant::now());
        let found = Kserve::new(folder.path().into()).scan(&mut walk);
        let found: Vec<_> = found
            .iter()
            .map(|found| {
                (
                    found.model.as_str(),
                    found.weights.extent,
                    found.weights.bytes.0,
                )
            })
            .collect();
        assert_eq!(
            found,
            [
                ("llama", WeightExtent::Whole, 5),
                ("phi", WeightExtent::Part, 2),
                ("qwen", WeightExtent::Part, 3)
            ]
        );
        let reasons = walk.reasons();
        assert!(
            reasons.len() == 1 && reasons[0].contains("no name of a model"),
            "{reasons:?}"
        );
    }

    #[test]
    fn a_volume_without_models_is_a_reason() {
        let folder = tempfile::tempdir().unwrap();
        let mut walk = Walk::start(Instant::now());
        assert!(Kserve::new(folder.path().into()).scan(&mut walk).is_empty());
        assert!(
            walk.reasons()[0].contains("there is no folder"),
            "{:?}",
            walk.reasons()
        );
    }
}

//! A `libnvidia-ml.so` that behaves as a script says: the agent's tests run the production NVML path without a GPU.
//!
//! Two crates in one. As an rlib it gives tests the [`NvmlScript`] to write and [`Mock`], which puts a copy of the library where
//! the agent can open it. As a cdylib it is that library. Only what the agent calls is exported, with the answers that
//! NVIDIA's documentation gives; no other code of the project may use `unsafe`, and nothing here may use the project.
//!
//! The script is the file named by `MOCK_NVML_SCRIPT`, or else the one beside the library with `.json` added to its name.
//! It is read again at each `nvmlInit`, `nvmlDeviceGetCount` and wait for events: a test changes the script while the agent
//! runs, and one sample reads one version of it.

mod abi;
mod devices;
mod gpm;
mod script;
mod system;
mod world;

pub use script::{GpuProcess, NvmlScript, ScriptedGpu, Slice, Xid};

use std::io;
use std::path::{Path, PathBuf};

/// The names of NVML's answers that a script may want under `refuse`.
pub mod codes {
    pub use crate::abi::{
        DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, GPU_IS_LOST, LIB_RM_VERSION_MISMATCH, NO_PERMISSION,
        NOT_SUPPORTED, RESET_REQUIRED, TIMEOUT, UNKNOWN,
    };
}

const LIBRARY: &str = "libmock_nvml.so";

/// A copy of the library with a script of its own. A test has one to itself: another copy is another library to the loader.
#[derive(Debug)]
pub struct Mock {
    library: PathBuf,
}

impl Mock {
    /// Copies the library into `folder`, to play `script`.
    pub fn install(folder: &Path, script: &NvmlScript) -> io::Result<Self> {
        let library = folder.join(LIBRARY);
        std::fs::copy(built()?, &library)?;
        let mock = Self { library };
        mock.play(script)?;
        Ok(mock)
    }

    /// What to give to `--nvml-lib`.
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// Takes a function out of the library, as one of an older driver; before it is opened.
    pub fn remove_function(&self, name: &str) -> io::Result<()> {
        let mut library = std::fs::read(&self.library)?;
        let places: Vec<usize> = (0..library.len() - name.len())
            .filter(|place| library[*place..].starts_with(name.as_bytes()))
            .collect();
        assert!(!places.is_empty(), "the library has no {name}");
        // The loader finds no symbol of the right name any more.
        places.into_iter().for_each(|place| library[place] = b'_');
        std::fs::write(&self.library, library)
    }

    /// Replaces the script, at once and as a whole.
    pub fn play(&self, script: &NvmlScript) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(script)?;
        let (beside, half) = (
            script_beside(&self.library),
            self.library.with_extension("half"),
        );
        std::fs::write(&half, text)?;
        std::fs::rename(half, beside)
    }
}

/// Where a library without `MOCK_NVML_SCRIPT` finds its script.
fn script_beside(library: &Path) -> PathBuf {
    let mut name = library.as_os_str().to_owned();
    name.push(".json");
    name.into()
}

/// The library as cargo built it: beside the test executable, or in `deps` beside another.
fn built() -> io::Result<PathBuf> {
    let executable = std::env::current_exe()?;
    let folder = executable.parent().unwrap_or(Path::new("."));
    let places = [folder.join(LIBRARY), folder.join("deps").join(LIBRARY)];
    let missing = || {
        io::Error::new(
            io::ErrorKind::NotFound,
            format!("cargo built no {LIBRARY} in {}", folder.display()),
        )
    };
    places
        .into_iter()
        .find(|place| place.is_file())
        .ok_or_else(missing)
}

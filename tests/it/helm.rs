//! Helm, where this machine has it: the command, or Helm's library in a Python wheel behind a small script that stands for the
//! command.

use crate::needs;
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Names a Python interpreter that has `helm-python-sdk`.
const PYTHON: &str = "STOWAGE_HELM_PYTHON";

pub struct Helm {
    /// Has the command `helm`.
    pub folder: PathBuf,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

impl Helm {
    /// `None`, with a line that says so, where there is none.
    pub fn find() -> Option<Self> {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        if let Some(folder) =
            std::env::split_paths(&folders).find(|folder| folder.join("helm").is_file())
        {
            return Some(Self { folder });
        }
        let python = std::env::var(PYTHON).unwrap_or_else(|_| "python3".to_owned());
        let imports = Command::new(&python)
            .args(["-c", "import helm_python"])
            .stderr(Stdio::null())
            .status();
        if imports.is_ok_and(|status| status.success()) {
            return Some(Self {
                folder: script(&python),
            });
        }
        needs::report_skipped(format_args!(
            "no helm on the path, and {python} has no helm-python-sdk; {PYTHON} names another interpreter"
        ));
        None
    }

    /// The chart's objects under the given flags; an error is what Helm says.
    pub fn render(&self, namespace: &str, flags: &[&str]) -> Result<Vec<Value>, String> {
        let mut helm = Command::new(self.folder.join("helm"));
        helm.args([
            "template",
            "stowage",
            "manifests/chart",
            "--namespace",
            namespace,
        ])
        .args(flags);
        let output = helm
            .current_dir(root())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if !output.status.success() {
            return Err(text(&output.stderr));
        }
        let objects: Vec<Value> = serde_saphyr::from_multiple(&text(&output.stdout)).unwrap();
        Ok(objects.into_iter().filter(Value::is_object).collect())
    }
}

/// A folder with a command `helm` that runs the script.
fn script(python: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("helm");
    std::fs::create_dir_all(&folder).unwrap();
    let text = format!(
        "#!/bin/sh\nexec {python} {} \"$@\"\n",
        root().join("tests/helm/helm.py").display()
    );
    // Renamed into place: a test beside this one may be running it.
    let file = tempfile::NamedTempFile::new_in(&folder).unwrap();
    std::fs::write(file.path(), text).unwrap();
    std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    file.into_temp_path().persist(folder.join("helm")).unwrap();
    folder
}

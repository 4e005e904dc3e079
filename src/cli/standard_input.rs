//! `-` in place of a file: standard input, which can be read once.

use anyhow::Result;
use clap::Error;
use clap::error::ErrorKind;
use std::path::Path;

/// The path that stands for standard input.
const STANDARD_INPUT: &str = "-";

pub fn is_standard_input(path: &Path) -> bool {
    path == Path::new(STANDARD_INPUT)
}

/// The name of a file in messages.
pub fn display_name(path: &Path) -> String {
    if is_standard_input(path) {
        "standard input".into()
    } else {
        path.display().to_string()
    }
}

/// Refuses a command line that names standard input twice: the second reader would get nothing.
pub fn check_named_once<'a>(
    arguments: impl IntoIterator<Item = (&'a str, &'a Path)>,
) -> Result<()> {
    let given = arguments
        .into_iter()
        .filter(|(_, path)| is_standard_input(path));
    let given: Vec<&str> = given.map(|(argument, _)| argument).collect();
    if given.len() > 1 {
        let both = given.join(" and ");
        let message = format!(
            "{both} are both -, and standard input is read once: name a file for one of them\n"
        );
        return Err(Error::raw(ErrorKind::ArgumentConflict, message).into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standard_input_is_named_once() {
        let (input, file) = (Path::new("-"), Path::new("file"));
        assert!(check_named_once([("--cluster", input), ("--policy", file)]).is_ok());
        let error = check_named_once([("--cluster", input), ("--policy", input)])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("--cluster and --policy are both -"),
            "{error}"
        );
    }
}

//! Decides what to do after each read of the policy files. Pure: the files come in, the action comes out; no clock, no disk.
//!
//! ```text
//!             the same as was handled
//!           ┌──────────┐
//!           ▼          │       other           the same again
//!        settled ──────┴────────────► changing ────────────────► settled: load it, or refuse it
//!           ▲                          │    ▲
//!           └──── back to the old ─────┘    └─ other again
//! ```
//!
//! A file that is being written, and a directory with one new and one old file, differ from one read to the next: only what is
//! read twice in a row is an intended policy.

use super::read::ReadError;
use stowage_policy_file::SourceText;

/// What was found at the policy's path.
pub(crate) type PolicyTexts = Result<Vec<SourceText>, ReadError>;

#[derive(Debug)]
pub(crate) struct FileChangeDetector {
    /// What was handled last, whether it became the policy or was rejected.
    settled: PolicyTexts,
    /// What the last read found, if it was something else.
    candidate: Option<PolicyTexts>,
}

/// The action after a read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReloadStep {
    Nothing,
    /// The files are changing: read again soon.
    ReadAgain,
    Load(Vec<SourceText>),
    Refuse(ReadError),
}

impl FileChangeDetector {
    /// A detector for which `settled`, found at the start, has been handled.
    pub fn from(settled: PolicyTexts) -> Self {
        Self {
            settled,
            candidate: None,
        }
    }

    pub fn observe(&mut self, texts: PolicyTexts) -> ReloadStep {
        if texts == self.settled {
            self.candidate = None;
            return ReloadStep::Nothing;
        }
        if self.candidate.as_ref() != Some(&texts) {
            self.candidate = Some(texts);
            return ReloadStep::ReadAgain;
        }
        self.candidate = None;
        self.settled = texts.clone();
        match texts {
            Ok(texts) => ReloadStep::Load(texts),
            Err(error) => ReloadStep::Refuse(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(text: &str) -> Vec<SourceText> {
        vec![SourceText::new("policy.yaml", text)]
    }

    fn gone() -> ReadError {
        ReadError::NoPolicy {
            path: "policies".into(),
        }
    }

    #[test]
    fn unchanged_files_lead_to_no_action() {
        let mut watching = FileChangeDetector::from(Ok(texts("a")));
        assert_eq!(watching.observe(Ok(texts("a"))), ReloadStep::Nothing);
        assert_eq!(watching.observe(Ok(texts("a"))), ReloadStep::Nothing);
    }

    #[test]
    fn a_change_is_loaded_once_when_it_is_seen_twice() {
        let mut watching = FileChangeDetector::from(Ok(texts("a")));
        assert_eq!(watching.observe(Ok(texts("b"))), ReloadStep::ReadAgain);
        assert_eq!(
            watching.observe(Ok(texts("b"))),
            ReloadStep::Load(texts("b"))
        );
        assert_eq!(watching.observe(Ok(texts("b"))), ReloadStep::Nothing);
    }

    #[test]
    fn a_file_that_is_still_being_written_is_not_loaded() {
        let mut watching = FileChangeDetector::from(Ok(texts("whole")));
        for part in ["", "c", "ch", "chan"] {
            assert_eq!(
                watching.observe(Ok(texts(part))),
                ReloadStep::ReadAgain,
                "{part:?}"
            );
        }
        assert_eq!(
            watching.observe(Ok(texts("changed"))),
            ReloadStep::ReadAgain
        );
        assert_eq!(
            watching.observe(Ok(texts("changed"))),
            ReloadStep::Load(texts("changed"))
        );
    }

    #[test]
    fn a_directory_that_is_gone_for_a_moment_changes_nothing() {
        let mut watching = FileChangeDetector::from(Ok(texts("a")));
        assert_eq!(watching.observe(Err(gone())), ReloadStep::ReadAgain);
        assert_eq!(watching.observe(Ok(texts("a"))), ReloadStep::Nothing);
        assert_eq!(
            watching.observe(Err(gone())),
            ReloadStep::ReadAgain,
            "what was seen before that does not count"
        );
    }

    #[test]
    fn unreadable_files_are_refused_once_and_loaded_when_they_are_back() {
        let mut watching = FileChangeDetector::from(Ok(texts("a")));
        assert_eq!(watching.observe(Err(gone())), ReloadStep::ReadAgain);
        assert_eq!(watching.observe(Err(gone())), ReloadStep::Refuse(gone()));
        assert_eq!(watching.observe(Err(gone())), ReloadStep::Nothing);
        assert_eq!(watching.observe(Ok(texts("a"))), ReloadStep::ReadAgain);
        assert_eq!(
            watching.observe(Ok(texts("a"))),
            ReloadStep::Load(texts("a")),
            "it clears the refusal"
        );
    }

    #[test]
    fn a_file_that_is_renamed_is_a_change() {
        let mut watching = FileChangeDetector::from(Ok(texts("a")));
        let renamed = vec![SourceText::new("other.yaml", "a")];
        assert_eq!(watching.observe(Ok(renamed.clone())), ReloadStep::ReadAgain);
        assert_eq!(
            watching.observe(Ok(renamed.clone())),
            ReloadStep::Load(renamed)
        );
    }
}

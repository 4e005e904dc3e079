//! The models of the bank, and pods that claim to be one of them.

use crate::simulate::fleet::pods::PodSpec;
use stowage_scheduling::units::Bytes;

/// What a pod is, by its label and priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum App {
    Chatbot,
    Credit,
    Fraud,
    /// It has the label of fraud detection, and not its priority.
    Pretender,
}

impl App {
    pub fn label(self) -> &'static str {
        match self {
            Self::Chatbot => "chatbot",
            Self::Credit => "credit",
            Self::Fraud | Self::Pretender => "fraud",
        }
    }

    pub fn priority(self) -> i32 {
        match self {
            Self::Chatbot => 10,
            Self::Credit => 100,
            Self::Fraud => 1000,
            Self::Pretender => 500,
        }
    }

    pub fn from_pod(spec: &PodSpec) -> Self {
        let label = spec.labels.get("app").map_or("", String::as_str);
        let all = [Self::Chatbot, Self::Credit, Self::Fraud];
        let app = all
            .into_iter()
            .find(|app| app.label() == label)
            .unwrap_or(Self::Pretender);
        if app == Self::Fraud && spec.priority < Self::Fraud.priority() {
            Self::Pretender
        } else {
            app
        }
    }

    pub fn pod(self, vram: Bytes) -> PodSpec {
        PodSpec {
            labels: [("app".to_owned(), self.label().to_owned())].into(),
            priority: self.priority(),
            ..PodSpec::plain("bank", vram)
        }
    }
}

//! Which DRA drivers hand out GPUs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Dynamic resource allocation (DRA): kube-scheduler allocates the devices that drivers publish as ResourceSlices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct DraRules {
    /// Drivers whose devices are GPUs: Stowage allocates nothing on a node for which one of them publishes a device. Slices of
    /// other drivers do not matter.
    #[schemars(extend("items" = {"format": "subdomain", "type": "string"}))]
    pub gpu_drivers: Vec<String>,
}

impl DraRules {
    pub(crate) fn is_gpu_driver(&self, driver: &str) -> bool {
        self.gpu_drivers.iter().any(|known| known == driver)
    }
}

impl Default for DraRules {
    fn default() -> Self {
        Self {
            gpu_drivers: vec!["gpu.nvidia.com".into()],
        }
    }
}

//! Tokens of service accounts: issued to a test or the demo, and reviewed as the real server reviews them.

use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Every token that is good, in order of issue.
#[derive(Debug, Default)]
pub struct Tokens(Mutex<BTreeMap<String, Issued>>);

#[derive(Debug)]
struct Issued {
    /// `system:serviceaccount:namespace:name`.
    user: String,
    node: Option<String>,
    audience: String,
    good: bool,
}

impl Tokens {
    pub fn issue(&self, account: &str, node: Option<&str>, audience: &str) -> String {
        let mut tokens = self.0.lock();
        let token = format!("token-{}", tokens.len() + 1);
        let issued = Issued {
            user: format!("system:serviceaccount:{}", account.replace('/', ":")),
            node: node.map(str::to_owned),
            audience: audience.into(),
            good: true,
        };
        tokens.insert(token.clone(), issued);
        token
    }

    pub fn revoke(&self, token: &str) {
        if let Some(issued) = self.0.lock().get_mut(token) {
            issued.good = false;
        }
    }

    /// A `TokenReview` with its status. An audience that does not match is an error of the token, as it is in Kubernetes.
    pub fn review(&self, mut review: Value) -> Value {
        let tokens = self.0.lock();
        let audiences: Vec<&str> = review["spec"]["audiences"]
            .as_array()
            .map(|audiences| audiences.iter().filter_map(Value::as_str).collect())
            .unwrap_or_default();
        let status = match tokens.get(review["spec"]["token"].as_str().unwrap_or_default()) {
            None => json!({ "user": {}, "error": "invalid bearer token" }),
            Some(issued) if !issued.good => {
                json!({ "user": {}, "error": "[invalid bearer token, service account token has expired]" })
            }
            Some(issued) if !audiences.contains(&issued.audience.as_str()) => json!({
                "user": {},
                "error": format!(
                    "[invalid bearer token, token audiences [{:?}] is invalid for the target audiences {audiences:?}]",
                    issued.audience
                ),
            }),
            Some(issued) => {
                let mut extra = json!({});
                if let Some(node) = &issued.node {
                    extra["authentication.kubernetes.io/node-name"] = json!([node]);
                }
                let user =
                    json!({ "username": issued.user, "groups": ["system:serviceaccounts"], "extra": extra });
                json!({ "authenticated": true, "user": user, "audiences": [issued.audience] })
            }
        };
        review["status"] = status;
        review
    }
}

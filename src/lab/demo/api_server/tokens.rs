//! Service account tokens: issued to tests and the demo, and reviewed as the real server reviews them.

use k8s_openapi::ByteString;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Every token that was issued.
#[derive(Debug, Default)]
pub struct Tokens {
    issued: Mutex<BTreeMap<String, IssuedToken>>,
    /// Granted access: a user, and a path or a namespace whose pods the user may get.
    grants: Mutex<BTreeSet<(String, String)>>,
}

/// The server's own audience, which is that of an ordinary token.
pub(crate) const API_SERVER_AUDIENCE: &str = "https://kubernetes.default.svc";

/// When every token expires, in seconds since 1970: in the year 2096, after any test ends.
const EXPIRY_UNIX_SECONDS: u64 = 4_000_000_000;

/// A token with the claims that Kubernetes writes, and a placeholder for the signature.
fn json_web_token(
    number: usize,
    user: &str,
    node: Option<&TokenNode>,
    audience: &str,
    issued: i64,
) -> String {
    let head = json!({ "alg": "RS256", "kid": "stand-in" });
    let mut claims = json!({
        "aud": [audience], "exp": EXPIRY_UNIX_SECONDS, "iat": issued, "iss": API_SERVER_AUDIENCE, "jti": number.to_string(),
        "sub": user, "kubernetes.io": {},
    });
    if let Some(TokenNode { name, uid }) = node {
        claims["kubernetes.io"]["node"] = json!({ "name": name });
        if let Some(uid) = uid {
            claims["kubernetes.io"]["node"]["uid"] = json!(uid);
        }
    }
    format!(
        "{}.{}.{}",
        base64_url(&head),
        base64_url(&claims),
        base64_url(&json!(number))
    )
}

fn user_name(account: &str) -> String {
    format!("system:serviceaccount:{}", account.replace('/', ":"))
}

fn base64_url(value: &Value) -> String {
    let bytes = ByteString(value.to_string().into_bytes());
    let text = serde_json::to_value(bytes).expect("bytes are plain data");
    let text = text.as_str().unwrap_or_default();
    text.replace('+', "-")
        .replace('/', "_")
        .trim_end_matches('=')
        .to_owned()
}

/// The node of a pod that a token is issued for.
#[derive(Debug)]
pub(crate) struct TokenNode {
    pub name: String,
    /// `None` if there is no such Node now.
    pub uid: Option<String>,
}

#[derive(Debug)]
struct IssuedToken {
    /// `system:serviceaccount:namespace:name`.
    user: String,
    node: Option<TokenNode>,
    audience: String,
    is_valid: bool,
}

impl Tokens {
    /// `issued` is in seconds since 1970.
    pub fn issue(
        &self,
        account: &str,
        node: Option<TokenNode>,
        audience: &str,
        issued: i64,
    ) -> String {
        let mut tokens = self.issued.lock();
        let user = user_name(account);
        let token = json_web_token(tokens.len() + 1, &user, node.as_ref(), audience, issued);
        let issued = IssuedToken {
            user,
            node,
            audience: audience.into(),
            is_valid: true,
        };
        tokens.insert(token.clone(), issued);
        token
    }

    pub fn allow(&self, account: &str, what: &str) {
        self.grants.lock().insert((user_name(account), what.into()));
    }

    /// A `SubjectAccessReview` with its status; everything that was not granted is denied.
    pub(crate) fn review_access(&self, mut review: Value) -> Value {
        let spec = &review["spec"];
        let text = |pointer: &str| {
            spec.pointer(pointer)
                .and_then(Value::as_str)
                .unwrap_or_default()
        };
        let is_get = [
            text("/nonResourceAttributes/verb"),
            text("/resourceAttributes/verb"),
        ]
        .contains(&"get");
        let is_pods = text("/resourceAttributes/resource") == "pods";
        let what = match is_pods {
            true => text("/resourceAttributes/namespace"),
            false => text("/nonResourceAttributes/path"),
        };
        let requested = (text("/user").to_owned(), what.to_owned());
        let allowed = is_get && self.grants.lock().contains(&requested);
        review["status"] = json!({ "allowed": allowed });
        review
    }

    pub(crate) fn revoke(&self, token: &str) {
        if let Some(issued) = self.issued.lock().get_mut(token) {
            issued.is_valid = false;
        }
    }

    /// A `TokenReview` with its status. An audience that does not match is an error of the token, as it is in Kubernetes.
    pub fn review(&self, mut review: Value) -> Value {
        let tokens = self.issued.lock();
        // Where none is asked for it is the server's own.
        let audiences: Vec<&str> = review["spec"]["audiences"]
            .as_array()
            .map(|audiences| audiences.iter().filter_map(Value::as_str).collect())
            .unwrap_or_else(|| vec![API_SERVER_AUDIENCE]);
        let status = match tokens.get(review["spec"]["token"].as_str().unwrap_or_default()) {
            None => json!({ "user": {}, "error": "invalid bearer token" }),
            Some(issued) if !issued.is_valid => {
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
                if let Some(TokenNode { name, uid }) = &issued.node {
                    extra["authentication.kubernetes.io/node-name"] = json!([name]);
                    if let Some(uid) = uid {
                        extra["authentication.kubernetes.io/node-uid"] = json!([uid]);
                    }
                }
                let user = json!({ "username": issued.user, "groups": ["system:serviceaccounts"], "extra": extra });
                json!({ "authenticated": true, "user": user, "audiences": [issued.audience] })
            }
        };
        review["status"] = status;
        review
    }
}

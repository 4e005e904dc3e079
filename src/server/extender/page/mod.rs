//! The page in a browser: `GET /` and the files under `/assets/`. They are part of the program and have no data of the cluster in
//! them, so that no token is asked for; what the page then asks for is guarded as always.
//!
//! No file needs another server, and no script or style is in the HTML itself: the content security policy allows none.

use axum::extract::Path;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use std::sync::LazyLock;

/// Scripts, styles and data come from this server alone, and no other page may frame this one.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// One file, as it is sent.
struct PageFile {
    name: &'static str,
    content_type: &'static str,
    bytes: &'static [u8],
}

macro_rules! file {
    ($name:literal, $content_type:expr) => {
        PageFile {
            name: $name,
            content_type: $content_type,
            bytes: include_bytes!($name),
        }
    };
}

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

static INDEX: PageFile = file!("index.html", HTML);

static ASSETS: [PageFile; 9] = [
    file!("app.js", SCRIPT),
    file!("explain.js", SCRIPT),
    file!("panels.js", SCRIPT),
    file!("state.js", SCRIPT),
    file!("style.css", STYLE),
    file!("uplot.css", STYLE),
    file!("uplot.js", SCRIPT),
    file!("views.js", SCRIPT),
    file!("words.js", SCRIPT),
];

/// The ETag of each file, in the order of [`all`].
static ETAGS: LazyLock<Vec<String>> = LazyLock::new(|| all().map(etag).collect());

fn all() -> impl Iterator<Item = &'static PageFile> {
    std::iter::once(&INDEX).chain(&ASSETS)
}

fn etag(file: &PageFile) -> String {
    let digest = Sha256::digest(file.bytes);
    let hex: String = digest
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("\"{hex}\"")
}

pub async fn index(headers: HeaderMap) -> Response {
    respond(0, &headers)
}

pub(crate) async fn asset(Path(name): Path<String>, headers: HeaderMap) -> Response {
    match all().skip(1).position(|file| file.name == name) {
        Some(index) => respond(index + 1, &headers),
        None => (StatusCode::NOT_FOUND, "the page has no such file\n").into_response(),
    }
}

/// The response with the file at this index of [`all`]; without its bytes if the client has them already.
fn respond(index: usize, request_headers: &HeaderMap) -> Response {
    let file = all().nth(index).expect("each place has a file");
    let tag = &ETAGS[index];
    let has = request_headers
        .get(header::IF_NONE_MATCH)
        .and_then(|has| has.to_str().ok());
    let headers = [
        (header::CONTENT_TYPE, file.content_type),
        (header::ETAG, tag.as_str()),
        // Another version of Stowage may be there at the next look.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
    ];
    if has.is_some_and(|has| {
        has.split(',')
            .any(|candidate| candidate.trim().trim_start_matches("W/") == tag)
    }) {
        return (StatusCode::NOT_MODIFIED, headers).into_response();
    }
    (headers, file.bytes).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Over a port-forward it still appears at once.
    const MOST_BYTES: usize = 200 << 10;

    fn text(name: &str) -> &'static str {
        let file = all().find(|file| file.name == name).unwrap();
        std::str::from_utf8(file.bytes).unwrap()
    }

    #[test]
    fn all_files_together_are_small() {
        let sizes: Vec<(&str, usize)> = all().map(|file| (file.name, file.bytes.len())).collect();
        let sum: usize = sizes.iter().map(|(_, size)| size).sum();
        assert!(sum <= MOST_BYTES, "{sum} bytes: {sizes:?}");
    }

    #[test]
    fn no_file_names_another_server_and_the_html_has_no_script_or_style_in_itself() {
        for file in all().filter(|file| !file.name.starts_with("uplot")) {
            let text = std::str::from_utf8(file.bytes)
                .unwrap()
                .replace("http://www.w3.org/2000/svg", "");
            assert!(
                !text.contains("http://") && !text.contains("https://"),
                "{}",
                file.name
            );
            assert!(
                !text.contains("innerHTML") && !text.contains("insertAdjacentHTML"),
                "{}",
                file.name
            );
        }
        let html = text("index.html");
        assert!(
            !html.contains("<style") && !html.contains(" style=") && !html.contains(" on"),
            "{html}"
        );
        let count = |text: &str| html.matches(text).count();
        assert_eq!(
            count("<script"),
            count("<script src=\"assets/"),
            "each names a file"
        );
        assert_eq!(
            count("<script"),
            count("></script>"),
            "and has nothing in itself"
        );
    }

    #[test]
    fn every_file_is_referred_to() {
        let texts: Vec<&str> = all()
            .map(|file| std::str::from_utf8(file.bytes).unwrap())
            .collect();
        for file in all().skip(1) {
            assert!(
                texts.iter().any(|text| text.contains(file.name)),
                "{}",
                file.name
            );
        }
    }

    #[tokio::test]
    async fn a_client_that_has_a_file_is_not_sent_it_again() {
        let first = index(HeaderMap::new()).await;
        assert_eq!(first.status(), StatusCode::OK);
        let tag = first.headers()[header::ETAG].clone();
        let again = index(HeaderMap::from_iter([(header::IF_NONE_MATCH, tag)])).await;
        assert_eq!(again.status(), StatusCode::NOT_MODIFIED);
        assert!(
            again
                .headers()
                .contains_key(header::CONTENT_SECURITY_POLICY)
        );
        let other = HeaderMap::from_iter([(header::IF_NONE_MATCH, "\"other\"".parse().unwrap())]);
        assert_eq!(index(other).await.status(), StatusCode::OK);
        assert_eq!(
            asset(Path("../mod.rs".into()), HeaderMap::new())
                .await
                .status(),
            StatusCode::NOT_FOUND
        );
    }
}

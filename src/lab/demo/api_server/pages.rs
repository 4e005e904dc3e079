//! Paged lists: every page of a list shows the objects as they were at its first page.
//!
//! A list with more than one requested page is stored until it is compacted or too many others were made after it; its tokens
//! have expired from then on. The caller decides what is listed.

use super::error::ApiError;
use super::resource::Resource;
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Lists that are kept at once: far more than clients of a test page through at the same time.
const MAX_STORED_LISTS: usize = 256;

#[derive(Debug, Default)]
pub(crate) struct PagedListStore(Mutex<PagedLists>);

#[derive(Debug, Default)]
struct PagedLists {
    lists_made: u64,
    stored: BTreeMap<u64, FrozenList>,
}

/// All that is listed, as of one version.
#[derive(Debug, Clone)]
pub(crate) struct FrozenList {
    pub resource: &'static Resource,
    pub revision: u64,
    pub items: Arc<[Arc<Value>]>,
}

/// One page of a list.
#[derive(Debug)]
pub(crate) struct ListPage {
    pub revision: u64,
    pub items: Vec<Arc<Value>>,
    /// The token of the next page, and how many objects it and those after it have.
    pub next: Option<(String, usize)>,
}

impl PagedListStore {
    /// The first page; everything where no limit was asked for.
    pub fn first(&self, list: FrozenList, limit: Option<usize>) -> ListPage {
        let limit = limit.unwrap_or(usize::MAX);
        if list.items.len() <= limit {
            return list.list_page(0, 0, limit);
        }
        let mut state = self.0.lock();
        state.lists_made += 1;
        let number = state.lists_made;
        state.stored.insert(number, list.clone());
        if state.stored.len() > MAX_STORED_LISTS {
            state.stored.pop_first();
        }
        list.list_page(number, 0, limit)
    }

    /// The page for an earlier page's continue token.
    pub fn next(
        &self,
        resource: &Resource,
        token: &str,
        limit: Option<usize>,
    ) -> Result<ListPage, ApiError> {
        let position = token
            .split_once('-')
            .and_then(|(list, from)| Some((list.parse().ok()?, from.parse().ok()?)));
        let (number, from) = position.ok_or_else(|| {
            ApiError::bad_request("continue key is not valid: it was not given out here")
        })?;
        let state = self.0.lock();
        let list = state
            .stored
            .get(&number)
            .ok_or_else(ApiError::expired_continue)?;
        if list.resource != resource {
            return Err(ApiError::bad_request(
                "continue key is not valid: it is of another kind",
            ));
        }
        Ok(list.list_page(number, from, limit.unwrap_or(usize::MAX)))
    }

    /// All tokens have expired.
    pub fn expire(&self) {
        self.0.lock().stored.clear();
    }
}

impl FrozenList {
    fn list_page(&self, number: u64, from: usize, limit: usize) -> ListPage {
        let remaining = self.items.get(from..).unwrap_or_default();
        let items = remaining[..limit.min(remaining.len())].to_vec();
        let left = remaining.len() - items.len();
        let next = (left > 0).then(|| (format!("{number}-{}", from + items.len()), left));
        ListPage {
            revision: self.revision,
            items,
            next,
        }
    }
}

//! Settings of the Hugging Face hub and the local cache of its models. Both are compatible with
//! `huggingface_hub`, so that Python and Levade find each other's downloads.
//!
//! - **Cache.** `HF_HUB_CACHE` (or `HUGGINGFACE_HUB_CACHE`), by default `hub` in `HF_HOME`. The
//!   default of `HF_HOME` is `huggingface` in `XDG_CACHE_HOME` or `~/.cache`.
//! - **Token.** `HF_TOKEN` (or `HUGGING_FACE_HUB_TOKEN`), by default the token of a login, in the
//!   file `HF_TOKEN_PATH` or `HF_HOME/token`. `HF_HUB_DISABLE_IMPLICIT_TOKEN` disables the default.
//! - **Offline.** If `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE` is set, the network is not used.
//! - **Layout.** The directory of a model is `models--OWNER--NAME`. In it, `refs/REVISION` contains
//!   a commit, and `snapshots/COMMIT` the files.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::{AdapterConfig, ModelError};

pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
pub(super) const ADAPTER: &str = "adapter_model.safetensors";

/// Settings for the Hugging Face hub, from environment variables.
#[derive(Debug, PartialEq)]
pub(super) struct HubSettings {
    pub(super) endpoint: String,
    pub(super) token: Option<String>,
    /// Name of the environment variable that disables network access. `None` if the network may be
    /// used.
    pub(super) offline: Option<&'static str>,
    pub(super) cache: PathBuf,
}

impl HubSettings {
    /// Reads the settings of the hub. `variable` returns the value of an environment variable.
    /// Blank values count as unset, and a leading `~/` in a path is replaced with `HOME`.
    ///
    /// # Errors
    /// Returns [`ModelError::Source`] if no variable determines the cache directory, or if
    /// `HF_ENDPOINT` does not start with `http://` or `https://`.
    pub(super) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, ModelError> {
        let set = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let user = set("HOME").map(PathBuf::from);
        let dir = |name: &str| {
            set(name).map(|value| match (value.strip_prefix("~/"), &user) {
                (Some(rest), Some(user)) => user.join(rest),
                _ => PathBuf::from(value),
            })
        };
        let home = dir("HF_HOME").or_else(|| {
            let caches =
                dir("XDG_CACHE_HOME").or_else(|| user.as_ref().map(|user| user.join(".cache")));
            caches.map(|caches| caches.join("huggingface"))
        });
        let cache = dir("HF_HUB_CACHE").or_else(|| dir("HUGGINGFACE_HUB_CACHE"));
        let Some(cache) = cache.or_else(|| home.as_ref().map(|home| home.join("hub"))) else {
            return Err(ModelError::Source(
                "no directory for models from the hub: HOME is not set\n\
                 set HF_HOME to a directory"
                    .into(),
            ));
        };
        let is_on = |name: &&str| {
            set(name).is_some_and(|value| {
                ["1", "ON", "YES", "TRUE"].contains(&value.trim().to_uppercase().as_str())
            })
        };
        let token = set("HF_TOKEN").or_else(|| set("HUGGING_FACE_HUB_TOKEN")).or_else(|| {
            let file =
                dir("HF_TOKEN_PATH").or_else(|| home.as_ref().map(|home| home.join("token")));
            file.filter(|_| !is_on(&"HF_HUB_DISABLE_IMPLICIT_TOKEN"))
                .and_then(|file| std::fs::read_to_string(file).ok())
        });
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
            return Err(ModelError::Source(format!(
                "HF_ENDPOINT is {endpoint:?}; it must start with https:// or http://"
            )));
        }
        Ok(Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty()),
            offline: ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].into_iter().find(is_on),
            cache,
        })
    }
}

/// Directory of a model in the cache, with the layout of `huggingface_hub`.
pub(super) struct CacheLayout(pub(super) PathBuf);

impl CacheLayout {
    pub(super) fn new(cache: &Path, id: &str) -> Self {
        Self(cache.join(format!("models--{}", id.replace('/', "--"))))
    }

    /// Returns the directory for the files of the revision `commit`. The directory need not exist.
    pub(super) fn snapshot_dir(&self, commit: &str) -> PathBuf {
        self.0.join("snapshots").join(commit)
    }

    /// Returns the path of the file that contains the commit of the branch or tag `revision`.
    /// Returns `None` if `revision` is not a relative path that stays inside its directory.
    pub(super) fn reference_path(&self, revision: &str) -> Option<PathBuf> {
        revision
            .split('/')
            .all(|part| !matches!(part, "" | "." | "..") && !part.contains('\\'))
            .then(|| self.0.join("refs").join(revision))
    }

    /// Returns the snapshot directory of a branch, tag or commit, or `None` if the cache does not
    /// contain the revision.
    pub(super) fn find_snapshot(&self, revision: &str) -> Option<PathBuf> {
        let named =
            self.reference_path(revision).and_then(|file| std::fs::read_to_string(file).ok());
        let commit = named.as_deref().map_or(revision, str::trim);
        // A plain directory name: the commit must not refer outside `snapshots`.
        let is_plain = Path::new(commit).file_name().is_some_and(|name| name == commit);
        is_plain.then(|| self.snapshot_dir(commit)).filter(|snapshot| snapshot.is_dir())
    }
}

/// Returns the first required file of a model or an adapter that is missing in `snapshot`, or
/// `None` if no file is missing. A symbolic link without a target counts as missing.
///
/// # Errors
/// Returns an error if the index of the weights is damaged.
pub(super) fn find_missing(snapshot: &Path) -> Result<Option<String>, ModelError> {
    let is_missing = |name: &str| !snapshot.join(name).is_file();
    if !is_missing(AdapterConfig::FILE) {
        return Ok(Some(ADAPTER).filter(|name| is_missing(name)).map(str::to_owned));
    }
    if is_missing("config.json") {
        return Ok(Some("config.json".into()));
    }
    if !is_missing(SINGLE) {
        return Ok(None);
    }
    if is_missing(INDEX) {
        return Ok(Some(SINGLE.into()));
    }
    Ok(read_shard_names(&snapshot.join(INDEX))?.into_iter().find(|shard| is_missing(shard)))
}

/// Returns the file names of the shards that an index of weights lists.
///
/// # Errors
/// Returns an error if the index cannot be read or is damaged.
pub(super) fn read_shard_names(index: &Path) -> Result<BTreeSet<String>, ModelError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let bytes = std::fs::read(index).map_err(ModelError::io_error("read", index))?;
    crate::placeholder::reject_placeholder(index, &bytes)?;
    let read: Index = serde_json::from_slice(&bytes)
        .map_err(|error| ModelError::damaged(index, error.to_string()))?;
    Ok(read.weight_map.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> HubSettings {
        HubSettings::read(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string())
        })
        .unwrap()
    }

    #[test]
    fn cache_directory_matches_huggingface_hub() {
        let home = ("HOME", "/home/me");
        assert_eq!(cache_dir(&[home]), Path::new("/home/me/.cache/huggingface/hub"));
        assert_eq!(cache_dir(&[home, ("XDG_CACHE_HOME", "/x")]), Path::new("/x/huggingface/hub"));
        assert_eq!(
            cache_dir(&[home, ("XDG_CACHE_HOME", "/x"), ("HF_HOME", "~/hf")]),
            Path::new("/home/me/hf/hub")
        );
        assert_eq!(
            cache_dir(&[("HF_HOME", "/hf"), ("HUGGINGFACE_HUB_CACHE", "/old")]),
            Path::new("/old")
        );
        assert_eq!(
            cache_dir(&[("HF_HUB_CACHE", "/new"), ("HUGGINGFACE_HUB_CACHE", "/old")]),
            Path::new("/new")
        );
        assert!(HubSettings::read(|_| None).unwrap_err().to_string().contains("HF_HOME"));
    }

    fn cache_dir(variables: &[(&str, &str)]) -> PathBuf {
        read(variables).cache
    }

    #[test]
    fn hub_token_in_environment_overrides_login() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().to_str().unwrap();
        let token =
            |variables: &[(&str, &str)]| read(&[&[("HF_HOME", home)], variables].concat()).token;
        assert_eq!(token(&[]), None);
        std::fs::write(dir.path().join("token"), "of-login\n").unwrap();
        std::fs::write(dir.path().join("other"), "of-other\n").unwrap();
        let other = dir.path().join("other");
        assert_eq!(token(&[]).as_deref(), Some("of-login"));
        assert_eq!(
            token(&[("HF_TOKEN_PATH", other.to_str().unwrap())]).as_deref(),
            Some("of-other")
        );
        assert_eq!(token(&[("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
        assert_eq!(token(&[("HUGGING_FACE_HUB_TOKEN", "old")]).as_deref(), Some("old"));
        assert_eq!(
            token(&[("HUGGING_FACE_HUB_TOKEN", "old"), ("HF_TOKEN", " new ")]).as_deref(),
            Some("new")
        );
    }

    #[test]
    fn offline_and_endpoint_variables_are_parsed() {
        let home = ("HOME", "/home/me");
        let offline = |name, value| read(&[home, (name, value)]).offline;
        assert_eq!(offline("HF_HUB_OFFLINE", "1"), Some("HF_HUB_OFFLINE"));
        assert_eq!(offline("TRANSFORMERS_OFFLINE", "yes"), Some("TRANSFORMERS_OFFLINE"));
        assert_eq!(offline("HF_HUB_OFFLINE", "0"), None);
        assert_eq!(read(&[home, ("HF_ENDPOINT", "https://mirror/")]).endpoint, "https://mirror");
        let rejected = HubSettings::read(|name| {
            Some(if name == "HF_ENDPOINT" { "mirror" } else { "/home/me" }.into())
        });
        assert!(rejected.unwrap_err().to_string().contains("HF_ENDPOINT is \"mirror\""));
    }

    #[test]
    fn find_snapshot_rejects_revisions_outside_cache() {
        let dir = tempfile::tempdir().unwrap();
        let cached = CacheLayout::new(dir.path(), "me/tiny");
        std::fs::create_dir_all(cached.snapshot_dir("abc")).unwrap();
        std::fs::create_dir_all(cached.0.join("refs/refs/pr")).unwrap();
        std::fs::write(cached.0.join("refs/refs/pr/1"), "abc").unwrap();
        std::fs::write(cached.0.join("refs/evil"), "../..").unwrap();
        for revision in ["abc", "refs/pr/1"] {
            assert_eq!(
                cached.find_snapshot(revision),
                Some(cached.snapshot_dir("abc")),
                "{revision}"
            );
        }
        for revision in ["main", "evil", "..", "../../models--me--tiny", "", "abc/.."] {
            assert_eq!(cached.find_snapshot(revision), None, "{revision}");
        }
    }

    #[test]
    fn find_missing_returns_first_missing_file() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let missing = || super::find_missing(dir.path()).unwrap();
        assert_eq!(missing().as_deref(), Some("config.json"));
        put("config.json", "{}");
        assert_eq!(missing().as_deref(), Some(SINGLE));
        put(INDEX, r#"{"weight_map": {"a": "one", "b": "two"}}"#);
        put("one", "");
        assert_eq!(missing().as_deref(), Some("two"));
        #[cfg(unix)]
        std::os::unix::fs::symlink("../blobs/gone", dir.path().join("two")).unwrap();
        assert_eq!(missing().as_deref(), Some("two"));
        put(SINGLE, "");
        assert_eq!(missing(), None);
        put(AdapterConfig::FILE, "{}");
        assert_eq!(missing().as_deref(), Some(ADAPTER));
    }
}

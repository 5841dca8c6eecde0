//! Detects placeholders of files that were never downloaded: Git LFS pointers and web pages.

use std::path::Path;

use crate::ModelError;

/// Returns an error if `contents`, which were read from `path`, are a placeholder for the file,
/// such as a Git LFS pointer.
///
/// # Errors
/// Returns [`ModelError::Missing`] if the contents are a placeholder. The message names the kind of
/// placeholder and how to get the file.
pub fn reject_placeholder(path: &Path, contents: &[u8]) -> Result<(), ModelError> {
    let head = contents.get(..1024).unwrap_or(contents).trim_ascii_start();
    let starts_with = |with: &str| {
        head.get(..with.len()).is_some_and(|start| start.eq_ignore_ascii_case(with.as_bytes()))
    };
    if starts_with("version https://git-lfs.github.com/")
        || starts_with("version https://hawser.github.com/")
    {
        return placeholder_error(
            path,
            "this is a Git LFS pointer, not the file: run `git lfs pull`",
            "run this command in the repository that contains the pointer, or fetch the file \
             itself",
        );
    }
    if starts_with("<!doctype html") || starts_with("<html") {
        return placeholder_error(
            path,
            "this is a web page, not the file",
            "a page about the file, or a login page, was saved instead of the file: fetch the file \
             itself",
        );
    }
    Ok(())
}

fn placeholder_error(path: &Path, what: &str, way_out: &str) -> Result<(), ModelError> {
    Err(ModelError::Missing {
        path: path.to_path_buf(),
        what: what.into(),
        way_out: way_out.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reject_placeholder_rejects_lfs_pointers_and_web_pages() {
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n";
        let message = rejection_message(pointer).unwrap();
        assert!(
            message.starts_with(
                "a/model.safetensors: this is a Git LFS pointer, not the file: run `git lfs pull`"
            ),
            "{message}"
        );
        for page in ["<!DOCTYPE html><html>", "\n  <html lang=\"en\">", "<HTML>"] {
            assert!(rejection_message(page.as_bytes()).unwrap().contains("is a web page"));
        }
        for sound in [&b"{}"[..], b"", b"GGUF", b"version", b"{% html %}<html>"] {
            assert_eq!(rejection_message(sound), None);
        }
    }

    fn rejection_message(contents: &[u8]) -> Option<String> {
        reject_placeholder(Path::new("a/model.safetensors"), contents).err().map(|e| e.to_string())
    }
}

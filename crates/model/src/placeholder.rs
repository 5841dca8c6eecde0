//! Placeholders of a file that was never fetched: a Git LFS pointer, a web page.

use std::path::Path;

use crate::ModelError;

/// Refuses the contents of the file at `path` where they only stand for it.
///
/// # Errors
/// Says what stands there, and how to get the file.
pub fn refuse(path: &Path, contents: &[u8]) -> Result<(), ModelError> {
    let missing = |what: &str, way_out: &str| {
        Err(ModelError::Missing { path: path.to_path_buf(), what: what.into(), way_out: way_out.into() })
    };
    let beginning = contents.get(..1024).unwrap_or(contents).trim_ascii_start();
    let begins = |with: &str| {
        beginning.get(..with.len()).is_some_and(|start| start.eq_ignore_ascii_case(with.as_bytes()))
    };
    if begins("version https://git-lfs.github.com/") || begins("version https://hawser.github.com/") {
        return missing(
            "is a Git LFS pointer, not the file: git lfs pull",
            "run that in the repository it lies in, or fetch the file itself",
        );
    }
    if begins("<!doctype html") || begins("<html") {
        return missing(
            "is a web page, not the file",
            "it was saved from the page that shows the file, or one that asks to log in: fetch the file itself",
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_in_the_place_of_a_file_is_named() {
        let refused =
            |contents: &[u8]| refuse(Path::new("a/model.safetensors"), contents).err().map(|e| e.to_string());
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n";
        let message = refused(pointer).unwrap();
        assert!(
            message.starts_with("a/model.safetensors is a Git LFS pointer, not the file: git lfs pull"),
            "{message}"
        );
        for page in ["<!DOCTYPE html><html>", "\n  <html lang=\"en\">", "<HTML>"] {
            assert!(refused(page.as_bytes()).unwrap().contains("is a web page"));
        }
        for sound in [&b"{}"[..], b"", b"GGUF", b"version", b"{% html %}<html>"] {
            assert_eq!(refused(sound), None);
        }
    }
}

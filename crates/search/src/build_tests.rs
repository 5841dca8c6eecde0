use std::fs;
use std::sync::Arc;

use super::*;
use crate::testing::{letters, make, passage, try_make, write_corpus};
use crate::{Index, Mode, Searcher};

fn sample_passages() -> Vec<Passage> {
    (0..600)
        .map(|at: usize| {
            passage(
                &format!("p{at}"),
                "Numbers",
                &format!("The number {at} is followed by {}.", at + 1),
            )
        })
        .collect()
}

#[test]
fn build_creates_index_and_reports_progress() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = dir.path().join("c.jsonl");
    let index = dir.path().join("i");
    write_corpus(&corpus, &sample_passages());
    let mut reports = Vec::new();
    let manifest = build(&corpus, &index, Analyzer::English, None, &mut |progress| {
        reports.push((progress.stage.to_owned(), progress.passages));
        assert!(progress.done <= progress.total);
    });
    let manifest = manifest.unwrap();
    assert_eq!(
        reports,
        [("indexing".into(), 256), ("indexing".into(), 512), ("writing the index".into(), 600)]
    );
    assert_eq!(manifest, *Index::open(&index, true).unwrap().manifest());
    // Only the corpus and the index remain.
    let names: Vec<_> =
        fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    let second_error = build(&corpus, &index, Analyzer::English, None, &mut |_| {}).unwrap_err();
    assert!(matches!(second_error, SearchError::Exists(_)), "{second_error}");
}

#[test]
fn failed_build_leaves_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = dir.path().join("c.jsonl");
    let index = dir.path().join("i");
    let build = |contents: &str| {
        fs::write(&corpus, contents).unwrap();
        let error =
            super::build(&corpus, &index, Analyzer::English, None, &mut |_| {}).unwrap_err();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "{error}");
        error.to_string()
    };
    assert!(build("").contains("contains no passage"));
    assert!(build("\n \n").contains("contains no passage"));
    assert!(
        build("{\"id\": \"a\", \"text\": \"x\"}\n{}")
            .ends_with("c.jsonl, line 2: the field `id` is missing; give every row a unique id")
    );
}

#[test]
fn open_rejects_unsupported_schema_with_advice() {
    let made = try_make(&sample_passages()[..3], Analyzer::English, false).unwrap();
    let path = made.index.join(MANIFEST);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"schema\": 2", "\"schema\": 3, \"unknown\": []")).unwrap();
    let error = Index::open(&made.index, false).err().unwrap().to_string();
    assert!(
        error.contains("an index of schema 3, but this version of Levade reads schema 2"),
        "{error}"
    );
    assert!(error.ends_with("levade search index CORPUS --out FOLDER"), "{error}");
}

#[test]
fn chinese_words_are_found_since_schema_2() {
    let passages =
        [passage("a", "", "埃达写了第一个程序。"), passage("b", "", "程序在机器上运行。")];
    let made = try_make(&passages, Analyzer::English, false).unwrap();
    let found = |query: &str| {
        let index = Index::open(&made.index, true).unwrap();
        index.bm25(&[query.into()], 5, 1).unwrap()[0]
            .iter()
            .map(|(row, _)| *row)
            .collect::<Vec<_>>()
    };
    assert_eq!((found("第一个程序"), found("机器")), (vec![0, 1], vec![1]));
    // If the manifest has schema 1, queries are split as in schema 1: a run of characters is one
    // term.
    let path = made.index.join(MANIFEST);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"schema\": 2", "\"schema\": 1")).unwrap();
    assert!(found("机器").is_empty());
}

#[test]
fn error_names_path_that_is_no_index() {
    let dir = tempfile::tempdir().unwrap();
    assert!(opening_error(&dir.path().join("absent")).contains("does not exist"));
    assert!(opening_error(dir.path()).contains("is not an index, because it has no search.json"));
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    assert!(opening_error(&file).contains("is a file, not the directory of an index"));
}

fn opening_error(path: &Path) -> String {
    Index::open(path, false).err().unwrap().to_string()
}

#[test]
#[cfg(unix)]
fn build_follows_symlink_to_empty_directory() {
    use std::os::unix::fs::symlink;
    let dir = tempfile::tempdir().unwrap();
    let corpus = dir.path().join("c.jsonl");
    let disk = dir.path().join("disk");
    let link = dir.path().join("link");
    write_corpus(&corpus, &sample_passages()[..3]);
    fs::create_dir_all(disk.join("index")).unwrap();
    symlink(disk.join("index"), &link).unwrap();
    build(&corpus, &link, Analyzer::English, None, &mut |_| {}).unwrap();
    assert!(link.is_symlink());
    assert_eq!(Index::open(&disk.join("index"), true).unwrap().manifest().passages, 3);
    let nowhere = dir.path().join("nowhere");
    symlink(disk.join("absent"), &nowhere).unwrap();
    let error = build(&corpus, &nowhere, Analyzer::English, None, &mut |_| {}).unwrap_err();
    assert!(matches!(error, SearchError::Exists(_)), "{error}");
}

/// Truncates, changes and removes each file of an index in turn.
#[test]
fn error_names_damaged_index_file() {
    let made = try_make(&sample_passages()[..40], Analyzer::English, true).unwrap();
    let manifest = Manifest::read(&made.index).unwrap();
    let names = manifest.files.iter().map(|entry| entry.name.as_str()).chain([MANIFEST]);
    for name in names {
        let path = made.index.join(name);
        let content = fs::read(&path).unwrap();
        let mut flipped = content.clone();
        let middle = flipped.len() / 2;
        flipped[middle] ^= 0x55;
        for damaged in [Some(content[..content.len() / 2].to_vec()), Some(flipped), None] {
            match damaged {
                Some(damaged) => fs::write(&path, damaged).unwrap(),
                None => fs::remove_file(&path).unwrap(),
            }
            let error = Index::open(&made.index, true).err().map(|error| error.to_string());
            let error = error.unwrap_or_else(|| panic!("{name} was opened"));
            assert!(error.contains("damaged") || error.contains("not an index"), "{name}: {error}");
        }
        fs::write(&path, content).unwrap();
    }
    Index::open(&made.index, true).unwrap();
}

/// Damaged files whose checksums match may cause errors or different results, but no crash.
#[test]
fn search_survives_damaged_files() {
    let made = try_make(&sample_passages()[..300], Analyzer::English, false).unwrap();
    let mut manifest = Manifest::read(&made.index).unwrap();
    for at in 0..manifest.files.len() {
        let path = made.index.join(&manifest.files[at].name);
        let content = fs::read(&path).unwrap();
        for location in (0..content.len()).step_by(content.len().div_ceil(12)) {
            let mut damaged = content.clone();
            let end = damaged.len().min(location + 40);
            damaged[location..end].fill(0xF7);
            fs::write(&path, &damaged).unwrap();
            manifest.files[at].crc32c = checksum(&path).unwrap();
            fs::write(made.index.join(MANIFEST), serde_json::to_vec(&manifest).unwrap()).unwrap();
            if let Ok(index) = Index::open(&made.index, true) {
                let found = index.bm25(&["number 7 followed".into()], 5, 1);
                let _ = found.and_then(|found| index.hits(&found[0]));
            }
        }
        fs::write(&path, &content).unwrap();
        manifest.files[at].crc32c = checksum(&path).unwrap();
    }
}

#[test]
fn manifest_rejects_file_names_outside_index() {
    let made = try_make(&sample_passages()[..3], Analyzer::English, false).unwrap();
    for name in ["../corpus.jsonl", "/etc/passwd", "", "a/../../b"] {
        let mut manifest = Manifest::read(&made.index).unwrap();
        manifest.files[0].name = name.into();
        fs::write(made.index.join(MANIFEST), serde_json::to_vec(&manifest).unwrap()).unwrap();
        let error = Index::open(&made.index, false).err().unwrap().to_string();
        assert!(error.contains("not within the directory"), "{error}");
    }
}

/// Runs itself as a child process that is killed at each crash point. Afterwards, no index opens,
/// and the next build succeeds.
#[test]
#[cfg(unix)]
fn killed_build_leaves_no_index_that_opens() {
    use std::os::unix::process::ExitStatusExt;
    const CHILD: &str = "LEVADE_TEST_SEARCH_CHILD";
    if let Ok(dir) = std::env::var(CHILD) {
        let dir = Path::new(&dir);
        build(&corpus_path(dir), &dir.join("i"), Analyzer::English, None, &mut |_| {}).unwrap();
        return;
    }
    for location in ["search_indexing", "search_indexing:2", "search_files", "search_rename"] {
        let dir = tempfile::tempdir().unwrap();
        write_corpus(&corpus_path(dir.path()), &sample_passages());
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "build::tests::killed_build_leaves_no_index_that_opens"])
            .env(CHILD, dir.path())
            .env(levade_policy::CRASH_AT, location)
            .output()
            .unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGKILL), "{location}");
        let index = dir.path().join("i");
        assert!(!index.exists() && Index::open(&index, false).is_err(), "{location}");
        if location != "search_rename" {
            assert!(Index::open(&dir.path().join(".i.building"), false).is_err(), "{location}");
        }
        build(&corpus_path(dir.path()), &index, Analyzer::English, None, &mut |_| {}).unwrap();
        assert_eq!(Index::open(&index, true).unwrap().manifest().passages, 600);
        assert!(!dir.path().join(".i.building").exists());
    }
}

fn corpus_path(dir: &Path) -> PathBuf {
    dir.join("c.jsonl")
}

#[test]
fn concurrent_builds_of_index_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = dir.path().join("c.jsonl");
    let index = dir.path().join("i");
    write_corpus(&corpus, &sample_passages());
    let site = BuildDir::create(&index).unwrap();
    let error = build(&corpus, &index, Analyzer::English, None, &mut |_| {}).unwrap_err();
    assert!(matches!(error, SearchError::Locked(_)), "{error}");
    drop(site);
    build(&corpus, &index, Analyzer::English, None, &mut |_| {}).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_searches_match_sequential_searches() {
    let (made, index) =
        tokio::task::spawn_blocking(|| make(&sample_passages(), true)).await.unwrap();
    let hybrid = Searcher::new(index, Mode::Hybrid, Some(letters()), 2).unwrap();
    let queries: Vec<String> = (0..40).map(|at| format!("what follows the number {at}")).collect();
    let mut separate = Vec::new();
    for query in &queries {
        separate.push(hybrid.search(vec![query.clone()], 4).await.unwrap().remove(0));
    }
    assert_eq!(hybrid.search(queries.clone(), 4).await.unwrap(), separate);
    let tasks = queries.into_iter().map(|query| {
        let hybrid = hybrid.clone();
        tokio::spawn(async move { hybrid.search(vec![query], 4).await.unwrap().remove(0) })
    });
    for (task, wanted) in tasks.collect::<Vec<_>>().into_iter().zip(separate) {
        assert_eq!(task.await.unwrap(), wanted);
    }
    drop(made);
}

#[tokio::test(flavor = "multi_thread")]
async fn dense_modes_require_vectors_and_their_model() {
    let (_made, index) =
        tokio::task::spawn_blocking(|| make(&sample_passages()[..3], false)).await.unwrap();
    let error = search_error(index, Mode::Dense, Some(letters()));
    assert!(error.contains("has no vectors") && error.contains("--dense MODEL"), "{error}");
    let (made, index) =
        tokio::task::spawn_blocking(|| make(&sample_passages()[..3], true)).await.unwrap();
    assert!(
        search_error(index, Mode::Hybrid, None)
            .contains("a hybrid search needs the model \"letters\"")
    );
    let path = made.index.join(MANIFEST);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"fingerprint\": \"letters\"", "\"fingerprint\": \"digits\""))
        .unwrap();
    let index = Index::open(&made.index, true).unwrap();
    assert!(
        search_error(index, Mode::Dense, Some(letters()))
            .contains("is not the model that embedded")
    );
}

fn search_error(index: Index, mode: Mode, model: Option<Arc<dyn Embedder>>) -> String {
    Searcher::new(index, mode, model, 1).err().unwrap().to_string()
}

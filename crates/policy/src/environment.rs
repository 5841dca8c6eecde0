//! Environment variables of this process and of its child processes.

use std::ffi::OsString;

/// Environment variables that every child process inherits if they are set: where programs are
/// found and how text is written.
pub const CHILD_VARIABLES: [&str; 9] =
    ["HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER"];

/// Returns the value of the environment variable `name` of this process. If a variable `LEVADE_X`
/// is not set, returns the value of `DRESSAGE_X`, its name before the project was called Levade. An
/// empty variable counts as unset. Variables without the prefix `LEVADE_` have only one name.
pub fn read_variable(name: &str) -> Option<OsString> {
    read_variable_from(name, |name| std::env::var_os(name))
}

/// Returns an environment variable as [`read_variable`] does; `variable` reads the environment.
fn read_variable_from(name: &str, variable: impl Fn(&str) -> Option<OsString>) -> Option<OsString> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    set(name).or_else(|| set(&format!("DRESSAGE_{}", name.strip_prefix("LEVADE_")?)))
}

/// Returns the complete environment of a child process: the [usual variables](CHILD_VARIABLES) and
/// those in `named`, if they are set. No other variable is passed, so that secrets stay in this
/// process.
pub fn child_environment(named: &[String]) -> Vec<(String, String)> {
    let names = CHILD_VARIABLES.into_iter().chain(named.iter().map(String::as_str));
    names
        .filter_map(|name| std::env::var(name).ok().map(|value| (name.to_owned(), value)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_variable_falls_back_to_old_name() {
        let new = ("LEVADE_LOG", "new");
        let old = ("DRESSAGE_LOG", "old");
        assert_eq!(lookup("LEVADE_LOG", &[old, new]).as_deref(), Some("new"));
        assert_eq!(lookup("LEVADE_LOG", &[old]).as_deref(), Some("old"));
        assert_eq!(lookup("LEVADE_LOG", &[("LEVADE_LOG", ""), old]).as_deref(), Some("old"));
        assert_eq!(lookup("LEVADE_LOG", &[("DRESSAGE_LOG", "")]), None);
        assert_eq!(lookup("HOME", &[("DRESSAGE_HOME", "x"), ("HOME", "y")]).as_deref(), Some("y"));
        assert_eq!(lookup("HOME", &[("DRESSAGE_HOME", "x")]), None);
    }

    fn lookup(name: &str, variables: &[(&str, &str)]) -> Option<String> {
        read_variable_from(name, |name| {
            variables.iter().find(|(lookup, _)| *lookup == name).map(|(_, value)| value.into())
        })
        .and_then(|value| value.into_string().ok())
    }
}

//! Environment variables of this process and of its child processes.

use std::ffi::OsString;

/// Variables that every child process gets if they are set: where programs are found and how text is
/// written.
pub const PASSED: [&str; 9] = ["HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER"];

/// Returns the variable `LEVADE_X` of this process, or else `DRESSAGE_X`, its name before the project was
/// called Levade. An empty variable counts as unset; variables with other names have one name only.
pub fn own(name: &str) -> Option<OsString> {
    own_in(name, |name| std::env::var_os(name))
}

/// Returns a variable as [`own`] does, from the environment that `variable` reads.
fn own_in(name: &str, variable: impl Fn(&str) -> Option<OsString>) -> Option<OsString> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    set(name).or_else(|| set(&format!("DRESSAGE_{}", name.strip_prefix("LEVADE_")?)))
}

/// Returns the complete environment of a child process: the [usual variables](PASSED) and those in
/// `named`, if they are set. No other variable is passed, so that secrets stay in this process.
pub fn passed(named: &[String]) -> Vec<(String, String)> {
    let names = PASSED.into_iter().chain(named.iter().map(String::as_str));
    names.filter_map(|name| std::env::var(name).ok().map(|value| (name.to_owned(), value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_falls_back_to_old_variable_name() {
        let own = |name: &str, variables: &[(&str, &str)]| {
            let find =
                |name: &str| variables.iter().find(|(own, _)| *own == name).map(|(_, value)| value.into());
            own_in(name, find).and_then(|value| value.into_string().ok())
        };
        let (new, old) = (("LEVADE_LOG", "new"), ("DRESSAGE_LOG", "old"));
        assert_eq!(own("LEVADE_LOG", &[old, new]).as_deref(), Some("new"));
        assert_eq!(own("LEVADE_LOG", &[old]).as_deref(), Some("old"));
        assert_eq!(own("LEVADE_LOG", &[("LEVADE_LOG", ""), old]).as_deref(), Some("old"));
        assert_eq!(own("LEVADE_LOG", &[("DRESSAGE_LOG", "")]), None);
        assert_eq!(own("HOME", &[("DRESSAGE_HOME", "x"), ("HOME", "y")]).as_deref(), Some("y"));
        assert_eq!(own("HOME", &[("DRESSAGE_HOME", "x")]), None);
    }
}

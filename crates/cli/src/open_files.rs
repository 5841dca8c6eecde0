//! Raises the limit on open files.
//!
//! Every attempt, session and connection opens files. The usual soft limit of 1024 is low for the
//! sake of programs that use `select`, which cannot handle larger file descriptors.

/// Maximum number of open files that this process requests as its limit.
#[cfg(unix)]
const MAX_OPEN_FILES: u64 = 65_536;

/// Raises the soft limit of open files to the hard limit, but at most to 65,536. A higher soft
/// limit stays. Does nothing on systems other than Unix.
pub fn raise_open_file_limit() {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let limit = getrlimit(Resource::Nofile);
        let max_open_files = limit
            .maximum
            .map_or(MAX_OPEN_FILES, |max_open_files| max_open_files.min(MAX_OPEN_FILES));
        if limit.current.is_some_and(|now| now < max_open_files) {
            // If the system rejects the new limit, the old one stays in effect.
            let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(max_open_files), ..limit });
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    #[test]
    fn open_file_limit_is_raised_but_never_lowered() {
        let before = getrlimit(Resource::Nofile);
        let max_open_files = before
            .maximum
            .map_or(MAX_OPEN_FILES, |max_open_files| max_open_files.min(MAX_OPEN_FILES));
        setrlimit(Resource::Nofile, Rlimit { current: Some(max_open_files.min(512)), ..before })
            .unwrap();
        raise_open_file_limit();
        assert_eq!(getrlimit(Resource::Nofile).current, Some(max_open_files));
        let limit = Rlimit { current: before.current.max(Some(max_open_files)), ..before };
        setrlimit(Resource::Nofile, limit).unwrap();
        raise_open_file_limit();
        assert_eq!(getrlimit(Resource::Nofile), limit, "a higher one stays");
    }
}

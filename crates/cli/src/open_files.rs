//! Raises the limit on open files.
//!
//! Every attempt, session and connection opens files. The usual soft limit of 1024 is low for the
//! sake of programs that use `select`, which cannot handle larger file descriptors.

/// Maximum limit that this process requests, in files.
#[cfg(unix)]
const MOST: u64 = 65_536;

/// Raises the soft limit on open files to the hard limit, at most 65,536. Keeps a higher soft limit.
/// Does nothing on systems other than Unix.
pub fn raise() {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let limit = getrlimit(Resource::Nofile);
        let most = limit.maximum.map_or(MOST, |most| most.min(MOST));
        if limit.current.is_some_and(|now| now < most) {
            // If the system rejects the new limit, the old one stays in effect.
            let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..limit });
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    #[test]
    fn raise_lifts_low_limit_and_keeps_higher_limit() {
        let before = getrlimit(Resource::Nofile);
        let most = before.maximum.map_or(MOST, |most| most.min(MOST));
        setrlimit(Resource::Nofile, Rlimit { current: Some(most.min(512)), ..before }).unwrap();
        raise();
        assert_eq!(getrlimit(Resource::Nofile).current, Some(most));
        let limit = Rlimit { current: before.current.max(Some(most)), ..before };
        setrlimit(Resource::Nofile, limit).unwrap();
        raise();
        assert_eq!(getrlimit(Resource::Nofile), limit, "a higher one stays");
    }
}

//! How many files this process may have open: every attempt, session and connection takes some, and the usual
//! limit (1024) is kept low for programs that cannot count further.

/// Most files that are of use.
#[cfg(unix)]
const MOST: u64 = 65_536;

/// Raises the limit to what the user may have.
pub fn raise() {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let limit = getrlimit(Resource::Nofile);
        let most = limit.maximum.map_or(MOST, |most| most.min(MOST));
        if limit.current.is_some_and(|now| now < most) {
            // Where the system refuses, what there was has to do.
            let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..limit });
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    #[test]
    fn a_low_limit_is_raised_to_what_the_user_may_have() {
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

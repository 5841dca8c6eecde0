//! Jobs that a scheduler has taken: watched to their end, through outages of who is asked, and ended on
//! request.

use std::cell::Cell;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use levade_policy::awake::{Clock, sleep, within};

use super::{Ended, LOOK};
use crate::failure::INTERRUPTED;
use crate::screen::Style;
use crate::stop::Requests;

/// How a job is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// In a few words.
    pub text: String,
    /// Exit code, once it will not run any more.
    pub ended: Option<u8>,
}

/// A job that a scheduler has taken, and runs whether it is watched or not.
pub trait Submitted {
    /// Scheduler, as lines begin.
    const LAUNCHER: &'static str;

    /// Name in messages, such as "job 7".
    fn name(&self) -> String;

    /// Command that tells how it is.
    fn to_watch(&self) -> String;

    /// Command that ends it.
    fn to_end(&self) -> String;

    /// Asks the scheduler how it is.
    async fn look(&self) -> anyhow::Result<Look>;

    /// Asks the scheduler to end it. Can be asked again.
    async fn end(&self) -> anyhow::Result<()>;
}

/// Longest waits.
#[derive(Debug, Clone, Copy)]
struct Patience {
    /// Between two looks.
    look: Duration,
    /// For one answer.
    answer: Duration,
    /// For a scheduler that does not say how the job is.
    silence: Duration,
    /// For a job that was asked to end: it may write a checkpoint first.
    ending: Duration,
}

const PATIENCE: Patience = Patience {
    look: LOOK,
    answer: Duration::from_secs(120),
    silence: Duration::from_secs(900),
    ending: Duration::from_secs(300),
};

/// Watches a job to its end, showing what the first machine prints; or says how to, where it is detached.
///
/// # Errors
/// When the scheduler says nothing of it for too long, or the job does not end when it is asked to.
pub async fn follow(job: &impl Submitted, log: &Path, detach: bool) -> anyhow::Result<Ended> {
    if detach {
        return Ok(Ended::Detached { watch: job.to_watch(), end: job.to_end() });
    }
    let requests = Requests::listen()?;
    let asked = Cell::new(false);
    let clock = Clock::default();
    tokio::select! {
        code = watch(job, log, &asked, &clock, PATIENCE) => Ok(Ended::Code(code?)),
        () = requests.two(|| asked.set(true)) => Ok(Ended::Code(INTERRUPTED)),
        () = clock.clone().keep(|_| {}) => unreachable!("it has no end"),
    }
}

/// Tells the user something of a launcher's job.
pub fn say<J: Submitted>(what: &str) {
    eprintln!("{} {what}", Style::stderr().dim(&format!("{:<6}", J::LAUNCHER)));
}

/// Watches a job until it has ended; gives its exit code.
async fn watch<J: Submitted>(
    job: &J,
    log: &Path,
    asked: &Cell<bool>,
    clock: &Clock,
    patience: Patience,
) -> anyhow::Result<u8> {
    let (mut shown, mut last) = (Growing::new(log), String::new());
    // Since when nothing is known of it, and since when it is to end.
    let (mut silent, mut ending): (Option<Duration>, Option<Duration>) = (None, None);
    let mut refused = false;
    loop {
        sleep(patience.look).await;
        shown.show();
        if asked.get() && ending.is_none() {
            match answered(job.end(), patience.answer).await {
                Ok(()) => {
                    say::<J>(&format!("{} is asked to end", job.name()));
                    ending = Some(clock.now());
                }
                Err(error) if !refused => {
                    say::<J>(&format!("{} cannot be asked to end, tried again: {error:#}", job.name()));
                    refused = true;
                }
                Err(_) => {}
            }
        }
        match answered(job.look(), patience.answer).await {
            Ok(state) => {
                if silent.take().is_some() {
                    say::<J>("answers again");
                }
                if state.text != last {
                    say::<J>(&state.text);
                    last = state.text;
                }
                if let Some(code) = state.ended {
                    shown.show();
                    return Ok(code);
                }
            }
            Err(error) => {
                let since = *silent.get_or_insert_with(|| {
                    say::<J>(&format!("says nothing of {}, asked again: {error:#}", job.name()));
                    clock.now()
                });
                if clock.now() - since > patience.silence {
                    anyhow::bail!(
                        "waited {:?} for {} to say how {} is, which may go on: {error:#}\nwatch it  {}\nend it    {}",
                        patience.silence,
                        J::LAUNCHER,
                        job.name(),
                        job.to_watch(),
                        job.to_end()
                    );
                }
            }
        }
        if let Some(since) = ending.filter(|since| clock.now() - *since > patience.ending) {
            anyhow::bail!(
                "waited {:?} for {} to end; it was last said to be: {last}\nwatch it  {}\nend it    {}",
                clock.now() - since,
                job.name(),
                job.to_watch(),
                job.to_end()
            );
        }
    }
}

async fn answered<T>(
    answer: impl Future<Output = anyhow::Result<T>>,
    longest: Duration,
) -> anyhow::Result<T> {
    within(longest, answer).await.unwrap_or_else(|| anyhow::bail!("waited {longest:?} for an answer"))
}

/// A file that grows, shown as it does.
pub struct Growing {
    path: PathBuf,
    shown: u64,
}

impl Growing {
    /// A file, from its present end on.
    pub fn new(path: &Path) -> Self {
        Growing { path: path.to_owned(), shown: std::fs::metadata(path).map_or(0, |found| found.len()) }
    }

    /// Shows what has come.
    pub fn show(&mut self) {
        let Ok(mut file) = std::fs::File::open(&self.path) else { return };
        let mut more = Vec::new();
        let read = file.seek(SeekFrom::Start(self.shown)).and_then(|_| file.read_to_end(&mut more));
        if read.is_ok() {
            self.shown += more.len() as u64;
            // Whoever reads no more has seen enough.
            let _ = std::io::stderr().write_all(&more);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    type Answer = Result<(&'static str, Option<u8>), &'static str>;

    /// A job whose scheduler answers what is written down; without a word left it says nothing more.
    struct Scripted {
        answers: RefCell<Vec<Answer>>,
        ends: RefCell<Vec<Result<(), &'static str>>>,
    }

    impl Submitted for Scripted {
        const LAUNCHER: &'static str = "test";

        fn name(&self) -> String {
            "job 7".into()
        }

        fn to_watch(&self) -> String {
            "look 7".into()
        }

        fn to_end(&self) -> String {
            "cancel 7".into()
        }

        async fn look(&self) -> anyhow::Result<Look> {
            let mut answers = self.answers.borrow_mut();
            // The last one is said for ever.
            let answer = if answers.len() > 1 { answers.remove(0) } else { answers[0] };
            let (text, ended) = answer.map_err(|why| anyhow::anyhow!(why))?;
            Ok(Look { text: text.into(), ended })
        }

        async fn end(&self) -> anyhow::Result<()> {
            let mut ends = self.ends.borrow_mut();
            if ends.is_empty() { Ok(()) } else { ends.remove(0).map_err(|why| anyhow::anyhow!(why)) }
        }
    }

    const QUICK: Patience = Patience {
        look: Duration::from_millis(1),
        answer: Duration::from_millis(200),
        silence: Duration::from_millis(100),
        ending: Duration::from_millis(100),
    };

    async fn watched(
        answers: &[Answer],
        ends: &[Result<(), &'static str>],
        asked: bool,
    ) -> anyhow::Result<u8> {
        let job = Scripted { answers: answers.to_vec().into(), ends: ends.to_vec().into() };
        let code = watch(&job, Path::new("/nowhere"), &Cell::new(asked), &Clock::default(), QUICK).await;
        assert!(code.is_err() || job.ends.borrow().is_empty());
        code
    }

    #[tokio::test]
    async fn a_scheduler_that_does_not_answer_for_a_while_is_asked_again() {
        let run = Ok(("runs", None));
        let answers = [run, Err("down"), Err("down"), run, Err("down"), Ok(("done", Some(3)))];
        assert_eq!(watched(&answers, &[], false).await.unwrap(), 3);
    }

    #[tokio::test]
    async fn a_scheduler_that_never_answers_is_given_up_by_name() {
        let error = watched(&[Ok(("runs", None)), Err("down")], &[], false).await.unwrap_err().to_string();
        for part in ["waited 100ms for test to say how job 7 is", "down", "watch it  look 7", "cancel 7"] {
            assert!(error.contains(part), "{part} in {error}");
        }
    }

    #[tokio::test]
    async fn a_job_that_is_asked_to_end_is_watched_until_it_has() {
        let answers = [Ok(("runs", None)), Ok(("ends", None)), Ok(("gone", Some(INTERRUPTED)))];
        assert_eq!(watched(&answers, &[Err("down")], true).await.unwrap(), INTERRUPTED);
        let error = watched(&[Ok(("runs", None))], &[], true).await.unwrap_err().to_string();
        assert!(error.contains("for job 7 to end; it was last said to be: runs"), "{error}");
    }
}

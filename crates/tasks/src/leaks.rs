//! Finds training tasks that ask or show a held-out question, also in another spelling, and near
//! copies of such questions.
//!
//! If rows of a source ask the same question about several contexts (documents, databases, options)
//! with several answers, the question depends on its context. Such a question leaks only if the
//! context is the same. The last turn of a conversation counts as a question of its own unless
//! several held-out conversations end with it ("Are you sure?").

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::near::NearCopies;
use super::question::QuestionSet;
use super::{QuestionKey, Task};

/// Rule that decides which rows repeat another row, and which tasks leak held-out questions into
/// training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MatchingRule {
    /// Rows that ask the same question are repeats, and tasks that ask a held-out question leak it.
    /// White space, case and Unicode form are ignored. Runs that older builds started keep this
    /// rule.
    Questions,
    /// Rows that are equal in all fields are repeats; white space and the case of questions are
    /// ignored. Tasks leak held-out questions that they ask or show, in any spelling. Runs that
    /// older builds started keep this rule.
    Rows,
    /// Rows that are equal to the last character are repeats. Tasks leak held-out questions as with
    /// `Rows`.
    #[default]
    ExactRows,
}

/// The held-out questions of a run, for finding training tasks that leak them.
#[derive(Debug, Default)]
pub struct HeldOutQuestions {
    matching: MatchingRule,
    keys: HashSet<QuestionKey>,
    /// Keys of the held-out questions that are compared together with their contexts.
    contextual: HashSet<QuestionKey>,
    near_copies: NearCopies,
}

impl HeldOutQuestions {
    /// Creates the set of the questions that the tasks `held_out` ask. Each item of `sources`
    /// contains all tasks of a source.
    pub fn new<'t>(
        matching: MatchingRule,
        held_out: &[&'t Task],
        sources: impl IntoIterator<Item = Vec<&'t Task>>,
    ) -> Self {
        let mut found = HeldOutQuestions { matching, ..HeldOutQuestions::default() };
        if held_out.is_empty() {
            return found;
        }
        if matching == MatchingRule::Questions {
            found.keys = held_out.iter().map(|task| task.key()).collect();
            return found;
        }
        let wanted: HashSet<QuestionKey> =
            held_out.iter().map(|task| task.question_key()).collect();
        for source in sources {
            found.contextual.extend(find_contextual(&source, &wanted));
        }
        let mut texts = Vec::new();
        for (task, keys) in held_out.iter().zip(own_keys(held_out, &found.contextual)) {
            let is_contextual = found.contextual.contains(&task.question_key());
            found.keys.extend(keys);
            if !is_contextual {
                texts.push(task.question_text());
            }
        }
        found.near_copies = NearCopies::new(texts);
        found
    }

    /// Returns whether the run holds out no question.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Returns whether a training task asks or shows a held-out question.
    pub fn leak(&self, task: &Task) -> bool {
        if self.is_empty() {
            return false;
        }
        if self.matching == MatchingRule::Questions {
            return self.keys.contains(&task.key());
        }
        let question = (!self.contextual.is_empty()).then(|| task.question_key());
        let about = question.filter(|question| self.contextual.contains(question));
        let about = about.map(|question| question.with_context(task.context()));
        task.shown_keys().into_iter().chain(about).any(|key| self.keys.contains(&key))
    }

    /// Returns the held-out question that `task` contains or nearly copies, or `None` if there is
    /// none. The caller must have checked that the task does not [`leak`](Self::leak) a question.
    pub fn near_copy(&self, task: &Task) -> Option<&str> {
        let turns = task.messages.iter().map(|turn| &*turn.content);
        let texts = turns.chain(task.messages.is_empty().then_some(&*task.question));
        texts.into_iter().find_map(|text| self.near_copies.find_near_copy(text))
    }
}

/// Returns, for each task, the keys under which another task would ask or show the same question.
pub(super) fn own_keys(
    tasks: &[&Task],
    contextual: &HashSet<QuestionKey>,
) -> Vec<Vec<QuestionKey>> {
    let question_sets: Vec<QuestionSet> = tasks.iter().map(|task| task.question_set()).collect();
    // Last turns that several conversations end with.
    let mut ends: HashMap<QuestionKey, QuestionKey> = HashMap::new();
    let mut ambiguous = HashSet::new();
    for question_set in &question_sets {
        if *ends.entry(question_set.question).or_insert(question_set.conversation)
            != question_set.conversation
        {
            ambiguous.insert(question_set.question);
        }
    }
    let keys = tasks.iter().zip(&question_sets).map(|(task, question_set)| {
        if contextual.contains(&question_set.question) {
            return vec![question_set.question.with_context(task.context())];
        }
        let unambiguous =
            (!ambiguous.contains(&question_set.question)).then_some(question_set.question);
        [Some(question_set.conversation), unambiguous, question_set.last]
            .into_iter()
            .flatten()
            .collect()
    });
    keys.collect()
}

/// Returns the questions of `wanted` that a source asks about several contexts with several
/// answers.
fn find_contextual(tasks: &[&Task], wanted: &HashSet<QuestionKey>) -> HashSet<QuestionKey> {
    struct QuestionSummary {
        context: QuestionKey,
        answer: String,
        contexts: bool,
        answers: bool,
    }
    let mut seen: HashMap<QuestionKey, QuestionSummary> = HashMap::new();
    for task in tasks {
        let question = task.question_key();
        if !wanted.contains(&question) {
            continue;
        }
        let context = task.context();
        let answer = task.answer_with_options();
        match seen.get_mut(&question) {
            None => {
                seen.insert(
                    question,
                    QuestionSummary { context, answer, contexts: false, answers: false },
                );
            }
            Some(first) => {
                first.contexts |= first.context != context;
                first.answers |= first.answer != answer;
            }
        }
    }
    seen.into_iter()
        .filter(|(_, seen)| seen.contexts && seen.answers)
        .map(|(question, _)| question)
        .collect()
}

/// Returns the tasks of `tasks` that a model has seen in training. `shown` contains the keys of all
/// texts that the model was trained on.
pub fn filter_seen<'t>(tasks: &[&'t Task], shown: &HashSet<QuestionKey>) -> Vec<&'t Task> {
    let keys = own_keys(tasks, &HashSet::new());
    let seen =
        tasks.iter().zip(keys).filter(|(_, keys)| keys.iter().any(|key| shown.contains(key)));
    seen.map(|(task, _)| *task).collect()
}

#[cfg(test)]
#[path = "leaks_tests.rs"]
mod tests;

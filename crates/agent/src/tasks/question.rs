//! Whether two tasks ask the same, and which of them are held out: both by what is asked, never by where it
//! stands.

use dressage_text::Message;
use sha2::{Digest, Sha256};
use unicode_normalization::UnicodeNormalization;

use super::Task;

/// A question up to what does not change it: Unicode form (NFC), case, white space, and characters that
/// nobody sees.
///
/// Two tasks of equal key ask the same. Of a conversation all turns but the instructions count; a single turn
/// of the user is the same question as its text alone. Punctuation counts, so that `1 - 2?` is not `1 + 2?`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QuestionKey([u8; 16]);

impl QuestionKey {
    fn new(normalised: &str) -> Self {
        let mut key = [0; 16];
        key.copy_from_slice(&Sha256::digest(normalised)[..16]);
        QuestionKey(key)
    }

    /// Place among the questions of a source under a split: the first ones are held out.
    pub(crate) fn rank(self, split_seed: u64) -> u64 {
        let hash = Sha256::new().chain_update(split_seed.to_le_bytes()).chain_update(self.0).finalize();
        hash[..8].iter().fold(0, |rank, byte| rank << 8 | u64::from(*byte))
    }
}

impl Task {
    /// The question, for comparison with other tasks.
    pub fn key(&self) -> QuestionKey {
        let turns: Vec<&Message> = self.messages.iter().filter(|turn| !turn.role.instructs()).collect();
        match turns[..] {
            [] => QuestionKey::new(&normalised(&self.question)),
            [only] => QuestionKey::new(&normalised(&only.content)),
            _ => {
                let turns =
                    turns.iter().map(|turn| format!("{} {}", turn.role.as_str(), normalised(&turn.content)));
                QuestionKey::new(&turns.collect::<Vec<_>>().join("\n"))
            }
        }
    }
}

fn normalised(text: &str) -> String {
    // Zero-width spaces and joiners, soft hyphens, marks of direction and of byte order.
    let unseen = |c: &char| matches!(c, '\u{AD}' | '\u{200B}'..='\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2060}'..='\u{2064}' | '\u{FEFF}');
    // Upper case first: ß and SS, σ and ς have lower forms of their own, but one upper form.
    let folded = text.chars().filter(|c| !unseen(c)).collect::<String>().to_uppercase().to_lowercase();
    let form: String = folded.nfc().collect();
    let blank = |c: char| c.is_whitespace() || c.is_control();
    form.split(blank).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asks(question: &str) -> Task {
        Task { question: question.to_owned(), ..Task::default() }
    }

    fn opens(messages: &[Message]) -> Task {
        let question = messages.last().unwrap().content.to_string();
        Task { question, messages: messages.to_vec(), ..Task::default() }
    }

    #[test]
    fn questions_are_compared_as_they_are_read() {
        let key = asks("What is Café Σ\u{3a3} 1 - 2?").key();
        for same in [
            " What is Café ΣΣ 1 - 2?\t\n",
            "what  is\u{a0}CAFÉ σς 1 - 2?",
            "What is Cafe\u{301} ΣΣ 1 -\r\n2?",
            "\u{feff}What is Ca\u{ad}fé Σ\u{200b}Σ 1 - 2?",
        ] {
            assert_eq!(asks(same).key(), key, "{same:?}");
        }
        for other in ["What is Café ΣΣ 1 + 2?", "What is Café ΣΣ 1 - 2", "What is Café ΣΣ 1 - 3?", ""]
        {
            assert_ne!(asks(other).key(), key, "{other:?}");
        }
    }

    #[test]
    fn conversations_are_compared_without_instructions() {
        let asked = |system: &str| opens(&[Message::system(system), Message::user("1 + 1?")]).key();
        assert_eq!(asked("Be brief."), asked("Be kind."));
        assert_eq!(asked("Be brief."), asks("1 + 1?").key());
        let shown = |first: &str| {
            opens(&[Message::user(first), Message::assistant("3"), Message::user("1 + 1?")]).key()
        };
        assert_ne!(shown("1 + 2?"), asked("Be brief."));
        assert_ne!(shown("1 + 2?"), shown("2 + 1?"));
        assert_eq!(shown("1 + 2?"), shown(" 1 +  2?"));
    }

    #[test]
    fn ranks_depend_on_the_split_and_are_spread() {
        let ranks = |split| (0..2000).map(|i| asks(&format!("{i}?")).key().rank(split)).collect::<Vec<_>>();
        let (one, two) = (ranks(1), ranks(2));
        assert_eq!(one, ranks(1));
        let low = |ranks: &[u64]| ranks.iter().map(|rank| *rank < u64::MAX / 4).collect::<Vec<_>>();
        let (one, two) = (low(&one), low(&two));
        let both = one.iter().zip(&two).filter(|(a, b)| **a && **b).count();
        for low in [one, two] {
            assert!((440..560).contains(&low.iter().filter(|low| **low).count()));
        }
        assert!((85..165).contains(&both), "{both}");
    }
}

//! Passages, the units of text that an index stores and a search returns.

use serde::{Deserialize, Serialize};

/// A passage of a corpus: a short text, usually from a page with a title.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Passage {
    /// Identifier of the passage, unique in its corpus.
    pub id: String,
    /// Title of the page that the passage is from. Empty if the passage has no title.
    pub title: String,
    /// Text of the passage, without the title.
    pub text: String,
}

impl Passage {
    /// Creates a passage from `contents` in Search-R1's format: the title in quotes on the first
    /// line, followed by the text. In any other format, all of `contents` becomes the text, without
    /// a title. In both cases, [`Passage::contents`] returns `contents` unchanged.
    pub fn from_contents(id: String, contents: String) -> Self {
        let titled = contents.split_once('\n').and_then(|(first, text)| {
            let title = first.strip_prefix('"')?.strip_suffix('"')?;
            (!title.is_empty()).then(|| (title.to_owned(), text.to_owned()))
        });
        match titled {
            Some((title, text)) => Passage { id, title, text },
            None => Passage { id, title: String::new(), text: contents },
        }
    }

    /// Returns the title and the text in Search-R1's format. This string is indexed and embedded.
    pub fn contents(&self) -> String {
        if self.title.is_empty() {
            self.text.clone()
        } else {
            format!("\"{}\"\n{}", self.title, self.text)
        }
    }
}

/// A passage found by a search, with its score.
#[derive(Debug, Clone, PartialEq)]
pub struct Hit {
    /// The passage that was found.
    pub passage: Passage,
    /// Score of the passage; higher is better. Depending on the search mode, it is the BM25 score,
    /// the cosine similarity or the sum of reciprocal ranks.
    pub score: f32,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn search_r1_contents_are_split_into_title_and_text() {
        assert_eq!(title_and_text("\"Ada\"\nwrote\nnotes"), ("Ada".into(), "wrote\nnotes".into()));
        for plain in ["Ada wrote", "Ada\nwrote", "\"\"\nwrote", "\"Ada\"", "\"", ""] {
            assert_eq!(title_and_text(plain), (String::new(), plain.to_owned()), "{plain:?}");
        }
    }

    fn title_and_text(contents: &str) -> (String, String) {
        let passage = Passage::from_contents("1".into(), contents.into());
        (passage.title, passage.text)
    }

    proptest! {
        #[test]
        fn passage_contents_round_trip_through_parsing(contents in "[a\"\n ]{0,12}") {
            let passage = Passage::from_contents("1".into(), contents.clone());
            prop_assert_eq!(passage.contents(), contents);
        }
    }
}

//! Passages: what is indexed and found.

use serde::{Deserialize, Serialize};

/// A passage of a corpus.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Passage {
    /// Name, unique in its corpus.
    pub id: String,
    /// Title of the page that it is from; empty where it has none.
    pub title: String,
    /// The text itself.
    pub text: String,
}

impl Passage {
    /// A passage of a corpus in Search-R1's form, whose `contents` are the title in quotes on a line of its
    /// own and the text after it. Contents of another form are text without a title, so that
    /// [`Passage::contents`] is what it was read from in either case.
    pub fn of_contents(id: String, contents: String) -> Self {
        let titled = contents.split_once('\n').and_then(|(first, text)| {
            let title = first.strip_prefix('"')?.strip_suffix('"')?;
            (!title.is_empty()).then(|| (title.to_owned(), text.to_owned()))
        });
        match titled {
            Some((title, text)) => Passage { id, title, text },
            None => Passage { id, title: String::new(), text: contents },
        }
    }

    /// Title and text in Search-R1's form, which is also what is indexed.
    pub fn contents(&self) -> String {
        match self.title.is_empty() {
            true => self.text.clone(),
            false => format!("\"{}\"\n{}", self.title, self.text),
        }
    }
}

/// A passage that was found.
#[derive(Debug, Clone, PartialEq)]
pub struct Hit {
    /// The passage.
    pub passage: Passage,
    /// Score: of BM25, the cosine of dense retrieval, or the sum of reciprocal ranks. Higher is better.
    pub score: f32,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn titles_are_taken_from_contents_of_search_r1() {
        let of = |contents: &str| {
            let passage = Passage::of_contents("1".into(), contents.into());
            (passage.title, passage.text)
        };
        assert_eq!(of("\"Ada\"\nwrote\nnotes"), ("Ada".into(), "wrote\nnotes".into()));
        for plain in ["Ada wrote", "Ada\nwrote", "\"\"\nwrote", "\"Ada\"", "\"", ""] {
            assert_eq!(of(plain), (String::new(), plain.to_owned()), "{plain:?}");
        }
    }

    proptest! {
        #[test]
        fn contents_are_what_they_were_read_from(contents in "[a\"\n ]{0,12}") {
            let passage = Passage::of_contents("1".into(), contents.clone());
            prop_assert_eq!(passage.contents(), contents);
        }
    }
}

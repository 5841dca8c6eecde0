//! Texts of the game in one language, from the files in `text/`.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::rules::Language;
use crate::GameError;

/// Texts of werewolf in one language, by key. `{name}` in a text is a placeholder.
#[derive(Debug, Clone)]
pub(super) struct Texts {
    language: &'static str,
    entries: Arc<BTreeMap<String, String>>,
}

impl Texts {
    /// Reads the texts of werewolf in a language.
    ///
    /// # Errors
    /// Returns [`GameError::Text`] if the file of the language is not valid.
    pub fn new(language: Language) -> Result<Self, GameError> {
        let (language, file) = match language {
            Language::English => ("en", include_str!("text/en.toml")),
            Language::Chinese => ("zh", include_str!("text/zh.toml")),
        };
        let entries = toml::from_str(file).map_err(|error| GameError::Text {
            language: language.to_owned(),
            key: error.to_string(),
        })?;
        Ok(Texts { language, entries: Arc::new(entries) })
    }

    /// Returns the text with this key.
    ///
    /// # Errors
    /// Returns [`GameError::Text`] if there is no text with this key.
    pub fn get_text(&self, key: &str) -> Result<&str, GameError> {
        self.entries.get(key).map(String::as_str).ok_or_else(|| GameError::Text {
            language: self.language.to_owned(),
            key: key.to_owned(),
        })
    }

    /// Returns the text with this key, with its placeholders replaced. `slots` contains the names
    /// of the placeholders with their values.
    pub fn fill(&self, key: &str, slots: &[(&str, &str)]) -> Result<String, GameError> {
        // Values may contain braces, so only placeholders of the original text are replaced.
        let mut rest = self.get_text(key)?;
        let mut filled = String::new();
        while let Some((before, slot_and_after)) = rest.split_once('{') {
            filled.push_str(before);
            let (slot, after) = slot_and_after.split_once('}').unwrap_or((slot_and_after, ""));
            let value = slots.iter().find(|(name, _)| *name == slot).map(|(_, value)| *value);
            filled.push_str(value.unwrap_or_default());
            rest = after;
        }
        filled.push_str(rest);
        Ok(filled)
    }

    /// Returns the name by which players refer to the player in a seat.
    ///
    /// # Errors
    /// Returns [`GameError::Text`] if the texts lack the template for names.
    pub fn player_name(&self, seat: usize) -> Result<String, GameError> {
        self.fill("player", &[("n", &(seat + 1).to_string())])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn languages_have_equal_keys_and_slots() {
        let slots = |text: &str| {
            let mut slots: Vec<String> = text
                .split('{')
                .skip(1)
                .filter_map(|rest| rest.split_once('}').map(|(slot, _)| slot.to_owned()))
                .collect();
            slots.sort();
            slots
        };
        let [english, chinese] =
            [Language::English, Language::Chinese].map(|language| Texts::new(language).unwrap());
        let keys = |texts: &Texts| texts.entries.keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(&english), keys(&chinese));
        for (key, text) in english.entries.iter() {
            assert_eq!(slots(text), slots(&chinese.entries[key]), "{key}");
        }
    }

    #[test]
    fn fill_leaves_braces_of_values() {
        let texts = Texts::new(Language::English).unwrap();
        let filled =
            texts.fill("says", &[("name", "Player1"), ("text", "{name} is a wolf")]).unwrap();
        assert_eq!(filled, "Player1: {name} is a wolf");
    }
}

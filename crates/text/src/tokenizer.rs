//! Text to token ids and back.
//!
//! Guarantees: [`Tokenizer::encode`] never yields a special token, whatever the text, and adds nothing;
//! special tokens come only from [`Tokenizer::encode_template`]. For a vocabulary that covers all bytes,
//! decoding the ids of a text gives the text back (after the tokenizer's own normalisation, such as NFC for
//! Qwen2).
//!
//! A *special* token is one that the tokenizer marks so: control tokens of a GGUF file, `"special": true` in
//! a `tokenizer.json`. Tokens that are merely matched first (`<tool_call>` of Qwen2.5) are text like any
//! other.
//!
//! Byte-level BPE, and SentencePiece's BPE with bytes for what is no token (Gemma); others are refused.

use std::collections::HashMap;

use levade_model::{AddedToken, GgufTokenizer, SpecialTokens, TokenizerSource, added_tokens};
use levade_policy::{TokenBytes, caught};
use tokenizers::{DecoderWrapper, ModelWrapper};

use crate::length::Longest;
use crate::{TextError, alphabet, gguf, sentencepiece};

/// Ids beyond this belong to as many tokens, or are damage: there is a place for each one below the last.
const MOST_IDS: usize = 1 << 20;

/// A special token and how it is matched.
#[derive(Debug, Clone)]
struct Special {
    id: u32,
    text: String,
    /// Takes the white space before it along.
    lstrip: bool,
    /// Takes the white space after it along.
    rstrip: bool,
    /// Only where no letter or digit touches it.
    single_word: bool,
}

/// A BPE tokenizer.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Bytes that each id stands for; `None` for special tokens and holes.
    bytes: Vec<Option<Vec<u8>>>,
    /// Special tokens by their first character, longest first.
    specials: HashMap<char, Vec<Special>>,
    special_texts: HashMap<u32, String>,
    bos: Option<u32>,
    eos: Vec<u32>,
    longest: Longest,
}

impl Tokenizer {
    /// A tokenizer from a model's files. Beginning and end of text are known from GGUF only; see
    /// [`with_ends`](Self::with_ends).
    ///
    /// # Errors
    /// When the file is damaged, or of a kind that is not supported; the message says which and what to do.
    pub fn new(source: &TokenizerSource) -> Result<Self, TextError> {
        match source {
            TokenizerSource::Json(bytes) => Self::from_json(bytes),
            TokenizerSource::Gguf(metadata) => Self::from_gguf(metadata),
        }
    }

    fn from_gguf(metadata: &GgufTokenizer) -> Result<Self, TextError> {
        let json = match metadata.model.as_str() {
            "llama" => sentencepiece::tokenizer_json(metadata)?,
            _ => gguf::tokenizer_json(metadata)?,
        };
        let json = json.to_string();
        let eos: Vec<u32> = metadata.eos.into_iter().collect();
        Ok(Self::from_json(json.as_bytes())?.with_ends(metadata.bos, &eos))
    }

    /// The library panics on some damaged files, on others only when it is used: so it is tried at once.
    fn from_json(bytes: &[u8]) -> Result<Self, TextError> {
        let stops = |what: String| {
            TextError::Tokenizer(format!(
                "tokenizer.json is damaged: the library that reads it stops at {what:?}; fetch the file again"
            ))
        };
        let tokenizer = caught(|| Self::read_json(bytes)).map_err(stops)??;
        caught(|| tokenizer.try_out()).map_err(stops)??;
        Ok(tokenizer)
    }

    /// Encodes a little of everything.
    fn try_out(&self) -> Result<(), TextError> {
        let ascii: String = (0..128).map(char::from).collect();
        let latin: String = ('\u{80}'..'\u{250}').collect();
        let others = "Ελληνικά русский עברית العربية हिन्दी ไทย 中文 かな 한국어 e\u{301} 👩\u{200d}🔬 \u{fffd}\u{10ffff} \u{feff}x";
        let spaces = " \t  \n\n\r\n   12345 don't WE'LL \u{a0}\u{3000} a  b   c";
        for text in [&ascii, &latin, others, spaces] {
            self.inner.encode_fast(text, false).map_err(|error| {
                TextError::Tokenizer(format!(
                    "tokenizer.json cannot encode text: {error}; fetch the file again"
                ))
            })?;
        }
        Ok(())
    }

    fn read_json(bytes: &[u8]) -> Result<Self, TextError> {
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| {
            TextError::Tokenizer(format!("tokenizer.json does not parse: {error}; fetch the file again"))
        })?;
        let to_bytes = check_supported(&inner, bytes)?;
        check_ids(&inner, bytes)?;
        // Lengths are the caller's business: a file saved with truncation on would cut every text.
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .map_err(|error| TextError::Tokenizer(format!("truncation cannot be switched off: {error}")))?;
        inner.set_encode_special_tokens(true);

        let added = inner.get_added_tokens_decoder();
        let vocabulary = inner.get_vocab(true);
        let size = vocabulary.values().max().map_or(0, |&last| last as usize + 1);
        if size > MOST_IDS.max(4 * vocabulary.len()) {
            return Err(TextError::Tokenizer(format!(
                "tokenizer.json has {} tokens, but gives one the id {}; fetch the file again",
                vocabulary.len(),
                size - 1
            )));
        }
        let mut tokenizer = Tokenizer {
            inner,
            bytes: vec![None; size],
            specials: HashMap::new(),
            special_texts: HashMap::new(),
            bos: None,
            eos: Vec::new(),
            longest: Longest::default(),
        };
        for (text, id) in vocabulary {
            match added.get(&id) {
                Some(token) if token.special => {
                    tokenizer.add_special(Special {
                        id,
                        text,
                        lstrip: token.lstrip,
                        rstrip: token.rstrip,
                        single_word: token.single_word,
                    });
                }
                Some(_) => tokenizer.bytes[id as usize] = Some(text.into_bytes()),
                None => tokenizer.bytes[id as usize] = Some(to_bytes(&text)),
            }
        }
        let strips = added.values().any(|token| token.lstrip || token.rstrip);
        let tokens = (0..size as u32).map(|id| tokenizer.bytes_with_special(id));
        tokenizer.longest = Longest::of(tokens, tokenizer.inner.get_normalizer(), strips);
        for group in tokenizer.specials.values_mut() {
            group.sort_by(|a, b| b.text.len().cmp(&a.text.len()).then(a.id.cmp(&b.id)));
        }
        Ok(tokenizer)
    }

    fn add_special(&mut self, special: Special) {
        self.special_texts.insert(special.id, special.text.clone());
        if let Some(first) = special.text.chars().next() {
            self.specials.entry(first).or_default().push(special);
        }
    }

    /// Sets the tokens that begin and end a text, as the model's configuration names them.
    #[must_use]
    pub fn with_ends(mut self, bos: Option<u32>, eos: &[u32]) -> Self {
        self.bos = bos;
        self.eos = eos.to_vec();
        self
    }

    /// Sets the tokens that begin and end a text from the names that templates use and the ids of the
    /// configuration. They need not agree: Qwen2.5 has a beginning of text in its configuration that its
    /// templates know nothing of. The names decide what templates print; every end counts.
    pub(crate) fn with_named_ends(self, names: &SpecialTokens, bos: Option<u32>, eos: &[u32]) -> Self {
        let named = |name: &Option<String>| name.as_ref().and_then(|text| self.special(text));
        let bos = if *names == SpecialTokens::default() { bos } else { named(&names.bos) };
        let first = named(&names.eos);
        let ends: Vec<u32> =
            first.into_iter().chain(eos.iter().copied().filter(|&id| Some(id) != first)).collect();
        self.with_ends(bos, &ends)
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The tokens that end a text, the main one first.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// One more than the largest id. A model may have more rows than this in its embedding.
    pub fn vocabulary(&self) -> usize {
        self.bytes.len()
    }

    /// The id of a special token by its text.
    pub fn special(&self, text: &str) -> Option<u32> {
        let group = self.specials.get(&text.chars().next()?)?;
        group.iter().find(|special| special.text == text).map(|special| special.id)
    }

    /// The special tokens with their texts, in no order.
    pub(crate) fn specials(&self) -> impl Iterator<Item = (u32, &str)> {
        self.special_texts.iter().map(|(id, text)| (*id, text.as_str()))
    }

    /// Whether `id` is a special token.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_texts.contains_key(&id)
    }

    /// The texts of the tokens that are matched before all others, special or not.
    pub(crate) fn added_tokens(&self) -> Vec<String> {
        self.inner.get_added_tokens_decoder().into_values().map(|token| token.content).collect()
    }

    /// The text of a token: of special tokens their name, of others what they stand for, with U+FFFD for the
    /// bytes of unfinished characters. Empty for ids out of range.
    pub fn token_text(&self, id: u32) -> String {
        match self.special_texts.get(&id) {
            Some(text) => text.clone(),
            None => String::from_utf8_lossy(self.token_bytes(id).unwrap_or_default()).into_owned(),
        }
    }

    /// The ids of a text. Special tokens in it are encoded as the characters they are written with, and
    /// nothing is added at either end.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        if text.is_empty() {
            return Vec::new();
        }
        // BPE fails only on an unknown token that the vocabulary lacks, which `check_supported` has excluded;
        // and where bytes are tokens, nothing is unknown.
        let encoding = self.inner.encode_fast(text, false).expect("BPE over bytes encodes any text");
        encoding.get_ids().to_vec()
    }

    /// The ids of a text in which special tokens count as themselves. For text from a trusted template only.
    pub fn encode_template(&self, text: &str) -> Vec<u32> {
        self.encode_guarded(text, None)
    }

    /// The ids of a whole text, as models were trained to read one: special tokens count as themselves, and
    /// the tokenizer's own beginning of a text comes first, where it adds one. For completions, not for
    /// messages.
    pub fn encode_document(&self, text: &str) -> Vec<u32> {
        // An empty text is what is added alone.
        let mut ids =
            self.inner.encode_fast("", true).map(|added| added.get_ids().to_vec()).unwrap_or_default();
        ids.retain(|id| Some(*id) == self.bos || !self.eos.contains(id));
        let rest = self.encode_template(text);
        if ids.first() == rest.first() && ids.len() == 1 {
            // Whoever wrote the beginning out does not want it twice.
            ids.clear();
        }
        ids.extend(rest);
        ids
    }

    /// Rejects a text whose bytes show that it has more than `max_tokens` tokens. Takes a fraction of the
    /// time that [`encode`](Self::encode) takes.
    ///
    /// # Errors
    /// Returns [`TextError::TooLong`] for such a text.
    pub fn check_length(&self, text: &str, max_tokens: usize) -> Result<(), TextError> {
        self.longest.check(text, max_tokens)
    }

    /// Like [`encode_template`](Self::encode_template), but no special token starts at a `guard` character or
    /// spans one. The guards themselves leave no trace: text around one is encoded as if it were not there.
    pub(crate) fn encode_guarded(&self, text: &str, guard: Option<char>) -> Vec<u32> {
        let mut ids = Vec::new();
        let mut plain = String::new();
        let mut guarded = false;
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            if Some(c) == guard {
                guarded = true;
                rest = &rest[c.len_utf8()..];
                continue;
            }
            let special = if guarded { None } else { self.special_at(rest, plain.chars().next_back()) };
            guarded = false;
            let Some(special) = special else {
                plain.push(c);
                rest = &rest[c.len_utf8()..];
                continue;
            };
            let kept = if special.lstrip { plain.trim_end() } else { plain.as_str() };
            ids.extend(self.encode(kept));
            ids.push(special.id);
            plain.clear();
            rest = &rest[special.text.len()..];
            if special.rstrip {
                rest = rest.trim_start();
            }
        }
        ids.extend(self.encode(&plain));
        ids
    }

    /// The longest special token at the start of `text`.
    fn special_at(&self, text: &str, before: Option<char>) -> Option<&Special> {
        let group = self.specials.get(&text.chars().next()?)?;
        let word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        group.iter().find(|special| {
            text.strip_prefix(&special.text)
                .is_some_and(|after| !special.single_word || !(word(before) || word(after.chars().next())))
        })
    }

    /// The special token that `text` starts with, and its length in bytes.
    pub(crate) fn leading_special(&self, text: &str) -> Option<(u32, usize)> {
        self.special_at(text, None).map(|special| (special.id, special.text.len()))
    }

    /// Puts `guard` into a text from outside wherever a special token could otherwise begin: before every
    /// occurrence of one, and, with `edges`, where the text could make one together with what a template
    /// prints before or after it.
    pub(crate) fn guard(&self, text: &str, guard: char, edges: bool) -> String {
        let mut out = String::with_capacity(text.len());
        // The middle or the end of a special token whose beginning the template would have to print.
        let completes = |part: &str| text.starts_with(part) || part.starts_with(text);
        let inside = |special: &str| special.char_indices().skip(1).any(|(at, _)| completes(&special[at..]));
        if edges && !text.is_empty() && self.special_texts.values().any(|special| inside(special)) {
            out.push(guard);
        }
        for (at, c) in text.char_indices() {
            let rest = &text[at..];
            let begins = |special: &Special| {
                rest.starts_with(&special.text) || (edges && special.text.starts_with(rest))
            };
            if self.specials.get(&c).is_some_and(|group| group.iter().any(begins)) {
                out.push(guard);
            }
            out.push(c);
        }
        out
    }

    /// The text of ids, without special tokens and ids out of range. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().filter_map(|&id| self.token_bytes(id)).flatten().copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The text of ids, the special tokens among `kept` by their names, without the other ones.
    pub(crate) fn decode_keeping(&self, ids: &[u32], kept: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.bytes_keeping(id, kept)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(crate) fn bytes_keeping(&self, id: u32, kept: &[u32]) -> &[u8] {
        if kept.contains(&id) {
            self.bytes_with_special(id)
        } else {
            self.token_bytes(id).unwrap_or_default()
        }
    }

    /// The text of ids, special tokens by their names. Ids out of range leave no trace.
    pub fn decode_with_special(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.bytes_with_special(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes of a token, of special tokens those of their names; none of ids out of range.
    pub fn bytes_with_special(&self, id: u32) -> &[u8] {
        let special = self.special_texts.get(&id).map(String::as_bytes);
        special.or_else(|| self.token_bytes(id)).unwrap_or_default()
    }

    /// A `tokenizer.json` that other programs load to get the same ids;
    /// `levade_model::write_tokenizer_config` writes what goes with it.
    ///
    /// # Errors
    /// When it cannot be written as JSON.
    pub fn to_json(&self) -> Result<String, TextError> {
        self.inner
            .to_string(true)
            .map_err(|error| TextError::Tokenizer(format!("cannot be written as tokenizer.json: {error}")))
    }
}

impl TokenBytes for Tokenizer {
    fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.bytes.get(id as usize)?.as_deref()
    }
}

/// Checks the kind of a tokenizer; returns how its tokens are read as bytes.
fn check_supported(inner: &tokenizers::Tokenizer, bytes: &[u8]) -> Result<fn(&str) -> Vec<u8>, TextError> {
    let ModelWrapper::BPE(model) = inner.get_model() else {
        return Err(TextError::Tokenizer(
            "tokenizer.json is not BPE; only byte-level BPE and SentencePiece's BPE are supported".into(),
        ));
    };
    let to_bytes: fn(&str) -> Vec<u8> = if matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
        alphabet::token_to_bytes
    } else if model.byte_fallback {
        let file = serde_json::from_slice(bytes)
            .map_err(|error| TextError::Tokenizer(format!("tokenizer.json does not parse: {error}")))?;
        sentencepiece::check(&file)?;
        sentencepiece::token_to_bytes
    } else {
        return Err(TextError::Tokenizer(
            "tokenizer.json is neither byte-level BPE (its decoder is not ByteLevel) nor SentencePiece's BPE with bytes for \
             what is no token (its model has no byte_fallback)"
                .into(),
        ));
    };
    if model.dropout.is_some_and(|p| p > 0.0) {
        return Err(TextError::Tokenizer(
            "tokenizer.json has BPE dropout, so texts have no fixed ids; set \"dropout\" to null".into(),
        ));
    }
    if let Some(unknown) = model.get_unk_token()
        && !inner.get_vocab(false).contains_key(unknown)
    {
        return Err(TextError::Tokenizer(format!(
            "the unknown token {unknown:?} of tokenizer.json is not in its vocabulary; is the file damaged?"
        )));
    }
    Ok(to_bytes)
}

/// Ids of added tokens follow from their order, and the library renumbers them in silence where the file
/// disagrees.
fn check_ids(inner: &tokenizers::Tokenizer, bytes: &[u8]) -> Result<(), TextError> {
    let added = added_tokens(bytes)
        .map_err(|error| TextError::Tokenizer(format!("tokenizer.json does not parse: {error}")))?;
    for AddedToken { id, content, .. } in added {
        let found = inner.token_to_id(&content);
        if found.is_some_and(|found| found != id) {
            return Err(TextError::Tokenizer(format!(
                "tokenizer.json gives the added token {content:?} the id {id}, but its place in the vocabulary gives \
                 it {found:?}; the ids of added tokens must follow the vocabulary without gaps"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;

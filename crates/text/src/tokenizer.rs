//! Converts text to token ids and back.
//!
//! A *special* token is a token that the tokenizer marks as special: a control token in a GGUF
//! file, or `"special": true` in a `tokenizer.json`. Added tokens without this mark (`<tool_call>`
//! of Qwen2.5) are ordinary text.
//!
//! Supported are byte-level BPE, and SentencePiece BPE with byte fallback (Gemma). Other kinds are
//! rejected.
//!
//! # Guarantees
//! - **No special tokens from text**: [`Tokenizer::encode`] never returns a special token, whatever
//!   the text, and adds no tokens. Special tokens come only from [`Tokenizer::encode_template`].
//! - **Round trip**: if the vocabulary covers all bytes, decoding the ids of a text returns the
//!   text, after the tokenizer's own normalization (such as NFC for Qwen2).

use std::collections::HashMap;

use levade_model::{AddedToken, GgufTokenizer, SpecialTokens, TokenizerSource, added_tokens};
use levade_policy::{TokenBytes, catch_panic};
use tokenizers::{DecoderWrapper, ModelWrapper};

use crate::length::TokenSizes;
use crate::{TextError, alphabet, gguf, sentencepiece};

/// Largest token id up to which a vocabulary may be sparse. If the largest id exceeds it, there
/// must be at least a quarter as many tokens; otherwise the file is damaged. The token table has an
/// entry for every id up to the largest one.
const MAX_IDS: usize = 1 << 20;

/// A special token, with the rules by which it matches text.
#[derive(Debug, Clone)]
struct SpecialToken {
    id: u32,
    text: String,
    /// Whether the token absorbs the white space before it.
    lstrip: bool,
    /// Whether the token absorbs the white space after it.
    rstrip: bool,
    /// Whether the token matches only if no letter, digit or underscore is adjacent to it.
    single_word: bool,
}

/// A tokenizer for byte-pair encoding (BPE) of text.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Bytes of each token by id; `None` for special tokens and unused ids.
    bytes: Vec<Option<Vec<u8>>>,
    /// Special tokens by their first character, the longest token first.
    specials: HashMap<char, Vec<SpecialToken>>,
    special_texts: HashMap<u32, String>,
    bos: Option<u32>,
    eos: Vec<u32>,
    token_sizes: TokenSizes,
}

impl Tokenizer {
    /// Creates a tokenizer from a model's files. Only GGUF files define the tokens at the start and
    /// the end of a text; for other files, see [`with_ends`](Self::with_ends).
    ///
    /// # Errors
    /// Returns an error with a remedy if the file is damaged or of an unsupported kind.
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

    /// Parses a `tokenizer.json` and tries the tokenizer out immediately. On some damaged files,
    /// the tokenizers library panics when it parses; on other damaged files, it panics only when it
    /// encodes.
    fn from_json(bytes: &[u8]) -> Result<Self, TextError> {
        let tokenizer = catch_panic(|| Self::read_json(bytes)).map_err(panic_error)??;
        catch_panic(|| tokenizer.try_out()).map_err(panic_error)??;
        Ok(tokenizer)
    }

    /// Encodes samples of many scripts, symbols and white space, to find out whether the tokenizer
    /// works.
    fn try_out(&self) -> Result<(), TextError> {
        let ascii: String = (0..128).map(char::from).collect();
        let latin: String = ('\u{80}'..'\u{250}').collect();
        let scripts = "Ελληνικά русский עברית العربية हिन्दी ไทย 中文 かな 한국어 e\u{301} 👩\u{200d}🔬 \u{fffd}\u{10ffff} \u{feff}x";
        let spaces = " \t  \n\n\r\n   12345 don't WE'LL \u{a0}\u{3000} a  b   c";
        for text in [&ascii, &latin, scripts, spaces] {
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
            TextError::Tokenizer(format!(
                "tokenizer.json cannot be parsed: {error}; fetch the file again"
            ))
        })?;
        let to_bytes = check_supported(&inner, bytes)?;
        check_ids(&inner, bytes)?;
        // Length limits are up to the caller: a file saved with truncation enabled would truncate
        // every text.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| {
            TextError::Tokenizer(format!("truncation cannot be disabled: {error}"))
        })?;
        inner.set_encode_special_tokens(true);

        let added = inner.get_added_tokens_decoder();
        let vocabulary = inner.get_vocab(true);
        let size = vocabulary.values().max().map_or(0, |&last| last as usize + 1);
        if size > MAX_IDS.max(4 * vocabulary.len()) {
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
            token_sizes: TokenSizes::default(),
        };
        for (text, id) in vocabulary {
            match added.get(&id) {
                Some(token) if token.special => {
                    tokenizer.add_special(SpecialToken {
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
        tokenizer.token_sizes =
            TokenSizes::measure(tokens, tokenizer.inner.get_normalizer(), strips);
        for group in tokenizer.specials.values_mut() {
            group.sort_by(|a, b| b.text.len().cmp(&a.text.len()).then(a.id.cmp(&b.id)));
        }
        Ok(tokenizer)
    }

    fn add_special(&mut self, special: SpecialToken) {
        self.special_texts.insert(special.id, special.text.clone());
        if let Some(first) = special.text.chars().next() {
            self.specials.entry(first).or_default().push(special);
        }
    }

    /// Sets the tokens at the start and the end of a text, as the model's configuration names them.
    #[must_use]
    pub fn with_ends(mut self, bos: Option<u32>, eos: &[u32]) -> Self {
        self.bos = bos;
        self.eos = eos.to_vec();
        self
    }

    /// Sets the tokens at the start and the end of a text, from the names that templates use and
    /// the ids of the configuration. The two may disagree: Qwen2.5 configures a start token that
    /// its templates do not use. The names determine what templates print. All configured end
    /// tokens count.
    pub(crate) fn with_named_ends(
        self,
        names: &SpecialTokens,
        bos: Option<u32>,
        eos: &[u32],
    ) -> Self {
        let bos =
            if *names == SpecialTokens::default() { bos } else { self.named_special(&names.bos) };
        let first = self.named_special(&names.eos);
        let ends: Vec<u32> =
            first.into_iter().chain(eos.iter().copied().filter(|&id| Some(id) != first)).collect();
        self.with_ends(bos, &ends)
    }

    fn named_special(&self, name: &Option<String>) -> Option<u32> {
        name.as_ref().and_then(|text| self.special(text))
    }

    /// Returns the id of the token that starts a text, or `None` if there is no such token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Returns the ids of the tokens that end a text, the main token first.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Returns the vocabulary size: the largest id plus one. The embedding of a model can have more
    /// rows.
    pub fn vocabulary(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the id of the special token whose text is `text`, or `None` if there is none.
    pub fn special(&self, text: &str) -> Option<u32> {
        let group = self.specials.get(&text.chars().next()?)?;
        group.iter().find(|special| special.text == text).map(|special| special.id)
    }

    /// Returns the ids and texts of the special tokens, in arbitrary order.
    pub(crate) fn specials(&self) -> impl Iterator<Item = (u32, &str)> {
        self.special_texts.iter().map(|(id, text)| (*id, text.as_str()))
    }

    /// Returns whether `id` is the id of a special token.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_texts.contains_key(&id)
    }

    /// Returns the texts of the added tokens, special or not. The tokenizer matches them before all
    /// other tokens.
    pub(crate) fn added_tokens(&self) -> Vec<String> {
        self.inner.get_added_tokens_decoder().into_values().map(|token| token.content).collect()
    }

    /// Returns the text of a token: the name of a special token, or the decoded bytes of any other
    /// token. Incomplete characters become U+FFFD. Empty for ids out of range.
    pub fn token_text(&self, id: u32) -> String {
        match self.special_texts.get(&id) {
            Some(text) => text.clone(),
            None => String::from_utf8_lossy(self.token_bytes(id).unwrap_or_default()).into_owned(),
        }
    }

    /// Encodes a text to token ids. Special tokens in the text are encoded as plain characters, and
    /// no tokens are added at either end.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        if text.is_empty() {
            return Vec::new();
        }
        // BPE fails only on an unknown token that the vocabulary lacks, which `check_supported` has
        // excluded. With byte tokens, nothing is unknown.
        let encoding =
            self.inner.encode_fast(text, false).expect("BPE over bytes encodes any text");
        encoding.get_ids().to_vec()
    }

    /// Encodes a text to token ids, in which special tokens count as themselves. Only for text from
    /// a trusted template.
    pub fn encode_template(&self, text: &str) -> Vec<u32> {
        self.encode_guarded(text, None)
    }

    /// Encodes a complete document to token ids in the format that models were trained on: special
    /// tokens count as themselves, and the tokenizer's own start token comes first, if it adds one.
    /// For raw completions, not for messages.
    pub fn encode_document(&self, text: &str) -> Vec<u32> {
        // The ids of an empty text are the added tokens.
        let mut ids = self
            .inner
            .encode_fast("", true)
            .map(|added| added.get_ids().to_vec())
            .unwrap_or_default();
        ids.retain(|id| Some(*id) == self.bos || !self.eos.contains(id));
        let rest = self.encode_template(text);
        if ids.first() == rest.first() && ids.len() == 1 {
            // The text already starts with the start token; it is not added twice.
            ids.clear();
        }
        ids.extend(rest);
        ids
    }

    /// Rejects a text whose length in bytes shows that it has more than `max_tokens` tokens. The
    /// check takes a fraction of the time of [`encode`](Self::encode).
    ///
    /// # Errors
    /// Returns [`TextError::TooLong`] if the text is rejected.
    pub fn check_length(&self, text: &str, max_tokens: usize) -> Result<(), TextError> {
        self.token_sizes.check(text, max_tokens)
    }

    /// Encodes a text like [`encode_template`](Self::encode_template), except that no special token
    /// starts at a `guard` character or spans one. Guards are removed: the text around a guard is
    /// encoded as if the guard were absent.
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
            let special =
                if guarded { None } else { self.special_at(rest, plain.chars().next_back()) };
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

    /// Returns the longest special token at the start of `text`, or `None` if there is none.
    /// `before` is the character before `text`.
    fn special_at(&self, text: &str, before: Option<char>) -> Option<&SpecialToken> {
        let group = self.specials.get(&text.chars().next()?)?;
        group.iter().find(|special| {
            text.strip_prefix(&special.text).is_some_and(|after| {
                !special.single_word
                    || !(is_word_char(before) || is_word_char(after.chars().next()))
            })
        })
    }

    /// Returns the id of the special token at the start of `text`, and its length in bytes.
    pub(crate) fn leading_special(&self, text: &str) -> Option<(u32, usize)> {
        self.special_at(text, None).map(|special| (special.id, special.text.len()))
    }

    /// Inserts the character `guard` into an external text before every occurrence of a special
    /// token, so that none is encoded.
    ///
    /// If `edges` is set, also inserts it before text that could form a special token together with
    /// the template's text before or after it.
    pub(crate) fn guard(&self, text: &str, guard: char, edges: bool) -> String {
        let mut out = String::with_capacity(text.len());
        // The text may be the middle or the end of a special token whose start the template prints.
        let completes = |part: &str| text.starts_with(part) || part.starts_with(text);
        let inside =
            |special: &str| special.char_indices().skip(1).any(|(at, _)| completes(&special[at..]));
        if edges && !text.is_empty() && self.special_texts.values().any(|special| inside(special)) {
            out.push(guard);
        }
        for (at, c) in text.char_indices() {
            let rest = &text[at..];
            if self.specials.get(&c).is_some_and(|group| {
                group.iter().any(|special| {
                    rest.starts_with(&special.text) || (edges && special.text.starts_with(rest))
                })
            }) {
                out.push(guard);
            }
            out.push(c);
        }
        out
    }

    /// Decodes token ids to text, without special tokens and ids out of range. Invalid UTF-8
    /// becomes U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> =
            ids.iter().filter_map(|&id| self.token_bytes(id)).flatten().copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Decodes token ids to text. Special tokens in `kept` are printed by name; other special
    /// tokens are omitted.
    pub(crate) fn decode_keeping(&self, ids: &[u32], kept: &[u32]) -> String {
        let bytes: Vec<u8> =
            ids.iter().flat_map(|&id| self.bytes_keeping(id, kept)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(crate) fn bytes_keeping(&self, id: u32, kept: &[u32]) -> &[u8] {
        if kept.contains(&id) {
            self.bytes_with_special(id)
        } else {
            self.token_bytes(id).unwrap_or_default()
        }
    }

    /// Decodes token ids to text, and prints special tokens by name. Ids out of range are omitted.
    pub fn decode_with_special(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> =
            ids.iter().flat_map(|&id| self.bytes_with_special(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Returns the bytes of a token, or the bytes of its name for a special token. Empty for ids
    /// out of range.
    pub fn bytes_with_special(&self, id: u32) -> &[u8] {
        let special = self.special_texts.get(&id).map(String::as_bytes);
        special.or_else(|| self.token_bytes(id)).unwrap_or_default()
    }

    /// Converts the tokenizer to a `tokenizer.json` that other programs can load to get the same
    /// ids. `levade_model::write_tokenizer_config` writes the files that belong to it.
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot be serialized as JSON.
    pub fn to_json(&self) -> Result<String, TextError> {
        self.inner.to_string(true).map_err(|error| {
            TextError::Tokenizer(format!(
                "the tokenizer cannot be written as tokenizer.json: {error}"
            ))
        })
    }
}

fn panic_error(what: String) -> TextError {
    TextError::Tokenizer(format!(
        "tokenizer.json is damaged: the tokenizers library panicked: {what:?}; fetch the \
                 file again"
    ))
}

fn is_word_char(c: Option<char>) -> bool {
    c.is_some_and(|c| c.is_alphanumeric() || c == '_')
}

impl TokenBytes for Tokenizer {
    fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.bytes.get(id as usize)?.as_deref()
    }
}

/// Checks that the kind of a tokenizer is supported, and returns the function that converts its
/// tokens to bytes.
fn check_supported(
    inner: &tokenizers::Tokenizer,
    bytes: &[u8],
) -> Result<fn(&str) -> Vec<u8>, TextError> {
    let ModelWrapper::BPE(model) = inner.get_model() else {
        return Err(TextError::Tokenizer(
            "tokenizer.json is not BPE; only byte-level BPE and SentencePiece BPE are supported"
                .into(),
        ));
    };
    let to_bytes: fn(&str) -> Vec<u8> =
        if matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            alphabet::token_to_bytes
        } else if model.byte_fallback {
            let file = serde_json::from_slice(bytes).map_err(|error| {
                TextError::Tokenizer(format!("tokenizer.json cannot be parsed: {error}"))
            })?;
            sentencepiece::check_supported(&file)?;
            sentencepiece::token_to_bytes
        } else {
            return Err(TextError::Tokenizer(
                "tokenizer.json is neither byte-level BPE (its decoder is not ByteLevel) nor \
             SentencePiece BPE with byte fallback (its model has no byte_fallback)"
                    .into(),
            ));
        };
    if model.dropout.is_some_and(|p| p > 0.0) {
        return Err(TextError::Tokenizer(
            "tokenizer.json has BPE dropout, so texts have no fixed ids; set \"dropout\" to null"
                .into(),
        ));
    }
    if let Some(unknown) = model.get_unk_token()
        && !inner.get_vocab(false).contains_key(unknown)
    {
        return Err(TextError::Tokenizer(format!(
            "the unknown token {unknown:?} of tokenizer.json is not in its vocabulary; is the \
             file damaged?"
        )));
    }
    Ok(to_bytes)
}

/// Checks the ids of added tokens. The library derives them from their order, and silently
/// renumbers them if the file disagrees.
fn check_ids(inner: &tokenizers::Tokenizer, bytes: &[u8]) -> Result<(), TextError> {
    let added = added_tokens(bytes).map_err(|error| {
        TextError::Tokenizer(format!("tokenizer.json cannot be parsed: {error}"))
    })?;
    for AddedToken { id, content, .. } in added {
        let found = inner.token_to_id(&content);
        if found.is_some_and(|found| found != id) {
            return Err(TextError::Tokenizer(format!(
                "tokenizer.json gives the added token {content:?} the id {id}, but its position in \
                 the vocabulary gives it {found:?}; the ids of added tokens must follow the \
                 vocabulary without gaps"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;

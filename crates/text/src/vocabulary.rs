//! Provides a tokenizer's tokens to a sampler: their bytes, for stop strings, and grammars over
//! them.
//!
//! Grammars are compiled by llguidance. A completion may be split into tokens in any way: only its
//! text is constrained. Special tokens are not text; only a Lark grammar can request them, by their
//! names.

use std::sync::{Arc, LazyLock, OnceLock};
use std::thread;

use levade_policy::{
    AllowedTokens, Constraint, Grammar, Grammars, PolicyError, TokenBytes, TokenSet, catch_panic,
};
use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::Tokenizer;

/// Maximum length of a grammar's source text, in bytes.
const MAX_GRAMMAR_BYTES: usize = 256 << 10;
/// Maximum number of consecutive negations of one term in a grammar.
const MAX_NEGATIONS: usize = 100;
/// Stack size of the thread that recurses over a grammar, in bytes. The longest allowed grammar
/// needs less. Only the used part occupies memory.
const STACK: usize = 512 << 20;
/// Maximum length of a token that a grammar can allow, in bytes. Longer tokens are not text that a
/// model writes.
const MAX_TOKEN_LEN: usize = 1000;
/// Maximum number of lexer states of a grammar per completion, each of 1 or 2 KB. Typical schemas
/// need hundreds.
const MAX_STATES: usize = 50_000;
/// Name of an additional last token that marks the end of a completion. No grammar can request it,
/// because names of special tokens in grammars contain no spaces.
const END: &str = "<|end of the grammar|>";

/// The tokens of a tokenizer, prepared for grammar-constrained sampling.
pub struct Vocabulary {
    /// Bytes of each token by id; `None` for special tokens and unused ids.
    bytes: Vec<Option<Vec<u8>>>,
    specials: Vec<(u32, String)>,
    /// Parser factory for grammars, created for the first grammar. Creation takes about as long as
    /// sampling one token.
    factory: OnceLock<Result<ParserFactory, String>>,
}

impl Vocabulary {
    /// Creates the vocabulary of a tokenizer.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        let ids = 0..tokenizer.vocabulary() as u32;
        Vocabulary {
            bytes: ids.map(|id| tokenizer.token_bytes(id).map(<[u8]>::to_vec)).collect(),
            specials: tokenizer.specials().map(|(id, name)| (id, name.to_owned())).collect(),
            factory: OnceLock::new(),
        }
    }

    /// Returns the largest token id plus one. llguidance uses it as the id of the end token.
    fn end_token_id(&self) -> u32 {
        self.bytes.len() as u32
    }

    fn factory(&self) -> Result<&ParserFactory, PolicyError> {
        let factory = self.factory.get_or_init(|| {
            catch_panic(|| self.make_factory())
                .unwrap_or_else(|panic| Err(format!("llguidance panicked: {panic:?}")))
        });
        factory.as_ref().map_err(|reason| {
            PolicyError::Invalid(format!(
                "grammars do not work with this model's tokenizer: {reason}"
            ))
        })
    }

    fn make_factory(&self) -> Result<ParserFactory, String> {
        // A text never contains the byte that marks special tokens.
        let is_text = |bytes: &&[u8]| {
            !bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER) && bytes.len() <= MAX_TOKEN_LEN
        };
        let mut words: Vec<Vec<u8>> = self
            .bytes
            .iter()
            .map(|bytes| bytes.as_deref().filter(is_text).unwrap_or_default().to_vec())
            .collect();
        for (id, name) in &self.specials {
            words[*id as usize] = special_word(name);
        }
        words.push(special_word(END));
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, self.end_token_id()), &words);
        // Not canonical, so that llguidance never requires one specific tokenization.
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .map_err(|error| flatten_error_message(&error.to_string()))?;
        let limits = factory.quiet().limits_mut();
        (limits.verbose_errors, limits.max_lexer_states) = (false, MAX_STATES);
        Ok(factory)
    }
}

fn special_word(name: &str) -> Vec<u8> {
    [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat()
}

impl TokenBytes for Vocabulary {
    fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.bytes.get(id as usize)?.as_deref()
    }
}

impl Grammars for Vocabulary {
    fn start(&self, grammar: &Grammar) -> Result<Box<dyn Constraint>, PolicyError> {
        let kind = grammar.kind();
        let wrong = |reason: &str| {
            PolicyError::Invalid(format!(
                "the {kind} cannot be compiled: {}",
                flatten_error_message(reason)
            ))
        };
        let parsed = convert_grammar(grammar).map_err(|reason| wrong(&reason))?;
        let factory = self.factory()?;
        let compiled = with_large_stack(|| {
            factory.create_parser(parsed).map_err(|error| format!("{error:#}"))
        });
        let matcher = Matcher::new(Ok(compiled
            .and_then(|parser| parser)
            .map_err(|reason| wrong(&reason))?));
        Ok(Box::new(GrammarConstraint { matcher, kind, end: self.end_token_id() }))
    }
}

/// Runs `work` on a thread with a stack for the recursion over a grammar, whose depth is the number
/// of its rules.
///
/// # Errors
/// Returns an error if the thread cannot be started, or if `work` panics.
pub(crate) fn with_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("grammar".into()).stack_size(STACK);
        let thread = thread.spawn_scoped(scope, work).map_err(|error| error.to_string())?;
        thread.join().map_err(|_| "llguidance panicked".into())
    })
}

/// Returns the reason why llguidance cannot compile a JSON schema, or `None` if it can. Needs the
/// stack of [`with_large_stack`].
pub(crate) fn compile_error(schema: &Value) -> Option<String> {
    /// A vocabulary of single bytes, with which a grammar compiles in less than a millisecond.
    static BYTES: LazyLock<Vocabulary> = LazyLock::new(|| Vocabulary {
        bytes: (0..=u8::MAX).map(|byte| Some(vec![byte])).collect(),
        specials: Vec::new(),
        factory: OnceLock::new(),
    });
    let factory = match BYTES.factory() {
        Ok(factory) => factory,
        Err(error) => return Some(error.to_string()),
    };
    let grammar = TopLevelGrammar::from_json_schema(schema.clone());
    match catch_panic(|| factory.create_parser(grammar)) {
        Ok(compiled) => compiled.err().map(|error| flatten_error_message(&format!("{error:#}"))),
        Err(panic) => Some(format!("llguidance panicked: {panic:?}")),
    }
}

/// Converts a grammar to llguidance's representation, or returns a message if the grammar is
/// invalid.
fn convert_grammar(grammar: &Grammar) -> Result<TopLevelGrammar, String> {
    if let Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) = grammar
        && text.len() > MAX_GRAMMAR_BYTES
    {
        return Err(format!(
            "the text has {} bytes; the maximum is {MAX_GRAMMAR_BYTES}",
            text.len()
        ));
    }
    Ok(match grammar {
        Grammar::JsonObject => TopLevelGrammar::from_json_schema(json!({"type": "object"})),
        Grammar::JsonSchema(text) => TopLevelGrammar::from_json_schema(
            serde_json::from_str(text)
                .map_err(|error| format!("the schema is not JSON: {error}"))?,
        ),
        Grammar::Regex(text) => TopLevelGrammar::from_regex(text),
        Grammar::Lark(text) => {
            if max_negations(text) > MAX_NEGATIONS {
                return Err(format!("the grammar negates a term more than {MAX_NEGATIONS} times"));
            }
            TopLevelGrammar::from_lark(text.clone())
        }
    })
}

/// Returns the largest number of consecutive negations in a grammar, which llguidance nests without
/// a limit.
fn max_negations(lark: &str) -> usize {
    let marks = lark.chars().filter(|c| !c.is_whitespace());
    let (_, max_run) = marks.fold((0, 0), |(row, max_run): (usize, usize), c| {
        let row = if c == '~' { row + 1 } else { 0 };
        (row, max_run.max(row))
    });
    max_run
}

/// Returns an error message of llguidance on one line, without the parser's state.
fn flatten_error_message(text: &str) -> String {
    let text = text.split("<backtrace>").next().unwrap_or_default().replace("<non-verbose/>", "");
    text.split_whitespace().collect::<Vec<&str>>().join(" ")
}

/// Constraint that restricts the tokens of one completion to a grammar.
struct GrammarConstraint {
    matcher: Matcher,
    kind: &'static str,
    end: u32,
}

impl GrammarConstraint {
    fn to_error(&self, error: &impl ToString) -> PolicyError {
        PolicyError::Invalid(format!(
            "the {} cannot constrain the completion any further: {}",
            self.kind,
            flatten_error_message(&error.to_string())
        ))
    }
}

impl Constraint for GrammarConstraint {
    fn allowed(&mut self) -> Result<AllowedTokens, PolicyError> {
        let mask = self.matcher.compute_mask_or_eos();
        let mut tokens = TokenSet::from_words(mask.map_err(|error| self.to_error(&error))?.into());
        let may_end = tokens.remove(self.end);
        // llguidance's id for trie nodes without a token.
        tokens.remove(self.end + 1);
        Ok(AllowedTokens { tokens, may_end })
    }

    fn push(&mut self, token: u32) -> Result<(), PolicyError> {
        self.matcher.consume_token(token).map_err(|error| self.to_error(&error))
    }
}

#[cfg(test)]
#[path = "vocabulary_tests.rs"]
mod tests;

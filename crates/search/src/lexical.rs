//! Ranks passages by BM25 over an inverted index (tantivy).
//!
//! Scores are Robertson and Zaragoza's BM25 with k₁ = 1.2 and b = 0.75, over title and text as one
//! field. The idf is Lucene's, which is never negative: ln(1 + (N − n + ½) / (n + ½)) for a term in
//! n of N passages. Passage lengths are rounded down to one of 256 values, which are exact up to 40
//! terms. The document number of a passage in the index is its row in the corpus. Passages with
//! equal scores are in the order of their rows.

use std::collections::BTreeMap;
use std::path::Path;

use levade_policy::catch_panic;
use serde::{Deserialize, Serialize};
use tantivy::collector::TopDocs;
use tantivy::indexer::NoMergePolicy;
use tantivy::query::{BooleanQuery, BoostQuery, Occur, Query, TermQuery};
use tantivy::schema::{
    FAST, Field, IndexRecordOption, STORED, Schema, TextFieldIndexing, TextOptions, Value,
};
use tantivy::tokenizer::{
    Language, LowerCaser, RemoveLongFilter, Stemmer, StopWordFilter, TextAnalyzer,
};
use tantivy::{
    DocAddress, Index, IndexReader, IndexWriter, ReloadPolicy, TantivyDocument, TantivyError, Term,
};

use crate::words::WordTokenizer;
use crate::{Passage, SearchError};

/// Name of the analyzer in stored inverted indices. It is a former name of the project.
const ANALYZER: &str = "dressage";
/// Memory for postings, in bytes. If it is full, the postings are written as a segment.
const WRITER_MEMORY: usize = 256 << 20;
/// Maximum length of a term, in bytes. Longer words are not indexed.
const MAX_TERM_BYTES: usize = 64;

/// Method of splitting a text into terms.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Analyzer {
    /// Splits a text into lower-case words without English stop words, stemmed by Porter's second
    /// algorithm.
    #[default]
    English,
    /// Splits a text into lower-case words.
    Plain,
}

impl Analyzer {
    /// Creates the analyzer for tantivy. If `divides` is true, each Han or Hiragana character is a
    /// separate word.
    fn build_analyzer(self, divides: bool) -> TextAnalyzer {
        let analyzer_builder = TextAnalyzer::builder(WordTokenizer::new(divides))
            .filter(RemoveLongFilter::limit(MAX_TERM_BYTES))
            .filter(LowerCaser);
        match (self, StopWordFilter::new(Language::English)) {
            (Analyzer::English, Some(stops)) => {
                analyzer_builder.filter(stops).filter(Stemmer::new(Language::English)).build()
            }
            _ => analyzer_builder.build(),
        }
    }

    /// Splits a text into terms, in the order of the text.
    pub fn terms(self, text: &str) -> Vec<String> {
        terms(&mut self.build_analyzer(true), text)
    }
}

fn terms(analyzer: &mut TextAnalyzer, text: &str) -> Vec<String> {
    let mut stream = analyzer.token_stream(text);
    let mut found = Vec::new();
    stream.process(&mut |token| found.push(token.text.clone()));
    found
}

/// Fields of a passage in the schema of the inverted index.
#[derive(Clone, Copy)]
struct PassageFields {
    id: Field,
    title: Field,
    text: Field,
    contents: Field,
    row: Field,
}

impl PassageFields {
    fn build_schema() -> (Schema, Self) {
        let mut schema = Schema::builder();
        let indexing = TextFieldIndexing::default()
            .set_tokenizer(ANALYZER)
            .set_index_option(IndexRecordOption::WithFreqs);
        let fields = PassageFields {
            id: schema.add_text_field("id", STORED),
            title: schema.add_text_field("title", STORED),
            text: schema.add_text_field("text", STORED),
            contents: schema
                .add_text_field("contents", TextOptions::default().set_indexing_options(indexing)),
            row: schema.add_u64_field("row", FAST),
        };
        (schema.build(), fields)
    }
}

/// Writes the passages of a corpus to an inverted index.
pub struct LexicalWriter {
    writer: IndexWriter,
    fields: PassageFields,
    rows: u64,
}

impl LexicalWriter {
    /// Creates an inverted index in `dir`, which must be empty.
    ///
    /// # Errors
    /// Returns an error if the index cannot be created.
    pub fn create(dir: &Path, analyzer: Analyzer) -> Result<Self, SearchError> {
        let to_error = to_search_error(dir);
        let (schema, fields) = PassageFields::build_schema();
        let index = Index::create_in_dir(dir, schema).map_err(&to_error)?;
        index.tokenizers().register(ANALYZER, analyzer.build_analyzer(true));
        // With one thread, each segment is a range of rows in order.
        let writer: IndexWriter =
            index.writer_with_num_threads(1, WRITER_MEMORY).map_err(&to_error)?;
        writer.set_merge_policy(Box::new(NoMergePolicy));
        Ok(LexicalWriter { writer, fields, rows: 0 })
    }

    /// Adds a passage, which becomes the next row.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written.
    pub fn add(&mut self, passage: &Passage) -> Result<(), TantivyError> {
        let mut document = TantivyDocument::default();
        document.add_text(self.fields.id, &passage.id);
        document.add_text(self.fields.title, &passage.title);
        document.add_text(self.fields.text, &passage.text);
        document.add_text(self.fields.contents, passage.contents());
        document.add_u64(self.fields.row, self.rows);
        self.writer.add_document(document)?;
        self.rows += 1;
        Ok(())
    }

    /// Writes the remaining passages to the index, and merges all segments into one.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written.
    pub fn finish(mut self) -> Result<(), TantivyError> {
        self.writer.commit()?;
        let index = self.writer.index().clone();
        let searcher = open_reader(&index)?.searcher();
        let mut segments = Vec::new();
        for segment in searcher.segment_readers() {
            let first = segment.fast_fields().u64("row")?.first(0);
            segments.push((first, segment.segment_id()));
        }
        drop(searcher);
        segments.sort();
        if segments.len() > 1 {
            let ids: Vec<_> = segments.into_iter().map(|(_, id)| id).collect();
            self.writer.merge(&ids).wait()?;
        }
        self.writer.garbage_collect_files().wait()?;
        self.writer.wait_merging_threads()
    }
}

fn open_reader(index: &Index) -> Result<IndexReader, TantivyError> {
    index.reader_builder().reload_policy(ReloadPolicy::Manual).try_into()
}

/// An inverted index that is open for searching.
pub struct LexicalIndex {
    reader: IndexReader,
    analyzer: TextAnalyzer,
    fields: PassageFields,
    dir: std::path::PathBuf,
}

impl LexicalIndex {
    /// Opens the inverted index in `dir`. `divides` states whether its analyzer made each Han or
    /// Hiragana character a separate word.
    ///
    /// # Errors
    /// Returns an error if a file is missing or damaged, or the number of passages is not
    /// `passages`.
    pub fn open(
        dir: &Path,
        analyzer: Analyzer,
        divides: bool,
        passages: u64,
    ) -> Result<Self, SearchError> {
        let analyzer = analyzer.build_analyzer(divides);
        let to_error = to_search_error(dir);
        let opened = catch_panic(|| {
            let index = Index::open_in_dir(dir)?;
            index.tokenizers().register(ANALYZER, analyzer.clone());
            Ok((index.schema(), open_reader(&index)?))
        });
        let (schema, reader) =
            opened.map_err(|panic| SearchError::damaged_error(dir, panic))?.map_err(&to_error)?;
        let (wanted, fields) = PassageFields::build_schema();
        let (rows, segments) = {
            let searcher = reader.searcher();
            (searcher.num_docs(), searcher.segment_readers().len())
        };
        if schema != wanted || rows != passages || segments != 1 {
            let why = format!(
                "it has {rows} passages in {segments} segments, but the index has {passages} in 1"
            );
            return Err(SearchError::damaged_error(dir, why));
        }
        Ok(LexicalIndex { reader, analyzer, fields, dir: dir.to_owned() })
    }

    /// Returns the rows and BM25 scores of the `count` best passages for `text`, the best first. A
    /// term that occurs n times in `text` has weight n. If `text` contains no terms, the result is
    /// empty.
    ///
    /// # Errors
    /// Returns an error if the index is damaged.
    pub fn search(&self, text: &str, count: usize) -> Result<Vec<(u32, f32)>, SearchError> {
        let mut weights: BTreeMap<String, u32> = BTreeMap::new();
        for term in terms(&mut self.analyzer.clone(), text) {
            *weights.entry(term).or_default() += 1;
        }
        if weights.is_empty() || count == 0 {
            return Ok(Vec::new());
        }
        let clauses = weights.into_iter().map(|(term, weight)| {
            let term = Term::from_field_text(self.fields.contents, &term);
            let term_query: Box<dyn Query> =
                Box::new(TermQuery::new(term, IndexRecordOption::WithFreqs));
            let query = if weight == 1 {
                term_query
            } else {
                Box::new(BoostQuery::new(term_query, weight as f32))
            };
            (Occur::Should, query)
        });
        let query = BooleanQuery::new(clauses.collect());
        let found = catch_panic(|| {
            self.reader.searcher().search(&query, &TopDocs::with_limit(count).order_by_score())
        });
        let found = found.map_err(|panic| SearchError::damaged_error(&self.dir, panic))?;
        let found = found.map_err(to_search_error(&self.dir))?;
        Ok(found.into_iter().map(|(score, address)| (address.doc_id, score)).collect())
    }

    /// Loads the passage in row `row`.
    ///
    /// # Errors
    /// Returns an error if the row does not exist, or the index is damaged.
    pub fn read_passage(&self, row: u32) -> Result<Passage, SearchError> {
        let found =
            catch_panic(|| self.reader.searcher().doc::<TantivyDocument>(DocAddress::new(0, row)));
        let found = found.map_err(|panic| SearchError::damaged_error(&self.dir, panic))?;
        let document = found.map_err(to_search_error(&self.dir))?;
        let text = |field| {
            let value =
                document.get_first(field).and_then(|value| value.as_str().map(str::to_owned));
            value.ok_or_else(|| {
                SearchError::damaged_error(
                    &self.dir,
                    format!("passage {row} of the index lacks a field"),
                )
            })
        };
        Ok(Passage {
            id: text(self.fields.id)?,
            title: text(self.fields.title)?,
            text: text(self.fields.text)?,
        })
    }
}

/// Returns a function that converts an error of tantivy for the inverted index in `dir`.
pub(crate) fn to_search_error(dir: &Path) -> impl Fn(TantivyError) -> SearchError + use<> {
    let dir = dir.to_owned();
    move |error| match error {
        TantivyError::IoError(cause) => SearchError::Io {
            action: "use",
            path: dir.clone(),
            cause: std::io::Error::new(cause.kind(), cause.to_string()),
        },
        other => SearchError::damaged_error(&dir, other.to_string()),
    }
}

#[cfg(test)]
#[path = "lexical_tests.rs"]
mod tests;

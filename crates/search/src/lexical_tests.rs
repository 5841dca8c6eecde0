use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::testing::{make, passage, try_make};

/// Rounds a passage length as the index does: exact up to 40, then down to a table whose steps
/// double every eight entries.
fn rounded_length(length: u32) -> f64 {
    f64::from(tantivy::fieldnorm::FieldNormReader::id_to_fieldnorm(
        tantivy::fieldnorm::FieldNormReader::fieldnorm_to_id(length),
    ))
}

/// Computes BM25 scores in f64, directly by the formula.
fn naive_scores(passages: &[Passage], query: &str, analyzer: Analyzer) -> Vec<f64> {
    let k = 1.2;
    let b = 0.75;
    let terms: Vec<Vec<String>> =
        passages.iter().map(|passage| analyzer.terms(&passage.contents())).collect();
    let total: usize = terms.iter().map(Vec::len).sum();
    let count = terms.len() as f64;
    let average = total as f64 / count;
    terms
        .iter()
        .map(|own| {
            let mut sum = 0.0;
            for term in analyzer.terms(query) {
                let frequency = own.iter().filter(|other| **other == term).count() as f64;
                let having = terms.iter().filter(|all| all.contains(&term)).count() as f64;
                let idf = (1.0 + (count - having + 0.5) / (having + 0.5)).ln();
                let length = rounded_length(own.len() as u32);
                sum += idf * frequency * (k + 1.0)
                    / (frequency + k * (1.0 - b + b * length / average));
            }
            sum
        })
        .collect()
}

fn corpus() -> impl Strategy<Value = Vec<Passage>> {
    // Few distinct words, so that passages share some. Short and long passages, so that lengths are
    // rounded.
    let row = ("[a-d ]{0,6}", prop::collection::vec("[abcdefgh]{1,2}", 1..120));
    prop::collection::vec(row, 1..25).prop_map(|rows| {
        rows.into_iter()
            .enumerate()
            .map(|(at, (title, words))| passage(&at.to_string(), title.trim(), &words.join(" ")))
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn bm25_matches_formula_in_f64(
        passages in corpus(),
        query in prop::collection::vec("[abcdefgh]{1,2}", 0..6),
    ) {
        let made = try_make(&passages, Analyzer::Plain, false).unwrap();
        let index = crate::Index::open(&made.index, true).unwrap();
        let query = query.join(" ");
        let expected = naive_scores(&passages, &query, Analyzer::Plain);
        let found = index.bm25(&[query], passages.len(), 1).unwrap().remove(0);
        let matching = expected.iter().filter(|score| **score > 0.0).count();
        prop_assert_eq!(found.len(), matching);
        for (row, score) in &found {
            let exact = expected[*row as usize];
            prop_assert!((f64::from(*score) - exact).abs() <= 1e-5 * exact, "row {}: {} \
                                                                             {}", row, score, exact);
        }
        for pair in found.windows(2) {
            prop_assert!(pair[0].1 > pair[1].1 || (pair[0].1 == pair[1].1 && pair[0].0 < pair[1].0));
        }
    }

    #[test]
    fn stored_passages_round_trip(
        rows in prop::collection::vec(("\\PC{0,12}", "[\\PC\n\"]{0,40}"), 1..12),
    ) {
        let passages: Vec<Passage> = rows
            .into_iter()
            .enumerate()
            .map(|(at, (title, text))| passage(&format!("ü{at}"), &title, &format!("{text}.")))
            .collect();
        let (_made, index) = make(&passages, false);
        let rows: Vec<(u32, f32)> = (0..passages.len() as u32).map(|row| (row, 0.0)).collect();
        let found: Vec<Passage> =
            index.hits(&rows).unwrap().into_iter().map(|hit| hit.passage).collect();
        prop_assert_eq!(found, passages);
    }
}

#[test]
fn analyzer_name_matches_stored_indices() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = LexicalWriter::create(dir.path(), Analyzer::Plain).unwrap();
    writer.add(&passage("a", "", "words")).unwrap();
    writer.finish().unwrap();
    let schema = std::fs::read_to_string(dir.path().join("meta.json")).unwrap();
    assert!(schema.contains(r#""tokenizer": "dressage""#), "{schema}");
}

#[test]
fn english_analyzer_stems_and_drops_stop_words() {
    assert_eq!(Analyzer::English.terms("The Movies were released"), ["movi", "were", "releas"]);
    assert_eq!(Analyzer::Plain.terms("The Movies, RELEASED"), ["the", "movies", "released"]);
    let counts: BTreeMap<_, _> =
        [("when is it", 0), ("", 0), ("!?", 0), ("release of the movie", 1)].into_iter().collect();
    let (_made, index) =
        make(&[passage("a", "Deadpool 2", "It releases in May."), passage("b", "", "x")], false);
    for (query, wanted) in counts {
        assert_eq!(index.bm25(&[query.into()], 5, 1).unwrap()[0].len(), wanted, "{query:?}");
    }
}

#[test]
fn merged_segments_preserve_row_order() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = LexicalWriter::create(dir.path(), Analyzer::Plain).unwrap();
    for row in 0..50 {
        writer.add(&passage(&row.to_string(), "", "same words")).unwrap();
        if row % 7 == 0 {
            // Writes a segment, as the writer does when its memory is full.
            writer.writer.commit().unwrap();
        }
    }
    writer.finish().unwrap();
    let lexical = LexicalIndex::open(dir.path(), Analyzer::Plain, true, 50).unwrap();
    let rows: Vec<u32> = lexical.search("words", 50).unwrap().iter().map(|(row, _)| *row).collect();
    assert_eq!(rows, (0..50).collect::<Vec<u32>>());
    assert_eq!(lexical.read_passage(33).unwrap().id, "33");
    assert!(lexical.read_passage(50).is_err());
    let other =
        LexicalIndex::open(dir.path(), Analyzer::Plain, true, 51).err().unwrap().to_string();
    assert!(
        other.contains("it has 50 passages in 1 segments, but the index has 51 in 1"),
        "{other}"
    );
}

//! Converts batches, sequences and updates to arrays.

use levade_policy::UpdateSequences;
use levade_tree::{SequenceInput, Term, Tokens, TreeBatch};

use super::wire::Body;

/// Writes a merged batch into a request body. Token k is visible to a later token q if q <
/// `subtree_end`\[k\].
pub(super) fn put_batch(body: &mut Body, batch: &TreeBatch) {
    // Descendants follow their node, so iterate backward to know their ends first.
    let mut ends: Vec<u32> = batch.nodes.iter().map(|node| node.start + node.len).collect();
    for (index, node) in batch.nodes.iter().enumerate().rev() {
        if let Some(parent) = node.parent {
            ends[parent as usize] = ends[parent as usize].max(ends[index]);
        }
    }
    let nodes = 0..batch.nodes.len();
    body.put_integers("tokens", batch.tokens.iter().copied());
    body.put_integers(
        "position",
        nodes.clone().flat_map(|i| (0..batch.nodes[i].len).map(move |k| batch.nodes[i].depth + k)),
    );
    body.put_integers(
        "subtree_end",
        nodes.flat_map(|i| std::iter::repeat_n(ends[i], batch.nodes[i].len as usize)),
    );
    let targets = || batch.targets.iter();
    body.put_integers("target_token", targets().map(|target| target.token));
    body.put_integers("predictor", targets().map(|target| target.predictor));
    body.put_numbers("temperature", targets().map(|target| target.temperature));
    body.put_integers("first_term", targets().map(|target| target.first_term));
    body.put_integers("terms", targets().map(|target| target.terms));
    body.put_integers("path", batch.terms.iter().map(|term| term.sequence));
    put_terms(body, &batch.terms);
}

/// Writes the sequences of an update into a request body, each with its targets, in the same order.
pub(super) fn put_paths(body: &mut Body, paths: &[SequenceInput]) {
    put_tokens(body, paths.iter().map(|path| &path.tokens));
    body.put_integers("path_targets", paths.iter().map(|path| path.targets.len() as i64));
    let targets = || paths.iter().flat_map(|path| &path.targets);
    body.put_integers("index", targets().map(|target| target.index));
    body.put_numbers("temperature", targets().map(|target| target.temperature));
    put_terms(body, &targets().map(|target| target.term).collect::<Vec<Term>>());
}

/// Writes an update that still needs a micro-batch plan into a request body.
pub(super) fn put_update_sequences(body: &mut Body, update: &UpdateSequences) {
    put_tokens(body, update.groups.iter().flatten());
    body.put_integers("group_len", update.groups.iter().map(|group| group.len() as i64));
}

fn put_tokens<'a>(body: &mut Body, paths: impl Iterator<Item = &'a Tokens> + Clone) {
    body.put_integers("path_tokens", paths.clone().flat_map(Tokens::iter));
    body.put_integers("path_len", paths.map(|tokens| tokens.len() as i64));
}

fn put_terms(body: &mut Body, terms: &[Term]) {
    let mut optional = |name: &str, of: fn(&Term) -> Option<f32>| {
        body.put_numbers(name, terms.iter().map(|term| of(term).unwrap_or(f32::NAN)));
    };
    optional("value", |term| term.value);
    optional("behaviour", |term| term.behavior);
    optional("proximal", |term| term.proximal);
    optional("reference", |term| term.reference);
    optional("path_log_ratio", |term| term.sequence_log_ratio);
    optional("correction", |term| term.correction);
    body.put_numbers("weight", terms.iter().map(|term| term.weight));
    body.put_numbers("advantage", terms.iter().map(|term| term.advantage));
    body.put_numbers("returns", terms.iter().map(|term| term.returns));
    body.put_flags("marked", terms.iter().map(|term| term.selected));
    body.put_integers("age", terms.iter().map(|term| term.age));
    body.put_integers(
        "version",
        terms.iter().map(|term| i64::try_from(term.version).unwrap_or(i64::MAX)),
    );
}

#[cfg(test)]
pub(super) mod decode {
    //! The inverse conversions, for the learner of the tests.

    use levade_tree::{Node, SequenceTarget, Target};

    use super::*;

    fn take_terms(body: &mut Body, paths: &[u32]) -> Result<Vec<Term>, String> {
        let mut all = |name: &str| body.take_all(name);
        let names = ["value", "behaviour", "proximal", "reference", "path_log_ratio", "correction"];
        let [value, behavior, proximal, reference, path_log_ratio, correction] =
            names.map(&mut all);
        let [weight, advantage, returns] = ["weight", "advantage", "returns"].map(&mut all);
        let marked = body.take_flags("marked")?;
        let age = body.take_integers("age")?;
        let version = body.take_integers("version")?;
        (0..paths.len())
            .map(|i: usize| {
                Ok(Term {
                    sequence: paths[i],
                    weight: weight.clone()?[i],
                    advantage: advantage.clone()?[i],
                    returns: returns.clone()?[i],
                    value: optional_value(&value, i)?,
                    behavior: optional_value(&behavior, i)?,
                    proximal: optional_value(&proximal, i)?,
                    reference: optional_value(&reference, i)?,
                    sequence_log_ratio: optional_value(&path_log_ratio, i)?,
                    selected: marked[i],
                    correction: optional_value(&correction, i)?,
                    age: age[i],
                    version: version[i],
                })
            })
            .collect()
    }

    fn optional_value(values: &Result<Vec<f32>, String>, i: usize) -> Result<Option<f32>, String> {
        Ok(Some(values.clone()?[i]).filter(|value| !value.is_nan()))
    }

    /// Reads a merged batch from a request body. The batch is equivalent to the written batch, but
    /// its nodes may be longer, because a node with a single child cannot be distinguished from a
    /// node that contains both.
    pub fn batch(body: &mut Body) -> Result<TreeBatch, String> {
        let tokens: Vec<u32> = body.take_integers("tokens")?;
        let position: Vec<u32> = body.take_integers("position")?;
        let subtree_end: Vec<u32> = body.take_integers("subtree_end")?;
        let mut nodes: Vec<Node> = Vec::new();
        for k in 0..tokens.len() as u32 {
            let end = |k: u32| subtree_end[k as usize];
            if k > 0 && k < end(k - 1) && end(k) == end(k - 1) {
                nodes.last_mut().unwrap().len += 1;
                continue;
            }
            let parent = (0..nodes.len() as u32).rev().find(|&i| end(nodes[i as usize].start) > k);
            nodes.push(Node { parent, start: k, len: 1, depth: position[k as usize] });
        }
        let [target_token, predictor, first_term, counts] =
            ["target_token", "predictor", "first_term", "terms"]
                .map(|name| body.take_integers::<u32>(name));
        let target_token = target_token?;
        let predictor = predictor?;
        let first_term = first_term?;
        let counts = counts?;
        let temperature = body.take_all("temperature")?;
        let targets = (0..target_token.len())
            .map(|i: usize| Target {
                token: target_token[i],
                predictor: predictor[i],
                temperature: temperature[i],
                first_term: first_term[i],
                terms: counts[i],
            })
            .collect();
        let paths: Vec<u32> = body.take_integers("path")?;
        let terms = take_terms(body, &paths)?;
        let batch = TreeBatch { tokens, nodes, targets, terms, ..TreeBatch::default() };
        batch.check().map_err(|error| error.to_string())?;
        Ok(batch)
    }

    fn take_tokens(body: &mut Body) -> Result<Vec<Tokens>, String> {
        let tokens: Vec<u32> = body.take_integers("path_tokens")?;
        let mut rest = &tokens[..];
        let lengths: Vec<usize> = body.take_integers("path_len")?;
        Ok(lengths
            .into_iter()
            .map(|len: usize| {
                let (path, after) = rest.split_at(len);
                rest = after;
                Tokens::from(path.to_vec())
            })
            .collect())
    }

    /// Reads the sequences of an update from a request body.
    pub fn paths(body: &mut Body) -> Result<Vec<SequenceInput>, String> {
        let tokens = take_tokens(body)?;
        let counts: Vec<usize> = body.take_integers("path_targets")?;
        let index = body.take_integers("index")?;
        let temperature = body.take_all("temperature")?;
        let terms = take_terms(body, &vec![0; index.len()])?;
        let mut at = 0;
        Ok(tokens
            .into_iter()
            .zip(counts)
            .map(|(tokens, count)| {
                let of_path = at..at + count;
                at += count;
                SequenceInput {
                    tokens,
                    targets: of_path
                        .map(|i: usize| SequenceTarget {
                            index: index[i],
                            temperature: temperature[i],
                            term: terms[i],
                        })
                        .collect(),
                }
            })
            .collect())
    }

    /// Reads an update that still needs a micro-batch plan from a request body.
    pub fn update_sequences(body: &mut Body) -> Result<UpdateSequences, String> {
        let mut tokens = take_tokens(body)?.into_iter();
        let groups: Vec<usize> = body.take_integers("group_len")?;
        let groups = groups.into_iter().map(|len| tokens.by_ref().take(len).collect()).collect();
        Ok(UpdateSequences { groups, micro_batch_tokens: body.take("micro_batch_tokens")? })
    }
}

#[cfg(test)]
mod tests {
    use levade_tree::SequenceTarget;

    use super::*;

    fn path(tokens: &[u32], targets: &[u32]) -> SequenceInput {
        SequenceInput {
            tokens: tokens.to_vec().into(),
            targets: targets
                .iter()
                .map(|&index| SequenceTarget {
                    index,
                    temperature: 0.5 + index as f32,
                    term: Term {
                        weight: 0.25,
                        advantage: -1.5,
                        behavior: (index % 2 == 0).then_some(-0.5),
                        reference: Some(-0.75),
                        selected: index == 2,
                        age: index,
                        version: 7,
                        ..Term::default()
                    },
                })
                .collect(),
        }
    }

    fn written(put: impl Fn(&mut Body)) -> Body {
        let mut body = Body::new(serde_json::json!({ "micro_batch_tokens": 9 }));
        put(&mut body);
        Body::read(&body.to_bytes().unwrap()).unwrap()
    }

    /// The golden tree: `subtree_end` must agree with the ancestry of nodes.
    #[test]
    fn subtree_end_encodes_token_visibility() {
        let paths = [
            path(&[1, 2, 3, 4, 5], &[2, 3]),
            path(&[1, 2, 3, 6, 7, 8], &[2, 5]),
            path(&[1, 2, 9], &[2]),
            path(&[1, 2], &[1]),
            path(&[11, 12], &[1]),
        ];
        let batch = TreeBatch::merge(&paths).unwrap();
        let mut body = written(|body| put_batch(body, &batch));
        let ends: Vec<usize> = body.clone().take_integers("subtree_end").unwrap();
        let positions: Vec<usize> = body.clone().take_integers("position").unwrap();
        assert_eq!(positions, [0, 1, 2, 3, 4, 3, 4, 5, 2, 0, 1]);
        let node_of = |k: usize| batch.nodes.partition_point(|node| node.start as usize <= k) - 1;
        for q in 0..batch.tokens.len() {
            let above = batch.ancestry(node_of(q) as u32);
            for (k, end) in ends.iter().enumerate() {
                let seen = k <= q && above.contains(&(node_of(k) as u32));
                assert_eq!(k <= q && q < *end, seen, "{k} by {q}");
            }
        }
        let read = decode::batch(&mut body).unwrap();
        assert_eq!(
            (&read.tokens, &read.targets, &read.terms),
            (&batch.tokens, &batch.targets, &batch.terms)
        );
    }

    #[test]
    fn updates_round_trip_through_arrays() {
        let paths = vec![path(&[1, 2, 3], &[1, 2]), path(&[4], &[]), path(&[1, 2, 3, 4], &[3])];
        assert_eq!(decode::paths(&mut written(|body| put_paths(body, &paths))).unwrap(), paths);
        let tokens = |path: &SequenceInput| path.tokens.clone();
        let groups = vec![
            paths[..2].iter().map(tokens).collect(),
            Vec::new(),
            vec![paths[2].tokens.clone()],
        ];
        let update = UpdateSequences { groups, micro_batch_tokens: 9 };
        assert_eq!(
            decode::update_sequences(&mut written(|body| put_update_sequences(body, &update)))
                .unwrap(),
            update
        );
    }
}

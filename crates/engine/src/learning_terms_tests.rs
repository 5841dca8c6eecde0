//! Tests of predictions and of the terms of a loss.

use super::*;

#[test]
fn predictions_match_f64_reference() {
    for config in family_configs() {
        let model = model(&config, 2);
        let mut learning = TrainingState::new(&model, TrainingLimits::NONE);
        let reference = ReferenceModel::new(&model.weights);
        let sequences = test_sequences(config.vocabulary);
        for sequence in &sequences {
            let separate = TreeBatch::merge(std::slice::from_ref(sequence)).unwrap();
            let found = learning.predictions(&model, None, &separate).unwrap();
            let logits = reference.logits(&sequence.tokens.to_vec());
            for (i, target) in sequence.targets.iter().enumerate() {
                let index = target.index as usize;
                let temperature = f64::from(target.temperature);
                let entropy = ReferenceModel::entropy(&logits, index, temperature);
                assert!(
                    (f64::from(found.entropies[i]) - entropy).abs() < 1e-4,
                    "{} {entropy}",
                    found.entropies[i]
                );
                let z: Vec<f64> =
                    logits[index - 1].iter().map(|z| (z / temperature).exp()).collect();
                let sum: f64 = z.iter().sum();
                let squares: f64 = z.iter().map(|z| (z / sum).powi(2)).sum();
                let concentration = f64::from(found.concentrations[i]);
                assert!((concentration / squares - 1.0).abs() < 1e-4, "{concentration} {squares}");
            }
        }
        let batch = TreeBatch::merge(&sequences).unwrap();
        let merged = learning.predictions(&model, None, &batch).unwrap();
        assert_eq!(merged.logprobs, learning.logprobs(&model, None, &batch).unwrap());
        let mut parts = TrainingState::new(&model, TrainingLimits { rows: 13, kept: 1 });
        assert_eq!(parts.predictions(&model, None, &batch).unwrap(), merged);
    }
}

/// Returns losses of every kind whose terms need only what [`test_sequences`] sets.
fn every_loss() -> Vec<Loss> {
    let trust = levade_rl::TrustRegion::default();
    let policies = [
        PolicyLoss::Reinforce,
        PolicyLoss::ImportanceSampling,
        PolicyLoss::Clip { low: 0.2, high: 0.2, dual: None, trust: Some(trust), keep: None },
        PolicyLoss::MiniRl { low: 0.2, high: 0.3, trust },
        PolicyLoss::Cispo { low: 1.0, high: 0.28 },
        PolicyLoss::SoftGate { positive: 1.0, negative: 1.05 },
        PolicyLoss::Direct { beta: 0.1 },
        PolicyLoss::KlCov { coefficient: 1.0, fraction: 0.1 },
        PolicyLoss::ClipCov { low: 0.2, high: 0.2, fraction: 0.1, lower: 1.0, upper: 5.0 },
    ];
    policies.map(Loss::new).into_iter().chain(losses()).collect()
}

#[test]
fn loss_terms_sum_to_loss_bitwise() {
    let config = tiny_config();
    let model = model(&config, 2);
    let mut sequences = test_sequences(config.vocabulary);
    // Some terms have weight 0, some have a correction, and some are stale.
    for (index, target) in
        sequences.iter_mut().flat_map(|sequence| &mut sequence.targets).enumerate()
    {
        let term = &mut target.term;
        term.weight = if index % 7 == 0 { 0.0 } else { term.weight };
        term.correction = (index % 3 == 0).then_some(0.75);
        (term.age, term.selected) = (index as u32 % 2, index % 5 == 0);
    }
    let batch = TreeBatch::merge(&sequences).unwrap();
    for loss in every_loss() {
        // As one unit, and in several.
        for rows in [usize::MAX, 24] {
            let mut learning =
                TrainingState::new(&model, TrainingLimits { rows, ..TrainingLimits::NONE });
            let mut terms = LossTerms::default();
            let sums = learning
                .forward_backward_terms(&model, None, &batch, &loss, Some(&mut terms))
                .unwrap();
            assert_eq!(terms.total(&batch).to_bits(), sums.loss.to_bits(), "{loss:?}, {rows} rows");
            assert_eq!(terms.units.len() > 1, rows == 24);
            let found: usize = terms.units.iter().flatten().map(|row| row.terms.len()).sum();
            assert_eq!(found, batch.terms.len());
            let mut separate =
                TrainingState::new(&model, TrainingLimits { rows, ..TrainingLimits::NONE });
            let plain = separate.forward_backward(&model, None, &batch, &loss).unwrap();
            assert_eq!(plain, sums);
        }
    }
}

//! Implements `levade inspect --terms`, which shows the loss of each trained token with its values.

use std::fmt::Write as _;
use std::path::Path;

use levade_agent::environments::Environments;
use levade_policy::process_time::Clock;
use levade_run::dir::RunDir;
use levade_run::policies::{self, StartedPolicies};
use levade_store::Attempt;
use levade_text::Tokenizer;
use levade_trainer::{PolicyTerms, TokenTerm, terms};
use serde_json::{Value, json};

use crate::failure::unusable;
use crate::host;
use crate::watch::Watch;

/// Computes the loss terms of an attempt by replaying the step that trained on the attempt. Returns
/// the terms as text, or as one line of JSON per token if `as_json` is true. If `token` is set,
/// only the token at this index of each sequence is included.
///
/// # Errors
/// Returns an error if the recipe has a remote learner, the step cannot be replayed, or the step
/// trained on no selected token.
pub async fn format_terms(
    dir: &Path,
    attempt: &Attempt,
    step: u32,
    tokenizer: &Tokenizer,
    (token, as_json): (Option<u32>, bool),
) -> anyhow::Result<String> {
    let run = RunDir::open(dir)?;
    let mut recipe = run.recipe()?;
    let started_at = run.started()?;
    recipe.run.folder = std::path::absolute(dir)?;
    if recipe.cluster.learner.is_some() {
        return Err(unusable(
            "--terms replays a step on the embedded engine, which is not possible because this run \
             has an external learner; without --terms, the recorded tokens are shown"
                .to_owned(),
        ));
    }
    let mut trained = recipe.clone();
    trained.cluster.samplers = None;
    let host = host::create_host()?;
    let StartedPolicies { policies, .. } =
        policies::start(&trained, started_at, &Environments::default(), &host, &mut Vec::new())
            .await?;
    let mut watch = Watch::new(Clock::default());
    let phase = attempt.slot.phase;
    let found = terms(&recipe, dir, policies, (phase, step), &mut watch).await?;
    watch.clear();
    let mut text = String::new();
    for policy in &found {
        let tokens = policy.tokens_of(attempt.id);
        let selected =
            tokens.iter().filter(|(_, term)| token.is_none_or(|token| term.index == token));
        let mut selected = selected.peekable();
        if selected.peek().is_none() {
            continue;
        }
        if !as_json {
            write_heading(&mut text, policy, (phase, step));
        }
        for (loss, term) in selected {
            let shown = tokenizer.decode_with_special(&[term.token]);
            if as_json {
                let line = term_to_json(policy, (phase, step), &loss.formula(), term, &shown);
                let _ = writeln!(text, "{line}");
            } else {
                write_term(&mut text, &loss.formula(), term, &shown)
            }
        }
    }
    if text.is_empty() {
        let location = token.map_or(String::new(), |token| format!(" at index {token}"));
        Err(unusable(format!("step {step} trained on no token of {}{location}", attempt.slot)))
    } else {
        Ok(text)
    }
}

/// Writes the heading of the terms: the policy, the step, and whether the terms add up to the loss
/// of the step. The loss of the step is a mean over the step's updates.
fn write_heading(text: &mut String, policy: &PolicyTerms, (phase, step): (u32, u32)) {
    let PolicyTerms { policy: name, version, .. } = policy;
    let _ =
        writeln!(text, "policy {name}, phase {phase}, step {step}, weights of version {version}");
    let sum = policy.sum();
    let total = policy.total();
    let updates = policy.updates();
    let _ = match sum.to_bits() == total.to_bits() {
        true if updates > 1 => writeln!(
            text,
            "all terms of the step add up to {sum:e}, bit for bit; divided by its {updates} \
             updates: its loss, {:e}",
            policy.loss()
        ),
        true => writeln!(text, "all terms of the step add up to its loss, {sum:e}, bit for bit"),
        false => {
            writeln!(text, "all terms of the step add up to {total:e}, but the learner has {sum:e}")
        }
    };
}

fn term_to_json(
    policy: &PolicyTerms,
    (phase, step): (u32, u32),
    formula: &str,
    term: &TokenTerm,
    shown: &str,
) -> Value {
    let mut document = json!({
        "policy": policy.policy, "version": policy.version, "phase": phase, "step": step,
        "text": shown, "formula": formula,
    });
    if let (Value::Object(all), Ok(Value::Object(term))) =
        (&mut document, serde_json::to_value(term))
    {
        all.extend(term);
    }
    document
}

/// Writes the loss term of a token: the token, the weighted formula with its value, the values of
/// the formula's symbols, and the log-probabilities.
fn write_term(text: &mut String, formula: &str, term: &TokenTerm, shown: &str) {
    let TokenTerm { leaf, index, update, ratio, advantage, weight, loss, bonus, part, .. } = term;
    let value = if *bonus == 0.0 { format!("{loss}") } else { format!("({loss} − {bonus})") };
    let _ = writeln!(text, "\n{index:>6}  {shown:?}  (sequence {}, update {update})", leaf.0);
    let _ = writeln!(text, "        weight · ({formula}) = {weight} · {value} = {part}");
    let clip = match (term.dropped, term.clipped, term.dual_clipped) {
        (true, ..) => " (left out)",
        (_, _, true) => " (dual-clipped)",
        (_, true, _) => " (clipped)",
        _ => "",
    };
    let mut values = vec![
        format!("p = {}", term.logp.exp()),
        format!("ρ = {ratio}{clip}"),
        format!("A = {advantage}"),
        format!("D = {}", term.kl),
        format!("H = {}", term.entropy),
        format!("age = {}", term.age),
    ];
    values.extend(
        term.sequence_log_ratio.map(|log_ratio| format!("ρ of the sequence = {}", log_ratio.exp())),
    );
    values.extend(term.marked.then(|| "marked".to_owned()));
    values.extend(term.correction.map(|correction| format!("c = {correction}")));
    let logprobs =
        [("behavior", term.behavior), ("proximal", term.proximal), ("reference", term.reference)];
    let known = logprobs.into_iter().filter_map(|(name, value)| Some(format!("{name} {}", value?)));
    let _ = writeln!(text, "        {}", values.join(", "));
    let _ = writeln!(
        text,
        "        log-probabilities: trained {}{}",
        term.logp,
        known.fold(String::new(), |all, one| format!("{all}, {one}"))
    );
}

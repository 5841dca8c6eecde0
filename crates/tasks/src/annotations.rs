//! Demonstrations from solutions with calculator annotations, as in GSM8K.
//!
//! `She sold 48/2 = <<48/2=24>>24 clips.` becomes a turn that writes `She sold 48/2 =` and calls
//! the calculator with `48/2`, whose result is 24, and a turn that continues with `24 clips.` The
//! last turn ends with `#### 24`. Results are always computed by the calculator of this crate, so a
//! demonstration never shows a result that the tool would not return.

use levade_reward::Rational;

use super::expression::{Number, calculation, evaluate};
use super::{DemonstratedCall, Demonstration};

/// Reason why an annotated solution cannot be converted to a demonstration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SkipReason {
    /// The solution has no annotation.
    NoCalls,
    /// The solution has more annotations than the limit allows.
    TooManyCalls,
    /// An annotation does not have the form `<<expression=number>>`, or the calculator cannot parse
    /// the expression.
    Unreadable,
    /// The calculator's result differs from the number in an annotation.
    Disagrees,
    /// There is no `#### number` after the last annotation.
    NoAnswer,
}

/// Converts a solution with calculator annotations, as in GSM8K, to a demonstration with at most
/// `max_calls` tool calls.
///
/// # Errors
/// Returns [`SkipReason`] if the solution cannot be converted.
pub fn parse_annotations(solution: &str, max_calls: usize) -> Result<Demonstration, SkipReason> {
    let mut calls = Vec::new();
    let mut rest = solution;
    while let Some((before, from)) = rest.split_once("<<") {
        let (annotation, after) = from.split_once(">>").ok_or(SkipReason::Unreadable)?;
        let (expression, stated) = annotation.rsplit_once('=').ok_or(SkipReason::Unreadable)?;
        let value = evaluate(expression).map_err(|_| SkipReason::Unreadable)?;
        if !is_equal_to_stated(&value, stated.trim())? {
            return Err(SkipReason::Disagrees);
        }
        calls.push(DemonstratedCall {
            content: before.trim().to_owned(),
            call: calculation(expression.trim()),
            result: value.to_string(),
        });
        rest = after;
    }
    if calls.is_empty() {
        return Err(SkipReason::NoCalls);
    }
    if calls.len() > max_calls {
        return Err(SkipReason::TooManyCalls);
    }
    let (_, answer) = rest.rsplit_once("####").ok_or(SkipReason::NoAnswer)?;
    if !answer.contains(|c: char| c.is_ascii_digit()) {
        return Err(SkipReason::NoAnswer);
    }
    Ok(Demonstration { calls, answer: rest.trim().to_owned() })
}

/// Returns whether `value` equals the number in the text `stated`, or rounds to that number at its
/// number of decimals.
fn is_equal_to_stated(value: &Number, stated: &str) -> Result<bool, SkipReason> {
    let stated = stated.replace(',', "");
    let number = Rational::parse(&stated).ok_or(SkipReason::Unreadable)?;
    let decimals = stated.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    let half = if decimals == 0 { 0.0 } else { 0.5 * 0.1f64.powi(decimals as i32) };
    Ok(match value {
        Number::Exact(value) if *value == number => true,
        // A difference of exactly half a unit is accepted, whichever way the annotator rounded.
        value => (value.to_f64() - number.to_f64()).abs() <= half * (1.0 + 1e-9),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn annotated_solution_becomes_calculator_calls_and_answer() {
        let solution = "Tom has 3*4 = <<3*4=12>>12 red balls.\n\
                        He gives half away: $<<12/2=6.00>>6 left.\n#### 6";
        let got = parse_annotations(solution, 2).unwrap();
        let steps: Vec<_> = got
            .calls
            .iter()
            .map(|c| {
                (
                    c.content.as_str(),
                    c.call.arguments["expression"].as_str().unwrap(),
                    c.result.as_str(),
                )
            })
            .collect();
        assert_eq!(
            steps,
            [("Tom has 3*4 =", "3*4", "12"), ("12 red balls.\nHe gives half away: $", "12/2", "6")]
        );
        assert_eq!(got.answer, "6 left.\n#### 6");
        let roles: Vec<_> = got.messages().iter().map(|m| m.role.as_str()).collect();
        assert_eq!(roles, ["assistant", "tool", "assistant", "tool", "assistant"]);
    }

    #[test]
    fn annotated_call_results_come_from_calculator() {
        assert_eq!(first_result("<<.5*3=1.5>>1.5 #### 1.5"), Ok("1.5".to_owned()));
        assert_eq!(first_result("<<10/3=3.33>>3.33 #### 3"), Ok("3.3333333333".to_owned()));
        assert_eq!(first_result("<<10/3=3.34>>3.34 #### 3"), Err(SkipReason::Disagrees));
        assert_eq!(first_result("<<10/3=3>>3 #### 3"), Err(SkipReason::Disagrees));
        assert_eq!(first_result("<<1000+2000=3,000>> #### 3,000"), Ok("3000".to_owned()));
    }

    fn first_result(solution: &str) -> Result<String, SkipReason> {
        parse_annotations(solution, 9).map(|d| d.calls[0].result.clone())
    }

    #[test]
    fn invalid_annotated_solutions_are_rejected_with_reason() {
        for (solution, why) in [
            ("No sums here.\n#### 5", SkipReason::NoCalls),
            ("<<1+1=2>>2\n<<2+2=4>>4\n#### 4", SkipReason::TooManyCalls),
            ("<<1+1=2 #### 2", SkipReason::Unreadable),
            ("<<1+1>> #### 2", SkipReason::Unreadable),
            ("<<7//2=3>> #### 3", SkipReason::Unreadable),
            ("<<1+1=two>> #### 2", SkipReason::Unreadable),
            ("<<1+1=3>> #### 3", SkipReason::Disagrees),
            ("#### 2 is <<1+1=2>>2", SkipReason::NoAnswer),
            ("<<1+1=2>>2\n#### none", SkipReason::NoAnswer),
        ] {
            assert_eq!(parse_annotations(solution, 1), Err(why), "{solution}");
        }
    }
}

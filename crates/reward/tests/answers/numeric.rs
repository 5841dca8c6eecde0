//! Metamorphic pairs for `numeric`: numbers in other notations and changed numbers, in sentences.

use levade_reward::{NumberLocation, NumericScorer, Tolerance};
use serde_json::Value;

use super::{Item, Random, Tally, grouped, next_to};

/// Number of values that are generated for each kind.
const ROUNDS: usize = 90;

/// Sentences that state a value in a completion, with the extraction method. `@` is replaced by the
/// value.
const SENTENCES: [(&str, NumberLocation); 15] = [
    ("Adding 3 and 4 gives 7. So she has @ in the end.", NumberLocation::LastNumber),
    ("@", NumberLocation::LastNumber),
    ("The answer is @.", NumberLocation::LastNumber),
    ("That makes **@**!", NumberLocation::LastNumber),
    ("3 + 4 = 7, so the result is @", NumberLocation::LastNumber),
    ("Total: @", NumberLocation::LastNumber),
    ("He gets `@`.", NumberLocation::LastNumber),
    ("first 12, then 13\n\n@\n", NumberLocation::LastNumber),
    ("3 * 4 = 12\n#### @", NumberLocation::Hashes),
    ("#### @ in total", NumberLocation::Hashes),
    ("The answer is @, as 3 people came.", NumberLocation::AnswerIs),
    ("I think the Answer is: **@**.", NumberLocation::AnswerIs),
    ("so $\\boxed{@}$ of 99", NumberLocation::Boxed),
    ("\\[\\boxed{ @ }\\]", NumberLocation::Boxed),
    ("\\boxed{x = @}", NumberLocation::Boxed),
];

fn add(tally: &mut Tally, r: &mut Random, item: &Item) {
    let gold = Value::from(item.gold.clone());
    for (values, is_correct) in [(&item.same, true), (&item.other, false)] {
        for value in values {
            let (sentence, extract) = *r.choose(&SENTENCES);
            let completion = sentence.replace('@', value);
            let scorer = NumericScorer { extract, tolerance: Tolerance::Exact };
            let score = scorer.grade(&completion, &gold).unwrap();
            tally.add(&item.gold, &format!("{extract:?} {completion}"), is_correct, score.value);
        }
    }
}

/// Returns wrong answers that end with the number.
fn shapes(number: &str, r: &mut Random) -> Vec<String> {
    let k = r.integer_between(2, 99);
    let h = r.integer_between(1, 12);
    vec![
        format!("({k}, {number})"),
        format!("[{k}, {number}]"),
        format!("[{k}, {number})"),
        format!("\\{{{k}, {number}\\}}"),
        format!("{h}:{number}"),
        format!("\\begin{{pmatrix}}{k} & {number}\\end{{pmatrix}}"),
        format!("\\begin{{pmatrix}}{k}\\\\{number}\\end{{pmatrix}}"),
        format!("{k} or {number}"),
        format!("{k} × {number}"),
        format!("{k} + {number}"),
        format!("between {k} and {number}"),
        format!("{k} to {number}"),
    ]
}

fn integer(r: &mut Random) -> Item {
    let n = r.integer_between(2, 999_999);
    let digits = n.to_string();
    let wide: String = digits.chars().map(|c| char::from_u32(c as u32 + 0xfee0).unwrap()).collect();
    let mut other = shapes(&digits, r);
    other.extend([
        (n + 1).to_string(),
        (n - 1).to_string(),
        format!("-{n}"),
        format!("{n}0"),
        format!("{n} million"),
        format!("{n} dozen"),
        format!("minus {n}"),
        format!("negative {n}"),
        format!("at least {n}"),
        format!("less than {n}"),
        format!("not {n}"),
        format!("twice {n}"),
        format!("{n} or more"),
        format!("{n}.5"),
        format!("{n}\\text{{ thousand}}"),
        format!("{n}_{{12}}"),
    ]);
    Item {
        same: vec![
            digits.clone(),
            format!("{n}.0"),
            grouped(&digits, ","),
            grouped(&digits, "{,}"),
            wide,
            format!("{n} apples"),
            format!("${n}"),
            format!("{n}\\text{{ cm}}^2"),
            format!("about {n}"),
            format!("{n}/1"),
        ],
        other,
        gold: digits,
    }
}

fn long(r: &mut Random) -> Item {
    let digits = r.digits(40);
    Item {
        same: vec![
            digits.clone(),
            grouped(&digits, ","),
            format!("{digits}.0"),
            format!("{digits} atoms"),
        ],
        other: vec![
            next_to(&digits),
            format!("{digits}0"),
            format!("-{digits}"),
            digits[..39].to_owned(),
            format!("{digits}.5"),
            format!("{digits} thousand"),
        ],
        gold: digits,
    }
}

fn decimal(r: &mut Random) -> Item {
    let integer = r.integer_between(1, 9_999_999);
    let num_decimals = r.integer_between(1, 30) as usize;
    let digits = r.digits(num_decimals);
    let gold = format!("{integer}.{digits}");
    Item {
        same: vec![
            gold.clone(),
            format!("{gold}0"),
            format!("{}.{digits}", grouped(&integer.to_string(), ",")),
        ],
        other: vec![
            format!("{integer}.{}", next_to(&digits)),
            format!("{gold}1"),
            format!("-{gold}"),
            format!("{}.{digits}", integer + 1),
            format!("{gold} million"),
            format!("{integer}"),
        ],
        gold,
    }
}

fn fraction(r: &mut Random) -> Item {
    let a = r.integer_between(1, 60);
    let b = *r.choose(&[3, 7, 11, 13]);
    let a = if a % b == 0 { a + 1 } else { a };
    Item {
        gold: format!("\\frac{{{a}}}{{{b}}}"),
        same: vec![
            format!("{a}/{b}"),
            format!("\\frac{{{a}}}{{{b}}}"),
            format!("{}/{}", 2 * a, 2 * b),
        ],
        other: vec![
            format!("{}/{b}", a + 1),
            format!("{b}/{a}"),
            format!("-{a}/{b}"),
            format!("{a}0/{b}"),
            a.to_string(),
            format!("{a}/{b} million"),
        ],
    }
}

fn mixed(r: &mut Random) -> Item {
    let w = r.integer_between(2, 40);
    let b = *r.choose(&[3, 5, 7, 8]);
    let a = r.integer_between(1, b - 1);
    Item {
        gold: format!("{w}\\frac{{{a}}}{{{b}}}"),
        same: vec![
            format!("{w} {a}/{b}"),
            format!("{}/{b}", w * b + a),
            format!("{w}\\frac{{{a}}}{{{b}}}"),
        ],
        other: vec![
            format!("{} {a}/{b}", w + 1),
            format!("-{w} {a}/{b}"),
            format!("{a}/{b}"),
            w.to_string(),
            format!("{w}{a}/{b}"),
        ],
    }
}

fn unit(r: &mut Random) -> Item {
    let n = r.integer_between(2, 999);
    let (unit, same, other) = *r.choose(&[
        ("cm", "centimeters", "m"),
        ("hours", "hr", "minutes"),
        ("kg", "kilograms", "grams"),
        ("dollars", "dollars", "cents"),
        ("miles per hour", "mph", "miles"),
    ]);
    Item {
        gold: format!("{n} {unit}"),
        same: vec![
            format!("{n} {unit}"),
            format!("{n} {same}"),
            n.to_string(),
            format!("{n} things"),
        ],
        other: vec![
            format!("{n} {other}"),
            format!("{} {unit}", n + 1),
            format!("-{n} {unit}"),
            format!("{n} thousand {unit}"),
        ],
    }
}

fn magnitude(r: &mut Random) -> Item {
    let n = r.integer_between(2, 999);
    let (word, zeros) = *r.choose(&[("thousand", 3), ("million", 6), ("billion", 9), ("lakh", 5)]);
    let zeros = "0".repeat(zeros);
    Item {
        gold: format!("{n} {word}"),
        same: vec![
            format!("{n}{zeros}"),
            grouped(&format!("{n}{zeros}"), ","),
            format!("{n}.0 {word} people"),
            format!("${n} {word}"),
            format!("{n}\\text{{ {word}}}"),
        ],
        other: vec![
            n.to_string(),
            format!("{n} trillion"),
            format!("{n} hundred"),
            format!("{n}{zeros}0"),
            format!("minus {n} {word}"),
            format!("at least {n} {word}"),
        ],
    }
}

#[test]
fn numeric_rejects_changed_values_and_accepts_rewrites() {
    let kinds = [integer, long, decimal, fraction, mixed, unit, magnitude];
    let mut r = Random(47);
    let mut tally = Tally::default();
    for _ in 0..ROUNDS {
        for kind in kinds {
            let item = kind(&mut r);
            add(&mut tally, &mut r, &item);
            add(&mut tally, &mut r, &item);
        }
    }
    tally.check("numeric");
}

//! Metamorphic pairs for `maths`: values in other notations and changed values, in sentences.

use levade_reward::MathsScorer;
use serde_json::Value;

use super::{Item, Random, Tally, grouped, next_to};

/// Number of values that are generated for each kind.
const ROUNDS: usize = 30;

/// Sentences that state a value in the last line of a completion. `@` is replaced by the value.
const SENTENCES: [&str; 16] = [
    "\\boxed{@}",
    "Adding 3 and 4 gives 7.\nSo the result is $\\boxed{@}$.",
    "Therefore\n\\[\\boxed{@}\\]",
    "$$\\boxed{ @ }$$ which we checked in 2 ways.",
    "\\boxed{\\color{red}{@}}",
    "\\boxed{{\\large @}}",
    "\\boxed{@\\checkmark}",
    "\\boxed{@\\text{ (since }n > 3)}",
    "<answer>$@$</answer>",
    "The answer is $@$.",
    "First I thought 17. The final answer is $@$, since 3 is odd.",
    "**Answer:** $@$",
    "The answer is **$@$** because $x = 7$ there.",
    "work 1 + 1\n#### $@$",
    "Answer: $@$ (see step 3)",
    "So the answer is: \\(@\\), not $99999$.",
];

fn add(tally: &mut Tally, scorer: &MathsScorer, r: &mut Random, item: &Item) {
    let gold = Value::from(item.gold.clone());
    for (values, is_correct) in [(&item.same, true), (&item.other, false)] {
        for value in values {
            let completion = r.choose(&SENTENCES).replace('@', value);
            let score = scorer.grade(&completion, &gold).unwrap();
            tally.add(&item.gold, &completion, is_correct, score.value);
        }
    }
}

fn strings<const N: usize>(items: [String; N]) -> Vec<String> {
    items.into()
}

fn integer(r: &mut Random) -> Item {
    let n = r.integer_between(2, 99_999);
    let digits = n.to_string();
    let wide: String = digits.chars().map(|c| char::from_u32(c as u32 + 0xfee0).unwrap()).collect();
    Item {
        gold: digits.clone(),
        same: strings([
            format!("{n}.0"),
            format!("x = {n}"),
            grouped(&digits, ","),
            grouped(&digits, "{,}"),
            wide,
            format!("{n}\\text{{ apples}}"),
            format!("\\frac{{{}}}{{3}}", 3 * n),
            format!("\\underline{{{n}}}"),
            format!("m+n={n}"),
            format!("\\text{{exactly }}{n}"),
            format!("{n}\\pmod{{1000000}}"),
        ]),
        other: strings([
            (n + 1).to_string(),
            (n - 1).to_string(),
            format!("-{n}"),
            format!("{n}0"),
            format!("{n}\\text{{ million}}"),
            format!("{n}\\text{{ dozen}}"),
            format!("\\text{{minus }}{n}"),
            format!("\\text{{at least }}{n}"),
            format!("{n}\\text{{ or }}{}", n + 1),
            format!("{n} \\approx {}", n + 1),
            format!("\\text{{twice }}{n}"),
            format!("({n}, {})", n + 1),
            format!("3x = {n}"),
            format!("{}!", n.min(99)),
            format!("{n}_{{{}}}", 11),
        ]),
    }
}

fn long(r: &mut Random) -> Item {
    let digits = r.digits(40);
    Item {
        same: strings([
            digits.clone(),
            grouped(&digits, ","),
            grouped(&digits, "{,}"),
            format!("{digits}.00"),
        ]),
        other: strings([
            next_to(&digits),
            format!("{digits}0"),
            format!("-{digits}"),
            digits[..39].to_owned(),
            format!("{}{}", &digits[..20], &digits[21..]),
            format!("{digits}.5"),
        ]),
        gold: digits,
    }
}

fn decimal(r: &mut Random) -> Item {
    let integer = r.integer_between(1, 9_999_999);
    let num_decimals = r.integer_between(1, 6) as usize;
    let digits = r.digits(num_decimals);
    let gold = format!("{integer}.{digits}");
    Item {
        same: strings([
            gold.clone(),
            format!("{gold}0"),
            format!("\\frac{{{integer}{digits}}}{{1{}}}", "0".repeat(num_decimals)),
            format!("x = {gold}"),
            format!("{}.{digits}", grouped(&integer.to_string(), ",")),
        ]),
        other: strings([
            format!("{integer}.{}", next_to(&digits)),
            format!("-{gold}"),
            format!("{integer}{digits}"),
            format!("{}.{digits}", integer + 1),
            format!("{gold}\\text{{ million}}"),
            integer.to_string(),
        ]),
        gold,
    }
}

fn fraction(r: &mut Random) -> Item {
    let a = r.integer_between(1, 60);
    let b = *r.choose(&[3, 7, 11, 13, 17, 19]);
    let a = if a % b == 0 { a + 1 } else { a };
    Item {
        gold: format!("\\frac{{{a}}}{{{b}}}"),
        same: strings([
            format!("{{{a} \\over {b}}}"),
            format!("{a}/{b}"),
            format!("\\nicefrac{{{a}}}{{{b}}}"),
            format!("\\dfrac{{{}}}{{{}}}", 2 * a, 2 * b),
            format!("\\frac{{{a}}}{{{b}}} \\approx {:.3}", a as f64 / b as f64),
            format!("x = \\tfrac{{{a}}}{{{b}}}"),
        ]),
        other: strings([
            format!("\\frac{{{}}}{{{b}}}", a + 1),
            format!("\\frac{{{b}}}{{{a}}}"),
            format!("-\\frac{{{a}}}{{{b}}}"),
            format!("\\frac{{{a}0}}{{{b}}}"),
            format!("{{{a} \\over {}}}", b + 1),
            format!("{:.3}", a as f64 / b as f64),
            format!("\\frac{{{a}}}{{{b}}} \\approx {:.3}", a as f64 / b as f64 + 0.1),
        ]),
    }
}

fn mixed(r: &mut Random) -> Item {
    let w = r.integer_between(2, 40);
    let b = *r.choose(&[3, 5, 7, 8]);
    let a = r.integer_between(1, b - 1);
    Item {
        gold: format!("{w}\\frac{{{a}}}{{{b}}}"),
        same: strings([
            format!("{w} {a}/{b}"),
            format!("\\frac{{{}}}{{{b}}}", w * b + a),
            format!("{w}+{a}/{b}"),
        ]),
        other: strings([
            format!("{}\\frac{{{a}}}{{{b}}}", w + 1),
            format!("{w}\\frac{{{}}}{{{b}}}", a + b),
            format!("-{w}\\frac{{{a}}}{{{b}}}"),
            format!("{w}\\cdot\\frac{{{a}}}{{{b}}}"),
            w.to_string(),
        ]),
    }
}

fn pair(r: &mut Random) -> Item {
    let a = r.integer_between(-50, 400);
    let b = r.integer_between(401, 999);
    Item {
        gold: format!("({a},{b})"),
        same: strings([
            format!("\\left({a}, {b}\\right)"),
            format!("(x,y) = ({a},{b})"),
            format!("$({a}, {b})$"),
        ]),
        other: strings([
            format!("({b},{a})"),
            format!("({a},{})", b + 1),
            format!("[{a},{b}]"),
            format!("({},{b})", a - 1),
            format!("({a},{b},{b})"),
            format!("{a}{b}"),
            b.to_string(),
            format!("(x,y) = ({b},{a})"),
        ]),
    }
}

fn interval(r: &mut Random) -> Item {
    let a = r.integer_between(-30, 30);
    let b = r.integer_between(31, 90);
    Item {
        gold: format!("[{a},{b})"),
        same: strings([
            format!("\\left[{a}, {b}\\right)"),
            format!("{a} \\le x < {b}"),
            format!("\\{{x : {a} \\le x < {b}\\}}"),
            format!("[{a},\\infty) \\cap (-\\infty,{b})"),
            format!("[{a},{b}] \\setminus \\{{{b}\\}}"),
            format!("\\{{x \\in \\mathbb{{R}} \\mid {b} > x \\ge {a}\\}}"),
        ]),
        other: strings([
            format!("({a},{b}]"),
            format!("[{a},{b}]"),
            format!("[{a},{})", b + 1),
            format!("[{},{b})", a + 1),
            format!("{a} < x < {b}"),
            format!("x \\ge {a}"),
            format!("[{a},{b}) \\setminus \\{{31\\}}").replace("31", &(a + 1).to_string()),
            format!("\\{{{a},{b}\\}}"),
        ]),
    }
}

fn set(r: &mut Random) -> Item {
    let a = r.integer_between(-40, 0);
    let b = a + r.integer_between(1, 9);
    let c = a + r.integer_between(10, 40);
    Item {
        gold: format!("\\{{{a},{b},{c}\\}}"),
        same: strings([
            format!("\\{{{c},{a},{b}\\}}"),
            format!("{b}, {c}, {a}"),
            format!("\\left\\{{ {a}, {b}, {c} \\right\\}}"),
            format!("\\{{{a},{b}\\}} \\cup \\{{{c}\\}}"),
        ]),
        other: strings([
            format!("\\{{{a},{b}\\}}"),
            format!("\\{{{a},{b},{}\\}}", c + 1),
            format!("\\{{{a},{b},{c},{}\\}}", c + 5),
            format!("({c},{b},{a})"),
            format!("\\{{{a},{b}\\}} \\cap \\{{{c}\\}}"),
            c.to_string(),
        ]),
    }
}

fn matrix(r: &mut Random) -> Item {
    let [a, b, c] = [(); 3].map(|()| r.integer_between(-20, 20));
    let d = a + r.integer_between(1, 9);
    let b = if b == c { b + 1 } else { b };
    let items = |name: &str, [a, b, c, d]: [i64; 4]| {
        format!("\\begin{{{name}}}{a}&{b}\\\\{c}&{d}\\end{{{name}}}")
    };
    Item {
        gold: items("pmatrix", [a, b, c, d]),
        same: strings([
            items("bmatrix", [a, b, c, d]),
            format!("\\left(\\begin{{array}}{{cc}}{a}&{b}\\\\{c}&{d}\\end{{array}}\\right)"),
            format!("\\frac12{}", items("pmatrix", [2 * a, 2 * b, 2 * c, 2 * d])),
            format!("-{}", items("pmatrix", [-a, -b, -c, -d])),
            format!("{}^T", items("pmatrix", [a, c, b, d])),
            format!("A = {}", items("pmatrix", [a, b, c, d])),
        ]),
        other: strings([
            items("pmatrix", [a, c, b, d]),
            items("pmatrix", [a, b, c, d + 1]),
            items("pmatrix", [c, d, a, b]),
            format!("10{}", items("pmatrix", [a, b, c, d])),
            items("vmatrix", [a, b, c, d]),
            format!("({a},{b},{c},{d})"),
        ]),
    }
}

fn time(r: &mut Random) -> Item {
    let h = r.integer_between(1, 11);
    let m = r.integer_between(0, 59);
    Item {
        gold: format!("{h}:{m:02}\\text{{ p.m.}}"),
        same: strings([
            format!("{h}:{m:02}\\text{{ PM}}"),
            format!("{}:{m:02}", h + 12),
            format!("{h:02}:{m:02} pm"),
            format!("{h}:{m:02}~\\mathrm{{p.m.}}"),
        ]),
        other: strings([
            format!("{h}:{m:02}\\text{{ a.m.}}"),
            format!("{h}:{:02}\\text{{ p.m.}}", (m + 1) % 60),
            format!("{}:{m:02}\\text{{ p.m.}}", h + 1),
            format!("{h}:{m:02}"),
            format!("{h}"),
            format!("{}:{m:02}", h + 11),
            format!("{m:02}:{h:02}\\text{{ p.m.}}")
                .replace(&format!("{m:02}:{h:02}"), &format!("{h}:{:02}", (m + 30) % 60)),
        ]),
    }
}

fn unit(r: &mut Random) -> Item {
    let n = r.integer_between(2, 999);
    let (short, long, other) = r.choose(&[
        ("cm", "centimeters", "m"),
        ("km", "kilometers", "miles"),
        ("hours", "hr", "minutes"),
        ("seconds", "sec", "hours"),
        ("kg", "kilograms", "grams"),
        ("dollars", "USD", "cents"),
        ("miles per hour", "mph", "km/h"),
        ("cm^2", "square centimeters", "cm"),
        ("^\\circ\\text{C}", "degrees Celsius", "degrees Fahrenheit"),
    ]);
    let text = |unit: &str| match unit.split_once('^') {
        Some(("", degree)) => format!("{n}^{degree}"),
        Some((unit, power)) => format!("{n}\\text{{ {unit}}}^{power}"),
        None => format!("{n}\\text{{ {unit}}}"),
    };
    Item {
        gold: text(short),
        same: strings([text(long), text(short), n.to_string(), text("wide things")]),
        other: strings([
            text(other),
            format!("{}\\text{{ {long}}}", n + 1),
            format!("-{}", text(short)),
            format!("10{}", text(short)),
            format!("{n}\\text{{ thousand {long}}}"),
            format!("\\text{{less than }}{}", text(short)),
        ]),
    }
}

fn magnitude(r: &mut Random) -> Item {
    let n = r.integer_between(2, 999);
    let (word, zeros) =
        *r.choose(&[("thousand", 3), ("million", 6), ("billion", 9), ("lakh", 5), ("crore", 7)]);
    let zeros = "0".repeat(zeros);
    Item {
        gold: format!("{n}\\text{{ {word}}}"),
        same: strings([
            format!("{n}{zeros}"),
            grouped(&format!("{n}{zeros}"), ","),
            format!("{n} {word}"),
            format!("{n}.0\\text{{ {word} people}}"),
            format!("{n}\\times10^{{{}}}", zeros.len()),
        ]),
        other: strings([
            n.to_string(),
            format!("{n}\\text{{ trillion}}"),
            format!("{n}\\text{{ hundred}}"),
            format!("{n}{zeros}0"),
            format!("{}\\text{{ {word}}}", n + 1),
            format!("-{n}\\text{{ {word}}}"),
            format!("{n}\\text{{ people}}"),
        ]),
    }
}

fn names(r: &mut Random) -> Item {
    let a = r.integer_between(1, 50);
    let b = r.integer_between(51, 99);
    let [x, y] = *r.choose(&[
        ["boys", "girls"],
        ["red balls", "blue balls"],
        ["cats", "dogs"],
        ["dimes", "nickels"],
    ]);
    Item {
        gold: format!("{a}\\text{{ {x}}}, {b}\\text{{ {y}}}"),
        same: strings([
            format!("{b}\\text{{ {y}}}, {a}\\text{{ {x}}}"),
            format!("{a}\\text{{ {x} and }}{b}\\text{{ {y}}}"),
            format!("\\text{{{x}: }}{a},\\text{{ {y}: }}{b}"),
            format!("{a}, {b}"),
        ]),
        other: strings([
            format!("{b}\\text{{ {x}}}, {a}\\text{{ {y}}}"),
            format!("{a}\\text{{ {y}}}, {b}\\text{{ {x}}}"),
            format!("{a}\\text{{ {x}}}, {}\\text{{ {y}}}", b + 1),
            format!("\\text{{{y}: }}{a},\\text{{ {x}: }}{b}"),
            format!("{a}\\text{{ {x}}}"),
            (a + b).to_string(),
        ]),
    }
}

fn percent(r: &mut Random) -> Item {
    let n = r.integer_between(2, 99);
    let [up, down] = *r.choose(&[
        ["profit", "loss"],
        ["increase", "decrease"],
        ["rise", "drop"],
        ["gain", "fall"],
    ]);
    Item {
        gold: format!("{n}\\%\\text{{ {up}}}"),
        same: strings([
            format!("{n}\\%"),
            format!("\\text{{a {up} of }}{n}\\%"),
            format!("{n}\\text{{ percent {up}}}"),
            format!("\\frac{{{n}}}{{100}}"),
        ]),
        other: strings([
            format!("{n}\\%\\text{{ {down}}}"),
            format!("\\text{{a {down} of }}{n}\\%"),
            format!("{}\\%\\text{{ {up}}}", n + 1),
            format!("-{n}\\%"),
            format!("{n}0\\%"),
            format!("{n}\\text{{ dollars}}"),
        ]),
    }
}

fn ratio(r: &mut Random) -> Item {
    let (a, b) = *r.choose(&[(2, 3), (3, 4), (5, 2), (7, 4), (9, 5), (1, 6)]);
    let k = r.integer_between(2, 9);
    Item {
        gold: format!("{a}:{b}"),
        same: strings([
            format!("{}:{}", k * a, k * b),
            format!("{a} : {b}"),
            format!("\\frac{{{a}}}{{{b}}}"),
        ]),
        other: strings([
            format!("{b}:{a}"),
            format!("{}:{}", k * a + 1, k * b),
            format!("{a}:{b}:{b}"),
            format!("{a}:{b}\\text{{ p.m.}}"),
            format!("-{a}:{b}"),
            a.to_string(),
        ]),
    }
}

fn based(r: &mut Random) -> Item {
    let n = r.integer_between(5, 900);
    let binary = format!("{n:b}");
    Item {
        gold: format!("{binary}_2"),
        same: strings([
            n.to_string(),
            format!("{binary}_{{2}}"),
            format!("{n:o}_8"),
            format!("{n}_{{10}}"),
            format!("{binary}_{{\\text{{two}}}}"),
        ]),
        other: strings([
            format!("{binary}_3"),
            binary.clone(),
            format!("{:b}_2", n + 1),
            format!("{binary}0_2"),
            format!("-{binary}_2"),
            format!("{n:o}"),
            format!("{n}_8").replace(&format!("{n}_8"), &format!("{:o}_8", n + 2)),
        ]),
    }
}

fn radical(r: &mut Random) -> Item {
    let a = r.integer_between(2, 60);
    let s = *r.choose(&[2, 3, 5, 7, 11]);
    Item {
        gold: format!("{a}\\sqrt{{{s}}}"),
        same: strings([
            format!("\\sqrt{{{}}}", a * a * s),
            format!("\\sqrt{{{s}}}\\cdot {a}"),
            format!("{a}√{s}"),
        ]),
        other: strings([
            format!("{}\\sqrt{{{s}}}", a + 1),
            format!("-{a}\\sqrt{{{s}}}"),
            format!("{a}\\sqrt{{{}}}", s + 1),
            format!("{:.2}", a as f64 * (s as f64).sqrt()),
            format!("{a}\\sqrt[3]{{{s}}}"),
        ]),
    }
}

#[test]
fn maths_rejects_changed_values_and_accepts_rewrites() {
    let kinds = [
        integer, long, decimal, fraction, mixed, pair, interval, set, matrix, time, unit,
        magnitude, names, percent, ratio, based, radical,
    ];
    let scorer = MathsScorer::default();
    let mut r = Random(47);
    let mut tally = Tally::default();
    for _ in 0..ROUNDS {
        for kind in kinds {
            let item = kind(&mut r);
            // Each value is used in two sentences.
            add(&mut tally, &scorer, &mut r, &item);
            add(&mut tally, &scorer, &mut r, &item);
        }
    }
    tally.check("maths");
}

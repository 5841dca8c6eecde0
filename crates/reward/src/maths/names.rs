//! Tables of names: functions, units, LaTeX commands.

/// LaTeX names of functions and constants that are also recognized as plain words.
pub(super) const NAMES: &[&str] = &[
    "sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh",
    "tanh", "ln", "log", "exp", "max", "min", "pi", "infty", "alpha", "beta", "gamma", "delta",
    "theta", "lambda", "mu", "phi", "omega", "binom", "frac", "abs", "floor", "ceil", "cup", "lg",
    "gcd", "lcm", "det", "mod",
];

/// Units that are recognized without `\text`.
pub(super) const UNITS: &[&str] = &[
    "mm", "cm", "dm", "km", "kg", "mg", "lb", "lbs", "oz", "ft", "in", "mi", "mph", "hr", "hrs",
    "min", "sec", "ms", "ml", "mL", "sq", "cu", "deg", "rad", "Hz", "kHz", "am", "pm", "AM", "PM",
    "yd", "kJ", "kW", "Pa", "kPa", "eV", "mol", "nm", "gal", "pt", "qt", "rpm", "dB", "MHz", "GHz",
    "MPa", "MW", "GW", "MJ", "kV", "mV", "mA", "keV", "MeV", "kB", "KB", "MB", "GB", "TB", "cal",
    "th", "st", "nd", "rd", "bn", "mn", "tn", "mio", "Mio", "mrd", "Mrd",
];

/// LaTeX commands that only change the appearance.
pub(super) const LOOKS: &[&str] = &[
    "left",
    "right",
    "big",
    "Big",
    "bigg",
    "Bigg",
    "bigl",
    "bigr",
    "Bigl",
    "Bigr",
    "displaystyle",
    "textstyle",
    "limits",
    "nolimits",
    "quad",
    "qquad",
    "thinspace",
    "enspace",
    "space",
    "mathstrut",
    "middle",
    "bf",
    "rm",
    "it",
    "boldsymbol",
    "bm",
    "pmb",
    "biggl",
    "biggr",
    "Biggl",
    "Biggr",
    "bigm",
    "tiny",
    "scriptsize",
    "footnotesize",
    "small",
    "normalsize",
    "large",
    "Large",
    "LARGE",
    "huge",
    "Huge",
    "scriptstyle",
    "scriptscriptstyle",
    "bfseries",
    "itshape",
    "rmfamily",
    "sffamily",
    "normalfont",
    "boldmath",
    "sf",
    "tt",
    "em",
    "hfill",
    "displaylimits",
    "relax",
    "nobreakspace",
    "checkmark",
    "blacksquare",
    "square",
    "Box",
    "qed",
    "qedhere",
    "bigstar",
    "star",
    "therefore",
];

/// LaTeX commands whose argument is text.
pub(super) const TEXTS: &[&str] = &[
    "text",
    "mbox",
    "hbox",
    "textbf",
    "textrm",
    "textit",
    "textsf",
    "mathrm",
    "operatorname",
    "mathbf",
    "mathit",
    "mathsf",
    "textnormal",
    "mathcal",
    "emph",
    "textup",
    "textsc",
    "texttt",
    "textsl",
    "textmd",
    "mathtt",
];

/// LaTeX commands that are replaced by an equivalent command, which the parser knows.
pub(super) const SAME: &[(&str, &str)] = &[
    ("varnothing", "emptyset"),
    ("dfrac", "frac"),
    ("tfrac", "frac"),
    ("cfrac", "frac"),
    ("dbinom", "binom"),
    ("tbinom", "binom"),
    ("bar", "overline"),
    ("lvert", "|"),
    ("rvert", "|"),
    ("vert", "|"),
    ("mid", "|"),
    ("cdot", "*"),
    ("times", "*"),
    ("ast", "*"),
    ("div", "/"),
    ("pm", "±"),
    ("mp", "±"),
    ("le", "≤"),
    ("leq", "≤"),
    ("leqslant", "≤"),
    ("ge", "≥"),
    ("geq", "≥"),
    ("geqslant", "≥"),
    ("lt", "<"),
    ("gt", ">"),
    ("ne", "≠"),
    ("neq", "≠"),
    ("equiv", "="),
    ("approx", "≈"),
    ("cup", "∪"),
    ("in", "∈"),
    ("lg", "log"),
    ("circ", "°"),
    ("degree", "°"),
    ("degrees", "°"),
    ("deg", "°"),
    ("percent", "%"),
    ("infin", "infty"),
    ("inf", "infty"),
    ("infinity", "infty"),
    ("oo", "infty"),
    ("to", "→"),
    ("rightarrow", "→"),
    ("asin", "arcsin"),
    ("acos", "arccos"),
    ("atan", "arctan"),
    ("sim", "∼"),
    ("simeq", "≈"),
    ("cong", "≅"),
    ("approxeq", "≈"),
    ("nicefrac", "frac"),
    ("sfrac", "frac"),
    ("flatfrac", "frac"),
    ("cap", "∩"),
    ("setminus", "∖"),
    ("smallsetminus", "∖"),
    ("backslash", "∖"),
    ("implies", "⇒"),
    ("Rightarrow", "⇒"),
    ("Longrightarrow", "⇒"),
    ("colon", ":"),
    ("leqq", "≤"),
    ("geqq", "≥"),
    ("ngtr", "≤"),
    ("nless", "≥"),
    ("bmod", "mod"),
    ("textdegree", "°"),
];

/// LaTeX commands with styling arguments, and the number of styling arguments before the visible
/// content.
pub(super) const DROPPED: &[(&str, u32)] = &[
    ("color", 1),
    ("textcolor", 1),
    ("colorbox", 1),
    ("fcolorbox", 2),
    ("hspace", 1),
    ("vspace", 1),
    ("mspace", 1),
    ("phantom", 1),
    ("hphantom", 1),
    ("vphantom", 1),
    ("label", 1),
    ("tag", 1),
    ("rule", 2),
    ("definecolor", 3),
    ("raisebox", 1),
    ("overset", 1),
    ("underset", 1),
    ("stackrel", 1),
];

/// LaTeX commands that frame, underline or color their argument.
pub(super) const FRAMES: &[&str] = &[
    "underline",
    "uline",
    "underbar",
    "boxed",
    "fbox",
    "framebox",
    "ensuremath",
    "mathop",
    "mathbin",
    "smash",
    "underbrace",
    "overbrace",
    "textcolor",
    "colorbox",
    "fcolorbox",
    "raisebox",
    "overset",
    "underset",
    "stackrel",
];

/// Greek letters with their LaTeX commands.
pub(super) const GREEK: &[(&str, &str)] = &[
    ("α", "alpha"),
    ("β", "beta"),
    ("γ", "gamma"),
    ("δ", "delta"),
    ("ε", "epsilon"),
    ("θ", "theta"),
    ("λ", "lambda"),
    ("μ", "mu"),
    ("π", "pi"),
    ("ρ", "rho"),
    ("ζ", "zeta"),
    ("η", "eta"),
    ("κ", "kappa"),
    ("ν", "nu"),
    ("ξ", "xi"),
    ("χ", "chi"),
    ("ψ", "psi"),
    ("Γ", "Gamma"),
    ("Θ", "Theta"),
    ("Λ", "Lambda"),
    ("Φ", "Phi"),
    ("Ψ", "Psi"),
    ("σ", "sigma"),
    ("τ", "tau"),
    ("φ", "phi"),
    ("ω", "omega"),
    ("Δ", "Delta"),
    ("Ω", "Omega"),
];

/// LaTeX commands for relations whose sides cannot be exchanged.
pub(super) const RELATIONS: &[&str] = &[
    "subset",
    "subseteq",
    "subsetneq",
    "supset",
    "supseteq",
    "notin",
    "ni",
    "perp",
    "parallel",
    "mapsto",
    "iff",
    "propto",
    "prec",
    "succ",
    "preceq",
    "succeq",
    "leftarrow",
    "leftrightarrow",
    "Leftrightarrow",
    "Leftarrow",
];

/// Short words that are not parsed as products of letters.
pub(super) const WORDS: &[&str] = &[
    "one", "two", "six", "ten", "not", "the", "per", "all", "any", "are", "was", "for", "has",
    "nor", "day", "old", "men", "man", "boy", "kid", "cup", "box", "egg", "dog", "cat", "pen",
    "bag", "car", "bus", "pie", "hat", "toy", "ans", "uhr", "job", "way", "red", "new", "usd",
    "eur", "gbp", "inr",
];

/// Very short words that are not parsed as products of letters if the text also has longer words.
pub(super) const PROSE_WORDS: &[&str] =
    &["is", "of", "to", "at", "we", "if", "by", "on", "in", "no", "up", "as", "an", "et", "und"];

/// Returns whether a three-letter word is capitalized like a name.
pub(super) fn is_capitalized_name(word: &str) -> bool {
    let mut chars = word.chars();
    chars.next().is_some_and(|c| c.is_ascii_uppercase())
        && word.len() == 3
        && chars.all(|c| c.is_ascii_lowercase())
}

/// Words before a bracket that are not parsed as names of functions.
pub(super) const NO_FUNCTIONS: [&str; 22] = [
    "answer", "option", "choice", "point", "points", "vertex", "center", "total", "or", "and",
    "if", "since", "because", "base", "approx", "about", "is", "are", "equals", "the", "to", "of",
];

/// Returns the length in bytes of the first factor of a product of Greek and Latin letters: k of
/// kπ, π of πr.
pub(super) fn first_factor_length(word: &str) -> Option<usize> {
    let is_greek = |c: char| GREEK.iter().any(|(letter, _)| letter.starts_with(c));
    let mixed = word.chars().any(|c| c.is_ascii());
    let is_product = word.chars().any(is_greek)
        && word.chars().all(|c| c.is_ascii() || is_greek(c))
        && (mixed || word.chars().count() == 2)
        && word.chars().nth(1).is_some();
    let first = word.chars().next().filter(|_| is_product)?;
    if is_greek(first) { Some(first.len_utf8()) } else { word.find(is_greek) }
}

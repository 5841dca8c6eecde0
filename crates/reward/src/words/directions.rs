//! Words that exclude each other: directions, months, days, and kinds of people and things.

/// Words for directions, by kinds of words that exclude each other. A number has at most one word
/// of each kind.
const DIRECTIONS: &[(&str, &str, &[&str])] = &[
    (
        "change",
        "up",
        &[
            "increase",
            "increased",
            "increases",
            "increasing",
            "rise",
            "rises",
            "rose",
            "growth",
            "gain",
            "gained",
            "gains",
            "profit",
            "profits",
            "surplus",
            "up",
            "higher",
            "raise",
            "raised",
            "markup",
            "more",
            "appreciation",
            "win",
            "wins",
            "won",
            "gewinn",
            "zunahme",
            "anstieg",
            "ganancia",
            "aumento",
            "augmente",
            "augmentation",
            "hausse",
            "bénéfice",
            "lucro",
            "arriba",
            "larger",
            "bigger",
            "greater",
            "wider",
            "deeper",
            "thicker",
            "stronger",
            "better",
            "richer",
            "grew",
            "grown",
            "expands",
            "expanded",
            "premium",
            "adds",
            "mehr",
            "gestiegen",
            "más",
            "aumenta",
        ],
    ),
    (
        "change",
        "down",
        &[
            "decrease",
            "decreased",
            "decreases",
            "decreasing",
            "drop",
            "drops",
            "dropped",
            "decline",
            "declined",
            "reduction",
            "reduced",
            "fall",
            "falls",
            "fell",
            "loss",
            "losses",
            "lost",
            "deficit",
            "down",
            "lower",
            "discount",
            "less",
            "fewer",
            "depreciation",
            "shortfall",
            "off",
            "verlust",
            "abnahme",
            "rückgang",
            "pérdida",
            "disminución",
            "diminue",
            "diminution",
            "baisse",
            "perte",
            "perda",
            "abajo",
            "smaller",
            "narrower",
            "shallower",
            "thinner",
            "weaker",
            "worse",
            "poorer",
            "shrank",
            "shrunk",
            "contracts",
            "contracted",
            "cut",
            "lose",
            "loses",
            "removes",
            "weniger",
            "gesunken",
            "disminuye",
        ],
    ),
    // Compass points are one kind: north is neither south nor east.
    ("compass", "north", &["north", "northern", "northward", "norden", "norte", "nord"]),
    ("compass", "south", &["south", "southern", "southward", "süden", "sur", "sud", "sul"]),
    ("compass", "east", &["east", "eastern", "eastward", "osten", "este"]),
    ("compass", "west", &["west", "western", "westward", "westen", "oeste", "ouest"]),
    ("compass", "northeast", &["northeast", "northeastern", "nordosten", "noreste"]),
    ("compass", "northwest", &["northwest", "northwestern", "nordwesten", "noroeste"]),
    ("compass", "southeast", &["southeast", "southeastern", "südosten", "sureste"]),
    ("compass", "southwest", &["southwest", "southwestern", "südwesten", "suroeste"]),
    ("height", "above", &["above", "over", "ahead"]),
    ("height", "below", &["below", "under", "underneath", "beneath", "behind"]),
    ("order", "before", &["before", "ago", "earlier", "early"]),
    ("order", "after", &["after", "later", "late", "now", "hence"]),
    ("age", "older", &["older"]),
    ("age", "younger", &["younger"]),
    ("speed", "faster", &["faster"]),
    ("speed", "slower", &["slower"]),
    ("extreme", "least", &["minimum", "smallest", "least", "lowest", "shortest", "min"]),
    ("extreme", "most", &["maximum", "largest", "greatest", "most", "highest", "longest", "max"]),
    ("turn", "clockwise", &["clockwise"]),
    ("turn", "counterclockwise", &["counterclockwise", "anticlockwise"]),
    ("account", "credit", &["credit", "deposit", "earned", "earns", "income", "revenue"]),
    (
        "account",
        "debit",
        &["debit", "withdrawal", "debt", "owed", "owes", "spent", "expense", "expenses"],
    ),
    ("side", "left", &["left", "leftward", "links", "izquierda", "gauche", "esquerda"]),
    ("side", "right", &["right", "rightward", "rechts", "derecha", "droite", "direita"]),
    ("inside", "in", &["inside", "interior"]),
    ("inside", "out", &["outside", "exterior"]),
    ("parity", "even", &["even"]),
    ("parity", "odd", &["odd"]),
    ("length", "long", &["taller", "longer"]),
    ("length", "short", &["shorter"]),
    ("weight", "heavy", &["heavier"]),
    ("weight", "light", &["lighter"]),
    ("heat", "warm", &["warmer", "hotter"]),
    ("heat", "cold", &["colder", "cooler"]),
    ("price", "low", &["cheaper"]),
    ("price", "high", &["expensive", "dearer", "pricier"]),
    ("daytime", "am", &["morning", "matin", "morgens", "vormittags", "mañana"]),
    (
        "daytime",
        "pm",
        &[
            "afternoon",
            "evening",
            "night",
            "tonight",
            "soir",
            "abends",
            "nachmittags",
            "nachts",
            "tarde",
            "noche",
        ],
    ),
    (
        "gender",
        "male",
        &[
            "boy", "boys", "man", "men", "male", "males", "jungen", "männer", "garçons", "hommes",
            "niños", "hombres",
        ],
    ),
    (
        "gender",
        "female",
        &[
            "girl", "girls", "woman", "women", "female", "females", "mädchen", "frauen", "filles",
            "femmes", "niñas", "mujeres",
        ],
    ),
    ("color", "red", &["red"]),
    ("color", "blue", &["blue"]),
    ("color", "green", &["green"]),
    ("color", "yellow", &["yellow"]),
    ("color", "black", &["black"]),
    ("color", "white", &["white"]),
    ("era", "bc", &["bc", "bce"]),
    ("era", "ad", &["ad", "ce"]),
];

/// Groups of words that exclude each other for any counted thing: adults are not children. `|`
/// separates words that exclude each other.
const EXCLUSIVE: [&str; 46] = [
    "adult adults|child children kid kids",
    "son sons|daughter daughters",
    "brother brothers|sister sisters",
    "father fathers|mother mothers",
    "uncle uncles|aunt aunts",
    "husband husbands|wife wives",
    "king kings|queen queens",
    "bull bulls|cow cows",
    "rooster roosters|hen hens",
    "teacher teachers|student students",
    "vertex vertices|edge edges|face faces",
    "row rows|column columns",
    "hit hits|miss misses",
    "proton protons|neutron neutrons|electron electrons",
    "attractive|repulsive",
    "exothermic|endothermic",
    "upward upwards|downward downwards",
    "inward inwards|outward outwards",
    "forward forwards|backward backwards",
    "inner|outer",
    "into|out",
    "overestimate overestimates overestimated|underestimate underestimates underestimated",
    "overvalued|undervalued",
    "overweight|underweight",
    "stretch stretched|compression compressed",
    "spring|summer|fall autumn|winter",
    "pass passes passed|fail fails failed",
    "yes|no",
    "present|absent",
    "entering|leaving",
    "bought|sold",
    "open|closed",
    "full|empty",
    "old|new",
    "heads|tails",
    "real|imaginary",
    "dead|alive",
    "high|low",
    "owes|owed",
    "pays|receives",
    "asset assets|liability liabilities",
    "borrowed|lent",
    "vertical vertically|horizontal horizontally",
    "domestic|foreign",
    "theoretical|experimental",
    "buyer buyers|seller sellers",
];

/// Returns the group of words that exclude each other to which a word belongs, and the word's
/// alternative within the group: adults exclude children.
pub(super) fn exclusive_group(word: &str) -> Option<(&'static str, &'static str)> {
    EXCLUSIVE.iter().find_map(|group| {
        let part = group.split('|').find(|part| part.split(' ').any(|own| own == word))?;
        Some((*group, part))
    })
}

/// Returns the time zone or relative day that a word next to a time names, such as EST or tomorrow,
/// with its kind.
pub(crate) fn time_zone_or_day(word: &str) -> Option<(&'static str, &'static str)> {
    const ZONES: [&str; 18] = [
        "UTC", "EST", "EDT", "CST", "CDT", "MST", "MDT", "PST", "PDT", "ET", "CT", "MT", "PT",
        "CET", "CEST", "BST", "IST", "JST",
    ];
    let zone = if word == "GMT" { "UTC" } else { word };
    if let Some(zone) = ZONES.iter().find(|own| **own == zone) {
        return Some(("zone", zone));
    }
    let day = match word.to_lowercase().as_str() {
        "tomorrow" | "next" | "following" => "tomorrow",
        "yesterday" | "previous" => "yesterday",
        "today" | "same" => "today",
        _ => return None,
    };
    Some(("relative day", day))
}

const MONTHS: [(&str, &str); 12] = [
    ("january", "jan"),
    ("february", "feb"),
    ("march", "mar"),
    ("april", "apr"),
    ("may", "may"),
    ("june", "jun"),
    ("july", "jul"),
    ("august", "aug"),
    ("september", "sep"),
    ("october", "oct"),
    ("november", "nov"),
    ("december", "dec"),
];

const DAYS: [&str; 7] =
    ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"];

/// Returns the name of a month from its number, 1 to 12.
pub(crate) fn month_name(number: usize) -> Option<&'static str> {
    MONTHS.get(number.checked_sub(1)?).map(|(name, _)| *name)
}

/// Returns whether a word is the name of a month, or the first three letters of one.
pub(crate) fn is_month(word: &str) -> bool {
    direction_kind(&word.to_lowercase()).is_some_and(|(kind, _)| kind == "month")
}

/// Returns the compass bearing at the start of `words`, such as "north of east", in which the order
/// of the words matters.
pub(crate) fn compass_bearing(words: &[&str]) -> Option<(&'static str, &'static str)> {
    const BEARINGS: [&str; 8] = [
        "north of east",
        "east of north",
        "north of west",
        "west of north",
        "south of east",
        "east of south",
        "south of west",
        "west of south",
    ];
    let words = words.get(..3)?.join(" ").to_lowercase();
    BEARINGS.iter().find(|own| **own == words).map(|own| ("bearing", *own))
}

/// Words for directions in scripts without spaces. They can be parts of longer words.
const JOINED_DIRECTIONS: [(&str, &str, &str); 31] = [
    ("增", "change", "up"),
    ("上升", "change", "up"),
    ("上涨", "change", "up"),
    ("盈利", "change", "up"),
    ("赚", "change", "up"),
    ("向上", "change", "up"),
    ("减", "change", "down"),
    ("下降", "change", "down"),
    ("下跌", "change", "down"),
    ("亏", "change", "down"),
    ("向下", "change", "down"),
    ("左", "side", "left"),
    ("右", "side", "right"),
    ("提高", "change", "up"),
    ("降低", "change", "down"),
    ("多", "change", "up"),
    ("少", "change", "down"),
    ("向东", "compass", "east"),
    ("向西", "compass", "west"),
    ("向南", "compass", "south"),
    ("向北", "compass", "north"),
    ("男", "gender", "male"),
    ("女", "gender", "female"),
    ("快", "speed", "faster"),
    ("慢", "speed", "slower"),
    ("重", "weight", "heavy"),
    ("轻", "weight", "light"),
    ("早", "order", "before"),
    ("晚", "order", "after"),
    ("上午", "daytime", "am"),
    ("下午", "daytime", "pm"),
];

/// Returns the kind and the meaning of a word for a direction, month or day, or `None` for any
/// other word.
pub(crate) fn direction_kind(word: &str) -> Option<(&'static str, &'static str)> {
    let month = |(long, short): &&(&str, &str)| {
        *long == word || *short == word || (word == "sept" && *short == "sep")
    };
    if let Some((long, _)) = MONTHS.iter().find(month) {
        return Some(("month", long));
    }
    if let Some(day) = DAYS.iter().find(|day| **day == word) {
        return Some(("day", day));
    }
    if let Some((kind, meaning, _)) = DIRECTIONS.iter().find(|(_, _, words)| words.contains(&word))
    {
        return Some((kind, meaning));
    }
    let (_, kind, meaning) = JOINED_DIRECTIONS.iter().find(|(part, ..)| word.contains(part))?;
    Some((kind, meaning))
}

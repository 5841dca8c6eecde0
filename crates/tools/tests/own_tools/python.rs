//! Tests of functions in a Python file as tools: their schemas, and the results of calls.

use std::time::Instant;

use levade_tools::ObservationKind;
use serde_json::json;

use super::*;

const TYPES: &str = include_str!("types.py");

#[tokio::test]
async fn type_hints_and_docstrings_become_schemas() {
    let dir = tempfile::tempdir().unwrap();
    let set = python(dir.path(), TYPES, LONG);
    assert!(set.specs(&Task::default()).is_empty());
    let mut open = open(&set, "a").await;
    let spec = |name: &str| open.specs().iter().find(|spec| spec.name == name).unwrap();
    let names: Vec<&str> = open.specs().iter().map(|spec| spec.name.as_str()).collect();
    let first = ["google", "numpy_style", "sphinx", "shapes", "later"];
    assert_eq!(
        names,
        [&first[..], &["unknown", "cached", "pieces", "later_pieces", "level", "counts"]].concat()
    );
    assert_eq!(spec("google").description, "Finds a city.\n\nOnly large ones.");
    assert_eq!(
        spec("google").parameters,
        json!({
            "type": "object",
            "properties": {
                "city": { "type": "string", "description": "Its name." },
                "days": { "type": "integer", "description": "How many days, on two \
                                                             lines.", "default": 3 },
                "unit": { "type": "string", "enum": ["C", "F"], "description": "Unit.", "default": "C" },
                "near": { "type": ["number", "null"] },
            },
            "required": ["city"],
            "additionalProperties": false,
        })
    );
    let numpy = &spec("numpy_style").parameters["properties"];
    assert_eq!(numpy["points"]["description"], "Points of a path.");
    assert_eq!(
        numpy["points"]["items"]["properties"]["x"],
        json!({ "description": "To the right.", "type": "integer" })
    );
    assert_eq!(numpy["points"]["items"]["required"], json!(["x"]));
    assert_eq!(
        numpy["weights"],
        json!({ "type": "object", "additionalProperties": { "type": "number" }, "description": "Weights." })
    );
    let sphinx = &spec("sphinx").parameters["properties"];
    assert_eq!(
        sphinx["colour"],
        json!({ "type": "string", "enum": ["red", "blue"], "description": "a colour" })
    );
    assert_eq!(sphinx["tree"]["properties"]["left"], json!({ "$ref": "#/$defs/Tree" }));
    assert_eq!(spec("sphinx").parameters["required"], json!(["colour"]));

    // An annotation that cannot be resolved does not affect the remaining ones.
    let unknown = &spec("unknown").parameters["properties"];
    assert_eq!((&unknown["thing"], &unknown["count"]["type"]), (&json!({}), &json!("integer")));
    assert_eq!(unknown["options"]["required"], json!(["level"]));

    let found = text(&mut open, "google", json!({ "city": "Rome", "near": 2 })).await;
    assert_eq!(found, "Rome 3 C 2.0 float");
    let found =
        text(&mut open, "numpy_style", json!({ "points": [{ "x": 1 }], "weights": { "a": 1 } }))
            .await;
    assert_eq!(found, "[Point(x=1, y=0.5)] {'a': 1.0}");
    let found =
        text(&mut open, "sphinx", json!({ "colour": "blue", "tree": { "left": { "leaf": 1 } } }))
            .await;
    assert_eq!(found, "Colour.BLUE {'left': {'leaf': 1}}");
    let found = text(&mut open, "later", json!({ "pair": ["a", 2] })).await;
    assert_eq!(
        found,
        "{\"pair\": [\"a\", 2], \"set\": [1, 2], \"nan\": NaN, \"point\": {\"x\": 1, \"y\": 0.5}}"
    );
    open.close().await.unwrap();
}

#[tokio::test]
async fn return_values_become_text() {
    let dir = tempfile::tempdir().unwrap();
    let set = python(dir.path(), TYPES, LONG);
    let mut open = open(&set, "a").await;
    for (tool, arguments, want) in [
        // Generators are collected item by item, synchronous and asynchronous. The first one is
        // infinite.
        ("pieces", json!({ "count": 2 }), "[{\"number\": 0}, {\"number\": 1}]"),
        ("later_pieces", json!({}), "[\"low\", [1, 2]]"),
        // A string that is a member of an enumeration.
        ("level", json!({}), "low"),
        ("counts", json!({}), "[[\"low\", 1]]"),
        // Null is passed for an optional argument. A cached function is called once.
        ("cached", json!({ "level": "red", "name": null }), "Colour.RED None 1"),
        ("cached", json!({ "level": "red" }), "Colour.RED None 1"),
        ("cached", json!({ "name": "x" }), "none x 2"),
    ] {
        assert_eq!(text(&mut open, tool, arguments).await, want);
    }
    let endless = call_tool(&mut open, "pieces", json!({ "count": 1_000_000_000 })).await;
    assert_eq!(endless.kind, ObservationKind::Ok);
    assert!(endless.text.ends_with("\"[… more are left out here …]\"]"), "{}", endless.text.len());
    open.close().await.unwrap();
}

#[tokio::test]
async fn bound_arguments_of_partial_are_hidden() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), "own.py", TYPES);
    let set = set_of(PythonKeys { functions: vec!["found_in".into()], ..keys(file) }, LONG);
    let mut open = open(&set, "a").await;
    let spec = &open.specs()[0];
    assert_eq!(spec.description, "Finds a city.\n\nOnly large ones.");
    let names: Vec<&String> = spec.parameters["properties"].as_object().unwrap().keys().collect();
    assert_eq!(names, ["city", "days", "near"]);
    let found = text(&mut open, "found_in", json!({ "city": "Rome", "near": 2 })).await;
    assert_eq!(found, "Rome 3 F 2.0 float");
    open.close().await.unwrap();
}

/// Stubs for framework features: defaults of pydantic, and objects that a framework injects into
/// its tools.
const FRAMEWORK: &str = "\
class RunContextWrapper:
    'Much that no model has to know.'
class InjectedToolArg: pass
class FieldInfo:
    def __init__(self, default=..., description=None):
        self.default, self.description = default, description
    def is_required(self): return self.default is ...
    def get_default(self, call_default_factory=False): return self.default
";

#[tokio::test]
async fn arguments_injected_by_frameworks_are_hidden() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "agents.py", FRAMEWORK);
    let text = "from typing import Annotated\n\
        from agents import FieldInfo as Field, InjectedToolArg, RunContextWrapper\n\
        def f(ctx: RunContextWrapper, x: int, user: Annotated[str, InjectedToolArg] = 'me'): \
        return [ctx, x, user]\n\
        def g(a: int = Field(description='A'), b: int = Field(2, 'B'), Context: int = 3): return \
        [a, b, Context]\n";
    let mut open = open(&python(dir.path(), text, LONG), "a").await;
    let parameters =
        |name: &str| open.specs().iter().find(|spec| spec.name == name).unwrap().parameters.clone();
    let f = parameters("f");
    let g = parameters("g");
    assert_eq!(
        (&f["properties"], &f["required"]),
        (&json!({ "x": { "type": "integer" } }), &json!(["x"]))
    );
    let a = json!({ "type": "integer", "description": "A" });
    let b = json!({ "type": "integer", "description": "B", "default": 2 });
    assert_eq!(
        (&g["properties"]["a"], &g["properties"]["b"], &g["required"]),
        (&a, &b, &json!(["a"]))
    );
    for (name, arguments, want) in
        [("f", json!({ "x": 1 }), r#"[null, 1, "me"]"#), ("g", json!({ "a": 1 }), "[1, 2, 3]")]
    {
        assert_eq!(super::text(&mut open, name, arguments).await, want);
    }
    let rejected = super::text(&mut open, "g", json!({})).await;
    assert!(rejected.contains("\"a\" is a required property"), "{rejected}");
    open.close().await.unwrap();
}

#[tokio::test]
async fn python_call_error_names_invalid_arguments() {
    let dir = tempfile::tempdir().unwrap();
    let set = python(dir.path(), TYPES, LONG);
    let mut open = open(&set, "a").await;
    for (tool, arguments, why) in [
        (
            "google",
            json!({}),
            "\"city\" is a required property; the arguments are city, days, unit, near",
        ),
        ("google", json!({ "city": 3 }), "city: 3 is not of type \"string\""),
        ("google", json!({ "city": "a", "day": 3 }), "('day' was unexpected)"),
        ("google", json!({ "city": "a", "unit": "K" }), "unit: \"K\" is not one of"),
        ("sphinx", json!({ "colour": "green" }), "colour: \"green\" is not one of"),
        (
            "sphinx",
            json!({ "colour": "red", "tree": { "left": { "leaf": "x" } } }),
            "tree.left.leaf: \"x\" is not of type",
        ),
        (
            "numpy_style",
            json!({ "points": [{ "x": -1 }], "weights": {} }),
            "points: ValueError: x is below 0",
        ),
        (
            "shapes",
            json!({ "when": "yesterday" }),
            "when: ValueError: Invalid isoformat string: 'yesterday'",
        ),
    ] {
        let observation = call_tool(&mut open, tool, arguments).await;
        assert_eq!(observation.kind, ObservationKind::BadArguments, "{observation:?}");
        assert!(observation.text.contains(why), "{}\n{why}", observation.text);
    }
    open.close().await.unwrap();
}

#[tokio::test]
async fn arguments_map_to_parameters_if_some_are_omitted() {
    let dir = tempfile::tempdir().unwrap();
    let text = "
import asyncio
from typing import Dict
def places(a: int = 1, b: int = 2, /, c: int = 3, **more: float) -> str: return repr((a, b, c, \
more))
def rest(**more): return repr(more)
def keys(x: Dict[int, str]) -> str: return repr(x)
def cancels(): raise asyncio.CancelledError('no')
async def cancels_itself(): raise asyncio.CancelledError('no')
";
    let mut open = open(&python(dir.path(), text, LONG), "a").await;
    for (tool, arguments, want) in [
        ("places", json!({ "b": 5 }), "(1, 5, 3, {})"),
        ("places", json!({ "c": 5, "a": 4 }), "(4, 2, 5, {})"),
        ("places", json!({ "d": 5, "more": 6 }), "(1, 2, 3, {'d': 5.0, 'more': 6.0})"),
        ("rest", json!({ "a": [1], "b": "x" }), "{'a': [1], 'b': 'x'}"),
        ("keys", json!({ "x": { "1": "a", "2": "b" } }), "{1: 'a', 2: 'b'}"),
        (
            "cancels",
            json!({}),
            "CancelledError: no (own.py, line 7, in cancels: def cancels(): raise",
        ),
        ("cancels_itself", json!({}), "CancelledError: no (own.py, line 8"),
    ] {
        let found = super::text(&mut open, tool, arguments).await;
        assert!(found.contains(want), "{found}");
    }
    for (tool, arguments, why) in [
        ("places", json!({ "d": "x" }), "d: \"x\" is not of type \"number\""),
        (
            "keys",
            json!({ "x": { "1": "a", "1.0": "b" } }),
            "two of the keys '1', '1.0' are the same",
        ),
    ] {
        let observation = call_tool(&mut open, tool, arguments).await;
        assert_eq!(observation.kind, ObservationKind::BadArguments, "{observation:?}");
        assert!(observation.text.contains(why), "{}", observation.text);
    }
    open.close().await.unwrap();
}

#[tokio::test]
async fn unknown_function_error_lists_known_functions() {
    let dir = tempfile::tempdir().unwrap();
    let text = "def f(): pass\nclass Shop:\n    def buy(self): 'Buys.'\n";
    let file = write(dir.path(), "own.py", text);
    let set = set_of(PythonKeys { functions: vec!["nope".into()], ..keys(file) }, LONG);
    let why = set.open(&attempt("a", json!({}))).await.unwrap_err().to_string();
    assert!(why.contains("`functions` names 'nope'") && why.contains("there is Shop, f"), "{why}");
}

#[tokio::test]
async fn arguments_are_converted_to_annotated_types() {
    let dir = tempfile::tempdir().unwrap();
    let text = "
import datetime, decimal, enum
from typing import Dict, Optional
class Unit(enum.Enum):
    C = 'c'
def keys(x: Dict[int, str], y: Dict[Unit, float] = {}) -> str: return repr((x, y))
def money(x: decimal.Decimal) -> str: return repr(x)
def when(x: datetime.datetime) -> str: return repr(x)
def real(x: float) -> str: return repr(x)
def maybe(x: Optional[decimal.Decimal]) -> str: return repr(x)
def kinds(x) -> str: return str([type(x).__name__, type(x['a'][0]).__name__])
def fresh(x: list = []) -> list:
    x.append(1)
    return x
";
    let set = python(dir.path(), text, LONG);
    let mut open = open(&set, "a").await;
    for (tool, arguments, want) in [
        ("keys", json!({ "x": { "1": "a" }, "y": { "c": 2 } }), "({1: 'a'}, {<Unit.C: 'c'>: 2.0})"),
        ("money", json!({ "x": 1.5 }), "Decimal('1.5')"),
        ("money", json!({ "x": "1.50" }), "Decimal('1.50')"),
        (
            "money",
            number("123456789.123456789123456789"),
            "Decimal('123456789.123456789123456789')",
        ),
        ("money", number("1.10"), "Decimal('1.10')"),
        ("maybe", number("1.10"), "Decimal('1.10')"),
        ("real", number("1.10"), "1.1"),
        ("kinds", number("{\"a\": [1.10]}"), "['dict', 'float']"),
        (
            "when",
            json!({ "x": "2024-02-03T04:05:06Z" }),
            "datetime.datetime(2024, 2, 3, 4, 5, 6, tzinfo=datetime.timezone.utc)",
        ),
        ("fresh", json!({}), "[1]"),
        ("fresh", json!({}), "[1]"),
    ] {
        assert_eq!(super::text(&mut open, tool, arguments).await, want);
    }
    let huge: serde_json::Value =
        serde_json::from_str(&format!("{{\"x\": 1{}}}", "0".repeat(400))).unwrap();
    for (tool, arguments, why) in [
        ("keys", json!({ "x": { "one": "a" } }), "x: the key 'one' is none of its type"),
        ("keys", json!({ "x": {}, "y": { "k": 2 } }), "y: the key 'k' is none of its type"),
        ("real", huge, "x: OverflowError"),
    ] {
        let observation = call_tool(&mut open, tool, arguments).await;
        assert_eq!(observation.kind, ObservationKind::BadArguments, "{observation:?}");
        assert!(observation.text.contains(why), "{}", observation.text);
    }
    open.close().await.unwrap();
}

fn number(number: &str) -> Value {
    serde_json::from_str(&format!("{{\"x\": {number}}}")).unwrap()
}

#[tokio::test]
async fn non_json_defaults_are_kept_but_hidden() {
    let dir = tempfile::tempdir().unwrap();
    let source = "
import dataclasses, enum
from typing import Annotated, Optional

class Unit(str, enum.Enum):
    C = 'C'
    F = 'F'

class Odd(enum.Enum):
    FAR = float('inf')
    ONE = 1

@dataclasses.dataclass
class Range:
    low: float = float('-inf')
    high: list = dataclasses.field(default_factory=lambda: [float('inf')])

class Bound:
    def __init__(self, **bounds):
        self.__dict__.update(bounds)

def within(x: float, limit: float = float('inf'), low: float = float('nan')) -> str:
    return repr((x, limit, low))

def listed(x: list = [float('inf')], y: dict = {'a': float('nan')}, half: str = '\\ud83d', n: int \
= 10**400) -> str:
    return repr((x, y, len(half), n > 2**64))

def ranged(range: Range = Range(), odd: Odd = Odd.FAR, unit: Optional[Unit] = None) -> str:
    return repr((range, odd, unit))

def bounded(n: Annotated[int, Bound(ge=1), Bound(le=9)], s: Annotated[str, Bound(max_length=2, \
pattern='^a')] = 'a',
            l: Annotated[list[int], Bound(min_length=1)] = [0], f: Annotated[float, \
            Bound(lt=float('inf'))] = 1.5) -> str:
    return repr((n, s, l, f))
";
    let set = python(dir.path(), source, LONG);
    let mut open = open(&set, "a").await;
    let properties = |name: &str| {
        let spec = open.specs().iter().find(|spec| spec.name == name).unwrap();
        assert!(!spec.parameters["required"].to_string().contains("limit"));
        spec.parameters["properties"].clone()
    };
    let number = json!({ "type": "number" });
    assert_eq!(properties("within"), json!({ "x": number, "limit": number, "low": number }));
    assert!(!properties("listed").to_string().contains("default"));
    assert_eq!(properties("ranged")["odd"]["enum"], json!(["FAR", 1]));
    assert_eq!(
        properties("bounded"),
        json!({
            "n": { "type": "integer", "minimum": 1, "maximum": 9 },
            "s": { "type": "string", "maxLength": 2, "pattern": "^a", "default": "a" },
            "l": { "type": "array", "items": { "type": "integer" }, "minItems": 1 },
            "f": { "type": "number", "default": 1.5 },
        })
    );
    assert_eq!(text(&mut open, "within", json!({ "x": 3 })).await, "(3.0, inf, nan)");
    assert_eq!(text(&mut open, "listed", json!({})).await, "([inf], {'a': nan}, 1, True)");
    assert_eq!(
        text(&mut open, "ranged", json!({ "range": {} })).await,
        "(Range(low=-inf, high=[inf]), <Odd.FAR: inf>, None)"
    );
    assert_eq!(
        text(&mut open, "ranged", json!({ "unit": "K" })).await,
        "Error: unit: \"K\" is not one of \"C\", \"F\""
    );
    for wrong in [
        json!({ "n": 10 }),
        json!({ "n": 1, "s": "abc" }),
        json!({ "n": 1, "s": "b" }),
        json!({ "n": 1, "l": [] }),
    ] {
        assert_eq!(
            call_tool(&mut open, "bounded", wrong).await.kind,
            ObservationKind::BadArguments
        );
    }
    open.close().await.unwrap();
}

#[tokio::test]
async fn sync_and_async_calls_run_concurrently() {
    let dir = tempfile::tempdir().unwrap();
    let text = "import time, asyncio\n\
                def slow(): time.sleep(0.5); return 'slow'\n\
                async def waits(): await asyncio.sleep(0.5); return 'waits'\n";
    let set = python(dir.path(), text, LONG);
    let mut open = open(&set, "a").await;
    let start = Instant::now();
    let calls =
        (0..12).map(|i| call(if i % 2 == 0 { "slow" } else { "waits" }, json!({}))).collect();
    let found = call_tools(&mut open, calls).await;
    for (i, observation) in found.iter().enumerate() {
        assert_eq!(observation.text, if i % 2 == 0 { "slow" } else { "waits" });
    }
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    open.close().await.unwrap();
}

#[tokio::test]
async fn tools_are_listed_marked_or_public_functions() {
    let dir = tempfile::tempdir().unwrap();
    let text = "from json import dumps\n\
                def one(): return 1\n\
                def two(): return 2\n\
                def _hidden(): return 3\n";
    assert_eq!(tool_names(python(dir.path(), text, LONG)).await, ["one", "two"]);
    let marked = format!(
        "{text}@tool\ndef three(): return 3\n@function_tool(strict=True)\ndef four(): return 4\n"
    );
    assert_eq!(tool_names(python(dir.path(), &marked, LONG)).await, ["three", "four"]);
    let of = |functions: &[&str]| {
        let file = write(dir.path(), "own.py", text);
        let functions = functions.iter().map(|name| (*name).to_owned()).collect();
        set_of(PythonKeys { functions, ..keys(file) }, LONG)
    };
    assert_eq!(tool_names(of(&["two", "_hidden"])).await, ["two", "_hidden"]);
    let error = of(&["tow"]).open(&attempt("a", json!({}))).await.unwrap_err().to_string();
    assert!(
        error
            .contains("`functions` names 'tow', which is not defined in own.py; there is one, two"),
        "{error}"
    );
}

async fn tool_names(set: ToolSet) -> Vec<String> {
    let open = open(&set, "a").await;
    let names: Vec<String> = open.specs().iter().map(|spec| spec.name.clone()).collect();
    open.close().await.unwrap();
    names
}

#[tokio::test]
async fn failed_load_reports_python_error() {
    let dir = tempfile::tempdir().unwrap();
    for (text, why) in [
        ("x = 1\ndef f(:\n    pass\n", "own.py\", line 2"),
        ("x = 1\ndef f(:\n    pass\n", "SyntaxError: invalid syntax"),
        (
            "import os\nimport no_such_module\n",
            "No module named 'no_such_module' (own.py, line 2, in <module>",
        ),
        ("exit(3)\n", "it calls exit(3) while it is loaded (own.py, line 1"),
        ("x = 1\n", "own.py has no tools: no public function"),
        ("def f(*args): pass\n", "f cannot be a tool: its parameter *args has no name"),
        (
            "class T:\n    def __init__(self, config, schema): config['url']\n    def \
             execute(self, i, p): pass\n",
            "T cannot be a tool: KeyError: 'url' (own.py, line 2, in __init__",
        ),
        ("import os\nos._exit(7)\n", "the Python process ended (exit code 7): it printed nothing"),
    ] {
        let set = python(dir.path(), text, LONG);
        let error = set.open(&attempt("a", json!({}))).await.unwrap_err().to_string();
        assert!(error.starts_with("tool \"own\" could not be opened: "), "{error}");
        assert!(error.contains(why), "{error}\n{why}");
    }
    let missing =
        set_of(PythonKeys { python: "no-such-python".into(), ..keys("own.py".into()) }, LONG);
    let error = missing.open(&attempt("a", json!({}))).await.unwrap_err().to_string();
    assert!(error.contains("cannot start no-such-python"), "{error}");
    let file = write(dir.path(), "own.py", "import time\ntime.sleep(60)\n");
    let slow = set_of(PythonKeys { start_seconds: 0.5, ..keys(file) }, LONG);
    let error = slow.open(&attempt("a", json!({}))).await.unwrap_err().to_string();
    assert!(error.contains("the worker was still loading after 500ms"), "{error}");
}

#[tokio::test]
async fn worker_gets_named_variables_and_sibling_modules() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "beside.py", "VALUE = 7\n");
    let text = "import os, sys, beside\n\
                def seen(): return [sorted(os.environ), beside.VALUE, os.getcwd(), \
                sys.stdin.read()]\n";
    let set = python(dir.path(), text, LONG);
    let mut open = open(&set, "a").await;
    let found: Vec<Value> =
        serde_json::from_str(&super::text(&mut open, "seen", json!({})).await).unwrap();
    // An interpreter that is a script may set further variables.
    let has = |name: &str| found[0].as_array().unwrap().iter().any(|found| found == name);
    assert!(has("PATH") && !has("CARGO_MANIFEST_DIR") && !has("CARGO_PKG_NAME"), "{}", found[0]);
    let here = dir.path().canonicalize().unwrap();
    assert_eq!(found[1..], [json!(7), json!(here.display().to_string()), json!("")]);
    open.close().await.unwrap();
}

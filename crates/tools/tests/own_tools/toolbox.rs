//! Tests of classes in a Python file whose methods are tools.

use levade_tools::ObservationKind;
use serde_json::json;

use super::*;

const BANK: &str = include_str!("bank.py");

async fn open_for(set: &ToolSet, name: &str, row: Value) -> OpenTools {
    set.open(&attempt(name, row)).await.unwrap()
}

fn names(open: &OpenTools) -> Vec<&str> {
    open.specs().iter().map(|spec| spec.name.as_str()).collect()
}

#[tokio::test]
async fn class_methods_share_state_within_one_attempt() {
    let dir = tempfile::tempdir().unwrap();
    let set = python(dir.path(), BANK, LONG);
    let mut ann =
        open_for(&set, "a", json!({ "owner": "Ann", "balance": 5, "question": "?" })).await;
    let mut bob = open_for(&set, "b", json!({ "owner": "Bob" })).await;
    assert_eq!(names(&ann), ["entries", "deposit", "later", "pair", "add", "kind"]);
    let deposit = &ann.specs()[1];
    assert_eq!(deposit.description, "Pays in.");
    assert_eq!(
        deposit.parameters["properties"]["amount"],
        json!({ "type": "number", "description": "How much." })
    );
    assert_eq!(ann.opening().unwrap(), "The account of Ann (balance, owner, question).");

    let paid = text(&mut ann, "deposit", json!({ "amount": 2 })).await;
    assert_eq!(paid, r#"{"balance": 7.0, "log": [2.0], "rates": [5, 2.0]}"#);
    let paid = text(&mut ann, "deposit", json!({ "amount": 3 })).await;
    assert_eq!(paid, r#"{"balance": 10.0, "log": [2.0, 3.0], "rates": [5, 2.0, 3.0]}"#);
    let paid = text(&mut bob, "deposit", json!({ "amount": 1 })).await;
    assert_eq!(paid, r#"{"balance": 1.0, "log": [1.0], "rates": [5, 1.0]}"#, "nothing is shared");
    assert_eq!(text(&mut ann, "entries", json!({})).await, "[2.0, 3.0]");
    assert_eq!(text(&mut ann, "later", json!({})).await, "later");
    assert_eq!(text(&mut ann, "add", json!({ "a": 1, "b": 2 })).await, "3");
    assert_eq!(text(&mut ann, "kind", json!({})).await, "Bank");
    let pair = call_tool(&mut ann, "pair", json!({})).await;
    assert_eq!((pair.text.as_str(), pair.reward), ("[\"text\", 2.0]", None));

    let failed = call_tool(&mut ann, "deposit", json!({ "amount": -1 })).await;
    assert_eq!(failed.kind, ObservationKind::Failed);
    assert!(
        failed.text.contains("ValueError: -1.0 is not positive (own.py, line "),
        "{}",
        failed.text
    );
    let wrong = call_tool(&mut ann, "deposit", json!({ "amount": "much" })).await;
    assert_eq!(wrong.kind, ObservationKind::BadArguments);
    for none in ["undocumented", "_hidden", "size", "reset", "close", "calc_reward"] {
        assert_eq!(call_tool(&mut ann, none, json!({})).await.kind, ObservationKind::UnknownTool);
    }

    let (found, errors) = ann.scorer_input().await;
    assert_eq!(
        (Value::Object(found), errors.len()),
        (json!({ "own": { "Bank": { "reward": 10.0 } } }), 0)
    );
    ann.close().await.unwrap();
    drop(bob);
    let closed = dir.path().join("closed");
    for _ in 0..200 {
        if std::fs::read_to_string(&closed).is_ok_and(|text| text.lines().count() == 4) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let closed = std::fs::read_to_string(&closed).unwrap();
    assert_eq!(
        closed, "close Ann\ndel Ann\nclose Bob\ndel Bob\n",
        "also of an attempt that was given up"
    );
}

#[tokio::test]
async fn constructor_gets_row_fields() {
    let dir = tempfile::tempdir().unwrap();
    let set = python(dir.path(), BANK, LONG);
    let error = set.open(&attempt("a", json!({ "name": "Ann" }))).await.unwrap_err().to_string();
    assert!(
        error.contains("Bank needs 'owner', and the row of the task has no such field"),
        "{error}"
    );
    let kwargs = json!({ "tools_kwargs": { "Bank": { "create_kwargs": { "owner": "Eve", "balance": 1 } } } });
    let mut eve = open_for(&set, "b", json!({ "owner": "Ann", "extra_info": kwargs })).await;
    let paid = text(&mut eve, "deposit", json!({ "amount": 1 })).await;
    assert!(paid.starts_with(r#"{"balance": 2.0"#), "{paid}");
    eve.close().await.unwrap();
    let all = "class Row:\n    def __init__(self, row): self.row = row\n    def fields(self) -> \
               list:\n        return sorted(self.row)\n";
    let set = python(dir.path(), all, LONG);
    let mut open = open_for(&set, "c", json!({ "b": 1, "a": 2 })).await;
    assert_eq!(text(&mut open, "fields", json!({})).await, "[\"a\", \"b\"]");
    assert_eq!(open.opening(), None);
    open.close().await.unwrap();
}

#[tokio::test]
async fn class_is_selected_by_name_decorator_or_uniqueness() {
    let a = "class A:\n    def a(self) -> str:\n        return 'a'\n";
    let b = "class B:\n    def b(self) -> str:\n        return 'b'\n    def c(self) -> str:\n        return 'c'\n";
    let dir = tempfile::tempdir().unwrap();
    let tools = async |text: &str, functions: &[&str]| {
        let mut options = keys(write(dir.path(), "own.py", text));
        options.functions = functions.iter().map(|name| (*name).to_owned()).collect();
        let set = set_of(options, LONG);
        let opened = set.open(&attempt("a", json!({}))).await;
        match opened {
            Ok(open) => {
                let found = names(&open).join(" ");
                open.close().await.unwrap();
                Ok(found)
            }
            Err(error) => Err(error.to_string()),
        }
    };
    assert_eq!(tools(a, &[]).await.unwrap(), "a");
    let both = format!("{a}{b}");
    let error = tools(&both, &[]).await.unwrap_err();
    assert!(
        error.contains("several classes")
            && error.contains("A, B")
            && error.contains("`functions`"),
        "{error}"
    );
    assert_eq!(tools(&both, &["B"]).await.unwrap(), "b c");
    assert_eq!(tools(&both, &["A", "B"]).await.unwrap(), "a b c");
    assert_eq!(tools(&format!("{a}@tool\n{b}"), &[]).await.unwrap(), "b c");
    let marked = both.replace("    def c(", "    @tool\n    def c(");
    assert_eq!(tools(&marked, &[]).await.unwrap(), "c");
    // A class in a file with functions is not a tool itself; the functions use it.
    let function = "def f() -> str:\n    return 'f'\n";
    assert_eq!(tools(&format!("{a}{function}"), &[]).await.unwrap(), "f");
    assert_eq!(tools(&format!("{a}{function}"), &["A", "f"]).await.unwrap(), "a f");
    let values = "import dataclasses, enum\nclass E(Exception):\n    def e(self) -> str: pass\n\
                  class N(enum.Enum):\n    X = 1\n    def n(self) -> str: pass\n";
    assert_eq!(tools(&format!("{values}{a}"), &[]).await.unwrap(), "a");
    let error = tools("class Plain:\n    def p(self): pass\n", &["Plain"]).await.unwrap_err();
    assert!(error.contains("Plain cannot be a tool") && error.contains("docstrings"), "{error}");
    let clash = format!("{a}{}", a.replace("class A", "class C"));
    let error = tools(&clash, &["A", "C"]).await.unwrap_err();
    assert!(error.contains("two of its tools are called 'a'"), "{error}");
}

#[tokio::test]
async fn constructor_defaults_are_not_shared_between_attempts() {
    let dir = tempfile::tempdir().unwrap();
    let text = "class A:\n    def __init__(self, items: list = [1]): self.items = items\n    def \
                add(self) -> int:\n        self.items.append(1)\n        return len(self.items)\n";
    let set = python(dir.path(), text, LONG);
    for name in ["a", "b"] {
        let mut open = open_for(&set, name, json!({})).await;
        assert_eq!(super::text(&mut open, "add", json!({})).await, "2");
        open.close().await.unwrap();
    }
}

#[tokio::test]
async fn class_state_is_not_shared_between_attempts() {
    let dir = tempfile::tempdir().unwrap();
    let text = "
class A:
    shelves = ([], [])
    books = []

    def __new__(cls, *args):
        return super().__new__(cls)

    def __getattr__(self, name):
        raise RuntimeError(name)

    def add(self, bag: list = []) -> list:
        for items in (self.shelves[0], self.books, bag):
            items.append(1)
        return [len(self.shelves[0]), len(self.books), len(bag)]
";
    let set = python(dir.path(), text, LONG);
    for name in ["a", "b"] {
        let mut open = open_for(&set, name, json!({})).await;
        assert_eq!(super::text(&mut open, "add", json!({})).await, "[1, 1, 1]");
        assert_eq!(super::text(&mut open, "add", json!({})).await, "[2, 2, 1]");
        open.close().await.unwrap();
    }
}

#[tokio::test]
async fn singleton_class_is_rejected() {
    let by_new = "
class A:
    one = None
    def __new__(cls):
        cls.one = cls.one or object.__new__(cls)
        return cls.one
    def a(self) -> str: return 'a'
";
    let by_metaclass = "
class Meta(type):
    one = None
    def __call__(cls):
        Meta.one = Meta.one or super().__call__()
        return Meta.one
class A(metaclass=Meta):
    def a(self) -> str: return 'a'
";
    for text in [by_new, by_metaclass] {
        let dir = tempfile::tempdir().unwrap();
        let set = python(dir.path(), text, LONG);
        let first = open_for(&set, "a", json!({})).await;
        let error = set.open(&attempt("b", json!({}))).await.unwrap_err().to_string();
        assert!(error.contains("A gives the same object again"), "{error}");
        first.close().await.unwrap();
    }
}

#[tokio::test]
async fn failed_reset_fails_open_and_closes_object() {
    let dir = tempfile::tempdir().unwrap();
    let text = "class A:\n    def a(self) -> str: return 'a'\n    def reset(self): raise \
                RuntimeError('no seed')\n    def close(self): open('closed', 'w').close()\n";
    let set = python(dir.path(), text, LONG);
    let error = set.open(&attempt("a", json!({}))).await.unwrap_err().to_string();
    assert!(error.contains("RuntimeError: no seed"), "{error}");
    assert!(dir.path().join("closed").exists());
}

const DESK: &str = r#"
class Desk:
    def __init__(self, orders):
        self.orders = orders

    def cancel(self, order: int):
        """Cancels an order."""
        if str(order) not in self.orders:
            raise ValueError(f"there is no order {order}")
        self.orders[str(order)]["status"] = "cancelled"

    def final_state(self):
        return self.orders
"#;

#[tokio::test]
async fn scorer_input_has_final_and_expected_state() {
    let dir = tempfile::tempdir().unwrap();
    let set = python(dir.path(), DESK, LONG);
    let orders = json!({ "1": { "status": "open" }, "2": { "status": "open" } });
    let row = |actions: Value| json!({ "orders": orders, "expected_actions": actions });
    let mut open = open_for(&set, "a", row(cancel_calls(2))).await;
    assert_eq!(names(&open), ["cancel"], "the state is no tool");
    call_tool(&mut open, "cancel", json!({ "order": 1 })).await;
    let (found, errors) = open.scorer_input().await;
    assert_eq!(errors.len(), 0);
    assert_eq!(
        Value::Object(found)["own"]["Desk"],
        json!({
            "state": order_states("cancelled", "open"),
            "expected_state": order_states("open", "cancelled"),
        })
    );
    // The expected calls start from the row, not from what the agent has made of it.
    let mut open = open_for(&set, "b", row(cancel_calls(1))).await;
    call_tool(&mut open, "cancel", json!({ "order": 1 })).await;
    let found = Value::Object(open.scorer_input().await.0);
    assert_eq!(found["own"]["Desk"]["state"], found["own"]["Desk"]["expected_state"]);
    for (actions, why) in [
        (
            cancel_calls(3),
            "call 0 of `expected_actions`, of cancel, failed: ValueError: there is no order 3",
        ),
        (json!([{ "name": "pay" }]), "call 0 of `expected_actions` is of 'pay'; Desk has cancel"),
        (json!("cancel"), "must be a list of calls"),
    ] {
        let mut open = open_for(&set, "c", row(actions)).await;
        let found = Value::Object(open.scorer_input().await.0);
        let facts = &found["own"]["Desk"];
        assert!(facts["expected_error"].as_str().unwrap().contains(why), "{facts}");
        assert_eq!(facts.get("expected_state"), None);
    }
    // Without such calls, there is only the state.
    let mut open = open_for(&set, "d", json!({ "orders": orders })).await;
    let found = Value::Object(open.scorer_input().await.0);
    assert_eq!(found["own"]["Desk"], json!({ "state": orders }));
}

fn cancel_calls(order: u32) -> Value {
    json!([{ "name": "cancel", "arguments": { "order": order } }])
}

fn order_states(a: &str, b: &str) -> Value {
    json!({ "1": { "status": a }, "2": { "status": b } })
}

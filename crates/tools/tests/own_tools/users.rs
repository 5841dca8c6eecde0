//! Tests of users in Python: classes of a file, and verl's interactions.

use levade_tools::{PythonUser, PythonUserKeys, PythonUserResponse, PythonUsers};
use serde_json::json;

use super::*;

fn users(keys: PythonUserKeys) -> PythonUsers {
    let keys = PythonUserKeys { workers: 1, start_seconds: 60.0, ..keys };
    PythonUsers::new("customer", &keys, supervisor())
}

fn users_of(dir: &Path, text: &str) -> PythonUsers {
    users(PythonUserKeys { file: write(dir, "user.py", text), ..PythonUserKeys::default() })
}

async fn open(users: &PythonUsers, name: &str, row: Value) -> Result<PythonUser, String> {
    users.open(&attempt(name, row), true).await
}

fn agent_message(text: &str) -> Value {
    json!([{ "role": "assistant", "content": text }])
}

fn message(text: &str) -> PythonUserResponse {
    PythonUserResponse { text: Some(text.into()), ends: false, score: None }
}

const CUSTOMER: &str = r#"
class Customer:
    def __init__(self, wish, mood="calm"):
        self.wish, self.mood, self.heard = wish, mood, []

    def respond(self, messages):
        if not messages:
            return f"{self.wish} ({self.mood})"
        self.heard.append(messages[-1]["content"])
        if self.heard[-1] == "break":
            raise ValueError("too rude")
        if self.heard[-1] == "odd":
            return 7
        return None if self.heard[-1] == "bye" else ", ".join(self.heard)

    def calc_reward(self):
        return len(self.heard) / 2
"#;

#[tokio::test]
async fn python_user_keeps_state_of_each_attempt() {
    let dir = tempfile::tempdir().unwrap();
    let users = users_of(dir.path(), CUSTOMER);
    let ann = open(&users, "a", json!({ "wish": "A pen", "mood": "cross" })).await.unwrap();
    let bob = open(&users, "b", json!({ "wish": "A mug" })).await.unwrap();
    assert_eq!(ann.respond_to(json!([])).await.unwrap(), message("A pen (cross)"));
    assert_eq!(bob.respond_to(json!([])).await.unwrap(), message("A mug (calm)"));
    assert_eq!(ann.respond_to(agent_message("Hi")).await.unwrap(), message("Hi"));
    assert_eq!(ann.respond_to(agent_message("Yes?")).await.unwrap(), message("Hi, Yes?"));
    assert_eq!(bob.respond_to(agent_message("One")).await.unwrap(), message("One"));
    let end = ann.respond_to(agent_message("bye")).await.unwrap();
    assert_eq!(end, PythonUserResponse { text: None, ends: true, score: None });
    assert_eq!(ann.finish().await, Ok(Some(1.5)));
    assert_eq!(bob.finish().await, Ok(Some(0.5)));
}

#[tokio::test]
async fn python_user_errors_name_the_failure() {
    let dir = tempfile::tempdir().unwrap();
    let users = users_of(dir.path(), CUSTOMER);
    let missing = open(&users, "a", json!({ "mood": "calm" })).await.err().unwrap();
    assert!(missing.contains("needs 'wish'"), "{missing}");
    let user = open(&users, "b", json!({ "wish": "A pen" })).await.unwrap();
    let broken = user.respond_to(agent_message("break")).await.unwrap_err();
    assert!(broken.contains("ValueError: too rude (user.py, line 11"), "{broken}");
    let odd = user.respond_to(agent_message("odd")).await.unwrap_err();
    assert!(odd.contains("Customer.respond gave 7"), "{odd}");
    for (text, why) in [
        ("def respond(messages):\n    return ''\n", "has 0 classes"),
        (
            "class A:\n    def respond(self, m): pass\nclass B:\n    def respond(self, m): pass\n",
            "A, B",
        ),
        ("class A(:\n", "SyntaxError"),
    ] {
        let error = open(&users_of(dir.path(), text), "c", json!({})).await.err().unwrap();
        assert!(error.contains(why), "{error}");
    }
}

/// An interaction as users of verl write it.
const COUNTING: &str = r#"
from verl.interactions.base import BaseInteraction

class CountInteraction(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        self.known, self.unit = {}, config.get("unit", "")

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.known[instance_id] = [ground_truth, 0.0, kwargs["name"]]
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        known = self.known[instance_id]
        assert kwargs["name"] == known[2], "the row's arguments contain the name"
        known[1] = float(messages[-1]["content"] == known[0] + self.unit)
        done = known[1] == 1.0
        return done, "Right." if done else "Try again.", known[1], {"turns": len(messages)}

    async def calculate_score(self, instance_id, **kwargs):
        return self.known[instance_id][1]

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.known[instance_id]
"#;

#[tokio::test]
async fn verl_interactions_run_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "counting.py", COUNTING);
    let config = json!({ "interaction": [
        { "name": "plain", "class_name": "counting.CountInteraction", "config": {} },
        { "name": "metric", "class_name": "counting.CountInteraction", "config": { "unit": " kg" } },
    ] });
    let config = write(dir.path(), "interaction.json", &config.to_string());
    let users = users(PythonUserKeys { config, ..PythonUserKeys::default() });
    for (name, wrong, right) in [("plain", "7 kg", "7"), ("metric", "7", "7 kg")] {
        let context = attempt(name, interaction_row(name));
        let opens = users.open(&context, true).await.err().unwrap();
        assert!(opens.contains("set `opens = false`"), "{opens}");
        let user = users.open(&context, false).await.unwrap();
        assert_eq!(
            user.respond_to(agent_message(wrong)).await.unwrap(),
            response("Try again.", false, 0.0)
        );
        assert_eq!(
            user.respond_to(agent_message(right)).await.unwrap(),
            response("Right.", true, 1.0)
        );
        assert_eq!(user.finish().await, Ok(Some(1.0)));
    }
    let unknown = users.open(&attempt("c", interaction_row("other")), false).await.err().unwrap();
    assert!(unknown.contains("'other', but must be one of plain, metric"), "{unknown}");
}

fn interaction_row(name: &str) -> Value {
    json!({ "extra_info": { "interaction_kwargs": { "name": name, "ground_truth": "7" } } })
}

fn response(text: &str, ends: bool, score: f64) -> PythonUserResponse {
    PythonUserResponse { text: Some(text.to_owned()), ends, score: Some(score) }
}

//! Tests of tool classes with verl's interface, and of verl's tool configurations.

use serde_json::json;

use super::*;

const GSM8K: &str = include_str!("gsm8k.py");
const CONFIG: &str = include_str!("tools.yaml");

fn verl(dir: &Path, config: PathBuf) -> ToolSet {
    write(dir, "gsm8k.py", GSM8K);
    let keys = PythonKeys { file: None, config: Some(config), ..keys(PathBuf::new()) };
    set_of(keys, LONG)
}

/// Writes the same configuration as JSON, which needs no YAML parser.
fn as_json(dir: &Path) -> PathBuf {
    let config = json!({ "tools": [{
        "class_name": "gsm8k.Gsm8kTool",
        "config": { "type": "native", "log": dir.join("log").display().to_string() },
        "tool_schema": { "type": "function", "function": {
            "name": "calc_gsm8k_reward",
            "description": "Scores an answer.",
            "parameters": {
                "type": "object",
                "properties": {
                    "answer": { "type": "str", "description": "The answer" },
                    "steps": { "type": "array", "item": { "type": "string" } },
                },
                "require": ["answer"],
            },
        } },
    }] });
    write(dir, "tools.json", &config.to_string())
}

#[tokio::test]
async fn attempt_instance_gets_kwargs_from_row() {
    let dir = tempfile::tempdir().unwrap();
    let set = verl(dir.path(), as_json(dir.path()));
    let mut x = set.open(&attempt("x", row_with_truth("7"))).await.unwrap();
    let mut y = set.open(&attempt("y", row_with_truth("8"))).await.unwrap();
    let parameters = &x.specs()[0].parameters;
    // Misspelled schema keywords are corrected.
    assert_eq!(
        parameters["properties"]["steps"],
        json!({ "type": "array", "items": { "type": "string" } })
    );
    assert_eq!(parameters["properties"]["answer"]["type"], "string");
    assert_eq!(parameters["required"], json!(["answer"]));
    let reward_output = call_tool(&mut x, "calc_gsm8k_reward", json!({ "answer": "7" })).await;
    assert_eq!((reward_output.text.as_str(), reward_output.reward), ("'7' gives 1.0!", Some(0.0)));
    assert_eq!(reward_output.metrics["tries"], 1.0);
    let second = call_tool(&mut x, "calc_gsm8k_reward", json!({ "answer": "7" })).await;
    assert_eq!((second.reward, second.metrics["tries"]), (Some(-0.05), 2.0));
    let wrong = call_tool(&mut y, "calc_gsm8k_reward", json!({ "answer": "7" })).await;
    assert_eq!((wrong.text.as_str(), wrong.metrics["tries"]), ("'7' gives 0.0!", 1.0));
    let bad = call_tool(&mut y, "calc_gsm8k_reward", json!({ "steps": [1] })).await;
    assert!(
        bad.text.contains("\"answer\" is a required property") || bad.text.contains("steps.0"),
        "{}",
        bad.text
    );
    let (found, errors) = x.scorer_input().await;
    assert_eq!(
        (Value::Object(found), errors),
        (json!({ "own": { "calc_gsm8k_reward": { "reward": 1.0 } } }), vec![])
    );
    let (found, _) = y.scorer_input().await;
    assert_eq!(found["own"]["calc_gsm8k_reward"]["reward"], 0.0);
    x.close().await.unwrap();
    // This attempt is cancelled.
    drop(y);
    let log = dir.path().join("log");
    let start = std::time::Instant::now();
    while std::fs::read_to_string(&log).unwrap_or_default().lines().count() < 2 {
        assert!(start.elapsed() < Duration::from_secs(20));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn row_with_truth(truth: &str) -> Value {
    let kwargs = json!({ "calc_gsm8k_reward": {
            "create_kwargs": { "ground_truth": truth }, "execute_kwargs": { "mark": "!" },
        } });
    json!({ "extra_info": { "need_tools_kwargs": true, "tools_kwargs": kwargs } })
}

/// Tools that get the data of their row as from verl's agent loop: `create(create_kwargs={…})`.
const NESTED: &str = "\
class _Base:
    def __init__(self, config, tool_schema):
        self.truth = None
    def execute(self, instance_id, parameters, **kwargs):
        return repr(self.truth)
class Named(_Base):
    tool_schema = {'name': 'named', 'description': '', 'parameters': {'type': 'object'}}
    async def create(self, instance_id=None, create_kwargs=None):
        self.truth = create_kwargs
class Any(_Base):
    tool_schema = {'name': 'any', 'description': '', 'parameters': {'type': 'object'}}
    async def create(self, instance_id=None, **kwargs):
        self.truth = (kwargs['create_kwargs'].get('truth'), kwargs.get('truth'))
class Own(_Base):
    tool_schema = {'name': 'own', 'description': '', 'parameters': {'type': 'object'}}
    def create(self, instance_id=None, truth=5):
        self.truth = truth
";

#[tokio::test]
async fn create_gets_row_kwargs_as_in_verl() {
    let dir = tempfile::tempdir().unwrap();
    let set = python(dir.path(), NESTED, LONG);
    let create_kwargs = json!({ "create_kwargs": { "truth": 7 } });
    let kwargs = json!({ "named": create_kwargs, "any": create_kwargs, "own": create_kwargs });
    let task_row = json!({ "extra_info": { "tools_kwargs": kwargs } });
    let with = [("named", "{'truth': 7}"), ("any", "(7, 7)"), ("own", "7")];
    let without = [("named", "{}"), ("any", "(None, None)"), ("own", "5")];
    for (row, wanted) in [(task_row, with), (json!({}), without)] {
        let mut open = set.open(&attempt("x", row)).await.unwrap();
        for (tool, want) in wanted {
            assert_eq!(text(&mut open, tool, json!({})).await, want);
        }
        open.close().await.unwrap();
    }
}

/// Tools that keep their state in the data of the attempt, because verl creates them anew for each
/// call.
const KEPT: &str = "\
from verl.experimental.agent_loop.tool_agent_loop import AgentData
class _Base:
    def __init__(self, config, tool_schema):
        pass
class Any(_Base):
    tool_schema = {'name': 'any', 'description': '', 'parameters': {'type': 'object'}}
    async def execute(self, instance_id, parameters, **kwargs):
        data = kwargs['agent_data']
        data.extra_fields['calls'] = data.extra_fields.get('calls', 0) + 1
        return str(data.extra_fields['calls'])
class Named(_Base):
    tool_schema = {'name': 'named', 'description': '', 'parameters': {'type': 'object'}}
    def execute(self, instance_id, parameters, agent_data: AgentData, **kwargs):
        kept = [data for data in (agent_data.request_id, agent_data.messages, \
        agent_data.tools_kwargs)]
        return repr([type(agent_data).__name__, agent_data.extra_fields, *kept])
class Without(_Base):
    tool_schema = {'name': 'without', 'description': '', 'parameters': {'type': 'object'}}
    def execute(self, instance_id, parameters):
        return 'none'
";

#[tokio::test]
async fn execute_gets_agent_data_as_in_verl() {
    let dir = tempfile::tempdir().unwrap();
    let set = python(dir.path(), KEPT, LONG);
    let row = json!({ "prompt": [{ "role": "user", "content": "Hi" }] });
    let mut x = set.open(&attempt("x", row)).await.unwrap();
    let mut y = set.open(&attempt("y", json!({}))).await.unwrap();
    for want in ["1", "2"] {
        assert_eq!(text(&mut x, "any", json!({})).await, want);
    }
    let shown_text = text(&mut x, "named", json!({})).await;
    assert!(shown_text.starts_with("['AgentData', {'calls': 2}, 'x"), "{shown_text}");
    assert!(shown_text.ends_with("[{'role': 'user', 'content': 'Hi'}], {}]"), "{shown_text}");
    assert_eq!(text(&mut x, "without", json!({})).await, "none");
    assert_eq!(text(&mut y, "any", json!({})).await, "1", "attempts know nothing of each other");
    for open in [x, y] {
        open.close().await.unwrap();
    }
}

#[tokio::test]
async fn failed_create_fails_open_and_releases_instances() {
    let dir = tempfile::tempdir().unwrap();
    let set = verl(dir.path(), as_json(dir.path()));
    let kwargs = json!({ "calc_gsm8k_reward": { "create_kwargs": { "ground_truth": "raise" } } });
    let row = json!({ "extra_info": { "tools_kwargs": kwargs } });
    let error = set.open(&attempt("x", row)).await.unwrap_err().to_string();
    assert!(error.contains("ValueError: no such truth (gsm8k.py, line "), "{error}");
    // The extra information of a row may be a JSON string, as in Parquet files.
    let row = json!({ "extra_info": "{\"tools_kwargs\": {\"calc_gsm8k_reward\": {\"create_kwargs\": {\"ground_truth\": \"5\"}}}}" });
    let mut open = set.open(&attempt("y", row)).await.unwrap();
    let reward_output = call_tool(&mut open, "calc_gsm8k_reward", json!({ "answer": "5" })).await;
    assert_eq!(reward_output.text, "'5' gives 1.0");
    open.close().await.unwrap();
}

#[tokio::test]
async fn config_is_parsed_or_error_names_missing_parts() {
    let dir = tempfile::tempdir().unwrap();
    let config = write(dir.path(), "tools.yaml", CONFIG);
    match verl(dir.path(), config).open(&attempt("a", json!({}))).await {
        Ok(open) => {
            assert_eq!(open.specs()[0].name, "calc_gsm8k_reward");
            assert_eq!(
                open.specs()[0].parameters["properties"]["steps"]["items"]["type"],
                "string"
            );
            open.close().await.unwrap();
        }
        // The interpreter of this machine has no YAML parser.
        Err(error) => assert!(error.to_string().contains("-m pip install pyyaml"), "{error}"),
    }
    for (text, why) in [
        ("{\"tool\": []}", "has no list `tools`"),
        ("{\"tools\": [{\"config\": {}}]}", "tools[0] of bad.json has no `class_name`"),
        ("{\"tools\": [{\"class_name\": \"gsm8k.Gsm9kTool\"}]}", "gsm8k has no class Gsm9kTool"),
        (
            "{\"tools\": [{\"class_name\": \"none.Tool\"}]}",
            "none cannot be imported: ModuleNotFoundError",
        ),
        (
            "{\"tools\": [{\"class_name\": \"verl.tools.mcp_base_tool.MCPBaseTool\"}]}",
            "is an MCP server: give it a [[tool]] of its own",
        ),
    ] {
        let config = write(dir.path(), "bad.json", text);
        let error =
            verl(dir.path(), config).open(&attempt("a", json!({}))).await.unwrap_err().to_string();
        assert!(error.contains(why), "{error}\n{why}");
    }
}

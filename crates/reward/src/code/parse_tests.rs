//! Tests of finding programs and of validating tests and keys.

use super::*;

#[test]
fn program_is_last_code_block_of_completion() {
    for (text, want) in [
        ("a ```python\nx = 1\n``` b ```\ny = 2\n``` c", Some("x = 1\n")),
        ("```py\nx\n``` and <answer>```python\ny\n```</answer>", Some("y\n")),
        ("```python\ny = 2", Some("y = 2")),
        ("```x = 1```", Some("x = 1")),
        ("```x\n```", None),
        ("print(1)", Some("print(1)")),
        ("~~~py\nx\n~~~", Some("x\n")),
        (
            "1. So:\n   ```python\n   def f():\n       return 1\n   ```",
            Some("def f():\n    return 1\n"),
        ),
        (
            "def f():\n    \"\"\"See ```f()```.\"\"\"",
            Some("def f():\n    \"\"\"See ```f()```.\"\"\""),
        ),
        ("import math works:\n```python\ny\n```", Some("y\n")),
        ("```\n\n```", None),
        ("", None),
    ] {
        assert_eq!(extract_program(text, "python").as_deref(), want, "{text}");
    }
    let both = "```python\nprint(1)\n``` in Python, and\n```sh\necho 1\n``` gives\n```\n1\n```";
    assert_eq!(extract_program(both, "bash").as_deref(), Some("echo 1\n"));
    assert_eq!(extract_program(both, "lua").as_deref(), Some("1\n"));
}

#[test]
fn invalid_tests_and_keys_are_rejected() {
    let (_, scorer) = scorer(TestScoring::All);
    for (task, want) in [
        (json!({}), "the task has no tests, neither in its field \"tests\" nor as its answer"),
        (json!({ "answer": 5 }), "expected a list, an object or code, but found 5"),
        (json!({ "tests": [{ "input": "x" }] }), "lacks `input` or `output`"),
        (
            json!({ "tests": { "inputs": ["1"], "outputs": [] } }),
            "there are 1 inputs, but 0 outputs",
        ),
        (json!({ "tests": { "input": "1" } }), "or `assert_case`, but found input"),
        (json!({ "tests": [{ "input": "1", "output": null }] }), "an output is null"),
        (json!({ "tests": [{ "input": "1", "output": { "a": 1 } }] }), "give it as a string"),
        (
            json!({ "tests": { "fn_name": "f", "inputs": ["x"], "outputs": ["1"] } }),
            "the argument \"x\" is not JSON",
        ),
    ] {
        let error = scorer.check_task(&task).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
    for (keys, want) in [
        (CodeKeys { seconds: 0.0, ..CodeKeys::default() }, "seconds = 0"),
        (CodeKeys { relative_tolerance: 1.0, ..CodeKeys::default() }, "relative_tolerance = 1"),
        (CodeKeys { memory_mb: 1, ..CodeKeys::default() }, "memory_mb = 1"),
        (CodeKeys { language: "cpp".into(), ..CodeKeys::default() }, "language = \"cpp\""),
        (CodeKeys { url: Some("h".into()), ..CodeKeys::default() }, "url = \"h\""),
    ] {
        let error = keys.check().unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
    CodeKeys { language: "cpp".into(), url: Some("http://h".into()), ..CodeKeys::default() }
        .check()
        .unwrap();
}

#[tokio::test]
async fn concurrent_attempts_validate_test_code_once() {
    let (runner, scorer) = scorer(TestScoring::All);
    let task = json!({ "tests": "def test_f():\n    assert f(1) == 1\n" });
    let attempt = || values(&scorer, "```python\ndef f(n):\n    return n\n```", task.clone());
    let (one, two, three) = tokio::join!(attempt(), attempt(), attempt());
    assert_eq!((one[0], two[0], three[0]), (1.0, 1.0, 1.0));
    // One run per answer, and one validation of the test.
    assert_eq!(*runner.runs.lock().unwrap(), 4);
}

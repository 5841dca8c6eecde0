use std::process::Stdio;
use std::sync::Mutex;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::testing::scorer_input;

/// Runs trusted Python programs of these tests without a sandbox.
#[derive(Debug, Default)]
struct Bare {
    runs: Mutex<usize>,
}

#[async_trait]
impl Runner for Bare {
    async fn ready(&self) -> Result<(), ScoreError> {
        Ok(())
    }

    async fn run(&self, program: &Program) -> Result<ProgramResult, ScoreError> {
        *self.runs.lock().unwrap() += 1;
        let mut python = tokio::process::Command::new("python3")
            .args(["-c", &program.code])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut stdin = python.stdin.take().unwrap();
        let mut stdout = python.stdout.take().unwrap();
        let input = program.stdin.clone();
        tokio::spawn(async move { stdin.write_all(input.as_bytes()).await });
        let mut bytes = Vec::new();
        let read =
            tokio::time::timeout(Duration::from_secs(20), stdout.read_to_end(&mut bytes)).await;
        if read.is_err() {
            return Ok(ProgramResult {
                stdout: String::new(),
                is_complete: true,
                end: ProgramEnd::TimeLimit,
            });
        }
        let code = python.wait().await.unwrap().code().unwrap_or(-9);
        let stdout = String::from_utf8_lossy(&bytes).into_owned();
        Ok(ProgramResult { stdout, is_complete: true, end: ProgramEnd::Exit(code) })
    }
}

fn scorer(value: TestScoring) -> (Arc<Bare>, Arc<CodeScorer>) {
    let runner = Arc::new(Bare::default());
    (runner.clone(), CodeScorer::new(CodeKeys { value, ..CodeKeys::default() }, runner))
}

async fn values(scorer: &CodeScorer, answer: &str, task: Value) -> Vec<f64> {
    scorer.check_task(&task).unwrap();
    let components = scorer.score(&scorer_input(answer, task)).await.unwrap();
    let names: Vec<&str> = components.iter().map(|component| component.name.as_str()).collect();
    assert_eq!(names, [Component::SCORE, PASSED, LIMIT_EXCEEDED]);
    components.iter().map(|component| component.value).collect()
}

const ADD: &str = "Here:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone.";

#[tokio::test]
async fn program_output_is_compared_for_each_input() {
    let (runner, scorer_by_fraction) = scorer(TestScoring::Fraction);
    let tests = json!({ "answer": "", "row": { "tests": { "inputs": ["1 2", "3 4\n", "0 0"], "outputs": ["3", "7\n", "1"] } } });
    assert_eq!(values(&scorer_by_fraction, ADD, tests.clone()).await, [2.0 / 3.0, 2.0 / 3.0, 0.0]);
    assert_eq!(*runner.runs.lock().unwrap(), 3);
    let (runner, all) = scorer(TestScoring::All);
    let pairs =
        json!({ "tests": [{ "input": "1 2", "output": "3" }, { "input": "1 1", "output": "2" }] });
    assert_eq!(values(&all, ADD, pairs.clone()).await, [1.0, 1.0, 0.0]);
    // Testing stops at the first failure.
    assert_eq!(values(&all, "```\nprint(5)\n```", pairs.clone()).await, [0.0, 0.0, 0.0]);
    assert_eq!(*runner.runs.lock().unwrap(), 3);
    // An empty program is not run.
    assert_eq!(values(&all, "```python\n```", pairs).await, [0.0, 0.0, 0.0]);
    assert_eq!(*runner.runs.lock().unwrap(), 3);
    // verl stores tests as JSON text in the expected answer.
    let text = json!({ "answer": tests["row"]["tests"].to_string() });
    assert_eq!(values(&scorer_by_fraction, ADD, text).await[0], 2.0 / 3.0);
}

#[tokio::test]
async fn program_passes_if_test_code_holds() {
    let (_, scorer) = scorer(TestScoring::Fraction);
    let add = "```python\ndef add(a, b):\n    return a + b\nif __name__ == '__main__':\n    raise \
               SystemExit(1)\n```";
    let asserts = json!({ "row": { "tests": ["assert add(1, 2) == 3", "assert add(1, 1) == 3"] } });
    assert_eq!(values(&scorer, add, asserts.clone()).await, [0.5, 0.5, 0.0]);
    let prefixed = json!({ "answer": { "import_prefix": "import math", "assert_case": ["assert add(1, 2) == math.floor(3.5)"] } });
    assert_eq!(values(&scorer, add, prefixed).await[0], 1.0);
    let humaneval = json!({
        "row": { "tests": "def check(candidate):\n    assert candidate(2, 2) == \
                           4\n", "entry_point": "add" }
    });
    assert_eq!(values(&scorer, add, humaneval.clone()).await[0], 1.0);
    let wrong = "```python\ndef add(a, b):\n    return a - b\n```";
    assert_eq!(values(&scorer, wrong, humaneval).await[0], 0.0);
    // A program that exits early does not pass, whatever its exit code.
    for early in
        ["import sys\nsys.exit(0)", "import os\nos._exit(0)", "def add(a, b):\n    exit(0)", "x ="]
    {
        assert_eq!(
            values(&scorer, &format!("```python\n{early}\n```"), asserts.clone()).await[0],
            0.0,
            "{early}"
        );
    }
}

#[tokio::test]
async fn vacuous_tests_leave_program_unscored() {
    let (_, scorer) = scorer(TestScoring::All);
    let program = "```python\ndef f(n):\n    return n\n```";
    for (tests, why) in [
        (
            "def check(candidate):\n    assert candidate(1) == 2\n",
            "define `check`, which is never called",
        ),
        ("def test_f(case):\n    assert f(case) == 2\n", "define `test_f`, which is never called"),
        ("def test_f():\n    yield f(1)\n    assert f(1) == 2\n", "the tests are generators"),
        ("def verify():\n    assert f(1) == 2\n", "only define code that is never called"),
        ("f(1) == 2", "assert nothing"),
        ("print(f(1))", "assert nothing"),
        ("assert (f(1) == 2, 'message')", "assert nothing"),
        ("assert True", "assert nothing"),
        ("\"assert f(1) == 2\"", "assert nothing"),
        // A Python dictionary literal.
        ("{'inputs': ['1'], 'outputs': ['2']}", "assert nothing"),
        // Assertions whose failure is swallowed.
        ("try:\n    assert f(1) == 2\nexcept:\n    print('failed')", "assert nothing"),
        (
            "def test_f():\n    try:\n        assert f(1) == 2\n    except Exception as e:\n        print(e)",
            "assert nothing",
        ),
        (
            "from contextlib import suppress\nwith suppress(AssertionError):\n    assert f(1) == 2",
            "assert nothing",
        ),
        ("def test_f():\n    return f(1) == 2", "assert nothing"),
        ("assert 1 == 1", "pass without a program"),
        ("def f(n):\n    return 3\nassert f(1) == 3", "pass without a program"),
        (
            "import unittest\n\
             unittest.TextTestRunner().run(unittest.FunctionTestCase(lambda: fail(f)))",
            "pass without",
        ),
        // Classes without tests, or with tests that do not run.
        (
            "import unittest\nclass A(unittest.TestCase):\n    def look(self):\n        assert \
             f(1) == 2",
            "never called",
        ),
        (
            "import unittest\nclass A(unittest.TestCase):\n    @unittest.skip('')\n    def \
             test_f(self):\n        assert f(1) == 2",
            "skip themselves",
        ),
        (
            "class TestF:\n    def test_f(self, case):\n        assert f(case) == 2",
            "define `TestF`, which is never called",
        ),
        ("if f(1) != 2:\n    exit()", "call `exit`"),
        ("assert f(1) 2", "invalid syntax"),
        ("the tests are elsewhere", "invalid syntax"),
        (
            "import no_such_module\nassert f(1) == 1",
            "import `no_such_module`, which the Python of the sandbox",
        ),
    ] {
        for answer in [program, "```python\ndef f(n):\n    return 2\n```"] {
            let task = json!({ "tests": tests });
            let error = scorer.score(&scorer_input(answer, task)).await.unwrap_err();
            assert!(error.to_string().contains(why), "{tests}: {error}");
        }
    }
    // A program cannot forge the report that its tests are unusable.
    let claim = "```python\nprint('unusable')\nprint('passed 0 unusable x')\n```";
    assert_eq!(values(&scorer, claim, json!({ "tests": ["assert f(1) == 1"] })).await[0], 0.0);
}

#[tokio::test]
async fn pytest_and_unittest_tests_are_run() {
    let (_, scorer) = scorer(TestScoring::All);
    let case = "import unittest\nclass TestCases(unittest.TestCase):\n    def test_f(self):\n        \
                self.assertEqual(f(1), 1)\nif __name__ == '__main__':\n    unittest.main()\n";
    for tests in [
        "from solution import f\n\ndef test_one():\n    assert f(1) == 1\n",
        "import random\nrandom.seed(0)\ndef test_one():\n    assert f(1) == 1\n",
        "class TestF:\n    def test_one(self):\n        assert f(1) == 1\n",
        case,
        "def test_one():\n    assert f(1) == 1\ntest_one()\n",
        // Tests that are called only in a script, with failures swallowed, or directly.
        "def test_one():\n    assert f(1) == 1\nif __name__ == '__main__':\n    test_one()\n",
        "def test_one():\n    assert f(1) == 1\nfor test in [test_one]:\n    try:\n        \
         test()\n    except:\n        print('failed')\n",
        "def test_one():\n    assert f(2) == 2\ndef test_two():\n    assert f(1) == 1\n\
         test_one()\n",
        "async def test_one():\n    assert f(1) == 1\n",
        "if f(1) != 1:\n    import sys\n    sys.exit(1)",
        "class TestF:\n    def setup_method(self):\n        self.f = f\n    def test_one(self):\n        assert self.f(1) == 1\n",
        // The runners of unittest, called in different ways.
        &case.replace("if __name__ == '__main__':\n    ", ""),
        &case.replace("if __name__ == '__main__':\n    \
                       unittest.main()", "done = unittest.main(exit=False).result"),
        &case.replace(
            "if __name__ == '__main__':\n    unittest.main()",
            "suite = unittest.TestLoader().loadTestsFromTestCase(TestCases)\nunittest.TextTestRunner().run(suite)",
        ),
        "from unittest import IsolatedAsyncioTestCase, TestCase as T, main\nclass Base(T):\n    \
         pass\nclass A(Base):\n    def test_f(self):\n        assert f(1) == 1\n\
         class B(IsolatedAsyncioTestCase):\n    async def test_g(self):\n        \
         self.assertEqual(f(3), f(3))\nmain()\n",
        "import unittest\nclass A(unittest.TestCase):\n    @unittest.skip('')\n    def \
         test_g(self):\n        assert 0\n    def test_f(self):\n        assert f(1) == 1\n",
        "import unittest\nclass A(unittest.TestCase):\n    def test_f(self):\n        with \
         self.assertRaises(Exception):\n            f(None)\n        self.assertTrue(f(1) == 1)\n",
        "try:\n    f(None)\n    raise AssertionError\nexcept TypeError:\n    pass\n\
         assert f(1) == 1",
        "try:\n    1 / (f(1) - 1)\n    assert False\nexcept ZeroDivisionError:\n    pass",
    ] {
        let score = |body: &'static str| {
            let answer = format!("```python\ndef f(n):\n    return {body}\n```");
            let scorer = scorer.clone();
let tests = tests.to_owned();
            async move { values(&scorer, &answer, json!({ "tests": tests })).await[0] }
        };
        assert_eq!((score("n + 0").await, score("n + 1").await), (1.0, 0.0), "{tests}");
    }
}

#[tokio::test]
async fn tests_can_patch_builtins_of_program() {
    let (_, scorer) = scorer(TestScoring::All);
    let tests = "import unittest\nfrom unittest.mock import patch\nclass A(unittest.TestCase):\n    @patch('builtins.print')\n    \
                 def test_f(self, shown):\n        f(3)\n        \
                 shown.assert_called_once_with(3)\n";
    for (program, score) in [("print(n)", 1.0), ("print(n + 1)", 0.0)] {
        let answer = format!("```python\ndef f(n):\n    {program}\n```");
        assert_eq!(
            values(&scorer, &answer, json!({ "tests": tests })).await[0],
            score,
            "{program}"
        );
    }
}

#[tokio::test]
async fn test_cases_parse_primeintellect_and_codecontests_formats() {
    let (_, scorer) = scorer(TestScoring::All);
    let add = "```python\ndef add(a, b):\n    return a + b\n```";
    let call = json!({ "type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3] });
    let wrong = json!({ "type": "function_call", "fn_name": "add", "input": [1, 2], "output": 4 });
    let cases = |cases: Value| json!({ "tests": { "language": "python", "test_cases": cases } });
    assert_eq!(values(&scorer, add, cases(json!([call]))).await[0], 1.0);
    assert_eq!(values(&scorer, add, cases(json!([call, wrong]))).await[0], 0.0);
    let printed = json!([{ "type": "stdin_stdout", "input": "1 2", "output": "3" }]);
    assert_eq!(values(&scorer, ADD, cases(printed)).await[0], 1.0);
    let contest = json!({ "tests": { "input": ["1 2", "2 2"], "output": ["3", "4"] } });
    assert_eq!(values(&scorer, ADD, contest).await[0], 1.0);
    let no_function = json!({ "tests": { "inputs": ["1 2"], "outputs": ["3"], "fn_name": "" } });
    assert_eq!(values(&scorer, ADD, no_function).await[0], 1.0);
}

#[tokio::test]
async fn decimal_and_fraction_results_compare_as_numbers() {
    let (_, scorer) = scorer(TestScoring::All);
    let task = |output: Value| json!({ "tests": { "fn_name": "f", "inputs": [[1]], "outputs": [output] } });
    for (value, output, score) in [
        ("Decimal(5)", json!(5), 1.0),
        ("Decimal('5.5')", json!(5), 0.0),
        ("Decimal(10) ** 25 + 1", json!(10), 0.0),
        ("[Fraction(1, 2)]", json!([0.5]), 1.0),
        ("10 ** 22", json!(1e22), 1.0),
        ("10 ** 22 + 1", json!(1e22), 0.0),
        ("float('nan')", json!(1.5), 0.0),
    ] {
        let program = format!(
            "```python\nfrom decimal import Decimal\nfrom fractions import Fraction\ndef f(n):\n    return {value}\n```"
        );
        assert_eq!(values(&scorer, &program, task(output)).await[0], score, "{value}");
    }
}

#[tokio::test]
async fn program_cannot_find_expected_value_or_token() {
    let (_, scorer) = scorer(TestScoring::Fraction);
    let task = json!({ "tests": { "fn_name": "secret", "inputs": [[1]], "outputs": ["a value to \
                                                                                     be found"] } });
    // Searches all objects of its process for the token and the value, and prints what resembles
    // them.
    let search = "import gc, os, sys\n\
        def secret(x):\n    \
            found = [str(o) for o in gc.get_objects()] + [str(f.f_locals) for f in \
            sys._current_frames().values()]\n    frame = sys._getframe()\n    \
            while frame:\n        \
                found.append(str(frame.f_locals))\n        \
                frame = frame.f_back\n    \
            for text in found:\n        \
                at = text.find('passed ')\n        \
                if at >= 0 and 'end of' not in text[at - 10 : at]:\n            \
                    os.write(1, b'\\n' + text[at:].split(\"'\")[0].encode() + b'\\n')\n            \
                    os._exit(0)\n        \
                if 'to be found' in text:\n            \
                    return 'a value ' + 'to be found'\n    \
            return None";
    assert_eq!(values(&scorer, &format!("```python\n{search}\n```"), task).await[0], 0.0);
}

#[tokio::test]
async fn function_results_are_compared_with_expected_values() {
    let (_, scorer) = scorer(TestScoring::Fraction);
    let tests = json!({ "tests": {
        "fn_name": "pair", "inputs": [[1, 2], "3\n4", [0.1, 0.2]], "outputs": [[1, 2], "[3, 4]", [0.1, 0.30000000001]],
    } });
    let function = "```python\ndef pair(a, b):\n    return (a, b)\n```";
    let method =
        "```python\nclass Solution:\n    def pair(self, a, b):\n        return [a, b]\n```";
    for program in [function, method] {
        assert_eq!(values(&scorer, program, tests.clone()).await[0], 2.0 / 3.0, "{program}");
    }
    let functional = json!({ "row": {
        "tests": [{ "input": "1\n2", "output": "[1, 2]", "testtype": "functional" }], "fn_name": "pair",
    } });
    assert_eq!(values(&scorer, method, functional).await[0], 1.0);
    assert_eq!(values(&scorer, "```python\npair = 5\n```", tests).await[0], 0.0);
}

#[tokio::test]
async fn json_string_is_parsed_only_for_text_input() {
    let (_, scorer) = scorer(TestScoring::All);
    let object = r#"{"$serde_json::private::Number": "5"}"#;
    let text = |output: &str| json!({ "fn_name": "f", "inputs": [[1]], "outputs": [output] });
    let lines = |output: &str| json!({ "fn_name": "f", "inputs": ["1"], "outputs": [output] });
    for (tests, value, score) in [
        (text("[1, 2]"), "'[1, 2]'", 1.0),
        (text("[1, 2]"), "[1, 2]", 0.0),
        (text("3"), "'3'", 1.0),
        (text("3"), "3", 0.0),
        (text("null"), "None", 0.0),
        (text(object), "5", 0.0),
        (lines("[1, 2]"), "[1, 2]", 1.0),
        (lines("[1, 2]"), "'[1, 2]'", 0.0),
        (lines("\"3\""), "'3'", 1.0),
        (lines(object), "5", 0.0),
        (lines(object), "{'$serde_json::private::Number': '5'}", 1.0),
        (lines("5"), "{'$serde_json::private::Number': '5'}", 0.0),
    ] {
        let program = format!("```python\ndef f(n):\n    return {value}\n```");
        assert_eq!(
            values(&scorer, &program, json!({ "tests": tests })).await[0],
            score,
            "{tests} {value}"
        );
    }
}

#[tokio::test]
async fn function_calls_match_data_set_harnesses() {
    let (_, scorer) = scorer(TestScoring::Fraction);
    let program = |code: &str| format!("```python\n{code}\n```");
    // APPS and TACO wrap the return value in a list.
    let wrapped = json!({ "tests": { "fn_name": "halves", "inputs": [[4], [[1]]], "outputs": [[2], [[1]]] } });
    let halves = "def halves(x):\n    return x // 2 if isinstance(x, int) else x";
    assert_eq!(values(&scorer, &program(halves), wrapped.clone()).await[0], 1.0);
    assert_eq!(values(&scorer, &program("def halves(x):\n    return 3"), wrapped).await[0], 0.0);
    // LiveCodeBench does not wrap it.
    let bare = json!({ "row": {
        "tests": [{ "input": "4", "output": "[2]", "testtype": "functional" }], "fn_name": "halves",
    } });
    assert_eq!(values(&scorer, &program(halves), bare).await[0], 0.0);
    // The metadata of the row, or of a test, contains the name of the function.
    let facts = r#"{"func_name": "pair"}"#;
    let test = json!({ "input": "1\n2", "output": "[1, 2]", "testtype": "functional" });
    let mut with_facts = test.clone();
    with_facts["metadata"] = json!({ "func_name": "pair" });
    let pair = program("def pair(a, b):\n    return [a, b]");
    for row in [json!({ "tests": [test], "metadata": facts }), json!({ "tests": [with_facts] })] {
        assert_eq!(values(&scorer, &pair, json!({ "row": row })).await[0], 1.0, "{row}");
    }
    // Predefined names such as `List` are also available with `check(candidate)` on a class
    // `Solution`.
    let check = json!({ "row": {
        "tests": "def check(candidate):\n    assert candidate([3, 1]) == [1, \
                  3]\n", "entry_point": "Solution().inorder",
    } });
    let inorder = "class Solution:\n    def inorder(self, nums: List[int]) -> List[int]:\n        \
                   return sorted(nums)";
    assert_eq!(values(&scorer, &program(inorder), check).await[0], 1.0);
    // A solution can use LeetCode's imports, but an imported name is not a solution.
    let task =
        json!({ "tests": { "fn_name": "add", "inputs": [[[3, 1, 2]]], "outputs": [[1, 2, 3]] } });
    let leet = "class Solution:\n    def add(self, nums: List[int]) -> Optional[List[int]]:\n        \
                seen = defaultdict(int)\n        heapify(nums)\n        \
                return [heapq.heappop(nums) for _ in range(math.floor(pow(3, 1, 7)))]";
    assert_eq!(values(&scorer, &program(leet), task.clone()).await[0], 1.0);
    assert_eq!(values(&scorer, &program("x = 1"), task).await[0], 0.0);
    let two = json!({ "tests": { "fn_name": "add", "inputs": [[1, 2]], "outputs": [3] } });
    assert_eq!(values(&scorer, &program("from operator import add"), two).await[0], 1.0);
}

#[tokio::test]
async fn test_code_does_not_provide_missing_names() {
    let (_, scorer) = scorer(TestScoring::All);
    let program = |code: &str| format!("```python\n{code}\n```");
    let check = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, \
                 1) == 0\n";
    let rows = [
        json!({ "tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"] }),
        json!({ "tests": check, "entry_point": "add" }),
        json!({ "tests": "def test_add():\n    assert add(1, 2) == 3 and add(-1, 1) == 0" }),
        json!({ "tests": "from solution import *\ndef test_add():\n    assert add(1, 2) == 3 and \
                          add(0, 1) == 1" }),
    ];
    for row in rows {
        for (answer, score) in [
            ("def add(a, b):\n    return a + b", 1.0),
            ("from operator import add", 1.0),
            ("def addition(a, b):\n    return a - b", 0.0),
            ("class Solution:\n    def add(self, a, b):\n        return 0", 0.0),
            ("def add(a, b):\n    return reduce(int.__add__, [a, b])", 0.0),
            ("def add(a, b):\n    return int(math.fsum([a, b]))", 0.0),
            ("import math\ndef add(a, b):\n    return int(math.fsum([a, b]))", 1.0),
        ] {
            let task = json!({ "row": row });
            assert_eq!(values(&scorer, &program(answer), task).await[0], score, "{answer} {row}");
        }
    }
    // Both tests are usable: a test of truth passes with a stand-in that returns objects, but fails
    // without a program.
    let row = json!({ "row": { "tests": ["assert add(1, 2)", "assert not add(2, 1)"] } });
    let correct = "def add(a, b):\n    return a < b";
    assert_eq!(values(&scorer, &program(correct), row).await[0], 1.0);
}

#[tokio::test]
async fn program_is_module_and_row_setup_code_runs() {
    let (_, scorer) = scorer(TestScoring::Fraction);
    let program = "```python\nfrom __future__ import annotations\n\
                   from dataclasses import dataclass\nimport typing\n\
        @dataclass\nclass Point:\n    x: int\n    y: typing.ClassVar[int] = 5\n\
        def area(p):\n    return p.x * Point.y + len(typing.get_type_hints(Point))\n```";
    let mbpp = json!({ "row": {
        "tests": ["assert area(Point(2)) == math.ceil(11.5)", "assert near(area(Point(1)), 7)"],
        "test_imports": ["import math"],
        "test_setup_code": "def near(a, b):\n    return abs(a - b) < 1",
    } });
    assert_eq!(values(&scorer, program, mbpp).await, [1.0, 1.0, 0.0]);
}

#[tokio::test]
async fn integers_of_any_length_compare_exactly() {
    let (_, scorer) = scorer(TestScoring::All);
    let task = |function: &str, input: &str, output: &str| -> Value {
        let tests =
            format!(r#"{{"fn_name": "{function}", "inputs": [[{input}]], "outputs": [{output}]}}"#);
        json!({ "tests": serde_json::from_str::<Value>(&tests).unwrap() })
    };
    let big = "10000000000000000000000003";
    let program = "```python\ndef next(n): return n + 1\ndef kind(n): return type(n).__name__\n\
                   def near(n): return float(n)\n```";
    for (function, input, output, score) in [
        ("next", big, "10000000000000000000000004", 1.0),
        ("next", big, "10000000000000000000000005", 0.0),
        ("next", "-9223372036854775810", "-9223372036854775809", 1.0),
        ("kind", "1e-07", "\"float\"", 1.0),
        ("kind", "12345678901234567890123", "\"int\"", 1.0),
        ("kind", "1.10", "\"float\"", 1.0),
        ("near", big, big, 0.0),
        ("near", "7", "7", 1.0),
    ] {
        assert_eq!(
            values(&scorer, program, task(function, input, output)).await[0],
            score,
            "{function} {input}"
        );
    }
    // More digits than CPython's default limit: parsed and printed, also by a program that imports
    // from `__future__`.
    let digits = "7".repeat(6000);
    let tests = json!({ "tests": [{ "input": digits, "output": format!("\n{digits}\n") }] });
    for program in [
        "print(int(input()))",
        "from __future__ import annotations\nif __name__ == '__main__':\n    print()\n    \
         print(int(input()))",
    ] {
        assert_eq!(
            values(&scorer, &format!("```python\n{program}\n```"), tests.clone()).await[0],
            1.0,
            "{program}"
        );
    }
    assert_eq!(
        values(&scorer, program, task("next", &digits, &format!("{}8", &digits[1..]))).await[0],
        1.0
    );
}

#[tokio::test]
async fn program_can_complete_prompt_of_row() {
    let (_, scorer) = scorer(TestScoring::All);
    let row = |prompt: &str, test: &str| json!({ "row": { "prompt": prompt, "tests": test, "entry_point": "twice" } });
    let prompt = "from typing import List\n\ndef half(x):\n    return x // 2\n\n\
                  def twice(x: List) -> List:\n    \"\"\" Doubles. \"\"\"\n";
    let test = "def check(candidate):\n    assert candidate([1]) == [2]\n    assert half(4) == 2\n";
    for (completion, score) in [
        // The body: indented, not indented, and with only its first line not indented.
        ("```python\n    return [2 * y for y in x]\n```", 1.0),
        ("```python\nz = []\nfor y in x:\n    z.append(2 * y)\nreturn z\n```", 1.0),
        ("z = [2 * y for y in x]\n    return z", 1.0),
        // The complete function: on its own, and using the imports and functions of the prompt.
        ("```python\ndef twice(x):\n    return [2 * y for y in x]\n```", 1.0),
        (
            "```python\nfrom __future__ import annotations\ndef twice(x: List) -> List:\n    \
             return [y + y for y in x]\n```",
            1.0,
        ),
        ("```python\ndef twice(x):\n    return [2 * half(2 * y) for y in x]\n```", 1.0),
        ("```python\ntwice = lambda x: [2 * y for y in x]\n```", 1.0),
        ("```python\n    return [3 * y for y in x]\n```", 0.0),
        ("```python\ndef other(x):\n    return [2 * y for y in x]\n```", 0.0),
        ("I do not know.", 0.0),
    ] {
        assert_eq!(values(&scorer, completion, row(prompt, test)).await[0], score, "{completion}");
    }
    // An invalid program does not leave the prompt's function, with only its docstring, as the
    // answer.
    let lenient = "def check(candidate):\n    assert candidate(1) is None\n";
    assert_eq!(values(&scorer, "```python\nx = (\n```", row(prompt, lenient)).await[0], 0.0);
    // A prompt in natural language is not treated as code.
    let text = "Write a function that doubles a list. Call it twice(x).";
    let test_code = "def check(candidate):\n    assert candidate([1]) == [2]\n";
    let program_text = "```python\ndef twice(x):\n    return [2 * y for y in x]\n```";
    assert_eq!(values(&scorer, program_text, row(text, test_code)).await[0], 1.0);
}

#[tokio::test]
async fn packed_tests_are_unpacked_or_rejected() {
    use base64::Engine;
    use std::io::Write;
    let (_, scorer) = scorer(TestScoring::All);
    let json = r#"[{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]"#;
    let pickle = [&[0x80, 4, 0x8C, json.len() as u8], json.as_bytes(), &[0x94, b'.']].concat();
    let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(&pickle).unwrap();
    let blob = base64::engine::general_purpose::STANDARD.encode(encoder.finish().unwrap());
    assert_eq!(values(&scorer, ADD, json!({ "tests": blob })).await[0], 1.0);
    let subtract = ADD.replace("a + b", "a - b");
    assert_eq!(values(&scorer, &subtract, json!({ "tests": blob })).await[0], 0.0);
    for damaged in [blob[..blob.len() / 2].to_owned(), "A".repeat(64)] {
        let error = scorer.check_task(&json!({ "tests": damaged })).unwrap_err().to_string();
        assert!(
            error.contains("give code, JSON, or tests that are packed as in LiveCodeBench"),
            "{error}"
        );
    }
}

#[path = "parse_tests.rs"]
mod parse;

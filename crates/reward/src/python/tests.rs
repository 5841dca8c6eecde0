use std::time::Instant;

use super::*;
use crate::testing;

fn scorer_input(text: &str, answer: Value) -> ScorerInput {
    let row = json!({ "data_source": "openai/gsm8k", "extra_info": { "index": 7 } });
    let mut input = testing::scorer_input(
        text,
        json!({ "answer": answer, "source": "rows.jsonl", "row": row }),
    );
    input.outcome.reasoning = "Hm.".into();
    input
}

struct Script {
    _dir: tempfile::TempDir,
    scorer: Arc<PythonScorer>,
}

fn script(text: &str, change: impl FnOnce(&mut PythonKeys)) -> Script {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("score.py");
    std::fs::write(&file, text).unwrap();
    let mut keys = PythonKeys { seconds: 20.0, ..PythonKeys::new(file) };
    change(&mut keys);
    keys.check().unwrap();
    Script { _dir: dir, scorer: PythonScorer::new(keys, Supervisor::default()) }
}

impl Script {
    async fn score(&self, text: &str) -> Result<Vec<Component>, ScoreError> {
        self.scorer.score(&scorer_input(text, "72".into())).await
    }
}

const HEAD: &str =
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):\n";

#[tokio::test]
async fn verl_compute_score_returns_components() {
    let text = format!(
        "import sys\nprint('loading')\n{HEAD}    print('noise', flush=True)\n    assert \
         data_source == 'openai/gsm8k'\n    assert extra_info == {{'index': 7, 'num_turns': 2, \
         'rollout_reward_scores': {{}}}}\n    assert more == {{'scale': 2}}\n    \
         return {{'score': more['scale'] * (solution_str == ground_truth), 'acc': True, 'pred': \
         'x'}}\n"
    );
    let scorer = script(&text, |keys| drop(keys.arguments.insert("scale".into(), 2.into())));
    scorer.scorer.check_ready(&Value::Null).await.unwrap();
    let components = scorer.score("72").await.unwrap();
    assert_eq!(components, [Component::score(2.0), Component::new("acc", 1.0)]);
    assert_eq!(scorer.score("71").await.unwrap()[0].value, 0.0);

    // An async function with another name, which reads the reasoning; and numbers of several types.
    let text = "import asyncio, fractions\nasync def worth(solution_str, **rest):\n    await \
                asyncio.sleep(0.01)\n    return fractions.Fraction(1, 2) if \
                solution_str.startswith('<think>\\nHm.\\n</think>') else -1\n";
    let scorer = script(text, |keys| {
        keys.function = "worth".into();
        keys.solution = SolutionText::Full;
    });
    assert_eq!(scorer.score("72").await.unwrap(), [Component::score(0.5)]);
    let text = format!(
        "import decimal\n\
         {HEAD}    return {{'score': decimal.Decimal('0.25'), 'n': decimal.Decimal(3)}}\n"
    );
    let components = script(&text, |_| ()).score("72").await.unwrap();
    assert_eq!(components, [Component::score(0.25), Component::new("n", 3.0)]);
}

/// Scores the text "72" with the named function. The row has `solution` and a prompt of messages.
async fn ported(
    text: &str,
    function: &str,
    change: impl FnOnce(&mut PythonKeys),
) -> Result<f64, String> {
    let scorer = script(text, |keys| {
        keys.function = function.into();
        change(keys);
    });
    let row = json!({
        "data_source": "openai/gsm8k",
        "solution": "72",
        "extra_info": { "index": 7 },
        "prompt": [{ "role": "user", "content": "6 * 12?" }],
    });
    let task = json!({ "question": "6 * 12?", "answer": "72", "row": row });
    scorer.scorer.check_ready(&task).await.map_err(|error| format!("check: {error}"))?;
    let components = scorer
        .scorer
        .score(&testing::scorer_input("72", task))
        .await
        .map_err(|error| error.to_string())?;
    Ok(components[0].value)
}

#[tokio::test]
async fn verl_and_trl_functions_score_unchanged() {
    for (name, text) in [
        (
            "batch",
            "def batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):\n    \
             assert (data_sources, extra_infos[0]['index']) == (['openai/gsm8k'], 7) and kwargs \
             == {}\n    return [{'score': float(s == t), 'acc': 1} for s, t in zip(solution_strs, \
             ground_truths)]\n",
        ),
        (
            "strict",
            "def strict(data_sources, solution_strs, ground_truths, extra_infos):\n    \
             return [float(s == t) for s, t in zip(solution_strs, ground_truths)]\n",
        ),
        (
            "awaited",
            "async def awaited(solution_strs, ground_truths, **kwargs):\n    \
             return tuple(s == t for s, t in zip(solution_strs, ground_truths))\n",
        ),
        (
            "accuracy",
            "def accuracy(completions, solution, **kwargs):\n    \
             assert kwargs['answer'] == ['72'] and 'prompt' not in kwargs and kwargs['prompts']\n    \
             contents = [completion[0]['content'] for completion in completions]\n    \
             return [1.0 if c == s else 0.0 for c, s in zip(contents, solution)]\n",
        ),
        (
            "plain",
            "def plain(prompts, completions, **kwargs):\n    return [float(c.strip() == '72') for \
             c in completions]\n",
        ),
        ("only", "def only(completions):\n    return [float(len(completions[0]) == 2)]\n"),
        (
            "asked",
            "def asked(prompts, completions, trainer_state=1, **kwargs):\n    assert \
             trainer_state is None\n    return [float(prompts[0][-1]['content'] == '6 * 12?')]\n",
        ),
        (
            "array",
            "class Array(list):\n    pass\nclass Scores:\n    def tolist(self): return [1.0]\n\
             def array(completions, **kwargs):\n    return Scores()\n",
        ),
        // A verl function with fewer parameters than verl requires.
        (
            "few",
            "def few(solution_str, ground_truth):\n    return float(solution_str == \
             ground_truth)\n",
        ),
        (
            "partial",
            "import functools\ndef score(completions, scale, **kwargs):\n    return [scale]\n\
             partial = functools.partial(score, scale=1.0)\n",
        ),
    ] {
        assert_eq!(ported(text, name, |_| ()).await, Ok(1.0), "{name}");
    }
    let text = "def f(completions, scale, **kwargs):\n    return [scale * \
                (completions[0][0]['role'] == 'assistant')]\n";
    let components = ported(text, "f", |keys| {
        keys.completions = Completions::Messages;
        keys.arguments.insert("scale".into(), 0.5.into());
    });
    assert_eq!(components.await, Ok(0.5));
}

#[tokio::test]
async fn incompatible_function_or_result_is_rejected() {
    for (text, want) in [
        ("def f(text, expected): return 1", "check: "),
        (
            "def f(text, expected): return 1",
            "takes (expected, text), none of which comes from the attempt: let the function take",
        ),
        ("def f(completions, target, **kwargs): return [1]", "check: "),
        (
            "def f(completions, target, **kwargs): return [1]",
            "requires the column `target`, but the task has only the columns data_source, ",
        ),
        (
            "def f(solution_str, style): return 1",
            "requires `style`, which an attempt does not have",
        ),
        ("def f(solution_str, /): return 1", "takes solution_str by position only"),
        ("def f(completions, completion_ids): return [1]", "requires `completion_ids`"),
        ("class f: pass", "defines `f` as a class"),
        (
            "def accuracy(completions): return [1]\ndef _x(): pass",
            "set `function` to one of its functions: accuracy",
        ),
        ("def f(completions): return [1, 2]", "returned 2 scores for 1 attempt"),
        ("def f(completions): return 1", "returned 1, which is not a list"),
        (
            "def f(completions): return [None]",
            "returned [None]: the function does not score this attempt",
        ),
        ("def f(solution_strs): return ['good']", "returned 'good', which is neither"),
    ] {
        let error = ported(text, "f", |_| ()).await.unwrap_err();
        assert!(error.contains(want), "{text}: {error}");
    }
    let error = ported("def f(solution_str): return 1", "f", |keys| {
        keys.arguments.insert("scale".into(), 2.into());
    });
    assert!(error.await.unwrap_err().contains("does not take `scale` of `arguments`"));
}

/// A task stores the digits as a string beside the number, because the number could lose digits.
#[tokio::test]
async fn numeric_ground_truth_is_passed_as_number() {
    // Python compares a float and an integer exactly.
    let text = format!(
        "{HEAD}    assert type(ground_truth) in (int, float)\n    return \
         float(type(ground_truth)(solution_str) == ground_truth)\n"
    );
    let scorer = script(&text, |_| ());
    for number in ["1e-05", "2.50", "18446744073709551617", "1e+5"] {
        let mut attempt = scorer_input(number, number.into());
        attempt.task["answer_number"] = serde_json::from_str(number).unwrap();
        let score = scorer.scorer.score(&attempt).await.unwrap();
        assert_eq!(score, [Component::score(1.0)], "{number}");
        assert_eq!(task_columns(&attempt.task)["answer"].to_string(), number);
    }
}

#[tokio::test]
async fn ground_truth_comes_from_row_if_answer_matches() {
    let text = format!("{HEAD}    return int(solution_str in ground_truth['target'])\n");
    let scorer = script(&text, |_| ());
    let row = json!({ "reward_model": { "style": "rule", "ground_truth": { "target": ["Paris", "paris"] } } });
    let task = |answer: Value| json!({ "answer": answer, "row": row });
    let input = |answer| testing::scorer_input("Paris", task(answer));
    let components = scorer.scorer.score(&input(json!(["Paris", "paris"]))).await.unwrap();
    assert_eq!(components, [Component::score(1.0)]);
    // If the recipe takes the answer from another field, that answer is passed.
    let other = script(&format!("{HEAD}    return int(ground_truth == 'Rome')\n"), |_| ());
    assert_eq!(other.scorer.score(&input("Rome".into())).await.unwrap(), [Component::score(1.0)]);
}

#[tokio::test]
async fn worker_is_reused_and_receives_only_named_variables() {
    let text = format!(
        "import os\ncalls = 0\n{HEAD}    global calls\n    calls += 1\n    return calls + \
         ('CARGO_PKG_NAME' in os.environ)\n"
    );
    let scorer = script(&text, |keys| keys.workers = 1);
    for call in 1..4 {
        assert_eq!(scorer.score("").await.unwrap()[0].value, f64::from(call));
    }
    let scorer = script(&text, |keys| keys.environment.push("CARGO_PKG_NAME".into()));
    assert_eq!(scorer.score("").await.unwrap()[0].value, 2.0);
}

#[tokio::test]
async fn failed_call_is_described_and_next_call_succeeds() {
    let text = format!(
        "import os, sys, time\n{HEAD}    \
         if solution_str == 'raise': raise ValueError('oh no')\n    \
         if solution_str == 'nan': return float('nan')\n    \
         if solution_str == 'text': return 'good'\n    \
         if solution_str == 'none': return None\n    \
         if solution_str == 'dict': return {{'acc': 1}}\n    \
         if solution_str == 'exit': sys.exit('bye')\n    \
         if solution_str == 'gone':\n        print('last words', file=sys.stderr)\n        \
         os._exit(3)\n    if solution_str == 'kill': os.kill(os.getpid(), 9)\n    \
         while solution_str == 'loop': pass\n    \
         if solution_str == 'sleep': time.sleep(600)\n    \
         if solution_str == 'print': print('x' * (1 << 20))\n    \
         return 1\n"
    );
    let scorer = script(&text, |keys| {
        keys.workers = 1;
        keys.seconds = 2.0;
    });
    for (text, want) in [
        ("raise", "raised ValueError: oh no (line 3)"),
        ("nan", "returned nan, which is not a finite number"),
        ("text", "returned 'good', which is neither a number"),
        ("none", "returned None, which is neither a number"),
        ("dict", "returned {'acc': 1}, which has no key `score`"),
        ("exit", "called exit('bye') (line 8)"),
        ("gone", "exited with exit status: 3: last words"),
        ("kill", "exited with signal: 9"),
        ("loop", "did not respond within 2s, and was killed"),
        ("sleep", "did not respond within 2s, and was killed"),
    ] {
        let error = scorer.score(text).await.unwrap_err();
        assert!(
            error.to_string().contains(want) && error.to_string().contains("score.py"),
            "{text}: {error}"
        );
        assert!(error.is_temporary(), "{text}");
        assert_eq!(scorer.score("print").await.unwrap()[0].value, 1.0, "after {text}");
    }
}

#[tokio::test]
async fn check_ready_reports_file_that_does_not_load() {
    for (text, want) in [
        ("def other(): pass", "defines no function `compute_score`"),
        ("x = 1\nimport no_such_module_at_all", "raised ModuleNotFoundError"),
        ("def broken(:\n", "raised SyntaxError"),
        ("import sys\nsys.exit(4)", "called exit(4) (line 2)"),
        ("while True: pass", "did not load within 1s"),
    ] {
        let loops = text.starts_with("while");
        let scorer = script(text, |keys| keys.start_seconds = if loops { 1.0 } else { 30.0 });
        let error = scorer.scorer.check_ready(&Value::Null).await.unwrap_err().to_string();
        assert!(error.contains(want), "{error}\n want: {want}");
    }
    let scorer = script("", |keys| keys.python = "/no/such/python".into());
    let error = scorer.scorer.check_ready(&Value::Null).await.unwrap_err().to_string();
    assert!(error.contains("cannot run the file with /no/such/python"), "{error}");
}

#[tokio::test]
async fn calls_run_concurrently_in_all_workers() {
    let text = format!("import time\n{HEAD}    time.sleep(0.5)\n    return 1\n");
    let scorer = script(&text, |keys| keys.workers = 4);
    for _ in 0..2 {
        let started = Instant::now();
        let calls: Vec<_> = (0..4).map(|_| scorer.score("")).collect();
        for call in futures(calls).await {
            call.unwrap();
        }
        // The first round also loads the workers. Four sequential calls would take two seconds.
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    }
    let started = Instant::now();
    futures((0..4).map(|_| scorer.score("")).collect()).await;
    assert!(started.elapsed() < Duration::from_millis(1900), "{:?}", started.elapsed());
}

/// Polls all futures concurrently, and returns their outputs in order.
async fn futures<T>(calls: Vec<impl Future<Output = T>>) -> Vec<T> {
    let mut calls: Vec<_> = calls.into_iter().map(Box::pin).collect();
    let mut done: Vec<Option<T>> = calls.iter().map(|_| None).collect();
    std::future::poll_fn(move |context| {
        for (call, done) in calls.iter_mut().zip(&mut done) {
            if done.is_none()
                && let std::task::Poll::Ready(value) = call.as_mut().poll(context)
            {
                *done = Some(value);
            }
        }
        if done.iter().all(Option::is_some) {
            std::task::Poll::Ready(done.iter_mut().filter_map(Option::take).collect())
        } else {
            std::task::Poll::Pending
        }
    })
    .await
}

#[test]
fn check_rejects_invalid_keys() {
    let keys = || PythonKeys::new("score.py");
    let mut named = keys();
    named.arguments.insert("ground_truth".into(), 1.into());
    for (keys, want) in [
        (PythonKeys::new(""), "file is empty"),
        (PythonKeys { seconds: 0.0, ..keys() }, "seconds = 0"),
        (PythonKeys { workers: 0, ..keys() }, "workers = 0"),
        (named, "arguments.ground_truth is set from the attempt"),
    ] {
        assert!(keys.check().unwrap_err().to_string().contains(want), "{want}");
    }
}

#[tokio::test]
async fn response_of_forked_process_is_ignored() {
    let text = format!("import os\n{HEAD}    return 1 if os.fork() else 0\n");
    let scorer = script(&text, |keys| keys.workers = 1);
    for _ in 0..5 {
        assert_eq!(scorer.score("72").await.unwrap(), [Component::score(1.0)]);
    }
}

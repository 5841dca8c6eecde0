"""Checks the unmodified client `sandbox-fusion` from PyPI against `levade sandbox serve`.

Calls each of the client's functions that a sandbox implements, synchronously and asynchronously: results, files in and
out, standard input, exit codes, time limits, unsupported languages, notebook cells, many concurrent calls. Also checks
verl's calls (only `requests`, verl's fields, and how verl reads `status` and `run_result`).

    cargo build --release
    python3 -m venv .sandbox && .sandbox/bin/pip install sandbox-fusion==0.3.7
    .sandbox/bin/python conformance/sandbox_client.py
"""

import argparse
import asyncio
import base64
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

import requests
import sandbox_fusion as fusion

ROOT = Path(__file__).resolve().parent.parent
failures = []


def expect(what: str, holds: bool, note: object = "") -> None:
    print(f"{'ok  ' if holds else 'FAIL'}  {what:<60} {'' if holds else note}", flush=True)
    if not holds:
        failures.append(what)


def code(text: str, language: str = "python", **fields) -> fusion.RunCodeResponse:
    return fusion.run_code(fusion.RunCodeRequest(code=text, language=language, **fields), max_attempts=1)


def cells(*texts: str, **fields) -> fusion.RunJupyterResponse:
    return fusion.run_jupyter(fusion.RunJupyterRequest(cells=list(texts), **fields), max_attempts=1)


def raised(call) -> str:
    try:
        call()
    except Exception as error:  # The client raises no specific exception.
        return str(error)
    return ""


def runs() -> None:
    good = code('print("hello")')
    expect("a run", good.status == "Success" and good.run_result.stdout == "hello\n", good)
    expect("its result", good.run_result.status == "Finished" and good.run_result.return_code == 0, good)
    summary = fusion.summary_run_code_result(good, fusion.SummaryMapping())
    expect("its summary", summary == "Success", summary)
    failed = code("1/0")
    expect("an exception", failed.status == "Failed" and failed.run_result.return_code == 1, failed)
    expect("its traceback", failed.run_result.stderr.endswith("ZeroDivisionError: division by zero\n"), failed)
    read = code("print(input()[::-1])", stdin="abc\n")
    expect("standard input", read.run_result.stdout == "cba\n", read)
    content = base64.b64encode(b"content").decode()
    text = "import shutil; shutil.copy('in/a.txt', 'b.bin')"
    copied = code(text, files={"in/a.txt": content, "none": None}, fetch_files=["b.bin", "missing"])
    expect("files in and out", copied.files == {"b.bin": content}, copied)
    late = code("import time\nprint('begun')\ntime.sleep(60)", run_timeout=1)
    expect("a time limit", late.status == "Failed" and late.run_result.status == "TimeLimitExceeded", late)
    expect("what was printed before", late.run_result.stdout == "begun\n", late)
    summary = fusion.summary_run_code_result(late, fusion.SummaryMapping(RunTimeout="late"))
    expect("its summary", summary == "late", summary)
    shell = code("echo $((6 * 7)); exit 3", "bash")
    expect("bash", shell.run_result.stdout == "42\n" and shell.run_result.return_code == 3, shell)
    flood = code("print('x' * 3_000_000)")
    kept = flood.run_result.stdout
    expect("3 MB of output is no time limit", flood.status == "Success" and "left out" in kept, flood.status)
    other = raised(lambda: code("int main() {}", "cpp"))
    expect("a language that is not here is an error of the sandbox", "Sandbox responded with error" in other, other)
    outside = raised(lambda: code("1", files={"../../etc/x": content}))
    expect("a path outside is refused, by name", "422" in outside and "../../etc/x" in outside, outside)


def notebooks() -> None:
    done = cells(
        "a = 123", "a", "print(a)", "import sys; sys.stderr.write('e')", "raise RuntimeError('error')", "a + 1"
    )
    shown = [cell.display for cell in done.cells]
    expect("cells", done.status == "Success" and len(done.cells) == 6, done)
    expect("names and values", shown[1] == [{"text/plain": "123"}] and shown[5] == [{"text/plain": "124"}], shown)
    expect("streams", done.cells[2].stdout == "123\n" and done.cells[3].stderr == "e", done.cells)
    error = done.cells[4].error[0]
    expect(
        "an exception, after which further cells run",
        (error["ename"], error["evalue"]) == ("RuntimeError", "error"),
        error,
    )
    content = base64.b64encode(b"x").decode()
    files = cells("open('b', 'w').write(open('a').read())", files={"a": content}, fetch_files=["b"])
    expect("files of notebooks", files.files == {"b": content}, files)
    late = cells("1", "while True: pass", total_timeout=1)
    expect("a time limit of all", late.status == "Failed" and late.driver.status == "TimeLimitExceeded", late)


async def at_once(count: int) -> None:
    calls = [fusion.run_code_async(fusion.RunCodeRequest(code=f"print({n})", language="python")) for n in range(count)]
    answers = await asyncio.gather(*calls)
    printed = [answer.run_result.stdout for answer in answers]
    expect(f"{count} calls at once", printed == [f"{n}\n" for n in range(count)], printed)


def verl(url: str) -> None:
    """Sends verl's request, and reads the response as verl does."""
    body = {
        "compile_timeout": 10, "run_timeout": 10, "code": "print(int(input()) * 2)", "stdin": "21", "memory_limit_MB": 1024,
        "language": "python", "files": {}, "fetch_files": [],
    }  # fmt: skip
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    answer = requests.post(f"{url}/run_code", json=body, headers=headers, timeout=60).json()
    run = answer["run_result"]
    good = (answer["status"], run["status"], run["return_code"], run["stdout"]) == ("Success", "Finished", 0, "42\n")
    expect("verl's request", good and answer["compile_result"] is None, answer)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade", help="levade binary")
    p.add_argument("--protection", default="full", help="sandbox protection: full or best-effort")
    arguments = p.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [arguments.levade, "sandbox", "serve", "--bind", address, "--protection", arguments.protection]
    server = subprocess.Popen(command)
    url = f"http://{address}"
    try:
        for _ in range(300):
            try:
                assert urllib.request.urlopen(f"{url}/v1/ping").read() == b'"pong"'
                break
            except OSError:
                time.sleep(0.1)
        else:
            sys.exit("levade sandbox serve did not answer within 30 s")
        print(f"sandbox-fusion {version('sandbox-fusion')}")
        fusion.set_sandbox_endpoint(url)
        runs()
        notebooks()
        asyncio.run(at_once(30))
        verl(url)
    finally:
        server.terminate()
        server.wait(30)
    sys.exit(f"{len(failures)} failed: {failures}" if failures else 0)


if __name__ == "__main__":
    main()

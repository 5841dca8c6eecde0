"""Fuzzes the property tests that take damaged input, each for a given time, with new random cases.

Surfaces: bodies of every gateway endpoint, paths and keys; event streams of other servers; completions in each of the
nine tool-call formats, with reasoning, complete and streamed; chat templates. `cargo test` runs a few hundred cases of
each. This script runs them in rounds of about ten seconds, and reports the number of cases. A case that panics, hangs,
kills the process or violates the property is printed in its smallest form (proptest shrinks it), and ends its surface.

Not included: coverage guidance, for which stable Rust has no tool. Needs `cargo` and no packages.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORMATS = ["hermes", "qwen_xml", "llama", "mistral", "deepseek", "glm", "kimi", "minimax", "harmony"]
# Name, crate, test.
SURFACES = [
    ("bodies", "gateway", "fuzz_tests::any_request_body_gets_response_in_api_format"),
    ("paths", "gateway", "fuzz_tests::request_reaches_only_attempt_of_its_key"),
    ("streams", "remote", "external::sse::tests::events_are_independent_of_chunk_boundaries"),
    *((name, "text", f"fuzz_tests::{name}_stream_matches_complete_parse") for name in FORMATS),
    ("templates", "text", "fuzz_tests::damaged_template_never_panics"),
]
# Duration of one run of a test binary.
ROUND_SECONDS = 10
HANG_SECONDS = 600


def binaries(profile):
    """Returns the library test binaries by crate. Builds as `cargo test --workspace` does, so that nothing is built
    twice.
    """
    command = ["cargo", "test", "--workspace", "--lib", "--no-run", "--message-format=json", *profile]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    made = [line for line in lines if line.get("executable")]
    return {line["target"]["name"].removeprefix("levade_"): line["executable"] for line in made}


def run_rounds(program, crate, test, seconds):
    """Runs a test in rounds. Returns the number of passed cases, and the output of a failed round."""
    cases, held, started = 100, 0, time.monotonic()
    while (left := seconds - (time.monotonic() - started)) > 0:
        environment = os.environ | {"PROPTEST_CASES": str(cases), "PROPTEST_DISABLE_FAILURE_PERSISTENCE": "1"}
        start = time.monotonic()
        command = [program, "--exact", test, "--test-threads", "1"]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT / "crates" / crate,
                env=environment,
                capture_output=True,
                text=True,
                timeout=HANG_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return held, f"{cases} cases did not end in {HANG_SECONDS} s"
        if done.returncode != 0 or "1 passed" not in done.stdout:
            return held, f"ended with {done.returncode}:\n{done.stdout[-6000:]}{done.stderr[-2000:]}"
        held += cases
        pace = cases / (time.monotonic() - start)
        cases = max(20, min(int(pace * min(ROUND_SECONDS, left)), cases * 10))
    return held, None


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seconds", type=float, default=600, help="duration per surface")
    p.add_argument("--only", default="", help="surfaces whose names contain this")
    p.add_argument("--release", action="store_true", help="build with optimization")
    arguments = p.parse_args()
    surfaces = [surface for surface in SURFACES if arguments.only in surface[0]]
    profile = ["--release"] if arguments.release else []
    programs = binaries(profile)
    failures = 0
    for name, crate, test in surfaces:
        started = time.monotonic()
        held, why = run_rounds(programs[crate], crate, test, arguments.seconds)
        print(f"{'FAIL' if why else 'ok  '} {name:10} {held:8} cases in {time.monotonic() - started:.0f} s", flush=True)
        if why:
            print(why, flush=True)
            failures += 1
    sys.exit(min(failures, 1))


if __name__ == "__main__":
    main()

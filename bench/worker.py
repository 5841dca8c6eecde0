"""Shared code of the peers' programs: requests on standard input, responses on standard output, one line of JSON each."""

import json
import os
import sys


def serve(worker: object) -> None:
    """Calls the method of `worker` that each request names, until there are no more requests.

    Output of libraries goes to standard error, so that standard output contains only responses.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(worker, request.pop("do"))(**request)
        print(json.dumps(answer), file=answers, flush=True)

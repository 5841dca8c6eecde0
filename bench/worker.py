"""What all peers' programs have in common: requests on standard input, answers on standard output, one line of JSON each."""

import json
import os
import sys


def serve(worker: object) -> None:
    """Answers each request with the method of `worker` that it names, until there are no more.

    What libraries print goes to standard error: answers have standard output for themselves.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(worker, request.pop("do"))(**request)
        print(json.dumps(answer), file=answers, flush=True)

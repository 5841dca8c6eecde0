"""A player of werewolf that makes random legal moves, behind a chat completions API: python3 legal.py [PORT].

It reads the format of the reply in the last message, and chooses one of the listed moves. A model that imitates it
(legal.toml) makes legal moves. Replies are a function of the conversation.
"""

import json
import random
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FORMAT = "Reply with one JSON object: {"
STATEMENTS = ["I trust {}.", "I suspect {}.", "{} is too quiet.", "I want to hear {}.", "Let us watch {}."]


def reply(messages):
    """Returns a random reply that has the format of the last request."""
    chance = random.Random(json.dumps(messages))
    asks = [message["content"] for message in messages if FORMAT in message["content"]]
    fields = asks[-1].rsplit(FORMAT, 1)[1].splitlines()[0]
    answer = {}
    if '"say": ' in fields:
        names = re.findall(r"Player\d+", messages[0]["content"])
        answer["say"] = chance.choice(STATEMENTS).format(chance.choice(names))
    if '"move": ' in fields:
        choices = fields.split('"move": ', 1)[1].rstrip("}").split(" | ")
        answer["move"] = json.loads(chance.choice(choices))
    return json.dumps(answer)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": reply(request["messages"])}
        usage = {"prompt_tokens": 0, "completion_tokens": 1, "total_tokens": 1}
        choice = {"index": 0, "finish_reason": "stop"}
        body = {"id": "legal", "object": "chat.completion", "created": 0, "model": "legal", "usage": usage}
        if request.get("stream"):
            chunk = body | {"object": "chat.completion.chunk", "choices": [choice | {"delta": message}]}
            content, kind = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", "text/event-stream"
        else:
            content, kind = json.dumps(body | {"choices": [choice | {"message": message}]}), "application/json"
        encoded = content.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8765
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()

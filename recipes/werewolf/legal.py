"""Scripted players of werewolf behind a chat completions API: python3 legal.py [PORT].

The model `legal` reads the format of the reply in the last message, and makes random legal moves and statements. A
model that imitates it (legal.toml) makes legal moves. The model `crowd` is an opponent with a habit: it votes for the
living player who was accused most often since the last vote, and accuses nobody itself. Replies are a function of the
conversation.
"""

import json
import random
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FORMAT = "Reply with one JSON object: {"
STATEMENTS = ["I trust {}.", "I suspect {}.", "{} is too quiet.", "I want to hear {}.", "Let us watch {}."]
NEUTRAL = ["I trust {}.", "I want to hear {}."]
ACCUSATION = re.compile(r"I suspect (Player\d+)|(Player\d+) is too quiet")
VOTES = "The votes: "


def accused(messages, legal):
    """Returns the player among `legal` who was accused most often since the last vote, the last one if several were."""
    heard = "\n".join(message["content"] for message in messages if message["role"] == "user")
    found = ["".join(match) for match in ACCUSATION.findall(heard.rsplit(VOTES, 1)[-1])]
    found = [name for name in found if name in legal]
    return max(reversed(found), key=found.count, default=None)


def reply(messages, model="legal"):
    """Returns a reply that has the format of the last request."""
    chance = random.Random(json.dumps(messages))
    asks = [message["content"] for message in messages if FORMAT in message["content"]]
    fields = asks[-1].rsplit(FORMAT, 1)[1].splitlines()[0]
    answer = {}
    if '"say": ' in fields:
        names = re.findall(r"Player\d+", messages[0]["content"])
        statements = NEUTRAL if model == "crowd" else STATEMENTS
        answer["say"] = chance.choice(statements).format(chance.choice(names))
    if '"move": ' in fields:
        choices = [json.loads(choice) for choice in fields.split('"move": ', 1)[1].rstrip("}").split(" | ")]
        answer["move"] = chance.choice(choices)
        if model == "crowd":
            # It uses neither antidote nor poison, and checks the first player.
            quiet = next((choice for choice in (False, "none") if choice in choices), choices[0])
            is_vote = "Vote for the player to be exiled" in asks[-1]
            answer["move"] = (accused(messages, choices) if is_vote else None) or quiet
    return json.dumps(answer)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": reply(request["messages"], request["model"])}
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

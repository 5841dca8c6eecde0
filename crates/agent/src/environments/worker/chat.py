"""A conversation with the model behind an attempt's endpoint, for environments that bring no client."""

import http.client
import json
import urllib.parse


class Over(Exception):
    """The attempt has no calls or tokens left, or its conversation no longer fits."""


class Conversation:
    """Messages of one attempt, and whether it is waiting for a reply."""

    def __init__(self, order):
        self.url = urllib.parse.urlsplit(order["base_url"])
        self.order = order
        self.messages = []
        self.turns = 0
        self.asking = False

    def say(self, role, content):
        self.messages.append({"role": role, "content": content})

    def reply(self):
        """The model's next turn, as text.

        No wait of its own ends it: the attempt's deadline does, and then this process is told to let go.
        """
        if self.turns >= self.order["max_turns"]:
            raise Over("agent.max_turns")
        body = json.dumps({"model": self.order["model"], "messages": self.messages})
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.order['api_key']}"}
        connection = http.client.HTTPConnection(self.url.hostname, self.url.port)
        self.asking = True
        try:
            connection.request("POST", f"{self.url.path}/chat/completions", body, headers)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
        finally:
            self.asking = False
            connection.close()
        said = json.loads(text)
        if "error" in said or answer.status >= 400:
            error = said.get("error") or {}
            message = error.get("message", text[:300])
            if answer.status == 400 and error.get("code") in ("attempt_limit_reached", "context_length_exceeded"):
                raise Over(message)
            raise RuntimeError(f"the model's endpoint answered {answer.status}: {message}")
        message = said["choices"][0]["message"]
        self.messages.append(message)
        self.turns += 1
        return message.get("content") or ""

    def open(self, observation):
        """Begins as the recipe says: its instructions, and its prompt around the first observation."""
        task = self.order["task"]
        for message in task["messages"]:
            content = message["content"]
            if isinstance(content, str):
                content = content.replace(task["question"], observation)
            self.say(message["role"], content)

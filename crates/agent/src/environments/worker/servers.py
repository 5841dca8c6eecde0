"""Servers of OpenEnv: an episode is a session at one."""

import asyncio
import json
import urllib.request

from levade_worker import episode, numbers

# Fields of an observation that are no part of what is seen.
ASIDE = ("done", "reward", "metadata")


class Source:
    """One server; a task is a set of arguments of its `reset`."""

    def __init__(self, options):
        try:
            from openenv.core import GenericEnvClient
        except ImportError as error:
            raise numbers.installed("openenv.core", "openenv-core", error) from error
        self.client, self.options = GenericEnvClient, options
        self.schema = self.asked("/schema").get("action") or {}

    def asked(self, path):
        url = self.options["url"].rstrip("/") + path
        try:
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with direct.open(url, timeout=30) as answer:
                return json.load(answer)
        except (OSError, ValueError) as error:
            raise numbers.Refused(f"the OpenEnv server does not answer at {url}: {error}") from error

    def describe(self):
        return numbers.version("openenv-core")

    def tasks(self, order):
        resets, url = self.options["resets"], self.options["url"]
        tasks = []
        for place in range(order["from"], order["to"]):
            reset = resets[place] if resets else {"seed": order["seed"] + place}
            name = json.dumps(reset, sort_keys=True)
            row = {"environment": {"reset": reset}}
            tasks.append({"name": str(place), "question": f"{url} {name}", "kind": "openenv", "row": row})
        return tasks

    def attempt(self, order, stopped):
        world = World(self, order["task"]["row"]["environment"]["reset"])
        return episode.play(world, order, stopped)


class World:
    """An episode at a server, over a connection of its own."""

    def __init__(self, source, reset):
        self.source, self.arguments = source, reset
        self.loop = asyncio.new_event_loop()
        self.session = source.client(base_url=source.options["url"])

    def run(self, awaitable):
        return self.loop.run_until_complete(awaitable)

    def text(self, observation):
        field = self.source.options["observation"]
        if not field and isinstance(observation, dict):
            seen = {key: value for key, value in observation.items() if key not in ASIDE}
            texts = [value for value in seen.values() if isinstance(value, str)]
            observation = texts[0] if len(texts) == 1 == len(seen) else seen
        return episode.observation_text(observation, field)

    def reset(self):
        self.run(self.session.connect())
        result = self.run(self.session.reset(**self.arguments))
        return self.text(result.observation)

    def step(self, reply):
        action = self.action(episode.action_text(reply, self.source.options["tag"]))
        try:
            result = self.run(self.session.step(action))
        except RuntimeError as error:
            # The server's own words on an action that it does not take; it goes on.
            raise episode.NoAction(f"Error: {error}") from error
        return self.text(result.observation), result.reward, result.done

    def action(self, text):
        """A reply as an action: a JSON object, also in a fence, or the one field that an action must have."""
        if text.startswith("```") and text.endswith("```"):
            text = "\n".join(text.splitlines()[1:-1]).strip()
        try:
            action = json.loads(text)
        except ValueError:
            action = text
        if isinstance(action, dict):
            return action
        schema = self.source.schema
        required = schema.get("required") or []
        if len(required) != 1:
            fields = ", ".join(schema.get("properties", {}))
            raise episode.NoAction(f"Reply with a JSON object with the fields of an action: {fields}.")
        kind = schema.get("properties", {}).get(required[0], {}).get("type")
        return {required[0]: text if kind == "string" else action}

    def close(self):
        try:
            self.run(self.session.disconnect())
        finally:
            self.loop.close()

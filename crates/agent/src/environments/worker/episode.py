"""Episodes of worlds that are stepped: an observation is a turn of the user, a reply is an action."""

import json
import re

from levade_worker import chat, numbers


class Stopped(Exception):
    """The attempt is over for whoever asked for it."""


def play(world, order, stopped):
    """Plays a world to its end, or to that of the attempt. Each reward belongs to the turn that earned it.

    `world` has `reset() -> observation` and `step(reply) -> (observation, reward, whether it is over)`; a reply
    that is no action raises `NoAction`, whose words are the next observation.
    """
    conversation = order["conversation"] = chat.Conversation(order)
    rewards = []
    try:
        conversation.open(world.reset())
        while True:
            reply = conversation.reply()
            if stopped.is_set():
                raise Stopped
            # Calls of an attempt are counted from 0.
            turn = conversation.turns - 1
            try:
                observation, reward, over = world.step(reply)
                if reward is not None:
                    number = numbers.reward(reward, f"the reward of step {turn + 1}")
                    rewards.append({"value": number, "turn": turn})
            except NoAction as wrong:
                observation, over = str(wrong), False
            if stopped.is_set():
                raise Stopped
            if over:
                break
            conversation.say("user", observation)
    except chat.Over:
        # Cut by a limit of the attempt: what was earned until then counts.
        pass
    finally:
        world.close()
    last = next((m.get("content") for m in reversed(conversation.messages) if m["role"] == "assistant"), "")
    return {"answer": last or "", "rewards": rewards or [{"value": 0.0}]}


class NoAction(Exception):
    """A reply in which no action is found; in words for the model."""


def last(text, tag):
    """What stands in the last tag of a text, None where there is none; or all of it where no tag is named."""
    if not tag:
        return text.strip()
    found = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def action_text(reply, tag):
    """The action in a reply."""
    action = last(reply, tag)
    if action is None:
        raise NoAction(f"Write your action between <{tag}> and </{tag}>.")
    return action


def observation_text(observation, field):
    """An observation as the model reads it: a text as it is, or that field of it; anything else as JSON."""
    if field:
        if not isinstance(observation, dict) or field not in observation:
            has = ", ".join(observation) if isinstance(observation, dict) else numbers.shown(observation)
            raise numbers.Refused(f"the observation has no field {field!r}; it has {has}")
        observation = observation[field]
    return observation if isinstance(observation, str) else json.dumps(numbers.plain(observation))

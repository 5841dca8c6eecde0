"""Worlds of gymnasium: text in, text out."""

import re

from levade_worker import episode, numbers


class Source:
    """One registered environment; a task is a seed of it."""

    def __init__(self, options):
        try:
            import gymnasium
        except ImportError as error:
            raise numbers.installed("gymnasium", "gymnasium", error) from error
        self.gym, self.options = gymnasium, options
        world = self.make()
        try:
            self.check(world)
        finally:
            world.close()

    def describe(self):
        return numbers.version("gymnasium")

    def make(self):
        name = self.options["environment"]
        try:
            return self.gym.make(name, **self.options["config"])
        except ModuleNotFoundError as error:
            raise numbers.installed(error.name, error.name, error) from error
        except (self.gym.error.Error, TypeError, AttributeError) as error:
            raise numbers.Refused(f"gymnasium cannot make {name}: {error}") from error

    def check(self, world):
        space, actions = world.action_space, self.options["actions"]
        spaces = self.gym.spaces
        if isinstance(space, spaces.Discrete):
            if actions and len(actions) != space.n:
                raise numbers.Refused(f"`actions` names {len(actions)} actions, but {world.spec.id} has {space.n}")
        elif not isinstance(space, spaces.Text):
            raise numbers.Refused(
                f"the actions of {world.spec.id} are {space}; replies can be actions of a Discrete or Text space"
            )

    def tasks(self, order):
        name = self.options["environment"]
        tasks = []
        for seed in range(order["seed"] + order["from"], order["seed"] + order["to"]):
            row = {"environment": {"seed": seed}}
            tasks.append({"name": f"{name}-{seed}", "question": f"{name}, seed {seed}", "kind": name, "row": row})
        return tasks

    def attempt(self, order, stopped):
        world = World(self.make(), self.options, order["task"]["row"]["environment"]["seed"])
        return episode.play(world, order, stopped)


class World:
    """An episode of an environment."""

    def __init__(self, world, options, seed):
        self.world, self.options, self.seed = world, options, seed
        self.discrete = hasattr(world.action_space, "n")

    def text(self, observation):
        # Environments of numbers draw themselves as text where they are made so.
        if self.world.render_mode == "ansi":
            return str(self.world.render())
        return episode.observation_text(observation, self.options["observation"])

    def reset(self):
        observation, _ = self.world.reset(seed=self.seed)
        return self.text(observation)

    def step(self, reply):
        action = episode.action_text(reply, self.options["tag"])
        if self.discrete:
            action = self.number(action)
        observation, reward, terminated, truncated, _ = self.world.step(action)
        return self.text(observation), reward, terminated or truncated

    def number(self, text):
        """The number of the action that a text names last."""
        names = self.options["actions"] or [str(place) for place in range(self.world.action_space.n)]
        # Longer names first: "north east" is not "north".
        longest = sorted(names, key=len, reverse=True)
        found = re.findall("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in longest), text, re.IGNORECASE)
        if not found:
            raise episode.NoAction(f"No action was found. Reply with one of: {', '.join(names)}.")
        # Names may differ in case alone, as the turns of a cube do.
        same = [name.lower() for name in names]
        place = names.index(found[-1]) if found[-1] in names else same.index(found[-1].lower())
        return place + int(getattr(self.world.action_space, "start", 0))

    def close(self):
        self.world.close()

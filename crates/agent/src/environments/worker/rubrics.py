"""Environments of verifiers, unchanged: they lead the attempt and say what it is worth."""

import asyncio
import itertools
import os

from levade_worker import numbers


class Source:
    """One environment, by verifiers' own configuration of it."""

    def __init__(self, options):
        try:
            import verifiers.v1 as vf
            from verifiers.v1.utils import loaders
        except ImportError as error:
            raise numbers.installed("verifiers.v1", "'verifiers>=0.4'", error) from error
        self.vf, self.loaders, self.options = vf, loaders, options
        self.served = {}
        self.lock = asyncio.Lock()
        self.iterator, self.listed = None, []
        self.env = self.environment(None, ())

    def describe(self):
        package = self.options["environment"].rsplit("/", 1)[-1].split("@", 1)[0]
        return f"{numbers.version('verifiers')}, {numbers.version(package)}"

    def environment(self, max_turns, agents):
        """The environment. Seats that are named as agents of the recipe ask for models of these names."""
        vf, loaders, name = self.vf, self.loaders, self.options["environment"]
        config = dict(self.options["config"])
        config["taskset"] = {"id": name, **config.get("taskset", {})}
        try:
            # The class of a taskset is looked for in silence; only this import says what is missing.
            loaders.import_taskset(name)
            kind = loaders.env_config_type(name, config.get("id", ""))
            for seat, field in kind.model_fields.items():
                if isinstance(field.default, vf.AgentConfig):
                    config[seat] = self.seat(seat, field.default, config.get(seat) or {}, max_turns, agents)
            return loaders.load_environment(loaders.resolve_env_config(config))
        except ModuleNotFoundError as error:
            package = name.rsplit("/", 1)[-1]
            raise numbers.installed(package.replace("-", "_"), package, error) from error
        except Exception as error:
            raise numbers.Refused(f"verifiers cannot load {name}: {type(error).__name__}: {error}") from error

    def seat(self, seat, default, given, max_turns, agents):
        """The configuration of a seat: what is given, else a chat loop in a process of this machine."""
        keys = dict(given)
        if "runtime" not in keys and default.runtime == self.vf.AgentConfig().runtime:
            keys["runtime"] = {"type": "subprocess"}
        own = self.loaders.default_harness_id(self.options["environment"])
        if "harness" not in keys and default.harness is None and own == "bash":
            keys["harness"] = {"id": "null"}
        if max_turns and "max_turns" not in keys and default.max_turns is None:
            keys["max_turns"] = max_turns
        if seat in agents:
            keys["model"] = seat
        return keys

    def tasks(self, order):
        """The tasks from place `from` to `to`; fewer where the environment has no more."""
        if self.iterator is None:
            self.iterator = iter(self.env.taskset)
        missing = order["to"] - len(self.listed)
        try:
            self.listed.extend(itertools.islice(self.iterator, max(missing, 0)))
        except Exception as error:
            name = self.options["environment"]
            raise numbers.Refused(f"{name} cannot list its tasks: {type(error).__name__}: {error}") from error
        return [self.task(task) for task in self.listed[order["from"] : order["to"]]]

    def task(self, task):
        name = self.options["environment"]
        data = task.data.model_dump(mode="json")
        label = task.data.name or task.data.id or ""
        prompt = task.data.prompt_text.strip()
        # Many tasks of a game ask the same: place and name tell them apart.
        question = f"[{name} {task.data.idx}{' ' if label else ''}{label}] {prompt}".strip()
        return {"name": str(task.data.idx), "question": question, "kind": name, "row": {"environment": data}}

    async def serving(self, max_turns, agents):
        """The environment with all that its episodes share, once it is up."""
        key = (max_turns, agents)
        async with self.lock:
            if key not in self.served:
                env = self.environment(max_turns, agents)
                up = asyncio.get_running_loop().create_future()
                # Entered and left by one task, as what it holds asks for.
                keeper = asyncio.create_task(hold(env, up))
                await up
                self.served[key] = (env, keeper)
            return self.served[key][0]

    async def attempt(self, order):
        agents = tuple(order["agents"][1:])
        env = await self.serving(order["max_turns"], agents)
        vf = self.vf
        kind = type(env.taskset).task_type()
        data = kind.data_type().model_validate(order["task"]["row"]["environment"])
        task = kind(data, env.config.taskset.task)
        # Verifiers reads keys from its environment, and hides those whose name says so from what it starts.
        variable = f"LEVADE_API_KEY_{order['attempt']}"
        os.environ[variable] = order["api_key"]
        try:
            client = vf.EvalClientConfig(base_url=order["base_url"], api_key_var=variable)
            context = vf.ModelContext(client=client, model=order["model"], sampling=vf.SamplingConfig())
            episode = await env.run_episode(task, context)
        finally:
            del os.environ[variable]
        return self.result(episode, agents)

    def result(self, episode, agents):
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            first = f"{errors[0].type}: {errors[0].message}" if errors else "the episode is not complete"
            return {"error": first}
        rewards, answer = [], ""
        for trace in episode.traces:
            seat = trace.agent.name
            if not getattr(trace.agent, "trainable", True):
                continue
            # The attempt is worth what its own agent earned; others earn under the names of their seats.
            own = seat not in agents
            earner, prefix = ({}, "") if own else ({"agent": seat}, f"{seat}.")
            answer = trace.last_reply or answer if own else answer
            total = 0.0
            for name, reward in trace.rewards.items():
                if reward is not None:
                    value = numbers.reward(reward.value, f"the reward {name}")
                    total += value
                    rewards.append({"value": value, "name": prefix + name, **earner})
            for name, value in trace.metrics.items():
                if value is not None:
                    value = numbers.reward(value, f"the metric {name}")
                    rewards.append({"value": value, "name": prefix + name, **earner})
            rewards.append({"value": total, **earner, **({} if own else {"name": seat})})
        return {"answer": answer, "rewards": rewards}


async def hold(env, up):
    """Keeps an environment's shared parts up for as long as this process lives."""
    try:
        async with env.serving():
            up.set_result(None)
            await asyncio.Event().wait()
    except Exception as error:
        if up.done():
            raise
        up.set_exception(error)

"""Data sets of reasoning-gym: tasks by seed and place, and their own scores."""

import threading

from levade_worker import episode, numbers

# Places whose tasks are made twice before anything is trained on them.
PROBED = 3


class Source:
    """Data sets that share a source's tasks."""

    def __init__(self, options):
        try:
            import reasoning_gym
        except ImportError as error:
            raise numbers.installed("reasoning_gym", "reasoning-gym", error) from error
        self.gym = reasoning_gym
        self.specs = {spec["name"]: spec for spec in options["datasets"]}
        self.made = {}
        self.lock = threading.Lock()
        for name in self.specs:
            self.probe(name)

    def describe(self):
        return numbers.version("reasoning-gym")

    def dataset(self, name, seed, size):
        """A data set, made once for each seed."""
        with self.lock:
            key = (name, seed, size)
            if key not in self.made:
                self.made[key] = self.create(name, seed, size)
            return self.made[key]

    def create(self, name, seed, size):
        from reasoning_gym.factory import DATASETS

        if name not in DATASETS:
            import difflib

            near = difflib.get_close_matches(name, DATASETS, 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise numbers.Refused(f"{self.describe()} has no data set {name!r}{hint}")
        try:
            return self.gym.create_dataset(name, seed=seed, size=size, **self.specs[name]["config"])
        except (TypeError, AssertionError, ValueError) as error:
            raise numbers.Refused(f"the data set {name} refuses its config: {error}") from error

    def probe(self, name):
        """Refuses a data set that does not give the same task at the same place: it could not be scored later."""
        first, second = (self.create(name, 1, PROBED) for _ in range(2))
        for place in range(PROBED):
            if first[place]["question"] != second[place]["question"]:
                raise numbers.Refused(
                    f"the data set {name} gives another task at the same seed and place each time, so its "
                    "answers cannot be scored later: leave it out"
                )

    def tasks(self, order):
        """The tasks at places `from` to `to` of one data set and seed."""
        name, seed, size = order["dataset"], order["seed"], order["size"]
        dataset = self.dataset(name, seed, size)
        return [self.task(dataset, name, seed, size, place) for place in range(order["from"], order["to"])]

    def task(self, dataset, name, seed, size, place):
        entry = dataset[place]
        where = {"dataset": name, "seed": seed, "size": size, "index": place}
        metadata = numbers.plain(entry.get("metadata", {}))
        answer = entry.get("answer")
        return {
            "name": f"{name}-{seed}-{place}",
            "question": str(entry["question"]),
            "answer": answer if answer is None else str(answer),
            "kind": name,
            "row": {"environment": where, "metadata": metadata},
        }

    def score(self, order):
        """The score that the data set gives the answer in a text."""
        where = order["row"]["environment"]
        name = where["dataset"]
        if name not in self.specs:
            raise numbers.Refused(f"the task is of the data set {name}, which this recipe's source does not have")
        dataset = self.dataset(name, where["seed"], where["size"])
        entry = dataset[where["index"]]
        if str(entry["question"]) != order["question"]:
            raise numbers.Refused(
                f"{self.describe()} gives another task at place {where['index']} of {name}, seed {where['seed']}, "
                "than it gave when the task was listed"
            )
        return numbers.reward(scored(dataset, episode.last(order["text"], order["tag"]), entry), f"the score of {name}")


def scored(dataset, answer, entry):
    """The score of an answer: 0 for one that the data set cannot read and fails at, if it can score its own answer."""
    try:
        return dataset.score_answer(answer, entry)
    except Exception as error:
        try:
            dataset.score_answer(entry["answer"], entry)
        except Exception:
            raise error from None
        return 0.0

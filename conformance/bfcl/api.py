"""The stateful APIs of `bfcl-eval` as one toolbox. BFCL's own check compares its final state with the expected one."""

import copy
import functools
import inspect
import uuid
from importlib import import_module

from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING, STATELESS_CLASSES
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import state_checker

# Classes of the categories `multi_turn_*`. No two of them have methods of the same name.
NAMES = [
    "GorillaFileSystem",
    "MathAPI",
    "MessageAPI",
    "TwitterAPI",
    "TicketAPI",
    "TradingBot",
    "TravelAPI",
    "VehicleControlAPI",
]
CLASSES = {name: getattr(import_module(CLASS_FILE_PATH_MAPPING[name]), name) for name in NAMES}
METHODS = {
    method: name
    for name, kind in CLASSES.items()
    for method, _ in inspect.getmembers(kind, inspect.isfunction)
    if not method.startswith("_")
}


def load(initial_config: dict, involved_classes: list[str]) -> dict:
    """Creates the APIs of an entry in their initial state."""
    made = {name: CLASSES[name]() for name in involved_classes}
    for name, api in made.items():
        if name not in STATELESS_CLASSES:
            api._load_scenario(copy.deepcopy(initial_config.get(name, {})))
    return made


def play(entry: str, initial_config: dict, involved_classes: list[str], calls: list[str]) -> tuple[list[str], dict]:
    """Makes calls with BFCL's own executor. Returns the results, and the APIs in their final state."""
    # The executor keeps APIs in its module under this name.
    owner = f"levade_{uuid.uuid4().hex}"
    results, apis = multi_turn_utils.execute_multi_turn_func_call(calls, initial_config, involved_classes, owner, entry)
    for key in [key for key in vars(multi_turn_utils) if key.startswith(owner)]:
        del vars(multi_turn_utils)[key]
    return results, apis


class Bfcl:
    def reset(self, entry, initial_config, involved_classes, ground_truth):
        self._start = entry, initial_config, involved_classes
        self._calls = [call for turn in ground_truth for call in turn]
        self._apis = load(initial_config, involved_classes)

    def final_state(self) -> dict | None:
        """Returns the attributes that differ from the expected state; `None` if the state cannot decide."""
        results, expected = play(*self._start, self._calls)
        failed = any(result.startswith("Error during execution") for result in results)
        if failed or state_checker(load(*self._start[1:]), expected)["valid"]:
            return None
        verdict = state_checker(self._apis, expected)
        if verdict["valid"]:
            return {}
        differences = verdict["details"]["differences"]
        return {name: {side: repr(value) for side, value in values.items()} for name, values in differences.items()}


def delegate(name: str, function):
    """Returns a method of `Bfcl` that calls the API `name`."""

    @functools.wraps(function)
    def method(self, *arguments, **named):
        return getattr(self._apis[name], function.__name__)(*arguments, **named)

    return method


for method_name, class_name in METHODS.items():
    setattr(Bfcl, method_name, delegate(class_name, getattr(CLASSES[class_name], method_name)))

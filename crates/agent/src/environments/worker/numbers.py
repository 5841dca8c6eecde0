"""Rewards as Levade takes them: numbers that are finite."""

import math
import numbers
import sys
from importlib import metadata

from levade_worker.protocol import shown


class Refused(Exception):
    """An environment that cannot be used, or an answer of it; in words for its user."""


def reward(value, of):
    """The number that a reward is: Python's, NumPy's, or a tensor of one element. `of` names it in errors."""
    number = None
    if isinstance(value, (bool, numbers.Real)):
        number = float(value)
    elif not isinstance(value, (str, bytes, dict, list, tuple, type(None))) and hasattr(value, "item"):
        try:
            number = float(value.item())
        except (TypeError, ValueError):
            number = None
    if number is None:
        raise Refused(f"{of} is {shown(value)}, which is no number")
    if not math.isfinite(number):
        raise Refused(f"{of} is {number}, which is no reward")
    return number


def plain(value):
    """A value as JSON has it; what JSON has not is written as Python prints it."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def installed(module, packages, why):
    """The error of a module that is missing: it names the command that installs it."""
    command = f"{sys.executable} -m pip install {packages}"
    return Refused(f"the Python of this source cannot import {module} ({why}); install it with: {command}")


def version(package):
    """A package with its version."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return package

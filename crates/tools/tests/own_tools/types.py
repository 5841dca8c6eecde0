import asyncio
import collections
import datetime
import enum
import functools
from dataclasses import dataclass
from typing import Dict, List, Literal, Optional, Required, Tuple, TypedDict


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    """A point.

    Args:
        x: To the right.
    """

    x: int
    y: float = 0.5

    def __post_init__(self):
        if self.x < 0:
            raise ValueError("x is below 0")


class Tree(TypedDict, total=False):
    leaf: int
    left: "Tree"


def google(city: str, days: int = 3, *, unit: Literal["C", "F"] = "C", near: Optional[float] = None) -> str:
    """Finds a city.

    Only large ones.

    Args:
        city (str): Its name.
        days (int, optional): How many days,
            on two lines.
        unit: Unit.

    Returns:
        str: What was found.
    """
    return f"{city} {days} {unit} {near} {type(near).__name__}"


def numpy_style(points: List[Point], weights: Dict[str, float]):
    """Draws.

    Parameters
    ----------
    points : list of Point
        Points of a path.
    weights : dict
        Weights.

    Returns
    -------
    str
    """
    return f"{points} {weights}"


def sphinx(colour: Colour, tree: Tree = None):
    """Paints.

    :param colour: a colour
    :type colour: Colour
    :returns: nothing
    """
    return f"{colour} {tree}"


def shapes(when: datetime.date, flag: bool = True, anything=None, **more):
    return [when.year, flag, anything, more]


async def later(pair: Tuple[str, int]):
    await asyncio.sleep(0)
    return {"pair": pair, "set": {1, 2}, "nan": float("nan"), "point": Point(1)}


class Options(TypedDict, total=False):
    level: "Required[int]"
    deep: bool


def unknown(thing: "NoSuchType", options: "Options", count: "int" = 1):
    return [thing, options, count]


class Level(str, enum.Enum):
    LOW = "low"


@functools.lru_cache(maxsize=None)
def cached(level: Literal[Colour.RED, "none"] = "none", name: str = None):
    """Remembers.

    Args:
        name: A name.
    """
    cached_calls.append(level)
    return f"{level} {name} {len(cached_calls)}"


cached_calls = []
found_in = functools.partial(google, unit="F")


def pieces(count: int):
    for number in range(count):
        yield {"number": number}


async def later_pieces():
    yield Level.LOW
    yield collections.deque([1, 2])


def level():
    return Level.LOW


def counts():
    return collections.ChainMap({"low": 1}).items()

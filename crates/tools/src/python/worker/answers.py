"""Answers of tools as JSON, and errors in words for a model."""

import collections.abc
import dataclasses
import enum
import itertools
import json
import math
import os
import traceback

from levade_worker.schema import sound

# Most characters of an answer. Longer ones lose their middle: no model reads them.
MOST = 1_000_000
# Most items that are taken from what gives them one by one, which may have no end.
MOST_ITEMS = 100_000
VIEWS = (collections.abc.KeysView, collections.abc.ValuesView, collections.abc.ItemsView)


def plain(value):
    """A value that JSON has, for one that it does not have."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, (collections.abc.Iterator, range, collections.deque, *VIEWS)):
        return items_of(iter(value))
    if isinstance(value, collections.abc.Mapping):
        return dict(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return of_bytes(bytes(value))
    for method in ("model_dump", "to_dict", "tolist", "_asdict"):
        if callable(getattr(value, method, None)) and not isinstance(value, type):
            return getattr(value, method)()
    return str(value)


def items_of(items):
    """The items of an iterator, as a list. Of one without end there is a note at the end."""
    return bounded(list(itertools.islice(items, MOST_ITEMS + 1)))


async def later_items_of(items):
    """The items of an iterator that has to be waited for, as a list."""
    found = []
    async for item in items:
        found.append(item)
        if len(found) > MOST_ITEMS:
            break
    return bounded(found)


def bounded(found):
    """Items, with a note in the place of those that are too many."""
    return [*found[:MOST_ITEMS], "[… more are left out here …]"] if len(found) > MOST_ITEMS else found


def of_bytes(value):
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"[{len(value)} bytes that are no text]"


def text_of(value):
    """The text that stands for a value: texts as they are, nothing for None, all else as JSON."""
    if value is None:
        return ""
    if isinstance(value, (bytes, bytearray, memoryview)):
        value = of_bytes(bytes(value))
    # A member of an enumeration may be a text or a number besides.
    if isinstance(value, enum.Enum) or not isinstance(value, (str, dict, list, tuple, int, float)):
        value = plain(value)
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, default=plain)
        except (TypeError, ValueError, RecursionError):
            value = str(value)
    return shorten(sound(value))


def shorten(text):
    if len(text) <= MOST:
        return text
    half = MOST // 2
    return f"{text[:half]}\n[… {len(text) - MOST} characters are left out here …]\n{text[-half:]}"


def has_response_shape(value):
    return hasattr(value, "text") and (hasattr(value, "image") or hasattr(value, "video"))


def content_of(value):
    """Parts of an answer: a text, and a note for each image or video. Dictionaries with these count, too."""
    if isinstance(value, dict) and "text" in value and set(value) <= {"text", "image", "video"}:
        media = [(kind, value.get(kind)) for kind in ("image", "video")]
        text = value["text"]
    elif has_response_shape(value):
        media = [(kind, getattr(value, kind, None)) for kind in ("image", "video")]
        text = value.text
    else:
        return [{"type": "text", "text": text_of(value)}]
    parts = [{"type": "text", "text": text_of(text)}] if text is not None else []
    for kind, items in media:
        items = items if isinstance(items, (list, tuple)) else [items] if items is not None else []
        parts.extend({"type": kind} for _ in items)
    return parts


def number(value):
    """A number for a record, as JSON has it or, where it is not finite, as a text; None where it is none."""
    if hasattr(value, "item") and callable(value.item) and not isinstance(value, (bool, int, float)):
        try:
            value = value.item()
        except Exception:
            return None
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, (int, float)):
        return None
    try:
        value = float(value)
    except OverflowError:
        return "inf"
    return value if math.isfinite(value) else str(value)


def answer(value, gives_reward):
    """The answer of a call. Some tools give a reward and metrics with it."""
    reward, metrics = None, {}
    if gives_reward and isinstance(value, tuple) and 2 <= len(value) <= 3:
        value, reward, *rest = value
        metrics = rest[0] if rest else {}
    if isinstance(value, dict) and set(value) == {"content", "success"}:
        parts = content_of(value["content"])
        if not value["success"]:
            return failed(parts[0].get("text", ""))
    else:
        parts = content_of(value)
    reply = {"parts": parts}
    if reward is not None:
        reply["reward"] = number(reward)
    if isinstance(metrics, dict):
        found = {sound(name): number(value) for name, value in metrics.items()}
        reply["metrics"] = {name: value for name, value in found.items() if value is not None}
    return reply


def bad_arguments(why):
    return {"error": "arguments", "text": shorten(sound(why))}


def failed(why):
    return {"error": "failed", "text": shorten(sound(why))}


def described(error, folder):
    """An exception in one line, with the last line of the user's own code that it went through."""
    what = "".join(traceback.format_exception_only(type(error), error)).strip()
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename, folder)]
    if not own:
        return what
    last = own[-1]
    line = f": {last.line}" if last.line else ""
    return f"{what} ({os.path.relpath(last.filename, folder)}, line {last.lineno}, in {last.name}{line})"


def is_own(file, folder):
    file = os.path.abspath(file)
    inside = file.startswith(os.path.join(folder, "")) and os.path.exists(file)
    return inside and not any(part in ("site-packages", "dist-packages") for part in file.split(os.sep))

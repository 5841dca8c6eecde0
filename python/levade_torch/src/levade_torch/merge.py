"""Merges sequences into a tree batch, with the same tokens, targets and terms as Levade's `TreeBatch::merge`."""

from dataclasses import dataclass, field

import numpy as np

from .batch import Terms, TreeBatch
from .errors import invalid_request
from .wire import Arrays, Columns


@dataclass
class Paths:
    """Sequences of an update: their `tokens`, and their targets one after another, in the order of the sequences."""

    tokens: list[np.ndarray]
    first_target: np.ndarray
    index: np.ndarray
    temperature: np.ndarray
    terms: Terms

    @staticmethod
    def read(arrays: Arrays) -> "Paths":
        """Reads the sequences of a body.

        Raises `invalid` if a sequence is empty or a target is outside its sequence.
        """
        columns = Columns(arrays)
        counts = columns.integers("path_targets")
        tokens = read_tokens(columns, len(counts))
        total = int(counts.sum())
        if (counts < 0).any():
            raise invalid_request(f"path {int(np.argmax(counts < 0))} has {counts.min()} targets")
        path = np.repeat(np.arange(len(counts)), counts)
        index = columns.integers("index", total)
        temperature = columns.floats("temperature", total)
        lengths = np.array([len(t) for t in tokens], np.int64)[path]
        if (wrong := (index < 1) | (index >= lengths)).any():
            at = int(np.argmax(wrong))
            raise invalid_request(f"path {path[at]} has the target {index[at]}; it must be 1 to {lengths[at] - 1}")
        if (wrong := ~(np.isfinite(temperature) & (temperature > 0))).any():
            at = int(np.argmax(wrong))
            raise invalid_request(
                f"a target of path {path[at]} has the temperature {temperature[at]}; it must be more than 0"
            )
        first = np.concatenate([[0], np.cumsum(counts)])
        return Paths(tokens, first, index, temperature, Terms.read(columns, total, path))


def read_tokens(columns: Columns, count: int | None = None) -> list[np.ndarray]:
    """Returns the token ids of every sequence.

    Raises `invalid` if a sequence is empty or the lengths do not add up.
    """
    lengths = columns.integers("path_len", count)
    tokens = columns.integers("path_tokens", int(lengths.sum()))
    if (lengths < 1).any():
        raise invalid_request(f"path {int(np.argmax(lengths < 1))} is empty")
    return np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else []


def count_shared_tokens(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the length of the common prefix."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(np.argmax(differ)) if differ.any() else n


@dataclass
class Node:
    """A run of tokens that the same sequences share, and its children. `start` is the node's index in the batch."""

    tokens: np.ndarray
    children: list["Node"] = field(default_factory=list)
    start: int = 0


def _insert(roots: list[Node], rest: np.ndarray) -> None:
    """Inserts `rest` into the trie, splitting the node at which tokens diverge."""
    siblings = roots
    while len(rest):
        node = next((s for s in siblings if s.tokens[0] == rest[0]), None)
        if node is None:
            siblings.append(Node(rest))
            return
        same = count_shared_tokens(node.tokens, rest)
        if same < len(node.tokens):
            node.children = [Node(node.tokens[same:], node.children)]
            node.tokens = node.tokens[:same]
        siblings, rest = node.children, rest[same:]


def _lay_out(roots: list[Node]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns tokens, positions and subtree ends in depth-first order. Sets `start` of every node."""
    order: list[tuple[Node, int]] = []
    stack = [(root, 0) for root in reversed(roots)]
    total = 0
    while stack:
        node, depth = stack.pop()
        node.start, total = total, total + len(node.tokens)
        order.append((node, depth))
        stack += [(child, depth + len(node.tokens)) for child in reversed(node.children)]
    ends: dict[int, int] = {}
    for node, _ in reversed(order):
        last = node.children[-1] if node.children else None
        ends[id(node)] = ends[id(last)] if last else node.start + len(node.tokens)
    tokens = [node.tokens for node, _ in order]
    position = [np.arange(depth, depth + len(node.tokens)) for node, depth in order]
    end = [np.full(len(node.tokens), ends[id(node)]) for node, _ in order]
    return tuple(
        np.concatenate(part).astype(np.int64) if part else np.zeros(0, np.int64) for part in (tokens, position, end)
    )


def _pack(roots: list[Node], tokens: np.ndarray) -> np.ndarray:
    """Returns the packed indices of a sequence's tokens. A node ends wherever a sequence ends."""
    found, siblings, rest = [], roots, tokens
    while len(rest):
        node = next(s for s in siblings if s.tokens[0] == rest[0])
        found.append(np.arange(node.start, node.start + len(node.tokens)))
        siblings, rest = node.children, rest[len(node.tokens) :]
    return np.concatenate(found)


def merge(paths: Paths, chosen: list[int]) -> TreeBatch:
    """Merges the chosen sequences, in that order, wherever their ids agree from the root on.

    Terms refer to their sequence by its index in `chosen`.
    """
    roots: list[Node] = []
    for path in chosen:
        _insert(roots, paths.tokens[path])
    tokens, position, end = _lay_out(roots)
    wanted = [np.arange(paths.first_target[p], paths.first_target[p + 1]) for p in chosen]
    packed = [
        _pack(roots, paths.tokens[p]) if len(w) else np.zeros(0, np.int64) for p, w in zip(chosen, wanted, strict=True)
    ]
    if not sum(map(len, wanted)):
        return TreeBatch(tokens, position, end)
    token = np.concatenate([at[paths.index[w]] for at, w in zip(packed, wanted, strict=True)])
    before = np.concatenate([at[paths.index[w] - 1] for at, w in zip(packed, wanted, strict=True)])
    path_index = np.concatenate([np.full(len(w), i) for i, w in enumerate(wanted)])
    wanted = np.concatenate(wanted)
    bits = np.ascontiguousarray(paths.temperature[wanted]).view(np.uint32)
    order = np.lexsort((path_index, bits, token))
    token, before, bits, path_index, wanted = (a[order] for a in (token, before, bits, path_index, wanted))
    new = np.ones(len(token), bool)
    new[1:] = (token[1:] != token[:-1]) | (bits[1:] != bits[:-1])
    first = np.flatnonzero(new)
    terms = paths.terms[wanted]
    terms.path = path_index
    count = np.diff(np.append(first, len(token)))
    return TreeBatch(
        tokens, position, end, token[first], before[first], paths.temperature[wanted][first], first, count, terms
    )

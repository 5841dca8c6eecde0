"""Tree batches: packed tokens in depth-first order, with their training targets.

Token q attends to token k if k <= q < subtree_end[k]. So k is visible to itself and to all its descendants.
"""

from dataclasses import dataclass, field, fields

import numpy as np

from .errors import invalid_request
from .wire import Arrays, Columns

OPTIONAL = ("value", "behaviour", "proximal", "reference", "path_log_ratio", "correction")
REQUIRED = ("weight", "advantage", "returns")


@dataclass
class Terms:
    """Loss terms of targets, one per sequence that trains the target. Columns of equal length; NaN marks an absent
    number.
    """

    path: np.ndarray
    weight: np.ndarray
    advantage: np.ndarray
    returns: np.ndarray
    value: np.ndarray
    behaviour: np.ndarray
    proximal: np.ndarray
    reference: np.ndarray
    path_log_ratio: np.ndarray
    correction: np.ndarray
    marked: np.ndarray
    age: np.ndarray
    version: np.ndarray

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, index) -> "Terms":
        return Terms(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    @staticmethod
    def read(columns: Columns, count: int, path: np.ndarray | None = None) -> "Terms":
        """Reads the columns of a body. Pass `path` if the body does not contain that column."""
        floats = {name: columns.floats(name, count) for name in REQUIRED + OPTIONAL}
        integers = {name: columns.integers(name, count) for name in ("marked", "age", "version")}
        integers["marked"] = integers["marked"] != 0
        path = columns.integers("path", count) if path is None else path
        return Terms(path=path, **floats, **integers)

    @staticmethod
    def empty() -> "Terms":
        """Returns empty columns."""
        kinds = {"path": np.int64, "marked": bool, "age": np.int64, "version": np.int64}
        return Terms(**{f.name: np.zeros(0, kinds.get(f.name, np.float32)) for f in fields(Terms)})


def no_integers() -> np.ndarray:
    """Returns an empty column."""
    return np.zeros(0, np.int64)


@dataclass
class TreeBatch:
    """A forest over token ids.

    Per token [n]: `tokens`, `position` in its sequence, `subtree_end` (exclusive). Per target [t]: `target_token` and
    `predictor` (packed indices), `temperature`, `first_term`, `term_count`.
    """

    tokens: np.ndarray
    position: np.ndarray
    subtree_end: np.ndarray
    target_token: np.ndarray = field(default_factory=no_integers)
    predictor: np.ndarray = field(default_factory=no_integers)
    temperature: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    first_term: np.ndarray = field(default_factory=no_integers)
    term_count: np.ndarray = field(default_factory=no_integers)
    terms: Terms = field(default_factory=Terms.empty)

    @staticmethod
    def read(arrays: Arrays) -> "TreeBatch":
        """Reads and checks the batch of a body.

        Raises `invalid` with the first inconsistency.
        """
        columns = Columns(arrays)
        tokens = columns.integers("tokens")
        targets = columns.integers("target_token")
        terms = columns.integers("path")
        batch = TreeBatch(
            tokens,
            columns.integers("position", len(tokens)),
            columns.integers("subtree_end", len(tokens)),
            targets,
            columns.integers("predictor", len(targets)),
            columns.floats("temperature", len(targets)),
            columns.integers("first_term", len(targets)),
            columns.integers("terms", len(targets)),
            Terms.read(columns, len(terms)),
        )
        batch.check()
        return batch

    @property
    def term_target(self) -> np.ndarray:
        """The target of every term that belongs to a target, in target order."""
        return np.repeat(np.arange(len(self.target_token)), self.term_count)

    @property
    def term_index(self) -> np.ndarray:
        """The index in `terms` of every term that belongs to a target, in target order."""
        within = np.arange(self.term_count.sum()) - np.repeat(
            np.cumsum(self.term_count) - self.term_count, self.term_count
        )
        return np.repeat(self.first_term, self.term_count) + within

    def parents(self) -> np.ndarray:
        """Returns the preceding token of every token in its sequence; −1 for a root.

        Raises `invalid` if tokens are not in depth-first order, or if positions do not count along sequences.
        """
        n, above = len(self.tokens), []
        parent = np.full(n, -1, np.int64)
        ends, positions = self.subtree_end.tolist(), self.position.tolist()
        for k in range(n):
            while above and ends[above[-1]] <= k:
                above.pop()
            before = above[-1] if above else -1
            limit, position = (ends[before], positions[before] + 1) if above else (n, 0)
            if not k < ends[k] <= limit:
                raise invalid_request(f"subtree_end[{k}] is {ends[k]}; it must be {k + 1} to {limit}")
            if positions[k] != position:
                raise invalid_request(f"position[{k}] is {positions[k]}, but the path has {position} tokens before it")
            parent[k] = before
            above.append(k)
        return parent

    def check(self) -> None:
        """Checks that tokens, targets and terms are consistent.

        Raises `invalid` with the first inconsistency.
        """
        n, terms = len(self.tokens), len(self.terms)
        parent = self.parents()
        inside = (self.target_token >= 0) & (self.target_token < n)
        self._raise_invalid(~inside, lambda t: f"target {t} is token {self.target_token[t]} of {n}")
        self._raise_invalid(
            (parent[self.target_token] != self.predictor) | (self.predictor < 0),
            lambda t: f"target {t} is token {self.target_token[t]}, which {self.predictor[t]} does not precede",
        )
        self._raise_invalid(
            ~(np.isfinite(self.temperature) & (self.temperature > 0)),
            lambda t: f"target {t} has the temperature {self.temperature[t]}; it must be more than 0",
        )
        self._raise_invalid(
            (self.term_count < 1) | (self.first_term < 0) | (self.first_term + self.term_count > terms),
            lambda t: f"target {t} has {self.term_count[t]} terms from {self.first_term[t]}, but there are {terms}",
        )

    @staticmethod
    def _raise_invalid(wrong: np.ndarray, what) -> None:
        if wrong.any():
            raise invalid_request(what(int(np.argmax(wrong))))

    def check_fits(self, vocabulary: int, context: int) -> None:
        """Checks that the batch fits a model.

        Raises `invalid` with the first token that has no embedding or lies beyond the context.
        """
        self._raise_invalid(
            (self.tokens < 0) | (self.tokens >= vocabulary),
            lambda k: f"token {k} has the id {self.tokens[k]}, but the vocabulary has {vocabulary} entries",
        )
        self._raise_invalid(
            self.position >= context,
            lambda k: f"a path has {self.position.max() + 1} tokens, but the context holds {context}",
        )

    def branches(self) -> np.ndarray:
        """Returns the indices at which branches start, followed by the number of tokens: [branches + 1].

        A branch is a run of tokens that the same sequences share.
        """
        inner = np.flatnonzero(self.subtree_end[1:] != self.subtree_end[:-1]) + 1
        return np.unique(np.array([0, *inner, len(self.tokens)], np.int64))

    def take(self, start: int, end: int) -> tuple["TreeBatch", np.ndarray]:
        """Returns branches `start..end` with the ancestor tokens of the first of them, and the indices of their
        targets here.

        Ancestor tokens are no targets in the returned batch. Target indices refer to this batch.
        """
        chosen = np.flatnonzero((self.target_token >= start) & (self.target_token < end))
        above = np.flatnonzero(self.subtree_end[:start] > start)
        rows = np.concatenate([above, np.arange(start, end)])
        # A target's predecessor is always among the rows: it is an ancestor of the first token, or it follows that
        # token.
        row_of = np.full(end, -1)
        row_of[rows] = np.arange(len(rows))
        part = TreeBatch(
            self.tokens[rows],
            self.position[rows],
            np.minimum(self.subtree_end[rows], end) - start + len(above),
            row_of[self.target_token[chosen]],
            row_of[self.predictor[chosen]],
            self.temperature[chosen],
            self.first_term[chosen],
            self.term_count[chosen],
            self.terms,
        )
        return part, chosen

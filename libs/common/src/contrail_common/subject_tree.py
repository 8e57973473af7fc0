"""A tree of subject filters: which of them match a subject, and which overlap another filter.

A search costs by the tokens of its subject or filter and by what it finds, not by the number of
filters in the tree. Only a ``*`` of the filter that is searched for looks at all branches of a
node.
"""

from collections.abc import Hashable, Iterable, Iterator
from heapq import heapify, heappop
from typing import Final, Generic, TypeVar

V = TypeVar("V", bound=Hashable)
_ALL_BELOW: Final = -1
"""In place of a position: the filter that is searched for ended with ``>`` above this node."""


class _Node(Generic[V]):
    """A step of one or more tokens.

    Each node but the root has values, or at least two children. So a tree has fewer than twice as
    many nodes as filters, however long these are, and its shape follows from the filters alone.
    """

    __slots__ = ("children", "label", "values")

    def __init__(self, label: str) -> None:
        # The tokens between the parent and this node. Empty for the root only.
        self.label = label
        # By the first token of their labels. Wildcards are tokens like others here.
        self.children: dict[str, _Node[V]] = {}
        # The values of the filter that ends here.
        self.values: set[V] = set()


class SubjectTree(Generic[V]):
    """Pairs of a valid filter (or literal subject) and a value; a filter may have many values."""

    def __init__(self) -> None:
        self._root: _Node[V] = _Node("")

    def add(self, pattern: str, value: V) -> None:
        """Add a pair. A known pair stays as it is."""
        node, tokens, at = self._root, pattern.split("."), 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                child = node.children[tokens[at]] = _Node(".".join(tokens[at:]))
                at = len(tokens)
            else:
                label = child.label.split(".")
                shared = _shared(label, tokens, at)
                if shared < len(label):
                    child = _split(node, child, label, shared)
                at += shared
            node = child
        node.values.add(value)

    def remove(self, pattern: str, value: V) -> None:
        """Remove a pair, if it is there."""
        path, tokens, at = [self._root], pattern.split("."), 0
        while at < len(tokens):
            child = path[-1].children.get(tokens[at])
            if child is None:
                return
            label = child.label.split(".")
            if _shared(label, tokens, at) < len(label):
                return
            path.append(child)
            at += len(label)
        path[-1].values.discard(value)
        # Only the last node can have become needless, and its parent by that.
        for depth in range(len(path) - 1, 0, -1):
            _tidy(path[depth - 1], path[depth])

    def matching(self, subject: str) -> list[V]:
        """The values of all filters that match a literal subject, in no particular order."""
        found: list[V] = []
        tokens = subject.split(".")
        end = len(tokens)
        open_nodes = [(self._root, 0)]
        while open_nodes:
            node, at = open_nodes.pop()
            if at == end:
                found += node.values
                continue
            for token in (tokens[at], "*", ">"):
                child = node.children.get(token)
                if child is not None:
                    reached = _match(child.label, tokens, at)
                    if reached is not None:
                        open_nodes.append((child, reached))
        return found

    def overlapping(self, pattern: str) -> Iterator[V]:
        """The values of all filters that overlap ``pattern``, in the order of these filters.

        Filters are ordered by their tokens. The order of values with the same filter is undefined.
        """
        tokens = pattern.split(".")
        # A stack; each iterator has the children of a node on the path that are not visited yet.
        path = [iter([(self._root, 0)])]
        while path:
            node, at = next(path[-1], (None, 0))
            if node is None:
                path.pop()
                continue
            if at in (len(tokens), _ALL_BELOW):
                yield from node.values
            if at != len(tokens):
                path.append(_overlapping_children(node, tokens, at))


def _shared(label: list[str], tokens: list[str], at: int) -> int:
    """How many tokens at the start of ``label`` are also in ``tokens`` from ``at`` on."""
    count = 0
    for token in label:
        if at + count == len(tokens) or token != tokens[at + count]:
            break
        count += 1
    return count


def _split(parent: _Node[V], child: _Node[V], label: list[str], at: int) -> _Node[V]:
    """Put a new node between two, after ``at`` tokens of the child's label, and return it."""
    middle: _Node[V] = _Node(".".join(label[:at]))
    parent.children[label[0]] = middle
    middle.children[label[at]] = child
    child.label = ".".join(label[at:])
    return middle


def _tidy(parent: _Node[V], node: _Node[V]) -> None:
    """Remove a node without values if it has fewer than two children."""
    if node.values or len(node.children) > 1:
        return
    key = node.label.partition(".")[0]
    if not node.children:
        del parent.children[key]
        return
    (child,) = node.children.values()
    child.label = f"{node.label}.{child.label}"
    parent.children[key] = child


def _overlapping_children(
    node: _Node[V], tokens: list[str], at: int
) -> Iterator[tuple[_Node[V], int]]:
    """The children whose labels overlap ``tokens`` from ``at`` on, with the position after them."""
    children = node.children
    token = ">" if at == _ALL_BELOW else tokens[at]
    keys: Iterable[str]
    if token == ">":
        keys = children
    elif token != "*":
        keys = children.keys() & {token, "*", ">"}
    else:
        keys = _after_any(children, tokens[at + 1] if at + 1 < len(tokens) else None)
    # A heap and not a sort: callers look at a few of perhaps many thousands.
    heap = list(keys)
    heapify(heap)
    while heap:
        child = children[heappop(heap)]
        reached = _ALL_BELOW if token == ">" else _overlap(child.label, tokens, at)
        if reached is not None:
            yield child, reached


def _after_any(children: dict[str, _Node[V]], following: str | None) -> Iterable[str]:
    """The keys of children that may overlap a ``*`` and the ``following`` token; None: the end.

    Most of perhaps many thousands differ in that token: this is cheaper than to visit each.
    """
    if following is None:
        return (key for key, child in children.items() if child.values and child.label == key)
    if following in ("*", ">"):
        return children
    wanted = (following, "*", ">")
    return (
        key
        for key, child in children.items()
        if (
            key == ">" or not child.children.keys().isdisjoint(wanted)
            if child.label == key
            else child.label.split(".", 2)[1] in wanted
        )
    )


def _match(label: str, tokens: list[str], at: int) -> int | None:
    """The position after the tokens that ``label`` matches from ``at`` on; None if it does not."""
    for token in label.split("."):
        if at == len(tokens):
            return None
        if token == ">":
            return len(tokens)
        if token not in ("*", tokens[at]):
            return None
        at += 1
    return at


def _overlap(label: str, tokens: list[str], at: int) -> int | None:
    """As :func:`_match`, where ``tokens`` may have wildcards too; or ``_ALL_BELOW``."""
    for token in label.split("."):
        if at == len(tokens):
            return None
        if tokens[at] == ">":
            return _ALL_BELOW
        if token == ">":
            return len(tokens)
        if token not in ("*", tokens[at]) and tokens[at] != "*":
            return None
        at += 1
    return at

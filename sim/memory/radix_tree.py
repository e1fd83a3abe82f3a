"""The radix tree of SGLang's RadixAttention (Zheng et al., arXiv 2312.07104): what is cached, by content.

Decides which part of a content is there already, and what goes first when room is needed: the least recently used of
the leaves that nobody holds, each as a whole (SGLang 0.5, `mem_cache/radix_cache.py`). The tree owns the blocks that
stand in it and no others: what a sequence has beyond them is the pool's account (`radix.py`).

Cost is by nodes. A page is a block's worth of tokens; content is compared in runs of pages, and what is known only by
its length is one number and a count.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count

Run = Sequence[Hashable]  # pages: a list of what they say, or a range of numbers that no other content has


@dataclass(frozen=True, slots=True)
class Content:
    """The pages of a sequence, without an end.

    Args:
        told: the first pages, as far as another sequence could have the same.
        own: the pages behind them are numbered from here on by their position, and like no other's.
    """

    told: list[Hashable]
    own: int

    def run(self, start: int, end: int) -> Run:
        """Pages from `start` on, up to `end` or to where those begin that are its own."""
        if start < len(self.told):
            return self.told[start:end]
        return range(self.own + start, self.own + end)


class Node:
    """A run of pages that follows its parent's.

    Attributes:
        pages: what they say; empty for the root alone.
        blocks: where they are, one block a page.
        parent: the node before it; None for the root, and for a node that has left the tree.
        children: by their first page.
        locks: how many sequences hold it; whoever holds a node holds all before it.
        used_at: when it was last used, in the tree's own count.
    """

    __slots__ = ("blocks", "children", "locks", "pages", "parent", "used_at")

    def __init__(self, pages: Run, blocks: Sequence[int], parent: Node | None, locks: int, used_at: int) -> None:
        self.pages = pages
        self.blocks = blocks
        self.parent = parent
        self.children: dict[Hashable, Node] = {}
        self.locks = locks
        self.used_at = used_at


Path = list[tuple[Node, int]]  # nodes, each with how many of its pages are meant: all but for the last


class RadixTree:
    """Contents that begin alike share their beginning.

    Attributes:
        root: before every content.
        num_blocks: blocks in the tree.
        num_locked: those of them that somebody holds.
    """

    def __init__(self) -> None:
        self.root = Node([], [], None, 0, 0)
        self.num_blocks = 0
        self.num_locked = 0
        self._uses = 0
        self._serial = count()
        # A heap of (when last used, serial, leaf that nobody holds), among entries that are no longer true.
        self._evictable: list[tuple[int, int, Node]] = []

    def match(self, content: Content, end: int, node: Node | None = None, start: int = 0) -> Path:
        """How far the pages up to `end` are there. Changes nothing.

        Args:
            content: what is looked for.
            end: pages of it.
            node: holds the last page before `start`; None: the root.
            start: pages that are known to be there.
        """
        node, path = node or self.root, []
        while start < end and (child := node.children.get(content.run(start, start + 1)[0])) is not None:
            same = _in_common(child.pages, content.run(start, min(end, start + len(child.pages))))
            path.append((child, same))
            if same < len(child.pages):
                break
            node, start = child, start + same
        return path

    def use(self, path: Path) -> Node:
        """Notes that a path, as `match` gives it, is used; returns the node with its last page.

        A node that is used in part is split there; SGLang counts its rest as used too.
        """
        self._uses += 1
        for node, _ in path:
            node.used_at = self._uses
            self._note_if_evictable(node)
        if not path:
            return self.root
        last, same = path[-1]
        return last if same == len(last.pages) else self._split(last, same)

    def insert(self, content: Content, end: int, blocks: Sequence[int], node: Node, start: int) -> tuple[Node, int]:
        """Adds the pages up to `end`, as far as they are not there.

        Args:
            content: whose pages they are.
            end: pages of it that are to be in the tree.
            blocks: where they are, from the first one on. Only those of pages that were not there become the tree's.
            node: holds the last page before `start`.
            start: pages that are known to be there.

        Returns:
            The node with the last page, and how many pages were there before.
        """
        path = self.match(content, end, node, start)
        there = start + sum(same for _, same in path)
        deepest = self.use(path) if path else node
        up = node
        while up is not self.root:
            up.used_at = self._uses
            assert up.parent is not None
            up = up.parent
        position = there
        while position < end:
            pages = content.run(position, end)
            child = Node(pages, blocks[position : position + len(pages)], deepest, 0, self._uses)
            deepest.children[pages[0]] = child
            self.num_blocks += len(pages)
            position += len(pages)
            deepest = child
        self._note_if_evictable(deepest)
        return deepest, there

    def lock(self, node: Node, below: Node) -> None:
        """Holds `node` and all before it up to `below`, which is not among them."""
        while node is not below:
            if not node.locks:
                self.num_locked += len(node.pages)
            node.locks += 1
            assert node.parent is not None
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Lets go of `node` and all before it."""
        while node is not self.root:
            node.locks -= 1
            if not node.locks:
                self.num_locked -= len(node.pages)
                self._note_if_evictable(node)
            assert node.parent is not None
            node = node.parent

    def evict(self, num_blocks: int) -> list[int]:
        """Takes out leaves until they had so many blocks or none is left that nobody holds; returns their blocks."""
        blocks: list[int] = []
        while len(blocks) < num_blocks and self._evictable:
            used_at, _, leaf = heapq.heappop(self._evictable)
            parent = leaf.parent
            if parent is None or leaf.children or leaf.locks or leaf.used_at != used_at:
                continue
            blocks += leaf.blocks
            self.num_blocks -= len(leaf.pages)
            leaf.parent = None
            del parent.children[leaf.pages[0]]
            self._note_if_evictable(parent)
        return blocks

    def _note_if_evictable(self, node: Node) -> None:
        if not node.children and not node.locks and node is not self.root:
            heapq.heappush(self._evictable, (node.used_at, next(self._serial), node))

    def _split(self, node: Node, place: int) -> Node:
        """Puts the first `place` pages of a node into one before it; whoever holds the node holds both."""
        parent = node.parent
        assert parent is not None
        before = Node(node.pages[:place], node.blocks[:place], parent, node.locks, self._uses)
        parent.children[before.pages[0]] = before
        node.pages, node.blocks, node.parent = node.pages[place:], node.blocks[place:], before
        before.children[node.pages[0]] = node
        return before


def _in_common(these: Run, those: Run) -> int:
    """How many pages two runs with the same first page have in common."""
    most = min(len(these), len(those))
    if these[:most] == those[:most]:
        return most
    return bisect_left(range(most), True, key=lambda end: these[: end + 1] != those[: end + 1])

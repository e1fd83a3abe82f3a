"""What a scheduler may ask of a memory policy, and how every slot of the pool is named.

A policy decides who holds which slots. It knows nothing of queues, budgets or time.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sim.sequence import Sequence


class Occupancy(NamedTuple):
    """The pool at one moment, in slots. The six names add up to the pool (DESIGN: waste).

    Args:
        used: hold a token of a live sequence, or get it in the step being run; a shared slot counts once.
        reserved: held by a live sequence that will fill them before it ends.
        internal: held by a live sequence that will never fill them.
        cached: belong to no live sequence but hold a reusable prefix.
        external: free, and together enough for the waiting head, but no usable run or region is.
        idle: free otherwise.
        largest_free_run: most slots that one allocation could get now; reported beside the total.
        saved: slots of the blocks that would be needed on top if nobody shared; reported beside the total.
    """

    used: int
    reserved: int
    internal: int
    cached: int
    external: int
    idle: int
    largest_free_run: int
    saved: int = 0


class KVMemory(Protocol):
    """Who holds which slots. Sequences are told apart by identity; `blocks` of a sequence is written only here."""

    @property
    def num_slots(self) -> int:
        """Slots that can ever be handed out; what an `Occupancy` adds up to."""

    @property
    def block_size(self) -> int:
        """Slots in a block."""

    @property
    def caches_prefixes(self) -> bool:
        """Whether `lookup` can ever find anything."""

    def never_fits(self, sequence: Sequence) -> str | None:
        """Why this sequence could not finish even with the pool to itself, or None. Changes nothing."""

    def table_entries(self, sequence: Sequence) -> int:
        """Block-table entries that a kernel looks up to read the sequence's KV; 0 if addresses are computed."""

    def lookup(self, sequence: Sequence) -> list[int]:
        """Blocks that already hold the sequence's first tokens (a prefix-cache hit), in order. Changes nothing."""

    def admit(self, sequence: Sequence, hit: list[int], num_tokens: int, room_for: int, others_run: bool) -> bool:
        """Gives a waiting sequence its hit blocks and room for its first `num_tokens` tokens, the hit ones included.

        Args:
            sequence: holds nothing yet.
            hit: what `lookup` has just returned.
            num_tokens: tokens that will be in the pool after the step.
            room_for: tokens that the pool must have room for now, though only `num_tokens` of them are taken.
            others_run: whether another sequence is running; a watermark counts only then.

        Returns:
            False if there is no room; then nothing has changed.
        """

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Gives a running sequence room for `num_tokens` tokens in all. False if there is none; then it gets nothing.

        What the sequence no longer needs for the tokens after its computed ones is given back before, in any case.
        """

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now."""

    @property
    def num_cached_blocks(self) -> int:
        """Those of them that hold a reusable prefix."""

    @property
    def can_leap(self) -> bool:
        """Whether a decoding sequence takes just one block, whenever its last is full, and gives none back; only then
        `room_left`, `decode` and `complete` may be called, and steps be taken many at a time.
        """

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that `grow` to `num_tokens` tokens would take."""

    def room_left(self, sequence: Sequence) -> int:
        """Tokens that the sequence can still store in what it holds: less than a block's, or all that it ever will."""

    def decode(self, tables: list[list[int]], num_tokens: int, never_filled: int) -> int:
        """Running sequences store tokens, each in a slot it holds by then.

        Args:
            tables: block tables that are full and get one block more, in this order; there are enough.
            num_tokens: how many tokens.
            never_filled: slots of the new blocks that their sequences will never fill.

        Returns:
            How many of the new blocks held a reusable prefix until now.
        """

    def complete(self, sequence: Sequence) -> None:
        """Takes note that the sequence has just filled a block."""

    def release(self, sequence: Sequence) -> None:
        """Takes back all that the sequence holds; its block table is empty afterwards."""

    @property
    def can_share(self) -> bool:
        """Whether sequences can hold the same blocks; only then `fork` may be called."""

    def fork(self, parent: Sequence, children: list[Sequence]) -> None:
        """Lets the children, which hold nothing, hold what the parent holds, and have computed what it has.

        From then on `grow` gives whoever writes into a partly filled block that others hold a copy of its own
        (copy-on-write), and the last holder writes in place.
        """

    def take_copies(self) -> list[tuple[Sequence, int, int]]:
        """Who had which block copied to which since the last call: no block is both, and none is copied to twice."""

    def take_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Undoes the `grow` of a plan that will not be executed for this sequence: only `num_tokens` are computed.

        If it shared its last block before, so did others, and theirs is taken back too.
        """

    def swap_out(self, sequences: list[Sequence]) -> list[tuple[int, int]] | None:
        """Moves all that the sequences of one request hold to the host; their block tables are empty afterwards.

        Returns:
            (device block, host block) of each block; None if the host has no room, and then nothing has changed.
        """

    def swap_in(
        self, sequences: list[Sequence], num_tokens: list[int], others_run: bool
    ) -> list[tuple[int, int]] | None:
        """Moves all that `swap_out` took from the sequences of one request back, and shares what was shared.

        Args:
            sequences: the same as in `swap_out`.
            num_tokens: tokens that each will have computed after the step, for which `grow` will then have room.
            others_run: whether another sequence is running; a watermark counts only then.

        Returns:
            (host block, device block) of each block; None if there is no room, and then nothing has changed.
        """

    def is_swapped(self, sequence: Sequence) -> bool:
        """Whether the sequence's blocks are on the host."""

    def occupancy(self, head: Sequence | None) -> Occupancy:
        """Names every slot.

        Args:
            head: the sequence at the front of the waiting queue, or None; only for it can free slots be *external*.
        """

"""What most memories answer to questions about forks and swaps: their sequences do neither."""

from __future__ import annotations

from sim.sequence import Sequence


class Unforked:
    """A memory whose sequences do not fork, and never go to the host: a part of a `KVMemory`."""

    @property
    def can_share(self) -> bool:
        """What sequences hold in common, if anything, they have found, not forked."""
        return False

    def fork(self, parent: Sequence, children: list[Sequence]) -> None:
        """Never asked for."""
        raise AssertionError("nothing is forked in this memory")

    def take_copies(self) -> list[tuple[Sequence, int, int]]:
        """None: nobody writes to what others hold."""
        return []

    def swap_out(self, sequences: list[Sequence]) -> list[tuple[int, int]] | None:
        """There is never room on the host, so whoever is preempted is computed again."""
        return None

    def swap_in(
        self, sequences: list[Sequence], num_tokens: list[int], others_run: bool
    ) -> list[tuple[int, int]] | None:
        """Never asked for."""
        raise AssertionError("nobody is swapped out of this memory")

    def is_swapped(self, sequence: Sequence) -> bool:
        """Nobody is."""
        return False

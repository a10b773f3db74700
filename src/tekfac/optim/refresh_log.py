"""When the curvature of every layer was refreshed last, and what came of it: for `optimizer.health()`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

from tekfac.curvature.layer_curvature import NOTHING, NOTHING_KNOWN, Due, LayerCurvature


class Refreshes(NamedTuple):
    """Of one layer. Steps are told by `num_steps` before them; None: none since this is counted.

    Attributes:
        factors: the last step that brought moments.
        basis: the last one that decomposed them.
        rescaling: the last one that brought a measured Theta.
        empty: due refreshes that brought no statistics.
        empty_in_a_row: those since one that brought some.
        failed_in_a_row: refreshes that failed since one that did not.
    """

    factors: int | None = None
    basis: int | None = None
    rescaling: int | None = None
    empty: int = 0
    empty_in_a_row: int = 0
    failed_in_a_row: int = 0

    def after(
        self, step: int, due: Due, before: LayerCurvature | None, block: LayerCurvature | None
    ) -> Refreshes:
        """After one more.

        Args:
            step: that it was made at.
            due: what was.
            before: the block until then.
            block: that it has left; None: still none.
        """
        brought = NOTHING_KNOWN if block is None else block.brought
        is_empty = (due.factors and not brought.factors) or (due.rescaling and not brought.rescaling)
        failures = [0 if own is None else own.failed_refreshes for own in (before, block)]
        empty_in_a_row, failed_in_a_row = self.empty_in_a_row, self.failed_in_a_row
        if is_empty or brought.factors or brought.rescaling:
            empty_in_a_row = empty_in_a_row + 1 if is_empty else 0
        if brought.basis or failures[1] > failures[0]:
            failed_in_a_row = 0 if brought.basis else failed_in_a_row + 1
        return Refreshes(
            step if brought.factors else self.factors,
            step if brought.basis else self.basis,
            step if brought.rescaling else self.rescaling,
            self.empty + is_empty,
            empty_in_a_row,
            failed_in_a_row,
        )


class RefreshLog:
    """Of all layers.

    Attributes:
        layers: what is known of each, by name.
        why: what kept the last empty refresh of a layer from bringing anything, in words; since the last start.
    """

    def __init__(self) -> None:
        self.layers: dict[str, Refreshes] = {}
        self.why: dict[str, str] = {}

    def note(
        self,
        step: int,
        due: Mapping[str, Due],
        before: Mapping[str, LayerCurvature],
        after: Mapping[str, LayerCurvature],
        why: str,
    ) -> None:
        """A step has refreshed.

        Args:
            step: which.
            due: what was, by layer, of those that are trained.
            before: the blocks until then, by layer.
            after: the blocks from then on.
            why: what keeps statistics from coming, where they do not.
        """
        for name in {**dict.fromkeys(due), **dict.fromkeys(after)}:
            own, block = before.get(name), after.get(name)
            if name not in due and block is own:
                continue
            known = self.layers.get(name, Refreshes())
            self.layers[name] = now = known.after(step, due.get(name, NOTHING), own, block)
            if now.empty > known.empty:
                self.why[name] = (block.brought.failure if block else "") or why

    def keep(self, names: Iterable[str]) -> None:
        """Forget all layers but these."""
        self.layers = {name: self.layers[name] for name in names if name in self.layers}

    def plain(self) -> dict[str, list[int | None]]:
        """To be saved."""
        return {name: list(own) for name, own in self.layers.items()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, list[int | None]]) -> Self:
        """What was saved."""
        log = cls()
        log.layers = {name: Refreshes(*own) for name, own in plain.items()}  # type: ignore[arg-type]
        return log

"""A survey sends a data set through a model and hands what each layer saw to collectors.

The hooks are those of the optimizers (capture/hooks.py). The model is put into eval mode, so that samples do
not depend on one another and nothing of it changes; afterwards it is as it was before.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tekfac.capture.capture import Capture
from tekfac.capture.tally import Tally, merged
from tekfac.common.console import track
from tekfac.common.data_hash import DataHash, is_empty, map_tensors
from tekfac.curvature.layer_curvature import NonFiniteStatisticsError
from tekfac.fisher.checkpoint import Checkpoint, Count, Record
from tekfac.fisher.collectors import Collectors, add_up, share_constants
from tekfac.fisher.dealing import Dealing, Heard, facts_of, require_sampler
from tekfac.fisher.known_likelihoods import KnownLikelihoods, UnclearLossError
from tekfac.fisher.loaders import require_loader
from tekfac.fisher.losses import BatchLoss, BatchLosses
from tekfac.fisher.mean_gradient import MeanGradient
from tekfac.fisher.metadata import in_words
from tekfac.fisher.options import ALL_DATA, OWN_PART, Options
from tekfac.layers.batch import CapturedBatch
from tekfac.layers.inventory import AS_MEANT, take_inventory
from tekfac.layers.layer import Layer
from tekfac.layers.registry import supported_types
from tekfac.ranks.group import Ranks
from tekfac.ranks.replicas import require_same
from tekfac.ranks.shards import require_whole

logger = logging.getLogger("tekfac")


class Survey:
    """A model, a data set, and the layers to look at.

    Attributes:
        model: that is measured, without what several processes have around it.
        layers: the layers with a block, by name.
        gradients: the gradient of the mean loss of a pass that was asked for it, by layer name, as matrices
            [G, d_out, d_in]; empty where the data have no targets. Of several predictions, the sum of theirs.
        count: of the last pass.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        options: Options,
        ranks: Ranks,
        passes: int = 1,
        asked: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Look at the model.

        Args:
            model: to be measured.
            loader: of the data.
            options: of the measurement.
            ranks: the processes that measure together.
            passes: how often the data are read, at least.
            asked: by name, what else these have to have in common.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"Expected a model (nn.Module), got {type(model).__name__}.")
        require_whole("tekfac.fisher", model)
        require_loader(loader, passes)
        require_sampler(loader, ranks, options.loader_gives)
        # The wrapper waits for other processes in every forward pass, but they may have fewer batches.
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self._loader = loader
        self._options = options
        self._ranks = ranks
        self._dealing = Dealing(ranks, options.loader_gives)
        self._checkpoint: Checkpoint | None = None
        self._likelihoods = KnownLikelihoods(options)
        self._losses = BatchLosses(self.model, options, self._likelihoods)
        self._passes = 0
        self.layers = _chosen_layers(self.model, options)
        self.gradients: dict[str, Tensor] = {}
        self.count = Count()
        self._seen: set[str] = set()
        if ranks.count > 1:
            require_same(ranks, "tekfac.fisher", {**asked, **facts_of(self.model, self.layers, options)})

    def keep_at(self, path: str | Path, signature: Mapping[str, Any], seconds: float) -> None:
        """Write passes to a file, and take them up from it; of several processes the first one does.

        Args:
            path: of the file.
            signature: what has to be the same, as plain values.
            seconds: between two writings.
        """
        if self._ranks.count > 1 and self._options.loader_gives == OWN_PART:
            raise ValueError(
                "checkpoint= with loader_gives='part': what several processes have done of their parts cannot "
                "be taken up again. Give every process all of the data (loader_gives='all'), or no checkpoint."
            )
        if self._ranks.index == 0:
            self._checkpoint = Checkpoint(path, signature, seconds)

    def run(self, title: str, collectors: Collectors, *, gradient: bool = False) -> list[str]:
        """One pass over the data.

        Args:
            title: of the pass, for the progress bar and for going on with an interrupted one.
            collectors: for each layer.
            gradient: whether to take the gradient of the loss, too.

        Returns:
            The names of the layers that were seen.

        Raises:
            ValueError: for a loader that is empty, or that gave other data than in the pass before, and for
                outputs that are not finite.
        """
        before, mean = self.count, MeanGradient(self.layers) if gradient else None
        self._passes += 1
        with self._watching() as capture:
            self._pass(title, collectors, capture, mean)
        if mean is not None:
            mean.add_up(self._ranks, self._device)
            self.gradients = mean.matrices()
        self._check(title, before)
        return [name for name in collectors if name in self._seen]

    def _pass(self, title: str, collectors: Collectors, capture: Capture, mean: MeanGradient | None) -> None:
        """Go over the data, from where an interrupted pass stopped."""
        record, read = self._take_up(title, collectors, capture), DataHash()
        done, checkpoint = record.count.batches, self._checkpoint
        for index, batch in enumerate(self._batches(title)):
            if index == done:
                self._require_same_data(record, read)
            read = read.then(batch)
            is_new = index >= done and not record.complete
            if is_new:
                self._collect(capture, batch, index, collectors, mean)
                self.count = replace(self.count, batches=index + 1, data=read)
            if self._dealing.ends_round(index):
                is_due = is_new and checkpoint is not None and checkpoint.is_due
                if self._dealing.hear(Heard(read, is_due=is_due)).is_due:
                    self._add_up(collectors, for_all=False)
                    self._write(title, collectors, capture)
        while not self._dealing.hear(Heard(read, ended=True)).ended:
            pass  # others have more batches
        if self.count.batches == done:
            self._require_same_data(record, read)
        self._add_up(collectors, for_all=True)
        if self.count.batches and not record.complete:
            self._write(title, collectors, capture, complete=True)

    def _batches(self, title: str) -> Iterator[Any]:
        """The batches of the data that are not empty, behind a progress bar if there is to be one."""
        shows = self._options.progress and self._ranks.index == 0
        loader = track(self._loader, title) if shows else self._loader
        return (batch for batch in loader if not is_empty(batch))

    # -- one batch ---------------------------------------------------------------------------------------

    def _collect(
        self, capture: Capture, batch: Any, index: int, collectors: Collectors, mean: MeanGradient | None
    ) -> None:
        """Hand what each layer saw of a batch to its collectors, if it is one that this process measures."""
        is_own = self._dealing.is_own(index)
        if not is_own and (index or self._passes > 1 or not self._losses.may_tell(batch)):
            return
        capture.clear()
        capture.sampling.begin(self._dealing.place_of(index))
        try:
            self._send(capture, batch, index, mean if is_own else None)
            seen = capture.batches_by_source()
        except UnclearLossError as error:
            raise ValueError(f"Batch {index} of the data: {error}.") from error
        if is_own:
            self._take_in(capture, seen, index, collectors)
        capture.clear()  # another's first batch has told the likelihood of the loss, as it does there

    def _take_in(
        self,
        capture: Capture,
        seen: Mapping[str, Mapping[str, list[CapturedBatch]]],
        index: int,
        collectors: Collectors,
    ) -> None:
        """Let what was seen of a batch count."""
        for name, by_source in seen.items():
            try:
                for source, batches in by_source.items():
                    for collector in collectors.get(name, ()):
                        collector.add(self._measured_with(source), batches)
            except NonFiniteStatisticsError as error:
                raise ValueError(f"Batch {index} of the data, layer {name!r}: {error}.") from error
        tallies = {self._measured_with(source): tally for source, tally in capture.tallies.items()}
        likelihoods = {name: in_words(own) for name, own in capture.likelihoods.found.items()}
        self.count = replace(
            self.count,
            samples=self.count.samples + capture.samples,
            tallies=merged(self.count.tallies, tallies),
            likelihoods={**self.count.likelihoods, **likelihoods},
        )
        self._seen |= set(seen)

    def _measured_with(self, source: str) -> str:
        """What sums are kept together: the empirical Fisher is one, whichever predictions a batch has."""
        return "" if self._options.fisher == "empirical" else source

    def _send(self, capture: Capture, batch: Any, index: int, mean: MeanGradient | None) -> None:
        """Forward and backward pass of a batch; the gradient of the loss, if asked for, is added up."""
        parameters = [p for layer in self.layers.values() for p in layer.parameters if p.requires_grad]
        with torch.inference_mode(False), torch.enable_grad():
            loss = self._losses.of(map_tensors(batch, self._usable), capture)
            if not parameters or (not loss.value.requires_grad and not loss.parts):
                raise ValueError(
                    "The loss depends on no layer whose parameters require gradients. Unfreeze those to look "
                    "at: model.requires_grad_(True)."
                )
            self._tell(capture, loss)
            if not loss.value.requires_grad:  # none of the layers was called
                return
            mean = mean if loss.of_data else None
            parts = loss.trained if mean is not None and len(loss.trained) > 1 else {}
            # All predictions are come by, also those that do not lead to the layers which are looked at.
            ends = [output for output in capture.predictions.values() if output.requires_grad]
            if mean is not None or self._options.fisher == "empirical" or not loss.has_hooks_at_outputs:
                ends = [*parameters, *ends]
            found = torch.autograd.grad(loss.value, ends, allow_unused=True, retain_graph=bool(parts))
            self._check_batch(capture, index, loss)
            if mean is None:
                return
            for name, own in parts.items():
                found = torch.autograd.grad(own.value, parameters, allow_unused=True, retain_graph=True)
                terms = self._options.num_terms(own.counted)
                self._add(mean, name, zip(parameters, found, strict=True), terms)
            if not parts:
                terms = sum(tally.terms for tally in capture.tallies.values())
                self._add(mean, "", zip(ends, found, strict=True), terms)

    def _tell(self, capture: Capture, loss: BatchLoss) -> None:
        """Tell what is known of a loss before its gradient arrives: which terms count.

        Those of predictions that depend on no layer do, too, though nothing will arrive at them.
        """
        capture.counted = {name: own.counted for name, own in loss.parts.items()}
        without = {name: own for name, own in capture.counted.items() if name not in loss.trained}
        if self._options.fisher != "empirical" or not loss.trained:
            capture.tallies = {name: Tally(self._options.num_terms(own)) for name, own in without.items()}
        if without and not loss.trained:
            capture.samples = max(map(len, without.values()))

    def _add(
        self, mean: MeanGradient, part: str, gradients: Iterable[tuple[Tensor, Tensor | None]], terms: int
    ) -> None:
        """Take in the gradient of a part of the loss, with so many terms, in one batch."""
        weight = 1 if self._options.loss_reduction == "sum" else terms
        mean.add(part, dict(gradients), weight=weight, terms=terms)

    def _check_batch(self, capture: Capture, index: int, loss: BatchLoss) -> None:
        if capture.problems:
            raise ValueError(f"Batch {index} of the data cannot be measured: {'; '.join(capture.problems)}.")
        if self._options.fisher == "empirical" and capture.passes > 1:
            raise ValueError(
                f"The loss of batch {index} calls the model {capture.passes} times. With fisher='empirical' it "
                "may do so once, for the share of each call in the loss is not known."
            )
        lost = [name for name in loss.trained if name not in capture.likelihoods.found]
        if lost and len(loss.trained) > 1:
            raise ValueError(
                f"Batch {index} of the data: the prediction {lost[0]!r} has no Fisher of its own: another one "
                "is made of it, or is the same. Leave one of them out, outputs=lambda returned: ..., or give "
                "the loss: loss=lambda model, batch: ..."
            )

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _usable(self, tensor: Tensor) -> Tensor:
        """The tensor on the model's device, in a form that autograd takes."""
        return (tensor.clone() if tensor.is_inference() else tensor).to(self._device)

    # -- between processes, and runs ---------------------------------------------------------------------

    def _take_up(self, title: str, collectors: Collectors, capture: Capture) -> Record:
        """How far an interrupted pass had come; what was summed up in it the first process has."""
        record = Record()
        if self._checkpoint is not None:
            record = self._checkpoint.take_up(title, collectors, capture, self._device)
        everywhere: list[tuple[Record, str]] = self._ranks.gather((record, capture.likelihoods.state()))
        record, likelihoods = everywhere[0]
        self.count, self._seen = record.count, set(record.seen)
        if record.count.batches and self._ranks.count > 1:
            share_constants(collectors, self._ranks)
            capture.likelihoods.load(likelihoods)
            self.count = self._own_share_of(record.count)
        return record

    def _own_share_of(self, count: Count) -> Count:
        """What this process has to add, where the first one has all that was summed up."""
        return Count(count.batches, data=count.data) if self._ranks.index else count

    def _require_same_data(self, record: Record, read: DataHash) -> None:
        if self._checkpoint is not None:
            self._checkpoint.require_same_data(record, read)

    def _add_up(self, collectors: Collectors, *, for_all: bool) -> None:
        """Put together what the processes have seen: in all of them, or in the first one alone."""
        ranks = self._ranks
        if ranks.count == 1:
            return
        counts, seen = zip(*ranks.gather((self.count, self._seen)), strict=True)
        count = Count.of_all(counts, same_data=self._options.loader_gives == ALL_DATA)
        add_up(collectors, ranks, self._device, keep=for_all or ranks.index == 0)
        self.count = count if for_all else self._own_share_of(count)
        self._seen = set().union(*seen)

    def _write(self, title: str, collectors: Collectors, capture: Capture, *, complete: bool = False) -> None:
        if self._checkpoint is not None:
            record = Record(self.count, sorted(self._seen), complete)
            self._checkpoint.write(title, record, collectors, capture)

    # -- around a pass -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _watching(self) -> Iterator[Capture]:
        """Hooks on, modes of all modules to eval; both undone at the end."""
        capture = Capture(
            self.model,
            self.layers.values(),
            self._options,
            likelihoods=self._likelihoods,
            only_training=False,
        )
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        capture.arm()
        try:
            yield capture
        finally:
            capture.clear()
            capture.disarm()
            for module, training in modes.items():
                module.training = training

    def _check(self, title: str, before: Count) -> None:
        count, seen = self.count, self._seen
        if not count.batches:
            raise ValueError("The loader is empty: it gave no batch. Expected at least one.")
        if not seen:
            raise ValueError(
                f"No layer saw anything in {count.batches} batch(es). Are all targets ignored, all layers "
                "frozen (requires_grad=False), or is the model not called itself, model(x), by the loss?"
            )
        if before.batches and count.data.content != before.data.content:
            raise ValueError(
                f"The pass for the {title} saw other data than the one before it ({count.samples} samples, "
                f"{before.samples} before). The loader must give the same data in every pass: no random "
                "augmentation, no sampler that draws anew."
            )
        if before.batches and self._options.fisher == "sampled" and count.data != before.data:
            raise ValueError(
                f"The pass for the {title} saw the data in another order than the one before it. With "
                "fisher='sampled' labels are drawn in the order of the data: use a loader that does not "
                "shuffle, or fisher='exact'."
            )
        unseen = [name for name in self.layers if name not in seen]
        if unseen and self._passes == 1:
            logger.warning(
                "No block of %s: no gradient reached it.", ", ".join(f"layer {name!r}" for name in unseen)
            )


def _chosen_layers(model: nn.Module, options: Options) -> dict[str, Layer]:
    """The layers to look at; what has no block is named in the log.

    Raises:
        ValueError: for a model without any, and for a name that is not the name of one.
    """
    inventory = take_inventory(model, (), options.side_rule, options.curvature_dtype)
    layers, names = inventory.layers, options.layers
    if not layers:
        kinds = ", ".join(supported_types())
        raise ValueError(f"Found no layer with a Fisher block in {type(model).__name__}. Supported: {kinds}.")
    if names is not None:
        names = list(names)
        if not names:
            raise ValueError(f"layers=[] names no layer. The layers are {', '.join(map(repr, layers))}.")
        for name in names:
            if name not in layers:
                module = name.rpartition(".")[0] or name
                named = (r for p, r in inventory.reasons.items() if p.startswith((name, f"{module}.")))
                why = next(named, None)
                raise ValueError(
                    f"No layer {name!r} with a Fisher block{f': {why}' if why else ''}. The layers are "
                    f"{', '.join(map(repr, layers))}."
                )
        return {name: layer for name, layer in layers.items() if name in names}
    for name, reason in inventory.reasons.items():
        level = logging.INFO if reason in AS_MEANT else logging.WARNING
        logger.log(level, "No Fisher block of %r: %s.", name, reason)
    covered = {parameter for layer in layers.values() for parameter in layer.parameters}
    others = [name for name, parameter in model.named_parameters() if parameter not in covered]
    if others:
        share = sum(p.numel() for p in covered) / max(1, sum(p.numel() for p in model.parameters()))
        logger.info("The blocks cover %.0f%% of the parameters. Without: %s.", 100 * share, ", ".join(others))
    return layers

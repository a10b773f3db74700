"""A survey sends a data set through a model and hands what each layer saw to collectors.

The hooks are those of the optimizers (capture.py). The model is put into eval mode, so that samples do not
depend on one another and nothing of it changes; afterwards it is as it was before.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tekfac.capture import Capture
from tekfac.curvature import NonFiniteStatisticsError
from tekfac.extras import require
from tekfac.fisher.batch import checksum, fingerprint, map_tensors
from tekfac.fisher.options import Options
from tekfac.fisher.resume import Count, HasState, Resume
from tekfac.groups import take_inventory
from tekfac.layers import SUPPORTED, Layer
from tekfac.likelihoods import as_likelihood
from tekfac.outputs import find_outputs
from tekfac.rows import LayerBatch

logger = logging.getLogger("tekfac")


class Collector(HasState, Protocol):
    """Something that is summed up over a data set, for one layer."""

    def add(self, batches: Sequence[LayerBatch]) -> None:
        """Take in what the layer saw in one batch of the data."""
        ...


class Survey:
    """A model, a data set, and the layers to look at.

    Attributes:
        layers: the layers with a block, by name.
        gradients: the gradient of the mean loss of a pass that was asked for it, by layer name, as matrices
            [G, d_out, d_in].
        count: of the last pass.
        resume: where passes are written to and taken up from, if anywhere.
    """

    def __init__(self, model: nn.Module, loader: Iterable[Any], options: Options) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"Expected a model (nn.Module), got {type(model).__name__}.")
        self._model = model
        self._loader = loader
        self._options = options
        self.resume: Resume | None = None
        self._likelihood = as_likelihood(options.likelihood)
        self._passes = 0
        self.layers = _chosen_layers(model, options.layers)
        self.gradients: dict[str, Tensor] = {}
        self.count = Count()

    def run(
        self, title: str, collectors: Mapping[str, Sequence[Collector]], *, gradient: bool = False
    ) -> list[str]:
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
        if isinstance(self._loader, Iterator) and (self._passes or self.resume is not None):
            why = "need another pass over the data" if self._passes else "are to be taken up from a checkpoint"
            raise ValueError(
                f"The {title} {why}, but the loader, a {type(self._loader).__name__}, can be read only once. "
                "Give a DataLoader or a list of batches."
            )
        before, self.count = self.count, Count()
        self._passes += 1
        with self._watching() as capture:
            seen = self._taken_up(title, collectors, capture)
            if seen is None:
                seen = self._pass(title, collectors, capture, gradient)
        self._check(title, before, seen)
        return [name for name in collectors if name in seen]

    def _pass(
        self,
        title: str,
        collectors: Mapping[str, Sequence[Collector]],
        capture: Capture,
        gradient: bool,
    ) -> set[str]:
        """Go over the data, from where an earlier pass stopped; the layers that were seen."""
        resume, done = self.resume, self.count.batches
        record = None if resume is None else resume.record(title)
        seen = set() if record is None else set(record.seen)
        for index, batch in enumerate(self._bar(title)):
            if resume is not None and record is not None and index == done - 1:
                resume.require_same_data(title, fingerprint(batch))
            if index < done:
                continue
            captured = self._capture(capture, batch, index, gradient)
            for name, batches in captured.items():
                try:
                    for collector in collectors.get(name, ()):
                        collector.add(batches)
                except NonFiniteStatisticsError as error:
                    raise ValueError(f"Batch {index} of the data, layer {name!r}: {error}.") from error
            self._add_up(captured, batch)
            seen.update(captured)
            if resume is not None:
                resume.note(title, self.count, seen, collectors, capture.sampling, fingerprint(batch))
        if resume is not None and self.count.batches:
            resume.finish(title, collectors, capture.sampling)
        if gradient:
            self.gradients = {name: total / max(1, self.count.terms) for name, total in self.gradients.items()}
        return seen

    def _taken_up(
        self, title: str, collectors: Mapping[str, Sequence[Collector]], capture: Capture
    ) -> set[str] | None:
        """Put back what an interrupted survey had; the layers it saw, if this pass was complete."""
        record = None if self.resume is None else self.resume.record(title)
        if self.resume is None or record is None:
            return None
        self.resume.restore(title, collectors, capture.sampling)
        self.count = record.count
        for batch in self._loader:
            self.resume.require_same_data(title, fingerprint(batch), first=True)
            break
        return set(record.seen) if record.complete else None

    # -- one batch ---------------------------------------------------------------------------------------

    def _capture(self, capture: Capture, batch: Any, index: int, gradient: bool) -> dict[str, list[LayerBatch]]:
        """What each layer saw of a batch; the gradient of the loss, if asked for, is added to the others."""
        capture.clear()
        device = next(self._model.parameters()).device
        with torch.inference_mode(False), torch.enable_grad():
            loss, outputs, capture.counted = self._loss(map_tensors(batch, lambda t: _usable(t, device)))
            parameters = [p for layer in self.layers.values() for p in layer.parameters if p.requires_grad]
            if not parameters or not loss.requires_grad:
                raise ValueError(
                    "The loss depends on no layer whose parameters require gradients. Unfreeze those to look "
                    "at: model.requires_grad_(True)."
                )
            if gradient or outputs is None:
                parts = torch.autograd.grad(loss, parameters, allow_unused=True)
            else:  # the outputs are far enough for the hooks
                torch.autograd.grad(loss, outputs)
        if capture.problems:
            raise ValueError(f"Batch {index} of the data cannot be measured: {'; '.join(capture.problems)}.")
        if gradient:
            terms = 1 if self._options.loss_reduction == "sum" else _terms(capture.batches)
            self._add_gradients(dict(zip(parameters, parts, strict=True)), terms)
        return capture.batches

    def _add_gradients(self, gradients: Mapping[Tensor, Tensor | None], terms: int) -> None:
        for name, layer in self.layers.items():
            weight = gradients.get(layer.weight)
            if weight is not None:
                bias = None if layer.bias is None else gradients.get(layer.bias)
                total = layer.to_matrix(weight, bias).double() * terms
                self.gradients[name] = total + self.gradients.get(name, 0)

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The loss of a batch and, where known, the outputs it is a function of and the terms that count."""
        options = self._options
        if options.loss is not None:
            return options.loss(self._model, batch), None, None
        if isinstance(batch, Mapping):
            returned, targets = self._model(**batch), None
            loss = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
            if isinstance(loss, Tensor):
                return loss, None, None
        elif isinstance(batch, tuple | list):
            if len(batch) != 2:
                raise ValueError(
                    f"A batch of the data is a {type(batch).__name__} of {len(batch)}. Expected (inputs, "
                    "targets), inputs alone, or a dict of the model's keywords. Otherwise: "
                    "loss=lambda model, batch: ..."
                )
            returned, targets = self._model(batch[0]), batch[1]
        else:
            returned, targets = self._model(batch), None
        if targets is None and options.fisher == "empirical":
            raise ValueError("fisher='empirical' needs targets: batches of (inputs, targets), or loss=...")
        outputs = (options.outputs or find_outputs)(returned)
        self._likelihood.check(outputs)
        if not -outputs.ndim <= options.batch_dim < outputs.ndim:
            raise ValueError(
                f"Invalid batch_dim: {options.batch_dim!r}. Expected an axis of the outputs, of shape "
                f"{list(outputs.shape)}."
            )
        axis = options.batch_dim % outputs.ndim
        if targets is not None and targets.ndim > axis:
            targets = targets.movedim(axis, 0)
        terms = self._likelihood.losses(outputs.movedim(axis, 0), targets)
        if options.loss_reduction == "sum":
            return terms.total, outputs, terms.counted
        counted = terms.counted if options.loss_reduction == "mean" else terms.counted.any(1)
        return terms.total / counted.sum().clamp_min(1), outputs, terms.counted

    def _add_up(self, captured: Mapping[str, Sequence[LayerBatch]], batch: Any) -> None:
        samples = max((sum(b.shape.samples for b in batches) for batches in captured.values()), default=0)
        total, size = checksum(batch)
        self.count = Count(
            self.count.batches + 1,
            self.count.samples + samples,
            self.count.terms + _terms(captured),
            self.count.checksum + total,
            self.count.magnitude + size,
        )

    # -- around a pass -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _watching(self) -> Iterator[Capture]:
        """Hooks on, modes of all modules to eval; both undone at the end."""
        options = self._options
        capture = Capture(
            self._model,
            self.layers.values(),
            likelihood=self._likelihood,
            fisher=options.fisher,
            loss_reduction=options.loss_reduction,
            batch_dim=options.batch_dim,
            outputs=options.outputs,
            seed=options.seed,
            only_training=False,
        )
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        capture.armed = True
        try:
            yield capture
        finally:
            capture.remove_hooks()
            for module, training in modes.items():
                module.training = training

    def _bar(self, title: str) -> Iterable[Any]:
        if not self._options.progress:
            return self._loader
        tqdm = require("tqdm", "A progress bar")
        bar: Iterable[Any] = tqdm.tqdm(self._loader, desc=title, unit="batch", dynamic_ncols=True)
        return bar

    def _check(self, title: str, before: Count, seen: set[str]) -> None:
        count = self.count
        if not count.batches:
            raise ValueError("The loader is empty: it gave no batch. Expected at least one.")
        if not seen:
            raise ValueError(
                f"No layer saw anything in {count.batches} batch(es). Are all targets ignored, all layers "
                "frozen (requires_grad=False), or is the model not called itself, model(x), by the loss?"
            )
        if before.batches and not count.of_same_data_as(before):
            raise ValueError(
                f"The pass for the {title} saw {count.samples} samples and {count.terms} loss terms, the one "
                f"before it {before.samples} and {before.terms}, or other numbers in them. The loader must "
                "give the same data in every pass: no random augmentation, no sampler that draws anew."
            )
        unseen = [name for name in self.layers if name not in seen]
        if unseen and self._passes == 1:
            logger.warning(
                "No block of %s: no gradient reached it.", ", ".join(f"layer {name!r}" for name in unseen)
            )


def _chosen_layers(model: nn.Module, names: Iterable[str] | None) -> dict[str, Layer]:
    """The layers to look at; what has no block is named in the log.

    Raises:
        ValueError: for a model without any, and for a name that is not the name of one.
    """
    inventory = take_inventory(model, ())
    layers = inventory.layers
    if not layers:
        kinds = ", ".join(f"nn.{kind.__name__}" for kind in SUPPORTED)
        raise ValueError(f"Found no layer with a Fisher block in {type(model).__name__}. Supported: {kinds}.")
    if names is not None:
        names = list(names)
        if not names:
            raise ValueError(f"layers=[] names no layer. The layers are {', '.join(map(repr, layers))}.")
        for name in names:
            if name not in layers:
                why = inventory.reasons.get(f"{name}.weight")
                raise ValueError(
                    f"No layer {name!r} with a Fisher block{f': {why}' if why else ''}. The layers are "
                    f"{', '.join(map(repr, layers))}."
                )
        return {name: layer for name, layer in layers.items() if name in names}
    covered = {parameter for layer in layers.values() for parameter in layer.parameters}
    others = [name for name, parameter in model.named_parameters() if parameter not in covered]
    if others:
        logger.info("Parameters without a Fisher block: %s.", ", ".join(others))
    return layers


def _usable(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the model's device, in a form that autograd takes."""
    return (tensor.clone() if tensor.is_inference() else tensor).to(device)


def _terms(captured: Mapping[str, Sequence[LayerBatch]]) -> int:
    return max((sum(batch.num_terms for batch in batches) for batches in captured.values()), default=0)

"""Capture: what the layers of a model saw in forward and backward passes, ready to be measured.

When a backward pass arrives at the model's outputs (hooks.py), the vectors that make the Fisher (drawn labels,
exact columns, or the training gradient itself) are sent from there down to the noted calls. What arrives there
is kept, layer by layer, until the step reads it. The training gradient tells which targets are ignored.

Of several predictions each has a Fisher of its own, and theirs are added up (docs/mathematics.md, section 6).
The training gradient of all of them comes by the layers in one pass, and is taken as it comes: as that of all.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tekfac.capture.autograd import Descent, sending, will_come_by
from tekfac.capture.hooks import WHY_NOTHING_CAME, Arrival, ModelHooks
from tekfac.capture.likelihood_of_loss import LikelihoodsOfLosses
from tekfac.capture.measurement import FisherKind, Measurement
from tekfac.capture.module_calls import ModuleCall, multiplications_of, versions
from tekfac.capture.output_layout import OutputLayout, found_layout, layer_with_samples_second
from tekfac.capture.probing import Probing, hopeful, probed_clear, shapes_of_pass
from tekfac.capture.sample_axis import (
    InseparableError,
    SampleAxis,
    divided_into,
    is_as_expected,
    samples_first,
)
from tekfac.capture.sampling import Sampling
from tekfac.capture.selection import Selection, StatisticsSamples, can_be_summed
from tekfac.capture.taking import (
    Squaring,
    clear_layer,
    settle,
    squared,
    take_gradients_of_units,
    take_samples,
    take_sums,
)
from tekfac.capture.tally import Tally, merged, shares_of
from tekfac.common.phases import Phase
from tekfac.layers.batch import CapturedBatch, FormedBatch, LayerBatch, MomentBatch, PassContext, Sums
from tekfac.layers.kinds.base import Application, RepetitionError
from tekfac.layers.kinds.norm import UnitKind
from tekfac.layers.layer import Layer
from tekfac.likelihoods import Gaussian, Likelihood, OutputShapeError, Prediction, Unknown
from tekfac.ranks.group import ALONE, Ranks
from tekfac.ranks.shards import own_part, whole_modules
from tekfac.ranks.whole_batch import WholeBatch

logger = logging.getLogger("tekfac")


@dataclass(eq=False)
class _Pass:
    """A forward and backward pass whose gradients are at its calls, or will be at the end of it.

    Attributes:
        source: the prediction, or predictions, that the gradients come from.
        calls: of layers.
        axis: what is known of the samples.
        num_terms: of the loss.
        counted: which of them count, [N, P].
        real: which positions are real, [N, T], where the model was told.
        selection: of samples to measure.
        is_share: whether gradients are shares of the whole step's.
        probed_shapes: of all that it came by, where it was probed; else None.
        agrees: whether the probe has shown so far what the shapes tell by themselves.
    """

    source: str
    calls: Sequence[ModuleCall]
    axis: SampleAxis
    num_terms: int
    counted: Tensor
    real: Tensor | None
    selection: Selection
    is_share: bool
    probed_shapes: str | None = None
    agrees: bool = False

    @cached_property
    def context(self) -> PassContext:
        """Known when all predictions that belong to the pass have arrived."""
        return PassContext.of(self.num_terms, self.counted, self.real)


class _Captured(NamedTuple):
    """What a pass left for a layer."""

    batch: CapturedBatch
    source: str
    is_share: bool


class Capture:
    """Watches a model and delivers, for each layer, what its curvature is measured from.

    Attributes:
        problems: what kept a forward pass from being captured, in words.
        sampling: the generator of drawn labels.
        choosing: the generator that samples to measure are chosen with.
        likelihoods: of the model's predictions.
        probing: what was told of whose rows are whose.
        counted: which terms of the next backward pass count, [N, P] by the name of the prediction, where its
            loss is known to be -log p of nothing else. Otherwise the gradient tells: a term without any does
            not count, unless its prediction is certain; and what the loss is multiplied by.
        passes: forward and backward passes received since the last `clear`.
        tallies: of their loss terms, by the name of the prediction, or of several that were measured together.
        samples: their samples, but for passes in which no term counts.
        seconds: what measuring in backward passes has taken so far, by the clock of the host.
        multiplications: of products with the layers' weights in the forward passes of the last step that was
            measured.
        left_out: names of layers that were seen, but not in a way that can be measured.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[Layer],
        measurement: Measurement,
        *,
        likelihoods: LikelihoodsOfLosses | None = None,
        ranks: Ranks = ALONE,
        grad_scaler: torch.amp.GradScaler | None = None,
        statistics_samples: StatisticsSamples = None,
        may_be_summed: bool = False,
        squaring: Squaring | None = None,
        only_training: bool = True,
        owner: str = "",
    ) -> None:
        """Watch nothing yet.

        Args:
            model: to be watched.
            layers: whose statistics are wanted.
            measurement: what the Fisher is an expectation over, and how the model is read.
            likelihoods: what is known of the predictions already; None: what the measurement says.
            ranks: the processes that have a part of every batch each.
            grad_scaler: the loss scaler; only the empirical Fisher needs to know it.
            statistics_samples: of a batch, that are measured.
            may_be_summed: whether all that is made of a sample is its gradient, so that sums of samples with
                random signs will do.
            squaring: what is kept of such sums, if that is less than their gradients.
            only_training: whether only passes in training mode count.
            owner: what the optimizer is called, for messages where a model has several.
        """
        seed = ranks.gather(torch.initial_seed())[0] if measurement.seed is None else measurement.seed
        self.problems: list[str] = []
        self.sampling = Sampling(seed)
        self.choosing = Sampling((seed + 1) % 2**63, torch.device("cpu"))  # not the numbers of the labels
        self.likelihoods = likelihoods or LikelihoodsOfLosses(measurement.likelihood, ranks)
        self.counted: Mapping[str, Tensor] = {}
        self.passes = self.samples = 0
        self.tallies: dict[str, Tally] = {}
        self.seconds = 0.0
        self.multiplications = self._multiplications = 0
        self.probing = Probing()
        self._kept = self.sampling, self.choosing, self.likelihoods, self.probing
        self._measurement = measurement
        self._ranks = ranks
        self._owner = owner
        self._grad_scaler = grad_scaler
        self._statistics_samples: StatisticsSamples = statistics_samples
        self._may_be_summed = may_be_summed and statistics_samples == "auto"
        self._squaring = squaring
        self._measurements: Mapping[str, float] = {}
        self._only_training = only_training
        self._hooks = ModelHooks(model, measurement, self.likelihoods, self, only_training=only_training)
        self._layers = {layer.name: layer for layer in layers}
        self._batches: dict[str, list[_Captured]] = {}
        self._unfinished: list[_Pass] = []
        self._loss_scale = 1.0
        self._adds_up = True
        self.left_out: set[str] = set()
        self._warned: set[str] = set()

    # -- when to watch ---------------------------------------------------------------------------------

    @property
    def armed(self) -> bool:
        """Whether forward passes are noted."""
        return self._hooks.armed

    @property
    def is_compiled(self) -> bool:
        """Whether watching a forward pass keeps compiled code from running."""
        return self._hooks.is_compiled

    def arm(
        self, names: Iterable[str] | None = None, measurements: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Note forward passes from now on.

        Args:
            names: of the layers to look at; None: all.
            measurements: as many as each layer's running average holds; of a layer with none all samples are
                measured.
        """
        self._measurements = measurements
        wanted = self._layers if names is None else {n: self._layers[n] for n in names if n in self._layers}
        self._hooks.arm(wanted.values())

    @property
    def asleep(self) -> bool:
        """Whether it watches nothing since a newer one came to the model."""
        return self._hooks.asleep

    def disarm(self) -> None:
        """Note no forward pass any more. What was captured stays."""
        self._hooks.disarm()

    def watch(self, layers: Iterable[Layer]) -> None:
        """Watch other layers from now on.

        What was captured of a layer stays where its parameters are still used by the same modules: it is a
        value that can be read as rows of the layer in its new form (without a bias that is frozen now, say).
        """
        self._finish()
        self._layers = {layer.name: layer for layer in layers}
        batches = {name: own for name, own in self._batches.items() if name in self._layers}
        self._batches = {
            name: [own._replace(batch=replace(own.batch, layer=self._layers[name])) for own in captured]
            for name, captured in batches.items()
            if captured[0].batch.layer.has_same_uses_as(self._layers[name])
            and all(own.batch.fits(self._layers[name]) for own in captured)
        }
        if self.armed:
            self._hooks.rearm(self._layers.values())

    # -- what was captured -----------------------------------------------------------------------------

    @property
    def predictions(self) -> Mapping[str, Tensor]:
        """Those of the last forward pass; kept only where not only training is watched."""
        return self._hooks.predictions

    def batches(self) -> dict[str, list[CapturedBatch]]:
        """What was captured since the last `clear`, by layer name, an entry for each prediction and pass.

        All of a layer's are divided by the terms of all of them, which stands for the terms of those from the
        same predictions; the Fisher of a loss is weighed as the loss is.
        """
        tallies = self.tallies
        if len(tallies) > 1 and self._ranks.count > 1:
            tallies = reduce(merged, self._ranks.gather(tallies))
        shares = shares_of(tallies)
        found: dict[str, list[CapturedBatch]] = {}
        for name, by_source in self.batches_by_source().items():
            terms = {source: sum(own.num_terms for own in batches) for source, batches in by_source.items()}
            for source, batches in by_source.items():
                among = sum(terms.values()) / terms[source] if terms[source] else 1.0
                factor = math.sqrt(shares[source].weight * among)
                weighed = (replace(own, gradient_factor=own.gradient_factor * factor) for own in batches)
                found.setdefault(name, []).extend(weighed)
        return found

    def batches_by_source(self) -> dict[str, dict[str, list[CapturedBatch]]]:
        """The same, by layer name and by what the gradients came from, which are those of single terms.

        Gradients of a mean loss are shares of the whole step's, whose terms are all known only now; those of
        drawn labels are whole ones.
        """
        self._finish()
        found: dict[str, dict[str, list[CapturedBatch]]] = {}
        for name, captured in self._batches.items():
            by_source = found.setdefault(name, {})
            for own in captured:
                factor = (self.tallies[own.source].terms if own.is_share else 1) / self._loss_scale
                by_source.setdefault(own.source, []).append(replace(own.batch, gradient_factor=factor))
        return found

    @property
    def why_nothing_came(self) -> str:
        """Why a layer has no statistics after a step that was to measure it, in words.

        Layers whose statistics were left out have reasons of their own, which the log has told.
        """
        return WHY_NOTHING_CAME[self._hooks.progress]

    def clear(self) -> None:
        """Let go of what was captured."""
        if self.passes:
            self.likelihoods.speaker = self._speaker
        self._batches, self._unfinished, self.problems = {}, [], []
        self.passes = self.samples = 0
        self.tallies = {}
        self.multiplications, self._multiplications = self._multiplications or self.multiplications, 0
        self._hooks.predictions = {}
        self._loss_scale = 1.0
        self._adds_up = True
        for kept in self._kept:
            kept.keep()

    def roll_back(self) -> None:
        """Let go of what was captured, as if nothing had ever been drawn for it."""
        for kept in self._kept:
            kept.roll_back()
        self.clear()

    def drop_what_was_zeroed(self) -> None:
        """Roll back passes whose gradients are gone: model.zero_grad() was called and no step was taken."""
        # Of a sharded model all processes have to ask, also those whose part of a batch left nothing.
        is_sharded = self._hooks.is_sharded
        # A pass that has failed may have left nothing but the numbers that were drawn for it.
        if not (self.passes or self.problems) or not self._only_training or not self._adds_up:
            return
        gradients = (p.grad for layer in self._layers.values() for p in layer.parameters)
        are_gone = all(gradient is None or not bool(own_part(gradient).any()) for gradient in gradients)
        if is_sharded:
            are_gone = all(self._ranks.gather(are_gone and not self._hooks.gradients_are_held_back()))
        if are_gone:
            self.roll_back()

    # -- told by the hooks -----------------------------------------------------------------------------

    def pass_begins(self) -> None:
        """A forward pass that is watched begins."""
        self.drop_what_was_zeroed()

    def pass_arrived(self, arrival: Arrival) -> None:
        """Send the Fisher's vectors down from the outputs and keep what arrives at the layers."""
        with self._timed():
            self._adds_up &= arrival.adds_up is not None
            wide = torch.promote_types(arrival.gradient.dtype, torch.float32)
            largest, total = float(arrival.outputs.max()), float(arrival.gradient.sum(dtype=wide))
            is_fine = math.isfinite(total) and largest < math.inf  # a class masked by -inf is fine
            if all(self._ranks.gather(is_fine)):
                self._receive(arrival)
            else:
                self.problems.append("the model's outputs or their gradients are not finite")

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Count what is done inside as time spent on measuring."""
        start = time.perf_counter()
        with Phase("capture"):
            yield
        self.seconds += time.perf_counter() - start

    def _receive(self, arrival: Arrival) -> None:
        name, calls, outputs, gradient = arrival.awaited.name, arrival.calls, arrival.outputs, arrival.gradient
        layout = self._layout(calls, outputs)
        if outputs.ndim:
            outputs, gradient = (layout.samples_first(own) for own in (outputs, gradient))
        likelihood = self.likelihoods.of(name, outputs, gradient, arrival.sort_of_loss)
        if not outputs.ndim:
            samples, calls = self._of_as_many_samples(calls)
            outputs, gradient = (own.expand(samples, 1) for own in (outputs, gradient))
        prediction = likelihood.predict(outputs, gradient)
        if name in self.counted:
            prediction = replace(prediction, counted=self.counted[name])
        if prediction.doubt is not None and self.likelihoods.set_for(name) is not None:
            self._warn_once(prediction.doubt)
        num_terms = self._measurement.num_terms(prediction.counted)
        self.samples += arrival.more_samples(len(outputs) if num_terms else 0)
        taken_by = arrival.taken_by()
        if taken_by is not None:
            self._join(taken_by, num_terms, prediction.counted)
            return
        others = arrival.to_come() if self._is_joint else []
        fisher = self._fisher_of(name, likelihood, is_alone=not others)
        self.passes += 1
        self._count(source := " + ".join(sorted([name, *others])), Tally(num_terms))
        if fisher != "empirical" and arrival.awaited.siblings.count > 1 and name not in self.counted:
            self._weigh(source, prediction, gradient, num_terms)
        if fisher == "empirical" and self._grad_scaler is not None:
            self._loss_scale = self._grad_scaler.get_scale()
        counted = torch.ones_like(prediction.counted) if others else prediction.counted
        whole = WholeBatch.of(counted, self._ranks)
        if fisher == "sampled" and whole.terms and not (calls and num_terms):
            self._drawn(prediction, whole, outputs.device)  # later draws are as with more layers
        measures = bool(calls) and bool(num_terms or others)
        self._multiplications += sum(map(multiplications_of, calls))
        if others:
            calls = [noted for noted in calls if will_come_by(noted.call)]
        is_open = measures and self.probing.is_open(calls, outputs)
        shapes = shapes_of_pass(calls, outputs) if is_open else ""
        probes = is_open and self.probing.is_wanted(shapes)
        descent = Descent(arrival.edge, [noted.call for noted in calls])
        comes_by = fisher == "empirical" and arrival.adds_up is not False and self._is_joint
        waits = comes_by and (bool(others) or descent.will_run())
        with self._hooks.sharding_held_off(self._ranks, needed=measures and (probes or not waits)):
            if not measures:
                return
            # The last sample, since in a causal model with samples and positions mixed up it reaches most rows.
            probed = int(counted.any(dim=1).nonzero()[-1])
            axis = SampleAxis(len(outputs), probed, may_be_joined=fisher == "sampled")
            selection = Selection(self._statistics_samples, whole, self.choosing)
            is_share = fisher == "empirical" and self._measurement.loss_reduction != "sum"
            real = arrival.awaited.real
            passed = _Pass(source, calls, axis, num_terms, prediction.counted, real, selection, is_share)
            early = hopeful(calls, len(outputs)) if is_open else calls
            if probes:
                found = probed_clear(descent, arrival.gradient, calls, axis, layout)
                passed.probed_shapes, passed.agrees = shapes, found == early
                early = found
            for noted in early:
                self._select_early(noted, len(outputs), selection, once=fisher == "empirical")
            if waits:
                self._wait(descent, arrival, others, passed)
            elif arrival.outputs.ndim:
                vectors = self._vectors(fisher, prediction, gradient, whole)
                self._send(descent, calls, map(layout.as_it_was, vectors))
                self._keep(passed)

    def _wait(self, descent: Descent, arrival: Arrival, others: Sequence[str], passed: _Pass) -> None:
        """Let the user's own pass leave its gradients at the calls."""
        for noted in passed.calls:
            settle(noted)
        descent.wait(arrival.gradient)
        arrival.join(others, passed)
        self._unfinished.append(passed)

    def _layout(self, calls: Sequence[ModuleCall], outputs: Tensor) -> OutputLayout:
        """Where a prediction has its samples; what speaks against an axis that was set is said once."""
        axis = self._measurement.batch_dim
        if axis == "auto":
            return found_layout(calls, outputs)
        layout = OutputLayout(axis)
        if outputs.ndim:
            turned = layout.samples_first(outputs)
            other = layer_with_samples_second(calls, turned)
            if other is not None:
                self._warn_once(
                    f"layer {other.watched.name!r} was called with {turned.shape[1]} samples, but the axis of "
                    f"the model's outputs that is taken for the samples has {len(turned)}. If another one "
                    "holds them (sequence-first outputs), say which: batch_dim=1"
                )
        return layout

    def _of_as_many_samples(self, calls: Sequence[ModuleCall]) -> tuple[int, list[ModuleCall]]:
        """How many samples most layers were called with, and their calls, where outputs are a lone number.

        What the others were called with cannot be told apart by sample.
        """
        lengths = [len(noted.call.kept["input"]) for noted in calls if noted.call.kept.keys() == {"input"}]
        samples = Counter(lengths).most_common(1)[0][0] if lengths else 1
        clear = [noted for noted in calls if clear_layer(noted, samples) is not None]
        for noted in calls:
            if noted not in clear:
                names = [layer.name for layer in noted.watched.layers.values()]
                self._leave_out(names, "the model returned its loss alone, and no predictions")
        return samples, clear

    @property
    def costs_no_pass(self) -> bool:
        """Whether what is measured comes by in the user's own backward passes, as far as is known."""
        found = list(self.likelihoods.found.values())
        is_sampled = self._measurement.fisher == "auto" and len(found) == 1 and isinstance(found[0], Gaussian)
        return self._is_joint and not is_sampled

    @property
    def _is_joint(self) -> bool:
        """Whether predictions are measured together, as their gradients come by in the user's own pass."""
        return self._measurement.fisher in ("auto", "empirical")

    def _fisher_of(self, name: str, likelihood: Likelihood, *, is_alone: bool) -> FisherKind:
        """What the Fisher of a prediction is an expectation over."""
        wanted = self._measurement.fisher
        if wanted == "auto":
            return "sampled" if isinstance(likelihood, Gaussian) and is_alone else "empirical"
        if wanted != "empirical" and isinstance(likelihood, Unknown):
            if name in self.likelihoods.found:
                self._warn_once(
                    f"the likelihood of the loss is not known, so that fisher={wanted!r} has no labels to go "
                    "by: the training gradients are measured instead. Say what it is: likelihood=..."
                )
            return "empirical"
        return wanted

    def _count(self, source: str, tally: Tally) -> None:
        self.tallies = merged(self.tallies, {source: tally})

    def _weigh(self, source: str, prediction: Prediction, gradient: Tensor, num_terms: int) -> None:
        """Note the weight of a loss, as far as its gradient tells."""
        factor = prediction.loss_factor(gradient)
        if factor is not None:
            terms = 1 if self._measurement.loss_reduction == "sum" else num_terms
            self._count(source, Tally(weights=factor * terms, told=1))

    def _join(self, passed: _Pass, num_terms: int, counted: Tensor) -> None:
        """Let the terms of another prediction count in a pass that takes its gradients, too."""
        more = max(0, num_terms - passed.num_terms)
        passed.num_terms += more
        self._count(passed.source, Tally(more))
        same = counted.shape == passed.counted.shape
        passed.counted = passed.counted | counted if same else torch.ones_like(passed.counted[:, :1])

    def _select_early(self, noted: ModuleCall, samples: int, selection: Selection, *, once: bool) -> None:
        """Keep only what is measured of a call, where samples are its first axis for sure."""
        layer = clear_layer(noted, samples)
        if layer is None:
            return
        chosen = self._chosen(selection, layer, math.prod(noted.call.shapes[0]), samples)
        if isinstance(chosen, Sums):
            take_sums(noted, layer, chosen, self._squaring, once=once)
            return
        if chosen is not None:
            take_samples(noted, chosen)
        if isinstance(noted.watched.kind, UnitKind):
            take_gradients_of_units(noted, layer, once=once)

    def _chosen(self, selection: Selection, layer: Layer, outputs: int, samples: int) -> Tensor | Sums | None:
        """What to measure of a layer that gave so many outputs for so many samples; None for all."""
        positions = outputs // (samples * layer.shape.groups * layer.shape.d_out)
        measurements = self._measurements.get(layer.name, 0)
        if self._may_be_summed and not layer.is_table and can_be_summed(layer.shape):
            singly = self._squaring is not None
            return selection.in_sums(positions, layer.shape, measurements, singly=singly)
        return selection.of(positions, layer.shape, measurements)

    def _vectors(
        self, fisher: FisherKind, prediction: Prediction, gradient: Tensor, whole: WholeBatch
    ) -> Iterator[Tensor]:
        """The vectors, shaped like the outputs, that are back-propagated one by one."""
        if fisher == "sampled":
            yield self._drawn(prediction, whole, gradient.device)
        elif fisher == "exact":
            yield from prediction.columns()
        else:
            yield gradient

    def _drawn(self, prediction: Prediction, whole: WholeBatch, device: torch.device) -> Tensor:
        """The gradient of drawn labels, which are those that one process would draw for the whole batch."""
        generator = self.sampling.generator_on(device)
        if whole.is_all:
            return prediction.sample(generator)
        return prediction.sample_part(generator, whole.start, len(whole.candidates))

    def _send(self, descent: Descent, calls: Sequence[ModuleCall], vectors: Iterable[Tensor]) -> None:
        """Send vectors down to the calls."""
        with sending():
            for vector in vectors:
                arrived = descent.send(vector)
                for noted, own in zip(calls, arrived, strict=True):
                    if any(part is not None for part in own):
                        noted.call.gradients.append(own)

    # -- from calls to batches -------------------------------------------------------------------------

    def _finish(self) -> None:
        """Keep what the user's own backward passes have left at the calls."""
        passes, self._unfinished = self._unfinished, []
        with self._timed(), whole_modules(self._repeated() if self.armed else ()):
            for passed in passes:
                for noted in passed.calls:
                    vectors = noted.call.gradients
                    noted.call.gradients = [own for own in vectors if any(g is not None for g in own)]
                try:
                    self._keep(passed)
                except Exception:
                    self.roll_back()
                    raise

    def _repeated(self) -> list[nn.Module]:
        """The modules whose calls are computed once more, by their parameters."""
        uses = (use for layer in self._layers.values() for use in layer.uses)
        return list(dict.fromkeys(use.module for use in uses if use.kind.repeats(use.module)))

    def _keep(self, passed: _Pass) -> None:
        """Join the applications of each layer's parameters to a batch."""
        by_layer: dict[str, list[Application]] = {}
        layers: dict[str, Layer] = {}
        early: dict[str, Tensor] = {}
        for noted in passed.calls:
            if noted.call.is_formed:
                self._keep_formed(noted, passed)
                continue
            for application in self._applications(noted):
                layer = noted.watched.layers.get(application.part)
                if layer is None or not layer.weight.requires_grad:
                    continue
                if not application.gradients or not application.inputs.numel():  # an expert that got no token
                    continue
                layers[layer.name] = layer
                rows = noted.call.rows
                if rows is None:
                    if noted.call.probe is not None:
                        passed.agrees &= is_as_expected(application, passed.axis)
                    application = samples_first(application, passed.axis)
                else:
                    early[layer.name] = rows
                by_layer.setdefault(layer.name, []).append(application)
        for name, applications in by_layer.items():
            batch = self._joined(layers[name], applications, early.get(name), passed)
            if batch is not None:
                self.probing.saw(name)
                self._keep_batch(name, batch, passed)
            else:
                passed.agrees = False
        if passed.probed_shapes is not None:
            self.probing.note(passed.probed_shapes, agreed=passed.agrees)

    def _keep_formed(self, noted: ModuleCall, passed: _Pass) -> None:
        """Take over gradients that were formed where they arrived."""
        call = noted.call
        (layer,) = noted.watched.layers.values()
        arrived = [own for (own,) in call.gradients if own is not None]
        call.kept, call.gradients, call.take = {}, [], None  # which refers to the call: they are freed at once
        if arrived and layer.weight.requires_grad:
            batch = self._formed(layer, arrived, call.rows, passed)
            self.probing.saw(layer.name)
            self._keep_batch(layer.name, batch, passed)

    def _keep_batch(self, name: str, batch: CapturedBatch, passed: _Pass) -> None:
        self._batches.setdefault(name, []).append(_Captured(batch, passed.source, passed.is_share))

    def _formed(
        self, layer: Layer, arrived: Sequence[Any], rows: Tensor | None, passed: _Pass
    ) -> FormedBatch | MomentBatch:
        """What was taken of one or more vectors, as a batch."""
        terms = passed.context.num_terms
        if isinstance(arrived[0], tuple):
            inputs, outputs = zip(*arrived, strict=True)
            return MomentBatch(layer, sum(inputs[1:], inputs[0]), sum(outputs[1:], outputs[0]), terms)
        share = 1.0 if rows is None else passed.selection.share(len(rows))
        gradients = arrived[0] if len(arrived) == 1 else torch.cat(list(arrived))  # whose layout would be lost
        return FormedBatch(layer, gradients, share * terms)

    def _joined(
        self, layer: Layer, applications: list[Application], rows: Tensor | None, passed: _Pass
    ) -> CapturedBatch | None:
        """The applications of a layer's parameters as a batch of the samples that are measured."""
        if rows is not None:
            share = passed.selection.share(len(rows))
            context = passed.context.of_part(rows, share, passed.axis.num_samples)
            return LayerBatch(layer, tuple(applications), len(rows), context)
        try:
            samples, doubt = divided_into(layer.name, applications, passed.axis)
        except InseparableError as error:
            self._leave_out([layer.name], str(error))
            return None
        except OutputShapeError as error:
            if self._measurement.fisher != "auto":
                raise
            self._leave_out([layer.name], str(error).removesuffix("."))
            return None
        if doubt is not None:
            self._warn_once(doubt)
        batch = LayerBatch(layer, tuple(applications), samples, passed.context)
        if samples != passed.axis.num_samples:
            return batch
        if layer.is_tied:
            return batch
        outputs = sum(application.gradients[0].numel() for application in applications)
        chosen = self._chosen(passed.selection, layer, outputs, samples)
        if chosen is None:
            return batch
        if isinstance(chosen, Sums):
            if self._squaring is None:
                return FormedBatch(layer, batch.summed(chosen), batch.num_terms)
            squares = squared(layer, chosen, self._squaring, batch.summed)
            return MomentBatch(layer, *squares, batch.num_terms)
        return batch.of_part(chosen, passed.selection.share(len(chosen)))

    def _applications(self, noted: ModuleCall) -> list[Application]:
        """What a call did with the module's parameters; none, and a word in the log, if that cannot be told."""
        watched, call = noted.watched, noted.call
        names = [layer.name for layer in watched.layers.values()]
        if versions(call.kept) != call.versions:
            self._leave_out(
                names,
                f"the input of layer {watched.name!r} was changed in place after the layer was called (inside "
                "a checkpointed segment?)",
            )
            return []
        if not call.gradients:
            return []
        try:
            return watched.kind.applications(watched.module, call)
        except RepetitionError as error:
            self._leave_out(names, str(error))
            return []

    # -- words -----------------------------------------------------------------------------------------

    def _leave_out(self, layers: Sequence[str], why: str) -> None:
        """Note that layers have no statistics, and say once why."""
        self.left_out.update(layers)
        instead = ", which is trained by first order," if self._only_training else ""
        self._warn_once(f"the statistics of layer {layers[0]!r}{instead} are left out: {why}")

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            message = message[0].upper() + message[1:] + ("" if message.endswith("?") else ".")
            logger.warning("%s%s", self._speaker, message)

    @property
    def _speaker(self) -> str:
        """Whose messages these are, where the model has several optimizers that were not let go of."""
        if not self._owner or self._hooks.is_alone:
            return ""
        return f"{self._owner}, optimizer no. {self._hooks.number} of this model: "

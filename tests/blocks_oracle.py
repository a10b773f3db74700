"""Dense Fisher blocks of any layer, from rows that are written out by hand.

A case has a model and the same model once more, written out in plain formulas on a `Tape`. The tape adds a
zero to every pre-activation s = W a + b, so that autograd gives u, the gradient at s. Samples are run one by
one (or, where they interact, together), and the rows are shown to give autograd's own gradients of the real
model. Everything else is a sum over these rows, from the definitions, in the coordinates of the parameters.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from dense import METHODS, RTOL, assert_close, sharings, solve_rtol
from tekfac import EKFAC, KFAC, TEKFAC, TKFAC
from tekfac.optim.natural_gradient import NaturalGradient

CLASSES = 3
DAMPING = 0.05
FISHERS = ("empirical", "exact")
Combination = tuple[type[NaturalGradient], str]
EVERY: tuple[Combination, ...] = tuple((m, s) for m in METHODS for s in sharings(m))
OWN: tuple[Combination, ...] = ((KFAC, "expand"), (EKFAC, "expand"), (TKFAC, "exact"), (TEKFAC, "exact"))
PRODUCTS: tuple[Combination, ...] = tuple(c for c in EVERY if c[0] in (KFAC, TKFAC))
NO_REDUCE: tuple[Combination, ...] = tuple(c for c in EVERY if c[1] != "reduce")


# -- the layer, written out ----------------------------------------------------------------------------


class Tape:
    """Pre-activations by key: the rows a they come from, and a zero that was added to them."""

    def __init__(self) -> None:
        self.inputs: dict[str, list[Tensor]] = {}
        self.shifts: dict[str, list[Tensor]] = {}

    def linear(self, key: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + b; x [N, ..., d], samples first."""
        s = x @ weight.T
        return self.keep(key, with_one(x) if bias is not None else x, s if bias is None else s + bias)

    def keep(self, key: str, a: Tensor, s: Tensor) -> Tensor:
        """Remember rows a [N, ..., d_in] of s [N, ..., d_out]; gives s with a zero added."""
        shift = torch.zeros_like(s, requires_grad=True)
        self.inputs.setdefault(key, []).append(a.detach())
        self.shifts.setdefault(key, []).append(shift)
        return s + shift

    def scaled(self, key: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x * w + b, unit by unit; x [N, ..., units]."""
        return self.keep(key, x, x * weight if bias is None else x * weight + bias)


def with_one(x: Tensor, one: float = 1.0) -> Tensor:
    """A last coordinate for the bias."""
    return torch.cat([x, torch.full_like(x[..., :1], one)], -1)


@dataclass(frozen=True)
class Part:
    """One block of a layer: which rows it is made of, and where its matrix is among the parameters.

    Attributes:
        key: of the tape.
        index: places of the matrix [d_out, d_in] in the layer's flattened, concatenated parameters.
        units: rows of the matrix are units of a norm, each with an exact block of its own.
        diagonal_in, diagonal_out: the factor of that side is kept as a diagonal.
        counted: which positions of which sample enter means over positions, [N, T]; None for all.
        group: which of the groups that lie side by side in the tape's rows.
        turned: an orthogonal matrix R; the input factor is restricted to blocks in the coordinates R a.
        cut_in: sizes of these blocks.
        as_expanded: plain factors are the trace-restricted ones with sharing "expand" (tied layers). Reduced
            ones are, too: a mean of inputs and gradients, which trade places between the uses, depends on
            the sign and scale of the back-propagated vectors.
    """

    key: str
    index: Tensor
    units: bool = False
    diagonal_in: bool = False
    diagonal_out: bool = False
    counted: Tensor | None = None
    group: int | None = None
    turned: Tensor | None = None
    cut_in: Sequence[int] = ()
    as_expanded: bool = False


def places(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Where each parameter's entries are in the concatenation of all."""
    result, start = {}, 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        result[name] = torch.arange(start, start + size).reshape(tuple(shape))
        start += size
    return result


def matrix_places(weight: Sequence[int], bias: bool) -> Tensor:
    """Of an ordinary layer: [weight.reshape(d_out, -1) | bias]."""
    index = places({"weight": weight, "bias": weight[:1]})
    rows = index["weight"].reshape(weight[0], -1)
    return torch.cat([rows, index["bias"][:, None]], 1) if bias else rows


@dataclass
class Case:
    """A model, its data, the model written out, and the layers under test by name.

    Attributes:
        model: gives logits, [N, C] or [N, T, C].
        written: (model, tape, *inputs) -> the same logits.
        layers: for every layer its parameters, as the model names them, and its parts.
        together: samples interact (batch norm) or share their random numbers (dropout).
        seed: of the random numbers of a forward pass.
        settings: of the optimizer.
        join: rows of new keys from those of the tape, where one parameter is used in several ways.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    labels: Tensor
    written: Callable[..., Tensor]
    layers: dict[str, tuple[list[str], list[Part]]]
    together: bool = False
    seed: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    join: Callable[[Rows], Rows] | None = None
    rows: dict[str, Any] = field(default_factory=dict)

    @property
    def terms(self) -> int:
        return self.labels.numel()

    def loss(self, logits: Tensor) -> Tensor:
        """Mean cross-entropy over all terms."""
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), self.labels.reshape(-1))

    def parameter_sizes(self, layer: str) -> dict[str, torch.Size]:
        shapes = dict(self.model.named_parameters(remove_duplicate=False))
        return {name: shapes[name].shape for name in self.layers[layer][0]}


def run(case: Case, model: nn.Module, *inputs: Tensor) -> Tensor:
    if case.seed is not None:
        torch.manual_seed(case.seed)
    output: Tensor = model(*inputs)
    return output


def label_losses(logits: Tensor, labels: Tensor, fisher: str) -> list[Tensor]:
    """Of [N, ..., C]: the training loss, or one for every label of every term of a sample; sums over n."""
    log_p = logits.log_softmax(-1)
    if fisher == "empirical":
        return [-log_p.gather(-1, labels[..., None]).sum()]
    weighted = -(log_p / 2).exp().detach() * log_p
    return list(weighted.flatten(1).sum(0))


Rows = dict[str, list[tuple[Tensor, Tensor]]]
"""By key, for every sample: a [K, T, d_in] and u [K, T, d_out]; groups lie side by side."""


def rows_of(case: Case, fisher: str) -> Rows:
    """What every part sees, shown to reproduce the model's outputs and autograd's gradients."""
    if fisher in case.rows:
        return case.rows[fisher]
    case.model.train()
    count = len(case.labels)
    batches = [slice(0, count)] if case.together else [slice(n, n + 1) for n in range(count)]
    rows: Rows = {}
    for batch in batches:
        inputs = tuple(x[batch] for x in case.inputs)
        if case.seed is not None:
            torch.manual_seed(case.seed)
        tape = Tape()
        logits = case.written(copy.deepcopy(case.model), tape, *inputs)
        assert_close(logits.detach(), run(case, copy.deepcopy(case.model), *inputs).detach(), 1e-12)
        flat = [shift for shifts in tape.shifts.values() for shift in shifts]
        columns = [
            torch.autograd.grad(loss, flat, retain_graph=True, materialize_grads=True)
            for loss in label_losses(logits, case.labels[batch], fisher)
        ]
        start = 0
        for key, shifts in tape.shifts.items():
            stop = start + len(shifts)
            a = torch.cat([_positions(x) for x in tape.inputs[key]], 1)
            us = [torch.cat([_positions(x) for x in column[start:stop]], 1) for column in columns]
            rows.setdefault(key, []).extend(zip(torch.stack([a] * len(us), 1), torch.stack(us, 1), strict=True))
            start = stop
    if case.join is not None:
        rows.update(case.join(rows))
    case.rows[fisher] = rows
    return rows


def _positions(x: Tensor) -> Tensor:
    """[N, ..., d] as [N, T, d]."""
    return x.reshape(len(x), -1, x.shape[-1])


def part_rows(part: Part, rows: Rows) -> list[tuple[Tensor, Tensor]]:
    """Of one part."""
    found = rows[part.key]
    if part.group is None:
        return found
    d_out, d_in = part.index.shape
    cut_in = slice(part.group * d_in, (part.group + 1) * d_in)
    cut_out = slice(part.group * d_out, (part.group + 1) * d_out)
    return [(a[..., cut_in], u[..., cut_out]) for a, u in found]


def gradients_of(part: Part, rows: Rows) -> Tensor:
    """Per-sample gradient matrices, [N, K, d_out, d_in]."""
    found = part_rows(part, rows)
    if not part.units:
        return torch.stack([torch.einsum("kto,kti->koi", u, a) for a, u in found])
    weight = torch.stack([(u * a).sum(1) for a, u in found])
    bias = torch.stack([u.sum(1) for a, u in found])
    return torch.stack([weight, bias], -1)[..., : part.index.shape[1]]


def assert_rows_give_autograds_gradients(case: Case) -> None:
    """For every layer, sum_t u a^T is what the real model's backward pass says, sample by sample."""
    rows, count = rows_of(case, "empirical"), len(case.labels)
    batches = [slice(0, count)] if case.together else [slice(n, n + 1) for n in range(count)]
    case.model.train()
    for batch in batches:
        model = copy.deepcopy(case.model)
        named = dict(model.named_parameters(remove_duplicate=False))
        logits = run(case, model, *(x[batch] for x in case.inputs))
        F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), case.labels[batch].reshape(-1), reduction="sum"
        ).backward()
        grads = {name: _dense_grad(parameter) for name, parameter in named.items()}
        for layer, (names, parts) in case.layers.items():
            expected = torch.cat([grads[name].reshape(-1) for name in names])
            actual = torch.zeros_like(expected)
            for part in parts:
                actual[part.index.reshape(-1)] += gradients_of(part, rows)[batch].sum((0, 1)).reshape(-1)
            error = float((actual - expected).abs().max())
            assert error < 1e-12 * max(1.0, float(expected.abs().max())), f"{layer}: {error:.1e}"


def _dense_grad(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense().detach().clone()


# -- the definitions -----------------------------------------------------------------------------------


def block_sizes(size: int, max_dim: int | None, large_dims: str) -> list[int]:
    """How a side is cut: one block, nearly equal blocks, or single numbers."""
    if max_dim is None or size <= max_dim:
        return [size]
    if large_dims == "diagonal" or (large_dims == "auto" and size > 20_000):
        return [1] * size
    count = -(-size // max_dim)
    width = -(-size // count)
    return [min(width, size - start) for start in range(0, size, width)]


def restricted(matrix: Tensor, sizes: Sequence[int]) -> Tensor:
    """The blocks on the diagonal alone."""
    keep = torch.block_diag(*(torch.ones(n, n) for n in sizes)).bool()
    return torch.where(keep, matrix, 0.0)


def eigenvectors(matrix: Tensor, sizes: Sequence[int]) -> Tensor:
    """Of every block on the diagonal, by itself."""
    return torch.block_diag(*(torch.linalg.eigh(b)[1] for b in _diagonal_blocks(matrix, sizes)))


def _diagonal_blocks(matrix: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    stops = list(itertools.accumulate(sizes))
    return [matrix[stop - n : stop, stop - n : stop] for n, stop in zip(sizes, stops, strict=True)]


def is_simple(matrix: Tensor, sizes: Sequence[int]) -> bool:
    """Whether the eigenvectors are unique enough to be compared to RTOL."""
    top = float(matrix.diagonal().max())
    for block in _diagonal_blocks(matrix, sizes):
        gaps = torch.linalg.eigvalsh(block).diff()
        if len(gaps) and float(gaps.min()) <= 3e-6 * top:
            return False
    return True


@dataclass(frozen=True)
class Expected:
    """A dense block.

    Attributes:
        block: over the row-major vec of [d_out, d_in].
        fisher: F itself.
        unique: False where the factors' eigenvectors are not.
        commuting: what the block must commute with all the same.
        negligible: not 0 where the block is nothing but rounding, below this number.
    """

    block: Tensor
    fisher: Tensor
    unique: bool = True
    commuting: tuple[Tensor, ...] = ()
    negligible: float = 0.0


def expected_part(case: Case, part: Part, method: type[NaturalGradient], sharing: str, fisher: str) -> Expected:
    """The block of one part as the method defines it, over the row-major vec of [d_out, d_in]."""
    rows, terms = rows_of(case, fisher), case.terms
    gradients = gradients_of(part, rows).flatten(0, 1)  # [N * K, d_out, d_in]
    exact = torch.einsum("nd,ne->de", gradients.flatten(1), gradients.flatten(1)) / terms
    d_out, d_in = part.index.shape
    if part.units:
        block = restricted(exact, [d_in] * d_out)
        return Expected(block, block)
    corrected = method in (EKFAC, TEKFAC)
    restrict = method in (TKFAC, TEKFAC)
    if part.as_expanded and (not restrict or sharing == "reduce"):
        restrict, sharing = True, "expand"
    inputs, outputs, scale = factors_of(part, rows, terms, sharing, restrict, exact)
    limit, how = case.settings.get("max_dim"), case.settings.get("large_dims", "auto")
    cut_in = [1] * d_in if part.diagonal_in else part.cut_in or block_sizes(d_in, limit, how)
    cut_out = [1] * d_out if part.diagonal_out else block_sizes(d_out, limit, how)
    turned = torch.eye(d_in).double() if part.turned is None else part.turned
    inputs, outputs = restricted(turned @ inputs @ turned.T, cut_in), restricted(outputs, cut_out)
    everything = sum(float((u.square().sum(-1) * a.square().sum(-1)).sum()) for a, u in part_rows(part, rows))
    rounding = 1e-20 * everything / terms
    if float(exact.trace()) < rounding if corrected else cancels(part, rows, sharing):
        return Expected(exact, exact, negligible=rounding)
    if not corrected:
        return Expected(scale * torch.kron(outputs, turned.T @ inputs @ turned), exact)
    q_in = turned.T @ eigenvectors(inputs, cut_in)
    block = oracle.eigen_corrected(exact, eigenvectors(outputs, cut_out), q_in)
    if cancels(part, rows, sharing):
        return Expected(block, exact, unique=False)
    if is_simple(inputs, cut_in) and is_simple(outputs, cut_out):
        return Expected(block, exact)
    inputs = turned.T @ inputs @ turned
    one_in, one_out = torch.eye(d_in).double(), torch.eye(d_out).double()
    return Expected(block, exact, False, (torch.kron(outputs, one_in), torch.kron(one_out, inputs)))


def cancels(part: Part, rows: Rows, sharing: str) -> bool:
    """Whether gradients sum to zero over positions, as those of keys do: reduced factors are mere rounding."""
    found = part_rows(part, rows)
    whole = sum(float(u.square().sum()) for _, u in found)
    return sharing == "reduce" and sum(float(u.sum(1).square().sum()) for _, u in found) < 1e-20 * whole


def factors_of(
    part: Part, rows: Rows, terms: int, sharing: str, restrict: bool, exact: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Input factor, output factor and scale."""
    d_out, d_in = part.index.shape
    seen = []
    for n, (a, u) in enumerate(part_rows(part, rows)):
        keep = slice(None) if part.counted is None else part.counted[n]
        left_out = torch.ones(a.shape[1], dtype=torch.bool)
        left_out[keep] = False
        assert not u[:, left_out].any()
        seen.append((a[:, keep], u[:, keep]))
    if sharing == "reduce":
        seen = [(a.mean(1, keepdim=True), u.sum(1, keepdim=True)) for a, u in seen if a.shape[1]]
    one = torch.ones(()).double()
    if not restrict:
        inputs = sum(torch.einsum("kti,ktj->ij", a, a) for a, _ in seen)
        inputs = inputs / sum(a.shape[0] * a.shape[1] for a, _ in seen)
        outputs = sum(torch.einsum("kto,ktp->op", u, u) for _, u in seen) / terms
        return inputs, outputs, one
    if sharing == "exact":
        block = exact
    else:
        alone = [torch.einsum("kto,kti->ktoi", u, a).reshape(-1, d_out * d_in) for a, u in seen]
        block = sum(g.T @ g for g in alone) / terms
    sigma = block.trace()
    if sigma == 0:
        block = torch.eye(d_out * d_in).double()
    n_phi, n_psi = oracle.partial_traces(block / block.trace(), d_out, d_in)
    return n_phi, n_psi, sigma


# -- the library beside it -----------------------------------------------------------------------------


def one_step(
    case: Case, method: type[NaturalGradient], sharing: str, fisher: str
) -> tuple[NaturalGradient, dict[str, Tensor], dict[str, Tensor]]:
    """One real step with lr=1 and no momentum: the optimizer, gradients, and how far parameters moved."""
    model = copy.deepcopy(case.model).train()
    settings = {"damping": DAMPING, "fisher": fisher, "sharing": sharing, **case.settings}
    optimizer = method.natural(model, lr=1.0, momentum=0.0, **settings)
    named = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in named.items()}
    case.loss(run(case, model, *case.inputs)).backward()
    grads = {name: _dense_grad(p) for name, p in named.items()}
    optimizer.step()
    return optimizer, grads, {name: before[name] - p.detach() for name, p in named.items()}


class LibraryBlocks:
    """The library's matrix, restricted to some parameters, flattened and concatenated."""

    def __init__(self, optimizer: NaturalGradient) -> None:
        self._dense = optimizer.curvature.to_dense()
        self._places = places(optimizer.curvature.parameters)

    def __call__(self, names: Iterable[str]) -> Tensor:
        where = torch.cat([self._places[name].reshape(-1) for name in names])
        return self._dense[where][:, where]


def assert_blocks_and_step(
    case: Case, combinations: Iterable[Combination] = EVERY, fishers: Iterable[str] = FISHERS
) -> None:
    """Every layer's block is the definition's, and the step is the dense damped solve."""
    problems = []
    for fisher, (method, sharing) in itertools.product(fishers, combinations):
        optimizer, grads, moved = one_step(case, method, sharing, fisher)
        blocks = LibraryBlocks(optimizer)
        for layer, (names, parts) in case.layers.items():
            where = f"{layer}, {method.__name__}, {sharing}, {fisher}"
            assert layer in optimizer.curvature, f"no block of {layer!r}: {list(optimizer.curvature)}"
            sizes = case.parameter_sizes(layer)
            found = {n: tuple(s) for n, s in optimizer.curvature[layer].shape.parameters.items()}
            assert found == {n: tuple(s) for n, s in sizes.items()}, f"{where}: parameters {found}"
            block = blocks(names)
            try:
                known = assert_layer(case, block, parts, method, sharing, fisher)
                gradient = torch.cat([grads[name].reshape(-1) for name in names])
                step = torch.cat([moved[name].reshape(-1) for name in names])
                damped = known + DAMPING * torch.eye(len(known)).double()
                assert_close(step, torch.linalg.solve(damped, gradient), 10 * solve_rtol(known, DAMPING))
            except AssertionError as problem:
                problems.append(f"{where}: {problem}")
    assert not problems, "\n".join(problems)


def assert_layer(
    case: Case, block: Tensor, parts: list[Part], method: type[NaturalGradient], sharing: str, fisher: str
) -> Tensor:
    """Compare; gives the block that is then known to be right."""
    expected = torch.zeros_like(block)
    for part in parts:
        where, want = part.index.reshape(-1), expected_part(case, part, method, sharing, fisher)
        if want.negligible:
            have = block[where][:, where]
            assert float(have.abs().max()) < want.negligible
            want = Expected(have, want.fisher)
        elif not want.unique:  # any basis of an eigenspace will do: the trace and the spaces are all there is
            have = block[where][:, where]
            assert_close(have.trace(), want.fisher.trace())
            for matrix in want.commuting:
                scale = float(have.norm() * matrix.norm())
                assert float((have @ matrix - matrix @ have).norm()) <= 1e-9 * scale
            want = Expected(have, want.fisher)
        expected[where[:, None], where[None, :]] = want.block
    assert_close(block, expected, RTOL)
    return expected


def names_in_log(caplog: Any, build: Callable[[], NaturalGradient]) -> tuple[NaturalGradient, str]:
    """An optimizer, and what was said when it was made."""
    with caplog.at_level(logging.INFO, "tekfac"):
        optimizer = build()
    return optimizer, caplog.text


# -- a network around one layer ------------------------------------------------------------------------


class Net(nn.Module):
    """A layer, tanh, and a linear head: of all positions with weights of their own, or of each."""

    def __init__(
        self, layer: nn.Module, call: Callable[..., Tensor], features: int, per_position: bool
    ) -> None:
        super().__init__()
        self.layer, self.call, self.per_position = layer, call, per_position
        self.head = nn.Linear(features, CLASSES)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.head(self.joined(self.call(self.layer, *inputs).tanh()))

    def joined(self, y: Tensor) -> Tensor:
        return y if self.per_position else y.flatten(1)


def net_case(
    layer: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    written: Callable[..., Tensor],
    layers: dict[str, tuple[list[str], list[Part]]],
    call: Callable[..., Tensor] = lambda layer, *inputs: layer(*inputs),
    seed: int = 0,
    forward_seed: int | None = None,
    scale: float = 0.7,
    per_position: bool = False,
    **options: Any,
) -> Case:
    """The case of one layer, with parameters up to `scale`; written gives by hand what call gives.

    The head gives logits of each sample or, per position, of each of [N, T].
    """
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = layer.double()
        for parameter in layer.parameters():  # also of norms, whose own beginnings are ones and zeros
            parameter.data.uniform_(-scale, scale)
            if getattr(layer, "padding_idx", None) is not None:
                parameter.data[layer.padding_idx] = 0.0
        state = copy.deepcopy(layer.state_dict())
        with torch.no_grad():
            shape = call(layer, *inputs).shape
        features = shape[-1] if per_position else shape[1:].numel()
        layer.load_state_dict(state)
        model = Net(layer, call, features, per_position).double()
        labels = torch.randint(CLASSES, shape[:2] if per_position else shape[:1])

    def whole(model: Net, tape: Tape, *inputs: Tensor) -> Tensor:
        return model.head(model.joined(written(model.layer, tape, *inputs).tanh()))

    return Case(model, inputs, labels, whole, layers, seed=forward_seed, **options)


def assert_chunks_change_nothing(case: Case, combinations: Iterable[Combination] = OWN) -> None:
    """A memory budget for one sample at a time gives the same blocks."""
    small = replace(case, settings={**case.settings, "memory_budget": 1})
    assert_blocks_and_step(small, combinations)


def assert_ignored_samples_do_not_count(case: Case, combinations: Iterable[Combination] = EVERY) -> None:
    """A batch in which some targets are ignored has the blocks of the batch without those samples."""
    ignored = torch.arange(len(case.labels)) % 3 == 1
    among = replace(case, labels=torch.where(ignored, -100, case.labels))
    alone = replace(case, labels=case.labels[~ignored], inputs=tuple(x[~ignored] for x in case.inputs))
    for method, sharing in combinations:
        for fisher in FISHERS:
            steps = [one_step(c, method, sharing, fisher) for c in (among, alone)]
            with_them, without = (LibraryBlocks(optimizer) for optimizer, _, _ in steps)
            for layer, (names, _) in case.layers.items():
                have, want = with_them(names), without(names)
                error = float((have - want).abs().max() / want.abs().max())
                where = f"{layer}, {method.__name__}, {sharing}, {fisher}"
                assert error < RTOL, f"{where}: relative error {error:.2e}"


def numbers(state: Any) -> Iterator[int]:
    """Sizes of all tensors of a nested state."""
    if isinstance(state, Tensor):
        yield state.numel()
    elif isinstance(state, dict):
        for value in state.values():
            yield from numbers(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from numbers(value)

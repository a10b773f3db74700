"""Tiny layers of equal size are refreshed and preconditioned together, with the results of each by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import assert_close, dense_block, every_method, normal, seeded, statistics
from tekfac import TEKFAC
from tekfac.curvature import network, stacks
from tekfac.curvature.symmetric import DecompositionError
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, everything

STEPS = 4


class Net(nn.Module):
    """Three norms and three linear layers of one size, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.tanh(norm(layer(x)))
        out: Tensor = self.head(x.mean(1))
        return out


def clocks(method: type[NaturalGradient]) -> dict[str, int]:
    names = ["factors_every", "basis_every", *(["rescaling_every"] if method.method.rescaling.measured else [])]
    return dict.fromkeys(names, 1)


def run(method: type[NaturalGradient], **settings: Any) -> tuple[nn.Module, NaturalGradient]:
    model = seeded(Net)
    settings = {"lr": 0.05, "fisher": "empirical", "damping": 1e-2, **clocks(method), **settings}
    optimizer = method.natural(model, **settings)
    for seed in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(normal(6, 5, 4, seed=seed)), torch.arange(6) % 3).backward()
        optimizer.step()
    return model, optimizer


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer by itself, from now on."""
    monkeypatch.setattr(network, "alike", lambda *_: [])
    monkeypatch.setattr(network, "stacked", lambda layers: [(name,) for name in layers])
    monkeypatch.setattr(stacks, "ROOMY", 0)


@every_method
@pytest.mark.parametrize("fisher", ["empirical", "sampled", "exact"])
def test_the_result_is_that_of_each_by_itself(
    monkeypatch: pytest.MonkeyPatch, method: type[NaturalGradient], fisher: str
) -> None:
    together = []
    whole = network.refreshed_together
    monkeypatch.setattr(network, "refreshed_together", lambda *a: together.append(len(a[0])) or whole(*a))
    model, optimizer = run(method, fisher=fisher)
    assert together == [3, 3] * (STEPS - 1)  # linear layers, and norms; the first step is each one's own
    alone(monkeypatch)
    other, expected = run(method, fisher=fisher)
    for name, block in statistics(expected).items():
        for group in range(len(block.basis.scale)):
            assert_close(dense_block(statistics(optimizer)[name], group), dense_block(block, group), 1e-9)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(one.detach(), two.detach(), 1e-9)


def test_what_fails_together_is_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from tekfac.curvature import symmetric

    eigen, calls = symmetric.symmetric_eigen, []

    def failing(matrix: Tensor) -> Any:
        calls.append(len(matrix))
        if len(matrix) == 12:  # three norms of four units
            raise DecompositionError("together")
        return eigen(matrix)

    monkeypatch.setattr(symmetric, "symmetric_eigen", failing)
    _, optimizer = run(TEKFAC)
    assert 12 in calls
    assert optimizer.failed_refreshes == 0
    alone(monkeypatch)
    _, expected = run(TEKFAC)
    for name, block in statistics(expected).items():
        assert_close(dense_block(statistics(optimizer)[name]), dense_block(block), 1e-9)


def test_what_is_handed_out_of_a_layer_is_its_own() -> None:
    """Not part of a larger tensor, which a saved state would hold as a whole."""
    _, optimizer = run(TEKFAC)
    blocks, curvature = optimizer._network.separate_blocks(), optimizer.curvature
    for name, block in blocks.items():
        for tensor in (*block.moments.values, *block.basis, *curvature[name].basis):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@every_method
def test_what_was_handed_out_stays_when_stacks_are_renewed(method: type[NaturalGradient]) -> None:
    model = seeded(Net)
    optimizer = method(model, factors_every=1, basis_every=1)
    handed_out = []
    for seed in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(normal(6, 5, 4, seed=seed)), torch.arange(6) % 3).backward()
        optimizer.step()
        blocks = (optimizer.curvature, optimizer._network.separate_blocks())
        bases = [tensor for own in blocks for name in own for tensor in own[name].basis]
        handed_out.append((bases, [tensor.clone() for tensor in bases]))
    for bases, copies in handed_out:
        assert all(map(torch.equal, bases, copies))
    first, last = handed_out[0][0], handed_out[-1][0]
    assert not all(map(torch.equal, first, last))  # it was renewed


def test_other_curvatures_in_the_same_bases_are_taken() -> None:
    _, optimizer = run(TEKFAC, momentum_at="before")
    bases = {name: block.basis for name, block in optimizer._network.blocks.items()}
    optimizer._network.blocks = {name: replace(block) for name, block in optimizer._network.blocks.items()}
    optimizer._network._present_stacks(optimizer._damping_rules())
    assert all(block.basis is bases[name] for name, block in optimizer._network.blocks.items())


@every_method
def test_stacked_layers_keep_nothing_twice(method: type[NaturalGradient]) -> None:
    """Their bases are views of the stack's, after the first step, a refresh and a loaded state alike."""
    model, optimizer = run(method)
    state = optimizer.state_dict()
    again = method.natural(model, **clocks(method), fisher="empirical", damping=1e-2)
    again.load_state_dict(state)
    for one in (optimizer, again):
        stacked = [
            stack for stack in one._network._present_stacks(one._damping_rules()) if len(stack.layers) > 1
        ]
        assert sorted(len(stack.layers) for stack in stacked) == [3, 3]
        for stack in stacked:
            for layer in stack.layers:
                pairs = zip(one._network.blocks[layer.name].basis, stack.basis, strict=True)
                for own, whole in pairs:
                    assert own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def gapped_run(method: type[NaturalGradient]) -> tuple[nn.Module, NaturalGradient]:
    """The default step, with layers and biases that have no gradient now and then, and a skipped step."""
    model = seeded(Net)
    optimizer = method(model, lr=0.05, factors_every=2, basis_every=2, seed=0)
    named = dict(model.named_parameters())
    for seed, gone in enumerate(([], ["layers.1.weight", "layers.1.bias"], ["layers.2.bias"], ["inf"], [])):
        optimizer.zero_grad()
        F.cross_entropy(model(normal(6, 5, 4, seed=seed)), torch.arange(6) % 3).backward()
        for name in gone:
            if name == "inf":
                model.head.bias.grad.fill_(torch.inf)
            else:
                named[name].grad = None
        optimizer.step()
    assert optimizer.skipped_steps == 1
    return model, optimizer


@every_method
@pytest.mark.parametrize("made_by", [run, gapped_run])
def test_room_is_given_back_between_steps(
    method: type[NaturalGradient], made_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the network needs its own; the run is the same."""
    kept = everything(*made_by(method))
    monkeypatch.setattr(stacks, "GIVEN_BACK", 1)
    model, optimizer = made_by(method)
    rooms = [stack._room for stack in optimizer._network._stacks if stack._room is not None]
    assert rooms
    assert all(room.whole.untyped_storage().nbytes() == 0 for room in rooms)
    assert_identical(everything(model, optimizer), kept)


def test_room_stays_where_torch_cannot_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "GIVEN_BACK", 1)
    monkeypatch.setattr(stacks, "RESIZED_ON", ())
    _, optimizer = run(TEKFAC)
    rooms = [stack._room for stack in optimizer._network._stacks if stack._room is not None]
    assert all(room.whole.untyped_storage().nbytes() > 0 for room in rooms)


def test_stacking_that_was_interrupted_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer stays without its block because memory was short for once."""
    calls = 0

    class Interrupted(stacks.Stack):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise MemoryError
            super().__init__(*arguments, **keywords)

    monkeypatch.setattr(network, "Stack", Interrupted)
    model = seeded(Net)
    optimizer = TEKFAC(model, lr=0.05)
    for seed in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(normal(6, 5, 4, seed=seed)), torch.arange(6) % 3).backward()
        if seed:
            optimizer.step()
        else:
            with pytest.raises(MemoryError):
                optimizer.step()
    names = {layer.name for stack in optimizer._network._stacks for layer in stack.layers}
    assert names == set(optimizer._network.blocks) == set(optimizer._layers)


@every_method
def test_a_layer_without_a_gradient_is_left_out(method: type[NaturalGradient]) -> None:
    """Of layers that lie together, one has none at all and one has none of its bias."""
    model, optimizer = run(method, **dict.fromkeys(clocks(method), 100))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    F.cross_entropy(model(normal(6, 5, 4, seed=9)), torch.arange(6) % 3).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name in ("layers.1.weight", "layers.1.bias", "norms.2.bias"):
        dict(model.named_parameters())[name].grad = None
        del gradients[name]
    filled = {**gradients, "norms.2.bias": torch.zeros(4).double()}
    curvature = optimizer.curvature
    velocities = {n: optimizer.state[p]["momentum_buffer"].clone() for n, p in model.named_parameters()}
    optimizer.step()
    names = [n for n in curvature.parameters if not n.startswith("layers.1")]
    kept = {n: filled[n] for n in names}
    kept |= {n: torch.zeros(s).double() for n, s in curvature.parameters.items() if n not in kept}
    if method.method.rescaling.measured:
        natural = curvature.solve(kept, damping=1e-2)
        for name, parameter in model.named_parameters():
            moved = (before[name] - parameter.detach()) / 0.05
            if name in gradients:
                assert_close(moved, 0.9 * velocities[name] + natural[name])
            else:
                assert not moved.any()


def test_a_run_is_the_same_from_a_saved_state_on() -> None:
    model, optimizer = run(TEKFAC)
    twin = seeded(Net)
    twin.load_state_dict(model.state_dict())
    other = TEKFAC.natural(twin, lr=0.05, fisher="empirical", damping=1e-2, **clocks(TEKFAC))
    other.load_state_dict(optimizer.state_dict())
    for net, one in ((model, optimizer), (twin, other)):
        one.zero_grad()
        F.cross_entropy(net(normal(6, 5, 4, seed=7)), torch.arange(6) % 3).backward()
        one.step()
    assert_identical(everything(model, optimizer), everything(twin, other))

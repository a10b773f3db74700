"""Promise: a pass is probed where its shapes leave something open, and rarely where probes agree with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import normal, seeded
from tekfac import TEKFAC
from tekfac.capture import capture as capturing
from tekfac.capture.probing import MOST_REMEMBERED, Probing
from training import assert_identical, everything

N, D, CLASSES = 4, 5, 3


class Positions(nn.Module):
    """As many positions as samples: shapes do not tell which axis of what is looked up holds which."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol, self.position = nn.Embedding(7, D), nn.Embedding(N, D)
        self.hidden, self.head = nn.Linear(D, D), nn.Linear(D, CLASSES)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.symbol(symbols) + self.position(torch.arange(symbols.shape[1]).expand_as(symbols))
        return self.head(torch.tanh(self.hidden(x)).mean(1))  # type: ignore[no-any-return]


class SequenceFirst(nn.Module):
    """As many positions as samples, which are the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(D, D), nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(x.transpose(0, 1))).mean(0))  # type: ignore[no-any-return]


class Twice(nn.Module):
    """A layer that is called with two parts of every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(D, D), nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (torch.tanh(self.encoder(part)) for part in (x[:, 0], x[:, 1]))
        return self.head(first - second)  # type: ignore[no-any-return]


class Beside(Twice):
    """The same, which returns what another layer makes of the input, too: no loss is taken of it."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Any:
        hidden = [torch.tanh(self.encoder(part)) for part in (x[:, 0], x[:, 1])]
        return self.head(hidden[0]), self.head(hidden[1]), self.other(x[:, 0])


def symbols(step: int) -> Tensor:
    return torch.randint(7, (N, N), generator=torch.Generator().manual_seed(step))


def vectors(step: int) -> Tensor:
    return normal(N, N, D, seed=step)


Inputs = Callable[[int], Tensor]
CASES: dict[str, tuple[type[nn.Module], Inputs]] = {
    "positions": (Positions, symbols),
    "twice": (Twice, vectors),
    "sequence first": (SequenceFirst, vectors),
    "beside": (Beside, vectors),
}


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps at which a probe was sent; `train` says which step it is."""
    sent: list[int] = []
    real = capturing.probed_clear

    def counted(*args: Any) -> Any:
        sent.append(train.step)  # type: ignore[attr-defined]
        return real(*args)

    monkeypatch.setattr(capturing, "probed_clear", counted)
    return sent


def train(case: str, steps: int, **settings: Any) -> Any:
    make, inputs = CASES[case]
    model = seeded(make).double()
    every = {"interval_growth": None, "factors_every": 1, "basis_every": 1, "turns": False}
    optimizer = TEKFAC(model, lr=0.05, seed=3, **{**every, **settings})
    for step in range(steps):
        train.step = step  # type: ignore[attr-defined]
        optimizer.zero_grad()
        outputs = model(inputs(step))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(F.cross_entropy(own, torch.arange(N) % CLASSES) for own in outputs[:2]).backward()  # type: ignore[union-attr]
        optimizer.step()
    return everything(model, optimizer)


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
@pytest.mark.parametrize("case", ["positions", "twice"])
def test_a_pass_like_one_before_is_probed_ever_more_rarely(case: str, fisher: str, probes: list[int]) -> None:
    train(case, 17, fisher=fisher)
    assert probes == [0, 1, 3, 7, 15]


def test_a_pass_whose_samples_are_elsewhere_is_always_probed(probes: list[int]) -> None:
    train("sequence first", 5)
    assert probes == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
@pytest.mark.parametrize("case", CASES)
def test_the_outcome_is_that_of_probing_every_pass(
    case: str, fisher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Probing, "state", lambda self: "{}")  # how often it was probed, the only difference
    rarely = train(case, 6, fisher=fisher)
    monkeypatch.setattr(Probing, "is_wanted", lambda self, shapes: True)
    assert_identical(rarely, train(case, 6, fisher=fisher))


def test_other_shapes_are_probed_by_themselves(probes: list[int]) -> None:
    model = seeded(Twice).double()
    optimizer = TEKFAC(model, interval_growth=None, factors_every=1, basis_every=1, turns=False)
    for step in range(8):
        train.step = step  # type: ignore[attr-defined]
        x = normal(N + step % 2, 2, D, seed=step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(len(x)) % CLASSES).backward()
        optimizer.step()
    assert probes == [0, 1, 2, 3, 6, 7]


def test_a_probe_that_meets_nothing_tells_nothing(probes: list[int]) -> None:
    model = seeded(Twice).double()
    nn.init.zeros_(model.head.weight)  # so that no gradient comes to the encoder at first
    optimizer = TEKFAC(model, lr=0.05, interval_growth=None, factors_every=1, basis_every=1, turns=False)
    for step in range(4):
        train.step = step  # type: ignore[attr-defined]
        optimizer.zero_grad()
        F.cross_entropy(model(vectors(step)), torch.arange(N) % CLASSES).backward()
        optimizer.step()
    assert probes == [0, 1, 2]


def test_what_is_remembered_of_shapes_has_an_end() -> None:
    probing = Probing()
    for size in map(str, range(3 * MOST_REMEMBERED)):
        assert probing.is_wanted(size)
        probing.note(size, agreed=True)
        assert len(probing._passes) <= MOST_REMEMBERED
    assert probing.is_wanted(size)  # the second of its shapes
    assert not probing.is_wanted(size)
    probing.note(size, agreed=False)
    assert probing.is_wanted(size)


class Mixing(Twice):
    """In some passes the samples are mixed up, so that a probe says something else than shapes do."""

    mixes = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.encoder(x[:, 0])) - torch.tanh(self.encoder(x[:, 1]))
        return self.head(hidden.roll(1, 0) if self.mixes else hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
@pytest.mark.parametrize("thrown_away", [None, 1, 2])
def test_a_run_goes_on_as_it_was_with_what_probes_have_told(stop: int, thrown_away: int | None) -> None:
    """Resumed from its state, or after a pass that no step was taken of."""
    ends = []
    for stops, throws in ((None, None), (stop, None), (None, thrown_away)):
        model = seeded(Mixing).double()
        settings: dict[str, Any] = {"interval_growth": None, "factors_every": 1, "basis_every": 1}
        optimizer = TEKFAC(model, lr=0.05, seed=3, turns=False, **settings)
        for step in range(6):
            if step == stops:
                state, weights = optimizer.state_dict(), model.state_dict()
                model = seeded(Mixing).double()
                model.load_state_dict(weights)
                optimizer = TEKFAC(model, lr=0.05, seed=9, turns=False, **settings)
                optimizer.load_state_dict(state)
            for again in (True, False) if step == throws else (False,):
                model.mixes = step == 3
                optimizer.zero_grad()
                F.cross_entropy(model(vectors(step)), torch.arange(N) % CLASSES).backward()
                if not again:
                    optimizer.step()
        ends.append(everything(model, optimizer))
    for end in ends[1:]:
        assert_identical(ends[0], end)

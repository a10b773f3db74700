"""Reinforcement learning: one network is the policy and its critic, and learns to balance a pole on a cart.

The dynamics are written out below, many carts at a time. After some moves of all carts a step is taken on the
advantage actor-critic loss: the policy's log-probabilities weighted by advantages, the squared error of the
critic, and a bonus for entropy. Where the policy's loss belongs to no likelihood that is known, the empirical
Fisher is taken, and nothing has to be said.

Run: python examples/actor_critic.py (ten seconds)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from beside_adam import Comparison, Make, compare, mean_of_last

STEPS, CARTS, MOVES, DISCOUNT, ENTROPY = 200, 32, 10, 0.98, 0.01

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
FARTHEST, STEEPEST = 2.4, 0.21


class ActorCritic(nn.Module):
    """Logits of a push to the left and to the right [N, 2], and the value [N], of states [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.policy, self.value = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, states: Tensor) -> dict[str, Tensor]:
        """Both, by name."""
        features = self.body(states)
        return {"policy": self.policy(features), "value": self.value(features).squeeze(-1)}


def upright(count: int) -> Tensor:
    """Carts in the middle with poles that nearly stand: [N, 4] of place, speed, angle, angular speed."""
    return 0.1 * torch.rand(count, 4) - 0.05


def moved(states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """The states after a push to the left (0) or to the right (1), and which poles have fallen, [N]."""
    _, speed, angle, turning = states.unbind(1)
    push, sin, cos = FORCE * (2.0 * actions - 1), angle.sin(), angle.cos()
    thrust = (push + POLE * HALF_LENGTH * turning.square() * sin) / (CART + POLE)
    inertia = HALF_LENGTH * (4 / 3 - POLE * cos.square() / (CART + POLE))
    swing = (GRAVITY * sin - cos * thrust) / inertia
    drive = thrust - POLE * HALF_LENGTH * swing * cos / (CART + POLE)
    states = states + SECONDS * torch.stack([speed, drive, turning, swing], 1)
    return states, (states[:, 0].abs() > FARTHEST) | (states[:, 2].abs() > STEEPEST)


def train(make: Make, seed: int) -> float:
    """How many poles fall in a thousand moves, in the last third of the training."""
    torch.manual_seed(seed)
    model = ActorCritic()
    optimizer = make(model)
    states, falls = upright(CARTS), []
    for _ in range(STEPS):
        seen, actions, fallen = [], [], []
        for _ in range(MOVES):
            with torch.no_grad():
                logits = model(states)["policy"]
            seen.append(states)
            actions.append(logits.softmax(1).multinomial(1)[:, 0])
            states, fell = moved(states, actions[-1])
            states = torch.where(fell[:, None], upright(CARTS), states)
            fallen.append(fell.float())
        with torch.no_grad():
            following = model(states)["value"]
        returns = []
        for fell in reversed(fallen):  # the reward is 1 for a move after which the pole still stands
            following = (1 - fell) * (1 + DISCOUNT * following)
            returns.insert(0, following)
        goal = torch.cat(returns)
        optimizer.zero_grad()
        out = model(torch.cat(seen))
        policy = torch.distributions.Categorical(logits=out["policy"])
        advantages = goal - out["value"].detach()
        gain = (policy.log_prob(torch.cat(actions)) * advantages).mean()
        loss = 0.5 * mse_loss(out["value"], goal) - gain - ENTROPY * policy.entropy().mean()
        loss.backward()
        optimizer.step()
        falls.append(torch.stack(fallen).mean().item())
    return 1000 * mean_of_last(falls, 1 / 3)


def main() -> Comparison:
    """Train with TEKFAC and with Adam, and print what came out."""
    return compare(train, f"falls in a thousand moves, in the last third of {STEPS} steps")


if __name__ == "__main__":
    main()

"""Several groups in one env, agents that leave, masked choices."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import warp as wp

from shoal.core import Box, Discrete, Field, ForGroup, Group, KernelWorld
from shoal.core.errors import ShoalError
from shoal.core.world import GroupOutputs, Outputs
from tests.helpers import (
    saved,
)

# --- Meadow: two groups, agents that leave, masked choices ----------------------------------------------------------

CELLS = 6


@wp.func
def move_wolf(env: int, agent: int, wolf_action: wp.array2d[int], wolf_at: wp.array2d[int]):
    wolf_at[env, agent] = wolf_at[env, agent] + wolf_action[env, agent] - 1


@wp.func
def move_sheep(
    env: int,
    agent: int,
    sheep_action: wp.array2d[int],
    sheep_at: wp.array2d[int],
    sheep_alive: wp.array2d[wp.bool],
):
    if sheep_alive[env, agent]:
        sheep_at[env, agent] = (sheep_at[env, agent] + sheep_action[env, agent]) % CELLS


@wp.func
def bite(
    env: int,
    wolf_at: wp.array2d[int],
    sheep_at: wp.array2d[int],
    sheep_alive: wp.array2d[wp.bool],
    wolf_reward: wp.array2d[float],
    sheep_reward: wp.array2d[float],
    terminated: wp.array[wp.bool],
):
    """A sheep on the cell of a wolf leaves the game; the episode ends when none is left."""
    left = int(sheep_at.shape[1])
    for sheep in range(sheep_at.shape[1]):
        if sheep_alive[env, sheep]:
            sheep_reward[env, sheep] = 0.5
            for wolf in range(wolf_at.shape[1]):
                if wolf_at[env, wolf] == sheep_at[env, sheep]:
                    sheep_alive[env, sheep] = False
                    wolf_reward[env, wolf] = wolf_reward[env, wolf] + 1.0
                    sheep_reward[env, sheep] = -1.0
        if not sheep_alive[env, sheep]:
            left -= 1
    terminated[env] = left == 0


@wp.func
def gather(
    env: int, env_id: wp.array[int], episode: wp.array[int], wolf_at: wp.array2d[int], sheep_at: wp.array2d[int]
):
    for wolf in range(wolf_at.shape[1]):
        wolf_at[env, wolf] = (env_id[env] + 2 * episode[env] + 3 * wolf) % CELLS
    for sheep in range(sheep_at.shape[1]):
        sheep_at[env, sheep] = (5 * env_id[env] + episode[env] + 2 * sheep) % CELLS


@wp.func
def wolf_sees(
    env: int,
    agent: int,
    wolf_at: wp.array2d[int],
    sheep_at: wp.array2d[int],
    wolf_observation: wp.array3d[float],
    wolf_action_mask: wp.array3d[wp.bool],
):
    here = wolf_at[env, agent]
    wolf_observation[env, agent, 0] = float(here)
    wolf_observation[env, agent, 1] = float(sheep_at[env, 0])
    wolf_action_mask[env, agent, 0] = here > 0
    wolf_action_mask[env, agent, 1] = True
    wolf_action_mask[env, agent, 2] = here < CELLS - 1


@wp.func
def sheep_sees(env: int, agent: int, sheep_at: wp.array2d[int], sheep_observation: wp.array3d[float]):
    sheep_observation[env, agent, 0] = float(sheep_at[env, agent])


class Meadow(KernelWorld):
    @dataclass(frozen=True)
    class Config:
        max_steps: int = 9

    state = dict(wolf_at=Field(int, (2,)), sheep_at=Field(int, (3,)))
    groups = (
        Group("wolf", observation=Box(2), action=Discrete(3), agents=2, masked=True),
        Group("sheep", observation=Box(1), action=Discrete(2), agents=3, can_leave=True),
    )
    step = [ForGroup("wolf", move_wolf), ForGroup("sheep", move_sheep), bite]
    reset = gather
    observe = [ForGroup("wolf", wolf_sees), ForGroup("sheep", sheep_sees)]


class MeadowReference:
    """One env of Meadow, in plain Python."""

    def __init__(self, env_id: int, max_steps: int = 9):
        self.env_id, self.max_steps, self.episode = env_id, max_steps, -1

    def reset(self):
        self.episode, self.clock = self.episode + 1, 0
        self.wolves = [(self.env_id + 2 * self.episode + 3 * w) % CELLS for w in range(2)]
        self.sheep = [(5 * self.env_id + self.episode + 2 * s) % CELLS for s in range(3)]
        self.alive = [True] * 3
        return self.see()

    def see(self):
        wolves = [[w, self.sheep[0]] for w in self.wolves]
        return wolves, [[s] for s in self.sheep]

    def mask(self):
        return [[w > 0, True, w < CELLS - 1] for w in self.wolves]

    def step(self, wolf_actions, sheep_actions):
        self.clock += 1
        self.wolves = [w + a - 1 for w, a in zip(self.wolves, wolf_actions, strict=True)]
        wolf_reward, sheep_reward = [0.0] * 2, [0.0] * 3
        for i in range(3):
            if self.alive[i]:
                self.sheep[i] = (self.sheep[i] + sheep_actions[i]) % CELLS
                biters = [w for w in range(2) if self.wolves[w] == self.sheep[i]]
                for w in biters:
                    wolf_reward[w] += 1.0
                self.alive[i] = not biters
                sheep_reward[i] = -1.0 if biters else 0.5
        return wolf_reward, sheep_reward, not any(self.alive), self.clock >= self.max_steps


def allowed_actions(mask: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """A random allowed choice for each agent."""
    scores = rng.random(tuple(mask.shape)) * mask.numpy()
    return torch.as_tensor(scores.argmax(-1).astype(np.int32))


# --- agents and groups ----------------------------------------------------------------------------------------------


def meadow_rows(outputs) -> dict[str, list]:
    wolf, sheep = outputs.groups["wolf"], outputs.groups["sheep"]
    return dict(
        wolf=wolf.observation.tolist(),
        sheep=sheep.observation.tolist(),
        mask=wolf.action_mask.tolist(),
        alive=sheep.alive.tolist(),
    )


def test_two_groups_equal_the_reference():
    """Observations, rewards, alive flags, masks, ends and group returns are equal over many episodes."""
    envs = 7
    world, references = Meadow(envs), [MeadowReference(i) for i in range(envs)]
    out = world.reset(0)
    seen = [reference.reset() for reference in references]
    rng = np.random.default_rng(0)
    returns = {"wolf": np.zeros(envs), "sheep": np.zeros(envs)}
    running = {"wolf": np.zeros(envs), "sheep": np.zeros(envs)}
    ends = set()
    for _ in range(60):
        rows = meadow_rows(out)
        for i, reference in enumerate(references):
            assert (rows["wolf"][i], rows["sheep"][i]) == seen[i]
            assert rows["mask"][i] == reference.mask()
            assert rows["alive"][i] == reference.alive
        actions = {
            "wolf": allowed_actions(out.groups["wolf"].action_mask, rng),
            "sheep": torch.as_tensor(rng.integers(0, 2, (envs, 3), dtype=np.int32)),
        }
        out = world.step(actions)
        for i, reference in enumerate(references):
            wolf, sheep, terminated, truncated = reference.step(
                actions["wolf"][i].tolist(), actions["sheep"][i].tolist()
            )
            assert out.groups["wolf"].reward[i].tolist() == wolf
            assert out.groups["sheep"].reward[i].tolist() == sheep
            assert (bool(out.terminated[i]), bool(out.truncated[i])) == (terminated, truncated)
            running["wolf"][i] += np.mean(wolf)
            running["sheep"][i] += np.mean(sheep)
            seen[i] = reference.see()
            if terminated or truncated:
                final = (
                    out.groups["wolf"].final_observation[i].tolist(),
                    out.groups["sheep"].final_observation[i].tolist(),
                )
                assert final == seen[i]
                ends.add((terminated, truncated))
                for name in returns:
                    returns[name][i] += running[name][i]
                    running[name][i] = 0.0
                seen[i] = reference.reset()
    assert {(True, False), (False, True)} <= ends
    for name, expected in returns.items():
        np.testing.assert_allclose(world.statistics().return_sum[name], expected, rtol=1e-5)


def fresh_rows(world, alive: bool) -> Outputs:
    """A row of a rollout whose `alive` has old values."""
    envs, groups = world.num_envs, {}
    for g in world.groups:
        shape = (envs, g.agents)
        groups[g.name] = GroupOutputs(
            torch.zeros(*shape, *g.observation.shape),
            torch.zeros(shape),
            torch.zeros(*shape, *g.observation.shape),
            torch.full(shape, alive) if g.can_leave else None,
            torch.zeros(*shape, g.choices, dtype=torch.bool) if g.masked else None,
        )
    return Outputs(torch.zeros(envs, dtype=torch.bool), torch.zeros(envs, dtype=torch.bool), groups)


@pytest.fixture(scope="module")
def meadow_history():
    """Twenty steps in place: actions, and alive flags after each."""
    rng = np.random.default_rng(1)
    world = Meadow(7)
    out = world.reset(0)
    actions, alive = [], []
    for _ in range(20):
        row = {
            "wolf": allowed_actions(out.groups["wolf"].action_mask, rng),
            "sheep": torch.as_tensor(rng.integers(0, 2, (7, 3), dtype=np.int32)),
        }
        out = world.step(row)
        actions.append(row)
        alive.append(out.groups["sheep"].alive.clone())
    assert any(not row.all() for row in alive)
    return actions, alive


@pytest.mark.parametrize("stale", [True, False])
def test_alive_is_carried_along_the_rows_of_a_rollout(meadow_history, stale):
    """Steps into rows with old values give the same alive flags as steps in place."""
    world = Meadow(7)
    world.reset(0)
    for row, expected in zip(*meadow_history, strict=True):
        out = world.step(row, into=fresh_rows(world, stale))
        np.testing.assert_array_equal(out.groups["sheep"].alive, expected)


def test_a_state_saved_between_rows_has_the_alive_flags(meadow_history):
    """A world stepped into rows, saved, loaded elsewhere and stepped in place continues unchanged."""
    actions, alive = meadow_history
    world, other = Meadow(7), Meadow(7)
    world.reset(0)
    for row in actions[:6]:
        world.step(row, into=fresh_rows(world, True))
    assert not alive[5].all()
    other.load_state_dict(saved(world))
    for row, expected in zip(actions[6:], alive[6:], strict=True):
        np.testing.assert_array_equal(other.step(row).groups["sheep"].alive, expected)


def test_one_tensor_is_not_enough_for_two_groups():
    world = Meadow(2)
    world.reset(0)
    with pytest.raises(ShoalError, match="wolf, sheep"):
        world.step(torch.zeros(2, 2, dtype=torch.int32))

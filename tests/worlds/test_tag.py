"""The tag worlds against slow references in NumPy, step by step, and invariants."""

import numpy as np
import pytest
import torch

from shoal.core.errors import ShoalError
from shoal.worlds.tag_continuous import TagContinuous
from shoal.worlds.tag_grid import TagGrid


def random_actions(world, generator) -> dict[str, torch.Tensor]:
    actions = {}
    for g in world.groups:
        highs = [g.action.n] if hasattr(g.action, "n") else g.action.nvec
        shape = (world.num_envs, g.agents)
        parts = [torch.randint(0, high, shape, dtype=torch.int32, generator=generator) for high in highs]
        actions[g.name] = parts[0] if len(parts) == 1 and not g.action.shape else torch.stack(parts, dim=-1)
    return actions


def before(world) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in world.state_dict().items()}


# --- tag-grid -------------------------------------------------------------------------------------------------------

MOVES = [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]


def grid_step(config, cells, actions, steps):
    """One env of tag-grid: cells and actions of all agents, the runner last, to rewards, cells and whether tagged."""
    rewards = np.zeros(len(cells))
    after = []
    for i, ((x, y), action) in enumerate(zip(cells, actions, strict=True)):
        dx, dy = MOVES[action]
        inside = 0 <= x + dx <= config.size and 0 <= y + dy <= config.size
        after.append((x + dx, y + dy) if inside else (x, y))
        rewards[i] -= 0.0 if inside else config.wall_penalty
    tagged = after[-1] in after[:-1]
    rewards[:-1] += config.tag_reward if tagged else -config.step_cost
    rewards[-1] += -config.tag_penalty if tagged else config.step_cost
    return after, rewards, tagged, tagged or steps >= config.max_steps


def grid_observation(config, cells, me, steps):
    """The observation of agent `me`."""
    taggers = len(cells) - 1
    scaled = [(x / config.size, y / config.size) for x, y in cells]
    time = steps / config.max_steps
    if config.full_observation:
        rows = [[*scaled[i], float(i < taggers), float(i == me)] for i in range(taggers + 1)]
        return [*np.ravel(rows), time]
    other = taggers
    if me == taggers:
        apart = [(x - cells[me][0]) ** 2 + (y - cells[me][1]) ** 2 for x, y in cells[:-1]]
        other = int(np.argmin(apart))
    return [*scaled[me], *scaled[other], float(me < taggers), time]


@pytest.mark.parametrize(
    "settings",
    [
        dict(size=4, max_steps=9, random_start=True),
        dict(size=4, max_steps=9, random_start=True, full_observation=False),
        dict(num_taggers=1, size=2, max_steps=5),
        dict(num_taggers=40, size=9, max_steps=7, random_start=True, full_observation=False),
    ],
)
def test_the_grid_equals_its_reference(settings):
    config = TagGrid.Config(**settings)
    world = TagGrid(6, config=config)
    world.reset(3)
    generator = torch.Generator().manual_seed(0)
    tags = 0
    for _ in range(40):
        old, actions = before(world), random_actions(world, generator)
        out = world.step(actions)
        for env in range(world.num_envs):
            xs = [*old["tagger_x"][env], old["runner_x"][env, 0]]
            ys = [*old["tagger_y"][env], old["runner_y"][env, 0]]
            chosen = [*actions["tagger"][env].tolist(), int(actions["runner"][env, 0])]
            steps = int(old["step_count"][env]) + 1
            cells, rewards, tagged, over = grid_step(config, list(zip(xs, ys, strict=True)), chosen, steps)
            found = np.append(out.groups["tagger"].reward[env], out.groups["runner"].reward[env])
            np.testing.assert_allclose(found, rewards, rtol=1e-6)
            assert bool(out.terminated[env]) == tagged
            assert bool(out.terminated[env] | out.truncated[env]) == over
            shown = "final_observation" if over else "observation"
            for me in range(len(cells)):
                group, agent = ("tagger", me) if me < config.num_taggers else ("runner", 0)
                seen = getattr(out.groups[group], shown)[env, agent]
                np.testing.assert_allclose(seen, grid_observation(config, cells, me, steps), rtol=1e-6)
            tags += tagged
    assert tags > 0
    assert float(world.statistics().report_sum["tagged"].sum()) == tags


def test_starts_of_the_grid():
    world = TagGrid(4)
    world.reset(0)
    assert (world.store.tagger_x == 50).all()
    assert (world.store.runner_x == 0).all()
    random = TagGrid(64, config=TagGrid.Config(size=5, random_start=True))
    random.reset(0)
    assert set(random.store.tagger_x.unique().tolist()) == set(range(6))
    assert not torch.equal(random.store.tagger_x[0], random.store.tagger_x[1])


# --- tag-continuous -------------------------------------------------------------------------------------------------


def drive(config, position, motion, choice, skill):
    """One agent's step. Sums that are compared with a bound are computed in float32, to be exact."""
    accelerations = [0.0, *np.linspace(-config.max_acceleration, config.max_acceleration, config.acceleration_levels)]
    turns = [0.0, *np.linspace(-config.max_turn, config.max_turn, config.turn_levels)]
    speed, direction, acceleration = np.float32(motion)
    acceleration += np.float32(accelerations[choice[0]])
    direction += np.float32(turns[choice[1]])
    direction -= np.float32(2 * np.pi) * np.floor(direction / np.float32(2 * np.pi))
    fastest = np.float32(config.max_speed) * np.float32(skill)
    speed = np.clip(speed + acceleration, np.float32(0.0), fastest)
    if speed in (0.0, fastest):
        acceleration = 0.0
    wanted = position + speed * np.array([np.cos(direction), np.sin(direction)])
    inside = np.clip(wanted, 0.0, config.size)
    return inside, (speed, direction, acceleration), -config.edge_penalty * float((inside != wanted).any())


def square_observation(config, position, motion, alive, me, steps):
    """The observation of agent `me`: the nearest agents in the game."""
    heading = motion[me][1] if config.egocentric else 0.0
    turn = np.array([[np.cos(heading), np.sin(heading)], [-np.sin(heading), np.cos(heading)]])
    apart = np.linalg.norm(position - position[me], axis=1)
    others = sorted((d, i) for i, d in enumerate(apart) if i != me and alive[i])[: config.num_neighbors]
    row = []
    for _, i in others:
        row += list(turn @ (position[i] - position[me]) / (config.size * np.sqrt(2.0)))
        row += [
            (motion[i][0] - motion[me][0]) / config.max_speed,
            (motion[i][2] - motion[me][2]) / config.max_acceleration,
            (motion[i][1] - motion[me][1]) / (2 * np.pi),
            float(i < config.num_taggers),
            1.0,
        ]
    row += [0.0] * (7 * (config.num_neighbors - len(others)))
    row.append(steps / config.max_steps)
    if config.egocentric:
        row += list(turn @ (0.5 - position[me] / config.size))
        row += [motion[me][0] / config.max_speed, motion[me][2] / config.max_acceleration]
        row += [np.cos(heading), np.sin(heading)]
    return row


@pytest.mark.parametrize(
    "settings",
    [
        dict(num_taggers=3, num_runners=5, size=6.0, max_steps=12, num_neighbors=4, tag_distance=0.1),
        dict(
            num_taggers=2, num_runners=3, size=3.0, max_steps=9, tag_distance=0.15, edge_penalty=0.3, step_reward=0.01
        ),
        dict(num_taggers=4, num_runners=40, size=9.0, max_steps=6, num_neighbors=10, egocentric=True, runner_skill=1.3),
        dict(num_taggers=1, num_runners=1, size=2.0, max_steps=30, num_neighbors=1, tag_distance=0.2, turn_levels=3),
    ],
)
def test_the_square_equals_its_reference(settings):
    config = TagContinuous.Config(**settings)
    world = TagContinuous(5, config=config)
    world.reset(7)
    generator = torch.Generator().manual_seed(2)
    tags = ends = 0
    for _ in range(30):
        old, actions = before(world), random_actions(world, generator)
        out = world.step(actions)
        over = (out.terminated | out.truncated).numpy()
        for env in range(world.num_envs):
            alive = np.append(np.ones(config.num_taggers, bool), old["runner_alive"][env])
            position, motion = old["position"][env].astype(float), [tuple(m) for m in old["motion"][env].astype(float)]
            choices = np.concatenate([actions["tagger"][env], actions["runner"][env]])
            rewards = np.zeros(len(alive))
            for i in np.flatnonzero(alive):
                skill = config.tagger_skill if i < config.num_taggers else config.runner_skill
                position[i], motion[i], rewards[i] = drive(config, position[i], motion[i], choices[i], skill)
            rewards[alive] += config.step_reward
            steps = int(old["step_count"][env]) + 1
            for i in np.flatnonzero(alive):
                if i < config.num_taggers:
                    continue
                apart = np.linalg.norm(position[: config.num_taggers] - position[i], axis=1)
                if apart.min() < config.tag_distance * config.size:
                    alive[i] = False
                    tags += 1
                    rewards[np.argmin(apart)] += config.tag_reward
                    rewards[i] -= config.tag_penalty
                elif steps >= config.max_steps:
                    rewards[i] += config.survival_reward
            runners = alive[config.num_taggers :]
            found = np.append(out.groups["tagger"].reward[env], out.groups["runner"].reward[env])
            np.testing.assert_allclose(found, rewards, rtol=1e-5, atol=1e-5)
            assert bool(out.terminated[env]) == (not runners.any() or steps >= config.max_steps)
            ends += bool(over[env])
            group = out.groups["runner"]
            left = group.final_alive if over[env] else group.alive
            np.testing.assert_array_equal(left[env], runners)
            for me in range(len(alive)):
                name, agent = ("tagger", me) if me < config.num_taggers else ("runner", me - config.num_taggers)
                shown = "final_observation" if over[env] else "observation"
                seen = getattr(out.groups[name], shown)[env, agent].numpy()
                expected = (
                    square_observation(config, position, motion, alive, me, steps) if alive[me] else np.zeros(len(seen))
                )
                np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-5)
    assert tags > 0
    assert ends > 0


def test_starts_are_random_or_fixed():
    free = TagContinuous(8, config=TagContinuous.Config(num_taggers=2, num_runners=3, max_steps=4))
    free.reset(1)
    assert len(free.store.position.flatten(1).unique(dim=0)) == 8
    quarters = free.store.motion[..., 1] / (np.pi / 2)
    torch.testing.assert_close(quarters, quarters.round())
    fixed = TagContinuous(8, config=TagContinuous.Config(num_taggers=2, num_runners=3, max_steps=4, fixed_start=True))
    fixed.reset(1)
    start = fixed.store.position.clone()
    assert len(start.flatten(1).unique(dim=0)) == 1
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        fixed.step(random_actions(fixed, generator))
    assert torch.equal(fixed.store.episode, torch.ones(8, dtype=torch.int32))
    assert torch.equal(fixed.store.position, start)


@pytest.mark.parametrize("cls", [TagGrid, TagContinuous])
def test_an_env_does_not_depend_on_its_batch(cls):
    sizes = dict(num_taggers=3, size=5, max_steps=7)
    config = cls.Config(**sizes, random_start=True) if cls is TagGrid else cls.Config(**sizes, num_runners=5)
    small, large = cls(3, config=config), cls(50, config=config)
    small.reset(4)
    large.reset(4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(25):
        actions = random_actions(large, generator)
        large.step(actions)
        small.step({name: tensor[:3] for name, tensor in actions.items()})
        for name, tensor in small.store.tensors.items():
            assert torch.equal(tensor, large.store[name][:3]), name


def test_memory_is_linear_in_the_number_of_agents():
    """No array of an env grows with the square of the number of agents."""
    bytes_of = {
        n: TagContinuous(1, config=TagContinuous.Config(num_runners=n)).bytes_per_env for n in (100, 1000, 2000)
    }
    per_agent = (bytes_of[2000] - bytes_of[1000]) / 1000
    assert per_agent == pytest.approx((bytes_of[1000] - bytes_of[100]) / 900, rel=0.01)
    partial = {
        n: TagGrid(1, config=TagGrid.Config(num_taggers=n, full_observation=False)).bytes_per_env for n in (1000, 2000)
    }
    assert partial[2000] < 2.1 * partial[1000]


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (TagGrid, dict(num_taggers=0), "--world.num-taggers must be between 1 and 1048575, got 0"),
        (TagGrid, dict(num_taggers=2**20), "--world.num-taggers must be between 1 and 1048575"),
        (TagGrid, dict(size=0), "--world.size must be at least 1, got 0"),
        (TagContinuous, dict(num_runners=0), "--world.num-runners must be at least 1, got 0"),
        (TagContinuous, dict(num_neighbors=17), "--world.num-neighbors must be between 1 and 16, got 17"),
        (TagContinuous, dict(max_speed=0), "--world.max-speed must be above 0, got 0.0"),
    ],
)
def test_settings_out_of_bounds_are_refused(cls, settings, message):
    with pytest.raises(ShoalError, match=message):
        cls(4, config=cls.Config(**settings))


def test_settings_named_like_observations_drop_no_barrier():
    """Only calls that write observations run without a barrier; `full_observation` is a setting of all of them."""
    world = TagGrid(2, "cpu")
    groups = {call.function.key: call.no_barrier_group for call in world._author_stages.calls(world, "observe", "", {})}
    assert groups == dict(clear_nearest="", find_nearest="", observe_tagger="observe", observe_runner="observe")
    ended = world._author_stages.calls(world, "observe", "ended", {"tagger_observation": "tagger_final_observation"})
    assert [call.no_barrier_group for call in ended] == ["", "", "observe", "observe"]

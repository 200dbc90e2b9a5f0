"""Pandemic: an independent reference in NumPy, the rules, the calibration file, and scores of policies."""

import json

import numpy as np
import pytest
import torch

import shoal
from shoal.core.errors import ShoalError
from shoal.draw.canvas import Canvas
from shoal.worlds.pandemic import Pandemic
from shoal.worlds.pandemic_data import MAP, PER_STATE, POPULATION

PEOPLE = np.array(list(POPULATION.values()), float)
COMPARTMENTS = ("susceptible", "infected", "recovered", "vaccinated", "dead")


class Reference:
    """One env in double precision, counted in people, with the day of the last change instead of a countdown."""

    def __init__(self, config, given, start):
        self.c, self.p = config, {k: given.get(k, getattr(config, k, None)) for k in PER_STATE}
        self.people = np.asarray(given.get("population", PEOPLE), float)
        self.contagion = start["contagion"].astype(float)
        self.now = {k: np.zeros(51) for k in COMPARTMENTS}
        self.now["infected"] = start["infected"].astype(float) * self.people
        self.now["susceptible"] = self.people - self.now["infected"]
        self.day, self.stringency, self.changed = 0, np.ones(51, int), np.full(51, -(10**6))
        self.followed, self.jobless_extra, self.replaced = np.ones(51), np.zeros(51), 0.0
        self.caught = np.zeros(51)
        self.days = []

    def nation(self, per_person):
        """Mean over the people of the nation."""
        return float((per_person * self.people).sum() / self.people.sum())

    def free(self):
        """Whether each governor can choose a new level tomorrow."""
        return self.day + 1 > self.changed + self.c.cooldown_days

    def mask(self):
        return self.free()[:, None] | (np.arange(1, 11) == self.stringency[:, None])

    def step(self, levels, planner):
        p, n = self.p, self.now
        moved = self.free() & (levels != self.stringency)
        if self.day % self.c.planner_interval == 0:
            self.replaced = self.c.max_subsidy * planner / 20
        self.day += 1
        self.stringency = np.where(moved, levels, self.stringency)
        self.changed = np.where(moved, self.day, self.changed)

        self.followed = self.followed * (1 - 1 / p["adoption_days"]) + self.stringency / p["adoption_days"]
        calm = (self.followed - 1) / 9
        prevented = p["distancing"] * (1 - (1 - calm) ** 2)
        at_home = n["infected"] / self.people
        abroad = n["infected"].sum() / self.people.sum()
        met = at_home + p["national_contacts"] * (abroad - at_home)
        self.caught = n["susceptible"] * np.minimum(self.contagion * (1 - prevented) * met, 1)
        ends = n["infected"] / p["infectious_days"]
        deaths = ends * p["fatality_rate"]
        doses = np.zeros(51)
        if self.day >= self.c.vaccine_day:
            doses = np.minimum(p["vaccine_rate"] * self.people, n["susceptible"] - self.caught)
        flows = dict(
            susceptible=-self.caught - doses, infected=self.caught - ends, recovered=ends - deaths, vaccinated=doses
        )
        self.now = {k: n[k] + flow for k, flow in {**flows, "dead": deaths}.items()}

        goal = p["max_added_unemployment"] * ((self.stringency - 1) / 9) ** 2
        pace = np.where(goal > self.jobless_extra, p["layoff_days"], p["rehire_days"])
        self.jobless_extra = self.jobless_extra * (1 - 1 / pace) + goal / pace
        jobless = self.jobless_extra + p["base_unemployment"]
        alive = 1 - self.now["dead"] / self.people
        wage = 1 / (1 - p["base_unemployment"])
        benefit = alive * jobless * self.replaced * wage
        income = alive * (1 - jobless) * wage + benefit
        need = p["subsistence_income"]
        economy = (1 - need) * (1 - (1 - need) / np.maximum(income - need, 0.05))
        health = -p["value_of_life"] * 365 * deaths / self.people
        reward = p["health_weight"] * health + p["economy_weight"] * economy
        cost = p["economy_weight"] * self.c.subsidy_cost * benefit
        self.days.append([100 * self.nation(jobless), self.nation(self.stringency), 100 * self.replaced])
        return reward, self.nation(reward - cost)

    def reports(self):
        deaths = 1e5 * self.now["dead"].sum() / self.people.sum()
        return dict(zip(Pandemic.reports, (deaths, *np.mean(self.days, axis=0)), strict=True))

    def governors_see(self):
        share = {k: v / self.people for k, v in self.now.items()}
        ill, nation_ill = share["infected"], self.now["infected"].sum() / self.people.sum()
        left = np.maximum(self.changed + self.c.cooldown_days - self.day, 0)
        columns = [
            (self.stringency - 1) / 9,
            left / self.c.cooldown_days,
            (self.followed - 1) / 9,
            share["susceptible"],
            ill / (ill + 0.0003),
            ill / (ill + 0.01),
            0.5 * self.p["infectious_days"] * self.caught / self.people / (ill + 1e-7),
            share["vaccinated"],
            100 * share["dead"],
            5 * (self.p["base_unemployment"] + self.jobless_extra),
            nation_ill / (nation_ill + 0.003),
            self.replaced,
            self.day / self.c.max_steps,
            max(self.c.vaccine_day - self.day, 0) / 100,
        ]
        return np.stack([np.broadcast_to(c, 51) for c in columns], axis=1)

    def planner_sees(self):
        total = {k: v.sum() / self.people.sum() for k, v in self.now.items()}
        ill = total["infected"]
        return [
            self.nation(self.stringency) / 10,
            total["susceptible"],
            ill / (ill + 0.0003),
            ill / (ill + 0.01),
            total["vaccinated"],
            100 * total["dead"],
            5 * self.nation(self.p["base_unemployment"] + self.jobless_extra),
            self.replaced,
            self.day / self.c.max_steps,
            max(self.c.vaccine_day - self.day, 0) / 100,
        ]


def starts(world):
    """The random start of an episode, which the reference takes from the world."""
    return [{k: world.store[k][i].numpy().copy() for k in ("infected", "contagion")} for i in range(world.num_envs)]


def choose(mask, rng):
    """Random allowed levels."""
    return torch.as_tensor((rng.random(tuple(mask.shape)) * mask.numpy()).argmax(-1).astype(np.int32))


def close(actual, wanted, what):
    np.testing.assert_allclose(np.asarray(actual), wanted, rtol=5e-4, atol=2e-6, err_msg=what)


def random_calibration(rng):
    """A different value for every state, around the default."""
    usual = Pandemic.Config()
    found = {k: (getattr(usual, k) * rng.uniform(0.7, 1.2, 51)).tolist() for k in PER_STATE if k != "population"}
    return {**found, "population": rng.uniform(1e5, 1e7, 51).tolist(), "national_contacts": 0.05}


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_world_equals_the_reference(tmp_path, calibrated):
    """Every quantity, reward, mask, observation and report, day by day, over several envs and episodes."""
    rng = np.random.default_rng(3)
    given, file = {}, tmp_path / "states.json"
    if calibrated:
        given = random_calibration(rng)
        file.write_text(json.dumps(given))
        given = {k: np.asarray(v, float) for k, v in given.items()}
    short = dict(max_steps=130, cooldown_days=6, planner_interval=20, vaccine_day=60)
    config = Pandemic.Config(calibration=str(file), **short) if calibrated else Pandemic.Config()
    world = Pandemic(2, config=config)
    out = world.reset(7)
    references = [Reference(config, given, start) for start in starts(world)]
    for _ in range(2 * config.max_steps + 10 if calibrated else config.max_steps + 10):
        action = choose(out.groups["governor"].action_mask, rng)
        planner = torch.as_tensor(rng.integers(0, 21, (2, 1), dtype=np.int32))
        out = world.step(dict(governor=action, planner=planner))
        governor, federal = out.groups["governor"], out.groups["planner"]
        ended = out.truncated.tolist()
        assert not out.terminated.any()
        for i, reference in enumerate(references):
            reward, planner_reward = reference.step(action[i].numpy() + 1, int(planner[i, 0]))
            close(governor.reward[i], reward, "governors' reward")
            close(federal.reward[i, 0], planner_reward, "planner's reward")
            assert ended[i] == (reference.day == config.max_steps)
            sight, nation = governor.observation, federal.observation
            if ended[i]:
                sight, nation = governor.final_observation, federal.final_observation
                for name, value in reference.reports().items():
                    close(world.last_episode().reports[name][i], value, name)
            close(sight[i], reference.governors_see(), "what governors see")
            close(nation[i, 0], reference.planner_sees(), "what the planner sees")
            if ended[i]:
                references[i] = reference = Reference(config, given, starts(world)[i])
                close(governor.observation[i], reference.governors_see(), "a first day")
                close(federal.observation[i, 0], reference.planner_sees(), "a first day")
            for name in COMPARTMENTS:
                close(world.store[name][i], reference.now[name] / reference.people, name)
            close(world.store.laid_off[i], reference.jobless_extra, "laid off")
            np.testing.assert_array_equal(governor.action_mask[i], reference.mask())
    assert world.store.episode.tolist() == ([2, 2] if calibrated else [1, 1])


def play(world, levels, subsidy=0, seed=11, days=None):
    """Step through an episode with `levels(store)` (or one level) and one subsidy; each group's mean return."""
    world.reset(seed)
    planner = torch.full((world.num_envs, 1), subsidy, dtype=torch.int32)
    for _ in range(days or world.config.max_steps):
        chosen = levels(world.store) if callable(levels) else torch.full((world.num_envs, 51), levels)
        world.step(dict(governor=chosen.to(torch.int32), planner=planner))
    return {name: float(value.mean()) for name, value in world.last_episode().returns.items()}


def moderate(store):
    """Start at level 6; two levels up where many are infected and infections grow, one down where they fall."""
    growth = 10.0 * store.caught / (store.infected + 1e-7)
    first = (store.step_count == 0)[:, None]
    moved = torch.where((growth > 1.0) & (store.infected > 1e-3), store.level + 2, store.level)
    moved = torch.where(growth < 0.9, moved - 1, moved)
    return torch.where(first, 5, moved).clamp(0, 9)


def test_people_are_conserved():
    world = Pandemic(8)
    rng = np.random.default_rng(0)
    out = world.reset(1)
    for _ in range(539):
        action = choose(out.groups["governor"].action_mask, rng)
        out = world.step(dict(governor=action, planner=torch.zeros(8, 1, dtype=torch.int32)))
        everyone = sum(world.store[name] for name in COMPARTMENTS)
        assert float((everyone - 1.0).abs().max()) < 1e-5
        assert min(float(world.store[name].min()) for name in COMPARTMENTS) >= 0.0


def test_a_new_level_stays_for_the_cooldown():
    """After a change on day 1 no change is possible on days 2 to 29; masked choices are ignored."""
    world = Pandemic(1)
    world.reset(0)

    def day(level):
        out = world.step(dict(governor=torch.full((1, 51), level, dtype=torch.int32), planner=NOTHING))
        return out.groups["governor"].action_mask[0, 0].tolist(), int(world.store.level[0, 0])

    assert world.outputs.groups["governor"].action_mask.all()
    only = [choice == 4 for choice in range(10)]
    assert day(4) == (only, 4)
    for _ in range(27):
        assert day(9) == (only, 4)
    assert day(9) == ([True] * 10, 4)
    assert day(4) == ([True] * 10, 4)
    assert day(7) == ([choice == 7 for choice in range(10)], 7)


NOTHING = torch.zeros(1, 1, dtype=torch.int32)


def test_the_planner_acts_every_ninety_days():
    """Worlds whose planners differ only between the days of choice stay equal bit for bit."""
    rng = np.random.default_rng(4)
    one, other, third = Pandemic(1), Pandemic(1), Pandemic(1)
    for world in (one, other, third):
        out = world.reset(2)
    for day in range(200):
        levels = choose(out.groups["governor"].action_mask, rng)
        said = torch.full((1, 1), (3, 15, 8)[day // 90], dtype=torch.int32)
        noise = said if day % 90 == 0 else torch.as_tensor(rng.integers(0, 21, (1, 1), dtype=np.int32))
        assert bool(out.groups["planner"].is_decision_step) == (day % 90 == 0)
        out = one.step(dict(governor=levels, planner=said))
        other.step(dict(governor=levels, planner=noise))
        third.step(dict(governor=levels, planner=said if day < 90 else NOTHING))
        for group in ("governor", "planner"):
            assert torch.equal(out.groups[group].reward, other.outputs.groups[group].reward)
            assert torch.equal(out.groups[group].observation, other.outputs.groups[group].observation)
            same = torch.equal(out.groups[group].reward, third.outputs.groups[group].reward)
            assert same == (day < 90)
        assert float(one.store.subsidy) == pytest.approx(0.5 * int(said) / 20)


def test_starts_differ_by_state_env_and_episode():
    world = Pandemic(200, config=Pandemic.Config(max_steps=1))
    world.reset(3)
    first = world.store.infected.clone()
    contagion = world.store.contagion.clone()
    world.step(dict(governor=torch.zeros(200, 51, dtype=torch.int32), planner=torch.zeros(200, 1, dtype=torch.int32)))
    assert (world.store.episode == 1).all()
    for now, before in ((world.store.infected, first), (world.store.contagion, contagion)):
        assert now.unique().numel() > 9_000
        assert (now != before).float().mean() > 0.99
    assert 0.0 <= float(first.min()) < 1e-5
    assert 0.0019 < float(first.max()) < 0.002
    assert float(first.mean()) == pytest.approx(0.0005, rel=0.05)
    assert float(contagion.mean()) == pytest.approx(0.25, rel=0.02)
    nations = contagion.mean(1) / 0.25
    assert 0.83 < float(nations.min()) < 0.88
    assert 1.12 < float(nations.max()) < 1.17
    assert float((contagion / contagion.mean(1, keepdim=True)).std()) == pytest.approx(0.15 / 3**0.5, rel=0.05)


def test_moderation_beats_both_extremes():
    """With any subsidy, a moderate adaptive policy is better for both groups than constant levels 1 or 10."""
    world = Pandemic(32)
    for subsidy in (0, 10, 20):
        opened, closed = play(world, 0, subsidy), play(world, 9, subsidy)
        middle = play(world, moderate, subsidy)
        for group in ("governor", "planner"):
            assert middle[group] > opened[group] + 15.0
            assert middle[group] > closed[group] + 15.0
    assert play(world, 0)["governor"] == pytest.approx(-58, abs=3)
    assert play(world, 9)["governor"] == pytest.approx(-66, abs=3)


def test_subsidies_pay_when_much_is_closed():
    world = Pandemic(8)
    assert play(world, 9, 20)["planner"] > play(world, 9, 0)["planner"] + 5.0
    assert play(world, 0, 20)["planner"] < play(world, 0, 0)["planner"] - 0.3


def test_data_of_the_states():
    assert len(POPULATION) == 51
    assert sum(POPULATION.values()) == 331_449_281  # the census of 2020
    assert sorted(name for name in MAP.split() if name != ".") == sorted(POPULATION)


def test_the_picture_shows_the_epidemic():
    world = Pandemic(1)
    pictures = []
    for levels in (0, 9):
        play(world, levels, days=60)
        canvas = Canvas()
        world.picture(canvas, 0)
        pictures.append(canvas.array().astype(float))
    opened, closed = ((p[..., 0] - p[..., 1]).mean() for p in pictures)
    assert opened > closed + 10.0  # redder


# --- settings and the calibration file ------------------------------------------------------------------------------


def test_a_calibration_file_replaces_settings(tmp_path):
    file = tmp_path / "states.json"
    file.write_text(json.dumps({"fatality_rate": 0.01, "vaccine_rate": [0.001 * i for i in range(51)]}))
    tables = Pandemic.tables(Pandemic.Config(calibration=str(file)))
    np.testing.assert_allclose(tables["of_fatality_rate"], 0.01)
    np.testing.assert_allclose(tables["of_vaccine_rate"], [0.001 * i for i in range(51)], rtol=1e-6)
    np.testing.assert_allclose(tables["of_transmission"], 0.25)
    np.testing.assert_allclose(tables["share"], PEOPLE / PEOPLE.sum(), rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", "must hold a JSON object"),
        ('{"fatallity_rate": 0.1}', "'fatallity_rate'; did you mean 'fatality_rate'"),
        ('{"max_steps": 10}', "no parameter"),
        ('{"fatality_rate": [0.1, 0.2]}', "a list of 51, got a list of 2"),
        ('{"fatality_rate": NaN}', "'fatality_rate' must hold finite numbers, got nan"),
        ('{"fatality_rate": "high"}', "finite numbers, got 'high'"),
        ('{"fatality_rate": [true' + ", 0.1" * 50 + "]}", "got True for AL"),
        ('{"fatality_rate": [' + "0.1, " * 50 + "1.5]}", "'fatality_rate' of WY must be between 0 and 1, got 1.5"),
    ],
)
def test_a_bad_calibration_file_is_refused(tmp_path, text, message):
    file = tmp_path / "states.json"
    file.write_text(text)
    with pytest.raises(ShoalError, match=message):
        Pandemic.Config(calibration=str(file))


def test_a_missing_calibration_file_is_refused(tmp_path):
    with pytest.raises(ShoalError, match=r"no calibration file .*nowhere\.json"):
        Pandemic.Config(calibration=str(tmp_path / "nowhere.json"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(fatality_rate=1.5), "fatality-rate must be between 0 and 1, got 1.5"),
        (dict(infectious_days=0.0), "infectious-days must be between 1"),
        (dict(cooldown_days=-1), "cooldown-days must be between 0 and"),
        (dict(state_variation=1.5), "state-variation must be between 0 and 1"),
        (dict(transmission=float("nan")), "transmission must be a finite number"),
    ],
)
def test_bad_settings_are_refused(setting, message):
    with pytest.raises(ShoalError, match=message):
        Pandemic.Config(**setting)


# --- learning -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tuned_settings_beat_the_extremes(seed, tmp_path):
    """Each group does better than with constant levels 1 or 10, with any subsidy."""
    run = shoal.train("pandemic", seed=seed, run_dir=tmp_path / "run", quiet=True, device="cpu")
    found = run.evaluate(episodes=64)
    world = Pandemic(64)
    for levels in (0, 9):
        for subsidy in (0, 20):
            fixed = play(world, levels, subsidy)
            assert found["governor"].mean > fixed["governor"] + 5.0
            assert found["planner"].mean > fixed["planner"] + 20.0

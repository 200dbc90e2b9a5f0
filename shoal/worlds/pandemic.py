"""Pandemic: 51 governors and a federal planner trade lives against livelihoods."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import warp as wp

from shoal.core import Box, Discrete, Field, ForGroup, Group, KernelWorld, Random, uniform, uniform4
from shoal.core.settings import check_settings
from shoal.worlds.pandemic_data import MAP, POPULATION, per_state

STATES = len(POPULATION)
LEVELS = 10
SUBSIDIES = 20
TOP = wp.constant(float(LEVELS - 1))
STEPS_OF_SUBSIDY = wp.constant(float(SUBSIDIES))
NATION = wp.constant(STATES)


@wp.func
def govern(
    env: int,
    agent: int,
    cooldown_days: int,
    governor_action: wp.array2d[int],
    level: wp.array2d[int],
    cooldown: wp.array2d[int],
):
    """A new level starts the cooldown; a choice that the mask forbids changes nothing."""
    left = cooldown[env, agent]
    choice = governor_action[env, agent]
    if left == 0 and choice != level[env, agent]:
        level[env, agent] = choice
        cooldown[env, agent] = cooldown_days
    else:
        cooldown[env, agent] = wp.max(left - 1, 0)


@wp.func
def spread(
    env: int,
    agent: int,
    vaccine_day: int,
    step_count: wp.array[int],
    nation_infected: wp.array[float],
    of_infectious_days: wp.array[float],
    of_fatality: wp.array[float],
    of_distancing: wp.array[float],
    of_adoption_days: wp.array[float],
    of_travel: wp.array[float],
    of_vaccine_rate: wp.array[float],
    contagion: wp.array2d[float],
    level: wp.array2d[int],
    adopted: wp.array2d[float],
    susceptible: wp.array2d[float],
    infected: wp.array2d[float],
    recovered: wp.array2d[float],
    vaccinated: wp.array2d[float],
    dead: wp.array2d[float],
    caught: wp.array2d[float],
    died: wp.array2d[float],
):
    """A day of the epidemic in one state; people follow a new level within days, the first measures help most."""
    y = adopted[env, agent]
    y = y + (float(level[env, agent]) / TOP - y) / of_adoption_days[agent]
    adopted[env, agent] = y
    ill = infected[env, agent]
    met = (1.0 - of_travel[agent]) * ill + of_travel[agent] * nation_infected[env]
    risk = contagion[env, agent] * (1.0 - of_distancing[agent] * y * (2.0 - y)) * met
    new = susceptible[env, agent] * wp.min(risk, 1.0)
    over = ill / of_infectious_days[agent]
    deaths = of_fatality[agent] * over
    left = susceptible[env, agent] - new
    doses = wp.where(step_count[env] >= vaccine_day, wp.min(of_vaccine_rate[agent], left), 0.0)
    susceptible[env, agent] = left - doses
    infected[env, agent] = ill + new - over
    recovered[env, agent] = recovered[env, agent] + (over - deaths)
    vaccinated[env, agent] = vaccinated[env, agent] + doses
    dead[env, agent] = dead[env, agent] + deaths
    caught[env, agent] = new
    died[env, agent] = deaths


@wp.func
def work(
    env: int,
    agent: int,
    full_subsidy: float,
    planner_action: wp.array[int],
    of_base_unemployment: wp.array[float],
    of_closing_unemployment: wp.array[float],
    of_layoff_days: wp.array[float],
    of_rehire_days: wp.array[float],
    of_need: wp.array[float],
    of_life_years: wp.array[float],
    of_health_weight: wp.array[float],
    of_economy_weight: wp.array[float],
    level: wp.array2d[int],
    dead: wp.array2d[float],
    died: wp.array2d[float],
    laid_off: wp.array2d[float],
    benefits: wp.array2d[float],
    governor_reward: wp.array2d[float],
):
    """A day of the economy in one state, and what its governor makes of it."""
    x = float(level[env, agent]) / TOP
    off = laid_off[env, agent]
    target = of_closing_unemployment[agent] * x * x
    days = wp.where(target > off, of_layoff_days[agent], of_rehire_days[agent])
    off = off + (target - off) / days
    laid_off[env, agent] = off
    usual = 1.0 - of_base_unemployment[agent]
    alive = 1.0 - dead[env, agent]
    replaced = full_subsidy * float(planner_action[env]) / STEPS_OF_SUBSIDY
    paid = alive * replaced * (1.0 - usual + off) / usual
    earned = alive * (usual - off) / usual + paid
    benefits[env, agent] = paid
    health = -365.0 * of_life_years[agent] * died[env, agent]
    spare = 1.0 - of_need[agent]
    economy = spare - spare * spare / wp.max(earned - of_need[agent], 0.05)
    governor_reward[env, agent] = of_health_weight[agent] * health + of_economy_weight[agent] * economy


@wp.func
def take_stock(
    env: int,
    share: wp.array[float],
    of_base_unemployment: wp.array[float],
    level: wp.array2d[int],
    susceptible: wp.array2d[float],
    infected: wp.array2d[float],
    vaccinated: wp.array2d[float],
    dead: wp.array2d[float],
    laid_off: wp.array2d[float],
    nation_level: wp.array[float],
    nation_susceptible: wp.array[float],
    nation_infected: wp.array[float],
    nation_vaccinated: wp.array[float],
    nation_dead: wp.array[float],
    nation_unemployment: wp.array[float],
):
    """The nation: means over its people, summed state by state in a fixed order."""
    height = float(0.0)
    prone = float(0.0)
    ill = float(0.0)
    immune = float(0.0)
    lost = float(0.0)
    idle = float(0.0)
    for s in range(NATION):
        w = share[s]
        height += w * float(level[env, s])
        prone += w * susceptible[env, s]
        ill += w * infected[env, s]
        immune += w * vaccinated[env, s]
        lost += w * dead[env, s]
        idle += w * (of_base_unemployment[s] + laid_off[env, s])
    nation_level[env] = 1.0 + height
    nation_susceptible[env] = prone
    nation_infected[env] = ill
    nation_vaccinated[env] = immune
    nation_dead[env] = lost
    nation_unemployment[env] = idle


@wp.func
def preside(
    env: int,
    full_subsidy: float,
    subsidy_cost: float,
    share: wp.array[float],
    of_economy_weight: wp.array[float],
    step_count: wp.array[int],
    planner_action: wp.array[int],
    benefits: wp.array2d[float],
    governor_reward: wp.array2d[float],
    nation_level: wp.array[float],
    nation_dead: wp.array[float],
    nation_unemployment: wp.array[float],
    planner_reward: wp.array[float],
    subsidy: wp.array[float],
    deaths: wp.array[float],
    unemployment: wp.array[float],
    stringency: wp.array[float],
    replacement: wp.array[float],
):
    """The planner's reward, and the figures that are reported: deaths so far and means over the days so far."""
    total = float(0.0)
    for s in range(NATION):
        total += share[s] * (governor_reward[env, s] - of_economy_weight[s] * subsidy_cost * benefits[env, s])
    planner_reward[env] = total
    now = full_subsidy * float(planner_action[env]) / STEPS_OF_SUBSIDY
    subsidy[env] = now
    day = float(step_count[env])
    deaths[env] = 1e5 * nation_dead[env]
    unemployment[env] = unemployment[env] + (100.0 * nation_unemployment[env] - unemployment[env]) / day
    stringency[env] = stringency[env] + (nation_level[env] - stringency[env]) / day
    replacement[env] = replacement[env] + (100.0 * now - replacement[env]) / day


@wp.func
def break_out(
    env: int,
    agent: int,
    rng: Random,
    nation_variation: float,
    state_variation: float,
    of_transmission: wp.array[float],
    of_first_infected: wp.array[float],
    contagion: wp.array2d[float],
    level: wp.array2d[int],
    cooldown: wp.array2d[int],
    adopted: wp.array2d[float],
    susceptible: wp.array2d[float],
    infected: wp.array2d[float],
    recovered: wp.array2d[float],
    vaccinated: wp.array2d[float],
    dead: wp.array2d[float],
    caught: wp.array2d[float],
    laid_off: wp.array2d[float],
):
    """A few states begin with many infected and most with few: four times the mean times a cubed uniform number."""
    own = uniform4(rng, agent, 0.0, 1.0)
    ill = 4.0 * of_first_infected[agent] * own[0] * own[0] * own[0]
    nation = 1.0 + uniform(rng, NATION, -nation_variation, nation_variation)
    contagion[env, agent] = of_transmission[agent] * nation * (1.0 + state_variation * (2.0 * own[1] - 1.0))
    level[env, agent] = 0
    cooldown[env, agent] = 0
    adopted[env, agent] = 0.0
    susceptible[env, agent] = 1.0 - ill
    infected[env, agent] = ill
    recovered[env, agent] = 0.0
    vaccinated[env, agent] = 0.0
    dead[env, agent] = 0.0
    caught[env, agent] = 0.0
    laid_off[env, agent] = 0.0


@wp.func
def close_books(
    env: int,
    subsidy: wp.array[float],
    deaths: wp.array[float],
    unemployment: wp.array[float],
    stringency: wp.array[float],
    replacement: wp.array[float],
):
    subsidy[env] = 0.0
    deaths[env] = 0.0
    unemployment[env] = 0.0
    stringency[env] = 0.0
    replacement[env] = 0.0


@wp.func
def half_at(x: float, middle: float):
    """From 0 to 1, a half at `middle`: shows small numbers and large ones."""
    return x / (x + middle)


@wp.func
def governor_sees(
    env: int,
    agent: int,
    max_steps: int,
    vaccine_day: int,
    cooldown_days: int,
    step_count: wp.array[int],
    of_infectious_days: wp.array[float],
    of_base_unemployment: wp.array[float],
    nation_infected: wp.array[float],
    subsidy: wp.array[float],
    level: wp.array2d[int],
    cooldown: wp.array2d[int],
    adopted: wp.array2d[float],
    susceptible: wp.array2d[float],
    infected: wp.array2d[float],
    vaccinated: wp.array2d[float],
    dead: wp.array2d[float],
    caught: wp.array2d[float],
    laid_off: wp.array2d[float],
    governor_observation: wp.array3d[float],
    governor_action_mask: wp.array3d[wp.bool],
):
    ill = infected[env, agent]
    governor_observation[env, agent, 0] = float(level[env, agent]) / TOP
    governor_observation[env, agent, 1] = float(cooldown[env, agent]) / float(wp.max(cooldown_days, 1))
    governor_observation[env, agent, 2] = adopted[env, agent]
    governor_observation[env, agent, 3] = susceptible[env, agent]
    governor_observation[env, agent, 4] = half_at(ill, 0.0003)
    governor_observation[env, agent, 5] = half_at(ill, 0.01)
    governor_observation[env, agent, 6] = 0.5 * of_infectious_days[agent] * caught[env, agent] / (ill + 1e-7)
    governor_observation[env, agent, 7] = vaccinated[env, agent]
    governor_observation[env, agent, 8] = 100.0 * dead[env, agent]
    governor_observation[env, agent, 9] = 5.0 * (of_base_unemployment[agent] + laid_off[env, agent])
    governor_observation[env, agent, 10] = half_at(nation_infected[env], 0.003)
    governor_observation[env, agent, 11] = subsidy[env]
    governor_observation[env, agent, 12] = float(step_count[env]) / float(max_steps)
    governor_observation[env, agent, 13] = 0.01 * float(wp.max(vaccine_day - step_count[env], 0))
    for choice in range(LEVELS):
        governor_action_mask[env, agent, choice] = cooldown[env, agent] == 0 or choice == level[env, agent]


@wp.func
def planner_sees(
    env: int,
    max_steps: int,
    vaccine_day: int,
    step_count: wp.array[int],
    subsidy: wp.array[float],
    nation_level: wp.array[float],
    nation_susceptible: wp.array[float],
    nation_infected: wp.array[float],
    nation_vaccinated: wp.array[float],
    nation_dead: wp.array[float],
    nation_unemployment: wp.array[float],
    planner_observation: wp.array2d[float],
):
    planner_observation[env, 0] = 0.1 * nation_level[env]
    planner_observation[env, 1] = nation_susceptible[env]
    planner_observation[env, 2] = half_at(nation_infected[env], 0.0003)
    planner_observation[env, 3] = half_at(nation_infected[env], 0.01)
    planner_observation[env, 4] = nation_vaccinated[env]
    planner_observation[env, 5] = 100.0 * nation_dead[env]
    planner_observation[env, 6] = 5.0 * nation_unemployment[env]
    planner_observation[env, 7] = subsidy[env]
    planner_observation[env, 8] = float(step_count[env]) / float(max_steps)
    planner_observation[env, 9] = 0.01 * float(wp.max(vaccine_day - step_count[env], 0))


class Pandemic(KernelWorld):
    """Governors of the 50 states and DC close and open them in a pandemic; a planner pays for lost wages.

    | | |
    |---|---|
    | observation | governor: 14 numbers of its state and the nation; planner: 10 of the nation (docs/pandemic.md) |
    | action | governor: stringency 1 to 10 (choices 0 to 9), each day; planner: subsidy 0 to 20, every 90 days |
    | mask | after a change, a governor keeps its level for `cooldown_days` |
    | reward | governor: health (deaths) and economy (income) of its state; planner: the nation's less what it pays |
    | end | truncated after `max_steps` days |
    """

    @dataclass(frozen=True)
    class Config:
        """Settings. Those of PER_STATE can be replaced, for each state, by a calibration file."""

        max_steps: int = 540
        """Days of an episode."""
        cooldown_days: int = 28
        """Days after a change during which a governor cannot change the level again."""
        planner_days: int = 90
        """Days between two choices of the planner."""
        transmission: float = 0.25
        """People that an infected person infects per day where all are susceptible and nothing is closed [1/day]."""
        infectious_days: float = 10.0
        """Mean time that an infection lasts [days]."""
        fatality: float = 0.007
        """Share of the infected who die."""
        distancing: float = 0.8
        """Share of the transmission that level 10 prevents."""
        adoption_days: float = 7.0
        """Time in which people follow a new level [days]."""
        travel: float = 0.02
        """Share of the contacts that are with people from all over the nation."""
        first_infected: float = 0.0005
        """Mean share of a state that is infected on the first day."""
        nation_variation: float = 0.15
        """Transmission differs from episode to episode by up to this share."""
        state_variation: float = 0.15
        """Transmission differs from state to state, anew in each episode, by up to this share."""
        vaccine_day: int = 300
        """First day of vaccinations."""
        vaccine_rate: float = 0.004
        """Share of a state that is vaccinated per day [1/day]."""
        base_unemployment: float = 0.04
        """Share of workers without work when nothing is closed."""
        closing_unemployment: float = 0.16
        """Further share that level 10 lays off in the long run; lower levels by the square of their height."""
        layoff_days: float = 14.0
        """Time in which unemployment rises [days]."""
        rehire_days: float = 45.0
        """Time in which it decays [days]."""
        need: float = 0.5
        """Share of the usual income that people cannot do without: the closer to it, the more a loss hurts."""
        full_subsidy: float = 0.5
        """Share of lost wages that subsidy level 20 replaces; lower levels in proportion."""
        subsidy_cost: float = 1.1
        """What a unit of subsidies costs the planner, in units of income."""
        life_years: float = 50.0
        """Worth of a life, in years of a person's income [years]."""
        health_weight: float = 0.5
        """Weight of health in the rewards."""
        economy_weight: float = 0.5
        """Weight of the economy in the rewards."""
        calibration: str = ""
        """JSON file that replaces settings by calibrated ones: a number for all states, or a list of 51."""

        def __post_init__(self):
            check_settings(self, "world.")
            if self.calibration:  # a run finds its file from anywhere
                object.__setattr__(self, "calibration", str(Path(self.calibration).resolve()))
            per_state(self)

    @staticmethod
    def groups(config):
        return (
            Group("governor", observation=Box(14), action=Discrete(LEVELS), agents=STATES, masked=True),
            Group("planner", observation=Box(10), action=Discrete(SUBSIDIES + 1), action_interval=config.planner_days),
        )

    @staticmethod
    def tables(config):
        found = per_state(config)
        share = found["population"] / found["population"].sum()
        return {"share": np.float32(share), **{f"of_{name}": np.float32(v) for name, v in found.items()}}

    state = dict(
        level=Field(int, (STATES,), doc="stringency level less one"),
        cooldown=Field(int, (STATES,), unit="days", doc="time until the level may change"),
        adopted=Field(float, (STATES,), doc="stringency that people follow, from 0 to 1"),
        contagion=Field(float, (STATES,), unit="1/day", doc="transmission in this episode"),
        susceptible=Field(float, (STATES,), unit="share of the people"),
        infected=Field(float, (STATES,), unit="share of the people"),
        recovered=Field(float, (STATES,), unit="share of the people"),
        vaccinated=Field(float, (STATES,), unit="share of the people"),
        dead=Field(float, (STATES,), unit="share of the people"),
        caught=Field(float, (STATES,), unit="share of the people", doc="infected today"),
        died=Field(float, (STATES,), unit="share of the people", doc="today"),
        laid_off=Field(float, (STATES,), unit="share of workers", doc="unemployed because of closing"),
        benefits=Field(float, (STATES,), unit="usual income", doc="subsidies per person"),
        nation_level=Field(float, doc="mean stringency level"),
        nation_susceptible=Field(float, unit="share of the people"),
        nation_infected=Field(float, unit="share of the people"),
        nation_vaccinated=Field(float, unit="share of the people"),
        nation_dead=Field(float, unit="share of the people"),
        nation_unemployment=Field(float, unit="share of workers"),
        subsidy=Field(float, unit="share of lost wages"),
        deaths=Field(float, unit="per 100,000 people"),
        unemployment=Field(float, unit="%", doc="mean since the first day"),
        stringency=Field(float, doc="mean level since the first day"),
        replacement=Field(float, unit="% of lost wages", doc="mean since the first day"),
    )
    reports = ("deaths", "unemployment", "stringency", "replacement")
    step = [ForGroup("governor", govern), ForGroup("governor", spread), ForGroup("governor", work), take_stock, preside]
    reset = [ForGroup("governor", break_out), take_stock, close_books]
    observe = [ForGroup("governor", governor_sees), planner_sees]
    settings = dict(
        common=dict(
            rollout_steps=180,
            lr=2e-3,
            normalize_reward=True,
            per_group=("planner.lr=3e-3",),
        ),
        ppo=dict(epochs=2, per_group=("planner.lr=3e-3", "planner.epochs=8", "planner.num_minibatches=1")),
        cpu=dict(total_steps=100_000, num_envs=16),
        gpu=dict(total_steps=4_000_000, num_envs=512, num_minibatches=16),
    )

    def picture(self, canvas, env):
        """A tile per state, redder with the infected, its blue bar the stringency; below it the nation."""
        s = self.store
        infected, level = s.infected[env].tolist(), s.level[env].tolist()
        names = list(POPULATION)
        canvas.view(0.0, 320.0, 0.0, 240.0)
        for row, line in enumerate(MAP.split("\n")[1:-1]):
            for column, name in enumerate(line.split()):
                if name != ".":
                    state = names.index(name)
                    x, y = 23.5 + 27.3 * column, 222.0 - 24.0 * row
                    heat = infected[state] / (infected[state] + 0.01)
                    height = 2.0 * level[state]
                    canvas.box(
                        (x, y),
                        26.0,
                        22.5,
                        f"#{238 - int(20 * heat):02x}{236 - int(176 * heat):02x}{228 - int(170 * heat):02x}",
                    )
                    canvas.box((x + 10.5, y - 11.25 + height / 2.0), 5.0, height, "blue")
                    canvas.text((round(x) - 11, round(240.0 - y) - 7), name)
        parts = dict(
            gray=1.0 - float(s.nation_susceptible[env] + s.nation_infected[env] + s.nation_vaccinated[env]),
            red=float(s.nation_infected[env]),
            green=float(s.nation_vaccinated[env]),
        )
        left = 10.0
        for color, part in parts.items():
            canvas.box((left + 150.0 * part, 28.0), 300.0 * part, 8.0, color)
            left += 300.0 * part
        canvas.line([(10.0, 23.0), (310.0, 23.0)], "ink", 1.0)
        text = f"day {int(s.step_count[env])}   deaths {float(s.deaths[env]):.0f} / 100,000   "
        text += (
            f"jobless {100.0 * float(s.nation_unemployment[env]):.1f} %   paid {100.0 * float(s.subsidy[env]):.0f} %"
        )
        canvas.text((10, 221), text)

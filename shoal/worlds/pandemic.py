"""Pandemic: 51 governors and a federal planner trade lives against livelihoods."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from shoal.core import Bounds, Box, Discrete, Field, ForGroup, Group, KernelWorld
from shoal.core.settings import Positive, UnitInterval, check_settings
from shoal.worlds.pandemic_data import MAP, POPULATION, per_state
from shoal.worlds.pandemic_model import (
    LEVELS,
    STATES,
    SUBSIDIES,
    average_nation,
    clear_reports,
    observe_nation,
    observe_state,
    reward_planner,
    run_economy,
    set_levels,
    spread_disease,
    start_outbreak,
)

Days = Annotated[float, Bounds(ge=1, le=1000)]
Weight = Annotated[float, Bounds(ge=0, le=1000)]


class Pandemic(KernelWorld):
    """Governors of the 50 states and DC choose the stringency of measures; a planner subsidizes lost wages.

    | | |
    |---|---|
    | observation | governor: 14 values of its state and the nation; planner: 10 of the nation (docs/pandemic.md) |
    | action | governor: stringency 1 to 10 (choices 0 to 9), each day; planner: subsidy 0 to 20, every 90 days |
    | mask | after a change, a governor keeps its level for `cooldown_days` |
    | reward | governor: health (deaths) and economy (income) of its state; planner: the national mean minus subsidies |
    | end | truncated after `max_steps` days |
    """

    @dataclass(frozen=True)
    class Config:
        """Settings. A calibration file can replace those of PER_STATE, for all states or for each."""

        max_steps: Positive = 540
        """Length of an episode [days]."""
        cooldown_days: Annotated[int, Bounds(ge=0, le=10**6)] = 28
        """Time after a change in which a governor cannot change the level again [days]."""
        planner_interval: Positive = 90
        """Interval between choices of the planner [days]."""
        transmission: Annotated[float, Bounds(ge=0, le=5)] = 0.25
        """Infections per infected person and day, if all are susceptible and there are no measures [1/day]."""
        infectious_days: Days = 10.0
        """Mean duration of an infection [days]."""
        fatality_rate: UnitInterval = 0.007
        """Fraction of the infected who die."""
        distancing: UnitInterval = 0.8
        """Fraction of the transmission that level 10 prevents."""
        adoption_days: Days = 7.0
        """Time constant with which people adopt a new level [days]."""
        national_contacts: UnitInterval = 0.02
        """Fraction of contacts with people from the whole nation."""
        initial_infected: Annotated[float, Bounds(ge=0, le=0.2)] = 0.0005
        """Mean fraction of a state that is infected on the first day."""
        nation_variation: UnitInterval = 0.15
        """Relative range of the transmission between episodes."""
        state_variation: UnitInterval = 0.15
        """Relative range of the transmission between states, drawn for each episode."""
        vaccine_day: int = 300
        """First day of vaccinations."""
        vaccine_rate: UnitInterval = 0.004
        """Fraction of a state that is vaccinated per day [1/day]."""
        base_unemployment: Annotated[float, Bounds(ge=0, le=0.5)] = 0.04
        """Unemployment without measures, as a fraction of workers."""
        max_added_unemployment: Annotated[float, Bounds(ge=0, le=0.45)] = 0.16
        """Additional unemployment at level 10 in the long run; it grows with the square of the level."""
        layoff_days: Days = 14.0
        """Time constant with which unemployment rises [days]."""
        rehire_days: Days = 45.0
        """Time constant with which unemployment falls [days]."""
        subsistence_income: Annotated[float, Bounds(ge=0, le=0.9)] = 0.5
        """Subsistence level, as a fraction of the usual income. Losses weigh more, the closer income is to it."""
        max_subsidy: UnitInterval = 0.5
        """Fraction of lost wages that subsidy level 20 replaces; lower levels in proportion."""
        subsidy_cost: Weight = 1.1
        """Cost of a unit of subsidies to the planner, in units of income."""
        value_of_life: Weight = 50.0
        """Value of a life, in years of a person's income [years]."""
        health_weight: Weight = 0.5
        """Weight of health in the rewards."""
        economy_weight: Weight = 0.5
        """Weight of the economy in the rewards."""
        calibration: str = ""
        """JSON file of calibrated settings: for each a number for all states, or a list of 51."""

        def __post_init__(self):
            check_settings(self, "world.")
            if self.calibration:  # so that a run finds the file from any folder
                object.__setattr__(self, "calibration", str(Path(self.calibration).resolve()))
            per_state(self)

    @staticmethod
    def groups(config):
        return (
            Group("governor", observation=Box(14), action=Discrete(LEVELS), agents=STATES, masked=True),
            Group(
                "planner", observation=Box(10), action=Discrete(SUBSIDIES + 1), action_interval=config.planner_interval
            ),
        )

    @staticmethod
    def tables(config):
        found = per_state(config)
        share = found["population"] / found["population"].sum()
        return {"share": np.float32(share), **{f"of_{name}": np.float32(v) for name, v in found.items()}}

    state = dict(
        level=Field(int, (STATES,), doc="stringency level minus 1"),
        cooldown=Field(int, (STATES,), unit="days", doc="time until the level can change"),
        adopted=Field(float, (STATES,), doc="adopted stringency, from 0 to 1"),
        contagion=Field(float, (STATES,), unit="1/day", doc="transmission in this episode"),
        susceptible=Field(float, (STATES,), unit="fraction of people"),
        infected=Field(float, (STATES,), unit="fraction of people"),
        recovered=Field(float, (STATES,), unit="fraction of people"),
        vaccinated=Field(float, (STATES,), unit="fraction of people"),
        dead=Field(float, (STATES,), unit="fraction of people"),
        caught=Field(float, (STATES,), unit="fraction of people", doc="infections of the day"),
        died=Field(float, (STATES,), unit="fraction of people", doc="deaths of the day"),
        laid_off=Field(float, (STATES,), unit="fraction of workers", doc="unemployed because of measures"),
        benefits=Field(float, (STATES,), unit="usual income", doc="subsidies per person"),
        nation_level=Field(float, doc="mean stringency level"),
        nation_susceptible=Field(float, unit="fraction of people"),
        nation_infected=Field(float, unit="fraction of people"),
        nation_vaccinated=Field(float, unit="fraction of people"),
        nation_dead=Field(float, unit="fraction of people"),
        nation_unemployment=Field(float, unit="fraction of workers"),
        subsidy=Field(float, unit="fraction of lost wages"),
        deaths=Field(float, unit="per 100,000 people"),
        unemployment=Field(float, unit="%", doc="mean since the first day"),
        stringency=Field(float, doc="mean level since the first day"),
        replacement=Field(float, unit="% of lost wages", doc="mean since the first day"),
    )
    reports = ("deaths", "unemployment", "stringency", "replacement")
    step = [
        ForGroup("governor", set_levels),
        ForGroup("governor", spread_disease),
        ForGroup("governor", run_economy),
        average_nation,
        reward_planner,
    ]
    reset = [ForGroup("governor", start_outbreak), average_nation, clear_reports]
    observe = [ForGroup("governor", observe_state), observe_nation]
    settings = dict(
        common=dict(
            rollout_steps=180,
            lr=2e-3,
            normalize_reward=True,
            group_settings=("planner.lr=3e-3",),
        ),
        ppo=dict(epochs=2, group_settings=("planner.lr=3e-3", "planner.epochs=8", "planner.num_minibatches=1")),
        cpu=dict(total_steps=100_000, num_envs=16),
        gpu=dict(total_steps=4_000_000, num_envs=512, num_minibatches=16),
    )

    def picture(self, canvas, env):
        """A tile per state: red for the infected, a blue bar for the stringency. Below it the nation's fractions."""
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

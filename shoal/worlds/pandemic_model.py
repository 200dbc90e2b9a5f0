"""The model of the world `pandemic`: one day of the disease and of the economy, as Warp functions."""

from typing import no_type_check

import warp as wp

from shoal.core import Random, uniform, uniform4
from shoal.worlds.pandemic_data import POPULATION

STATES = len(POPULATION)
LEVELS = 10
SUBSIDIES = 20
TOP_LEVEL = wp.constant(float(LEVELS - 1))
TOP_SUBSIDY = wp.constant(float(SUBSIDIES))
NATION = wp.constant(STATES)


@wp.func
@no_type_check
def set_levels(
    env: int,
    agent: int,
    cooldown_days: int,
    governor_action: wp.array2d[int],
    level: wp.array2d[int],
    cooldown: wp.array2d[int],
):
    """Take over new levels. A change starts the cooldown; masked choices have no effect."""
    left = cooldown[env, agent]
    choice = governor_action[env, agent]
    if left == 0 and choice != level[env, agent]:
        level[env, agent] = choice
        cooldown[env, agent] = cooldown_days
    else:
        cooldown[env, agent] = wp.max(left - 1, 0)


@wp.func
@no_type_check
def spread_disease(
    env: int,
    agent: int,
    vaccine_day: int,
    step_count: wp.array[int],
    nation_infected: wp.array[float],
    of_infectious_days: wp.array[float],
    of_fatality_rate: wp.array[float],
    of_distancing: wp.array[float],
    of_adoption_days: wp.array[float],
    of_national_contacts: wp.array[float],
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
    """One day of the epidemic in one state. People adopt a new level within days; the first measures help most."""
    y = adopted[env, agent]
    y = y + (float(level[env, agent]) / TOP_LEVEL - y) / of_adoption_days[agent]
    adopted[env, agent] = y
    ill = infected[env, agent]
    met = (1.0 - of_national_contacts[agent]) * ill + of_national_contacts[agent] * nation_infected[env]
    risk = contagion[env, agent] * (1.0 - of_distancing[agent] * y * (2.0 - y)) * met
    new = susceptible[env, agent] * wp.min(risk, 1.0)
    over = ill / of_infectious_days[agent]
    deaths = of_fatality_rate[agent] * over
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
@no_type_check
def run_economy(
    env: int,
    agent: int,
    max_subsidy: float,
    planner_action: wp.array[int],
    of_base_unemployment: wp.array[float],
    of_max_added_unemployment: wp.array[float],
    of_layoff_days: wp.array[float],
    of_rehire_days: wp.array[float],
    of_subsistence_income: wp.array[float],
    of_value_of_life: wp.array[float],
    of_health_weight: wp.array[float],
    of_economy_weight: wp.array[float],
    level: wp.array2d[int],
    dead: wp.array2d[float],
    died: wp.array2d[float],
    laid_off: wp.array2d[float],
    benefits: wp.array2d[float],
    governor_reward: wp.array2d[float],
):
    """One day of the economy in one state, and its governor's reward."""
    x = float(level[env, agent]) / TOP_LEVEL
    off = laid_off[env, agent]
    target = of_max_added_unemployment[agent] * x * x
    days = wp.where(target > off, of_layoff_days[agent], of_rehire_days[agent])
    off = off + (target - off) / days
    laid_off[env, agent] = off
    usual = 1.0 - of_base_unemployment[agent]
    alive = 1.0 - dead[env, agent]
    replaced = max_subsidy * float(planner_action[env]) / TOP_SUBSIDY
    paid = alive * replaced * (1.0 - usual + off) / usual
    earned = alive * (usual - off) / usual + paid
    benefits[env, agent] = paid
    health = -365.0 * of_value_of_life[agent] * died[env, agent]
    spare = 1.0 - of_subsistence_income[agent]
    economy = spare - spare * spare / wp.max(earned - of_subsistence_income[agent], 0.05)
    governor_reward[env, agent] = of_health_weight[agent] * health + of_economy_weight[agent] * economy


@wp.func
@no_type_check
def average_nation(
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
    """National averages, weighted by population and summed over states in a fixed order."""
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
@no_type_check
def reward_planner(
    env: int,
    max_subsidy: float,
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
    """The planner's reward and the reports: deaths so far, and means over the days so far."""
    total = float(0.0)
    for s in range(NATION):
        total += share[s] * (governor_reward[env, s] - of_economy_weight[s] * subsidy_cost * benefits[env, s])
    planner_reward[env] = total
    now = max_subsidy * float(planner_action[env]) / TOP_SUBSIDY
    subsidy[env] = now
    day = float(step_count[env])
    deaths[env] = 1e5 * nation_dead[env]
    unemployment[env] = unemployment[env] + (100.0 * nation_unemployment[env] - unemployment[env]) / day
    stringency[env] = stringency[env] + (nation_level[env] - stringency[env]) / day
    replacement[env] = replacement[env] + (100.0 * now - replacement[env]) / day


@wp.func
@no_type_check
def start_outbreak(
    env: int,
    agent: int,
    rng: Random,
    nation_variation: float,
    state_variation: float,
    of_transmission: wp.array[float],
    of_initial_infected: wp.array[float],
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
    """Start an episode. Infections are 4 * mean * u^3 with u uniform: many in a few states, few in most."""
    own = uniform4(rng, agent, 0.0, 1.0)
    ill = 4.0 * of_initial_infected[agent] * own[0] * own[0] * own[0]
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
@no_type_check
def clear_reports(
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
@no_type_check
def saturate(x: float, middle: float):
    """Map x >= 0 to [0, 1), with 0.5 at `middle`: resolves small and large values."""
    return x / (x + middle)


@wp.func
@no_type_check
def observe_state(
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
    governor_observation[env, agent, 0] = float(level[env, agent]) / TOP_LEVEL
    governor_observation[env, agent, 1] = float(cooldown[env, agent]) / float(wp.max(cooldown_days, 1))
    governor_observation[env, agent, 2] = adopted[env, agent]
    governor_observation[env, agent, 3] = susceptible[env, agent]
    governor_observation[env, agent, 4] = saturate(ill, 0.0003)
    governor_observation[env, agent, 5] = saturate(ill, 0.01)
    governor_observation[env, agent, 6] = 0.5 * of_infectious_days[agent] * caught[env, agent] / (ill + 1e-7)
    governor_observation[env, agent, 7] = vaccinated[env, agent]
    governor_observation[env, agent, 8] = 100.0 * dead[env, agent]
    governor_observation[env, agent, 9] = 5.0 * (of_base_unemployment[agent] + laid_off[env, agent])
    governor_observation[env, agent, 10] = saturate(nation_infected[env], 0.003)
    governor_observation[env, agent, 11] = subsidy[env]
    governor_observation[env, agent, 12] = float(step_count[env]) / float(max_steps)
    governor_observation[env, agent, 13] = 0.01 * float(wp.max(vaccine_day - step_count[env], 0))
    for choice in range(LEVELS):
        governor_action_mask[env, agent, choice] = cooldown[env, agent] == 0 or choice == level[env, agent]


@wp.func
@no_type_check
def observe_nation(
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
    planner_observation[env, 2] = saturate(nation_infected[env], 0.0003)
    planner_observation[env, 3] = saturate(nation_infected[env], 0.01)
    planner_observation[env, 4] = nation_vaccinated[env]
    planner_observation[env, 5] = 100.0 * nation_dead[env]
    planner_observation[env, 6] = 5.0 * nation_unemployment[env]
    planner_observation[env, 7] = subsidy[env]
    planner_observation[env, 8] = float(step_count[env]) / float(max_steps)
    planner_observation[env, 9] = 0.01 * float(wp.max(vaccine_day - step_count[env], 0))

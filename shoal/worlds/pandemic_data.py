"""Populations and parameters of the states in the world `pandemic`, and the calibration file for them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import ShoalError, unknown
from shoal.core.settings import Bounds, bounds_of

POPULATION = {
    name: int(people)
    for name, people in (
        entry.split()
        for entry in """
AL 5024279, AK 733391, AZ 7151502, AR 3011524, CA 39538223, CO 5773714, CT 3605944, DE 989948, DC 689545, FL 21538187,
GA 10711908, HI 1455271, ID 1839106, IL 12812508, IN 6785528, IA 3190369, KS 2937880, KY 4505836, LA 4657757,
ME 1362359, MD 6177224, MA 7029917, MI 10077331, MN 5706494, MS 2961279, MO 6154913, MT 1084225, NE 1961504, NV 3104614,
NH 1377529, NJ 9288994, NM 2117522, NY 20201249, NC 10439388, ND 779094, OH 11799448, OK 3959353, OR 4237256,
PA 13002700, RI 1097379, SC 5118425, SD 886667, TN 6910840, TX 29145505, UT 3271616, VT 643077, VA 8631393, WA 7705281,
WV 1793716, WI 5893718, WY 576851""".split(",")
    )
}
"""Residents of the 50 states and DC at the census of April 1, 2020; this order is the order of the governors."""

MAP = """
AK .  .  .  .  .  .  .  .  .  ME
.  .  .  .  .  .  .  .  .  VT NH
WA ID MT ND MN IL WI MI NY RI MA
OR NV WY SD IA IN OH PA NJ CT .
CA UT CO NE MO KY WV VA MD DE .
.  AZ NM KS AR TN NC SC DC .  .
.  .  .  OK LA MS AL GA .  .  .
HI .  .  TX .  .  .  .  FL .  .
"""
"""Tiles of the picture: one per state, placed roughly as on a map."""

PER_STATE = (
    "population",
    "transmission",
    "infectious_days",
    "fatality_rate",
    "distancing",
    "adoption_days",
    "national_contacts",
    "initial_infected",
    "vaccine_rate",
    "base_unemployment",
    "max_added_unemployment",
    "layoff_days",
    "rehire_days",
    "subsistence_income",
    "value_of_life",
    "health_weight",
    "economy_weight",
)
"""Parameters that a calibration file can set, for all states or for each. All but the population are settings."""


def per_state(config: Any) -> dict[str, np.ndarray]:
    """The parameters of PER_STATE as arrays [state]: from the calibration file, else from the settings."""
    found = {name: np.full(len(POPULATION), getattr(config, name, 0.0)) for name in PER_STATE}
    found["population"] = np.array(list(POPULATION.values()), float)
    bounds = {**bounds_of(type(config)), "population": Bounds(ge=1, le=1e10)}
    for name, value in (_read(config.calibration) if config.calibration else {}).items():
        if name not in PER_STATE:
            raise unknown(f"parameter in {config.calibration}:", name, PER_STATE)
        found[name] = _array(f"{config.calibration}: {name!r}", value, bounds[name])
    return found


def _read(path: str) -> dict[str, Any]:
    file = Path(path)
    if not file.is_file():
        raise ShoalError(f"There is no calibration file {path}; give --world.calibration a JSON file, or omit it.")
    try:
        given = json.loads(file.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ShoalError(f"{path} is not JSON: {error}.") from None
    if not isinstance(given, dict):
        raise ShoalError(f"{path} must hold a JSON object of parameters by name, not a {type(given).__name__}.")
    return given


def _array(label: str, value: Any, bounds: Bounds) -> np.ndarray:
    """An array [state] from a number for all states or a list."""
    values = value if isinstance(value, list) else [value] * len(POPULATION)
    if len(values) != len(POPULATION):
        raise ShoalError(f"{label} must be a number or a list of {len(POPULATION)}, got a list of {len(values)}.")
    for state, number in zip(POPULATION, values, strict=True):
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise ShoalError(f"{label} must hold finite numbers, got {number!r} for {state}.")
        if not bounds.admit(number):
            raise ShoalError(f"{label} of {state} must be {bounds}, got {number:g}.")
    return np.array(values, float)

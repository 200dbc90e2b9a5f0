"""Names of the bundled worlds and their modules. Listing them imports neither torch nor Warp."""

from shoal.core.errors import ShoalError, excerpt, unknown

WORLDS: dict[str, tuple[str, str, str]] = {
    "acrobot": ("shoal.worlds.acrobot", "Acrobot", "Swing the foot of a two-link arm above the bar."),
    "cartpole": ("shoal.worlds.cartpole", "CartPole", "Balance a pole on a cart."),
    "explore": ("shoal.nav.explore", "Explore", "Walk through as much of a house as possible, by sight."),
    "flee": ("shoal.nav.flee", "Flee", "Get as far away from the start as possible in a house, by sight."),
    "mountain-car": ("shoal.worlds.mountain_car", "MountainCar", "Rock a weak car out of a valley."),
    "mountain-car-continuous": (
        "shoal.worlds.mountain_car_continuous",
        "MountainCarContinuous",
        "Rock a weak car out of a valley, sparing fuel.",
    ),
    "pandemic": ("shoal.worlds.pandemic", "Pandemic", "51 governors and a planner trade lives against livelihoods."),
    "pendulum": ("shoal.worlds.pendulum", "Pendulum", "Swing a pendulum up and hold it there."),
    "pointnav": ("shoal.nav.pointnav", "PointNav", "Walk to a point in a house, by sight."),
    "tag-continuous": ("shoal.worlds.tag_continuous", "TagContinuous", "Taggers hunt runners in a square."),
    "tag-grid": ("shoal.worlds.tag_grid", "TagGrid", "Taggers hunt a runner on a grid."),
}
"""Name -> module, class, one line."""

KERNEL_WORLDS = sorted(name for name, (module, _, _) in WORLDS.items() if module.startswith("shoal.worlds."))
"""Bundled worlds that need no scenes."""

HOST_KINDS = {
    "gym": "any environment of Gymnasium: gym:LunarLander-v3",
    "ale": "Atari games: ale:breakout",
    "zoo": "parallel environments of PettingZoo: zoo:sisl.pursuit_v5",
    "envpool": "EnvPool's environments: envpool:Pong-v5",
}
"""Prefix of a name -> the environments, which run on the CPU."""


def kind_of_world(name: str) -> str:
    """The kind of a world's name: `bundled`, `file`, or one of HOST_KINDS. Nothing is imported."""
    kind, colon, _ = name.partition(":")
    if colon and kind in HOST_KINDS:
        return kind
    if name.rpartition(":")[0].endswith(".py"):
        return "file"
    if name.endswith(".py"):
        raise ShoalError(f"{excerpt(name)} does not say which world of the file is meant; write FILE.py:NAME.")
    if name in WORLDS:
        return "bundled"
    if colon:
        kinds = ", ".join(f"{kind}:" for kind in HOST_KINDS)
        raise ShoalError(f"There is no world {excerpt(name)!r}; use one of {kinds} or FILE.py:NAME.")
    raise unknown("world", name, WORLDS)

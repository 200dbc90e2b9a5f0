"""Plots of learning curves and benchmarks."""

import re
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError, excerpt, new_file
from shoal.runs.files import replacing
from shoal.runs.folder import RunFolder

PICTURES = (".png", ".pdf", ".svg", ".jpg")

RETURN = re.compile(r"rollout/(?:(.+)/)?ep_rew_mean")
"""Metric of the episode return, with the group's name in worlds with several groups."""

MAX_CURVES = 100
"""Maximum number of groups drawn per run."""


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: Path) -> Path:
    with replacing(path) as file:
        figure.savefig(file, dpi=130)
    _pyplot().close(figure)
    return path


def plot_runs(paths: list[str | Path], out: str | Path | None = None) -> Path:
    """Plot episode return over env steps, in training and evaluation, for one or more runs."""
    target = new_file(out or RunFolder.open(paths[0]).path / "curve.png", PICTURES, "A picture")
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
    drawn = False
    for path in paths:
        folder = RunFolder.open(path)
        rows = folder.metrics()
        name = _text(folder.path.name)
        found = {key: match[1] for row in rows for key in row if (match := RETURN.fullmatch(key))}
        for key, group in sorted(found.items())[:MAX_CURVES]:
            if points := [(row["steps"], row[key]) for row in rows if row.get(key) is not None]:
                label = name if len(found) == 1 else f"{name} {_text(group or '')}"
                axes.plot(*zip(*points, strict=True), label=f"{label}: training")
                drawn = True
        scores = folder.scores()
        if scores:
            points = [(row["steps"], row["mean"]) for row in scores]
            axes.plot(*zip(*points, strict=True), "o", color="black", markersize=4, label=f"{name}: evaluation")
            drawn = True
    if not drawn:
        plt.close(figure)
        raise ShoalError(f"{paths[0]} has no metrics to draw yet.")
    axes.set_title(_text(Path(paths[0]).name.replace("__", "  ")) if len(paths) == 1 else "")
    axes.set_xlabel("env steps")
    axes.set_ylabel("episode return")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return _save(figure, target)


def _text(name: str) -> str:
    """A name for matplotlib, which parses text between dollar signs as math."""
    return excerpt(name).replace("$", r"\$")


def plot_bench(rows: list[dict[str, Any]], path: Path) -> Path:
    """Plot env steps per second over the number of envs: stepping alone, rollout only, end to end, by agent count."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
    measured = [row for row in rows if row["bench"] != "full"]
    measured.sort(key=lambda row: row["num_envs"])
    counts = sorted({row["agents_per_env"] for row in measured})
    for index, agents in enumerate(counts):
        here = [row for row in measured if row["agents_per_env"] == agents]
        trained = [row for row in here if row["bench"] == "training"]
        curves = {
            "stepping alone": (":", [(r["num_envs"], r["steps_per_second"]) for r in here if r["bench"] == "stepping"]),
            "rollout only": ("--", [(r["num_envs"], r["rollout_only"]) for r in trained]),
            "end to end": ("-", [(r["num_envs"], r["steps_per_second"]) for r in trained]),
        }
        for label, (line, points) in curves.items():
            if points:
                name = label if len(counts) == 1 else f"{agents} agents, {label}"
                color = None if len(counts) == 1 else f"C{index}"
                axes.loglog(*zip(*points, strict=True), line, marker="o", markersize=3, color=color, label=name)
        for row in rows:
            if row["bench"] == "full" and row["agents_per_env"] == agents and trained:
                axes.axvline(row.get("fits", row["num_envs"]), color=f"C{index}", linewidth=0.8, alpha=0.5)
                text = f" full at {row['fits']:,} envs" if "fits" in row else " full"
                axes.text(row.get("fits", row["num_envs"]), axes.get_ylim()[0], text, rotation=90, fontsize=6)
                break
    axes.set_xlabel("envs")
    axes.set_ylabel("env steps per second")
    axes.set_title(f"{measured[0]['world']} on {measured[0]['device']}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=6 if len(counts) > 1 else None)
    return _save(figure, path)


def plot_render(rows: list[dict[str, Any]], path: Path) -> Path:
    """Plot images per second over triangles, views and resolution, in one panel each."""
    plt = _pyplot()
    panels = {
        "triangles": ("triangles", "triangles of the scene"),
        "views": ("views", "views in one call"),
        "size": ("width", "pixels a side"),
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(10.5, 3.4), layout="constrained")
    for axis, (curve, (key, label)) in zip(axes, panels.items(), strict=True):
        points = sorted((row[key], row["images_per_second"]) for row in rows if row.get("curve") == curve)
        axis.loglog(*zip(*points, strict=True), marker="o", markersize=4)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("images per second")
    figure.suptitle(f"depth on {rows[0]['device']}")
    return _save(figure, path)

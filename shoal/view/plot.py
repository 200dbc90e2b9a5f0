"""Learning curves and benchmark curves as pictures."""

from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.run.folder import RunFolder


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_runs(paths: list[str | Path], out: str | Path | None = None) -> Path:
    """Episode return over env steps, in training and in evaluation, for one or more runs."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
    drawn = False
    for path in paths:
        folder = RunFolder.open(path)
        rows = folder.metrics()
        keys = sorted({k for row in rows for k in row if k.endswith("ep_rew_mean")})
        for key in keys:
            points = [(row["steps"], row[key]) for row in rows if key in row]
            label = folder.path.name if len(keys) == 1 else f"{folder.path.name} {key.split('/')[1]}"
            axes.plot(*zip(*points, strict=True), label=f"{label}: training")
            drawn = True
        scores = folder.scores()
        if scores:
            points = [(row["steps"], row["mean"]) for row in scores]
            axes.plot(
                *zip(*points, strict=True), "o", color="black", markersize=4, label=f"{folder.path.name}: evaluation"
            )
            drawn = True
    if not drawn:
        plt.close(figure)
        raise ShoalError(f"{paths[0]} has no metrics to draw yet.")
    axes.set_title(Path(paths[0]).name.replace("__", "  ") if len(paths) == 1 else "")
    axes.set_xlabel("env steps")
    axes.set_ylabel("episode return")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    path = Path(out) if out else Path(paths[0]) / "curve.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def plot_bench(rows: list[dict[str, Any]], path: Path) -> Path:
    """Env steps per second over the number of envs: stepping alone, rollout only, end to end."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
    curves = {
        "stepping alone": [(r["num_envs"], r["steps_per_second"]) for r in rows if r["bench"] == "stepping"],
        "rollout only": [(r["num_envs"], r["rollout_only"]) for r in rows if r["bench"] == "training"],
        "end to end": [(r["num_envs"], r["steps_per_second"]) for r in rows if r["bench"] == "training"],
    }
    for label, points in curves.items():
        if points:
            axes.loglog(*zip(*points, strict=True), "o-", label=label)
    axes.set_xlabel("envs")
    axes.set_ylabel("env steps per second")
    axes.set_title(f"{rows[0]['world']} on {rows[0]['device']}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path

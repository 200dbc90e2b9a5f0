"""The command line. Heavy imports happen inside the commands, so that `shoal --help` answers at once."""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.config.options import PlayOptions
    from shoal.runs.run import Run

HELP = """\
usage: shoal COMMAND ...

Train reinforcement-learning agents at the speed of the hardware.

  shoal train WORLD [--algo ppo|a2c|a3c|appo|impala|dqn|rainbow|r2d2|ddpg|td3|sac]
                    [--seed N] [--total-steps N] [--num-envs N] [--device auto|cpu|cuda]
                    [--gpus N] [--run-dir DIR] ...
                        train; every world ships tuned settings. WORLD is a name of
                        `shoal list`, your own world or environment (my_file.py:MyEnv),
                        gym:LunarLander-v3, ale:pong, zoo:MODULE or envpool:ID
  shoal resume RUN      continue a run from its last checkpoint
  shoal eval RUN        play whole episodes and print means with 95 % intervals, deviation
                        and count, scene by scene where there are several; maps of them
  shoal record RUN      write a video of a run's policy, or one picture of many envs
  shoal plot RUN        write the learning curve as a picture
  shoal bench WORLD     measure steps per second, stepping, rollout only and end to end
  shoal bench render    measure images per second
  shoal scene info SCENE      what a 3-D scene holds: house:SEED, cabin:SEED, or a .glb, .gltf, .obj, .ply file
  shoal scene render SCENE    a picture of many views of it, in color and depth
  shoal scene episodes SCENE  draw PointNav episodes and write them in Habitat's format
  shoal check WORLD     look for mistakes in a world of your own
  shoal list            the worlds there are

`shoal COMMAND --help` shows all flags of a command. `python -m shoal` works as well.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for a failure, 2 for bad input, 128 + its number after a signal."""
    from shoal.core.environment import set_program_defaults
    from shoal.core.streams import standard_streams

    set_program_defaults()
    words = sys.argv[1:] if arguments is None else arguments
    with standard_streams() as out:
        code = _run(words)
        out.flush()
        if code == 0 and out.error is not None and words[:1] not in ([name] for name in RUN_COMMANDS):
            print(f"shoal: the output could not be written: {out.error.strerror}.", file=sys.stderr)
            code = 1
    return code


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if words[0] in ("-V", "--version"):
        from shoal import __version__

        print(f"shoal {__version__}")
        return 0
    from shoal.core.errors import NEVER_BEGAN, ShoalError, plain_warnings, shortage, unknown
    from shoal.core.temporary import remove_abandoned
    from shoal.core.user_code import UserCode

    plain_warnings()
    try:
        if words[0] not in COMMANDS:
            raise unknown("command", words[0], COMMANDS)
        remove_abandoned()
        with UserCode(f"`shoal {words[0]}` failed"):
            return COMMANDS[words[0]](words[1:])
    except ShoalError as error:
        if not _is_reported_elsewhere(error):
            print(f"shoal: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"shoal: {NEVER_BEGAN}", file=sys.stderr)
        return 130
    except Exception as error:
        problem = shortage(error)
        if problem is None:
            raise
        print(f"shoal: {problem}", file=sys.stderr)
        return 1
    except SystemExit as end:  # after --help
        if end.code:
            raise
        return 0


def _train(words: list[str]) -> int:
    world, flags = _world(words, "train")
    from shoal.runs.jobs import parse_job

    job = parse_job(world, flags)
    from shoal.runs.start import train_job

    return _to_the_end(lambda: train_job(job))


def _resume(words: list[str]) -> int:
    from shoal.config.options import ResumeOptions, parse_options

    options = parse_options(ResumeOptions, "resume", words)
    from shoal.runs.start import resume

    counts = options.processes, options.gpus
    return _to_the_end(lambda: resume(options.run, options.total_steps, options.quiet, *counts, options.trust))


def _to_the_end(train: Callable) -> int:
    """Train; then say where the results are and what to try next. Of several processes, one talks."""
    from shoal.core.launch_info import find_launch_info, is_follower
    from shoal.runs.interrupts import ended_at_second_signal
    from shoal.runs.session import Stopped

    try:
        with ended_at_second_signal() if find_launch_info() is None else nullcontext():  # a launcher ends its processes
            run = train()
    except Stopped as stop:
        if not is_follower():
            print(f"shoal: {stop}", file=sys.stderr)
        return stop.exit_code
    if is_follower():
        return 0
    scores = run.folder.scores()
    if scores:
        from shoal.runs.folder import best_of

        groups = scores[-1]["groups"]
        if len(groups) > 1:
            print("evaluation: " + ", ".join(f"{name} {score['mean']:.2f}" for name, score in groups.items()))
        else:
            print(f"evaluation: {scores[-1]['mean']:.2f} (best {best_of(scores)['mean']:.2f})")
    print(f"results: {run.path}")
    print(f"next: shoal eval {run.path}   shoal record {run.path}   shoal plot {run.path}")
    return 0


def _is_reported_elsewhere(error: Exception) -> bool:
    """Whether another process reports the same error: of the command line, or of the leader."""
    if "RANK" not in os.environ and "SLURM_PROCID" not in os.environ:
        return False
    import torch.distributed as dist

    from shoal.core.launch_info import is_follower
    from shoal.training.processes import LeaderError

    return is_follower() and (isinstance(error, LeaderError) or not dist.is_initialized())


def _eval(words: list[str]) -> int:
    from shoal.config.options import EvalOptions, parse_options

    options = parse_options(EvalOptions, "eval", words)
    from shoal.core.errors import make_folder, new_file, writing
    from shoal.runs.evaluation import JSON
    from shoal.view.maps import Maps

    if options.out:
        new_file(options.out, JSON, "An evaluation")
    maps = None if options.maps is None else Maps(options.maps)
    run = _load(options)
    if maps:
        maps_dir = make_folder(options.maps_dir) if options.maps_dir else run.folder.subfolder("maps")
        for old in () if options.maps_dir else maps_dir.glob("*.png"):  # of another evaluation
            with writing(old):
                old.unlink()
    found = run.evaluate(options.episodes, options.seed, options.stochastic_actions, maps)
    lines = found.lines()
    try:
        if options.out:
            lines.append(str(found.save(options.out)))
        if maps:
            paths = maps.save(found, maps_dir)
            lines.append(f"{len(paths)} map{'s' * (len(paths) > 1)}: {paths[0].parent}")
    finally:
        print("\n".join(lines))
    return 0


def _record(words: list[str]) -> int:
    from shoal.config.options import RecordOptions, parse_options

    options = parse_options(RecordOptions, "record", words)
    from shoal.view.video import record

    size = options.envs, options.steps, options.fps
    print(record(_load(options), options.out, *size, options.seed, options.stochastic_actions))
    return 0


def _load(options: "PlayOptions") -> "Run":
    """The run that options name, with the policies and settings that they ask for."""
    from shoal.runs.run import load_run

    return load_run(
        options.run,
        options.checkpoint,
        options.device,
        list(options.random),
        list(options.load_policy),
        list(options.set),
        options.trust,
    )


def _plot(words: list[str]) -> int:
    from shoal.config.options import PlotOptions, parse_options

    options = parse_options(PlotOptions, "plot", words)
    from shoal.view.plot import plot_runs

    print(plot_runs(list(options.runs), options.out))
    return 0


def _bench(words: list[str]) -> int:
    if words[:1] == ["render"]:
        from shoal.config.options import BenchRenderOptions, parse_options

        options = parse_options(BenchRenderOptions, "bench render", words[1:])
        from shoal.tools.bench_render import bench_render_command

        return bench_render_command(options)
    world, flags = _world(words, "bench")
    from shoal.tools.bench import bench_command

    return bench_command(world, flags)


def _scene(words: list[str]) -> int:
    from shoal.core.errors import unknown

    parts = {"info": _scene_info, "render": _scene_render, "episodes": _scene_episodes}
    if not words or words[0] in ("-h", "--help"):
        print("usage: shoal scene info SCENE ... | shoal scene render SCENE ... | shoal scene episodes SCENE ...\n")
        print("SCENE is house:SEED, cabin:SEED, house:SEED@DETAIL, or the path of a .glb, .gltf, .obj or .ply file.")
        return 0
    if words[0] not in parts:
        raise unknown("command", f"scene {words[0]}", [f"scene {part}" for part in parts])
    return parts[words[0]](words[1:])


def _scene_info(words: list[str]) -> int:
    from shoal.config.options import SceneInfoOptions, parse_options

    options = parse_options(SceneInfoOptions, "scene info", words)
    from shoal.scene.info import scene_info

    for line in scene_info(options.scene, options.up, options.scale, options.strict):
        print(line)
    return 0


def _scene_render(words: list[str]) -> int:
    from shoal.config.options import SceneRenderOptions, parse_options

    options = parse_options(SceneRenderOptions, "scene render", words)
    from shoal.core.machine import pick_device
    from shoal.render.sheet import check_path, draw_sheet, parse_size, save_sheet
    from shoal.scene.sources import prepare

    check_path(options.out)
    size, device = parse_size(options.size), pick_device(options.device)
    packed = prepare(options.scene, options.up, options.scale, device, options.strict)
    sheet = draw_sheet(
        packed, options.views, size, light=options.light, hfov=options.hfov, seed=options.seed, device=device
    )
    print(save_sheet(sheet, options.out))
    return 0


def _scene_episodes(words: list[str]) -> int:
    from shoal.config.options import SceneEpisodesOptions, parse_options

    options = parse_options(SceneEpisodesOptions, "scene episodes", words)
    from shoal.core.machine import pick_device
    from shoal.nav.episode_sampling import make_episodes

    lines = make_episodes(
        list(options.scenes),
        options.count,
        options.split,
        options.out,
        seed=options.seed,
        up=options.up,
        scale=options.scale,
        strict=options.strict,
        device=pick_device(options.device),
    )
    for line in lines:
        print(line, flush=True)
    return 0


def _check(words: list[str]) -> int:
    world, flags = _world(words, "check")
    from shoal.tools.check import check_command

    return check_command(world, flags)


def _list(words: list[str]) -> int:
    from shoal.config.options import ListOptions, parse_options
    from shoal.core.registry import HOST_KINDS, WORLDS

    parse_options(ListOptions, "list", words)
    width = max(len(name) for name in WORLDS)
    for name, (_, _, line) in sorted(WORLDS.items()):
        print(f"{name:{width}}  {line}")
    for kind, line in HOST_KINDS.items():
        print(f"{kind + ':...':{width}}  {line[0].upper()}{line[1:]}")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "resume": _resume,
    "eval": _eval,
    "record": _record,
    "plot": _plot,
    "bench": _bench,
    "scene": _scene,
    "check": _check,
    "list": _list,
}

RUN_COMMANDS = ("train", "resume")
"""Commands whose results are in the run folder: output that could not be written is no failure."""


def _world(words: list[str], command: str) -> tuple[str, list[str]]:
    """The world's name, which comes first, and the flags after it."""
    from shoal.core.errors import ShoalError

    if not words or words[0] in ("-h", "--help"):
        # Flags differ from world to world; cart-pole's show the common ones.
        return "cartpole", ["--help"]
    if words[0].startswith("-"):
        raise ShoalError(f"`shoal {command}` wants the world first: shoal {command} cartpole {' '.join(words)}")
    return words[0], words[1:]


if __name__ == "__main__":
    sys.exit(main())

"""The command line. Heavy imports happen inside the commands, so that `shoal --help` answers at once."""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext

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
        if not _told_by_another(error):
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
    parser = _parser("resume", "Continue a run from its newest good checkpoint.")
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--total-steps", help="new end of the run, in env steps")
    parser.add_argument("--processes", type=int, help="processes to go on with (default: as many as before)")
    parser.add_argument("--gpus", type=int, help="GPUs of this machine to go on with, one process each")
    parser.add_argument("--quiet", action="store_true", help="no progress on the terminal")
    _trust_argument(parser)
    options = parser.parse_args(words)
    from shoal.runs.start import resume

    counts = options.processes, options.gpus
    return _to_the_end(lambda: resume(options.run, options.total_steps, options.quiet, *counts, options.trust))


def _to_the_end(train: Callable) -> int:
    """Train; then say where the results are and what to try next. Of several processes, one talks."""
    from shoal.core.launch_info import find_launch_info, follows
    from shoal.runs.interrupts import ended_at_second_signal
    from shoal.runs.session import Stopped

    try:
        with ended_at_second_signal() if find_launch_info() is None else nullcontext():  # a launcher ends its processes
            run = train()
    except Stopped as stop:
        if not follows():
            print(f"shoal: {stop}", file=sys.stderr)
        return stop.exit_code
    if follows():
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


def _told_by_another(error: Exception) -> bool:
    """Whether another process says the same: what is wrong with the command line, or what the leader has told."""
    if "RANK" not in os.environ and "SLURM_PROCID" not in os.environ:
        return False
    import torch.distributed as dist

    from shoal.core.launch_info import follows
    from shoal.training.processes import Told

    return follows() and (isinstance(error, Told) or not dist.is_initialized())


def _eval(words: list[str]) -> int:
    parser = _parser(
        "eval",
        "Play whole episodes with a run's policy, in envs and with seeds of their own. Brackets are 95 % intervals.",
    )
    _run_arguments(parser)
    parser.add_argument("--episodes", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--out", metavar="FILE.json", help="write all scores and the figures of every episode")
    parser.add_argument("--maps", type=int, metavar="N", help="draw top-down maps of the first N episodes (navigation)")
    parser.add_argument("--maps-dir", metavar="DIR", help="folder for the maps (default: maps/ in the run folder)")
    options = parser.parse_args(words)
    from shoal.core.errors import make_folder, new_file, writing
    from shoal.runs.evaluation import JSON
    from shoal.runs.run import load_run
    from shoal.view.maps import Maps

    if options.out:
        new_file(options.out, JSON, "An evaluation")
    maps = None if options.maps is None else Maps(options.maps)
    run = load_run(
        options.run, options.checkpoint, options.device, options.random, options.load, options.set, options.trust
    )
    if maps:
        maps_dir = make_folder(options.maps_dir) if options.maps_dir else run.folder.subfolder("maps")
        for old in () if options.maps_dir else maps_dir.glob("*.png"):  # of another evaluation
            with writing(old):
                old.unlink()
    found = run.evaluate(options.episodes, options.seed, options.sample, maps)
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
    parser = _parser("record", "Write a video of a run's policy (.mp4 or .gif) or one picture of many envs (.png).")
    _run_arguments(parser)
    parser.add_argument("--out", help="file: .mp4, .gif or .png (default: a video in videos/ of the run folder)")
    parser.add_argument("--envs", type=int, help="envs side by side (default: 4; 16 for .png)")
    parser.add_argument("--steps", type=int, help="steps to record (default: 10 s; for .png, the 100 before it)")
    parser.add_argument(
        "--fps", type=int, help="pictures per second (default: 50; 20 in worlds with places, 10 in navigation)"
    )
    options = parser.parse_args(words)
    from shoal.runs.run import load_run
    from shoal.view.video import record

    run = load_run(
        options.run, options.checkpoint, options.device, options.random, options.load, options.set, options.trust
    )
    print(record(run, options.out, options.envs, options.steps, options.fps, options.seed, options.sample))
    return 0


def _plot(words: list[str]) -> int:
    parser = _parser("plot", "Draw the learning curves of one or more runs.")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    parser.add_argument("--out", help="file (default: curve.png in the first run folder)")
    options = parser.parse_args(words)
    from shoal.view.plot import plot_runs

    print(plot_runs(options.runs, options.out))
    return 0


def _bench(words: list[str]) -> int:
    if words[:1] == ["render"]:
        from shoal.tools.bench_render import bench_render_command

        return bench_render_command(words[1:])
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


def _scene_arguments(parser, several: bool = False) -> None:
    kinds = "house:SEED, cabin:SEED, house:SEED@DETAIL, or a .glb, .gltf, .obj, .ply file"
    if several:
        parser.add_argument("scenes", metavar="SCENE", nargs="+", help=f"{kinds}; house:0-99, or a folder of files")
    else:
        parser.add_argument("scene", metavar="SCENE", help=kinds)
    parser.add_argument("--up", default="auto", choices=["auto", "y", "z"], help="the file's upward axis")
    parser.add_argument("--scale", type=float, default=1.0, help="meters per unit of the file (0.01: centimeters)")
    parser.add_argument("--strict", action="store_true", help="refuse files whose textures are missing")


def _scene_info(words: list[str]) -> int:
    parser = _parser("scene info", "What a scene holds: size, triangles, materials, textures, labels, memory.")
    _scene_arguments(parser)
    options = parser.parse_args(words)
    from shoal.scene.info import scene_info

    for line in scene_info(options.scene, options.up, options.scale, options.strict):
        print(line)
    return 0


def _scene_render(words: list[str]) -> int:
    import argparse

    parser = _parser("scene render", "Write one picture of many views of a scene, in color and in depth.")
    _scene_arguments(parser)
    parser.add_argument("--views", type=int, default=16, help="how many (default: 16)")
    parser.add_argument("--out", default="sheet.png", help="file: .png or .jpg (default: sheet.png)")
    parser.add_argument("--size", default="192x144", help="pixels of each view (default: 192x144)")
    parser.add_argument("--fov", type=float, default=90.0, help="horizontal field of view, degrees (default: 90)")
    parser.add_argument("--seed", type=int, default=0, help="which views (default: 0)")
    parser.add_argument("--light", action=argparse.BooleanOptionalAction, default=True, help="shade by a simple light")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    options = parser.parse_args(words)
    from shoal.core.machine import pick_device
    from shoal.render.sheet import check_path, draw_sheet, parse_size, save_sheet
    from shoal.scene.sources import prepare

    check_path(options.out)
    size, device = parse_size(options.size), pick_device(options.device)
    packed = prepare(options.scene, options.up, options.scale, device, options.strict)
    sheet = draw_sheet(
        packed, options.views, size, light=options.light, fov=options.fov, seed=options.seed, device=device
    )
    print(save_sheet(sheet, options.out))
    return 0


def _scene_episodes(words: list[str]) -> int:
    parser = _parser(
        "scene episodes", "Draw PointNav episodes by Habitat's rules and write FOLDER/SPLIT/content/SCENE.json.gz."
    )
    _scene_arguments(parser, several=True)
    parser.add_argument("--count", type=int, default=100, help="episodes per scene (default: 100)")
    parser.add_argument("--split", default="val", help="train, val or another name (default: val)")
    parser.add_argument("--out", default="episodes", metavar="FOLDER", help="where to (default: episodes)")
    parser.add_argument("--seed", type=int, default=0, help="which episodes (default: 0)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    options = parser.parse_args(words)
    from shoal.core.machine import pick_device
    from shoal.nav.episode_sampling import make_episodes

    lines = make_episodes(
        options.scenes,
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
    _parser("list", "The worlds there are.").parse_args(words)
    from shoal.core.registry import HOST_KINDS, WORLDS

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


def _parser(command: str, description: str):
    import argparse

    return argparse.ArgumentParser(prog=f"shoal {command}", description=description)


def _run_arguments(parser) -> None:
    import argparse

    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--checkpoint", default="best", help="best, last or a step number (default: best)")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--seed", type=int, help="seed of the episodes (default: the run's)")
    parser.add_argument("--random", nargs="+", default=[], metavar="GROUP", help="groups that act at random instead")
    parser.add_argument("--load", nargs="+", default=[], metavar="GROUP=RUN", help="groups that another run plays for")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="other settings of the world: eval-scenes=my/folder"
    )
    parser.add_argument(
        "--sample",
        action=argparse.BooleanOptionalAction,
        help="draw actions instead of taking the likeliest (default: as the run's own evaluations)",
    )
    _trust_argument(parser)


def _trust_argument(parser) -> None:
    parser.add_argument(
        "--trust", action="store_true", help="execute the run's own code although you have not trained it here"
    )


if __name__ == "__main__":
    sys.exit(main())

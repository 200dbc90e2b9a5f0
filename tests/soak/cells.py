"""Small trainings that are killed, one for each algorithm, schedule and number of processes, and what they promise."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """One training that takes some seconds."""

    world: str
    flags: str
    steps: int
    num_envs: int = 64
    rollout: int = 16
    equal: bool = True
    """Whether a resumed run ends with the tensors of an uninterrupted one."""

    def words(self, steps: int | None = None) -> list[str]:
        """Words of the command line after `shoal train`."""
        total = steps or self.steps
        # The learning rate may depend on the end of the run, so a resumed run keeps the end of the first one.
        text = f"{self.flags} --num-envs {self.num_envs} --rollout-steps {self.rollout} --total-steps {total}"
        return [self.world, *text.split(), *f"--checkpoint-every {total // 8} {COMMON}".split()]


COMMON = "--eval-episodes 2 --log-every-seconds 0.2 --compile off --threads 1 --device cpu"
Q = "--batch-size 128 --learning-starts 1024 --buffer-size 20000"

CELLS = {
    "ppo": Cell("cartpole", "--algo ppo", 400_000),
    "ppo-normalized": Cell("pendulum", "--algo ppo --normalize-obs --normalize-reward", 400_000),
    "ppo-lstm": Cell("cartpole", "--algo ppo --rnn lstm --rnn-size 32", 100_000),
    "ppo-groups": Cell("tag-continuous", "--algo ppo", 20_000, num_envs=16),
    "ppo-stacked": Cell("cartpole", "--algo ppo --frame-stack 4 --action-repeat 2", 200_000),
    "ppo-2-processes": Cell("cartpole", "--algo ppo --processes 2", 300_000),
    "a2c": Cell("acrobot", "--algo a2c", 400_000),
    "a3c-1-actor": Cell("cartpole", "--algo a3c --actors 1", 200_000),
    "a3c-3-actors": Cell("cartpole", "--algo a3c --actors 3", 200_000, num_envs=48, equal=False),
    "appo-lag-0": Cell("cartpole", "--algo appo --max-policy-lag 0", 200_000),
    "appo-lag-2": Cell("cartpole", "--algo appo --max-policy-lag 2", 200_000, equal=False),
    "impala-lag-0": Cell("cartpole", "--algo impala --max-policy-lag 0", 200_000),
    "dqn": Cell("cartpole", f"--algo dqn {Q}", 60_000),
    "dqn-asynchronous": Cell("cartpole", f"--algo dqn --asynchronous {Q}", 60_000, equal=False),
    "dqn-2-processes": Cell("cartpole", f"--algo dqn --processes 2 {Q}", 40_000),
    "rainbow": Cell("mountain-car", f"--algo rainbow {Q}", 20_000),
    "r2d2": Cell(
        "cartpole", "--algo r2d2 --burn-in 16 --sequence-length 16 --batch-size 64 --learning-starts 2048", 30_000
    ),
    "ddpg": Cell("pendulum", f"--algo ddpg {Q}", 20_000),
    "td3": Cell("pendulum", f"--algo td3 {Q}", 20_000),
    "sac": Cell("pendulum", f"--algo sac {Q}", 15_000),
    "pointnav": Cell("pointnav", "--algo ppo", 20_000, num_envs=16, equal=False),
    "host-lockstep": Cell(
        "gym:CartPole-v1", "--vec-backend processes --env-schedule lockstep", 60_000, 16, 32, equal=False
    ),
    "host-alternating": Cell(
        "gym:CartPole-v1", "--vec-backend processes --env-schedule alternating", 60_000, 16, 32, equal=False
    ),
    "host-first-come": Cell(
        "gym:CartPole-v1", "--vec-backend processes --env-schedule first-come", 60_000, 16, 32, equal=False
    ),
    "host-native": Cell("gym:CartPole-v1", "--vec-backend native", 100_000, 16, 32, equal=False),
    "host-appo": Cell("gym:CartPole-v1", "--algo appo --vec-backend processes", 60_000, 16, 32, equal=False),
    "host-2-processes": Cell("gym:CartPole-v1", "--vec-backend processes --processes 2", 40_000, 16, 32, equal=False),
}

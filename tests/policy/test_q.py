"""Q-policies: dueling, distributions, noise, exploration, masks, several parts."""

import pytest
import torch

from shoal.core import Box, Discrete, Group, MultiDiscrete, ShoalError
from shoal.core.spaces import Mixed
from shoal.policy import QPolicy, choose_encoder, mlp_encoder
from shoal.policy.heads import MASKED
from shoal.policy.q import QHead

ONE = Group("g", observation=Box(3), action=Discrete(4))
SEVERAL = Group("g", observation=Box(3), action=MultiDiscrete((2, 3)))
KINDS = {
    "plain": {},
    "dueling": dict(dueling=True),
    "atoms": dict(atoms=11, v_min=-2.0, v_max=3.0),
    "quantiles": dict(quantiles=7),
    "everything": dict(dueling=True, noisy=True, atoms=51),
}


def make(group=ONE, **head) -> QPolicy:
    torch.manual_seed(0)
    return QPolicy(group, mlp_encoder((16,), "tanh"), False, **head)


@pytest.mark.parametrize("group", [ONE, SEVERAL])
@pytest.mark.parametrize("kind", KINDS)
def test_every_choice_has_a_value(kind, group):
    policy = make(group, **KINDS[kind])
    seen = torch.randn(5, 3)
    q_logits, q = policy.q_logits(seen), policy.distribution(seen)
    assert q_logits.shape == (5, group.choices, policy.head.width)
    assert q.shape == (5, group.choices)
    assert policy.head.mode(q).shape == (5, *group.action.shape)
    assert policy.head.mode(q).dtype == torch.int32


def test_values_are_the_means_of_their_distributions():
    torch.manual_seed(0)
    q_logits = torch.randn(6, 4, 11)
    atoms = QHead(3, (4,), True, atoms=11, v_min=-2.0, v_max=3.0)
    by_hand = sum(q_logits.softmax(-1)[..., i] * (-2.0 + 0.5 * i) for i in range(11))
    torch.testing.assert_close(atoms.q_values(q_logits), by_hand)
    torch.testing.assert_close(QHead(3, (4,), True, quantiles=11).q_values(q_logits), q_logits.mean(-1))


def test_dueling_advantages_have_mean_zero():
    head = make(SEVERAL, dueling=True).head
    features = torch.randn(5, 16)
    raw = head.linear(features)
    q = head.q_values(head(features))
    for part in q.split((2, 3), dim=1):
        torch.testing.assert_close(part.mean(1), raw[:, -1])
    torch.testing.assert_close(q[:, 0] - q[:, 1], raw[:, 0] - raw[:, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_q_values_are_not_rounded_to_bf16(kind):
    head, features = make(**KINDS[kind]).head, torch.randn(64, 16).bfloat16()
    exact = head.q_values(head(features.float()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(head.q_values(head(features)), exact, rtol=1e-5, atol=1e-5)


def noise(rows: int, width: int, rate: float) -> torch.Tensor:
    torch.manual_seed(1)
    drawn = torch.rand(rows, width)
    drawn[:, 0] += rate
    return drawn


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_agents_explore_at_their_rate(rate):
    """The greedy choice has probability 1 - e + e / 4, each other one e / 4."""
    rows = 40_000
    q = torch.tensor([0.0, 3.0, 1.0, 2.0]).expand(rows, -1)
    action, log_prob = make().head.sample(q, noise(rows, 2, rate))
    share = torch.bincount(action, minlength=4) / rows
    expected = torch.tensor([rate / 4, 1 - rate + rate / 4, rate / 4, rate / 4])
    torch.testing.assert_close(share, expected, atol=0.01, rtol=0)
    assert not log_prob.any()


def test_random_actions_follow_the_odds_of_the_space():
    rows = 40_000
    policy = make(Group("g", observation=Box(3), action=Discrete(4, odds=(0.5, 1.0, 2.0, 1.0))))
    params = torch.tensor([0.0, 3.0, 1.0, MASKED]).expand(rows, -1)
    action, _ = policy.head.sample(params, noise(rows, 2, 1.0))
    share = torch.bincount(action, minlength=4) / rows
    torch.testing.assert_close(share, torch.tensor([1.0, 2.0, 4.0, 0.0]) / 7.0, atol=0.01, rtol=0)


def test_masked_choices_are_never_taken():
    rows = 5000
    policy = make(SEVERAL)
    mask = torch.rand(rows, 5) < 0.5
    mask[:, 0] |= ~mask[:, 1]
    mask[:, 4] |= ~mask[:, 2:4].any(1)
    q = policy.distribution(torch.randn(rows, 3), mask)
    assert bool((q[~mask] == MASKED).all())
    for rate in (0.0, 0.5, 1.0):
        action, _ = policy.head.sample(q, noise(rows, 3, rate))
        assert bool(mask.gather(1, action.long() + torch.tensor([0, 2])).all())


def test_noise_is_keyed_by_the_counter_and_can_be_zeroed():
    policy, counter = make(noisy=True), torch.zeros(1, dtype=torch.int32)
    plan = policy.noise_plan(7, 0, counter)
    seen = torch.randn(4, 3)
    quiet = policy.distribution(seen)
    plan()
    first = policy.distribution(seen)
    counter += 1
    plan()
    second = policy.distribution(seen)
    counter -= 1
    plan()
    assert torch.equal(policy.distribution(seen), first)
    assert not torch.equal(first, second)
    assert not torch.equal(first, quiet)
    policy.zero_noise()
    assert torch.equal(policy.distribution(seen), quiet)
    assert make().noise_plan(7, 0, counter) is None


def test_noise_is_factorized():
    """Noise is sign(x) sqrt(|x|) of normal x, with mean 0 and second moment E|x|; weights use products of it."""
    policy, counter = make(noisy=True), torch.zeros(1, dtype=torch.int32)
    layer, plan = policy.head.linear, policy.noise_plan(3, 0, counter)
    found = []
    for _ in range(500):
        plan()
        found.append(layer.noise.clone())
        counter += 1
    drawn = torch.stack(found)
    assert abs(float(drawn.mean())) < 0.03
    assert float(drawn.square().mean()) == pytest.approx((2 / torch.pi) ** 0.5, rel=0.05)
    weight, bias = layer.perturbed()
    before, after = layer.noise[:16], layer.noise[16:]
    torch.testing.assert_close(weight, layer.weight + layer.weight_sigma * after[:, None] * before[None, :])
    torch.testing.assert_close(bias, layer.bias + layer.bias_sigma * after)


def test_images_use_the_usual_encoders():
    group = Group("g", observation=Box((4, 84, 84), dtype=torch.uint8), action=Discrete(6))
    policy = QPolicy(group, choose_encoder("nature", group, (8,), "relu"), True, dueling=True)
    assert policy.as_bytes
    assert policy.distribution(torch.zeros(2, 4, 84, 84, dtype=torch.uint8)).shape == (2, 6)
    assert policy.activations() > 512


@pytest.mark.parametrize("space", [Box(2, -1.0, 1.0), Mixed((Discrete(2), Box(1, -1.0, 1.0)))])
def test_continuous_actions_are_refused(space):
    with pytest.raises(ShoalError, match="Q-learning needs Discrete or MultiDiscrete actions"):
        make(Group("g", observation=Box(3), action=space))

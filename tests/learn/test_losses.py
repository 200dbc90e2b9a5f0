"""Losses against NumPy references, their gradients against finite differences."""

import numpy as np
import pytest
import torch

from shoal.learn import losses

N = 40


def sample(seed=0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    old = rng.normal(-1.0, 0.3, N)
    return dict(
        log_prob=old + rng.normal(0.0, 0.3, N),
        old_log_prob=old,
        advantage=rng.normal(0.3, 1.0, N),
        value=rng.normal(size=N),
        old_value=rng.normal(size=N),
        target=rng.normal(size=N),
    )


def mean(x, w):
    return x.mean() if w is None else x[w > 0].mean()


def reference_policy_gradient(s, w):
    return -mean(s["log_prob"] * s["advantage"], w)


def reference_clipped_policy(s, w):
    ratio = np.exp(s["log_prob"] - s["old_log_prob"])
    return -mean(np.minimum(ratio * s["advantage"], np.clip(ratio, 0.8, 1.2) * s["advantage"]), w)


def reference_value(s, w):
    return 0.5 * mean((s["value"] - s["target"]) ** 2, w)


def reference_clipped_value(s, w):
    near = np.clip(s["value"], s["old_value"] - 0.2, s["old_value"] + 0.2)
    return 0.5 * mean(np.maximum((s["value"] - s["target"]) ** 2, (near - s["target"]) ** 2), w)


def reference_kl(s, w):
    ratio = np.exp(s["log_prob"] - s["old_log_prob"])
    return mean(ratio - 1 - np.log(ratio), w)


def reference_clip_fraction(s, w):
    ratio = np.exp(s["log_prob"] - s["old_log_prob"])
    return mean(((ratio < 0.8) | (ratio > 1.2)).astype(float), w)


CASES = {
    "policy gradient": (losses.policy_gradient_loss, ("log_prob", "advantage"), (), reference_policy_gradient),
    "clipped policy": (
        losses.clipped_policy_loss,
        ("log_prob", "old_log_prob", "advantage"),
        (0.2,),
        reference_clipped_policy,
    ),
    "value": (losses.value_loss, ("value", "target"), (), reference_value),
    "clipped value": (losses.clipped_value_loss, ("value", "old_value", "target"), (0.2,), reference_clipped_value),
    "KL": (losses.approximate_kl, ("log_prob", "old_log_prob"), (), reference_kl),
    "clip fraction": (losses.clip_fraction, ("log_prob", "old_log_prob"), (0.2,), reference_clip_fraction),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def weights() -> list[np.ndarray | None]:
    rng = np.random.default_rng(3)
    only_one = np.zeros(N)
    only_one[7] = 1.0
    return [None, (rng.random(N) < 0.5).astype(float), np.ones(N), only_one]


def compute(case, numbers, weight) -> torch.Tensor:
    function, names, constants, _ = case
    tensors = [torch.as_tensor(numbers[name]) for name in names]
    return function(*tensors, *constants, None if weight is None else torch.as_tensor(weight))


@pytest.mark.parametrize("seed", range(3))
def test_losses_equal_their_references(case, seed):
    numbers = sample(seed)
    for weight in weights():
        assert float(compute(case, numbers, weight)) == pytest.approx(case[3](numbers, weight), rel=1e-6, abs=1e-9)


def test_samples_of_weight_zero_are_ignored(case):
    numbers, weight = sample(), weights()[1]
    before = compute(case, numbers, weight)
    for name in case[1]:
        numbers[name][weight == 0] += 100.0 if name != "log_prob" else -3.0
    assert float(compute(case, numbers, weight)) == pytest.approx(float(before), rel=1e-9)


def test_without_valid_samples_the_loss_is_zero(case):
    assert float(compute(case, sample(), np.zeros(N))) == 0.0


@pytest.mark.parametrize("name", ["policy gradient", "clipped policy", "value", "clipped value"])
def test_gradients_equal_finite_differences(name):
    """Finite differences of the reference with respect to the first argument."""
    function, names, constants, reference = CASES[name]
    numbers = sample(5)
    for weight in weights()[:2]:
        tensors = [torch.as_tensor(numbers[n]) for n in names]
        tensors[0].requires_grad_()
        function(*tensors, *constants, None if weight is None else torch.as_tensor(weight)).backward()
        slope = np.zeros(N)
        for i in range(N):
            shifted = [{**numbers, names[0]: numbers[names[0]].copy()} for _ in range(2)]
            shifted[0][names[0]][i] += 1e-6
            shifted[1][names[0]][i] -= 1e-6
            slope[i] = (reference(shifted[0], weight) - reference(shifted[1], weight)) / 2e-6
        np.testing.assert_allclose(tensors[0].grad, slope, rtol=1e-4, atol=1e-7)


def test_gradient_steps_make_good_actions_more_likely():
    """The gradient is negative where the advantage is positive, and zero once the ratio is clipped on that side."""
    old = torch.zeros(4)
    log_prob = torch.log(torch.tensor([1.0, 1.0, 1.5, 0.5])).requires_grad_()
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    losses.clipped_policy_loss(log_prob, old, advantage, 0.2).backward()
    assert log_prob.grad[0] < 0 < log_prob.grad[1]
    assert log_prob.grad[2:].tolist() == [0.0, 0.0]


def test_clipping_does_not_affect_ratios_on_the_wrong_side():
    """A ratio that moved the wrong way has the full gradient, since the minimum keeps the worse term."""
    log_prob = torch.log(torch.tensor([1.5, 0.5])).requires_grad_()
    losses.clipped_policy_loss(log_prob, torch.zeros(2), torch.tensor([-1.0, 1.0]), 0.2).backward()
    assert log_prob.grad[0] > 0 > log_prob.grad[1]


def test_kl_is_never_negative_and_zero_for_the_same_policy():
    rng = np.random.default_rng(0)
    old, new = torch.as_tensor(rng.normal(size=1000)), torch.as_tensor(rng.normal(size=1000))
    for i in range(1000):
        assert losses.approximate_kl(new[i : i + 1], old[i : i + 1]) >= 0.0
    assert losses.approximate_kl(old, old) == 0.0


def test_kl_of_two_known_distributions():
    """The estimate, averaged over actions of the old policy, is the exact divergence."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    action = np.random.default_rng(0).choice(3, 200_000, p=p)
    found = losses.approximate_kl(torch.as_tensor(np.log(q[action])), torch.as_tensor(np.log(p[action])))
    assert float(found) == pytest.approx((p * np.log(p / q)).sum(), abs=0.01)


def test_explained_variance():
    rng = np.random.default_rng(0)
    target = torch.as_tensor(rng.normal(2.0, 3.0, 1000))
    noisy = target + torch.as_tensor(rng.normal(0.0, 1.5, 1000))
    expected = 1 - np.var(target.numpy() - noisy.numpy()) / np.var(target.numpy())
    assert float(losses.explained_variance(noisy, target)) == pytest.approx(expected)
    assert float(losses.explained_variance(target, target)) == 1.0
    assert float(losses.explained_variance(torch.full_like(target, 7.0), target)) == pytest.approx(0.0, abs=1e-9)
    assert torch.isfinite(losses.explained_variance(target, torch.ones_like(target)))


def test_normalized_advantages():
    """Mean 0 and standard deviation 1 over samples of weight 1, with the order kept."""
    advantage, weight = sample()["advantage"] * 5 + 3, weights()[1]
    for w in (None, weight):
        kept = slice(None) if w is None else w > 0
        mean, scale = losses.moments(torch.as_tensor(advantage), None if w is None else torch.as_tensor(w))
        found = ((torch.as_tensor(advantage) - mean) * scale).numpy()
        expected = (advantage - advantage[kept].mean()) / advantage[kept].std()
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_equal_advantages_stay_finite():
    mean, scale = losses.moments(torch.full((10,), 2.5))
    assert float(mean) == 2.5
    assert torch.isfinite(scale)

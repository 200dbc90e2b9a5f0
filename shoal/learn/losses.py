"""Losses as pure functions, each with its equation. `weight` [batch] is 1 for samples that count and 0 for the rest."""

import torch


def weighted_mean(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Mean over the samples that count."""
    return x.mean() if weight is None else (x * weight).sum() / weight.sum().clamp(min=1.0)


def policy_gradient_loss(
    log_prob: torch.Tensor, advantage: torch.Tensor, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """L = -E[ log pi(a|s) A ]   (Williams 1992; Mnih et al. 2016)."""
    return -weighted_mean(log_prob * advantage, weight)


def clipped_policy_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantage: torch.Tensor,
    clip: float,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """L = -E[ min(r A, clip(r, 1 - c, 1 + c) A) ],  r = pi(a|s) / pi_old(a|s)   (Schulman et al. 2017)."""
    ratio = torch.exp(log_prob - old_log_prob)
    unclipped = ratio * advantage
    clipped = ratio.clamp(1.0 - clip, 1.0 + clip) * advantage
    return -weighted_mean(torch.minimum(unclipped, clipped), weight)


def value_loss(value: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """L = 1/2 E[ (V(s) - R)^2 ]."""
    return 0.5 * weighted_mean((value - target).square(), weight)


def clipped_value_loss(
    value: torch.Tensor,
    old_value: torch.Tensor,
    target: torch.Tensor,
    clip: float,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """L = 1/2 E[ max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) ]."""
    near = old_value + (value - old_value).clamp(-clip, clip)
    worst = torch.maximum((value - target).square(), (near - target).square())
    return 0.5 * weighted_mean(worst, weight)


def approximate_kl(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """KL(pi_old || pi) ~ E[ (r - 1) - log r ], never negative (Schulman 2020, "Approximating KL divergence")."""
    log_ratio = log_prob - old_log_prob
    return weighted_mean(torch.expm1(log_ratio) - log_ratio, weight)


def clip_fraction(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, clip: float, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Share of samples whose ratio left the clip range."""
    ratio = torch.exp(log_prob - old_log_prob)
    return weighted_mean(((ratio - 1.0).abs() > clip).float(), weight)


def variance(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Var(x) = E[ (x - E[x])^2 ] over the samples that count."""
    return weighted_mean((x - weighted_mean(x, weight)).square(), weight)


def explained_variance(value: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """1 - Var(R - V) / Var(R): 1 is a perfect value function, 0 no better than a constant."""
    return 1.0 - variance(target - value, weight) / variance(target, weight).clamp(min=1e-8)


def moments(x: torch.Tensor, weight: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and one over the standard deviation, over the samples that count: what advantages are normalised by."""
    return weighted_mean(x, weight), torch.rsqrt(variance(x, weight) + 1e-8)

"""What a model is trained to make small. A loss mask says which tokens count; it is not the mask of attention."""

import mlx.core as mx


def token_losses(logits: mx.array, targets: mx.array, *, smoothing: float = 0.0) -> mx.array:
    """The cross entropy of each target in nats, (...), of logits (..., V) and targets (...) from 0 to V - 1.

    With `smoothing` ε a target is 1 - ε of itself and ε of all V ids alike (Szegedy et al. 2015, arXiv 1512.00567).
    Computed in float32, or in float64 if that is what the logits are.

    >>> print(token_losses(mx.zeros((1, 4)), mx.array([2])))
    array([1.38629], dtype=float32)
    """
    wide = logits if logits.dtype == mx.float64 else logits.astype(mx.float32)
    total = mx.logsumexp(wide, axis=-1)
    losses = total - mx.take_along_axis(wide, targets[..., None], axis=-1).squeeze(-1)
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing * (total - wide.mean(axis=-1))
    return losses


def cross_entropy(
    logits: mx.array, targets: mx.array, *, loss_mask: mx.array | None = None, smoothing: float = 0.0
) -> mx.array:
    """The mean of `token_losses` over the targets for which `loss_mask` (...) is not 0; what is masked may be no id.

    A mask of other numbers than 0 and 1 weighs the losses. Where nothing counts the loss is 0.
    """
    if loss_mask is None:
        return token_losses(logits, targets, smoothing=smoothing).mean()
    counts = loss_mask != 0
    losses = token_losses(logits, mx.where(counts, targets, 0), smoothing=smoothing)
    weights = loss_mask.astype(losses.dtype)
    total = weights.sum()
    return mx.where(counts, losses * weights, 0).sum() / mx.where(total > 0, total, 1)


def next_token_loss(
    logits: mx.array, ids: mx.array, *, loss_mask: mx.array | None = None, smoothing: float = 0.0
) -> mx.array:
    """The mean cross entropy of each of `ids` (B, L) but the first, given those before it: logits (B, L, V) are what
    the model says of the token after each.

    loss_mask (B, L) says of each token whether predicting it counts; a token that does not count is still read.

    >>> ids, certain = mx.array([[0, 1, 2]]), mx.array([[[0.0, 50, 0], [0, 0, 50], [0, 0, 0]]])
    >>> next_token_loss(certain, ids).item()
    0.0
    """
    mask = None if loss_mask is None else loss_mask[:, 1:]
    return cross_entropy(logits[:, :-1], ids[:, 1:], loss_mask=mask, smoothing=smoothing)

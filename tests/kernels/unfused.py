"""The loss of a chain of drafts from whole logits, against which the one from hidden states is held."""

from torch import Tensor

from bebop.kernels.chain_losses import corrected_loss, counted, product_loss
from bebop.kernels.losses import tv_loss


def e2e_tv_loss(
    draft: Tensor, target: Tensor, mask: Tensor, *, temperature: float = 1.0, tokens: Tensor | None = None
) -> Tensor:
    """As ``linear_e2e_tv_loss``, of logits [N, K, V]; steps that do not count are not read."""
    valid = counted(mask)
    rows = valid.flatten().nonzero()[:, 0]
    pair = [x.flatten(0, 1)[rows] for x in (draft, target)]

    def back(number: Tensor | None) -> Tensor:
        """[N, K] of the rows; 0 for the others."""
        assert number is not None
        return number.new_zeros(valid.numel()).index_put((rows,), number).view_as(valid)

    tv = tv_loss(*pair, temperature=temperature)
    if tokens is None:
        return product_loss(back(tv.loss), back(tv.alpha), valid)
    chosen = tv_loss(*pair, temperature=temperature, kind="hard_ce", labels=tokens.flatten()[rows])
    return corrected_loss(back(tv.loss), back(-chosen.loss), back(chosen.target_log), valid)

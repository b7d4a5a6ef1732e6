"""One transformer layer from sequences to sequences: attention, then a position-wise ReLU FFN."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import relu

from everydepth.errors import SettingError
from everydepth_papers.constructions.maps import Domain


class SingleLayer(nn.Module):
    """`z = e + attention(e)` with `e = embed(x) + positions`, then `y = out(relu(hidden(z)))`.

    No norm, as in the theorem; the skip around the attention keeps a token's own input and place.
    """

    def __init__(
        self, domain: Domain, *, outputs: int, width: int, heads: int, hidden: int
    ) -> None:
        super().__init__()
        if width % heads:
            raise SettingError(f"width={width} and heads={heads}; use a width they divide")
        self.embed = nn.Linear(domain.dim, width)
        self.positions = nn.Parameter(self.embed.weight.new_empty(domain.tokens, width))
        nn.init.normal_(self.positions)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.hidden = nn.Linear(width, hidden)
        self.out = nn.Linear(hidden, outputs)

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token outputs"]:
        e = self.embed(x) + self.positions
        z = e + self.attention(e, e, e, need_weights=False)[0]
        return self.out(relu(self.hidden(z)))

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @property
    def nonzero_count(self) -> int:
        """Parameters that are not zero: what a construction really uses."""
        return sum(int(p.count_nonzero()) for p in self.parameters())

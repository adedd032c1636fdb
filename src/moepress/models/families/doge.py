"""Doge: found in order to be refused by name rather than overlooked."""

from torch import nn

from moepress.models.adapter import Block
from moepress.models.fused import FusedAdapter


class DogeAdapter(FusedAdapter):
    name = "doge"

    def matches(self, block: Block) -> bool:
        return all(isinstance(getattr(block, name, None), nn.Embedding) for name in ("down_embed", "up_embed"))

    def refusal(self, block: Block) -> str | None:
        return "its experts are single hidden units found by product keys, and there is nothing in them to merge"

"""ERNIE 4.5 VL: text tokens and image tokens have experts of their own, under one router width."""

from moepress.models.adapter import Block
from moepress.models.fused import FusedAdapter


class ErnieVLAdapter(FusedAdapter):
    name = "ernie4.5-vl"
    vanilla = False

    def matches(self, block: Block) -> bool:
        return super().matches(block) and type(block).__name__ == "Ernie4_5_VLMoeSparseMoeBlock"

    def rows_refusal(self, block: Block) -> str | None:
        return "the text and the image experts of a layer share one router width"

"""DeepSeek-V4's hash layers: a table gives each token of the vocabulary its experts, the router only weighs them."""

from moepress.models.adapter import Block
from moepress.models.fused import FusedAdapter


class HashAdapter(FusedAdapter):
    name = "deepseek-v4-hash"
    vanilla = False

    def matches(self, block: Block) -> bool:
        return super().matches(block) and hasattr(getattr(block, "gate", None), "tid2eid")

    def rows_refusal(self, block: Block) -> str | None:
        return "its table gives each token of the vocabulary its experts by number, and all of them must stay"

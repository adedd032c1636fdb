"""OpenAI's privacy filter: fused; the block's `num_experts` is how many are chosen, a factor on the output."""

from moepress.models.adapter import Block
from moepress.models.fused import FusedAdapter


class PrivacyFilterAdapter(FusedAdapter):
    name = "openai-privacy-filter"
    rows_on_block = False

    def matches(self, block: Block) -> bool:
        return super().matches(block) and type(block).__name__ == "OpenAIPrivacyFilterMLP"

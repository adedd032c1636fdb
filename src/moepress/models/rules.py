"""How a router turns scores into choices, in words. Only routers whose code was read are described."""

from __future__ import annotations

from collections.abc import Callable

from moepress.models.adapter import Block

_SOFTMAX_RENORMALISED = "softmax > top-k, renormalised"
_SIGMOID_BIAS_RENORMALISED = "sigmoid + bias > top-k, renormalised"

RULES: dict[str, list[str]] = {
    _SOFTMAX_RENORMALISED: (
        "MixtralTopKRouter MiniMaxTopKRouter Qwen3_5MoeTopKRouter Qwen3VLMoeTextTopKRouter HunYuanMoEV1Gate"
    ).split(),
    "softmax > top-k{norm}": (
        "Qwen2MoeTopKRouter Qwen3MoeTopKRouter Qwen3NextTopKRouter OlmoeTopKRouter FlexOlmoTopKRouter "
        "MellumTopKRouter Qwen3OmniMoeThinkerTextTopKRouter Qwen4ExpTextTopKRouter"
    ).split(),
    "softmax > top-k": "JambaTopKRouter JambaSparseMoeBlock".split(),
    "softmax > top-k, renormalised, per-expert scale": "Gemma4TextRouter DiffusionGemmaTextRouter".split(),
    "softmax > top-k{dbrx}": ["DbrxRouter"],
    "softmax + bias > top-k, renormalised": "Ernie4_5_MoeTopKRouter Ernie4_5_VLMoeMoeTopKRouter".split(),
    "softmax + bias > top-k": ["LongcatFlashTopkRouter"],
    "softmax{groups} > top-k": "DeepseekV2TopkRouter DeepseekOcr2TextTopkRouter".split(),
    "softmax{groups} > top-k{norm}": ["Mistral4TopkRouter"],
    "top-k > softmax": (
        "GptOssTopKRouter OpenAIPrivacyFilterTopKRouter GraniteMoeTopKRouter GraniteMoeSharedTopKRouter "
        "GraniteMoeHybridTopKRouter GraniteMoeSWATopKRouter JetMoeTopKGating CompactJetMoeGating AriaTextTopKRouter "
        "AriaTextMoELayer"
    ).split(),
    "top-k > {cohere}": ["Cohere2MoeTopKRouter"],
    "sigmoid + bias{groups} > top-k{norm}": (
        "DeepseekV3TopkRouter DeepseekV32TopkRouter Glm4MoeTopkRouter Glm4MoeLiteTopkRouter Glm4vMoeTextTopkRouter "
        "Glm5NextTextTopkRouter GlmMoeDsaTopkRouter Dots1TopkRouter ExaoneMoeTopkRouter SolarOpenTopkRouter "
        "MiMoV2FlashTopkRouter NemotronHTopkRouter KimiLinearTopkRouter AXK1TopkRouter AXK2TopkRouter HYV4TopkRouter"
    ).split(),
    _SIGMOID_BIAS_RENORMALISED: (
        "HYV3TopKRouter MiniMaxM2TopKRouter MiniMaxM3VLTopKRouter Step3p7TopKRouter AfmoeTokenChoiceRouter"
    ).split(),
    "{softcap}" + _SIGMOID_BIAS_RENORMALISED: ["LagunaTopKRouter"],
    "sigmoid{expert_bias} > top-k{norm}": ["Lfm2MoeTopKRouter"],
    "sigmoid + bias > top-k, renormalised together with the shared experts": ["InklingTopkRouter"],
    "{score_fn} + bias > top-k, renormalised": ["DeepseekV4TopKRouter"],
    "token table, weighted by {score_fn}, renormalised": ["DeepseekV4HashRouter"],
    "sparsemixer": ["PhimoeTopKRouter"],
    "top-k > sigmoid, on the experts' input": ["Llama4Router"],
    "softmax > top-1": "SwitchTransformersTop1Router CompactSwitchRouter".split(),
    "softmax > top-2, renormalised, capacity": ["NllbMoeTop2Router"],
    "softmax > top-2, renormalised{capacity}": ["FairseqMoeTop2Router"],
    "MLP > softmax + bias > top-k of experts and a skip": ["ZayaRouter"],
}
_TEMPLATE_OF = {name: template for template, names in RULES.items() for name in names}


def _dbrx(router: Block, block: Block) -> str:
    p = block.moe_normalize_expert_weights
    return "" if p is None else ", renormalised" if p == 1 else f", renormalised to a {p:g}-norm of 1"


def _cohere(router: Block, block: Block) -> str:
    renormalised = router.expert_selection_fn == "sigmoid" and router.norm_topk_prob
    return f"{router.expert_selection_fn}{', renormalised' if renormalised else ''}"


def _groups(router: Block, block: Block) -> str:
    limited = getattr(router, "topk_method", "") != "greedy" and (router.num_group or 1) > 1
    return " > groups" if limited else ""


PARTS: dict[str, Callable[[Block, Block], str]] = {
    "norm": lambda router, _: ", renormalised" if router.norm_topk_prob else "",
    "groups": _groups,
    "dbrx": _dbrx,
    "cohere": _cohere,
    "softcap": lambda router, _: "softcap > " if router.router_logit_softcapping > 0 else "",
    "capacity": lambda router, _: ", capacity" if router.drop_tokens else "",
    "expert_bias": lambda router, _: " + bias" if router.use_expert_bias else "",
    "score_fn": lambda router, _: type(router.score_fn).__name__.removesuffix("Activation").lower(),
}


def rule_of(router: Block, block: Block) -> str:
    """Of the router's class or, where the block itself chooses, of the block's."""
    for module in (router, block):
        template = _TEMPLATE_OF.get(type(module).__name__)
        if template is not None:
            parts = {name: part(router, block) for name, part in PARTS.items() if f"{{{name}}}" in template}
            return template.format(**parts)
    return f"unknown ({type(router).__name__})"
